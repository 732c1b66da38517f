"""Kinds of attention, blocks and positions in one frame: each against a float64 model of loops and quadratic forms."""

import dataclasses
import importlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.config import ConfigError, from_mapping
from heinsen.contrib.onnx import check_exportable
from heinsen.decoding import Sampling, decode, load_prefix, prefill, prompts, read, save_prefix
from heinsen.decoding.prompts import longest_document
from heinsen.export.huggingface import huggingface_tensors
from heinsen.models import (
    abstract_params,
    check_room,
    count_params,
    forget,
    forward,
    init_model_state,
    init_params,
    layer_records,
    mean_loss,
    state_size,
)
from heinsen.models.mixers import MIXERS, TokenContext
from heinsen.models.positions import POSITION_CLASSES
from heinsen.models.state import resize_caches
from heinsen.ops.delta import DeltaState
from heinsen.ops.linear import LinearState
from heinsen.ops.softmax import KVCache
from heinsen.ops.states import LogState, MeanState
from heinsen.parallel import MeshError
from heinsen.training.config import TrainConfig, check_mesh
from tests.model_configs import model_config
from tests.models.model64 import (
    DOCUMENT,
    SIZES,
    B,
    MovingAverage,
    T,
    assert_close,
    assert_gradients,
    draw_params,
    draw_tokens,
    logits64,
    losses64,
    rotate64,
)
from tests.runs import run_config

pytest_plugins = ["tests.run_fixtures"]

# Every kind, option, block and position once at least.
EQUAL = dict(d_key=4, d_value=4)
VARIANTS = {
    "paper": dict(document_token=DOCUMENT),
    "gpt2": dict(
        attention="softmax", block="gpt2", position="learned", n_positions=T, document_token=DOCUMENT, **EQUAL
    ),
    "sigmoid": dict(attention="sigmoid", sigmoid_alpha=0.5, sigmoid_bias="-log_n", position="rotary", block="gpt2"),
    "linear": dict(attention="linear", output_gate=True, forget_gate="head", document_token=DOCUMENT),
    "delta": dict(
        attention="delta", position="none", convolution=4, forget_gate="head", document_token=DOCUMENT, **EQUAL
    ),
    "real": dict(
        value_domain="real", position="none", block="gpt2", convolution=4, forget_gate="head", document_token=DOCUMENT
    ),
    "features": dict(
        value_domain="real", feature_map="elu", position="rotary", forget_gate="head", document_token=DOCUMENT
    ),
    "hybrid": dict(
        attention="heinsen,softmax,sigmoid",
        n_layers=3,
        sigmoid_bias="-1.5",
        position="rotary",
        convolution=2,
        forget_gate="head",
        document_token=DOCUMENT,
        **EQUAL,
    ),
}
VARIANTS["another kind"] = dict(attention="moving_average", document_token=DOCUMENT)


@pytest.fixture(params=VARIANTS)
def config(request):
    return model_config(**SIZES | VARIANTS[request.param])


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """One more kind, which the frame knows by one class and one registration."""
    monkeypatch.setitem(MIXERS, "moving_average", MovingAverage.from_config)


# ---- the models ----------------------------------------------------------------------------------


def test_logits_activations_and_gradients_are_those_of_the_float64_model(rng, config):
    params, tokens = draw_params(config, rng), draw_tokens(config, rng)

    def run(params, tokens):
        logits, _ = forward(config, params, tokens)
        grads = jax.grad(lambda params: mean_loss(config, params, tokens))(params)
        return logits, layer_records(config, params, tokens), grads

    (logits, rms, grads), records = jax.jit(run)(params, tokens), []
    assert_close(logits, logits64(config, params, tokens, records), 2e-5)
    for index, name in enumerate(("attention", "residual")):
        assert list(rms[name]) == list(range(config.n_layers))
        for i, got in rms[name].items():
            layer = np.concatenate([each[index] for each in records[i :: config.n_layers]])
            assert_close(got, np.sqrt(np.mean(layer**2)), 2e-5)
    loss = lambda params: losses64(logits64(config, params, tokens[:, :-1]), tokens[:, 1:]).mean()
    assert_gradients(rng, params, grads, loss)


