"""One run of a sweep as a process: what submitit executes, here and on a cluster's nodes.

submitit gets this module by value (`launch.py`), so it imports nothing of heinsen: a node starts no JAX but the run's.

The run's folder tells what became of it: `status.json` by the job, and `lock`, held while the job or its run lives.
A job stops its run (which then saves a checkpoint) when a file `stop` appears in the folder, or when the sweep that
started it is gone: the sweep holds a lock on a file with a token of its own.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from heinsen.files import write_atomically

STATUS_FILE, LOCK_FILE, STOP_FILE, LOG_FILE = "status.json", "lock", "stop", "train.log"
EXIT_INTERRUPTED = 75  # of train.py: saved, run again
POLL_SECONDS = 0.2
PATIENCE = 600.0  # seconds for the run of a killed sweep to save and leave: it may be compiling


class TrainingJob:
    """A command and the folder of its run. `environment` changes the process's; None takes a variable away.

    cores: those it may use; None: all. sweep: (lock file, token) of the sweep to die with; None: it outlives it.
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
        self._child: subprocess.Popen | None = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_child": None}

    def __call__(self) -> None:
        """Run the command to its end. Leaves with its exit status where that is not 0."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK_FILE).open("a") as lock:
            if not wait_for_lock(lock, PATIENCE):
                sys.exit(f"{folder}: another process has been running it for {PATIENCE:.0f} s; nothing is done")
            code = self._run(folder, lock.fileno())
        if code != 0:
            sys.exit(code if code > 0 else 128 - code)

    def checkpoint(self):
        """submitit calls this shortly before the time is over, or on preemption: save, and go on later."""
        import submitit

        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            # Not Popen.wait: this may interrupt a call of poll, which holds a lock that wait wants.
            with contextlib.suppress(ChildProcessError):
                while os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                    time.sleep(POLL_SECONDS)
        self._write_status(Path(self.folder), state="interrupted", ended=time.time(), returncode=EXIT_INTERRUPTED)
        return submitit.helpers.DelayedSubmission(self)

    def _run(self, folder: Path, lock: int) -> int:
        if read_status(folder).get("state") == "finished":
            return 0
        environment = os.environ | {name: x for name, x in self.environment.items() if x is not None}
        for name, value in self.environment.items():
            if value is None:
                environment.pop(name, None)
        started = dict(
            state="running",
            started=time.time(),
            ended=None,
            returncode=None,
            host=socket.gethostname(),
            job=_slurm_job(),
            cores=self.cores,
        )
        self._write_status(folder, **started)
        with (folder / LOG_FILE).open("ab") as log:
            self._child = subprocess.Popen(
                self.command,
                cwd=self.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
                start_new_session=True,  # a terminal's Ctrl-C is for the sweep, which then stops its runs
                preexec_fn=self._before_exec(),
            )
            asked = None
            while self._child.poll() is None:
                if asked is None and (asked := self._why_stop(folder)):
                    self._child.send_signal(signal.SIGTERM)
                time.sleep(POLL_SECONDS)
        code = self._child.returncode
        if code == 0:
            state = "finished"
        elif code == EXIT_INTERRUPTED or code < 0:
            state = "pruned" if asked == "pruned" else "interrupted"
        else:
            state = "crashed"
        self._write_status(folder, state=state, ended=time.time(), returncode=code)
        return code

    def _why_stop(self, folder: Path) -> str | None:
        if (folder / STOP_FILE).exists():
            return "pruned"
        if self.sweep is not None and not is_held(Path(self.sweep[0]), self.sweep[1]):
            return "the sweep is gone"
        return None

    def _before_exec(self):
        """What the child does before it becomes the run."""
        cores = None if self.cores is None or not hasattr(os, "sched_setaffinity") else set(self.cores)
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

        def prepare() -> None:
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM's warning reaches all processes; it is the job's
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if prctl is not None:
                prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a killed job leaves no run behind
            if cores is not None:
                os.sched_setaffinity(0, cores)

        return prepare

    def _write_status(self, folder: Path, **changes) -> None:
        write_atomically(folder / STATUS_FILE, json.dumps(read_status(folder) | changes) + "\n")


def read_status(folder: Path) -> dict:
    """What the last job of a run has written; {} if there was none."""
    try:
        return json.loads((folder / STATUS_FILE).read_text())
    except (OSError, ValueError):
        return {}


def wait_for_lock(file, seconds: float) -> bool:
    """Take the lock on an open file, waiting so long for the one who holds it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)


def is_held(path: Path, token: str | None = None) -> bool:
    """Whether a process holds the lock on a file, one that has written this token to it."""
    try:
        with path.open() as file:
            if token is not None and file.read().strip() != token:
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _slurm_job() -> str | None:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID")
