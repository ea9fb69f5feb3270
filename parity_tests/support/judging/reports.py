"""Reports to render: a GPT whose block 3 normalises with another eps, and odd ones."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from attn_parity.results.findings import Divergence, ModuleNode, PairedParameter, Picture, TensorVerdict, Worst
from attn_parity.results.report import Report

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\x1b[31m\ud800\u202e]]>"
"""A name that breaks out of whatever does not escape it."""

SUSPECT = "blocks.3.norm1"
COMMAND = "attn-bridge compare mine.py:make 'theirs.py:make' --seeds 3 --html report.html"


def equal_tensor(name: str, **changes: object) -> TensorVerdict:
    """Return a verdict as an equal tensor has it, with `changes`."""
    fields = {
        "name": name,
        "second_name": name.replace(".weight", ".kernel"),
        "kind": "matrix gradient" if name.startswith("grad") else "output",
        "shape": (2, 10, 48),
        "dtype": "float32",
        "verdict": "equal",
        "relative": 2.1e-15,
        "meaning_used": 0.0021,
        "first_used": 0.31,
        "second_used": 0.45,
        "first_ulps": 0.21,
        "second_ulps": 0.34,
        "count": 8640,
        "worst": Worst(2, (1, 7, 12), 0.731058578, 0.731058638, 0.7310585786300049),
    }
    return TensorVerdict(**fields | changes)


def block(index: int, differs: bool) -> ModuleNode:
    """Return the tree of one transformer block."""
    path = f"blocks.{index}"
    late = index >= 3
    free = 4e-3 if late else 1e-7

    def leaf(name: str, kind: str, flax_kind: str | None = None, **changes: object) -> ModuleNode:
        inside = {"error_in": free, "error_out": free * 1.1, "forward_error": 1.2e-15, "backward_error": 2.3e-15}
        fields = {"verdict": "equal"} | inside | changes
        return ModuleNode(f"{path}.{name}", f"layers.{index}.{name}", kind, flax_kind or kind, **fields)

    norm = (
        leaf(
            "norm1",
            "LayerNorm",
            verdict="different",
            error_in=1e-7,
            error_out=3.1e-3,
            forward_error=3.1e-3,
            backward_error=5.2e-3,
            message="output: largest difference 3.1e-03 at (1, 7, 12); rows of small variance are furthest off",
            first=True,
        )
        if differs
        else leaf("norm1", "LayerNorm")
    )
    attention = dataclasses.replace(
        leaf("attn", "MultiHeadAttention"),
        children=tuple(leaf(f"attn.{name}", "Linear") for name in ("W_query", "W_key", "W_value", "out_proj")),
    )
    dropout = ModuleNode(
        f"{path}.drop", f"layers.{index}.drop", "Dropout", "Dropout", message="it was given no tensor that differs"
    )
    return ModuleNode(
        path,
        f"layers.{index}",
        "TransformerBlock",
        "TransformerBlock",
        "different" if differs else "equal",
        free / 1.1,
        free,
        3.2e-3 if differs else 3.2e-15,
        5.1e-3 if differs else 5.1e-15,
        "differs inside" if differs else "",
        children=(norm, attention, dropout, leaf("norm2", "LayerNorm"), leaf("mlp", "Sequential", "MLP")),
    )


def gpt_tree(differs: bool = True, blocks: int = 12) -> ModuleNode:
    """Return the module tree of a GPT, block 3 of which differs."""
    children = (
        ModuleNode("tok_emb", "tok_emb", "Embedding", "Embed", "equal", None, 0.0, 0.0, 1.1e-16),
        ModuleNode("pos_ids", None, "PositionIds", "", message="there is no module of this name or shape"),
        *(block(index, differs and index == 3) for index in range(blocks)),
        ModuleNode(None, "probe", "", "Intermediates"),
        ModuleNode("head", "head", "Linear", "Linear", "equal", 4e-3, 5e-3, 2.2e-15, 1.9e-15),
    )
    verdict = "different" if differs else "equal"
    return ModuleNode("", "", "GPTModel", "GPTModel", verdict, None, 5e-3, 4.1e-3, 6e-3, children=children)


def pictures() -> list[Picture]:
    """Return pictures of a float32 output, attention weights, a large matrix with one wrong element, and a vector."""
    rng = np.random.default_rng(7)
    output = rng.normal(size=(2, 10, 48)) * np.linspace(0.2, 2, 48)
    off = output.copy()
    off[1, 7] += 0.3 * np.sin(np.arange(48) / 5)
    scores = rng.normal(size=(2, 6, 12, 12)) * 2 + np.where(np.tril(np.ones((12, 12))) > 0, 0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    other = weights.copy()
    other[0, 2] = np.roll(other[0, 2], 1, axis=-1)
    large = rng.normal(size=(700, 512))
    one_wrong = large.astype(np.float32)
    one_wrong[431, 77] += 9
    bias = rng.normal(size=48)
    return [
        Picture("output", noisy(output, rng), noisy(off, rng), output),
        Picture("output[1]", noisy(weights, rng), noisy(other, rng), weights),
        Picture("grad head.weight", noisy(large, rng), one_wrong, large),
        Picture("grad blocks.0.norm1.shift", bias.astype(ml_dtypes.bfloat16), bias.astype(ml_dtypes.bfloat16), bias),
        Picture("grad x", noisy(output, rng), noisy(output, rng)),
    ]


def noisy(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return values in float32 with rounding errors of a few units in the last place."""
    return (values * (1 + rng.normal(size=values.shape) * 6e-8)).astype(np.float32)


