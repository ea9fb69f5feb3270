"""The tests that authors of ports write for themselves: forward only, on easy inputs, with a tolerance by feel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

Array = np.ndarray


class Ported(Protocol):
    """An original and its port, with the original's weights."""

    def original(self, *inputs: Array) -> list[Array]:
        """Return the outputs of the original."""

    def port(self, *inputs: Array) -> list[Array]:
        """Return the outputs of the port."""

    def draw(self, **options: object) -> tuple[Array, ...]:
        """Return inputs; options are those of ``inputs`` in the kind's file."""

    def learn(self, inputs: Sequence[Array], steps: int) -> list[float]:
        """Return the port's mean squared outputs before each step of gradient descent on them."""


@dataclasses.dataclass(frozen=True)
class AuthorTest:
    """A test: its description, and the check, which raises AssertionError."""

    about: str
    check: Callable[[Ported], None]

    def passes(self, ported: Ported) -> bool:
        """Return whether the test passes."""
        try:
            self.check(ported)
        except AssertionError:
            return False
        return True


def close(tolerance: float, about: str = "", **options: object) -> AuthorTest:
    """Return the test that outputs are within `tolerance` (atol and rtol), on inputs that `about` describes."""

    def check(ported: Ported) -> None:
        inputs = ported.draw(**options)
        for got, wanted in zip(ported.port(*inputs), ported.original(*inputs), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)

    return AuthorTest(f"{tolerance:.0e}".replace("e-0", "e-") + f", {about}" * bool(about), check)


def _shapes(ported: Ported) -> None:
    inputs = ported.draw()
    for got, wanted in zip(ported.port(*inputs), ported.original(*inputs), strict=True):
        assert got.shape == wanted.shape
        assert np.isfinite(got).all()


def _means(ported: Ported) -> None:
    inputs = ported.draw()
    for got, wanted in zip(ported.port(*inputs), ported.original(*inputs), strict=True):
        assert abs(got.mean() - wanted.mean()) < 0.01


def _similar(ported: Ported) -> None:
    inputs = ported.draw()
    got, wanted = (np.concatenate([one.ravel() for one in f(*inputs)]) for f in (ported.port, ported.original))
    assert got @ wanted > 0.9 * np.linalg.norm(got) * np.linalg.norm(wanted)


def _learns(ported: Ported) -> None:
    losses = ported.learn(ported.draw(), 5)
    assert losses[-1] < losses[0]


SHAPES = AuthorTest("shapes, finite", _shapes)
MEANS = AuthorTest("means within 0.01", _means)
SIMILAR = AuthorTest("cosine above 0.9", _similar)
LEARNS = AuthorTest("the loss falls", _learns)
