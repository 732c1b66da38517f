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
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_orbax(level: int) -> Iterator[None]:
    """Drop Orbax's log records of at least `level`: each thread and task repeats what also comes as an exception.

    When one of several reads fails, Orbax never awaits the others: Python's warnings of that are dropped, too.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio", None)]

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno < level or not (record.name == "asyncio" or "orbax" in record.pathname)

    for logger in loggers:
        logger.addFilter(is_wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
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


@functools.cache
def ignore_abandoned_reads() -> None:
    """Print no errors of reads that Orbax abandons when another read fails.

    They end later, in threads of TensorStore, and find their event loop closed, which Python reports as errors that
    nothing can catch: without this, a damaged checkpoint of 120 arrays prints about as many tracebacks.
    """
    report = sys.unraisablehook

    def report_unrelated(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            report(unraisable)

    sys.unraisablehook = report_unrelated


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
