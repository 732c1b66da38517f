"""Exports: the published module's state_dict against a float64 forward pass of it; folders; what reads them."""

import dataclasses
import json
import re
import shlex
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import default
from heinsen.config import from_mapping
from heinsen.data.loader import train_iterator
from heinsen.export import (
    ExportError,
    is_export,
    is_reference_model,
    load_folder,
    read_manifest,
    save_folder,
)
from heinsen.export.published import reference_tensors
from heinsen.export.state_dicts import from_state_dict, to_state_dict
from heinsen.files import file_sha256, seal, unseal
from heinsen.models import forward, mean_loss
from heinsen.parallel import make_mesh
from heinsen.training.checkpoint import CheckpointError
from heinsen.training.config import TrainConfig
from heinsen.training.data import open_split
from heinsen.training.folder import RunError, load_run
from heinsen.training.loop import train
from heinsen.weights import load_params
from scripts.config_files import override
from tests.model_configs import model_config
from tests.models.model64 import SIZES, assert_close, draw_params, logits64
from tests.runs import (
    BATCH,
    LENGTH,
    STEPS,
    checkpoint_steps,
    copy_run,
    read_log,
    run_config,
    snapshot,
    train_command,
)

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

SMALL = model_config(**SIZES | dict(d_value=5))

# The published module's names with the shapes that torch gives them at these sizes: H V = 15, W1 27 wide.
SHAPES = {"embed.weight": (16, 10), "embed_pos.dense.weight": (20, 10), "embed_pos.dense.bias": (20,)}
for _layer in ("layers.0", "layers.1"):
    SHAPES |= {f"{_layer}.feedforward1.0.weight": (10,), f"{_layer}.feedforward1.0.bias": (10,)}
    SHAPES |= {f"{_layer}.feedforward1.1.weight": (27, 10), f"{_layer}.feedforward1.1.bias": (27,)}
    SHAPES |= {f"{_layer}.feedforward2.0.weight": (20, 15), f"{_layer}.feedforward2.0.bias": (20,)}
    SHAPES |= {f"{_layer}.feedforward2.2.weight": (10, 10)}
SHAPES |= {"lnorm.weight": (10,), "lnorm.bias": (10,)}


@pytest.fixture
def state_dict(rng) -> dict[str, np.ndarray]:
    """Random arrays, at a scale that keeps the layers' outputs near 1."""
    scale = lambda shape: 1 / np.sqrt(shape[-1] if len(shape) > 1 else 1)
    return {name: (scale(s) * rng.standard_normal(s)).astype(np.float32) for name, s in SHAPES.items()}


@pytest.fixture
def params(state_dict):
    return from_state_dict(SMALL, reference_tensors(SMALL), state_dict)


def save(folder, params, config=SMALL, **options):
    options = {"step": 3, "run": {"name": "a run"}, "card": "# A card\n"} | options
    return save_folder(folder, config, "bytes", params, **options)


def assert_equal(got, want):
    """Compare two trees of arrays, bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- the published module's layout ---------------------------------------------------------------


def our_params(state):
    """Our parameters for a state_dict of the published module: torch's Linear has weights [out, in]."""
    layers = lambda name: np.stack([state[f"layers.{i}.feedforward{name}"] for i in range(SMALL.n_layers)])
    return {
        "embedding": state["embed.weight"],
        "position": {"dense": {"kernel": state["embed_pos.dense.weight"].T, "bias": state["embed_pos.dense.bias"]}},
        "layers": {
            "norm": {"scale": layers("1.0.weight"), "bias": layers("1.0.bias")},
            "w1": {"kernel": layers("1.1.weight").swapaxes(1, 2), "bias": layers("1.1.bias")},
            "w2": {"kernel": layers("2.0.weight").swapaxes(1, 2), "bias": layers("2.0.bias")},
            "w3": {"kernel": layers("2.2.weight").swapaxes(1, 2)},
        },
        "norm": {"scale": state["lnorm.weight"], "bias": state["lnorm.bias"]},
    }


def test_logits_are_those_of_the_published_module(rng, state_dict, params):
    """Every tensor in its place: shapes cannot tell that W3 is transposed, and that layer 1 is the second."""
    assert_equal(params, our_params(state_dict))
    tokens = rng.integers(SMALL.vocab_size, size=(2, 7))
    want = logits64(SMALL, our_params(state_dict), tokens)
    assert np.ptp(want) > 1
    assert_close(jax.jit(forward, static_argnums=0)(SMALL, params, tokens)[0], want, 1e-5)


