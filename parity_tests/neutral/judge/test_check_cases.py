"""What `attn-bridge check` runs by default."""

from __future__ import annotations

import pytest

from attn_bridge.parity.check import kernels
from attn_bridge.parity.check.cases import MODES, cases_of
from attn_bridge.parity.check.twin_runs import Subject
from attn_bridge.parity.compare.sides.dtypes import DTYPES
from attn_bridge.specs import VARIANTS


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_runs_in_every_case_and_in_full_where_users_run_it(variant):
    subjects = [Subject(variant, case) for case in cases_of(variant, is_brief=True)]
    assert [one.case.name for one in subjects] == [case.name for case in cases_of(variant)]
    assert all("float64" in one.precisions(DTYPES, everywhere=False) for one in subjects)
    (first,) = (one for one in subjects if one.is_first)
    assert {"float64", "float32", "bfloat16"} <= set(first.precisions(DTYPES, everywhere=False))
    assert first.is_in_full("float32")
    assert first.is_in_full("bfloat16") == (variant.name in ("MultiHeadAttention", "LayerNorm"))
    assert not any(one.is_in_full("float32") for one in subjects if one is not first)


def test_what_a_user_gave_is_run_in_full():
    (variant,) = (one for one in VARIANTS if one.name == "MultiHeadAttention")
    subject = Subject(variant, cases_of(variant)[-1], weights={})
    assert all(subject.is_in_full(dtype) for dtype in DTYPES)


def test_one_case_of_the_implementations_is_compiled_as_users_compile_it():
    (full,) = (case for case in kernels.CASES if case.in_full)
    assert not full.operands, "every implementation serves it"
    assert not full.options
    assert {"float64", "float32"} == set(full.dtypes)
    assert {name for modes in MODES.values() for name in modes} == {"eager", "aot", "inductor", "jit"}
