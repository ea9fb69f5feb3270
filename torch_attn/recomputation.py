"""Recomputation of activations repeats the draws of the forward pass (Chen et al. 2016, arXiv 1604.06174).

`torch.utils.checkpoint` calls a function in the forward pass and again in the backward pass. In between it restores
torch's global generators, but neither the streams of `JaxRngs` nor a `torch.Generator` that a caller passes. A `Region`
records the draws of such a call and gives them again whenever the call is repeated. `watch` makes
`torch.utils.checkpoint` announce its calls, and is the one place that knows its internals; checkpoints by other
libraries are not seen, and `check_forward` refuses dropout in them. Sources are compared by identity.

Draws by compiled code are not seen one by one. A stream whose count moved without them is set back as a whole.

A cache is written in place, and a repeated call would find the tokens of the forward pass in it: `check_cache` refuses.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar

import torch
import torch.utils.checkpoint  # with torch itself
from torch import Tensor

from .operations.tracing import is_traced

P = ParamSpec("P")
Result = TypeVar("Result")

_WATCHED = ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")
"""Modules that hold the generator function around the forward pass of a checkpoint under this name:"""

_GENERATOR = "_checkpoint_without_reentrant_generator"

_WATCHES = "_watches"
"""Attribute of our wrappers, which `functools.wraps` hands on to wrappers of theirs: nothing is recorded twice."""


class Stream(Protocol):
    """A source of keys: the next one is derived from `count`, an int64 scalar on the CPU."""

    tag: str
    count: Tensor
    drawn: int
    """Keys drawn so far outside of compiled code."""


_STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()


def register(stream: Stream) -> None:
    """Have recomputation restore this stream where compiled code draws from it."""
    _STREAMS.add(stream)


_BEGUN: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
"""Caches that were begun in a backward pass, and its number."""

# ---- draws


class _Local(threading.local):
    """Recordings and replays under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.active: list[Region | _Replay] = []


_LOCAL = _Local()


def next_count(stream: Stream) -> int:
    """Return the count for the next key of a stream and count on; in a recomputation, the count of the forward pass.

    Raises:
        RuntimeError: the recomputation draws more than the forward pass did; a graph or trace is being captured, which
            would repeat this draw for ever.
    """
    _check_no_capture(stream.tag)
    recordings, replay = _surrounding()
    count = _advance(stream) if replay is None else replay.take(stream)
    for region in recordings:
        region.counts.setdefault(stream, []).append(count)
    return count


def prepare(generator: torch.Generator) -> None:
    """Note that a draw from a generator follows; in a recomputation, set it to its state in the forward pass."""
    recordings, replay = _surrounding()
    if replay is not None:
        replay.rewind(generator)
    for region in recordings:
        if generator not in region.states:
            region.states[generator] = generator.get_state()


def check_forward() -> None:
    """Refuse to draw a dropout mask in a backward pass, except to repeat one.

    Raises:
        RuntimeError: a backward pass is running, and `torch.utils.checkpoint` does not recompute.
    """
    if torch._C._current_graph_task_id() != -1 and _surrounding()[1] is None:
        raise RuntimeError(
            "dropout in a backward pass would draw another mask than the forward pass did; recompute with "
            "torch.utils.checkpoint, or use rngs=None"
        )


def check_cache(cache: object, length: int) -> None:
    """Refuse to append tokens to a cache in a backward pass, except to one that was begun there.

    Args:
        cache: the cache of the call.
        length: number of tokens in it.

    Raises:
        RuntimeError: a backward pass is running, and `cache` has tokens from before.
    """
    task = torch._C._current_graph_task_id()
    if task == -1:
        return
    if length == 0:
        _BEGUN[cache] = task
    elif _BEGUN.get(cache) != task:
        raise RuntimeError(
            "a recomputation in the backward pass would append its tokens to the cache again; call the checkpointed "
            "function without a cache, or make the cache inside it"
        )


def _surrounding() -> tuple[list[Region], _Replay | None]:
    """Return the innermost replay, and the recordings within it: their draws are repeated ones, or new ones."""
    recordings: list[Region] = []
    for entry in reversed(_LOCAL.active):
        if isinstance(entry, _Replay):
            return recordings, entry
        recordings.append(entry)
    return recordings, None


def refuse_capture(tag: str, capture: str) -> NoReturn:
    """Refuse a draw whose result a graph would keep."""
    raise RuntimeError(f"{capture} would repeat one draw of the stream {tag!r} in every run; use eval() or rngs=None")


def _check_no_capture(tag: str) -> None:
    if is_traced():
        refuse_capture(tag, "a trace")
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        refuse_capture(tag, "a CUDA graph")


# ---- counts, in memory: neither transforms nor dispatch modes, which may be active, see them being read and written


def _count_of(stream: Stream) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(stream.count.data_ptr())


def _advance(stream: Stream) -> int:
    word = _count_of(stream)
    count = word.value
    word.value = count + 1
    stream.drawn += 1
    return count


def _positions() -> dict[Stream, tuple[int, int]]:
    """Return count and `drawn` of all streams that can be drawn from."""
    counts: dict[Stream, tuple[int, int]] = {}
    for stream in list(_STREAMS):
        with contextlib.suppress(AttributeError, RuntimeError):  # made in part; a fake tensor, which has no memory
            if stream.count.ndim == 0:
                counts[stream] = _count_of(stream).value, stream.drawn
    return counts


