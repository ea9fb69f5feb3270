"""Whether a description and a class of `transformers` compute the same: logits, gradients, padding, caches, tokens.

Nothing here knows how the description was made. Each config is read as a file would be: as `to_dict` writes it, and as
the few keys that a shorter file has.
"""

from __future__ import annotations

import collections
import inspect
import json
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from attn_bridge import backends
from attn_bridge.models.derived.description import Description
from attn_bridge.models.derived.reading import DerivedFamily
from attn_bridge.module_weights import transfer
from attn_bridge.specs.decoder_model import DecoderConfig
from attn_bridge.whole_files import JsonObject

from ..model_classes.experts import in_files
from ..model_classes.model_class import ABSENT, ModelClass
from ..model_classes.sizes import DEPTHS, LAYERS
from ..running.promotion import promoted
from .key_changes import changes_of, mixed, renamed
from .model_pair import (
    ModelPair,
    RefusedError,
    WrongError,
    as_file,
    make_pair,
    pair_with,
    printed_keys,
    read,
    reader_of,
)

BOUND = 1e-10
"""Largest difference of logits and gradients in float64, of the largest value or of 1."""

CACHED = 1e-12
"""Largest difference of logits with a cache from those without."""

LARGE = 10_000_000
"""Parameters of an instance beyond which a default of a size is compared as it is read, without running it."""

TOKENS, NEW = 13, 32
"""Tokens of a sample, more than three windows of a tiny instance; tokens that are generated."""


DEEP, LONG = 24, 48
"""Layers and tokens of a larger instance: constants of a class may begin beyond a usual one. Positions go up to 64."""

# ---- what is compared


