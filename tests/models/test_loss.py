"""The chunked loss against float64 NumPy on whole logits, and the memory that it saves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen.models import cross_entropy as loss
from heinsen.models import init_params, mean_loss, next_token_losses
from heinsen.models.cross_entropy import cross_entropy, token_losses, weighted_loss
from tests.models.test_model import SMALL

B, T, D, VOCAB = 3, 7, 5, 11


def losses64(x, embedding, targets):
    """(losses [B, T], softmax - one_hot [B, T, vocab]), with loops."""
    x, embedding = np.float64(x), np.float64(embedding)
    losses, dlogits = np.zeros(targets.shape), np.zeros((*targets.shape, len(embedding)))
    for index in np.ndindex(targets.shape):
        logits = embedding @ x[index]
        p = np.exp(logits - logits.max())
        losses[index] = np.log(p.sum()) + logits.max() - logits[targets[index]]
        dlogits[index] = p / p.sum()
        dlogits[index][targets[index]] -= 1
    return losses, dlogits


@pytest.fixture(params=[10**6, 2 * B * VOCAB, 1], ids=["one chunk", "2 tokens a chunk", "1 token a chunk"])
def chunks(request, monkeypatch):
    """How many logits may exist at once: T is no multiple of 2, so some chunks are padded."""
    monkeypatch.setattr(loss, "max_logits", lambda: request.param)


def draw(rng, scale):
    x, embedding = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, T, D), (VOCAB, D)))
    return scale * x, embedding, rng.integers(0, VOCAB, (B, T)), rng.random((B, T)).astype(np.float32)


@pytest.mark.parametrize("scale", [1, 100])
def test_losses_and_gradients_are_those_of_whole_logits_in_float64(rng, chunks, scale):
    x, embedding, targets, weights = draw(rng, scale)
    want, dlogits = losses64(x, embedding, targets)
    dlogits *= weights[..., None]
    # A logit is rounded to its size: its exponential, and a gradient with it, is off by as much.
    rounding = np.finfo(np.float32).eps * np.abs(x @ embedding.T).max()
    bar = max(1e-5, rounding)
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=0, atol=bar * np.abs(want).max())
    close(token_losses(x, embedding, targets, "float32"), want)

    f = lambda x, embedding, weights: 3 * weighted_loss(x, embedding, targets, weights, "float32")
    total, (dx, dembedding, dweights) = jax.jit(jax.value_and_grad(f, (0, 1, 2)))(x, embedding, weights)
    close(total, 3 * (weights * want).sum())
    close(dx, 3 * dlogits @ np.float64(embedding))
    close(dembedding, 3 * np.einsum("btv,btd->vd", dlogits, x))
    close(dweights, 3 * want)


def test_a_sure_and_right_prediction_has_small_gradients_in_bfloat16(rng, chunks):
    """p - 1 is taken before it is rounded: rounded first, p = 0.999 would be 1 and the gradient 0."""
    embedding = np.eye(VOCAB, D, dtype=np.float32)
    targets = rng.integers(0, D, (B, T))
    x = 8.0 * embedding[targets]
    _, dlogits = losses64(x, embedding, targets)
    dx = jax.grad(lambda x: weighted_loss(x, embedding, targets, jnp.ones((B, T)), "bfloat16"))(x)
    want = dlogits @ np.float64(embedding)
    np.testing.assert_allclose(dx, want, rtol=0, atol=2e-2 * np.abs(want).max())


def test_the_models_loss_is_the_mean_of_its_tokens_losses(rng):
    params = jax.jit(init_params, static_argnums=0)(SMALL, jax.random.key(0))
    tokens = rng.integers(0, SMALL.vocab_size, (6, T + 1))
    both = lambda params: (mean_loss(SMALL, params, tokens), next_token_losses(SMALL, params, tokens))
    mean, losses = jax.jit(both)(params)
    np.testing.assert_allclose(mean, losses.mean(), rtol=1e-6)


def test_no_logits_of_a_whole_batch_are_in_memory():
    """32 x 1024 tokens over 50,304 ids: whole float32 logits would take 6.6 GB."""
    x, embedding = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 1024, 768), (50304, 768)))
    targets, weights = (jax.ShapeDtypeStruct((32, 1024), dtype) for dtype in ("int32", "float32"))
    f = jax.value_and_grad(lambda *args: weighted_loss(*args, "float32"), (0, 1))
    memory = jax.jit(f).lower(x, embedding, targets, weights).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1e9


@pytest.mark.parametrize("scale", [1, 1e4])
def test_cross_entropy_is_the_negative_log_likelihood(rng, scale):
    logits = (scale * rng.standard_normal((2, 5, VOCAB))).astype(np.float32)
    targets = rng.integers(0, VOCAB, (2, 5))
    want = losses64(logits, np.eye(VOCAB), targets)[0]
    np.testing.assert_allclose(cross_entropy(logits, targets), want, rtol=1e-6, atol=1e-6 * scale)


def test_cross_entropy_counts_in_nats():
    np.testing.assert_allclose(cross_entropy(jnp.zeros((1, 8)), jnp.array([3])), np.log(8), rtol=1e-6)
