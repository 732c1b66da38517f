"""Files of datasets, of inputs and of runs are damaged in every way: the right result, or one line that names the file.

    python -m pytest -n 0 -m long tests/faults/test_fuzz.py [--seed=N] [-k prepare]

By default each command meets one damage of each kind of file. HEINSEN_FUZZ is the number of times that in the long
test it meets each damage of each.
"""

import dataclasses
import fnmatch
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tests.data.preparing import interrupt, settings_of
from tests.runs import OVERRIDES, ROOT, Commands, checkpoint_steps, read_log, without_timing

pytest_plugins = ["tests.run_fixtures"]

ROUNDS = int(os.environ.get("HEINSEN_FUZZ", 1))
STEPS, EVERY = 12, 4  # the run's; its last checkpoint is removed, and `resume` repeats the steps after the one before

# The folders of a world, with names that no prose contains.
RAW, PARTIAL, DATA, RUN, EXPORT, STATE = (f"w.{name}" for name in ("raw", "partial", "data", "run", "export", "state"))
SETTINGS = OVERRIDES | {
    "total_tokens": STEPS * 4 * 16,
    "model.n_layers": 1,
    "optimizer.warmup_steps": 2,
    "validate_every": EVERY,
    "validation_tokens": 200,
    "checkpoint_every": EVERY,
}


