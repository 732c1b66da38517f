"""Convert nested mappings (a config file, a run's config.json) to frozen dataclasses, with strict checks.

Locked ConfigDicts let None and True pass for integers. Here a value must have exactly its field's type; an integer
may stand for a float. A number with other limits than being positive is annotated with `Limits`.
"""

import ctypes
import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from heinsen.errors import HeinsenError

T = TypeVar("T")


class ConfigError(HeinsenError, ValueError):
    """A config value that cannot be used; the message names the field, the value and the remedy."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a number, as in `seed: Annotated[int, Limits(at_least=0)]`.

    Attributes:
      at_least, below: without `at_least` the number must be positive.
      unlimited: infinity is allowed, and stands for no limit.
    """

    at_least: float | None = None
    below: float | None = None
    unlimited: bool = False


def check_numbers(config: Any, path: str = "") -> None:
    """Raise ValueError for a number of a config dataclass that is outside of its limits, or of those of the machine.

    Integers have at most 64 bits; computations with other numbers are in float32, which must not make them 0 or inf.

    Args:
      path: what to put before the names of fields, such as "model.".
    """
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        annotations = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Limits)]
        limits, value = annotations[0] if annotations else Limits(), getattr(config, name)
        if limits.unlimited and value == math.inf:
            continue
        if type(value) in (int, float) and (problem := _find_problem(value, limits.at_least, limits.below)):
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


# Fields of earlier runs and exports, and what they are called now.
RENAMED = {f"gate{end}": f"forget_gate{end}" for end in ("", "_shortest", "_longest")}


def added(default: Any) -> Any:
    """A field of a config that earlier runs, sweeps and exports lack. Its default leaves them as they were."""
    return dataclasses.field(default=default, metadata={"added": True})


def _defaults(cls: Any) -> dict[str, Any]:
    """The fields of a config dataclass that are `added`, with their defaults; those of groups are mappings."""
    found: dict[str, Any] = {x.name: x.default for x in dataclasses.fields(cls) if "added" in x.metadata}
    is_group = lambda x: dataclasses.is_dataclass(x) and not isinstance(x, type)
    return {name: comparable(type(x), dataclasses.asdict(x)) if is_group(x) else x for name, x in found.items()}


def _rename(fields: Mapping[str, Any]) -> dict[str, Any]:
    # Where both names are given, the former one stays, and is refused as unknown.
    return {name if (new := RENAMED.get(name, name)) in fields else new: value for name, value in fields.items()}


def comparable(cls: Any, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config `cls` under their present names, without those `added` that have their default."""
    kinds, defaults, fields = typing.get_type_hints(cls), _defaults(cls), {}
    for name, value in _rename(mapping).items():
        is_group = isinstance(value, Mapping) and dataclasses.is_dataclass(kinds.get(name))
        fields[name] = comparable(kinds[name], value) if is_group else value
    return {name: value for name, value in fields.items() if name not in defaults or value != defaults[name]}


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file of fields, one JSON object. Raises ConfigError with the reason; an OSError where there is no file."""
    try:
        value = json.loads(path.read_bytes(), object_hook=_rename)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path} is damaged ({reason})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is damaged (it holds {type(value).__name__}, not an object of fields)")
    return value


def from_mapping(cls: type[T], values: Mapping[str, Any], path: str = "config") -> T:
    """Build dataclass `cls` and the dataclasses nested in it.

    Args:
      values: a value for every field, and nothing else. Those that are `added` may be missing.
      path: the name of `values` in error messages.

    Raises:
      ConfigError: a field is missing, unknown, of the wrong type, or refused by its dataclass.
    """
    types_of_fields = typing.get_type_hints(cls)
    values = _rename(values)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if missing := [name for name in names if name not in values and name not in _defaults(cls)]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, which configs/default.py has")
    if unknown := [name for name in values if name not in names]:
        raise ConfigError(f"{path} has unknown fields {', '.join(unknown)}: the fields are {', '.join(names)}")
    try:
        given = {name: _check_type(types_of_fields[name], x, f"{path}.{name}") for name, x in values.items()}
        return cls(**given)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _check_type(wanted: Any, value: Any, path: str) -> Any:
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
