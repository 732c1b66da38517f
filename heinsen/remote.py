"""Addresses such as s3://bucket/name. Only here does the core reach heinsen.contrib.remote, and only for an address.

Orbax and tensorstore read and write checkpoints at gs:// themselves; nothing here is needed for that.
"""

import abc
import contextlib
import re
from pathlib import Path

from heinsen.errors import HeinsenError


class RemoteError(HeinsenError, RuntimeError):
    """An address that cannot be read or written, or that does not hold what it should."""


class Mirror(contextlib.AbstractContextManager["Mirror", None]):
    """The copy of a run folder at an address; leaving the context copies the rest."""

    @abc.abstractmethod
    def prepare(self, fingerprint: str) -> None:
        """Fetch the run into its folder if it is only at the address. `fingerprint` is that of the run's config."""

    @abc.abstractmethod
    def start(self, step: int) -> None:
        """Begin to copy in the background, as soon as the checkpoint of this step is whole."""


def is_remote(path: str) -> bool:
    """Return whether a path is an address, such as s3://bucket/name."""
    return re.match(r"[a-z][a-z0-9+.-]*://", path) is not None


def open_mirror(address: str, workdir: Path) -> Mirror:
    """Return the mirror at an address of a run folder, which need not exist yet. Raises RemoteError."""
    from heinsen.contrib import remote

    return remote.RunMirror(address, workdir)


def local_run(path: str) -> Path:
    """Return the folder of a run or an export that is to be read, after copying it from an address into the cache.

    Of a run that are its newest checkpoint and all files outside of checkpoints/. Raises RemoteError.
    """
    if not is_remote(path):
        return Path(path)
    from heinsen.contrib import remote

    return remote.fetch_run(path)


def local_split(dataset: str, split: str) -> Path:
    """Return the folder of a split of a token dataset, after copying it from an address into the cache.

    Raises RemoteError, and DatasetError if what lies at the address is no dataset or damaged.
    """
    if not is_remote(dataset):
        return Path(dataset) / split
    from heinsen.contrib import remote

    return remote.fetch_split(dataset, split)
