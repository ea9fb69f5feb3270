"""The pytest plugin: the fixture `parity`, its marker, its options, and what a failing comparison prints.

It is loaded in every pytest run of whoever has this package installed. So it imports nothing but pytest and one number
before a test asks for the fixture, and leaves alone the tests that don't. A setting is looked for in the call, the
marker, the command line and the ini file, in this order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import itertools
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .compare.samples.limits import MAX_SEEDS

if TYPE_CHECKING:
    from .compare.results.report import ParityError, Report

Device = str | tuple[str, str]
"""``cpu``, ``gpu`` or ``tpu``, or one of them for torch and one for Flax."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "gpu", "tpu")
MODES = ("eager", "jit")
AXES = {"variants": "variant", "dtypes": "dtype", "devices": "device", "modes": "mode"}
"""What a test is parametrised by -> the name of one value, in the order of the id."""

WHOLE = {"seeds": 1, "first_seed": 0}
"""Whole numbers -> the least."""

MAX = {"seeds": MAX_SEEDS}
"""Whole numbers -> the largest."""

PASSED_ON = ("rules", "transfer", "train", "strict", "localise", "second_inputs", "fixed", "vary", "allow")
"""What else a marker may say to `compare`."""

CELL = "_parity_cell"
"""The fixture that holds the combination a test runs in; where a project has its own `parity`, no test asks for it."""

PACKAGES = {"torch": "torch", "jax": "jax", "flax": "jax"}
"""What a comparison imports -> the extra that installs it."""

WORST_FIRST = ("different", "precision", "inconclusive", "equal")


# ---- settings


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and their ini settings."""
    group = parser.getgroup("parity", "parity of torch and Flax modules (attn-bridge)")
    group.addoption("--parity-seeds", metavar="N", help="how many times each comparison draws numbers")
    group.addoption("--parity-first-seed", metavar="N", help="the first seed of each comparison")
    several = {"action": "append", "default": []}
    group.addoption(
        "--parity-device",
        metavar="KIND",
        **several,
        help="cpu, gpu or tpu, or two of them for torch and Flax, such as cpu,tpu (may be repeated)",
    )
    group.addoption("--parity-dtype", metavar="DTYPE", **several, help=f"one of {', '.join(DTYPES)} (may be repeated)")
    group.addoption("--parity-mode", metavar="MODE", **several, help=f"one of {', '.join(MODES)} (may be repeated)")
    group.addoption(
        "--parity-allow",
        metavar="PATH=REASON",
        **several,
        help="accept a known difference in this submodule or tensor (may be repeated); every report says so",
    )
    group.addoption(
        "--parity-baseline",
        metavar="DIR",
        help="say what has changed since the JSON reports that --parity-json wrote into DIR",
    )
    group.addoption("--parity-html", metavar="DIR", help="write a page per failing comparison into DIR")
    group.addoption("--parity-json", metavar="DIR", help="write a JSON report per failing comparison into DIR")
    parser.addini("parity_seeds", "as --parity-seeds")
    parser.addini("parity_devices", "as --parity-device, separated by spaces", type="args")
    parser.addini("parity_dtypes", "as --parity-dtype, separated by spaces", type="args")
    parser.addini("parity_modes", "as --parity-mode, separated by spaces", type="args")
    parser.addini("parity_allow", "as --parity-allow, one per line", type="linelist")
    parser.addini("parity_html", "as --parity-html, relative to the root folder")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line and the ini file say.

    Attributes:
        values: checked values by the name that the marker gives them.
        html: folder for pages, None for no pages.
        json: folder for JSON reports, None for none.
        baseline: folder of JSON reports of an earlier run, None for none.
        arguments: the command line's share of it, for the command that runs a test again.
    """

    values: Mapping[str, Any]
    html: Path | None
    json: Path | None
    arguments: tuple[str, ...]
    baseline: Path | None = None

    @classmethod
    def of(cls, config: pytest.Config) -> Settings:
        """Read and check them.

        Raises:
            ValueError: one that cannot be used.
        """
        values: dict[str, Any] = {}
        arguments: list[str] = []
        for name in ("seeds", "first_seed", "devices", "dtypes", "modes", "allow"):
            option = f"--parity-{AXES.get(name, name).replace('_', '-')}"
            given = config.getoption(option)
            if given not in (None, []):
                values[name] = _checked(name, given, label=option)
                arguments += itertools.chain(*((option, one) for one in ([given] if isinstance(given, str) else given)))
            elif name != "first_seed" and config.getini(f"parity_{name}"):
                values[name] = _checked(name, config.getini(f"parity_{name}"), label=f"parity_{name}")
        here = config.invocation_params.dir
        html = _folder("--parity-html", config.getoption("--parity-html"), here)
        html = html or _folder("parity_html", config.getini("parity_html"), config.rootpath)
        json = _folder("--parity-json", config.getoption("--parity-json"), here)
        baseline = _folder("--parity-baseline", config.getoption("--parity-baseline"), here)
        return cls(values, html, json, tuple(arguments), baseline)


