"""Preparations survive kills and full disks, refuse other settings, and may be divided among machines."""

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

from heinsen.data import prepare as prepare_module
from heinsen.data import tokenize as tokenize_module
from heinsen.data import writer as writer_module
from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.prepare import PreparationError, prepare, prepare_part
from heinsen.data.sources import find_inputs
from heinsen.errors import exit_on_error
from heinsen.files import hold_lock, seal, unseal
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
        (jsonl(["", "", ""]), False, "no text in any of the 3 documents for split 'train' in .*a.jsonl: give"),
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
    original = prepare_module.tokenize_documents
    monkeypatch.setattr(
        prepare_module,
        "tokenize_documents",
        lambda *arguments: (counts.append(arguments[-1]), original(*arguments[:-1], 1))[1],
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(5))
    prepare(settings, tmp_path / "small")
    monkeypatch.setattr(prepare_module, "_SMALL_BYTES", 1)
    prepare(settings, tmp_path / "large")
    prepare(settings, tmp_path / "given", workers=3)
    assert counts == [1, 5, 3]
    with pytest.raises(PreparationError, match="workers must be at least 1, got 0"):
        prepare(settings, tmp_path / "none", workers=0)


def test_worker_death_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["text"]))
    monkeypatch.setattr(tokenize_module, "_start_worker", functools.partial(os._exit, 9))
    with pytest.raises(PreparationError, match="a worker process died"):
        prepare(settings_of(tmp_path / "a.jsonl"), tmp_path / "out", workers=2)


def test_progress_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare_module, "_LOG_SECONDS", 0.0)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["123456789"] * 3))
    prepare(settings_of(tmp_path / "a.jsonl"), tmp_path / "out")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert re.search(r"out/train: 20 tokens, 2 documents, input 1 of 1, [\d,]+ tokens/s$", lines[1])
    assert re.search(r"out/train: 3 documents, 30 tokens, 27 bytes in 1 shards; 0.\d s, [\d,]+ tokens/s$", lines[-1])


# ---- resuming ------------------------------------------------------------------------------------


def _command(*arguments):
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


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
def test_rerun_after_sigkill_gives_the_same_bytes(tmp_path, rng):
    """Kill preparations with worker processes at random moments, then let one finish."""
    words = np.array(["".join(rng.choice(list("abcdefghijklmnop"), n)) for n in rng.integers(1, 12, 4000)])
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 40_000, 120)]
    source = tmp_path / "a.jsonl.zst"
    source.write_bytes(zstandard.compress(jsonl(texts)))
    arguments = [f"--source={source}", "--tokenizer=gpt2", "--split=train", "--shard_tokens=200000", "--workers=2"]
    uninterrupted = tmp_path / "uninterrupted"
    prepare(settings_of(source, tokenizer="gpt2", shard_tokens=200_000), uninterrupted, workers=1)

    folder = tmp_path / "killed" / "train"
    kills = 0
    for attempt in range(2):
        mark = f"{os.getpid()}-{attempt}"
        finished_before = len(list(folder.glob("shard-*.npy")))
        process = subprocess.Popen(
            _command(*arguments, f"--out={folder.parent}"),
            env={**os.environ, "PREPARATION": mark},
            stderr=subprocess.DEVNULL,  # a pipe would stay open as long as a worker does
        )
        while process.poll() is None and len(list(folder.glob("shard-*.npy"))) < finished_before + 1 + attempt:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        deadline = time.monotonic() + 10
        while alive := _processes_of(mark):
            if time.monotonic() > deadline:
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                pytest.fail(f"workers {alive} outlive their parent")
            time.sleep(0.02)
    assert kills and not (folder / "metadata.json").exists()
    (folder / "shard-99999.npy.tmp").write_bytes(b"left over by a kill")

    result = subprocess.run(
        _command(*arguments, f"--out={folder.parent}", "--verify"), capture_output=True, text=True, check=True
    )
    assert "resuming after" in result.stderr and "matches its SHA-256" in result.stderr
    assert files_of(folder) == files_of(uninterrupted / "train")
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


