"""Our torch names, and the Flax twins' names of the same tensors. Every other layout is defined in terms of these."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Collection, Iterable, Iterator

from ..specs.blocks.feed_forward import XIELU
from ..weights.rows import Row

OWN = "attn-bridge-"
"""Prefix of the model's name in the ``model_type`` of our config.json."""

MATRIX = "o i -> i o"
CONVOLUTION = "o i k -> k i o"

ATTENTION = [f"{{path}}{name}.{leaf}" for name in ("W_query", "W_key", "W_value") for leaf in ("weight", "bias")]
OUT = ["{path}out_proj.weight", "{path}out_proj.bias"]
BARE = ["{path}W_query", "{path}W_key", "{path}W_value"]
"""Matrices of `SelfAttention_v1`, which are [in, out] in both twins."""

LINEAR = [
    f"{{path}}{name}.{leaf}"
    for name in (
        *("ff.layers.0", "ff.layers.2", "ff.fc1", "ff.fc2", "ff.fc3", "out_head", "head_linear", "emb_linear"),
        *("layer_linear", "layer_gate", "layer_proj", "dense.fc1", "dense.fc2", "dense.fc3"),
        *("laurel_down", "laurel_up", "stream_in.{i}", "stream_out.{i}"),
        *(f"altup.{one}" for one in ("correction", "prediction", "stream_router")),
        *(f"ff.{one}.fc{number}" for one in ("experts.{j}", "shared") for number in (1, 2, 3)),
        *("ff.router", "ff.shared_gate"),
    )
    for leaf in ("weight", "bias")
]
CONVOLUTIONS = [
    "{path}conv1d.weight",
    *(f"{{path}}encoder.conv{number}.{leaf}" for number in (1, 2) for leaf in ("weight", "bias")),
]
"""Names of the convolutions of a gated delta net, and of those in front of Whisper's encoder."""
EMBEDDINGS = ["{path}tok_emb.weight", "{path}pos_emb.weight", "{path}type_emb.weight", "{path}layer_emb.weight"]
NORMS = ["{path}scale", "{path}shift"]

MODERN = [
    *(
        f"{{path}}{name}.{leaf}"
        for name in ("W_gate", "W_head_gate", "W_query_latent", "W_latent", "W_key_rope", "W_beta", "W_alpha", "W_step")
        for leaf in ("weight", "bias")
    ),
    *(f"{{path}}{name}.weight" for name in ("W_index_query", "W_index_key", "W_index_weights")),
    *(
        f"{{path}}{name}.weight"
        for name in ("W_decay_down", "W_decay_up", "W_gate_down", "W_gate_up", "W_step_down", "W_step_up")
    ),
    *(f"{{path}}{name}" for name in ("sinks", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "dt_bias", "A_log")),
    *("{path}D", "{path}conv1d.bias"),
    "{path}relative_bias",
]
"""Names of projections that attention after chapter 3 adds."""

NUMBERS = [f"{{path}}ff.layers.1.{name}" for name in XIELU]
"""Numbers of an activation."""

BARE_VECTORS = ["{path}ff.router.correction_bias", "{path}logits_bias", "{path}out_bias"]
BARE_VECTORS += ["{path}ff.router.expert_scale", "{path}scalar", "{path}altup.corrected_scale"]

NAMES = [*ATTENTION, *OUT, *BARE, *LINEAR, *CONVOLUTIONS, *EMBEDDINGS, *NORMS, *MODERN, *NUMBERS, *BARE_VECTORS]
"""Every name of ours, below any prefix."""

TOGETHER = (
    ("W_query.weight", "W_key.weight", "W_value.weight"),
    ("W_query.bias", "W_value.bias"),
    ("q_norm.scale", "k_norm.scale"),
    ("q_norm.shift", "k_norm.shift"),
    ("ff.layers.0.bias", "ff.layers.2.bias"),
    tuple(f"ff.layers.1.{name}" for name in XIELU),
    ("layer_emb.weight", "layer_linear.weight", "layer_norm.scale"),
    ("laurel_down.weight", "laurel_up.weight", "laurel_norm.scale"),
    (
        *(f"altup.{name}.weight" for name in ("correction", "prediction", "stream_router")),
        *("altup.corrected_scale", "altup.stream_norm.scale"),
    ),
    ("layer_gate.weight", "layer_proj.weight", "input_norm.scale"),
    ("dense.fc1.weight", "dense_norm.scale", "experts_norm.scale"),
    (
        *(f"W_index_{name}.weight" for name in ("query", "key", "weights")),
        *("key_norm.scale", "key_norm.shift"),
    ),
)
"""Endings that a module has all of, or none."""

QUERY_BIAS, KEY_BIAS = "W_query.bias", "W_key.bias"
"""All modules of a checkpoint that have the first have the second, or none: Whisper's keys have no bias."""


def torch_rows(*left_out: list[str]) -> list[Row]:
    """Return the rows of our torch names, without those left out."""
    skipped = {name for names in left_out for name in names}
    return [Row(name, (name,)) for name in NAMES if name not in skipped]


