"""Largest errors of every implementation of attention on this device, against float64 on the host.

Inputs are normal numbers times sigma, in float32: queries, keys and values; with a gate also log decays, whose time
constants are spread over 1 to 1000 tokens. The promised tolerances are those of docs/attention.md.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import heinsen
from heinsen.files import make_folder
from heinsen.ops.api import IMPLEMENTATIONS
from heinsen.sweep.machine import usable_cores
from scripts.benchmarking import accuracy_report
from scripts.benchmarking.measure import device_name, versions, write_results

FUNCTIONS = {"log": heinsen.log_attention, "real": heinsen.attention}
GRADIENT_TOLERANCE = 1e-4  # of a tensor's largest


def output_tolerance(sigma: float) -> float:
    """Return the promised error of log y, and of y relative to the largest."""
    return 2e-5 if sigma <= 8 else 2e-4


@dataclass(frozen=True)
class Settings:
    """Lengths in ascending order; no implementation is begun later than `stop_after` seconds after the start."""

    lengths: Sequence[int]
    sigmas: Sequence[float]
    heads: int
    features: int
    stop_after: float


class Case(NamedTuple):
    """Inputs and the cotangent of the output, in float32: [H, T, K] each, the log decays [H, T]."""

    q: np.ndarray
    k: np.ndarray
    values: np.ndarray
    log_decay: np.ndarray | None
    cotangent: np.ndarray


Results = dict[str, np.ndarray]  # the output "y", and gradients by the names of a case's inputs


def benchmark_accuracy(settings: Settings, out: Path) -> str:
    """Run the benchmark, write OUT/results.json and OUT/accuracy.png, and return the report."""
    make_folder(out)
    trial = Trial(settings)
    summary: dict[str, Any] = dict(
        device=device_name(),
        versions=versions(),
        heads=settings.heads,
        features=settings.features,
        rows=trial.rows,
        left_out=trial.left_out,
    )
    for n_tokens in settings.lengths:
        trial.run(n_tokens)
        path = write_results(out, summary)  # so far: a process that is stopped leaves what it has found
    paths = path, accuracy_report.plot(summary, out / "accuracy.png")
    return "\n".join([*accuracy_report.report(summary), f"written: {', '.join(map(str, paths))}"])


@dataclass
class Trial:
    """Collects a row of errors per implementation and case, and the reasons where there is none."""

    settings: Settings
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def run(self, n_tokens: int) -> None:
        """Add the rows of all implementations and kinds of inputs at a length, compiling as many at a time as cores."""
        combinations = itertools.product(FUNCTIONS, (False, True), IMPLEMENTATIONS)
        which = [
            dict(implementation=implementation, values=values, gated=gated, tokens=n_tokens)
            for values, gated, implementation in combinations
        ]
        with ThreadPoolExecutor(len(usable_cores())) as pool:
            for rows, left_out in pool.map(self._try, which):
                self.rows += rows
                self.left_out += left_out

    def _try(self, which: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows of an implementation for every sigma, and the reason why there are no more, if so."""
        if time.monotonic() - self.start > self.settings.stop_after:
            return [], [dict(**which, why="no time left", failed=False)]
        rows, values = [], which["values"]
        call = prepare(which["implementation"], values)
        for sigma in self.settings.sigmas:
            case = draw_case((self.settings.heads, which["tokens"], self.settings.features), sigma, which["gated"])
            try:
                got = call(case)
            except Exception as error:
                # A ValueError or NotImplementedError says what an implementation does not do; all else is a defect.
                failed = not isinstance(error, ValueError | NotImplementedError)
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                return rows, [dict(**which, why=why, failed=failed)]
            rows.append(dict(**which, sigma=sigma, **judge(got, compute(case, values), values, sigma)))
        kind = accuracy_report.kind(values, which["gated"])
        print(f"T={which['tokens']} {which['implementation']}, {kind}: done", file=sys.stderr, flush=True)
        return rows, []


