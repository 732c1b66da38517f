"""Convert nested mappings (a config file, a run's config.json) to frozen dataclasses, with strict checks.

Locked ConfigDicts let None and True pass for integers. Here a value must have exactly its field's type.

A field that needs more than a name and a type is annotated with a `Setting`: its limits, and for a field that was added
later what runs of earlier versions did, so that their config.json stays readable.
"""

import ctypes
import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from heinsen.errors import HeinsenError

T = TypeVar("T")


class ConfigError(HeinsenError, ValueError):
    """A config value that cannot be used; the message names the field, the value and the remedy."""


_NOT_ADDED = object()


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a field's type does not say, as in `seed: Annotated[int, Setting(at_least=0)]`.

    Attributes:
      at_least, below: limits of a number; without any it must be positive.
      unlimited: infinity is allowed, and stands for no limit.
      earlier: for a field that earlier versions lacked, the value that says what they did. Every field added after
        version 0.1 states it here, and its default in `configs/default.py`.
    """

    at_least: float | None = None
    below: float | None = None
    unlimited: bool = False
    earlier: Any = _NOT_ADDED


def _settings(cls: type) -> dict[str, Setting]:
    hints = typing.get_type_hints(cls, include_extras=True).items()
    found = {name: [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Setting)] for name, hint in hints}
    return {name: settings[0] if settings else Setting() for name, settings in found.items()}


def check_numbers(config: Any, path: str = "") -> None:
    """Raise ValueError for a number of a config dataclass that is outside of its limits, or of those of the machine.

    Integers have at most 64 bits; computations with other numbers are in float32, which must not make them 0 or inf.

    Args:
      path: what to put before the names of fields, such as "model.".
    """
    for name, setting in _settings(type(config)).items():
        value = getattr(config, name)
        if setting.unlimited and value == math.inf:
            continue
        if type(value) in (int, float) and (problem := _find_problem(value, setting.at_least, setting.below)):
            raise ValueError(f"{path}{name} = {value}: {problem}")


def _find_problem(value: float, at_least: float | None, below: float | None) -> str | None:
    if isinstance(value, float):
        rounded = ctypes.c_float(value).value
        if not math.isfinite(rounded):
            return "it must be finite" if not math.isfinite(value) else "it must be finite in float32"
        if 0 < abs(value) < 2.0**-126:
            return "it is too small for float32, which holds it as 0"
        value = rounded
    if at_least is None and not value > 0:
        return "it must be positive"
    if isinstance(value, float) and below is not None and not (at_least or 0) <= value < below:
        return f"it must lie in [{at_least or 0}, {below})"
    if at_least is not None and not value >= at_least:
        return "it must not be negative" if at_least == 0 else f"it must be at least {at_least}"
    if below is not None and not value < below:
        return f"it must be less than {below}"
    return None if abs(value) < 2**63 or isinstance(value, float) else "it does not fit into 64 bits"


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises ConfigError with the reason; an OSError where there is no file."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path} is damaged ({reason})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged (it holds {type(value).__name__}, not an object of fields)")
    return value


def complete(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` of dataclass `cls` with the fields that an earlier version did not write, as it ran."""
    added = {name: value for name, value in _added_fields(cls).items() if name not in values}
    return {**values, **_map_groups(complete, cls, values), **added}


def reduce(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` of dataclass `cls` without added fields that are as in earlier versions, which lack them."""
    same = [name for name, value in _added_fields(cls).items() if values[name] == value]
    return {name: x for name, x in {**values, **_map_groups(reduce, cls, values)}.items() if name not in same}


def _added_fields(cls: type) -> dict[str, Any]:
    """Return {field that earlier versions lack: what they did}."""
    return {name: each.earlier for name, each in _settings(cls).items() if each.earlier is not _NOT_ADDED}


def _map_groups(
    function: Callable[[type, Mapping[str, Any]], dict[str, Any]], cls: type, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Apply a function to the values of each dataclass that is a field of `cls`."""
    kinds = typing.get_type_hints(cls).items()
    groups = {name: kind for name, kind in kinds if dataclasses.is_dataclass(kind)}
    return {
        name: function(typing.cast(type, kind), values[name])
        for name, kind in groups.items()
        if isinstance(values.get(name), Mapping)
    }


def from_mapping(cls: type[T], values: Mapping[str, Any], path: str = "config") -> T:
    """Build dataclass `cls` and the dataclasses nested in it.

    Args:
      values: a value for every field, and nothing else. Fields that were added later may be missing (`complete`).
      path: the name of `values` in error messages.

    Raises:
      ConfigError: a field is missing, unknown, of the wrong type, or refused by its dataclass.
    """
    values, types_of_fields = complete(cls, values), typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if missing := [name for name in names if name not in values]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, which configs/default.py has")
    if unknown := [name for name in values if name not in names]:
        raise ConfigError(f"{path} has unknown fields {', '.join(unknown)}: the fields are {', '.join(names)}")
    try:
        return cls(**{name: _convert(types_of_fields[name], values[name], f"{path}.{name}") for name in names})
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _convert(wanted: Any, value: Any, path: str) -> Any:
    """Return `value` as the annotated type `wanted`, or raise ConfigError."""
    if dataclasses.is_dataclass(wanted):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} = {value!r}: expected a group of fields")
        return from_mapping(typing.cast(type, wanted), value, path)
    alternatives = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    options = [typing.get_origin(option) or option for option in alternatives]  # dict for dict[str, Any]
    if value == "":
        raise ConfigError(f"{path} = '': it must not be empty")
    if float in options and type(value) is int:
        return float(value) if abs(value) < 2**1023 else math.inf
    if type(value) in options:
        return value
    names = " or ".join("None" if option is types.NoneType else option.__name__ for option in options)
    raise ConfigError(f"{path} = {value!r}: expected {names}, got {type(value).__name__}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "config") -> list[str]:
    """Describe each field in which two nested configs differ, one line per field."""
    lines = []
    for name in sorted({*old, *new}):
        where = f"{path}.{name}"
        if name not in old or name not in new:
            lines.append(f"{where}: only in the {'run' if name in old else 'command'}")
        elif isinstance(old[name], Mapping) and isinstance(new[name], Mapping):
            lines += differences(old[name], new[name], where)
        elif old[name] != new[name]:
            lines.append(f"{where}: {old[name]!r} in the run, {new[name]!r} in the command")
    return lines
