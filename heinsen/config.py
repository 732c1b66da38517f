"""Convert nested mappings (a config file, a run's config.json) to frozen dataclasses, with strict checks.

Locked ConfigDicts let None and True pass for integers. Here a value must have exactly its field's type.
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
    """Build dataclass `cls` and the dataclasses nested in it.

    Args:
      values: a value for every field, and nothing else.
      path: the name of `values` in error messages.

    Raises:
      ConfigError: a field is missing, unknown, of the wrong type, or refused by its dataclass.
    """
    types_of_fields = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if missing := [name for name in names if name not in values]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: start from configs/default.py")
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
    if float in options and type(value) is int:
        return float(value)
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
