"""The judge on the gallery: right pairs are equal, faults are seen, and named where they are.

Entries of other packages run where these are importable.
"""

from __future__ import annotations

import pytest

from fault_lab.gallery import Finding, GalleryTrial, judge_entry

from .gallery import Entry, entries, outside

for framework in ("torch", "flax"):
    pytest.importorskip(framework, exc_type=ImportError)

HERE, OUTSIDE = entries(), outside()

RIGHT = [pytest.param(entry, id=entry.name) for entry in (*HERE.values(), *OUTSIDE.values())]
WRONG = [
    pytest.param(entry, fault, id=f"{entry.name}:{fault}")
    for entry in (*HERE.values(), *OUTSIDE.values())
    for fault in entry.faults
]


def judged(entry: Entry, name: str) -> Finding:
    """Judge an entry, right or with a fault; skip where a package that it needs is not installed."""
    if not entry.is_available:
        pytest.skip(f"{', '.join(entry.needs)} is not installed")
    return judge_entry(entry, GalleryTrial("", entry.name, name))


@pytest.mark.parametrize("entry", RIGHT)
def test_a_right_pair_is_equal(entry: Entry) -> None:
    """No right pair is objected to."""
    found = judged(entry, "")
    assert found.verdict == "equal", found.explanation


@pytest.mark.parametrize(("entry", "name"), WRONG)
def test_a_fault_is_seen_and_placed(entry: Entry, name: str) -> None:
    """Every fault is seen, and named where it is."""
    found = judged(entry, name)
    assert found.seen, found.explanation
    assert found.placed, f"{found.place}; {entry.faults[name].places}"


def test_the_gallery_is_as_large_as_promised() -> None:
    """Forty pairs, two faults each, and a name that is none is refused."""
    assert len(HERE) >= 40
    assert all(len(entry.faults) >= 2 for entry in HERE.values())
    with pytest.raises(ValueError, match="has no fault 'nothing'"):
        HERE["t5"].build("nothing")
