"""The forget gate: float32 against float64 at every size of decay and of exponents, and what it must never do.

tests/ops/test_implementations.py has the equations with decays, documents and states; test_sharded.py has meshes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import heinsen
from heinsen import LogState, MeanState, init_state, merge_states, update_state
from heinsen.ops import chunked, logarithms
from heinsen.ops.api import attend_both_ways
from heinsen.ops.decay import ChunkDecay
from heinsen.ops.running import from_running, take_step, to_running
from tests.ops.common import user_jit
from tests.ops.truth import draw_decays

FEATURES = 16


@functools.cache
def compiled(implementation, jit):
    def run(q, k, log_v, log_decay, g):
        attend = functools.partial(heinsen.log_attention, implementation=implementation)
        y, pull = jax.vjp(lambda q, k, log_v, g: attend(q, k, log_v, log_decay=g), q, k, log_v, log_decay)
        return y, *pull(g.astype(y.dtype))

    return jit(run)


def run(implementation, arrays, dtype, jit=jax.jit):
    with jax.enable_x64(dtype == np.float64):
        return [np.asarray(x) for x in compiled(implementation, jit)(*(x.astype(dtype) for x in arrays))]


EPSILON = 2.0**-24


def more_rounding(form, n_tokens, sigma):
    """(of log y, of the gradient by log decays): what long sequences add to the bars.

    The scan merges logarithms of sums, up to 10 (sigma + 1), ceil(log2 T) times for S and Z each; so does the chunked
    form once a chunk where values spread so far that it computes in logarithms. Gradients are exponentials of these,
    off by a part as large. The gradient by a decay is the sum of S dS over K V numbers, which cancels: dS sums up some
    T V cotangents near 1, of any sign, and is rounded T / 32 times.
    """
    if n_tokens < 1000:
        return 0.0, 0.0
    merges = {"scan": np.ceil(np.log2(n_tokens)), "chunked": n_tokens / 32 if sigma > 8 else 0}[form]
    return 2 * EPSILON * 10 * (sigma + 1) * merges, 2 * EPSILON * np.sqrt(n_tokens / 32 * n_tokens * FEATURES)


def check(rng, n_tokens, sigma, batch, decays, jit=jax.jit):
    """The same bars as without decays (test_accuracy.py)."""
    arrays = [sigma * rng.standard_normal((*batch, n_tokens, FEATURES)) for _ in range(3)]
    arrays = [x.astype(np.float32) for x in (*arrays, decays, rng.standard_normal(arrays[0].shape))]
    # Many tokens are too much for the quadratic form's memory.
    y64, *gradients64 = run("reference" if n_tokens <= 256 else "scan", arrays, np.float64)
    for form in ("chunked", "scan"):
        y, *gradients = run(form, arrays, np.float32, jit if form == "chunked" else jax.jit)
        error, (more, more_of_decays) = np.max(np.abs(y - y64)), more_rounding(form, n_tokens, sigma)
        assert error <= (2e-5 if sigma <= 8 else 2e-4) + more, f"{form}: log y off by {error:.2g}"
        for name, x, want in zip(("q", "k", "log_v", "log_decay"), gradients, gradients64, strict=True):
            error, largest = np.max(np.abs(x - want)), np.max(np.abs(want))
            # Where tokens see little but themselves, most gradients vanish beside the cotangents, which are near 1.
            allowed = max((1e-4 + more) * max(largest, 0.1), more_of_decays if name == "log_decay" else 0.0)
            assert error <= allowed, f"{form}, {name}: {error:.2g} of {largest:.2g}"


@pytest.mark.parametrize("sigma", [1, pytest.param(8, marks=pytest.mark.long), 64])
def test_decays_of_every_size_in_one_sequence(rng, sigma):
    check(rng, 100, sigma, (6,), draw_decays(rng, (6, 100)))


@pytest.mark.long
@pytest.mark.parametrize("sigma", [0.1, 1, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("n_tokens", [1, 2, 63, 1000, 4096])
def test_every_size_of_decay_and_every_dynamic_range(rng, n_tokens, sigma):
    """Compiled as for users, which takes long."""
    check(rng, n_tokens, sigma, (2,), draw_decays(rng, (2, n_tokens)), user_jit)
    for decay in (-1e-6, -1e-2, -1.0, -50.0):  # one time constant for all tokens
        decays = np.full((2, n_tokens), decay)
        decays[:, 0] = -20.0  # so that the gradient by the decays does not vanish as a whole
        check(rng, n_tokens, sigma, (2,), decays, user_jit)


def test_sums_within_a_chunk_are_not_rounded_to_the_largest(rng):
    """A float32 running sum that passes through -1600 is off by 1e-4."""
    decays = draw_decays(rng, (50, 64))
    decays[np.isneginf(decays)] = -50.0
    decays[..., -8:] *= 1e-4
    got = jax.jit(lambda x: ChunkDecay.of(x, 8))(decays)
    exact = np.cumsum(decays.astype(np.float64), axis=-1)
    of_keys = np.tril(np.exp(np.minimum(exact[..., :, None] - exact[..., None, :], 0)))
    np.testing.assert_allclose(np.exp(got.keys_at_queries), of_keys, rtol=2e-5, atol=1e-30)
    np.testing.assert_allclose(got.keys_at_end, exact[..., -1:] - exact, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got.before_at_queries, exact, rtol=1e-6, atol=1e-7)
    naive = np.cumsum(decays, axis=-1)
    assert np.abs((naive[..., -1:] - naive) - (exact[..., -1:] - exact))[..., -8:].max() > 1e-6


@pytest.fixture
def lose(monkeypatch):
    """lose(module, name): let a form of the computation return NaN; what is finite was computed without it."""

    def lose(module, name):
        form = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: jax.tree.map(lambda x: x * jnp.nan, form(*args)))
        jax.clear_caches()

    yield lose
    jax.clear_caches()


@pytest.mark.parametrize("function", ["log_attention", "attention"])
def test_ordinary_inputs_take_one_product_per_chunk_and_wide_ones_do_not(rng, function, lose):
    """Inputs up to sigma = 4 and decays from -5 to 0, and a number of tokens that fills no chunk."""
    lose(chunked, "block_weights")
    run = jax.jit(getattr(heinsen, function))
    for sigma in (1, 4, 64):
        arrays = [np.float32(sigma * rng.standard_normal((8, 700, FEATURES))) for _ in range(2)]
        arrays.append(np.float32(rng.standard_normal((8, 700, FEATURES))))
        decays = -5 * rng.random((8, 700)).astype(np.float32)
        decays[1], decays[2], decays[3] = -5, 0, -1e-3
        decays[4] = np.where(rng.random(700) < 0.5, -5, -1e-4)
        decays[5] = np.where(rng.random(700) < 0.1, -np.inf, -1e-4)
        assert np.all(np.isfinite(run(*arrays, log_decay=decays))) == (sigma != 64)


@pytest.mark.parametrize("function", ["log_attention", "attention"])
def test_exponents_that_spread_take_blocks_and_no_logarithms(rng, function, lose):
    for module, name in ((chunked, "product_weights"), (logarithms, "attend")):
        lose(module, name)
    q, k = (np.float32(64 * rng.standard_normal((2, 100, FEATURES))) for _ in range(2))
    v = np.float32(rng.standard_normal((2, 100, FEATURES)))
    decays = draw_decays(rng, (2, 100))
    assert np.all(np.isfinite(jax.jit(getattr(heinsen, function))(q, k, v, log_decay=decays)))


@pytest.mark.parametrize("gated", [False, True])
def test_both_directions_take_one_product_per_chunk(rng, lose, gated):
    """Even at the last token of a document, which sees none after it."""
    lose(chunked, "block_weights")
    q, k, log_v = (jnp.float32(rng.standard_normal((2, 45, 4))) for _ in range(3))
    ids = jnp.asarray(np.cumsum(rng.random((2, 45)) < 0.3, axis=-1))
    if gated:
        decays = {name: -jnp.float32(rng.random((2, 45))) for name in ("log_decay", "log_decay_after")}
        y = attend_both_ways(q, k, log_v, **decays, segment_ids=ids, signed=False)
    else:
        y = heinsen.log_attention(q, k, log_v, causal=False, segment_ids=ids, implementation="chunked")
    assert np.all(np.isfinite(y))


@pytest.mark.parametrize("value, decay, in_logarithms", [(100.0, -0.8, False), (100.0, -4.0, True), (1e3, -1.0, True)])
def test_a_large_value_that_is_forgotten_is_out_of_later_chunks(rng, value, decay, in_logarithms, lose):
    """Shifts fall from chunk to chunk. Where a value is forgotten within one, logarithms hold what is left."""
    q, k, log_v = (jnp.asarray(rng.standard_normal((2, 160, FEATURES)), jnp.float32) for _ in range(3))
    log_v, decays = log_v.at[:, 0].add(value), jnp.full((2, 160), decay)
    decays = decays.at[:, 40].set(-jnp.inf if value > 100 else decay)  # a document ends
    attend = lambda **options: jax.jit(functools.partial(heinsen.log_attention, **options))(
        q, k, log_v, log_decay=decays
    )
    with jax.enable_x64(True):
        arrays = [x.astype(np.float64) for x in (q, k, log_v)]
        want = jax.jit(functools.partial(heinsen.log_attention, implementation="reference"))(
            *arrays, log_decay=decays.astype(np.float64)
        )
    np.testing.assert_allclose(attend(), want, atol=2e-4)
    lose(logarithms, "attend")
    assert np.all(np.isfinite(attend(implementation="chunked"))) != in_logarithms


@pytest.mark.parametrize("function", ["log_attention", pytest.param("attention", marks=pytest.mark.long)])
def test_offsets_of_a_hundred_thousand_with_a_gate(rng, function):
    """k + decay would round small decays away: shifts are subtracted first."""
    q, k, v, g = (rng.standard_normal((2, 100, 4)) for _ in range(4))
    decays = -np.exp(rng.uniform(np.log(1e-6), np.log(0.1), (2, 100)))
    offset = np.round(1e5 * rng.standard_normal(4))
    for arrays in ((q, k + 1e5, v), (q - offset, k + offset, v)):
        arrays = [np.float32(x) for x in (*arrays, decays)]

        def run(form, dtype, arrays=arrays):
            with jax.enable_x64(dtype == np.float64):
                attend = functools.partial(getattr(heinsen, function), implementation=form)
                call = lambda q, k, v, decays: attend(q, k, v, log_decay=decays)
                y, pull = jax.vjp(call, *(x.astype(dtype) for x in arrays))
                return [np.float64(x) for x in (y, *pull(g.astype(dtype)))]

        for got, want in zip(run("chunked", np.float32), run("reference", np.float64), strict=True):
            assert np.abs(got - want).max() <= 2e-5 * max(1, np.abs(want).max())


# ---- laws ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "implementation", ["reference", *(pytest.param(name, marks=pytest.mark.long) for name in ("chunked", "scan"))]
)
def test_no_decay_is_a_decay_of_zero_and_minus_infinity_is_a_document(rng, implementation):
    q, k, log_v = (jnp.float32(rng.standard_normal((2, 40, 4))) for _ in range(3))
    attend = jax.jit(functools.partial(heinsen.log_attention, implementation=implementation))
    zero = jnp.zeros((2, 40))
    np.testing.assert_allclose(attend(q, k, log_v, log_decay=zero), attend(q, k, log_v), atol=2e-6)
    starts = jnp.asarray(rng.random((2, 40)) < 0.2)
    got = attend(q, k, log_v, log_decay=jnp.where(starts, -jnp.inf, zero))
    np.testing.assert_allclose(got, attend(q, k, log_v, segment_ids=jnp.cumsum(starts, axis=-1)), atol=2e-6)


@pytest.mark.long
def test_a_decay_is_a_shift_of_queries_and_keys_by_its_sums(rng):
    """The definition, in float64: q + G and k - G."""
    with jax.enable_x64(True):
        q, k, log_v = (jnp.asarray(rng.standard_normal((2, 50, 4))) for _ in range(3))
        decays = jnp.asarray(-rng.random((2, 50)))
        sums = jnp.cumsum(decays, axis=-1)[..., None]
        attend = jax.jit(heinsen.log_attention)
        want = attend(q + sums, k - sums, log_v)
        np.testing.assert_allclose(attend(q, k, log_v, log_decay=decays), want, atol=1e-11)


@pytest.mark.parametrize("kind", [LogState, MeanState])
def test_states_with_their_decays_are_a_monoid_in_order(rng, kind):
    """(a, x) (b, y) = (a + b, merge(x, y, b)): associative, with pieces of a sequence as elements."""
    function = heinsen.log_attention if kind is LogState else heinsen.attention
    attend = jax.jit(functools.partial(function, implementation="reference", return_state=True))
    arrays = [jnp.float32(rng.standard_normal((2, 30, 4))) for _ in range(3)]
    decays = jnp.asarray(np.maximum(draw_decays(rng, (2, 30)), -2))
    cut = lambda part: attend(*(x[:, part] for x in arrays), log_decay=decays[:, part])[1]
    parts = [slice(0, 7), slice(7, 8), slice(8, 30)]
    (x, y, z), (_, b, c) = map(cut, parts), (jnp.sum(decays[:, part], axis=-1) for part in parts)
    left = merge_states(merge_states(x, y, log_decay=b), z, log_decay=c)
    right = merge_states(x, merge_states(y, z, log_decay=c), log_decay=b + c)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
    jax.tree.map(close, left, right)
    jax.tree.map(close, left, cut(slice(0, 30)))
    assert not np.allclose(left.h_z, merge_states(merge_states(x, y), z).h_z, atol=1e-2)
    gone = merge_states(jax.tree.map(lambda x: x * np.nan, x), y, log_decay=jnp.full(2, -jnp.inf))
    jax.tree.map(close, gone, y)  # nothing of it is left, NaN included


def test_updates_and_steps_are_the_parallel_form(rng):
    n, shape = 60, (2, 3)
    q, k, log_v = (jnp.float32(rng.standard_normal((*shape, n, 4))) for _ in range(3))
    decays = jnp.asarray(draw_decays(rng, (*shape, n)))
    attend = jax.jit(functools.partial(heinsen.log_attention, return_state=True))
    want, want_end = attend(q, k, log_v, log_decay=decays)
    tokens = [jnp.moveaxis(x, 2, 0) for x in (q, k, log_v, decays)]

    def update(state, token):
        state = update_state(state, *token[1:3], log_decay=token[3])
        return state, heinsen.query_state(state, token[0])

    end, got = jax.jit(functools.partial(jax.lax.scan, update))(init_state(shape, 4, 4), tokens)
    np.testing.assert_allclose(np.moveaxis(got, 0, 2), want, atol=2e-5)

    def step(state, token):
        log_y, state = take_step(state, *token)
        return state, log_y

    half = jax.tree.map(lambda x: x[: n // 2], tokens), jax.tree.map(lambda x: x[n // 2 :], tokens)
    state, outputs = init_state(shape, 4, 4), []
    for part in half:
        running, got = jax.jit(functools.partial(jax.lax.scan, step))(to_running(state), part)
        state, exact = from_running(running)
        assert bool(exact.all())
        outputs.append(got)
    np.testing.assert_allclose(np.moveaxis(np.concatenate(outputs), 0, 2), want, atol=2e-5)
    for got_end in (end, state):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), got_end, want_end)


@pytest.mark.long
@pytest.mark.parametrize("decay", [-1e-6, -1e-4, -0.1])
def test_a_million_steps(rng, decay):
    """Decays as small as float32's rounding of a sum of exponents add up all the same."""
    n_calls, n, size = 31_250, 32, 8
    key = jax.random.key(int(rng.integers(2**31)))

    def run(dtype):
        def call(carry, i):
            x = jax.random.normal(jax.random.fold_in(key, i), (n, 3, size), jnp.float32).astype(dtype)

            def step(state, token):
                log_y, state = take_step(state, *token, jnp.asarray(decay, dtype))
                return state, log_y

            state, log_y = jax.lax.scan(step, to_running(carry), tuple(x[:, j] for j in range(3)))
            end, exact = from_running(state)
            return end, (log_y[-1], exact)

        state, (log_y, exact) = jax.lax.scan(call, init_state((), size, size, dtype=dtype), jnp.arange(n_calls))
        return state, log_y, exact

    state, log_y, exact = jax.tree.map(np.asarray, jax.jit(run, static_argnums=0)(jnp.float32))
    with jax.enable_x64(True):
        state64, log_y64, _ = jax.tree.map(np.asarray, jax.jit(run, static_argnums=0)(jnp.float64))
    assert exact.all()
    assert np.max(np.abs(log_y - log_y64)) <= 2e-4
    means, means64 = (np.asarray(h_s) - np.asarray(h_z)[..., None] for h_s, h_z in (state, state64))
    assert np.max(np.abs(means - means64)) <= 2e-4
    # The state between calls rounds h_z: by as much for all features, where it is stationary, which no query sees.
    drift = np.asarray(state.h_z) - np.asarray(state64.h_z)
    assert np.max(np.abs(drift)) <= n_calls * np.spacing(np.float32(np.max(np.abs(state64.h_z)))) / 2
    assert np.ptp(drift) <= 2e-4


