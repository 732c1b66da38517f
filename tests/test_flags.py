"""Flags of every program: a value that is empty, and a config file that cannot be loaded, end in one line."""

import ast
import contextlib
import io
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from absl import app, flags
from ml_collections import ConfigDict

from configs import default, explain_missing, load_config
from heinsen.config import ConfigError, from_mapping
from heinsen.training.config import TrainConfig
from scripts.sweep_runs import RunFactory

# ml_collections loads config files by a deprecated method.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

ROOT = Path(__file__).parent.parent
SOURCES = [*ROOT.glob("*.py"), *(ROOT / "scripts").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
PROGRAMS = sorted(path.relative_to(ROOT).as_posix() for path in SOURCES if "app.run(" in path.read_text())
NOT_TEXT = ("DEFINE_integer", "DEFINE_float", "DEFINE_bool", "DEFINE_enum")  # their parsers refuse an empty text


def defined_flags(program: str) -> dict[str, str]:
    """Return {name: DEFINE_...} of the flags that a program's source defines."""
    calls = [node for node in ast.walk(ast.parse((ROOT / program).read_text())) if isinstance(node, ast.Call)]
    calls = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("DEFINE_")]
    return {call.args[0].value: call.func.attr for call in calls}


DEFINED = {program: defined_flags(program) for program in PROGRAMS}
CASES = [
    (program, name) for program in PROGRAMS for name, kind in sorted(DEFINED[program].items()) if kind not in NOT_TEXT
]
CASES += [(program, "config.data.path") for program in PROGRAMS if "config" in DEFINED[program]]
MAY_BE_EMPTY = [("scripts/prepare_data.py", "source_field")]  # stores no sources
BY_CONFIG = [("scripts/sweep.py", "config.data.path")]  # checked with all other fields of the config


@pytest.fixture
def end_of(monkeypatch):
    """Return a function that runs a program up to its main and returns the message that it ends with, else None."""
    registry = flags.FLAGS.__dict__["__flags"]
    others = dict(registry)
    own = {name for names in DEFINED.values() for name in names}

    def run(program, *arguments):
        registry.clear()  # of other programs
        registry.update({name: flag for name, flag in others.items() if name.split(".")[0] not in own})
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        monkeypatch.setattr(app, "run", lambda main, flags_parser: flags_parser(sys.argv))
        try:
            runpy.run_path(str(ROOT / program), run_name="__main__")
        except SystemExit as end:
            return end.code
        return None

    yield run
    registry.clear()
    registry.update(others)


