"""A sweep through SLURM, in truth: tests/slurm/setup.sh makes this machine a cluster."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from heinsen.sweep.folder import SweepFolder
from tests.runs import BATCH, LENGTH, OVERRIDES, ROOT, finish, read_log

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.long

STEPS = 3000
PATIENCE = 1500  # seconds: six runs on the cores there are


@pytest.fixture(scope="module")
def slurm():
    ready = lambda: (
        shutil.which("scontrol") and subprocess.run(["scontrol", "ping"], capture_output=True).returncode == 0
    )
    was_there = ready()
    if not was_there:
        script = ROOT / "tests" / "slurm" / "setup.sh"
        made = subprocess.run([script], capture_output=True, text=True, timeout=PATIENCE)
        if made.returncode != 0:
            pytest.skip(f"SLURM cannot be set up here: {made.stderr.strip()[-500:]}")
    yield
    if not was_there:
        subprocess.run([script, "stop"], check=True, capture_output=True)


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def train_process(folder):
    """The process id of the train.py of a run."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"--workdir={folder}".encode() in words and any(word.endswith(b"train.py") for word in words):
                return int(entry)
    raise AssertionError(f"no process trains {folder}")


@pytest.fixture(scope="module")
def swept(slurm, data, commands, tmp_path_factory):
    """Six runs; of those under way one is requeued by the administrator, one told that its time is over, one killed."""
    path = tmp_path_factory.mktemp("slurm") / "sweep"
    settings = OVERRIDES | {"data.path": data, "total_tokens": STEPS * BATCH * LENGTH}
    settings |= {"checkpoint_every": STEPS, "validate_every": STEPS}
    del settings["optimizer.learning_rate"]
    command = ["scripts/sweep.py", "--config=configs/default.py", f"--workdir={path}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    command += ["--sweep.optimizer.learning_rate=1e-3,2e-3,4e-3", "--seeds=2", "--launcher=slurm", "--time=0:30:00"]
    process = commands.start(*command)
    try:
        wait_until((path / "sweep.json").exists, "the sweep does not begin")
        runs = [path / run.name for run in SweepFolder.load(path).runs]
        stop_each(dict(zip(runs, (requeue, end_time, kill), strict=False)))
        wait_until(lambda: process.poll() is not None, "the sweep does not end")
    finally:
        if process.poll() is None:
            process.kill()
            subprocess.run(["scancel", "--me"], check=True)
        first = finish(process)
    between = {view.name: view.state for view in SweepFolder.load(path).views()}
    again = commands.run(*command)
    return path, runs, first, between, again


def stop_each(stops):
    """Stop each run, `{run: how}`, once it is under way. SLURM's commands may take longer than a run: wait for none."""
    n_steps, left = lambda run: len(read_log(run)), dict(stops)
    deadline, commands = time.monotonic() + PATIENCE, []
    while left:
        assert time.monotonic() < deadline, f"{[*left]} make no steps"
        for run in [run for run in left if n_steps(run) > 100]:
            commands.append(left.pop(run)(run))
            assert n_steps(run) < STEPS - 100, "it is too fast to be stopped: raise STEPS"
        time.sleep(0.05)
    for command in filter(None, commands):
        command.communicate(timeout=PATIENCE)


def slurm_command(*words):
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def requeue(run):
    return slurm_command("scontrol", "requeue", (run / "job").read_text().strip())


def end_time(run):
    """SLURM's warning before the time is over."""
    return slurm_command("scancel", "--signal=USR2", (run / "job").read_text().strip())


def kill(run):
    os.kill(train_process(run), signal.SIGKILL)


def test_all_runs_end_whatever_happens_to_their_jobs(swept):
    path, runs, first, between, again = swept
    killed = runs[2].name
    assert first.returncode == 3 and f"{killed}: interrupted" in first.stderr and "SIGKILL" in first.stderr
    assert f"1 of 6 runs have not finished: {killed}" in first.stderr
    assert between == {run.name: "interrupted" if run.name == killed else "finished" for run in runs}
    assert again.returncode == 0, again.stderr
    assert "5 of 6 runs finished earlier" in again.stderr and again.stderr.count(": submitted") == 1
    for run in runs:
        assert read_log(run)[-1]["step"] == STEPS and "validation_loss" in read_log(run)[-1]


def test_requeued_runs_resume_from_a_checkpoint_of_that_moment(swept):
    _, runs, _, _, _ = swept
    for run in runs[:2]:
        log = (run / "train.log").read_text()
        assert "SIGTERM at step" in log and "resuming after step" in log
        steps = [entry["step"] for entry in read_log(run) if "loss" in entry]
        assert steps == list(range(1, STEPS + 1))
        status = json.loads((run / "status.json").read_text())
        assert status["state"] == "finished" and status["job"] == (run / "job").read_text().strip()


def test_runs_that_were_left_alone_ran_once(swept):
    _, runs, _, _, _ = swept
    for run in runs[3:]:
        assert (run / "train.log").read_text().count("run folder") == 1
        assert "resuming" not in (run / "train.log").read_text()
