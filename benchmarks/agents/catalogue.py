"""The forty ports: the lines that differ from the right port of their kind, and the test of their author."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .authors import LEARNS, MEANS, SHAPES, SIMILAR, AuthorTest, close

FOLDER = Path(__file__).parent / "ports"


@dataclasses.dataclass(frozen=True)
class Port:
    """A port.

    Attributes:
        kind: its file in ``ports/``, without suffix.
        fault: its faults in words, "" for a right port.
        test: its author's test.
        changes: pairs of a text that the kind's file holds once, and the text of the port.
    """

    kind: str
    fault: str
    test: AuthorTest
    changes: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """The kind's file with the port's lines."""
        text = (FOLDER / f"{self.kind}.py").read_text(encoding="utf-8")
        for right, wrong in self.changes:
            if text.count(right) != 1:
                raise ValueError(f"{right!r} must occur once in {self.kind}.py, not {text.count(right)} times")
            text = text.replace(right, wrong)
        return text


PORTS = (
    Port("rotary_attention", "", close(1e-5)),
    Port(
        "rotary_attention",
        "heads of keys tiled",
        SIMILAR,
        (
            ("jnp.repeat(k, heads // kv_heads, axis=1)", "jnp.tile(k, (1, heads // kv_heads, 1, 1))"),
            ("jnp.repeat(v, heads // kv_heads, axis=1)", "jnp.tile(v, (1, heads // kv_heads, 1, 1))"),
        ),
    ),
    Port(
        "rotary_attention", "mask off by one", SHAPES, (("jnp.tri(t, k=0, dtype=bool)", "jnp.tri(t, k=1, dtype=bool)"),)
    ),
    Port(
        "rotary_attention",
        "scale by the model's width",
        close(1e-2),
        (("/ q.shape[-1] ** 0.5", "/ x.shape[-1] ** 0.5"),),
    ),
    Port("cached_attention", "", close(1e-5)),
    Port(
        "cached_attention",
        "positions start at 0",
        close(1e-5, "empty cache", past=0),
        (("pos = past + jnp.arange(t)", "pos = jnp.arange(t)"),),
    ),
    Port("cached_attention", "epsilon of RMSNorm 1e-6", close(1e-4), (("epsilon=1e-5", "epsilon=1e-6"),)),
    Port(
        "cached_attention",
        "heads before query, key, value",
        MEANS,
        (
            ("reshape(b, t, 3, self.num_heads, -1)", "reshape(b, t, self.num_heads, 3, -1)"),
            ("jnp.transpose(qkv, (2, 0, 3, 1, 4))", "jnp.transpose(qkv, (3, 0, 2, 1, 4))"),
        ),
    ),
    Port("relative_bias", "", close(1e-4)),
    Port(
        "relative_bias",
        "far buckets clamped at the whole number",
        close(1e-5, "length 6", length=6),
        (("np.minimum(large, n - 1)", "np.minimum(large, num_buckets - 1)"),),
    ),
    Port("relative_bias", "buckets of left and right exchanged", SIMILAR, (("np.where(rel > 0", "np.where(rel < 0"),)),
    Port("experts", "", close(1e-5)),
    Port(
        "experts",
        "weights of the chosen do not add up to 1",
        LEARNS,
        (("    top = top / top.sum(axis=-1, keepdims=True)\n", ""),),
    ),
    Port(
        "experts",
        "GELU for SiLU; weights do not add up to 1",
        SHAPES,
        (("jax.nn.silu(g)", "jax.nn.gelu(g)"), ("    top = top / top.sum(axis=-1, keepdims=True)\n", "")),
    ),
    Port("bidirectional_lstm", "", close(1e-7)),
    Port(
        "bidirectional_lstm",
        "backward outputs not turned back",
        close(1e-5, "length 1", length=1),
        (('params["backwards"], xs[::-1])[::-1]', 'params["backwards"], xs[::-1])'),),
    ),
    Port(
        "bidirectional_lstm",
        "the output gate sees the old cell",
        close(1e-5, "length 1", length=1),
        (
            ("        c = f * c + i * jnp.tanh(zg)\n", ""),
            ('jax.nn.sigmoid(zo + p["peep"][2] * c) * jnp.tanh(c)', 'jax.nn.sigmoid(zo + p["peep"][2] * c)'),
            (
                "        return (h, c), h",
                "        c = f * c + i * jnp.tanh(zg)\n        h = h * jnp.tanh(c)\n        return (h, c), h",
            ),
        ),
    ),
    Port(
        "bidirectional_lstm",
        "gate and output exchanged; backward outputs not turned back",
        LEARNS,
        (
            ("zi, zf, zg, zo =", "zi, zf, zo, zg ="),
            ('params["backwards"], xs[::-1])[::-1]', 'params["backwards"], xs[::-1])'),
        ),
    ),
    Port("normed_gru", "", close(1e-5)),
    Port("normed_gru", "biased standard deviation", MEANS, ((", ddof=1", ""),)),
    Port("normed_gru", "update gate turned around", LEARNS, (("(1 - z) * n + z * h", "z * n + (1 - z) * h"),)),
    Port("normed_gru", "epsilon under the root", close(1e-5), (("/ (std + 1e-6)", "/ jnp.sqrt(std**2 + 1e-6)"),)),
    Port("convolution_module", "", close(1e-5)),
    Port(
        "convolution_module",
        "even kernel padded on the other side",
        MEANS,
        (("[(size // 2, size // 2 - 1)]", "[(size // 2 - 1, size // 2)]"),),
    ),
    Port("convolution_module", "epsilon of LayerNorm 1e-6", close(1e-4), (("eps=1e-5", "eps=1e-6"),)),
    Port("vector_quantizer", "", close(1e-5)),
    Port(
        "vector_quantizer",
        "stopped gradients of both losses exchanged",
        close(1e-5),
        (("codebook_loss + self.beta * commit_loss", "commit_loss + self.beta * codebook_loss"),),
    ),
    Port("vector_quantizer", "no straight-through estimator", close(1e-5), (("z + sg(q - z)", "q"),)),
    Port("mixture_head", "", close(1e-6)),
    Port("mixture_head", "log scale counted once, not per dimension", LEARNS, (("- dim * log_s -", "- log_s -"),)),
    Port(
        "mixture_head",
        "log scale not clipped",
        close(1e-5),
        (
            (
                'jnp.clip(x @ params["scale_w"] + params["scale_b"], -3.0, 2.0)',
                'x @ params["scale_w"] + params["scale_b"]',
            ),
        ),
    ),
    Port("graph_attention", "", close(1e-5)),
    Port("graph_attention", "slope of leaky ReLU 0.01", MEANS, (("send[:, None, :], 0.2)", "send[:, None, :])"),)),
    Port(
        "graph_attention",
        "absent edges have score 0",
        close(1e-5, "all edges", density=1.0),
        (("scores, -jnp.inf), axis", "scores, 0.0), axis"),),
    ),
    Port("conditional_field", "", close(1e-5)),
    Port(
        "conditional_field",
        "mask of transitions off by one",
        close(1e-4, "no padding", lengths=(7, 7, 7)),
        (("trans * mask[:, 1:]", "trans * mask[:, :-1]"),),
    ),
    Port(
        "conditional_field",
        "the last tag is that of padding; mask of transitions off by one",
        close(1e-4, "no padding", lengths=(7, 7, 7)),
        (
            ("last = jnp.take_along_axis(tags, mask.sum(1)[:, None] - 1, axis=1)[:, 0]", "last = tags[:, -1]"),
            ("trans * mask[:, 1:]", "trans * mask[:, :-1]"),
        ),
    ),
    Port("time_embedding", "", close(1e-5)),
    Port(
        "time_embedding",
        "frequencies rounded to bfloat16",
        close(1e-2, "steps below 1", most=1.0),
        (("args = t[:, None] * freqs", "args = t[:, None] * freqs.astype(jnp.bfloat16)"),),
    ),
    Port(
        "time_embedding",
        "sine before cosine",
        SIMILAR,
        (("[jnp.cos(args), jnp.sin(args)]", "[jnp.sin(args), jnp.cos(args)]"),),
    ),
)
