"""Rules and the conversion of named arrays, on NumPy alone."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_bridge import Rule, Rules, WeightsMismatchError, flax_to_torch, specs, torch_to_flax

# ---- there and back

PATTERNS: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...] = (
    ("... -> ...", (), ((),)),
    ("... -> ...", (), (("a",), ("b",), ("c",))),
    ("o -> o", (), (("o",),)),
    ("o i -> i o", (), (("o",), ("i",))),
    ("a b c -> c a b", (), (("a",), ("b",), ("c",))),
    ("a b -> a 1 b", (), (("a",), ("b",))),
    ("a b ... -> b a ...", (), (("a",), ("b",), ("c",), ("d",))),
    ("(h d) -> h d", ("h",), (("h", "d"),)),
    ("(h d) e -> e h d", ("h",), (("h", "d"), ("e",))),
    ("e (h d) -> h e d", ("d",), (("e",), ("h", "d"))),
    ("(h d) e -> (d h) e", ("h",), (("h", "d"), ("e",))),
    ("(k h d) e -> k e h d", ("k", "h"), (("k", "h", "d"), ("e",))),
    ("... (h d) -> ... h d", ("d",), (("a",), ("b",), ("h", "d"))),
    ("o i -> (i o)", ("i",), (("o",), ("i",))),
)
"""Pattern, the letters whose size it is told, and the letters of each torch axis."""

KINDS = (*"?bBhHiIlLqQefdFD", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
DTYPES = tuple(dict.fromkeys(map(np.dtype, KINDS)))
LAYOUTS = ("C", "Fortran", "transposed", "reversed", "strided", "broadcast", "big-endian", "read-only")


def lay_out(array: np.ndarray, layout: str) -> np.ndarray:
    """Return an array of like shape (and, except where broadcast, like elements) that lies otherwise in memory."""
    if layout == "Fortran":
        return np.asfortranarray(array)
    if layout == "transposed":
        return np.roll(array.T, 1, 0).copy().T if array.ndim else array
    if layout == "reversed":
        return np.flip(np.flip(array).copy()) if array.ndim else array
    if layout == "strided":
        return np.stack([array, array], -1)[..., 1] if array.ndim else array
    if layout == "broadcast" and array.ndim:
        return np.broadcast_to(array[:1], array.shape)
    if layout == "big-endian" and array.dtype.isbuiltin == 1:
        return array.byteswap().view(array.dtype.newbyteorder(">"))
    if layout == "read-only":
        array = array.copy()
        array.flags.writeable = False
    return array


@st.composite
def cases(draw: st.DrawFn) -> tuple[Rule, np.ndarray]:
    """Draw a rule and an array of random bits that fits it."""
    pattern, told, axes = draw(st.sampled_from(PATTERNS))
    letters = sorted(set(itertools.chain.from_iterable(axes)))
    sizes = {letter: draw(st.integers(1, 4)) for letter in letters}
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(int(np.prod([sizes[letter] for letter in axis])) for axis in axes if axis)
    count = int(np.prod(shape, dtype=int))
    bits = np.frombuffer(draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)), np.uint8)
    array = (bits % 2 if dtype == np.bool_ else bits).astype(np.uint8).view(dtype).reshape(shape)
    rule = Rule("t.weight", "f.kernel", pattern, **{letter: sizes[letter] for letter in told})
    return rule, lay_out(array, draw(st.sampled_from(LAYOUTS)))


@given(cases())
@settings(max_examples=300, deadline=None)
def test_there_and_back_is_the_same_to_the_last_bit(case):
    rule, array = case
    before = array.tobytes()
    there = torch_to_flax({"t.weight": array}, [rule])
    back = flax_to_torch(there, [rule])
    assert list(there) == ["f.kernel"]
    assert list(back) == ["t.weight"]
    moved, returned = there["f.kernel"], back["t.weight"]
    assert (returned.shape, returned.dtype, returned.tobytes()) == (array.shape, array.dtype, before)
    assert array.tobytes() == before
    assert moved.dtype == array.dtype
    assert moved.shape == rule.convert_shape(array.shape, "torch")
    for one, other in itertools.combinations((array, moved, returned), 2):
        assert not np.shares_memory(one, other)
    for result in (moved, returned):
        assert result.flags.c_contiguous
        assert result.flags.writeable


@given(cases())
@settings(max_examples=100, deadline=None)
def test_the_pattern_is_read_from_torch_to_flax(case):
    """Element by element: the flat position in the result is where the pattern puts it."""
    rule, array = case
    ids = torch_to_flax({"t.weight": np.arange(array.size).reshape(array.shape)}, [rule])["f.kernel"]
    moved = torch_to_flax({"t.weight": array}, [rule])["f.kernel"]
    assert moved.tobytes() == array.reshape(-1)[ids.reshape(-1)].tobytes()


def test_heads_split_as_the_pattern_says():
    weight = np.arange(24).reshape(6, 4)
    kernel = torch_to_flax({"q": weight}, [Rule("q", "k", "(h d) e -> e h d", h=2)])["k"]
    assert kernel.shape == (4, 2, 3)
    assert all(kernel[e, h, d] == weight[3 * h + d, e] for e, h, d in np.ndindex(4, 2, 3))


def test_empty_arrays_cross():
    rule = Rule("q", "k", "(h d) e -> e h d", h=2)
    kernel = torch_to_flax({"q": np.zeros((6, 0))}, [rule])["k"]
    assert kernel.shape == (0, 2, 3)
    assert flax_to_torch({"k": kernel}, [rule])["q"].shape == (6, 0)


def test_the_given_dictionary_stays_as_it_is():
    arrays = {"a": np.ones((2, 3))}
    torch_to_flax(arrays, [Rule("a", "b", "o i -> i o")])
    assert list(arrays) == ["a"]
    assert arrays["a"].shape == (2, 3)


@pytest.mark.parametrize("variant", specs.VARIANTS, ids=lambda variant: variant.name)
def test_the_rules_of_every_variant_go_there_and_back(variant):
    sizes = {"d_in": 4, "d_out": 6, "context_length": 5, "num_heads": 2, "qkv_bias": True, "emb_dim": 4}
    for config in [example.config for example in variant.examples] or [
        variant.config(**variant.config.arguments_from(sizes))
    ]:
        check_there_and_back(config)


def check_there_and_back(config: specs.Config) -> None:
    rng = np.random.default_rng(0)
    arrays = {row.rule.torch: rng.normal(size=row.shape) for row in config.parameters}
    there = torch_to_flax(arrays, config.rules())
    assert {name: array.shape for name, array in there.items()} == {
        row.rule.flax: row.flax_shape for row in config.parameters
    }
    back = flax_to_torch(there, config.rules())
    assert list(back) == list(arrays)
    assert all(np.array_equal(back[name], arrays[name]) for name in arrays)


# ---- one rule


def raises(error: type[Exception], message: str, call: Any, *arguments: Any, **keywords: Any) -> None:
    """Check that a call raises that very type with that very text."""
    with pytest.raises(error) as caught:
        call(*arguments, **keywords)
    assert type(caught.value) is error
    assert str(caught.value) == message


BIJECTION = "pattern is not a bijection of axes"
ARROW = "pattern must read 'torch axes -> flax axes'"


@pytest.mark.parametrize(
    ("pattern", "sizes", "message"),
    [
        ("a b -> a", {}, f"Rule('t', 'f', 'a b -> a'): {BIJECTION}"),
        ("a -> a b", {}, f"Rule('t', 'f', 'a -> a b'): {BIJECTION}"),
        ("a a -> a", {}, f"Rule('t', 'f', 'a a -> a'): {BIJECTION}"),
        ("a b -> a c", {}, f"Rule('t', 'f', 'a b -> a c'): {BIJECTION}"),
        ("a 2 -> a", {}, f"Rule('t', 'f', 'a 2 -> a'): {BIJECTION}"),
        ("... a -> a", {}, f"Rule('t', 'f', '... a -> a'): {BIJECTION}"),
        ("a -> ... a", {}, f"Rule('t', 'f', 'a -> ... a'): {BIJECTION}"),
        ("... ... -> ...", {}, f"Rule('t', 'f', '... ... -> ...'): {BIJECTION}"),
        ("(a b -> b a", {}, f"Rule('t', 'f', '(a b -> b a'): {BIJECTION}"),
        ("a$ b -> b a", {}, f"Rule('t', 'f', 'a$ b -> b a'): {BIJECTION}"),
        ("a b", {}, f"Rule('t', 'f', 'a b'): {ARROW}"),
        ("a -> a -> a", {}, f"Rule('t', 'f', 'a -> a -> a'): {ARROW}"),
        ("", {}, f"Rule('t', 'f', ''): {ARROW}"),
        ("(h d) -> h d", {}, "Rule('t', 'f', '(h d) -> h d'): (h d) needs the size of h or d as a keyword"),
        ("h d -> (h d)", {}, "Rule('t', 'f', 'h d -> (h d)'): (h d) needs the size of h or d as a keyword"),
        (
            "(h d e) -> h d e",
            {"h": 2},
            "Rule('t', 'f', '(h d e) -> h d e', h=2): (h d e) needs the size of d or e as a keyword",
        ),
        (
            "(h d) -> h d",
            {"h": 2, "z": 3},
            "Rule('t', 'f', '(h d) -> h d', h=2, z=3): size given for 'z', which is no axis of the pattern",
        ),
        ("(h d) -> h d", {"h": 0}, "Rule('t', 'f', '(h d) -> h d', h=0): size of 'h' (0) must be at least 1"),
        ("(h d) -> h d", {"h": -2}, "Rule('t', 'f', '(h d) -> h d', h=-2): size of 'h' (-2) must be at least 1"),
    ],
)
def test_a_rule_that_is_no_bijection_is_refused_when_it_is_made(pattern, sizes, message):
    raises(ValueError, message, Rule, "t", "f", pattern, **sizes)


@pytest.mark.parametrize("size", [2.0, True, "2", None], ids=repr)
def test_sizes_are_integers(size):
    kind = type(size).__name__
    message = f"Rule('t', 'f', '(h d) -> h d', h={size!r}): size of 'h' must be an integer, got {kind}"
    raises(TypeError, message, Rule, "t", "f", "(h d) -> h d", h=size)


@pytest.mark.parametrize("label", ["torch", "flax", "pattern"])
def test_names_and_pattern_are_strings(label):
    arguments = {"torch": "t", "flax": "f", "pattern": "a -> a", label: 3}
    raises(TypeError, f"{label} must be a string, got int", Rule, **arguments)


def test_a_pattern_has_a_bounded_number_of_axes():
    axes = " ".join("abcdefghijklm")
    raises(
        ValueError, f"Rule('t', 'f', '{axes} -> {axes}'): 13 axes, more than 12", Rule, "t", "f", f"{axes} -> {axes}"
    )


@pytest.mark.parametrize(
    ("torch", "flax", "message"),
    [
        ("a.{i}", "b", "Rule('a.{i}', 'b', '... -> ...'): both names must hold the same placeholders"),
        ("a.{i}", "b.{j}", "Rule('a.{i}', 'b.{j}', '... -> ...'): both names must hold the same placeholders"),
        ("a.{i}.{i}", "b.{i}.{i}", "'a.{i}.{i}': placeholders are distinct lower-case names such as {i}"),
        ("a.{I}", "b.{I}", "'a.{I}': placeholders are distinct lower-case names such as {i}"),
        ("a.{}", "b.{}", "'a.{}': placeholders are distinct lower-case names such as {i}"),
    ],
)
def test_both_names_hold_the_same_placeholders(torch, flax, message):
    raises(ValueError, message, Rule, torch, flax)


def test_a_rule_shows_and_compares_itself():
    rule = Rule("t", "f", "(h d) -> h d", h=2)
    assert repr(rule) == "Rule('t', 'f', '(h d) -> h d', h=2)"
    assert rule == Rule("t", "f", "(h d) -> h d", h=2)
    assert hash(rule) == hash(Rule("t", "f", "(h d) -> h d", h=2))
    assert rule != Rule("t", "f", "(h d) -> h d", h=3)
    assert rule != ("t", "f")


def test_a_rule_moves_below_prefixes():
    rule = Rule("q.weight", "q.kernel", "(h d) e -> e h d", h=2)
    assert rule.prefixed("a.b", "") == Rule("a.b.q.weight", "q.kernel", "(h d) e -> e h d", h=2)
    assert Rules([rule]).prefixed("", "c") == Rules([Rule("q.weight", "c.q.kernel", "(h d) e -> e h d", h=2)])


# ---- sets of rules


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("a", "b"), Rule("a", "c")], "two rules share the torch name a"),
        ([Rule("a", "c"), Rule("b", "c")], "two rules share the flax name c"),
        ([Rule("a.{i}", "b.{i}"), Rule("a.{j}", "c.{j}")], "two rules cover the same torch names: a.{i} and a.{j}"),
        ([Rule("a.{i}", "c.{i}"), Rule("b.{j}", "c.{j}")], "two rules cover the same flax names: c.{i} and c.{j}"),
    ],
)
def test_two_rules_with_one_name_are_refused_when_the_set_is_made(rules, message):
    raises(ValueError, message, Rules, rules)


def test_a_set_holds_rules_only():
    raises(TypeError, "Rules takes Rule objects, got str", Rules, ["a"])
    raises(TypeError, "Rules takes Rule objects, got dict", torch_to_flax, {}, [{"torch": "a"}])


def test_a_set_is_iterable_sized_comparable_and_shows_itself():
    rules = Rules([Rule("a", "b"), Rule("c", "d", "o i -> i o")])
    assert list(rules) == [Rule("a", "b"), Rule("c", "d", "o i -> i o")]
    assert len(rules) == 2
    assert rules == Rules(rules)
    assert hash(rules) == hash(Rules(rules))
    assert rules != Rules([])
    assert repr(rules) == "Rules([Rule('a', 'b', '... -> ...'), Rule('c', 'd', 'o i -> i o')])"


# ---- names that do not fit


ONE = np.ones(2)
LAYERS = Rules([Rule("h.{i}.a", "k.{i}.x"), Rule("h.{i}.b", "k.{i}.y", "o i -> i o"), Rule("end", "end")])


def test_everything_wrong_comes_in_one_error():
    arrays = {"h.0.a": ONE, "h.0.b": np.ones((2, 3, 4)), "h.1.b": ONE, "x": ONE, "h.a.a": ONE}
    with pytest.raises(WeightsMismatchError) as caught:
        torch_to_flax(arrays, LAYERS)
    error = caught.value
    assert type(error) is WeightsMismatchError
    assert error.missing == ["end", "h.1.a"]
    assert error.unexpected == ["h.a.a", "x"]
    assert error.misshapen == [
        "h.0.b: shape (2, 3, 4) does not fit 'o i -> i o'",
        "h.1.b: shape (2,) does not fit 'o i -> i o'",
    ]
    assert str(error) == (
        "weights do not match: missing: end, h.1.a; unexpected: h.a.a, x; misshapen: "
        "h.0.b: shape (2, 3, 4) does not fit 'o i -> i o', h.1.b: shape (2,) does not fit 'o i -> i o'"
    )


def test_a_mismatch_is_a_value_error():
    assert issubclass(WeightsMismatchError, ValueError)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"k.0.x": ONE, "k.0.y": np.ones((2, 2)), "k.1.x": ONE, "end": ONE}, "missing: k.1.y"),
        ({"end": ONE}, "missing: k.{i}.x, k.{i}.y"),
        ({}, "missing: end, k.{i}.x, k.{i}.y"),
        ({"k.00.x": ONE, "k.0.x": ONE, "k.0.y": np.ones((2, 2)), "end": ONE}, "unexpected: k.00.x"),
        ({"k.-1.x": ONE, "k.0.x": ONE, "k.0.y": np.ones((2, 2)), "end": ONE}, "unexpected: k.-1.x"),
        ({"k.0.x": ONE, "k.0.y": np.ones((2, 2)), "end": ONE, "kA0Ax": ONE}, "unexpected: kA0Ax"),
    ],
)
def test_a_layer_that_lacks_a_tensor_is_named(arrays, message):
    raises(WeightsMismatchError, f"weights do not match: {message}", flax_to_torch, arrays, LAYERS)


def test_indices_go_with_their_names():
    rules = [Rule("h.{i}.e.{j}", "x.{j}.{i}")]
    arrays = {f"h.{i}.e.{j}": np.full(2, 10 * i + j) for i in (0, 1, 12) for j in (0, 3)}
    there = torch_to_flax(arrays, rules)
    assert sorted(there) == sorted(f"x.{j}.{i}" for i in (0, 1, 12) for j in (0, 3))
    assert all(np.array_equal(there[f"x.{j}.{i}"], arrays[f"h.{i}.e.{j}"]) for i in (0, 1, 12) for j in (0, 3))
    assert sorted(flax_to_torch(there, rules)) == sorted(arrays)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("h.{i}", "k.{i}"), Rule("h.0", "z")], "two rules cover the same torch names: h.{i} and h.0"),
        ([Rule("h.{i}", "k.{i}"), Rule("b", "k.0")], "two rules cover the same flax names: k.{i} and k.0"),
        (
            [Rule("a.{i}.5", "b.{i}"), Rule("a.3.{i}", "c.{i}")],
            "two rules cover the same torch names: a.{i}.5 and a.3.{i}",
        ),
    ],
)
def test_rules_that_one_name_could_fall_under_are_refused_when_the_set_is_made(rules, message):
    raises(ValueError, message, Rules, rules)


def test_rules_that_differ_in_one_number_do_not_clash():
    assert len(Rules([Rule("a.{i}.5", "b.{i}"), Rule("a.{i}.6", "c.{i}"), Rule("a.x", "d")])) == 3


@pytest.mark.parametrize("name", ["a{i}{j}", "a{i}0", "a0{i}", "a.{i", "a.i}", "{{i}}"])
def test_placeholders_that_could_be_read_in_two_ways_are_refused(name):
    with pytest.raises(ValueError, match="placeholder"):
        Rule(name, name)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": [1.0, 2.0]}, "a must be a NumPy array, got list"),
        ({"a": np.float32(1)}, "a must be a NumPy array, got float32"),
        ({"a": None}, "a must be a NumPy array, got NoneType"),
        ({"a": np.array([None])}, "a must hold numbers, got dtype object"),
        ({"a": np.zeros(2, "i4,i4")}, "a must hold numbers, got dtype [('f0', '<i4'), ('f1', '<i4')]"),
        ({"a": np.array(["one"])}, "a must hold numbers, got dtype <U3"),
        ({"a": np.array([b"one"])}, "a must hold numbers, got dtype |S3"),
        ({"a": np.array(["2020"], "datetime64[Y]")}, "a must hold numbers, got dtype datetime64[Y]"),
        ({3: ONE}, "names must be strings, got 3"),
    ],
    ids=["list", "scalar", "none", "objects", "records", "text", "bytes", "dates", "integer name"],
)
def test_only_named_arrays_of_numbers_are_taken(arrays, message):
    raises(TypeError, message, torch_to_flax, arrays, [Rule("a", "b")])


def test_shapes_are_not_cut_off_behind_a_long_name():
    arrays = {"n" * 100: np.ones((3, 2))}
    with pytest.raises(WeightsMismatchError) as caught:
        torch_to_flax(arrays, [Rule("n" * 100, "b", "a b -> b a", a=1234567)])
    assert "n" * 100 + ": " in str(caught.value)
    assert str(caught.value).isprintable()
    text = str(WeightsMismatchError(misshapen=["n" * 100 + ": expected (12288, 4096),\ngot (4096, 12288)"]))
    assert text.endswith(r"expected (12288, 4096),\ngot (4096, 12288)")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("\x1b[31m", r"\x1b[31m"),
        ("n" * 300, "n" * 120 + "... (300 characters)"),
        ("Gewicht_ü", "Gewicht_ü"),
    ],
    ids=["line break", "escape code", "long", "letters"],
)
def test_a_hostile_name_is_one_harmless_line(name, shown):
    raises(
        WeightsMismatchError,
        f"weights do not match: missing: a; unexpected: {shown}",
        torch_to_flax,
        {name: ONE},
        [Rule("a", "b")],
    )


# ---- rules files

GOOD = """
# our own model
[[rule]]
torch = "h.{i}.q.weight"
flax = "h.{i}.q.kernel"
pattern = "(h d) e -> e h d"
h = 8

