"""The layout tables: every one there and back, what they say about names and shapes, and how they are told apart."""

import contextlib
import copy
import dataclasses
import itertools
import math
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from attn_bridge import WeightsMismatchError
from attn_bridge.models import layouts
from attn_bridge.models.derived import known
from attn_bridge.models.layout.blocks import lacking
from attn_bridge.models.layouts import LayoutError, Row, SettingError
from attn_bridge.weights.placements import refined
from parity_tests.support.calls import cover

from ..checkpoints import SIZES, attention, bert, gpt, llama, whole

SINGLE = ["torch", "flax", "book", "fused-qkv", "torch-mha", "nnx-mha", "linen-mha"]
WHOLE = [name for name in layouts.names() if layouts.find(name).whole]
MADE = [name for name in WHOLE if name not in ("hf-gpt2", "nanogpt", "hf-bert", "flax-bert", "hf-llama")]
DERIVED = {layout.name for layout in known.LAYOUTS}
KINDS = ("hf-glm4", "hf-hy-v3", "hf-falcon", "hf-roberta", "hf-gpt-neox", "hf-qwen2-moe", "hf-kolibri1")
"""Derived layouts that always run: one per kind of block, of experts and of projections in one tensor."""
ALWAYS = [name for name in WHOLE if name not in DERIVED or name in KINDS]
DTYPES = [np.float32, np.float64, ml_dtypes.bfloat16, np.float16, np.int8]


def assert_same_bits(result, expected):
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        assert (result[name].dtype, result[name].shape) == (array.dtype, array.shape), name
        assert result[name].tobytes() == array.tobytes(), name


