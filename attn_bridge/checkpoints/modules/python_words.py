"""Error messages of `load` and `save` in Python terms: arguments instead of CLI options, and advice on names."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Collection, Iterable, Iterator

from ...models import layouts
from ...models.unknown_names.beginnings import patterns_of

_ARGUMENTS = {
    "strip": "strip",
    "drop": "drop",
    "from": "from_layout",
    "to": "to_layout",
    "set": "settings",
    "rules": "rules",
}
"""Option of the command line -> argument of `load` and `save`."""

_WORD = r"(?:'[^']*'|[^\s;,()']+)"
_OPTION = re.compile(rf"--({'|'.join(_ARGUMENTS)})\b(?: ({_WORD}))?")
_WITH_VALUE = re.compile(rf"--({'|'.join(_ARGUMENTS)})(?= \()")
"""An option in front of its value in parentheses, as errors about an option begin."""

_RUN = re.compile(rf"{_OPTION.pattern}(?: {_OPTION.pattern})*")


def in_python(text: str) -> str:
    """Return a message with Python arguments instead of options of the command line.

    ``--strip model. --from hf-gpt2`` becomes ``strip='model.', from_layout='hf-gpt2'``.
    """
    text = _WITH_VALUE.sub(lambda hit: _ARGUMENTS[hit[1]], text)
    return _RUN.sub(lambda run: _arguments(run[0]), text)


@contextlib.contextmanager
def python_errors() -> Iterator[None]:
    """Reword the message of a ValueError that passes through."""
    try:
        yield
    except ValueError as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (in_python(error.args[0]),)
        raise


def advice(
    missing: Collection[str], unexpected: Collection[str], names: Collection[str], wanted: Collection[str]
) -> str:
    """Return the arguments of `load` that make a checkpoint's names those of a module, or "".

    Args:
        missing: names of the module that the checkpoint lacks.
        unexpected: names of the checkpoint that the module lacks.
        names: all names of the checkpoint.
        wanted: all names of the module.
    """
    if not missing:
        patterns = patterns_of(sorted(unexpected), wanted)
        return f"drop={[*patterns]} leaves the unexpected tensors out" if patterns else ""
    first = next((name for name in sorted(wanted) if any(one.endswith(f".{name}") for one in names)), "")
    for name in names:
        prefix = name.removesuffix(first) if first and name.endswith(f".{first}") else ""
        if prefix and all(prefix + one in names for one in wanted):
            return f"the names of the module are there below {prefix} (strip={prefix!r})"
    return ""


@contextlib.contextmanager
def advising(names: Collection[str], modules: Iterable[Collection[str]]) -> Iterator[None]:
    """Add to a refusal of names, where it has no advice, the arguments of `load` that make them a module's.

    Args:
        names: all names of the checkpoint.
        modules: names of the module, each by another framework's names.
    """
    try:
        yield
    except layouts.LayoutError as error:
        text = str(error)
        if "--strip" not in text and "--drop" not in text and len(error.args) == 1:
            sets = [({*one} - {*names}, {*names} - {*one}, names, one) for one in modules if one]
            hint = next(filter(None, (advice(*one) for one in sets)), "")
            error.args = (f"{text}; {hint}" if hint else text,)
        raise


def _arguments(run: str) -> str:
    """Return the arguments for a run of options; repeated options become a list or a dict."""
    values: dict[str, list[str]] = {}
    end = 0
    for hit in _OPTION.finditer(run):
        option, word = hit[1], hit[2] or ""
        words = values.setdefault(option, [])
        if _is_value(option, word):
            words.append(shlex.split(word)[0])
            end = hit.end()
        else:  # the option alone, in a sentence
            end = hit.end(1)
    return ", ".join(_argument(*one) for one in values.items()) + run[end:]


def _is_value(option: str, word: str) -> bool:
    """Whether the word after an option is its value, and not the next word of a sentence."""
    if option in ("from", "to"):
        return word in layouts.names() or word == "same"
    if option == "set":
        return "=" in word
    return word.startswith("'") or word.endswith(".") or "*" in word or (option == "drop" and "." in word)


def _argument(option: str, values: list[str]) -> str:
    name = _ARGUMENTS[option]
    if not values:
        return f"{name}="
    if option == "set":
        return (
            f"{name}={{{', '.join(f'{key!r}: {value}' for key, _, value in (one.partition('=') for one in values))}}}"
        )
    return f"{name}={values!r}" if option == "drop" else f"{name}={values[0]!r}"