def _checked(name: str, value: Any, label: str) -> Any:
    """Return a setting's value in the form that is used, or raise a ValueError that says what it must be."""
    if name in WHOLE:
        if not re.fullmatch("[0-9]+", str(value)) or int(value) < WHOLE[name]:
            raise ValueError(f"{label} ({value}) must be a whole number from {WHOLE[name]}")
        if int(value) > MAX.get(name, int(value)):
            raise ValueError(f"{label} ({value}) must be at most {MAX[name]}")
        return int(value)
    if name == "allow":
        from .compare.results.allowances import checked

        try:
            return checked(value, label)
        except TypeError as error:
            raise ValueError(str(error)) from None
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not values:
        raise ValueError(f"{label} () must have at least one value")
    if name == "devices":
        return tuple(_device(one, label) for one in values)
    allowed = {"dtypes": DTYPES, "modes": MODES}.get(name)
    for one in values:
        if allowed is not None and one not in allowed:
            raise ValueError(f"{label} ({one}) must be one of {', '.join(allowed)}")
        if not isinstance(one, str):
            raise ValueError(f"{label} ({one!r}) must be a string")
    return values


def _device(value: Any, label: str) -> Device:
    match tuple(value) if isinstance(value, (tuple, list)) else tuple(str(value).split(",")):
        case (kind,) if kind in DEVICES:
            return str(kind)
        case (torch, flax) if torch in DEVICES and flax in DEVICES:
            return torch, flax
        case kinds:
            shown = ",".join(map(str, kinds))
            known = ", ".join(DEVICES)
            raise ValueError(f"{label} ({shown}) must be one of {known}, or two for torch and Flax, such as cpu,tpu")


def _folder(label: str, value: str | None, base: Path) -> Path | None:
    if not value:
        return None
    path = base / value
    if path.exists() and not path.is_dir():
        raise ValueError(f"{label} ({value}) must be a folder")
    return path


def _read_markers(node: Any) -> dict[str, Any]:
    """Return what the markers of a test say; the nearest one decides."""
    found: dict[str, Any] = {}
    for marker in node.iter_markers("parity"):
        if marker.args:
            raise ValueError(f"the marker parity takes keywords only, got {marker.args[0]!r}")
        said: dict[str, Any] = {}
        for name, value in marker.kwargs.items():
            several = next((plural for plural, one in AXES.items() if one == name), None)
            if name not in {*AXES, *WHOLE, *PASSED_ON} and several is None:
                known = ", ".join((*AXES, *WHOLE, *PASSED_ON))
                raise ValueError(f"the marker parity has no {name}; it takes {known}")
            if value is None:
                continue
            label = f"{name} of the marker parity"
            if name == "allow":
                said[name] = _checked(name, value, label)
            elif name in PASSED_ON:
                said[name] = value
            elif several is not None:
                said[several] = _checked(several, (value,), label)
            else:
                said[name] = _checked(name, value, label)
        found = said | found
    return found


_SETTINGS = pytest.StashKey[Settings]()


def pytest_configure(config: pytest.Config) -> None:
    """Check the settings before any test runs."""
    config.addinivalue_line(
        "markers",
        "parity(variants, dtypes, devices, modes, seeds, first_seed): what the fixture parity compares; the test runs "
        "once per combination, with an id such as attention-float32-cpu-eager",
    )
    try:
        config.stash[_SETTINGS] = Settings.of(config)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(_Summary(config), "attn_bridge_summary")


