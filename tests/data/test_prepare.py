"""Shards equal a direct encoding and survive kills; bad input is named, not ignored."""

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

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from heinsen.data import join as join_module
from heinsen.data import prepare as prepare_module
from heinsen.data import readers as readers_module
from heinsen.data import shards as shards_module
from heinsen.data import tokenize as tokenize_module
from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.inputs import find_inputs
from heinsen.data.prepare import PreparationError, Settings, prepare, prepare_part
from heinsen.data.tokenizer import get_tokenizer
from heinsen.errors import exit_on_error
from heinsen.files import seal, unseal

pytest_plugins = ["tests.run_fixtures"]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_data.py"


@pytest.fixture
def documents(rng):
    """Texts of very different lengths, including the special token's name, blank and empty ones."""
    alphabet = list('abcdefgh  \n\r\té漢🙂"\\')
    lengths = rng.integers(0, 200, 60) * rng.integers(0, 5, 60)
    texts = ["".join(rng.choice(alphabet, n)) for n in lengths]
    return [*texts, "", "a <|endoftext|> b", " "]


def _jsonl(texts, field="text"):
    # Both ways of writing a non-ASCII character in JSON, and a blank line after each record.
    lines = [json.dumps({"meta": 1, field: t}, ensure_ascii=bool(i % 2)) for i, t in enumerate(texts)]
    return "\n\n".join(lines).encode()


def _settings(*sources, split="train", tokenizer="bytes", **changes):
    return Settings(sources=tuple(map(str, sources)), split=split, tokenizer=tokenizer, **changes)


def _files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _check(folder, texts, tokenizer="bytes", parts=0):
    """Check that the split in `folder` holds `texts`, each followed by eot, and that its metadata is right."""
    dataset = TokenDataset(folder)
    dataset.verify()
    tokenizer = get_tokenizer(tokenizer)
    expected = np.concatenate([np.append(tokenizer.encode(text), tokenizer.eot_id) for text in texts])
    np.testing.assert_array_equal(dataset.read(0, dataset.num_tokens), expected)
    assert dataset.num_documents == len(texts)
    assert dataset.num_bytes == sum(len(text.encode()) for text in texts)
    shards = dataset.metadata["shards"]
    for key in ("num_tokens", "num_documents", "num_bytes"):
        assert sum(shard[key] for shard in shards) == dataset.metadata[key]
    folders = [f"part-{i:05d}-of-{parts:05d}/" for i in range(parts)]
    books = [f"{name}metadata.json" for name in ["", *folders]]
    assert sorted(_files(folder)) == sorted([*books, *(shard["file"] for shard in shards)])  # nothing is left over
    for shard in shards:
        tokens = np.load(folder / shard["file"])
        assert tokens.dtype == np.uint16
        assert np.count_nonzero(tokens == tokenizer.eot_id) == shard["num_documents"]
        assert tokens[-1] == tokenizer.eot_id  # closed at a document boundary
    return dataset


def _write(tmp_path, form, texts, rng):
    """Write the texts in order to a folder of several files of one form."""
    folder = tmp_path / form
    folder.mkdir()
    cuts = np.sort(rng.choice(np.arange(1, len(texts)), 2, replace=False))
    for index, part in enumerate(np.split(np.array(texts, object), cuts)):
        path = folder / f"{index:04d}.{form}"
        if form == "jsonl":
            path.write_bytes(_jsonl(part))
        elif form == "jsonl.zst":
            data = _jsonl(part)
            cut = rng.integers(len(data))  # two frames, cut inside a line
            path.write_bytes(b"".join(map(zstandard.ZstdCompressor().compress, (data[:cut], data[cut:]))))
        elif form == "parquet":
            table = pyarrow.table({"other": list(range(len(part))), "text": pyarrow.array(list(part))})
            pyarrow.parquet.write_table(table, path, row_group_size=7)
    if form == "txt":
        for index, text in enumerate(texts):
            (folder / f"{index:04d}.txt").write_bytes(text.encode())
    return folder


@pytest.mark.parametrize("form", ["jsonl", "jsonl.zst", "parquet", "txt"])
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_files_become_the_stream_of_their_documents(tmp_path, documents, rng, form, tokenizer):
    if form == "txt":
        documents = [text for i, text in enumerate(documents) if i % 3 == 0]
    folder = _write(tmp_path, form, documents, rng)
    settings = _settings(folder, tokenizer=tokenizer, shard_tokens=1500)
    prepare(settings, tmp_path / "out", workers=1)
    dataset = _check(tmp_path / "out" / "train", documents, tokenizer)
    shards = dataset.metadata["shards"]
    assert len(shards) > 1 and all(shard["num_tokens"] >= 1500 for shard in shards[:-1])
    if form != "txt":  # a glob names the same files, in the same order
        prepare(_settings(folder / "*"), tmp_path / "glob", workers=1)
        _check(tmp_path / "glob" / "train", documents)


def test_small_batches_and_blocks_change_nothing(tmp_path, documents, rng, monkeypatch):
    folder = _write(tmp_path, "jsonl.zst", documents, rng)
    monkeypatch.setattr(tokenize_module, "BATCH_BYTES", 300)
    monkeypatch.setattr(readers_module, "READ_BYTES", 17)
    prepare(_settings(folder), tmp_path / "out", workers=1)
    _check(tmp_path / "out" / "train", documents)


def test_worker_processes_keep_the_order(tmp_path, documents, rng, monkeypatch):
    folder = _write(tmp_path, "jsonl", documents, rng)
    monkeypatch.setattr(tokenize_module, "BATCH_BYTES", 300)  # many batches under way at once
    prepare(_settings(folder, tokenizer="gpt2"), tmp_path / "out", workers=3)
    _check(tmp_path / "out" / "train", documents, "gpt2")


