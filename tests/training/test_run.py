"""Whole runs: the contents of their folder, and that no kind of interruption changes them."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from heinsen.config import ConfigError, comparable
from heinsen.data.tokenizer import get_tokenizer
from heinsen.decoding import Sampling, generate
from heinsen.parallel import make_mesh
from heinsen.training import devices, loop, metrics, plots
from heinsen.training.config import TrainConfig
from heinsen.training.data import pad_vocabulary, train_config
from heinsen.training.folder import RunError, load_run, load_tokenizer_name
from heinsen.training.loop import NonFiniteLossError, RunInterruption, StopSignals, train
from heinsen.weights import load_params
from scripts.sweep_runs import RunFactory
from tests.runs import (
    BATCH,
    CHECKPOINT_EVERY,
    EOT,
    KEEP,
    LENGTH,
    OVERRIDES,
    ROOT,
    STEPS,
    TIMEOUT,
    VALIDATE_EVERY,
    Run,
    at_step,
    checkpoint_steps,
    copy_run,
    draw_text,
    newest_checkpoint,
    read_log,
    run_config,
    snapshot,
    stop_when,
    train_command,
    without_timing,
    write_split,
)

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

INTERRUPTED = 75


@pytest.fixture(scope="module", autouse=True)
def traced_steps() -> Iterator[None]:
    """Runs of one config in this process share a step: it would be traced anew, and then compiled to the same."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_optimizer", "make_train_step"):
            patch.setattr(loop, name, functools.cache(getattr(loop, name)))
        yield


@pytest.fixture(scope="module")
def config(data: Path) -> TrainConfig:
    return run_config(data)


@pytest.fixture(scope="module")
def last_checkpoint(run: Run, config: TrainConfig):
    return newest_checkpoint(run.workdir, config)


def assert_same_run(workdir: Path, run: Run, config: TrainConfig, last_checkpoint) -> None:
    """Compare metrics.jsonl and the last checkpoint with those of the uninterrupted run, bit for bit."""
    log, expected = without_timing(read_log(workdir)), without_timing(run.log)
    assert [entry["step"] for entry in log] == [entry["step"] for entry in expected]
    assert log == expected
    step, state, position = newest_checkpoint(workdir, config)
    assert (step, position) == (last_checkpoint[0], last_checkpoint[2])
    for actual, wanted in zip(state, last_checkpoint[1], strict=True):
        np.testing.assert_array_equal(actual, wanted)


# ---- what a run leaves -----------------------------------------------------------------------


def test_metrics_hold_every_logged_step_and_validation_once_in_order(run):
    expected = [
        (step, kind)
        for step in range(1, STEPS + 1)
        for kind in ("loss", "validation_loss")
        if kind == "loss" or step % VALIDATE_EVERY == 0 or step == STEPS
    ]
    assert [
        (entry["step"], kind) for entry in run.log for kind in ("loss", "validation_loss") if kind in entry
    ] == expected
    assert all(entry["tokens"] == entry["step"] * BATCH * LENGTH for entry in run.log)


