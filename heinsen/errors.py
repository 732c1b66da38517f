"""The base of all errors that a user can fix, and the one place where programs exit with them."""

import contextlib
import os
import sys
from collections.abc import Iterator

EXIT_ERROR = 1
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: rerun the same command to resume


class HeinsenError(Exception):
    """An error whose message names the cause and the remedy; programs print it and exit with status 1."""


class InputError(HeinsenError, ValueError):
    """An argument that cannot be used."""


class Interrupted(Exception):
    """A request to stop, after which everything is saved; programs print it and exit with status 75."""


@contextlib.contextmanager
def exit_on_error(on_interrupt: str | None = None) -> Iterator[None]:
    """Exit the program with a message on stderr, not a traceback, where the block raises an error of this package.

    Every entry point runs its work in this context. The exit status is 1 for a `HeinsenError`, 75 for `Interrupted`.

    Args:
      on_interrupt: the message of Ctrl-C, which exits with status 1; None: raise KeyboardInterrupt.
    """
    try:
        yield
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except HeinsenError as error:
        _exit(f"error: {error}")
    except KeyboardInterrupt:
        if on_interrupt is None:
            raise
        sys.exit(on_interrupt)


def _exit(message: str) -> None:
    """Exit with status 1. One of several processes does not wait for the others, which may be lost or wait for it."""
    if not _is_distributed():
        sys.exit(message)
    print(message, file=sys.stderr, flush=True)
    os._exit(EXIT_ERROR)


def _is_distributed() -> bool:
    """Whether this process has joined others; importing JAX to find out would cost seconds."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()