def test_sources_are_read_in_the_order_given(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    prepare(_settings(tmp_path / "b.txt", tmp_path / "a.txt"), tmp_path / "out")
    _check(tmp_path / "out" / "train", ["b", "a"])


def test_text_field(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_jsonl(["x", "y"], field="content"))
    prepare(_settings(tmp_path / "a.jsonl", text_field="content"), tmp_path / "out")
    _check(tmp_path / "out" / "train", ["x", "y"])


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"max_documents": 7}, 7),
        ({"max_tokens": 41}, 5),
        ({"max_tokens": 40}, 4),
        ({"max_documents": 10**6}, 30),
    ],
)
def test_limits(tmp_path, limits, count):
    texts = [f"document{i % 10}" for i in range(30)]  # 10 tokens each
    (tmp_path / "a.jsonl").write_bytes(_jsonl(texts))
    prepare(_settings(tmp_path / "a.jsonl", **limits), tmp_path / "out")
    _check(tmp_path / "out" / "train", texts[:count])


def test_hub_dataset(tmp_path, monkeypatch, documents):
    def load_dataset(name, config, *, split, streaming):
        assert (name, config, split, streaming) == ("owner/corpus", "small", "test", True)
        return datasets.Dataset.from_dict({"text": documents}).to_iterable_dataset(num_shards=3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prepare(_settings("owner/corpus", split="test", hub_config="small"), tmp_path / "out")
    _check(tmp_path / "out" / "test", documents)


def test_hub_failure_names_the_dataset(tmp_path, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(PreparationError, match=r"'owner/corpus' is no local file.*ConnectionError: no route"):
        prepare(_settings("owner/corpus"), tmp_path / "out")


def test_stdlib_splits_are_disjoint_and_source_only():
    train, validation = ([i.name for i in find_inputs(_settings("stdlib", split=s))] for s in ("train", "validation"))
    assert not set(train) & set(validation)
    assert {"stdlib/argparse.py", "stdlib/asyncio/tasks.py"} <= set(train) | set(validation)
    assert 0.02 < len(validation) / (len(train) + len(validation)) < 0.1
    for name in train + validation:
        assert name.endswith(".py") and not {"test", "tests", "site-packages"} & set(name.split("/"))
    with pytest.raises(PreparationError, match="splits train and validation, not 'test'"):
        find_inputs(_settings("stdlib", split="test"))


# Resuming.


def _command(*arguments):
    return [sys.executable, str(SCRIPT), *map(str, arguments)]


def _processes_of(mark):
    """Return the processes with PREPARATION=mark in their environment: a preparation and its workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"PREPARATION={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # ended meanwhile
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.long
def test_rerun_after_sigkill_gives_the_same_bytes(tmp_path, rng):
    """Kill preparations with worker processes at random moments, then let one finish."""
    words = np.array(["".join(rng.choice(list("abcdefghijklmnop"), n)) for n in rng.integers(1, 12, 4000)])
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 40_000, 120)]
    source = tmp_path / "a.jsonl.zst"
    source.write_bytes(zstandard.ZstdCompressor().compress(_jsonl(texts)))
    arguments = [
        f"--source={source}",
        "--tokenizer=gpt2",
        "--split=train",
        "--shard_tokens=200000",
        "--workers=2",
    ]
    uninterrupted = tmp_path / "uninterrupted"
    prepare(_settings(source, tokenizer="gpt2", shard_tokens=200_000), uninterrupted, workers=1)

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
    assert _files(folder) == _files(uninterrupted / "train")
    _check(folder, texts, "gpt2")


def _interrupt(settings, out, shards, part=None):
    """Stop a preparation, as Ctrl-C does, when it is about to close the shard after `shards`.

    `part` is (index, count) of the part to prepare; None means the whole split.
    """
    close_shard = shards_module.ShardWriter.close_shard

    def close(writer):
        if len(writer.shards) == shards:
            raise KeyboardInterrupt
        close_shard(writer)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards_module.ShardWriter, "close_shard", close)
        prepare_part(settings, out, *part) if part else prepare(settings, out)
    folder = out / settings.split
    if part:
        folder /= "part-{:05d}-of-{:05d}".format(*part)
    assert len(list(folder.glob("shard-*.npy"))) == shards and not (folder / "metadata.json").exists()
    return folder


@pytest.fixture
def interrupted(tmp_path):
    """A preparation that stopped after two shards: `(settings, folder, documents)`."""
    documents = [f"document {i} " * 50 for i in range(10)]  # two per shard
    (tmp_path / "a.jsonl").write_bytes(_jsonl(documents))
    settings = _settings(tmp_path / "a.jsonl", shard_tokens=1000)
    return settings, _interrupt(settings, tmp_path / "out", shards=2), documents


def test_finished_shards_are_not_made_again(interrupted, tmp_path):
    settings, folder, documents = interrupted
    before = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.npy")}
    prepare(settings, tmp_path / "out")
    assert before == {path: path.stat().st_mtime_ns for path in before}
    _check(folder, documents)


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
    if name == "progress.jsonl":
        folder = folder.parent / "again"
        settings = dataclasses.replace(settings, split="again")
    with pytest.raises(SystemExit) as end, exit_on_error(on_os_error="Rerun"), _largest_file(size):
        prepare(settings, tmp_path / "out")
    assert end.value.code == f"error: {folder / name}: File too large: free some space. Rerun"
    assert not list(folder.glob("*.tmp")) and not (folder / "metadata.json").exists()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("shard-*.npy")}
    assert len(before) == (0 if name == "progress.jsonl" else 2)
    prepare(settings, tmp_path / "out")
    assert before == {path: path.stat().st_mtime_ns for path in before}
    _check(folder, documents)


def test_damaged_record_of_progress_is_found(interrupted, tmp_path):
    settings, folder, _ = interrupted
    progress = folder / "progress.jsonl"
    whole = progress.read_text()
    for text, message in [
        (re.sub(r'"num_bytes": (\d+)', r'"num_bytes": \g<1>0', whole, count=1), "its digest does not fit"),
        (whole.replace('"position": [0, 7]', '"position": [0, 3]'), "its digest does not fit"),
        (re.sub('"position"', '"place"', re.sub(', "digest": "[0-9a-f]*"', "", whole)), "record lacks position"),
        (whole.replace("\n", "\n5\n", 1), "int in place of a record"),
    ]:
        assert text != whole
        progress.write_text(text)
        with pytest.raises(PreparationError, match=f"{folder}.* is damaged .*{message}.*delete the folder"):
            prepare(settings, tmp_path / "out")
    progress.write_text(re.sub(', "digest": "[0-9a-f]*"', "", whole))  # as earlier versions wrote it
    prepare(settings, tmp_path / "out")


def test_torn_progress_line_is_done_again(interrupted, tmp_path):
    settings, folder, documents = interrupted
    progress = folder / "progress.jsonl"
    progress.write_bytes(progress.read_bytes()[:-10])
    (folder / "shard-00001.npy").unlink()
    _interrupt(settings, tmp_path / "out", shards=3)  # its own lines must be readable too
    prepare(settings, tmp_path / "out")
    _check(folder, documents)


def test_damaged_finished_shard_is_found_when_going_on(interrupted, tmp_path):
    settings, folder, _ = interrupted
    shard = folder / "shard-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(PreparationError, match="shard-00001.npy.*delete the folder"):
        prepare(settings, tmp_path / "out")


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_tokens": 999}, "shard_tokens: 1000 before, 999 now"),
        ({"tokenizer": "gpt2"}, "tokenizer: 'bytes' before, 'gpt2' now"),
        ({"max_documents": 50}, "max_documents: None before, 50 now"),
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
    before = _files(folder)
    changed = Settings(**{**vars(settings), **change})
    with pytest.raises(PreparationError, match=f"other settings: {message}.*delete the folder"):
        prepare(changed, tmp_path / "out")
    assert _files(folder) == before


def test_finished_split_is_left_alone(interrupted, tmp_path, capsys):
    settings, folder, _ = interrupted
    prepare(settings, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / "progress.jsonl").write_text("")  # as a kill after the last rename leaves it
    assert prepare(settings, tmp_path / "out").num_documents == len(interrupted[2])
    assert "already prepared with these settings" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_two_preparations_at_once_are_refused(tmp_path, documents, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(_jsonl(documents))
    settings = _settings(tmp_path / "a.jsonl")
    refused = []

    def tokenize_documents(*args):
        with pytest.raises(PreparationError, match="another process is preparing") as error:
            prepare(settings, tmp_path / "out")
        refused.append(error)
        return original(*args)

    original = prepare_module.tokenize_documents
    monkeypatch.setattr(prepare_module, "tokenize_documents", tokenize_documents)
    prepare(settings, tmp_path / "out")
    assert len(refused) == 1
    _check(tmp_path / "out" / "train", documents)


# In parts, by several machines.


@pytest.fixture
def corpus(tmp_path, rng):
    """A folder of seven files and the texts of each; some texts are longer than a shard of 300 tokens."""
    (tmp_path / "corpus").mkdir()
    texts = {}
    for name in "abcdefg":
        texts[name] = [rng.bytes(n).hex() for n in rng.integers(1, 200, rng.integers(3, 9))]
        (tmp_path / "corpus" / f"{name}.jsonl").write_bytes(_jsonl(texts[name]))
    return tmp_path / "corpus", list(texts.values())


def _joined(texts, count):
    """Return the documents in the order of parts: each takes every `count`-th file."""
    return [text for index in range(count) for file in texts[index::count] for text in file]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_parts_make_one_dataset(tmp_path, corpus, rng, count, capsys):
    source, texts = corpus
    settings, folder = _settings(source, shard_tokens=300), tmp_path / "out" / "train"
    for number, index in enumerate(rng.permutation(count).tolist()):
        if number:
            with pytest.raises(DatasetError, match=f"no metadata.json, and {number} of {count} parts are finished"):
                TokenDataset(folder)
        capsys.readouterr()
        dataset = prepare_part(settings, tmp_path / "out", index, count)
        _check(folder / f"part-{index:05d}-of-{count:05d}", [text for file in texts[index::count] for text in file])
        found = f"{number + 1} of {count} parts are finished" if number < count - 1 else "finished and joined"
        assert found in capsys.readouterr().err
    assert dataset.path == folder
    _check(folder, _joined(texts, count), parts=count)
    metadata = dataset.metadata
    assert [shard["file"] for shard in metadata["shards"]] == sorted(
        path.relative_to(folder).as_posix() for path in folder.glob("part-*/shard-*.npy")
    )
    prepare(settings, tmp_path / "whole")
    alone = TokenDataset(tmp_path / "whole" / "train").metadata
    assert metadata["source"] == alone["source"] | {"shard_count": count}
    assert {k: v for k, v in metadata.items() if k not in ("shards", "source")} == {
        k: v for k, v in alone.items() if k not in ("shards", "source")
    }


def _prepare_parts(settings, out, count):
    for index in range(count):
        dataset = prepare_part(settings, out, index, count)
    return dataset


def test_finished_parts_are_left_alone(tmp_path, corpus, capsys):
    settings, out = _settings(corpus[0]), tmp_path / "out"
    _prepare_parts(settings, out, 2)
    stamps = lambda: {path: path.stat().st_mtime_ns for path in (out / "train").rglob("*")}
    before = stamps()
    capsys.readouterr()
    assert prepare_part(settings, out, 0, 2).path == out / "train"
    message = capsys.readouterr().err
    assert "part-00000-of-00002: already prepared" in message and "all 2 parts are finished and joined" in message
    assert stamps() == before


def test_parts_do_not_depend_on_workers_or_interruptions(tmp_path, corpus):
    settings = _settings(corpus[0], shard_tokens=300)
    _prepare_parts(settings, tmp_path / "out", 2)
    again = tmp_path / "again"
    prepare_part(settings, again, 1, 2, workers=2)
    _interrupt(settings, again, 2, part=(0, 2))
    prepare_part(settings, again, 0, 2)
    assert _files(again / "train") == _files(tmp_path / "out" / "train")


def test_joining_resumes_after_a_kill(tmp_path, corpus, monkeypatch):
    """After a kill between the last part's metadata and the split's, the command of any part writes the latter."""
    settings, out = _settings(corpus[0]), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "join_parts", lambda *_: None)
        _prepare_parts(settings, out, 3)
    whole = out / "train" / "metadata.json"
    whole.with_name("metadata.json.other-machine.123.tmp").write_bytes(b'{"form')
    assert not whole.exists()
    prepare_part(settings, out, 1, 3)
    _check(out / "train", _joined(corpus[1], 3), parts=3)


def test_two_may_join_at_the_same_moment(tmp_path, corpus, monkeypatch):
    """The second runs after the first has written its temporary file, before it renames it: their names must differ."""
    settings, out = _settings(corpus[0]), tmp_path / "out"
    prepare_part(settings, out, 0, 2)
    replace, written, joined = os.replace, [], []

    def replace_late(old, new):
        if Path(new) == out / "train" / "metadata.json":
            written.append(old)
            if len(written) == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(os, "getpid", lambda: -1)  # another process
                    joined.append(prepare_part(settings, out, 0, 2))
        replace(old, new)

    monkeypatch.setattr(os, "replace", replace_late)
    dataset = prepare_part(settings, out, 1, 2)
    assert len(set(written)) == len(written) == 2
    assert joined[0].path == dataset.path == out / "train" and joined[0].metadata == dataset.metadata
    _check(out / "train", _joined(corpus[1], 2), parts=2)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_damaged_metadata_of_the_whole_costs_no_part(tmp_path, corpus, text):
    settings, out = _settings(corpus[0]), tmp_path / "out"
    _prepare_parts(settings, out, 2)
    before, path = _files(out), out / "train" / "metadata.json"
    path.write_text(text)
    with pytest.raises(DatasetError, match=f"{path} is damaged .* delete the file and prepare any part again"):
        TokenDataset(out / "train")
    with pytest.raises(PreparationError, match=f"{path} is damaged .* delete the file and rerun the same command"):
        prepare_part(settings, out, 0, 2)
    path.unlink()
    prepare_part(settings, out, 0, 2)
    assert _files(out) == before
    other = unseal(json.loads(before["train/metadata.json"]))
    other["shards"].reverse()
    path.write_text(json.dumps(seal(other)))
    with pytest.raises(PreparationError, match=f"{path} does not list what its parts hold; delete it"):
        prepare_part(settings, out, 1, 2)


def test_empty_part_is_a_part(tmp_path, corpus):
    source, texts = corpus
    (source / "b.jsonl").write_bytes(b"\n")
    settings, out = _settings(source), tmp_path / "out"
    assert prepare_part(settings, out, 1, 7).num_tokens == 0
    _prepare_parts(settings, out, 7)
    _check(out / "train", _joined([[] if i == 1 else file for i, file in enumerate(texts)], 7), parts=7)
    for path in source.iterdir():
        path.write_bytes(b"")
    with pytest.raises(PreparationError, match="no documents for split 'train'"):
        _prepare_parts(settings, tmp_path / "empty", 2)
    assert not (tmp_path / "empty" / "train" / "metadata.json").exists()


def test_bad_document_is_skipped_in_its_part(tmp_path, corpus):
    source, texts = corpus
    with open(source / "b.jsonl", "ab") as file:
        file.write(b"\n{")
    settings, out = _settings(source), tmp_path / "out"
    prepare_part(settings, out, 0, 2)
    with pytest.raises(PreparationError, match=r"b\.jsonl, line .*invalid JSON"):
        prepare_part(settings, out, 1, 2)
    dataset = prepare_part(settings, out, 1, 2, skip_bad_documents=True)
    assert dataset.metadata["num_skipped_documents"] == 1
    _check(out / "train", _joined(texts, 2), parts=2)


@pytest.mark.parametrize("finished", [False, True])
def test_parts_with_other_settings_are_refused_and_nothing_is_touched(tmp_path, corpus, finished):
    settings, out = _settings(corpus[0], shard_tokens=50), tmp_path / "out"
    part = out / "train" / "part-00001-of-00003"
    if finished:
        prepare_part(settings, out, 1, 3)
    else:
        _interrupt(settings, out, 2, part=(1, 3))
    before = _files(out)
    what = "was prepared" if finished else "holds an unfinished preparation"
    for change, index, count, message in [
        ({"shard_tokens": 49}, 1, 3, "shard_tokens: 50 before, 49 now"),
        ({"tokenizer": "gpt2"}, 0, 3, "tokenizer: 'bytes' before, 'gpt2' now"),
        ({}, 0, 2, "shard_count: 3 before, 2 now"),
        ({}, 1, 7, "shard_count: 3 before, 7 now"),
    ]:
        with pytest.raises(PreparationError, match=f"{part} {what} with other settings: {message}.*delete the folder"):
            prepare_part(Settings(**{**vars(settings), **change}), out, index, count)
        assert _files(out) == before
    with pytest.raises(PreparationError, match=f"{part} {what} with other settings: shard_count: 3 before, None now"):
        prepare(settings, out)
    with open(corpus[0] / "g.jsonl", "ab") as file:  # an input of another part
        file.write(b"\n")
    with pytest.raises(PreparationError, match=f"{part} {what} with other settings: inputs: "):
        prepare_part(settings, out, 1, 3)
    assert _files(out) == before


@pytest.mark.parametrize("finished", [False, True])
def test_parts_of_a_split_prepared_whole_are_refused(tmp_path, corpus, finished):
    settings, out = _settings(corpus[0], shard_tokens=300), tmp_path / "out"
    if finished:
        prepare(settings, out)
    else:
        _interrupt(settings, out, 2)
    before = _files(out)
    with pytest.raises(PreparationError, match=f"{out}/train .* with other settings: shard_count: None before, 2 now"):
        prepare_part(settings, out, 0, 2)
    assert _files(out) == before


def test_parts_that_differ_are_not_joined(tmp_path, corpus, monkeypatch):
    """Two machines that begin at the same moment do not see each other's settings before the end."""
    settings, out = _settings(corpus[0]), tmp_path / "out"
    prepare_part(settings, out, 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(join_module, "find_recorded", lambda folder: None)
        with pytest.raises(PreparationError, match="part-00000-of-00002 was prepared with other settings: text_field"):
            prepare_part(_settings(corpus[0], text_field="meta"), out, 1, 2, skip_bad_documents=True)
    assert not (out / "train" / "metadata.json").exists()


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
    settings = Settings(**{**vars(_settings(corpus[0])), **change})
    with pytest.raises(PreparationError, match=message):
        prepare_part(settings, tmp_path / "out", index, count)
    assert not (tmp_path / "out").exists()


_KILLED = """
import os, runpy, signal, sys
from heinsen.data.shards import ShardWriter

append = ShardWriter._append
def append_or_die(writer, line):
    if len(writer.shards) == 2:  # the second one has its name, and is not recorded
        os.kill(os.getpid(), signal.SIGKILL)
    append(writer, line)

ShardWriter._append = append_or_die
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_command_line_in_parts(tmp_path, rng):
    """Kill one machine, rerun its command, join, verify; then damage a shard and follow the error message."""
    source = tmp_path / "corpus"
    source.mkdir()
    texts = [[rng.bytes(20_000).hex() for _ in range(6)] for _ in range(3)]
    for number, file in enumerate(texts):
        (source / f"{number}.jsonl").write_bytes(_jsonl(file))
    folder, data = tmp_path / "out" / "train", ["--split=train", f"--out={tmp_path / 'out'}"]
    settings = _settings(source, shard_tokens=30_000)
    arguments = [f"--source={source}", "--tokenizer=bytes", "--shard_tokens=30000", "--shard_count=2", *data]
    run = functools.partial(subprocess.run, capture_output=True, text=True)

    killed = run([sys.executable, "-c", _KILLED, str(SCRIPT), *arguments, "--shard_index=0"], cwd=SCRIPT.parents[1])
    assert killed.returncode == -signal.SIGKILL and len(list(folder.rglob("shard-*.npy"))) == 2, killed.stderr
    prepare_part(settings, tmp_path / "out", 1, 2)
    result = run(_command(*arguments, "--shard_index=0", "--verify"))
    assert "resuming after" in result.stderr and f"{folder}: every shard matches its SHA-256" in result.stderr
    _check(folder, _joined(texts, 2), parts=2)
    _prepare_parts(settings, tmp_path / "uninterrupted", 2)
    before = _files(folder)
    assert before == _files(tmp_path / "uninterrupted" / "train")

    shard = folder / "part-00001-of-00002" / "shard-00001.npy"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    message = r"SHA-256 differs from metadata.json for part-00001-of-00002/shard-00001.npy; delete (\S+) and (\S+) and"
    for command in (_command("--verify", *data), _command(*arguments, "--shard_index=0", "--verify")):
        result = run(command)
        assert result.returncode == 1 and (found := re.search(message, result.stderr)), result.stderr
    part, metadata = map(Path, found.groups())
    assert (part, metadata) == (shard.parent, folder / "metadata.json")
    metadata.unlink()
    shutil.rmtree(part)
    prepare_part(settings, tmp_path / "out", 1, 2)
    assert _files(folder) == before


# Sources of documents.


def _named(texts, names):
    """Return JSON lines in The Pile's format, each with its name (or any other value)."""
    records = [{"text": text, "meta": {"pile_set_name": name}} for text, name in zip(texts, names, strict=True)]
    return "\n".join(map(json.dumps, records)).encode()


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


@pytest.fixture
def named(tmp_path, rng):
    """`(folder of five files, texts of each, names of each)`: some documents, and a whole file, name none."""
    (tmp_path / "named").mkdir()
    texts = [[rng.bytes(n).hex() for n in rng.integers(1, 120, 8)] for _ in range(5)]
    names = [rng.choice(["Pile-CC", "ArXiv", "漢", None], 8).tolist() for _ in texts]
    names[2] = [None] * 8
    for index, (own, own_names) in enumerate(zip(texts, names, strict=True)):
        (tmp_path / "named" / f"{index}.jsonl").write_bytes(_named(own, own_names))
    return tmp_path / "named", texts, names


def test_sources_are_kept_beside_the_shards(tmp_path, named):
    source, texts, names = named
    dataset = prepare(_settings(source, shard_tokens=300), tmp_path / "out", workers=1)
    flat = [name for own in names for name in own]
    assert _sources(dataset.path) == flat
    found, numbers = dataset.read_sources()
    assert [found[number] for number in numbers] == flat
    plain = [shard for shard in dataset.metadata["shards"] if "sources" not in shard]
    assert plain, "shards without a source have no such file"
    np.testing.assert_array_equal(
        dataset.read(0, dataset.num_tokens),
        np.concatenate([np.append(list(text.encode()), 256) for own in texts for text in own]),
    )
    alone = prepare(_settings(source, shard_tokens=300, source_field=None), tmp_path / "none")
    assert not alone.has_sources and not list(alone.path.glob("*.sources.npy"))
    assert [shard["sha256"] for shard in alone.metadata["shards"]] == [
        shard["sha256"] for shard in dataset.metadata["shards"]
    ]


def test_sources_do_not_depend_on_interruptions_or_parts(tmp_path, named):
    source, _, names = named
    settings = _settings(source, shard_tokens=300)
    prepare(settings, tmp_path / "out")
    _interrupt_named(settings, tmp_path / "again", 2)
    prepare(settings, tmp_path / "again")
    assert _files(tmp_path / "again") == _files(tmp_path / "out")

    dataset = _prepare_parts(settings, tmp_path / "parts", 2)
    dataset.verify()
    assert _sources(dataset.path) == [name for own in names[::2] + names[1::2] for name in own]
    other = tmp_path / "parts again"
    prepare_part(settings, other, 1, 2)
    _interrupt_named(settings, other, 1, part=(0, 2))
    prepare_part(settings, other, 0, 2)
    assert _files(other) == _files(tmp_path / "parts")


def _interrupt_named(settings, out, shards, part=None):
    """Call `_interrupt`, which counts files of shards, with the files of sources hidden."""
    glob = Path.glob
    with pytest.MonkeyPatch.context() as patch:
        shards_only = lambda *args, **kwargs: [p for p in glob(*args, **kwargs) if ".sources" not in p.name]
        patch.setattr(Path, "glob", shards_only)
        _interrupt(settings, out, shards, part)


def test_damaged_sources_are_found(tmp_path, named):
    settings = _settings(named[0])
    dataset = prepare(settings, tmp_path / "out")
    path = dataset.path / "shard-00000.sources.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DatasetError, match=r"SHA-256 differs .* for shard-00000.sources.npy; delete the folder"):
        TokenDataset(dataset.path).verify()
    path.write_bytes(content[:-2])
    with pytest.raises(DatasetError, match="shard-00000.sources.npy has .* bytes instead of"):
        prepare(settings, tmp_path / "out")


@pytest.mark.parametrize("parts", [0, 2])
def test_datasets_made_before_there_were_sources_stay_good(tmp_path, named, parts, capsys):
    """Version 1 without sources and without the setting is readable, and the same command finds it finished."""
    settings, out = _settings(named[0]), tmp_path / "out"
    make = lambda settings: _prepare_parts(settings, out, parts) if parts else prepare(settings, out)
    make(_settings(named[0], source_field=None))
    for path in out.rglob("metadata.json"):
        metadata = unseal(json.loads(path.read_text()))  # those versions wrote no digest either
        assert metadata["format_version"] == 1
        del metadata["source"]["source_field"]
        path.write_text(json.dumps(metadata, indent=2) + "\n")
    before = _files(out)
    capsys.readouterr()
    dataset = make(settings)
    assert "stored no sources of documents" in capsys.readouterr().err
    assert _files(out) == before and not dataset.has_sources
    assert dataset.read_sources()[0] == [None] and len(dataset.read_sources()[1]) == dataset.num_documents


def test_another_source_field(tmp_path):
    lines = [{"text": str(i), "from": value} for i, value in enumerate(["  a\n b ", "", 7, None, ["a"], "\ud800"])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    dataset = prepare(_settings(tmp_path / "a.jsonl", source_field="from"), tmp_path / "out")
    assert _sources(dataset.path) == ["a b", None, None, None, None, "?"]
    with pytest.raises(PreparationError, match="source_field: 'from' before, 'meta.pile_set_name' now"):
        prepare(_settings(tmp_path / "a.jsonl"), tmp_path / "out")


def test_skipped_documents_have_no_source(tmp_path):
    lines = [_named(["a"], ["x"]), b'{"meta": {"pile_set_name": "y"}}', b"{", _named(["b"], ["z"])]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    dataset = prepare(_settings(tmp_path / "a.jsonl"), tmp_path / "out", skip_bad_documents=True)
    assert _sources(dataset.path) == ["x", "z"]


def test_sources_of_parquet_and_hub(tmp_path, monkeypatch):
    rows = {"text": ["a", "b", "c"], "meta": [{"pile_set_name": "x", "n": 1}, None, {"pile_set_name": "y", "n": 2}]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["d"], "meta": ["no struct"]}), tmp_path / "b.parquet")
    dataset = prepare(_settings(tmp_path / "a.parquet", tmp_path / "b.parquet"), tmp_path / "out")
    assert _sources(dataset.path) == ["x", None, "y", None]
    dataset = prepare(_settings(tmp_path / "b.parquet", source_field="meta"), tmp_path / "flat")
    assert _sources(dataset.path) == ["no struct"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict(rows))
    assert _sources(prepare(_settings("owner/corpus"), tmp_path / "hub").path) == ["x", None, "y"]


def test_a_field_with_ever_new_names_is_no_source(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "MAX_SOURCES", 5)
    (tmp_path / "a.jsonl").write_bytes(_named("abcdef", "abcdef"))
    with pytest.raises(PreparationError, match="more than 5 different sources in .*the last 'f'.*--source_field="):
        prepare(_settings(tmp_path / "a.jsonl"), tmp_path / "out")
    prepare(_settings(tmp_path / "a.jsonl", source_field=None), tmp_path / "out")
    _check(tmp_path / "out" / "train", list("abcdef"))


# Bad input.

_GOOD = b'{"text": "good"}\n'
BAD_LINES = {
    "not UTF-8": (b'{"text": "caf\xe9"}', r"not UTF-8 \(byte 13"),
    "cut JSON": (b'{"text": "cut', "invalid JSON"),
    "other field": (b'{"content": "x"}', "no text field 'text' but 'content'; name the text field by --text_field"),
    "no field": (b"{}", "no text field 'text' but an empty object"),
    "no object": (b'["text"]', "no text field 'text' but list"),
    "number": (b'{"text": 3}', "not a string but int"),
    "null": (b'{"text": null}', "not a string but NoneType"),
    "surrogate": (b'{"text": "\\ud800"}', "lone surrogate"),
    "too deep": (b'{"text":' + b"[" * 100_000 + b"}", "invalid JSON"),
}


def _check_bad(tmp_path, source, where, message, kept):
    """Check that the error names place and remedy, and that following the remedy leaves the document out."""
    settings = _settings(source, shard_tokens=10)
    folder = tmp_path / "out" / "train"
    with pytest.raises(PreparationError, match=f"{where}: .*{message}.*--skip_bad_documents"):
        prepare(settings, tmp_path / "out", workers=1)
    assert not (folder / "metadata.json").exists()
    finished = list(folder.glob("shard-*.npy"))
    assert finished and all(shard.stat().st_size for shard in finished)
    dataset = prepare(settings, tmp_path / "out", workers=1, skip_bad_documents=True)
    assert dataset.metadata["num_skipped_documents"] == 1
    _check(folder, kept)
    with pytest.raises(PreparationError, match="skip_bad_documents: 1 skipped before, off now"):
        prepare(settings, tmp_path / "out", workers=1)


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line(tmp_path, name):
    line, message = BAD_LINES[name]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(3 * _GOOD + b"\n" + line + b"\n" + _GOOD)
    _check_bad(tmp_path, path, f"{path}, line 5", message, ["good"] * 4)


def test_bad_text_file(tmp_path):
    for name in ("a", "b", "d"):
        (tmp_path / f"{name}.txt").write_bytes(b"more than ten bytes")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    _check_bad(tmp_path, tmp_path / "*.txt", tmp_path / "c.txt", "not UTF-8", ["more than ten bytes"] * 3)


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_damaged_zst(tmp_path, rng, damage):
    """The lines before the damage are kept, and the next file is read."""
    texts = [rng.bytes(1000).hex() for _ in range(600)]
    data = _jsonl(texts)
    frames = [zstandard.ZstdCompressor().compress(data[i : i + 100_000]) for i in range(0, len(data), 100_000)]
    whole = b"".join(frames)
    path = tmp_path / "0.jsonl.zst"
    if damage == "truncated":
        path.write_bytes(whole[: int(len(whole) * rng.uniform(0.3, 0.95))])
    else:
        start = len(b"".join(frames[:5]))
        path.write_bytes(whole[:start] + b"no frame at all" + whole[start:])
    (tmp_path / "1.jsonl").write_bytes(_jsonl(["last"]))
    message = "truncated" if damage == "truncated" else "damaged zstd data"
    where = rf"{path}, line \d+"
    settings = _settings(tmp_path / "?.jsonl*", shard_tokens=50_000)
    with pytest.raises(PreparationError, match=f"{where}: .*{message}.*--skip_bad_documents"):
        prepare(settings, tmp_path / "out")
    dataset = prepare(settings, tmp_path / "out", skip_bad_documents=True)
    assert dataset.metadata["num_skipped_documents"] == 1
    kept = dataset.num_documents - 1
    assert 50 < kept < 600
    _check(tmp_path / "out" / "train", [*texts[:kept], "last"])


def test_bad_parquet_rows(tmp_path):
    offsets = pyarrow.py_buffer(np.array([0, 10, 14, 24], np.int32))
    array = pyarrow.StringArray.from_buffers(3, offsets, pyarrow.py_buffer(b"0123456789caf\xe90123456789"))
    pyarrow.parquet.write_table(pyarrow.table({"text": array}), tmp_path / "a.parquet")
    _check_bad(tmp_path, tmp_path / "a.parquet", "a.parquet, row 2", "not UTF-8", ["0123456789"] * 2)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["0123456789", "x", None]}), tmp_path / "b.parquet")
    with pytest.raises(PreparationError, match="b.parquet, row 3: the text is not a string but NoneType"):
        prepare(_settings(tmp_path / "b.parquet"), tmp_path / "b")


