"""Digests of weights that devices share: those of plain modules, and what they say of a part that is another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import attn_bridge
from attn_bridge.checkpoints import live
from attn_bridge.checkpoints.live import tiles
from attn_bridge.checkpoints.readers import SharedReader

from .sharded_sides import BFLOAT16, MODELS, build, numbers, wide


def digests_are_those_of_what_is_written(side: Any, folder: Path) -> None:
    """Of a shared and of a plain module, under every layout's names, cast or not: those of the manifest."""
    for number, (name, dtype) in enumerate(MODELS):
        config, arrays = numbers(name, dtype)
        plain, shared = (build(side, name, config, arrays, shared=one) for one in (False, True))
        for layout in ("same", "torch", "flax", *(("book",) if name == "GPTModel" else ())):
            path = folder / f"{number} {layout}.safetensors"
            side.save(shared, path, to_layout=layout)
            found = attn_bridge.digests(shared, layout=layout)
            known = json.loads(path.with_name(f"{path.name}.attn-bridge.json").read_text())["tensors"]
            assert {key: one.digest for key, one in found.tensors.items()} == {
                key: one["blake3"] for key, one in known.items()
            }
            assert {key: (list(one.shape), one.dtype) for key, one in found.tensors.items()} == {
                key: (one["shape"], one["dtype"]) for key, one in known.items()
            }
            assert found.problems == {}
            assert found.compare(attn_bridge.digests(plain, layout=layout)) == {}
            assert live.compare(found, path) == {}
            assert live.Digests.__eq__(found, side.everywhere(found)[0])
        cast = attn_bridge.digests(shared, layout=layout, dtype="f16")
        assert cast.compare(attn_bridge.digests(plain, layout=layout, dtype="f16")) == {}
        assert cast.compare(found).keys() == {
            key for key, one in found.tensors.items() if cast.tensors[key].dtype != one.dtype
        }


def a_digest_moves_little(side: Any, folder: Path) -> None:
    """No more of a weight is read at once than a piece, though the weights are many times as large."""
    config, arrays = wide()
    module = build(side, "DecoderModel", config, arrays, shared=True)
    largest = max(one.nbytes for one in arrays.values())
    piece, moved = largest >> 5, []
    read_range, read_rows, update = SharedReader.read_range, SharedReader.read_rows, tiles.TiledDigest.update

    def watched_range(self: Any, name: str, start: int, stop: int) -> Any:
        moved.append(stop - start)
        return read_range(self, name, start, stop)

    def watched_rows(self: Any, name: str, start: int, step: int, into: Any) -> None:
        moved.append(into.nbytes)
        read_rows(self, name, start, step, into)

    def watched_update(self: Any, box: Any, array: Any) -> None:
        moved.append(array.nbytes)
        update(self, box, array)

    plain = {
        layout: attn_bridge.digests(build(side, "DecoderModel", config, arrays, shared=False), layout=layout)
        for layout in ("torch", "flax")
    }
    with side.counting(moved):
        for layout in ("torch", "flax"):
            with (
                mock.patch.object(tiles, "PIECE", piece),
                mock.patch.object(SharedReader, "read_range", watched_range),
                mock.patch.object(SharedReader, "read_rows", watched_rows),
                mock.patch.object(tiles.TiledDigest, "update", watched_update),
            ):
                found = attn_bridge.digests(module, layout=layout)
            assert found.tensors.keys() == plain[layout].tensors.keys()
            assert found.compare(plain[layout]) == {}
    if side.is_first:
        assert moved
    assert max(moved, default=0) <= piece, (max(moved), piece, largest)


