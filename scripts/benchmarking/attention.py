"""Forward and backward passes of attention: time and memory by the number of tokens."""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from heinsen.distributed import keep_host_memory
from heinsen.errors import InputError
from heinsen.files import make_folder
from scripts.benchmarking import attention_report
from scripts.benchmarking.contestants import (
    CHUNKED,
    DIRECTIONS,
    Prepare,
    Prepared,
    Shape,
    SkipError,
    contestants,
)
from scripts.benchmarking.measure import device_name, seconds, versions, warm_up, write_results

Result = dict[str, Any]
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Settings:
    """Lengths in ascending order, dtypes in order; dtypes () means the device's default.

    `only` names the contestants, () means all; those in `skip` are left out, whether they could run here or not.
    """

    lengths: Sequence[int]
    dtypes: Sequence[str]
    only: Sequence[str]
    skip: Sequence[str]
    batch: int
    heads: int
    features: int
    repeats: int
    time_limit: float  # seconds per call
    stop_after: float  # seconds after the start, when nothing more is begun

    def shape(self, n_tokens: int, dtype: str) -> Shape:
        return Shape(self.batch, self.heads, n_tokens, self.features, dtype)


def benchmark_attention(settings: Settings, out: Path) -> str:
    """Run the benchmark, write OUT/results.json and OUT/attention.png, and return the report. Raises InputError."""
    keep_host_memory()
    dtypes = settings.dtypes or DTYPES[: 1 if jax.default_backend() == "cpu" else 2]
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise InputError(f"--dtypes={dtype}: choose float32 or bfloat16")
    race = Race(settings, _choose(contestants(), settings))
    make_folder(out)
    for dtype in dtypes:
        for n_tokens in settings.lengths:
            race.drop_slow(n_tokens)
            for direction in DIRECTIONS:
                race.run(settings.shape(n_tokens, dtype), direction)
                write_results(out, summarize(settings, race))  # so far: a stopped process leaves what it has found
                elapsed = time.monotonic() - race.start
                print(f"{dtype} T={n_tokens} {direction}: done after {elapsed:.0f} s", file=sys.stderr, flush=True)
    growth = [each for dtype in dtypes for direction in DIRECTIONS for each in race.growth(dtype, direction)]
    summary = summarize(settings, race, growth)
    paths = write_results(out, summary), attention_report.plot(summary, out / "attention.png")
    return "\n".join([*attention_report.report(summary), f"written: {', '.join(map(str, paths))}"])


def summarize(settings: Settings, race: "Race", growth: Sequence[Result] = ()) -> dict[str, Any]:
    return dict(
        device=device_name(),
        versions=versions(),
        batch=settings.batch,
        heads=settings.heads,
        features=settings.features,
        results=race.results,
        growth=growth,
        left_out=[
            dict(name=name, direction=direction, dtype=dtype, why=reason)
            for (name, direction, dtype), reason in race.left_out.items()
        ],
    )


def _choose(found: Mapping[str, Prepare], settings: Settings) -> dict[str, Prepare]:
    if unknown := set(settings.only) - found.keys():
        raise InputError(f"--only={','.join(sorted(unknown))}: here there are {', '.join(found)}")
    chosen = settings.only or found
    return {name: prepare for name, prepare in found.items() if name in chosen and name not in settings.skip}


@dataclass
class Race:
    """Times the contestants in turn. Those that cannot continue are in `left_out`, with the reason."""

    settings: Settings
    entries: Mapping[str, Prepare]
    results: list[Result] = field(default_factory=list)
    left_out: dict[tuple[str, str, str], str] = field(default_factory=dict)  # {(name, direction, dtype): reason}
    start: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.start > self.settings.stop_after

    def run(self, shape: Shape, direction: str) -> None:
        """Add one result for each contestant that can run."""
        prepared, times = self._prepare(shape, direction)
        for _ in range(self.settings.repeats - 1):
            for name, entry in prepared.items():
                if (
                    not self.is_over
                    and statistics.median(times[name]) * len(times[name]) < 3 * self.settings.time_limit
                ):
                    warm_up(entry.call)
                    times[name].append(seconds(entry.call))
        self.results += [
            dict(
                name=name,
                direction=direction,
                dtype=shape.dtype,
                tokens=shape.n_tokens,
                milliseconds=1e3 * statistics.median(times[name]),
                fastest_milliseconds=1e3 * min(times[name]),
                calls=len(times[name]),
                peak_bytes=entry.peak_bytes,
            )
            for name, entry in prepared.items()
        ]

    def _prepare(self, shape: Shape, direction: str) -> tuple[dict[str, Prepared], dict[str, list[float]]]:
        """Return the contestants that can run at a shape, and the time of one call of each."""
        prepared, times = {}, {}
        for name, prepare in self.entries.items():
            key = name, direction, shape.dtype
            if self.is_over:
                self.left_out.setdefault(key, f"no time left at T = {shape.n_tokens}")
            if key in self.left_out:
                continue
            try:
                entry = prepare(shape, direction)
                seconds(entry.call)
                took = seconds(entry.call)
            except SkipError as reason:
                self.left_out[key] = str(reason)
            except Exception as error:  # out of memory, or a kernel that does not support this shape: go on without it
                self.left_out[key] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            else:
                prepared[name], times[name] = entry, [took]
                if took > self.settings.time_limit:
                    self.left_out[key] = f"took {took:.1f} s at T = {shape.n_tokens}"
        return prepared, times

    def drop_slow(self, n_tokens: int) -> None:
        """Drop the contestants that would exceed the time limit if their time kept growing as it did last."""
        for result in self.results:
            growth = 1.0
            for earlier in self.results:
                same = all(result[name] == earlier[name] for name in ("name", "direction", "dtype"))
                if same and earlier["tokens"] * 4 == result["tokens"]:
                    growth = result["milliseconds"] / earlier["milliseconds"] / 4
            ratio = n_tokens / result["tokens"]
            expected = 1e-3 * result["milliseconds"] * ratio * (ratio if growth > 2 else 1)
            if ratio > 1 and expected > self.settings.time_limit:
                key = result["name"], result["direction"], result["dtype"]
                self.left_out.setdefault(key, f"would take {expected:.0f} s at T = {n_tokens}")

    def growth(self, dtype: str, direction: str) -> list[Result]:
        """Return the chunked form's time per token at each length as a multiple of that at the first, from 1024 on.

        All lengths take turns, because the machine's speed varies.
        """
        which = dict(name=CHUNKED, direction=direction, dtype=dtype)
        lengths = [r["tokens"] for r in self.results if which.items() <= r.items() and r["tokens"] >= 1024]
        if len(lengths) < 2 or self.is_over:
            return []
        calls = {n: self.entries[CHUNKED](self.settings.shape(n, dtype), direction).call for n in lengths}
        times: dict[int, list[float]] = {n: [] for n in lengths}
        for _ in range(self.settings.repeats):
            for n, call in calls.items():
                warm_up(call)
                times[n].append(seconds(call) / n)
        first = statistics.median(times[lengths[0]])
        return [dict(**which, tokens=n, since=lengths[0], ratio=statistics.median(times[n]) / first) for n in lengths]