def different_report() -> Report:
    """Return a report as of a real pair that differs in one place, every field in use."""
    worst = Worst(2, (1, 7, 12), 0.731058578, 0.727935218, 0.7310585786300049)
    beyond = {"bad": 412, "first_used": 0.31, "second_used": 118.4, "second_ulps": 5210.0, "meaning_used": 3.1e9}
    message = "412 of 8640 elements beyond 7.31e-13; worst at (1, 7, 12) of sample 2: 0.731058578 and 0.727935218"
    tensors = [
        equal_tensor(
            "output",
            verdict="different",
            message=message,
            relative=3.1e-3,
            worst=worst,
            weights="own",
            sample="random weights, seed 1",
            **beyond,
        ),
        equal_tensor("output[1]", kind="weight", shape=(2, 6, 12, 12)),
        equal_tensor(
            "grad x",
            kind="input gradient",
            verdict="different",
            message=message,
            relative=float("inf"),
            second_used=float("inf"),
            worst=Worst(0, (0, 0, 3), 0.25, float("nan"), 0.25),
            second_ulps=float("inf"),
            bad=3,
        ),
        equal_tensor(
            "grad head.weight",
            verdict="precision",
            message="flax used 180% of its allowance in float32",
            side="second",
            second_used=1.8,
            second_ulps=4.2,
            bad=7,
            shape=(700, 512),
        ),
        equal_tensor("grad blocks.0.norm1.shift", kind="vector gradient", shape=(48,), dtype="bfloat16"),
        *(
            equal_tensor(f"grad blocks.{index}.attn.{name}.weight", shape=(48, 48))
            for index in range(12)
            for name in ("W_query", "W_key", "W_value", "out_proj")
        ),
        TensorVerdict("weight probe", "probe", "weight", (3,), "float32", "inconclusive", "Flax alone returned it"),
    ]
    pairing = [
        PairedParameter(
            f"blocks.{index}.attn.{name}.weight", f"layers.{index}.attn.{name}.kernel", "o i -> i o", "names"
        )
        for index in range(12)
        for name in ("W_query", "W_key", "W_value", "out_proj")
    ]
    pairing.append(PairedParameter("head.weight", "head.kernel", "o i -> i o", "probe"))
    return Report(
        verdict="different",
        tensors=tensors,
        first_divergence=Divergence(
            SUSPECT,
            "layers.3.norm1",
            "forward",
            "eps is 1e-05 on the torch side and 1e-06 on the Flax side; rows of small variance are furthest off",
            hint="both eps differ by a factor of 10",
        ),
        tree=gpt_tree(),
        unexercised=[f"blocks.{index}.attn.rel_bias" for index in range(12)] + ["pos_ids.table"],
        invariances=[f"blocks.{index}.attn.W_key.bias" for index in range(12)],
        unreached=[
            "dropout 0.1 in blocks.*.drop: both sides are in eval mode",
            "the Flax module's `attention_mask` (you gave none)",
        ],
        pairing=pairing,
        noise={"torch, run twice": 0.0, "Flax, eager and jit": 2.2e-16},
        notes=["The Flax side was lifted to float64 in 2 layers that were built with dtype=float32."],
        seeds=3,
        samples=9,
        environment={
            "python": "3.11.7",
            "machine": "x86_64, 2 cores",
            "torch": "2.13.0+cpu",
            "jax": "0.10.2",
            "flax": "0.12.8",
            "numpy": "2.4.6",
            "jax_default_matmul_precision": "highest",
        },
        seconds=4.72,
        peak_memory=1_312_000_000,
        command=COMMAND,
        first_name="GPTModel",
        second_name="GPTModel",
        pictures=pictures(),
    )