# ---- errors ----------------------------------------------------------------------------------------


def test_what_does_not_fit_is_named():
    x, decays = jnp.zeros((2, 5, 4)), jnp.zeros((2, 5))
    with pytest.raises(ValueError, match="log_decay with causal=False"):
        heinsen.log_attention(x, x, x, log_decay=decays, causal=False)
    state = init_state((2,), 4, 4)
    with pytest.raises(ValueError, match=r"log_decay \(5,\) does not fit states"):
        merge_states(state, state, log_decay=decays[0])


@pytest.mark.wrong_types
def test_decays_of_whole_numbers_or_features_are_refused():
    x = jnp.zeros((2, 5, 4))
    with pytest.raises(TypeError, match="log_decay has dtype int32"):
        heinsen.attention(x, x, x, log_decay=jnp.zeros((2, 5), int))
    with pytest.raises(ValueError, match=r"log_decay \(2, 5, 4\) does not fit k \(2, 5, 4\): expected one number"):
        heinsen.log_attention(x, x, x, log_decay=x)


@pytest.mark.long
def test_values_far_from_one_cost_no_precision(rng):
    """Shifts of values that fall by less than they are rounded to must not count as falling by more."""
    n, offset = 2048, 1e5
    noise = rng.standard_normal((1, n, FEATURES)).astype(np.float32)
    log_v, decays = (np.float32(offset) + 0.1 * noise).astype(np.float32), np.full((1, n), -1e-4, np.float32)
    arrays = [0 * noise, 0 * noise, log_v]
    got = np.asarray(user_jit(heinsen.log_attention)(*arrays, log_decay=decays))
    with jax.enable_x64(True):
        scan = jax.jit(functools.partial(heinsen.log_attention, implementation="scan"))
        want = np.asarray(scan(*map(np.float64, arrays), log_decay=np.float64(decays)))
    assert np.abs(got - want).max() < 0.02  # float32 holds log y itself to 0.004


