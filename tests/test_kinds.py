"""Kinds of attention, blocks and positions in one frame: each against a float64 model of loops and quadratic forms."""

import dataclasses
import functools
import importlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.config import ConfigError, from_mapping
from heinsen.decoding import Sampling, decode, read
from heinsen.decoding.prompts import longest_document
from heinsen.models import (
    activation_rms,
    check_room,
    count_params,
    forward,
    init_model_state,
    init_params,
    mean_decays,
    mean_loss,
)
from heinsen.models.mixers import Tokens
from heinsen.models.positions import POSITION_CLASSES
from heinsen.ops.linear import LinearState
from heinsen.ops.softmax import KVCache
from heinsen.ops.states import LogState, MeanState
from heinsen.parallel import MeshError
from heinsen.training.config import TrainConfig, check_mesh
from tests.models import model_config
from tests.runs import run_config

pytest_plugins = ["tests.run_fixtures"]

B, T = 2, 8
DOCUMENT = 3

# No two sizes alike but where a kind asks for it; every kind, option, block and position once at least.
SIZES = dict(vocab_size=13, padded_vocab_size=16, d_model=10, n_heads=3, d_key=2, d_value=4, implementation="scan")
EQUAL = dict(d_key=4, d_value=4)
VARIANTS = {
    "gpt2": dict(
        attention="softmax", block="gpt2", position="learned", n_positions=T, document_token=DOCUMENT, **EQUAL
    ),
    "sigmoid": dict(
        attention="sigmoid", sigmoid_alpha=0.5, sigmoid_bias="-log_n", position="rotary", block="gpt2", output="norm"
    ),
    "window": dict(
        attention="window,heinsen", window=3, position="rotary", block="gpt2", gate="head", document_token=DOCUMENT
    ),
    "linear": dict(attention="linear", signed_features=True, output="gate", gate="head", document_token=DOCUMENT),
    "real": dict(
        value_domain="real",
        position="none",
        block="gpt2",
        convolution=4,
        qk_norm=True,
        gate="head",
        document_token=DOCUMENT,
    ),
    "hybrid": dict(
        attention="heinsen,softmax,sigmoid",
        n_layers=3,
        sigmoid_bias="-1.5",
        position="rotary",
        convolution=2,
        gate="head",
        signed_features=True,
        output="norm",
        qk_norm=True,
        document_token=DOCUMENT,
        **EQUAL,
    ),
}
QUICK = ("gpt2", "linear", "hybrid")


@pytest.fixture(
    params=[*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in sorted({*VARIANTS} - {*QUICK}))]
)
def config(request):
    return model_config(**SIZES | VARIANTS[request.param])


