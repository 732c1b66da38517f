"""Imports run one way, and configuration enters once, strictly checked: the layout and contracts of docs/design.md."""

import ast
import dataclasses
import graphlib
import importlib
import typing
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs import default, pile_125m
from heinsen.config import ConfigError, added, comparable, from_mapping
from heinsen.models import ModelConfig
from heinsen.training.config import TrainConfig
from heinsen.training.data import train_config

ROOT = Path(__file__).parent.parent

# logspace -> ops -> models -> the rest; a unit imports units of lower or equal rank, or its own modules.
RANKS = {"logspace": 0, "ops": 1, "models": 2}
RANKS |= {"decoding": 3, "training": 3, "evaluation": 3, "export": 3, "weights": 3, "sweep": 4, "plan": 4}
RANKS |= {"linen": 3, "nnx": 3}
# Leaves import only themselves, these, and errors of heinsen.
COMMON = {"files", "progress", "quantities"}
LEAVES = {
    "backend",
    "chips",
    "config",
    "data",
    "distributed",
    "figures",
    "files",
    "host",
    "parallel",
    "progress",
    "promotion",
    "quantities",
    "version",
}
BASE = "errors"  # imported by everything, imports nothing
# The core reaches contrib here alone, inside functions; contrib imports what it likes.
LOOKUPS = {"heinsen.ops.api", "heinsen.plan.plan"}
ENTRY_POINTS = {"configs", "absl", "ml_collections", "tests", "scripts", "train", "eval"}  # with their flags
ONLY_IN = {
    "flax": ("heinsen.models.", "heinsen.linen.", "heinsen.nnx."),
    "orbax": ("heinsen.training.checkpoint.",),
}


def module_names():
    """Return {dotted name: path} of heinsen's modules."""
    names = {}
    for path in sorted((ROOT / "heinsen").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = module_names()


def imported_modules(source: str, module: str, is_package: bool = False) -> set[str]:
    """Return the dotted names of the modules that `source` imports; `from a import b` is a.b where that is a module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".") if is_package else module.split(".")[:-1]
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                found.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base)
    return found


def imports_of(module: str) -> set[str]:
    path = MODULES[module]
    return imported_modules(path.read_text(), module, path.name == "__init__.py")


def unit(module: str) -> str:
    """Return the file or folder of heinsen that holds a module: heinsen.training.loop -> training, heinsen -> .'."""
    return (module + ".").split(".")[1]


def within_heinsen(module: str) -> set[str]:
    found = {name for name in imports_of(module) if name.split(".")[0] == "heinsen"}
    return {name for name in found if unit(name) != "contrib"} if module in LOOKUPS else found


def test_every_kind_of_import_is_found():
    source = (
        "import jax.numpy as jnp, heinsen.models\n"
        "from heinsen.ops import scan, log_attention\n"
        "def f():\n    from ..logspace import logsumexp\n    from . import dataset\n"
    )
    assert imported_modules(source, "heinsen.data.loader") == {
        "jax.numpy",
        "heinsen.models",
        "heinsen.ops.scan",
        "heinsen.ops",
        "heinsen.logspace",
        "heinsen.data.dataset",
    }
    assert imported_modules("from .models import forward", "heinsen", True) == {"heinsen.models"}
    assert {"heinsen", "heinsen.logspace", "heinsen.ops", "heinsen.training.loop"} <= set(MODULES)
    assert "heinsen.logspace" in imports_of("heinsen.ops.scan")
    assert unit("heinsen") == ""
    assert unit("heinsen.config") == "config" and unit("heinsen.data.loader") == "data"


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    own = unit(module)
    if own == "contrib":
        return
    assert own in {"", BASE, *RANKS, *LEAVES}, f"{module}: give {own} a rank in docs/design.md and here"
    for name in within_heinsen(module):
        assert name != "heinsen", f"{module} imports the package that imports it"
        other = unit(name)
        if own in LEAVES:
            assert other in {own, BASE, *COMMON}, f"{module} is a leaf and imports {name}"
        elif own == BASE:
            raise AssertionError(f"{module} imports {name}")
        elif own and other not in {*LEAVES, BASE} and other != own:
            assert RANKS[other] <= RANKS[own], f"{module} imports {name}, which comes after it"


@pytest.mark.parametrize("module", MODULES)
def test_contrib_is_imported_on_demand_by_its_look_ups(module):
    if unit(module) == "contrib":
        return
    path = MODULES[module]
    found = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(
            unit(name) == "contrib"
            for name in imported_modules(ast.unparse(node), module, path.name == "__init__.py")
            if name.startswith("heinsen.")
        )
    ]
    assert bool(found) == (module in LOOKUPS)
    assert all(node.col_offset for node in found), "inside a function"


