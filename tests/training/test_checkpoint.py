"""Checkpoints restore what was saved, bit for bit, or are reported as damaged; nothing in between.

Longer than what it tests: a third of it are programs, on other devices, in two processes, and where no file has room.
"""

import contextlib
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.parallel import with_shardings
from heinsen.training import checkpoint
from heinsen.training.checkpoint import CheckpointError, Checkpoints, checksums, describe_cause, restore_params
from heinsen.training.step import TrainState
from tests.runs import checkpoint_steps, finish, snapshot

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

KEEP, HASH = 3, "the config's"
STEPS = (10, 20, 30)
METADATA = "_CHECKPOINT_METADATA"


def draw_state(rng: np.random.Generator) -> TrainState:
    """Return arrays of several types; the bits of the large ones are random, so that Orbax cannot compress them.

    Each field has a large one. Else its write may go on where the others fail, into the next save of the process.
    """
    draw = lambda *shape: jnp.asarray(rng.integers(0, 2**32, shape, np.uint32)).view(jnp.float32)
    params = {"layers": {"w": draw(3, 32, 40), "b": jnp.asarray(rng.normal(size=7), jnp.bfloat16)}}
    return TrainState(params, (jnp.asarray(rng.integers(100), jnp.int32), {"mu": draw(64, 20)}), {"all": draw(64, 20)})


