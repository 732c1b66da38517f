"""Config files, and the overrides of their fields: errors name the field and say what to write instead."""

import difflib
import functools
import runpy
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from heinsen.config import ConfigError


def load_config(path: str) -> ConfigDict:
    """Return the config that `get_config` makes in a file; FILE:TEXT calls get_config(TEXT). Raises ConfigError."""
    file, *argument = path.split(":", 1)
    try:
        Path(file).read_bytes()  # or an OSError that names it
        names = runpy.run_path(file, run_name="config")
        if "get_config" not in names:
            raise TypeError("it has no function get_config")
        config = names["get_config"](*argument)
        if not isinstance(config, ConfigDict):
            raise TypeError(f"get_config returns {type(config).__name__}, not a ConfigDict")
    except (Exception, SystemExit) as error:  # whatever the code in the file may raise
        raise ConfigError(f"--config={path} cannot be loaded: {_describe(error, file)}") from error
    return config


def _describe(error: BaseException, file: str) -> str:
    """Return an error in one line, with the line of the config file that caused it."""
    if isinstance(error, OSError) and error.filename == file:
        return f"{error.strerror}: give a Python file, such as configs/demo.py"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"


def override(config: ConfigDict, texts: Mapping[str, str], flag: str = "config") -> ConfigDict:
    """Set fields of a config to what texts say: {"a.b": "1"} of --config.a.b=1. "None" unsets an optional field.

    Raises ConfigError, which names the flag --`flag`.a.b. That None suits the field is for `from_mapping` to check.
    """
    for field, text in texts.items():
        *groups, name = field.split(".")
        if field not in _field_names(config):
            similar = ask_for_similar(field, config)
            raise ConfigError(f"--{flag}.{field}: the config has no such field{similar}")
        group = functools.reduce(ConfigDict.__getitem__, groups, config)
        if isinstance(group[name], ConfigDict):
            raise ConfigError(f"--{flag}.{field}={text}: {field} is a group of fields ({', '.join(group[name])})")
        try:
            group[name] = None if text == "None" else _parse_text(text, group.get_type(name))
        except ValueError as error:
            raise ConfigError(f"--{flag}.{field}={text}: {error}") from error
    return config


def _parse_text(text: str, kind: type) -> Any:
    """Return the value that a text says, of the type of a field. Raises ValueError, which says what to write."""
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("expected true or false")
        return text.lower() == "true"
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError as error:
        raise ValueError(f"expected an integer{as_integer(text)}" if kind is int else "expected a number") from error


def as_integer(text: str) -> str:
    """Return how to write 1e6 as an integer; nothing for what is none."""
    try:
        number = float(text)
    except ValueError:
        return ""
    return f", such as {int(number)}" if number.is_integer() else ""


def _field_names(config: ConfigDict) -> Iterator[str]:
    """Yield the names of all fields and groups, a.b for field b of group a."""
    for name, value in config.items():
        yield name
        if isinstance(value, ConfigDict):
            yield from (f"{name}.{inner}" for inner in _field_names(value))


def ask_for_similar(field: str, config: ConfigDict, prefix: str = "") -> str:
    """Return the end of a message about a wrong name: fields of a similar name, or of which it is the initials (lr)."""
    name, lasts = field.rpartition(".")[2], {path: path.rpartition(".")[2] for path in _field_names(config)}
    found = [path for path, last in lasts.items() if "".join(word[:1] for word in last.split("_")) == name]
    for like in difflib.get_close_matches(name, lasts.values(), n=2, cutoff=0.75):
        found += [path for path, last in lasts.items() if last == like]
    similar = [prefix + path for path in dict.fromkeys(found)][:2]
    return f"; is it {' or '.join(similar)}?" if similar else ""
