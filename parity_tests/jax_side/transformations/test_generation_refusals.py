"""What JAX's generation refuses that torch's does not."""

from __future__ import annotations

import pytest

from jax_attn.decoding import generation


def test_drawing_without_a_random_source_names_the_argument():
    with pytest.raises(
        ValueError, match=r"rng \(None\) must be .* temperature is above 0; give rng=jax\.random\.key\(0\)$"
    ):
        generation._uniform(None, (2, 3))
