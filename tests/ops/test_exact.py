"""The exact weights of a chunk, and heads that take them beside heads that do not."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen.ops import chunk, decay, exact, schedule
from heinsen.ops.values import LOG_DOMAIN
from tests.ops.common import run_fast_form, spoil_exact_form, user_jit
from tests.ops.truth import assert_close, assert_gradients_close, draw_case, truth

FEATURES = 5


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("sigma, offset", [(1, 0), (64, 0), (2, 1e4)])
@pytest.mark.parametrize(
    "n_tokens, forgets",
    [(64, True), *(pytest.param(*x, marks=pytest.mark.long) for x in [(1, False), (7, True), (12, True), (32, False)])],
)
def test_exact_weights_are_the_definition_at_every_dynamic_range(rng, n_tokens, forgets, sigma, offset, both_ways):
    draw = lambda *shape: np.float32(sigma * rng.standard_normal(shape))
    q, k, *cs = draw(n_tokens, FEATURES), draw(n_tokens, FEATURES), *draw(1 + both_ways, FEATURES)
    k = k + np.float32(offset * rng.standard_normal((n_tokens, 1)))
    log_decay = lambda: -jnp.float32(5 * rng.random(n_tokens)) if forgets else None
    where = lambda: jnp.asarray(rng.random(n_tokens) < 0.1) if forgets else None
    decays = [decay.chunk_decay(where(), log_decay(), n_tokens, q.dtype)]
    if both_ways:
        decays.append(decay.chunk_decay_after(where(), where(), log_decay(), n_tokens, q.dtype))
    weigh = lambda q, k: chunk.exact_weights(q, k, decays, list(map(jnp.asarray, cs)))
    weights, pull, (r, _) = jax.jit(lambda q, k: jax.vjp(weigh, q, k, has_aux=True))(q, k)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), weights)

    q, k, r = (np.float64(x) for x in (q, k, r))
    of_keys = np.max([np.float64(each.keys_at_queries) for each in decays], axis=0)
    parts = [
        np.exp(q + c + np.float64(x.before_at_queries)[:, None] - r[:, None]) for c, x in zip(cs, decays, strict=True)
    ]
    of_outside = np.concatenate(parts, axis=-1)
    of_features = np.exp(q[:, None, :] + k[None, :, :] + of_keys[..., None] - r[:, None, None])
    decays_that_count = of_keys[of_features.max(axis=-1) > 1e-7]  # large ones where the largest key is far behind
    rounding = 3e-7 * max(10, np.abs(q).max(), -decays_that_count.min(initial=0))  # of exponents of that size
    posterior = of_features * np.float64(cotangents.inside)[..., None]
    dq = posterior.sum(axis=1)
    dq += (of_outside * np.float64(cotangents.outside)).reshape(n_tokens, -1, FEATURES).sum(axis=1)
    want = of_outside, of_features.sum(axis=-1), dq, posterior.sum(axis=0)
    for got, wanted in zip((*weights, *jax.jit(pull)(cotangents)), want, strict=True):
        np.testing.assert_allclose(got, wanted, atol=rounding * max(1, np.abs(wanted).max()))
    assert np.all(weights.inside.sum(axis=-1) + weights.outside.sum(axis=-1) >= 0.9), "the largest is 1"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_mixtures_of_heads_that_spread_and_heads_that_do_not(seed, rng):
    """Every head has its own range of queries, keys and values, its own decays, and documents."""
    batch, n_tokens = (2, 6), 300
    scale = lambda *choices: rng.choice(choices, (*batch, 1, 1))
    normal = lambda n: rng.standard_normal((*batch, n_tokens, n))
    q, k = scale(0.3, 1, 8, 64) * normal(FEATURES), scale(0.3, 1, 8, 64) * normal(FEATURES)
    k += scale(0, 0, 20, 1e3) * normal(1)
    log_v, g = scale(0.3, 1, 1, 64) * normal(3), normal(3)
    decays = -np.exp(rng.uniform(np.log(1e-6), np.log(50), (*batch, n_tokens)))
    ids = jnp.asarray(np.cumsum(rng.random((2, 1, n_tokens)) < 0.01, axis=-1), jnp.int32)
    arrays = [np.float32(x) for x in (q, k, log_v, decays)]

    def run(implementation, dtype):
        def attend(q, k, log_v, decays):
            return heinsen.log_attention(q, k, log_v, log_decay=decays, segment_ids=ids, implementation=implementation)

        @jax.jit
        def with_gradients(g, *arrays):
            y, pull = jax.vjp(attend, *arrays)
            return y, *pull(g)

        with jax.enable_x64(dtype == np.float64):
            return [np.asarray(x) for x in with_gradients(*(x.astype(dtype) for x in (g, *arrays)))]

    got, want = run("chunked", np.float32), run("reference", np.float64)
    np.testing.assert_allclose(got[0], want[0], atol=2e-4)
    for x, wanted in zip(got[1:], want[1:], strict=True):
        assert np.abs(x - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_a_head_that_spreads_leaves_the_others_to_the_fast_form(rng):
    heads = 3 * exact.MAX_ROWS
    q, k, v = (np.float32(rng.standard_normal((heads, 64, FEATURES))) for _ in range(3))
    wide = k.copy()
    wide[0] = 1000 * np.sort(k[0], axis=0)  # of each feature the largest key comes last
    run = jax.jit(functools.partial(heinsen.attention, implementation="chunked"))
    np.testing.assert_array_equal(run(q, wide, v)[exact.MAX_ROWS :], run(q, k, v)[exact.MAX_ROWS :])
    fast, lost = jax.jit(functools.partial(run_fast_form, signed=True))(q, wide, v)
    assert lost and not np.allclose(fast[0], run(q, wide, v)[0], atol=0.1)


@pytest.mark.parametrize("state", [False, True])
def test_only_the_chunks_in_which_values_rise_are_read_in_logarithms(rng, state, monkeypatch):
    """Outputs and gradients are exact although NaN takes the place of rows that are computed again as a whole."""
    case = draw_case(rng, (2, 3), n_queries=128, state=state)._replace(log_decay=-np.float32(rng.random((2, 3, 128))))
    case.values[:, :, 40:] += 100.0
    form = schedule.InOrder(LOG_DOMAIN, schedule.Split(2, 2, 32), "cpu")

    @jax.jit
    def run(q, k, values, log_decay):
        first = LOG_DOMAIN.empty_state(k, values)
        return form.forward(q, chunk.Keys(k, values, None, log_decay[..., None]), first, save_residuals=True)

    _, residuals, lost = run(case.q, case.k, case.values, case.log_decay)
    assert not np.any(lost)
    assert np.moveaxis(residuals.lost_chunks, 0, 2).reshape(6, 4).tolist() == 6 * [[False, True, False, False]]

    spoil_exact_form(monkeypatch, schedule.InOrder)
    cotangents = [np.float32(rng.standard_normal(case.values.shape)), np.zeros((2, 3, 4, 3)), np.zeros((2, 3, 4))]
    want = truth(case, False, cotangents)
    arrays = [case.q, case.k, case.values, case.log_decay, *(case.state or ())]

    def attend(q, k, values, log_decay, *state):
        initial = heinsen.LogState(*state) if state else None
        return heinsen.log_attention(q, k, values, log_decay=log_decay, state=initial, implementation="chunked")

    y, pull = jax.jit(lambda *arrays: jax.vjp(attend, *arrays))(*arrays)
    assert_close(y, want.y)
    assert_gradients_close(jax.jit(pull)(cotangents[0]), want.gradients, case, False, 5e-5)  # logs of 100 are rounded


def test_rows_whose_sums_lose_values_are_read_again_from_the_beginning(rng):
    """Queries read one key feature alone, whose values are far below the other's: only the last sum holds them."""
    case = draw_case(rng, (2,), n_queries=128, d_key=2)
    case.k[:, ::2, 1] -= 100.0
    case.k[:, 1::2, 0] -= 100.0
    case.values[:, 1::2] += 100.0
    case.values[:, 96::2] += 100.0
    case.q[..., 1] -= 300.0
    args = case.q, case.k, case.values
    want = truth(case, False, [np.ones_like(case.values), np.zeros((2, 2, 3)), np.zeros((2, 2))])
    y, pull = jax.jit(lambda *args: jax.vjp(heinsen.log_attention, *args))(*args)
    assert_close(y, want.y)
    assert_gradients_close((*jax.jit(pull)(np.ones_like(case.values)), None), want.gradients, case, False, 5e-5)


@pytest.mark.parametrize("n_rows", [1, exact.MAX_ROWS, 2 * exact.MAX_ROWS])
def test_rows_that_lost_nothing_take_no_time(n_rows):
    """XLA moves what is the same in each turn of a loop to before it; a block of all rows must not be."""
    compute = lambda rows, x, out: rows.write(out, jnp.cos(jnp.linalg.norm(rows.take(x), axis=-1, keepdims=True)))
    run = lambda lost, x: exact.for_rows(lost, lambda rows, out: compute(rows, x, out), x[..., :1], exact.MAX_ROWS)
    shapes = jax.ShapeDtypeStruct((n_rows,), bool), jax.ShapeDtypeStruct((n_rows, 64), jnp.float32)
    loops, entry = user_jit(run).lower(*shapes).compile().as_text().split("\nENTRY ")
    bodies = {block.split(" ")[0]: block for block in re.split(r"\n(?=%)", loops)}

    def reached(block):
        called = set(re.findall(r"(?:calls|to_apply)=(%[\w.-]+)", block))
        return [block, *(text for name in called for text in reached(bodies[name]))]

    assert not any(" cosine(" in block for block in reached(entry))
    assert any(" cosine(" in block for block in bodies.values())