def draw_params(config, rng):
    """Random everywhere: fresh norms and biases would hide theirs."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

    def draw(path, x):
        is_scale = path[-1].key in ("scale", "q_scale", "k_scale", "y_scale")
        size = 0.3 if is_scale else 1 / np.sqrt(x.shape[-2] if path[-1].key == "kernel" else 2)
        x = np.float32(is_scale + size * rng.standard_normal(x.shape))
        # A gate's scale below 0 is 0, and has a gradient all the same, which is not the derivative.
        return np.abs(x) if is_scale and path[-2].key.startswith("gate") else x

    return jax.tree_util.tree_map_with_path(draw, shapes)


def draw_tokens(config, rng):
    tokens = rng.integers(4, config.vocab_size, (B, T))
    if config.document_token is not None:
        tokens[0, [2, 3, 6]] = tokens[1, [0, 5]] = DOCUMENT
    return np.int32(tokens)


# ---- the reference -------------------------------------------------------------------------------


def norm64(x, norm):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]


def sigmoid64(x):
    return 1 / (1 + np.exp(-x))


def rotate64(x, place):
    half = x.shape[-1] // 2
    turn = np.exp(1j * place[:, None] * 10000.0 ** (-np.arange(half) / half))
    z = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def attention64(config, kind, q, k, v, log_decays):
    """One head of one document, [T, K], [T, K], [T, V], [T]s -> [T, V]: the weights of all pairs."""
    n = len(q)
    seen = np.tril(np.ones((n, n))) if config.causal else np.ones((n, n))
    if kind == "window":
        seen = seen * (np.abs(np.subtract.outer(np.arange(n), np.arange(n))) < config.window)
    if config.position == "rotary" and kind in ("softmax", "sigmoid", "window"):
        q, k = rotate64(q, np.arange(n)), rotate64(k, np.arange(n))
    if config.signed_features and kind in ("heinsen", "linear"):
        q, k = (np.concatenate([x, -x], axis=-1) for x in (q, k))
    if kind == "sigmoid":
        count = seen.sum(-1, keepdims=True)
        bias = -np.log(count) if config.sigmoid_bias == "-log_n" else float(config.sigmoid_bias)
        return seen * sigmoid64(q @ k.T / np.sqrt(config.d_key) + bias) / count**config.sigmoid_alpha @ v
    if kind in ("softmax", "window"):
        weights = np.exp(q @ k.T / np.sqrt(config.d_key))
    elif kind == "linear":
        f = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
        weights = f(q) @ f(k).T
    else:
        weights = np.exp(q) @ np.exp(k).T
    if config.gate == "head" and kind in ("heinsen", "linear"):
        left = [[log_decays[0][s + 1 : t + 1].sum() for s in range(n)] for t in range(n)]
        if not config.causal:  # the tokens between, for later ones
            left += np.array([[log_decays[1][t + 1 : s].sum() for s in range(n)] for t in range(n)])
        weights = weights * np.exp(left)
    weights = seen * weights / (seen * weights).sum(-1, keepdims=True)
    return np.log(weights @ np.exp(v)) if kind == "heinsen" and config.value_domain == "log" else weights @ v


def recurrence64(c, l):  # noqa: E741
    e, out = np.zeros(c.shape[-1]), []
    for t in range(len(c)):
        e = np.log(sigmoid64(c[t]) * np.exp(e) + np.exp(l[t]))
        out.append(e)
    return np.stack(out)


def layer64(config, kind, x, p, told):
    """Appends its attention and what it gives on to `told`."""
    n_k = config.d_key
    h = norm64(x, p["norm"]) @ p["w1"]["kernel"] + p["w1"]["bias"]
    unit = lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    heads = []
    for i, qkv in enumerate(np.split(h, config.n_heads, axis=-1)):
        if config.convolution:
            taps = p["convolution"]["taps"][i]
            qkv = sum(tap * np.pad(qkv, [(j, 0), (0, 0)])[: len(qkv)] for j, tap in enumerate(taps))
        q, k, v = qkv[:, :n_k], qkv[:, n_k : 2 * n_k], qkv[:, 2 * n_k :]
        if config.qk_norm:
            q, k = unit(q) * p["q_scale"][i], unit(k) * p["k_scale"][i]
        log_decays = []
        if config.gate == "head" and kind in ("heinsen", "linear"):
            for name in ("gate",) if config.causal else ("gate", "gate_after"):
                gate = norm64(x, p["norm"]) @ p[name]["kernel"][:, i] + p[name]["bias"][i]
                log_decays.append(p[name]["scale"][i] * np.log(sigmoid64(gate)))
        y = attention64(config, kind, q, k, v, log_decays)
        heads.append(unit(y) * p["y_scale"][i] if config.output == "norm" else y)
    y = np.concatenate(heads, axis=-1)
    dense = lambda name, x: x @ p[name]["kernel"] + p[name].get("bias", 0)
    if config.output == "gate":
        y = 2 * sigmoid64(dense("output_gate", norm64(x, p["norm"]))) * y
    if config.block == "heinsen":
        h = dense("w2", y)
        x = x + dense("w3", h[:, : config.d_model] * sigmoid64(h[:, config.d_model :]))
    else:
        x = x + dense("attention_out", y)
        h = dense("mlp_in", norm64(x, p["mlp_norm"]))
        x = x + dense("mlp_out", 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))))
    told.append((y, x))
    return x


def document64(config, params, tokens, told):
    """Logits of the tokens of one document, by themselves; each layer tells `told` of them."""
    x = params["embedding"][tokens]
    if config.position == "learned":
        x = x + params["position"]["embedding"][: len(x)]
    elif config.position == "recurrent":
        maps = x @ params["position"]["dense"]["kernel"] + params["position"]["dense"]["bias"]
        maps = np.split(maps, maps.shape[-1] // config.d_model, axis=-1)
        e = recurrence64(*maps[:2])
        x = x + (e if config.causal else e + recurrence64(*(m[::-1] for m in maps[2:]))[::-1])
    kinds, layers = config.attention.split(","), params["layers"]
    for i in range(config.n_layers):
        own = layers if len(kinds) == 1 else layers[f"layer_{i % len(kinds)}"]
        own = jax.tree.map(lambda p, i=i: p[i // len(kinds)], own)
        x = layer64(config, kinds[i % len(kinds)], x, own, told)
    return norm64(x, params["norm"]) @ params["embedding"].T


def logits64(config, params, tokens, told=None):
    """Each document of each row by itself."""
    params = jax.tree.map(np.float64, params)
    rows, told = [], [] if told is None else told
    for row in tokens:
        begins = np.flatnonzero(row == config.document_token) if config.document_token is not None else []
        rows.append(np.concatenate([document64(config, params, d, told) for d in np.split(row, begins) if len(d)]))
    return np.stack(rows)


def losses64(logits, targets):
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return log_z - np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


def slope64(loss, params, direction):
    """The derivative of a loss along a direction through all parameters."""
    moved = lambda step: jax.tree.map(lambda x, d: np.float64(x) + step * d, params, direction)
    return (loss(moved(1e-5)) - loss(moved(-1e-5))) / 2e-5


def assert_close(got, want, tolerance):
    assert np.abs(np.asarray(got, np.float64) - want).max() <= tolerance * np.abs(want).max()


# ---- the models ----------------------------------------------------------------------------------


def test_logits_activations_and_gradients_are_those_of_the_float64_model(rng, config):
    params, tokens = draw_params(config, rng), draw_tokens(config, rng)

    def run(params, tokens):
        logits, _ = forward(config, params, tokens)
        return logits, activation_rms(config, params, tokens), jax.grad(lambda p: mean_loss(config, p, tokens))(params)

    (logits, rms, grads), told = jax.jit(run)(params, tokens), []
    assert_close(logits, logits64(config, params, tokens, told), 2e-5)
    for index, name in enumerate(("attention", "residual")):
        of_layers = [
            np.concatenate([each[index] for each in told[i :: config.n_layers]]) for i in range(len(rms[name]))
        ]
        assert_close(rms[name], np.array([np.sqrt(np.mean(x**2)) for x in of_layers]), 2e-5)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), params)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda d, g: np.sum(d * np.float64(g)), direction, grads)))
    loss = lambda params: losses64(logits64(config, params, tokens[:, :-1]), tokens[:, 1:]).mean()
    numeric = slope64(loss, params, direction)
    scale = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(grads)))
    assert abs(numeric - slope) < 1e-4 * max(scale, abs(slope))
    assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grads))


def test_mean_decays_are_those_of_the_gates(rng):
    """With no weights, a head forgets at its bias's rate; layers of kinds without a gate have none."""
    config = model_config(
        **SIZES
        | EQUAL
        | dict(attention="softmax,heinsen", position="none", gate="head", gate_shortest=3, gate_longest=300),
        n_layers=4,
    )
    params = init_params(config, jax.random.key(0))
    gate = params["layers"]["layer_1"]["gate"]
    gate["kernel"] *= 0
    measure = jax.jit(functools.partial(mean_decays, config))
    decays = measure(params, draw_tokens(config, rng))
    assert list(decays) == [1, 3]
    for each in decays.values():
        np.testing.assert_allclose(-1 / np.log(each), [3, 30, 300], rtol=1e-4)
    gate["scale"] *= -1  # less than nothing is nothing
    assert all(map(np.all, (each == 1 for each in measure(params, draw_tokens(config, rng)).values())))


