"""Preparations survive kills and full disks, and refuse other settings."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard

from heinsen.data import preparation, tokenization
from heinsen.data import writer as writer_module
from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.preparation import PreparationError, prepare
from heinsen.data.sources import find_inputs
from heinsen.errors import exit_on_error
from heinsen.files import hold_lock
from tests.data.preparing import check_split, files_of, interrupt, jsonl, settings_of, times_of

pytest_plugins = ["tests.run_fixtures"]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_data.py"


@pytest.mark.parametrize(
    ("limits", "count"),
    [({"max_documents": 7}, 7), ({"max_tokens": 41}, 5), ({"max_tokens": 40}, 4), ({"max_documents": 10**6}, 30)],
)
def test_limits(tmp_path, limits, count):
    texts = [f"document{i % 10}" for i in range(30)]  # 10 tokens each
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    prepare(settings_of(tmp_path / "a.jsonl", **limits), tmp_path / "out")
    check_split(tmp_path / "out" / "train", texts[:count])


@pytest.mark.parametrize("changes", [{"split": "../train"}, {"split": ""}, {"shard_tokens": 0}, {"max_tokens": 0}])
def test_settings_out_of_range(changes):
    with pytest.raises(PreparationError, match="split '.*' must consist|must be at least 1, got 0"):
        settings_of("a.txt", **changes)
    with pytest.raises(PreparationError, match="no source given"):
        settings_of()


@pytest.mark.parametrize(
    ("content", "skip", "message"),
    [
        (jsonl(["", "", ""]), False, "no text in 3 documents for split 'train' in .*a.jsonl: give"),
        (b"\n \n", False, "no documents for split 'train'"),
        (b"[]\n[]\n", True, r"no documents .*\(2 bad ones skipped\)"),
    ],
)
def test_a_split_without_text_does_not_bind_the_next_attempt(tmp_path, content, skip, message):
    """Of empty texts alone it would have tokens, but bits per byte would be a division by zero."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(PreparationError, match=message):
        prepare(settings_of(path), tmp_path / "out", skip_bad_documents=skip)
    assert not list((tmp_path / "out" / "train").iterdir())
    path.write_bytes(jsonl(["", "now"]))
    prepare(settings_of(path, tokenizer="gpt2"), tmp_path / "out")
    check_split(tmp_path / "out" / "train", ["", "now"], "gpt2")


def test_number_of_workers(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["text"]))
    settings, counts = settings_of(tmp_path / "a.jsonl"), []
    original = preparation.tokenize_blocks
    monkeypatch.setattr(
        preparation,
        "tokenize_blocks",
        lambda *arguments: (counts.append(arguments[-1]), original(*arguments[:-1], 1))[1],
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5))
    prepare(settings, tmp_path / "small")
    monkeypatch.setattr(preparation, "_SMALL_BYTES", 1)
    prepare(settings, tmp_path / "large")
    prepare(settings, tmp_path / "given", workers=3)
    assert counts == [1, 5, 3]
    with pytest.raises(PreparationError, match="workers must be at least 1, got 0"):
        prepare(settings, tmp_path / "none", workers=0)


def test_worker_death_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["text"]))
    monkeypatch.setattr(tokenization, "_start_worker", functools.partial(os._exit, 9))
    with pytest.raises(PreparationError, match="a worker process died"):
        prepare(settings_of(tmp_path / "a.jsonl"), tmp_path / "out", workers=2)


def test_progress_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preparation, "_LOG_SECONDS", 0.0)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["123456789"] * 3))
    prepare(settings_of(tmp_path / "a.jsonl"), tmp_path / "out")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert re.search(r"out/train: 20 tokens, 2 documents, input 1 of 1, [\d,]+ tokens/s$", lines[1])
    assert re.search(r"out/train: 3 documents, 30 tokens, 27 bytes in 1 shard; 0.\d s, [\d,]+ tokens/s$", lines[-1])


# ---- resuming ------------------------------------------------------------------------------------


