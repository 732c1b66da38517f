"""The layer to import, in Linen and in NNX: the models' attention, in pieces too, and with grouped keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import heinsen.linen
import heinsen.nnx
from heinsen.models.language_model import GPT2Layer
from heinsen.models.state import LayerState, locate_tokens
from heinsen.ops import api, reference
from tests.model_configs import model_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

B, T, D, H = 2, 13, 12, 4
OPTIONS = {
    "grouped": dict(n_kv_heads=2, convolution=3, forget_gate_longest=20.0),
    "plain, real values": dict(forget_gate=False, convolution=0, output_gate=False, value_domain="real", d_head=5),
}


@pytest.fixture(autouse=True)
def compiles_soon(monkeypatch):
    monkeypatch.setitem(api.IMPLEMENTATIONS, "chunked", reference.attend)


@pytest.fixture(params=OPTIONS)
def layer(request):
    return heinsen.linen.Attention(D, H, **OPTIONS[request.param])


def apply(layer, params, *arguments, method=None):
    return jax.jit(lambda *arguments: layer.apply(*arguments, method=method))(params, *arguments)


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def draw_params(rng, layer):
    """Parameters of which none is as initialized."""
    shapes = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 1, D)))
    return jax.tree.map(lambda x: 0.5 * draw(rng, *x.shape), shapes)


def assert_close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)


@pytest.mark.parametrize("options", [{}, dict(output_gate=False, value_domain="real")])
def test_it_is_the_attention_of_the_models(options, rng):
    """GPT-2's block adds it to the residual stream, and then an MLP, which is 0 here."""
    config = model_config(
        d_model=D, n_heads=H, d_key=3, d_value=3, n_layers=1, block="gpt2", position="none", forget_gate="head",
        convolution=4, document_token=0, **{"output_gate": True} | options,
    )  # fmt: skip
    x, tokens = draw(rng, B, T, D), jnp.asarray(rng.integers(0, 4, (B, T)))
    layer, nothing = GPT2Layer(config, config.mixers[0]), LayerState(None, None)
    arguments = x, nothing, locate_tokens(config, tokens)[1], False
    shapes = jax.eval_shape(lambda: layer.init(jax.random.key(0), *arguments))["params"]
    params = jax.tree.map(lambda x: 0.5 * draw(rng, *x.shape), shapes)
    params["mlp_out"] = jax.tree.map(jnp.zeros_like, params["mlp_out"])
    want = jax.jit(lambda params: layer.apply({"params": params}, *arguments)[0] - x)(params)

    norm, out = params.pop("norm"), params.pop("attention_out")
    own = {name: group for name, group in params.items() if not name.startswith("mlp")} | {"out": out}
    centered = x - x.mean(-1, keepdims=True)
    normed = centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]
    attention = heinsen.linen.Attention(D, H, **options)
    assert_close(apply(attention, {"params": own}, normed, jnp.cumsum(tokens == 0, axis=1)), want)


def test_a_text_in_pieces_has_the_outputs_of_the_whole(layer, rng):
    params, x = draw_params(rng, layer), draw(rng, B, T, D)
    whole, state, outputs = apply(layer, params, x), layer.init_state(B), []
    for piece in jnp.split(x, [1, 6, 7, 8], axis=1):
        y, state = apply(layer, params, piece, state, method="read")
        outputs.append(y)
    assert_close(jnp.concatenate(outputs, axis=1), whole)
    assert_close(apply(layer, params, x, method="read"), (whole, state))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_keeps_its_shapes_and_dtypes(dtype, layer):
    layer = layer.clone(dtype=dtype)
    for n_tokens in (1, T):
        x = jnp.zeros((B, n_tokens, D), dtype)
        read = lambda x: layer.init_with_output(jax.random.key(0), x, layer.init_state(B), method="read")
        y, state = jax.eval_shape(read, x)[0]
        assert y.dtype == dtype and state == jax.eval_shape(lambda: layer.init_state(B))


def test_padding_leaves_the_state_of_each_row(layer, rng):
    params, x, lengths = draw_params(rng, layer), draw(rng, B, T, D), [2, T]
    y, state = apply(layer, params, x, None, jnp.asarray(lengths), method="read")
    for row, n in enumerate(lengths):
        want = apply(layer, params, x[row : row + 1, :n], method="read")
        assert_close((y[row : row + 1, :n], jax.tree.map(lambda x, row=row: x[row : row + 1], state)), want)


def test_documents_are_read_as_if_alone(layer, rng):
    params, x = draw_params(rng, layer), draw(rng, 1, T, D)
    alone = [apply(layer, params, document) for document in jnp.split(x, [4, 5], axis=1)]
    ids = jnp.asarray([[5] * 4 + [2] + [5] * 8])
    assert_close(apply(layer, params, x, ids), jnp.concatenate(alone, axis=1))


