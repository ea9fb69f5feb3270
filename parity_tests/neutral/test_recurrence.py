"""Forms of recurrent attention, whose numbers are the same and whose costs are not."""

from __future__ import annotations

import pytest

from attn_bridge.recurrence import choose_form


@pytest.mark.parametrize(
    ("form", "tokens", "chosen"),
    [
        (None, 1, "recurrent"),
        (None, 2, "chunked"),
        ("chunked", 1, "chunked"),
        ("recurrent", 2, "recurrent"),
    ],
)
def test_tokens_are_computed_in_chunks_unless_a_form_or_a_single_token_is_given(form, tokens, chosen):
    assert choose_form(form, tokens) == chosen