# ---- parametrisation


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination that a test runs in; None is what nothing was said about."""

    variant: str | None = None
    dtype: str | None = None
    device: Device | None = None
    mode: str | None = None

    def __str__(self) -> str:
        parts = (part for part in dataclasses.astuple(self) if part is not None)
        return "-".join(part if isinstance(part, str) else ",".join(part) for part in parts)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the tests that use the fixture by what was said about it, if anything."""
    if CELL not in metafunc.fixturenames:
        return
    try:
        said = {**metafunc.config.stash[_SETTINGS].values, **_read_markers(metafunc.definition)}
    except ValueError as error:
        raise pytest.fail.Exception(f"{metafunc.definition.name}: {error}", pytrace=False) from None
    axes = {one: said[plural] for plural, one in AXES.items() if plural in said}
    if axes:
        cells = [Cell(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
        metafunc.parametrize(CELL, cells, indirect=True, ids=map(str, cells))


@pytest.fixture
def _parity_cell(request: pytest.FixtureRequest) -> Cell:
    cell: Cell = getattr(request, "param", Cell())
    return cell


# ---- the fixture


class Parity:
    """Compares any two sides: ``parity(first, second, inputs)``.

    Attributes:
        variant: name of the variant that the test runs in; like all of these, None if nothing was said about it.
        dtype: the precision.
        device: the kind of device; a pair for one of torch and one of Flax.
        mode: ``eager`` or ``jit``.
        seeds: how many times numbers are drawn.
        first_seed: the first seed.
    """

    def __init__(self, node: Any, cell: Cell):
        settings = node.config.stash[_SETTINGS]
        said = {**settings.values, **_read_markers(node)}
        self.variant, self.dtype, self.device, self.mode = cell.variant, cell.dtype, cell.device, cell.mode
        self.seeds: int | None = said.get("seeds")
        self.first_seed: int | None = said.get("first_seed")
        self._node, self._settings, self._calls = node, settings, 0
        self._options = {name: said[name] for name in (*WHOLE, *PASSED_ON) if name in said}
        self._options |= {} if cell.dtype is None else {"dtypes": (cell.dtype,)}
        self._options |= {} if cell.device is None else {"device": cell.device}
        self._options |= {} if cell.mode is None else {"modes": (cell.mode,)}
        file = Path(os.path.relpath(node.path, node.config.invocation_params.dir)).as_posix()
        _, mark, name = node.nodeid.partition("::")
        self._options["command"] = shlex.join(["pytest", f"{file}{mark}{name}", *settings.arguments])

    def __call__(self, first: Any, second: Any, inputs: Any, **options: Any) -> Report:
        """Return the report of `attn_bridge.parity.compare`, which takes the same arguments.

        Raises:
            ParityError: (an AssertionError) the verdict is not ``equal``; the message says what differs, and where.
        """
        __tracebackhide__ = True
        from . import ParityError, compare

        chosen = self._options | options
        _skip_if_absent(chosen.get("device"))
        report: Report = compare(first, second, inputs, **chosen)
        self._calls += 1
        self._record(report)
        if not report.passed:
            raise ParityError(report)
        return report

    def _changes(self, report: Report) -> list[str]:
        """Say what is other than in the report of the same comparison in an earlier run, if there is one."""
        folder = self._settings.baseline
        path = folder and folder / f"{_file_name(self._node.nodeid, self._calls)}.json"
        if path is None:
            return []
        return report.changes_since(path).lines() if path.exists() else ["since the baseline: it was equal, or not run"]

    def _record(self, report: Report) -> None:
        """Write down what came out: for the summary, for JUnit, and, on a mismatch, for whoever reads about it."""
        node = self._node
        node.stash.setdefault(_VERDICTS, []).append(report.verdict)
        node.user_properties.append(("parity_verdict", report.verdict))
        if report.first_divergence is not None:
            node.user_properties.append(("parity_first_divergence", str(report.first_divergence)))
        if report.passed:
            return
        lines = [f"note: {note}" for note in report.notes] + self._changes(report)
        for kind, folder, write in (
            ("html", self._settings.html, report.to_html),
            ("json", self._settings.json, report.to_json),
        ):
            if folder is not None:
                path = folder / f"{_file_name(node.nodeid, self._calls)}.{kind}"
                folder.mkdir(parents=True, exist_ok=True)
                write(path)
                lines.append(f"{kind}: {_shown(path, node.config.invocation_params.dir)}")
        if report.environment:
            lines.append(", ".join(f"{name} {value}" for name, value in report.environment.items()))
        if lines:
            node.add_report_section("call", "parity", "\n".join(lines))


@pytest.fixture
def parity(request: pytest.FixtureRequest, _parity_cell: Cell) -> Parity:
    """Compare any two sides, such as a torch and a Flax module: ``parity(first, second, inputs)``."""
    missing = [package for package in PACKAGES if not _is_installed(package)]
    if missing:
        extras = ",".join(dict.fromkeys(PACKAGES[package] for package in missing))
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'attn-bridge[{extras}]'")
    _skip_if_absent(_parity_cell.device)
    return Parity(request.node, _parity_cell)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # made unimportable
        return False


def _skip_if_absent(device: Device | None) -> None:
    """Skip the test if this machine lacks a device that it names."""
    __tracebackhide__ = True
    if device is None:
        return
    kinds = (device, device) if isinstance(device, str) else device
    for framework, kind in zip(("torch", "flax"), kinds, strict=True):
        reason = _why_absent(framework, kind)
        if reason:
            pytest.skip(f"no {kind}: {reason}")


def _why_absent(framework: str, kind: str) -> str:
    """Return why a framework cannot compute on a kind of device here, "" if it can."""
    if framework == "torch":
        if kind == "gpu" and not importlib.import_module("torch").cuda.is_available():
            return "torch.cuda.is_available() is False"
        return "torch has none; name a pair for torch and Flax, such as cpu,tpu" if kind == "tpu" else ""
    try:
        importlib.import_module("jax").devices(kind)
    except RuntimeError as error:
        return f"jax says: {' '.join(str(error).split())}"
    return ""


def _file_name(nodeid: str, call: int) -> str:
    """Return a name that any file system takes; the digest keeps apart what else would read the same."""
    readable = re.sub("[^A-Za-z0-9._]+", "-", nodeid)[-100:].strip("-.")
    digest = hashlib.sha256(nodeid.encode()).hexdigest()[:8]
    return f"{readable}-{digest}" if call == 1 else f"{readable}-{digest}-{call}"


def _shown(path: Path, base: Path) -> str:
    """Return a path as its reader would write it: relative to `base` if it lies below it."""
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()


# ---- what is printed at the end


_VERDICTS = pytest.StashKey[list[str]]()

REPORT_ATTRIBUTE = "attn_bridge_parity"
"""Where a test's report carries verdicts and the annotation, also from an xdist worker to the process that prints."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Hand the verdicts of a test over to its report."""
    outcome: Any = yield
    if _VERDICTS not in item.stash:
        return
    report = outcome.get_result()
    verdicts = item.stash[_VERDICTS]
    handed: dict[str, Any] = {"verdicts": list(verdicts)}
    verdicts.clear()
    error = _mismatch(call)
    if error is not None and call.excinfo is not None:
        own = Path(__file__).parent
        visible = [entry for entry in call.excinfo.traceback if not Path(entry.path).is_relative_to(own)]
        base = Path(os.environ.get("GITHUB_WORKSPACE") or item.config.rootpath)
        if visible:
            handed["file"], handed["line"] = _shown(Path(visible[-1].path), base), visible[-1].lineno + 1
        handed["title"] = f"parity: {error.report.verdict} in {item.name}"
        handed["message"] = str(error)
    setattr(report, REPORT_ATTRIBUTE, handed)


def _mismatch(call: pytest.CallInfo[None]) -> ParityError | None:
    from . import ParityError

    error = None if call.excinfo is None else call.excinfo.value
    return error if isinstance(error, ParityError) else None


class _Summary:
    """Collects what the reports of all tests carry and prints it at the end."""

    def __init__(self, config: pytest.Config):
        self.verdicts: Counter[str] = Counter()
        self.annotations: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take over what a report carries; in an xdist run, it comes from a worker."""
        handed = getattr(report, REPORT_ATTRIBUTE, None)
        if handed is None:
            return
        self.verdicts.update(handed["verdicts"])
        if report.failed and "message" in handed:
            self.annotations.append(_annotation(handed))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print one line on all comparisons and, on GitHub, an annotation per failed test."""
        if self.verdicts:
            total = self.verdicts.total()
            counts = [f"{self.verdicts[verdict]} {verdict}" for verdict in WORST_FIRST if self.verdicts[verdict]]
            terminalreporter.write_line(", ".join([f"parity: {total} comparison{'s' if total > 1 else ''}", *counts]))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for annotation in self.annotations:
                terminalreporter.write_line(annotation)


def _annotation(handed: Mapping[str, Any]) -> str:
    """Return GitHub's workflow command that shows an error beside the line of the comparison."""
    places = {name: str(handed[name]) for name in ("file", "line", "title") if name in handed}
    escapes = {":": "%3A", ",": "%2C"}
    properties = ",".join(f"{name}={_escape(value, escapes)}" for name, value in places.items())
    return f"::error {properties}::{_escape(handed['message'], {})}"


def _escape(text: str, more: Mapping[str, str]) -> str:
    escapes = {"%": "%25", "\r": "%0D", "\n": "%0A", **more}
    return "".join(escapes.get(character, character) for character in text)