def _without_digests(text):
    return re.sub(', "digest": "[0-9a-f]*"', "", text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: re.sub(r'"num_bytes": (\d+)', r'"num_bytes": \g<1>0', text, count=1), "its digest does not fit"),
        (lambda text: text.replace('"position": [0, 7]', '"position": [0, 3]'), "its digest does not fit"),
        (_without_digests, "it has no digest"),
        (lambda text: text.replace("\n", "\n5\n", 1), "int in place of a record"),
        (None, "shard-00001.npy has .* bytes instead of"),
    ],
)
def test_damage_of_an_unfinished_preparation_is_found(interrupted, tmp_path, change, message):
    settings, folder, _ = interrupted
    progress, shard = folder / "progress.jsonl", folder / "shard-00001.npy"
    if change is None:
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        whole = progress.read_text()
        progress.write_text(change(whole))
        assert progress.read_text() != whole
    with pytest.raises(PreparationError, match=f"{folder}.* is damaged .*{message}.*delete the folder"):
        prepare(settings, tmp_path / "out")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_tokens": 999}, "shard_tokens: 1000 before, 999 now"),
        ({"tokenizer": "gpt2"}, "tokenizer: 'bytes' before, 'gpt2' now"),
        ({"max_documents": 50}, "max_documents: None before, 50 now"),
        ({"source_field": "from"}, "source_field: 'meta.pile_set_name' before, 'from' now"),
        ({}, "inputs: .* before, .* now"),
    ],
)
def test_other_settings_are_refused_and_nothing_is_touched(interrupted, tmp_path, finished, change, message):
    settings, folder, _ = interrupted
    if finished:
        prepare(settings, tmp_path / "out")
    if not change:
        with open(tmp_path / "a.jsonl", "ab") as file:
            file.write(b'\n{"text": "one more"}')
    before = files_of(folder)
    state = "was prepared" if finished else "holds an unfinished preparation"
    with pytest.raises(PreparationError, match=f"{folder} {state} with other settings: {message}.*delete the folder"):
        prepare(dataclasses.replace(settings, **change), tmp_path / "out")
    assert files_of(folder) == before


def test_a_preparation_at_work_or_finished_is_left_alone(interrupted, tmp_path, capsys):
    settings, folder, documents = interrupted
    with hold_lock(folder / "prepare.lock"), pytest.raises(PreparationError, match="another process is preparing"):
        prepare(settings, tmp_path / "out")
    prepare(settings, tmp_path / "out")
    check_split(folder, documents)
    before = times_of(folder)
    (folder / "progress.jsonl").write_text("")  # as a kill after the last rename leaves it
    assert prepare(settings, tmp_path / "out").n_documents == len(documents)
    assert "already prepared with these settings" in capsys.readouterr().err
    assert before == times_of(folder)


def test_another_process_that_has_just_finished_is_noticed(interrupted, tmp_path, monkeypatch):
    settings, folder, documents = interrupted
    original = prepare_module.open_progress

    @contextlib.contextmanager
    def open_late(path):
        with monkeypatch.context() as patch:
            patch.setattr(prepare_module, "open_progress", original)
            prepare(settings, tmp_path / "out")
        times.update(times_of(folder))
        with original(path) as file:
            yield file

    times = {}
    monkeypatch.setattr(prepare_module, "open_progress", open_late)
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


# ---- in parts, by several machines ---------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path, rng):
    """A folder of seven files and the texts of each; some texts are longer than a shard of 300 tokens."""
    (tmp_path / "corpus").mkdir()
    texts = {}
    for name in "abcdefg":
        texts[name] = [rng.bytes(n).hex() for n in rng.integers(1, 200, rng.integers(3, 9))]
        (tmp_path / "corpus" / f"{name}.jsonl").write_bytes(jsonl(texts[name]))
    return tmp_path / "corpus", list(texts.values())


def _joined(texts, count):
    """Return the documents in the order of parts: each takes every `count`-th file."""
    return [text for index in range(count) for file in texts[index::count] for text in file]


def _prepare_parts(settings, out, count):
    for index in range(count):
        dataset = prepare_part(settings, out, index, count)
    return dataset


