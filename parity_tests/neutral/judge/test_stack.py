"""Places in the user's code, as errors and hints name them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from attn_parity import stack


def test_a_cell_of_a_notebook_is_named_by_its_number(monkeypatch):
    file = "ipykernel_27/4048.py"  # as ipykernel names the file of a cell
    names = {file: ("Cell", "In[3]")}
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("\n1 / 0", file, "exec"))
    assert stack.raised_at(caught.value) == "cell In[3]:2"
