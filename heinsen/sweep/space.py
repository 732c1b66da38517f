"""What a sweep tries: lists of values and ranges for fields of the config, and the points made of them."""

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from heinsen.errors import HeinsenError

Value = int | float | str | bool | None
Point = dict[str, Value]  # field -> value
SEARCHES = ("grid", "zip", "random", "optuna")
_LISTED = ("grid", "zip")  # searches that try all that is listed
SEED = "seed"  # the field that --seeds varies
LONGEST_NAME = 100  # characters of a run's folder name

_RANGE = re.compile(r"(?P<low>[^,:]+?)\.\.(?P<high>[^,:]+?)(?P<log>:log)?")
_DIGITS = 4  # of a number drawn from a range: more tell nothing, and make long folder names
_SAFE = re.compile(r"[A-Za-z0-9.+-]+(_[A-Za-z0-9.+-]+)*")


class SweepError(HeinsenError, ValueError):
    """A sweep that cannot be run as asked; the message names the flag or the file, and the remedy."""


@dataclasses.dataclass(frozen=True)
class Range:
    """All numbers from low to high, both included, evenly or (log) evenly in their logarithm."""

    low: float
    high: float
    log: bool
    integer: bool

    def __str__(self) -> str:
        return f"{self.low}..{self.high}" + (":log" if self.log else "")

    def draw(self, rng: np.random.Generator) -> int | float:
        low, high = (self.low, self.high + 1) if self.integer else (self.low, self.high)
        x = math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high)
        return self.round(math.floor(x) if self.integer else x)

    def round(self, x: float) -> int | float:
        """The nearest number with few digits, still in the range."""
        number = int(x) if self.integer else float(f"{x:.{_DIGITS}g}")
        return min(max(number, self.low), self.high)


Space = dict[str, tuple[Value, ...] | Range]


def parse_space(texts: Mapping[str, str], convert: Callable[[str, str], Value], search: str = "grid") -> Space:
    """The space of `--sweep.FIELD=TEXT` flags: V1,V2,... or a JSON list, LOW..HIGH or LOW..HIGH:log.

    convert(field, text) gives the value that the config makes of it, or raises SweepError. For a search that takes the
    values of all fields together ("zip") they stay in order, and may repeat.
    """
    return {field: _parse_values(field, text, convert, search) for field, text in texts.items()}


def _parse_values(
    field: str, text: str, convert: Callable[[str, str], Value], search: str
) -> tuple[Value, ...] | Range:
    flag = f"--sweep.{field}={text}"
    if match := _RANGE.fullmatch(text.strip()):
        low, high = convert(field, match["low"]), convert(field, match["high"])
        if not all(type(x) in (int, float) for x in (low, high)):
            if type(low) is not str:
                raise SweepError(f"{flag}: a range needs numbers at both ends, such as 1e-5..1e-2:log or 1..8")
        else:
            log = match["log"] is not None
            if not low < high:
                raise SweepError(f"{flag}: a range goes from a lower to a higher number")
            if log and low <= 0:
                raise SweepError(f"{flag}: the logarithm of a range needs numbers above 0")
            return Range(low, high, log, type(low) is int and type(high) is int)
    texts = _split(flag, text)
    values = [convert(field, each) for each in texts]
    if search == "zip":
        return tuple(values)
    repeated = [each for i, each in enumerate(texts) if values[i] in values[:i]]
    if repeated:
        raise SweepError(f"{flag}: {', '.join(repeated)} stands there twice")
    if all(type(x) in (int, float) for x in values):
        values.sort()  # so that 1,2 and 2,1 are one sweep
    return tuple(values)


def _split(flag: str, text: str) -> list[str]:
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except ValueError as error:
            raise SweepError(f'{flag}: not a JSON list ({error}); expected ["A","B"], or A,B') from error
        texts = [x if isinstance(x, str) else json.dumps(x) for x in items]
    else:
        texts = [part.strip() for part in text.split(",")]
    if not texts or any(part == "" for part in texts):
        raise SweepError(f"{flag}: an empty value; expected V1,V2,... or LOW..HIGH or LOW..HIGH:log")
    return texts


def text_of(value: Value) -> str:
    """As a command line says it."""
    return value if isinstance(value, str) else repr(value)


def folder_name(point: Point) -> str:
    """The settings as a folder's name: safe characters, at most LONGEST_NAME, the same for the same point.

    A field goes by its last part where that is the only one of its name. What had to be changed or cut gets a digest.
    """
    fields = sorted(point, key=lambda field: (field == SEED, field))
    short = [field.rpartition(".")[2] for field in fields]
    labels = [last if short.count(last) == 1 else field for field, last in zip(fields, short, strict=True)]
    parts = [(label, text_of(point[field])) for label, field in zip(labels, fields, strict=True)]
    name = "__".join(f"{label}={text}" for label, text in parts)
    if len(name) <= LONGEST_NAME and all(_SAFE.fullmatch(text) for _, text in parts):
        return name
    digest = hashlib.sha256(json.dumps([[f, point[f]] for f in fields]).encode()).hexdigest()[:8]
    name = "__".join(label + "=" + re.sub(r"[^A-Za-z0-9.+-]+", "-", text) for label, text in parts)
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


