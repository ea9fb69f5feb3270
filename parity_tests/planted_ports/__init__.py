"""Small ports, ten with one planted fault and five that are right: what the skill `port-and-prove` is tried on.

Each folder holds ``original.py`` and ``port.py``; neither says whether the port is right. Here stands the truth, and
``python -m parity_tests.planted_ports FOLDER`` lays out the pairs alone, for someone who is to find the faults.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        about: what is wrong, in words.
        wrong: the text of the port that is wrong, which occurs once.
        right: what it should be.
        path: path of the first divergence, as the report has it.
        between: the two submodules between which it lies, or None.
        direction: ``forward`` or ``backward``.
    """

    about: str
    wrong: str
    right: str
    path: str = ""
    between: tuple[str, str] | None = None
    direction: str = "forward"


FAULTS = {
    "decoder_block": Fault(
        "the residual is taken after the second norm",
        "        x = self.norm2(x)\n        return x + self.down(jax.nn.silu(self.up(x)))",
        "        return x + self.down(jax.nn.silu(self.up(self.norm2(x))))",
        between=("norm2", ""),
    ),
    "encoder_layer": Fault(
        "the second norm has Flax's default epsilon",
        "self.norm2 = nnx.LayerNorm(width, rngs=rngs)",
        "self.norm2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)",
        path="norm2",
    ),
    "expert_layer": Fault(
        "the weights of the chosen experts do not sum to one",
        "        gates = jnp.sum(",
        "        top = top / top.sum(axis=-1, keepdims=True)\n        gates = jnp.sum(",
        between=("router", ""),
    ),
    "gated_mlp": Fault(
        "GELU is the approximation by tanh",
        "jax.nn.gelu(self.gate(hidden))",
        "jax.nn.gelu(self.gate(hidden), approximate=False)",
        between=("up", "down"),
    ),
    "grouped_attention": Fault(
        "the heads of keys and values are tiled instead of repeated",
        "jnp.tile(one, (1, 1, self.heads // self.groups, 1))",
        "jnp.repeat(one, self.heads // self.groups, axis=2)",
        between=("value", "out"),
    ),
    "patch_stem": Fault(
        "SAME pads unevenly under a stride",
        'self.first = nnx.Conv(3, 8, kernel_size=(3, 3), strides=2, padding="SAME", rngs=rngs)\n'
        '        self.second = nnx.Conv(8, 12, kernel_size=(3, 3), strides=2, padding="SAME", rngs=rngs)',
        "self.first = nnx.Conv(3, 8, kernel_size=(3, 3), strides=2, padding=1, rngs=rngs)\n"
        "        self.second = nnx.Conv(8, 12, kernel_size=(3, 3), strides=2, padding=1, rngs=rngs)",
        path="first",
    ),
    "recurrent_cell": Fault(
        "the update gate is turned around",
        "update * new + (1 - update) * state",
        "(1 - update) * new + update * state",
        between=("state", ""),
    ),
    "rotary_attention": Fault(
        "positions rotate pairs of neighbours instead of halves",
        "    first, second = x[..., ::2], x[..., 1::2]\n"
        "    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)\n"
        "    return rotated.reshape(x.shape)",
        "    first, second = x[..., :half], x[..., half:]\n"
        "    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)",
        between=("value", "out"),
    ),
    "scaled_norm": Fault(
        "no gradient goes through the size of a row",
        "jax.lax.stop_gradient(jnp.mean(x**2, axis=-1, keepdims=True))",
        "jnp.mean(x**2, axis=-1, keepdims=True)",
        path="norm",
        direction="backward",
    ),
    "windowed_attention": Fault(
        "the window holds one token too many",
        "(ago <= self.window)",
        "(ago < self.window)",
        between=("qkv", "out"),
    ),
}
"""Folder -> the fault in its port."""

RIGHT = ("fused_attention", "linear_attention", "squeeze_block", "tanh_mlp", "token_classifier")
"""Folders whose port has none."""
