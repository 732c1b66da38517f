"""A run folder's copy at an address, such as s3://bucket/runs/a: written as the run goes on, read in place of the run.

    ADDRESS/config.json, metrics.jsonl, plots/...     as in the run folder
    ADDRESS/checkpoints/<step>/...                    as in the run folder
    ADDRESS/checkpoints/<step>.whole                  written once all files of this checkpoint are there

The run itself goes on in its folder on a file system, with locks and renames, which object stores lack. A machine that
has lost its disk fetches the folder from the mirror and resumes.
"""

import contextlib
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from heinsen.config import ConfigError
from heinsen.contrib.remote.files import PATIENCE, Remote, cache_folder
from heinsen.errors import Interrupted, print_warning
from heinsen.files import hold_lock, write_atomically
from heinsen.progress import track
from heinsen.remote import Mirror, RemoteError
from heinsen.training.checkpoint import CHECKPOINTS, DAMAGED, checkpoint_steps
from heinsen.training.folder import CONFIG_FILE, LOCK_FILE, RunError, parse_config

_WHOLE = re.compile(rf"{CHECKPOINTS}/(\d+)\.whole")
_POLL_SECONDS = 0.2


class RunMirror(Mirror):
    """The copy of one run; use as a context manager to copy the rest when the run ends or is interrupted.

    Args:
      address: where to copy to.
      workdir: the run folder. It need not exist yet.
      warn: called with a message for each copy that failed and is tried again.
    """

    def __init__(self, address: str, workdir: Path, warn: Callable[[str], object] = print_warning) -> None:
        self._remote, self._workdir, self._warn = Remote(address), workdir, warn
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._copied: dict[str, tuple[int, int]] = {}  # time and size of each file that lies at the address

    def prepare(self, fingerprint: str) -> None:
        """Fetch the run into its folder if it is only at the address.

        Raises:
          RunError: the address holds a run with another config, or one that is further than the run in the folder.
          RemoteError: it cannot be read.
        """
        listed = self._remote.list()
        if (theirs := self._read_fingerprint()) is None:
            return
        if theirs != fingerprint:
            raise RunError(f"{self._remote.address} holds a run with another config: give another --mirror")
        newest = max(_whole_steps(listed), default=0)
        if not (self._workdir / CONFIG_FILE).exists():
            print(f"{self._workdir} holds no run: fetching step {newest}", file=sys.stderr, flush=True)
            names = [name for name in listed if name.startswith(f"{CHECKPOINTS}/{newest}/")]
            _fetch(self._remote, [*names, *_outside_checkpoints(listed)], self._workdir)
        elif newest > (here := max(checkpoint_steps(self._workdir), default=0)):
            raise RunError(
                f"{self._remote.address} holds step {newest} of this run, {self._workdir} step {here}: give an empty "
                "--workdir, to go on from there, or another --mirror"
            )

    def start(self, step: int) -> None:
        """Begin to copy in the background, as soon as the checkpoint of this step is whole.

        A copy that is still going on goes on; what it misses comes with the next one.
        """
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._copy_later, args=(step,), daemon=True)
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        if error is not None and not isinstance(error, Interrupted):
            return
        try:
            self.copy()
        except RemoteError as failed:
            message = f"{failed}. {self._workdir} is whole: rerun the same command to copy it"
            if error is None:
                raise RemoteError(message) from failed
            self._warn(message)

    def copy(self) -> None:
        """Copy what the address lacks, checkpoints first; remove checkpoints that the folder no longer holds."""
        listed, steps = self._remote.list(), checkpoint_steps(self._workdir)
        for step in steps:
            if f"{CHECKPOINTS}/{step}.whole" not in listed:
                self._copy_checkpoint(step)
        own = (CHECKPOINTS, DAMAGED)
        for path in sorted(self._workdir.rglob("*")):
            name = path.relative_to(self._workdir).as_posix()
            if name.split("/")[0] not in own and name != LOCK_FILE and not name.endswith(".tmp") and path.is_file():
                self._copy_if_new(path, name)
        gone = [name for name in listed if name.startswith(f"{CHECKPOINTS}/") and _step_of(name) not in steps]
        self._remote.remove(sorted(gone, key=lambda name: _WHOLE.fullmatch(name) is None))  # no longer whole first

    def _copy_checkpoint(self, step: int) -> None:
        folder = self._workdir / CHECKPOINTS / str(step)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        try:
            for path in files:
                self._remote.upload(path, path.relative_to(self._workdir).as_posix())
        except RemoteError:
            if folder.exists():
                raise
            return  # a newer one has taken its place meanwhile
        self._remote.write(b"", f"{CHECKPOINTS}/{step}.whole")

    def _copy_if_new(self, path: Path, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # replaced meanwhile
            status = path.stat()
            version = status.st_mtime_ns, status.st_size
            if self._copied.get(name) != version:
                self._remote.upload(path, name)
                self._copied[name] = version

    def _copy_later(self, step: int) -> None:
        while not (self._workdir / CHECKPOINTS / str(step)).exists():  # Orbax renames it when it is whole
            if self._ending.wait(_POLL_SECONDS):
                return
        try:
            self.copy()
        except RemoteError as error:
            self._warn(f"{error}. It is tried again after the next checkpoint")

    def _read_fingerprint(self) -> str | None:
        content = self._remote.read(CONFIG_FILE)
        try:
            return None if content is None else parse_config(json.loads(content))[0].fingerprint
        except (ConfigError, ValueError) as error:
            raise RunError(f"{self._remote.address} holds something else than this run ({error})") from error


def fetch_run(address: str) -> Path:
    """Return the folder in the cache to which a run, with its newest checkpoint, or an export is copied.

    Raises RemoteError.
    """
    remote = Remote(address)
    listed = remote.list()
    if CONFIG_FILE not in listed:
        raise RemoteError(f"{address} holds no run and no export: it has no {CONFIG_FILE}")
    newest = max(_whole_steps(listed), default=None)
    names = [name for name in listed if name.startswith(f"{CHECKPOINTS}/{newest}/")] + _outside_checkpoints(listed)
    version = json.dumps({name: listed[name] for name in names}, sort_keys=True)
    folder = cache_folder("runs", remote.address) / remote.address.rsplit("/", 1)[-1]
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder.parent / "lock", PATIENCE):
        record = folder.parent / "version.json"
        if not record.exists() or record.read_text() != version:
            record.unlink(missing_ok=True)
            shutil.rmtree(folder)
            _fetch(remote, names, folder)
            write_atomically(record, version)
    return folder


def _fetch(remote: Remote, names: list[str], folder: Path) -> None:
    """Copy files from the address; config.json, which makes a folder a run, is the last."""
    names = sorted(names, key=lambda name: name == CONFIG_FILE)
    for name in track(names, f"fetching {remote.address}", len(names), lambda _: 1, "files"):
        remote.download(name, folder / name)


def _outside_checkpoints(listed: dict[str, str]) -> list[str]:
    return [name for name in listed if not name.startswith(f"{CHECKPOINTS}/")]


def _whole_steps(listed: dict[str, str]) -> list[int]:
    """Return the steps whose checkpoints are whole at the address; a copy by other means says nothing of that."""
    whole = [int(match[1]) for name in listed if (match := _WHOLE.fullmatch(name))]
    return whole or sorted({step for name in listed if (step := _step_of(name)) is not None})


def _step_of(name: str) -> int | None:
    """The step of a checkpoint's file, by its name."""
    match = re.match(rf"{CHECKPOINTS}/(\d+)[./]", name)
    return int(match[1]) if match else None
