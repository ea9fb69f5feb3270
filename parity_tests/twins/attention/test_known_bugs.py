"""Bugs that public code had: planted in the torch twin, they turn `check` red, or decoding away from the full pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch_attn
from attn_bridge import masks
from attn_bridge.parity import check
from attn_bridge.specs import GroupedQueryAttentionConfig, Rotary

Change = Callable[[dict[str, Any]], dict[str, Any]]


def allowed(arguments: dict[str, Any]) -> torch.Tensor:
    """Return the mask of a call as an array ``(B, H, T, S)``."""
    query, key = arguments["query"], arguments["key"]
    positions = torch.arange(key.shape[1])
    answer = arguments["mask"].allowed(positions[: query.shape[1], None], positions[None])
    return answer.expand(query.shape[0], query.shape[2], query.shape[1], key.shape[1])


def inverted_mask(arguments: dict[str, Any]) -> dict[str, Any]:
    """A mask of what to hide, given to a kernel that takes what to show (rasbt/LLMs-from-scratch #1061)."""
    return {"mask": ~allowed(arguments)}


def mask_by_the_wrong_axis(arguments: dict[str, Any]) -> dict[str, Any]:
    """Rows of a mask taken for its columns (rasbt/LLMs-from-scratch PR #1048)."""
    return {"mask": allowed(arguments).transpose(-1, -2)}


def window_counts_neighbours(arguments: dict[str, Any]) -> dict[str, Any]:
    """A window of W neighbours and the token itself, as `jax.nn` and FlashAttention count."""
    mask = masks.sliding_window(4)
    for array in arguments["mask"].arrays():
        mask = mask & array
    return {"mask": mask}


def heads_tiled(arguments: dict[str, Any]) -> dict[str, Any]:
    """Query head h reads key/value head h modulo K, where it should be h // (H / K)."""
    groups = arguments["query"].shape[2] // arguments["key"].shape[2]
    return {name: arguments[name].repeat(1, 1, groups, 1) for name in ("key", "value")}


def sinks_left_out(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"sinks": arguments["sinks"] * 0 - 1e9}


def only_key_0(arguments: dict[str, Any]) -> dict[str, Any]:
    """``is_causal=True`` for one query: it is query 0, which sees key 0 (google/flax #5591)."""
    return {"mask": masks.causal()} if arguments["query"].shape[1] == 1 else {}


def plant(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    right = torch_attn.functional.dot_product_attention

    def wrong(query: Any, key: Any, value: Any, **arguments: Any) -> Any:
        arguments |= {"query": query, "key": key, "value": value}
        return right(**(arguments | change(arguments)))

    monkeypatch.setattr(torch_attn.functional, "dot_product_attention", wrong)


@pytest.mark.parametrize(
    ("change", "case"),
    [
        (inverted_mask, "llama"),
        (mask_by_the_wrong_axis, "chunked"),
        (window_counts_neighbours, "gpt-oss"),
        (heads_tiled, "llama"),
        (sinks_left_out, "gpt-oss"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_known_bug_turns_check_red(change, case, monkeypatch):
    plant(monkeypatch, change)
    report = check(["GroupedQueryAttention"], cases=[case], dtypes=["float64"], seeds=1)
    assert {cell.verdict for cell in report.failures} == {"different"}
    assert "torch eager vs NumPy reference" in {cell.what for cell in report.failures}


def test_a_rotary_pairing_of_the_other_kind_turns_check_red(monkeypatch):
    right = torch_attn.positions.apply_rotary
    monkeypatch.setattr(
        torch_attn.grouped_query_attention, "apply_rotary", lambda x, cos, sin, pairing: right(x, cos, sin, "half")
    )
    report = check(["GroupedQueryAttention"], cases=["one-kv-head"], dtypes=["float64"], seeds=1)
    assert {cell.verdict for cell in report.failures} == {"different"}


def decoding_error() -> float:
    """Return by how much decoding one by one differs from the full pass."""
    torch.manual_seed(0)
    config = GroupedQueryAttentionConfig(8, 4, 2, position=Rotary(), mask=masks.sliding_window(4))
    module = torch_attn.GroupedQueryAttention(config, dtype=torch.float64).eval()
    x, outputs = torch.randn(2, 7, 8, dtype=torch.float64), []
    with torch.no_grad():
        cache = module.init_cache(2, 7)
        for token in range(7):
            output, cache = module(x[:, token : token + 1], cache=cache)
            outputs.append(output)
        return float((torch.cat(outputs, 1) - module(x)).abs().max())


def test_decoding_with_only_key_0_differs_from_the_full_pass(monkeypatch):
    assert decoding_error() < 1e-12
    plant(monkeypatch, only_key_0)
    assert decoding_error() > 1e-2


def test_positions_restarted_after_the_cache_differ(monkeypatch):
    """Shifting all positions alike changes nothing, so that only cached decoding shows a wrong offset."""
    right = torch_attn.decoding.token_positions.positions_of
    monkeypatch.setattr(torch_attn.grouped_query_attention, "positions_of", lambda x, given, *_: right(x, given))
    assert decoding_error() > 1e-2


def test_a_window_holds_the_token_itself_and_no_neighbour_more():
    for count in (1, 3):
        seen = masks.sliding_window(count).allowed(np.arange(6)[:, None], np.arange(6)[None])
        assert seen.sum(1).tolist() == [min(i + 1, count) for i in range(6)]
