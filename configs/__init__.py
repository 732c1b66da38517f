"""Configs, one file per kind of run, and the parsing of every program's flags."""

import difflib
import importlib.machinery
import importlib.util
import itertools
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict


def parse_flags(argv: list[str], may_be_empty: Collection[str] = (), takes_arguments: bool = False) -> list[str]:
    """Parse flags for `app.run(main, flags_parser=parse_flags)`; what is wrong with them exits with one line.

    No flag and no argument is empty, apart from the flags `may_be_empty`: --workdir="$RUN" with an unset variable must
    not mean the current folder. Arguments that are no flags are refused unless the program `takes_arguments`.
    """
    from heinsen.config import ConfigError

    _shorten_interrupts()
    values, config = flags.FLAGS, None
    if (path := _find_config_file(argv)) is not None:
        if not path.strip():
            _exit_for_empty("--config=")
        argv = [f"--config={find_config(path)}" if text == f"--config={path}" else text for text in argv]
        try:
            config = load_config(path)  # explains errors that the flag's own parser passes on
        except ConfigError as error:
            sys.exit(f"error: {error}")
        refuse_missing_fields(argv, config)
    try:
        arguments, problem = values(argv), None
    except flags.Error as error:
        arguments, problem = [], _explain(error, config)
        if missing := re.search(r"Flag --(\w+) must have a value other than None", problem):
            arguments = [argv[0], *_no_flags(argv)]
            problem = f"--{missing[1]} is missing: {values[missing[1]].help}"
    for name in values:
        if name not in may_be_empty and _is_empty(values[name]):
            _exit_for_empty(f"--{name}=")
    if not all(map(str.strip, arguments)):
        _exit_for_empty("an argument")
    if arguments[1:] and not takes_arguments:  # first, as it may be the value of a flag that is missing
        refuse(f"unexpected arguments {arguments[1:]}: write --flag=value, and quote a value with spaces")
    if problem is not None:
        refuse(problem)
    return arguments


def _explain(error: flags.Error, config: ConfigDict | None) -> str:
    """Return what is wrong with the flags, and what to write instead."""
    problem = str(error)
    if isinstance(error, flags.UnrecognizedFlagError) and config is not None and "Did you mean" not in problem:
        similar = [f"--config.{field}" for field in _similar_fields(error.flagname, config)]
        return problem + _ask(similar)
    if number := re.search(r"invalid literal for int\(\) with base 10: '(.*)'", problem):
        return problem.replace(number[0], f"expected an integer{_as_integer(number[1])}")
    problem = re.sub(r"\('Non-boolean argument to boolean flag', .*\)", "expected true or false", problem)
    return problem.replace(
        "Overriding config is not allowed.", "a run has its own; override fields, --config.a.b=value"
    )


def _as_integer(text: str) -> str:
    """Return how to write 1e6 as an integer; nothing for what is none."""
    try:
        number = float(text)
    except ValueError:
        return ""
    return f", such as {int(number)}" if number.is_integer() else ""


def _no_flags(argv: list[str]) -> list[str]:
    """Return arguments that are no flags, nor the value of one before them."""
    takes_next = lambda text: text.startswith("-") and "=" not in text
    return [text for before, text in itertools.pairwise(argv) if not (text.startswith("-") or takes_next(before))]


def refuse(problem: str) -> NoReturn:
    """End the program with one line, for flags that cannot be used."""
    sys.exit(f"error: {problem} (--help lists the flags)")


def refuse_address(flag: str, remedy: str = "give a folder, and copy it there") -> None:
    """End the program if the flag's value is an address such as s3://bucket/name, where no folder can be written."""
    if "://" in (value := flags.FLAGS[flag].value or ""):
        refuse(f"--{flag}={value} is an address, and files are written to folders: {remedy}")


def refuse_missing_fields(arguments: Iterable[str], config: ConfigDict) -> None:
    """End the program if a flag --config.a.b=value names a field that the config lacks."""
    for argument in arguments:
        if (match := re.match(r"--?config\.([^=]+)", argument)) and (problem := explain_missing(match[1], config)):
            refuse(f"--config.{problem}")


def explain_missing(field: str, config: ConfigDict) -> str | None:
    """Return what is wrong with the name of a field, and similar ones; None if the config has it."""
    group: Any = config
    for key in field.split("."):
        if not isinstance(group, ConfigDict) or key not in group:
            break
        group = group.get(key)
    else:
        return None
    similar = _similar_fields(field, config)
    return f"{field}: the config has no such field{_ask(similar)}"


def _ask(similar: list[str]) -> str:
    """Return the end of a message about a name that is wrong."""
    return f"; is it {' or '.join(similar)}?" if similar else ""


def _similar_fields(field: str, config: ConfigDict) -> list[str]:
    """Return fields whose last name is like that of `field`, or has it for its initials (lr), or groups like it."""
    paths = list(_paths(config))
    groups = {path.rpartition(".")[0] for path in paths} - {""}
    name = field.rpartition(".")[2]
    lasts = {path: path.rpartition(".")[2] for path in paths}
    initials = [path for path, last in lasts.items() if "".join(word[:1] for word in last.split("_")) == name]
    like = difflib.get_close_matches(name, lasts.values(), n=2, cutoff=0.75)
    found = [*initials, *(path for last in like for path in paths if lasts[path] == last)]
    return list(dict.fromkeys(found or difflib.get_close_matches(field, groups, n=1, cutoff=0.75)))[:2]


def _paths(config: ConfigDict, parent: str = "") -> Iterator[str]:
    """Yield the names of all fields, a.b for field b of group a."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _paths(value, f"{parent}{key}.")
        else:
            yield f"{parent}{key}"


def show_help(name: str) -> None:
    """End the program `name`, which is "__main__" unless it is imported, if --help asks for its flags.

    Call it between the definitions of flags and the imports that take seconds, in which Ctrl-C is one line from now on.
    """
    if name != "__main__":
        return
    _shorten_interrupts()
    if {"--help", "--helpshort"} & {*sys.argv}:
        app.define_help_flags()
        flags.FLAGS(sys.argv)


def _shorten_interrupts() -> None:
    """Print one line instead of a traceback where Ctrl-C ends the program."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = show


def _exit_for_empty(what: str) -> NoReturn:
    refuse(f"{what} is empty: give a value, or leave it out (is a shell variable unset?)")


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


def find_config(path: str) -> str:
    """Return the path of a config file: where there is no configs/NAME.py, that of this package."""
    file, *argument = path.split(":", 1)
    own = Path(__file__).resolve().parent.parent / file
    return path if Path(file).exists() or not own.is_file() else ":".join([str(own), *argument])


def load_config(path: str) -> ConfigDict:
    """Return the config that a file's `get_config` makes. Raises ConfigError, which names the file."""
    from heinsen.config import ConfigError

    file, *argument = find_config(path).split(":", 1)
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
