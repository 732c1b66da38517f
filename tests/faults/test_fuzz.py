"""Every file that a command reads is damaged in every way: the right result, or one line that names the file.

    python -m pytest -n 0 -m long tests/faults/test_fuzz.py [--seed=N] [-k eval]

HEINSEN_FUZZ is the number of times that each command meets each damage of each kind of file. All paths are relative to
the folder of a case, which holds copies of what the command reads.
"""

import collections
import dataclasses
import fnmatch
import hashlib
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import zstandard

from heinsen.data.prepare import Settings, prepare
from heinsen.data.shards import ShardWriter
from tests.faults.programs import ROOT, End, Programs
from tests.runs import OVERRIDES, checkpoint_steps, read_log, without_timing

pytest_plugins = ["tests.run_fixtures"]
pytestmark = pytest.mark.long

ROUNDS = int(os.environ.get("HEINSEN_FUZZ", 1))
SERVERS = 2
HANG = 30.0  # seconds; on a busy machine, ten times what the undamaged command takes there
STEPS, EVERY = 12, 4  # the run's; its last checkpoint is removed, and `resume` repeats the steps after the one before

# The parts of a world, with names that no prose contains.
RAW, PARTIAL, DATA, RUN, EXPORT, STATE, SWEEP, BANDS = (
    f"w.{name}" for name in ("raw", "partial", "data", "run", "export", "state", "sweep", "bands")
)
CONFIG_FILE = ROOT / "configs" / "default.py"
SETTINGS = OVERRIDES | {
    "data.path": DATA,
    "total_tokens": STEPS * 4 * 16,
    "model.n_layers": 1,
    "optimizer.warmup_steps": 2,
    "validate_every": EVERY,
    "validation_tokens": 200,
    "checkpoint_every": EVERY,
}


def config_flags(**changes: Any) -> list[str]:
    return [f"--config={CONFIG_FILE}", *(f"--config.{name}={value}" for name, value in (SETTINGS | changes).items())]