@pytest.mark.parametrize("count", [1, 3])
def test_parts_make_one_dataset(tmp_path, corpus, rng, count, capsys):
    source, texts = corpus
    settings, folder = settings_of(source, shard_tokens=300), tmp_path / "out" / "train"
    for number, index in enumerate(rng.permutation(count).tolist()):
        if number:
            with pytest.raises(DatasetError, match=f"no metadata.json, and {number} of the {number} parts there are"):
                TokenDataset(folder)
        capsys.readouterr()
        dataset = prepare_part(settings, tmp_path / "out", index, count)
        check_split(
            folder / f"part-{index:05d}-of-{count:05d}", [text for file in texts[index::count] for text in file]
        )
        found = f"{number + 1} of {count} parts are finished" if number < count - 1 else "finished and joined"
        assert found in capsys.readouterr().err
    assert dataset.path == folder
    check_split(folder, _joined(texts, count), parts=count)
    metadata = dataset.metadata
    assert [shard["file"] for shard in metadata["shards"]] == sorted(
        path.relative_to(folder).as_posix() for path in folder.glob("part-*/shard-*.npy")
    )
    prepare(settings, tmp_path / "whole")
    alone = TokenDataset(tmp_path / "whole" / "train").metadata
    assert alone["source"].pop("content").keys() == {"times", "files"}
    assert metadata["source"] == alone["source"] | {"shard_count": count}
    assert metadata | {"shards": 0, "source": 0} == alone | {"shards": 0, "source": 0}

    before = times_of(folder)
    capsys.readouterr()
    assert prepare_part(settings, tmp_path / "out", 0, count).path == folder
    message = capsys.readouterr().err
    assert f"part-00000-of-{count:05d}: already prepared" in message
    assert f"all {count} parts are finished and joined" in message
    assert {**times_of(folder), folder: 0} == {**before, folder: 0}, "only the lock comes and goes"


def test_parts_do_not_depend_on_workers_or_interruptions(tmp_path, corpus):
    settings = settings_of(corpus[0], shard_tokens=300)
    _prepare_parts(settings, tmp_path / "out", 2)
    again = tmp_path / "again"
    prepare_part(settings, again, 1, 2, workers=2)
    interrupt(settings, again, 2, part=(0, 2))
    prepare_part(settings, again, 0, 2)
    assert files_of(again / "train") == files_of(tmp_path / "out" / "train")


@pytest.mark.parametrize("text", [None, "", "{", "[]", "other"])
def test_any_part_joins_all_again(tmp_path, corpus, text, monkeypatch):
    """After a kill between the last part's metadata and the split's; or if the latter is damaged or of other parts."""
    settings, out = settings_of(corpus[0]), tmp_path / "out"
    _prepare_parts(settings, out, 2)
    before, path = files_of(out), out / "train" / "metadata.json"
    if text is None:
        path.unlink()
    elif text == "other":
        other = unseal(json.loads(path.read_text()))
        other["shards"].reverse()
        path.write_text(json.dumps(seal(other)))
    else:
        path.write_text(text)
        with pytest.raises(DatasetError, match=f"{path} is damaged .* rerun the command of any part"):
            TokenDataset(out / "train")
    monkeypatch.setattr(prepare_module, "_PATIENCE", 0.0)
    with hold_lock(path.with_name("prepare.lock")), pytest.raises(PreparationError, match="another process is joining"):
        prepare_part(settings, out, 0, 2)
    prepare_part(settings, out, 0, 2)
    assert files_of(out) == before


def test_a_part_may_be_empty(tmp_path, corpus):
    source, texts = corpus
    (source / "b.jsonl").write_bytes(jsonl([""]))
    settings, out = settings_of(source), tmp_path / "out"
    assert prepare_part(settings, out, 1, 7).n_bytes == 0
    _prepare_parts(settings, out, 7)
    check_split(out / "train", _joined([[""] if i == 1 else file for i, file in enumerate(texts)], 7), parts=7)
    for path in source.iterdir():
        path.write_bytes(b"")
    with pytest.raises(PreparationError, match="no text in any of the 2 parts"):
        _prepare_parts(settings, tmp_path / "empty", 2)
    assert not (tmp_path / "empty" / "train" / "metadata.json").exists()