def test_mean_decays_are_those_of_the_gates(rng):
    """With no weights, a head forgets at its bias's rate; layers of kinds without a gate have none."""
    config = model_config(
        **SIZES
        | EQUAL
        | dict(
            attention="sigmoid,heinsen",
            position="none",
            forget_gate="head",
            forget_gate_shortest=3,
            forget_gate_longest=300,
        ),
        n_layers=4,
    )
    params = init_params(config, jax.random.key(0))
    gate = params["layers"]["layer_1"]["gate"]
    gate["kernel"] *= 0
    measure = jax.jit(lambda params, tokens: layer_records(config, params, tokens)["decay"])
    decays = measure(params, draw_tokens(config, rng))
    assert list(decays) == [1, 3]
    for each in decays.values():
        np.testing.assert_allclose(-1 / np.log(each), [3, 30, 300], rtol=1e-4)
    gate["scale"] *= -1  # less than nothing is nothing
    assert all(map(np.all, (each == 1 for each in measure(params, draw_tokens(config, rng)).values())))


def test_mean_decays_average_what_tokens_leave(rng):
    config = model_config(**SIZES | EQUAL | dict(position="none", forget_gate="head"), n_layers=1)
    params, tokens = init_params(config, jax.random.key(1)), draw_tokens(config, rng)
    gate = params["layers"]["gate"]
    gate["kernel"] = gate["kernel"] + 3 * rng.standard_normal(gate["kernel"].shape, np.float32)
    x = np.float64(params["embedding"])[tokens]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    kept = 1 / (1 + np.exp(-(x @ np.float64(gate["kernel"][0]) + np.float64(gate["bias"][0]))))
    decays = jax.jit(layer_records, static_argnums=0)(config, params, tokens)["decay"]
    np.testing.assert_allclose(decays[0], kept.mean((0, 1)), rtol=1e-5)


def test_pieces_prompts_saved_states_and_steps_equal_the_whole(rng, config, monkeypatch, tmp_path):
    """Token by token from nothing; and ragged prompts with padding, read in pieces, saved, loaded and gone on with."""
    monkeypatch.setattr(prompts, "PREFILL_PIECE", 4)
    params, tokens = draw_params(config, rng), draw_tokens(config, rng)
    want, rows = logits64(config, params, tokens), np.arange(B)
    read = jax.jit(lambda params, tokens, state: forward(config, params, tokens, state))
    empty = init_model_state(config, B, capacity=T)
    state = empty
    for t in range(T):
        logits, state = read(params, tokens[:, t : t + 1], state)
        assert_close(logits[:, 0], want[:, t], 3e-5)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, empty)

    lengths = rng.permutation([1, 5])
    prompt = np.where(np.arange(5) < lengths[:, None], tokens[:, :5], rng.integers(2, 13))
    prefix = prefill(config, params, prompt, empty, lengths)
    save_prefix(tmp_path / "state", config, params, prefix)
    logits, before = load_prefix(tmp_path / "state", config, params)
    before = resize_caches(config, before, T)  # files hold what is filled
    assert_close(logits, want[rows, lengths - 1], 2e-5)
    place = lengths[:, None] + np.arange(3)
    more = tokens[rows[:, None], place]
    logits, state = read(params, more[:, :2], before)
    assert_close(logits, want[rows[:, None], place[:, :2]], 2e-5)
    logits, _ = read(params, more[:, 2:], state)
    assert_close(logits[:, 0], want[rows, place[:, 2]], 3e-5)

    # A row of padding alone keeps every bit of its state; another has that of its tokens, whatever the padding is.
    padded = jax.jit(lambda params, tokens, state, lengths: forward(config, params, tokens, state, lengths))
    _, after = padded(params, more, before, np.array([0, 2]))
    _, other = padded(params, np.where(np.arange(3) < 2, more, 7), before, np.array([0, 2]))
    same = lambda row, a, b: jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[row], b[row]), a, b)
    same(0, after.attention, before.attention)
    same(1, after.attention, other.attention)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b[1], atol=1e-5), after.attention, state.attention)
    # What is forgotten is not seen, in the rows that forget.
    fresh = read(params, tokens[:, :1], empty)[0]
    logits = read(params, tokens[:, :1], forget(config, state, jnp.array([True, False])))[0]
    assert_close(logits[0], np.asarray(fresh[0], np.float64), 1e-5)
    if config.document_token is None or tokens[1, 0] != DOCUMENT:
        assert np.abs(logits[1] - fresh[1]).max() > 1e-3


