"""Bad configs, data and run folders: one error names the cause, and nothing is lost."""

import dataclasses
import errno
import fcntl
import functools
import json
import math
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from heinsen.config import ConfigError, differences
from heinsen.data.dataset import DatasetError
from heinsen.files import LockedError, hold_lock, is_held
from heinsen.parallel import make_mesh
from heinsen.training.checkpoint import CheckpointError
from heinsen.training.config import TrainConfig
from heinsen.training.data import RunData, open_split
from heinsen.training.devices import DeviceError
from heinsen.training.folder import RunError, claim_folder, load_run, load_tokenizer_name, write_config
from heinsen.training.loop import train
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import init_train_state
from heinsen.weights import load_params
from tests.runs import (
    STEPS,
    copy_run,
    draw_text,
    finish,
    run_config,
    snapshot,
    write_split,
)
from tests.test_architecture import fields_of_type

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture(scope="module")
def config(data: Path) -> TrainConfig:
    return run_config(data)


# ---- configs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(accumulation_steps=3), "batch_size = 4 does not divide into accumulation_steps = 3"),
        (dict(seed=2**63), f"seed = {2**63}: it does not fit into 64 bits"),
        (dict(mesh__fsdp=0), "mesh.fsdp = 0: it must be positive, or -1"),
        (dict(mesh__fsdp=-1), "mesh.data and mesh.fsdp are -1"),
        (dict(model__remat="some"), "model.remat = 'some': choose none, full, dots"),
        (dict(model__padded_vocab_size=256), "model.padded_vocab_size = 256 is smaller than vocab_size = 257"),
        (dict(model__n_layers=10**9), "model.n_layers = 1000000000: it must be less than 10000"),
        (dict(model__n_heads=2**28 - 1), "features of all heads are more than an array can have"),
        (dict(model__attention="heinsen*999999999"), "is a pattern of 999999999 layers, which does not divide"),
        (dict(optimizer__warmup_steps=STEPS), f"optimizer.warmup_steps = {STEPS} does not fit a run of {STEPS} steps"),
        (dict(optimizer__learning_rate=math.inf), "optimizer.learning_rate = inf: it must be finite"),
        (dict(optimizer__learning_rate=1e39), "optimizer.learning_rate = 1e+39: it must be finite in float32"),
        (dict(optimizer__learning_rate=10**400), "optimizer.learning_rate = inf: it must be finite"),
        (dict(optimizer__eps=1e-39), "optimizer.eps = 1e-39: it is too small for float32, which holds it as 0"),
        (dict(optimizer__b2=1 - 1e-12), "optimizer.b2 = 0.999999999999: it must lie in [0, 1)"),
        (dict(sample_tokens=-1), "sample_tokens = -1"),
        (
            dict(sample_tokens=16, model__objective="masked"),
            "sample_tokens = 16: a model with model.objective = 'masked' predicts no next token; set it to 0",
        ),
        (
            dict(sample_tokens=16, model__position="learned", model__n_positions=16),
            "sample_tokens = 16 and a document's beginning go beyond model.n_positions = 16: ask for fewer",
        ),
    ],
)
def test_bad_values_name_their_field(data, changes, message):
    with pytest.raises(ConfigError) as error:
        run_config(data, **changes)
    assert message in str(error.value)


def test_differences_between_configs_are_listed_field_by_field():
    old = {"a": 1, "group": {"b": 2, "same": 3}, "gone": 4}
    new = {"a": 1.5, "group": {"b": None, "same": 3}, "new": 5}
    assert differences(old, new) == [
        "config.a: 1 in the run, 1.5 in the command",
        "config.gone: only in the run",
        "config.group.b: 2 in the run, None in the command",
        "config.new: only in the command",
    ]
    assert differences(old, old) == []


NUMBERS = [path for kind in (int, float) for path in fields_of_type(kind)]


@pytest.mark.parametrize("path", [path for path in NUMBERS if not path.startswith("mesh.")])  # a mesh fits the devices
def test_no_number_is_beyond_its_type(data, path):
    """No list of fields: one that is added later is checked, too."""
    value = functools.reduce(getattr, path.split("."), run_config(data)).__class__
    for bad in (10**19, -(10**19), -1) if value is int else (math.nan, math.inf, -math.inf, 1e39, -1e39):
        if (path, bad) == ("optimizer.clip_norm", math.inf):
            continue  # no clipping
        with pytest.raises(ConfigError, match=rf"{path} ="):
            run_config(data, **{path.replace(".", "__"): bad})


def test_the_largest_seed_works(data):
    config, mesh = run_config(data, seed=2**63 - 1), make_mesh()
    assert next(RunData.open(config, mesh).batches)["tokens"].shape == (4, 17)
    init_train_state(config.model, make_optimizer(config.optimizer, STEPS), config.seed, mesh)


