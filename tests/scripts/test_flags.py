"""Flags of every program, and config files with the overrides of their fields: what is wrong ends in one line."""

import contextlib
import dataclasses
import io
import json
import os
import re
import runpy
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
from absl import app, flags

import experiments.tools  # noqa: F401  imported within a test, its libraries would keep the test's streams
from configs import default, pile_125m
from heinsen.config import ConfigError, from_mapping
from heinsen.training.config import TrainConfig
from scripts.cli import show_help
from scripts.config_files import load_config, override
from scripts.sweep_runs import RunFactory

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("*.py"), *(ROOT / "scripts").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
PROGRAMS = sorted(
    path.relative_to(ROOT).as_posix() for path in SOURCES if '\nif __name__ == "__main__":\n' in path.read_text()
)
MAY_BE_EMPTY = [("scripts/prepare_data.py", "source_field")]  # stores no sources


@pytest.fixture
def end_of(monkeypatch):
    """Return a function that runs a program up to its main and returns the message that it ends with, else None."""
    registry = flags.FLAGS.__dict__["__flags"]
    before = dict(registry)
    of_absl = {name: registry[name] for name in before if flags.FLAGS.find_module_defining_flag(name)[:4] == "absl"}

    def run(program, *arguments):
        registry.clear()  # of other programs
        registry.update(of_absl)
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        monkeypatch.setattr(app, "run", lambda main, flags_parser: flags_parser(sys.argv))
        try:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        except SystemExit as end:
            return end.code
        return None

    yield run
    registry.clear()
    registry.update(before)


def text_flags(program):
    """Return the names of a program's flags whose values are texts; the parsers of others refuse an empty one."""
    found = flags.FLAGS.get_key_flags_for_module(str(ROOT / program))
    names = [flag.name for flag in found if "string" in flag.flag_type() and "enum" not in flag.flag_type()]
    return names + ["config.data.path"] * ("config" in names)