def test_metrics_have_the_fields_of_the_contract_and_agree_with_each_other(run, config):
    train_bytes = json.loads((run.data / "train" / "metadata.json").read_text())
    bits_per_nat = train_bytes["num_tokens"] / train_bytes["num_bytes"] / math.log(2)
    model, d = config.model, config.model.d_model
    heads = model.n_heads * (2 * model.d_key + model.d_value)
    layer = 2 * d + d * heads + heads + model.n_heads * model.d_value * 2 * d + 2 * d + d * d
    n_params = model.padded_vocab_size * d + d * 2 * d + 2 * d + model.n_layers * layer + 2 * d
    assert f"{n_params:,} parameters" in run.stderr
    assert re.search(r"compiling the training step \.\.\.\ncompiled the training step in \d+\.\d s\n", run.stderr)
    o, peaks = config.optimizer, []
    for entry in run.log:
        if "validation_loss" in entry:
            assert entry.keys() == {"step", "tokens", "validation_loss", "validation_bits_per_byte"}
            continue
        assert entry.keys() == {
            "step", "tokens", "loss", "bits_per_byte", "grad_norm", "param_norm", "skipped", "learning_rate",
            "tokens_per_second", "mfu", "data_wait",
        }  # fmt: skip
        assert entry["bits_per_byte"] == pytest.approx(entry["loss"] * bits_per_nat, rel=1e-12)
        assert entry["skipped"] == 0 and 0 <= entry["data_wait"] < 1 and 0 < entry["param_norm"] < math.inf
        assert 0 < entry["grad_norm"] < math.inf and 0 < entry["tokens_per_second"] < math.inf
        peaks.append(entry["tokens_per_second"] * 6 * n_params / entry["mfu"])
        done = entry["step"] - 1
        cosine = (1 + math.cos(math.pi * (done - o.warmup_steps) / (STEPS - o.warmup_steps))) / 2
        rate = o.final_learning_rate + (o.learning_rate - o.final_learning_rate) * cosine
        if done < o.warmup_steps:
            rate = o.learning_rate * done / o.warmup_steps
        assert entry["learning_rate"] == pytest.approx(rate, rel=1e-5)
    np.testing.assert_allclose(peaks, peaks[0], rtol=1e-12)  # the rate that this machine was measured to have
    assert 1e8 < peaks[0] < 1e16


def test_logged_losses_are_means_since_the_last_log_also_where_a_run_was_interrupted(run, config, tmp_path):
    """Saved after 20 and 40 steps, logged after 7, 14, ... and the last."""
    losses = {entry["step"]: entry["loss"] for entry in run.log if "loss" in entry}
    config = dataclasses.replace(config, log_every=7, checkpoint_every=20)
    train(config, tmp_path)
    logged = [entry for entry in read_log(tmp_path) if "loss" in entry]
    ends = [*range(7, STEPS, 7), STEPS]
    means = [np.mean([losses[step] for step in range(last + 1, end + 1)]) for last, end in pairwise([0, *ends])]
    assert [entry["step"] for entry in logged] == ends
    np.testing.assert_allclose([entry["loss"] for entry in logged], means, rtol=1e-6)
    uninterrupted = without_timing(read_log(tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))  # as if killed before it was whole
    train(config, tmp_path)
    assert without_timing(read_log(tmp_path)) == uninterrupted


def test_a_run_learns(run):
    losses = [entry["loss"] for entry in run.log if "loss" in entry]
    validation = [entry["validation_loss"] for entry in run.log if "validation_loss" in entry]
    assert abs(losses[0] - math.log(264)) < 0.5
    assert losses[-1] < 0.7 * losses[0] and validation[-1] < 0.8 * validation[0]


def test_newest_checkpoints_stay_and_the_last_is_the_end(run):
    assert checkpoint_steps(run.workdir) == [STEPS - CHECKPOINT_EVERY * i for i in reversed(range(KEEP))]


def test_config_of_a_run_is_read_back_whole(run, config):
    assert load_run(run.workdir) == config and load_tokenizer_name(run.workdir) == "bytes"
    assert json.loads((run.workdir / "config.json").read_text())["model"]["n_layers"] == 2


def test_report_on_stdout_is_the_last_validation(run):
    last = [entry for entry in run.log if "validation_loss" in entry][-1]
    assert run.stdout == (
        f"{run.workdir}: validation loss {last['validation_loss']:.4f} nats per token, "
        f"{last['validation_bits_per_byte']:.4f} bits per byte over the first 300 of 333 tokens of the split "
        "validation\n"
    )


