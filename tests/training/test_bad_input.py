"""Bad configs, data and run folders: one error names the cause, and nothing is lost."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import default
from heinsen.config import ConfigError, differences, from_mapping
from heinsen.data.dataset import DatasetError
from heinsen.parallel import make_mesh
from heinsen.training.checkpoint import CheckpointError
from heinsen.training.loop import train
from heinsen.training.run import RunError, TrainConfig, load_run, open_split
from heinsen.weights import load_params
from tests.runs import (
    CHECKPOINT_EVERY,
    STEPS,
    checkpoint_steps,
    copy_run,
    draw_text,
    read_log,
    run_config,
    snapshot,
    without_timing,
    write_split,
)

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture(scope="module")
def config(data: Path) -> TrainConfig:
    return run_config(data)


# ---- configs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("total_tokens", 0, "total_tokens = 0: it must be positive"),
        ("sequence_length", -1, "sequence_length = -1: it must be positive"),
        ("batch_size", 0, "batch_size = 0"),
        ("accumulation_steps", 0, "accumulation_steps = 0"),
        ("accumulation_steps", 3, "batch_size = 4 does not divide into accumulation_steps = 3"),
        ("seed", -1, "seed = -1"),
        ("log_every", 0, "log_every = 0"),
        ("validate_every", 0, "validate_every = 0"),
        ("validation_tokens", 0, "validation_tokens = 0"),
        ("checkpoint_every", 0, "checkpoint_every = 0"),
        ("keep_checkpoints", 0, "keep_checkpoints = 0"),
        ("keep_every", 0, "keep_every = 0"),
        ("stop_after_skipped", 0, "stop_after_skipped = 0"),
        ("spike_sigmas", -1.0, "spike_sigmas = -1.0"),
        ("mesh__fsdp", 0, "mesh.fsdp = 0: it must be positive, or -1"),
        ("mesh__fsdp", -1, "mesh.data and mesh.fsdp are -1"),
        ("model__remat", "some", "model.remat = 'some': choose none, full, dots"),
        ("peak_flops", 0.0, "peak_flops = 0.0"),
        ("peak_flops", math.nan, "peak_flops = nan"),
        ("optimizer__learning_rate", math.nan, "optimizer.learning_rate = nan"),
        ("optimizer__warmup_steps", STEPS, f"optimizer.warmup_steps = {STEPS} does not fit a run of {STEPS} steps"),
        ("model__n_layers", 0, "model.n_layers = 0"),
        ("model__padded_vocab_size", 256, "model.padded_vocab_size = 256 is smaller than vocab_size = 257"),
        ("model__dtype", "float16", "model.dtype = 'float16'"),
        ("model__implementation", "fastest", "model.implementation = 'fastest'"),
        # Types: a locked ConfigDict lets None and True pass for a number.
        ("batch_size", None, "config.batch_size = None: expected int, got NoneType"),
        ("batch_size", True, "config.batch_size = True: expected int, got bool"),
        ("batch_size", 4.0, "config.batch_size = 4.0: expected int, got float"),
        ("optimizer__weight_decay", None, "config.optimizer.weight_decay = None: expected float"),
        ("model__remat", 1, "config.model.remat = 1: expected str"),
        ("model__implementation", 3, "config.model.implementation = 3: expected str or None"),
        ("data__path", None, "config.data.path = None: expected str"),
        ("data", "data/pile", "config.data = 'data/pile': expected a group of fields"),
    ],
)
def test_bad_values_name_their_field(data, field, value, message):
    with pytest.raises(ConfigError) as error:
        run_config(data, **{field: value})
    assert message in str(error.value)


def test_good_values_of_neighbouring_types_pass(data):
    assert run_config(data, optimizer__weight_decay=0).optimizer.weight_decay == 0.0
    assert type(run_config(data, peak_flops=10**12).peak_flops) is float
    assert run_config(data, peak_flops=None).peak_flops is None
    assert run_config(data, model__implementation="scan").model.implementation == "scan"


def test_missing_and_unknown_fields_are_named():
    mapping = default.get_config().to_dict()
    del mapping["model"]["d_key"]
    with pytest.raises(ConfigError, match=r"config\.model lacks d_key"):
        from_mapping(TrainConfig, mapping)
    mapping["model"]["d_key"] = 8
    mapping["optimizer"]["momentum"] = 0.9
    with pytest.raises(ConfigError, match=r"config\.optimizer has unknown fields momentum.*learning_rate"):
        from_mapping(TrainConfig, mapping)


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


# ---- data ------------------------------------------------------------------------------------


def test_missing_dataset_is_named_with_the_command_that_makes_it(tmp_path, data):
    config = run_config(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"nowhere/train.*scripts/prepare_data\.py"):
        train(config, tmp_path / "run")
    with pytest.raises(DatasetError, match="letters/test"):
        open_split(run_config(data), "test")
    assert not (tmp_path / "run").exists(), "nothing may be written before the data is there"


def test_data_of_another_tokenizer_is_refused(tmp_path, data, rng):
    config = run_config(data, data__tokenizer="gpt2")
    with pytest.raises(DatasetError, match=r"holds 'bytes' tokens, the config says data\.tokenizer = 'gpt2'"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_document_token_that_is_not_the_datas_is_refused(tmp_path, data):
    with pytest.raises(
        DatasetError, match=r"begin with token 256.* document_token = 10: set --config\.model\.document"
    ):
        train(run_config(data, model__document_token=10), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    open_split(run_config(data, model__document_token=256), "train")


def test_validation_split_is_checked_like_the_training_split(tmp_path, rng):
    write_split(tmp_path / "data" / "train", draw_text(rng, 500))
    write_split(tmp_path / "data" / "validation", draw_text(rng, 500), tokenizer="gpt2", vocab_size=50257)
    with pytest.raises(DatasetError, match="validation holds 'gpt2' tokens"):
        train(run_config(tmp_path / "data"), tmp_path / "run")


def test_a_vocabulary_larger_than_the_models_is_refused(data, tmp_path):
    config = run_config(data, model__vocab_size=256, model__padded_vocab_size=256)
    with pytest.raises(DatasetError, match=r"vocabulary of 257 ids.* 256: set --config\.model\.vocab_size=257"):
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
    other = dataclasses.replace(
        config, seed=7, model=dataclasses.replace(config.model, d_model=64, implementation="chunked")
    )
    with pytest.raises(RunError) as error:
        train(other, a_run)
    assert str(error.value).splitlines() == [
        f"{a_run} holds a run with another config:",
        "  config.model.d_model: 32 in the run, 64 in the command",
        "  config.model.implementation: 'scan' in the run, 'chunked' in the command",
        "  config.seed: 0 in the run, 7 in the command",
        "Give another --workdir, or the run's own config to resume it.",
    ]
    assert snapshot(a_run) == before


def without_a_run(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def without_checkpoints_folder(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()


def with_an_empty_checkpoint(folder: Path) -> None:
    without_checkpoints(folder)
    (folder / "checkpoints" / "20").mkdir()


def with_another_model(folder: Path) -> None:
    mapping = json.loads((folder / "config.json").read_text())
    mapping["model"]["d_key"] = 8
    (folder / "config.json").write_text(json.dumps(mapping))


def truncated(checkpoint: Path) -> None:
    """Cut every file that holds numbers in half."""
    data_files = [path for path in checkpoint.rglob("*") if path.is_file() and "d" in path.parent.name.split(".")]
    assert data_files
    for path in data_files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def with_all_truncated(folder: Path) -> None:
    for step in checkpoint_steps(folder):
        truncated(folder / "checkpoints" / str(step))


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (without_a_run, RunError, "is not a run folder: it has no config.json"),
        (without_checkpoints_folder, CheckpointError, "has no checkpoints/ folder"),
        (without_checkpoints, CheckpointError, "holds no whole checkpoint"),
        (with_an_empty_checkpoint, CheckpointError, "checkpoints/20 cannot be restored"),
        (with_another_model, CheckpointError, "/bias is float32[2, 24] in it, float32[2, 40] in the model"),
        (with_all_truncated, CheckpointError, f"checkpoints/{STEPS} cannot be restored"),
    ],
)
def test_a_folder_without_a_usable_checkpoint_is_refused_for_reading(a_run, damage, kind, message):
    damage(a_run)
    before = snapshot(a_run)
    with pytest.raises(kind) as error:
        load_params(a_run, load_run(a_run).model, make_mesh())
    assert message in str(error.value) and str(a_run) in str(error.value)
    assert snapshot(a_run) == before


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (with_an_empty_checkpoint, "checkpoints/20 cannot be restored"),
        (with_all_truncated, f"checkpoints/{STEPS} cannot be restored"),
    ],
)
def test_training_does_not_start_over_where_all_checkpoints_are_damaged(a_run, config, damage, message):
    damage(a_run)
    before = snapshot(a_run)
    with pytest.raises(CheckpointError) as error:
        train(config, a_run)
    assert message in str(error.value) and str(a_run) in str(error.value)
    assert snapshot(a_run) == before


@pytest.mark.parametrize("damage", [truncated, pytest.param(emptied, marks=pytest.mark.long)])
def test_training_resumes_from_the_checkpoint_before_a_damaged_one(a_run, run, config, damage, capfd):
    """The damaged one is moved away, and the run ends as if nothing had happened."""
    newest = a_run / "checkpoints" / str(STEPS)
    damage(newest)
    damaged = snapshot(newest)
    train(config, a_run)
    start = STEPS - CHECKPOINT_EVERY
    message = capfd.readouterr().err
    assert message.startswith(f"warning: {newest} is damaged: ") and f"Using step {start}" in message
    assert f"resuming after step {start}" in message
    assert snapshot(a_run / "damaged_checkpoints" / str(STEPS)) == damaged
    assert without_timing(read_log(a_run)) == without_timing(run.log)
    step, params = load_params(a_run, config.model, make_mesh())
    _, expected = load_params(run.workdir, config.model, make_mesh())
    assert step == STEPS
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_damaged_config_file_is_named(a_run, config):
    (a_run / "config.json").write_text('{"seed": 0, "total_')
    for call in (lambda: load_run(a_run), lambda: train(config, a_run)):
        with pytest.raises((RunError, ConfigError), match="config.json"):
            call()