def shapes(arrays):
    return {name: array.shape for name, array in arrays.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", ["", "model.blocks.11.att."])
@pytest.mark.parametrize("name", SINGLE)
def test_single_modules_go_there_and_back(name, path, dtype):
    layout = layouts.find(name)
    canonical = {key: array.astype(dtype) for key, array in attention(path, seed=3).items()}
    theirs = layout.from_canonical(canonical, num_heads=4)
    assert_same_bits(layout.to_canonical(theirs), canonical)
    assert layouts.detect(theirs).name == ("torch" if name == "book" else name)


TYPES = {"nanogpt": "gpt2", "hf-bert-decoder": "bert-decoder", "hf-big-bird": "big_bird"}
"""Layout whose names another library has as well -> a model type that tells them apart."""

MAKE = {"hf-gpt2": gpt, "nanogpt": gpt, "hf-bert": bert, "flax-bert": bert, "hf-llama": llama}


@pytest.mark.parametrize(("name", "make"), MAKE.items())
@pytest.mark.parametrize("prefix", [0, 1])
def test_whole_models_go_there_and_back(name, make, prefix):
    layout = layouts.find(name)
    canonical = make(3, seed=prefix)
    theirs = layout.from_canonical(canonical, prefix=layout.prefixes[prefix])
    assert all(key.startswith(("lm_head", layout.prefixes[prefix])) for key in theirs)
    assert_same_bits(layout.to_canonical(theirs), canonical)
    assert layouts.detect(theirs, TYPES.get(name)).name == name
    decoded = layout.decode(shapes(theirs))
    assert decoded.restore["prefix"] == layout.prefixes[prefix]


@cover.some("name", MADE, [name for name in ALWAYS if name in MADE])
def test_models_of_every_kind_of_block_go_there_and_back(name):
    layout = layouts.find(name)
    canonical = whole(name, 4)
    if name == "gguf-gemma":  # its norms hold 1 more, in the same dtype
        canonical = {
            key: (array + np.float32(1)) - np.float32(1) if key.endswith(".scale") else array
            for key, array in canonical.items()
        }
    assert layouts.detect(canonical).name == "torch"
    for prefix in layout.prefixes:
        theirs = layout.from_canonical(canonical, prefix=prefix, **SIZES)
        outside = ("lm_head", "language_model.lm_head", "proj_out", "final_logits_bias", prefix)
        whole_names = {row.theirs for row in layout.rows if "{" not in row.theirs}
        assert all(key.startswith(outside) or key in whole_names for key in theirs)
        assert_same_bits(layout.to_canonical(theirs, **SIZES), canonical)
        assert layout.decode(shapes(theirs), SIZES).restore.get("prefix", layout.prefixes[0]) == prefix
    in_flax = layouts.find("flax").from_canonical(canonical)
    assert layouts.detect(in_flax).name == "flax"
    assert_same_bits(layouts.find("flax").to_canonical(in_flax), canonical)


@cover.some("prefixes", ["the first", "all"], ["the first"])
@cover.some("name", WHOLE, ALWAYS)
def test_no_layout_reads_the_models_of_another_otherwise(name, prefixes):
    layout = layouts.find(name)
    for prefix in layout.prefixes[: 1 if prefixes == "the first" else None]:
        theirs = shapes(
            layout.from_canonical(whole(name, 4) if name in MADE else MAKE[name](4), prefix=prefix, **SIZES)
        )
        placed = layout.decode(theirs, SIZES).placements
        # Granite 4 without recurrent layers has the names of granitemoeshared: what is found reads them alike.
        assert layouts.detect(theirs, TYPES.get(name)).decode(theirs, SIZES).placements == placed
        for other in WHOLE:
            if name in ("hf-bert-decoder", "hf-big-bird") and other == "hf-bert":  # BERT without its head is an encoder
                continue
            with contextlib.suppress(WeightsMismatchError, LayoutError):
                assert layouts.find(other).decode(theirs, SIZES).placements == placed, other


@pytest.mark.parametrize(
    ("model_type", "others"),
    [("solar_open", ["glm4_moe"]), ("glm4_moe", ["dots1"]), ("granitemoe", ["granitemoeshared"])],
)
def test_layouts_that_read_a_model_equally_need_no_choice(model_type, others):
    name = f"hf-{model_type.replace('_', '-')}"
    theirs = shapes(layouts.find(name).from_canonical(whole(name, 2), **SIZES))
    assert layouts.detect(theirs).name == name
    for kind in (model_type, *others):
        assert layouts.detect(theirs, kind).name == f"hf-{kind.replace('_', '-')}"


def test_layouts_that_read_a_model_otherwise_ask_which(monkeypatch):
    layout, other = layouts.find("hf-granitemoe"), copy.copy(layouts.find("hf-granitemoeshared"))
    theirs = shapes(layout.from_canonical(whole("hf-granitemoe", 2), **SIZES))
    exchanged = {"ff.experts.{j}.fc1": "ff.experts.{j}.fc2", "ff.experts.{j}.fc2": "ff.experts.{j}.fc1"}
    rows = [
        dataclasses.replace(
            row,
            ours=tuple(re.sub(r"ff\.experts\.\{j\}\.fc[12]", lambda hit: exchanged[hit[0]], one) for one in row.ours),
        )
        for row in other.rows
    ]
    other.rows = tuple(rows)
    other._index_theirs(rows)
    monkeypatch.setitem(layouts._PACKAGED, other.name, other)
    with pytest.raises(
        LayoutError, match=r"^the names fit the layouts hf-granitemoe, hf-granitemoeshared; say which with --from$"
    ):
        layouts.detect(theirs)


TIED = {
    "hf-modernbert-decoder",
    "hf-gpt2",
    "flax-gpt2",
    "gguf-gpt2",
    "hf-gemma",
    "hf-gemma3n",
    "hf-gemma4",
    "hf-gemma4-moe",
    "hf-cohere2-moe",
    "gguf-gemma",
    "hf-bloom",
    "hf-bart",
    "flax-bart",
    "flax-t5",
    "hf-whisper",
    "hf-t5",
    "hf-umt5",
}
"""Layouts of libraries that tie the head to the embeddings unless a config says otherwise."""


@pytest.mark.parametrize("name", WHOLE)
def test_a_head_is_left_out_by_default_where_the_library_ties_it(name):
    layout = layouts.find(name)
    canonical = MAKE[name](1) if name in MAKE else whole(name, 1)
    default, apart, tied = (
        layout.from_canonical(canonical, **SIZES, **({} if "tie" not in layout.settings else setting)).keys()
        for setting in ({}, {"tie": 0}, {"tie": 1})
    )
    assert default == (tied if name in TIED else apart)


@cover.some("blocks", ["the last of a kind", "all"], ["the last of a kind"])
@cover.some("name", MADE, [name for name in ALWAYS if name in MADE])
def test_a_model_that_lacks_any_tensor_is_refused(name, blocks):
    layout = layouts.find(name)
    count = 6 if name == "hf-kimi-linear" else 4  # which has three kinds of attention: two blocks of each
    theirs = shapes(layout.from_canonical(whole(name, count), **SIZES))
    spared = set()
    kinds = {re.sub(r"\d+", "#", key): key for key in theirs}
    for key in theirs if blocks == "all" else kinds.values():
        rest = {one: shape for one, shape in theirs.items() if one != key}
        try:
            layout.decode(rest, SIZES)
        except WeightsMismatchError:
            continue
        spared.add(key)
    spared = {name.removeprefix("params.params.") for name in spared}
    heads = {row.theirs for row in layout.rows if row.ours == ("out_head.weight",) and row.optional}
    if name.startswith("hf-gemma4"):  # any layer may have keys that are its values; a config.json decides
        spared = {one for one in spared if not one.endswith("self_attn.v_proj.weight")}
    if name == "hf-mimo-v2-flash":  # layers with a window have sinks; a config.json decides which
        spared = {one for one in spared if not one.endswith("attention_sink_bias")}
    if name == "hf-modernbert-decoder":  # which outside the blocks has biases by keys of a config.json, each alone
        spared = {one for one in spared if "layers" in one or not one.endswith(".bias")}
        spared = {one for one in spared if "layers.0.attn_norm." not in one}  # the first block has no such norm
    assert spared - heads <= {
        "lm_head.weight",
        "lm_head.kernel",
        "output.weight",
        "out_head.weight",
        "lm_head.w",
        "final_logits_bias",
        "decoder.logits_dense.kernel",
        "layers.reversible_embedding.vars.1",
    }  # models without a head, or whose head is tied


def test_docs_and_help_name_every_layout():
    root = Path(layouts.__file__).parents[2]
    for file in ("docs/layouts.md", "attn_bridge/cli/checkpoints/commands.py"):
        text = (root / file).read_text(encoding="utf-8")
        assert not [name for name in layouts.names() if not re.search(rf"[` ]{name}[`,;]", text)], file


def test_a_model_type_names_its_layout_and_tells_models_of_others():
    theirs = layouts.find("hf-llama").from_canonical(llama(2))
    assert layouts.find("hf-mistral") is layouts.find("hf-llama")
    assert layouts.detect(theirs, "qwen3").name == "hf-llama"
    assert layouts.detect(theirs, None).name == "hf-llama"
    with pytest.raises(
        LayoutError,
        match=r"which is for llama, mistral, qwen2, qwen3, granite, ministral, smollm3, .*, but config.json says bloom",
    ):
        layouts.detect(theirs, "bloom")
    assert layouts.detect(llama(2), "bloom").name == "torch"


def test_a_llama_is_no_qwen3_next_whose_queries_are_gated():
    theirs = layouts.find("hf-llama").from_canonical(llama(2))
    with pytest.raises(WeightsMismatchError, match=r"missing: any linear_attn\."):
        layouts.find("hf-qwen3-next").decode(shapes(theirs), SIZES)


def test_keys_of_all_modules_have_biases_or_none():
    both = [*attention("a."), *attention("b.")]
    assert lacking(both) == []
    assert lacking([name for name in both if not name.endswith("W_key.bias")]) == []
    assert lacking([name for name in both if name != "b.W_key.bias"]) == ["b.W_key.bias"]
    assert lacking([name for name in both if name != "b.W_query.bias"]) == ["b.W_query.bias"]
    assert lacking(["q_norm.scale"]) == ["k_norm.scale"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fused-qkv", {"qkv.weight": lambda q, k, v: np.concatenate([q, k, v])}),
        ("torch-mha", {"in_proj_weight": lambda q, k, v: np.concatenate([q, k, v])}),
        ("nnx-mha", {"value.kernel": lambda q, k, v: v.T.reshape(6, 4, 2)}),
        ("flax", {"W_key.kernel": lambda q, k, v: k.T}),
    ],
)  # fmt: skip
def test_the_elements_are_where_the_library_has_them(name, expected):
    canonical = attention(seed=5)
    theirs = layouts.find(name).from_canonical(canonical, num_heads=4)
    weights = [canonical[f"W_{one}.weight"] for one in ("query", "key", "value")]
    for key, compute in expected.items():
        assert np.array_equal(theirs[key], compute(*weights))


