"""What the attention computes, in float64 NumPy with no logarithm until the end; gradients in closed form.

    S = A V + [first document] exp(q) N0,   Z = A 1 + [first document] exp(q) Z0,   A = [seen] exp(q) exp(k)^T

where (N0, Z0) is what the incoming state sums up; the outgoing one sums up the last document. With log decays, key s
counts exp(sum of those after it, up to t) at query t, and so on: [seen] and its like are numbers between 0 and 1.
float64 holds exp of +-700: enough for logarithms of a few hundred. Nothing here is shared with heinsen.
"""

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """Inputs of one call, in float32: values are log v or v; state is a pair of arrays, or None; log_decay [*, T]."""

    q: np.ndarray
    k: np.ndarray
    values: np.ndarray
    causal: bool
    state: tuple[np.ndarray, np.ndarray] | None
    segment_ids: np.ndarray | None
    log_decay: np.ndarray | None = None


def draw_case(
    rng,
    batch=(),
    n_queries=9,
    n_keys=None,
    d_key=4,
    d_value=3,
    causal=True,
    state=False,
    mean_length=0,
    scale=1.0,
    decay=False,
) -> Case:
    """Normal inputs times `scale`; if `mean_length`, documents of about that length, with recurring ids.

    If `decay`, log decays of every size from -1e-6 to -50, and some of -inf.
    """
    n_keys = n_queries if n_keys is None else n_keys
    normal = lambda *shape: (scale * rng.standard_normal(shape)).astype(np.float32)
    ids = None
    if mean_length:
        begins = rng.random((*batch, n_keys)) < 1 / mean_length
        begins[..., n_keys // 2] = True  # two documents at least
        # The next id is another of three: many ids come back in a later document.
        ids = np.cumsum(begins * rng.integers(1, 3, begins.shape), axis=-1).astype(np.int32) % 3
    return Case(
        normal(*batch, n_queries, d_key),
        normal(*batch, n_keys, d_key),
        normal(*batch, n_keys, d_value),
        causal,
        (normal(*batch, d_key, d_value), normal(*batch, d_key)) if state else None,
        ids,
        draw_decays(rng, (*batch, n_keys)) if decay else None,
    )


def draw_decays(rng, shape) -> np.ndarray:
    decays = -np.exp(rng.uniform(np.log(1e-6), np.log(50), shape))
    return np.where(rng.random(shape) < 0.1, -np.inf, decays).astype(np.float32)


class Truth(NamedTuple):
    """y is log y or y; state the pair after all tokens; gradients by q, k, values, log decays and the state's parts."""

    y: np.ndarray
    state: tuple[np.ndarray, np.ndarray]
    gradients: tuple[np.ndarray, ...]


def truth(case: Case, signed: bool, cotangents=None) -> Truth:
    """The truth of `attention` if `signed`, else of `log_attention`; cotangents default to ones."""
    batch, n_keys = case.k.shape[:-2], case.k.shape[-2]
    d_key, d_value = case.k.shape[-1], case.values.shape[-1]
    if case.state is None:
        empty = np.zeros if signed else lambda shape: np.full(shape, -np.inf)
        state = empty((*batch, d_key, d_value)), np.full((*batch, d_key), -np.inf)
    else:
        state = case.state
    ids = np.zeros(n_keys, np.int32) if case.segment_ids is None else case.segment_ids
    ids = np.broadcast_to(ids, (*batch, n_keys))
    if cotangents is None:
        cotangents = np.ones((*batch, case.q.shape[-2], d_value)), *map(np.ones_like, state)
    inputs = [np.asarray(x, np.float64) for x in (case.q, case.k, case.values, *state)]
    cotangents = [np.asarray(g, np.float64) for g in cotangents]
    log_decay = np.zeros((*batch, n_keys)) if case.log_decay is None else np.asarray(case.log_decay, np.float64)
    rows = [
        _row(*(x[row] for x in inputs), log_decay[row], case.causal, ids[row], signed, *(g[row] for g in cotangents))
        for row in np.ndindex(batch)
    ]
    results = [np.reshape(column, (*batch, *column[0].shape)) for column in zip(*rows, strict=True)]
    return Truth(results[0], tuple(results[1:3]), tuple(results[3:]))


def document_numbers(ids):
    """0 0 1 1 2 ...: a new number whenever the id changes."""
    numbers = [0]
    for before, now in zip(ids[:-1], ids[1:], strict=True):
        numbers.append(numbers[-1] + int(before != now))
    return np.array(numbers)


def _row(q, k, values, state, h_z0, log_decay, causal, ids, signed, g_y, g_state, g_h_z):
    document = document_numbers(ids)
    packed = document[-1] > 0
    seen = np.ones((len(q), len(k)))
    if packed:
        seen = np.equal(document[:, None], document[None, :]).astype(np.float64)
    if causal:
        seen = np.tril(seen)
    first = (document == 0).astype(np.float64) if packed else np.ones(len(q))
    last = (document == document[-1]).astype(np.float64)
    goes_on = 0.0 if packed else 1.0
    if causal:  # decays between tokens are sums over those after s, up to t
        n = len(k)
        between = [[log_decay[s + 1 : t + 1].sum() if s <= t else 0.0 for s in range(n)] for t in range(n)]
        seen, last = seen * np.exp(between), last * np.exp(between[-1])
        first = first * np.exp([log_decay[: t + 1].sum() for t in range(n)])
        goes_on *= np.exp(log_decay.sum())

    exp_q, exp_k, z0 = np.exp(q), np.exp(k), np.exp(h_z0)
    v = values if signed else np.exp(values)
    n0 = z0[:, None] * state if signed else np.exp(state)

    a = seen * (exp_q @ exp_k.T)
    s = a @ v + first[:, None] * (exp_q @ n0)
    z = a.sum(-1) + first * (exp_q @ z0)
    n = goes_on * n0 + (last[:, None] * exp_k).T @ v
    zz = goes_on * z0 + last @ exp_k

    # From the cotangents of the results to those of S, Z and of the outgoing sums N, Z.
    if signed:
        y, end = _ratio(s, z[:, None]), _ratio(n, zz[:, None])
        d_s, d_n = _ratio(g_y, z[:, None]), _ratio(g_state, zz[:, None])
        d_z = -_ratio((g_y * y).sum(-1), z)
        d_zz = _ratio(g_h_z - (g_state * end).sum(-1), zz)
    else:
        # 0 / 0 is 0, whatever the cotangent.
        y, end = np.where(z[:, None] == 0, -np.inf, _log(s) - np.where(z == 0, 0, _log(z))[:, None]), _log(n)
        d_s, d_n = _ratio(g_y, s), _ratio(g_state, n)
        d_z, d_zz = -_ratio(g_y.sum(-1), z), _ratio(g_h_z, zz)

    d_a = seen * (d_s @ v.T + d_z[:, None])
    d_exp_q = d_a @ exp_k + first[:, None] * (d_s @ n0.T + d_z[:, None] * z0)
    d_exp_k = d_a.T @ exp_q + last[:, None] * (v @ d_n.T + d_zz)
    d_v = a.T @ d_s + last[:, None] * (exp_k @ d_n)
    d_n0 = exp_q.T @ (first[:, None] * d_s) + goes_on * d_n
    d_z0 = exp_q.T @ (first * d_z) + goes_on * d_zz
    d_pairs = d_a * (exp_q @ exp_k.T)
    d_first = first * ((d_s * (exp_q @ n0)).sum(-1) + d_z * (exp_q @ z0))
    d_last = last * (exp_k * (v @ d_n.T + d_zz)).sum(-1)
    d_on = goes_on * ((d_n * n0).sum() + (d_zz * z0).sum())
    d_log_decay = np.zeros(len(k))
    for r in range(len(k) if causal else 0):
        d_log_decay[r] = d_pairs[r:, :r].sum() + d_first[r:].sum() + d_last[:r].sum() + d_on
    if signed:
        d_values, d_state = d_v, z0[:, None] * d_n0
        d_h_z0 = z0 * (d_z0 + (d_n0 * state).sum(-1))
    else:
        d_values, d_state, d_h_z0 = v * d_v, n0 * d_n0, z0 * d_z0
    return y, end, _log(zz), exp_q * d_exp_q, exp_k * d_exp_k, d_values, d_log_decay, d_state, d_h_z0


def _ratio(a, b):
    return np.where(b == 0, 0.0, a / np.where(b == 0, 1.0, b))


def _log(x):
    return np.where(x == 0, -np.inf, np.log(np.where(x == 0, 1.0, x)))


def assert_close(got, want, tolerance=1e-5, what="", floor=0.1):
    """Infinities equal; the rest within `tolerance` of the largest magnitude wanted, or a larger `floor`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=what)
    not_finite = np.sum(~np.isfinite(got[finite]))
    assert not_finite == 0, f"{what}: {not_finite} of {got.size} not finite"
    error = np.max(np.abs(got[finite] - want[finite]), initial=0.0)
    scale = np.max(np.abs(want[finite]), initial=floor)
    message = f"{what}: error {error:.2g} at scale {scale:.2g}, allowed {tolerance:.0e} of it"
    assert error <= tolerance * scale, message


def assert_gradients_close(got, want, case, signed, tolerance=1e-5):
    """A gradient is a sum of cotangents (of order 1) times weights below 1, and times values if `signed`.

    It may cancel, even to 0; what float32 rounds off is relative to its terms.
    """
    assert len(got) == (4 if case.state is None else 6)
    floor = max(1.0, np.abs(case.values).max()) if signed else 1.0
    for name, x, expected in zip(("q", "k", "values", "log_decay", "state[0]", "h_z"), got, want, strict=False):
        if x is not None:
            assert_close(x, expected, tolerance, f"gradient by {name}", floor)
