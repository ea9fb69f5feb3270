"""Multi-head latent attention to the keys that an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

from __future__ import annotations

import dataclasses
from typing import Self

from .base import Example, Parameter, Variant
from .lightning_indexer import Indexer
from .model import below
from .multi_head_latent_attention import MultiHeadLatentAttentionConfig
from .position import Rotary
from .rope_scaling import YaRNScaling


@dataclasses.dataclass(frozen=True)
class SparseIndexedAttentionConfig(MultiHeadLatentAttentionConfig):
    """The sizes of `MultiHeadLatentAttentionConfig`, and an indexer.

    Attributes:
        indexer: chooses the keys that each query attends to, of those that the masks show.
    """

    indexer: Indexer = dataclasses.field(kw_only=True)

    @classmethod
    def of(cls, latent: MultiHeadLatentAttentionConfig, indexer: Indexer) -> Self:
        """Return the config of a latent attention with an indexer."""
        return cls(**{field.name: getattr(latent, field.name) for field in dataclasses.fields(latent)}, indexer=indexer)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.indexer, Indexer):
            raise TypeError(f"indexer must be an Indexer, got {type(self.indexer).__name__}")
        if self.position is not None and self.indexer.head_dim < self.rope_dim:
            raise ValueError(
                f"head_dim of Indexer ({self.indexer.head_dim}) must be at least rope_dim ({self.rope_dim})"
            )

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Those of the latent attention, and the indexer's."""
        return (*super().parameters, *below("indexer", self.indexer.parameters_of(self.d_in, self.query_source)))


_YARN = YaRNScaling(4.0, 16, mscale=1.0, mscale_all_dim=0.7)

EXAMPLES = (
    Example(
        "deepseek-v3.2",
        SparseIndexedAttentionConfig(
            6,
            2,
            5,
            3,
            4,
            2,
            query_dim=4,
            position=Rotary(pairing="interleaved", scaling=_YARN),
            indexer=Indexer(4, 6, top_k=3),
        ),
        mask="padding",
        dtypes=("float64", "float32", "bfloat16"),
    ),
    Example(
        "glm-5",
        SparseIndexedAttentionConfig(
            5, 3, 4, 2, 2, 6, query_dim=3, indexer=Indexer(5, 4, top_k=2, pairing="interleaved", norm_eps=1e-2)
        ),
        mask="per-head",
        return_weights=True,
    ),
)

VARIANT = Variant(
    "SparseIndexedAttention",
    "sparse_indexed_attention",
    SparseIndexedAttentionConfig,
    group="modern",
    examples=EXAMPLES,
)