def test_bad_document_is_skipped_in_its_part(tmp_path, corpus):
    source, texts = corpus
    with open(source / "b.jsonl", "ab") as file:
        file.write(b"\n{")
    settings, out = settings_of(source), tmp_path / "out"
    prepare_part(settings, out, 0, 2)
    with pytest.raises(PreparationError, match=r"b\.jsonl, line .*invalid JSON"):
        prepare_part(settings, out, 1, 2)
    dataset = prepare_part(settings, out, 1, 2, skip_bad_documents=True)
    assert dataset.metadata["num_skipped_documents"] == 1
    check_split(out / "train", _joined(texts, 2), parts=2)


@pytest.mark.parametrize("finished", [False, True])
def test_parts_with_other_settings_are_refused_and_nothing_is_touched(tmp_path, corpus, finished):
    settings, out = settings_of(corpus[0], shard_tokens=50), tmp_path / "out"
    part = out / "train" / "part-00001-of-00003"
    if finished:
        prepare_part(settings, out, 1, 3)
    else:
        interrupt(settings, out, 2, part=(1, 3))
    before = files_of(out)
    what = f"{part} {'was prepared' if finished else 'holds an unfinished preparation'} with other settings"
    for change, index, count, message in [
        ({"shard_tokens": 49}, 1, 3, "shard_tokens: 50 before, 49 now"),
        ({"tokenizer": "gpt2"}, 0, 3, "tokenizer: 'bytes' before, 'gpt2' now"),
        ({}, 0, 2, "shard_count: 3 before, 2 now"),
        ({}, 1, 7, "shard_count: 3 before, 7 now"),
    ]:
        with pytest.raises(PreparationError, match=f"{what}: {message}.*delete the folder"):
            prepare_part(dataclasses.replace(settings, **change), out, index, count)
    with pytest.raises(PreparationError, match=f"{what}: shard_count: 3 before, None now"):
        prepare(settings, out)
    with open(corpus[0] / "g.jsonl", "ab") as file:  # an input of another part
        file.write(b"\n")
    with pytest.raises(PreparationError, match=f"{what}: inputs: "):
        prepare_part(settings, out, 1, 3)
    assert files_of(out) == before
    (part / ("metadata.json" if finished else "progress.jsonl")).write_text("{\n")
    with pytest.raises(PreparationError, match=f"{part}/.* is damaged .*; delete the folder and rerun the command"):
        prepare_part(settings, out, 0, 3)


def test_parts_of_a_split_prepared_whole_are_refused(interrupted, tmp_path):
    settings, folder, _ = interrupted
    (tmp_path / "b.jsonl").write_bytes(jsonl(["b"]))
    settings = dataclasses.replace(settings, sources=(*settings.sources, str(tmp_path / "b.jsonl")))
    before = files_of(folder)
    with pytest.raises(PreparationError, match=f"{folder} .* with other settings: .*shard_count: None before, 2 now"):
        prepare_part(settings, tmp_path / "out", 0, 2)
    assert files_of(folder) == before


def test_parts_that_differ_are_not_joined(tmp_path, corpus, monkeypatch):
    """Two machines that begin at the same moment do not see each other's settings before the end."""
    settings, out = settings_of(corpus[0]), tmp_path / "out"
    prepare_part(settings, out, 0, 2)
    find_parts = prepare_module.find_parts
    monkeypatch.setattr(prepare_module, "find_parts", lambda path: [])
    with pytest.raises(PreparationError, match="part-00000-of-00002 was prepared with other settings: text_field"):
        prepare_part(settings_of(corpus[0], text_field="meta"), out, 1, 2, skip_bad_documents=True)
    assert find_parts(out / "train") and not (out / "train" / "metadata.json").exists()


@pytest.mark.parametrize(
    ("change", "index", "count", "message"),
    [
        ({}, 0, 8, "7 inputs for shard_count = 8: .*--shard_count=7 or less"),
        ({"sources": ("owner/corpus",)}, 0, 2, "1 input for shard_count = 2: .*A hub dataset is one input"),
        ({"max_tokens": 10}, 0, 2, "max_tokens = 10 and shard_count = 2"),
        ({"max_documents": 9}, 1, 2, "max_documents = 9 and shard_count = 2"),
        ({}, 2, 2, "shard_index = 2, shard_count = 2: the index must be from 0"),
        ({}, -1, 2, "shard_index = -1"),
        ({}, 0, 0, "shard_count = 0"),
    ],
)
def test_impossible_parts(tmp_path, corpus, change, index, count, message):
    with pytest.raises(PreparationError, match=message):
        prepare_part(dataclasses.replace(settings_of(corpus[0]), **change), tmp_path / "out", index, count)
    assert not (tmp_path / "out").exists()


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