def test_mean_decays_average_what_tokens_leave(rng):
    config = model_config(**SIZES | EQUAL | dict(position="none", gate="head"), n_layers=1)
    params, tokens = init_params(config, jax.random.key(1)), draw_tokens(config, rng)
    gate = params["layers"]["gate"]
    gate["kernel"] = gate["kernel"] + 3 * rng.standard_normal(gate["kernel"].shape, np.float32)
    x = np.float64(params["embedding"])[tokens]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    kept = 1 / (1 + np.exp(-(x @ np.float64(gate["kernel"][0]) + np.float64(gate["bias"][0]))))
    decays = jax.jit(mean_decays, static_argnums=0)(config, params, tokens)
    np.testing.assert_allclose(decays[0], kept.mean((0, 1)), rtol=1e-5)


def test_pieces_and_steps_equal_the_whole(rng, config):
    """From nothing, and after a piece of 4 tokens: another piece, or token by token; none sees what comes later."""
    params, tokens = draw_params(config, rng), draw_tokens(config, rng)
    want = logits64(config, params, tokens)
    read = jax.jit(lambda params, tokens, state: forward(config, params, tokens, state))
    empty = init_model_state(config, B, capacity=T)
    first, middle = read(params, tokens[:, :4], empty)
    assert_close(first, want[:, :4], 2e-5)
    assert_close(read(params, tokens[:, 4:], middle)[0], want[:, 4:], 2e-5)
    for start, state in ((0, empty), (4, middle)):
        for t in range(start, T):
            logits, state = read(params, tokens[:, t : t + 1], state)
            assert_close(logits[:, 0], want[:, t], 3e-5)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, empty)