def test_gpt2_has_its_projections_side_by_side_and_its_head_tied():
    canonical = gpt(2)
    theirs = layouts.find("hf-gpt2").from_canonical(canonical)
    block = "trf_blocks.1.att.W_"
    side_by_side = np.concatenate([canonical[f"{block}{one}.weight"].T for one in ("query", "key", "value")], axis=1)
    assert np.array_equal(theirs["transformer.h.1.attn.c_attn.weight"], side_by_side)
    assert "lm_head.weight" not in theirs
    apart = layouts.find("hf-gpt2").from_canonical(canonical, tie=0)
    assert np.array_equal(apart["lm_head.weight"], canonical["out_head.weight"])
    assert layouts.find("hf-gpt2").decode(shapes(apart)).restore["tie"] == 0


def test_what_is_missing_and_what_is_unknown_is_listed():
    layout = layouts.find("hf-gpt2")
    theirs = layout.from_canonical(gpt(3))
    del theirs["transformer.h.1.attn.c_attn.weight"], theirs["transformer.wpe.weight"]
    theirs["transformer.extra"] = np.zeros(3)
    with pytest.raises(WeightsMismatchError) as caught:
        layout.decode(shapes(theirs))
    assert caught.value.missing == ["transformer.h.1.attn.c_attn.weight", "transformer.wpe.weight"]
    assert caught.value.unexpected == ["transformer.extra"]