def test_programs_and_their_flags_are_found(end_of):
    assert {"train.py", "eval.py", "scripts/sweep.py", "experiments/scaling/run.py"} < set(PROGRAMS)
    for program, names in {
        "train.py": {"workdir"},
        "eval.py": {"tasks"},
        "scripts/prepare_data.py": {"source"},
    }.items():
        end_of(program)
        assert names < set(text_flags(program))


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_takes_an_empty_value(program, end_of):
    with contextlib.redirect_stderr(io.StringIO()):
        end_of(program)
        for name in text_flags(program):
            end = end_of(program, f"--{name}=")
            if (program, name) in MAY_BE_EMPTY:
                assert end is None or "is empty" not in end
            else:
                message = f"error: --{name}= is empty: give a value, or leave it out"
                assert end is not None and end.startswith(message) and "\n" not in end, (name, end)


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        (["scripts/prepare_data.py", "--split=train", "--out=~/data"], "out", "/home/me/data"),
        (
            ["scripts/prepare_data.py", "--split=a", "--out=b", "--source=~/a", "--source=b~"],
            "source",
            ["/home/me/a", "b~"],
        ),
        (["train.py", "--config=configs/demo.py", "--config.data.path=~/x"], "config.data.path", "/home/me/x"),
        (["scripts/generate.py", "--workdir=x", "--prompt=~/x"], "prompt", ["~/x"]),
    ],
)
def test_a_tilde_that_the_shell_leaves_is_the_home_folder(command, name, value, end_of, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert end_of(*command) is None and flags.FLAGS[name].value == value


HELP = """
import contextlib, io, json, os, runpy, sys
from absl import app
from ml_collections import ConfigDict
for program in json.load(sys.stdin):
    if os.fork() == 0:
        sys.argv = [program, "-h"]
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            runpy.run_path(program, run_name="__main__")
        slow = [name for name in ("jax", "matplotlib") if name in sys.modules]
        counts = [text.getvalue().count(words) for words in ("\\n  --", ": Required. ")]
        print(json.dumps([program, slow, *counts]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_help_says_which_flags_are_required_without_importing_jax():
    """Importing it takes most of the time that a program needs to start."""
    command = [sys.executable, "-c", HELP]
    end = subprocess.run(command, input=json.dumps(PROGRAMS), cwd=ROOT, capture_output=True, text=True)
    shown = [json.loads(line) for line in end.stdout.splitlines()]
    assert [program for program, *_ in shown] == PROGRAMS, end.stderr
    for program, slow, n_flags, n_required in shown:
        text = (ROOT / program).read_text()
        more = {'", sizes=': 1, "reads_corpus=False": -1, "has_cells=False": -3}
        of_experiments = 7 + sum(n for option, n in more.items() if option in text)  # experiments/command.py
        n_defined = text.count("flags.DEFINE_") or of_experiments
        assert slow == [] and n_flags == n_defined and n_required == text.count("required=True"), program


def test_every_spelling_of_help_is_help(end_of, capsys):
    for flag in ("-h", "-help", "--help", "--helpshort"):
        assert end_of("eval.py", flag) is None
        assert capsys.readouterr().out.count("\n  --workdir: Required. Run folder of train.py") == 1


@pytest.mark.parametrize(("error", "told"), [(KeyboardInterrupt(), "interrupted"), (ValueError("x"), "ValueError: x")])
def test_ctrl_c_is_one_line_from_the_first_imports_on(monkeypatch, capsys, error, told):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "argv", ["program"])
    show_help("__main__")
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == f"{told}\n"


@pytest.mark.parametrize("program", ["eval.py", "scripts/generate.py"])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_a_terminal_cannot_encode_is_escaped_and_names_of_files_are_not(program, name, end_of, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, name, stream)
    assert end_of(program).startswith("error: --workdir is missing")
    print("caf\u00e9 \ud800", os.fsencode("caf\u00e9").decode("ascii", "surrogateescape"), file=stream, flush=True)
    assert stream.buffer.getvalue() == rb"caf\xe9 \ud800 caf" + b"\xc3\xa9\n"


def test_errors_of_the_c_locale_show_names_of_files(tmp_path):
    """Without UTF-8 Python decodes them to lone surrogates, which it would print as escapes."""
    source = os.fsencode(tmp_path) + "/donn\u00e9es.xyz".encode()
    command = [sys.executable, "scripts/prepare_data.py", b"--source=" + source, "--out=out", "--split=train"]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([*command, "--tokenizer=bytes"], cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 1 and done.stderr.startswith(b"error: no file matches source '" + source + b"'")


UNKNOWN, UNEXPECTED = "Unknown command line flag", "unexpected arguments ['more']: write --flag=value, and quote a"
PREPARE = ["scripts/prepare_data.py", "--out=x", "--split=train"]
LIKE_IT = "is it --config.optimizer.learning_rate or --config.optimizer.final_learning_rate?"


@pytest.mark.parametrize(
    "command, message",
    [
        (["train.py", "--learning_rate=3"], f"{UNKNOWN} 'learning_rate'; {LIKE_IT}"),
        (["train.py", "--workdr=x"], f"{UNKNOWN} 'workdr'. Did you mean: workdir ?"),
        (["train.py", "--hollow=x"], f"{UNKNOWN} 'hollow'"),
        (["scripts/plot_runs.py", "--config.seed=1"], f"{UNKNOWN} 'config.seed'"),
        (["train.py", "--plan_steps=2.7"], "flag --plan_steps=2.7: expected an integer"),
        (["train.py", "--plan_steps=1e3"], "flag --plan_steps=1e3: expected an integer, such as 1000"),
        (["train.py", "--plan_steps=some"], "flag --plan_steps=some: expected an integer"),
        (["train.py", "--plan=maybe"], "flag --plan=maybe: expected true or false"),
        (["train.py", "--config=configs/demo.py", "--workdir=x", "more"], f"{UNEXPECTED} value with spaces"),
        # Without the flag that it is the value of:
        (["train.py", "more", "--workdir=x", "--plan_steps", "1"], f"{UNEXPECTED} value with spaces"),
        (["eval.py"], re.compile(r"--workdir is missing: [A-Z].* \(--help lists the flags\)")),
        (["scripts/prepare_data.py"], re.compile(r"--out is missing: [A-Z].* \(--help lists the flags\)")),
        (["train.py", "--config=configs/demo.py", "--workdir", " "], re.compile("--workdir= is empty: give a value.*")),
        ([*PREPARE, "--source=x", "--source", ""], re.compile("--source= is empty: give a value.*")),
        ([*PREPARE, "x", ""], re.compile("an argument is empty: give a value.*")),
        (["scripts/plot_runs.py", "--out=x.png", "", "run"], re.compile("an argument is empty: give a value.*")),
    ],
)
def test_a_wrong_flag_is_told_with_what_to_write(command, message, end_of):
    pattern = re.compile(re.escape(f"{message} (--help lists the flags)")) if isinstance(message, str) else message
    told = end_of(*command)
    assert told.startswith("error: ") and pattern.fullmatch(told.removeprefix("error: ")), told


def test_arguments_are_taken_by_programs_that_have_some(end_of):
    assert end_of("scripts/plot_runs.py", "--out=x.png", "run") is None


# ---- config files --------------------------------------------------------------------------------

BAD_FILES = {
    "syntax": (b"x = (", r"SyntaxError: '\(' was never closed"),
    "binary": (bytes(range(256)), "SyntaxError: .* null bytes|SyntaxError: .*UTF-8"),
    "empty": (b"", "TypeError: it has no function get_config"),
    "raises": (b"def get_config():\n    return 1 / 0\n", "line 2: ZeroDivisionError: division by zero"),
    "lines": (b"raise ValueError('one\\ntwo')\n", "line 1: ValueError: one two"),
    "import": (b"\nimport nothing_here\n", "line 2: ModuleNotFoundError: No module named 'nothing_here'"),
    "exits": (b"import sys\nsys.exit(0)\n", "line 2: SystemExit: 0"),
    "number": (b"def get_config():\n    return 5\n", "TypeError: get_config returns int, not a ConfigDict"),
    "arguments": (b"def get_config(a):\n    return a\n", r"TypeError: get_config\(\) missing 1 required"),
    "folder": (None, "Is a directory: give a Python file"),
    "missing": (None, "No such file or directory: give a Python file, such as configs/demo.py"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_config_file_that_cannot_be_loaded_is_named(name, tmp_path):
    content, message = BAD_FILES[name]
    path = tmp_path / f"{name}.py"
    if name == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--config={re.escape(str(path))} cannot be loaded: ({message})") as error:
        load_config(str(path))
    assert "\n" not in str(error.value)


def test_a_file_is_loaded_once_and_takes_what_follows_the_colon(tmp_path):
    """Its dataclasses look for the module that they are in."""
    path = tmp_path / "config"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses, pathlib\nfrom ml_collections import ConfigDict\n"
        "@dataclasses.dataclass\nclass Size:\n    n: int\n"
        f"with open({str(tmp_path / 'log')!r}, 'a') as log:\n    print('loaded', file=log)\n"
        "def get_config(text='default'):\n    return ConfigDict(dict(text=text, n=Size(3).n))\n"
    )
    assert load_config(str(path)).to_dict() == {"text": "default", "n": 3}
    assert (tmp_path / "log").read_text() == "loaded\n"
    assert load_config(f"{path}:a:b").text == "a:b"


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("batch_size", "12", 12),
        ("optimizer.eps", "1e-6", 1e-6),
        ("optimizer.eps", "2", 2.0),
        ("model.output_gate", "True", True),
        ("model.output_gate", "false", False),
        ("data.path", "a=b,None", "a=b,None"),
        ("keep_every", "7", 7),  # None in the config
        ("init_from", "7", "7"),
    ],
)
def test_a_field_takes_a_value_of_its_type(field, text, value):
    values = override(default.get_config(), {"seed": "5", field: text}).to_dict()
    *groups, name = field.split(".")
    found = (values[groups[0]] if groups else values)[name]
    assert found == value and type(found) is type(value) and values["seed"] == 5


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("total_tokens", "3e9", "=3e9: expected an integer, such as 3000000000"),
        ("total_tokens", "inf", "=inf: expected an integer"),
        ("keep_every", "often", "=often: expected an integer"),
        ("optimizer.b1", "high", "=high: expected a number"),
        ("model.output_gate", "maybe", "=maybe: expected true or false"),
        ("mesh", "2", "=2: mesh is a group of fields (data, fsdp, sequence, tensor)"),
        ("seed.x", "1", ": the config has no such field"),
        ("nothing.like.it", "1", ": the config has no such field"),
        *(
            (field, "1", f": the config has no such field; is it {similar}?")
            for field, similar in {
                "optimizer.lr": "optimizer.learning_rate",
                "learning_rate": "optimizer.learning_rate or optimizer.final_learning_rate",
                "optimiser.learning_rate": "optimizer.learning_rate or optimizer.final_learning_rate",
                "model.layers": "model.n_layers",
                "batchsize": "batch_size",
                "modle": "model",
            }.items()
        ),
    ],
)
def test_what_a_field_cannot_take_is_told_with_what_to_write(field, text, message):
    for flag in ("config", "sweep"):
        with pytest.raises(ConfigError) as error:
            override(default.get_config(), {field: text}, flag)
        assert str(error.value) == f"--{flag}.{field}{message}"


def fields(cls, path=""):
    """Yield (name, type) of the fields of a dataclass and of those in it."""
    for name, kind in typing.get_type_hints(cls).items():
        yield from fields(kind, f"{path}{name}.") if dataclasses.is_dataclass(kind) else [(path + name, kind)]


def test_none_unsets_optional_fields_of_every_type_and_no_others():
    optional = {name: kind for name, kind in fields(TrainConfig) if types.NoneType in typing.get_args(kind)}
    assert {int, str} <= {kind for hint in optional.values() for kind in typing.get_args(hint)}
    config = override(pile_125m.get_config(), dict.fromkeys(optional, "3"))
    assert None not in [config.get(name) for name in ("init_from", "keep_every")]
    assert from_mapping(TrainConfig, override(config, dict.fromkeys(optional, "None")).to_dict()).init_from is None
    for name in dict(fields(TrainConfig)).keys() - optional:
        values = override(pile_125m.get_config(), {name: "None"}).to_dict()
        with pytest.raises(ConfigError, match=rf"config\.{re.escape(name)} = None: expected"):
            from_mapping(TrainConfig, values)


def test_a_sweep_unsets_an_optional_field():
    factory = RunFactory("configs/pile_125m.py", {"keep_every": "5"}, check_data=False)
    values = [factory.convert("keep_every", text) for text in ("None", "7")]
    assert values == [None, 7] and factory.base["keep_every"] == 5
    for value in values:
        command = factory.command(factory.make({"keep_every": value}), Path("run"))
        assert command[1:] == [str(ROOT / "train.py"), "--config=configs/pile_125m.py", "--workdir=run", command[-1]]
        assert command[-1] == f"--config.keep_every={value}"


def test_no_field_of_a_config_is_an_empty_text():
    values = pile_125m.get_config().to_dict()
    values["data"]["path"] = ""
    with pytest.raises(ConfigError, match=r"config.data.path = '': it must not be empty"):
        from_mapping(TrainConfig, values)
