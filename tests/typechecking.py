"""The run-time check of heinsen's annotations: conftest.py installs it on every function as heinsen is imported."""

from collections.abc import Callable
from typing import Any

from beartype import beartype
from beartype.roar import BeartypeDecorHintException


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply beartype, except where it does not support an annotation: `Self` in a method, a generic named tuple."""
    try:
        return beartype(function)
    except BeartypeDecorHintException:
        return function
