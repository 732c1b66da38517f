"""What an installed heinsen is: typed, of one version, light to import; the examples."""

import ast
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

import heinsen
from heinsen.ops import api, reference
from tests.runs import ROOT, TIMEOUT

pytest_plugins = ["tests.run_fixtures"]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]


def requirements(extra: str | None = None) -> set[str]:
    return set(PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra])


def names(lines: set[str]) -> set[str]:
    """The packages' names, as they are imported."""
    imported = {"orbax-checkpoint": "orbax", "ml-collections": "ml_collections", "absl-py": "absl"}
    found = {re.match(r"[\w-]+", line)[0] for line in lines}
    return {imported.get(name, name) for name in found}


def run(*arguments: str | Path, **options) -> str:
    result = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=TIMEOUT, **options
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---- the package -----------------------------------------------------------------------------


def test_the_attention_needs_nothing_but_jax():
    """Imported and used in a fresh process: what else came along, of all that training needs."""
    heavy = names(requirements("train")) | {"torch", "lm_eval", "optuna", "wandb"}
    heavy -= {"zstandard"}  # jax takes it for its cache of compiled functions where it is installed
    assert {"flax", "optax", "orbax", "grain", "datasets", "tiktoken", "absl", "matplotlib"} <= heavy
    program = (
        "import sys, heinsen, jax.numpy as jnp\n"
        "x = jnp.zeros((3, 2))\n"
        "heinsen.init_state((), 2, 2), heinsen.log_attention(x, x, x, implementation='reference')\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    loaded = set(run("-c", program, cwd=ROOT).split())
    assert {"heinsen", "jax", "jaxtyping"} <= loaded
    assert sorted(loaded & heavy) == []


def test_requirements_install_the_package_and_what_training_needs():
    """One list of dependencies, pyproject.toml's; an editable install puts the project root on the import path."""
    core, train = requirements(), requirements("train")
    assert names(core) == {"jax", "jaxtyping", "numpy"} and len(train) > 10
    assert not names(core) & names(train)
    assert REQUIREMENTS == ["-e .[train]"]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == {"": "."} and settings["packages"]["find"]["include"] == ["heinsen*"]


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["dynamic"]["version"] == {"attr": "heinsen.version.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", heinsen.__version__)
    (assignment,) = ast.parse((ROOT / "heinsen" / "version.py").read_text()).body[-1:]
    assert ast.literal_eval(assignment.value) == heinsen.__version__


def has_build_backend() -> bool:
    """Whether the setuptools that pyproject.toml asks for is installed; else the wheel needs the package index."""
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.long
def test_a_wheel_holds_the_typed_package_and_nothing_else(tmp_path):
    source, wheels, site = (tmp_path / name for name in ("source", "wheels", "site"))
    for folder in ("configs", "heinsen", "scripts"):  # a copy: the build writes beside the sources
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "train.py"):
        shutil.copy(ROOT / name, source)
    files = {str(path.relative_to(source)) for path in (source / "heinsen").rglob("*") if path.is_file()}
    assert {"heinsen/py.typed", "heinsen/ops/api.py"} <= files
    offline = ["--no-build-isolation"] if has_build_backend() else []
    run("-m", "pip", "wheel", source, "--no-deps", "--wheel-dir", wheels, *offline)
    (wheel,) = wheels.glob("*.whl")
    assert wheel.name == f"heinsen-{heinsen.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        inside = {name for name in file.namelist() if ".dist-info/" not in name}
        (metadata,) = (file.read(name).decode() for name in file.namelist() if name.endswith("/METADATA"))
    assert inside == files
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert set(needed) == {"jax", "jaxtyping", "numpy"}
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel)
    where = run(
        "-c", f"import sys; sys.path.insert(0, {str(site)!r}); import heinsen; print(heinsen.__file__)", cwd="/"
    )
    assert Path(where.strip()) == site / "heinsen" / "__init__.py"


# ---- the examples ----------------------------------------------------------------------------


@pytest.fixture
def quick_attention(compile_cache, monkeypatch):
    """The form of the attention that compiles soonest."""
    monkeypatch.setitem(api.IMPLEMENTATIONS, "chunked", reference.attend)


@pytest.fixture
def example(quick_attention):
    """example(name): the module of examples/name.py."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_every_example_is_tested():
    tested = {"toy_example", "flax_model", "plain_jax", "fork_state"}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == tested


def test_every_cell_of_the_notebook_runs(quick_attention):
    """Its cells compare what they compute by hand with the library."""
    cells = json.loads((ROOT / "examples" / "attention_by_hand.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names = {}
    for cell in code:
        exec(cell, names)
    assert len(code) >= 6 and sum("assert_allclose" in cell for cell in code) >= 6


def test_toy_example_has_the_same_result_five_times(rng, example, capsys):
    module = example("toy_example")
    results = module.main(seed=int(rng.integers(1000)))
    assert len(results) == 5
    for y in results.values():
        assert y.shape == (12, 4)
        np.testing.assert_allclose(y, results["quadratic"], rtol=1e-4)
    assert "[20, 20, 20, 20]" in capsys.readouterr().out


def test_plain_jax_example_learns_and_streams(example, capsys):
    figures = example("plain_jax").main(steps=100)
    assert figures["last_loss"] < 0.05 * figures["first_loss"] and figures["stream_error"] < 0.02
    assert figures["stream_difference"] < 1e-4
    assert figures["state_size"] == 4 + 4 * 1
    assert "8 numbers of state" in capsys.readouterr().out


def test_flax_example_draws_sequences_with_one_answer(rng, example):
    module = example("flax_model")
    draw, key = module.draw.__wrapped__, jax.random.key(int(rng.integers(1000)))
    names, values, answers = jax.eval_shape(lambda key: draw(key, 5), key)
    assert (names.shape, values.shape, answers.shape) == ((5, 9), (5, 9), (5,))
    params = jax.eval_shape(module.Lookup().init, key, names, values)
    assert jax.eval_shape(module.Lookup().apply, params, names, values).shape == (5, module.N_VALUES)


@pytest.mark.long
def test_flax_example_learns_to_look_up(example):
    module = example("flax_model")
    names, values, answers = map(np.asarray, module.draw(jax.random.key(0), 20))
    for row, answer in enumerate(answers):
        assert values[row, :-1][names[row, :-1] == names[row, -1]] == [answer]
    before, after = module.main(steps=80)
    assert before < 0.3 and after > 0.9


@pytest.mark.long
def test_fork_example_reads_once_and_writes_the_same_again(example):
    shown = example("fork_state").main(n_tokens=8, copies=3, lengths=(1, 20))
    assert len(set(shown["sizes"].values())) == 1 and len(shown["sizes"]) == 2
    assert len(set(shown["forked"])) == 3 and shown["again"] == shown["forked"]
    assert shown["error"] < 1e-3
