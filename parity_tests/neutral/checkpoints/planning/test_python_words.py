"""Errors of `load` and `save` name arguments of Python, and what makes a checkpoint's names a module's."""

from __future__ import annotations

import pytest

from attn_bridge.checkpoints.modules.python_words import advice, in_python

REWORDED = {
    "take it (--strip model.)": "take it (strip='model.')",
    "(--strip 'a b.' --from hf-gpt2)": "(strip='a b.', from_layout='hf-gpt2')",
    "(--drop 'my.*' --drop x.bias)": "(drop=['my.*', 'x.bias'])",
    "--set tie=0 writes both": "settings={'tie': 0} writes both",
    "--set heads=N and --set kv=N": "settings={'heads': N} and settings={'kv': N}",
    "say which with --from": "say which with from_layout=",
    "--strip takes one of them, --drop leaves one out": "strip= takes one of them, drop= leaves one out",
    "rules (--rules, docs/rules.md) take": "rules (rules=, docs/rules.md) take",
    "--strip (x.) must be what": "strip (x.) must be what",
    "--from hf-bert takes them": "from_layout='hf-bert' takes them",
    "no option at all": "no option at all",
}


@pytest.mark.parametrize("text", REWORDED)
def test_options_become_arguments(text):
    assert in_python(text) == REWORDED[text]


def test_a_prefix_in_front_of_all_names_is_advised():
    names, wanted = ["ema.a", "net.x.a", "net.x.b"], ["a", "b"]
    assert advice(wanted, names, names, wanted) == "the names of the module are there below net.x. (strip='net.x.')"


def test_tensors_beyond_the_modules_are_advised_to_be_dropped():
    assert (
        advice([], ["my.a", "my.b"], ["w", "my.a", "my.b"], ["w"]) == "drop=['my.*'] leaves the unexpected tensors out"
    )


def test_names_that_do_not_fit_get_no_advice():
    assert advice(["b"], ["c"], ["a", "c"], ["a", "b"]) == ""
