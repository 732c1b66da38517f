"""The forms of attention that are measured, and the scaling laws of each.

    y(x) = n^-alpha sum_{j <= n} sigmoid(q(x) . k(z_j) / sqrt(d)) v(z_j)

If the tokens z_j are drawn from one distribution, n^(alpha - 1) y converges to the integral I(x) = E_z[sigmoid(q(x) .
k(z) / sqrt(d)) v(z)]: the norm of y grows as n^(1 - alpha), at alpha = 1 y tends to I as n^-1/2, and doubling every
token multiplies y by exactly 2^(1 - alpha). For independent tokens and any n, with C(x) the variance of one token's
contribution,

    E |y|^2 = n^(-2 alpha) (n^2 |I|^2 + n C)

so that below n* = C / |I|^2 the fluctuation dominates, which grows as n^(1/2 - alpha). Softmax and heinsen attention
tend to a limit, and doubling every token does not change them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import heinsen

Run = Callable[[np.ndarray, np.ndarray, np.ndarray], dict[str, np.ndarray]]  # (q, k, v) -> {form: y}


@dataclass(frozen=True)
class Form:
    """A form of attention in which every query sees every key, and its laws.

    attend: (q [*batch, Q, d], k [*batch, n, d], v [*batch, n, d]) -> y [*batch, Q, d].
    growth: the exponent of the norm of y. doubling: the ratio when every token is doubled, None if no law is exact.
    """

    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    alpha: float | None
    growth: float
    doubling: float | None
    converges: bool


def softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.einsum("...qd,...nd->...qn", q, k) * q.shape[-1] ** -0.5, axis=-1) @ v


_SIGMOID = functools.partial(heinsen.sigmoid_attention, causal=False)
FORMS: dict[str, Form] = {
    **{
        f"sigmoid, alpha = {alpha:g}": Form(
            functools.partial(_SIGMOID, alpha=alpha), alpha, 1 - alpha, 2 ** (1 - alpha), alpha == 1
        )
        for alpha in (0.0, 0.5, 0.75, 1.0, 1.25, 1.5)
    },
    "sigmoid, bias = -log n": Form(functools.partial(_SIGMOID, alpha=0.0, bias="-log_n"), None, 0.0, None, False),
    "softmax": Form(softmax_attention, None, 0.0, 1.0, True),
    "heinsen": Form(functools.partial(heinsen.attention, causal=False), None, 0.0, 1.0, True),
}


def compile_together(forms: Mapping[str, Form]) -> Run:
    """Return all forms as one compiled function (q, k, v) -> {form: y} in float64."""
    compiled = jax.jit(lambda q, k, v: {name: form.attend(q, k, v) for name, form in forms.items()})

    def run(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, np.ndarray]:
        with jax.enable_x64(True):
            return jax.device_get(compiled(*(x.astype(np.float64) for x in (q, k, v))))

    return run


def norms_by_law(lengths: Sequence[int], alpha: float, square: float, variance: float) -> np.ndarray:
    """Return sqrt(E |y|^2) for independent tokens at each n; `square` is |I|^2, `variance` C."""
    n = np.array(lengths, float)
    return n**-alpha * np.sqrt(n**2 * square + n * variance)


def window_growth(n_tokens: int, alpha: float, bias: str = "0.0") -> float:
    """Return the RMS over t = 1..n_tokens of the sum of all weights if the logits are 0: t^(1 - alpha) / 2.

    With bias "-log_n" and alpha = 0 the sum is t sigmoid(-log t) = t / (t + 1).
    """
    t = np.arange(1.0, n_tokens + 1)
    weights = t / (t + 1) if bias == "-log_n" else t ** (1 - alpha) / 2
    return float(np.sqrt(np.mean(weights**2)))