@dataclasses.dataclass(frozen=True)
class Definition:
    """A whole sweep. `base` is the config's mapping with the overrides of every run; seeds come on top of each point.

    `trials` counts points of a random search or of Optuna; it may grow when a sweep goes on.
    """

    config: str
    overrides: dict[str, str]
    base: dict[str, Any]
    space: Space
    seeds: tuple[int, ...] | None
    search: str
    trials: int | None
    search_seed: int

    def __post_init__(self):
        if self.search not in SEARCHES:
            raise SweepError(f"--search={self.search}: choose {', '.join(SEARCHES)}")
        if not self.space and self.seeds is None:
            raise SweepError("nothing to sweep: give --sweep.FIELD=V1,V2,... or --seeds=N")
        if self.seeds is not None and SEED in self.space:
            raise SweepError(f"--seeds and --sweep.{SEED} exclude each other")
        if both := sorted(self.overrides.keys() & self.space.keys()):
            raise SweepError(f"{', '.join(both)}: given by --config and by --sweep, choose one")
        ranges = [field for field, values in self.space.items() if isinstance(values, Range)]
        if self.search in _LISTED:
            if ranges:
                raise SweepError(f"--sweep.{ranges[0]} is a range: give --search=random --trials=N, or list its values")
            if self.trials is not None:
                raise SweepError(
                    f"--trials is for --search=random and --search=optuna: --search={self.search} tries all there is"
                )
            lengths = {field: len(values) for field, values in self.space.items()}
            if self.search == "zip" and len(set(lengths.values())) > 1:
                counts = ", ".join(f"--sweep.{field} has {n}" for field, n in lengths.items())
                raise SweepError(f"--search=zip takes one value of each field for each run: {counts}")
        elif self.trials is None or self.trials < 1:
            raise SweepError(f"--search={self.search} needs --trials=N, how many to try")
        if self.search == "optuna" and self.seeds is not None:
            raise SweepError("--seeds is for grids and random search: Optuna judges each trial by one run")

    def points(self) -> list[Point]:
        """Those of the grid, the zip or the random search, in the order of their runs; none of Optuna's."""
        if self.search == "optuna":
            return []
        if self.search in _LISTED:
            combine = itertools.product if self.search == "grid" else zip
            values = combine(*self.space.values()) if self.space else [()]
            points = [dict(zip(self.space, each, strict=True)) for each in values]
        else:
            points = [self.draw(trial) for trial in range(self.trials)]
        distinct = {folder_name(point): point for point in points}
        return [point | seed for point in distinct.values() for seed in self._seeds()]

    def corners(self) -> list[Point]:
        """Points that show each value, and each end of a range, at least once."""
        ends = {f: (v.low, v.high) if isinstance(v, Range) else v for f, v in self.space.items()}
        first = {field: values[0] for field, values in ends.items()}
        return [first | {field: value} for field, values in ends.items() for value in values]

    def draw(self, trial: int) -> Point:
        """Of the random search: the same for the same --search_seed, however many trials there are."""
        rng = np.random.default_rng([self.search_seed, trial])
        return {
            field: values.draw(rng) if isinstance(values, Range) else values[int(rng.integers(len(values)))]
            for field, values in self.space.items()
        }

    def _seeds(self) -> Sequence[Point]:
        return [{}] if self.seeds is None else [{SEED: seed} for seed in self.seeds]

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
        """{flag: what it says}, of what tells one sweep from another."""
        rows = {f"--sweep.{field}": _values_text(values) for field, values in sorted(self.space.items())}
        rows["seeds"] = "one" if self.seeds is None else ", ".join(map(str, self.seeds))
        rows["--search"] = self.search
        if self.search not in _LISTED:
            rows["--search_seed"] = str(self.search_seed)
        return rows


def _values_text(values: tuple[Value, ...] | Range) -> str:
    return str(values) if isinstance(values, Range) else ", ".join(map(text_of, values))


def changes(old: Definition, new: Definition) -> list[str]:
    """One line for each way in which two sweeps differ, their configs aside."""
    ours, theirs = new.describe(), old.describe()
    lines = []
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            say = lambda rows, name=name: rows.get(name, "not swept")
            lines.append(f"{name}: {say(theirs)} in the folder, {say(ours)} in the command")
    if old.trials is not None and new.trials is not None and new.trials < old.trials:
        lines.append(f"--trials: {old.trials} in the folder, {new.trials} in the command; it may only grow")
    return lines
