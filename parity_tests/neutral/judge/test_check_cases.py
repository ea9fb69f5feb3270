"""What `attn-bridge check` runs by default."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from attn_bridge.specs import VARIANTS
from attn_parity.check import kernels, matrix
from attn_parity.check.cases import MODES, cases_of, draw
from attn_parity.check.twin_runs import CheckRow
from attn_parity.sides.arrays import DTYPES


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_runs_every_case_and_users_case_in_full(variant):
    subjects = [CheckRow(variant, case) for case in cases_of(variant, is_brief=True)]
    assert [one.case.name for one in subjects] == [case.name for case in cases_of(variant)]
    assert all("float64" in one.precisions(DTYPES, everywhere=False) for one in subjects)
    (first,) = (one for one in subjects if one.is_first)
    assert {"float64", "float32", "bfloat16"} <= set(first.precisions(DTYPES, everywhere=False))
    assert first.is_in_full("float32")
    assert first.is_in_full("bfloat16") == (variant.name in ("MultiHeadAttention", "LayerNorm"))
    assert not any(one.is_in_full("float32") for one in subjects if one is not first)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_drawn_biases_and_scales_are_far_from_zero(variant):
    for case in cases_of(variant):
        vectors = [weight for weight in draw(case, variant, seed=3).weights.values() if weight.ndim == 1]
        assert all(np.abs(vector).min() >= 0.2 for vector in vectors)


def test_users_weights_are_run_in_full():
    (variant,) = (one for one in VARIANTS if one.name == "MultiHeadAttention")
    subject = CheckRow(variant, cases_of(variant)[-1], weights={})
    assert all(subject.is_in_full(dtype) for dtype in DTYPES)


def test_one_case_of_each_implementation_compiles_as_for_users():
    (full,) = (case for case in kernels.CASES if case.in_full)
    assert not full.operands, "every implementation serves it"
    assert not full.options
    assert {"float64", "float32"} == set(full.dtypes)
    assert {name for modes in MODES.values() for name in modes} == {"eager", "aot", "inductor", "jit"}


@pytest.mark.parametrize("case", kernels.CASES, ids=lambda case: case.name)
def test_no_kernel_case_sees_later_tokens(case):
    positions = np.arange(150)
    allowed = case.mask.allowed(positions[:, None], positions[None, :])
    assert not np.triu(allowed, 1).any()


def count(variants: str, cores: int, jobs: int | None = None, **options: Any) -> int:
    """Return the processes of a check on a machine with so many cores."""
    everywhere = options.get("everywhere", False)
    chosen = matrix._choose_rows(tuple(variants.split()), (), None, everywhere)
    work = matrix._Work(*chosen, DTYPES, everywhere, False, seeds=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "usable_cores", lambda: cores)
        return matrix._count_jobs(work, jobs)


def test_the_number_of_processes_follows_cores_and_work():
    assert [count("", cores) for cores in (1, 2, 3, 4, 64)] == [1, 2, 3, 4, 4]
    assert count("LayerNorm", 64) == 1
    assert count("MultiHeadAttention", 64, everywhere=True) == 1, "its cases share what is compiled"
    assert count("LayerNorm RMSNorm", 64) == 1, "done before another process has its imports"
    assert count("LayerNorm RMSNorm dot_product_attention", 64) == 3
    assert [count("", 2, jobs) for jobs in (1, 3, 100)] == [1, 3, 26]
    assert count("LayerNorm RMSNorm", 1, jobs=7) == 2


def test_the_parts_of_the_work_are_its_rows_in_order():
    work = matrix._Work(*matrix._choose_rows((), (), None, False), DTYPES, False, False, seeds=3)
    parts = work.parts()
    assert [row for part in parts for row in part.rows] == work.rows
    assert sum(part.runs for part in parts) == work.runs
    assert [str(part) for part in parts[:2]] == ["simple_self_attention", "SelfAttention_v1"]
    assert str(parts[-1]) == "dot_product_attention capped"
    assert pickle.loads(pickle.dumps(parts)) == parts
