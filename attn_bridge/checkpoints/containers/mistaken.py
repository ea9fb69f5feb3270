"""Recognises files whose contents do not fit their extension, by their first bytes, and names a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from .base import MAX_HEADER

HEAD = 512
"""Bytes of a file that are looked at."""


class _Readable(Protocol):
    """A file, or a part of one."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def read(self, start: int, count: int, /) -> bytes | memoryview:
        """Return bytes."""


_READ_AS = "--source-format {} reads it (--format of inspect)"

_KINDS = (
    (rb"version https://git-lfs", "is a pointer of Git LFS, not the file itself: git lfs pull fetches that"),
    (rb"\s*<(?i:!doctype\s+html|html)", "is a web page, not a checkpoint: download the file itself"),
    (rb"lmgg|fmgg|tjgg|algg", "is a file of ggml, older than GGUF: llama.cpp's convert_llama_ggml_to_gguf.py makes "
     "GGUF of it, or convert the model that it was made of"),
    (rb"24ka", "is an export of llama2.c: convert the checkpoint that it was made of"),
    (rb"\xc6\xd7\x34\x01|\x78\xd8\x34\x01", "is an export of llm.c: convert the checkpoint that it was made of"),
    (rb"[\s\S]{4}TFL3", "is a graph of TensorFlow Lite, whose weights have other names and forms; convert what it was "
     "made of"),
    (rb"\x08[\x03-\x1e][\x12:]", "is a graph of ONNX, whose weights have other names and forms; convert what it was "
     "exported from"),
    (rb"[\s\S]{4}[\x01-\xff]\0\0\0(blk\.|output|token_embd)", "is an importance matrix of llama.cpp, which has no "
     "weights; convert the model"),
    (rb"\x92[\x91-\x9f][\xa1-\xbf\xd9]", "is a stream of EasyLM, a pair of msgpack for each tensor; load it with "
     "EasyLM's StreamingCheckpointer, and save flax.serialization.msgpack_serialize of the tree"),
    *((re.escape(magic), f"is compressed by {name}: unpack it first") for magic, name in {
        b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"7z\xbc\xaf": "7z"
    }.items()),
)  # fmt: skip
"""Pattern of a file's first bytes -> its kind, and a remedy."""

_MAGIC = {b"GGUF": "gguf", b"\x89HDF\r\n\x1a\n": "keras"}
"""First bytes of a file -> its container."""

INSTEAD = {
    ".distcp": "is a part of a distributed checkpoint of torch; give its folder, which has the index (.metadata)",
    ".npy": "is a single array, or a pickled dict of them; save it by np.savez(FILE, **arrays), and convert that",
    ".pt2": "is a program of torch.export; torch.save the state_dict of torch.export.load(FILE), and convert that",
    ".onnx": "is a graph of ONNX, whose weights have other names and forms; convert what it was exported from",
    ".tflite": "is a graph of TensorFlow Lite, whose weights have other names and forms; convert what it was made of",
    ".xml": "is a graph of OpenVINO, whose weights have other names and forms; convert what it was exported from",
    ".pb": "is a graph of TensorFlow; load its variables with tf.train.load_checkpoint, and save them by np.savez",
    ".index": "is the index of a checkpoint of TensorFlow; load that with tf.train.load_checkpoint, and save its "
    "variables by np.savez",
}
"""Extension of files that are not read -> the error message, with a remedy."""

_MEMBERS = {"data.pkl": "torch", ".npy": "npz", "metadata.json": "keras"}
"""Ending of the name of an archive's first member -> its container."""


def kind_of(file: _Readable, format: str) -> str:
    """Return the kind of a file and a remedy, if the file has another format; "" if the kind is unknown.

    Args:
        file: the file.
        format: the container that it was opened as; "" if none is known.
    """
    start = bytes(file.read(0, min(HEAD, file.size)))
    kind = next((kind for pattern, kind in _KINDS if re.match(pattern, start)), "")
    if kind:
        return kind
    container = _container_of(start)
    if not container or container == format:
        return ""
    other = f", not of {format}" if format else ""
    return f"is a file of {container}{other}: {_READ_AS.format(container)}"


def unnamed(file: _Readable) -> str:
    """Return the kind of a file without a known extension, by its first bytes, and a remedy; "" if unknown."""
    kind = kind_of(file, "")
    start = bytes(file.read(0, min(HEAD, file.size)))
    # The magic of tar is at byte 257 of its first block.
    if start[257:262] == b"ustar":
        return "is a tar archive: unpack it, and convert the checkpoint in it"
    # A zip starts with a member's local header, an empty one with its end record.
    if start.startswith((b"PK\3\4", b"PK\5\6")):
        return kind or "is a zip archive: unpack it, and convert the checkpoint in it"
    guess = "msgpack" if start[:1] in MAPS and start[1:2] in TEXTS else "pickle" if start.startswith(b"\x80") else ""
    return kind or (f"may be {guess}: {_READ_AS.format(guess)}" if guess else "")


