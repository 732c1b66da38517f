"""Silence what Orbax logs or complains of besides raising it, and find the cause in what it raises."""

import functools
import logging
import os
import re
import sys
import traceback
import warnings
from typing import Any


@functools.cache
def quiet_orbax() -> None:
    """Print, from now on, no log records of Orbax, which repeat what it raises, nor Python's complaints of its reads.

    When one read fails, Orbax abandons the others. They end at any time later, in threads of TensorStore or when Python
    collects them, and nothing can catch their errors: a damaged checkpoint of 120 arrays prints about as many
    tracebacks.
    """
    is_unrelated = lambda text: not re.search("orbax/checkpoint|tensorstore|Event loop is closed", text)
    for name in ("absl", "asyncio", None):
        logging.getLogger(name).addFilter(lambda record: is_unrelated(record.pathname + record.getMessage()))
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    report = sys.unraisablehook

    def report_unrelated(unraisable: Any) -> None:
        if is_unrelated("".join(traceback.format_exception(unraisable.exc_value))):
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