def sample(seed: int, batch: int = 3, vocabulary: int = 60, tokens: int = TOKENS) -> Tensor:
    """Return token ids ``(batch, tokens)``."""
    return torch.randint(3, vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def error_of(theirs: Tensor, ours: Tensor, bound: float = BOUND) -> float:
    """Return the largest difference divided by its bound; infinite where a number is not finite."""
    if theirs.shape != ours.shape or not bool(torch.isfinite(theirs).all() & torch.isfinite(ours).all()):
        return float("inf")
    largest = max(1.0, float(theirs.abs().max()))
    return float((theirs - ours).abs().max()) / (bound * largest)


def check_logits(pair: ModelPair, label: str, seed: int = 1, logits: Tensor | None = None) -> None:
    """Compare logits; `logits` are those of the instance, where they are known.

    Raises:
        RefusedError: ours has fewer positions than the sample.
        WrongError: they differ.
    """
    if (pair.config.num_positions or TOKENS) < TOKENS:
        raise RefusedError(f"num_positions ({pair.config.num_positions}) below the tokens of the sample")
    ids = sample(seed)
    with promoted(), torch.no_grad():
        theirs = pair.theirs(ids, use_cache=False).logits if logits is None else logits
        ours = pair.ours(ids)
    if error_of(theirs, ours) > 1:
        raise WrongError(f"logits differ by {float((theirs - ours).abs().max()):.1e} with {label}")


def check_larger(subject: ModelClass, reader: DerivedFamily, seed: int = 7) -> None:
    """Compare logits of an instance of `DEEP` layers and `LONG` tokens; of the usual depth, where that can't be.

    Raises:
        WrongError: they differ.
        MemoryError: there is too little memory for the larger one.
    """
    per_layer = {
        key: value * (DEEP // LAYERS)
        for key, value in subject.sizes.items()
        if isinstance(value, list) and len(value) == LAYERS
    }
    ids = sample(seed, batch=2, tokens=LONG)
    for changes in ({**{key: DEEP for key in DEPTHS if key in subject.sizes}, **per_layer}, {}):
        keys = subject.keys(**changes)
        try:
            pair = make_pair(subject, reader, keys, seed)
            with promoted(), torch.no_grad():
                theirs = pair.theirs(ids, use_cache=False).logits
        except WrongError:
            raise
        except Exception as error:  # a class may not run them, and ours may refuse them
            if _is_out_of_memory(error):
                raise MemoryError(f"too little memory for an instance with {printed_keys(keys, subject)}") from error
            continue
        if not bool(torch.isfinite(theirs).all()):
            continue
        with promoted(), torch.no_grad():
            ours = pair.ours(ids)
        if error_of(theirs, ours) > 1:
            raise WrongError(
                f"logits of {len(pair.config.blocks)} layers and {LONG} tokens differ by "
                f"{float((theirs - ours).abs().max()):.1e}"
            )
        return


def check_padding(pair: ModelPair, side: str, seed: int = 2) -> None:
    """Compare logits of rows with padding on a side, where tokens are.

    Raises:
        WrongError: they differ.
    """
    ids, lengths = sample(seed), (TOKENS, TOKENS - 4, TOKENS - 6)
    steps = torch.arange(TOKENS)
    rows = [steps >= TOKENS - length if side == "left" else steps < length for length in lengths]
    mask = torch.stack(rows)
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(pair.theirs.forward).parameters
    # Some classes count from the first row of their table; those without the argument may count padding as well.
    numbered: list[dict[str, Tensor]] = [
        {"position_ids": positions},
        {"position_ids": positions + pair.config.position_offset},
    ]
    for arguments, own in (
        [(one, {}) for one in numbered] if takes_positions else [({}, {}), ({}, {"positions": steps})]
    ):
        with promoted(), torch.no_grad():
            theirs = pair.theirs(ids, attention_mask=mask.long(), use_cache=False, **arguments).logits
            ours = pair.ours(ids, attention_mask=mask, **own)
        if error_of(theirs[mask], ours[mask]) <= 1:
            return
    raise WrongError(f"logits differ with padding on the {side}")


def check_gradients(pair: ModelPair, seed: int = 3) -> int:
    """Compare the gradients of all parameters; return how many.

    Raises:
        WrongError: some differ.
    """
    ids = sample(seed)
    weights = torch.randn(
        (*ids.shape, pair.config.vocab_size), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    for model in (pair.theirs, pair.ours):
        model.zero_grad()
    with promoted():
        (pair.theirs(ids, use_cache=False).logits * weights).sum().backward()
        (pair.ours(ids) * weights).sum().backward()
    ours = {name: one.grad.numpy() for name, one in pair.ours.named_parameters() if one.grad is not None}
    shapes = {parameter.rule.torch: parameter.shape for parameter in pair.config.parameters}
    encoded = pair.layout.encode(shapes, pair.settings)
    written = encoded.write({name: ours.get(name, np.zeros(shape)) for name, shape in shapes.items()})
    every = pair.theirs.named_parameters(remove_duplicate=False)
    # A table of sinusoids is frozen there.
    parameters = {name: tensor for name, tensor in every if name in written and tensor.requires_grad}
    for name, parameter in parameters.items():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if error_of(grad, torch.from_numpy(written[name])) > 1:
            raise WrongError(f"gradients of {name} differ")
    return len(parameters)


def check_file(pair: ModelPair) -> None:
    """Read the tensors that `transformers` writes to a file, and compare them with ours.

    Raises:
        WrongError: they are not read, or differ.
    """
    state = {name: tensor.numpy() for name, tensor in in_files(pair.theirs).items()}
    ties = getattr(pair.theirs, "all_tied_weights_keys", None) or {}
    gone = {*ties, *pair.layout.apart(state)}
    state = {name: array for name, array in state.items() if name not in gone}
    _, matches = pair.layout.match(state)
    state = {name: array for name, array in state.items() if name not in matches or matches[name][0].ours}
    settings = {name: value for name, value in pair.settings.items() if name not in ("prefix", "fused")}
    try:
        arrays = pair.layout.to_canonical(state, **settings)
    except ValueError as error:
        raise WrongError(f"a file of the class is not read: {error}") from error
    ours = pair.ours.state_dict()
    for parameter in pair.config.parameters:
        name = parameter.rule.torch
        if name not in arrays or not np.array_equal(arrays[name], ours[name].numpy()):
            raise WrongError(f"{name} differs in a file of the class")


def check_cache(pair: ModelPair, seed: int = 4) -> None:
    """Compare ours with a cache with ours without, token by token after a first part, beyond the window.

    Raises:
        WrongError: they differ.
    """
    ids = sample(seed, batch=2)
    with promoted(), torch.no_grad():
        whole = pair.ours(ids)
        cache = pair.ours.init_cache(2, TOKENS)
        first, cache = pair.ours(ids[:, :5], cache=cache)
        parts = [first]
        for step in range(5, TOKENS):
            logits, cache = pair.ours(ids[:, step : step + 1], cache=cache)
            parts.append(logits)
    if error_of(whole, torch.cat(parts, 1), CACHED) > 1:
        raise WrongError("logits with a cache differ from those without")


def check_tokens(pair: ModelPair, seed: int = 5) -> None:
    """Compare the likeliest tokens that follow, with caches.

    Raises:
        WrongError: they differ.
    """
    from transformers import GenerationConfig

    ids = sample(seed, batch=2)[:, :6]
    # The config of some classes asks for beams, or for a last token.
    pair.theirs.generation_config = GenerationConfig()
    with promoted(), torch.no_grad():
        theirs = pair.theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        ours = pair.ours.generate(ids, NEW)
    if not torch.equal(theirs, ours):
        raise WrongError(f"the {NEW} likeliest tokens differ")


def check_jax(pair: ModelPair, seed: int = 6) -> None:
    """Compare logits with those of the Flax model.

    Raises:
        WrongError: they differ.
    """
    backend, ids = backends.load("flax"), sample(seed)
    with backend.precision("float64"):
        module = backend.build_blank("DecoderModel", pair.config, "float64")
        transfer(pair.ours, module)
        ours = torch.from_numpy(np.array(module(ids.numpy())))
    with promoted(), torch.no_grad():
        theirs = pair.theirs(ids, use_cache=False).logits
    if error_of(theirs, ours) > 1:
        raise WrongError("logits of the Flax model differ")


# ---- configs


def check_defaults(subject: ModelClass, reader: DerivedFamily) -> None:
    """Compare a config without keys with what `transformers` writes for it.

    Raises:
        WrongError: they are read otherwise.
    """
    results: list[DecoderConfig | str] = []
    for keys in ({"model_type": subject.model_type}, as_file(subject.config_class())):
        try:
            results.append(read(reader, keys))
        except RefusedError as error:
            results.append(str(error))
    short, full = results
    if isinstance(short, str) and isinstance(full, str):
        return  # a default that ours do not express, as an odd number of rotary channels, is refused in files as well
    if short != full:
        raise WrongError("a config without keys is read otherwise than the defaults of transformers")


def try_change(subject: ModelClass, reader: DerivedFamily, changes: Mapping[str, object], seed: int = 0) -> str:
    """Return ``equal``, ``refused`` (ours), or ``impossible`` (an instance that can't be made or run).

    Raises:
        WrongError: the description reads the config, and computes something else.
    """
    keys = subject.keys(**changes)
    if ABSENT in changes.values() and _is_large(subject, keys):
        return _check_read(subject, reader, keys)
    made = _made(subject, keys, seed)
    if made is None:
        return "impossible"
    theirs, file, logits = made
    outcome, compared = "refused", list[DecoderConfig]()
    for settings in (file, keys):
        try:
            config = read(reader, settings)
        except RefusedError:
            continue
        if config in compared:
            continue
        compared.append(config)
        outcome = "equal"
        # The search compares the same instance with the same tensors before the proof: once is enough.
        comparison = json.dumps([keys, seed]) + f" {config} {reader.layout.name} {reader.layout.rows}"
        if subject.kept.get(comparison):
            continue
        pair = pair_with(theirs, reader, config, settings)
        try:
            check_logits(pair, printed_keys(keys, subject), logits=logits)
        except RefusedError:
            return "refused"
        if any(isinstance(value, bool) for value in changes.values()):
            check_file(pair)  # a switch may add tensors, which files may name otherwise
        subject.kept[comparison] = True
    return outcome


def _is_large(subject: ModelClass, keys: Mapping[str, object]) -> bool:
    """Return whether the default of a size makes an instance of gigabytes."""
    try:
        return sum(map(math.prod, subject.shapes(keys).values())) > LARGE
    except Exception:  # a config that can't be made is found where it is run
        return False


def _check_read(subject: ModelClass, reader: DerivedFamily, keys: Mapping[str, object]) -> str:
    """Compare a config as transformers fills it with the shorter one; return ``equal`` or ``refused``.

    Raises:
        WrongError: they are read otherwise.
    """
    results: list[DecoderConfig | None] = []
    for file in (as_file(subject.config(keys)), keys):
        try:
            results.append(read(reader, file))
        except RefusedError:
            results.append(None)
    full, short = results
    if short is not None and full != short:
        raise WrongError(
            f"the config of {printed_keys(keys, subject)} is read otherwise than the defaults of transformers"
        )
    return "refused" if short is None else "equal"


def _made(
    subject: ModelClass, keys: Mapping[str, object], seed: int
) -> tuple[nn.Module, dict[str, object], Tensor] | None:
    """Return an instance, its config.json and its logits; None where it can't be made or run.

    Raises:
        MemoryError: too little memory to run it, which does not show that the class can't.
    """
    name = json.dumps([keys, seed])
    if name not in subject.kept:
        made = None
        try:
            with promoted(), torch.no_grad():
                theirs = subject.instance(keys, seed)
                logits = theirs(sample(1), use_cache=False).logits
            if bool(torch.isfinite(logits).all()):
                made = theirs, as_file(subject.config(keys)), logits
        except Exception as error:  # what transformers raises for a config that it can't run is of any class
            if _is_out_of_memory(error):
                raise MemoryError(f"too little memory for an instance with {printed_keys(keys, subject)}") from error
        subject.kept[name] = made
    instance: tuple[nn.Module, JsonObject, Tensor] | None = subject.kept[name]
    return instance


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory was short; torch's allocator on CPUs raises a RuntimeError."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def prove(subject: ModelClass, description: Description, *, flax: bool = True, mixtures: int = 12) -> JsonObject:
    """Prove a description; return the counts of all comparisons.

    Args:
        subject: the class.
        description: the family.
        flax: whether to run the Flax model as well.
        mixtures: random configs with several keys changed.

    Raises:
        MemoryError: a config needs more memory than there is.
        WrongError: they do not compute the same; the message names the first config and what differs.
    """
    import transformers

    reader = reader_of(description)
    check_defaults(subject, reader)
    counts: collections.Counter[str] = collections.Counter()
    gradients = 0
    for seed in (0, 1):
        try:
            pair = make_pair(subject, reader, subject.keys(), seed)
        except RefusedError as error:
            raise WrongError(f"the usual instance is refused: {error}") from error
        check_logits(pair, "the usual instance")
    check_larger(subject, reader)
    check_file(pair)
    gradients = check_gradients(pair)
    for side in ("left", "right"):
        check_padding(pair, side)
    check_cache(pair)
    check_tokens(pair)
    singles = changes_of(subject)
    proven = [
        one for one in singles if counts.update([outcome := try_change(subject, reader, one)]) or outcome == "equal"
    ]
    counts.update(try_change(subject, reader, changes) for changes in renamed(subject, singles))
    for number, changes in enumerate(mixed(subject, proven, mixtures)):
        counts.update([try_change(subject, reader, changes, number + 2)])
    if flax:
        check_jax(pair)
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__.partition("+")[0],
        "flax": flax,
        "configs_equal": counts["equal"] + 2,
        "configs_refused": counts["refused"],
        "gradients": gradients,
        "tokens": NEW,
    }
