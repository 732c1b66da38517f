"""The definition of a sweep: its base config, its space, and the strategy that chooses points from the space.

A strategy is one class and one entry of STRATEGIES. A sweep is written to disk as its Definition and read back from it.
"""

import abc
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

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
    is the number of points of a random or Optuna search; it may grow when a sweep is resumed.
    """

    config: str
    overrides: dict[str, str]
    base: dict[str, Any]
    space: Space
    seeds: tuple[int, ...] | None
    search: str
    trials: int | None
    search_seed: int

    def __post_init__(self) -> None:
        strategy = find_strategy(self.search)
        if not self.space and self.seeds is None:
            raise SweepError("nothing to sweep: give --sweep.FIELD=V1,V2,... or --seeds=N")
        if self.seeds is not None and SEED in self.space:
            raise SweepError(f"--seeds and --sweep.{SEED} exclude each other")
        if both := sorted(self.overrides.keys() & self.space.keys()):
            raise SweepError(f"{', '.join(both)}: set by --config and by --sweep, choose one")
        strategy.check(self)

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
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"space": space, "seeds": seeds}

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
        return rows | self.strategy.describe(self)


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


class Strategy(abc.ABC):
    """How a sweep chooses its points."""

    paired: ClassVar[bool] = False  # the i-th values of all fields belong together
    adaptive: ClassVar[bool] = False  # points depend on the results of earlier runs

    @abc.abstractmethod
    def check(self, definition: Definition) -> None:
        """Raise SweepError if the definition does not suit the strategy."""

    @abc.abstractmethod
    def points(self, definition: Definition) -> list[Point]:
        """Return the points that are known in advance, without seeds; repetitions are dropped."""

    def describe(self, definition: Definition) -> dict[str, str]:
        """Return {flag: its text} of the flags that only some strategies read."""
        return {}


class Grid(Strategy):
    """Every combination of the values."""

    def check(self, definition: Definition) -> None:
        _check_listed(definition)

    def points(self, definition: Definition) -> list[Point]:
        combinations = itertools.product(*_values(definition))
        return [dict(zip(definition.space, values, strict=True)) for values in combinations]


class Zip(Strategy):
    """The first values of all fields together, then the second ones, and so on."""

    paired = True

    def check(self, definition: Definition) -> None:
        _check_listed(definition)
        lengths = {field: len(values) for field, values in zip(definition.space, _values(definition), strict=True)}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"--sweep.{field} has {n}" for field, n in lengths.items())
            raise SweepError(f"--search=zip takes one value of each field for each run: {counts}")

    def points(self, definition: Definition) -> list[Point]:
        if not definition.space:
            return [{}]
        return [dict(zip(definition.space, values, strict=True)) for values in zip(*_values(definition), strict=True)]


class Random(Strategy):
    """Points drawn at random; for one --search_seed, more trials keep the first ones."""

    def check(self, definition: Definition) -> None:
        _check_trials(definition)

    def points(self, definition: Definition) -> list[Point]:
        assert definition.trials is not None  # by `check`
        return [self._draw(definition, trial) for trial in range(definition.trials)]

    def describe(self, definition: Definition) -> dict[str, str]:
        return {"--search_seed": str(definition.search_seed)}

    def _draw(self, definition: Definition, trial: int) -> Point:
        rng = np.random.default_rng([definition.search_seed, trial])
        return {
            field: values.draw(rng) if isinstance(values, Range) else values[int(rng.integers(len(values)))]
            for field, values in definition.space.items()
        }


class Optuna(Strategy):
    """Points proposed by Optuna, given the results so far (`heinsen.sweep.search`)."""

    adaptive = True

    def check(self, definition: Definition) -> None:
        _check_trials(definition)
        if definition.seeds is not None:
            raise SweepError("--seeds is for grids and random search: Optuna judges each trial by one run")

    def points(self, definition: Definition) -> list[Point]:
        return []

    def describe(self, definition: Definition) -> dict[str, str]:
        return {"--search_seed": str(definition.search_seed)}


STRATEGIES: dict[str, Strategy] = {"grid": Grid(), "zip": Zip(), "random": Random(), "optuna": Optuna()}


def find_strategy(name: str) -> Strategy:
    """Return the strategy that --search names. Raises SweepError."""
    if name not in STRATEGIES:
        raise SweepError(f"--search={name}: choose {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def _check_listed(definition: Definition) -> None:
    for field, values in definition.space.items():
        if isinstance(values, Range):
            raise SweepError(f"--sweep.{field} is a range: give --search=random --trials=N, or list its values")
    if definition.trials is not None:
        raise SweepError(
            f"--trials is for --search=random and --search=optuna: --search={definition.search} runs every point"
        )


def _check_trials(definition: Definition) -> None:
    if definition.trials is None or definition.trials < 1:
        raise SweepError(f"--search={definition.search} needs --trials=N, the number of points to try")


def _values(definition: Definition) -> list[tuple[Value, ...]]:
    """Return the values of each field of a space without ranges."""
    return [values for values in definition.space.values() if not isinstance(values, Range)]