def test_no_modules_import_each_other_in_a_cycle():
    edges = {module: within_heinsen(module) - {module} for module in MODULES}
    assert "heinsen.logspace" in edges["heinsen.ops.scan"]
    order = list(graphlib.TopologicalSorter(edges).static_order())  # raises CycleError, which names the cycle
    assert order.index("heinsen.logspace") < order.index("heinsen.ops.scan")


@pytest.mark.parametrize("module", MODULES)
def test_heinsen_knows_no_entry_point_and_no_flags(module):
    assert not {name.split(".")[0] for name in imports_of(module)} & ENTRY_POINTS


@pytest.mark.parametrize("package", ONLY_IN)
def test_flax_and_orbax_stay_where_they_belong(package):
    users = {module for module in MODULES if package in {name.split(".")[0] for name in imports_of(module)}}
    assert users and all(f"{module}.".startswith(ONLY_IN[package]) for module in users), users


def sources(folder: str = ".") -> list[Path]:
    """Return the project's Python files, without virtual environments, data and caches."""
    files = (ROOT / folder).rglob("*.py")
    first = lambda path: path.relative_to(ROOT).parts[0]
    outside = {"data", "runs", "build", "dist"}
    return sorted(path for path in files if first(path) not in outside and not first(path).startswith("."))


def uses_of(path: Path, name: str) -> list[ast.AST]:
    """Return the nodes of a file that call a method of `name`, such as `sys.path`, assign to it or subscript it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=used)) | ast.Subscript(value=used) | ast.AugAssign(target=used):
                found += [node] if ast.unparse(used) == name else []
            case ast.Assign(targets=targets):
                found += [node for target in targets if ast.unparse(target) == name]
    return found


def test_no_file_edits_the_import_path():
    """An editable install finds the packages."""
    assert {ROOT / "train.py", ROOT / "heinsen/logspace.py", ROOT / "tests/runs.py"} <= set(sources())
    assert not [path for path in sources() if uses_of(path, "sys.path")]


def test_every_module_of_heinsen_can_be_imported_by_name():
    """No function shadows a module, so nothing is looked up in sys.modules or by importlib."""
    for path in sources("heinsen"):
        assert not [node for node in uses_of(path, "sys.modules") if isinstance(node, ast.Subscript)], path
        assert "import_module" not in path.read_text(), path


@pytest.mark.parametrize(
    "code", ["sys.path.insert(0, x)", "sys.path[:0] = [x]", "sys.path += [x]", "sys.path = [x]", "sys.path.append(x)"]
)
def test_every_kind_of_edit_is_found(code, tmp_path):
    (tmp_path / "code.py").write_text(f"import sys\nx = 'a'\n{code}\n")
    assert uses_of(tmp_path / "code.py", "sys.path")


def test_public_names_exist():
    heinsen = importlib.import_module("heinsen")
    public = {"log_attention", "attention", "init_state", "update_state", "query_state", "merge_states"}
    public |= {"sigmoid_attention", "sigmoid_attention_cached"}
    assert public <= set(heinsen.__all__)
    assert all(hasattr(heinsen, name) for name in heinsen.__all__)


# ---- configuration -------------------------------------------------------------------------------

CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_file_builds_a_run(name):
    kind = ["gpt2"] if name == "convert" else []  # else it needs a run to convert
    config = importlib.import_module(f"configs.{name}").get_config(*kind)
    config.model.vocab_size = config.model.vocab_size or 257  # None: the data's
    config = train_config(config.to_dict())
    assert config.total_steps >= 1
    assert {"default", "pile_125m"} <= set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_config_files_change_only_what_default_has(name):
    def fields(values, path=""):
        for key, value in values.items():
            yield from fields(value, f"{path}.{key}") if isinstance(value, dict) else [f"{path}.{key}"]

    values = importlib.import_module(f"configs.{name}").get_config().to_dict()
    assert set(fields(values)) == set(fields(default.get_config().to_dict()))


def test_every_field_can_be_set_by_a_flag():
    """--config.model.values=... would set a method of the ConfigDict."""
    groups = [default.get_config()]
    while groups:
        group = groups.pop()
        assert not [name for name in group if hasattr(ConfigDict, name)]
        groups += [x for _, x in group.items() if isinstance(x, ConfigDict)]


def changed(path: str, value) -> dict:
    """The paper's values with the one at `path` replaced."""
    values = pile_125m.get_config().to_dict()
    *groups, name = path.split(".")
    group = values
    for key in groups:
        group = group[key]
    assert name in group
    group[name] = value
    return values


def fields_of_type(wanted, cls=TrainConfig, path=""):
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from fields_of_type(wanted, kind, f"{path}{name}.")
        elif kind == wanted:
            yield f"{path}{name}"


