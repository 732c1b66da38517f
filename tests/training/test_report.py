"""What a run reports besides its metrics: skipped steps, traces, Weights & Biases."""

import contextlib
import math
import shutil
import sys
import types

import grain
import pytest

from heinsen.config import ConfigError
from heinsen.training import data as training_data
from heinsen.training import log, loop
from heinsen.training.folder import RunError
from heinsen.training.loop import NonFiniteLossError, train
from heinsen.training.metrics import WandbLog
from tests.runs import BATCH, CHECKPOINT_EVERY, LENGTH, checkpoint_steps, read_log, run_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


# ---- steps that are not finite ---------------------------------------------------------------


def with_bad_batches(monkeypatch, bad_steps):
    """Put a token outside the vocabulary, whose embedding reads NaN, into the batches of these steps."""
    iterate = training_data.train_iterator

    def train_iterator(*arguments, **options):
        batches = iterate(*arguments, **options)

        class Batches(grain.DatasetIterator):
            get_state, set_state = lambda _: batches.get_state(), lambda _, state: batches.set_state(state)

            def __next__(self):
                step = batches.get_state()["next_index"] + 1
                tokens = next(batches)["tokens"]
                if step in bad_steps:
                    tokens[0, 0] = 10**6
                return {"tokens": tokens}

        return Batches()

    monkeypatch.setattr(training_data, "train_iterator", train_iterator)


def test_steps_that_are_not_finite_are_skipped_and_counted(data, tmp_path, monkeypatch, capfd):
    with_bad_batches(monkeypatch, {5, 6, 20})
    train(run_config(data, total_tokens=24 * BATCH * LENGTH), tmp_path / "run")
    told = capfd.readouterr().err
    assert "loss nan and gradient norm nan at step 5: skipped, 1 in a row, 1 in all" in told
    assert "at step 6: skipped, 2 in a row, 2 in all" in told and "at step 20: skipped, 1 in a row, 3 in all" in told
    steps = [entry for entry in read_log(tmp_path / "run") if "loss" in entry]
    assert [entry["step"] for entry in steps if entry["loss"] is None] == [5, 6, 20]
    assert [entry["skipped"] for entry in steps] == [0] * 4 + [1] + [2] * 14 + [3] * 5
    rates = {entry["step"]: entry["learning_rate"] for entry in steps}
    assert rates[5] == rates[6] == rates[7] and rates[8] > rates[7], "a skipped step does not advance the schedule"
    assert all(
        math.isfinite(entry["validation_loss"]) for entry in read_log(tmp_path / "run") if "validation_loss" in entry
    )


def test_too_many_in_a_row_stop_the_run_at_the_last_checkpoint(data, tmp_path, monkeypatch):
    with_bad_batches(monkeypatch, {13, 25, 26, 27})
    monkeypatch.setattr(loop, "STOP_AFTER_SKIPPED", 3)
    with pytest.raises(NonFiniteLossError) as error:
        train(run_config(data), tmp_path / "run")
    assert "loss nan and gradient norm nan at step 27: stopped after 3 such steps in a row" in str(error.value)
    assert f"Go back to {tmp_path / 'run' / 'checkpoints' / '20'} with a lower" in str(error.value)
    assert checkpoint_steps(tmp_path / "run")[-1] == 2 * CHECKPOINT_EVERY