@pytest.mark.parametrize(("column", "values"), [("content", ["a"]), ("text", [1])])
def test_parquet_without_a_text_column(tmp_path, column, values):
    pyarrow.parquet.write_table(pyarrow.table({column: values}), tmp_path / "a.parquet")
    with pytest.raises(PreparationError, match="a.parquet.* column 'text' .*--text_field"):
        prepare(_settings(tmp_path / "a.parquet"), tmp_path / "out", skip_bad_documents=True)


def test_damaged_parquet(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 10}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(PreparationError, match="a.parquet, row 1: damaged parquet data"):
        prepare(_settings(tmp_path / "a.parquet"), tmp_path / "out")


@pytest.mark.parametrize("name", ["missing.jsonl", "*.jsonl", "./missing", "/missing"])
def test_no_file_matches(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(PreparationError, match=f"no file matches source '{name.replace('*', '[*]')}'"):
        prepare(_settings(name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folder_without_known_files_and_unknown_ending(tmp_path):
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(PreparationError, match="no file matches"):
        prepare(_settings(tmp_path), tmp_path / "out")
    with pytest.raises(PreparationError, match="none of the known endings"):
        prepare(_settings(tmp_path / "a.csv"), tmp_path / "out")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(PreparationError, match="more than once"):
        prepare(_settings(tmp_path, tmp_path / "a.txt"), tmp_path / "out")


def test_split_of_empty_texts_alone_is_an_error(tmp_path):
    """It would have tokens, one end of text each, but bits per byte would be a division by zero."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(_jsonl(["", "", ""]))
    with pytest.raises(PreparationError, match=f"no text in any of the 3 documents for split 'train' in {path}: give"):
        prepare(_settings(path), tmp_path / "out")
    for index in (0, 1):
        (tmp_path / f"part{index}.jsonl").write_bytes(_jsonl([""]))
    parts = _settings(tmp_path / "part*.jsonl")
    assert prepare_part(parts, tmp_path / "parts", 0, 2).num_bytes == 0, "another part may hold text"
    with pytest.raises(PreparationError, match="no text in any of the 2 documents for split 'train'"):
        prepare_part(parts, tmp_path / "parts", 1, 2)
    path.write_bytes(_jsonl(["", "a"]))
    prepare(_settings(path), tmp_path / "out")
    _check(tmp_path / "out" / "train", ["", "a"])


def test_empty_split_is_an_error_that_does_not_bind_the_next_attempt(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n \n")
    with pytest.raises(PreparationError, match="no documents for split 'train'"):
        prepare(_settings(path), tmp_path / "out")
    assert not list((tmp_path / "out" / "train").iterdir())
    path.write_bytes(b"[]\n[]\n")
    with pytest.raises(PreparationError, match=r"no documents .*\(2 bad ones skipped\)"):
        prepare(_settings(path), tmp_path / "out", skip_bad_documents=True)
    path.write_bytes(_jsonl(["now"]))
    prepare(_settings(path, tokenizer="gpt2"), tmp_path / "out")
    _check(tmp_path / "out" / "train", ["now"], "gpt2")


def test_vocabulary_too_large_for_uint16(tmp_path, monkeypatch):
    class Large(type(get_tokenizer("bytes"))):
        vocab_size = 65537

    monkeypatch.setattr(prepare_module, "get_tokenizer", lambda name: Large())
    with pytest.raises(PreparationError, match="65537 tokens: too many for uint16"):
        prepare(_settings(tmp_path), tmp_path / "out")


def test_worker_death_is_an_error(tmp_path, documents, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(_jsonl(documents))
    monkeypatch.setattr(tokenize_module, "_start_worker", functools.partial(os._exit, 9))
    with pytest.raises(PreparationError, match="a worker process died"):
        prepare(_settings(tmp_path / "a.jsonl"), tmp_path / "out", workers=2)


@pytest.mark.parametrize("changes", [{"split": "../train"}, {"split": ""}, {"shard_tokens": 0}, {"max_tokens": 0}])
def test_settings_out_of_range(changes):
    with pytest.raises(PreparationError):
        _settings("a.txt", **changes)


# The command line.


@pytest.mark.long
def test_command_line_prepares_both_stdlib_splits(tmp_path):
    arguments = [
        "--source=stdlib",
        "--tokenizer=bytes",
        f"--out={tmp_path}",
        "--split=train,validation",
        "--verify",
    ]
    result = subprocess.run(_command(*arguments), capture_output=True, text=True, cwd=tmp_path, check=True)
    for split in ("train", "validation"):
        texts = [Path(i.location).read_bytes().decode() for i in find_inputs(_settings("stdlib", split=split))]
        dataset = _check(tmp_path / split, texts)
        assert f"{split}: {len(texts):,} documents, {dataset.num_tokens:,} tokens" in result.stderr


def test_command_line_errors_are_one_line(commands, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for arguments, message in [
        (["--source=missing.txt", "--split=train"], "no file matches"),
        ([f"--source={tmp_path}/a.txt", "--split=train,validation"], "a.txt would be in every split"),
        (["--source=a.txt", "--split=train", "--shard_index=1"], "--shard_index=1 and --shard_count=None: give both"),
        (["--split=train"], "no source given"),
        (["--split=train", "--verify", "--shard_count=2"], "no --shard_count"),
        (["--split=train", "--verify"], f"no token dataset at {tmp_path}/out/train"),
        (
            [f"--source={tmp_path}/a.txt", "--split=train", f"--out={tmp_path}/a.txt"],
            "a.txt/train: Not a directory: giv",
        ),
    ]:
        result = commands.fork(SCRIPT, f"--out={tmp_path}/out", *arguments, "--tokenizer=bytes")
        assert result.returncode == 1 and result.stderr.startswith("error: ") and message in result.stderr
        assert result.stderr.count("\n") == 1
