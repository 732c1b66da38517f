"""train.py --plan: its report, for the devices here and for others, and that it leaves no files."""

import dataclasses
import json
import re

import jax
import pytest

import heinsen.planning.plan
from heinsen.chips import CHIPS
from heinsen.parallel import make_mesh
from heinsen.planning.costs import Costs, Operation
from heinsen.planning.plan import find_overflow, plan
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import init_train_state
from tests.runs import BATCH, LENGTH, STEPS, run_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


def test_a_plan_has_the_figures_of_the_run(tmp_path):
    config = run_config(tmp_path / "no data are needed")
    found = plan(config, steps=2, peak_flops=1e12)
    state = init_train_state(config.model, make_optimizer(config.optimizer, config.total_steps), 0, make_mesh())
    assert found.n_params == sum(x.size for x in jax.tree.leaves(state.params))
    assert found.bytes_state == sum(x.nbytes for x in jax.tree.leaves(state)) < found.bytes_step
    assert found.n_devices == 1 and found.mesh == {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert (found.total_steps, found.tokens_per_step) == (STEPS, BATCH * LENGTH)
    assert found.flops_per_step == 6 * found.n_params * BATCH * LENGTH
    assert found.peak_flops == 1e12
    assert found.seconds_per_step > 0 and found.not_timed is None
    text = str(found)
    mfu = found.flops_per_step / found.seconds_per_step / 1e12
    assert f"MFU {mfu:.1%}" in text and f"{BATCH * LENGTH / found.seconds_per_step:,.0f} tokens/s" in text
    minutes = found.seconds_per_step * STEPS / 60
    assert f"{minutes:.1f} minutes for the whole run, {minutes / 60:,.1f} device-hours" in text
    assert not list(tmp_path.iterdir())


def test_a_plan_that_is_not_timed_says_why_and_what_it_would_be(tmp_path):
    config = run_config(tmp_path, total_tokens=300_000_000_000)
    found = plan(config, steps=3, peak_flops=1.0)
    assert found.seconds_per_step is None and re.search(r"4 steps would take \d+ s at the peak rate", found.not_timed)
    hours = found.flops_per_step * found.total_steps / 0.4 / 3600
    assert f"if MFU were 40%   {hours / 24:,.1f} days for the whole run, {hours:,.1f} device-hours" in str(found)


def test_a_plan_on_a_known_chip_has_its_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(heinsen.planning.plan, "chip_of", lambda kind: CHIPS["h100"])
    config = run_config(tmp_path)
    found = plan(config, steps=0, peak_flops=1e15)
    products = sum(found.costs.total.flops.values())
    assert products > 6 * 0.5 * found.n_params * BATCH * LENGTH  # the embedding, half of it here, is also looked up
    assert found.costs.total.n_bytes > 3 * found.bytes_state  # each is read and written
    text = str(found)
    assert f"bound             {found.costs.seconds:.3g} s per step at least" in text and "not measured" in text
    figures = json.loads(text.splitlines()[-1])
    assert figures["bound_seconds_per_step"] == found.costs.seconds
    assert figures["bound_device_hours"] == pytest.approx(found.costs.seconds * STEPS / 3600)
    assert figures["bound_mfu"] == pytest.approx(found.flops_per_step / found.costs.seconds / 1e15)
    assert figures["costs"]["bytes"] == found.costs.total.n_bytes and len(figures["costs"]["costliest"]) == 10


def test_a_plan_for_a_target_says_whether_it_fits(tmp_path):
    operations = {"slow": Operation(2, 3e9, seconds=0.2), "fast": Operation(1, 1e9, seconds=0.05)}
    costs = Costs(operations, {"all-reduce": (3, 4e9)}, 0.01, 0.02, loops_not_counted=1)
    found = dataclasses.replace(plan(run_config(tmp_path), steps=0), target="h100-8", costs=costs, bytes_device=10**9)
    assert found.fits
    text = str(found)
    assert "(h100-8, by its compiler)" in text and "of 953.7 MiB: it fits" in text and "not measured" not in text
    assert "3 all-reduce (4.0 GB)" in text and "1 loops whose length depends on data count as not run" in text
    assert f"bound             0.25 s per step at least, {BATCH * LENGTH / 0.25:,.0f} tokens/s" in text
    assert "at the bound      0.2 minutes for the whole run, 0.0 device-hours at least" in text
    costliest = text.splitlines()[-3:-1]
    assert [line.split() for line in costliest] == [
        ["200.00", "80.0%", "2", "3.0", "slow"],
        ["50.00", "20.0%", "1", "1.0", "fast"],
    ]
    assert json.loads(text.splitlines()[-1])["fits"] is True
    overflow = str(dataclasses.replace(found, costs=None, bytes_step=2 * 10**9))
    assert "of 953.7 MiB: IT DOES NOT FIT" in overflow and "whole run" not in overflow
    assert json.loads(overflow.splitlines()[-1])["fits"] is False


def test_an_overflow_of_a_compiler_is_understood():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 46.5G of 31.25G hbm. Exceeded by 15.25G."
    assert find_overflow(message) == (int(46.5 * 2**30), int(31.25 * 2**30))
    message = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (65.57G) "
    message += "exceeds available HBM (15.75G)."
    assert find_overflow(message) == (int(65.57 * 2**30), int(15.75 * 2**30))
    assert find_overflow("INTERNAL: something else") is None


def test_wrong_targets_are_refused_in_one_line(commands):
    small = ["--config=configs/demo.py", "--plan"]
    done = commands.fork("train.py", *small, "--target=h300")
    assert done.returncode == 1 and done.stderr.startswith(
        "error: --target=h300: there is no such machine. There are a"
    )
    done = commands.fork("train.py", "--config=configs/demo.py", "--target=h100")
    assert done.returncode == 1 and "it goes with --plan" in done.stderr


@pytest.mark.long
def test_the_plan_is_a_command_that_writes_nothing(commands, tmp_path):
    small = ["--config=configs/demo.py", "--config.model.d_model=16", "--config.sequence_length=16"]
    done = commands.run("train.py", *small, "--plan", "--plan_steps=0", "--config.mesh.fsdp=2", devices=4)
    assert done.returncode == 0, done.stderr
    assert "devices           4 x cpu; data 2 x fsdp 2 x tensor 1 x sequence 1" in done.stdout
    assert "not measured: --plan_steps=0" in done.stdout and "device-hours" in done.stdout