# ---- progress --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [False, True])
def test_validations_do_not_change_the_eta(data, tmp_path, monkeypatch, capfd, is_terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    now = [0.0]
    monkeypatch.setattr(log, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    with log.Reporter(run_config(data), tmp_path, 0, 1000, 1.0, log.LossMean(), writes=True) as reporter:
        now[0] = 10.5
        reporter.write(10, {"loss": 1.0})  # of 60
        with reporter.pause():
            now[0] = 1000.0
        reporter.write(10, {"validation_loss": 1.0})
    told = capfd.readouterr().err
    assert told.count("ETA 00:52") >= 2 and told.count("ETA") == told.count("ETA 00:52"), told


# ---- traces ----------------------------------------------------------------------------------


def test_the_error_that_ended_a_run_is_told_whatever_its_reports_do(data, tmp_path, monkeypatch):
    """Metrics that cannot be read for the plot; and logs that are open where one cannot be opened."""
    config, closed = run_config(data, wandb_project="project"), []
    wandb = types.SimpleNamespace(write=lambda *_: None, close=lambda: closed.append("W&B"))
    monkeypatch.setattr(log, "WandbLog", lambda *_: wandb)
    make = lambda: log.Reporter(config, tmp_path, 0, 1000, 1.0, log.LossMean(), writes=True)
    with pytest.raises(NonFiniteLossError, match="the loss"):
        with make():
            (tmp_path / "metrics.jsonl").unlink()
            (tmp_path / "metrics.jsonl").mkdir()
            raise NonFiniteLossError("the loss is nan")
    assert closed == ["W&B"]
    with pytest.raises((OSError, RunError)):
        make()
    assert closed == 2 * ["W&B"]


@pytest.mark.long
def test_chosen_steps_are_traced(data, tmp_path, capfd):
    train(run_config(data, trace_steps="3:4", total_tokens=10 * BATCH * LENGTH), tmp_path / "run")
    assert list((tmp_path / "run" / "trace").rglob("*.xplane.pb"))
    assert f"trace of steps 3:4 written to {tmp_path / 'run' / 'trace'}" in capfd.readouterr().err


@pytest.mark.parametrize("steps", ["3", "4:3", "0:2", "a:b", ":", "1:2:3"])
def test_steps_to_trace_are_two_numbers(data, steps):
    with pytest.raises(ConfigError, match=f"trace_steps = '{steps}': expected FIRST:LAST"):
        run_config(data, trace_steps=steps)


# ---- Weights & Biases ------------------------------------------------------------------------


class FakeWandb(types.ModuleType):
    """Records its inputs; its server may be unreachable."""

    def __init__(self, reachable: bool):
        super().__init__("wandb")
        self.reachable, self.started, self.logged, self.finished, self.torn_down = reachable, [], [], 0, False
        self.errors = types.SimpleNamespace(Error=ConnectionError)
        self.Settings = dict

    def init(self, **options):
        if options["project"] == "a/b":
            raise ValueError("invalid project name a/b\nof a traceback")
        if not self.reachable and (options.get("mode") != "offline" or not self.torn_down):
            raise ConnectionError("no route to host")
        self.started.append(options)
        return types.SimpleNamespace(log=lambda m, step: self.logged.append((step, m)), finish=self.finish)

    def teardown(self):
        self.torn_down = True

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize("reachable", [pytest.param(True, marks=pytest.mark.long), False])
def test_wandb_gets_the_metrics_and_goes_offline_where_it_must(data, tmp_path, monkeypatch, reachable):
    wandb = FakeWandb(reachable)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = run_config(data, wandb_project="tests", log_every=5, total_tokens=10 * BATCH * LENGTH)
    train(config, tmp_path / "run")
    expected = [(entry.pop("step"), entry) for entry in read_log(tmp_path / "run")]
    assert wandb.logged == expected and wandb.finished == 1
    train(config, tmp_path / "run")  # complete: continues the same run there
    first, again = wandb.started
    assert first["id"] == again["id"] and first["resume"] == "allow" and first["project"] == "tests"
    assert first["config"]["model"]["n_layers"] == config.model.n_layers
    shutil.rmtree(tmp_path / "run")
    train(config, tmp_path / "run")
    assert wandb.started[-1]["id"] != first["id"], "another run in the place of a removed one"
    message = "wandb_project = 'a/b': ValueError: invalid project name a/b; correct it"
    with pytest.raises(RunError, match=message) as error:
        train(run_config(data, wandb_project="a/b"), tmp_path / "bad")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("broken", ["log", "finish"])
def test_wandb_that_breaks_leaves_the_run_alone(data, tmp_path, monkeypatch, capsys, broken):
    def fail(*_, **__):
        raise BrokenPipeError("its service is gone\nof a traceback")

    run = types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    setattr(run, broken, fail)
    wandb = FakeWandb(True)
    wandb.init = lambda **_: run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with contextlib.closing(WandbLog(run_config(data, wandb_project="tests"), tmp_path)) as record:
        record.write(3, {"loss": 1.0})
        record.write(4, {"loss": 1.0})
    (line,) = capsys.readouterr().err.splitlines()
    what = "nothing is recorded there from step 3 on" if broken == "log" else "the end of the run may be missing there"
    assert f"Weights & Biases: BrokenPipeError: its service is gone; {what}, but in metrics.jsonl" in line


def test_wandb_that_is_not_installed_is_named(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match="wandb is not installed: pip install wandb"):
        train(run_config(data, wandb_project="tests"), tmp_path / "run")
