"""Leases: objects of a store that identify a running process, and show that it is alive."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Self

from ....whole_files import JsonObject
from ...containers.base import CheckpointError
from ...containers.remote.stores import Store

# A beat that the store does not take is passed over (`_beat`), so a living process has four to renew its lease.
BEAT, PATIENCE = 2.0, 8.0
"""Seconds between renewals of a lease, and seconds without renewal until its process counts as dead."""


_held: set[str] = set()
"""Tokens of the leases that this process holds."""


class Lease:
    """A lease of one process.

    Args:
        store: the store.
        key: key of the object.
    """

    def __init__(self, store: Store, key: str):
        self._store, self._key = store, key
        self._said = {"token": uuid.uuid4().hex, **_process(os.getpid()), "beat": 0}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, *, waits: bool = True) -> bool:
        """Take the lease unless a living process has it; with `waits`, watch until its state is clear. Return success.

        Raises:
            CheckpointError: the store does not answer.
        """
        seen, since = b"", time.monotonic()
        while True:
            if self._store.put_if_absent(self._key, self._data()):
                _held.add(str(self._said["token"]))
                self._thread = threading.Thread(target=self._beat, daemon=True)
                self._thread.start()
                return True
            lease_data = self._store.get(self._key)
            if lease_data is None:
                continue
            # Its beat went on while we looked: the process lives, on whichever machine.
            if seen and lease_data != seen:
                return False
            seen, lives = lease_data, _lives(lease_data)
            is_silent = time.monotonic() - since > PATIENCE
            if lives is False or (lives is None and is_silent):
                # Another process may do the same: `put_if_absent` in the next round decides who is first.
                self._store.delete([self._key])
            elif is_silent or not waits:  # one of this machine lives, however long it is kept from saying so
                return False
            else:
                time.sleep(0.2)

    def is_held(self) -> bool:
        """Whether this process still has the lease, according to the store."""
        lease_data = self._store.get(self._key)
        return lease_data is not None and _token(lease_data) == self._said["token"]

    def _data(self) -> bytes:
        return json.dumps(self._said).encode()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            self._said["beat"] = int(str(self._said["beat"])) + 1
            with contextlib.suppress(CheckpointError):  # the owner notices when it matters
                self._store.put(self._key, self._data())

    def leave(self) -> None:
        """Release the lease."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            _held.discard(str(self._said["token"]))
            with contextlib.suppress(CheckpointError):
                if self.is_held():
                    self._store.delete([self._key])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()


def _token(data: bytes) -> str:
    try:
        return str(json.loads(data)["token"])
    except (ValueError, KeyError, TypeError):
        return ""


def _process(number: int) -> dict[str, str | int]:
    """Return the identity of a process: host, boot, process id, start time and pid namespace."""
    identity: dict[str, str | int] = {"host": socket.gethostname(), "pid": number, "boot": "", "born": "", "space": ""}
    with contextlib.suppress(OSError, IndexError):
        identity["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        identity["space"] = str(Path("/proc/self/ns/pid").readlink())
        # Field 22, the start time in ticks, since process ids are used again; counted behind the last parenthesis, as
        # the name of a command may have spaces.
        identity["born"] = Path(f"/proc/{number}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    return identity


def is_dead(data: bytes) -> bool:
    """Return whether a lease surely belongs to a dead process of this machine."""
    return _lives(data) is False


def _lives(data: bytes) -> bool | None:
    """Return whether a lease's process is alive; None for another machine's, which only renewals show."""
    try:
        lease: JsonObject = json.loads(data)
        own = _process(int(lease["pid"]))
    except (ValueError, KeyError, TypeError):
        return False
    if any(lease.get(name) != own[name] or not own[name] for name in ("host", "boot", "space")):
        return None
    if lease["pid"] == os.getpid():
        return str(lease.get("token")) in _held
    return bool(own["born"] == lease.get("born"))