INTS, FLOATS, STRINGS = (sorted(fields_of_type(kind)) for kind in (int, float, str))


@pytest.mark.parametrize("path", INTS)
@pytest.mark.parametrize("value", [None, True, False, 1.0, "1", [1]], ids=repr)
def test_only_integers_are_integers(path, value):
    with pytest.raises(ConfigError, match=rf"config\.{path} = .*expected int, got {type(value).__name__}"):
        from_mapping(TrainConfig, changed(path, value))


@pytest.mark.parametrize("path", FLOATS)
@pytest.mark.parametrize("value", [None, True, "1e-3"], ids=repr)
def test_only_numbers_are_floats(path, value):
    with pytest.raises(ConfigError, match=rf"config\.{path} = .*expected float, got {type(value).__name__}"):
        from_mapping(TrainConfig, changed(path, value))


@pytest.mark.parametrize("path", STRINGS)
@pytest.mark.parametrize("value", [None, 1], ids=repr)
def test_only_strings_are_strings(path, value):
    with pytest.raises(ConfigError, match=rf"config\.{path} = .*got {type(value).__name__}"):
        from_mapping(TrainConfig, changed(path, value))


def test_an_integer_is_accepted_for_a_float():
    assert {"model.n_layers", "seed"} <= set(INTS) and "optimizer.clip_norm" in FLOATS
    assert {"data.path", "model.dtype", "model.remat"} <= set(STRINGS)
    config = from_mapping(TrainConfig, changed("optimizer.clip_norm", 2))
    assert config.optimizer.clip_norm == 2.0 and type(config.optimizer.clip_norm) is float


def test_none_is_accepted_where_the_type_says_so():
    assert from_mapping(TrainConfig, changed("keep_every", None)).keep_every is None
    assert from_mapping(TrainConfig, changed("model.implementation", None)).model.implementation is None
    assert from_mapping(TrainConfig, changed("model.implementation", "scan")).model.implementation == "scan"
    for path, value in (("keep_every", "often"), ("keep_every", True), ("model.implementation", 3)):
        with pytest.raises(ConfigError, match=rf"config\.{path} = .*or None"):
            from_mapping(TrainConfig, changed(path, value))


@pytest.mark.parametrize("group", ["", "model", "optimizer", "data", "mesh"])
def test_unknown_and_missing_fields_are_named(group):
    where = f"config.{group}".rstrip(".")
    unknown = pile_125m.get_config().to_dict()
    (unknown[group] if group else unknown)["learning_rat"] = 1.0
    with pytest.raises(ConfigError, match=rf"{where} has unknown fields learning_rat"):
        from_mapping(TrainConfig, unknown)
    missing = pile_125m.get_config().to_dict()
    inner = missing[group] if group else missing
    name = sorted(inner)[0]
    del inner[name]
    with pytest.raises(ConfigError, match=rf"{where} lacks {name}"):
        from_mapping(TrainConfig, missing)


def test_a_function_fits_on_a_screen():
    """Kernels, and a module of other libraries, aside."""
    for name, path in MODULES.items():
        if "contrib.kernels" not in name and "export.pytorch" not in name:
            functions = (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef))
            long = {x.name: n for x in functions if (n := x.end_lineno - x.lineno + 1) > 66}
            assert not long, name


def test_a_field_with_its_former_name_too_is_refused():
    model = pile_125m.get_config().model.to_dict()
    renamed = {name: model[name] for name in model if name != "forget_gate"} | {"gate": "head"}
    assert from_mapping(ModelConfig, renamed).forget_gate == "head"
    with pytest.raises(ConfigError, match="config has unknown fields gate"):
        from_mapping(ModelConfig, model | {"gate": "head"})


@dataclasses.dataclass(frozen=True)
class Group:
    rate: float
    beta: float = added(0.9)


@dataclasses.dataclass(frozen=True)
class Whole:
    name: str
    group: Group
    other: Group = added(Group(1.0))


def test_fields_that_are_added_leave_earlier_configs_as_they_were():
    earlier = {"name": "a", "group": {"rate": 2.0}}
    whole = from_mapping(Whole, earlier)
    assert whole == Whole("a", Group(2.0))
    assert comparable(Whole, dataclasses.asdict(whole)) == earlier
    changed = dataclasses.asdict(Whole("a", Group(2.0, beta=0.5), Group(3.0)))
    assert comparable(Whole, changed) == {"name": "a", "group": {"rate": 2.0, "beta": 0.5}, "other": {"rate": 3.0}}


def test_a_group_must_be_a_group():
    with pytest.raises(ConfigError, match=r"config\.model = 3: expected a group"):
        from_mapping(TrainConfig, changed("model", 3))
