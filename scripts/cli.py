"""Flags of every program: errors say what to write instead."""

import codecs
import io
import itertools
import os.path
import re
import sys
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Any, NoReturn

from absl import app, flags

from heinsen.errors import InputError
from scripts.config_files import as_integer, ask_for_similar, load_config, override

_TEXTS = ("prompt", "stop")  # flags that may begin with ~ and name no file
_HELP = {"-h", "-help", "--help", "--helpshort"}


def parse_flags(argv: list[str], may_be_empty: Collection[str] = (), takes_arguments: bool = False) -> list[str]:
    """Parse flags for `app.run(main, flags_parser=parse_flags)`; what is wrong with them exits with one line.

    A program that defines --config also takes --config.a.b=value (`read_config`). ~ at the beginning of a value is the
    home folder: in --out=~/data the shell leaves it as it is. No flag and no argument is empty,
    apart from the flags `may_be_empty`: --workdir="$RUN" with an unset variable must not mean the current folder.
    Arguments that are no flags are refused unless the program `takes_arguments`.
    """
    _prepare_terminal()
    values = flags.FLAGS
    if _HELP & {*argv}:
        _show_help()
    for text in argv[1:] if "config" in values else ():
        if (match := re.match(r"--?(config\.[^=\s]+)", text)) and match[1] not in values:
            flags.DEFINE_string(match[1], None, "Overrides a field of the config.")
    try:
        arguments, problem = values(argv), None
    except flags.Error as error:
        arguments, problem = [], _explain(error)
        if missing := re.search(r"Flag --(\w+) must have a value other than None", problem):
            arguments = [argv[0], *_find_arguments(argv)]
            problem = f"--{missing[1]} is missing: {values[missing[1]].help}"
    empty = [f"--{name}=" for name in values if name not in may_be_empty and _is_empty(values[name])]
    if not all(map(str.strip, arguments)):
        empty.append("an argument")
    if empty:
        refuse(f"{empty[0]} is empty: give a value, or leave it out (is a shell variable unset?)")
    if arguments[1:] and not takes_arguments:  # first, as it may be the value of a flag that is missing
        refuse(f"unexpected arguments {arguments[1:]}: write --flag=value, and quote a value with spaces")
    if problem is not None:
        refuse(problem)
    for name in set(values) - {*_TEXTS}:
        if isinstance(texts := values[name].value, str):
            values[name].value = os.path.expanduser(texts)
        elif isinstance(texts, list):
            values[name].value = [os.path.expanduser(text) if isinstance(text, str) else text for text in texts]
    return arguments


def _explain(error: flags.Error) -> str:
    """Return what is wrong with the flags, and what to write instead."""
    problem = str(error)
    if isinstance(error, flags.UnrecognizedFlagError) and "config" in flags.FLAGS and "Did you mean" not in problem:
        from configs import default

        return problem + ask_for_similar(error.flagname, default.get_config(), "--config.")
    if number := re.search(r"invalid literal for int\(\) with base 10: '(.*)'", problem):
        return problem.replace(number[0], f"expected an integer{as_integer(number[1])}")
    return re.sub(r"\('Non-boolean argument to boolean flag', .*\)", "expected true or false", problem)


def _find_arguments(argv: list[str]) -> list[str]:
    """Return arguments that are no flags, nor the value of one before them."""
    takes_next = lambda text: text.startswith("-") and "=" not in text
    return [text for before, text in itertools.pairwise(argv) if not (text.startswith("-") or takes_next(before))]


def _is_empty(flag: flags.Flag) -> bool:
    """Return whether a flag was given without a value, or with an empty one among several."""
    texts = flag.value if isinstance(flag.value, list) else [flag.value]
    return bool(flag.present) and (not texts or any(isinstance(text, str) and not text.strip() for text in texts))


def refuse(problem: str) -> NoReturn:
    """End the program with one line, for flags that cannot be used."""
    sys.exit(f"error: {problem} (--help lists the flags)")


def refuse_address(flag: str) -> None:
    """End the program if the flag's value is an address such as s3://bucket/name, where no folder can be written."""
    if "://" in (value := flags.FLAGS[flag].value or ""):
        refuse(f"--{flag}={value} is an address, and files are written to folders: give a folder, and copy it there")


def parse_counts(flag: str, texts: Sequence[str]) -> list[int]:
    """Return the numbers of a list flag. Raises InputError unless all are positive integers."""
    for text in texts:
        if not text.strip().isdecimal() or int(text) < 1:
            raise InputError(f"--{flag}: {text!r} is not a number above 0; expected e.g. --{flag}=16,64")
    return [int(text) for text in texts]


def show_help(name: str) -> None:
    """End the program `name`, which is "__main__" unless it is imported, if --help asks for its flags.

    Call it between the definitions of flags and the imports that take seconds, in which Ctrl-C is one line from now on.
    """
    if name != "__main__":
        return
    _prepare_terminal()
    if _HELP & {*sys.argv}:
        _show_help()


def _show_help() -> NoReturn:
    """Print what the program does and its flags, and which of them are required."""
    for name in (values := flags.FLAGS):
        if any("other than None" in validator.message for validator in values[name].validators):
            values[name].help = f"Required. {values[name].help}"
    app.usage(shorthelp=True, writeto_stdout=True)
    sys.exit()


def _prepare_terminal() -> None:
    """Print names of files as they are, and escape what else a terminal that is not UTF-8 cannot show.

    Ctrl-C ends the program with one line.
    """
    codecs.register_error("readable", _encode)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="readable")

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = show


def _encode(error: UnicodeError) -> tuple[bytes, int]:
    """Return the byte that Python could not decode in a file's name, or an escape; and where to go on."""
    assert isinstance(error, UnicodeEncodeError)
    character, after = error.object[error.start], error.start + 1
    is_byte = "\udc80" <= character <= "\udcff"
    return character.encode("ascii", "surrogateescape" if is_byte else "backslashreplace"), after


def read_config(flag: flags.FlagHolder[str]) -> dict[str, Any]:
    """Return the fields of the file that --config names, with those of --config.a.b=value. Raises ConfigError."""
    return override(load_config(flag.value), given_fields()).to_dict()


def given_fields() -> dict[str, str]:
    """Return {"a.b": value} of the flags --config.a.b=value."""
    given = {name: flags.FLAGS[name].value for name in flags.FLAGS if name.startswith("config.")}
    return {name.removeprefix("config."): text for name, text in given.items()}