MAPS, TEXTS = (
    [bytes([code]) for code in (*range(low, high + 1), *others)]
    for low, high, others in ((0x81, 0x8F, (0xDE, 0xDF)), (0xA1, 0xBF, (0xD9,)))
)
"""First bytes of a map, and of a text, in msgpack: `flax.training.checkpoints` gives its files no extension."""

ZARR = (
    "holds a folder of Zarr for each array, as T5X and older Megatron save it: load it with their own tool (T5X: "
    "t5x.checkpoints.load_t5x_checkpoint), and save the arrays by numpy.savez"
)
"""Kind of a folder with such arrays, and a remedy."""

STATES = re.compile(
    r"(training_args|common|openvino_\w+|(rng_state|random_states|optimizer|scheduler|scaler)(_\d+)?"
    r"|(optim|extra_state)_world_size_\d+_rank_\d+|([a-z0-9]+_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states)\.(pt|pth|bin|pkl)"
)
"""Names of files next to weights: of a trainer's other state, of a graph."""

RUNS = (
    (r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", "holds the parts of weights that DeepSpeed's ZeRO 3 saves: "
     "its zero_to_fp32.py puts them together, convert what that writes"),
    (r"layer_\d+-model_\d+-model_states\.pt", "holds a file for each layer, as DeepSpeed's pipelines save them: "
     "export it with the trainer's own tool (GPT-NeoX has convert_neox_to_hf.py), and convert that"),
    (r"mp_rank_[\d_]*[1-9][\d_]*(_model_states\.pt)?", "holds the parts of weights that ranks of tensor or pipeline "
     "parallelism save: put them together with the trainer's own tool (Megatron-LM has tools/checkpoint/convert.py), "
     "and convert that"),
    (r"model_world_size_\d+_rank_\d+\.pt", "holds the part of the weights that each rank of FSDP 1 saves: put them "
     "together with the trainer's own tool (verl has python -m verl.model_merger merge), and convert that"),
    (r"rank[1-9]\d*\.safetensors", "holds the parts of weights that ranks of TensorRT-LLM take: convert the model that "
     "they were made of"),
    (r"checkpoint_metadata\.json", "is a checkpoint of nanotron, a file for each module and rank: its "
     "convert_nanotron_to_hf.py makes a folder of transformers of it, convert that"),
)  # fmt: skip
"""Pattern of file names -> the kind of a folder with such files, and a remedy."""


def run_of(names: Iterable[str]) -> str:
    """Return the kind of a folder of a trainer without whole checkpoints, and a remedy; "" if unknown."""
    kinds = [kind for pattern, kind in RUNS if any(re.fullmatch(pattern, name) for name in names)]
    return kinds[0] if kinds else ""


PARTS = re.compile(r"(consolidated\.|mp_rank_|model_world_size_\d+_rank_)(\d+)(\.pth?|_model_states\.pt)")
"""Names of files that hold a part of each matrix where the folder has several: front, number, end."""


RANK = re.compile(r"mp_rank_[0-9]{2}(_[0-9]{3})*")
"""Names of the folders of Megatron's ranks: that of tensor parallelism, of pipeline stages, of experts."""


def is_part(path: Path) -> bool:
    """Return whether a file holds a part of a model's matrices, and the first or second of the others is next to it."""
    hit = PARTS.fullmatch(path.name)
    if hit is None:
        return False
    front, number, end = hit[1], hit[2], hit[3]
    return path.with_name(f"{front}{0 if int(number) else 1:0{len(number)}}{end}").is_file()


def part_of_run(folder: Path) -> str:
    """Return the kind of a run, and a remedy, if a folder is that of one of its ranks and others are next to it."""
    name = folder.absolute().name
    if not RANK.fullmatch(name):
        return ""
    numbers = name.split("_")[2:]
    for at, number in enumerate(numbers):
        other = "_".join(["mp_rank", *numbers[:at], f"{not int(number):0{len(number)}}", *numbers[at + 1 :]])
        if (folder.absolute().parent / other).is_dir():
            return run_of([name, other])
    return ""


def _container_of(start: bytes) -> str:
    """Return the container that the first bytes are of; "" if unknown."""
    for magic, name in _MAGIC.items():
        if start.startswith(magic):
            return name
    if start.startswith(b"PK\3\4"):
        # A zip's local header: the name's length at byte 26, the name at byte 30.
        name = start[30 : 30 + int.from_bytes(start[26:28], "little")].decode("utf-8", "replace")
        return next((one for ending, one in _MEMBERS.items() if name.endswith(ending)), "")
    # Safetensors start with eight bytes of length, then JSON.
    length = int.from_bytes(start[:8], "little")
    return "safetensors" if start[8:9] == b"{" and 1 < length <= MAX_HEADER else ""
