"""Conversions by a user's own rules."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.cli.app import run

from ..checkpoint_files import bits, write

RULES = """
[[rule]]
torch = ["enc.{i}.q", "enc.{i}.k"]
flax = "encoder.{i}.qk"
pattern = "(h d) e -> e (h p d)"
part = "p"
h = 2

[[rule]]
torch = "enc.{i}.scale"
flax = "scales"
pattern = "d -> l d"
stack = "l"

[[rule]]
torch = "enc.{i}.mask"
drop = "it is computed"
"""


def test_rules_of_ones_own_lead_there_and_back(tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    random_ = np.random.default_rng(0)
    arrays = {f"enc.{i}.{name}": random_.normal(size=(4, 3)) for i in range(2) for name in ("q", "k")}
    arrays |= {f"enc.{i}.scale": random_.normal(size=5) for i in range(2)} | {"enc.0.mask": np.ones(3)}
    source = write(tmp_path / "a.safetensors", arrays)
    there = checkpoints.convert(source, tmp_path / "b.npz", rules=rules).target
    found = checkpoints.read(there)
    assert {name: array.shape for name, array in found.items()} == {
        "encoder.0.qk": (3, 8),
        "encoder.1.qk": (3, 8),
        "scales": (2, 5),
    }
    assert np.array_equal(found["encoder.1.qk"].reshape(3, 2, 2, 2)[:, :, 1], arrays["enc.1.k"].T.reshape(3, 2, 2))
    assert checkpoints.verify(source, there, rules=rules).passed
    back = checkpoints.convert(there, tmp_path / "c.safetensors", rules=rules).target
    assert bits(checkpoints.read(back)) == bits(arrays)


FUSED = {
    "counted": """
[[rule]]
torch = "h.{i}.qkv"
flax = ["layer_{i}.q", "layer_{i}.k", "layer_{i}.v"]
pattern = "(p h c) d -> d h c"
part = "p"
h = 2
""",
    "along": """
