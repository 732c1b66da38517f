"""Conversions: the two stages of a run, resumed in each and between them; and what cannot be converted."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import convert
from heinsen.config import ConfigError
from heinsen.models import abstract_params, attention_distances, mean_loss
from heinsen.parallel import make_mesh
from heinsen.training.checkpoint import Checkpoints
from heinsen.training.conversion import draw_first_places, names_of_added, take_from_teacher
from heinsen.training.data import train_config
from heinsen.training.folder import RunError, load_run, write_config
from heinsen.training.loop import train
from heinsen.training.step import init_train_state
from heinsen.weights import load_initial_params, load_params
from tests.model_configs import model_config
from tests.models.model64 import SIZES, draw_params, draw_tokens, logits64
from tests.runs import BATCH, LENGTH, OVERRIDES, copy_run, read_log, run_config, without_timing

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

STEPS, BOUNDARY = 12, 6
SOFTMAX = dict(model__attention="softmax", model__position="rotary", model__block="gpt2", model__convolution=2)


def save_teacher(workdir: Path, data: Path, **changes) -> Path:
    """A run of one checkpoint, of the parameters that it began with."""
    config = run_config(data, **SOFTMAX | changes)
    write_config(config, workdir, "bytes")
    with Checkpoints(workdir, 1) as checkpoints:
        state = init_train_state(config.model, optax.sgd(0.1), 1, make_mesh())
        checkpoints.save(2, state, {}, config.fingerprint)
    return workdir


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, data) -> Path:
    return save_teacher(tmp_path_factory.mktemp("teacher") / "run", data)


def converted(data: Path, source: Path | None, **changes):
    """The config of a conversion in STEPS steps, with a checkpoint every 4."""
    config = convert.get_config()
    small = {name: x for name, x in OVERRIDES.items() if not name.startswith("model.")}
    small |= {"total_tokens": STEPS * BATCH * LENGTH, "optimizer.warmup_steps": 2, "checkpoint_every": 4}
    config.update_from_flattened_dict(small | {"data.path": str(data), "init_from": source and str(source)})
    config.update_from_flattened_dict({name.replace("__", "."): x for name, x in changes.items()})
    return train_config(config.to_dict())


@pytest.fixture(scope="module")
def run(tmp_path_factory, data, teacher) -> Path:
    workdir = tmp_path_factory.mktemp("converted") / "run"
    train(converted(data, teacher, keep_checkpoints=9), workdir)
    return workdir


def params_at(workdir: Path, step: int, tmp_path: Path):
    copied = copy_run(workdir, tmp_path / f"at_{step}", lambda saved: saved == step)
    return load_params(copied, load_run(copied).model, make_mesh()).params


# ---- a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("killed_after", [4, BOUNDARY, 8])
def test_it_resumes_bit_for_bit_in_each_stage_and_between_them(run, data, teacher, tmp_path, killed_after):
    workdir = copy_run(run, tmp_path / "run", keep=lambda step: step <= killed_after)
    train(converted(data, teacher, keep_checkpoints=9), workdir)
    assert without_timing(read_log(workdir)) == without_timing(read_log(run))
    jax.tree.map(
        np.testing.assert_array_equal, *(params_at(w, STEPS, tmp_path / n) for w, n in ((workdir, "a"), (run, "b")))
    )


def test_first_the_attention_learns_alone_and_then_everything(run, data, teacher, tmp_path):
    config = converted(data, teacher)
    started = load_initial_params(config, make_mesh(), "bytes").params
    old = load_params(teacher, load_run(teacher).model, make_mesh()).params
    added = names_of_added(config)
    parts = {"feature_map": ("kernel", "bias"), "gate": ("kernel", "bias", "scale")}
    assert added == {f"layers.{part}.{name}" for part, names in parts.items() for name in names}
    middle, last = (params_at(run, step, tmp_path) for step in (BOUNDARY, STEPS))
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    for path, x in jax.tree_util.tree_leaves_with_path(started):
        of = lambda tree, path=path: np.asarray(dict(jax.tree_util.tree_leaves_with_path(tree))[path])
        if name(path) not in added:
            np.testing.assert_array_equal(x, of(old))
        assert np.any(x != of(middle)) == (name(path) in added), name(path)
        assert np.any(of(middle) != of(last)), name(path)


def test_reports_name_the_stage_and_the_distance_of_each_layer(data, teacher, tmp_path, capsys):
    train(converted(data, teacher), tmp_path / "run")
    told, log = capsys.readouterr().err, read_log(tmp_path / "run")
    assert "of the teacher, " in told and "with its attention only swapped" in told
    assert f"run attention step 5/{STEPS}  distance " in told and f"run text step 7/{STEPS}  loss " in told
    steps = [entry for entry in log if "validation_loss" not in entry]
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    for entry in steps:
        is_first = entry["step"] <= BOUNDARY
        names = {"distance", "distance/layer_0", "distance/layer_1"}
        assert names & {*entry} == (names if is_first else set()) and ("loss" in entry) != is_first
    layers = [np.mean([entry[f"distance/layer_{i}"] for i in range(2)]) for entry in steps[:BOUNDARY]]
    np.testing.assert_allclose([entry["distance"] for entry in steps[:BOUNDARY]], layers, rtol=1e-5)
    rates = [entry["learning_rate"] for entry in steps]
    norms = [entry["param_norm"] for entry in steps]
    assert rates[0] == rates[BOUNDARY] == 0 and norms[BOUNDARY] == norms[BOUNDARY - 1] != norms[BOUNDARY + 1]
    np.testing.assert_allclose([max(rates[:BOUNDARY]), max(rates[BOUNDARY:])], [3e-2, 4e-3], rtol=1e-6)
    assert [entry["step"] for entry in log if "validation_loss" in entry] == [BOUNDARY, STEPS]
    assert (tmp_path / "run" / "plots" / "loss.png").exists()


# ---- the parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("gate, position", [("none", "none"), ("head", "rotary"), ("head", "none")])
def test_distances_are_of_the_teachers_inputs_and_relative_to_its_variance(rng, gate, position):
    sizes = SIZES | dict(d_value=2, n_layers=2, position="rotary", block="gpt2", document_token=3)
    old = model_config(**sizes, attention="softmax", forget_gate=gate)
    kind = dict(attention="heinsen", value_domain="real", feature_map="exponential", forget_gate="head")
    new = dataclasses.replace(old, **kind, position=position)
    params, tokens = draw_params(new, rng), draw_tokens(new, rng)
    shared = jax.tree.map(lambda _, x: x, abstract_params(old), common(params, abstract_params(old)))
    outputs = []
    for config, own in ((old, shared), (new, params)):
        logits64(config, own, tokens, records := [])
        outputs.append(np.concatenate([y for y, _ in records[::2]]))  # of the first layer, document by document
    first = np.mean((outputs[0] - outputs[1]) ** 2) / np.mean(outputs[0].var(axis=0))
    measure = jax.jit(lambda params: attention_distances(new, old, params, tokens))
    distances = measure(params)
    np.testing.assert_allclose(distances[0], first, rtol=1e-4)
    kernel = params["layers"]["feature_map"]["kernel"]
    params["layers"]["feature_map"]["kernel"] = np.stack([kernel[0] + 1, kernel[1]])
    moved = measure(params)
    assert moved[0] != distances[0] and moved[1] == distances[1]


def common(params, like):
    return {n: common(params[n], x) if isinstance(x, dict) else params[n] for n, x in like.items()}


ON_FOUR_DEVICES = """
import jax, numpy as np
from heinsen.models import attention_distances, init_params
from heinsen.parallel import MeshConfig, make_mesh, shardings, split_batch
from tests.model_configs import model_config

