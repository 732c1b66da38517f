"""One run of a sweep as a process: what submitit executes, on this machine or on a node of a cluster.

submitit receives this module and `heinsen.files` by value (`heinsen.sweep.launch`), and with them the constants that
they import: a job imports nothing of heinsen, and no process on a node starts JAX except the run.

The run's folder shows what became of it: the job writes `status.json`, and `lock` is held as long as the job or its
run is alive. A job stops its run, which then saves a checkpoint, when a file named `stop` appears in the folder, or
when the sweep that started it is gone: a sweep holds the lock on a file that contains a token of its own.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from heinsen.errors import EXIT_INTERRUPTED
from heinsen.files import LockedError, hold_lock, is_held, seal, unseal, write_atomically

STATUS_FILE, LOCK_FILE, STOP_FILE, LOG_FILE = "status.json", "lock", "stop", "train.log"
POLL_SECONDS = 0.2
PATIENCE = 600.0  # seconds for the run of a killed sweep to save and exit: it may be compiling


class TrainingJob:
    """A command and the folder of its run.

    `environment` changes the environment of the process; None removes a variable. The process may use `cores`, or all
    of them if None. `sweep` is the (lock file, token) of the sweep that the run must not outlive; None lets it.
    """

    def __init__(
        self,
        command: list[str],
        cwd: str,
        folder: str,
        environment: dict[str, str | None],
        cores: list[int] | None,
        sweep: tuple[str, str] | None,
    ):
        self.command, self.cwd, self.folder = command, cwd, folder
        self.environment, self.cores, self.sweep = environment, cores, sweep
        self._child: subprocess.Popen[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_child": None}

    def __call__(self) -> None:
        """Run the command to its end. Exits with the command's status if that is not 0."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with hold_lock(folder / LOCK_FILE, PATIENCE) as lock:
                code = self._run(folder, lock.file.fileno())
        except LockedError as error:
            sys.exit(f"{folder}: another job has been running it for {PATIENCE:.0f} s ({error}); nothing is done")
        if code != 0:
            sys.exit(code if code > 0 else 128 - code)

    def checkpoint(self) -> Any:
        """Save the run and return its continuation: submitit calls this at the time limit or on preemption."""
        import submitit

        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            # Not Popen.wait: this method may interrupt a call of poll, which holds a lock that wait needs.
            with contextlib.suppress(ChildProcessError):
                while os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                    time.sleep(POLL_SECONDS)
        _update_status(Path(self.folder), state="interrupted", ended=time.time(), returncode=EXIT_INTERRUPTED)
        return submitit.helpers.DelayedSubmission(self)

    def _run(self, folder: Path, lock: int) -> int:
        """Return the exit status of the command, and record its state."""
        if _last_status(folder).get("state") == "finished":
            return 0
        started = dict(state="running", started=time.time(), ended=None, returncode=None)
        _update_status(folder, **started, host=socket.gethostname(), job=_slurm_job(), cores=self.cores)
        with (folder / LOG_FILE).open("ab") as log:
            self._child = self._start(log, lock)
            stopped = self._wait(folder, self._child)
        code = self._child.returncode
        _update_status(folder, state=_end_state(code, stopped), ended=time.time(), returncode=code)
        return code

    def _start(self, log: IO[bytes], lock: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self.environment}
        return subprocess.Popen(
            self.command,
            cwd=self.cwd,
            env={name: value for name, value in environment.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
            start_new_session=True,  # a terminal's Ctrl-C is for the sweep, which then stops its runs
            preexec_fn=self._before_exec(),
        )

    def _wait(self, folder: Path, child: subprocess.Popen[bytes]) -> str | None:
        """Wait for the run to end, and return the reason why it was asked to, if it was."""
        reason = None
        while child.poll() is None:
            if reason is None and (reason := self._reason_to_stop(folder)):
                child.send_signal(signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        return reason

    def _reason_to_stop(self, folder: Path) -> str | None:
        if (folder / STOP_FILE).exists():
            return "pruned"
        if self.sweep is not None and not is_held(Path(self.sweep[0]), self.sweep[1]):
            return "interrupted"
        return None

    def _before_exec(self) -> Callable[[], None]:
        """Return what the child process does before it executes the command."""
        cores = None if self.cores is None or not hasattr(os, "sched_setaffinity") else set(self.cores)
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

        def prepare() -> None:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM's warning reaches all processes; the job handles it
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if prctl is not None:
                prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a killed job leaves no run behind
            if cores is not None:
                os.sched_setaffinity(0, cores)

        return prepare


def _end_state(code: int, stopped: str | None) -> str:
    """Return the state of a run that has exited, given the reason why it was asked to stop."""
    if code == 0:
        return "finished"
    if code == EXIT_INTERRUPTED or code < 0:
        return stopped or "interrupted"
    return "crashed"


def _update_status(folder: Path, **changes: Any) -> None:
    write_atomically(folder / STATUS_FILE, json.dumps(seal(_last_status(folder) | changes)) + "\n")


def _last_status(folder: Path) -> dict[str, Any]:
    """Return the status, {} if it is damaged: the run itself knows where it was."""
    with contextlib.suppress(OSError, ValueError):
        return read_status(folder)
    return {}


def read_status(folder: Path) -> dict[str, Any]:
    """Return what the last job of a run has written, {} if there was none.

    Raises ValueError if it is damaged, and OSError if it cannot be read.
    """
    try:
        status = unseal(json.loads((folder / STATUS_FILE).read_bytes()))
    except FileNotFoundError:
        return {}
    if "state" not in status:
        raise ValueError("it has no state")
    return status


def _slurm_job() -> str | None:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID")