def test_padding_of_a_whole_batch_changes_nothing(rng):
    """Not even that of layers with a gate and a cache, whose keys of padding reach no other layer."""
    config = model_config(**SIZES | VARIANTS["hybrid"])
    params, tokens, lengths = draw_params(config, rng), draw_tokens(config, rng), rng.permutation(T)[:B]
    want = logits64(config, params, tokens)
    logits, _ = jax.jit(forward, static_argnums=0)(config, params, tokens, None, lengths)
    within = np.arange(T) < lengths[:, None]
    assert_close(logits[within], want[within], 2e-5)


def test_each_kind_has_its_own_state():
    config = model_config(attention="heinsen,softmax,sigmoid,linear,delta", n_layers=5)
    states = init_model_state(config, B, 5).attention
    assert list(map(type, states)) == [LogState, KVCache, KVCache, LinearState, DeltaState]
    assert config.has_cache
    assert states[1].k.shape[2] == 5
    real = model_config(value_domain="real")
    assert isinstance(init_model_state(real, B).attention[0], MeanState) and not real.has_cache
    another = model_config(attention="moving_average")
    assert isinstance(another.mixers[0], MovingAverage) and not another.has_cache and not another.splits_sequences
    assert init_model_state(another, B).attention[0].shape == (B, 2, 4)


@pytest.mark.parametrize("kind", MIXERS)
def test_only_delta_layers_have_beta(kind):
    layers = abstract_params(model_config(attention=kind))["layers"]
    assert ("strength" in layers) == (kind == "delta") == MIXERS[kind](model_config()).takes_beta


def test_gradients_at_zero_queries_keys_and_values_of_delta_layers_are_finite(rng):
    config = model_config(**SIZES | VARIANTS["delta"])
    params, tokens = draw_params(config, rng), draw_tokens(config, rng)
    params["layers"]["w1"] = jax.tree.map(np.zeros_like, params["layers"]["w1"])
    grads = jax.jit(jax.grad(lambda params: mean_loss(config, params, jnp.asarray(tokens))))(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_size_of_the_state_by_hand():
    """3 layers of 2 heads, a convolution over 4 tokens; recurrent positions have d_model numbers more."""
    sizes = dict(n_layers=3, n_heads=2, d_value=8, d_model=32, convolution=4, position="none")
    last_inputs = lambda d_key: (4 - 1) * (d_key + d_key + 8)
    for attention, d_key, n_tokens, each in (
        ("heinsen", 4, 0, 4 * 8 + 4),
        ("linear", 4, 9, 4 * 8 + 4),
        ("delta", 4, 9, 4 * 8),
        ("softmax", 8, 9, 9 * (8 + 8)),
    ):
        config = model_config(**sizes, attention=attention, d_key=d_key)
        assert state_size(config, n_tokens) == 3 * 2 * (each + last_inputs(d_key))
    recurrent = model_config(**sizes | {"position": "recurrent"}, d_key=4)
    assert state_size(recurrent, 9) == 3 * 2 * (4 * 8 + 4 + last_inputs(4)) + 32


def test_gpt2_begins_with_normal_weights_and_no_bias():
    config = model_config(**VARIANTS["gpt2"], d_model=64, n_layers=8, n_heads=16)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(1))
    for name in ("w1", "mlp_in", "attention_out", "mlp_out"):
        deviation = 0.02 / 4 if name.endswith("out") else 0.02  # sqrt(2 * 8 layers)
        kernel = np.float64(params["layers"][name]["kernel"])
        assert abs(kernel.std() / deviation - 1) < 0.05 and abs(kernel.mean()) < 0.05 * deviation
        assert not np.any(params["layers"][name]["bias"])
    assert abs(np.std(params["embedding"]) / 0.02 - 1) < 0.05