def placed(state: Any) -> Any:
    return with_shardings(jax.eval_shape(lambda: state), jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


class Saved(NamedTuple):
    workdir: Path
    states: dict[int, TrainState]

    def copy(self, workdir: Path) -> "Saved":
        shutil.copytree(self.workdir, workdir)
        return self._replace(workdir=workdir)

    def path(self, step: int) -> Path:
        return self.workdir / "checkpoints" / str(step)

    def restore(self, config_hash: str = HASH) -> tuple[int, list[str]]:
        """Restore and compare with what was saved; return the step and the warnings."""
        warnings = []
        with Checkpoints(self.workdir, KEEP, warn=warnings.append) as checkpoints:
            step, state, progress = checkpoints.restore_newest(placed(self.states[STEPS[0]]), config_hash)
        assert bits(state) == bits(self.states[step]) and progress == {"next_index": step}
        assert jax.tree.structure(state) == jax.tree.structure(self.states[step])
        return step, warnings


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Saved:
    rng = np.random.default_rng(request.config.option.seed)
    saved = Saved(tmp_path_factory.mktemp("checkpoints") / "run", {step: draw_state(rng) for step in STEPS})
    with Checkpoints(saved.workdir, KEEP) as checkpoints:
        for step, state in saved.states.items():
            checkpoints.save(step, state, {"next_index": step}, HASH)
    return saved


@pytest.fixture
def saved(one_run: Saved, tmp_path: Path) -> Saved:
    return one_run.copy(tmp_path / "run")


# ---- checksums -------------------------------------------------------------------------------


def expected_checksum(words: np.ndarray) -> int:
    """Compute the checksum of words in row-major order with Python's integers."""
    total = 0
    for i, word in enumerate(words.ravel().tolist()):
        x = (word + i * 0x9E3779B9) % 2**32
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        total += x ^ (x >> 16)
    return total % 2**32


def test_checksum_is_of_the_words_in_their_places(rng):
    floats = rng.normal(size=(3, 4, 5)).astype(np.float32)
    floats[0, 0, :3] = -0.0, np.nan, -np.inf
    narrow, counts = jnp.asarray(floats, jnp.bfloat16), rng.integers(-(2**31), 2**31, 9, np.int32)
    cases = {
        "float32": (floats, floats.view(np.uint32)),
        "scalar": (floats[1, 2, 3], floats[1, 2, 3].view(np.uint32)),
        "empty": (floats[:0], floats[:0].view(np.uint32)),
        "bfloat16": (narrow, np.asarray(narrow).view(np.uint16)),
        "int32": (counts, counts.view(np.uint32)),
    }
    arrays = {name: jnp.asarray(array) for name, (array, _) in cases.items()}
    sums = dict(zip(sorted(arrays), checksums(arrays), strict=True))
    assert {name: int(x) for name, x in sums.items()} == {name: expected_checksum(w) for name, (_, w) in cases.items()}
    with jax.enable_x64(True):
        wide = rng.normal(size=(4, 3))
        assert int(checksums(jnp.asarray(wide))[0]) == expected_checksum(wide.view(np.uint32))


def test_every_changed_bit_and_place_changes_the_checksum(rng):
    words = rng.integers(0, 2**32, (37, 11), np.uint32)
    variants = [words]
    for bit in range(32):
        place = tuple(rng.integers(words.shape))
        variants.append(words.copy())
        variants[-1][place] ^= np.uint32(1 << bit)
    variants += [words ^ np.uint32(1 << 31), words[::-1], words[:, ::-1], np.roll(words, 1)]
    pair = words.copy()  # two sign bits: a sum of words times odd numbers would not notice
    pair[3, 4] ^= np.uint32(1 << 31)
    pair[20, 7] ^= np.uint32(1 << 31)
    variants.append(pair)
    sums = [int(checksums(jnp.asarray(variant))[0]) for variant in variants]
    assert len(set(sums)) == len(variants)


# ---- what is saved and what stays ------------------------------------------------------------


def test_a_run_without_checkpoints_restores_none(tmp_path, rng):
    with Checkpoints(tmp_path, KEEP) as checkpoints:
        assert checkpoints.restore_newest(placed(draw_state(rng)), HASH) is None
        assert checkpoints.latest is None


def test_the_newest_comes_back_bit_for_bit(saved):
    before = snapshot(saved.workdir)
    assert saved.restore() == (STEPS[-1], [])
    step, params = restore_params(saved.workdir, placed(saved.states[10].params), warn=pytest.fail)
    assert step == STEPS[-1] and bits(params) == bits(saved.states[step].params)
    assert snapshot(saved.workdir) == before


def test_the_newest_stay_and_every_so_many_steps(tmp_path, rng):
    state = draw_state(rng)
    with Checkpoints(tmp_path, 2, keep_every=20) as checkpoints:
        for step in range(5, 60, 5):
            checkpoints.save(step, state, {}, HASH)
        checkpoints.save(55, state, {"not": "saved"}, HASH)
        assert checkpoints.latest == 55
    assert checkpoint_steps(tmp_path) == [20, 40, 50, 55]
    with Checkpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.restore_newest(placed(state), HASH).progress == {}


def test_parameters_are_read_alone(saved):
    """Damage to other fields does not matter."""
    shutil.rmtree(saved.path(30) / "opt_state")
    step, params = restore_params(saved.workdir, placed(saved.states[30].params), warn=pytest.fail)
    assert step == 30 and bits(params) == bits(saved.states[30].params)
    step, (warning,) = saved.restore()
    assert step == 20 and "opt_state" in warning


# ---- damage ----------------------------------------------------------------------------------


def check_fallback(saved: Saved) -> str:
    """Restore the save before the last one, with a warning; return the reason it gives."""
    damaged = snapshot(saved.path(30))
    step, (warning,) = saved.restore()
    aside = saved.workdir / "damaged_checkpoints" / "30"
    start, end = f"{saved.path(30)} is damaged: ", f". Using step 20; it is now {aside}"
    assert step == 20 and warning.startswith(start) and warning.endswith(end)
    assert checkpoint_steps(saved.workdir) == [10, 20] and snapshot(aside) == damaged, "nothing is lost"
    return warning[len(start) : -len(end)]


def no_record(saved: Saved) -> None:
    (saved.path(30) / METADATA).unlink()


def no_arrays(saved: Saved) -> None:
    shutil.rmtree(saved.path(30) / "params" / "d")


def another_step(saved: Saved) -> None:
    shutil.rmtree(saved.path(30))
    shutil.copytree(saved.path(10), saved.path(30))


def a_flipped_bit(saved: Saved) -> None:
    """Of a value, which Orbax does not notice."""
    path = max((path for path in (saved.path(30) / "params").rglob("*")), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def edit(name: str, old: str, new: str) -> Callable[[Saved], object]:
    return lambda saved: (path := saved.path(30) / name).write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (no_record, "its record is damaged, or of an older version of the code (it has no digest)"),
        (
            edit(METADATA, '"next_index": 30', '"next_index": 31'),
            "its record is damaged, or of an older version of the code (its digest does not fit",
        ),
        (another_step, "it was saved as step 10"),
        (edit("params/_METADATA", "key_type", "key_typf"), "its metadata cannot be read (KeyError: 'key_type')"),
        (no_arrays, ""),
        (a_flipped_bit, "1 arrays are not as they were saved: params/layers/w"),
    ],
)
def test_damage_is_named_and_the_one_before_is_used(saved, damage, reason):
    """One of each kind of error; tests/faults/test_fuzz.py damages the files in every way."""
    damage(saved)
    assert check_fallback(saved).startswith(reason)


