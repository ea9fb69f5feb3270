"""The settings of the plugin: read from marker, command line and ini file, and checked."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ..samples.limits import MAX_SEEDS

Device = str | tuple[str, str]
"""``cpu``, ``gpu`` or ``tpu``, or one of them for torch and one for Flax."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "gpu", "tpu")
MODES = ("eager", "jit")
AXES = {"variants": "variant", "dtypes": "dtype", "devices": "device", "modes": "mode"}
"""Setting that parametrises a test -> the name of one value, in the order of the id."""

WHOLE = {"seeds": 1, "first_seed": 0}
"""Whole numbers -> the least."""

MAX = {"seeds": MAX_SEEDS}
"""Whole numbers -> the largest."""

PASSED_ON = (
    "rules",
    "transfer",
    "train",
    "strict",
    "localise",
    "second_inputs",
    "fixed",
    "vary",
    "output",
    "allow",
    "reference",
)
"""Other arguments of `compare` that a marker may set."""


def add_options(parser: pytest.Parser) -> None:
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
    group.addoption("--parity-manifest", action="store_true", help="run the pairs of parity.toml as tests, too")
    parser.addini("parity_manifest", "as --parity-manifest: true", type="bool", default=False)
    parser.addini("parity_seeds", "as --parity-seeds")
    parser.addini("parity_devices", "as --parity-device, separated by spaces", type="args")
    parser.addini("parity_dtypes", "as --parity-dtype, separated by spaces", type="args")
    parser.addini("parity_modes", "as --parity-mode, separated by spaces", type="args")
    parser.addini("parity_allow", "as --parity-allow, one per line", type="linelist")
    parser.addini("parity_html", "as --parity-html, relative to the root folder")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings from the command line and the ini file.

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
            option_value = config.getoption(option)
            if option_value not in (None, []):
                values[name] = _checked(name, option_value, label=option)
                arguments += itertools.chain(
                    *((option, one) for one in ([option_value] if isinstance(option_value, str) else option_value))
                )
            elif name != "first_seed" and config.getini(f"parity_{name}"):
                values[name] = _checked(name, config.getini(f"parity_{name}"), label=f"parity_{name}")
        folder = config.invocation_params.dir
        html = _folder("--parity-html", config.getoption("--parity-html"), folder)
        html = html or _folder("parity_html", config.getini("parity_html"), config.rootpath)
        json = _folder("--parity-json", config.getoption("--parity-json"), folder)
        baseline = _folder("--parity-baseline", config.getoption("--parity-baseline"), folder)
        return cls(values, html, json, tuple(arguments), baseline)


SETTINGS = pytest.StashKey[Settings]()
"""Where a run keeps its settings."""


def _checked(name: str, value: Any, label: str) -> object:
    """Return a setting's value in normal form.

    Raises:
        ValueError: the value is invalid; names the valid ones.
    """
    if name in WHOLE:
        if not re.fullmatch("[0-9]+", str(value)) or int(value) < WHOLE[name]:
            raise ValueError(f"{label} ({value}) must be a whole number from {WHOLE[name]}")
        if int(value) > MAX.get(name, int(value)):
            raise ValueError(f"{label} ({value}) must be at most {MAX[name]}")
        return int(value)
    if name == "allow":
        from ..results.allowances import checked

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
    for element in values:
        if allowed is not None and element not in allowed:
            raise ValueError(f"{label} ({element}) must be one of {', '.join(allowed)}")
        if not isinstance(element, str):
            raise ValueError(f"{label} ({element!r}) must be a string")
    return values


def _device(value: object, label: str) -> Device:
    kinds = tuple(value) if isinstance(value, (tuple, list)) else tuple(str(value).split(","))
    match tuple("gpu" if kind == "cuda" else kind for kind in kinds):
        case (kind,) if kind in DEVICES:
            return str(kind)
        case (torch, flax) if torch in DEVICES and flax in DEVICES:
            return torch, flax
        case _:
            listing = ",".join(map(str, kinds))
            devices = ", ".join(DEVICES)
            raise ValueError(
                f"{label} ({listing}) must be one of {devices}, or two for torch and Flax, such as cpu,tpu"
            )


def _folder(label: str, value: str | None, base: Path) -> Path | None:
    if not value:
        return None
    path = base / value
    if path.exists() and not path.is_dir():
        raise ValueError(f"{label} ({value}) must be a folder")
    return path


def read_markers(node: pytest.Item) -> dict[str, object]:
    """Return the settings from the markers of a test; the nearest marker wins."""
    settings: dict[str, object] = {}
    for marker in node.iter_markers("parity"):
        if marker.args:
            raise ValueError(f"the marker parity takes keywords only, got {marker.args[0]!r}")
        of_marker: dict[str, object] = {}
        for name, value in marker.kwargs.items():
            several = next((plural for plural, one in AXES.items() if one == name), None)
            if name not in {*AXES, *WHOLE, *PASSED_ON} and several is None:
                setting_names = ", ".join((*AXES, *WHOLE, *PASSED_ON))
                raise ValueError(f"the marker parity has no {name}; it takes {setting_names}")
            if value is None:
                continue
            label = f"{name} of the marker parity"
            if name == "allow":
                of_marker[name] = _checked(name, value, label)
            elif name in PASSED_ON:
                of_marker[name] = value
            elif several is not None:
                of_marker[several] = _checked(several, (value,), label)
            else:
                of_marker[name] = _checked(name, value, label)
        settings = of_marker | settings
    return settings
