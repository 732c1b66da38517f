"""One command as a SLURM job array: task i of N runs it with --shard_count=N --shard_index=i. Submits, and waits."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from heinsen.errors import HeinsenError
from heinsen.files import make_folder, write_atomically

_POLL_SECONDS = 5.0
_STATUS = "exit status"  # how the log of a task ends
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


class ArrayError(HeinsenError, RuntimeError):
    """The array cannot be submitted, or tasks have failed."""


def run_array(command: Sequence[str], tasks: int, folder: Path, options: Sequence[str]) -> None:
    """Execute a command that takes --shard_count and --shard_index in `tasks` jobs, and wait for their end.

    An array of an earlier call with this folder that SLURM still holds is waited for, and none is submitted.

    Args:
      folder: for the tasks' logs and the array's id; seen by all nodes.
      options: of sbatch.

    Raises:
      ArrayError: SLURM rejects the array, the folder holds another one, or tasks have failed. Names their logs.
    """
    make_folder(folder)
    record = folder / "array.json"
    wanted = {"command": list(command), "tasks": tasks}
    array = _held(record, wanted)
    if array is None:
        array = _submit(command, tasks, folder, options)
        write_atomically(record, json.dumps(wanted | {"array": array}) + "\n")
        print(f"SLURM array {array}: {tasks} tasks, logs in {folder}", file=sys.stderr, flush=True)
    _wait(array, tasks)
    failed = [log for i in range(tasks) if not _has_succeeded(log := folder / f"{array}_{i}.log")]
    if failed:
        raise ArrayError(
            f"{len(failed)} of {tasks} tasks have failed. Rerun the same command to resume them. "
            + "; ".join(f"{log}: {_last_line(log)}" for log in failed[:3])
        )


def _held(record: Path, wanted: dict) -> str | None:
    """Return the id of the recorded array if SLURM still holds tasks of it. Raises ArrayError if it is another one."""
    if not record.exists():
        return None
    kept = json.loads(record.read_text())
    array = kept.pop("array")
    if not _active(array):
        return None
    if kept != wanted:
        raise ArrayError(
            f"SLURM holds array {array} of another command for this folder ({shlex.join(kept['command'])}, "
            f"{kept['tasks']} tasks): wait for its end, or scancel {array}"
        )
    print(f"SLURM still holds array {array}: waiting for it", file=sys.stderr, flush=True)
    return array


def _submit(command: Sequence[str], tasks: int, folder: Path, options: Sequence[str]) -> str:
    line = f"{shlex.join(command)} --shard_count={tasks} --shard_index=$SLURM_ARRAY_TASK_ID"
    submit = ["sbatch", "--parsable", f"--array=0-{tasks - 1}", "--requeue", "--open-mode=append", *options]
    submit += [
        f"--output={folder.absolute()}/%A_%a.log",
        f"--wrap={line}; status=$?; echo {_STATUS} $status; exit $status",
    ]
    try:
        done = subprocess.run(submit, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ArrayError("--launcher=slurm: SLURM is not installed here (no sbatch)") from error
    if done.returncode:
        raise ArrayError(f"SLURM rejects the array: {done.stderr.strip()}")
    return done.stdout.strip().split(";")[0]


def _wait(array: str, tasks: int) -> None:
    """Wait until SLURM holds no task of the array any more, and tell what becomes of them."""
    told = ""
    try:
        while active := _active(array):
            running = sum(state == "running" for state in active.values())
            line = f"array {array}: {tasks - len(active)} of {tasks} tasks ended, {running} running"
            if line != told:
                print(line, file=sys.stderr, flush=True)
                told = line
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        print(f"SLURM keeps running array {array}: `scancel {array}` ends it", file=sys.stderr, flush=True)
        raise


def _active(array: str) -> dict[str, str]:
    """Return {job: state} of the array's tasks that SLURM holds, asking again until it answers."""
    while (queue := slurm_queue()) is None:
        time.sleep(_POLL_SECONDS)
    return {job: state for job in queue if job.split("_")[0] == array and (state := queued_state(queue, job))}


def _has_succeeded(log: Path) -> bool:
    return _last_line(log) == f"{_STATUS} 0"


def _last_line(log: Path) -> str:
    """Return the last line of a task's log, before that with its status if it has failed."""
    lines = log.read_text(errors="replace").split("\n")[:-1] if log.exists() else []
    return next((line for line in reversed(lines) if line == f"{_STATUS} 0" or not line.startswith(_STATUS)), "no log")


def slurm_queue() -> dict[str, str] | None:
    """Return {job id: its SLURM state} for this user's jobs, arrays task by task; None if SLURM does not answer."""
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i %T"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        return None
    return dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if " " in line)


def queued_state(queue: dict[str, str], job: str | None) -> str | None:
    """Return the state of the run whose job this is, or None if SLURM no longer holds the job."""
    if job is None or job not in queue:
        return None
    return "queued" if queue[job] in _WAITING else "running"