def test_plot_is_a_png(run):
    image = (run.workdir / "plots" / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in image[-12:]


def read_events(workdir: Path) -> list[Event]:
    """TensorBoard's records: length, checksum, event, checksum."""
    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack_from("<Q", content)
            events.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return events


def test_tensorboard_holds_the_scalars_of_metrics_jsonl_once(run):
    scalars = [(e.step, v.tag, v.simple_value) for e in read_events(run.workdir) for v in e.summary.value]
    kind = lambda entry: "validation" if "validation_loss" in entry else "train"
    expected = [
        (entry["step"], f"{kind(entry)}/{name.removeprefix('validation_')}", np.float32(x))
        for entry in run.log
        for name, x in entry.items()
        if name != "step" and (name != "tokens" or kind(entry) == "train")
    ]
    assert [scalar[:2] for scalar in scalars] == [scalar[:2] for scalar in expected]
    assert len({scalar[:2] for scalar in scalars}) == len(scalars)
    np.testing.assert_array_equal([scalar[2] for scalar in scalars], [scalar[2] for scalar in expected])


# ---- the data of a run -----------------------------------------------------------------------


def test_data_are_known_by_their_content_not_their_path(run, config, last_checkpoint, tmp_path, rng):
    workdir, moved = copy_run(run.workdir, tmp_path / "run", keep=lambda step: step <= 50), tmp_path / "data"
    shutil.copytree(config.data.path, moved)
    elsewhere = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(moved)))
    train(elsewhere, workdir)
    assert_same_run(workdir, run, elsewhere, last_checkpoint)
    assert load_run(workdir).data.path == str(moved)

    for split in ("train", "validation"):
        shutil.rmtree(moved / split)
        write_split(moved / split, draw_text(rng, 3000))
        workdir = copy_run(run.workdir, tmp_path / split, keep=lambda step: step <= 50)
        before = snapshot(workdir)
        with pytest.raises(RunError, match=f"{workdir} holds a run on other data: what lies at {moved} now"):
            train(elsewhere, workdir)
        assert snapshot(workdir) == before


def test_a_run_without_its_config_is_not_resumed(run, config, tmp_path):
    workdir = copy_run(run.workdir, tmp_path / "run")
    (workdir / "config.json").unlink()
    before = snapshot(workdir)
    with pytest.raises(RunError, match=f"{workdir} has checkpoints but no config.json: restore it"):
        train(config, workdir)
    assert snapshot(workdir) == before


