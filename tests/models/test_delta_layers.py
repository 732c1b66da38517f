"""Models with the gated delta rule: padding, zeros, and that no other kind has a beta."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.contrib.onnx import check_exportable
from heinsen.export.huggingface import huggingface_tensors
from heinsen.models import LanguageModel, abstract_params, init_model_state, mean_loss
from heinsen.models.mixers import MIXERS
from tests.model_configs import model_config
from tests.models.model64 import SIZES, B, T, draw_params, draw_tokens

CONFIG = model_config(**SIZES | dict(attention="delta", n_layers=1, forget_gate="head", convolution=2))


def test_padding_leaves_the_state_as_it_is(rng):
    """The padding of rows with tokens has ids of all kinds; a row of padding alone keeps every bit of its state."""
    params, tokens = draw_params(CONFIG, rng), draw_tokens(CONFIG, rng)
    read = jax.jit(
        lambda state, tokens, lengths: LanguageModel(CONFIG).apply({"params": params}, tokens, state, lengths)
    )
    _, before = read(init_model_state(CONFIG, B), tokens, np.array([T, T]))
    x, after = read(before, tokens, np.array([0, 3]))
    other_x, other = read(before, np.where(np.arange(T) < 3, tokens, 7), np.array([0, 3]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[0]), before.attention, after.attention)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), other.attention, after.attention)
    np.testing.assert_array_equal(x[1, :3], other_x[1, :3])
    _, alone = read(before, tokens[:, :3], np.array([3, 3]))
    for a, b in zip(after.attention, alone.attention, strict=True):
        np.testing.assert_allclose(a.memory[1], b.memory[1], atol=1e-5)
    assert np.any(after.attention[0].memory[1] != before.attention[0].memory[1])


def test_gradients_at_zero_queries_keys_and_values_are_finite(rng):
    params, tokens = draw_params(CONFIG, rng), draw_tokens(CONFIG, rng)
    params["layers"]["w1"] = jax.tree.map(np.zeros_like, params["layers"]["w1"])
    grads = jax.jit(jax.grad(lambda params: mean_loss(CONFIG, params, jnp.asarray(tokens))))(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_exports_are_refused():
    with pytest.raises(ValueError, match="not model.attention = 'delta' .* export it without --format=hf"):
        huggingface_tensors(CONFIG)
    pytest.importorskip("onnx", reason="pip install onnx")
    with pytest.raises(
        ValueError, match="model.attention = 'delta': one step in ONNX needs heinsen; export it without"
    ):
        check_exportable(CONFIG)


@pytest.mark.parametrize("kind", MIXERS)
def test_only_delta_layers_have_beta(kind):
    layers = abstract_params(model_config(attention=kind))["layers"]
    assert ("strength" in layers) == (kind == "delta") == MIXERS[kind](model_config()).takes_beta
