"""A sweep as a whole: its runs end as they should, or are stopped and resumed; and scripts/sweep.py as a command."""

import contextlib
import csv
import dataclasses
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from heinsen.errors import HeinsenError
from heinsen.files import hold_lock, is_held
from heinsen.sweep.driver import SweepInterruption, drive
from heinsen.sweep.folder import SweepFolder
from heinsen.sweep.job import read_status, write_status
from heinsen.sweep.launcher import Launcher, LaunchOptions, LocalLauncher, SlurmLauncher, divide, visible_gpus
from heinsen.sweep.runs import RunView, SweepRun, best_of, summary, table
from heinsen.sweep.search import ListSearch, OptunaSearch, make_search
from heinsen.sweep.space import Range, SweepError, parse_space
from scripts.sweep_runs import RunFactory
from tests.runs import (
    OVERRIDES,
    ROOT,
    STEPS,
    TIMEOUT,
    draw_text,
    read_log,
    snapshot,
    train_command,
    write_split,
)
from tests.sweep import fake
from tests.sweep.fake import definition, wait_until

pytest_plugins = ["tests.run_fixtures"]


def starts(folder, run):
    """The cores that a fake run could use each time it was started."""
    return [json.loads(line) for line in (folder.folder(run) / "starts").read_text().splitlines()]


