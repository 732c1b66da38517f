"""One run as a process, started by the sweep on this machine or by a SLURM job on a node.

The run's folder shows what became of it: `status.json` holds its state, and `lock` is held as long as the process is
alive. A run of a killed sweep or job is sent SIGTERM by the system (on Linux), on which train.py saves a checkpoint.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit

from heinsen.errors import EXIT_INTERRUPTED
from heinsen.files import hold_lock, is_held, seal, unseal, write_atomically
from heinsen.sweep.runs import STATES

STATUS_FILE, LOCK_FILE, LOG_FILE = "status.json", "lock", "train.log"
PATIENCE = 600.0  # seconds for the run of a killed sweep to save and exit: it may be compiling

# A new process executes this before it becomes the run. (Python code between fork and exec, as by `preexec_fn`, may
# deadlock in a process with JAX's threads.)
_BECOME = """
import ctypes, os, signal, sys
signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM's warning reaches all processes of a job, which handles it
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if sys.argv[1]:
    os.sched_setaffinity(0, map(int, sys.argv[1].split(",")))
os.execvp(sys.argv[2], sys.argv[2:])
"""


def start_run(
    command: Sequence[str], folder: Path, cores: Sequence[int] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start the command of a run in a folder, which is made if it is missing.

    Args:
      cores: that the process may use; () for all.
      environment: variables to add to those of this process.

    Raises:
      LockedError: an earlier process of the run does not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder / LOCK_FILE, PATIENCE) as lock, (folder / LOG_FILE).open("ab") as log:
        write_status(folder, state="running", started=time.time(), ended=None, returncode=None)
        return subprocess.Popen(
            [sys.executable, "-c", _BECOME, ",".join(map(str, cores)), *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock.fileno()],  # the run holds the lock from now on
            start_new_session=True,  # a terminal's Ctrl-C is for the sweep, which then stops its runs
        )


def record_end(folder: Path, returncode: int) -> None:
    """Record that the process of a run has ended."""
    was_stopped = returncode == EXIT_INTERRUPTED or returncode < 0
    state = "finished" if returncode == 0 else "interrupted" if was_stopped else "crashed"
    write_status(folder, state=state, ended=time.time(), returncode=returncode)


def write_status(folder: Path, **changes: Any) -> None:
    """Change fields of a run's status.json."""
    last: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # where it is damaged, the run itself knows where it was
        last = read_status(folder)
    write_atomically(folder / STATUS_FILE, json.dumps(seal(last | changes)) + "\n")


def read_status(folder: Path) -> dict[str, Any]:
    """Return the status of a run, {} if it has never been started.

    Raises ValueError if it is damaged, and OSError if it cannot be read.
    """
    try:
        status = unseal(json.loads((folder / STATUS_FILE).read_bytes()))
    except FileNotFoundError:
        return {}
    if status.get("state") not in STATES:
        raise ValueError(f"its state is {status.get('state')!r}")
    return status


def is_alive(folder: Path) -> bool:
    """Return whether a process of the run is alive."""
    return is_held(folder / LOCK_FILE)


# ---- SLURM ---------------------------------------------------------------------------------------


class SlurmTask:
    """A run that submitit executes on a node: `command` in `folder`."""

    def __init__(self, command: list[str], folder: Path):
        self.command, self.folder = command, folder
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Run the command to its end and return its exit status.

        Exits if the run was stopped: submitit then asks SLURM whether the job is requeued.
        """
        self._process = start_run(self.command, self.folder)
        code = self._process.wait()
        record_end(self.folder, code)
        if code == EXIT_INTERRUPTED or code < 0:
            sys.exit(code if code > 0 else 128 - code)
        return code

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Save the run and return its continuation: submitit calls this at the time limit or on preemption."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            # Not Popen.wait: this handler of a signal interrupts such a call, which holds a lock.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        record_end(self.folder, EXIT_INTERRUPTED)
        return submitit.helpers.DelayedSubmission(SlurmTask(self.command, self.folder))


@functools.cache  # submitit asks SLURM about all jobs together, at a limited rate
def slurm_job(jobs: Path, job_id: str) -> submitit.SlurmJob[int]:
    """Return a job that has been submitted from the folder `jobs`, perhaps by another process."""
    return submitit.SlurmJob(jobs, job_id)


def slurm_holds(jobs: Path, job_id: str) -> bool:
    """Return whether the job is queued or running. False on a machine without SLURM."""
    return shutil.which("sacct") is not None and not slurm_job(jobs, job_id).done()