def test_state_dicts_go_round_bit_for_bit(rng, state_dict):
    again = to_state_dict(SMALL, reference_tensors(SMALL), from_state_dict(SMALL, reference_tensors(SMALL), state_dict))
    assert set(again) == set(SHAPES)
    for name, x in again.items():
        assert x.dtype == np.float32 and x.tobytes() == state_dict[name].tobytes()
        assert x.flags.c_contiguous, "safetensors and torch write what lies there"
    params = draw_params(SMALL, rng)
    exported = to_state_dict(SMALL, reference_tensors(SMALL), params)
    assert all(x.flags.c_contiguous for x in exported.values())
    assert_equal(from_state_dict(SMALL, reference_tensors(SMALL), exported), params)


def test_every_tensor_that_does_not_fit_is_named_at_once(rng, state_dict):
    names = list(rng.permutation(sorted(SHAPES)))
    gone, turned, integers = names[:2], [name for name in names[2:] if len(SHAPES[name]) == 2][0], names[-1]
    integers = names[-2] if integers == turned else integers
    bad = {name: x for name, x in state_dict.items() if name not in gone}
    bad[turned] = np.zeros((3, *SHAPES[turned]), np.float32)
    bad[integers] = np.zeros(SHAPES[integers], np.int32)
    bad |= {"head.weight": np.zeros(3), "layers.2.feedforward2.2.weight": np.zeros((10, 10))}
    with pytest.raises(ExportError) as raised:
        from_state_dict(SMALL, reference_tensors(SMALL), bad)
    lines = [line.strip() for line in str(raised.value).splitlines()]
    assert {*lines[1].removeprefix("missing: ").split(", ")} == {*gone}
    assert lines[2] == "unknown: head.weight, layers.2.feedforward2.2.weight"
    shape = ", ".join(map(str, SHAPES[turned]))
    assert {*lines[3:]} == {
        f"{turned} is [3, {shape}], not [{shape}]",
        f"{integers} is int32, not a floating-point type",
    }


def test_parameters_of_another_size_are_refused(params):
    deeper = dataclasses.replace(SMALL, n_layers=3)
    with pytest.raises(ExportError, match=r"layers\.w1\.kernel is \[2, 10, 27\], not \[3, 10, 27\]"):
        to_state_dict(deeper, reference_tensors(deeper), params)


def test_other_models_are_exported_under_our_own_names(rng, params, tmp_path):
    assert is_reference_model(SMALL) and save(tmp_path / "papers", params).layout == "reference"
    assert set(load_file(tmp_path / "papers" / "weights.safetensors")) == set(SHAPES)
    gated = dataclasses.replace(SMALL, forget_gate="head")
    assert not is_reference_model(gated) and not is_reference_model(model_config(objective="masked"))
    other = draw_params(gated, rng)
    kernel = other["layers"]["w3"]["kernel"]
    other["layers"]["w3"]["kernel"] = kernel.swapaxes(1, 2).copy().swapaxes(1, 2)  # another layout in memory
    with pytest.raises(ExportError, match="the published module has no such model"):
        to_state_dict(gated, reference_tensors(gated), other)
    with pytest.raises(ExportError, match="the published module has no such model"):
        from_state_dict(gated, reference_tensors(gated), {})
    assert save(tmp_path / "other", other, gated).layout == "native"
    names = {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(other)}
    assert set(load_file(tmp_path / "other" / "weights.safetensors")) == names
    assert_equal(load_folder(tmp_path / "other")[2], other)
    del other["layers"]["w3"]
    with pytest.raises(ExportError, match=r"missing: layers\.w3\.kernel"):
        save(tmp_path / "third", other, gated)
    assert not (tmp_path / "third").exists()


# ---- folders -------------------------------------------------------------------------------------


def test_a_folder_gives_back_every_bit(params, tmp_path):
    written = save(tmp_path / "a" / "b", params)
    config, tokenizer, again = load_folder(tmp_path / "a" / "b")
    assert (config, tokenizer) == (SMALL, "bytes")
    assert_equal(again, params)
    assert read_manifest(tmp_path / "a" / "b") == written and written.run == {"name": "a run"} and written.step == 3
    assert snapshot(tmp_path).keys() == {f"a/b/{name}" for name in ("weights.safetensors", "config.json", "README.md")}
    assert (tmp_path / "a" / "b" / "README.md").read_text() == "# A card\n"
    modes = {path.stat().st_mode for path in (tmp_path / "a" / "b").iterdir()}
    assert len(modes) == 1, "whoever may read the card may read the weights"


