"""train.py --plan: its report, for the devices here and for others, and that it leaves no files."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import pytest

import heinsen.plan.plan
from heinsen import backend
from heinsen.chips import CHIPS
from heinsen.parallel import make_mesh
from heinsen.plan import report
from heinsen.plan.costs import Costs, Operation
from heinsen.plan.plan import find_notes, find_overflow, plan
from heinsen.plan.targets import Target
from heinsen.training.devices import DeviceError
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import init_train_state
from tests.runs import BATCH, LENGTH, STEPS, run_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture(scope="module")
def bounded(tmp_path_factory, compile_cache):
    """A plan for a target whose compiler is the CPU's here, that of a run of 32 steps."""
    target = Target("h100-8", CHIPS["h100"], 1, "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "devices", lambda self: jax.devices())
        patch.setattr(heinsen.plan.plan, "find_target", lambda name: target)
        return plan(run_config(tmp_path_factory.mktemp("no data")), 0, target.name)


def test_a_plan_has_the_figures_of_the_run(tmp_path):
    config = run_config(tmp_path / "no data are needed")
    found = plan(config, steps=2, peak_flops=1e12)
    state = init_train_state(config.model, make_optimizer(config.optimizer, config.total_steps), 0, make_mesh())
    assert found.n_params == sum(x.size for x in jax.tree.leaves(state.params))
    assert found.bytes_state == sum(x.nbytes for x in jax.tree.leaves(state)) < found.bytes_step
    assert found.n_devices == 1 and found.mesh == {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert (found.total_steps, found.tokens_per_step) == (STEPS, BATCH * LENGTH)
    assert found.flops_per_step == 6 * found.n_params * BATCH * LENGTH
    assert found.peak_flops == 1e12 and found.costs is None
    assert found.seconds_per_step > 0 and found.not_timed is None
    text = str(found)
    mfu = found.flops_per_step / found.seconds_per_step / 1e12
    assert f"MFU {mfu:.1%}" in text and f"{BATCH * LENGTH / found.seconds_per_step:,.0f} tokens/s" in text
    minutes = found.seconds_per_step * STEPS / 60
    assert f"{minutes:.1f} minutes for the whole run, {minutes / 60:,.1f} device-hours" in text
    assert not list(tmp_path.iterdir())


def test_a_plan_that_is_not_timed_says_why_and_what_it_would_be(tmp_path, monkeypatch):
    config = run_config(tmp_path, total_tokens=300_000_000_000)
    found = plan(config, steps=3, peak_flops=1.0)
    assert found.seconds_per_step is None and re.search(r"4 steps would take \d+ s at the peak rate", found.not_timed)
    hours = found.flops_per_step * found.total_steps / 0.4 / 3600
    text = str(found)
    assert f"if MFU were 40%   {hours / 24:,.1f} days for the whole run, {hours:,.1f} device-hours" in text
    assert f"not measured: {found.not_timed}" in text
    monkeypatch.setattr(heinsen.plan.plan, "available_bytes", lambda: found.bytes_step - 1)
    monkeypatch.setattr(heinsen.plan.plan, "chip_of", lambda kind: CHIPS["h100"])
    found = plan(config, steps=3, peak_flops=1e15)  # of a known chip: with its bound
    assert found.not_timed == "it needs more memory than there is"
    assert f"bound             {found.costs.seconds:.3g} s per step at least" in str(found)


def test_a_plan_for_a_target_has_its_chip_its_memory_and_a_bound(bounded):
    chip, bound = CHIPS["h100"], bounded.costs.seconds
    assert bounded.target == "h100-8" and bounded.peak_flops == chip.bfloat16 and bounded.costs.chip == chip
    assert bounded.fits and bounded.bytes_device == int(0.75 * chip.memory) and bounded.seconds_compiling > 0
    products = sum(bounded.costs.total.flops.values())
    assert products > 6 * 0.5 * bounded.n_params * BATCH * LENGTH  # the embedding, half of it here, is also looked up
    assert bounded.costs.total.n_bytes > 3 * bounded.bytes_state  # each is read and written
    figures = json.loads(str(bounded).splitlines()[-1])
    assert figures["bound_seconds_per_step"] == bound
    assert figures["bound_device_hours"] == pytest.approx(bound * STEPS / 3600)
    assert figures["expected_seconds_per_step"] == pytest.approx([bound / 0.81, bound / 0.52])
    assert figures["bound_mfu"] == pytest.approx(bounded.flops_per_step / bound / chip.bfloat16)
    assert figures["costs"]["bytes"] == bounded.costs.total.n_bytes and len(figures["costs"]["costliest"]) == 10


def test_a_step_that_does_not_fit_has_the_figures_of_its_compiler(tmp_path, monkeypatch):
    def run_out(_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(Target, "devices", lambda self: jax.devices())
    monkeypatch.setattr(heinsen.plan.plan._Step, "compile", run_out)
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 46.5G of 31.25G hbm."
    found = plan(run_config(tmp_path), 0, "v5e-1", peak_flops=1.0)
    assert found.fits is False and found.costs is None and found.peak_flops == 1.0
    assert (found.bytes_step, found.bytes_device) == (int(46.5 * 2**30), int(31.25 * 2**30))
    message = "INTERNAL: something else"
    with pytest.raises(DeviceError, match="something else"):
        plan(run_config(tmp_path), 0, "v5e-1")


def test_the_report_says_what_a_step_costs_and_whether_it_fits(bounded):
    operations = {"slow": Operation(2, 3e9, seconds=0.2), "fast": Operation(1, 1e9, seconds=0.05)}
    costs = Costs(CHIPS["h100"], operations, {"all-reduce": Operation(3, 4e9)}, {"loop"})
    found = dataclasses.replace(bounded, costs=costs, bytes_device=10**9)
    text = str(found)
    assert "(h100-8, by its compiler)" in text and "of 953.7 MiB: it fits" in text and "not measured" not in text
    assert "3 all-reduce (4.0 GB)" in text and "1 loops whose length depends on data count as not run" in text
    assert f"bound             0.25 s per step at least, {BATCH * LENGTH / 0.25:,.0f} tokens/s" in text
    rates = f"{BATCH * LENGTH * 0.52 / 0.25:,.0f} to {BATCH * LENGTH * 0.81 / 0.25:,.0f} tokens/s"
    assert f"expected          0.309 to 0.481 s per step, {rates}: 52% to 81% of the bound, as measured on" in text
    assert "at the bound      0.2 minutes for the whole run, 0.0 device-hours at least" in text
    assert "expected, at most 0.5 minutes for the whole run, 0.0 device-hours\n" in text and "note  " not in text
    assert "note              too slow" in str(dataclasses.replace(found, notes=("too slow",)))
    costliest = text.splitlines()[-3:-1]
    assert [line.split() for line in costliest] == [
        ["200.00", "80.0%", "2", "3.0", "slow"],
        ["50.00", "20.0%", "1", "1.0", "fast"],
    ]
    assert json.loads(text.splitlines()[-1])["fits"] is True
    small = dataclasses.replace(costs, operations={"x": Operation(1, 2.5e6, seconds=0.25)}, loops_not_counted=set())
    for steps, time in ((14_400, "1.0 hours"), (690_000, "47.9 hours"), (691_200, "2.0 days")):
        text = str(dataclasses.replace(found, costs=small, total_steps=steps))
        assert f"at the bound      {time} for the whole run" in text
    assert "bytes moved       0.0025 GB" in text and "loops whose" not in text and "matrix products   0 FLOPs" in text
    overflow = str(dataclasses.replace(found, costs=None, bytes_step=2 * 10**9))
    assert "of 953.7 MiB: IT DOES NOT FIT" in overflow and "whole run" not in overflow
    assert json.loads(overflow.splitlines()[-1])["fits"] is False
    assert not str(dataclasses.replace(found, target=None, costs=None)).splitlines()[-1].startswith("{")


def test_the_expected_time_is_that_of_the_steps_that_were_measured():
    files = (Path(__file__).parents[2] / "bench").glob("h200_step*.json")
    steps = [json.loads(file.read_text()) for file in files]
    reached = sorted(step["bound_seconds_per_step"] / step["seconds_per_step"] for step in steps)
    assert (reached[0], reached[-1]) == pytest.approx(report._REACHED, abs=0.005) and len(steps) == 3


def test_softmax_that_is_not_fused_is_noted(tmp_path):
    def model(d_head=8, **fields):
        sizes = {"d_key": d_head, "d_value": d_head}
        return dataclasses.replace(run_config(tmp_path).model, attention="softmax", **sizes, **fields)

    assert find_notes(model(dtype="float32")) == ()
    with backend.compiling_for("gpu"):
        assert find_notes(model(dtype="bfloat16")) == () == find_notes(run_config(tmp_path).model)
        (note,) = find_notes(model(dtype="bfloat16", forget_gate="head"))
        assert "cuDNN takes part with model.forget_gate=none" in note
        (note,) = find_notes(model(dtype="float32"))
        assert "cuDNN takes part with model.dtype=bfloat16" in note
        (note,) = find_notes(model(d_head=12, dtype="bfloat16"))
        assert "cuDNN takes part with model.d_key and d_value a multiple of 8" in note


def test_an_overflow_of_a_compiler_is_understood():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 46.5G of 31.25G hbm. Exceeded by 15.25G."
    assert find_overflow(message) == (int(46.5 * 2**30), int(31.25 * 2**30))
    message = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (65.57G) "
    message += "exceeds available HBM (15.75G)."
    assert find_overflow(message) == (int(65.57 * 2**30), int(15.75 * 2**30))
    for given, required in (("1.5K", 1.5 * 2**10), ("2.5M", 2.5 * 2**20), ("0.5T", 2**39), ("300", 300)):
        assert find_overflow(f"Used {given} of 2.0T hbm.") == (int(required), 2**41)
    assert find_overflow("INTERNAL: something else") is None


def test_wrong_targets_are_refused_in_one_line(commands):
    small = ["--config=configs/pile_125m.py", "--plan"]
    done = commands.fork("train.py", *small, "--target=h300")
    assert done.returncode == 1 and done.stderr.startswith(
        "error: --target=h300: there is no such machine. There are a"
    )
    done = commands.fork("train.py", "--config=configs/demo.py", "--target=h100")
    assert done.returncode == 1 and "it goes with --plan" in done.stderr


@pytest.mark.long
def test_the_plan_is_a_command_that_writes_nothing(commands, tmp_path):
    small = ["--config=configs/demo.py", "--config.model.vocab_size=257", "--config.model.d_model=16"]
    small += ["--config.sequence_length=16"]
    done = commands.run("train.py", *small, "--plan", "--plan_steps=0", "--config.mesh.fsdp=2", devices=4)
    assert done.returncode == 0, done.stderr
    assert "devices           4 x cpu; data 2 x fsdp 2 x tensor 1 x sequence 1" in done.stdout
    assert "not measured: --plan_steps=0" in done.stdout and "device-hours" in done.stdout