def test_reading_parameters_falls_back_and_changes_nothing(saved, capsys):
    no_arrays(saved)
    before = snapshot(saved.workdir)
    step, params = restore_params(saved.workdir, placed(saved.states[20].params))
    assert step == 20 and bits(params) == bits(saved.states[20].params) and snapshot(saved.workdir) == before
    assert capsys.readouterr().err.startswith(f"warning: {saved.path(30)} is damaged: ")


def test_a_run_that_removes_what_is_being_read_has_a_newer_one(saved, monkeypatch):
    """With keep_checkpoints=1: the newer one is whole before the older one goes, file by file."""
    newer, load = saved.path(30).rename(saved.workdir / "newer"), checkpoint._load

    def load_late(path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
        if newer.exists():
            newer.rename(saved.path(30))
            shutil.rmtree(saved.path(10))
            shutil.rmtree(path / "params")
        return load(path, wanted)

    monkeypatch.setattr(checkpoint, "_load", load_late)
    step, params = restore_params(saved.workdir, placed(saved.states[30].params), warn=pytest.fail)
    assert step == 30 and bits(params) == bits(saved.states[30].params)


def test_a_step_moved_away_is_saved_again_as_often_as_needed(saved):
    for name in ("30", "30.1"):
        no_record(saved)
        with Checkpoints(saved.workdir, KEEP, warn=lambda message: None) as checkpoints:
            step, state, _ = checkpoints.restore_newest(placed(saved.states[10]), HASH)
            assert step == 20 == checkpoints.latest
            checkpoints.save(30, saved.states[30], {"next_index": 30}, HASH)
        assert (saved.workdir / "damaged_checkpoints" / name).is_dir()
        assert saved.restore() == (30, [])


def test_only_damaged_checkpoints_are_refused_each_with_its_reason(saved):
    (saved.path(10) / METADATA).unlink()
    shutil.rmtree(saved.path(20))
    saved.path(20).mkdir()
    no_arrays(saved)
    before = snapshot(saved.workdir)
    for call in (saved.restore, lambda: restore_params(saved.workdir, placed(saved.states[10].params))):
        with pytest.raises(CheckpointError) as error:
            call()
        first, *reasons, remedy = str(error.value).splitlines()
        assert first == f"{saved.workdir / 'checkpoints'} holds no usable checkpoint:"
        assert remedy == "Restore one of them from a copy, or train in another --workdir."
        for line, step in zip(reasons, (30, 20, 10), strict=True):
            assert line.startswith(f"  {saved.path(step)} cannot be restored: ")
        assert snapshot(saved.workdir) == before and saved.path(20).exists()


def test_a_cause_is_named_in_words():
    """Orbax's errors may be no more than a key."""
    assert describe_cause(KeyError(1813)) == "Orbax failed (KeyError: 1813)"
    assert describe_cause(KeyError("key_type"), otherwise="it is odd") == "it is odd (KeyError: 'key_type')"
    assert describe_cause(AssertionError()) == "Orbax failed (AssertionError)"
    try:
        try:
            raise OSError(28, "No space left on device", "a file")
        except OSError as error:
            raise KeyError("key_type") from error
    except KeyError as error:
        assert describe_cause(error) == "No space left on device: a file"
    assert describe_cause(ValueError("DATA_LOSS: CRC-32C  [tensorstore_spec='{}']")) == "DATA_LOSS: CRC-32C"


# ---- another run's ---------------------------------------------------------------------------


def test_another_config_is_refused_at_once(saved):
    """It does not fall back to an older checkpoint with the right hash."""
    with Checkpoints(saved.workdir, 4) as checkpoints:
        checkpoints.save(40, saved.states[30], {}, "another's")
    before = snapshot(saved.workdir)
    with pytest.raises(CheckpointError, match=r"checkpoints/40 was saved by a run with another config.*--workdir"):
        saved.restore()
    assert snapshot(saved.workdir) == before


def test_another_model_is_refused_with_what_differs(saved):
    before = snapshot(saved.workdir)
    layers = placed(saved.states[10].params)["layers"]
    other = {"w": layers["w"].update(shape=(3, 32, 39)), "c": layers["b"]}
    with pytest.raises(CheckpointError) as error:
        restore_params(saved.workdir, {"layers": other})
    assert str(error.value).startswith(
        f"{saved.path(30)} cannot be restored: it belongs to another model. params/layers/b is bfloat16[7] in it, "
        "missing in the model; params/layers/c is missing in it, bfloat16[7] in the model; params/layers/w is "
        "float32[3, 32, 40] in it, float32[3, 32, 39] in the model. Give another --workdir"
    )
    state = placed(saved.states[10])
    with Checkpoints(saved.workdir, KEEP) as checkpoints, pytest.raises(CheckpointError, match="another optimizer"):
        checkpoints.restore_newest(state._replace(opt_state={"momentum": layers["b"]}), HASH)
    assert snapshot(saved.workdir) == before


def test_a_file_in_place_of_the_folder_is_named(tmp_path, rng):
    (tmp_path / "checkpoints").write_text("")
    with (
        pytest.raises(CheckpointError, match="checkpoints is not a folder"),
        Checkpoints(tmp_path, KEEP) as checkpoints,
    ):
        checkpoints.restore_newest(placed(draw_state(rng)), HASH)


# ---- other devices ---------------------------------------------------------------------------

ON_FOUR_DEVICES = """
import sys
from pathlib import Path
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from heinsen.training.checkpoint import Checkpoints, checksums
from tests.training.test_checkpoint import HASH, KEEP, draw_state

mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
shapes = jax.eval_shape(lambda: draw_state(np.random.default_rng(0)))
for axes in ("x", ("y", "x")):
    divide = lambda x: x.update(sharding=NamedSharding(mesh, P(None, axes) if x.ndim > 1 else P()))
    with Checkpoints(Path(sys.argv[1]), KEEP, warn=sys.exit) as checkpoints:
        _, state, _ = checkpoints.restore_newest(jax.tree.map(divide, shapes), HASH)
        assert not state.params["layers"]["w"].sharding.is_fully_replicated
        assert [str(int(x)) for x in checksums(state)] == sys.argv[2:], axes
        checkpoints.save(40, state, {"next_index": 40}, HASH)
"""


def test_checkpoints_and_checksums_are_the_same_on_other_devices(saved, commands):
    expected = [str(int(x)) for x in checksums(saved.states[30])]
    done = commands.run("-W", "error", "-c", ON_FOUR_DEVICES, saved.workdir, *expected, devices=4)
    assert done.returncode == 0, done.stderr
    assert saved._replace(states={**saved.states, 40: saved.states[30]}).restore() == (40, [])


TWO_PROCESSES = """
import sys
from pathlib import Path
import jax
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
from heinsen.training.checkpoint import Checkpoints
from heinsen.training.step import TrainState
from tests.training.test_checkpoint import HASH, KEEP

workdir, values = Path(sys.argv[1]), np.random.default_rng(0).normal(size=(64, 50)).astype("f4")
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
weights = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("x")), values.__getitem__)
state = TrainState({"w": weights}, {"mu": weights}, {"all": weights})
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
warnings = []
with Checkpoints(workdir, KEEP, warn=warnings.append) as checkpoints:
    for step in (10, 20, 30):
        checkpoints.save(step, state, {"next_index": step}, HASH)
    checkpoints.wait()
    if jax.process_index() == 0:  # a part that the second process alone reads
        parts = [path for path in (workdir / "checkpoints/30/params/ocdbt.process_1/d").iterdir()]
        assert parts
        for part in parts:
            part.write_bytes(part.read_bytes()[:100])
    multihost_utils.sync_global_devices("damaged")
    step, state, progress = checkpoints.restore_newest(abstract, HASH)
    assert (step, progress) == (20, {"next_index": 20})
    for shard in state.params["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])
    checkpoints.save(30, state, {"next_index": 30}, HASH)
assert len(warnings) == (jax.process_index() == 0) and all("damaged: OUT_OF_RANGE" in text for text in warnings)
"""


@pytest.mark.long
def test_what_one_of_two_processes_cannot_read_is_damaged_for_both(commands, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [commands.start("-c", TWO_PROCESSES, tmp_path / "run", address, process) for process in (0, 1)]
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)  # they could wait for each other
        ends = [finish(process) for process in processes]
    assert [end.returncode for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    assert checkpoint_steps(tmp_path / "run") == [10, 20, 30]
    assert (tmp_path / "run" / "damaged_checkpoints" / "30").is_dir()


# ---- saves that fail -------------------------------------------------------------------------

NO_ROOM = """
import gc, resource, sys, time
from pathlib import Path
import jax, numpy as np
from heinsen.training.checkpoint import CheckpointError, Checkpoints
from tests.training.test_checkpoint import HASH, KEEP, bits, draw_state, placed

jax.config.update("jax_enable_compilation_cache", False)  # the limit is for checkpoints

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

workdir, state = Path(sys.argv[1]), draw_state(np.random.default_rng(int(sys.argv[2])))

def fail(error_in_the_body=None, at_the_next_save=False):
    warnings = []
    with Checkpoints(workdir, KEEP, warn=warnings.append) as checkpoints:
        restored = checkpoints.restore_newest(placed(state), HASH)
        step = 10 if restored is None else restored.step + 10
        limit(1000)
        checkpoints.save(step, state, {}, HASH)
        if at_the_next_save:
            try:
                checkpoints.save(step + 10, state, {}, HASH)
            except CheckpointError as error:
                warnings.append(str(error))
            limit(resource.RLIM_INFINITY)
            checkpoints.save(step + 20, state, {}, HASH)
        if error_in_the_body is not None:
            raise error_in_the_body
    return warnings

def message(step, then):
    path = workdir / "checkpoints" / str(step)
    return f"step {step} could not be saved to {path}: File too large. Fix this, then rerun the same command to {then}"

def message_of(kind, *arguments):
    try:
        fail(*arguments)
    except kind as error:
        return str(error)

from_nothing = message(10, "start over, as there is no checkpoint yet")
assert message_of(CheckpointError) == from_nothing, message_of(CheckpointError)
limit(resource.RLIM_INFINITY)
warnings = fail(at_the_next_save=True)
assert warnings == [from_nothing], warnings
assert sorted(path.name for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()) == ["30"]
assert message_of(CheckpointError) == message(40, "resume from checkpoint 30")
limit(resource.RLIM_INFINITY)
assert message_of(ZeroDivisionError, ZeroDivisionError("what ends the run")) == "what ends the run"
limit(resource.RLIM_INFINITY)
with Checkpoints(workdir, KEEP) as checkpoints:
    restored = checkpoints.restore_newest(placed(state), HASH)
    assert restored.step == 30 and bits(restored.state) == bits(state)
    checkpoints.save(40, state, {}, HASH)
assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["30", "40"], "remains of the failed saves"

# Nor does a checkpoint whose reads fail print more than its warning, also when Python collects them later.
many, warnings = state._replace(params=dict.fromkeys(map(str, range(60)), state.params["layers"]["w"])), []
with Checkpoints(workdir / "many", KEEP, warn=warnings.append) as checkpoints:
    for step in (10, 20):
        checkpoints.save(step, many, {}, HASH)
    checkpoints.wait()
    for path in (workdir / "many/checkpoints/20/params/d").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    assert checkpoints.restore_newest(placed(many), HASH).step == 10 and len(warnings) == 1
for _ in range(4):
    time.sleep(0.1)
    gc.collect()
"""


def test_a_save_or_read_that_fails_says_so_once_and_leaves_the_older_ones(commands, rng, tmp_path):
    done = commands.run("-W", "error", "-c", NO_ROOM, tmp_path / "run", int(rng.integers(2**31)))
    assert done.returncode == 0 and done.stderr == "", done.stderr
