"""The run-time check of heinsen's annotations: conftest.py installs it on every function as heinsen is imported."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as static type checkers have it


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply beartype, except where it does not support an annotation: `Self` in a method, a generic named tuple."""
    try:
        return _check(function)
    except BeartypeDecorHintException:
        return function
