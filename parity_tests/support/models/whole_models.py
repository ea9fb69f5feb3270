"""The book's `GPTModel` and `BertEncoder`, small: their configs, inputs, and weights for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from attn_bridge import specs


@dataclasses.dataclass(frozen=True, eq=False)
class WholeModel:
    """A whole model that both backends have.

    Attributes:
        name: the class in both packages.
        spec: the class of its config.
        config: what a user gives for it.
        inputs: arrays by the names of the arguments.
        width: of the output, per token.
        one_layer: what to change in the config for a model of one layer.
        other_rates: what to change for other rates of dropout, which no weight depends on.
    """

    name: str
    spec: type[specs.Config]
    config: dict[str, Any]
    inputs: dict[str, np.ndarray]
    width: int
    one_layer: dict[str, int]
    other_rates: dict[str, float]

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return (*self.inputs["ids"].shape, self.width)

    def spec_of(self, **changes: Any) -> specs.Config:
        """Return the config, with changes, as a model holds it."""
        return self.spec(**{**self.config, **changes})


def _ids(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 23, shape).astype(np.int32)


GPT = WholeModel(
    "GPTModel",
    specs.GPTModelConfig,
    {
        "vocab_size": 23,
        "context_length": 8,
        "emb_dim": 12,
        "n_heads": 3,
        "n_layers": 2,
        "drop_rate": 0.1,
        "qkv_bias": True,
    },
    {"ids": _ids(3, 8)},
    width=23,
    one_layer={"n_layers": 1},
    other_rates={"drop_rate": 0.0},
)
BERT = WholeModel(
    "BertEncoder",
    specs.BertEncoderConfig,
    {
        "vocab_size": 23,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "max_position_embeddings": 9,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    },
    {
        "ids": _ids(3, 7),
        # Padded on the right, on the left, and not at all.
        "attention_mask": np.array([[1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], np.int32),
        "token_type_ids": (np.arange(7) > 3).astype(np.int32)[None].repeat(3, 0),
    },
    width=12,
    one_layer={"num_hidden_layers": 1},
    other_rates={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.3},
)


def draw(config: specs.Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw every parameter under its torch name: no bias near 0, no scale near 1, scores that differ."""
    random = np.random.default_rng(seed)
    arrays = {}
    for row in config.parameters:
        if len(row.shape) == 1:
            # Larger biases and shifts would outweigh what the tokens say.
            size = 1.0 if row.rule.torch.endswith("scale") else 0.3
            array = random.choice([-1.0, 1.0], row.shape) * random.uniform(0.2 * size, 1.6 * size, row.shape)
        else:
            array = random.normal(size=row.shape) * (1.0 if "emb" in row.rule.torch else 1.5 * row.shape[1] ** -0.5)
        arrays[row.rule.torch] = array
    return arrays
