"""The attention layers of torch and Flax themselves, and our drop-ins for them: one rule per weight.

They have no config of ours, so each backend's `find_stock_attention` describes those that it finds in a module.
"""

from __future__ import annotations

import dataclasses

from ..weights import Rule, Rules

PACKED = "in_proj_weight"
"""Name of the matrix that `torch.nn.MultiheadAttention` packs its three projections into if their inputs are equal."""

_PROJECTIONS = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class StockAttention:
    """The meaning of the weights of a `torch.nn.MultiheadAttention` or `flax.nnx.MultiHeadAttention`.

    Attributes:
        num_heads: heads that the queries are split into.
        num_kv_heads: heads of keys and values; torch has as many as heads of queries.
        bias: whether the four projections add biases.
        normalize_qk: whether queries and keys are normalised, which Flax alone can.
        add_bias_kv: whether a trained key and value are appended, which torch alone can.
        add_zero_attn: whether a key and value of zeros are appended, which torch alone can.
    """

    num_heads: int
    num_kv_heads: int
    bias: bool
    normalize_qk: bool = False
    add_bias_kv: bool = False
    add_zero_attn: bool = False

    def rules(self, *, is_packed: bool) -> Rules:
        """Return the rules of all weights.

        Args:
            is_packed: whether torch's layer has `PACKED`, rather than a matrix per projection (`kdim`, `vdim`).
        """
        heads = {"h": self.num_heads}
        kernels, biases = ([f"{name}.{kind}" for name in _PROJECTIONS] for kind in ("kernel", "bias"))
        if is_packed:
            rules = [Rule(PACKED, kernels, "(part h c) e -> e h c", part="part", **heads)]
        else:
            names = [f"{name[0]}_proj_weight" for name in _PROJECTIONS]
            pairs = zip(names, kernels, strict=True)
            rules = [Rule(name, kernel, "(h c) e -> e h c", **heads) for name, kernel in pairs]
        rules.append(Rule("out_proj.weight", "out.kernel", "o (h c) -> h c o", **heads))
        if self.bias:
            rules.append(Rule("in_proj_bias", biases, "(part h c) -> h c", part="part", **heads))
            rules.append(Rule("out_proj.bias", "out.bias", "o -> o"))
        return Rules(rules)
