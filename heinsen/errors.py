"""The base of every error that a user can mend, and how a program ends with one."""

import contextlib
import sys
from collections.abc import Iterator


class HeinsenError(Exception):
    """An error whose message names the value at fault and the remedy; programs print it as one line and exit."""


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """End the program with status 1 and one line on stderr where a `HeinsenError` is raised within."""
    try:
        yield
    except HeinsenError as error:
        sys.exit(f"error: {error}")