def equal_report() -> Report:
    """Return a report of a pair that is equal everywhere."""
    found = different_report()
    return dataclasses.replace(
        found,
        verdict="equal",
        tensors=[equal_tensor(tensor.name, kind=tensor.kind, shape=tensor.shape) for tensor in found.tensors],
        first_divergence=None,
        tree=gpt_tree(differs=False),
        pairing=[dataclasses.replace(pair, how="rules") for pair in found.pairing],
    )


def inconclusive_report() -> Report:
    """Return a report of a pair that could not be run."""
    message = "the Flax side takes no argument attention_mask"
    return Report("inconclusive", [], message=message, first_name="Encoder", second_name="BertEncoder")


def large_report(count: int = 1000) -> Report:
    """Return a report of many tensors, some failing, each with a picture and a module."""
    rng = np.random.default_rng(0)
    tensors, drawn, nodes = [], [], []
    for index in range(count):
        name = f"grad blocks.{index}.fc.weight"
        tensors.append(equal_tensor(name, **{"verdict": "precision", "message": "too far"} if index % 100 == 7 else {}))
        values = rng.normal(size=(64, 64))
        drawn.append(Picture(name, values.astype(np.float32), values.astype(np.float32), values))
        path = f"blocks.{index}"
        nodes.append(ModuleNode(path, path, "Block", "Block", "equal", 1e-7, 2e-7, 1e-15, 1e-15))
    tree = ModuleNode("", "", "GPTModel", "GPTModel", "precision", None, 1e-7, 1e-15, 1e-15, children=tuple(nodes))
    return dataclasses.replace(different_report(), verdict="precision", tensors=tensors, tree=tree, pictures=drawn)


def hostile_report() -> Report:
    """Return a report in which every text is hostile."""
    node = ModuleNode(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "different", message=HOSTILE, first=True)
    root = ModuleNode("", "", HOSTILE, "Other", "different", message=HOSTILE, children=(node,))
    tensor = equal_tensor(HOSTILE, kind=HOSTILE, dtype=HOSTILE, verdict="different", message=HOSTILE, second_name="y")
    return Report(
        "different",
        [tensor],
        Divergence(HOSTILE, "other", "forward", HOSTILE),
        root,
        [HOSTILE],
        [HOSTILE],
        [HOSTILE],
        [PairedParameter(HOSTILE, HOSTILE, HOSTILE, "probe")],
        {HOSTILE: 0.5},
        [HOSTILE],
        HOSTILE,
        environment={HOSTILE: HOSTILE},
        command=HOSTILE,
        first_name=HOSTILE,
        second_name=HOSTILE,
        pictures=[Picture(HOSTILE, np.ones((2, 2)), np.zeros((2, 2)), np.ones((2, 2)))],
    )
