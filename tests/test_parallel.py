"""Runs on meshes of simulated devices, in one process and in two, against one device."""

import signal
import socket
import time

import jax
import pytest

from heinsen.data.tokenizer import get_tokenizer
from heinsen.decoding import Sampling, generate
from heinsen.models import abstract_params
from heinsen.parallel import AXES, MeshConfig, make_mesh, shardings
from heinsen.training.folder import load_run
from heinsen.training.loop import train
from heinsen.weights import load_params
from tests.model_configs import model_config
from tests.runs import (
    BATCH,
    CHECKPOINT_EVERY,
    EOT,
    LENGTH,
    STEPS,
    Commands,
    checkpoint_steps,
    copy_run,
    finish,
    read_log,
    run_config,
    snapshot,
    stop_when,
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


@pytest.mark.long
def test_a_checkpoint_of_one_device_goes_on_on_another_mesh(run, commands, tmp_path):
    """The mesh does not identify a run; config.json records the new one."""
    start = STEPS - CHECKPOINT_EVERY
    workdir = copy_run(run.workdir, tmp_path / "run", keep=lambda step: step <= start)
    changes = {"mesh__fsdp": 2, "mesh__tensor": 2, "sample_tokens": 9}
    resumed = commands.run(*train_command(run.data, workdir, **changes), devices=4)
    assert resumed.returncode == 0, resumed.stderr
    assert "parameters on 4 x cpu" in resumed.stderr and f"resuming after step {start}" in resumed.stderr
    assert "config.mesh.fsdp: 1 in the run, 2 in the command: continuing with the command's" in resumed.stderr
    assert losses(read_log(workdir)) == pytest.approx(losses(run.log), rel=1e-5)
    assert losses(read_log(workdir), after=start) != losses(run.log, after=start)
    assert load_run(workdir).mesh == MeshConfig(-1, 2, 2, 1)
    check_sample(workdir)


def test_a_checkpoint_of_four_devices_goes_on_on_one(run_on_4_devices, tmp_path, capfd):
    start = STEPS - CHECKPOINT_EVERY
    workdir = copy_run(run_on_4_devices.workdir, tmp_path / "run", keep=lambda step: step <= start)
    train(run_config(run_on_4_devices.data), workdir)
    message = capfd.readouterr().err
    assert "parameters on 1 x" in message and f"resuming after step {start}" in message
    assert losses(read_log(workdir)) == pytest.approx(losses(run_on_4_devices.log), rel=1e-5)


def check_sample(workdir):
    """Compare the last sample, of 9 tokens, with what one device draws."""
    config = load_run(workdir)
    _, params = load_params(workdir, config.model, make_mesh())
    tokens = list(generate(config.model, params, [EOT], Sampling(), config.seed, 9))
    assert read_log(workdir)[-1]["sample"] == get_tokenizer("bytes").decode(tokens)


EVERY_MESH = """
import sys
from pathlib import Path
from heinsen.training.loop import train
from heinsen.training.folder import load_run
from tests.runs import run_config

for i, sizes in enumerate([(1, 4, 1, 1), (2, 1, 2, 1), (1, 1, 1, 4)]):
    mesh = dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor", "mesh__sequence"), sizes))
    train(run_config(Path(sys.argv[1]), optimizer__name=sys.argv[3], **mesh), Path(sys.argv[2]) / str(i))
"""


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_axis_of_the_mesh_gives_the_losses_of_one_device(optimizer, run, commands, tmp_path):
    done = commands.run("-W", "error", "-c", EVERY_MESH, run.data, tmp_path, optimizer, devices=4)
    assert done.returncode == 0, done.stderr
    train(run_config(run.data, optimizer__name=optimizer), tmp_path / "one")
    expected = losses(read_log(tmp_path / "one"))
    assert (expected == losses(run.log)) == (optimizer == "adamw")
    for i in range(3):
        actual = losses(read_log(tmp_path / str(i)))
        assert actual == pytest.approx(expected, rel=1e-4) and actual != expected


# ---- several processes ---------------------------------------------------------------------------


def start_two(commands: Commands, data, workdir, *flags, **changes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    two = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2"]
    command = [*train_command(data, workdir, **changes), *flags]
    return [commands.start(*command, *two, f"--process_id={i}", devices=2) for i in range(2)]


@pytest.mark.long
def test_two_processes_are_lost_stop_together_and_go_on(run, commands, tmp_path):
    """One is killed; both restart, stop together, resume on another mesh, and end with the losses of one device."""
    workdir = tmp_path / "run"
    first, second = start_two(commands, run.data, workdir)
    try:
        stop_when(second, lambda: len(read_log(workdir)) > 12, signal.SIGKILL)
        start = time.monotonic()
        left = finish(first)
        assert time.monotonic() - start < 60
    finally:
        first.kill()
    assert left.returncode == 1
    assert "error: another process of the run failed or was lost" in left.stderr
    assert checkpoint_steps(workdir)[-1] == CHECKPOINT_EVERY

    changes = {"mesh__data": 1, "mesh__fsdp": 2, "mesh__sequence": 2, "sample_tokens": 9}
    for number, begin in (signal.SIGTERM, 22), (signal.SIGUSR1, 34):
        first, second = start_two(commands, run.data, workdir, **changes)
        try:
            # Sent to the process that is not the coordinator; the other one is notified.
            stopped = stop_when(second, lambda begin=begin: read_log(workdir)[-1]["step"] > begin, number)
            assert stopped.returncode == finish(first).returncode == 75, stopped.stderr
        finally:
            first.kill()
        step = checkpoint_steps(workdir)[-1]
        assert begin < step < STEPS and f"saved {workdir}/checkpoints/{step}" in stopped.stderr

    done = [finish(process) for process in start_two(commands, run.data, workdir, **changes)]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stderr
    assert "parameters on 4 x cpu" in done[0].stderr and f"resuming after step {step}" in done[0].stderr
    assert "step" not in done[1].stderr, "the first alone reports"
    assert "validation loss" in done[0].stdout and "validation loss" not in done[1].stdout
    assert losses(read_log(workdir)) == pytest.approx(losses(run.log), rel=1e-4)
    check_sample(workdir)


# ---- sharding ------------------------------------------------------------------------------------


ON_FOUR_DEVICES = """
import sys
from pathlib import Path
import jax, numpy as np
from heinsen.parallel import AXES, MeshConfig, make_mesh, place_batch, process_rows, replicated, split_batch
from heinsen.training.loop import train
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import init_train_state
from tests.runs import run_config

# Meshes that do not fit.
for changes in eval(sys.argv[3]):
    try:
        train(run_config(Path(sys.argv[1]), **changes), Path(sys.argv[2]))
    except ValueError as error:
        print(error)

mesh = make_mesh()
assert mesh.axis_names == AXES and mesh.shape["data"] == 4

def rows_by_device(array, axis):
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [np.unique(np.moveaxis(np.asarray(shard.data), axis, 0)[:, 0]).tolist() for shard in shards]

batch = np.repeat(np.arange(8), 3).reshape(8, 3)
placed = place_batch(mesh, {"tokens": batch, "mask": batch > 3})
assert placed.keys() == {"tokens", "mask"} and placed["mask"].dtype == bool
assert rows_by_device(placed["tokens"], 0) == [[0, 1], [2, 3], [4, 5], [6, 7]]
np.testing.assert_array_equal(placed["tokens"], batch)
assert process_rows(mesh, 8).tolist() == list(range(8))

# [passes, batch, tokens]: every device takes part in every pass.
passes = np.stack([batch[:4], batch[4:]])
placed = place_batch(mesh, {"tokens": passes}, axis=1)["tokens"]
assert [shard.data.shape for shard in placed.addressable_shards] == [(2, 1, 3)] * 4
assert placed.sharding.is_equivalent_to(split_batch(mesh, axis=1), 3)
np.testing.assert_array_equal(placed, passes)

# Sequences are split over data and fsdp, and replicated over the other axes.
placed = place_batch(make_mesh(MeshConfig(1, 2, 1, 2)), {"tokens": batch})["tokens"]
assert rows_by_device(placed, 0) == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2

# Parameters and moments are split; initialization never holds them whole.
sizes = dict(model__d_model=64, model__n_heads=8, model__implementation=None)
config = run_config("unused", optimizer__name=sys.argv[4], **sizes)
optimizer = make_optimizer(config.optimizer, 100)
size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
held = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
mesh = make_mesh(MeshConfig(1, 4, 1, 1))
state = init_train_state(config.model, optimizer, 0, mesh)
assert held(state) < 0.3 * size(state), "norms and biases alone are whole"
assert held(state.params["layers"]["w1"]["kernel"]) * 4 == size(state.params["layers"]["w1"]["kernel"])
one = init_train_state(config.model, optimizer, 0, jax.make_mesh((1,) * 4, AXES, devices=jax.devices()[:1],
                       axis_types=(jax.sharding.AxisType.Auto,) * 4))
jax.tree.map(np.testing.assert_array_equal, state, one)
compiled = jax.jit(lambda: init_train_state(config.model, optimizer, 0, mesh)).lower().compile()
assert compiled.memory_analysis().output_size_in_bytes < 0.3 * size(state)
assert compiled.memory_analysis().temp_size_in_bytes < 0.3 * size(state)
"""


COMMUNICATION = """
import re
import jax, numpy as np
from heinsen.models import mean_loss
from heinsen.parallel import MeshConfig, make_mesh, split_batch
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import abstract_train_state
from tests.runs import run_config

config = run_config("unused", model__implementation=None)
optimizer = make_optimizer(config.optimizer, 100)

def sent(sizes, n_tokens):
    "Bytes of each collective of the gradient on a device, by its kind."
    mesh = make_mesh(MeshConfig(*sizes))
    tokens = jax.ShapeDtypeStruct((1, 4, n_tokens + 1), np.int32, sharding=split_batch(mesh, axis=1))
    params = abstract_train_state(config.model, optimizer, mesh).params
    loss = lambda params, tokens: mean_loss(config.model, params, tokens[0], mesh)
    text = jax.jit(jax.grad(loss)).lower(params, tokens).compile().as_text()
    found = {}
    for shape, kind in re.findall(r"= \\S*?f32\\[([\\d,]*)\\]\\S* (collective-permute|all-reduce|all-gather)\\(", text):
        found[kind] = found.get(kind, 0) + 4 * int(np.prod([int(n) for n in shape.split(",") if n] or [1]))
    return found

short, long = sent((1, 1, 1, 4), 64), sent((1, 1, 1, 4), 256)
assert short["collective-permute"] > 0 and short == long, f"communication grows with tokens: {short}, {long}"
"""


@pytest.mark.long
def test_communication_does_not_grow_with_the_tokens(commands):
    done = commands.run("-W", "error", "-c", COMMUNICATION, devices=4)
    assert done.returncode == 0, done.stderr


def test_arrays_lie_where_the_mesh_says_and_a_mesh_that_does_not_fit_is_refused(data, run, commands, tmp_path):
    cases = [
        ({"batch_size": 6}, "6 sequences per microbatch (batch_size 6 / accumulation_steps 1) do not divide over 4"),
        ({"mesh__data": 3}, "axes data 3 x fsdp 1 x tensor 1 x sequence 1 need 3 devices: there are 4"),
        ({"mesh__fsdp": 3}, "the mesh's axes data -1 x fsdp 3 x tensor 1 x sequence 1 do not divide 4 devices"),
        ({"mesh__tensor": 4}, "model.n_heads = 2 do not divide over mesh.tensor = 4"),
        ({"mesh__sequence": 4, "sequence_length": 18}, "sequence_length = 18 does not divide into 4 parts"),
        (
            {"mesh__fsdp": 4, "model__d_model": 30, "model__padded_vocab_size": 260},
            "axis 1 of params/layers/w1/kernel (2, 30, 24) does not divide into 4 parts (mesh.fsdp 4)",
        ),
    ]
    changes = repr([changes for changes, _ in cases])
    done = commands.run("-W", "error", "-c", ON_FOUR_DEVICES, data, tmp_path / "new", changes, "muon", devices=4)
    assert done.returncode == 0, done.stderr
    messages = done.stdout.splitlines()
    assert len(messages) == len(cases), done.stderr
    for message, (_, expected) in zip(messages, cases, strict=True):
        assert expected in message
    assert not (tmp_path / "new").exists()

    workdir = copy_run(run.workdir, tmp_path / "run")
    before = snapshot(workdir)
    done = commands.fork(*train_command(data, workdir), devices=3)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    message = f"error: {BATCH} sequences per microbatch (batch_size {BATCH} / accumulation_steps 1) do not divide over"
    assert done.stderr.startswith(message) and snapshot(workdir) == before


@pytest.mark.wrong_types  # a mesh without devices
@pytest.mark.parametrize("parts", [dict(objective="masked"), dict(attention="delta"), dict(block="gpt2")])
def test_parameters_with_an_axis_of_heads_are_divided_by_heads(parts):
    config = model_config(n_heads=6, forget_gate="head", output_gate=True, convolution=3, **parts)
    abstract = abstract_params(config)
    where = shardings(jax.sharding.AbstractMesh((1, 1, 2, 1), AXES), abstract)
    specs = {
        jax.tree_util.keystr(path): dict(enumerate(sharding.spec)).get(x.shape.index(6))
        for (path, x), sharding in zip(jax.tree.leaves_with_path(abstract), jax.tree.leaves(where), strict=True)
        if 6 in x.shape
    }
    assert any("gate" in name for name in specs)
    assert {name: axes for name, axes in specs.items() if axes != "tensor"} == {}


def test_the_axis_that_takes_the_rest():
    assert MeshConfig(-1, 2, 1, 2).sizes(8) == (2, 2, 1, 2)
    assert MeshConfig(2, 2, 1, -1).sizes(4) == (2, 2, 1, 1)
    assert LENGTH % 4 == 0  # the runs above divide
