"""Silence what Orbax logs or complains of besides raising it, and find the cause in what it raises."""

import contextlib
import functools
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def quiet_orbax(level: int) -> Iterator[None]:
    """Drop Orbax's log records of at least `level`: each thread and task repeats what also comes as an exception."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio", None)]

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno < level or not (record.name == "asyncio" or "orbax" in record.pathname)

    for logger in loggers:
        logger.addFilter(is_wanted)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_wanted)


def wait_for_threads(seconds: float = 60) -> None:
    """Wait for the threads that Orbax abandons when another thread of a save fails: they still write and log."""
    end = time.monotonic() + seconds
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            threading.Thread.join(thread, max(0.0, end - time.monotonic()))  # their own raises what they raised


def ignore_abandoned_reads() -> None:
    """Ignore, from now on, complaints of the reads that Orbax abandons when another read fails; they may end later."""
    if getattr(sys.unraisablehook, "func", None) is not _report_unrelated:
        sys.unraisablehook = functools.partial(_report_unrelated, sys.unraisablehook)
        sys.excepthook = functools.partial(_print_unrelated, sys.excepthook)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)


def _report_unrelated(report: Callable[[Any], Any], unraisable: Any) -> None:
    code = getattr(unraisable.object, "cr_code", None)
    if "Event loop is closed" not in str(unraisable.exc_value) and (code is None or "orbax" not in code.co_filename):
        report(unraisable)


def _print_unrelated(print_error: Callable[..., Any], kind: type[BaseException], error: Any, traceback: Any) -> None:
    """Print an error that nothing has caught, unless it is of a read that ends in a thread of TensorStore."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or "Event loop is closed" not in str(error):
        print_error(kind, error, traceback)


def describe_cause(error: BaseException, otherwise: str = "Orbax failed") -> str:
    """Return the system's or TensorStore's error if there is one, else the innermost cause, which Orbax's errors hide.

    Args:
      otherwise: what an error of neither means: it comes without a sentence, such as KeyError("key_type").
    """
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    for link in reversed(chain):
        if isinstance(link, OSError) and link.strerror:
            return f"{link.strerror}: {link.filename}" if link.filename else link.strerror
        if number := re.search(r"os_error_code='(\d+)'", str(link)):
            return os.strerror(int(number[1]))
    text = re.sub(r" \[tensorstore_spec.*", "", " ".join(str(chain[-1]).split()))
    if re.match("[A-Z_]{5,}: ", text):  # a status of TensorStore
        return text
    return f"{otherwise} ({type(chain[-1]).__name__}{text and f': {text}'})"
