"""A module's weights, inputs and results as a folder of safetensors and JSON, for a comparison without the framework.

A folder holds ``dump.json`` (the manifest), ``weights.safetensors`` (the module's own weights),
``state.safetensors`` (its buffers, variables and collections that are not weights), one file per sample in ``samples``
(inputs, and drawn weights in a torch dump) and one per precision and sample, such as ``float32/0000.safetensors``
(cotangents, outputs and all gradients, in that precision and in float64).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from attn_bridge import backends, checkpoints
from attn_bridge.checkpoints.containers.files import PIECE, File
from attn_bridge.checkpoints.containers.safetensors import SafetensorsReader
from attn_bridge.checkpoints.containers.sources import open_file, read_file

from ..pairing import Tensor
from ..samples.sampling import FIRST, Planned
from ..sides.arrays import is_float, numpy_dtype
from ..sides.subject import Arguments, Array, Arrays, Call, Run, SideWeight, Submodule
from .manifest import SCHEMA, DumpManifest, Recorded, match_data, parse

MANIFEST = "dump.json"
WEIGHTS, STATE = "weights.safetensors", "state.safetensors"
ORACLE = "oracle"
"""Name of the folder of a sample's float64 results, next to those of the modes."""

FLASH: Literal["flash"] = "flash"
"""Name of the folder of the float64 results with softmax instead of fused attention, if any ran."""

MAX_JSON = 1 << 26
"""Most bytes of a manifest."""

MAX_OPEN = 4
"""Most files that are kept in memory."""


class DumpError(ValueError):
    """A folder is not a dump, or is incomplete; the message is one line."""


def stored_as(mode: str, dtype: str, cast: str | None) -> str:
    """Return under which name a run in low precision is stored: in float64 an eager run is the oracle itself."""
    return ORACLE if cast == "float64" and dtype == "float64" and mode == "eager" else mode


def key_of(tensor: Tensor) -> str:
    """Return the key of a parameter, or of a part of one."""
    if tensor.cut is None:
        return tensor.source
    return f"{tensor.source}[{tensor.cut.offset} + {tensor.cut.strides} x {tensor.shape}]"


# ---- writing


