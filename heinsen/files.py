"""Atomic writes: after a crash or a loss of power, a file or folder is whole or as it was before."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def atomic_writer(path: Path, suffix: str = ".tmp") -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`, which replaces `path` once it is whole and on disk.

    The temporary file is `path` with `suffix` appended to its name; concurrent writers need different suffixes. If the
    block raises, `path` is untouched and the temporary file is removed. Raises OSError.
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
    _sync_folder(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 text file with `atomic_writer`. Raises OSError."""
    with atomic_writer(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def atomic_folder(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Yield an empty temporary folder in which to write the files `names`, which then become those of `folder`.

    A new or empty folder appears whole or not at all. In one that holds files, each of `names` is replaced whole, in
    their order; other files stay. If the block raises, `folder` is untouched. Raises OSError.
    """
    folder = folder.resolve()
    replaces_files = folder.is_dir() and any(folder.iterdir())
    temporary = (folder if replaces_files else folder.parent) / f".{folder.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for name in names:
            _sync_file(temporary / name)
        if replaces_files:
            for name in names:
                os.replace(temporary / name, folder / name)
            _sync_folder(folder)
        else:
            _sync_folder(temporary)
            os.rename(temporary, folder)  # onto nothing, or an empty folder
            _sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries, such as a new name, to disk where the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