# ---- commands --------------------------------------------------------------------------------


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def steps_after_8(folder: Path, run: str) -> list[dict[str, Any]]:
    return [entry for entry in without_timing(read_log(folder / run)) if entry["step"] > 2 * EVERY]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, the parts of the world that it gets, and what it reads of them.

    `reads` is {kind of file: pattern of its paths}; a file is of the first kind that fits. `result` returns what must
    not change besides stdout. `runs` says that it starts processes of its own, whose errors are shown.
    """

    arguments: list[str]
    reads: dict[str, str]
    parts: tuple[str, ...]
    result: Callable[[Path], Any] = lambda folder: None
    runs: bool = False


RUN_FILES = {
    "config.json of a run": f"{RUN}/config.json",
    "arrays of a checkpoint": f"{RUN}/checkpoints/8/*/d/*",
    "records of a checkpoint": f"{RUN}/checkpoints/8/*METADATA*",
    "other files of a checkpoint": f"{RUN}/checkpoints/8/*",
}
SPLIT_FILES = {
    "metadata.json of a split": "/metadata.json",
    "shards": "/shard-?????.npy",
    "sources of documents": "/shard-*.sources.npy",
}
METRICS = {"metrics.jsonl": f"{RUN}/metrics.jsonl"}
EXPORT_FILES = {
    "config.json of an export": f"{EXPORT}/config.json",
    "weights.safetensors": f"{EXPORT}/weights.safetensors",
}
GENERATE = ["scripts/generate.py", "--prompt=abc", "--max_tokens=8", "--seed=3", "--save_state=after"]
PREPARE = ["scripts/prepare_data.py", "--tokenizer=bytes", "--shard_tokens=1000", "--workers=1", f"--source={RAW}"]
SHORT = {"total_tokens": 2 * 4 * 16, "optimizer.warmup_steps": 1}


def of_split(split: str, *kinds: str) -> dict[str, str]:
    return {kind: f"{DATA}/{split}{SPLIT_FILES[kind]}" for kind in kinds or SPLIT_FILES}


SWEEP_FLAGS = [*config_flags(**SHORT), f"--workdir={SWEEP}", "--sweep.seed=0,1", "--parallel=2"]
SWEEP_FILES = {
    "sweep.json": f"{SWEEP}/sweep.json",
    "status.json of a sweep's run": f"{SWEEP}/seed=*/status.json",
    "metrics.jsonl of a sweep's run": f"{SWEEP}/seed=*/metrics.jsonl",
}

COMMANDS = {
    "train: resume": Command(
        ["train.py", f"--workdir={RUN}", *config_flags()],
        RUN_FILES | METRICS | of_split("train", "metadata.json of a split", "shards"),
        (RUN, DATA),
        lambda folder: steps_after_8(folder, RUN),
    ),
    "train: init_from a run": Command(
        ["train.py", "--workdir=new", *config_flags(**SHORT, init_from=RUN)],
        RUN_FILES,
        (RUN, DATA),
        lambda folder: without_timing(read_log(folder / "new")),
    ),
    "train: init_from an export": Command(
        ["train.py", "--workdir=new", *config_flags(**SHORT, init_from=EXPORT)],
        EXPORT_FILES,
        (EXPORT, DATA),
        lambda folder: without_timing(read_log(folder / "new")),
    ),
    "eval": Command(["eval.py", f"--workdir={RUN}"], RUN_FILES | of_split("validation"), (RUN, DATA)),
    "eval: export": Command(["eval.py", f"--workdir={EXPORT}"], EXPORT_FILES, (EXPORT, DATA)),
    "generate": Command([*GENERATE, f"--workdir={RUN}"], RUN_FILES, (RUN,), lambda folder: digest(folder / "after")),
    "generate: export": Command(
        [*GENERATE, f"--workdir={EXPORT}"], EXPORT_FILES, (EXPORT,), lambda folder: digest(folder / "after")
    ),
    "generate: load_state": Command(
        [*GENERATE, f"--workdir={EXPORT}", f"--load_state={STATE}/text.state"],
        {"saved state": f"{STATE}/text.state"},
        (EXPORT, STATE),
        lambda folder: digest(folder / "after"),
    ),
    "export": Command(
        ["scripts/export.py", f"--workdir={RUN}", "--out=new"],
        RUN_FILES | METRICS,
        (RUN,),
        lambda folder: [digest(folder / "new" / name) for name in ("weights.safetensors", "README.md")],
    ),
    "prepare: resume": Command(
        [*PREPARE, f"--out={PARTIAL}", "--split=train"],
        {
            "progress.jsonl": f"{PARTIAL}/train/progress.jsonl",
            "inputs": f"{RAW}/*",
            "shards": f"{PARTIAL}/train/shard-?????.npy",
            "sources of documents": f"{PARTIAL}/train/shard-*.sources.npy",
        },
        (RAW, PARTIAL),
        lambda folder: {
            name: digest(folder / PARTIAL / "train" / name)
            for name in ("metadata.json", *(f"shard-{i:05d}.npy" for i in range(3)))
        },
    ),
    "prepare: again": Command(
        [*PREPARE, f"--out={DATA}", "--split=train"],
        of_split("train", "metadata.json of a split"),
        (RAW, DATA),
    ),
    "prepare: verify": Command(
        ["scripts/prepare_data.py", "--verify", f"--out={DATA}", "--split=train"], of_split("train"), (DATA,)
    ),
    "plot_runs": Command(
        ["scripts/plot_runs.py", RUN, "--out=runs.svg", "--metric=validation_loss", f"--against={BANDS}/bands.csv"],
        METRICS | {"config.json of a run": f"{RUN}/config.json", "bands of loss": f"{BANDS}/bands.csv"},
        (RUN, BANDS),
    ),
    "sweep: resume": Command(
        ["scripts/sweep.py", *SWEEP_FLAGS],
        SWEEP_FILES,
        (SWEEP, DATA),
        runs=True,
    ),
    "sweep: status": Command(["scripts/sweep.py", f"--workdir={SWEEP}", "--status"], SWEEP_FILES, (SWEEP,)),
    "sweep: report": Command(
        ["scripts/sweep.py", f"--workdir={SWEEP}", "--report"],
        SWEEP_FILES,
        (SWEEP,),
        lambda folder: [row.rpartition(",")[0] for row in (folder / SWEEP / "sweep.csv").read_text().splitlines()],
    ),
}


# ---- damage ----------------------------------------------------------------------------------

Damage = Callable[[np.random.Generator, Path, list[Path]], None]  # (rng, file, other files of its kind)


def flip(rng, path, others):
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)


def truncate(kept: Callable[[int], int]) -> Damage:
    return lambda rng, path, others: os.truncate(path, kept(path.stat().st_size))


def lengthen(rng, path, others):
    path.write_bytes(path.read_bytes() + rng.bytes(rng.integers(1, 100)))


def fill_at_random(rng, path, others):
    path.write_bytes(rng.bytes(path.stat().st_size))


def fill_with(text: str) -> Damage:
    return lambda rng, path, others: path.write_text(text)


def swap(rng, path, others):
    path.write_bytes(others[rng.integers(len(others))].read_bytes())


def make_folder(rng, path, others):
    path.unlink()
    path.mkdir()


def remove(rng, path, others):
    path.unlink()


def forbid(rng, path, others):
    """A link to nothing: as root, no mode forbids reading."""
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES: dict[str, Damage] = {
    **{f"a flipped bit ({i})": flip for i in range(4)},
    "truncated to nothing": truncate(lambda n: 0),
    "truncated to half": truncate(lambda n: n // 2),
    "truncated by a byte": truncate(lambda n: n - 1),
    "lengthened": lengthen,
    "random bytes": fill_at_random,
    **{f"replaced by {text}": fill_with(text + "\n") for text in ("5", "null", "{}", '[{"a": 1}]')},
    "replaced by another file": swap,
    "replaced by a folder": make_folder,
    "replaced by a broken link": forbid,
    "removed": remove,
}


# ---- damage to values


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


def change_value(rng, mapping: Any) -> None:
    change(rng, mapping, lambda holder, key: holder.__setitem__(key, wrong_value(rng, holder[key])))


def drop_value(rng, mapping: Any) -> None:
    change(rng, mapping, lambda holder, key: holder.__delitem__(key))


def change(rng, mapping: Any, action: Callable[[Any, Any], None]) -> None:
    found = list(places(mapping))
    *path, key = found[rng.integers(len(found))]
    for each in path:
        mapping = mapping[each]
    action(mapping, key)


def in_json(mutate: Callable) -> Damage:
    def damage(rng, path, others):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        i = rng.integers(len(lines))
        mapping = json.loads(lines[i])
        mutate(rng, mapping)
        lines[i] = json.dumps(mapping)
        path.write_text("\n".join(lines) + "\n")

    return damage


def in_header(mutate: Callable) -> Damage:
    def damage(rng, path, others):
        arrays = dict(np.load(path))
        header = json.loads(str(arrays["header"]))
        mutate(rng, header)
        with path.open("wb") as file:
            np.savez(file, **arrays | {"header": np.array(json.dumps(header))})

    return damage


def in_array(mutate: Callable) -> Damage:
    def damage(rng, path, others):
        arrays = dict(np.load(path))
        names = [name for name in arrays if name != "header"]
        name = names[rng.integers(len(names))]
        arrays[name] = mutate(arrays[name])
        with path.open("wb") as file:
            np.savez(file, **arrays)

    return damage


def write_id(low: int, high: int) -> Damage:
    def damage(rng, path, others):
        ids = np.load(path)
        ids[rng.integers(len(ids), size=30)] = rng.integers(low, high)
        np.save(path, ids)

    return damage


IN_JSON = {f"a wrong value ({i})": in_json(change_value) for i in range(8)}
IN_JSON |= {f"a missing value ({i})": in_json(drop_value) for i in range(3)}
OF_SUFFIX: dict[str, dict[str, Damage]] = {
    ".json": IN_JSON,
    ".jsonl": IN_JSON,
    ".npy": {"an id in range": write_id(0, 2), "an id beyond the vocabulary": write_id(257, 1 << 16)},
    ".state": {
        **{f"a wrong value in the header ({i})": in_header(change_value) for i in range(6)},
        **{f"a missing value in the header ({i})": in_header(drop_value) for i in range(3)},
        "NaN in an array": in_array(lambda x: np.full_like(x, np.nan if x.dtype.kind == "f" else -1)),
        "an array of another shape": in_array(lambda x: np.concatenate([x.ravel(), x.ravel()])),
        "an array of another type": in_array(lambda x: x.astype(np.complex64)),
    },
}


def damages_of(path: str) -> dict[str, Damage]:
    """Return {name: damage} of what can be done to a file of this name."""
    return DAMAGES | OF_SUFFIX.get(Path(path).suffix, {})


# Damage that shows in no check: (command, path, damage) as patterns, and the reason. docs/SCALING.md lists the same.
UNTOLD = {
    ("*", "*/metrics.jsonl", "*"): "the log of a run has no digest: it grows by lines",
    ("export", f"{RUN}/config.json", "*"): "the model card shows fields that may change when a run resumes",
    ("plot_runs", f"{RUN}/config.json", "*"): "no checkpoint is read, whose hash of the config would tell",
    ("[!p]*", f"{DATA}/*.npy", "*"): "in-range ids are compared with their digest by --verify alone",
    ("prepare: resume", f"{PARTIAL}/*.npy", "*"): "of a finished shard only the header and the size are read again",
    ("*", f"{RAW}/*", "*"): "inputs are the user's: there is nothing to compare them with",
    ("sweep: *", "*/status.json", "removed"): "so does a run that has not been started look",
    ("sweep: *", "*/status.json", "replaced by a broken link"): "the same",
    ("*", f"{BANDS}/*", "*"): "the user's own file",
}


# ---- the world -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers(commands) -> Iterator[list[Programs]]:
    environment = commands.environment(1)
    with Programs(environment) as first, Programs(environment) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def world(servers: list[Programs], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all parts, undamaged."""
    folder = tmp_path_factory.mktemp("world")

    def run(*arguments: str) -> None:
        end = servers[0].run(list(arguments), folder, 300)
        assert end.status == 0, end.stderr

    write_raw(folder / RAW)
    for split in ("train", "validation"):
        run(*PREPARE, f"--out={DATA}", f"--split={split}")
    interrupt_preparation(folder)
    run("train.py", f"--workdir={RUN}", *config_flags())
    run("scripts/export.py", f"--workdir={RUN}", f"--out={EXPORT}")
    shutil.rmtree(folder / RUN / "checkpoints" / str(STEPS))
    assert checkpoint_steps(folder / RUN) == [EVERY, 2 * EVERY]
    (folder / STATE).mkdir()
    run(*GENERATE[:2], f"--workdir={EXPORT}", f"--save_state={STATE}/text.state")
    run("scripts/sweep.py", *SWEEP_FLAGS)
    (folder / BANDS).mkdir()
    (folder / BANDS / "bands.csv").write_text(
        "tokens,low,high,source,tokenizer\n300,1.5,4.5,a,bytes\n600,1,6,b,bytes\n"
    )
    return folder