def test_queries_without_keys_and_a_gap_in_the_blocks_are_missing():
    canonical = gpt(4)
    del canonical["trf_blocks.3.att.W_key.weight"]
    names = [name for name in canonical if not name.startswith("trf_blocks.2.")]
    assert sorted(lacking(names)) == ["trf_blocks.2", "trf_blocks.3.att.W_key.weight"]
    assert lacking(gpt(2)) == []


def test_numbers_of_others_may_have_gaps():
    assert lacking(["net.0.W_query", "net.2.W_key", "a.layers.1.weight", "trf_blocks.0.ff.layers.2.weight"]) == []
    assert sorted(lacking(["layers.1.att.out_proj.bias", "heads.1.scale"]), reverse=True) == ["layers.0", "heads.0"]


@pytest.mark.parametrize("setting", [None, 5])
def test_heads_have_to_be_known_and_to_fit(setting):
    settings = {} if setting is None else {"num_heads": setting}
    error, message = (SettingError, "needs --set num_heads=N") if setting is None else (LayoutError, "8 is not h=5 x c")
    with pytest.raises(error, match=message):
        layouts.find("nnx-mha").encode(shapes(attention()), settings)


def test_masks_are_dropped_for_a_reason():
    names = {**shapes(attention("a.")), "a.mask": (7, 7)}
    decoded = layouts.find("book").decode(names)
    assert decoded.dropped == {"a.mask": "a causal mask, which our modules compute"}
    assert layouts.detect(names).name == "book"


def test_shapes_that_are_no_parts_of_one_tensor_are_refused():
    canonical = attention()
    canonical["W_key.weight"] = np.zeros((8, 7), np.float32)
    with pytest.raises(LayoutError, match=r"W_query\.weight \(8, 6\) and W_key\.weight \(8, 7\) are no parts of one"):
        layouts.find("fused-qkv").encode(shapes(canonical))


@pytest.mark.parametrize("name", ["hf-phi3", "vllm"])
def test_shares_are_not_checked_while_the_numbers_of_heads_are_unknown(name):
    layout, canonical = layouts.find(name), whole(name, 1)
    assert_same_bits(layout.from_canonical(canonical), layout.from_canonical(canonical, **SIZES))


def test_a_fused_tensor_of_another_size_is_refused():
    theirs = layouts.find("fused-qkv").from_canonical(attention())
    theirs["qkv.weight"] = theirs["qkv.weight"][:-1]
    with pytest.raises(LayoutError, match=r"qkv\.weight \(23, 6\): 23 is not part=3 x o"):
        layouts.find("fused-qkv").decode(shapes(theirs))


@pytest.mark.parametrize("prefix", ["params.", ""])
def test_linen_is_told_from_nnx_by_params(prefix):
    theirs = layouts.find("linen-mha").from_canonical(attention("x."), num_heads=2, prefix=prefix)
    assert layouts.detect(theirs).name == ("linen-mha" if prefix else "nnx-mha")