def test_each_kind_has_its_own_state():
    config = model_config(attention="heinsen,softmax,sigmoid,linear,window", n_layers=5, window=7)
    states = init_model_state(config, B, 5).attention
    assert list(map(type, states)) == [LogState, KVCache, KVCache, LinearState, KVCache] and config.has_cache
    assert states[1].k.shape[2] == 5 and states[4].k.shape[2] == 7
    assert not model_config(attention="window", window=7).has_cache
    real = model_config(value_domain="real")
    assert isinstance(init_model_state(real, B).attention[0], MeanState) and not real.has_cache


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
    tokens = Tokens(jnp.arange(9, dtype=jnp.int32)[None] + start, jnp.zeros((1, 9), jnp.int32), None, None)
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
        (dict(attention="window"), "model.attention = 'window' needs the number of tokens that each one sees"),
        (dict(attention="window", window=0), "model.window = 0: it must be at least 1"),
        (dict(sigmoid_alpha=float("nan")), "model.sigmoid_alpha = nan: it must be finite"),
        (dict(sigmoid_alpha=float("inf")), "model.sigmoid_alpha = inf: it must be finite"),
        (dict(sigmoid_bias="log_n"), "model.sigmoid_bias = 'log_n': expected a finite number, or -log_n"),
        (dict(sigmoid_bias="inf"), "model.sigmoid_bias = 'inf'"),
        (dict(value_domain="complex"), "model.value_domain = 'complex': choose log, real"),
        (dict(value_domain="real", attention="linear"), "model.attention = 'linear' has none: set it to log"),
        (dict(output="relu"), "model.output = 'relu': choose none, norm, gate"),
        (
            dict(signed_features=True, attention="softmax"),
            "of heinsen and linear attention, of which model.attention =",
        ),
        (dict(block="llama"), "model.block = 'llama': choose heinsen, gpt2"),
        (dict(position="sinus"), "model.position = 'sinus': choose recurrent, learned, rotary, none"),
        (dict(position="learned"), "model.n_positions = None: learned positions need their number"),
        (dict(position="learned", n_positions=0), "model.n_positions = 0: it must be at least 1"),
        (dict(position="rotary"), "model.attention = 'heinsen' must have some"),
        (dict(position="rotary", attention="sigmoid", d_key=5), "model.d_key = 5 be even"),
        (dict(objective="denoise"), "model.objective = 'denoise': choose next_token, masked"),
        (
            dict(objective="masked", gate="head", implementation="scan"),
            "model.implementation = 'scan': a forget gate in a masked model is computed in chunks; set it to chunked",
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


@pytest.mark.parametrize("name, splits", [("hybrid", False), ("real", False), ("gpt2", False), (None, True)])
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


NAMES = ["gpt2", "sigmoid", "window", "linear", "real", "masked"]
ON_FOUR_DEVICES = """
import jax, numpy as np
from heinsen.models.masking import mask_tokens
from heinsen.models import init_params, masked_loss, mean_loss
from heinsen.parallel import MeshConfig, make_mesh, split_batch
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import abstract_train_state
from tests.models import model_config
from tests.runs import run_config
from tests.test_kinds import NAMES, VARIANTS

for name in NAMES:
    model = model_config(implementation="scan", **VARIANTS.get(name, {"objective": "masked", "document_token": 3}))
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
    of_layer = (6 if model.block == "gpt2" else 4) + bool(model.convolution) + 2 * (model.output == "gate")
    of_gates = 3 * sum(name in ("heinsen", "linear") for name in model.pattern) * (model.gate == "head")
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