# ---- commands --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, with {} for the world's folder, and what it reads there.

    `reads` is {kind of file: pattern of its paths}; a file is of the first kind that fits. `result` returns what must
    not change besides stdout.
    """

    arguments: list[str]
    reads: dict[str, str]
    result: Callable[[Path], Any] = lambda folder: None


def digests(folder: Path) -> dict[str, str]:
    files = [*folder.glob("*.npy"), folder / "metadata.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def of_split(split: str, *kinds: str) -> dict[str, str]:
    files = {
        "metadata.json of a split": "metadata.json",
        "shards": "shard-?????.npy",
        "sources of documents": "shard-*.sources.npy",
    }
    return {kind: f"{DATA}/{split}/{files[kind]}" for kind in kinds or files}


RUN_FILES = {
    "config.json of a run": f"{RUN}/config.json",
    "arrays of a checkpoint": f"{RUN}/checkpoints/8/*/d/*",
    "records of a checkpoint": f"{RUN}/checkpoints/8/*METADATA*",
    "other files of a checkpoint": f"{RUN}/checkpoints/8/*",
}
PREPARE = ["scripts/prepare_data.py", "--tokenizer=bytes", "--shard_tokens=1000", "--workers=1"]
TRAIN = ["train.py", f"--config={ROOT}/configs/default.py", f"--workdir={{}}/{RUN}", f"--config.data.path={{}}/{DATA}"]
TRAIN += [f"--config.{name}={value}" for name, value in SETTINGS.items()]
GENERATE = ["scripts/generate.py", f"--workdir={{}}/{RUN}", "--prompt=abc", "--temperature=0"]
COMMANDS = {
    "train": Command(
        TRAIN,
        RUN_FILES | {"metrics.jsonl": f"{RUN}/metrics.jsonl"} | of_split("train", "metadata.json of a split", "shards"),
        lambda folder: [e for e in without_timing(read_log(folder / RUN)) if e["step"] > 2 * EVERY],
    ),
    "eval": Command(["eval.py", f"--workdir={{}}/{RUN}"], RUN_FILES | of_split("validation")),
    "eval: export": Command(
        ["eval.py", f"--workdir={{}}/{EXPORT}"],
        {"config.json of an export": f"{EXPORT}/config.json", "weights": f"{EXPORT}/weights.safetensors"},
    ),
    "generate: state": Command([*GENERATE, f"--load_state={{}}/{STATE}", "--max_tokens=9"], {"saved state": STATE}),
    "prepare: resume": Command(
        [*PREPARE, f"--source={{}}/{RAW}", f"--out={{}}/{PARTIAL}", "--split=train"],
        {
            "progress.jsonl": f"{PARTIAL}/train/progress.jsonl",
            "inputs": f"{RAW}/*",
            "shards": f"{PARTIAL}/train/shard-?????.npy",
            "sources of documents": f"{PARTIAL}/train/shard-*.sources.npy",
        },
        lambda folder: digests(folder / PARTIAL / "train"),
    ),
    "prepare: verify": Command(
        ["scripts/prepare_data.py", "--verify", f"--out={{}}/{DATA}", "--split=train"], of_split("train")
    ),
}

# Damage that shows in no check: (command, path, damage) as patterns, and the reason. docs/training.md lists the same.
UNTOLD = {
    ("*", "*/metrics.jsonl", "*"): "the log of a run has no digest: it grows by lines",
    ("[!p]*", f"{DATA}/*.npy", "*"): "in-range ids are compared with their digest by --verify alone",
    ("prepare: resume", f"{PARTIAL}/*.npy", "*"): "of a finished shard only the header and the size are read again",
}


# ---- damage ----------------------------------------------------------------------------------

Damage = Callable[[np.random.Generator, Path, list[Path]], object]  # (rng, file, other files like it)


def flip(rng, path, others):
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)


def truncate(kept: Callable[[int], int]) -> Damage:
    return lambda rng, path, others: os.truncate(path, kept(path.stat().st_size))


def fill_with(text: str) -> Damage:
    return lambda rng, path, others: path.write_text(text)


def replace(make: Callable[[Path], object]) -> Damage:
    return lambda rng, path, others: (path.unlink(), make(path))


DAMAGES: dict[str, Damage] = {
    **{f"a flipped bit ({i})": flip for i in range(4)},
    "truncated to nothing": truncate(lambda n: 0),
    "truncated to half": truncate(lambda n: n // 2),
    "truncated by a byte": truncate(lambda n: n - 1),
    "lengthened": lambda rng, path, others: path.write_bytes(path.read_bytes() + rng.bytes(rng.integers(1, 100))),
    "random bytes": lambda rng, path, others: path.write_bytes(rng.bytes(path.stat().st_size)),
    **{f"replaced by {text}": fill_with(text + "\n") for text in ("5", "null", "{}", '[{"a": 1}]')},
    "replaced by another file": lambda rng, path, others: path.write_bytes(rng.choice(others).read_bytes()),
    "replaced by a folder": replace(Path.mkdir),
    "replaced by a broken link": replace(lambda path: path.symlink_to("nowhere")),  # as root, all files are readable
    "removed": replace(lambda path: None),
}


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths of everything in JSON but the whole."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def wrong_value(rng, old: Any) -> Any:
    huge, nested = 10**30, {"a": [old]}
    if isinstance(old, bool) or not isinstance(old, int | float):
        return [-1, huge, "another", "", "../x", None, nested, math.nan, True][rng.integers(9)]
    return [-old - 1, 10 * old + 1, old + 0.5, huge, str(old), None, nested, math.nan, math.inf, True][rng.integers(10)]


def in_json(is_removed: bool) -> Damage:
    """Return a damage of one value in JSON, or of a line in JSON lines: it is another one, or removed."""

    def damage(rng, path, others):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        i = rng.integers(len(lines))
        whole = holder = json.loads(lines[i])
        found = list(places(whole))
        *outer, key = found[rng.integers(len(found))]
        for each in outer:
            holder = holder[each]
        if is_removed:
            del holder[key]
        else:
            holder[key] = wrong_value(rng, holder[key])
        lines[i] = json.dumps(whole)
        path.write_text("\n".join(lines) + "\n")

    return damage


def write_id(low: int, high: int) -> Damage:
    def damage(rng, path, others):
        ids = np.load(path)
        ids[rng.integers(len(ids), size=30)] = rng.integers(low, high)
        np.save(path, ids)

    return damage


IN_JSON = {f"a wrong value ({i})": in_json(False) for i in range(8)}
IN_JSON |= {f"a missing value ({i})": in_json(True) for i in range(3)}
OF_SUFFIX: dict[str, dict[str, Damage]] = {
    ".json": IN_JSON,
    ".jsonl": IN_JSON,
    ".npy": {"an id in range": write_id(0, 2), "an id beyond the vocabulary": write_id(257, 1 << 16)},
}


def damages_of(path: str) -> dict[str, Damage]:
    """Return {name: damage} of what can be done to a file of this name."""
    return DAMAGES | OF_SUFFIX.get(Path(path).suffix, {})


# ---- the world -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class World:
    """Undamaged files in `whole`, of which `live`, the path that all of them name, becomes a copy before each case."""

    commands: Commands
    whole: Path
    live: Path

    def reset(self) -> None:
        shutil.rmtree(self.live, ignore_errors=True)
        shutil.copytree(self.whole, self.live)  # with the times of inputs

    def run(self, command: Command) -> tuple[Any, Any]:
        """Run a command; return how it ended, and its result."""
        end = self.commands.fork(*(word.replace("{}", str(self.live)) for word in command.arguments))
        return end, (end.stdout, command.result(self.live)) if end.returncode == 0 else None


@pytest.fixture(scope="module")
def world(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Inputs, a preparation with two of its three shards, a dataset, a run, its export, and a state of its model."""
    folder = tmp_path_factory.mktemp("world")
    world = World(commands, folder / "whole", folder / "live")
    sources = {"train": world.live / RAW, "validation": folder / "validation"}  # no file may be in two splits
    for path in sources.values():
        path.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for path in [*(sources["train"] / name for name in "abc"), sources["validation"] / "d"]:
        texts = [" ".join(rng.choice(["abc", "de", "fgh"], 30)) for _ in range(10)]
        lines = [json.dumps({"text": text, "meta": {"pile_set_name": "AB"[i % 2]}}) for i, text in enumerate(texts)]
        path.with_suffix(".jsonl.zst").write_bytes(zstandard.compress("\n".join(lines).encode()))
    for split, source in sources.items():
        end, _ = world.run(Command([*PREPARE, f"--source={source}", f"--out={{}}/{DATA}", f"--split={split}"], {}))
        assert end.returncode == 0, end.stderr
    interrupt(settings_of(world.live / RAW, shard_tokens=1000), world.live / PARTIAL, shards=2)
    export = Command(["scripts/export.py", f"--workdir={{}}/{RUN}", f"--out={{}}/{EXPORT}"], {})
    state = Command([*GENERATE, f"--save_state={{}}/{STATE}", "--max_tokens=0"], {})
    for command in (COMMANDS["train"], export):
        end, _ = world.run(command)
        assert end.returncode == 0, end.stderr
    shutil.rmtree(world.live / RUN / "checkpoints" / str(STEPS))
    end, _ = world.run(state)
    assert end.returncode == 0, end.stderr
    assert checkpoint_steps(world.live / RUN) == [EVERY, 2 * EVERY]
    world.live.rename(world.whole)
    return world