def write_raw(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        texts = [" ".join(rng.choice(["abc", "de", "fgh"], 30)) for _ in range(10)]
        lines = [json.dumps({"text": text, "meta": {"pile_set_name": "AB"[i % 2]}}) for i, text in enumerate(texts)]
        (folder / f"{name}.jsonl.zst").write_bytes(zstandard.compress("\n".join(lines).encode()))


def interrupt_preparation(world: Path) -> None:
    """Leave a preparation after two shards."""
    close = ShardWriter.close_shard

    def close_two(writer):
        if len(writer.shards) == 2:
            raise KeyboardInterrupt
        close(writer)

    settings = Settings((RAW,), "train", "bytes", shard_tokens=1000)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.chdir(world)
        patch.setattr(ShardWriter, "close_shard", close_two)
        prepare(settings, PARTIAL, workers=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """One damage of one file of one command, with random numbers of its own."""

    command: str
    kind: str
    path: str
    damage: str
    seed: int

    def __str__(self) -> str:
        return f"{self.command}: {self.path}: {self.damage}"


def cases_of(rng, world: Path, name: str) -> list[Case]:
    """Return ROUNDS times each damage of each kind of file, a file of several drawn for each."""
    order = lambda path: (path.parent, path.stat().st_size, path.name)  # Orbax's names are random
    found = sorted((path for path in world.rglob("*") if path.is_file()), key=order)
    cases, left = [], [str(path.relative_to(world)) for path in found]
    for kind, pattern in COMMANDS[name].reads.items():
        files = fnmatch.filter(left, pattern)
        left = [path for path in left if path not in files]
        for damage in [*damages_of(files[0])] * ROUNDS:
            path = files[rng.integers(len(files))]
            cases.append(Case(name, kind, path, damage, int(rng.integers(1 << 32))))
    return cases


def others_of(world: Path, path: str) -> list[Path]:
    """Other files that could be mistaken for this one."""
    own = world / path
    alike = lambda other: other.suffix == own.suffix != "" or other.parent.name == own.parent.name
    files = [other for other in sorted(world.rglob("*")) if other.is_file() and other.read_bytes() != own.read_bytes()]
    return list(filter(alike, files)) or files


def execute(case: Case, world: Path, folder: Path, programs: Programs, limit: float) -> tuple[End, Any]:
    """Run the command on a damaged copy; return how it ended, and its result."""
    command = COMMANDS[case.command]
    for part in command.parts:
        shutil.copytree(world / part, folder / part, symlinks=True)
    damages_of(case.path)[case.damage](
        np.random.default_rng(case.seed), folder / case.path, others_of(world, case.path)
    )
    end = programs.run(command.arguments, folder, limit)
    result = result_of(command, end, folder) if end.status == 0 else None
    shutil.rmtree(folder)
    return end, result


def result_of(command: Command, end: End, folder: Path) -> Any:
    return end.stdout, command.result(folder)


# ---- judgement -------------------------------------------------------------------------------

VERDICTS = ("correct", "refused", "untold")  # all others are wrong


def judge(case: Case, end: End, result: Any, accepted: list[Any]) -> str:
    """Return correct, refused or untold, or else what is wrong. `accepted[1:]` need a warning."""
    if "Traceback" in end.stderr:
        return "a traceback"
    if end.status is None:
        return f"it hangs for {end.seconds:.0f} s"
    if end.status == 0:
        if result == accepted[0] or (result in accepted[1:] and names("warning: ", case, end)):
            return "correct"
        return "untold" if is_untold(case) else f"another result: {result}"
    if end.status < 0 or end.status > 3:
        return f"status {end.status}"
    first, message = error_lines(end.stderr)
    if COMMANDS[case.command].runs:
        message = end.stderr
    if not first:
        return "no error: line"
    return "refused" if mentions(case, message) else "the error does not name the file"


def error_lines(stderr: str) -> tuple[bool, str]:
    """Return whether one error is there, in one line or as a list with a last line, and its text."""
    lines = stderr.splitlines()
    found = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if len(found) != 1:
        return False, ""
    message = lines[found[0] :]
    is_one = all(line.startswith("  ") for line in message[1:-1]) and (len(message) != 2 or message[1].startswith("  "))
    return is_one, "\n".join(message)


def names(start: str, case: Case, end: End) -> bool:
    return any(mentions(case, line) for line in end.stderr.splitlines() if line.startswith(start))


def mentions(case: Case, text: str) -> bool:
    """Whether the text has the file's path, or that of a folder which holds it.

    Of inputs the preparation's record has only the number and the size.
    """
    path = Path(f"{PARTIAL}/train" if case.kind == "inputs" and RAW not in text else case.path)
    return any(str(each) in text for each in (path, *path.parents) if each != Path("."))


def is_untold(case: Case) -> bool:
    matches = lambda pattern: all(map(fnmatch.fnmatch, (case.command, case.path, case.damage), pattern))
    return any(map(matches, UNTOLD))


# ---- the tests -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> Iterator[collections.Counter]:
    """How cases ended, by kind of file; printed at the end."""
    found: collections.Counter = collections.Counter()
    yield found
    verdicts = (*VERDICTS, "wrong")
    rows = [(kind, *(found[kind, verdict] for verdict in verdicts)) for kind in dict.fromkeys(k for k, _ in found)]
    rows.append(("all", *(sum(row[i] for row in rows) for i in range(1, 5))))
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{'cases by kind of file':<32}" + "".join(f"{name:>9}" for name in verdicts))
        print("\n".join(f"{kind:<32}" + "".join(f"{n:>9}" for n in numbers) for kind, *numbers in rows))


@pytest.mark.parametrize("name", COMMANDS)
def test_damage_never_passes_for_a_result(world, servers, counts, rng, tmp_path, name):
    command = COMMANDS[name]
    accepted, seconds = map(list, zip(*undamaged(world, tmp_path, servers[0], command), strict=True))
    limit = max(HANG, 10 * max(seconds))
    free: SimpleQueue[Programs] = SimpleQueue()
    for server in servers:
        free.put(server)

    def run(number: int, case: Case) -> tuple[Case, End, str]:
        programs, folder = free.get(), tmp_path / f"case {number}"
        folder.mkdir()
        try:
            end, result = execute(case, world, folder, programs, limit)
        finally:
            free.put(programs)
        verdict = judge(case, end, result, accepted)
        if verdict not in VERDICTS:
            print(describe(case, end, verdict), flush=True)
        return case, end, verdict

    with ThreadPoolExecutor(SERVERS) as pool:
        ends = list(pool.map(run, itertools.count(), cases_of(rng, world, name)))
    for case, _, verdict in ends:
        counts[case.kind, verdict if verdict in VERDICTS else "wrong"] += 1
    wrong = [describe(*each) for each in ends if each[2] not in VERDICTS]
    assert not wrong, f"{len(wrong)} of {len(ends)} cases:\n" + "\n".join(wrong)


def describe(case: Case, end: End, verdict: str) -> str:
    """Return the case, and its last traceback or the last lines of stderr."""
    before, traceback, after = end.stderr.rpartition("Traceback")
    lines = [*before.splitlines()[-1:], *(traceback + after).splitlines()[:30]] if traceback else after.splitlines()
    return f"{case}: {verdict}\n    " + "\n    ".join(lines[-20:])


def undamaged(world: Path, folder: Path, programs: Programs, command: Command) -> list[tuple[Any, float]]:
    """Return (result, seconds) of the command; also without the newest checkpoint, if the result depends on it."""
    found = []
    reads_newest = any("checkpoint" in kind for kind in command.reads) and command is not COMMANDS["train: resume"]
    for kept in ("all", "older") if reads_newest else ("all",):
        for part in command.parts:
            shutil.copytree(world / part, folder / kept / part)
        if kept == "older":
            shutil.rmtree(folder / kept / RUN / "checkpoints" / str(2 * EVERY))
        end = programs.run(command.arguments, folder / kept, 600)
        assert end.status == 0, end.stderr
        found.append((result_of(command, end, folder / kept), end.seconds))
    assert len({repr(result) for result, _ in found}) == len(found), "the checkpoints must differ"
    return found
