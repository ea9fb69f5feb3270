"""What `torch_attn.backend` does beyond running modules: the number of threads, which belongs to the process."""

from __future__ import annotations

import threading

import pytest
import torch

from torch_attn import backend


def fail():
    with backend.few_threads():
        assert torch.get_num_threads() == 1
    raise LookupError


def test_few_threads_are_as_many_as_before_afterwards():
    former = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(LookupError), backend.few_threads():
            fail()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(former)


def test_overlapping_thread_limits_restore_the_first_count():
    former, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    has_begun, may_end = threading.Event(), threading.Event()

    def work():
        with backend.few_threads():
            has_begun.set()
            may_end.wait(60)
        seen.append(torch.get_num_threads())

    try:
        with backend.few_threads():
            other = threading.Thread(target=work)
            other.start()
            assert has_begun.wait(60)
        may_end.set()
        other.join(60)
        assert seen == [3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(former)
