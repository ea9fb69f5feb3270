"""Parity: the rule that says whether two implementations compute the same, and the matrix it is applied to."""

from .judge import TensorResult, judge_meaning, judge_precision
from .matrix import CheckReport, check

__all__ = ["CheckReport", "TensorResult", "check", "judge_meaning", "judge_precision"]