[[ rule ]]
torch = "norm.weight"
flax = "norm.scale"
"""


def test_rules_load_from_a_file(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(GOOD)
    expected = Rules(
        [Rule("h.{i}.q.weight", "h.{i}.q.kernel", "(h d) e -> e h d", h=8), Rule("norm.weight", "norm.scale")]
    )
    assert Rules.from_toml(path) == expected
    assert Rules.from_toml(str(path)) == expected


def test_an_empty_file_holds_no_rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text("")
    assert Rules.from_toml(path) == Rules([])


START = '[[rule]]\ntorch = "a"\nflax = "b"\n\n'
NEEDS = "a rule needs the keys torch and flax"
NOTHING_ELSE = "a rules file holds [[rule]] tables and nothing else, got"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'{START}# [[rule]]\n[[rule]]\ntorch = "c"\n', f", line 6: {NEEDS}, got torch"),
        (f'{START}  [[ rule ]] # two\nflax = "c"\n', f", line 5: {NEEDS}, got flax"),
        (
            f'{START}[[rule]]\ntorch = "c"\nflax = "d"\npattern = "x y -> x"\n',
            f", line 5: Rule('c', 'd', 'x y -> x'): {BIJECTION}",
        ),
        (
            f'{START}[[rule]]\ntorch = "c"\nflax = "d"\nheads = 3\n',
            ", line 5: Rule('c', 'd', '... -> ...', heads=3): size given for 'heads', which is no axis of the pattern",
        ),
        (
            '[[rule]]\ntorch = "c"\nflax = "d"\npattern = "(h d) -> h d"\nh = 2.0\n',
            ", line 1: Rule('c', 'd', '(h d) -> h d', h=2.0): size of 'h' must be an integer, got float",
        ),
        ('[[rule]]\ntorch = 3\nflax = "d"\n', ", line 1: torch must be a string, got int"),
        (
            '[[rule]]\ntorch = "c.{i}"\nflax = "d"\n',
            ", line 1: Rule('c.{i}', 'd', '... -> ...'): both names must hold the same placeholders",
        ),
        (f"title = 'mine'\n{START}", f": {NOTHING_ELSE} title"),
        ("rule = 3\n", ": rule must be tables, each headed [[rule]]"),
        ("[rule]\ntorch = 'a'\n", ": rule must be tables, each headed [[rule]]"),
        ("rule = [{torch = 'a'}]\n", ": a rule needs the keys torch and flax, got torch"),
        (f'{START}[[rule]]\ntorch = "a"\nflax = "c"\n', ", line 5: two rules share the torch name a"),
        ("[[rule]\n", ": Expected ']]' at the end of an array declaration (at line 1, column 7)"),
        (f"{START}pattern = \n", ": Invalid value (at line 5, column 11)"),
    ],
)
def test_a_mistake_in_a_file_is_found_by_its_line(tmp_path, text, message):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    raises(ValueError, f"{path}{message}", Rules.from_toml, path)


def test_two_rules_of_one_name_in_a_file_are_refused(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(START + START)
    with pytest.raises(ValueError, match="two rules share the torch name a") as caught:
        Rules.from_toml(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Rules.from_toml(tmp_path / "none.toml")


# ---- rules between one tensor and several

JOINT = {
    "counted": (
        Rule(["h.{i}.q", "h.{i}.k"], "k.{i}.qk", "(h c) d -> d (h part c)", part="part", h=2),
        {f"h.{i}.{name}": (6, 4) for i in range(3) for name in "qk"},
        {f"k.{i}.qk": (4, 12) for i in range(3)},
    ),
    "along": (
        Rule(["a", "b"], "ab", "o d -> d o", along="o", split=[3, 5]),
        {"a": (3, 4), "b": (5, 4)},
        {"ab": (4, 8)},
    ),
    "equal shares": (
        Rule(["a", "b"], "ab", "o d -> d o", along="o"),
        {"a": (4, 3), "b": (4, 3)},
        {"ab": (3, 8)},
    ),
    "stacked": (
        Rule("h.{i}.w", "w", "o d -> d l o", stack="l"),
        {f"h.{i}.w": (2, 3) for i in range(11)},
        {"w": (3, 11, 2)},
    ),
    "parts on the Flax side": (
        Rule("c_attn", ["q", "k", "v"], "(part o) d -> d o", part="part"),
        {"c_attn": (12, 3)},
        {"q": (3, 4), "k": (3, 4), "v": (3, 4)},
    ),
    "stacked on the torch side": (
        Rule("experts", "moe.{i}.w", "e o d -> d o", stack="e"),
        {"experts": (5, 2, 3)},
        {f"moe.{i}.w": (3, 2) for i in range(5)},
    ),
}


@pytest.mark.parametrize("name", JOINT)
def test_joint_rules_go_there_and_back_to_the_last_bit(name):
    rule, shapes, flax_shapes = JOINT[name]
    random = np.random.default_rng(0)
    arrays = {key: random.integers(0, 2**32, size=shape, dtype=np.uint32).view("f4") for key, shape in shapes.items()}
    arrays["plain"] = np.arange(6, dtype=np.float32).reshape(2, 3)
    rules = Rules([rule, Rule("plain", "plain", "o i -> i o")])
    there = torch_to_flax(arrays, rules)
    assert {key: one.shape for key, one in there.items()} == {**flax_shapes, "plain": (3, 2)}
    back = flax_to_torch(there, rules)
    assert back.keys() == arrays.keys()
    assert all(back[key].tobytes() == array.tobytes() for key, array in arrays.items())
    assert Rules([rule.turned().turned()]) == Rules([rule])
    again = torch_to_flax(flax_to_torch(there, rules), rules)
    assert all(again[key].tobytes() == there[key].tobytes() for key in there)


def test_joint_rules_put_every_element_where_the_pattern_says():
    arrays = {
        f"h.{i}.{name}": np.arange(24).reshape(6, 4) + 100 * i + 1000 * part
        for i in range(3)
        for part, name in enumerate("qk")
    }
    there = torch_to_flax(arrays, [JOINT["counted"][0]])
    for i, h, part, c, d in np.ndindex(3, 2, 2, 3, 4):
        assert there[f"k.{i}.qk"][d, (h * 2 + part) * 3 + c] == arrays[f"h.{i}.{'qk'[part]}"][h * 3 + c, d]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda: Rule(["a", "b"], ["c", "d"], "o -> o", along="o"), "one of torch and flax must be a single name"),
        (
            lambda: Rule(["a", "b"], "c", "o -> o", along="o", split=[1, "x"]),
            "split must hold whole numbers or '...', got 'x'",
        ),
        (lambda: Rule(["a", "b"], "c", "o -> o", along="p"), "'p' is no axis of the pattern"),
        (lambda: Rule("a", "b", "o -> l o", stack="l"), "names on both sides must hold the same placeholders"),
        (lambda: Rule("a", first="b", second="c"), "torch and flax, or first and second, not some of both"),
    ],
)
def test_a_joint_rule_that_is_none_is_refused_when_it_is_made(rule, message):
    with pytest.raises(ValueError, match=message):
        rule()


def test_what_a_joint_rule_lacks_is_named():
    rule, shapes, _ = JOINT["counted"]
    arrays = {key: np.ones(shape) for key, shape in shapes.items()}
    del arrays["h.1.k"]
    raises(WeightsMismatchError, "weights do not match: missing: h.1.k", torch_to_flax, arrays, [rule])
    raises(WeightsMismatchError, "weights do not match: missing: k.{i}.qk", flax_to_torch, {}, [rule])
    with pytest.raises(WeightsMismatchError, match=r"misshapen: k\.0\.qk \(4, 5\)"):
        flax_to_torch({"k.0.qk": np.ones((4, 5))}, [rule])


def test_an_axis_may_have_the_name_of_a_key():
    assert Rule("a", "b", "(part o) -> part o", part=2).sizes == {"part": 2}


def test_a_rule_that_drops_leaves_its_tensor_out():
    rules = [Rule("a", "b"), Rule("mask", drop="computed")]
    assert torch_to_flax({"a": ONE, "mask": ONE}, rules).keys() == {"b"}
    assert flax_to_torch({"b": ONE}, rules).keys() == {"a"}
