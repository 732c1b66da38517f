"""L(N, D) = E + A / N^alpha + B / D^beta, fitted to runs (Hoffmann et al. 2022, arXiv:2203.15556, eqs. 2 and 3).

N parameters, D tokens, L nats per token. As there, the fit minimizes the Huber loss of log L from many starting points,
with A, B and E as exponentials. The bands are those of a residual bootstrap: the law is fitted again to losses that
differ from the fit by residuals drawn from its own, scaled up for the degrees of freedom.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

N_COEFFICIENTS = 5
_DELTA = 1e-3  # of the Huber loss, in log L
# Bounds of log A, log B, log E, alpha and beta.
_LOWEST, _HIGHEST = np.array([-30.0, -30.0, -6.0, 0.0, 0.0]), np.array([40.0, 40.0, 2.0, 2.5, 2.5])


@dataclasses.dataclass(frozen=True)
class Law:
    """The coefficients, with E in nats; logarithms of A, B and E because they span many orders of magnitude."""

    log_a: float
    log_b: float
    log_e: float
    alpha: float
    beta: float

    def __call__(self, n_params: np.ndarray | float, tokens: np.ndarray | float) -> np.ndarray:
        """Return the loss in nats per token."""
        return np.exp(_log_loss(np.array(dataclasses.astuple(self)), np.log(n_params), np.log(tokens)))


def fit(n_params: np.ndarray, tokens: np.ndarray, loss: np.ndarray, n_starts: int = 40) -> Law:
    """Return the law with the smallest Huber loss. Raises ValueError unless there are more runs than coefficients."""
    if len(loss) <= N_COEFFICIENTS:
        raise ValueError(f"{len(loss)} runs cannot determine {N_COEFFICIENTS} coefficients: more runs are needed")
    return Law(*_fit(np.log(n_params), np.log(tokens), np.log(loss), np.random.default_rng(0), n_starts))


def bootstrap(
    law: Law, n_params: np.ndarray, tokens: np.ndarray, loss: np.ndarray, n: int, n_starts: int = 4
) -> list[Law]:
    """Return `n` laws fitted to losses that differ from this law as much as the given ones do."""
    rng = np.random.default_rng(0)
    log_n, log_d = np.log(n_params), np.log(tokens)
    start = np.array(dataclasses.astuple(law))
    expected = _log_loss(start, log_n, log_d)
    own = residuals(law, n_params, tokens, loss)
    draws = (expected + rng.choice(own, len(loss)) for _ in range(n))
    return [Law(*_fit(log_n, log_d, draw, rng, n_starts, start)) for draw in draws]


def residuals(law: Law, n_params: np.ndarray, tokens: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Return the residuals of the log loss about their mean, scaled up for the degrees of freedom.

    They estimate how far a new run may be from the law.
    """
    raw = np.log(loss) - np.log(law(n_params, tokens))
    return (raw - raw.mean()) * np.sqrt(len(loss) / (len(loss) - N_COEFFICIENTS))


def prediction_interval(laws: Sequence[Law], residuals: np.ndarray, n_params: float, tokens: float) -> list[float]:
    """Return the ends of the interval of a new loss: 95% of what these laws predict, with each of the residuals."""
    drawn = [law(n_params, tokens) * np.exp(residuals) for law in laws]
    return np.percentile(drawn, [2.5, 97.5]).tolist()


def coverage(
    law: Law, n_params: np.ndarray, tokens: np.ndarray, noise: float, wanted: tuple[float, float], n: int, n_laws: int
) -> float:
    """Return the share of n simulated experiments whose `prediction_interval` holds the new loss.

    The law is the truth of all, each log loss has normal noise, and fits begin at the law alone. wanted: parameters and
    tokens of the new loss.
    """
    rng, hits, start = np.random.default_rng(0), 0, np.array(dataclasses.astuple(law))
    for _ in range(n):
        losses = law(n_params, tokens) * np.exp(noise * rng.standard_normal(len(n_params)))
        best = Law(*_fit(np.log(n_params), np.log(tokens), np.log(losses), rng, 1, start))
        laws = bootstrap(best, n_params, tokens, losses, n_laws, n_starts=1)
        low, high = prediction_interval(laws, residuals(best, n_params, tokens, losses), *wanted)
        hits += low <= law(*wanted) * np.exp(noise * rng.standard_normal()) <= high
    return hits / n


def on_bound(law: Law) -> list[str]:
    """Return the names of the coefficients that are at an end of what the fit allows, which therefore decides them."""
    values, names = np.array(dataclasses.astuple(law)), [field.name for field in dataclasses.fields(Law)]
    near = np.minimum(values - _LOWEST, _HIGHEST - values) < 1e-3 * (_HIGHEST - _LOWEST)
    return [name for name, is_near in zip(names, near, strict=True) if is_near]


def _log_loss(x: np.ndarray, log_n: np.ndarray | float, log_d: np.ndarray | float) -> np.ndarray:
    log_a, log_b, log_e, alpha, beta = x
    return np.logaddexp(np.logaddexp(log_a - alpha * log_n, log_b - beta * log_d), log_e)


def _fit(
    log_n: np.ndarray,
    log_d: np.ndarray,
    log_loss: np.ndarray,
    rng: np.random.Generator,
    n_starts: int,
    first: np.ndarray | None = None,
) -> list[float]:
    """Return the best coefficients of fits from `n_starts` points, `first` among them."""

    def errors(x: np.ndarray) -> np.ndarray:
        return _log_loss(x, log_n, log_d) - log_loss

    def jacobian(x: np.ndarray) -> np.ndarray:
        log_a, log_b, log_e, alpha, beta = x
        terms = np.stack(np.broadcast_arrays(log_a - alpha * log_n, log_b - beta * log_d, log_e))
        a, b, e = np.exp(terms - np.logaddexp.reduce(terms))
        return np.stack([a, b, e, -a * log_n, -b * log_d], axis=1)

    def draw_start() -> np.ndarray:
        alpha, beta = rng.uniform(0.05, 1.2, 2)
        size = rng.uniform(-2, 2, 2)  # of both terms at the center of the runs, in log nats
        return np.array(
            [size[0] + alpha * log_n.mean(), size[1] + beta * log_d.mean(), rng.uniform(-3, 1), alpha, beta]
        )

    starts = [] if first is None else [first]
    starts += [draw_start() for _ in range(n_starts - len(starts))]
    options = dict(loss="huber", f_scale=_DELTA, x_scale=(1.0, 1.0, 1.0, 0.1, 0.1), max_nfev=2000)
    inside = [np.clip(x, _LOWEST, _HIGHEST) for x in starts]
    fits = [least_squares(errors, x, jacobian, bounds=(_LOWEST, _HIGHEST), **options) for x in inside]
    return min(fits, key=lambda fit: fit.cost).x.tolist()
