"""Galleries: pairs with known verdicts, judged right and with each of their faults.

A gallery is a Python module or file with ``entries``: a mapping of name -> `Entry`, or a function that returns one. It
is imported only on request, and an entry builds its sides when they are judged::

    from fault_lab.gallery import Case, Entry, fault, inside

    def build(wrong):  # None, or the name of a fault
        return Case(first, second, inputs, {"rules": rules})

    entries = {"my-block": Entry("my-block", build, {"eps": fault("norm"), "gelu": fault(*inside("", "fc1", "fc2"))})}
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import rich.box
import rich.markup
import rich.table

from attn_parity import factories

ATTRIBUTE = "entries"
"""Default name of the entries of a gallery."""

PREFIX = "gallery"
"""Prefix of the names of gallery cases."""

MOST_CANDIDATES = 2
"""Number of places that were not excluded among which the right one still counts; a reader looks at two."""

Place = str | tuple[str, ...]
"""A module path of the first side (``*`` matches anything), or the modules around the wrong code."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One realistic error of a port.

    Attributes:
        places: the accepted locations; a path, or the modules around the wrong code.
        effect: ``meaning`` (shows in float64), or ``precision`` (shows in the working precision only).
        side: the side that has it.
        direction: ``backward`` if the forward pass does not show it.
    """

    places: tuple[Place, ...]
    effect: Literal["meaning", "precision"] = "meaning"
    side: Literal["first", "second"] = "second"
    direction: Literal["forward", "backward"] = "forward"

    @property
    def verdicts(self) -> tuple[str, ...]:
        """The verdicts that name this fault rightly."""
        return ("different",) if self.effect == "meaning" else ("precision", "different")

    def is_placed_by(self, divergence: Any) -> bool:
        """Return whether a report's first divergence names the location, or leaves it among a few candidates."""
        if divergence is None:
            return False
        return any(self._is_at(place) for place in [divergence, *divergence.candidates][: 1 + MOST_CANDIDATES])

    def _is_at(self, named: Any) -> bool:
        """Return whether a named place is the module, or modules around the code."""
        paths = [place for place in self.places if isinstance(place, str)]
        around = [place for place in self.places if isinstance(place, tuple)]
        if named.between and around:
            return any(
                all(any(fnmatch.fnmatchcase(end, one) for one in place) for end in named.between) for place in around
            )
        return any(fnmatch.fnmatchcase(named.path or "", path) for path in paths)


def fault(*places: Place, **how: Any) -> Fault:
    """Return a `Fault` at these places."""
    return Fault(places, **how)


def inside(path: str, *children: str) -> tuple[Place, ...]:
    """Return the locations of wrong code in a module's own forward pass: the module, or between these children.

    The path of the module also represents its start and its end, before and after all of them.
    """
    return path, (path, *(f"{path}.{child}".lstrip(".") for child in children))


