"""Sampling: time to draw a token from logits, and what top-p costs by a sort of the vocabulary.

The logits are flat, as of a model at its start, or peaked, as of a trained one.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from heinsen.decoding import Sampling, sample
from heinsen.files import make_folder
from scripts.benchmarking.measure import describe_versions, device_name, seconds, versions, warm_up, write_results

TOP_P = 0.95
DEVIATIONS = {"flat": 0.1, "peaked": 3.0}  # of the logits

Draw = Callable[[jax.Array, jax.Array], jax.Array]  # (a key for each row, logits [B, V]) -> ids [B]


def benchmark_sampling(vocab_size: int, batches: Sequence[int], repeats: int, out: Path) -> str:
    """Run the benchmark, write OUT/results.json, and return the report."""
    make_folder(out)
    results: list[dict[str, Any]] = []
    summary = dict(device=device_name(), versions=versions(), vocab_size=vocab_size, repeats=repeats, results=results)
    for batch in batches:
        for logits in DEVIATIONS:
            results += time_draws(logits, batch, vocab_size, repeats)
            path = write_results(out, summary)  # so far: a stopped process leaves what it has found
    lines = [
        f"{device_name()}; {describe_versions()}; a vocabulary of {vocab_size}",
        f"{'batch':>5} {'logits':<8} {'sampling':<18} {'ms':>9}",
        *(f"{r['batch']:>5} {r['logits']:<8} {r['name']:<18} {r['milliseconds']:>9.3f}" for r in results),
    ]
    return "\n".join([*lines, f"written: {path}"])


def time_draws(logits: str, batch: int, vocab_size: int, repeats: int) -> list[dict[str, Any]]:
    """Time all ways to draw in turn."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), batch)
    x = jnp.asarray(DEVIATIONS[logits] * rng.standard_normal((batch, vocab_size)), jnp.float32)
    draws: dict[str, Draw] = {
        "greedy": prepare(Sampling(0.0), vocab_size),
        "all": prepare(Sampling(), vocab_size),
        "top_k 50": prepare(Sampling(top_k=50), vocab_size),
        f"top_p {TOP_P}": prepare(Sampling(top_p=TOP_P), vocab_size),
        f"top_p {TOP_P}, sorted": jax.jit(draw_from_sorted),
    }
    calls = {name: lambda draw=draw: draw(keys, x).block_until_ready() for name, draw in draws.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        warm_up(call)
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return [
        dict(batch=batch, logits=logits, name=name, milliseconds=1e3 * statistics.median(of))
        for name, of in times.items()
    ]


def prepare(sampling: Sampling, vocab_size: int) -> Draw:
    return jax.jit(lambda keys, logits: sample(keys, logits, sampling, vocab_size))


def draw_from_sorted(keys: jax.Array, logits: jax.Array) -> jax.Array:
    """Draw by top-p as its definition says: sort, add up, cut, and draw a rank."""
    descending, order = jax.lax.top_k(logits, logits.shape[-1])
    p = jax.nn.softmax(descending, axis=-1)
    descending = jnp.where(jnp.cumsum(p, axis=-1) - p < TOP_P, descending, -jnp.inf)
    rank = jax.vmap(jax.random.categorical)(keys, descending)
    return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0]
