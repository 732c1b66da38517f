"""Files at addresses such as s3://bucket/runs/a or gs://bucket/data, through fsspec.

Locks, renames and fsync are those of local files. So whatever is read at an address is first copied into a cache, and
only whole files are written there.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from heinsen.files import atomic_writer
from heinsen.remote import RemoteError

PATIENCE = 24 * 3600.0  # seconds to wait for another process that fetches the same


def cache_folder(kind: str, *key: str) -> Path:
    """Return the folder in the cache for what `key` names: $XDG_CACHE_HOME/heinsen/KIND/..., or in ~/.cache."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "heinsen" / kind / hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]


class Remote:
    """The files below an address. Every method raises RemoteError, which names the address, if it fails.

    Args:
      address: such as s3://bucket/name. The package of its protocol (s3fs, gcsfs, ...) finds the credentials.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        import fsspec

        try:
            self._files, self._root = fsspec.core.url_to_fs(self.address)
        except ImportError as error:
            raise RemoteError(f"{address} cannot be opened: {error}, with pip") from error
        except ValueError as error:
            raise RemoteError(f"{address} cannot be opened: {error}; expected s3://..., gs://... or such") from error
        if hasattr(self._files, "auto_mkdir"):  # file://
            self._files.auto_mkdir = True

    def list(self) -> dict[str, str]:
        """Return {name of a file, relative to the address: its version}, which changes with the contents."""
        with self._errors("read"):
            self._files.invalidate_cache()
            try:
                found: dict[str, dict[str, Any]] = self._files.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
            keys = ("size", "ETag", "etag", "generation", "mtime", "LastModified", "created")
            root = self._root.rstrip("/") + "/"
            return {
                path.removeprefix(root): " ".join(str(info[key]) for key in keys if key in info)
                for path, info in found.items()
                if path.startswith(root)
            }

    def read(self, name: str) -> bytes | None:
        """Return the contents of a file; None if there is none."""
        with self._errors("read"):
            try:
                content: bytes = self._files.cat_file(f"{self._root}/{name}")
            except FileNotFoundError:
                return None
            return content

    def download(self, name: str, target: Path) -> None:
        """Copy a file to `target`, which appears whole or not at all."""
        with self._errors("read"):
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(target) as file:
                self._files.get_file(f"{self._root}/{name}", file.name)

    def upload(self, source: Path, name: str) -> None:
        """Copy a file to the address."""
        with self._errors("written"):
            self._files.put_file(str(source), f"{self._root}/{name}")

    def write(self, content: bytes, name: str) -> None:
        """Write a file of this content."""
        with self._errors("written"):
            self._files.pipe_file(f"{self._root}/{name}", content)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        with self._errors("written"):
            for name in names:
                self._files.rm_file(f"{self._root}/{name}")

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each protocol raises its own kinds
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RemoteError(
                f"{self.address} cannot be {what}: {reason}. Check the address, the credentials and the network"
            ) from error