def test_command_line_in_parts(tmp_path, rng, commands):
    """Kill one machine, rerun its command, join, verify; then damage a shard and follow the error message."""
    source = tmp_path / "corpus"
    source.mkdir()
    texts = [[rng.bytes(20_000).hex() for _ in range(6)] for _ in range(3)]
    for number, file in enumerate(texts):
        (source / f"{number}.jsonl").write_bytes(jsonl(file))
    folder, data = tmp_path / "out" / "train", ["--split=train", f"--out={tmp_path / 'out'}"]
    settings = settings_of(source, shard_tokens=30_000)
    arguments = [f"--source={source}", "--tokenizer=bytes", "--shard_tokens=30000", "--shard_count=2", *data]

    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(SCRIPT), *arguments, "--shard_index=0"], cwd=SCRIPT.parents[1]
    )
    assert killed.returncode == -signal.SIGKILL and len(list(folder.rglob("shard-*.npy"))) == 2
    prepare_part(settings, tmp_path / "out", 1, 2)
    result = commands.fork(SCRIPT, *arguments, "--shard_index=0", "--verify")
    assert "resuming after" in result.stderr and f"{folder}: every shard matches its SHA-256" in result.stderr
    check_split(folder, _joined(texts, 2), parts=2)
    _prepare_parts(settings, tmp_path / "uninterrupted", 2)
    before = files_of(folder)
    assert before == files_of(tmp_path / "uninterrupted" / "train")

    shard = folder / "part-00001-of-00002" / "shard-00001.npy"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    result = commands.fork(SCRIPT, "--verify", *data)
    message = "SHA-256 differs from metadata.json for part-00001-of-00002/shard-00001.npy; delete the folder (\\S+) and"
    assert result.returncode == 1 and (found := re.search(message, result.stderr)), result.stderr
    assert Path(found[1]) == shard.parent
    shutil.rmtree(found[1])
    prepare_part(settings, tmp_path / "out", 1, 2)
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
    dataset = prepare(settings_of(source, shard_tokens=300), tmp_path / "out", workers=1)
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


def test_sources_do_not_depend_on_interruptions_or_parts(tmp_path, named):
    source, _, names = named
    settings = settings_of(source, shard_tokens=300)
    prepare(settings, tmp_path / "out")
    interrupt(settings, tmp_path / "again", 2)
    prepare(settings, tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    dataset = _prepare_parts(settings, tmp_path / "parts", 2)
    dataset.verify()
    assert _sources(dataset.path) == [name for own in names[::2] + names[1::2] for name in own]


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
    result = subprocess.run(_command(*arguments), capture_output=True, text=True, cwd=tmp_path, check=True)
    for split in ("train", "validation"):
        texts = [Path(i.location).read_bytes().decode() for i in find_inputs(settings_of("stdlib", split=split))]
        dataset = check_split(tmp_path / split, texts)
        assert f"{split}: {len(texts):,} documents, {dataset.n_tokens:,} tokens" in result.stderr


def test_command_line_errors_are_one_line(commands, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    table = {
        "no file matches": ["--source=missing.txt", "--split=train"],
        "a.txt would be in every split": [f"--source={tmp_path}/a.txt", "--split=train,validation"],
        "--shard_index=1 and --shard_count=None: give both": ["--source=a.txt", "--split=train", "--shard_index=1"],
        "no source given": ["--split=train"],
        "no --shard_count": ["--split=train", "--verify", "--shard_count=2"],
        f"no token dataset at {tmp_path}/out/train": ["--split=train", "--verify"],
        "a.txt/train: Not a directory: giv": [f"--source={tmp_path}/a.txt", "--split=train", f"--out={tmp_path}/a.txt"],
    }
    ends = commands.fork_all(
        {
            message: {"arguments": [SCRIPT, f"--out={tmp_path}/out", *arguments, "--tokenizer=bytes"]}
            for message, arguments in table.items()
        }
    )
    for message, result in ends.items():
        assert result.returncode == 1 and result.stderr.startswith("error: ") and message in result.stderr
        assert result.stderr.count("\n") == 1
