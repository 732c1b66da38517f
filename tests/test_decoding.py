"""Generation: the recurrent form against the parallel one, and draws against exact probabilities."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from heinsen import decoding
from heinsen.decoding import Sampling, decode_step, generate, prefill, sample
from heinsen.model import forward, init_model_state, init_params
from tests.models import model_config

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.usefixtures("compile_cache")

MODEL = model_config()
GREEDY = Sampling(temperature=0.0)
full_forward = jax.jit(forward, static_argnums=0)


@pytest.fixture
def params(rng):
    """A model with opinions: logits with a standard deviation of about 2, lowest for the token just read."""

    def draw(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name.endswith("scale"):
            return jnp.full(x.shape, -1.0 if name == "norm/scale" else 1.0, x.dtype)
        size = 1 / math.sqrt(x.shape[-2]) if name.endswith("kernel") else 0.4
        return jnp.asarray(size * rng.standard_normal(x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0))))


def draw_tokens(rng, *shape: int) -> jax.Array:
    return jnp.asarray(rng.integers(0, MODEL.vocab_size, shape), jnp.int32)


# ---- prefill and steps -----------------------------------------------------------------------


@pytest.mark.parametrize("n_prompt", [1, 13])
def test_prefill_and_steps_equal_the_forward_pass_at_every_position(rng, params, n_prompt):
    tokens = draw_tokens(rng, 2, 24)
    expected, end = full_forward(MODEL, params, tokens)
    assert np.std(expected) > 1
    logits, state = prefill(MODEL, params, tokens[:, :n_prompt])
    for position in range(n_prompt - 1, 24):
        if position >= n_prompt:
            logits, state = decode_step(MODEL, params, tokens[:, position], state)
        np.testing.assert_allclose(logits, expected[:, position], atol=1e-4, err_msg=f"position {position}")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state, end)


def test_a_prompt_read_in_pieces_equals_one_read_at_once(rng, params, monkeypatch):
    tokens = draw_tokens(rng, 2, 13)
    read, lengths = decoding._prefill_piece, []
    monkeypatch.setattr(decoding, "_prefill_piece", lambda *args: (lengths.append(args[2].shape[1]), read(*args))[1])
    expected, expected_state = prefill(MODEL, params, tokens)
    monkeypatch.setattr(decoding, "PREFILL_PIECE", 5)
    logits, state = prefill(MODEL, params, tokens)
    assert lengths == [13, 5, 5, 3]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state, expected_state)
    # The same by hand: the state of an earlier call.
    _, state = prefill(MODEL, params, tokens[:, :10])
    assert lengths[4:] == [5, 5]
    logits, _ = prefill(MODEL, params, tokens[:, 10:], state)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    without, _ = prefill(MODEL, params, tokens[:, 10:])
    assert np.abs(without - expected).max() > 0.1, "what came before matters"


def test_state_keeps_its_size_and_the_one_given_is_donated(rng, params):
    sizes = lambda state: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
    tokens = draw_tokens(rng, 2, 13)
    _, state = prefill(MODEL, params, tokens)
    assert sizes(state) == sizes(init_model_state(MODEL, 2))
    for position in range(13):
        given = state
        _, state = decode_step(MODEL, params, tokens[:, position], state)
        assert sizes(state) == sizes(given)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, params)))


def test_an_empty_prompt_is_refused(params):
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        prefill(MODEL, params, jnp.zeros((1, 0), jnp.int32))
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        next(generate(MODEL, params, np.array([], np.int32), GREEDY, seed=0))


@pytest.mark.parametrize("bad", [-1, 257, 263])
def test_prompt_ids_outside_the_vocabulary_are_refused(params, bad):
    """The padded rows of the embedding are no tokens."""
    with pytest.raises(ValueError, match=rf"{bad}.*the vocabulary has 257"):
        next(generate(MODEL, params, np.array([65, bad]), GREEDY, seed=0))


# ---- generate --------------------------------------------------------------------------------


def test_greedy_generation_takes_the_likeliest_token_of_repeated_forward_passes(rng, params):
    # Rows past the vocabulary would win nearly always.
    params["embedding"] = params["embedding"].at[257:].multiply(8.0)
    prompt, written = np.asarray(draw_tokens(rng, 7)), []
    beaten = 0
    for _ in range(12):
        tokens = np.zeros((1, 19), np.int32)
        tokens[0, : 7 + len(written)] = [*prompt, *written]
        logits = np.asarray(full_forward(MODEL, params, tokens)[0][0, 6 + len(written)])
        best = np.sort(logits[:257])
        assert best[-1] - best[-2] > 1e-4, "a draw of two tokens proves nothing: rare, run again"
        beaten += logits[257:].max() > best[-1]
        written.append(int(np.argmax(logits[:257])))
    assert beaten > 0 and len(set(written)) > 1, written
    assert list(generate(MODEL, params, prompt, GREEDY, seed=0, max_tokens=12)) == written


def test_draws_depend_on_the_seed_and_greedy_ones_do_not(rng, params):
    prompt = np.asarray(draw_tokens(rng, 7))
    write = lambda sampling, seed: list(generate(MODEL, params, prompt, sampling, seed, max_tokens=20))
    assert write(Sampling(), 1) == write(Sampling(), 1)
    assert write(Sampling(), 1) != write(Sampling(), 2)
    assert write(GREEDY, 1) == write(GREEDY, 2)
    assert write(Sampling(), 1) != write(GREEDY, 1)


def test_every_draw_of_a_text_has_its_own_randomness(rng, params):
    """A model that always says the same: all letters alike."""
    flat = jax.tree.map(jnp.zeros_like, params)
    written = list(generate(MODEL, flat, np.array([65]), Sampling(), seed=0, max_tokens=60))
    assert len(set(written)) > 40 and all(0 <= token < 257 for token in written)


def test_generation_without_end_is_lazy(rng, params):
    endless = generate(MODEL, params, np.array([65, 66, 67]), Sampling(), seed=0, max_tokens=None)
    first = list(itertools.islice(endless, 30))
    assert first == list(generate(MODEL, params, np.array([65, 66, 67]), Sampling(), seed=0, max_tokens=30))
    assert isinstance(next(endless), int)
    assert list(generate(MODEL, params, np.array([65]), Sampling(), seed=0, max_tokens=0)) == []


def test_generation_stops_before_the_stop_id(rng, params):
    prompt = np.asarray(draw_tokens(rng, 7))
    written = list(generate(MODEL, params, prompt, Sampling(), seed=0, max_tokens=20))
    stop_id = written[6]
    stopped = list(generate(MODEL, params, prompt, Sampling(), seed=0, max_tokens=20, stop_id=stop_id))
    assert stopped == written[: written.index(stop_id)]
    missing = next(token for token in range(257) if token not in written)
    assert list(generate(MODEL, params, prompt, Sampling(), 0, max_tokens=20, stop_id=missing)) == written


# ---- sampling --------------------------------------------------------------------------------

VOCAB, PADDED = 12, 16
DRAWS = 20_000


def exact_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """By the definition, in float64; raises unless the choice of kept tokens is clear."""
    logits = np.asarray(logits, np.float64) / sampling.temperature
    likeliest = np.argsort(-logits)
    kept = likeliest[: sampling.top_k or len(logits)]
    p = np.exp(logits[kept] - logits[kept[0]])
    p /= p.sum()
    reached = np.cumsum(p)
    if sampling.top_p < 1:
        assert np.abs(reached - sampling.top_p).min() > 1e-4
        kept = kept[: np.searchsorted(reached, sampling.top_p) + 1]
    out = np.zeros(len(logits))
    out[kept] = p[: len(kept)] / p[: len(kept)].sum()
    return out


def count_draws(rng, logits: np.ndarray, sampling: Sampling, n_draws: int = DRAWS) -> np.ndarray:
    """How often each token is drawn; the ids past the vocabulary have by far the largest logits."""
    padded = np.concatenate([logits, np.full(PADDED - VOCAB, 50.0)]).astype(np.float32)
    key = jax.random.key(int(rng.integers(2**31)))
    drawn = sample(key, jnp.broadcast_to(padded, (n_draws, PADDED)), sampling, VOCAB)
    assert drawn.shape == (n_draws,)
    counts = np.bincount(drawn, minlength=VOCAB)
    assert len(counts) == VOCAB, "an id past the vocabulary"
    return counts


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=3.0),
        Sampling(top_k=1),
        Sampling(top_k=4),
        Sampling(top_k=VOCAB),
        Sampling(top_k=1000),
        Sampling(top_p=0.7),
        Sampling(top_p=0.95),
        Sampling(top_p=1e-6),
        Sampling(temperature=1.5, top_k=7, top_p=0.8),
        Sampling(temperature=0.3, top_p=0.9),
    ],
    ids=str,
)
def test_draws_have_the_exact_probabilities(rng, sampling):
    while True:
        logits = 1.5 * rng.standard_normal(VOCAB)
        try:
            expected = exact_probabilities(logits, sampling)
            break
        except AssertionError:
            continue
    counts = count_draws(rng, logits, sampling)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    if sampling.top_k or sampling.top_p < 1:
        assert 1 <= kept.sum() <= min(sampling.top_k or VOCAB, VOCAB)
    likely = expected * DRAWS >= 5  # chi-square needs this many
    observed = np.append(counts[likely], counts[kept & ~likely].sum())
    wanted = np.append(expected[likely], expected[kept & ~likely].sum()) * DRAWS
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert scipy.stats.chisquare(observed, wanted).pvalue > 1e-7


def test_each_row_is_drawn_by_its_own_logits(rng):
    logits = np.full((5, PADDED), -100.0, np.float32)
    wanted = rng.permutation(VOCAB)[:5]
    logits[np.arange(5), wanted] = 100.0
    for sampling in (Sampling(), GREEDY, Sampling(top_k=2), Sampling(top_p=0.5)):
        np.testing.assert_array_equal(sample(jax.random.key(0), jnp.asarray(logits), sampling, VOCAB), wanted)


@pytest.mark.parametrize("sampling", [Sampling(top_k=4), Sampling(top_p=0.35)], ids=str)
def test_tokens_that_are_equally_likely_do_not_lift_the_limit(rng, sampling):
    """Of ten alike, four are the fewest that reach 0.35; which four is open."""
    logits = np.zeros(VOCAB)
    logits[:2] = -50.0
    assert np.count_nonzero(count_draws(rng, logits, sampling)) == 4


@pytest.mark.parametrize("temperature", [1e-5, 1e-38])
def test_a_tiny_temperature_takes_the_likeliest_token(rng, temperature):
    logits = rng.permutation(np.linspace(-3.0, 8.0, VOCAB))
    counts = count_draws(rng, logits, Sampling(temperature=temperature), n_draws=50)
    assert counts[np.argmax(logits)] == 50


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", -0.5),
        ("top_p", math.nan),
    ],
)
def test_bad_values_name_their_field(field, value):
    with pytest.raises(ValueError, match=rf"{field} = {value}: it must"):
        Sampling(**{field: value})