class DumpWriter:
    """Writes a dump into an empty folder, file by file.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.digests: dict[str, str] = {}
        self.samples: list[Planned] = []
        self.size = 0

    def write(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write arrays into a file of the folder.

        Raises:
            ValueError: one has a dtype that safetensors lacks.
        """
        import safetensors
        import safetensors.numpy

        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        try:
            data = safetensors.numpy.save({key: np.asarray(array, order="C") for key, array in arrays.items()})
        except safetensors.SafetensorError as error:
            raise ValueError(f"{name} cannot be written as safetensors: {error}") from error
        path.write_bytes(data)
        self.digests[name] = hashlib.sha256(data).hexdigest()
        self.size += len(data)

    def number(self, sample: Planned) -> tuple[int, bool]:
        """Return the number of a sample, and whether it is new."""
        is_new = sample not in self.samples
        if is_new:
            self.samples.append(sample)
        return self.samples.index(sample), is_new

    def write_calls(self, sample: Planned, calls: Sequence[Call]) -> list[Recorded]:
        """Write the submodule calls on a sample, and return their entries for the manifest."""
        arrays: Arrays = {}
        entries = []
        for i, call in enumerate(calls):
            inputs = call.arguments.leaves
            arrays |= {f"{i}/inputs/{j}": array for j, array in enumerate(inputs)}
            arrays |= {f"{i}/outputs/{j}": array for j, array in enumerate(call.outputs)}
            entries.append(Recorded(call.path, call.number, call.order, len(inputs), len(call.outputs)))
        self.write(f"calls/{self.number(sample)[0]:04}.safetensors", arrays)
        return entries

    def finish(self, manifest: DumpManifest) -> None:
        """Write the manifest."""
        manifest.samples, manifest.digests = self.samples, self.digests
        data = dataclasses.asdict(dataclasses.replace(manifest, pairing=[]))
        data["pairing"] = [match_data(match) for match in manifest.pairing]
        text = json.dumps({"schema": SCHEMA, **data}, indent=1, allow_nan=False)
        (self.folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def run_arrays(where: str, run: Run) -> Arrays:
    """Return the arrays of a run by the names that they have in a file."""
    named = {f"{where}/outputs/{i}": array for i, array in enumerate(run.outputs)}
    named |= {f"{where}/inputs/{i}": array for i, array in enumerate(run.input_gradients) if array is not None}
    return named | {f"{where}/weights/{name}": array for name, array in run.parameter_gradients.items()}


# ---- reading


class Dump:
    """A dump read back; it takes the place of a subject, looks results up and runs nothing.

    Args:
        path: the folder.

    Raises:
        DumpError: the folder is not a dump, or is incomplete.
    """

    holds_float64 = True
    """Whether a side could hold float64; the arrays of a dump have the dtypes in which its side was judged."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        text = self._text()
        self.digest = hashlib.sha256(text).hexdigest()
        self.manifest = self._parsed(text)
        self.name, self.device = self.manifest.name, self.manifest.device
        self.framework = self.manifest.framework
        self.argument_names = self.manifest.argument_names
        self._ids = {one: number for number, one in enumerate(self.manifest.samples)}
        self._open: dict[str, Arrays] = {}
        self.held = self._numbers(WEIGHTS, self.manifest.parameters, "parameters")
        self._state = self._numbers(STATE, self.manifest.state, "state") if self.manifest.state else {}
        self._carried: frozenset[str] = frozenset()
        self.arguments = self.inputs(FIRST)
        self.kind = f"dump of a {self.manifest.kind}"

    # ---- as a subject

    @property
    def changed(self) -> frozenset[str]:
        """Nothing: `unreached` has the names that calls changed."""
        return frozenset()

    def parameters(self) -> dict[str, SideWeight]:
        """Return the parameters and running statistics by name, and the state that `carry` named."""
        manifest = self.manifest
        return manifest.parameters | {name: one for name, one in manifest.state.items() if name in self._carried}

    def state(self) -> dict[str, SideWeight]:
        """Return the state that is not among the parameters of the manifest by name."""
        return self.manifest.state

    def carry(self, names: Collection[str]) -> None:
        """Count the state of these names, and no other, among the parameters."""
        self._carried = frozenset(names)

    def tied(self) -> dict[str, str]:
        """Return nothing: a dump holds each weight under one name."""
        return {}

    def uses(self, weights: Mapping[str, Array], arguments: Arguments) -> dict[str, int]:
        """Return weight -> number of the first operation that combines it with values that depend on inputs."""
        del weights, arguments
        return self.manifest.uses

    def weights(self) -> Arrays:
        """Return the weights that the module held, and the state that `carry` named."""
        return self.held | {name: one for name, one in self._state.items() if name in self._carried}

    def few_threads(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for small work; nothing is run here."""
        return contextlib.nullcontext()

    def modules(self) -> list[Submodule]:
        """Return the submodules, the module itself first."""
        return self.manifest.modules

    def settings(self) -> dict[str, dict[str, float]]:
        """Return path -> the numbers that a submodule's meaning depends on."""
        return self.manifest.settings

    def unreached(self, arguments: Arguments) -> list[str]:
        """Describe the branches that the calls did not reach."""
        del arguments
        return self.manifest.unreached

    # ---- samples

    def __contains__(self, sample: object) -> bool:
        return sample in self._ids

    def inputs(self, sample: Planned) -> Arguments:
        """Return the call of a sample."""
        arrays = self._file(f"samples/{self._number(sample):04}.safetensors")
        first = self.manifest.positional
        count = first + len(self.manifest.keywords)
        leaves = [self._get(arrays, f"inputs/{i}") for i in range(count)]
        keywords = dict(zip(self.manifest.keywords, leaves[first:], strict=True))
        return Arguments(tuple(leaves[:first]), {**keywords, **self.manifest.constants})

    def sample_weights(self, sample: Planned) -> Arrays:
        """Return the weights of a sample of a torch dump."""
        arrays = self._file(f"samples/{self._number(sample):04}.safetensors")
        if sample[0].startswith("held") and not sample[2]:
            return self.weights()
        stored = {name: self._get(arrays, f"weights/{name}") for name in self.held}
        for name, array in stored.items():
            if (array.shape, array.dtype) != (self.held[name].shape, self.held[name].dtype):
                raise self._error(f"the weights of sample {sample} do not fit {name}")
        return self.weights() | stored

    def cotangents(self, sample: Planned, dtype: str) -> list[Array]:
        """Return the gradients that were given to the outputs of a sample."""
        arrays = self._file(f"{dtype}/{self._number(sample):04}.safetensors")
        return [self._get(arrays, f"cotangents/{i}") for i in range(len(self.manifest.outputs))]

    def run(self, sample: Planned, dtype: str, which: str) -> Run:
        """Return the results of a sample in one precision, in one mode or the float64 ones."""
        manifest = self.manifest
        name = f"{dtype}/{self._number(sample):04}.safetensors"
        arrays, leaves = self._file(name), self.inputs(sample).leaves
        outputs = [self._get(arrays, f"{which}/outputs/{i}") for i in range(len(manifest.outputs))]
        of_inputs = [
            self._get(arrays, f"{which}/inputs/{i}") if is_float(leaf) else None for i, leaf in enumerate(leaves)
        ]
        of_weights = {
            name: self._get(arrays, f"{which}/weights/{name}")
            for name, one in manifest.parameters.items()
            if one.role == "parameter" and not one.frozen and is_float(self.held[name])
        }
        for array, like in [
            *zip(of_inputs, leaves, strict=True),
            *((array, self.held[name]) for name, array in of_weights.items()),
        ]:
            if array is not None and (array.shape != like.shape or not is_float(array)):
                raise self._error(f"{name} holds {array.dtype} of shape {array.shape} for an array of {like.shape}")
        for output, cotangent, (_, shape, kind) in zip(
            outputs, self.cotangents(sample, dtype), manifest.outputs, strict=True
        ):
            if is_float(output) != is_float(np.empty(0, numpy_dtype(kind))) or {output.shape, cotangent.shape} != {
                shape
            }:
                raise self._error(
                    f"{name} holds {output.dtype} of shape {output.shape} for an output of {kind} {shape}"
                )
        return Run(outputs, [place for place, _, _ in manifest.outputs], of_inputs, of_weights)

    def recorded(self) -> list[Planned]:
        """Return the samples on which calls of submodules were recorded."""
        return [one for number, one in enumerate(self.manifest.samples) if str(number) in self.manifest.calls]

    def calls(self, sample: Planned) -> list[Call]:
        """Return the calls of submodules that were recorded on a sample."""
        number = self._number(sample)
        arrays = self._file(f"calls/{number:04}.safetensors")
        calls = []
        for i, entry in enumerate(self.manifest.calls[str(number)]):
            inputs = tuple(self._get(arrays, f"{i}/inputs/{j}") for j in range(entry.inputs))
            outputs = [self._get(arrays, f"{i}/outputs/{j}") for j in range(entry.outputs)]
            calls.append(
                Call(entry.path, entry.number, entry.order, Arguments(inputs), outputs, [None] * entry.outputs)
            )
        return calls

    # ---- files

    def _error(self, reason: str) -> DumpError:
        return DumpError(f"{self.path} is not a whole dump: {reason}")

    def _text(self) -> bytes:
        path = self.path / MANIFEST
        try:
            if not path.is_file():
                what = f"has no {MANIFEST}" if self.path.is_dir() else "is no folder"
                raise DumpError(f"{self.path} is no dump: it {what}")
            return read_file(path, self.path, MAX_JSON)
        except DumpError:
            raise
        except (OSError, ValueError) as error:
            raise self._error(str(error)) from error

    def _parsed(self, text: bytes) -> DumpManifest:
        try:
            return parse(json.loads(text))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise self._error(f"{MANIFEST}: {error or type(error).__name__}") from error

    def _numbers(self, name: str, wanted: Mapping[str, SideWeight], what: str) -> Arrays:
        """Return the arrays of a file, checked to be those of the manifest."""
        stored = self._file(name)
        described = {name: (one.shape, one.dtype) for name, one in wanted.items()}
        if {name: (one.shape, one.dtype.name) for name, one in stored.items()} != described:
            raise self._error(f"{name} does not hold the {what} of {MANIFEST}")
        return stored

    def _number(self, sample: Planned) -> int:
        if sample not in self._ids:
            raise self._error(f"there is no sample {sample}")
        return self._ids[sample]

    def _file(self, name: str) -> Arrays:
        if name not in self._open:
            path = self.path / name
            if name not in self.manifest.digests:
                raise self._error(f"{MANIFEST} lists no {name}")
            try:
                if _sha256(open_file(path, self.path)) != self.manifest.digests[name]:
                    raise self._error(f"{name} is not what was written")
                with checkpoints.Checkpoint(SafetensorsReader(path, self.path)) as checkpoint:
                    arrays = dict(checkpoint)
            except DumpError:
                raise
            except (OSError, ValueError, MemoryError) as error:
                raise self._error(str(error)) from error
            self._open = dict([*self._open.items()][-MAX_OPEN + 1 :]) | {name: arrays}
        return self._open[name]

    def _get(self, arrays: Arrays, key: str) -> Array:
        if key not in arrays:
            raise self._error(f"a file of it holds no {key}")
        return arrays[key]


def _sha256(file: File) -> str:
    """Return the digest of a whole file."""
    digest = hashlib.sha256()
    for start in range(0, file.size, PIECE):
        digest.update(file.read(start, min(PIECE, file.size - start)))
    file.close()
    return digest.hexdigest()


def of_side(path: str | Path, framework: backends.Framework) -> Dump:
    """Return a dump of one framework.

    Raises:
        DumpError: the folder is not a dump, or is incomplete.
        ValueError: it is of the other framework.
    """
    dump = Dump(path)
    if dump.framework != framework:
        raise ValueError(f"{path} is a {dump.framework} dump, not a {framework} one; the torch dump comes first")
    return dump


# ---- the manifest, checked
