"""Largest errors of every implementation of attention on this device, against float64 on the host.

Inputs are normal numbers times sigma, in float32 or rounded to bfloat16: queries, keys and values; with a gate also log
decays in float32, whose time constants are spread over 1 to 1000 tokens. The promised tolerances are those of
docs/attention.md for float32; with bfloat16 what values and outputs of 8 bits allow (`output_tolerance`).
"""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import heinsen
from heinsen.errors import InputError
from scripts.benchmarking import measure

FUNCTIONS = {"log": heinsen.log_attention, "real": heinsen.attention}
SIGMAS = (1, 8, 64)
GRADIENT_TOLERANCES = {"float32": 1e-4, "bfloat16": 2.0**-6}  # of a tensor's largest


def output_tolerance(sigma: float, dtype: str) -> float:
    """Return the promised error of log y, and of y relative to the largest.

    Weights and values that are rounded to bfloat16, and y, are off by 2^-9 each.
    """
    if dtype == "bfloat16":
        return 2.0**-7
    return 2e-5 if sigma <= 8 else 2e-4


class Case(NamedTuple):
    """Inputs and the cotangent of the output: [H, T, K] each, of one dtype; the log decays [H, T] in float32."""

    q: np.ndarray
    k: np.ndarray
    values: np.ndarray
    log_decay: np.ndarray | None
    cotangent: np.ndarray


Results = dict[str, np.ndarray]  # the output "y", and gradients by the names of a case's inputs


def benchmark_accuracy(
    lengths: Sequence[int], dtypes: Sequence[str], only: Sequence[str], heads: int, features: int, out: Path
) -> str:
    """Run the benchmark, write OUT/results.json, and return the report. Raises InputError.

    only: names of the implementations, (): all.
    """
    measure.check_dtypes(dtypes)
    if unknown := set(only) - {*measure.IMPLEMENTATIONS}:
        raise InputError(f"--only={','.join(sorted(unknown))}: there are {', '.join(measure.IMPLEMENTATIONS)}")
    implementations = [name for name in measure.IMPLEMENTATIONS if name in (only or measure.IMPLEMENTATIONS)]
    summary: dict[str, Any] = measure.machine() | dict(heads=heads, features=features, rows=[], left_out=[])
    for n_tokens in lengths:
        errors = lambda which, n_tokens=n_tokens: measure_errors((heads, n_tokens, features), *which)
        combinations = itertools.product(implementations, FUNCTIONS, (False, True), dtypes or measure.DTYPES)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # most of the time goes into compiling
            for rows, left_out in pool.map(errors, combinations):
                summary["rows"] += rows
                summary["left_out"] += left_out
                measure.write_results(out, summary)
        measure.tell(f"T={n_tokens}: done")
    return "\n".join(report(summary))