def _drawn_by_compiled_code(before: dict[Stream, tuple[int, int]]) -> list[Stream]:
    after = _positions()
    return [s for s, (count, drawn) in before.items() if s in after and after[s][0] - count != after[s][1] - drawn]


def hidden() -> contextlib.AbstractContextManager[object]:
    """Return a context whose operations dispatch modes do not see, such as those of a selective checkpoint.

    They draw again in a recomputation, whichever results its policy saves. Fake tensors remain fake.
    """
    if not torch._C._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return torch._C._DisableTorchDispatch() if fake is None else contextlib.nullcontext()


# ---- regions


class Region:
    """The draws of one call of a checkpointed function, by source.

    Attributes:
        counts: of the keys drawn from each stream, in order.
        states: of each generator before its first draw.
        starts: counts, before the call, of the streams that compiled code draws from.
    """

    def __init__(self) -> None:
        self.counts: dict[Stream, list[int]] = {}
        self.states: dict[torch.Generator, Tensor] = {}
        self.starts: dict[Stream, int] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the draws of this thread."""
        before = _positions()
        with _active(self):
            yield
        self.starts = {stream: before[stream][0] for stream in _drawn_by_compiled_code(before)}

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Replay the recorded draws in this thread; afterwards sources continue as if nothing had been drawn.

        Raises:
            RuntimeError: compiled code draws from a stream that it did not draw from before.
        """
        before, replay = _positions(), _Replay(self)
        for stream, start in self.starts.items():
            _count_of(stream).value = start
        try:
            with _active(replay):
                yield
        finally:
            strays = [s for s in _drawn_by_compiled_code(before) if s not in self.starts]
            for stream in [*self.starts, *strays]:
                _count_of(stream).value, stream.drawn = before[stream]
            replay.restore()
            if strays:
                raise RuntimeError(
                    f"compiled code drew from the stream {strays[0].tag!r} in a recomputation only, and so another "
                    "mask than the forward pass did"
                )

    def repeating(self, function: Callable[P, Result]) -> Callable[P, Result]:
        """Return the function that replays whenever it is called."""

        @functools.wraps(function, updated=())
        def repeat(*args: P.args, **kwargs: P.kwargs) -> Result:
            with self.replaying():
                return function(*args, **kwargs)

        return repeat


class _Replay:
    """One repetition of a region's draws."""

    def __init__(self, region: Region):
        self._region = region
        self._rest: dict[Stream, Iterator[int]] = {}
        self._later: dict[torch.Generator, Tensor] = {}

    def take(self, stream: Stream) -> int:
        """Return the count of the next key."""
        if stream in self._region.starts:
            return _advance(stream)
        counts = self._region.counts.get(stream, [])
        for count in self._rest.setdefault(stream, iter(counts)):
            return count
        raise RuntimeError(
            f"a recomputation draws more keys from the stream {stream.tag!r} than its forward pass did ({len(counts)})"
        )

    def rewind(self, generator: torch.Generator) -> None:
        """Set a generator, the first time, to the state that it had."""
        if generator not in self._later and generator in self._region.states:
            self._later[generator] = generator.get_state()
            generator.set_state(self._region.states[generator])

    def restore(self) -> None:
        """Restore generators to their states before the repetition."""
        for generator, state in self._later.items():
            generator.set_state(state)


@contextlib.contextmanager
def _active(entry: Region | _Replay) -> Iterator[None]:
    active = _LOCAL.active
    active.append(entry)
    try:
        yield
    finally:
        active.remove(entry)


# ---- torch.utils.checkpoint


def watch() -> None:
    """Have every checkpoint of this process record its draws and repeat them; does nothing the second time."""
    function = torch.utils.checkpoint.CheckpointFunction
    if not getattr(function.forward, _WATCHES, False):
        function.forward = staticmethod(_watched_forward(function.forward))
    for module in [sys.modules[name] for name in _WATCHED if name in sys.modules]:
        generator = getattr(module, _GENERATOR, None)
        if generator is not None and not getattr(generator, _WATCHES, False):
            setattr(module, _GENERATOR, _watched_generator(generator))


def _watched_forward(forward: Callable[..., object]) -> Callable[..., object]:
    """Watch the reentrant checkpoint, which calls its function in `forward` and in `backward`."""

    @functools.wraps(forward)
    def watched(ctx: object, run_function: Callable[..., object], *args: object) -> object:
        region = Region()
        contexts = iter([region.recording])

        def run(*inputs: object) -> object:
            with next(contexts, region.replaying)():
                return run_function(*inputs)

        return forward(ctx, run, *args)

    vars(watched)[_WATCHES] = True
    return watched


def _watched_generator(generator: Callable[..., Any]) -> Callable[..., object]:
    """Watch the other one, which suspends while its caller runs the forward pass, and calls `fn` to recompute alone."""

    @functools.wraps(generator)
    def watched(fn: Callable[..., Any], *args: object, **kwargs: object) -> Iterator[None]:
        region = Region()
        with region.recording():
            yield from generator(region.repeating(fn), *args, **kwargs)

    vars(watched)[_WATCHES] = True
    return watched