def test_gpt2_small_has_its_124439808_parameters_and_differs_in_its_model_only():
    config = run_config_of("gpt2_124m")
    shapes = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
    assert count_params(shapes) == 124_439_808
    assert jax.tree.map(jnp.shape, shapes["layers"]) == {
        "norm": {"scale": (12, 768), "bias": (12, 768)},
        "w1": {"kernel": (12, 768, 2304), "bias": (12, 2304)},
        "attention_out": {"kernel": (12, 768, 768), "bias": (12, 768)},
        "mlp_norm": {"scale": (12, 768), "bias": (12, 768)},
        "mlp_in": {"kernel": (12, 768, 3072), "bias": (12, 3072)},
        "mlp_out": {"kernel": (12, 3072, 768), "bias": (12, 768)},
    }
    ours, theirs = (importlib.import_module(f"configs.{n}").get_config() for n in ("gpt2_124m", "pile_125m"))
    assert ours.model.to_dict() != theirs.model.to_dict()
    del ours.model, theirs.model
    assert ours.to_dict() == theirs.to_dict()


def run_config_of(name):
    return from_mapping(TrainConfig, importlib.import_module(f"configs.{name}").get_config().to_dict())


@pytest.mark.parametrize("start", [0, 4090, 10**6, 2**24 - 3, 2**31 - 20])
def test_rotations_are_relative_however_long_the_text(rng, start):
    """A state of constant size goes on for millions of tokens: the places of neighbors must not run together."""
    q, k = (rng.standard_normal((1, 1, 9, 16)) for _ in range(2))
    tokens = TokenContext(jnp.arange(9, dtype=jnp.int32)[None] + start, jnp.zeros((1, 9), jnp.int32), None, None)
    q32, k32 = POSITION_CLASSES["rotary"].rotate(jnp.float32(q), jnp.float32(k), tokens)
    scores = rotate64(q[0, 0], np.arange(9)) @ rotate64(k[0, 0], np.arange(9)).T
    np.testing.assert_allclose(q32[0, 0] @ k32[0, 0].T, scores, atol=0.02)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(attention="relu"), "'relu' is no kind of attention; choose heinsen, softmax, sigmoid, linear"),
        (dict(attention="heinsen*0"), "is no kind of attention"),
        (
            dict(attention="heinsen*2,softmax"),
            "a pattern of 3 layers, which does not divide model.n_layers = 2; choose",
        ),
        (dict(attention="softmax", d_value=8), "model.d_key = 4 and model.d_value = 8 to be equal"),
        (dict(sigmoid_alpha=float("nan")), "model.sigmoid_alpha = nan: it must be finite"),
        (dict(sigmoid_alpha=float("inf")), "model.sigmoid_alpha = inf: it must be finite"),
        (dict(sigmoid_bias="log_n"), "model.sigmoid_bias = 'log_n': expected a finite number, or -log_n"),
        (dict(sigmoid_bias="inf"), "model.sigmoid_bias = 'inf'"),
        (dict(value_domain="complex"), "model.value_domain = 'complex': choose log, real"),
        (dict(value_domain="real", attention="linear"), "model.attention = 'linear' has none: set it to log"),
        (
            dict(forget_gate="head", attention="sigmoid"),
            "of heinsen, softmax, linear, delta attention, of which model.",
        ),
        (dict(feature_map="cosine"), "model.feature_map = 'cosine': choose none, exponential, elu, relu, softmax"),
        (dict(feature_map="elu", attention="linear"), "of heinsen attention, of which model.attention = 'linear' has"),
        (dict(d_features=8), "model.d_features = 8 is the number of a feature map's features, and there is none: set"),
        (dict(feature_map="elu", d_features=7), "model.d_features = 7: features come in pairs, give an even number"),
        (dict(block="llama"), "model.block = 'llama': choose heinsen, gpt2"),
        (dict(position="sinus"), "model.position = 'sinus': choose recurrent, learned, rotary, none"),
        (dict(position="learned"), "model.n_positions = None: learned positions need their number"),
        (dict(position="learned", n_positions=0), "model.n_positions = 0: it must be at least 1"),
        (dict(position="rotary"), "model.attention = 'heinsen' must have some"),
        (dict(position="rotary", attention="sigmoid", d_key=5), "model.d_key = 5 be even"),
        (dict(objective="denoise"), "model.objective = 'denoise': choose next_token, masked"),
        (
            dict(objective="masked", forget_gate="head", implementation="scan"),
            "model.implementation = 'scan': a forget gate in a masked model is computed in chunks; set it to chunked",
        ),
        (
            dict(objective="masked", attention="delta"),
            "model.objective = 'masked': model.attention = 'delta' has delta layers, which read tokens in their order "
            "only; set model.objective to next_token, or choose another kind of attention",
        ),
        (dict(objective="masked", padded_vocab_size=257), "set model.padded_vocab_size = 257 above vocab_size = 257"),
    ],
    ids=str,
)
def test_impossible_models_are_refused_with_what_to_choose(changes, message):
    with pytest.raises(ConfigError) as error:
        model_config(**changes)
    assert message in str(error.value)


