"""Measurements of output norms, convergence and doubling, and the exponents fitted to them.

Axes: H heads, N tokens to draw from, n keys, Q queries, d features.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from experiments.sigmoid_scaling.forms import Form, Run, norms_by_law

HEADS, FEATURES, QUERIES = 2, 32, 16
WIDTH, VOCABULARY = 256, 4096  # of tokens
MEAN = 1.0  # length of the tokens' mean relative to their spread
_DOUBLED = 1024  # tokens that are doubled, at most
_KEYS_PER_CALL = 2**19  # over all sequences


class Tokens(NamedTuple):
    """Tokens as the heads see them."""

    q: np.ndarray  # [H, N, d]
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, mean: float = MEAN) -> "Tokens":
        """Random maps of normal vectors around a common mean, `mean` times as long as their spread, of order 1."""
        x = rng.standard_normal((VOCABULARY, WIDTH)) + mean * rng.standard_normal(WIDTH)
        x /= np.sqrt(1 + mean**2)
        maps = rng.standard_normal((3, HEADS, WIDTH, FEATURES)) / np.sqrt(WIDTH)
        return cls(*np.einsum("nw,phwd->phnd", x, maps, optimize=True))

    def draw(self, rng: np.random.Generator, n_sequences: int, n: int) -> np.ndarray:
        """The indices of the tokens of random sequences, [n_sequences, n]."""
        return rng.integers(self.k.shape[1], size=(n_sequences, n))


def moments(tokens: Tokens, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean I of sigmoid(q . k / sqrt(d)) v over all tokens, [H, Q, d], and its variance C, [H, Q]."""
    weights = 1 / (1 + np.exp(-(tokens.q[:, queries] @ tokens.k.swapaxes(-1, -2)) / np.sqrt(FEATURES)))
    n_tokens = tokens.k.shape[1]
    first = weights @ tokens.v / n_tokens
    second = np.einsum("hqn,hn->hq", weights**2, np.sum(tokens.v**2, axis=-1)) / n_tokens
    return first, second - np.sum(first**2, axis=-1)


def measure_outputs(
    forms: Mapping[str, Form],
    run: Run,
    tokens: Tokens,
    queries: np.ndarray,
    lengths: Sequence[int],
    n_sequences: int,
    rng: np.random.Generator,
) -> dict[str, dict[str, np.ndarray]]:
    """Return {form: {"norm": |y|, "error": |y - limit|}}, each [lengths, sequences], root mean squares over queries.

    The limit is the output for all tokens together; the error is NaN for forms without one. All forms receive the same
    sequences.
    """
    rms = lambda y: np.sqrt(np.mean(np.sum(np.square(y), axis=-1), axis=(-2, -1)))
    q = tokens.q[:, queries]
    limits = {name: y if forms[name].converges else np.nan for name, y in run(q, tokens.k, tokens.v).items()}
    found: dict[str, dict[str, list[np.ndarray]]] = {name: {"norm": [], "error": []} for name in forms}
    for n in tqdm(lengths, "numbers of keys"):
        most = min(n_sequences, max(1, _KEYS_PER_CALL // n))
        per_call = next(m for m in range(most, 0, -1) if n_sequences % m == 0)
        parts = []
        for _ in range(n_sequences // per_call):
            drawn = tokens.draw(rng, per_call, n)
            k, v = (np.moveaxis(x[:, drawn], 0, 1) for x in (tokens.k, tokens.v))
            parts.append(run(np.broadcast_to(q, (per_call, *q.shape)), k, v))
        for name, row in found.items():
            y = np.concatenate([part[name] for part in parts])
            row["norm"].append(rms(y))
            row["error"].append(rms(y - limits[name]))
    return {name: {quantity: np.array(rows) for quantity, rows in row.items()} for name, row in found.items()}


def measure_doubling(
    forms: Mapping[str, Form], run: Run, tokens: Tokens, n: int, rng: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Compare (x_1, x_1, ..., x_n, x_n) with (x_1, ..., x_n), with every token as a query.

    Returns {form: {"ratio": mean ratio of the norms, "departure": largest |y_doubled - predicted ratio * y| / |y|}};
    the departure is NaN for forms without a prediction.
    """
    drawn = tokens.draw(rng, 1, n)[0]
    once = [x[:, drawn] for x in (tokens.q, tokens.k, tokens.v)]
    ys, ys_doubled = run(*once), run(*(np.repeat(x, 2, axis=1) for x in once))
    norm = lambda y: np.linalg.norm(y, axis=-1)
    found = {}
    for name, form in forms.items():
        y, y_doubled = np.repeat(ys[name], 2, axis=1), ys_doubled[name]
        predicted = np.nan if form.doubling is None else form.doubling
        departure = np.max(norm(y_doubled - predicted * y) / norm(y))
        found[name] = {"ratio": float(np.mean(norm(y_doubled) / norm(y))), "departure": float(departure)}
    return found


def fit_exponent(lengths: Sequence[int], values: np.ndarray) -> tuple[float, float]:
    """Return the exponent of values [lengths, sequences] and its standard error.

    Each column has sequences of its own, and a slope by least squares of logarithms; the exponent is the mean of the
    slopes. The error of a single column is 0.
    """
    x = np.log(lengths) - np.mean(np.log(lengths))
    slopes = x @ np.log(values) / np.sum(x**2)
    error = np.std(slopes, ddof=1) / np.sqrt(len(slopes)) if len(slopes) > 1 else 0.0
    return float(np.mean(slopes)), float(error)


def study(
    forms: Mapping[str, Form],
    run: Run,
    tokens: Tokens,
    lengths: Sequence[int],
    n_sequences: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return all measurements, ready for JSON; `run` is `compile_together(forms)`."""
    queries = rng.choice(tokens.k.shape[1], QUERIES, replace=False)
    integral, variances = moments(tokens, queries)
    square, variance = float(np.mean(np.sum(integral**2, axis=-1))), float(np.mean(variances))
    outputs = measure_outputs(forms, run, tokens, queries, lengths, n_sequences, rng)
    doubling = measure_doubling(forms, run, tokens, min(_DOUBLED, tokens.k.shape[1]), rng)
    long = lengths[(len(lengths) - 1) // 2 :]
    fluctuation = lambda lengths: fit_exponent(lengths, norms_by_law(lengths, 1.0, square, variance)[:, None])[0]
    rows = []
    for name, form in forms.items():
        norms, errors = outputs[name]["norm"], outputs[name]["error"]
        rows.append(
            dict(
                form=name,
                alpha=form.alpha,
                growth_predicted=form.growth,
                growth=fit_exponent(lengths, norms),
                growth_of_long=fit_exponent(long, norms[-len(long) :]),
                doubling_predicted=form.doubling,
                doubling=doubling[name]["ratio"],
                doubling_departure=None if form.doubling is None else doubling[name]["departure"],
                convergence=fit_exponent(lengths, errors) if form.converges else None,
                norms=np.mean(norms, axis=1).tolist(),
                errors=np.mean(errors, axis=1).tolist() if form.converges else None,
            )
        )
    return dict(
        heads=HEADS,
        features=FEATURES,
        queries=QUERIES,
        population=tokens.k.shape[1],
        lengths=lengths,
        fitted_long=long,
        sequences=n_sequences,
        norm_of_integral=square**0.5,
        variance_of_one=variance,
        crossover=variance / square,
        growth_of_fluctuation=[fluctuation(lengths), fluctuation(long)],
        forms=rows,
    )
