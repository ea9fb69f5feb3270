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


def located_calls(path, body):
    """Return how each call of ``mark`` in the body of a function is located among all of them."""
    path.write_text(f"def forward(mark):\n{body}")
    namespace, sites = {}, []
    exec(compile(path.read_text(), path, "exec"), namespace)
    namespace["forward"](lambda *_: sites.append(stack.call_site(stack.live(sys._getframe(1)))))
    return [stack.located([site], sites) for site in sites]


LONGEST = f"mark({'1' * 54})"
"""An expression of 60 characters, the most that are shown."""


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("    mark(1)\n    mark(2)\n", ["2", "3"]),
        ("    'é', mark('ü'),  mark( 2 )\n", ["2 `mark('ü')`", "2 `mark( 2 )`"]),
        ("    mark(1), mark(\n        22)\n", ["2 `mark(1)`", "2 `mark( …`"]),
        (f"    mark(1), {LONGEST}\n", ["2 `mark(1)`", f"2 `{LONGEST}`"]),
        (f"    mark(1), {LONGEST[:-1]}1)\n", ["2 `mark(1)`", f"2 `{LONGEST[:58]} …`"]),
    ],
    ids=["lines", "accents", "two lines", "longest", "too long"],
)
def test_one_of_several_calls_in_a_line_is_named_by_its_expression(tmp_path, body, texts):
    path = tmp_path / "model.py"
    assert located_calls(path, body) == [f"{path}:{text}" for text in texts]


@pytest.mark.parametrize(("library", "is_model"), [("models", True), ("torch", False)])
def test_an_operation_in_an_installed_model_has_its_line_there(tmp_path, library, is_model):
    inner, outer = tmp_path / "site-packages" / library / "layers.py", tmp_path / "own.py"
    inner.parent.mkdir(parents=True)
    inner.write_text("\ndef layer(mark):\n    mark()\n")
    outer.write_text("def forward(mark):\n    layer(mark)\n")
    namespace, sites = {}, []
    for path in (inner, outer):
        exec(compile(path.read_text(), path, "exec"), namespace)
    namespace["forward"](lambda: sites.append(stack.call_site(stack.live(sys._getframe(1)))))
    called = f"{outer}:2"
    assert stack.located(sites, sites) == (f"models/layers.py:3, called at {called}" if is_model else called)
