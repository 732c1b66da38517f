"""SLURM's queue, as `squeue` shows it."""

import shutil
import subprocess

_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


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