def _processes_of(mark):
    """Return the processes with PREPARATION=mark in their environment: a preparation and its workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile
            if f"PREPARATION={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.long
def test_workers_end_with_a_killed_preparation_and_a_rerun_gives_the_same_bytes(tmp_path, rng):
    """At a random moment after the first shard."""
    words = np.array(["".join(rng.choice(list("abcdefghijklmnop"), n)) for n in rng.integers(1, 12, 4000)])
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 40_000, 120)]
    source, folder, mark = tmp_path / "a.jsonl.zst", tmp_path / "killed" / "train", str(os.getpid())
    source.write_bytes(zstandard.compress(jsonl(texts)))
    settings = settings_of(source, tokenizer="gpt2", shard_tokens=200_000)
    arguments = [f"--source={source}", "--tokenizer=gpt2", "--split=train", "--shard_tokens=200000", "--workers=2"]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *arguments, f"--out={folder.parent}"],
        env={**os.environ, "PREPARATION": mark},
        stderr=subprocess.DEVNULL,  # a pipe would stay open as long as a worker does
    )
    while process.poll() is None and not list(folder.glob("shard-*.npy")):
        time.sleep(0.002)
    assert len(_processes_of(mark)) >= 3, "it has workers"
    time.sleep(rng.uniform(0, 0.05))
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (folder / "metadata.json").exists()
    deadline = time.monotonic() + 10
    while alive := _processes_of(mark):
        if time.monotonic() > deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"workers {alive} outlive their parent")
        time.sleep(0.02)
    for out, workers in ((folder.parent, 2), (tmp_path / "uninterrupted", 1)):
        prepare(settings, out, workers=workers)
    assert files_of(folder) == files_of(tmp_path / "uninterrupted" / "train")
    check_split(folder, texts, "gpt2")


@pytest.fixture
def interrupted(tmp_path):
    """A preparation that stopped after two shards: `(settings, folder, documents)`."""
    documents = [f"document {i} " * 50 for i in range(10)]  # two per shard
    (tmp_path / "a.jsonl").write_bytes(jsonl(documents))
    settings = settings_of(tmp_path / "a.jsonl", shard_tokens=1000)
    return settings, interrupt(settings, tmp_path / "out", shards=2), documents


@pytest.mark.parametrize("damage", ["none", "torn line", "left over"])
def test_finished_shards_are_not_made_again(interrupted, tmp_path, damage):
    settings, folder, documents = interrupted
    progress, kept = folder / "progress.jsonl", folder / "shard-00000.npy"
    before = kept.stat().st_mtime_ns
    if damage == "torn line":
        progress.write_bytes(progress.read_bytes()[:-10])
        (folder / "shard-00001.npy").unlink()
        interrupt(settings, tmp_path / "out", shards=3)  # its own lines must be readable too
    elif damage == "left over":
        (folder / "shard-00002.npy.tmp").write_bytes(b"by a kill")
    os.utime(tmp_path / "a.jsonl", (1, 1))  # another time alone changes nothing
    prepare(settings, tmp_path / "out")
    assert kept.stat().st_mtime_ns == before
    check_split(folder, documents)


@contextlib.contextmanager
def _largest_file(size):
    """Let every write beyond `size` bytes of a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(("size", "name"), [(300, "progress.jsonl"), (1900, "shard-00002.npy")])
def test_full_disk_is_named_and_loses_nothing(interrupted, tmp_path, size, name):
    settings, folder, documents = interrupted
    out = tmp_path / "out"
    if name == "progress.jsonl":
        out = tmp_path / "again"
        folder = out / settings.split
    with pytest.raises(SystemExit) as end, exit_on_error(on_os_error="Rerun"), _largest_file(size):
        prepare(settings, out)
    assert end.value.code == f"error: {folder / name}: File too large: free some space. Rerun"
    assert not list(folder.glob("*.tmp")) and not (folder / "metadata.json").exists()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.npy")}
    assert len(before) == (0 if name == "progress.jsonl" else 2)
    prepare(settings, out)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    check_split(folder, documents)


@pytest.mark.parametrize("damaged", ["progress.jsonl", "shard-00001.npy"])
def test_damage_of_an_unfinished_preparation_is_found(interrupted, tmp_path, damaged):
    settings, folder, _ = interrupted
    content = (folder / damaged).read_bytes()
    if damaged == "progress.jsonl":
        message, content = "its digest does not fit", content.replace(b'"position": [0, 7]', b'"position": [0, 3]')
    else:
        message, content = "shard-00001.npy has .* bytes instead of", content[:-1]
    (folder / damaged).write_bytes(content)
    with pytest.raises(PreparationError, match=f"{folder}.* is damaged .*{message}.*delete the folder"):
        prepare(settings, tmp_path / "out")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_tokens": 999}, "shard_tokens: 1000 before, 999 now"),
        (lambda content: content + b'\n{"text": "one more"}', "inputs: .* before, .* now"),
        (lambda content: content.replace(b"9", b"8", 1), "the content of the inputs, at equal sizes"),
    ],
)
def test_other_settings_are_refused_and_nothing_is_touched(interrupted, tmp_path, finished, change, message):
    settings, folder, _ = interrupted
    path = tmp_path / "a.jsonl"
    if finished:
        prepare(settings, tmp_path / "out")
    if callable(change):
        path.write_bytes(change(path.read_bytes()))
    else:
        settings = dataclasses.replace(settings, **change)
    before = files_of(folder)
    state = "was prepared" if finished else "holds an unfinished preparation"
    with pytest.raises(PreparationError, match=f"{folder} {state} with other settings: {message}.*delete the folder"):
        prepare(settings, tmp_path / "out")
    assert files_of(folder) == before