def a_flipped_bit_is_named_with_its_rank(side: Any, folder: Path) -> None:
    """One bit in one copy of a part: the odd copy is named; where there is no other, so is who holds the tile."""
    config, arrays = numbers("GPTModel")
    good = attn_bridge.digests(build(side, "GPTModel", config, arrays, shared=False))
    before = attn_bridge.digests(build(side, "GPTModel", config, arrays, shared=True))
    ways = set()
    # Of the weights that are cut alike, the first; all in one module, since a digest is some hundred messages.
    of_cuts = {_cut(shards): name for name, shards in reversed(before.shards.items())}
    assert len(of_cuts) > 2
    for place in (0, 3):
        module = build(side, "GPTModel", config, arrays, shared=True)
        for name in of_cuts.values():
            part = side.held(module, name)[place]
            part.reshape(-1).view(np.uint8)[-1] ^= 1
            side.put(module, name, place, part)
        found = attn_bridge.digests(module)
        problems = found.compare(good)
        assert problems.keys() == set(of_cuts.values())
        for name, problem in problems.items():
            region = _region(before, name, place)
            copies = [one.place for one in before.shards[name] if one.region == region]
            where = f"in [{', '.join(f'{start}:{stop}' for start, stop in region)}]"
            ways.add(len(copies))
            assert (name in found.problems) == (len(copies) > 1)
            if len(copies) > 2:
                others = ", ".join(str(one) for one in copies if one != place)
                assert found.problems[name].startswith(f"{found.unit} {place} holds other bytes {where}")
                assert found.problems[name].endswith(f"than {found.unit}s {others}")
            elif len(copies) == 2:
                assert f"hold different bytes {where}" in found.problems[name]
                assert all(f"{found.unit} {one}" in found.problems[name] for one in copies)
            else:
                assert problem.startswith("has other bytes in 1 of ")
                assert problem.endswith(f"which {found.unit} {place} holds")
    assert len(ways) > 1, ways


def _cut(shards: Any) -> Any:
    """Return which ranks hold which part of how many axes."""
    regions = list(dict.fromkeys(one.region for one in shards))
    return len(shards[0].region), tuple((one.place, regions.index(one.region)) for one in shards)


def _region(found: Any, name: str, place: int) -> Any:
    return next(one.region for one in found.shards[name] if one.place == place)


def a_stale_part_is_named_with_its_rank(side: Any, folder: Path) -> None:
    """All ranks but those of one part took an update; any layout's names find it, against a file of the whole."""
    config, arrays = numbers("DecoderModel experts", BFLOAT16)
    after = numbers("DecoderModel experts", BFLOAT16, seed=1)[1]
    stale, shared = (build(side, "DecoderModel", config, one, shared=True) for one in (arrays, after))
    plain = build(side, "DecoderModel", config, after, shared=False)
    if side.is_first:
        for layout in ("torch", "flax"):
            side.save(plain, folder / f"{layout}.safetensors", to_layout=layout)
    side.barrier()
    first = attn_bridge.digests(stale)
    for name, shards in first.shards.items():
        region, old = _region(first, name, 3), side.held(stale, name)
        for one in shards:
            if one.region == region:
                side.put(shared, name, one.place, old[one.place])
    alone = 0
    for layout in ("torch", "flax"):
        found = attn_bridge.digests(shared, layout=layout)
        assert found.problems == {}
        problems = live.compare(found, folder / f"{layout}.safetensors")
        assert problems.keys() == found.tensors.keys()
        for text in problems.values():
            assert text.startswith("has other bytes in ")
            assert "3" in text.rpartition(", which ")[2], text
        alone += sum(text.endswith(f", which {found.unit} 3 holds") for text in problems.values())
    assert alone > 4


def swapped_parts_are_named(side: Any, folder: Path) -> None:
    """Two ranks hold each other's part: both are named, and no other."""
    config, arrays = numbers("GPTModel")
    shared = build(side, "GPTModel", config, arrays, shared=True)
    first = attn_bridge.digests(shared)
    name = next(name for name, some in first.shards.items() if len({one.region for one in some}) == len(some) == 4)
    held = side.held(shared, name)
    assert held[1].shape == held[2].shape
    side.put(shared, name, 1, held[2])
    side.put(shared, name, 2, held[1])
    problems = attn_bridge.digests(shared).compare(first)
    assert problems.keys() == {name}
    assert f"which {first.unit}s 1, 2 hold" in problems[name]


SCENARIOS = (
    digests_are_those_of_what_is_written,
    a_digest_moves_little,
    a_flipped_bit_is_named_with_its_rank,
    a_stale_part_is_named_with_its_rank,
    swapped_parts_are_named,
)