def measure_errors(
    shape: tuple[int, int, int], implementation: str, values: str, gated: bool, dtype: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of an implementation at a shape [H, T, K] for every sigma, and why there are no more, if so."""
    which = dict(implementation=implementation, values=values, gated=gated, dtype=dtype, tokens=shape[1])
    rows: list[dict[str, Any]] = []
    call = prepare(implementation, values)
    for sigma in SIGMAS:
        case = draw_case(shape, sigma, gated, dtype)
        try:
            got = call(case)
        except Exception as error:
            # A ValueError or NotImplementedError says what an implementation does not do; all else is a defect.
            failed = not isinstance(error, ValueError | NotImplementedError)
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return rows, [dict(**which, why=why, failed=failed)]
        rows.append(dict(**which, sigma=sigma, **judge(got, compute(case, values), values, sigma, dtype)))
    return rows, []


def judge(got: Results, want: Results, values: str, sigma: float, dtype: str = "float32") -> dict[str, Any]:
    """Return the errors by name, None for what is not finite, the tolerances, and whether all are within them.

    log y's error is absolute, that of y and of a gradient relative to the largest.
    """
    errors: dict[str, float | None] = {}
    for name, expected in want.items():
        scale = 1.0 if (name, values) == ("y", "log") else float(np.max(np.abs(expected)))
        error = float(np.max(np.abs(got[name].astype(np.float64) - expected))) / scale
        errors[name] = error if math.isfinite(error) else None
    allowed = {"y": output_tolerance(sigma, dtype)}
    tolerances = {name: allowed.get(name, GRADIENT_TOLERANCES[dtype]) for name in want}
    passed = all(error is not None and error <= tolerances[name] for name, error in errors.items())
    return dict(errors=errors, tolerances=tolerances, passed=passed)


def draw_case(shape: tuple[int, int, int], sigma: float, gated: bool, dtype: str = "float32") -> Case:
    rng = np.random.default_rng(0)
    normal = lambda scale: (scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype))
    q, k, values, cotangent = normal(sigma), normal(sigma), normal(sigma), normal(1.0)
    log_decay = (-(1e-3 ** rng.random(shape[:-1]))).astype(np.float32) if gated else None
    return Case(q, k, values, log_decay, cotangent)


def prepare(implementation: str, values: str) -> Callable[[Case], Results]:
    """Return a call that computes the output and its gradients on the device."""

    def run(inputs: dict[str, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        def attend(inputs: dict[str, jax.Array]) -> jax.Array:
            arrays = inputs["q"], inputs["k"], inputs["values"]
            return FUNCTIONS[values](*arrays, log_decay=inputs.get("log_decay"), implementation=implementation)

        y, pull = jax.vjp(attend, inputs)
        return y, pull(cotangent.astype(y.dtype))[0]

    compiled = jax.jit(run)

    def call(case: Case) -> Results:
        inputs = {name: x for name, x in case._asdict().items() if name != "cotangent" and x is not None}
        y, gradients = compiled(inputs, case.cotangent)
        return {"y": np.asarray(y)} | {name: np.asarray(x) for name, x in gradients.items()}

    return call


# ---- float64 -------------------------------------------------------------------------------------


def compute(case: Case, values: str) -> Results:
    """Return output and gradients by the equations in float64, quadratic in T."""
    of_head = lambda head: [None if x is None else x[head].astype(np.float64) for x in case]
    heads = [compute_head(*of_head(head), values) for head in range(len(case.q))]
    return {name: np.stack([head[name] for head in heads]) for name in heads[0]}


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


# ---- the report ----------------------------------------------------------------------------------


def report(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines of the report: a row per implementation and case, and a verdict."""
    lines = [
        f"causal, H={summary['heads']} K=V={summary['features']}; {measure.describe_machine(summary)}",
        "errors against float64: log y absolute; y and gradients relative to the largest",
        f"{'implementation':<14} {'values':<34} {'sigma':>5} {'T':>6} {'output':>8} {'allowed':>8} "
        f"{'gradient':>8} {'allowed':>8} {'worst by':<10}",
    ]
    for row in summary["rows"]:
        name, error = worst_gradient(row["errors"])
        lines.append(
            f"{row['implementation']:<14} {kind(row):<34} {row['sigma']:>5g} {row['tokens']:>6} "
            f"{_number(row['errors']['y']):>8} {row['tolerances']['y']:>8.0e} "
            f"{_number(error):>8} {row['tolerances'][name]:>8.0e} {name:<10} {'pass' if row['passed'] else 'FAIL'}"
        )
    for each in summary["left_out"]:
        state = "FAIL" if each["failed"] else "left out"
        lines.append(f"{state}: {each['implementation']}, {kind(each)}, T = {each['tokens']}: {each['why']}")
    n_passed, n_failed = (sum(x[key] for x in summary[of]) for of, key in (("rows", "passed"), ("left_out", "failed")))
    verdict = f"{n_passed} of {len(summary['rows'])} rows within their tolerances"
    return [*lines, f"{verdict}; {n_failed} failed to run; {len(summary['left_out']) - n_failed} left out"]


def kind(which: Mapping[str, Any]) -> str:
    return f"{which['values']} values{', forget gate' if which['gated'] else ''}, {which['dtype']}"


def worst_gradient(errors: Mapping[str, float | None]) -> tuple[str, float | None]:
    """Return the input whose gradient has the largest error, with the error; None: it is not finite."""
    gradients = [(name, error) for name, error in errors.items() if name != "y"]
    return max(gradients, key=lambda each: math.inf if each[1] is None else each[1])


def _number(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"