def test_names_that_fit_nothing_say_what_comes_closest():
    theirs = layouts.find("hf-gpt2").from_canonical(gpt(2))
    advice = r"; rules of your own \(--rules, docs/rules.md\) take any names$"
    drop = r"^without the other 1, names are those of hf-gpt2 \(--drop foo\); "
    with pytest.raises(LayoutError, match=rf"{drop}.*hf-gpt2 comes closest, but does not know foo{advice}"):
        layouts.detect([*theirs, "foo"])
    with pytest.raises(LayoutError, match=rf"^no tensor has a name that a layout knows, such as foo{advice}"):
        layouts.detect(["foo", "bar.baz"])
    with pytest.raises(LayoutError, match=r"^layout \(foo\) is not known; docs/layouts\.md lists all layouts$"):
        layouts.find("foo")


GROUPED = Row(
    "{path}qkv.weight",
    tuple(f"{{path}}W_{name}.weight" for name in ("query", "key", "value")),
    "o i -> o i",
    along="o",
    split=("q", "kv", "kv"),
)
PER_HEAD = Row(
    "qkv.weight",
    tuple(f"W_{name}.weight" for name in ("query", "key", "value")),
    "(h d) i -> (h part d) i",
    part="part",
    sizes={"h": "num_heads"},
)
SCANNED = Row("blocks.weight", ("layers.{i}.weight",), "o i -> i l o", stack="l")


def test_parts_of_several_sizes_lie_along_an_axis():
    layout = layouts.Layout("grouped", "", [GROUPED])
    random = np.random.default_rng(0)
    canonical = {
        f"a.W_{name}.weight": random.normal(size=(size, 5)) for name, size in (("query", 8), ("key", 2), ("value", 2))
    }
    theirs = layout.from_canonical(canonical)
    assert np.array_equal(theirs["a.qkv.weight"], np.concatenate(list(canonical.values())))
    assert_same_bits(layout.to_canonical(theirs, q=8, kv=2), canonical)
    with pytest.raises(SettingError, match="--set q=N and --set kv=N"):
        layout.to_canonical(theirs)
    with pytest.raises(LayoutError, match=r"parts of 6 \+ 2 \+ 2 rows are not its 12"):
        layout.to_canonical(theirs, q=6, kv=2)


def test_parts_may_alternate_from_head_to_head():
    layout = layouts.Layout("per head", "", [PER_HEAD])
    canonical = attention(out=False, bias=False)
    fused = layout.from_canonical(canonical, num_heads=4)["qkv.weight"].reshape(4, 3, 2, 6)
    for part, array in enumerate(canonical.values()):
        assert np.array_equal(fused[:, part].reshape(8, 6), array)
    assert_same_bits(layout.to_canonical({"qkv.weight": fused.reshape(24, 6)}, num_heads=4), canonical)


