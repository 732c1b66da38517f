"""train.py --plan: its report, and that it leaves no files."""

import re

import jax
import pytest

from heinsen.parallel import make_mesh
from heinsen.planning.plan import plan
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import init_train_state
from tests.runs import BATCH, LENGTH, STEPS, run_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


def test_a_plan_has_the_figures_of_the_run(tmp_path):
    config = run_config(tmp_path / "no data are needed")
    found = plan(config, steps=2)
    state = init_train_state(config.model, make_optimizer(config.optimizer, config.total_steps), 0, make_mesh())
    assert found.n_params == sum(x.size for x in jax.tree.leaves(state.params))
    assert found.bytes_state == sum(x.nbytes for x in jax.tree.leaves(state)) < found.bytes_step
    assert found.n_devices == 1 and found.mesh == {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert (found.total_steps, found.tokens_per_step) == (STEPS, BATCH * LENGTH)
    assert found.flops_per_step == 6 * found.n_params * BATCH * LENGTH
    assert found.peak_flops == config.peak_flops
    assert found.seconds_per_step > 0 and found.not_timed is None
    text = str(found)
    mfu = found.flops_per_step / found.seconds_per_step / config.peak_flops
    assert f"MFU {mfu:.1%}" in text and f"{BATCH * LENGTH / found.seconds_per_step:,.0f} tokens/s" in text
    minutes = found.seconds_per_step * STEPS / 60
    assert f"{minutes:.1f} minutes for the whole run, {minutes / 60:,.1f} device-hours" in text
    assert not list(tmp_path.iterdir())


def test_a_plan_that_is_not_timed_says_why_and_what_it_would_be(tmp_path):
    config = run_config(tmp_path, total_tokens=300_000_000_000, peak_flops=1.0)
    found = plan(config, steps=3)
    assert found.seconds_per_step is None and re.search(r"4 steps would take \d+ s at the peak rate", found.not_timed)
    hours = found.flops_per_step * found.total_steps / 0.4 / 3600
    assert f"if MFU were 40%   {hours / 24:,.1f} days for the whole run, {hours:,.1f} device-hours" in str(found)


@pytest.mark.long
def test_the_plan_is_a_command_that_writes_nothing(commands, tmp_path):
    small = ["--config=configs/demo.py", "--config.model.d_model=16", "--config.sequence_length=16"]
    done = commands.run("train.py", *small, "--plan", "--plan_steps=0", "--config.mesh.fsdp=2", devices=4)
    assert done.returncode == 0, done.stderr
    assert "devices           4 x cpu; data 2 x fsdp 2 x tensor 1 x sequence 1" in done.stdout
    assert "not measured: --plan_steps=0" in done.stdout and "device-hours" in done.stdout
