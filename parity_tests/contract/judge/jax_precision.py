"""The adapter of JAX's precision switches: unsafe values of each, and how to see what is in force."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

from attn_parity.frameworks.jax import precision
from attn_parity.settings import precision as joint

LABEL = "jax"
UNSAFE = {
    "default_matmul_precision": "bfloat16",
    "threefry_partitionable": False,
    "default_prng_impl": "rbg",
    "random_seed_offset": 7,
}
"""Setting that `strict` holds -> a value under which numbers differ."""

SWITCHES = {switch.name: switch for switch in precision.SWITCHES}
ON_CPU = set(UNSAFE) - {"default_matmul_precision"}
"""Those that are unsafe on a CPU too."""

LACKING = precision._config("no_such_thing", "meaning", True)
"""A setting that this version does not have."""


def values() -> dict[str, Any]:
    """Return every value in force, for this thread and for others."""
    here = {name: switch.read() for name, switch in SWITCHES.items()}
    others = {}
    thread = threading.Thread(target=lambda: others.update({f"other {name}": SWITCHES[name].read() for name in here}))
    thread.start()
    thread.join()
    return here | others


def row_of(name: str) -> joint.SettingRow:
    """Return a setting as it is now."""
    (row,) = (row for row in joint.rows_of("jax", precision) if row.name == name)
    return row


def assert_safe() -> None:
    """Check that every setting that `strict` holds is safe, in this thread and in others."""
    found = values()
    for name, switch in SWITCHES.items():
        if switch.hold:
            assert found[name] == found[f"other {name}"] == switch.safe


def states(name: str) -> set[str]:
    """Return what an unsafe value of a setting may be called on this machine."""
    return {"unsafe" if name in ON_CPU or precision.kinds() != {"cpu"} else "no effect here"}


@contextlib.contextmanager
def set_unsafe(name: str) -> Iterator[None]:
    """Hold a context in which a setting has its unsafe value for all threads, as a user sets it."""
    former = getattr(jax.config, f"jax_{name}")
    jax.config.update(f"jax_{name}", UNSAFE[name])
    try:
        yield
    finally:
        jax.config.update(f"jax_{name}", former)
