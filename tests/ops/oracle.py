"""What every kind of attention computes: the weights of all pairs, in float64, with gradients by JAX; and its calls.

    y[t] = sum_s w[t, s] v[s] / sum_s w[t, s],   w[t, s] = left[t, s] f(q[t], k[s])        (sigmoid: no denominator)

left, from 0 to 1, is what a key keeps at a query of its document after the log decays of the tokens between, 0 where
it is not seen. States are sums over the tokens before. The delta rule has its recurrence instead. float64 holds exp of
+-700: enough for logarithms of a few hundred. `Law` shares nothing with heinsen.

Axes: `*batch` any leading axes; T queries, S keys; K key and V value features.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import heinsen
from heinsen import LogState, MeanState, backend
from heinsen.ops.api import attend_both_ways
from heinsen.ops.delta import DeltaState, delta_rule
from heinsen.ops.linear import LinearState
from heinsen.ops.softmax import softmax_attention
from tests.ops.common import small_sizes

STATES = {"log": LogState, "real": MeanState, "linear": LinearState, "delta": DeltaState}
FUNCTIONS = {"log": "log_attention", "real": "attention", "linear": "linear_attention", "sigmoid": "sigmoid_attention"}

# ---- the oracle ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Law:
    """(y or log y [*batch, T, V], the parts of the state after all tokens) of float64 arrays, as by `Form`."""

    kind: str
    alpha: float = 1.0
    bias: Any = 0.0

    def __call__(self, x, ids, causal):
        q, k, v = x["q"], x["k"], x["values"]
        if self.kind == "delta":
            return _recurrence(x, ids)
        left, first, last = _left(q, k, ids, causal, x.get("log_decay"), x.get("log_decay_after"))
        if self.kind in ("softmax", "sigmoid"):
            scores = q @ k.swapaxes(-1, -2) / np.sqrt(k.shape[-1])
            if self.kind == "softmax":
                w = left * jnp.exp(scores)
                return w @ v / w.sum(-1, keepdims=True), ()
            n = left.sum(-1, keepdims=True)
            bias = -jnp.log(n) if self.bias == "-log_n" else self.bias
            return left * jnp.exp(jax.nn.log_sigmoid(scores + bias)) / n**self.alpha @ v, ()

        elu = lambda x: jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))
        fq, fk = map(elu if self.kind == "linear" else jnp.exp, (q, k))
        v = jnp.exp(v) if self.kind == "log" else v
        s0, z0 = self._sums(x["state"]) if "state" in x else (0.0 * fk.swapaxes(-1, -2) @ v, 0.0 * fk[..., 0, :, None])
        w = left * (fq @ fk.swapaxes(-1, -2))
        s, z = w @ v + first * (fq @ s0), w.sum(-1, keepdims=True) + first * (fq @ z0)
        at_end, stays = last * fk, first[..., -1:, :]
        end_s = stays * s0 + at_end.swapaxes(-1, -2) @ v
        end_z = stays * z0 + at_end.sum(-2)[..., None]
        if self.kind == "linear":
            return _ratio(s, z), (jnp.concatenate([end_s, end_z], axis=-1),)
        y, end = (_log_ratio(s, z), _log(end_s)) if self.kind == "log" else (_ratio(s, z), _ratio(end_s, end_z))
        return y, () if "log_decay_after" in x else (end, _log(end_z[..., 0]))

    def _sums(self, state):
        """What a state sums up: of values [*batch, K, V], and of weights [*batch, K, 1]."""
        if self.kind == "linear":
            return state[0][..., :-1], state[0][..., -1:]
        z = jnp.exp(state[1])[..., None]
        return jnp.exp(state[0]) if self.kind == "log" else state[0] * z, z


def _left(q, k, ids, causal, log_decay, log_decay_after):
    """What is left of keys at queries [*batch, T, S], of the state at queries and of keys at the end [*batch, T, 1]."""
    n = k.shape[-2]
    if q.shape[-2] != n:  # without documents and decays
        return jnp.ones((*k.shape[:-2], q.shape[-2], n)), jnp.ones((*q.shape[:-1], 1)), jnp.ones((*k.shape[:-1], 1))
    document, is_earlier = jnp.cumsum(_starts(ids, k), axis=-1), np.tril(np.ones((n, n), bool))
    same = document[..., :, None] == document[..., None, :]
    total, erased = _running_sums(jnp.zeros(k.shape[:-1]) if log_decay is None else log_decay)
    seen = same & is_earlier & (erased[..., :, None] == erased[..., None, :])
    left = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    last = left[..., -1, :]
    first = jnp.exp(jnp.where((document == 0) & (erased == 0), total, -jnp.inf))
    if not causal:  # later keys, decayed by the tokens between
        g = jnp.zeros(k.shape[:-1]) if log_decay_after is None else log_decay_after
        (total, erased), (until, erased_until) = map(
            _running_sums, (g, jnp.pad(g, [(0, 0)] * (g.ndim - 1) + [(1, 0)])[..., :-1])
        )
        seen = same & ~is_earlier & (erased[..., :, None] == erased_until[..., None, :])
        left += jnp.exp(jnp.where(seen, until[..., None, :] - total[..., :, None], -jnp.inf))
    return left, first[..., None], last[..., None]


def _running_sums(g):
    """Of log decays, and of those that erase everything."""
    return jnp.cumsum(jnp.where(g == -jnp.inf, 0.0, g), axis=-1), jnp.cumsum(g == -jnp.inf, axis=-1)


def _starts(ids, k):
    ids = jnp.broadcast_to(0 if ids is None else ids, k.shape[:-1])
    return jnp.concatenate([jnp.zeros_like(ids[..., :1], bool), ids[..., 1:] != ids[..., :-1]], axis=-1)


def _recurrence(x, ids):
    """The equation in the head of heinsen/ops/delta.py, token by token, with matrices written out."""
    left = jnp.where(_starts(ids, x["k"]), 0.0, jnp.exp(x.get("log_decay", 0.0)))

    def token(memory, at_t):
        q, k, v, beta, left = at_t
        erase = jnp.eye(k.shape[-1]) - beta[..., None, None] * k[..., :, None] * k[..., None, :]
        memory = left[..., None, None] * (erase @ memory) + beta[..., None, None] * k[..., :, None] * v[..., None, :]
        return memory, jnp.squeeze(q[..., None, :] @ memory, -2)

    (state,) = x.get("state", (0.0 * x["k"].swapaxes(-1, -2) @ x["values"],))
    tokens_first = [jnp.moveaxis(x, left.ndim - 1, 0) for x in (x["q"], x["k"], x["values"], x["beta"], left)]
    end, y = jax.lax.scan(token, state, tokens_first)
    return jnp.moveaxis(y, 0, left.ndim - 1), (end,)


def _ratio(a, b):
    """a / b, and 0 where b is 0. (JAX's own derivative takes b * b, which float64 does not hold.)"""
    return a * jnp.where(b == 0, 0.0, jnp.exp(-jnp.log(jnp.where(b == 0, 1.0, b))))


def _log_ratio(a, b):
    return _log(a) - jnp.log(jnp.where(b == 0, 1.0, b))


def _log(x):
    return jnp.where(x == 0, -jnp.inf, jnp.log(jnp.where(x == 0, 1.0, x)))


# ---- calls ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Form:
    """A function of heinsen with options: its kind, such as an implementation, and the sizes of its chunks and blocks.

    form(x, ids, causal) is (y, parts of the state) of arrays by name: q, k, values and, where there are, state,
    log_decay, log_decay_after and beta.
    """

    kind: str
    options: tuple[tuple[str, Any], ...] = ()
    small: bool = True
    platform: str | None = None

    def __str__(self):
        return " ".join([self.kind, *(str(value) for _, value in self.options), *[self.platform] * bool(self.platform)])

    @property
    def law(self):
        return Law(self.kind, **{name: x for name, x in self.options if name in ("alpha", "bias")})

    @property
    def signed(self):
        return self.kind != "log"

    def state(self, parts):
        return None if parts is None else STATES[self.kind](*parts)

    def __call__(self, x, ids=None, causal=True):
        with small_sizes(self.small), backend.compiling_for(self.platform or backend.current()):
            y, state = self._call(x, ids, causal)
        return y, tuple(state)

    def _call(self, x, ids, causal):
        arrays = x["q"], x["k"], x["values"]
        given = {"log_decay": x.get("log_decay"), "segment_ids": ids}
        if "log_decay_after" in x:
            return attend_both_ways(*arrays, **given, log_decay_after=x["log_decay_after"], signed=self.signed), ()
        if self.kind == "softmax":
            return softmax_attention(*arrays, ids, causal, given["log_decay"]), ()
        if self.kind == "sigmoid":
            return heinsen.sigmoid_attention(*arrays, segment_ids=ids, causal=causal, **dict(self.options)), ()
        given["state"] = self.state(x.get("state"))
        if self.kind == "delta":
            return delta_rule(*arrays, x["beta"], **given)
        function = getattr(heinsen, FUNCTIONS[self.kind])
        return function(*arrays, **given, causal=causal, **dict(self.options), return_state=True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def evaluate(function, causal, x, ids, cotangents):
    """(y, state), and the gradients by name."""
    out, pull = jax.vjp(lambda x: function(x, ids, causal), x)
    return out, pull(cotangents)[0]


# ---- inputs --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """Inputs of one call, in float32."""

    x: dict[str, Any]
    ids: np.ndarray | None
    causal: bool

    def change(self, ids=None, **x):
        """With some arrays replaced."""
        return Case(self.x | x, self.ids if ids is None else ids, self.causal)


def draw_case(
    rng, kind, batch=(), n_queries=9, n_keys=None, d_key=4, d_value=3, causal=True, state=False, mean_length=0,
    scale=1.0, decay=False, after=False,
):  # fmt: skip
    """Normal inputs times `scale`; if `mean_length`, documents of about that length, with recurring ids.

    If `decay`, log decays of every size from -1e-6 to -50, and some of -inf; if `after`, those of later tokens too. The
    delta rule has unit keys, and betas of 0 and 1 among others.
    """
    n_keys = n_queries if n_keys is None else n_keys
    normal = lambda *shape: (scale * rng.standard_normal((*batch, *shape))).astype(np.float32)
    x = {"q": normal(n_queries, d_key), "k": normal(n_keys, d_key), "values": normal(n_keys, d_value)}
    if kind == "delta":
        x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
        x["beta"] = np.float32(np.clip(rng.uniform(-0.2, 1.2, (*batch, n_keys)), 0, 1))
    if state:
        x["state"] = tuple(normal(*shape) for shape in state_shapes(kind, d_key, d_value))
    if state and kind == "linear":
        x["state"][0][..., -1] = np.abs(x["state"][0][..., -1])
    for name in ["log_decay"] * decay + ["log_decay_after"] * after:
        x[name] = draw_decays(rng, (*batch, n_keys))
    ids = None
    if mean_length:
        begins = rng.random((*batch, n_keys)) < 1 / mean_length
        begins[..., n_keys // 2] = True  # two documents at least
        # The next id is another of three: many ids come back in a later document.
        ids = np.cumsum(begins * rng.integers(1, 3, begins.shape), axis=-1).astype(np.int32) % 3
    return Case(x, ids, causal)


def draw_decays(rng, shape) -> np.ndarray:
    decays = -np.exp(rng.uniform(np.log(1e-6), np.log(50), shape))
    return np.where(rng.random(shape) < 0.1, -np.inf, decays).astype(np.float32)


def state_shapes(kind, d_key, d_value):
    return {
        "log": ((d_key, d_value), (d_key,)),
        "real": ((d_key, d_value), (d_key,)),
        "linear": ((d_key, d_value + 1),),
        "delta": ((d_key, d_value),),
    }.get(kind, ())


def draw_cotangents(rng, form, case):
    """Of y and the parts of the state, in float32."""
    *batch, n, d_key = case.x["q"].shape
    d_value = case.x["values"].shape[-1]
    states = () if "log_decay_after" in case.x else state_shapes(form.kind, d_key, d_value)
    y, *state = (np.float32(rng.standard_normal((*batch, *shape))) for shape in ((n, d_value), *states))
    return y, tuple(state)


def run(form, case, cotangents):
    return jax.tree.map(np.asarray, evaluate(form, case.causal, case.x, case.ids, cotangents))


def truth(form, case, cotangents):
    """(y, state), and the gradients by name, from float32 inputs in float64."""
    with jax.enable_x64(True):
        x, cotangents = jax.tree.map(np.float64, (case.x, cotangents))
        return jax.tree.map(np.asarray, evaluate(form.law, case.causal, x, case.ids, cotangents))


# ---- comparisons ---------------------------------------------------------------------------------

# Of outputs and states, and of gradients, relative to the largest.
TOLERANCES = {kind: (1e-5, 1e-5) for kind in ("log", "real")} | {kind: (1e-5, 2e-5) for kind in ("linear", "delta")}
TOLERANCES |= {"sigmoid": (1e-6, 1e-6), "softmax": (2e-5, 2e-5)}


def check(form, case, rng, tolerance=None, of_gradients=None):
    """Outputs, which are returned, states and all gradients, those that come through the returned state among them."""
    cotangents = jax.tree.map(case.x["q"].dtype.type, draw_cotangents(rng, form, case))
    tolerance, of_gradients = tolerance or TOLERANCES[form.kind][0], of_gradients or TOLERANCES[form.kind][1]
    (y, state), gradients = run(form, case, cotangents)
    (want, want_state), want_gradients = truth(form, case, cotangents)
    assert {x.dtype for x in (y, *state)} == {case.x["q"].dtype}
    assert_close(y, want, tolerance, "y")
    for part, expected in zip(state, want_state, strict=True):
        assert_close(part, expected, tolerance, "state")
    assert_gradients_close(gradients, want_gradients, case, form, of_gradients)
    return y


def assert_gradients_close(got, want, case, form, tolerance):
    """A gradient is a sum of cotangents (of order 1) times weights below 1, and times values if `signed`.

    It may cancel, even to 0; what float32 rounds off is relative to its terms.
    """
    floor = {"linear": 0.1, "sigmoid": 0.1, "softmax": 0.0}.get(form.kind, 1.0)
    if form.kind == "real":
        floor = max(floor, np.abs(case.x["values"]).max())
    for (path, x), expected in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_close(x, expected, tolerance, f"gradient by {jax.tree_util.keystr(path)}", floor)


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