def drive_here(folder, **options):
    """Run a sweep of fakes, two at a time; what it says and the runs in the end."""
    with folder.lock(), contextlib.redirect_stderr(io.StringIO()) as said:
        launcher = LocalLauncher(folder, fake.command, LaunchOptions(parallel=2))
        views = drive(folder, ListSearch(folder), launcher, **options)
    return said.getvalue(), {view.run.point["behaviour"]: view for view in views}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A sweep of three fakes of which one crashes, run once: its folder, what was said, its runs."""
    path = tmp_path_factory.mktemp("sweep") / "fakes"
    behaviours = ("finish", "crash", "other")
    folder = SweepFolder.open_or_create(path, definition({"behaviour": behaviours}), fake.runs(*behaviours))
    return folder, *drive_here(folder)


def test_a_crashed_run_is_reported_and_the_rest_are_run(ended):
    folder, said, views = ended
    states = {name: view.state for name, view in views.items()}
    assert states == {"finish": "finished", "crash": "crashed", "other": "finished"}
    assert views["crash"].returncode == 1 and views["crash"].step == 3
    crashed = re.search(r"behaviour=crash: crashed in \d s at step 3, exit status 1; its log ends with:\n(.*)", said)
    assert crashed[1] == "    error: this is what went wrong"
    assert re.search(rf"behaviour=finish: finished in \d s, validation loss {6 / fake.STEPS:.4f}\n", said)
    assert said.count(": started\n") == 3 and "behaviour=other: started\n" in said
    assert len(table(folder.views())) == 5 and "2 finished" in table(folder.views())[-1]
    assert best_of(list(views.values())) == views["finish"]
    assert table(folder.views())[1].split() == ["behaviour=finish", "finished", "4/4", "1.2500", "1.5000", "100"]
    shares = divide(sorted(os.sched_getaffinity(0)), 2)
    assert all(starts(folder, run)[0] in shares for run in folder.runs)
    assert read_status(folder.folder(folder.runs[0]))["ended"] is not None


def test_the_csv_has_a_line_per_run(ended):
    folder, _, views = ended
    with (folder.path / "sweep.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert set(rows) == {f"behaviour={name}" for name in views}
    row = rows["behaviour=finish"]
    assert (row["behaviour"], row["state"], row["step"], row["total_steps"]) == ("finish", "finished", "4", "4")
    assert float(row["validation_loss"]) == 6 / fake.STEPS and float(row["bits_per_byte"]) == 2 / fake.STEPS
    assert float(row["loss"]) == 5 / fake.STEPS and float(row["tokens_per_second"]) == 100


def test_the_time_left_is_that_of_the_runs_which_have_not_ended():
    """1,000 tokens are left: at 10 tokens/s on average, two runs at a time."""
    view = lambda seed, state, **known: RunView(run=SweepRun({"seed": seed}, 10, 40), state=state, **known)
    finished = dict(step=10, tokens=400, tokens_per_second=9.0)
    ended = [view(0, "finished", **finished, seconds=60.0), view(1, "crashed", step=5)]
    views = [*ended, view(2, "running", step=5, tokens_per_second=20.0), view(3, "waiting"), view(4, "waiting")]
    assert summary(views, 2).endswith("; ETA 00:50") and summary(views).endswith("; ETA 01:40")
    assert summary(views, 9).endswith("; ETA 00:33"), "no more at a time than are left"
    assert table(views)[3].split()[-1] == "00:10"
    resumed = [view(0, "finished", **finished, seconds=6.0), *views[1:]]  # its last job took few of the steps
    assert summary(resumed, 1).endswith("; ETA 01:20")
    assert "ETA" not in summary(views, 0) and "ETA" not in summary(ended, 2)
    assert "ETA" not in summary([view(0, "running")]), "no rate is known yet"


def test_the_best_run_has_finished_with_a_finite_loss():
    views = [
        RunView(run=SweepRun({"seed": i}, 10, 40), state=state, validation_loss=loss)
        for i, (state, loss) in enumerate([("running", 1.0), ("finished", float("nan")), ("finished", None)])
    ]
    assert best_of(views) is None and "best" not in summary(views)
    good = dataclasses.replace(views[0], state="finished")
    assert best_of([*views, good]) is good and "best so far 1.0000 (seed=0)" in summary([*views, good])
    assert "best 1.0000" in summary([good])


def test_a_sweep_continues_until_its_runs_have_ended_and_a_search_has_proposed_all(tmp_path):
    view = lambda seed, state: RunView(run=SweepRun({"seed": seed}, 10, 40), state=state)
    grid = SweepFolder(tmp_path, definition({"seed": (0, 1)}), [])
    search = SweepFolder(tmp_path, definition({"seed": (0, 1)}, search="optuna", trials=3), [])
    ended = [view(0, "finished"), view(1, "crashed")]
    assert not grid.is_going_on(ended) and grid.is_going_on([*ended, view(2, "waiting")])
    assert search.is_going_on([]) and search.is_going_on(ended) and not search.is_going_on([*ended, view(2, "pruned")])


def test_finished_runs_are_not_repeated_and_retry_repeats_the_crashed(ended):
    folder, _, _ = ended
    said, views = drive_here(SweepFolder.load(folder.path))
    assert [len(starts(folder, run)) for run in folder.runs] == [1, 1, 1]
    assert "2 of 3 runs finished earlier" in said and views["crash"].state == "crashed"
    assert "1 run crashed earlier, left alone without --retry: behaviour=crash" in said
    said, views = drive_here(SweepFolder.load(folder.path), retry=True)
    assert [len(starts(folder, run)) for run in folder.runs] == [1, 2, 1]
    assert views["crash"].state == "finished" and "behaviour=crash: started, resumes" in said


def test_a_sweep_from_before_a_field_of_configs_resumes(ended, tmp_path):
    folder, _, _ = ended
    model = {"d_model": 32, "forget_gate": "head"}
    before, now = ({"seed": 0, "model": x} for x in ({"d_model": 32, "gate": "head"}, model | {"feature_map": "none"}))
    earlier = dataclasses.replace(folder.definition, base=before)
    SweepFolder.open_or_create(tmp_path / "sweep", earlier, folder.runs)
    SweepFolder.open_or_create(tmp_path / "sweep", dataclasses.replace(earlier, base=now), folder.runs)
    with pytest.raises(SweepError, match="config.model.feature_map: only in the command"):
        changed = now | {"model": model | {"feature_map": "elu"}}
        SweepFolder.open_or_create(tmp_path / "sweep", dataclasses.replace(earlier, base=changed), folder.runs)


def test_another_sweep_in_the_folder_is_refused_with_the_difference(ended, tmp_path):
    folder, _, _ = ended
    before = snapshot(folder.path)
    other = dataclasses.replace(folder.definition, space={"behaviour": ("finish",)}, base={"seed": 7})
    with pytest.raises(SweepError) as refusal:
        SweepFolder.open_or_create(folder.path, other, folder.runs[:1])
    assert "--sweep.behaviour: finish, crash, other in the folder, finish in the command" in str(refusal.value)
    assert "config.seed: 0 in the folder, 7 in the command" in str(refusal.value)
    assert snapshot(folder.path) == before
    (tmp_path / "file").write_text("something else")
    for use in (lambda: SweepFolder.open_or_create(tmp_path, other, []), lambda: SweepFolder.load(tmp_path)):
        with pytest.raises(SweepError, match="holds no sweep"):
            use()


def test_data_of_a_sweep_are_known_by_their_content_not_their_path(data, tmp_path, rng):
    def open_sweep(path):
        overrides = {name: str(value) for name, value in (OVERRIDES | {"data.path": path}).items()}
        factory = RunFactory("configs/default.py", overrides, check_data=False)
        sweep = definition({"seed": (0, 1)}, base=factory.base, data_digest=factory.data_digest([str(path)]))
        runs = [factory.make(point) for point in sweep.points()]
        return SweepFolder.open_or_create(tmp_path / "sweep", sweep, runs).definition

    digest, moved = open_sweep(data).data_digest, tmp_path / "moved"
    assert digest is not None
    with pytest.raises(SweepError, match=f"config.data.path: '{data}' in the folder, '{moved}' in the command"):
        open_sweep(moved)  # unknown data: their path decides
    shutil.copytree(data, moved)
    found = open_sweep(moved)
    assert (found.data_digest, found.base["data"]["path"]) == (digest, str(moved))
    shutil.rmtree(moved)
    assert open_sweep(moved).data_digest == digest
    shutil.copytree(data, moved)
    shutil.rmtree(moved / "validation")
    write_split(moved / "validation", draw_text(rng, 333))
    before = snapshot(tmp_path / "sweep")
    with pytest.raises(SweepError, match=f"sweep holds a sweep on other data: what lies at {moved} now is not what"):
        open_sweep(moved)
    assert snapshot(tmp_path / "sweep") == before


DAMAGES = {
    "cut": lambda record: json.dumps(record)[:-20],
    "no record": lambda record: "5",
    "empty": lambda record: "{}",
    "a changed value": lambda record: json.dumps(record | {"format": 1, "started": 17.0, "runs": []}),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["sweep.json", "behaviour=finish/status.json"])
def test_damaged_records_are_named(ended, tmp_path, name, damage):
    folder = shutil.copytree(ended[0].path, tmp_path / "damaged")
    assert len(SweepFolder.load(folder).views()) == 3
    (folder / name).write_text(DAMAGES[damage](json.loads((folder / name).read_text())))
    with pytest.raises(SweepError, match=f"{re.escape(str(folder / name))} is damaged .*(restore|delete) it"):
        SweepFolder.load(folder).views()


def test_two_commands_do_not_run_one_sweep(ended, monkeypatch):
    folder, _, _ = ended
    with folder.lock():
        assert is_held(folder.path / "sweep.lock")
        monkeypatch.setattr("heinsen.sweep.folder.hold_lock", functools.partial(hold_lock, patience=0.0))
        before = (folder.path / "sweep.json").read_bytes()
        for use in (folder.lock().__enter__, lambda: SweepFolder.open_or_create(folder.path, folder.definition, [])):
            with pytest.raises(SweepError, match=rf"another command is running.*process {os.getpid()} on "):
                use()
        assert (folder.path / "sweep.json").read_bytes() == before
    assert not is_held(folder.path / "sweep.lock")


# ---- stopped and resumed -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A sweep killed by -9 in its first run, then by SIGTERM, then left to its end: the states after each."""
    path = tmp_path_factory.mktemp("killed") / "sweep"
    first, states = path / "behaviour=slow__seed=0", []

    def note():
        folder = SweepFolder.load(path)
        wait_until(lambda: all(view.state != "running" for view in folder.views()), "a run outlives its sweep", TIMEOUT)
        states.append({view.name: (view.state, view.step) for view in folder.views()})

    def wait_for_step(step):
        wait_until(lambda: first.exists() and len(read_log(first)) >= step, "the first run makes no steps", TIMEOUT)

    command = [sys.executable, "-m", "tests.sweep.fake", str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_for_step(2)
    (view, _) = SweepFolder.load(path).views()
    assert view.state == "running" and 2 <= view.step < fake.SLOW_STEPS
    process.kill()
    process.wait()
    note()

    reached = states[0][first.name][1]
    terminate = threading.Thread(target=lambda: (wait_for_step(reached + 3), os.kill(os.getpid(), signal.SIGTERM)))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # should it come too late, it is not for the tests
    terminate.start()
    with pytest.raises(SweepInterruption, match="rerun the same command to resume"):
        fake.sweep(path)
    terminate.join()
    signal.signal(signal.SIGTERM, before)
    note()
    fake.sweep(path)
    note()
    return SweepFolder.load(path), states


def test_runs_of_a_killed_sweep_save_and_the_same_command_resumes(killed):
    folder, (by_kill, by_term, in_the_end) = killed
    first, *others = (run.name for run in folder.runs)
    assert by_kill[first][0] == by_term[first][0] == "interrupted"
    assert 0 < by_kill[first][1] < by_term[first][1] < fake.SLOW_STEPS
    assert all(by_term[name] == ("waiting", 0) for name in others), "one at a time"
    assert {state for state, _ in in_the_end.values()} == {"finished"}
    steps = [entry["step"] for entry in read_log(folder.folder(folder.runs[0]))]
    assert steps == list(range(1, fake.SLOW_STEPS + 1)), "no step is lost and none made twice"
    assert [len(starts(folder, run)) for run in folder.runs] == [3, 1]


# ---- searches ------------------------------------------------------------------------------------


class InstantLauncher(Launcher):
    """A sweep whose runs make a validation at each look: `losses(point)` are those of a run."""

    start_message, stop_message = "started", "stopping"

    def __init__(self, path, whole, losses, refuse=lambda point: None):
        self.losses, self.make_run = losses, lambda point: SweepRun(point, len(losses(point)), 1, refuse(point))
        self.folder = SweepFolder.open_or_create(path, whole, list(map(self.make_run, whole.points())))
        self.under_way, self.started, self.cancelled = {}, [], set()

    def sweep(self):
        """Run it; its runs in the end, and what it says."""
        with contextlib.redirect_stderr(io.StringIO()) as said:
            return drive(self.folder, make_search(self.folder, self.make_run), self), said.getvalue()

    def free(self):
        return 2 - len(self.under_way)

    def start(self, runs):
        for run in runs:
            where = self.folder.folder(run)
            where.mkdir(parents=True, exist_ok=True)
            self.under_way[run.name] = (where, list(enumerate(self.losses(run.point), 1)))
            self.started.append(run.name)

    def active(self):
        for name, (where, left) in list(self.under_way.items()):
            if left and name not in self.cancelled:
                step, loss = left.pop(0)
                entry = {"step": step, "tokens": step, "loss": loss, "validation_loss": loss, "tokens_per_second": 0.5}
                with (where / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(entry) + "\n")
            state = "interrupted" if name in self.cancelled else "running" if left else "finished"
            write_status(where, state=state, started=0.0, ended=1.0)
            if state != "running":
                del self.under_way[name]
        return set(self.under_way)

    def cancel(self, name):
        assert name in self.under_way and name not in self.cancelled
        self.cancelled.add(name)

    def stop(self):
        for where, _ in self.under_way.values():
            write_status(where, state="interrupted")
        return "stopped"


@pytest.fixture
def quick(monkeypatch):
    """No waiting between looks, and fake runs count as alive without a lock."""
    monkeypatch.setattr("heinsen.sweep.driver._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("heinsen.sweep.folder.is_alive", lambda folder: True)


def test_optuna_finds_the_better_part_prunes_and_goes_on(tmp_path, quick):
    pytest.importorskip("optuna")
    space = {"rate": Range(1e-5, 1e-1, True, False), "kind": ("good", "bad")}
    losses = lambda p: [abs(np.log10(p["rate"]) + 3) + (p["kind"] == "bad") + 1 / step for step in range(1, 7)]
    refuse = lambda point: "too fast" if point["rate"] > 5e-2 else None
    search = lambda n: InstantLauncher(tmp_path / "s", definition(space, search="optuna", trials=n), losses, refuse)
    few = search(6)
    first, _ = few.sweep()
    assert len(few.started) == len(first) == 6 - sum(view.state == "refused" for view in first)
    many = search(18)
    views, said = many.sweep()
    assert len(views) <= 18 and not {*many.started} & {view.name for view in first}
    by_state = lambda state: [view for view in views if view.state == state]
    assert len(by_state("finished") + by_state("pruned") + by_state("refused")) == len(views)
    assert all(f"{v.name}: refused, too fast" in said for v in views[len(first) :] if v.state == "refused")
    assert all(0 < view.step < 6 for view in by_state("pruned"))
    assert min(view.validation_loss for view in by_state("finished")) < 1.0
    assert any(view.run.point["kind"] == "bad" for view in by_state("pruned"))


def test_a_log_file_has_an_eta_from_the_first_runs_on(tmp_path, quick, monkeypatch):
    monkeypatch.setattr("heinsen.sweep.driver._REDRAW_SECONDS", 0.0)
    _, said = InstantLauncher(tmp_path / "s", definition({"seed": (0, 1, 2, 3)}), lambda point: [1.0] * 5).sweep()
    (line,) = [line for line in said.split("finished", 1)[0].splitlines() if "ETA" in line]
    assert re.fullmatch(r"4 runs: 2 waiting, 2 running; ETA 00:1\d", line), (
        "18 of 20 tokens or less, 2 x 0.5 per second"
    )


def test_sigterm_stops_a_sweep_wherever_it_arrives(tmp_path, quick):
    """Where an object is destroyed, Python ignores exceptions."""

    class Dying:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    class Terminated(InstantLauncher):
        def active(self):
            if self.started:
                Dying()
            return super().active()

    before = signal.getsignal(signal.SIGTERM)
    launcher = Terminated(tmp_path / "sweep", definition({"seed": (0, 1, 2, 3)}), lambda point: [1.0] * 3)
    with pytest.raises(SweepInterruption, match="stopped"):
        launcher.sweep()
    assert len(launcher.started) == 2 and signal.getsignal(signal.SIGTERM) == before


def test_trials_that_a_stopped_search_has_left_go_on(tmp_path, quick):
    pytest.importorskip("optuna")

    class Stopping(InstantLauncher):
        def active(self):
            if len(super().active()) == 2 and len(self.started) == 4:
                raise KeyboardInterrupt
            return set(self.under_way)

    whole = definition({"rate": Range(0.0, 1.0, False, False)}, search="optuna", trials=5)
    losses = lambda point: [point["rate"]] * 3
    stopped = Stopping(tmp_path / "sweep", whole, losses)
    with pytest.raises(SweepInterruption):
        stopped.sweep()
    left = [view.name for view in SweepFolder.load(tmp_path / "sweep").views() if view.state == "interrupted"]
    assert len(left) == 2
    resumed = InstantLauncher(tmp_path / "sweep", whole, losses)
    views, _ = resumed.sweep()
    assert {*resumed.started[:2]} == {*left}
    assert len(stopped.started) + len(resumed.started) - 2 == len(views) == 5
    assert all(view.state in ("finished", "pruned") for view in views)


def test_a_killed_search_does_not_lock_out_the_next(tmp_path, monkeypatch):
    """Optuna's lock links to its log: to nowhere if --workdir is relative, and then Optuna waits without end."""
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    folder = SweepFolder.open_or_create(Path("s"), definition({"a": (1,)}, search="optuna", trials=1), [])
    Path("s/optuna.log.lock").symlink_to("s/optuna.log")
    search = threading.Thread(target=OptunaSearch, args=(folder, lambda point: SweepRun(point, 1, 1)), daemon=True)
    search.start()
    search.join(TIMEOUT / 5)
    assert not search.is_alive()


def test_a_missing_optuna_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    folder = SweepFolder.open_or_create(tmp_path / "s", definition({"a": (1,)}, search="optuna", trials=1), [])
    with pytest.raises(SweepError, match="pip install 'optuna"):
        OptunaSearch(folder, lambda point: SweepRun(point, 1, 1))


# ---- launchers -----------------------------------------------------------------------------------


def test_devices_are_divided_in_order(rng, monkeypatch):
    for _ in range(20):
        items, parts = list(range(rng.integers(1, 40))), int(rng.integers(1, 12))
        divided = divide(items, parts)
        assert len(divided) == parts and all(divided)
        if len(items) >= parts:
            assert sum(divided, []) == items and max(map(len, divided)) - min(map(len, divided)) <= 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_each_run_at_a_time_gets_a_gpu_of_its_own(ended, monkeypatch):
    folder, _, _ = ended
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    taken = []

    class Process:
        def poll(self):
            return None

    def start(command, where, cores, environment):
        taken.append((where.name, environment))
        return Process()

    monkeypatch.setattr("heinsen.sweep.launcher.start_run", start)
    launcher = LocalLauncher(SweepFolder.load(folder.path), fake.command, LaunchOptions())
    assert launcher.free() == 2
    launcher.start(folder.runs[:2])
    names = [run.name for run in folder.runs[:2]]
    assert taken == [(name, {"CUDA_VISIBLE_DEVICES": gpu}) for name, gpu in zip(names, "35", strict=True)]
    assert launcher.free() == 0 and launcher.active() == set(names)
    with pytest.raises(SweepError, match="--parallel=3 is more than there are GPUs"):
        LocalLauncher(folder, fake.command, LaunchOptions(parallel=3))


def test_slurm_that_is_not_there_is_named(ended, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SweepError, match="SLURM is not installed here"):
        SlurmLauncher(ended[0], fake.command, LaunchOptions())


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("model", "1", "--sweep.model=1: model is a group"),
        ("batch_size", "4,many", "--sweep.batch_size=many"),
        ("batch_size", "4,None", "batch_size=None: config.batch_size = None: expected int"),
        ("seed", "0,-1", "seed=-1: config: seed = -1: it must not be negative"),
        ("data.path", "nowhere", "no token dataset at nowhere/train"),
    ],
)
def test_values_that_no_run_can_have_are_named(data, field, text, message):
    overrides = {name: str(value) for name, value in (OVERRIDES | {"data.path": data}).items() if name != field}
    factory = RunFactory("configs/default.py", overrides, check_data=True)
    with pytest.raises(HeinsenError, match=re.escape(message)):
        for value in parse_space({field: text}, factory.convert)[field]:
            factory.make({field: value})


