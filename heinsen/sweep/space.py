"""The values and ranges that a sweep tries, and the points drawn from them."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from heinsen.errors import HeinsenError

Value = int | float | str | bool | None
Point = dict[str, Value]  # {field of the config: value}
Convert = Callable[[str, str], Value]  # (field, text) -> the value that the config makes of the text

SEED = "seed"  # the field that --seeds varies
LONGEST_NAME = 100  # characters in the name of a run's folder

_RANGE = re.compile(r"(?P<low>[^,:]+?)\.\.(?P<high>[^,:]+?)(?P<log>:log)?")
_DIGITS = 4  # significant digits of a number drawn from a range: more would only lengthen folder names
_SAFE = re.compile(r"[A-Za-z0-9.+-]+(_[A-Za-z0-9.+-]+)*")


class SweepError(HeinsenError, ValueError):
    """A sweep that cannot run as requested; the message names the flag or the file, and the remedy."""


@dataclass(frozen=True)
class Range:
    """All numbers from low to high, both included, distributed uniformly or (log) log-uniformly."""

    low: int | float
    high: int | float
    log: bool
    integer: bool

    def __str__(self) -> str:
        return f"{self.low}..{self.high}" + (":log" if self.log else "")

    def draw(self, rng: np.random.Generator) -> int | float:
        """Return a random number from the range, rounded."""
        low, high = (self.low, self.high + 1) if self.integer else (self.low, self.high)
        x = math.exp(rng.uniform(math.log(low), math.log(high))) if self.log else rng.uniform(low, high)
        return self.round(math.floor(x) if self.integer else x)

    def round(self, x: int | float) -> int | float:
        """Return the nearest number with few significant digits that is still in the range."""
        number = int(x) if self.integer else float(f"{x:.{_DIGITS}g}")
        return min(max(number, self.low), self.high)


Space = dict[str, tuple[Value, ...] | Range]


def is_number(value: Value) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def parse_space(texts: Mapping[str, str], convert: Convert, paired: bool = False) -> Space:
    """Return the space of `--sweep.FIELD=TEXT` flags: V1,V2,... or a JSON list, LOW..HIGH or LOW..HIGH:log.

    Lists of numbers are sorted, so that 1,2 and 2,1 define the same sweep. If `paired`, the i-th values of all fields
    belong together: lists keep their order, and values may repeat. Raises SweepError, as `convert` may.
    """
    space: Space = {}
    for field, text in texts.items():
        flag = f"--sweep.{field}={text}"
        values = _parse_range(flag, field, text, convert)
        space[field] = _parse_list(flag, field, text, convert, paired) if values is None else values
    return space


def _parse_range(flag: str, field: str, text: str, convert: Convert) -> Range | None:
    """Return the range, or None if the text is a list: strings may contain `..`, too."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return None
    low, high = convert(field, match["low"]), convert(field, match["high"])
    if isinstance(low, str):
        return None
    if not is_number(low) or not is_number(high):
        raise SweepError(f"{flag}: a range needs a number at each end, such as 1e-5..1e-2:log or 1..8")
    log = match["log"] is not None
    if not low < high:
        raise SweepError(f"{flag}: a range runs from a lower to a higher number")
    if log and low <= 0:
        raise SweepError(f"{flag}: a logarithmic range needs numbers above 0")
    return Range(low, high, log, integer=isinstance(low, int) and isinstance(high, int))


def _parse_list(flag: str, field: str, text: str, convert: Convert, paired: bool) -> tuple[Value, ...]:
    texts = _split(flag, text)
    values = [convert(field, each) for each in texts]
    if paired:
        return tuple(values)
    if repeated := [each for i, each in enumerate(texts) if values[i] in values[:i]]:
        raise SweepError(f"{flag}: {', '.join(repeated)} is listed twice")
    numbers = [value for value in values if is_number(value)]
    return tuple(sorted(numbers) if len(numbers) == len(values) else values)


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


def format_value(value: Value) -> str:
    """Return the value as a command line would give it."""
    return value if isinstance(value, str) else repr(value)


def format_values(values: tuple[Value, ...] | Range) -> str:
    return str(values) if isinstance(values, Range) else ", ".join(map(format_value, values))


def folder_name(point: Point) -> str:
    """Return a folder name for a point: safe characters, at most LONGEST_NAME, the same for the same point.

    A field is abbreviated to its last part if no other field ends in it. A name that had to be changed or cut ends in
    a digest.
    """
    fields = sorted(point, key=lambda field: (field == SEED, field))
    short = [field.rpartition(".")[2] for field in fields]
    labels = [last if short.count(last) == 1 else field for field, last in zip(fields, short, strict=True)]
    parts = [(label, format_value(point[field])) for label, field in zip(labels, fields, strict=True)]
    name = "__".join(f"{label}={text}" for label, text in parts)
    if len(name) <= LONGEST_NAME and all(_SAFE.fullmatch(text) for _, text in parts):
        return name
    digest = hashlib.sha256(json.dumps([[f, point[f]] for f in fields]).encode()).hexdigest()[:8]
    name = "__".join(label + "=" + re.sub(r"[^A-Za-z0-9.+-]+", "-", text) for label, text in parts)
    return f"{name[: LONGEST_NAME - 9]}-{digest}"