class Case(NamedTuple):
    """The arguments of a ``compare`` call."""

    first: Any
    second: Any
    inputs: Any
    options: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A pair of a gallery.

    Attributes:
        name: its name, as the table shows it.
        build: builds the pair; with the name of a fault, with that fault; None is right.
        faults: name -> fault that it can be built with.
        tags: the features that it covers.
        needs: packages that it imports besides the frameworks; it is left out if one is not installed.
    """

    name: str
    build: Callable[[str | None], Case]
    faults: Mapping[str, Fault]
    tags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def is_available(self) -> bool:
        """Whether all that it needs is installed."""
        return all(importlib.util.find_spec(package) is not None for package in self.needs)


@dataclasses.dataclass(frozen=True)
class GalleryTrial:
    """One comparison: an entry of a gallery, right ("") or with a fault."""

    gallery: str
    entry: str
    fault: str = ""

    def __str__(self) -> str:
        return ":".join(filter(None, (PREFIX, self.entry, self.fault)))


@dataclasses.dataclass(frozen=True)
class Finding:
    """The judge's result on an entry.

    Attributes:
        trial: the entry and the fault.
        verdict: the judge's verdict; ``refused`` if it gave a reason for not comparing them, ``crashed`` if it failed.
        place: the reported location of the divergence.
        message: its reason in one line.
        explanation: its reasons in full.
        seen: whether the verdict is right: a right pair is ``equal``, a fault is not.
        placed: whether the location is right, too.
        seconds: its duration.
    """

    trial: GalleryTrial
    verdict: str
    place: str
    message: str
    explanation: str
    seen: bool
    placed: bool
    seconds: float

    @property
    def right(self) -> str:
        """``yes``, ``place`` for a fault that is seen and located wrongly, ``NO`` for a wrong verdict."""
        return "yes" if self.seen and self.placed else "place" if self.seen else "NO"

    @property
    def is_wrong(self) -> bool:
        """Whether it counts against the judge; a place that is named wrongly does not."""
        return not self.seen

    @property
    def command(self) -> str:
        """The command that runs it again."""
        return f"attn-bridge mutate --gallery {self.trial.gallery} --case {self.trial}"

    def __str__(self) -> str:
        what = "missed" if self.trial.fault else "false alarm"
        line = f"{'right' if self.seen else what}: {self.trial}: {self.verdict}"
        return f"{line}: {self.message}" if self.message else line

    def row(self) -> list[str]:
        """Return its line of the table."""
        verdict = self.verdict if self.verdict not in ("refused", "crashed") else f"{self.verdict}: {self.message}"
        named = [self.trial.entry, self.trial.fault, verdict[:160], self.place]
        return [*named, self.right, f"{self.seconds:.1f}"]

    def to_json(self) -> dict[str, object]:
        """Return it as JSON-ready data."""
        return {
            "case": str(self.trial),
            "gallery": self.trial.gallery,
            "entry": self.trial.entry,
            "fault": self.trial.fault,
            "verdict": self.verdict,
            "place": self.place,
            "message": self.message,
            "seen": self.seen,
            "placed": self.placed,
            "command": self.command,
            "seconds": round(self.seconds, 3),
        }


HEADINGS = ("entry", "fault", "verdict", "place", "right", "seconds")


def load_entries(gallery: str) -> dict[str, Entry]:
    """Return the entries of a gallery that can run on this machine.

    Args:
        gallery: ``file.py`` or ``module``, with ``:name`` if its entries are not called ``entries``.

    Raises:
        ValueError: the gallery does not exist, importing it raises, or it has no valid entries.
    """
    return {name: one for name, one in _all_entries(gallery).items() if one.is_available}


def _all_entries(gallery: str) -> dict[str, Entry]:
    where, colon, attribute = gallery.rpartition(":")
    name = gallery if colon and attribute.isidentifier() and where else f"{gallery}:{ATTRIBUTE}"
    entries = factories.load(name, "gallery").target
    if callable(entries):
        with factories.guarded(name):
            entries = entries()
    is_mapping = isinstance(entries, Mapping) and entries
    if not is_mapping or not all(isinstance(one, Entry) and key == one.name for key, one in entries.items()):
        raise ValueError(f"{name} must give entries, name -> fault_lab.gallery.Entry of that name")
    return dict(entries)


def plan_gallery(gallery: str) -> list[GalleryTrial]:
    """Return the trials of a gallery: each entry right, then with each of its faults.

    Raises:
        ValueError: see `load_entries`.
    """
    entries = load_entries(gallery)
    return [GalleryTrial(gallery, name, wrong) for name, one in entries.items() for wrong in ("", *one.faults)]


def find_gallery_trial(case: str, galleries: Iterable[str]) -> GalleryTrial:
    """Return the trial that a report calls by this name: ``gallery:ENTRY`` or ``gallery:ENTRY:FAULT``.

    Raises:
        ValueError: none of the galleries has it.
    """
    trials = [trial for gallery in galleries for trial in plan_gallery(gallery)]
    if not trials:
        raise ValueError(f"case ({case}) is of a gallery: name it with --gallery")
    for trial in trials:
        if str(trial) == case:
            return trial
    raise ValueError(f"case ({case}) must be one of {', '.join(map(str, trials))}")


def judge_trial(trial: GalleryTrial) -> Finding:
    """Build an entry and judge it; an exception becomes the verdict."""
    return judge_entry(load_entries(trial.gallery)[trial.entry], trial)


def judge_entry(entry: Entry, trial: GalleryTrial) -> Finding:
    """Judge an entry as a trial of it asks for."""
    from attn_parity.compare.driver import compare

    started = time.perf_counter()
    wrong = entry.faults[trial.fault] if trial.fault else None
    report, verdict, message = None, "", ""
    try:
        with factories.seeded(0), factories.guarded(str(trial)):
            case = entry.build(trial.fault or None)
        report = compare(case.first, case.second, case.inputs, **case.options)
    except (ValueError, TypeError) as error:  # the judge refuses to compare them, and says why
        verdict, message = "refused", factories.text_of(error)
    except Exception as error:  # a fault may make a module raise anything; the run goes on and reports it
        verdict, message = "crashed", f"{type(error).__name__}: {factories.text_of(error)}"
    divergence = None
    if report is not None:
        verdict, divergence = report.verdict, report.first_divergence
        message = report.message or (str(report.failures[0]) if report.failures else "")
    return Finding(
        trial,
        verdict,
        place_of(divergence),
        message,
        report.explain() if report is not None else message,
        seen=verdict in wrong.verdicts if wrong else verdict == "equal",
        placed=wrong.is_placed_by(divergence) if wrong else True,
        seconds=time.perf_counter() - started,
    )


def place_of(divergence: Any) -> str:
    """Name a divergence in one line; "" for None."""
    if divergence is None:
        return ""
    between = getattr(divergence, "between", None)
    where = f"between {between[0]} and {between[1]}" if between else divergence.path or "(whole)"
    return f"{where}, {divergence.direction}"


def summarised(findings: Sequence[Finding]) -> str:
    """Count the findings in a sentence."""
    right, wrong = ([one for one in findings if bool(one.trial.fault) == planted] for planted in (False, True))
    seen, placed = sum(one.seen for one in wrong), sum(one.right == "yes" for one in wrong)
    share = f" ({placed / len(wrong):.0%} of all)" if wrong else ""
    return (
        f"{sum(one.seen for one in right)} of {len(right)} right entries equal, "
        f"{seen} of {len(wrong)} faults seen, {placed} placed rightly{share}"
    )


def table_of(findings: Sequence[Finding]) -> rich.table.Table:
    """Return one row per finding."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading == "seconds" else "left")
    for finding in findings:
        *cells, right, seconds = map(rich.markup.escape, finding.row())
        color = {"yes": "green", "place": "yellow", "NO": "red"}[right]
        table.add_row(*cells, f"[{color}]{right}[/]", seconds)
    return table