def test_learned_positions_end_with_a_clear_error_or_nan(rng):
    """As long as a document may begin anywhere, only the numbers tell."""
    config = model_config(**SIZES | VARIANTS["gpt2"] | dict(n_positions=4))
    params, tokens = draw_params(config, rng), draw_tokens(config, rng)
    logits = jax.jit(lambda params, tokens: forward(config, params, tokens)[0])(params, tokens)
    assert np.isnan(logits[1, 4]).all(), "the fifth token of a document"
    assert np.isfinite(logits[0]).all(), "no document of this row has a fifth"
    check_room(config, 4)
    with pytest.raises(ValueError, match="5 tokens go beyond the model.n_positions = 4 positions"):
        check_room(config, 5)
    alone = dataclasses.replace(config, document_token=None)
    with pytest.raises(ValueError, match="8 tokens go beyond"):
        forward(alone, params, tokens)
    with pytest.raises(ConfigError, match=r"sequence_length = 16 is longer than model.n_positions = 8: raise it"):
        run_config("unused", model__position="learned", model__n_positions=8)


def test_prompts_that_padding_takes_beyond_the_learned_positions_are_read_and_longer_ones_refused(rng):
    changes = dict(attention="linear", block="gpt2", position="learned", n_positions=6)
    config = model_config(**SIZES | changes)
    params, tokens = draw_params(config, rng), draw_tokens(config, rng)
    prefix = read(config, params, [tokens[0, :3], tokens[1, :6]])
    for row, length in enumerate((3, 6)):
        assert_close(prefix.logits[row], logits64(config, params, tokens[row : row + 1, :length])[0, -1], 2e-5)
    with pytest.raises(ValueError, match="7 tokens go beyond the model.n_positions = 6"):
        read(config, params, [tokens[0, :3], tokens[1, :7]])
    with pytest.raises(ValueError, match="7 tokens go beyond"):
        read(config, params, [tokens[0, :3], tokens[1, :1]], prefix.state)
    with pytest.raises(ValueError, match="8 tokens go beyond"):
        decode(config, params, prefix, jax.random.split(jax.random.key(0), B), Sampling(), 2)
    # Documents that begin anew have positions of their own.
    documents = dataclasses.replace(config, document_token=DOCUMENT)
    before = init_model_state(documents, 1)._replace(n_tokens=jnp.array([9]), document_start=jnp.array([5]))
    longest = lambda *row: longest_document(documents, before, np.array([row]), np.array([len(row)]))
    assert [longest(5, 6), longest(5, DOCUMENT, 6), longest(DOCUMENT, *[5] * 6, DOCUMENT)] == [6, 5, 7]


