"""Give two sides the same weights: draw those of the first, carry them over by rules, fill the second.

Rules are dicts in the language of ``convert --rules``, so that they can be given to ``compare`` as well. `rules` reads
them from a table, one a line: ``names of the first | name of the second | pattern | keys``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from einops import rearrange

Arrays = dict[str, np.ndarray]
Rule = dict[str, Any]

_PLACEHOLDERS = {
    "{i}": r"(?P<i>\d+)",
    "{j}": r"(?P<j>\d+)",
    "{path}": r"(?P<path>(?:.+\.)?)",
    "{rest}": r"(?P<rest>.+)",
}


def rules(table: str, **sizes: int) -> list[Rule]:
    """Read a table of rules; `sizes` are those of axes that a pattern splits."""
    found = []
    for line in filter(None, map(str.strip, table.splitlines())):
        names, other, pattern, keys = ([one.strip() for one in line.split("|")] + ["", ""])[:4]
        parts = [name.strip() for name in names.split(",")]
        rule: Rule = {"torch": parts if len(parts) > 1 else parts[0], "flax": other}
        if pattern:
            rule["pattern"] = pattern
            rule |= {axis: size for axis, size in sizes.items() if re.search(rf"\b{axis}\b", pattern)}
        for key in keys.split():
            word, _, value = key.partition("=")
            rule[word] = [int(one) for one in value.split(",")] if word == "split" else value
        found.append(rule)
    return found


def carry(arrays: Mapping[str, np.ndarray], table: Sequence[Rule]) -> Arrays:
    """Return the second side's arrays; the first rule that names an array takes it."""
    groups: dict[tuple[int, str], dict[tuple[int, int], np.ndarray]] = {}
    for name, array in arrays.items():
        number, part, match = next(
            ((n, p, m) for n, rule in enumerate(table) for p, m in enumerate(_matches(rule, name)) if m),
            (-1, 0, None),
        )
        assert match is not None, f"no rule names {name}"
        words = match.groupdict()
        target, count = table[number]["flax"], 0
        for word, value in words.items():
            if f"{{{word}}}" not in target:
                count = int(value)  # the axis that stacks
            target = target.replace(f"{{{word}}}", value)
        groups.setdefault((number, target), {})[part, count] = array
    return {target: _join(table[number], found) for (number, target), found in groups.items()}


def _matches(rule: Rule, name: str) -> list[re.Match[str] | None]:
    names = rule["torch"] if isinstance(rule["torch"], list) else [rule["torch"]]
    patterns = ["".join(_PLACEHOLDERS.get(w, re.escape(w)) for w in re.split(r"(\{\w+\})", one)) for one in names]
    return [re.fullmatch(pattern, name) for pattern in patterns]


def _join(rule: Rule, found: Mapping[tuple[int, int], np.ndarray]) -> np.ndarray:
    if "pattern" not in rule:
        (array,) = found.values()
        return array
    left, right = (side.strip() for side in rule["pattern"].split("->"))
    part, stack, along = rule.get("part"), rule.get("stack"), rule.get("along")
    sizes = {key: size for key, size in rule.items() if isinstance(size, int)}
    layers = []
    for layer in sorted({count for _, count in found}):
        pieces = [found[key] for key in sorted(found) if key[1] == layer]
        if part:
            layers.append(rearrange(np.stack(pieces), f"{part} {left} -> {_without(right, stack)}", **sizes))
        else:
            whole = np.concatenate(pieces, left.split().index(along)) if along else pieces[0]
            layers.append(rearrange(whole, f"{left} -> {_without(right, stack)}", **sizes))
    return np.stack(layers, right.split().index(stack)) if stack else layers[0]


def _without(pattern: str, axis: str | None) -> str:
    return " ".join(word for word in pattern.split() if word != axis)


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    """Draw weights that hide nothing: no bias is 0, no scale is 1, statistics are positive."""
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes.items():
        drawn = random.normal(size=shape)
        if "running_var" in name:
            drawn = random.uniform(0.5, 2.0, size=shape)
        elif len(shape) >= 2 and "embed" not in name:
            drawn *= float(np.prod(shape[1:])) ** -0.5
        elif len(shape) < 2:
            drawn = 0.3 * drawn + (1.0 if name.endswith(("weight", "scale", "_g")) else 0.0)
        found[name] = drawn.astype(np.float32)
    return found


def held(side: Any) -> Arrays:
    """Return the weights and running statistics of a module, by name."""
    if hasattr(side, "named_parameters"):
        named = [*side.named_parameters(), *side.named_buffers()]
        return {
            name: one.detach().numpy().copy()
            for name, one in named
            if hasattr(one, "grad_fn") and (one.requires_grad or name.endswith(("running_mean", "running_var")))
        }
    from flax import nnx

    return {".".join(map(str, path)): np.asarray(one[...]) for path, one in _variables(nnx, side)}


def _variables(nnx: Any, module: Any) -> Any:
    return nnx.to_flat_state(nnx.state(module, nnx.Any(nnx.Param, nnx.BatchStat)))


def fill(side: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Put arrays into a torch or an NNX module; every weight has to be given, in its shape."""
    wanted = {name: array.shape for name, array in held(side).items()}
    given = {name: array.shape for name, array in arrays.items()}
    assert wanted == given, {name: (wanted.get(name), given.get(name)) for name in wanted.keys() ^ given.keys()} or [
        (name, wanted[name], given[name]) for name in wanted if wanted[name] != given[name]
    ]
    if hasattr(side, "named_parameters"):
        import torch

        with torch.no_grad():
            for name, one in [*side.named_parameters(), *side.named_buffers()]:
                if name in arrays:
                    one.copy_(torch.from_numpy(np.array(arrays[name], order="C")))
        return side.eval()
    import jax.numpy as jnp
    from flax import nnx

    for path, variable in _variables(nnx, side):
        variable[...] = jnp.asarray(arrays[".".join(map(str, path))])
    side.eval()
    return side


def fresh(module: Any, seed: int = 0) -> Any:
    """Fill a module with drawn weights."""
    return fill(module, draw({name: array.shape for name, array in held(module).items()}, seed))


def linen(module: Any, arrays: Mapping[str, np.ndarray], *inputs: Any, **keywords: Any) -> tuple[Any, dict[str, Any]]:
    """Return a Linen module with its variables, given by dotted names without the collection."""
    import jax
    import jax.numpy as jnp
    from flax.traverse_util import flatten_dict, unflatten_dict

    inputs, keywords = jax.tree.map(jnp.asarray, (inputs, keywords))
    abstract = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs, **keywords))
    wanted = flatten_dict(abstract)
    shapes = {".".join(path[1:]): one.shape for path, one in wanted.items()}
    assert shapes == {name: array.shape for name, array in arrays.items()}, (shapes, list(arrays))
    filled = {path: jnp.asarray(arrays[".".join(path[1:])], jnp.float32) for path in wanted}
    return module, unflatten_dict(filled)


def onto(first: Any, second: Any, table: str | Sequence[Rule], **sizes: int) -> Any:
    """Carry the first side's weights over to the second and return the second."""
    return fill(second, carry(held(first), rules(table, **sizes) if isinstance(table, str) else table))


def numbers(*shape: int, seed: int = 1, scale: float = 1.0) -> np.ndarray:
    """Draw a float32 input."""
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def tokens(*shape: int, vocabulary: int = 24, seed: int = 1) -> np.ndarray:
    """Draw token ids."""
    return np.random.default_rng(seed).integers(1, vocabulary, size=shape)
