"""Configs, one file per kind of run, and the parsing of every program's flags."""

import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Collection
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict


def parse_flags(argv: list[str], may_be_empty: Collection[str] = ()) -> list[str]:
    """Parse flags for `app.run(main, flags_parser=parse_flags)`; what is wrong with them exits with one line.

    No flag and no argument is empty, apart from the flags `may_be_empty`: --workdir="$RUN" with an unset variable must
    not mean the current folder.
    """
    from heinsen.config import ConfigError

    values = flags.FLAGS
    if (path := _find_config_file(argv)) is not None:
        if not path.strip():
            _exit_for_empty("--config=")
        try:
            load_config(path)  # explains errors that the flag's own parser passes on
        except ConfigError as error:
            sys.exit(f"error: {error}")
    try:
        arguments, problem = values(argv), None
    except (AttributeError, KeyError) as error:  # from a locked ConfigDict, which suggests a similar name
        sys.exit(f"FATAL Flags parsing error: --config has no such field: {error}")
    except flags.Error as error:
        arguments, problem = [], f"{error}\nPass --helpshort to see the flags."
    for name in values:
        if name not in may_be_empty and _is_empty(values[name]):
            _exit_for_empty(f"--{name}=")
    if not all(map(str.strip, arguments)):
        _exit_for_empty("an argument")
    if problem is not None:
        sys.exit(f"FATAL Flags parsing error: {problem}")
    return arguments


def show_help(name: str) -> None:
    """End the program `name`, which is "__main__" unless it is imported, if --help asks for its flags.

    Call it between the definitions of flags and the imports that take seconds.
    """
    if name == "__main__" and {"--help", "--helpshort"} & {*sys.argv}:
        app.define_help_flags()
        flags.FLAGS(sys.argv)


def _exit_for_empty(what: str) -> NoReturn:
    sys.exit(f"FATAL Flags parsing error: {what} is empty: give a value, or leave it out (is a shell variable unset?)")


def _is_empty(flag: flags.Flag) -> bool:
    """Return whether a flag was given without a value, or with an empty one among several."""
    texts = flag.value if isinstance(flag.value, list) else [flag.value]
    return bool(flag.present) and (not texts or any(isinstance(text, str) and not text.strip() for text in texts))


def _find_config_file(argv: list[str]) -> str | None:
    """Return the path that --config names; None if it is not given, or no flag for a config file."""
    if "config" not in flags.FLAGS or flags.FLAGS["config"].flag_type() != "config object":
        return None
    own = flags.FlagValues()
    flags.DEFINE_string("config", None, "", flag_values=own)
    own(argv, known_only=True)
    return own.config


def load_config(path: str) -> ConfigDict:
    """Return the config that a file's `get_config` makes. Raises ConfigError, which names the file."""
    from heinsen.config import ConfigError

    file, *argument = path.split(":", 1)
    loader = importlib.machinery.SourceFileLoader("config_to_check", file)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)  # a dataclass looks for its module there
    try:
        loader.exec_module(module)
        config = module.get_config(*argument)
        if not isinstance(config, ConfigDict):
            raise TypeError(f"get_config returns {type(config).__name__}, not a ConfigDict")
    except (Exception, SystemExit) as error:  # whatever the code in the file may raise
        raise ConfigError(f"--config={path} cannot be loaded: {_describe(error, file)}") from error
    finally:
        del sys.modules[loader.name]
    return config


def _describe(error: BaseException, file: str) -> str:
    """Return an error in one line, with the line of the config file that caused it."""
    if isinstance(error, OSError) and error.filename == file:
        return f"{error.strerror}: give a Python file, such as configs/demo.py"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"


def read_config(flag: flags.FlagHolder[ConfigDict]) -> dict[str, Any]:
    """Return the values of a --config flag as nested dicts."""
    return flag.value.to_dict()
