"""A sweep through SLURM: with stand-ins for SLURM's commands, and on a cluster made by tests/slurm/setup.sh."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import submitit

from heinsen.sweep.folder import SweepFolder
from heinsen.sweep.job import slurm_job
from heinsen.sweep.launcher import LaunchOptions, SlurmLauncher
from heinsen.sweep.space import SweepError
from tests.runs import BATCH, LENGTH, OVERRIDES, ROOT, TIMEOUT, finish, read_log
from tests.sweep import fake
from tests.sweep.fake import wait_until

pytest_plugins = ["tests.run_fixtures"]


# ---- stand-ins for SLURM's commands --------------------------------------------------------------


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Let sbatch, sacct, ... of this folder stand in for SLURM: a function that writes one as a shell script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    slurm_job.cache_clear()
    submitit.SlurmJob.watcher.clear()

    def write(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    states = "\\n".join(["JobID|State|NodeList", *(f"77_{i}|{{}}|" for i in range(3))])
    write("sacct", f"printf '{states.format(*['PENDING'] * 3)}\\n'")
    write("sbatch", "echo Submitted batch job 77")
    for name in ("srun", "scontrol", "scancel"):
        write(name, f"echo {name} $* >> {tmp_path}/called")
    return write


@pytest.fixture
def folder(tmp_path):
    behaviours = ("slow", "crash", "finish")
    whole = fake.definition({"behaviour": behaviours})
    return SweepFolder.open_or_create(tmp_path / "sweep", whole, fake.runs(*behaviours))


def start_task(folder, index):
    """Start the process of a task of the array as a node does."""
    variables = dict(SUBMITIT_EXECUTOR="slurm", SLURM_JOB_ID=f"10{index}")
    variables |= dict(SLURM_ARRAY_JOB_ID="77", SLURM_ARRAY_TASK_ID=str(index))
    command = [sys.executable, "-m", "submitit.core._submit", str(folder.jobs_folder)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stderr=subprocess.DEVNULL)


def state_of(folder, run):
    """The state of a run as another command sees it: it asks SLURM at once."""
    slurm_job.cache_clear()
    return SweepFolder.load(folder.path).view(run).state


def test_an_array_is_submitted_and_its_tasks_run_save_and_resume(stand_ins, folder, tmp_path):
    slow, crash, ends = folder.runs
    options = LaunchOptions(parallel=2, partition="big", minutes=90, gpus_per_run=1, cpus_per_run=3)
    launcher = SlurmLauncher(folder, fake.command, options)
    assert launcher.active() == set() and launcher.free() == 3, "all at once"
    launcher.start(folder.runs)
    asked = set(next(folder.jobs_folder.glob("*.sh")).read_text().splitlines())
    wanted = {"array=0-2%2", "cpus-per-task=3", "gpus-per-node=1", "job-name=sweep-sweep", "nodes=1", "requeue"}
    assert {f"#SBATCH --{option}" for option in (*wanted, "ntasks-per-node=1", "partition=big", "time=90")} <= asked
    assert launcher.active() == {run.name for run in folder.runs}
    assert [folder.job_id(run) for run in folder.runs] == ["77_0", "77_1", "77_2"]
    assert {state_of(folder, run) for run in folder.runs} == {"queued"}
    assert SlurmLauncher(folder, fake.command, options).active() == launcher.active(), "of an earlier command"

    tasks = [start_task(folder, i) for i in range(3)]
    wait_until(lambda: len(read_log(folder.folder(slow))) >= 3, "it makes no steps", TIMEOUT)
    assert state_of(folder, slow) == "running"
    tasks[0].send_signal(signal.SIGUSR2)  # SLURM's warning before the time limit
    assert [task.wait(TIMEOUT) for task in tasks[1:]] == [0, 0] and tasks[0].wait(TIMEOUT) != 0
    assert (tmp_path / "called").read_text() == "scontrol requeue 77_0\n"
    view = folder.view(slow)
    assert view.state == "queued" and 3 <= view.step < fake.SLOW_STEPS, "it has saved and is requeued"
    assert folder.view(crash).state == "crashed" and folder.view(crash).returncode == 1
    assert folder.view(ends).state == "finished" and launcher.active() == {slow.name}

    assert start_task(folder, 0).wait(TIMEOUT) == 0
    assert [entry["step"] for entry in read_log(folder.folder(slow))] == list(range(1, fake.SLOW_STEPS + 1))
    assert state_of(folder, slow) == "finished" and launcher.active() == set()


def test_a_run_whose_job_is_cancelled_is_interrupted_or_pruned(stand_ins, folder, tmp_path):
    slow, _, _ = folder.runs
    launcher = SlurmLauncher(folder, fake.command, LaunchOptions())
    launcher.start(folder.runs)
    task = start_task(folder, 0)
    wait_until(lambda: len(read_log(folder.folder(slow))) >= 3, "it makes no steps", TIMEOUT)
    launcher.cancel(slow.name)
    assert (tmp_path / "called").read_text() == "scancel 77_0\n"
    task.kill()  # the run is sent SIGTERM by the system, and saves
    task.wait()
    stand_ins("sacct", r"printf 'JobID|State|NodeList\n77_0|CANCELLED by 0|\n77_1|RUNNING|\n77_2|PENDING|\n'")
    wait_until(lambda: state_of(folder, slow) != "running", "a run outlives its job", TIMEOUT)
    assert [state_of(folder, run) for run in folder.runs] == ["interrupted", "queued", "queued"]
    folder.mark_pruned(slow)
    assert state_of(folder, slow) == "pruned"
    assert launcher.stop() == "SLURM still holds 2 runs; rerun the same command to watch them again"


def test_an_adaptive_search_submits_as_many_runs_as_may_run(stand_ins, folder):
    launcher = SlurmLauncher(folder, fake.command, LaunchOptions(parallel=2))
    object.__setattr__(folder.definition, "search", "optuna")
    assert launcher.free() == 2
    launcher.start(folder.runs[:1])
    assert launcher.free() == 1 and folder.job_id(folder.runs[0]) == "77"


def test_what_slurm_says_against_the_runs_is_shown(stand_ins, folder):
    stand_ins("sbatch", "echo sbatch: error: invalid partition >&2; exit 1")
    with pytest.raises(SweepError, match="SLURM rejects the runs: .*invalid partition"):
        SlurmLauncher(folder, fake.command, LaunchOptions()).start(folder.runs)


# ---- a cluster -----------------------------------------------------------------------------------


STEPS = 3000
PATIENCE = 1000  # seconds: four runs on the cores there are


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


@pytest.fixture(scope="module")
def swept(slurm, data, commands, tmp_path_factory):
    """Four runs; one is requeued by the administrator, one warned that its time is over, one killed."""
    path = tmp_path_factory.mktemp("slurm") / "sweep"
    settings = OVERRIDES | {"data.path": data, "total_tokens": STEPS * BATCH * LENGTH}
    settings |= {"checkpoint_every": STEPS, "validate_every": STEPS}
    del settings["optimizer.learning_rate"]
    command = ["scripts/sweep.py", "--config=configs/default.py", f"--workdir={path}"]
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    command += ["--sweep.optimizer.learning_rate=1e-3,2e-3", "--seeds=2", "--launcher=slurm", "--time=0:30:00"]
    process = commands.start(*command)
    try:
        wait_until((path / "sweep.json").exists, "the sweep does not begin", PATIENCE)
        runs = [path / run.name for run in SweepFolder.load(path).runs]
        stop_each(dict(zip(runs, (requeue, end_time, kill), strict=False)))
        wait_until(lambda: process.poll() is not None, "the sweep does not end", PATIENCE)
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
    _, process, *_ = (run / "run.lock").read_text().split()  # "process 17 on ...", by train.py
    os.kill(int(process), signal.SIGKILL)


@pytest.mark.long
def test_all_runs_end_whatever_happens_to_their_jobs(swept):
    path, runs, first, between, again = swept
    killed = runs[2].name
    assert first.returncode == 3 and f"{killed}: interrupted" in first.stderr and "SIGKILL" in first.stderr
    assert f"1 of 4 runs did not finish: {killed}" in first.stderr
    assert between == {run.name: "interrupted" if run.name == killed else "finished" for run in runs}
    assert again.returncode == 0, again.stderr
    assert "3 of 4 runs finished earlier" in again.stderr and again.stderr.count(": submitted") == 1
    for run in runs:
        assert read_log(run)[-1]["step"] == STEPS and "validation_loss" in read_log(run)[-1]


@pytest.mark.long
def test_requeued_runs_resume_from_a_checkpoint_of_that_moment(swept):
    _, runs, _, _, _ = swept
    for run in runs[:2]:
        log = (run / "train.log").read_text()
        assert "SIGTERM at step" in log and "resuming after step" in log
        steps = [entry["step"] for entry in read_log(run) if "loss" in entry]
        assert steps == list(range(1, STEPS + 1))
    log = (runs[3] / "train.log").read_text()  # it was left alone
    assert log.count("run folder") == 1 and "resuming" not in log