def flax_rows(*left_out: list[str]) -> list[Row]:
    """Return the rows of our Flax names, without those left out."""
    skipped = {name for names in left_out for name in names}
    return [_flax_row(name) for name in NAMES if name not in skipped]


def _flax_row(name: str) -> Row:
    stem, _, leaf = name.rpartition(".")
    if name in EMBEDDINGS:
        return Row(f"{stem}.embedding", (name,))
    if leaf == "weight":
        return Row(f"{stem}.kernel", (name,), CONVOLUTION if name in CONVOLUTIONS else MATRIX)
    return Row(name, (name,))


def lacking(names: Iterable[str]) -> list[str]:
    """Return our names that must accompany those present but are missing: queries without keys, gaps in blocks."""
    names = set(names)
    missing = []
    for endings in TOGETHER:
        stems = {name.removesuffix(ending) for name in names for ending in endings if name.endswith(ending)}
        missing += [stem + ending for stem in stems for ending in endings if stem + ending not in names]
    # Mamba's values may have a bias; its queries are projected from the values, and have none.
    missing = [name for name in missing if name.replace(QUERY_BIAS, "W_step_up.weight") not in names]
    stems = {name.removesuffix(KEY_BIAS) for name in names if name.endswith(KEY_BIAS)}
    missing += [stem + QUERY_BIAS for stem in stems if stem + QUERY_BIAS not in names]
    if stems:
        stems = {name.removesuffix(QUERY_BIAS) for name in names if name.endswith(QUERY_BIAS)}
        missing += [stem + KEY_BIAS for stem in stems if stem + KEY_BIAS not in names]
    numbers: dict[str, set[int]] = collections.defaultdict(set)
    for name in names:
        for hit in _STACKED.finditer(name):
            numbers[name[: hit.end() - 1]].add(int(name[hit.end() :].partition(".")[0]))
    missing += _first_norms(names)
    pairs = (("stream_in.", "stream_out."), ("stream_out.", "stream_in."))
    missing += [name.replace(*pair) for name in names for pair in pairs if name.startswith(pair[0])]
    missing = [name for name in missing if name not in names]
    exempt = _exempt(names)
    missing = [name for name in dict.fromkeys(missing) if name not in exempt]
    return missing + [f"{stem}.{i}" for stem, found in numbers.items() for i in gaps(found, max(found))]


def _first_norms(names: Collection[str]) -> Iterator[str]:
    """Yield the norms before attention that blocks lack: where there are such, the first block alone may have none."""
    hits = [hit for hit in map(_SECOND_NORM.fullmatch, names) if hit is not None]
    first = {hit: f"{hit['root']}{hit['number']}.norm1.{hit['leaf']}" for hit in hits}
    roots = {(hit["root"], hit["leaf"]) for hit, name in first.items() if name in names}
    for hit, name in first.items():
        if name not in names and int(hit["number"]) and (hit["root"], hit["leaf"]) in roots:
            yield name


def _exempt(names: Collection[str]) -> set[str]:
    """Return names that attention of Gemma 3n and 4 may lack, whose blocks have a factor or alternating updates.

    In Gemma 4 keys may be values. Layers at the end of a model, and only they, may read the keys and values of earlier
    ones.
    """
    keyless: dict[str, list[int]] = collections.defaultdict(list)
    exempt = set()
    for name in names:
        hit = _MARKED.fullmatch(name)
        if hit is None:
            continue
        stem = f"{hit['root']}{hit['number']}.att."
        if hit["mark"] == "scalar" and f"{stem}W_value.weight" not in names:
            exempt |= {f"{stem}W_value.{leaf}" for leaf in ("weight", "bias") if f"{stem}W_key.{leaf}" in names}
        keyless[hit["root"]].append(int(hit["number"]))
    for root, numbers in keyless.items():
        for number in sorted(numbers, reverse=True):
            stem = f"{root}{number}.att."
            leaves = [f"{stem}{part}.{leaf}" for part in ("W_key", "W_value") for leaf in ("weight", "bias")]
            if any(name in names for name in leaves):
                break
            exempt.update(leaves, (f"{stem}k_norm.scale",))
    return exempt


_SECOND_NORM = re.compile(r"(?P<root>(?:.+\.)?trf_blocks\.)(?P<number>[0-9]+)\.norm2\.(?P<leaf>scale|shift)")

_MARKED = re.compile(r"(?P<root>(?:.+\.)?trf_blocks\.)(?P<number>[0-9]+)\.(?P<mark>scalar|altup\.corrected_scale)")
"""Parameters of the blocks of Gemma 3n and 4."""

_STACKED = re.compile(r"(?:^|(?<=\.))(?:(?:trf_blocks|heads|experts)\.(?=[0-9]+\.)|layers\.(?=[0-9]+\.att\.))")
"""Modules with numbered blocks of ours; other numbers are the user's own, and may have gaps."""


def gaps(numbers: Collection[int], stop: int) -> Iterable[int]:
    """Return the first missing numbers below `stop`; not all, since a name may have any number."""
    return itertools.islice((i for i in range(stop) if i not in numbers), 100)
