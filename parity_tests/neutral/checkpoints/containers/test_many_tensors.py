"""Work on checkpoints of very many tensors grows with their number, and no faster."""

from __future__ import annotations

import numpy as np
import pytest

from attn_bridge import checkpoints
from attn_bridge.checkpoints.containers.base import TensorInfo
from attn_bridge.models import layouts
from attn_bridge.weights.index import Index, kinds_of


def counted(monkeypatch, owner, name):
    """Count the calls of a method, or the evaluations of a property."""
    calls, before = [], getattr(owner, name)
    get = before.fget if isinstance(before, property) else before

    def counting(*arguments):
        calls.append(1)
        return get(*arguments)

    monkeypatch.setattr(owner, name, property(counting) if isinstance(before, property) else counting)
    return calls


def test_verifying_looks_at_each_tensor_a_few_times(tmp_path, monkeypatch):
    evaluations = {}
    for count in (50, 200):
        arrays = {f"layers.{number}.w": np.full(2, number, np.float32) for number in range(count)}
        np.savez(tmp_path / f"{count}.npz", **arrays)
        checkpoints.convert(tmp_path / f"{count}.npz", tmp_path / f"{count}", to_layout="same")
        with monkeypatch.context() as patch:
            calls = counted(patch, TensorInfo, "nbytes")
            assert checkpoints.verify(tmp_path / f"{count}.npz", tmp_path / f"{count}").passed
            evaluations[count] = len(calls)
    assert evaluations[200] < 5 * evaluations[50]


@pytest.mark.parametrize("leaf", ["w", "mlp.gate_proj.weight"])
def test_names_of_a_kind_are_looked_up_together(monkeypatch, leaf):
    lookups = {}
    for count in (20, 400):
        names = [f"model.layers.{number}.experts.{number % 8 + 20}.{leaf}" for number in range(20, count + 20)]
        with monkeypatch.context() as patch:
            calls = counted(patch, Index, "find")
            with pytest.raises(layouts.LayoutError, match=r"fit no layout|no tensor has a name"):
                layouts.detect(names)
            lookups[count] = len(calls)
    assert lookups[400] == lookups[20]


def test_digits_that_a_template_spells_out_make_kinds_before_its_index_is_asked():
    Index([("only.w7391", 1)])
    spelled, other = kinds_of(("only.w7391", "only.w7392"))
    assert spelled != other


def test_kinds_keep_the_digits_that_templates_spell():
    assert layouts.find("hf-mixtral")  # its templates spell w1, w2, w3
    one, same, other = kinds_of(("layers.12345.w1", "layers.67890.w1", "layers.12345.w2"))
    assert one == same != other