@pytest.mark.long
def test_a_sweep_of_two_real_runs(run, commands, tmp_path):
    """By the command, and drawn by scripts/plot_runs.py. The first is the fixture's run: what that compiled is used."""
    folder = tmp_path / "sweep"
    config = train_command(run.data, folder)[1:]
    end = commands.run("scripts/sweep.py", *config, "--sweep.seed=1,0", "--parallel=2")
    assert end.returncode == 0, end.stderr
    runs = [folder / f"seed={seed}" for seed in (0, 1)]
    losses = []
    for seed, path in enumerate(runs):
        assert json.loads((path / "config.json").read_text())["seed"] == seed
        assert read_log(path)[-1]["step"] == STEPS
        losses.append(read_log(path)[-1]["validation_loss"])
        assert f"{losses[-1]:.4f}" in end.stdout
    assert abs(losses[0] - run.log[-1]["validation_loss"]) < 1e-3 < abs(losses[0] - losses[1])
    assert f"best {min(losses):.4f}" in end.stdout
    plot = commands.fork("scripts/plot_runs.py", *runs, f"--out={tmp_path}/plot.svg", "--x=flops", "--log_x")
    report = commands.fork("scripts/sweep.py", f"--workdir={folder}", "--report")
    assert plot.returncode == report.returncode == 0, plot.stderr + report.stderr
    rows = [line.split() for line in plot.stdout.splitlines() if line.startswith(str(folder))]
    assert [row[1] for row in rows] == [f"{loss:.4f}" for loss in losses]
    assert (tmp_path / "plot.svg").read_text().count("<path") > 10
    assert re.search(rf"<b>{min(losses):.4f}</b>", (folder / "report.html").read_text())