@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_grouped_keys_and_values_are_heads_that_are_repeated(n_kv_heads, rng):
    grouped, whole = heinsen.linen.Attention(D, H, n_kv_heads), heinsen.linen.Attention(D, H)
    params, x, k = draw_params(rng, grouped)["params"], draw(rng, B, T, D), D // H

    def repeat(features):
        """Features [..., a group's queries, key and value] as [heads, ..., query, key and value]."""
        *queries, key, value = jnp.split(features, H // n_kv_heads + 2, axis=-1)
        return jnp.stack([jnp.concatenate([query, key, value], axis=-1) for query in queries])

    each = lambda x: jnp.concatenate([repeat(part) for part in x])  # [groups, ...] -> [heads, ...]
    columns = lambda w: jnp.moveaxis(each(jnp.stack(jnp.split(w, n_kv_heads, axis=-1))), 0, -2)
    w1 = {name: columns(w).reshape(*w.shape[:-1], 3 * H * k) for name, w in params["w1"].items()}
    repeated = params | {"w1": w1, "convolution": {"taps": each(params["convolution"]["taps"])}}
    assert_close(apply(grouped, {"params": params}, x), apply(whole, {"params": repeated}, x))


def test_the_module_of_nnx_is_that_of_linen(layer, rng):
    options = {name: getattr(layer, name) for name in layer.__annotations__ if name not in ("parent", "name")}
    module = heinsen.nnx.Attention(**options, rngs=nnx.Rngs(3))
    own = {"params": nnx.to_pure_dict(nnx.state(module))}
    assert_close(own, layer.init(nnx.Rngs(3).params(), jnp.zeros((1, 1, D))))
    x, ids = draw(rng, B, T, D), jnp.asarray(rng.integers(0, 2, (B, T)))
    assert_close(nnx.jit(lambda module, x: module(x, ids))(module, x), apply(layer, own, x, ids))
    lengths = jnp.asarray([1, T])
    found = nnx.jit(lambda module, x: module.read(x, module.init_state(B), lengths))(module, x)
    assert_close(found, apply(layer, own, x, None, lengths, method="read"))

    @nnx.jit
    def step(module, optimizer):
        loss, grads = nnx.value_and_grad(lambda module: jnp.mean(module(x) ** 2))(module)
        optimizer.update(module, grads)
        return loss, nnx.to_pure_dict(grads)

    loss, grads = step(module, nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param))
    want = jax.jit(jax.grad(lambda variables: jnp.mean(layer.apply(variables, x) ** 2)))(own)
    assert_close({"params": grads}, want)
    after = apply(layer, {"params": nnx.to_pure_dict(nnx.state(module))}, x)
    assert jnp.mean(after**2) < loss


def test_layers_of_nnx_can_be_stacked_and_scanned(rng):
    make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: heinsen.nnx.Attention(D, H, rngs=rngs)))
    stack, x = make(nnx.Rngs(0)), draw(rng, B, T, D)
    run = nnx.scan(lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    want = x
    for i in range(2):
        params = jax.tree.map(lambda w, i=i: w[i], nnx.to_pure_dict(nnx.state(stack)))
        want = want + apply(heinsen.linen.Attention(D, H), {"params": params}, want)
    assert_close(run(x, stack), want)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(n_heads=5), "d_model = 12 does not divide into n_heads = 5: give d_head, too"),
        (dict(n_kv_heads=3), "n_kv_heads = 3 does not divide n_heads = 4"),
        (dict(n_heads="4"), "n_heads = '4': expected an integer"),
        (dict(d_head=2.5), "d_head = 2.5: expected an integer or None"),
        (dict(forget_gate="head"), "forget_gate = 'head': expected True or False"),
        (dict(convolution=1), "convolution = 1: one tap sees no other token"),
        (dict(value_domain="exp"), "value_domain = 'exp': choose log, real"),
        (dict(kv_heads=2), "got an unexpected keyword argument 'kv_heads'"),
    ],
)
def test_impossible_arguments_are_named(arguments, message):
    for build in (heinsen.linen.Attention, lambda **given: heinsen.nnx.Attention(**given, rngs=nnx.Rngs(0))):
        with pytest.raises((ValueError, TypeError), match=message):
            build(**dict(d_model=D, n_heads=H) | arguments)


@pytest.mark.wrong_types
def test_arrays_that_do_not_fit_are_named():
    layer = heinsen.nnx.Attention(D, H, rngs=nnx.Rngs(0))
    x = jnp.zeros((B, T, D))
    for wrong in (x[..., 1:], x[0], x[:, :0]):
        with pytest.raises(ValueError, match=r"x is \[.*\]: expected \[B, T, d_model = 12\] with T > 0"):
            layer(wrong)
    with pytest.raises(ValueError, match=r"segment_ids is \[13\]: expected \[2, 13\]"):
        layer(x, jnp.zeros(T, jnp.int32))
    with pytest.raises(ValueError, match=r"lengths is \[3\]: expected \[2\]"):
        layer.read(x, lengths=jnp.zeros(3, jnp.int32))
    other = heinsen.linen.Attention(D, H, value_domain="real")
    for state in (layer.init_state(3), other.init_state(B), (1, 2)):
        with pytest.raises(ValueError, match=r"state does not fit this layer and x \[2, 13, 12\]: expected arrays of"):
            layer.read(x, state)