def test_layers_may_be_stacked():
    layout = layouts.Layout("scanned", "", [SCANNED])
    canonical = {f"layers.{i}.weight": np.random.default_rng(i).normal(size=(3, 4)) for i in range(12)}
    theirs = layout.from_canonical(canonical)
    assert np.array_equal(theirs["blocks.weight"], np.stack([array.T for array in canonical.values()], axis=1))
    assert_same_bits(layout.to_canonical(theirs), canonical)
    del canonical["layers.5.weight"]
    with pytest.raises(WeightsMismatchError, match=r"missing: layers\.5\.weight"):
        layout.from_canonical(canonical)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ours": ("a",), "pattern": "o i -> o"}, "must hold the same axes"),
        ({"ours": ("a",), "pattern": "o i"}, "must read"),
        ({"ours": ("a",), "pattern": "o o -> o o"}, "each axis once"),
        ({"ours": ("a", "b"), "pattern": "o i -> o i"}, "either the axis that counts them or one they lie along"),
        ({"ours": ("a",), "pattern": "o -> o", "along": "o"}, "no several"),
        ({"ours": ("a",), "sizes": {"x": 3}}, "no axis of the pattern"),
        ({}, "names either tensors of ours or a reason"),
        ({"ours": ("a",), "reason": "b"}, "names either tensors of ours or a reason"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_bijection_is_refused(row, message):
    with pytest.raises(LayoutError, match=message):
        Row("theirs", **row)


def test_every_row_of_every_layout_places_every_element_once():
    every = [(name, row) for name in layouts.names() for row in layouts.find(name).rows if row.ours]
    fours = dict.fromkeys(("qk_nope_head_dim", "linear_key_head_dim", "head_dim", "mamba_state"), 4)
    settings = {**dict.fromkeys(SIZES, 3), "kv_lora_rank": 12, "mamba_heads": 12, **fours}
    for name, row in every:
        values = {"i": "0", "j": "0", "path": "", "prefix": ""}
        left, _ = row._sides(2, of_theirs=False)
        shape = tuple(12 + 12 * position for position in range(len(left)))
        keys = {(number, 0): shape for number in range(len(row.ours))}
        names = {(number, 0): str(number) for number in range(len(row.ours))}
        # One group of keys and values has as many rows as each of its queries.
        sizes = {**settings, "num_heads": 1, "num_kv_heads": 1} if 1 in row.shares else settings
        # Each expert is a whole axis of ours.
        experts = {shape[at] for at, (axis, *_) in enumerate(left) if row.sizes.get(axis) == "expert_width"}
        sizes = {**sizes, **dict.fromkeys(["expert_width"] if experts else [], *experts)}
        whole, placed = row.encode(row.theirs, keys, names, sizes)
        taken = []
        for placement in placed.values():
            steps = [
                range(0, size * stride, stride) if stride else [0] for axis in placement.axes for size, stride in axis
            ]
            taken += [placement.offset + sum(place) for place in itertools.product(*steps)]
        assert sorted(taken) == list(range(math.prod(whole))), (name, row)
        assert set(row.decode(row.theirs, whole, values, sizes)) == {template.format(**values) for template in row.ours}


def test_axes_that_two_layouts_cut_in_different_places_meet():
    one = [((4, 10), (6, 1))]
    two = [((8, 3), (3, 100))]
    assert refined(one, two) == [(4, 10, 6), (2, 3, 3), (3, 1, 100)]
    with pytest.raises(LayoutError, match="cut into pieces"):
        refined([((4, 6), (6, 1))], [((6, 4), (4, 1))])


def test_a_model_type_of_any_length_stays_in_one_short_line():
    theirs = layouts.find("hf-llama").from_canonical(llama(2))
    with pytest.raises(LayoutError) as caught:
        layouts.detect(theirs, "a\nb" + "x" * 10_000)
    assert "config.json says a\\nbxxx" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_heads_in_one_projection_are_told_apart_by_their_numbers():
    layout = layouts.find("hf-phi3")
    canonical = whole("hf-phi3", 2)
    sizes = {"num_heads": 4, "num_kv_heads": 2}
    theirs = layout.from_canonical(canonical, **sizes)
    key = "model.layers.0.self_attn.qkv_proj.weight"
    parts = [canonical[f"trf_blocks.0.att.W_{name}.weight"] for name in ("query", "key", "value")]
    np.testing.assert_array_equal(theirs[key], np.concatenate(parts))
    with pytest.raises(SettingError, match=r"the shares of its parts need --set num_kv_heads=N"):
        layout.to_canonical(theirs, num_heads=4)
    with pytest.raises(LayoutError, match=r"16 rows are not 4 \+ 3 \+ 3 equal shares"):
        layout.to_canonical(theirs, num_heads=4, num_kv_heads=3)
    with pytest.raises(LayoutError, match=r"parts of 8 \+ 4 \+ 4 rows are not 4 \+ 4 \+ 4 equal shares"):
        layout.from_canonical(canonical, num_heads=4, num_kv_heads=4)


def test_an_encoder_that_no_multimodal_model_has_is_not_left_out():
    theirs = shapes(layouts.find("hf-llama").from_canonical(llama(2)))
    own = {"encoder.layers.0.weight": (4, 4)}
    with pytest.raises(LayoutError, match=r"does not know encoder.layers.0.weight"):
        layouts.detect(theirs | own)
    speech = own | {"encoder.input_linear.weight": (4, 4)}
    assert layouts.find("hf-llama").apart(theirs | speech).keys() == speech.keys()
    assert layouts.detect(theirs | speech).name == "hf-llama"


@pytest.mark.parametrize(
    ("name", "prefixes"), [("hf-opt", ("model.", "")), ("hf-roberta", ("roberta.",)), ("hf-electra", ("electra.",))]
)
def test_a_base_is_read_without_its_prefix_where_it_is_a_whole_model(name, prefixes):
    layout = layouts.find(name)
    assert layout.prefixes == prefixes
    rows = [row.theirs.replace("{i}", "0") for row in layout.rows]
    for prefix in prefixes:
        inside = [row.replace("{prefix}", prefix) for row in rows if row.startswith("{prefix}")]
        assert layout.match(inside)[0] == prefix
    base = prefixes[0]
    assert not any(row.startswith(base) for row in rows)
