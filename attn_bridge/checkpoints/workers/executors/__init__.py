"""Where workers run: processes of this machine, in tasks of Ray, or started by hand under a number.

Those of this machine are forked: from the process that asks for them, or, where that has threads or connections, from
a `nursery`, which begins without any.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...containers.remote import is_url
from ..conducting import CORES, Helpers, most

if TYPE_CHECKING:
    from ...requests import Prepared, Request
    from ..jobs import Job
    from ..working import Advance
    from .nursery import Nursery


@contextlib.contextmanager
def early(request: Request, workers: int | None) -> Iterator[Nursery | None]:
    """Begin a nursery where a conversion may need one: of a store, by several workers."""
    urls = [one for one in (request.source, request.target) if is_url(one)]
    count = (os.cpu_count() or 1) // CORES if workers is None else workers
    if not urls or isinstance(count, bool) or not isinstance(count, int) or not 2 <= count <= most():
        yield None
        return
    from .nursery import Nursery

    with Nursery([url.partition(":")[0] for url in urls]) as nursery:
        if workers is not None:
            with contextlib.suppress(TypeError):  # settings that are no JSON: what refuses them says why
                nursery.expect(request, count - 1)
        yield nursery


def start(
    request: Request, prepared: Prepared, job: Job, run: str, indices: Sequence[int], advance: Advance
) -> Helpers:
    """Start workers of these numbers on this machine."""
    from .nursery import Nursery
    from .processes import Processes

    if Processes.may_fork():
        return Processes(prepared, job, run, indices, advance)
    return Nursery(()).start(request, prepared, job, run, indices, advance)
