"""Tunix's own models, tiny ones, beside the `transformers` models whose weights they take.

`python -m parity_tests.support.models.tunix_models` writes the names and shapes of their state to
goldens/tunix_states.json;
it needs `tunix` to be importable: its wheel, unpacked, on the path. Its requirements are not needed for its models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

STATES = Path(__file__).parents[2] / "goldens" / "tunix_states.json"

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
    },  # version 0.1.7 knows none else for Llama and Qwen 3
    "tie_word_embeddings": False,
}
GEMMA = {
    **SIZES,
    "num_hidden_layers": 6,
    "sliding_window": 4,
    "query_pre_attn_scalar": 6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
EXPERTS = {"moe_intermediate_size": 20, "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on both sides.

    Attributes:
        layout: name of the layout of Tunix's.
        theirs: name of the layout of `transformers`.
        model_type: as `transformers` calls it.
        sizes: its config.
        own: what Tunix's config has beside the sizes.
    """

    layout: str
    theirs: str
    model_type: str
    sizes: dict[str, Any]
    own: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    "llama3": Case("tunix-llama3", "hf-llama", "llama", SIZES),
    "llama3-tied": Case(
        "tunix-llama3", "hf-llama", "llama", {**SIZES, "tie_word_embeddings": True}, {"weight_tying": True}
    ),
    "qwen2": Case("tunix-qwen2", "hf-llama", "qwen2", {**SIZES, "head_dim": 4}),
    "qwen3": Case(
        "tunix-qwen3", "hf-llama", "qwen3", {**SIZES, "tie_word_embeddings": True}, {"use_tied_embedding": True}
    ),
    "qwen3-moe": Case(
        "tunix-qwen3", "hf-qwen3-moe", "qwen3_moe", {**SIZES, **EXPERTS}, {"num_experts": 3, "num_experts_per_tok": 2}
    ),
    "gemma3": Case("tunix-gemma3", "hf-gemma", "gemma3_text", GEMMA),
    "gemma3-one-key": Case("tunix-gemma3", "hf-gemma", "gemma3_text", {**GEMMA, "num_key_value_heads": 1}),
    "gemma3-own-keys": Case("tunix-gemma3", "hf-gemma", "gemma3_text", {**GEMMA, "num_key_value_heads": 4}),
}


def known_states() -> dict[str, dict[str, tuple[int, ...]]]:
    """Return what Tunix's own models were seen to hold: case -> name -> shape."""
    held = json.loads(STATES.read_text(encoding="utf-8"))["states"]
    return {case: {name: tuple(shape) for name, shape in state.items()} for case, state in held.items()}


def library(family: str) -> Any:
    """Return the module of Tunix with a family's model, or skip the test where Tunix is not there."""
    found = importlib.util.find_spec("tunix")
    if found is None or not found.submodule_search_locations:
        pytest.skip("tunix is not importable: unpack the wheel of google-tunix and put it on PYTHONPATH")
    if "tunix" not in sys.modules:  # the package itself imports trainers and all that they need; models don't
        package = types.ModuleType("tunix")
        package.__path__, package.__spec__ = list(found.submodule_search_locations), found
        sys.modules["tunix"] = package
    return importlib.import_module(f"tunix.models.{family}.model")


@contextlib.contextmanager
def as_tunix_needs() -> Iterator[None]:
    """Have what Tunix's models turn off for everyone off for them alone, and not hear what they call in old ways."""
    import flax

    before = flax.config.flax_always_shard_variable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            flax.config.update("flax_always_shard_variable", False)
            yield
        finally:
            flax.config.update("flax_always_shard_variable", before)


def version() -> str:
    """Return the version of Tunix that is on the path."""
    return importlib.metadata.version("google-tunix")


@as_tunix_needs()
def build(case: Case) -> Any:
    """Return Tunix's own model of a case, in float32."""
    from flax import nnx
    from jax import numpy as jnp

    family = case.layout.removeprefix("tunix-")
    module, sizes = library(family), case.sizes
    known: dict[str, Any] = {
        "num_layers": sizes["num_hidden_layers"],
        "embed_dim": sizes["hidden_size"],
        "hidden_dim": sizes["intermediate_size"],
        "num_heads": sizes["num_attention_heads"],
        "num_kv_heads": sizes["num_key_value_heads"],
        "head_dim": sizes["head_dim"],
        **case.own,
    }
    if family == "gemma3":
        config = module.ModelConfig(
            **known,
            num_embed=sizes["vocab_size"],
            sliding_window_size=sizes["sliding_window"],
            local_base_frequency=10_000,
            global_base_frequency=1_000_000,
            global_scale_factor=8.0,
            param_dtype=jnp.float32,
        )
        return module.Gemma3(config, rngs=nnx.Rngs(0))
    if family != "llama3":
        known |= {"dtype": jnp.float32, "param_dtype": jnp.float32}
    config = module.ModelConfig(
        **known, vocab_size=sizes["vocab_size"], rope_theta=1_000_000, norm_eps=sizes["rms_norm_eps"]
    )
    return getattr(module, family.capitalize())(config, rngs=nnx.Rngs(0))


def state_of(model: Any) -> dict[str, np.ndarray]:
    """Return the state of a model, names joined by dots."""
    from flax import nnx

    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model))}


@as_tunix_needs()
def load(case: Case, model: Any, folder: Path) -> Any:
    """Return a model of the same config that Tunix's own loader fills from a folder of `transformers`."""
    from jax import numpy as jnp

    family = case.layout.removeprefix("tunix-")
    file = "params_safetensors" if family == "gemma3" else "params"
    loader = importlib.import_module(f"tunix.models.{family}.{file}")
    return loader.create_model_from_safe_tensors(str(folder), model.config, None, jnp.float32)


@as_tunix_needs()
def put(model: Any, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays into the state of a model, whose names they must have."""
    from flax import nnx
    from jax import numpy as jnp

    state = dict(nnx.to_flat_state(nnx.state(model)))
    assert {".".join(map(str, path)) for path in state} == arrays.keys()
    for path, leaf in state.items():
        array = arrays[".".join(map(str, path))]
        assert array.shape == leaf[...].shape, path
        leaf.set_value(jnp.asarray(array))
    nnx.update(model, nnx.from_flat_state(state))


@as_tunix_needs()
def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """Return what a model gives for a batch without padding."""
    from jax import numpy as jnp

    b, t = ids.shape
    seen = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)), (b, t, t))
    return np.asarray(model(jnp.asarray(ids), jnp.broadcast_to(jnp.arange(t), (b, t)), None, seen)[0])


def main() -> None:
    """Write the names and shapes of every case."""
    states = {
        name: {key: list(array.shape) for key, array in sorted(state_of(build(case)).items())}
        for name, case in CASES.items()
    }
    lines = [
        f'    "{name}": {{\n' + ",\n".join(f'      "{key}": {shape}' for key, shape in state.items()) + "\n    }"
        for name, state in states.items()
    ]
    text = f'{{\n  "google-tunix": "{version()}",\n  "states": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    STATES.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
