"""Forward and backward passes of attention: time and memory by the number of tokens."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax

from heinsen.errors import InputError
from heinsen.host import keep_host_memory
from scripts.benchmarking import measure
from scripts.benchmarking.contestants import (
    CHUNKED,
    DIRECTIONS,
    INPUTS,
    JaxContestant,
    Prepared,
    Shape,
    SkipError,
    TorchContestant,
    contestants,
    with_normal_inputs,
)
from scripts.benchmarking.versions import old_package

Summary = Mapping[str, Any]
Contestant = TypeVar("Contestant")


@dataclass(frozen=True)
class Settings:
    """Lengths in ascending order; dtypes [] means the device's default. inputs: kinds of them, for JAX's contestants.

    `only` names the contestants, [] means all; those in `skip` are left out, whether they could run here or not. A
    contestant with a call that took more than `time_limit` seconds is left out at longer sequences. old: a commit that
    is compared with (`contestants`).
    """

    lengths: Sequence[int]
    dtypes: Sequence[str]
    inputs: Sequence[str]
    only: Sequence[str]
    skip: Sequence[str]
    batch: int
    heads: int
    features: int
    repeats: int
    time_limit: float
    old: str | None = None

    def __post_init__(self) -> None:
        measure.check_dtypes(self.dtypes)
        for kind in self.inputs:
            if kind not in INPUTS:
                raise InputError(f"--inputs={kind}: choose among {', '.join(INPUTS)}")

    def choose(self, found: Mapping[str, Contestant]) -> dict[str, Contestant]:
        """Return the contestants to run. Raises InputError."""
        bare = {name: with_normal_inputs(name) for name in found}
        if unknown := set(self.only) - {*bare.values()}:
            raise InputError(
                f"--only={','.join(sorted(unknown))}: here there are {', '.join(dict.fromkeys(bare.values()))}"
            )
        chosen = {*(self.only or bare.values())} - {*self.skip}
        return {name: x for name, x in found.items() if bare[name] in chosen}

    def shape(self, n_tokens: int, dtype: str) -> Shape:
        return Shape(self.batch, self.heads, n_tokens, self.features, dtype)

    def describe(self) -> str:
        return f"causal, B={self.batch} H={self.heads} K=V={self.features}"


def benchmark_attention(settings: Settings, out: Path) -> str:
    """Run the benchmark, write OUT/results.json, and return the report. Raises InputError."""
    keep_host_memory()
    jax.config.update("jax_enable_compilation_cache", False)  # compilation is timed
    dtypes = settings.dtypes or measure.DTYPES[: 1 if jax.default_backend() == "cpu" else 2]
    with old_package(settings.old) as old:
        race = Race(settings, settings.choose(contestants(settings.inputs, old)))
        for dtype, n_tokens, direction in itertools.product(dtypes, settings.lengths, DIRECTIONS):
            race.run(settings.shape(n_tokens, dtype), direction)
            measure.write_results(out, race.summary())
            measure.tell(f"{dtype} T={n_tokens} {direction}: done")
    return "\n".join(report(race.summary()))


@dataclass
class Race:
    """Times the contestants in turn. Those that cannot continue are in `left_out`, with the reason."""

    settings: Settings
    contestants: Mapping[str, JaxContestant | TorchContestant]
    results: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[tuple[str, str, str], str] = field(default_factory=dict)  # {(name, direction, dtype): reason}

    def summary(self) -> dict[str, Any]:
        names = "name", "direction", "dtype", "why"
        left_out = [dict(zip(names, (*key, why), strict=True)) for key, why in self.left_out.items()]
        return measure.machine() | dict(shape=self.settings.describe(), results=self.results, left_out=left_out)

    def run(self, shape: Shape, direction: str) -> None:
        """Add one result for each contestant that can run; a slow one is timed once."""
        prepared, times = self._prepare(shape, direction)
        quick = {name: x.call for name, x in prepared.items() if times[name][0] <= self.settings.time_limit}
        times |= measure.time_in_turn(quick, self.settings.repeats)
        for name, entry in prepared.items():
            which = dict(name=name, direction=direction, dtype=shape.dtype, tokens=shape.n_tokens)
            took = dict(milliseconds=measure.milliseconds(times[name]), seconds=times[name])
            costs = dict(peak_bytes=entry.peak_bytes, seconds_compiling=entry.seconds_compiling)
            self.results.append(which | took | costs)

    def _prepare(self, shape: Shape, direction: str) -> tuple[dict[str, Prepared], dict[str, list[float]]]:
        """Return the contestants that can run at a shape, and the time of one call of each."""
        prepared, times = {}, {}
        for name, contestant in self.contestants.items():
            key = name, direction, shape.dtype
            if key in self.left_out:
                continue
            try:
                entry = contestant.prepare(shape, direction)
                measure.seconds(entry.call)
                took = measure.seconds(entry.call)
            except SkipError as reason:
                self.left_out[key] = str(reason)
            except Exception as error:  # out of memory, or a kernel that does not support this shape: go on without it
                self.left_out[key] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            else:
                prepared[name], times[name] = entry, [took]
                if took > self.settings.time_limit:
                    self.left_out[key] = f"took {took:.1f} s at T = {shape.n_tokens}"
        return prepared, times


# ---- the report ----------------------------------------------------------------------------------

_TABLES = {
    "ms": ("milliseconds", 1.0),
    "MiB beyond the inputs": ("peak_bytes", 2.0**-20),
    "seconds of compilation": ("seconds_compiling", 1.0),
}


def report(summary: Summary) -> list[str]:
    """Return the lines of the report."""
    lines = [f"{summary['shape']}; {measure.describe_machine(summary)}"]
    groups = dict.fromkeys((r["direction"], r["dtype"]) for r in summary["results"])
    for direction, dtype in groups:
        chosen = [r for r in summary["results"] if (r["direction"], r["dtype"]) == (direction, dtype)]
        for title, (key, scale) in _TABLES.items():
            lines += ["", f"{direction}, {dtype}, {title}", *_table(chosen, key, scale)]
        lines.append("")
        lines += [f"{direction}, {dtype}: {line}" for line in _ratios(chosen)]
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in summary["left_out"]:
        reasons.setdefault((r["name"], r["why"]), []).append(f"{r['direction']} {r['dtype']}")
    return lines + [f"left out: {name} ({', '.join(cases)}): {why}" for (name, why), cases in reasons.items()]


def _table(results: list[dict[str, Any]], key: str, scale: float) -> list[str]:
    known = [r for r in results if r[key] is not None]
    names, lengths = (list(dict.fromkeys(r[name] for r in known)) for name in ("name", "tokens"))
    width = max([len(name) for name in names], default=0)
    lines = [" " * width + "".join(f"{f'T={n}':>12}" for n in lengths)]
    for name in names:
        cells = {r["tokens"]: f"{r[key] * scale:.4g}" for r in known if r["name"] == name}
        lines.append(name.ljust(width) + "".join(f"{cells.get(n, '-'):>12}" for n in lengths))
    return lines


def _ratios(results: list[dict[str, Any]]) -> list[str]:
    """Return lines that compare contestants, by length: with normal inputs, with the old version, or with CHUNKED."""
    milliseconds = {(r["name"], r["tokens"]): r["milliseconds"] for r in results}
    ratios: dict[tuple[str, str], list[str]] = {}
    for (name, n_tokens), took in milliseconds.items():
        bases = (with_normal_inputs(name), name.replace("heinsen", "old", 1), CHUNKED)
        base = next((x for x in bases if x != name and (x, n_tokens) in milliseconds), None)
        if base is not None and not name.startswith("old"):
            ratio = took / milliseconds[base, n_tokens]
            ratios.setdefault((name, base), []).append(f"{ratio:.2f} (T={n_tokens})")
    return [f"{name} takes {', '.join(found)} times as long as {base}" for (name, base), found in ratios.items()]
