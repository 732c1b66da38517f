"""Everything runs where a program has set stricter promotion of ranks and dtypes for its own arithmetic."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
import heinsen.linen
from heinsen.models import next_token_losses
from heinsen.ops.api import attend_both_ways
from heinsen.ops.delta import delta_rule
from heinsen.parallel import make_mesh
from heinsen.training.data import make_microbatches, rows_by_microbatch
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import init_train_state, make_train_step
from tests.runs import run_config

B, T, K = 2, 11, 4
GATE = {"log_decay": -jnp.ones((B, T))}
DOCUMENTS = {"segment_ids": jnp.asarray([0] * 5 + [1] * 6)}
CASES = {
    "log values": (heinsen.log_attention, GATE),
    "all keys of documents": (heinsen.attention, DOCUMENTS | {"causal": False}),
    "spread": (lambda q, k, v: heinsen.attention(q, 300 * k, v), {}),
    "scan": (heinsen.log_attention, {"implementation": "scan"}),
    "linear": (heinsen.linear_attention, GATE),
    "sigmoid": (heinsen.sigmoid_attention, {}),
    "both ways": (attend_both_ways, GATE | {"log_decay_after": -jnp.ones((B, T)), "signed": True}),
    "delta rule": (lambda *args: delta_rule(*args, jnp.full((B, T), 0.5), **GATE)[0], {}),
}


@contextlib.contextmanager
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_gradients(rng, name):
    function, options = CASES[name]
    args = [jnp.asarray(rng.normal(size=(B, T, K)), jnp.bfloat16) for _ in range(3)]
    # Rules of derivatives are traced after the function where it was jitted or is computed again.
    total = jax.checkpoint(jax.jit(lambda *args: function(*args, **options).astype(jnp.float32).sum()))
    expected = jax.grad(total, (0, 1, 2))(*args)
    jax.clear_caches()
    with strict():
        found = jax.grad(total, (0, 1, 2))(*args)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_states(rng):
    q, k, v = (jnp.asarray(rng.normal(size=(B, K)), jnp.float32) for _ in range(3))
    with strict():
        state = heinsen.init_state((B,), K, K)
        state = heinsen.update_state(state, k, v, log_decay=-jnp.ones(B))
        y, state = heinsen.extend_context(heinsen.merge_states(state, state), k, v, q[:, None])
        assert y.shape == (B, 1, K) and heinsen.query_state(state, q).shape == (B, K)
        qkv = [x[:, None].astype(jnp.bfloat16) for x in (q, k, v)]
        assert heinsen.sigmoid_attention_cached(*qkv, jnp.ones(B, jnp.int32), first=0).shape == (B, 1, K)
        state = heinsen.init_linear_state((B,), K, K)
        assert heinsen.linear_attention(*qkv, state=state, return_state=True)[0].shape == (B, 1, K)


def test_a_layer(rng):
    layer, x = heinsen.linen.Attention(8, 2, n_kv_heads=1), jnp.asarray(rng.normal(size=(B, T, 8)), jnp.bfloat16)
    with strict():
        (y, _), _ = layer.init_with_output(jax.random.key(0), x, lengths=jnp.full(B, T), method="read")
    assert y.shape == x.shape and y.dtype == jnp.float32


ADDITIONS = dict(forget_gate="head", convolution=4, output_gate=True)
MODELS = {
    "heinsen": ADDITIONS,
    "masked": ADDITIONS | {"objective": "masked", "implementation": None},
    "delta": ADDITIONS | {"attention": "delta"},
    "softmax": {"attention": "softmax", "position": "rotary"},
    "softmax, forget gate": {"attention": "softmax", "position": "none", "forget_gate": "head"},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step(name):
    fields = {f"model__{field}": value for field, value in MODELS[name].items()}
    config = run_config(Path("data"), optimizer__name="muon", accumulation_steps=2, model__dtype="bfloat16", **fields)
    model, mesh, optimizer = config.model, make_mesh(), make_optimizer(config.optimizer, config.total_steps)
    windows = np.zeros((config.batch_size, 9), np.int32)
    with strict():
        state = init_train_state(model, optimizer, 0, mesh)
        batches = make_microbatches(config, windows, 0, rows_by_microbatch(config, mesh))
        state, metrics = make_train_step(model, optimizer, mesh)(state, batches)
        if model.causal:
            assert next_token_losses(model, state.params, windows).shape == (len(windows), 8)
    assert np.isfinite(metrics["loss"])
