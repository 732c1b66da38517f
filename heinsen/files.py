"""Atomic writes, after which a file or folder is whole or as before; JSON records with a digest; locks of folders."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_DIGEST = "digest"
_POLL_SECONDS = 0.2


@contextlib.contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Name `path` in an OSError of the block that names no file, as that of a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def make_folder(path: Path) -> None:
    """Create a folder for results with its parents, before they are computed. Raises OSError if it is not writable."""
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_writer(path: Path, suffix: str = ".tmp") -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`, which replaces `path` once it is whole and on disk.

    The temporary file is `path` with `suffix` appended to its name; concurrent writers need different suffixes. If the
    block raises, `path` is untouched and the temporary file is removed. Raises OSError, which names a file.
    """
    temporary = path.with_name(path.name + suffix)
    try:
        with name_errors(path):
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
        with name_errors(folder):
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


# Records with a digest.


def seal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON record with a digest of all its fields, which `unseal` checks."""
    fields = {name: value for name, value in record.items() if name != _DIGEST}
    return {**fields, _DIGEST: _digest(fields)}


def unseal(record: Any) -> dict[str, Any]:
    """Return a JSON record without its digest. Raises ValueError if it is no record, or its digest does not fit."""
    if not isinstance(record, dict):
        raise ValueError(f"{type(record).__name__} in place of a record")
    fields = {name: value for name, value in record.items() if name != _DIGEST}
    if record.get(_DIGEST) != _digest(fields):
        raise ValueError("its digest does not fit its contents" if _DIGEST in record else "it has no digest")
    return fields


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


# Locks.


class LockedError(BlockingIOError):
    """Another process holds a lock; the message says which process."""


@contextlib.contextmanager
def hold_lock(path: Path, patience: float = 2.0) -> Iterator[IO[str]]:
    """Hold the lock on a file, which is made if it is missing, and name this process in it; yield the open file.

    It is a lock of the operating system: it ends with the process that holds it and its children that inherited the
    file, however they end. Linux extends it to all machines that mount the same NFS folder. The file stays, empty,
    unless its holder removes it.

    Args:
      patience: seconds to wait for a process that holds the lock; `is_held` does so for a moment.

    Raises:
      LockedError: another process holds it.
      OSError: the file cannot be written, or its file system has no locks.
    """
    with _lock(path, time.monotonic() + patience) as file:
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        with name_errors(path):
            file.truncate(0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}, since {now}\n".encode())
        try:
            yield file
        finally:
            file.truncate(0)


def _lock(path: Path, deadline: float) -> IO[str]:
    """Open and lock a file; open it again where somebody has removed it meanwhile."""
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
            file.close()
        except BlockingIOError as error:
            with file:
                file.seek(0)
                if time.monotonic() >= deadline:
                    raise LockedError(file.readline().strip() or "another process") from error
            time.sleep(_POLL_SECONDS)
        except BaseException:
            file.close()
            raise


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock on a file."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