# ---- data ------------------------------------------------------------------------------------


def test_data_of_another_tokenizer_than_the_runs_is_refused(a_run, data, tmp_path, rng):
    """A folder of data can be replaced by one of the same name."""
    for split in ("train", "validation"):
        write_split(tmp_path / "data" / split, draw_text(rng, 500), tokenizer="gpt2", vocab_size=50257, eot_id=50256)
    vocabulary = dict(model__vocab_size=50257, model__padded_vocab_size=50264)
    config = run_config(tmp_path / "data", **vocabulary)
    write_config(config, tmp_path / "of_gpt2", "gpt2")
    assert load_tokenizer_name(tmp_path / "of_gpt2") == "gpt2" and load_run(tmp_path / "of_gpt2") == config
    write_config(config, tmp_path / "of_bytes", "bytes")
    with pytest.raises(RunError, match="config.tokenizer: 'bytes' in the run, 'gpt2' in the command"):
        train(config, tmp_path / "of_bytes")
    other = run_config(tmp_path / "data", init_from=str(a_run), model__padded_vocab_size=264)
    with pytest.raises(DatasetError, match="holds 'gpt2' tokens, the run reads 'bytes': prepare it with that"):
        open_split(other, "validation", load_tokenizer_name(a_run))


def test_a_document_token_that_is_not_the_datas_is_refused(tmp_path, data):
    with pytest.raises(
        DatasetError, match=r"begin with token 256.* document_token = 10: set --config\.model\.document"
    ):
        train(run_config(data, model__document_token=10), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    open_split(run_config(data, model__document_token=256), "train")


def test_validation_split_is_checked_like_the_training_split(tmp_path, rng):
    write_split(tmp_path / "data" / "train", draw_text(rng, 500))
    write_split(tmp_path / "data" / "validation", draw_text(rng, 500), tokenizer="gpt2", vocab_size=50257, eot_id=50256)
    with pytest.raises(DatasetError, match="validation holds 'gpt2' tokens"):
        train(run_config(tmp_path / "data"), tmp_path / "run")


def test_a_vocabulary_larger_than_the_models_is_refused(data, tmp_path):
    config = run_config(data, model__vocab_size=256, model__padded_vocab_size=256)
    with pytest.raises(DatasetError, match=r"vocabulary of 257 ids.* 256: set --config\.model\.vocab_size=None and"):
        train(config, tmp_path / "run")
    ((dataset, share),) = open_split(run_config(data, model__vocab_size=260), "train")
    assert (dataset.vocab_size, share) == (257, 1.0), "a larger model is fine"


@pytest.mark.parametrize(
    ("length", "batch", "windows"),
    [(3000, 4, 0), (700, 4, 2)],
    ids=["a sequence longer than the data", "fewer sequences than a batch"],
)
def test_too_little_data_for_a_batch_is_refused_with_the_numbers(data, tmp_path, length, batch, windows):
    config = run_config(data, sequence_length=length, batch_size=batch, total_tokens=STEPS * length * batch)
    with pytest.raises(DatasetError, match=rf"2000 tokens, which make {windows} windows.* {batch} rows"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- run folders -----------------------------------------------------------------------------


@pytest.fixture
def a_run(run, tmp_path) -> Path:
    return copy_run(run.workdir, tmp_path / "run")


def test_another_config_in_the_folder_is_refused_with_the_fields_that_differ(a_run, config):
    before = snapshot(a_run)
    other = dataclasses.replace(  # the first two may change
        config,
        log_every=2,
        mesh=dataclasses.replace(config.mesh, data=1),
        seed=7,
        data=dataclasses.replace(config.data, validation_split="train"),
        model=dataclasses.replace(config.model, d_model=64, implementation="chunked"),
    )
    with pytest.raises(RunError) as error:
        train(other, a_run)
    assert str(error.value).splitlines() == [
        f"{a_run} holds a run with another config:",
        "  config.data.validation_split: 'validation' in the run, 'train' in the command",
        "  config.model.d_model: 32 in the run, 64 in the command",
        "  config.model.implementation: 'reference' in the run, 'chunked' in the command",
        "  config.seed: 0 in the run, 7 in the command",
        "Give another --workdir, or the run's own config to resume it.",
    ]
    assert snapshot(a_run) == before


def test_a_folder_without_a_usable_checkpoint_is_refused_for_reading(a_run, config):
    """Nor does training start over. Each step takes away a little more; test_checkpoint.py damages checkpoints."""
    read = lambda: load_params(a_run, load_run(a_run).model, make_mesh())
    for arrays in a_run.glob("checkpoints/*/params/d"):
        shutil.rmtree(arrays)
    before = snapshot(a_run)
    for use in (read, lambda: train(config, a_run)):
        with pytest.raises(CheckpointError, match=f"{a_run}/checkpoints/{STEPS} cannot be restored"):
            use()
        assert snapshot(a_run) == before
    mapping = json.loads((a_run / "config.json").read_text())
    mapping["model"]["d_key"] = 8
    (a_run / "config.json").write_text(json.dumps(mapping))
    with pytest.raises(CheckpointError, match=r"/bias is float32\[2, 24\] in it, float32\[2, 40\] in the model"):
        read()
    shutil.rmtree(a_run / "checkpoints")
    with pytest.raises(CheckpointError, match=f"{a_run} has no checkpoints/ folder"):
        read()
    (a_run / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=f"{a_run}/checkpoints holds no whole checkpoint"):
        read()
    (a_run / "config.json").unlink()
    with pytest.raises(RunError, match=f"{a_run} is not a run folder: it has no config.json"):
        read()


def test_a_damaged_config_file_is_named(a_run, config):
    """tests/faults/test_fuzz.py damages it in every way."""
    path = a_run / "config.json"
    mapping = json.loads(path.read_text())
    path.write_text('{"seed": 0, "total_')
    for call in (lambda: load_run(a_run), lambda: train(config, a_run)):
        with pytest.raises(RunError, match=re.escape(f"{path} is damaged (Unterminated string")):
            call()
    for change in ({"seed": "0"}, {"sed": 0}, {"total_tokens": -1}, {"tokenizer": "bytex"}, {"tokenizer": None}):
        path.write_text(json.dumps(mapping | change))
        with pytest.raises(RunError, match=re.escape(f"{path}: config") + f".*{next(iter(change))}.*Restore the file"):
            load_run(a_run)


def test_a_config_that_was_changed_since_the_checkpoints_is_refused_for_reading(a_run):
    """A digit flipped in config.json would give another loss."""
    path = a_run / "config.json"
    mapping = json.loads(path.read_text())
    path.write_text(json.dumps(mapping | {"sequence_length": 18}))
    with pytest.raises(CheckpointError, match=r"another config \(hash .*if config.json was changed, restore it"):
        load_params(a_run, load_run(a_run).model, make_mesh())
    path.write_text(json.dumps(mapping | {"log_every": 3}))  # of no consequence
    load_params(a_run, load_run(a_run).model, make_mesh())


@pytest.mark.parametrize(
    "changes",
    [
        {"model__vocab_size": 10**8, "model__padded_vocab_size": 10**8, "model__d_model": 2**12},
        {"batch_size": 10**9, "total_tokens": 10**12},
    ],
)
def test_a_model_or_batch_that_does_not_fit_the_machine_is_refused(data, tmp_path, changes):
    config = run_config(data, **changes)
    with pytest.raises(
        DeviceError, match=r"out of memory: a step needs more than [\d,.]+ GiB per device, .* there are"
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- two runs in a folder --------------------------------------------------------------------


def test_a_second_run_in_a_folder_is_refused_before_anything_is_touched(a_run, config):
    with hold_lock(a_run / "run.lock"):
        before = snapshot(a_run)
        with pytest.raises(RunError) as error:
            train(config, a_run)
        assert snapshot(a_run) == before
        assert load_run(a_run) == config, "reading is not refused"
        load_params(a_run, config.model, make_mesh())
    host = f"process {os.getpid()} on {socket.gethostname()}, since 20"
    assert f"{a_run} belongs to a run in progress ({host}" in str(error.value)
    assert train(config, a_run).tokens == 300


HOLD = """
import sys, time
from pathlib import Path
from heinsen.files import hold_lock

with hold_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_process_leaves_no_lock(commands, tmp_path):
    path = tmp_path / "lock"
    process = commands.start("-c", HOLD, path)
    assert process.stdout.readline() == b"held\n" and is_held(path)
    with pytest.raises(LockedError, match=f"process {process.pid} on "), hold_lock(path, patience=0):
        pass
    process.kill()
    finish(process)
    assert path.read_text() and not is_held(path)
    with hold_lock(path, patience=0):
        assert is_held(path)
    assert path.read_text() == "" and not is_held(path)


def test_a_lock_file_that_was_removed_is_not_the_lock(tmp_path, monkeypatch):
    """Its holder removes it after another process has opened it, and before that one locks it."""
    path, flock, removed = tmp_path / "lock", fcntl.flock, []

    def remove_and_lock(*arguments):
        if not removed:
            removed.append(path.unlink())
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", remove_and_lock)
    with hold_lock(path, patience=0):
        assert removed and is_held(path)


def test_a_file_system_without_locks_comes_with_a_warning(data, tmp_path, monkeypatch, capfd):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with claim_folder(run_config(data), tmp_path / "run", "bytes") as changes:
        assert changes == []
    assert "is on a file system without locks" in capfd.readouterr().err