def test_bfloat16_rounds_to_the_nearest(params, tmp_path):
    assert save(tmp_path / "half", params, dtype="bfloat16").dtype == "bfloat16"
    again = load_folder(tmp_path / "half")[2]
    assert_equal(again, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    size = lambda folder: (tmp_path / folder / "weights.safetensors").stat().st_size
    save(tmp_path / "whole", params)
    assert size("half") < 0.7 * size("whole")
    with pytest.raises(ExportError, match="dtype = 'int8': choose float32 or bfloat16"):
        save(tmp_path / "none", params, dtype="int8")


def test_only_an_earlier_export_is_ever_replaced_and_only_when_told(rng, params, tmp_path):
    folder, other = tmp_path / "export", jax.tree.map(lambda x: x + 1, params)
    folder.mkdir()
    save(folder, params)  # an empty folder is free
    (folder / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(ExportError, match="export holds exported weights: use a new folder, or --overwrite"):
        save(folder, other)
    assert snapshot(tmp_path) == before
    save(folder, other, overwrite=True, step=4)
    assert_equal(load_folder(folder)[2], other)
    assert read_manifest(folder).step == 4 and (folder / "notes.txt").read_text() == "mine"
    assert len(list(folder.iterdir())) == 4 and len(list(tmp_path.iterdir())) == 1
    for name in ("run", "file"):  # a run's folder, and no folder at all
        path = tmp_path / name
        path.mkdir() if name == "run" else path.write_text("something")
        if name == "run":
            (path / "config.json").write_text("{}")
        before = snapshot(tmp_path)
        for overwrite in (False, True):
            with pytest.raises(ExportError, match=f"{name} exists and holds something else"):
                save(path, params, overwrite=overwrite)
        assert snapshot(tmp_path) == before


def test_a_disk_that_does_not_take_it_loses_nothing(params, tmp_path, monkeypatch):
    save(tmp_path / "export", params)
    before = snapshot(tmp_path)

    def fail(arrays, path, metadata=None):
        save_file({name: x[:1] for name, x in arrays.items()}, path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("heinsen.export.folders.save_file", fail)
    for name, overwrite in (("export", True), ("new", False)):
        with pytest.raises(ExportError, match="cannot be written: .*No space left on device.*free some space"):
            save(tmp_path / name, params, overwrite=overwrite)
    assert snapshot(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == ["export"]


def test_damaged_weights_are_never_loaded(rng, params, tmp_path):
    """One damage for each message. tests/faults/test_fuzz.py does all kinds of damage, to what eval.py reads."""
    folder, weights = tmp_path / "export", tmp_path / "export" / "weights.safetensors"
    save(folder, params)
    whole = weights.read_bytes()
    flipped = bytearray(whole)
    flipped[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
    for content, message in (
        (whole[:-1], rf"has {len(whole) - 1} bytes instead of {len(whole)}: copy the folder again"),
        (flipped, "is damaged, its SHA-256 is not the one in config.json: copy the folder again"),
    ):
        weights.write_bytes(content)
        with pytest.raises(ExportError, match=f"weights.safetensors {message}"):
            load_folder(folder)
    weights.unlink()
    with pytest.raises(ExportError, match="weights.safetensors cannot be read .*No such file.*copy the folder again"):
        load_folder(folder)
    (folder / "weights.safetensors.index.json").write_text("{}")  # as transformers writes several files
    with pytest.raises(ExportError, match="weights.safetensors cannot be read .*save it .* as one file"):
        load_folder(folder)


def test_weights_that_do_not_fit_their_config_are_refused_with_all_names(state_dict, params, tmp_path):
    """The checksum is right: somebody made the folder by hand."""
    manifest = save(tmp_path / "export", params)
    weights, config = (tmp_path / "export" / name for name in ("weights.safetensors", "config.json"))

    def load_by_hand():
        file = {"bytes": weights.stat().st_size, "sha256": file_sha256(weights)}
        config.write_text(json.dumps(seal(dataclasses.asdict(manifest) | {"weights": file})))
        load_folder(tmp_path / "export")

    del state_dict["lnorm.bias"]
    save_file(state_dict | {"lnorm.shift": np.zeros(10, np.float32)}, weights)
    with pytest.raises(ExportError, match=f"{weights}(.|\n)*missing: lnorm.bias\n  unknown: lnorm.shift"):
        load_by_hand()
    weights.write_bytes(b"not a safetensors file")
    with pytest.raises(ExportError, match=r"weights.safetensors cannot be read \(.*header"):
        load_by_hand()


def test_a_damaged_config_says_what_is_wrong(params, tmp_path):
    """One damage for each message, as above."""
    folder, config = tmp_path / "export", tmp_path / "export" / "config.json"
    missing = "holds no exported weights: it has no config.json; write one with .*export.py"
    with pytest.raises(ExportError, match=missing):
        read_manifest(folder)
    save(folder, params)
    sealed = config.read_text()
    whole = unseal(json.loads(sealed))
    change = lambda **fields: json.dumps(seal(whole | fields))
    cases = {
        sealed.replace('"step": 3', '"step": 8'): "config.json is damaged .its digest does not fit its contents.: copy",
        "{}": "its config.json belongs to something else",
        change(format_version=2): "has format version 2, this code reads 1",
        change(step=3.0): "step = 3.0: expected int, got float",
        change(layout="torch"): "layout = 'torch': expected reference, native, huggingface",
    }
    for text, message in cases.items():
        config.write_text(text)
        with pytest.raises(ExportError, match=message) as error:
            load_folder(folder)
        assert str(folder) in str(error.value) and is_export(folder)
    assert not is_export(tmp_path)


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(run, commands, tmp_path_factory):
    """Export the shared run; return the folder and what the command printed."""
    folder = tmp_path_factory.mktemp("exported") / "export"
    before = snapshot(run.workdir)
    end = commands.fork("scripts/export.py", f"--workdir={run.workdir}", f"--out={folder}")
    assert end.returncode == 0 and "Traceback" not in end.stderr, end.stderr
    assert snapshot(run.workdir) == before
    return folder, end.stdout


def test_an_export_is_the_run_to_whatever_reads_runs(run, exported):
    folder, printed = exported
    config = run_config(run.data)
    assert load_run(folder) == load_run(run.workdir) == config
    step, params = load_params(folder, config.model, make_mesh())
    want_step, want = load_params(run.workdir, config.model, make_mesh())
    assert step == want_step == STEPS
    assert_equal(params, want)
    assert [x.sharding for x in jax.tree.leaves(params)] == [x.sharding for x in jax.tree.leaves(want)]
    assert f"parameters of {run.workdir} after step {STEPS}, float32, layout reference" in printed


def test_the_model_card_tells_of_the_run_and_its_command_repeats_it(run, exported):
    card = (exported[0] / "README.md").read_text()
    last = {name: [e[name] for e in run.log if name in e][-1] for name in ("loss", "validation_loss")}
    n_params = sum(x.size for x in load_file(exported[0] / "weights.safetensors").values())
    for text in (
        f"{n_params:,}, float32",
        f"{STEPS * BATCH * LENGTH:,}: step {STEPS}",
        f"{last['loss']:.4f} nats per token",
        f"{last['validation_loss']:.4f} nats per token",
        f"{run.data}, split train",
        "n_layers 2, d_model 32, n_heads 2, d_key 4, d_value 4; vocabulary 257, padded to 264",
        "| tokenizer | bytes |",
        "module.load_state_dict(",
    ):
        assert text in card
    words = shlex.split(re.search(r"python train.py(.|\n)*?\n\n", card)[0])
    assert words[:3] == ["python", "train.py", "--config=configs/default.py"]
    assert f"--workdir={run.workdir}" in words
    fields = dict(word.removeprefix("--config.").split("=", 1) for word in words if word.startswith("--config."))
    assert from_mapping(TrainConfig, override(default.get_config(), fields).to_dict()) == run_config(run.data)


def test_an_export_for_transformers_has_a_card_that_the_hub_reads(run, commands, tmp_path):
    end = commands.fork("scripts/export.py", f"--workdir={run.workdir}", f"--out={tmp_path}/hf", "--format=hf")
    assert end.returncode == 0 and "float32, layout huggingface" in end.stdout, end.stderr
    card = (tmp_path / "hf" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "AutoModelForCausalLM" in card
    assert "--workdir=." in card and str(tmp_path / "hf") not in card and "load_state_dict" not in card
    assert_equal(load_folder(tmp_path / "hf")[2], load_params(run.workdir, run_config(run.data).model, make_mesh())[1])


def first_loss(run, source):
    """Return the loss of the shared run's first batch under the weights of `source`."""
    model = run_config(run.data).model
    batch = next(train_iterator(open_split(run_config(run.data), "train"), LENGTH, BATCH, 0))["tokens"]
    return float(jax.jit(mean_loss, static_argnums=0)(model, load_params(source, model, make_mesh())[1], batch))


@pytest.mark.long
def test_a_run_from_exported_weights_starts_at_their_loss_and_resumes_without_them(run, exported, tmp_path):
    source, workdir = tmp_path / "export", tmp_path / "run"
    shutil.copytree(exported[0], source)
    config = run_config(run.data, init_from=str(source), checkpoint_every=40, validate_every=STEPS)
    train(config, workdir)
    log = [entry for entry in read_log(workdir) if "loss" in entry]
    assert log[0]["loss"] == pytest.approx(first_loss(run, source), abs=1e-5)
    assert log[0]["loss"] < run.log[0]["loss"] - 0.5, "the run began at random, and had learned"
    rates = [entry["learning_rate"] for entry in log]
    assert rates == [entry["learning_rate"] for entry in run.log if "loss" in entry] and rates[0] == 0
    assert log[0]["param_norm"] == pytest.approx(run.log[-2]["param_norm"], rel=1e-3)
    shutil.rmtree(source)
    # Resumed, it reads its own checkpoint.
    again = copy_run(workdir, tmp_path / "again", keep=lambda step: step == 40)
    train(config, again)
    assert [entry["loss"] for entry in read_log(again) if "loss" in entry] == [entry["loss"] for entry in log]
    assert checkpoint_steps(again) == [40, STEPS]
    # The source of the weights is part of the run's identity.
    with pytest.raises(RunError, match="config.init_from: .*export' in the run, None in the command"):
        train(dataclasses.replace(config, init_from=None), again)


@pytest.mark.long
def test_a_run_from_another_run_lies_on_its_mesh(run, commands, tmp_path):
    changes = {"mesh__data": 1, "mesh__fsdp": 2, "mesh__tensor": 2, "total_tokens": 4 * BATCH * LENGTH}
    changes |= {"optimizer__warmup_steps": 1, "init_from": run.workdir}
    end = commands.run(*train_command(run.data, tmp_path / "run", **changes), devices=4)
    assert end.returncode == 0, end.stderr
    assert f"starting from the parameters of {run.workdir} after step {STEPS}" in end.stderr
    assert read_log(tmp_path / "run")[0]["loss"] == pytest.approx(first_loss(run, run.workdir), abs=1e-4)


def test_weights_that_cannot_be_started_from_are_refused_and_nothing_is_written(run, exported, tmp_path):
    bare, damaged = tmp_path / "bare", tmp_path / "damaged"
    bare.mkdir()
    shutil.copy(run.workdir / "config.json", bare)
    shutil.copytree(exported[0], damaged)
    (damaged / "weights.safetensors").write_bytes(b"")
    before = snapshot(tmp_path)
    cases = [
        (tmp_path / "none", {}, RunError, "none is not a run folder"),
        (bare, {}, CheckpointError, "bare has no checkpoints/ folder"),
        (damaged, {}, CheckpointError, "weights.safetensors has 0 bytes instead of"),
    ]
    for source in (exported[0], run.workdir):  # as many numbers, in other heads
        message = "model.d_key: 4 in the run, 2 in the command(.|\n)*model.n_heads: 2 in the run, 4 in the command"
        cases.append((source, {"model__n_heads": 4, "model__d_key": 2, "model__d_value": 2}, RunError, message))
    for source, changes, kind, message in cases:
        with pytest.raises(kind, match=message):
            train(run_config(run.data, init_from=str(source), **changes), tmp_path / "new")
    with pytest.raises(RunError, match="holds exported weights: give a --workdir of its own"):
        train(run_config(run.data), exported[0])
    assert snapshot(tmp_path) == before and not (tmp_path / "new").exists()


def test_an_export_of_another_model_is_not_loaded_as_this_one(run, exported):
    with pytest.raises(RunError, match="weights of another model:\n  config.model.n_layers: 2 in the run, 3 in the"):
        load_params(exported[0], run_config(run.data, model__n_layers=3).model, make_mesh())
    computes_otherwise = run_config(run.data, model__remat="full", model__implementation="chunked").model
    assert load_params(exported[0], computes_otherwise, make_mesh())[0] == STEPS
