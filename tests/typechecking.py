"""The run-time check of heinsen's annotations: conftest.py installs it on every function as heinsen is imported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as static type checkers have it


def checked_modules() -> list[str]:
    """Return the names of heinsen's modules whose annotations are checked."""
    root = Path(__file__).parent.parent
    paths = [path.relative_to(root).with_suffix("") for path in (root / "heinsen").rglob("*.py")]
    return sorted({".".join(path.parts) for path in paths if path.name != "__init__"})


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply beartype, except where it does not support an annotation: `Self` in a method, a generic named tuple.

    Not to functions within functions, which it would read anew whenever the outer one runs: a tenth of the tests' time.
    """
    if "<locals>" in function.__qualname__:
        return function
    try:
        return _check(function)
    except BeartypeDecorHintException:
        return function
