"""The definition of a sweep: its base config, its space, and the strategy that chooses points from the space.

A sweep is written to disk as its Definition and read back from it.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from heinsen.sweep.space import (
    SEED,
    Point,
    Range,
    Space,
    SweepError,
    Value,
    folder_name,
    format_values,
)


@dataclasses.dataclass(frozen=True)
class Definition:
    """A whole sweep. Raises SweepError for settings that do not go together.

    `base` is the config's mapping with the overrides of every run. Every point runs once for each of `seeds`. `trials`
    is the number of points of a random or Optuna search; it may grow when a sweep is resumed. `data_digest` is of the
    content of all data that runs read; None: unknown.
    """

    config: str
    overrides: dict[str, str]
    base: dict[str, Any]
    space: Space
    seeds: tuple[int, ...] | None
    search: str
    trials: int | None
    search_seed: int
    data_digest: str | None = None

    def __post_init__(self) -> None:
        strategy, option = self.strategy, f"--search={self.search}"
        ranges = [field for field, values in self.space.items() if isinstance(values, Range)]
        if not self.space and self.seeds is None:
            raise SweepError("nothing to sweep: give --sweep.FIELD=V1,V2,... or --seeds=N")
        if self.seeds is not None and SEED in self.space:
            raise SweepError(f"--seeds and --sweep.{SEED} exclude each other")
        if both := sorted(self.overrides.keys() & self.space.keys()):
            raise SweepError(f"{', '.join(both)}: set by --config and by --sweep, choose one")
        if strategy.draws and (self.trials is None or self.trials < 1):
            raise SweepError(f"{option} needs --trials=N, the number of points to try")
        if not strategy.draws and ranges:
            raise SweepError(f"--sweep.{ranges[0]} is a range: give --search=random --trials=N, or list its values")
        if not strategy.draws and self.trials is not None:
            raise SweepError(f"--trials is for --search=random and --search=optuna: {option} runs every point")
        if strategy.paired and len({len(values) for values in _lists(self).values()}) > 1:
            counts = ", ".join(f"--sweep.{field} has {len(values)}" for field, values in _lists(self).items())
            raise SweepError(f"{option} takes one value of each field for each run: {counts}")
        if strategy.adaptive and self.seeds is not None:
            raise SweepError("--seeds is for grids and random search: Optuna judges each trial by one run")

    @property
    def strategy(self) -> "Strategy":
        return find_strategy(self.search)

    def points(self) -> list[Point]:
        """Return the distinct points known in advance, each with every seed, in the order of their runs."""
        distinct = {folder_name(point): point for point in self.strategy.points(self)}
        seeds: list[Point] = [{}] if self.seeds is None else [{SEED: seed} for seed in self.seeds]
        return [point | seed for point in distinct.values() for seed in seeds]

    def corners(self) -> list[Point]:
        """Return points that together contain each value, and each end of a range, at least once."""
        ends = {f: (v.low, v.high) if isinstance(v, Range) else v for f, v in self.space.items()}
        first = {field: values[0] for field, values in ends.items()}
        return [first | {field: value} for field, values in ends.items() for value in values]

    def to_json(self) -> dict[str, Any]:
        space = {f: dataclasses.asdict(v) if isinstance(v, Range) else list(v) for f, v in self.space.items()}
        seeds = None if self.seeds is None else list(self.seeds)
        return vars(self) | {"space": space, "seeds": seeds}

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> "Definition":
        space = {f: Range(**v) if isinstance(v, Mapping) else tuple(v) for f, v in mapping["space"].items()}
        seeds = None if mapping["seeds"] is None else tuple(mapping["seeds"])
        return cls(**{**mapping, "space": space, "seeds": seeds})

    def describe(self) -> dict[str, str]:
        """Return {flag: its text} of everything that distinguishes this sweep from others with the same config."""
        rows = {f"--sweep.{field}": format_values(values) for field, values in sorted(self.space.items())}
        rows["seeds"] = "one" if self.seeds is None else ", ".join(map(str, self.seeds))
        rows["--search"] = self.search
        return rows | ({"--search_seed": str(self.search_seed)} if self.strategy.draws else {})


def changes(old: Definition, new: Definition) -> list[str]:
    """Return one line for each way in which two sweeps differ, apart from their configs."""
    there, here = old.describe(), new.describe()
    lines = [
        f"{name}: {there.get(name, 'not swept')} in the folder, {here.get(name, 'not swept')} in the command"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]
    if old.trials is not None and new.trials is not None and new.trials < old.trials:
        lines.append(f"--trials: {old.trials} in the folder, {new.trials} in the command; it may only grow")
    return lines


# ---- strategies ----------------------------------------------------------------------------------


class Strategy(NamedTuple):
    """How a sweep chooses its points.

    Attributes:
      points: returns the points that are known in advance, without seeds; repetitions are dropped.
      paired: the i-th values of all fields belong together.
      draws: `trials` points are drawn, from lists and ranges.
      adaptive: points depend on the results of earlier runs (`heinsen.sweep.search`).
    """

    points: Callable[[Definition], list[Point]]
    paired: bool = False
    draws: bool = False
    adaptive: bool = False


def _combine(definition: Definition) -> list[Point]:
    lists = _lists(definition)
    paired = definition.strategy.paired and lists  # without fields, one empty point remains
    rows = zip(*lists.values(), strict=True) if paired else itertools.product(*lists.values())
    return [dict(zip(lists, values, strict=True)) for values in rows]


def _random(definition: Definition) -> list[Point]:
    """Draw the points; for one search_seed, more trials keep the first ones."""
    assert definition.trials is not None  # checked by Definition
    points = []
    for trial in range(definition.trials):
        rng = np.random.default_rng([definition.search_seed, trial])
        draw = lambda values, rng=rng: (
            values.draw(rng) if isinstance(values, Range) else values[int(rng.integers(len(values)))]
        )
        points.append({field: draw(values) for field, values in definition.space.items()})
    return points


def _lists(definition: Definition) -> dict[str, tuple[Value, ...]]:
    """Return the space of a strategy without ranges."""
    return {field: values for field, values in definition.space.items() if not isinstance(values, Range)}


STRATEGIES = {
    "grid": Strategy(_combine),
    "zip": Strategy(_combine, paired=True),
    "random": Strategy(_random, draws=True),
    "optuna": Strategy(lambda definition: [], draws=True, adaptive=True),
}


def find_strategy(name: str) -> Strategy:
    """Return the strategy that --search names. Raises SweepError."""
    if name not in STRATEGIES:
        raise SweepError(f"--search={name}: choose {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
