"""From plain nested mappings (a config file, a run's config.json) into the frozen dataclasses, checked strictly.

Locked ConfigDicts let None and True pass for integers; nothing passes here that is not of the field's own type.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from heinsen.errors import HeinsenError

T = TypeVar("T")


class ConfigError(HeinsenError, ValueError):
    """A config value that cannot be used; the message names the field, the value and the remedy."""


def from_mapping(cls: type[T], values: Mapping[str, Any], path: str = "config") -> T:
    """Build dataclass `cls`, nested ones included. Raises ConfigError for missing, unknown or ill-typed fields."""
    types_of = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    if missing := [name for name in names if name not in values]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: start from configs/default.py")
    if unknown := [name for name in values if name not in names]:
        raise ConfigError(f"{path} has unknown fields {', '.join(unknown)}: the fields are {', '.join(names)}")
    try:
        return cls(**{name: _convert(types_of[name], values[name], f"{path}.{name}") for name in names})
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _convert(wanted: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(wanted):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path} = {value!r}: expected a group of fields")
        return from_mapping(wanted, value, path)
    options = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    if float in options and type(value) is int:
        return float(value)
    if type(value) in options:
        return value
    names = " or ".join("None" if option is types.NoneType else option.__name__ for option in options)
    raise ConfigError(f"{path} = {value!r}: expected {names}, got {type(value).__name__}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "config") -> list[str]:
    """One line for each field in which two nested configs differ."""
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
