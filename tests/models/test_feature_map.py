"""Feature maps: the four kinds against NumPy, what they begin as, and one model in parallel, in pieces and in steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen import attention, linear_attention
from heinsen.contrib.onnx.folder import check_exportable
from heinsen.export import ExportError
from heinsen.export.huggingface import huggingface_tensors
from heinsen.models import forward, init_model_state, init_params, state_size
from heinsen.models.feature_map import LOG_FEATURES, FeatureMap
from tests.model_configs import model_config
from tests.models.model64 import SIZES, B, T, assert_close, draw_params, draw_tokens, log_features64, logits64

GATED = dict(value_domain="real", position="rotary", forget_gate="head", document_token=3)


def draw_qk(rng):
    return (jnp.asarray(rng.standard_normal((2, 3, 6, 4)), jnp.float32) for _ in range(2))


@pytest.mark.parametrize("n_features", [4, 8, 14])
def test_a_map_begins_as_directions_and_their_negatives(rng, n_features):
    q, k = draw_qk(rng)
    module = FeatureMap("exponential", n_features, "float32")
    (a, b), params = module.init_with_output(jax.random.key(1), q, k)
    half = n_features // 2
    for x, exponents in ((q, a), (k, b)):
        np.testing.assert_array_equal(exponents[..., :half], -exponents[..., half:])
        if n_features >= 8:
            np.testing.assert_array_equal(exponents[..., :4], x)
    kernel = params["params"]["kernel"]
    np.testing.assert_array_equal(kernel[0], kernel[1])  # a feature pairs a direction of queries with the same of keys
    np.testing.assert_allclose(np.linalg.norm(kernel, axis=-2), 1, rtol=1e-6)
    assert np.linalg.matrix_rank(kernel[0, 0]) == min(half, 4)


@pytest.mark.parametrize("name", LOG_FEATURES)
def test_each_kind_is_the_logarithm_of_its_features_and_has_gradients(rng, name):
    """Of any size: nothing overflows, and elu + 1 is what linear attention has."""
    log_features, z = LOG_FEATURES[name], 3 * rng.standard_normal((5, 8))
    want = log_features64(dataclasses.make_dataclass("Config", ["feature_map"])(name), z)
    assert_close(log_features(jnp.float32(z)), want, 1e-6)
    slopes = jax.grad(lambda z: jnp.sum(log_features(z)[..., 0]))(jnp.float32(100 * z))
    assert np.isfinite(slopes).all() and np.any(slopes != 0)
    if name == "elu":
        q, k = draw_qk(rng)
        np.testing.assert_allclose(
            attention(log_features(q), log_features(k), k), linear_attention(q, k, k), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "name", ["exponential", *(pytest.param(x, marks=pytest.mark.long) for x in [*LOG_FEATURES][1:])]
)
def test_parallel_prefill_and_steps_agree_in_float64(rng, name):
    with jax.enable_x64(True):
        config = model_config(**SIZES | GATED | dict(feature_map=name, d_features=6))
        params = jax.tree.map(np.float64, draw_params(config, rng))
        config = dataclasses.replace(config, dtype="float64")
        tokens, state = draw_tokens(config, rng), init_model_state(config, B)
        read = jax.jit(lambda tokens, state: forward(config, params, tokens, state))
        want = logits64(config, params, tokens)
        assert_close(read(tokens, None)[0], want, 1e-12)
        assert_close(read(tokens[:, :5], state)[0], want[:, :5], 1e-12)
        for t in range(T):
            logits, state = read(tokens[:, t : t + 1], state)
            assert_close(logits[:, 0], want[:, t], 1e-12)


def test_a_model_without_a_map_is_as_before_and_one_with_it_has_a_larger_state():
    changes = dict(value_domain="real", position="none")
    config = model_config(**changes, feature_map="exponential")
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert params["layers"].pop("feature_map")["kernel"].shape == (2, 2, 2, 4, 8)
    without = model_config(**changes)
    assert params == jax.eval_shape(lambda: init_params(without, jax.random.key(0)))
    assert [state_size(c, 9) for c in (without, config)] == [2 * 2 * n_features * 5 for n_features in (4, 8)]


def test_exports_for_other_libraries_are_refused():
    config = model_config(value_domain="real", feature_map="softmax", position="none")
    for check, end in (
        (huggingface_tensors, "without a feature map; export it without --format=hf"),
        (check_exportable, "needs none; export it without --format=onnx"),
    ):
        with pytest.raises(ExportError, match=f"model.feature_map = 'softmax': .*{end}"):
            check(config)