def test_programs_and_their_flags_are_found():
    assert {"train.py", "eval.py", "scripts/sweep.py", "experiments/ladder/run.py"} < set(PROGRAMS)
    assert {("train.py", "workdir"), ("scripts/prepare_data.py", "source"), ("eval.py", "tasks")} < set(CASES)
    assert set(MAY_BE_EMPTY + BY_CONFIG) < set(CASES)


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_takes_an_empty_value(program, end_of):
    for name in [name for of, name in CASES if of == program]:
        config = ["--config=configs/demo.py"] * (name.startswith("config.") and program != "eval.py")
        with contextlib.redirect_stderr(io.StringIO()):
            end = end_of(program, *config, f"--{name}=")
        if (program, name) in MAY_BE_EMPTY + BY_CONFIG:
            assert end is None or "is empty" not in end
        else:
            message = f"error: --{name}= is empty: give a value, or leave it out"
            assert end is not None and end.startswith(message) and "\n" not in end, (name, end)


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "--config=configs/demo.py", "--workdir", " "],
        ["scripts/prepare_data.py", "--out=x", "--split=train", "--source=x", "--source", ""],
        ["scripts/prepare_data.py", "--out=x", "--split=train", "x", ""],
        ["scripts/plot_runs.py", "--out=x.png", "", "run"],
    ],
)
def test_values_and_arguments_of_their_own_are_not_empty_either(command, end_of):
    assert re.match("error: (--workdir=|--source=|an argument) is empty: give a value", end_of(*command))


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_shown_without_importing_jax(program):
    """Importing it takes most of the time that a program needs to start."""
    code = "import runpy, sys; sys.argv = sys.argv[1:]\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit: print('jax' in sys.modules, 'matplotlib' in sys.modules, file=sys.stderr)"
    end = subprocess.run([sys.executable, "-c", code, program, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert end.stderr == "False False\n" and f"{program}:" in end.stdout
    assert all(f"--{'[no]' * (kind == 'DEFINE_bool')}{name}:" in end.stdout for name, kind in DEFINED[program].items())


def test_ctrl_c_is_one_line_from_the_first_imports_on():
    """And other errors keep their traceback."""
    say = "import sys; from configs import show_help; show_help('__main__'); raise {}"
    end_of = lambda error: subprocess.run(
        [sys.executable, "-c", say.format(error)], cwd=ROOT, capture_output=True, text=True
    )
    interrupted, failed = end_of("KeyboardInterrupt"), end_of("ValueError('x')")
    assert interrupted.stderr == "interrupted\n" and interrupted.returncode == -signal.SIGINT
    assert failed.stderr.startswith("Traceback") and failed.returncode == 1


@pytest.mark.parametrize(
    "field, similar",
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate or optimizer.final_learning_rate"),
        ("optimiser.learning_rate", "optimizer.learning_rate or optimizer.final_learning_rate"),
        ("model.layers", "model.n_layers"),
        ("batchsize", "batch_size"),
        ("modle", "model"),
    ],
)
def test_fields_that_are_none_are_told_with_similar_ones(field, similar, end_of):
    end = end_of("train.py", "--config=configs/demo.py", f"--config.{field}=1")
    assert end == f"error: --config.{field}: the config has no such field; is it {similar}? (--help lists the flags)"


def test_every_field_of_the_config_is_one_that_it_has():
    config = default.get_config()
    for group, fields in config.items():
        assert explain_missing(group, config) is None
        for name in fields if isinstance(fields, ConfigDict) else ():
            assert explain_missing(f"{group}.{name}", config) is None
            assert explain_missing(f"{group}.{name}.x", config) is not None
    assert explain_missing("nothing.like.it", config) == "nothing.like.it: the config has no such field"


@pytest.mark.parametrize("program, name", [("eval.py", "workdir"), ("experiments/ladder/run.py", "corpus")])
def test_a_missing_flag_is_named_with_its_meaning(program, name, end_of):
    told = end_of(program)
    assert re.match(rf"error: --{name} is missing: [A-Z].* \(--help lists the flags\)$", told), told


def test_arguments_that_are_no_flags_are_refused(end_of):
    end = end_of("train.py", "--config=configs/demo.py", "--workdir=x", "more")
    assert end.startswith("error: unexpected arguments ['more']: write --flag=value") and "\n" not in end
    assert end_of("scripts/plot_runs.py", "--out=x.png", "run") is None
    forgot_the_flag = end_of("train.py", "configs/demo.py", "--workdir=x", "--plan_steps", "1")
    assert forgot_the_flag.startswith("error: unexpected arguments ['configs/demo.py']: write --flag=value")


@pytest.mark.parametrize(
    "command, message",
    [
        (
            ["train.py", "--learning_rate=3"],
            "Unknown command line flag 'learning_rate'; is it --config.optimizer.learning_rate or "
            "--config.optimizer.final_learning_rate?",
        ),
        (["train.py", "--workdr=x"], "Unknown command line flag 'workdr'. Did you mean: workdir ?"),
        (["train.py", "--hollow=x"], "Unknown command line flag 'hollow'"),
        (
            ["train.py", "--config.total_tokens=3e9"],
            "flag --config.total_tokens=3e9: expected an integer, such as 3000000000",
        ),
        (["train.py", "--config.total_tokens=inf"], "flag --config.total_tokens=inf: expected an integer"),
        (["train.py", "--plan_steps=2.7"], "flag --plan_steps=2.7: expected an integer"),
        (["train.py", "--plan_steps=some"], "flag --plan_steps=some: expected an integer"),
        (["train.py", "--config.model.qk_norm=maybe"], "flag --config.model.qk_norm=maybe: expected true or false"),
        (["train.py", "--plan=maybe"], "flag --plan=maybe: expected true or false"),
        (["eval.py"], "flag --config=configs/demo.py: a run has its own; override fields, --config.a.b=value"),
    ],
)
def test_a_wrong_flag_is_told_with_what_to_write(command, message, end_of):
    end = end_of(command[0], "--config=configs/demo.py", *command[1:])
    assert end == f"error: {message} (--help lists the flags)"


# ---- config files --------------------------------------------------------------------------------

BAD_FILES = {
    "syntax": (b"x = (", r"SyntaxError: '\(' was never closed"),
    "binary": (bytes(range(256)), "SyntaxError: .* null bytes|SyntaxError: .*UTF-8"),
    "empty": (b"", ".* has no attribute 'get_config'"),
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
def test_a_config_file_that_cannot_be_loaded_is_named(name, tmp_path, end_of):
    content, message = BAD_FILES[name]
    path = tmp_path / f"{name}.py"
    if name == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    match = f"^--config={re.escape(str(path))} cannot be loaded: ({message})"
    with pytest.raises(ConfigError, match=match) as error:
        load_config(str(path))
    assert "\n" not in str(error.value)
    for override in ([], ["--config.seed=1"], ["--config.no.such=1"]):
        end = end_of("train.py", f"--config={path}", "--workdir=x", *override)
        assert end == f"error: {error.value}"
    with pytest.raises(ConfigError, match=match):
        RunFactory(str(path), {}, check_data=False)


def test_every_config_of_the_repository_can_be_loaded():
    for path in sorted(ROOT.glob("configs/*.py")):
        if path.name != "__init__.py":
            assert load_config(str(path)).optimizer.learning_rate > 0


def test_no_field_of_a_config_is_an_empty_text():
    fields = default.get_config().to_dict()
    fields["data"]["path"] = ""
    with pytest.raises(ConfigError, match=r"config.data.path = '': it must not be empty"):
        from_mapping(TrainConfig, fields)
