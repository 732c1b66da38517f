"""The base of all errors that a user can fix, and the one place where programs exit with them."""

import contextlib
import ctypes
import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator

EXIT_ERROR = 1
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: rerun the same command to resume


class HeinsenError(Exception):
    """An error whose message names the cause and the remedy; programs print it and exit with status 1."""


class InputError(HeinsenError, ValueError):
    """An argument that cannot be used."""


class Interruption(Exception):
    """A request to stop, after which everything is saved; programs print it and exit with status 75."""


def print_warning(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def exit_on_error(on_interrupt: str | None = None, on_os_error: str = "") -> Iterator[None]:
    """Exit the program with a message on stderr, not a traceback, where the block raises an error that a user can fix.

    Every entry point runs its work in this context. The exit status is 75 for `Interruption`, and 1 for a
    `HeinsenError` and for an OSError of the system: a file that cannot be read, a full disk. Such an error names the
    file, as all do that come from `heinsen.files`.

    Args:
      on_interrupt: the message of Ctrl-C, which exits with status 1; None: raise KeyboardInterrupt.
      on_os_error: what to do after an OSError, besides its own remedy.
    """
    try:
        yield
    except Interruption as interruption:
        print(interruption, file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except HeinsenError as error:
        _exit(f"error: {error}")
    except KeyboardInterrupt:
        if on_interrupt is not None:
            sys.exit(on_interrupt)
        if not _is_distributed():
            raise
        _exit("interrupted")
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system
            _exit(f"error: {_describe_os_error(error)}" + f". {on_os_error}" * bool(on_os_error))
        if not _is_distributed():
            raise
        _exit(traceback.format_exc().rstrip())


def describe(error: Exception) -> str:
    """Return an error's message. An OSError's own would show a file's name by repr, which may escape some of it."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    return f"{error.strerror}: {error.filename}"


def _describe_os_error(error: OSError) -> str:
    """Return the file, the cause and the remedy of an OSError in one line."""
    cause = f"{error.strerror or error}{_REMEDIES.get(error.errno, '')}"
    return cause if error.filename is None else f"{error.filename}: {cause}"


_FULL, _DENIED, _WRONG = ": free some space", ": change its permissions", ": give another path"
_REMEDIES: dict[int | None, str] = {
    **dict.fromkeys([errno.ENOSPC, errno.EDQUOT, errno.EFBIG], _FULL),
    **dict.fromkeys([errno.EACCES, errno.EPERM], _DENIED),
    **dict.fromkeys([errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EROFS, errno.ENAMETOOLONG], _WRONG),
}


def _exit(message: str) -> None:
    """Exit with status 1. One of several processes does not wait for the others, which may be lost or wait for it."""
    if not _is_distributed():
        sys.exit(message)
    print(message, file=sys.stderr, flush=True)
    os._exit(EXIT_ERROR)


def exit_on_abort(message: str) -> None:
    """Exit with status 1 and this message, instead of SIGABRT and a stack trace alone, when C++ code calls abort().

    JAX's runtime does so in a process that has lost another one, from a thread of its own: nothing can be caught.
    """
    global _on_abort

    def exit_now(_: int) -> None:
        os.write(2, f"error: {message}\n".encode())
        os._exit(EXIT_ERROR)

    # A handler of Python's would run in the main thread, too late.
    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(exit_now)
    ctypes.CDLL(None).signal(ctypes.c_int(signal.SIGABRT), _on_abort)


_on_abort: object = None  # the handler, which must not be freed


def _is_distributed() -> bool:
    """Whether this process has joined others; importing JAX to find out would cost seconds."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()