def test_exports_of_delta_layers_are_refused():
    config = model_config(attention="delta")
    with pytest.raises(ValueError, match="not model.attention = 'delta' .* export it without --format=hf"):
        huggingface_tensors(config)
    pytest.importorskip("onnx", reason="pip install onnx")
    with pytest.raises(
        ValueError, match="model.attention = 'delta': one step in ONNX needs heinsen; export it without"
    ):
        check_exportable(config)


@pytest.mark.parametrize(
    "name, splits", [(name, False) for name in ("hybrid", "real", "features", "gpt2", "delta")] + [(None, True)]
)
def test_only_the_papers_attention_divides_the_tokens_of_a_sequence(name, splits):
    changes = {f"model__{key}": value for key, value in VARIANTS.get(name, {}).items()}
    config = run_config("unused", **{**changes, "model__n_positions": 16, "model__document_token": None})
    mesh = mock.Mock(spec=jax.sharding.Mesh, shape={"data": 1, "fsdp": 1, "tensor": 1, "sequence": 2})
    if splits:
        check_mesh(config, mesh)
        return
    with pytest.raises(
        MeshError, match=r"mesh.sequence = 2 divides .* model.attention = heinsen .* Use the mesh's other"
    ):
        check_mesh(config, mesh)


NAMES = ["gpt2", "sigmoid", "linear", "delta", "real", "features", "masked"]
ON_FOUR_DEVICES = """
import jax, numpy as np
from heinsen.models.masking import mask_tokens
from heinsen.models import init_params, masked_loss, mean_loss
from heinsen.parallel import MeshConfig, make_mesh, split_batch
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import abstract_train_state
from tests.model_configs import model_config
from tests.runs import run_config
from tests.models.test_kinds import NAMES, VARIANTS

for name in NAMES:
    model = model_config(implementation="reference", **VARIANTS.get(name, {"objective": "masked", "document_token": 3}))
    params = jax.jit(init_params, static_argnums=0)(model, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 257, (4, 9))
    tokens[:, 4] = 3
    batch = {"tokens": tokens} if model.causal else mask_tokens(model, tokens[:, 1:], 0, 0, np.arange(4))
    of_windows = lambda model, params, batch, mesh: mean_loss(model, params, batch["tokens"], mesh)
    loss_fn = of_windows if model.causal else masked_loss
    gradient = lambda mesh: jax.value_and_grad(lambda params, batch: loss_fn(model, params, batch, mesh))
    loss, grads = jax.jit(gradient(None))(params, batch)
    mesh = make_mesh(MeshConfig(1, 2, 2, 1))
    optimizer = make_optimizer(run_config("unused").optimizer, 100)
    where = jax.tree.map(lambda x: x.sharding, abstract_train_state(model, optimizer, mesh).params)
    split = {jax.tree_util.keystr(path) for path, s in jax.tree.leaves_with_path(where) if any(s.spec)}
    of_layer = (6 if model.block == "gpt2" else 4) + bool(model.convolution) + 2 * model.output_gate
    of_layer += 2 * (model.feature_map != "none")
    of_gates = 3 * sum(name in ("heinsen", "linear", "delta") for name in model.pattern) * (model.forget_gate == "head")
    of_gates += 2 * model.pattern.count("delta")  # strengths
    n_split = 1 + (model.position == "recurrent") + len(model.pattern) * of_layer + of_gates
    assert len(split) == n_split, split
    on_mesh = jax.jit(gradient(mesh), in_shardings=(where, split_batch(mesh)))
    got, got_grads = jax.block_until_ready(on_mesh(params, batch))
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got_grads), jax.tree.leaves(grads)):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    print(name)
"""


@pytest.mark.long
def test_every_kind_has_the_loss_and_gradients_of_one_device_on_meshes(commands):
    done = commands.run("-W", "error", "-c", ON_FOUR_DEVICES, devices=4)
    assert done.returncode == 0 and done.stdout.splitlines() == NAMES, done.stderr
