"""What a call of a sharded torch module may ask for gives what the plain module gives, in float64."""

from __future__ import annotations

import dataclasses

import pytest

from ..support.processes import crew
from .processes import sharded_calls

JOB = (("tensor", 2), ("context", 2))
METHODS = ("all_gather", "ring", "ulysses")


@pytest.fixture(scope="module")
def distances(tmp_path_factory):
    job = sharded_calls.Job(JOB, METHODS, tmp_path_factory.mktemp("mesh"))
    return crew.run(sharded_calls.run_job, [dataclasses.replace(job, rank=rank) for rank in range(4)])[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [call.name for call in sharded_calls.calls()])
def test_outputs_and_gradients_are_those_of_the_plain_module(distances, name, method):
    assert distances[f"{name}, {method}"] <= 1e-12


@pytest.mark.parametrize("name", ["grouped", "delta net", "kimi", "lightning", "convolution", "mamba", "mamba2"])
def test_decoding_with_a_cache_gives_what_the_plain_module_gives(distances, name):
    assert distances[f"cache of {name}"] <= 1e-12