def test_a_preparation_at_work_or_finished_is_left_alone(interrupted, tmp_path, capsys):
    settings, folder, documents = interrupted
    with hold_lock(folder / "prepare.lock"), pytest.raises(PreparationError, match="another process is preparing"):
        prepare(settings, tmp_path / "out")
    prepare(settings, tmp_path / "out")
    check_split(folder, documents)
    before = times_of(folder)
    (folder / "progress.jsonl").write_text("")  # as a kill after the last rename leaves it
    os.utime(tmp_path / "a.jsonl", (1, 1))
    assert prepare(settings, tmp_path / "out").n_documents == len(documents)
    assert "already prepared with these settings" in capsys.readouterr().err
    assert before == times_of(folder)


def test_another_process_that_has_just_finished_is_noticed(interrupted, tmp_path, monkeypatch):
    settings, folder, documents = interrupted
    original = preparation.open_progress

    @contextlib.contextmanager
    def open_late(path):
        with monkeypatch.context() as patch:
            patch.setattr(preparation, "open_progress", original)
            prepare(settings, tmp_path / "out")
        times.update(times_of(folder))
        with original(path) as file:
            yield file

    times = {}
    monkeypatch.setattr(preparation, "open_progress", open_late)
    prepare(settings, tmp_path / "out")
    assert times_of(folder) == times
    check_split(folder, documents)


@pytest.mark.parametrize("finished", [True, False])
def test_a_file_of_another_split_is_refused(tmp_path, finished):
    """A folder for training that has the file for validation, too, under whatever name."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.jsonl").write_bytes(jsonl(["a", "b" * 200] * 5))
    (corpus / "validation.jsonl").write_bytes(jsonl(["c"]))
    (corpus / "empty.jsonl").write_bytes(b"")
    settings, out = settings_of(corpus, shard_tokens=300), tmp_path / "out"
    prepare(settings, out) if finished else interrupt(settings, out, 2)
    copy = tmp_path / "copy.jsonl"
    shutil.copy(corpus / "validation.jsonl", copy)
    validation = settings_of(copy, split="validation")
    with pytest.raises(PreparationError, match=f"{copy} is in split 'train' of {out}, too: leave it out of one"):
        prepare(validation, out)
    assert not any((out / "validation").glob("*"))
    copy.write_bytes(jsonl(["d"]))
    assert prepare(settings_of(tmp_path / "c*.jsonl", corpus / "empty.jsonl", split="validation"), out).n_documents == 1


_KILLED = """
import os, runpy, signal, sys
from heinsen.data.writer import ShardWriter

append = ShardWriter._append
def append_or_die(writer, line):
    if len(writer.shards) == 2:  # the second one has its name, and is not recorded
        os.kill(os.getpid(), signal.SIGKILL)
    append(writer, line)

ShardWriter._append = append_or_die
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_command_line(tmp_path, rng, commands):
    """Kill a preparation, rerun its command, verify; then damage a shard and follow the error message."""
    texts = [rng.bytes(20_000).hex() for _ in range(12)]
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_bytes(jsonl(texts[4 * number : 4 * number + 4]))
    folder, data = tmp_path / "out" / "train", ["--split=train", f"--out={tmp_path / 'out'}"]
    arguments = [f"--source={tmp_path}/*.jsonl", "--tokenizer=bytes", "--shard_tokens=30000", *data]
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(SCRIPT), *arguments], cwd=SCRIPT.parents[1])
    assert killed.returncode == -signal.SIGKILL and len(list(folder.glob("shard-*.npy"))) == 2
    result = commands.fork(SCRIPT, *arguments, "--verify")
    assert "resuming after 1 fin" in result.stderr and f"{folder}: every shard matches its SHA-256" in result.stderr
    check_split(folder, texts)

    before, shard = files_of(folder), folder / "shard-00001.npy"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    result = commands.fork(SCRIPT, "--verify", *data)
    message = "SHA-256 differs from metadata.json for shard-00001.npy; delete the folder (\\S+) and"
    assert result.returncode == 1 and (found := re.search(message, result.stderr)), result.stderr
    assert Path(found[1]) == folder
    shutil.rmtree(found[1])
    prepare(settings_of(tmp_path / "*.jsonl", shard_tokens=30_000), tmp_path / "out")
    assert files_of(folder) == before


