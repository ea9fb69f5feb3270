"""Work in a fork of the process, which a signal kills alone."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable


def in_a_process(work: Callable[[], object]) -> int:
    """Do something in a fork, and return its exit status, or minus the signal that killed it.

    The fork has no thread but its own, and leaves without what a process does at its end. An exception is status 1,
    but for `SystemExit`, which has its own.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # frameworks that other tests loaded have threads: the fork needs none of them
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        work()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
