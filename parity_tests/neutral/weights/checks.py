"""Checks that several tests of rules share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


def raises(error: type[Exception], message: str, call: Any, *arguments: Any, **keywords: Any) -> None:
    """Check that a call raises that very type with that very text."""
    with pytest.raises(error) as caught:
        call(*arguments, **keywords)
    assert type(caught.value) is error
    assert str(caught.value) == message


BIJECTION = "pattern is not a bijection of axes"
ONE = np.ones(2)