sizes = dict(position="rotary", block="gpt2", convolution=2, document_token=3)
old = model_config(attention="softmax", **sizes)
new = model_config(value_domain="real", feature_map="exponential", forget_gate="head", **{**sizes, "position": "none"})
params = jax.jit(init_params, static_argnums=0)(new, jax.random.key(0))
tokens, places = np.random.default_rng(0).integers(0, 257, (4, 8)), 7 * np.arange(4)
tokens[:, 4] = 3
def measure(mesh):
    distance = lambda params, tokens, places: attention_distances(new, old, params, tokens, mesh, places).sum()
    return jax.value_and_grad(distance)

want, want_grads = jax.jit(measure(None))(params, tokens, places)
mesh = make_mesh(MeshConfig(1, 2, 2, 1))
where = shardings(mesh, params), split_batch(mesh), split_batch(mesh)
got, grads = jax.jit(measure(mesh), in_shardings=where)(params, tokens, places)
np.testing.assert_allclose(got, want, rtol=1e-5)
for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads)):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
"""


@pytest.mark.long
def test_distances_and_their_gradients_are_those_of_one_device_on_a_mesh(commands):
    done = commands.run("-W", "error", "-c", ON_FOUR_DEVICES, devices=4)
    assert done.returncode == 0, done.stderr


def test_windows_start_anywhere_where_positions_are_rotary(data, teacher, tmp_path, rng):
    config = converted(data, teacher, model__position="rotary")
    rows = np.arange(64)
    places = draw_first_places(config, 3, rows)
    assert places.min() >= 0 and 8 * LENGTH < places.max() < 16 * LENGTH
    np.testing.assert_array_equal(draw_first_places(config, 3, rows[5:9]), places[5:9])
    assert np.any(draw_first_places(config, 4, rows) != places)
    old = config.teacher
    params = load_params(teacher, old, make_mesh()).params
    tokens = jnp.asarray(rng.integers(0, 257, (4, 9)))
    loss = jax.jit(lambda first_place: mean_loss(old, params, tokens, None, first_place))
    np.testing.assert_allclose(loss(places[:4]), loss(0 * places[:4]), rtol=1e-5)
    assert not np.any(draw_first_places(converted(data, teacher), 3, rows))


def test_the_config_is_the_teachers_with_another_attention_and_needs_it_no_more(run, data, teacher, tmp_path):
    old, new = load_run(teacher).model, load_run(run).model
    differing = {name for name, x in dataclasses.asdict(new).items() if x != getattr(old, name)}
    assert differing == {"attention", "value_domain", "feature_map", "forget_gate", "position"}
    assert (old.position, new.position) == ("rotary", "none")
    gated = save_teacher(tmp_path / "gated", data, model__forget_gate="head")
    config = converted(data, gated)
    assert config.teacher == load_run(gated).model
    assert names_of_added(config) == {"layers.feature_map.kernel", "layers.feature_map.bias"}


# ---- bad input -------------------------------------------------------------------------------


def test_what_cannot_be_converted_is_refused_in_one_line(data, teacher, tmp_path):
    own = dict(model__attention="heinsen", model__position="none", model__block="heinsen", model__convolution=0)
    others = {
        "paper": own,
        "mixed": dict(model__attention="softmax,linear"),
        "masked": dict(model__objective="masked"),
        "learned": dict(model__position="learned", model__n_positions=LENGTH),
        "gated": dict(model__forget_gate="head"),
    }
    sources = {name: save_teacher(tmp_path / name, data, **changes) for name, changes in others.items()}
    start = "starts from softmax attention in all layers and objective = next_token; give another --config.init_from"
    cases = [
        (None, {}, "config.init_from = None: a conversion starts from a trained softmax model; give its run"),
        (tmp_path / "none", {}, "none is not a run folder"),
        ("paper", {}, rf"has model.attention = 'heinsen' and objective = 'next_token': a conversion {start}"),
        ("mixed", {}, start),
        ("masked", {}, start),
        ("learned", dict(sequence_length=2 * LENGTH), "sequence_length = 32 is longer than model.n_positions = 16"),
        ("gated", dict(model__forget_gate="none"), "the teacher has a forget gate, which must stay: set it to head"),
        (
            "learned",
            dict(model__position="none"),
            "the teacher has 'learned', and only rotary positions can be left out",
        ),
        (
            teacher,
            dict(model__position="learned", model__n_positions=99),
            "model.position = 'learned': the teacher has",
        ),
        (teacher, dict(conversion__position="x"), "conversion.position = 'x': choose"),
        (teacher, dict(model__value_domain="log"), "makes a model with model.attention = heinsen in all layers"),
        (teacher, dict(model__d_key=8), "softmax attention needs model.d_key = 8 and model.d_value = 4 to be equal"),
        (teacher, dict(conversion__share=0.0), r"conversion.share = 0.0: it must lie between 0 and 1"),
        (teacher, dict(conversion__share=1.0), r"conversion.share = 1.0: it must lie between 0 and 1"),
        (teacher, dict(conversion__share=0.9), "optimizer.warmup_steps = 2 does not fit a run of 1 steps, or a stage"),
    ]
    for source, changes, message in cases:
        with pytest.raises((ConfigError, RunError), match=message) as error:
            converted(data, sources.get(source, source), **changes)
        assert "\n" not in str(error.value)
    for changes, message in (
        (dict(model__d_model=64), "model.d_model: 32 in the run, 64 in the command"),
        (dict(model__d_key=8, model__d_value=8), "model.d_key: 4 in the run, 8 in the command"),
        (dict(model__vocab_size=260), "model.vocab_size: 257 in the run, 260 in the command"),
    ):
        with pytest.raises(RunError, match=message):
            load_initial_params(converted(data, teacher, **changes), make_mesh(), "bytes")


def test_a_run_that_converts_nothing_does_not_depend_on_how_it_would(data, teacher, tmp_path):
    own, other = (
        [make(conversion__attention_learning_rate=rate).fingerprint for rate in (1e-2, 1e-3)]
        for make in (partial(run_config, data, init_from=str(tmp_path)), partial(converted, data, teacher))
    )
    assert own[0] == own[1] and other[0] != other[1]
    values = dataclasses.asdict(run_config(data, init_from=str(tmp_path)))
    assert take_from_teacher(values) is values
