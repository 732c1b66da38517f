"""Atomic writes: a file is there whole, or as it was before, also after a loss of power."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def atomic_writer(path: Path, suffix: str = ".tmp") -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`, which takes its name once it is whole and on disk.

    The temporary file is `path` with `suffix` appended to its name; writers that may meet give different ones. Where
    the block raises, `path` is untouched and the temporary file is removed. Raises OSError.
    """
    temporary = path.with_name(path.name + suffix)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 text file with `atomic_writer`. Raises OSError."""
    with atomic_writer(path) as file:
        file.write(text.encode())