def test_runs_from_before_resume(run, config, last_checkpoint, tmp_path):
    """Their checkpoints have a hash of the data's path, too, their config fewer fields, and some with other names."""
    workdir = tmp_path / "run"
    with pytest.raises(RunInterruption), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainConfig, "fingerprint", property(lambda config: config.fingerprints[-1]))
        at_step(patch, 54, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(config, workdir)
    mapping = json.loads((workdir / "config.json").read_text())
    assert mapping.pop("data_digest")
    mapping = comparable(TrainConfig, mapping)
    assert "conversion" not in mapping
    (workdir / "config.json").write_text(json.dumps(mapping | {"conversion": 3}))
    with pytest.raises(RunError, match="config.conversion: only in the run"):
        train(config, workdir)
    mapping["model"]["gate"] = mapping["model"].pop("forget_gate")
    (workdir / "config.json").write_text(json.dumps(mapping))
    train(config, workdir)
    assert_same_run(workdir, run, config, last_checkpoint)
    assert json.loads((workdir / "config.json").read_text())["data_digest"]


def test_the_vocabulary_is_the_datas_unless_it_is_given(run, config, commands, tmp_path):
    model = dataclasses.asdict(config.model)

    def sizes(**changes) -> tuple[int, int]:
        found = train_config({**dataclasses.asdict(config), "model": model | changes}).model
        return found.vocab_size, found.padded_vocab_size

    unknown = {"vocab_size": None, "padded_vocab_size": None}
    assert sizes(**unknown) == sizes(**unknown, objective="masked") == (257, 264)
    assert sizes(vocab_size=264, padded_vocab_size=None) == (264, 264)
    assert sizes(vocab_size=264, padded_vocab_size=None, objective="masked") == (264, 272), "a row for masked tokens"
    assert sizes(vocab_size=None, padded_vocab_size=300) == (257, 300)
    assert [pad_vocabulary(n) for n in (256, 32_000, 50_257)] == [256, 32_000, 50_304]
    with pytest.raises(ConfigError, match="padded_vocab_size = 256 is smaller than vocab_size = 257"):
        sizes(vocab_size=None, padded_vocab_size=256)

    fields = OVERRIDES | {"data.path": run.data, "model.vocab_size": None, "model.padded_vocab_size": None}
    RunFactory("configs/default.py", {name: str(value) for name, value in fields.items()}, check_data=True).make({})
    workdir = copy_run(run.workdir, tmp_path / "run")
    again = commands.fork(*train_command(run.data, workdir, model__vocab_size=None, model__padded_vocab_size=None))
    assert again.returncode == 0 and f"resuming after step {STEPS}" in again.stderr, again.stderr
    assert load_run(workdir) == config


# ---- samples ---------------------------------------------------------------------------------


def test_samples_are_what_generate_draws_and_change_nothing_else(run, config, last_checkpoint, tmp_path, capfd):
    workdir = copy_run(run.workdir, tmp_path / "run", keep=lambda step: step <= 50)
    sampling = dataclasses.replace(config, sample_tokens=9, validate_every=5)
    with pytest.raises(RunInterruption), pytest.MonkeyPatch.context() as patch:
        at_step(patch, 54, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(sampling, workdir)
    train(sampling, workdir)
    log = read_log(workdir)
    samples = [(entry["step"], entry["sample"]) for entry in log if "sample" in entry]
    assert [step for step, _ in samples] == [55, 60]
    _, params = load_params(workdir, config.model, make_mesh())
    tokens = list(generate(config.model, params, [EOT], Sampling(), config.seed, 9))
    assert len(tokens) == 9 and samples[-1][1] == get_tokenizer("bytes").decode(tokens)
    assert f"a sample:\n{samples[-1][1]}\n" in capfd.readouterr().err
    for actual, wanted in zip(newest_checkpoint(workdir, config)[1], last_checkpoint[1], strict=True):
        np.testing.assert_array_equal(actual, wanted)
    texts = [(e.step, v.tag) for e in read_events(workdir) for v in e.summary.value if v.HasField("tensor")]
    assert texts == [(step, "validation/sample/text_summary") for step, _ in samples]


# ---- metrics.jsonl ---------------------------------------------------------------------------


def write_lines(workdir: Path, text: str) -> None:
    (workdir / "metrics.jsonl").write_text(text)


def test_a_torn_last_line_is_dropped_and_replaced(tmp_path):
    whole = '{"step": 1, "tokens": 64, "loss": 2.5}\n{"step": 2, "tokens": 128, "loss": 2.25}\n'
    write_lines(tmp_path, whole + '{"step": 3, "tok')
    assert [entry["step"] for entry in metrics.read_metrics(tmp_path)] == [1, 2]
    log = metrics.MetricsLog(tmp_path, start_step=2)
    log.write(3, {"tokens": 192, "loss": 2.125})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == whole + '{"step": 3, "tokens": 192, "loss": 2.125}\n'


# One of each kind; tests/faults/test_fuzz.py damages the file in every way.
DAMAGED_LINES = [b"5", b"\xff", b"[" * 100_000, b'{"step": 2', b'{"step": 0}', b'{"step": true}', b'{"stgp": 2}']
DAMAGED_LINES += [b'{"step": 2, "loss": "1"}', b'{"step": 2, "loss": NaN}', b'{"step": 2, "tokens": 1e999}']


def test_lines_that_hold_no_metrics_are_dropped_and_counted(tmp_path, capsys):
    lines = [b'{"step": 1, "tokens": 8, "loss": 2.5}', *DAMAGED_LINES, b'{"step": 3, "tokens": null, "loss": null}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    whole = [{"step": 1, "tokens": 8, "loss": 2.5}, {"step": 3, "tokens": None, "loss": None}]
    n = len(DAMAGED_LINES)
    said = []
    assert metrics.read_metrics(tmp_path, warn=said.append) == whole
    assert said == [f"{tmp_path / 'metrics.jsonl'}: {n} of {n + 2} lines are damaged and left out"]
    assert metrics.metric_points(whole, "loss") == [(8, 2.5)]
    assert plots.plot_run(tmp_path)[0].stat().st_size > 0
    metrics.MetricsLog(tmp_path, start_step=3).close()
    assert read_log(tmp_path) == whole, "resuming is not blocked"
    capsys.readouterr()
    assert metrics.read_metrics(tmp_path) == whole and capsys.readouterr().err == ""


def test_metrics_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"metrics.jsonl cannot be read: Is a directory"):
        metrics.read_metrics(tmp_path)


def test_entries_past_the_checkpoint_are_dropped(tmp_path):
    write_lines(tmp_path, "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 6)))
    log = metrics.MetricsLog(tmp_path, start_step=3)
    assert [entry["step"] for entry in read_log(tmp_path)] == [1, 2, 3]
    log.write(4, {"loss": 0.5})
    assert read_log(tmp_path)[-1] == {"step": 4, "loss": 0.5}, "a line is on disk as soon as it is written"
    log.close()
    assert [e.step for e in read_events(tmp_path) if e.HasField("session_log")] == [4], "TensorBoard purges from here"


def test_peak_rate_is_of_the_chips_name_else_measured(monkeypatch):
    assert 1e8 < devices.peak_flops_per_device() < 1e16
    monkeypatch.setattr(jax, "devices", lambda: [mock.Mock(device_kind="NVIDIA H100 80GB HBM3")])
    assert devices.peak_flops_per_device() == 989e12


# ---- killed ----------------------------------------------------------------------------------


def some_steps_past_a_checkpoint(workdir: Path) -> bool:
    steps = checkpoint_steps(workdir)
    return bool(steps) and steps[-1] + 3 <= read_log(workdir)[-1]["step"] < STEPS


def test_a_killed_run_resumes_bit_for_bit(run, config, last_checkpoint, commands, tmp_path, capfd):
    """At other moments, such as within a save: tests/faults/test_kill.py."""
    workdir = tmp_path / "killed"
    process = commands.start(*train_command(run.data, workdir))
    killed = stop_when(process, lambda: some_steps_past_a_checkpoint(workdir), signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    saved = checkpoint_steps(workdir)
    train(config, workdir)
    assert f"resuming after step {saved[-1]}" in capfd.readouterr().err
    assert_same_run(workdir, run, config, last_checkpoint)
    assert all(path.name.isdigit() for path in (workdir / "checkpoints").iterdir()), "remains of the killed save"


def test_sigterm_saves_and_exits_with_75_and_the_same_command_resumes_bit_for_bit(
    run, config, last_checkpoint, commands, tmp_path
):
    workdir = tmp_path / "interrupted"
    command = train_command(run.data, workdir)
    process = commands.start(*command)
    interrupted = stop_when(process, lambda: any(e["step"] >= 12 for e in read_log(workdir)), signal.SIGTERM)
    assert interrupted.returncode == INTERRUPTED, interrupted.stderr
    step = checkpoint_steps(workdir)[-1]
    assert 12 <= step < STEPS and read_log(workdir)[-1]["step"] == step
    assert "SIGTERM: stopping after this step\n" in interrupted.stderr
    assert f"SIGTERM at step {step}: saved {workdir / 'checkpoints' / str(step)}" in interrupted.stderr
    assert "Traceback" not in interrupted.stderr
    resumed = commands.fork(*command)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming after step {step}" in resumed.stderr
    assert resumed.stdout.replace(str(workdir), "") == run.stdout.replace(str(run.workdir), "")
    assert_same_run(workdir, run, config, last_checkpoint)


# ---- interrupted at a chosen step ------------------------------------------------------------


def test_signals_stop_at_the_end_of_a_step(run, config, last_checkpoint, tmp_path, monkeypatch):
    """Stop before the first checkpoint; then before a step that is validated and saved anyway.

    A step's metrics are written while the next one runs, at whose end the run then stops.
    """
    workdir = tmp_path / "run"
    numbers = [signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM]
    before = [signal.getsignal(number) for number in numbers]
    for number, times, step in zip(numbers, [1, 2, 1, 2], [4, 13, 22, 30], strict=True):
        with monkeypatch.context() as patch:
            at_step(patch, step - 1, lambda sent=[number] * times: [os.kill(os.getpid(), each) for each in sent])
            with pytest.raises(RunInterruption, match=rf"{number.name} at step {step}: saved .*/checkpoints/{step};"):
                train(config, workdir)
        assert checkpoint_steps(workdir)[-1] == step
        assert read_log(workdir)[-1]["step"] == step
        assert [signal.getsignal(number) for number in numbers] == before
    train(config, workdir)
    assert_same_run(workdir, run, config, last_checkpoint)


class Dying:
    """Sends a signal to this process when it is destroyed, where Python ignores exceptions."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_told_and_recorded_wherever_it_arrives_and_stays_ignored_if_it_was(number, monkeypatch, capfd):
    with StopSignals() as signals:
        assert signals.stop_after(1) is None
        Dying(number)
        assert signals.stop_after(2) == number.name
    assert f"{number.name}: stopping after this step" in capfd.readouterr().err
    before = signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), number)
            assert signals.stop_after(1) is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


IN_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.long
def test_a_run_whose_terminal_is_closed_saves_and_exits_with_75(run, commands, tmp_path):
    workdir, (outside, inside) = tmp_path / "run", os.openpty()
    os.set_blocking(outside, False)
    command = [sys.executable, "-c", IN_A_TERMINAL, *train_command(run.data, workdir)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=commands.environment(1), stdin=inside, stdout=inside, stderr=inside
    )
    os.close(inside)
    said, deadline = b"", time.monotonic() + TIMEOUT
    while not (workdir.exists() and read_log(workdir) and read_log(workdir)[-1]["step"] >= 12):
        assert process.poll() is None and time.monotonic() < deadline, said
        with contextlib.suppress(BlockingIOError):
            said += os.read(outside, 1 << 16)
        time.sleep(0.01)
    os.close(outside)
    assert process.wait(TIMEOUT) == INTERRUPTED, said
    step = checkpoint_steps(workdir)[-1]
    assert 12 <= step < STEPS and read_log(workdir)[-1]["step"] == step


def poisoned_after(steps: int):
    """Return a `make_train_step` whose parameters become NaN after so many steps."""

    def make(*arguments, **options):
        step, done = make_train_step(*arguments, **options), 0

        def poisoned(state, tokens):
            nonlocal done
            if done == steps:
                state = state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
            done += 1
            return step(state, tokens)

        return poisoned

    make_train_step = loop.make_train_step
    return make


def test_parameters_that_are_not_finite_stop_the_run_and_are_not_saved(
    run, config, last_checkpoint, tmp_path, monkeypatch
):
    workdir = tmp_path / "run"
    for step, saved in ((5, "there is no checkpoint yet"), (30, f"Go back to {workdir / 'checkpoints' / '20'} with a")):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "make_train_step", poisoned_after(step - 1))  # step 30 would be saved
            with pytest.raises(NonFiniteLossError, match=f"no longer finite at step {step}: loss nan.*{saved}"):
                train(config, workdir)
        assert checkpoint_steps(workdir) == ([] if step == 5 else [10, 20])
        assert read_log(workdir)[-1]["step"] == step - 1 and all(map(math.isfinite, read_log(workdir)[-1].values()))
    train(config, workdir)
    assert_same_run(workdir, run, config, last_checkpoint)


# ---- complete --------------------------------------------------------------------------------


def test_a_complete_run_given_again_changes_nothing_and_reports(run, config, tmp_path):
    workdir = copy_run(run.workdir, tmp_path / "run")
    before = snapshot(workdir)
    result = train(config, workdir)
    after = snapshot(workdir)
    kept = [name for name in before if name.endswith(".json") or name.startswith(("metrics", "checkpoints/"))]
    assert len(kept) > 5
    assert {name: after.get(name) for name in kept} == {name: before[name] for name in kept}
    assert result.loss == [entry["validation_loss"] for entry in run.log if "validation_loss" in entry][-1]
    assert result.tokens == 300