# ---- sources of documents ------------------------------------------------------------------------


@pytest.fixture
def named(tmp_path, rng):
    """`(folder of five files, texts of each, names of each)`: some documents, and a whole file, name none."""
    (tmp_path / "named").mkdir()
    texts = [[rng.bytes(n).hex() for n in rng.integers(1, 120, 8)] for _ in range(5)]
    names = [rng.choice(["Pile-CC", "ArXiv", "漢", None], 8).tolist() for _ in texts]
    names[2] = [None] * 8
    for index, rows in enumerate(zip(texts, names, strict=True)):
        records = [{"text": text, "meta": {"pile_set_name": name}} for text, name in zip(*rows, strict=True)]
        (tmp_path / "named" / f"{index}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path / "named", texts, names


def _sources(folder):
    """Read the name of every document's source, shard by shard, without the reader under test."""
    found = []
    for shard in json.loads((folder / "metadata.json").read_text())["shards"]:
        names = [None] * shard["num_documents"]
        if "sources" in shard:
            numbers = np.load(folder / shard["sources"]["file"])
            assert numbers.dtype == np.uint16 and numbers.shape == (shard["num_documents"],)
            names = [shard["sources"]["names"][number] for number in numbers]
            assert set(names) == set(shard["sources"]["names"]) != {None}
        found += names
    return found


def test_sources_are_kept_beside_the_shards(tmp_path, named):
    source, texts, names = named
    settings = settings_of(source, shard_tokens=300)
    dataset = prepare(settings, tmp_path / "out", workers=1)
    interrupt(settings, tmp_path / "again", 2)
    prepare(settings, tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    flat = [name for own in names for name in own]
    assert _sources(dataset.path) == flat
    found, numbers = dataset.read_sources()
    assert [found[number] for number in numbers] == flat
    plain = [shard for shard in dataset.metadata["shards"] if "sources" not in shard]
    assert plain, "shards without a source have no such file"
    np.testing.assert_array_equal(
        dataset.read(0, dataset.n_tokens),
        np.concatenate([np.append(list(text.encode()), 256) for own in texts for text in own]),
    )
    alone = prepare(settings_of(source, shard_tokens=300, source_field=None), tmp_path / "none")
    assert not alone.has_sources and not list(alone.path.glob("*.sources.npy"))
    assert [shard["sha256"] for shard in alone.metadata["shards"]] == [
        shard["sha256"] for shard in dataset.metadata["shards"]
    ]


def test_skipped_documents_have_no_source_and_damaged_ones_are_found(tmp_path):
    lines = [{"text": text, "meta": {"pile_set_name": name}} for text, name in ("ax", (3, "y"), "bz")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    dataset = prepare(settings_of(tmp_path / "a.jsonl"), tmp_path / "out", skip_bad_documents=True)
    assert _sources(dataset.path) == ["x", "z"]
    path = dataset.path / "shard-00000.sources.npy"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    with pytest.raises(DatasetError, match=r"SHA-256 differs .* for shard-00000.sources.npy; delete the folder"):
        TokenDataset(dataset.path).verify()


def test_a_field_with_ever_new_names_is_no_source(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_SOURCES", 5)
    lines = [{"text": name, "from": name} for name in "abcdef"]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = settings_of(tmp_path / "a.jsonl", source_field="from")
    with pytest.raises(PreparationError, match="more than 5 different sources in .*the last 'f'.*--source_field="):
        prepare(settings, tmp_path / "out")
    prepare(dataclasses.replace(settings, max_documents=5), tmp_path / "out")
    assert _sources(tmp_path / "out" / "train") == list("abcde")


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.long
def test_command_line_prepares_both_stdlib_splits(tmp_path):
    arguments = ["--source=stdlib", "--tokenizer=bytes", f"--out={tmp_path}", "--split=train,validation", "--verify"]
    result = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    for split in ("train", "validation"):
        texts = [Path(i.location).read_bytes().decode() for i in find_inputs(settings_of("stdlib", split=split))]
        dataset = check_split(tmp_path / split, texts)
        assert f"{split}: {len(texts):,} documents, {dataset.n_tokens:,} tokens" in result.stderr