[[rule]]
torch = "h.{i}.qkv"
flax = ["layer_{i}.q", "layer_{i}.k", "layer_{i}.v"]
pattern = "o d -> d o"
along = "o"
split = [6, 6, 6]
""",
}
"""A tensor of torch's that is three of Flax's."""


@pytest.mark.parametrize("kind", FUSED)
def test_rules_take_a_fused_tensor_of_torch_apart(tmp_path, kind):
    rules = tmp_path / "rules.toml"
    rules.write_text(FUSED[kind] + '[[rule]]\nflax = ["rng.count", "rng.key"]\ndrop = "random state"\n')
    random_ = np.random.default_rng(0)
    arrays = {f"h.{i}.qkv": random_.normal(size=(18, 5)) for i in range(2)}
    source = write(tmp_path / "a.safetensors", arrays)
    there = checkpoints.convert(source, tmp_path / "b.safetensors", rules=rules).target
    found = checkpoints.read(there)
    assert len(found) == 6
    assert checkpoints.inspect(there).layout == "rules.toml flax"
    for i in range(2):
        for part, array in zip("qkv", np.split(arrays[f"h.{i}.qkv"], 3), strict=True):
            wanted = array.reshape(2, 3, 5).transpose(2, 0, 1) if kind == "counted" else array.T
            np.testing.assert_array_equal(found[f"layer_{i}.{part}"], wanted)
    assert checkpoints.verify(source, there, rules=rules).passed
    back = checkpoints.convert(there, tmp_path / "c.safetensors", rules=rules).target
    assert bits(checkpoints.read(back)) == bits(arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('flax = "scales"', 'flax = ["scales", "more"]\n#'), "line 9: enc.{i}.scale: names on both sides"),
        (('flax = "encoder.{i}.qk"', 'flax = ["encoder.{i}.qk"]'), "line 2: one of torch and flax may be a list"),
        (("pattern =", "pattern = 3 #"), "line 2: pattern must be a text"),
        (("(h p d)", "(h p e)"), "line 2: encoder"),
        (("h = 2", "h = 0"), "line 2: h must be a size"),
        (('flax = "scales"', ""), "line 9: a rule needs the keys torch and flax"),
        (("enc.{i}.q", "enc.{k}.q"), "not {k}"),
        (("h = 2", "optional = true"), "line 2: optional is no key of a rule"),
        (("[[rule]]\ntorch = [", "[rule\ntorch = ["), "rules.toml"),
    ],
)  # fmt: skip
def test_errors_in_rules_point_at_the_line(tmp_path, change, message):
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES.replace(*change))
    source = write(tmp_path / "a.safetensors", {"enc.0.q": np.ones((4, 3))})
    with pytest.raises(ValueError, match=r"rules\.toml") as caught:
        checkpoints.convert(source, tmp_path / "b.npz", rules=rules)
    assert message in str(caught.value)


RULE = "[[rule]]\ntorch = {}\nflax = {}\n"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (RULE.format('"x.{i}.w"', '"y"'), "must hold the same placeholders"),
        (RULE.format('"x"', '"y.{i}"'), "must hold the same placeholders"),
        (RULE.format('"x.w"', '"y"') + 'pattern = "a -> l a"\nstack = "l"', "but for the {i} that stack counts"),
        (RULE.format('"{prefix}x"', '"y"'), "must hold the same placeholders"),
        (RULE.format('["x", "y"]', '"z"') + 'pattern = "a -> a"\nalong = "a"\nsplit = [4, -1]', "split must hold"),
        (RULE.format('["x", "y"]', '"z"') + 'pattern = "a -> a"\nalong = "a"\nsplit = "ab"', "split must be a list"),
        (RULE.format('"x.{i}"', '"y"') + 'pattern = "a -> l a"\nstack = "l"\nl = 9', "'l', which is counted"),
        (RULE.format('"x.0.w"', '"y"') + RULE.format('"x.1.w"', '"y"'), "x.0.w and x.1.w would both be y"),
    ],
)  # fmt: skip
def test_rules_that_would_lose_tensors_or_fail_on_the_way_back_are_refused(tmp_path, capsys, rules, message):
    (tmp_path / "rules.toml").write_text(rules)
    source = write(tmp_path / "a.safetensors", {"x.0.w": np.ones(3), "x.1.w": np.zeros(3)})
    assert run(["convert", str(source), str(tmp_path / "b.npz"), "--rules", str(tmp_path / "rules.toml")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "b.npz").exists()


def test_rules_whose_two_sides_cover_the_same_names_go_back_by_the_manifest(tmp_path):
    (tmp_path / "rules.toml").write_text(RULE.format('"x"', '"x"') + 'pattern = "a b c -> c a b"')
    source = write(tmp_path / "a.safetensors", {"x": np.arange(24.0).reshape(2, 3, 4)})
    there = checkpoints.convert(source, tmp_path / "b.npz", rules=tmp_path / "rules.toml").target
    assert checkpoints.read(there)["x"].shape == (4, 2, 3)
    back = checkpoints.convert(there, tmp_path / "c.safetensors", rules=tmp_path / "rules.toml").target
    assert bits(checkpoints.read(back)) == bits(checkpoints.read(source))


@pytest.mark.parametrize(("arguments", "shape"), [(["--from", "torch"], (4, 2, 3)), (["--to", "torch"], (3, 4, 2))])
def test_rules_whose_two_sides_cover_the_same_names_go_the_way_that_is_asked_for(tmp_path, arguments, shape):
    (tmp_path / "rules.toml").write_text(RULE.format('"x"', '"x"') + 'pattern = "a b c -> c a b"')
    source = write(tmp_path / "a.safetensors", {"x": np.arange(24.0).reshape(2, 3, 4)})
    target = tmp_path / "b.npz"
    assert run(["convert", str(source), str(target), "--rules", str(tmp_path / "rules.toml"), *arguments]) == 0
    assert checkpoints.read(target)["x"].shape == shape