# ---- both directions ------------------------------------------------------------------------------


def both_ways64(q, k, v, before, after, document):
    """y of one sequence in float64: the weights of all pairs, with a reset for each -inf."""
    n = len(q)
    left = np.zeros((n, n))
    for t in range(n):
        for s in range(n):
            between = before[s + 1 : t + 1] if s <= t else after[t + 1 : s]
            left[t, s] = np.exp(between.sum()) * (document[s] == document[t])
    weights = left * (np.exp(q) @ np.exp(k).T)
    return weights @ v / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    "signed, packed, sigma", [pytest.param(False, False, 1, marks=pytest.mark.long), (True, True, 1), (False, True, 64)]
)
def test_both_directions_are_gated_separately_and_the_later_one_leaves_out_the_token(rng, signed, packed, sigma):
    n = int(rng.integers(60, 100))
    q, k, values = (sigma * rng.standard_normal((2, n, 4)).astype(np.float32) for _ in range(3))
    before, after = draw_decays(rng, (2, n)), draw_decays(rng, (2, n))
    document = np.cumsum(rng.random((2, n)) < 0.05, axis=-1) if packed else np.zeros((2, n), int)
    ids = jnp.asarray(document, jnp.int32) if packed else None

    def attend(q, k, values, before, after):
        return attend_both_ways(q, k, values, log_decay=before, log_decay_after=after, segment_ids=ids, signed=signed)

    arrays = [jnp.asarray(x) for x in (q, k, values, before, after)]
    g = rng.standard_normal(q.shape).astype(np.float32)
    top = 0 if signed else values.max(axis=1, keepdims=True)

    @jax.jit
    def run(*arrays):
        y, pull = jax.vjp(attend, *arrays)
        return y, pull(jnp.asarray(g))

    y, grads = run(*arrays)

    def truth(q, k, values, before, after):
        v = values if signed else np.exp(values - top)
        y = np.stack([both_ways64(*each) for each in zip(q, k, v, before, after, document, strict=True)])
        return y if signed else np.log(y) + top

    arrays64 = [np.float64(x) for x in (q, k, values, before, after)]
    np.testing.assert_allclose(y, truth(*arrays64), atol=2e-5 if sigma == 1 else 2e-4)
    directions = [np.where(np.isfinite(x), rng.standard_normal(x.shape), 0.0) for x in arrays64]
    for i, direction in enumerate(directions):  # by each input alone
        moved = lambda step, i=i, d=direction: [x + step * d if j == i else x for j, x in enumerate(arrays64)]
        slope = np.sum(g * (truth(*moved(1e-6)) - truth(*moved(-1e-6)))) / 2e-6
        terms = direction * np.float64(grads[i])
        assert abs(slope - terms.sum()) <= 1e-4 * np.sqrt(np.sum(terms**2)) + 1e-5


def test_what_is_not_finite_stays_in_its_row_in_both_directions(rng):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 4)), jnp.float32) for _ in range(3))
    decays, v = jnp.full((2, 9), -0.1, jnp.float32), v.at[0, 4, 0].set(jnp.nan)
    gated = attend_both_ways(q, k, v, log_decay=decays, log_decay_after=decays, signed=True)
    plain = heinsen.attention(q, k, v, causal=False, segment_ids=jnp.arange(9) // 6, implementation="chunked")
    for y in (gated, plain):
        assert np.all(np.isfinite(y[1])) and not np.any(np.isfinite(y[0, 4:6, 0]))