def files_of(folder: Path) -> list[Path]:
    order = lambda path: (path.parent, path.stat().st_size, path.name)  # Orbax's names are random
    return sorted((path for path in folder.rglob("*") if path.is_file()), key=order)


def cases_of(rng, world: World, command: Command, rounds: int) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, path, damage): so many times each damage of each kind of file (0: one), and a file drawn for it."""
    left = [str(path.relative_to(world.whole)) for path in files_of(world.whole)]
    for kind, pattern in command.reads.items():
        files = fnmatch.filter(left, pattern)
        left = [path for path in left if path not in files]
        damages = [*damages_of(files[0])]
        for damage in damages * rounds or [str(rng.choice(damages))]:
            yield kind, str(rng.choice(files)), damage


def others_of(world: World, path: str) -> list[Path]:
    """Other files that could be mistaken for this one."""
    own = world.whole / path
    alike = lambda other: other.suffix == own.suffix != "" or other.parent.name == own.parent.name
    files = [other for other in files_of(world.whole) if other.read_bytes() != own.read_bytes()]
    return list(filter(alike, files)) or files


# ---- judgement -------------------------------------------------------------------------------


def judge(name: str, path: str, damage: str, end: Any, result: Any, accepted: list[Any]) -> str | None:
    """Return what is wrong with the end of a command, or None. The results `accepted[1:]` need a warning."""
    # Of inputs the record of a preparation has only number, size and digest.
    places = [path, f"{PARTIAL}/train"] if path.startswith(RAW) else [path]
    names_file = lambda text: any(str(each) in text for p in places for each in (Path(p), *Path(p).parents[:-1]))
    lines = end.stderr.splitlines()
    if "Traceback" in end.stderr:
        return "a traceback"
    if end.returncode == 0:
        warned = any(line.startswith("warning: ") and names_file(line) for line in lines)
        untold = any(all(map(fnmatch.fnmatch, (name, path, damage), pattern)) for pattern in UNTOLD)
        return None if result == accepted[0] or untold or (warned and result in accepted) else f"a result: {result}"
    errors = [line for line in lines if line.startswith("error: ")]
    if end.returncode not in (1, 2, 3) or len(errors) != 1:
        return f"status {end.returncode}, {len(errors)} lines of error"
    message = end.stderr[end.stderr.index("error: ") :]
    # The config of a run names its data: with another name in it, the error is theirs.
    is_of_data = path == f"{RUN}/config.json" and re.search(r"no token dataset at|holds '\w+' tokens", message)
    return None if names_file(message) or is_of_data else "the error does not name the file"


@pytest.mark.parametrize("rounds", [0, pytest.param(ROUNDS, marks=pytest.mark.long)], ids=["smallest", "whole"])
@pytest.mark.parametrize("name", COMMANDS)
def test_damage_never_passes_for_a_result(world, rng, name, rounds):
    command, accepted, wrong = COMMANDS[name], [], []
    for kept in ("all", "older") if name == "eval" else ("all",):
        world.reset()
        if kept == "older":
            shutil.rmtree(world.live / RUN / "checkpoints" / str(2 * EVERY))
        end, result = world.run(command)
        assert end.returncode == 0 and result not in accepted, end.stderr
        accepted.append(result)
    for kind, path, damage in cases_of(rng, world, command, rounds):
        world.reset()
        damages_of(path)[damage](rng, world.live / path, others_of(world, path))
        end, result = world.run(command)
        if problem := judge(name, path, damage, end, result, accepted):
            wrong.append(f"{kind}, {path}, {damage}: {problem}\n    " + "\n    ".join(end.stderr.splitlines()[-20:]))
    assert not wrong, f"{len(wrong)} cases:\n" + "\n".join(wrong)
