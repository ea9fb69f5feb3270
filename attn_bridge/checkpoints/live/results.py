"""Digests of weights from one source: as JSON, and compared with those of another source."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...printable import printable
from ...weights import Region
from ...whole_files import JsonObject
from ..containers.base import CheckpointError
from ..manifest import DIGEST, MAX_BYTES, Manifest

VERSION, MARK = 1, "attn-bridge-digests"


@dataclasses.dataclass(frozen=True)
class TensorDigest:
    """The digest of a tensor.

    Attributes:
        dtype: NumPy name of its dtype.
        shape: its shape.
        digest: of its bytes, as in a manifest.
        tiles: digests of its tiles, in C order; () if not available.
        places: sets of ranks (of JAX, devices) that hold some of it.
        held: for each tile, the index of its set in `places`; () if it is not sharded.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    tiles: tuple[str, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    held: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class ShardDigest:
    """The digest of one rank's (of JAX, one device's) shard of a weight.

    Attributes:
        place: the rank, or the device's number.
        region: region of the weight.
        digest: of its bytes.
    """

    place: int
    region: Region
    digest: str


@dataclasses.dataclass(frozen=True)
class Digests:
    """Digests of all tensors of a module or a checkpoint, under the names of a layout.

    Attributes:
        layout: the layout; "" for the module's or the checkpoint's own names.
        dtype: dtype of a cast of floating-point tensors; "" without a cast.
        unit: unit of `place`: ``rank`` or ``device``.
        tensors: name -> digest.
        shards: name of a sharded weight in the module -> digests of the shards of each rank.
        source: origin of the digests, for messages.
    """

    layout: str
    dtype: str
    tensors: dict[str, TensorDigest]
    shards: dict[str, tuple[ShardDigest, ...]] = dataclasses.field(default_factory=dict)
    unit: str = "rank"
    source: str = ""

    @property
    def problems(self) -> dict[str, str]:
        """Weight -> ranks whose replicas of the same region differ."""
        problems: dict[str, str] = {}
        for name, shards in self.shards.items():
            parts: dict[Region, list[ShardDigest]] = collections.defaultdict(list)
            for shard in shards:
                parts[shard.region].append(shard)
            texts = [text for region, some in parts.items() if (text := self._differing(region, some))]
            if texts:
                problems[name] = "; ".join(texts)
        return problems

    def _differing(self, region: Region, replicas: Sequence[ShardDigest]) -> str:
        groups: dict[str, list[int]] = collections.defaultdict(list)
        for replica in replicas:
            groups[replica.digest].append(replica.place)
        if len(groups) < 2:
            return ""
        first, *others = sorted(groups.values(), key=len, reverse=True)
        where = f"[{', '.join(f'{start}:{stop}' for start, stop in region)}]"
        if len(first) == len(others[0]):
            every = " and ".join(_listed(self.unit, one) for one in groups.values())
            return f"{every} hold different bytes in {where}"
        odd = [place for some in others for place in some]
        return f"{_listed(self.unit, odd)} {_hold(odd)} other bytes in {where} than {_listed(self.unit, first)}"

    def compare(self, other: Digests) -> dict[str, str]:
        """Compare with the digests of another source; return name -> difference, with ranks if available.

        Raises:
            ValueError: both have names of a layout, and those are two layouts.
        """
        if self.layout and other.layout and self.layout != other.layout:
            raise ValueError(
                f"{self.source or 'one'} has names of layout {self.layout}, {other.source or 'the other'} of "
                f"{other.layout}; take both in one layout"
            )
        problems = dict.fromkeys(self.tensors, f"is missing in {other.source or 'the other'}")
        problems |= dict.fromkeys(other.tensors, f"is missing in {self.source or 'the one'}")
        for name in self.tensors.keys() & other.tensors.keys():
            text = self._difference(self.tensors[name], other.tensors[name], other)
            if text:
                problems[name] = text
            else:
                del problems[name]
        own, theirs = ((one.problems, one.source) for one in (self, other))
        for differences, source in (own, theirs):
            for name, text in differences.items():
                difference = f"{text} ({source})" if source else text
                problems[name] = f"{problems[name]}; {difference}" if name in problems else difference
        return problems

    def _difference(self, own: TensorDigest, peer: TensorDigest, other: Digests) -> str:
        if (own.dtype, own.shape) != (peer.dtype, peer.shape):
            hint = "; cast both to one dtype" if own.shape == peer.shape else ""
            return f"is {own.dtype} {own.shape}, and {peer.dtype} {peer.shape} in {other.source or 'the other'}{hint}"
        if own.digest == peer.digest:
            return ""
        text = "has other bytes"
        if not own.tiles or len(own.tiles) != len(peer.tiles):
            return text
        differing = [at for at, pair in enumerate(zip(own.tiles, peer.tiles, strict=True)) if pair[0] != pair[1]]
        text += f" in {len(differing)} of {len(own.tiles)} tiles"
        for digests, tensor in ((self, own), (other, peer)):
            if tensor.held:
                sets = dict.fromkeys(tensor.places[tensor.held[at]] for at in differing)
                places = sorted({place for some in sets for place in some})
                beside = f" of {digests.source}" if digests.source else ""
                text += f", which {_listed(digests.unit, places)}{beside} {_hold(places)}"
        return text

    def to_json(self) -> JsonObject:
        """Return a document for `from_json`."""
        return {
            MARK: VERSION,
            "layout": self.layout,
            "dtype": self.dtype,
            "unit": self.unit,
            "tensors": {
                name: {
                    "dtype": one.dtype,
                    "shape": list(one.shape),
                    DIGEST: one.digest,
                    "tiles": list(one.tiles),
                    "places": [list(places) for places in one.places],
                    "held": list(one.held),
                }
                for name, one in self.tensors.items()
            },
            "shards": {
                name: [
                    {"place": one.place, "region": [list(bounds) for bounds in one.region], DIGEST: one.digest}
                    for one in shards
                ]
                for name, shards in self.shards.items()
            },
        }


def from_json(document: Mapping[str, Any], source: str = "") -> Digests:
    """Return the digests in a document of `Digests.to_json`.

    Raises:
        CheckpointError: it is malformed.
    """
    try:
        if document[MARK] != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        tensors = {
            _text(name): TensorDigest(
                _text(one["dtype"]),
                _numbers(one["shape"]),
                _text(one[DIGEST]),
                tuple(map(_text, one["tiles"])),
                tuple(map(_numbers, one["places"])),
                _numbers(one["held"]),
            )
            for name, one in document["tensors"].items()
        }
        for name, entry in tensors.items():
            if entry.held and (len(entry.held) != len(entry.tiles) or max(entry.held) >= len(entry.places)):
                raise ValueError(f"{printable(name)}: held does not fit its tiles and places")
        shards = {
            name: tuple(
                ShardDigest(_number(one["place"]), tuple(_pair(pair) for pair in one["region"]), _text(one[DIGEST]))
                for one in some
            )
            for name, some in document["shards"].items()
        }
        unit = document["unit"]
        if unit not in ("rank", "device"):
            raise ValueError("unit must be rank or device")
        return Digests(_text(document["layout"]), _text(document["dtype"]), tensors, shards, unit, source)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{source or 'digests'} can't be used: {reason}") from None


def of_manifest(manifest: Manifest, source: str) -> Digests:
    """Return the digests of a manifest, which has no tiles.

    Raises:
        CheckpointError: it is malformed.
    """
    try:
        tensors = {
            name: TensorDigest(_text(one["dtype"]), _numbers(one["shape"]), _text(one[DIGEST]))
            for name, one in manifest.tensors.items()
        }
    except (TypeError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{source} can't be used: {reason}") from None
    return Digests(manifest.layout, manifest.dtype, tensors, source=source)


def read(path: Path) -> Digests | None:
    """Return the digests of a file; None for a file of another kind.

    Raises:
        CheckpointError: the file of digests is malformed.
    """
    if path.suffix != ".json" or not path.is_file() or path.stat().st_size > MAX_BYTES:
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be used: {error}") from None
    return from_json(document, str(path)) if isinstance(document, dict) and MARK in document else None


def _listed(unit: str, places: Sequence[int]) -> str:
    return f"{unit}{'s' if len(places) > 1 else ''} {', '.join(map(str, sorted(places)))}"


def _hold(places: Sequence[int]) -> str:
    return "hold" if len(places) > 1 else "holds"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{printable(str(value))} must be text")
    return value


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{printable(str(value))} must be a whole number of at least 0")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(_number(one) for one in values)


def _pair(values: object) -> tuple[int, int]:
    start, stop = _numbers(values)
    return start, stop
