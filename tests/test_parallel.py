"""Four simulated devices against one, by the entry point."""

import pytest

from heinsen.training.loop import train
from tests.runs import (
    BATCH,
    CHECKPOINT_EVERY,
    STEPS,
    copy_run,
    read_log,
    run_config,
    snapshot,
    train_command,
)

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


def losses(log, after: int = 0) -> dict[tuple[int, str], float]:
    names = ("loss", "validation_loss", "grad_norm")
    return {
        (entry["step"], name): entry[name] for entry in log for name in names if name in entry and entry["step"] > after
    }


def test_four_devices_give_the_losses_of_one(run, run_on_4_devices):
    assert "parameters on 1 x cpu" in run.stderr and "parameters on 4 x cpu" in run_on_4_devices.stderr
    one, four = losses(run.log), losses(run_on_4_devices.log)
    assert len(one) > 2 * STEPS
    assert four == pytest.approx(one, rel=1e-5)
    assert four != one, "sums over four devices round differently: were there four?"


def test_a_checkpoint_of_one_device_goes_on_on_four(run, commands, tmp_path):
    start = STEPS - CHECKPOINT_EVERY
    workdir = copy_run(run.workdir, tmp_path / "run", keep=lambda step: step <= start)
    resumed = commands.run(*train_command(run.data, workdir), devices=4)
    assert resumed.returncode == 0, resumed.stderr
    assert "parameters on 4 x cpu" in resumed.stderr and f"resuming after step {start}" in resumed.stderr
    expected = losses(run.log)
    assert losses(read_log(workdir)) == pytest.approx(expected, rel=1e-5)
    assert losses(read_log(workdir), after=start) != losses(run.log, after=start)


def test_a_checkpoint_of_four_devices_goes_on_on_one(run_on_4_devices, tmp_path, capfd):
    start = STEPS - CHECKPOINT_EVERY
    workdir = copy_run(run_on_4_devices.workdir, tmp_path / "run", keep=lambda step: step <= start)
    train(run_config(run_on_4_devices.data), workdir)
    message = capfd.readouterr().err
    assert "parameters on 1 x" in message and f"resuming after step {start}" in message
    assert losses(read_log(workdir)) == pytest.approx(losses(run_on_4_devices.log), rel=1e-5)


PLACEMENT = """
import jax, numpy as np
from heinsen.parallel import make_mesh, place_batch, replicated, split_batch

mesh = make_mesh()
assert mesh.axis_names == ("data",) and mesh.devices.size == 4

def rows_by_device(array, axis):
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [np.unique(np.moveaxis(np.asarray(shard.data), axis, 0)[:, 0]).tolist() for shard in shards]

batch = np.repeat(np.arange(8), 3).reshape(8, 3)
placed = place_batch(mesh, {"tokens": batch, "mask": batch > 3})
assert placed.keys() == {"tokens", "mask"} and placed["mask"].dtype == bool
assert rows_by_device(placed["tokens"], 0) == [[0, 1], [2, 3], [4, 5], [6, 7]]
np.testing.assert_array_equal(placed["tokens"], batch)

# [passes, batch, tokens]: every device takes part in every pass.
passes = np.stack([batch[:4], batch[4:]])
placed = place_batch(mesh, {"tokens": passes}, axis=1)["tokens"]
assert [shard.data.shape for shard in placed.addressable_shards] == [(2, 1, 3)] * 4
assert placed.sharding.is_equivalent_to(split_batch(mesh, axis=1), 3)
np.testing.assert_array_equal(placed, passes)

everywhere = jax.device_put(batch, replicated(mesh))
assert [shard.data.shape for shard in everywhere.addressable_shards] == [(8, 3)] * 4
"""


def test_batches_are_split_and_a_batch_that_does_not_divide_is_refused(data, run, commands, tmp_path):
    workdir = copy_run(run.workdir, tmp_path / "run")
    before = snapshot(workdir)
    done = commands.run_all(
        {
            "placement": {"arguments": ["-W", "error", "-c", PLACEMENT], "devices": 4},
            "new": {"arguments": train_command(data, tmp_path / "new", batch_size=6), "devices": 4},
            "existing": {"arguments": train_command(data, workdir), "devices": 3},
        }
    )
    assert done["placement"].returncode == 0, done["placement"].stderr
    for name, n_devices, batch in [("new", 4, 6), ("existing", 3, BATCH)]:
        numbers = f"{batch} sequences a pass (batch_size {batch} / accumulation_steps 1)"
        assert done[name].returncode == 1
        message = f"error: {numbers} do not divide over {n_devices} devices"
        assert done[name].stderr.startswith(message), done[name].stderr
        assert "--config.batch_size" in done[name].stderr and "Traceback" not in done[name].stderr
    assert not (tmp_path / "new").exists() and snapshot(workdir) == before