def judge(got: Results, want: Results, values: str, sigma: float) -> dict[str, Any]:
    """Return the errors by name, None for what is not finite, the tolerances, and whether all are within them.

    log y's error is absolute, that of y and of a gradient relative to the largest.
    """
    errors: dict[str, float | None] = {}
    for name, expected in want.items():
        scale = 1.0 if (name, values) == ("y", "log") else float(np.max(np.abs(expected)))
        error = float(np.max(np.abs(got[name].astype(np.float64) - expected))) / scale
        errors[name] = error if math.isfinite(error) else None
    tolerances = {name: output_tolerance(sigma) if name == "y" else GRADIENT_TOLERANCE for name in want}
    passed = all(error is not None and error <= tolerances[name] for name, error in errors.items())
    return dict(errors=errors, tolerances=tolerances, passed=passed)


def draw_case(shape: tuple[int, int, int], sigma: float, gated: bool) -> Case:
    rng = np.random.default_rng(0)
    normal = lambda scale: (scale * rng.standard_normal(shape)).astype(np.float32)
    q, k, values, cotangent = normal(sigma), normal(sigma), normal(sigma), normal(1.0)
    log_decay = (-(1e-3 ** rng.random(shape[:-1]))).astype(np.float32) if gated else None
    return Case(q, k, values, log_decay, cotangent)


def prepare(implementation: str, values: str) -> Callable[[Case], Results]:
    """Return a call that computes the output and its gradients on the device, in float32."""

    def run(inputs: dict[str, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        def attend(inputs: dict[str, jax.Array]) -> jax.Array:
            arrays = inputs["q"], inputs["k"], inputs["values"]
            return FUNCTIONS[values](*arrays, log_decay=inputs.get("log_decay"), implementation=implementation)

        y, pull = jax.vjp(attend, inputs)
        return y, pull(cotangent)[0]

    compiled = jax.jit(run)

    def call(case: Case) -> Results:
        inputs = {name: x for name, x in case._asdict().items() if name != "cotangent" and x is not None}
        y, gradients = compiled(inputs, case.cotangent)
        return {"y": np.asarray(y)} | {name: np.asarray(x) for name, x in gradients.items()}

    return call


# ---- float64 -------------------------------------------------------------------------------------


def compute(case: Case, values: str) -> Results:
    """Return output and gradients by the equations in float64, quadratic in T."""
    heads = [compute_head(*head, values) for head in _heads(case)]
    return {name: np.stack([head[name] for head in heads]) for name in heads[0]}


def _heads(case: Case) -> list[list[np.ndarray | None]]:
    return [[None if x is None else x[head].astype(np.float64) for x in case] for head in range(len(case.q))]


def compute_head(
    q: np.ndarray,
    k: np.ndarray,
    x: np.ndarray,
    log_decay: np.ndarray | None,
    g: np.ndarray,
    values: str,
) -> Results:
    """Return output and gradients of one head, with values x and cotangent g.

    w[t, s] = exp(q[t]) . exp(k[s]) times the decays after s up to t, for s <= t, is relative to the largest of a row.
    Its products have exponents of up to nine standard deviations, which float64 holds up to sigma = 64.
    """
    e_q, e_k = np.exp(q - q.max(-1, keepdims=True)), np.exp(k - k.max(-1, keepdims=True))
    features = e_q @ e_k.T
    logits = np.log(features) + q.max(-1)[:, None] + k.max(-1)
    if log_decay is not None:
        total = np.cumsum(log_decay)
        logits += total[:, None] - total
    logits[np.triu_indices(len(q), 1)] = -np.inf
    w = np.exp(logits - logits.max(-1, keepdims=True))
    z = w.sum(-1, keepdims=True)
    # d_logits is the gradient by log w.
    if values == "log":
        shift = x.max(0)
        v = np.exp(x - shift)
        s = w @ v
        y = np.log(s) - np.log(z) + shift
        d_logits = w * ((g / s) @ v.T - g.sum(-1, keepdims=True) / z)
        d_x = v * (w.T @ (g / s))
    else:
        p = w / z
        y = p @ x
        d_logits = p * (g @ x.T - (g * y).sum(-1, keepdims=True))
        d_x = p.T @ g
    per_feature = d_logits / features
    results = {"y": y, "q": e_q * (per_feature @ e_k), "k": e_k * (per_feature.T @ e_q), "values": d_x}
    if log_decay is not None:  # r counts in all pairs s < r <= t
        before = np.cumsum(d_logits, axis=-1) - d_logits
        results["log_decay"] = np.sum(np.tril(before), axis=0)
    return results
