"""Every kind of input becomes the stream of its documents; bad input is named, not ignored."""

import errno
import functools
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from heinsen.data import readers as readers_module
from heinsen.data import tokenization
from heinsen.data.preparation import PreparationError, prepare
from heinsen.data.sources import check_disjoint, find_inputs
from tests.data.preparing import check_split, files_of, interrupt, jsonl, settings_of
from tests.runs import ROOT


@pytest.fixture
def documents(rng):
    """Texts of very different lengths, including the special token's name, blank and empty ones."""
    alphabet = list('abcdefgh  \n\r\té漢🙂"\\')
    lengths = rng.integers(0, 200, 60) * rng.integers(0, 5, 60)
    texts = ["".join(rng.choice(alphabet, n)) for n in lengths]
    return [*texts, "", "a <|endoftext|> b", " "]


def in_pieces(compress, data, rng):
    """Compress in two frames, cut inside a line."""
    cut = rng.integers(len(data))
    return compress(data[:cut]) + compress(data[cut:])


def write_table(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=7)


def write_files(folder, form, texts, rng):
    """Write the texts in order to a new folder of several files of one form."""
    folder.mkdir()
    n_files = len(texts) if form == "txt" else 3
    for index, part in enumerate(np.array_split(np.array(texts, object), n_files)):
        path, data = folder / f"{index:04d}.{form}", jsonl(part)
        match form:
            case "txt":
                path.write_bytes(part[0].encode())
            case "jsonl":
                path.write_bytes(data)
            case "jsonl.zst":
                path.write_bytes(in_pieces(zstandard.compress, data, rng))
            case "jsonl.gz":
                path.write_bytes(in_pieces(gzip.compress, data, rng))
            case "parquet":
                write_table(path, other=list(range(len(part))), text=list(part))
    return folder


@pytest.mark.parametrize("form", ["jsonl", "jsonl.zst", "jsonl.gz", "parquet", "txt"])
def test_files_become_the_stream_of_their_documents(tmp_path, documents, rng, form, monkeypatch):
    folder = write_files(tmp_path / "in", form, documents, rng)
    prepare(settings_of(folder, shard_tokens=1500), tmp_path / "out", workers=1)
    dataset = check_split(tmp_path / "out" / "train", documents)
    shards = dataset.metadata["shards"]
    assert len(shards) > 1 and all(shard["num_tokens"] >= 1500 for shard in shards[:-1])
    monkeypatch.setattr(tokenization, "BATCH_BYTES", 50)
    monkeypatch.setattr(readers_module, "READ_BYTES", 17)
    tokenize, sizes = tokenization._tokenize_batch, []
    record = lambda *arguments: (result := tokenize(*arguments), sizes.append(len(result[1])))[0]
    monkeypatch.setattr(tokenization, "_tokenize_batch", record)
    prepare(settings_of(folder / "*"), tmp_path / "glob", workers=1)  # the same files, in smaller pieces
    check_split(tmp_path / "glob" / "train", documents)
    assert sum(sizes) == len(documents) and len(sizes) > 5


def test_the_bytes_do_not_depend_on_workers_or_interruptions(tmp_path, documents, rng, monkeypatch):
    folder = write_files(tmp_path / "in", "jsonl.zst", documents, rng)
    settings = settings_of(folder, tokenizer="gpt2", shard_tokens=1500)
    prepare(settings, tmp_path / "alone", workers=1)
    monkeypatch.setattr(tokenization, "BATCH_BYTES", 300)  # many batches under way at once
    interrupt(settings, tmp_path / "out", 2)  # within a block of lines
    prepare(settings, tmp_path / "out", workers=2)
    check_split(tmp_path / "out" / "train", documents, "gpt2")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "alone")


def test_sources_are_read_in_the_order_given(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl([name], field="content"))
    settings = settings_of(tmp_path / "b.jsonl", tmp_path / "a.jsonl", text_field="content")
    prepare(settings, tmp_path / "out")
    check_split(tmp_path / "out" / "train", ["b", "a"])


def test_stdlib_splits_are_disjoint_and_source_only(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": str(tmp_path)}.get)
    wanted = {f"asyncio/m{i}.py" for i in range(500)}
    for name in wanted | {"test/a.py", "json/tests/a.py", "site-packages/a.py", "idlelib/a.py", "a.txt"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "latin.py").write_bytes(b"\xe9")
    train, validation = ([i.name for i in find_inputs(settings_of("stdlib", split=s))] for s in ("train", "validation"))
    assert not set(train) & set(validation) and set(train) | set(validation) == {f"stdlib/{name}" for name in wanted}
    assert train == sorted(train) and 0.02 < len(validation) / len(wanted) < 0.1
    with pytest.raises(PreparationError, match="splits train and validation, not 'test'"):
        find_inputs(settings_of("stdlib", split="test"))


@pytest.fixture
def hub(monkeypatch):
    """Stand-in for the hub: returns a function that sets the columns of every dataset there."""
    calls = []

    def put(**columns):
        def load_dataset(name, config, *, split, streaming):
            calls.append((name, config, split, streaming))
            return datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=3)

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, timeout: None)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return put


def test_hub_dataset(tmp_path, hub, documents):
    calls = hub(text=documents)
    prepare(settings_of("owner/corpus", split="test", hub_config="small"), tmp_path / "out")
    assert calls == [("owner/corpus", "small", "test", True)]
    check_split(tmp_path / "out" / "test", documents)
    prepare(settings_of("owner/corpus", hub_split="dev"), tmp_path / "dev")
    assert calls[1:] == [("owner/corpus", None, "dev", True)]
    hub(content=documents)
    with pytest.raises(PreparationError, match="owner/corpus, row 1: no column 'text' but content; .*--text_field"):
        prepare(settings_of("owner/corpus"), tmp_path / "other")


def test_no_input_is_in_two_splits(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    check = lambda source, **changes: check_disjoint(
        [settings_of(source, split=s, **changes) for s in ("train", "test")]
    )
    check("owner/corpus")
    for source, changes in ((tmp_path, {}), ("owner/corpus", {"hub_split": "train"})):
        with pytest.raises(PreparationError, match=f"{source}.* would be in every split: give one --split per call"):
            check(source, **changes)


def test_a_split_on_the_hub_is_in_one_split_of_a_dataset(tmp_path, hub, documents):
    hub(text=documents)
    prepare(settings_of("owner/corpus", hub_config="small"), tmp_path)
    with pytest.raises(
        PreparationError, match=f"owner/corpus is in split 'train' of {tmp_path}, too: give another --hub_split"
    ):
        prepare(settings_of("owner/corpus", split="test", hub_config="small", hub_split="train"), tmp_path)
    prepare(settings_of("owner/corpus", split="test", hub_config="small"), tmp_path)
    prepare(settings_of("owner/corpus", split="other", hub_config="large", hub_split="train"), tmp_path)


def test_a_dataset_that_is_not_on_the_hub_is_named_at_once(tmp_path, monkeypatch):
    def refuse(self, name, timeout):
        raise ConnectionError("no\nroute")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    monkeypatch.setattr(datasets, "load_dataset", None)  # which would try for half a minute
    with pytest.raises(PreparationError, match=r"'owner/corpus' is no local file.*opening.*ConnectionError: no route"):
        prepare(settings_of("owner/corpus"), tmp_path / "out")


# ---- which files are read ------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["", "*"])
def test_every_file_of_a_folder_is_read_or_named(tmp_path, capsys, pattern):
    folder, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    for path in (folder / "sub", elsewhere, folder / "lost+found", folder / "sub" / ".git"):
        path.mkdir(parents=True)
    for path in (folder / "a.jsonl", folder / "b.JSONL", folder / "sub" / "c.jsonl", elsewhere / "d.jsonl"):
        path.write_bytes(jsonl([path.stem]))
    for name in ("sub/.hidden.jsonl", "sub/.git/a.jsonl", "lost+found/a.jsonl", "sub/README.md", "e.json"):
        (folder / name).write_bytes(jsonl(["unread"]))
    (folder / "linked").symlink_to(elsewhere)
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "f.jsonl").symlink_to("nowhere")
    prepare(settings_of(folder / pattern if pattern else folder), tmp_path / "out")
    check_split(tmp_path / "out" / "train", ["a", "b", "d", "c"])
    groups = (
        "hidden: 3 (lost+found, .git, .hidden.jsonl); broken links: 1 (f.jsonl); of other kinds: 2 (e.json, README.md)"
    )
    assert f": 4 files read, others not; {groups}\n" in capsys.readouterr().err


def test_two_stars_stand_for_all_folders_below(tmp_path):
    for name in ("a", "sub/b", "sub/sub/c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.txt").write_text(name)
    names = [Path(i.name).parent.name for i in find_inputs(settings_of(tmp_path / "**" / "*.txt"))]
    assert names == ["a", "b", "c"]


def test_a_file_is_read_once_whatever_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to("a.txt")
    for other in ("a.txt", str(tmp_path / "a.txt"), "link.txt"):
        with pytest.raises(PreparationError, match=f"more than once by the sources: {other}"):
            find_inputs(settings_of("a.txt", other))
    with pytest.raises(PreparationError, match="link.txt, which is the same file as .*a.txt"):
        find_inputs(settings_of(tmp_path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *((name, f"no file matches source '{name.replace('*', '[*]')}'") for name in ("no.jsonl", "*.jsonl", "/no")),
        ("./no", "no file matches source './no'"),
        ("folder.jsonl", "no file matches"),
        ("a.csv", "source 'a.csv' is of no known kind: known endings are .jsonl, "),
    ],
)
def test_no_file_to_read(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(PreparationError, match=message):
        prepare(settings_of(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "txt"])
def test_a_byte_order_mark_is_no_text(tmp_path, suffix):
    content = b"\xef\xbb\xbf" + (b"one" if suffix == "txt" else jsonl(["one"]))
    (tmp_path / f"a.{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    prepare(settings_of(tmp_path / f"a.{suffix}"), tmp_path / "out")
    check_split(tmp_path / "out" / "train", ["one"])


def test_numbers_that_are_not_read_may_be_too_large_for_python(tmp_path):
    digits = b"9" * 5000
    line = b'{"other": [%s, -1.%s], "text": "%s", "meta": {"pile_set_name": "s"}}' % (digits, digits, digits)
    (tmp_path / "a.jsonl").write_bytes(line)
    dataset = prepare(settings_of(tmp_path / "a.jsonl"), tmp_path / "out")
    assert dataset.read(0, len(dataset) - 1).astype(np.uint8).tobytes() == digits
    assert dataset.read_sources()[0] == ["s"]


def test_a_long_line_is_read_in_linear_time(tmp_path, monkeypatch):
    """Of 16,384 blocks: to copy what came before with each takes tens of seconds."""
    monkeypatch.setattr(readers_module, "READ_BYTES", 1 << 10)
    (tmp_path / "a.jsonl").write_bytes(b"x" * (1 << 24) + b"\ny")
    start = time.process_time()
    blocks = list(readers_module.read_jsonl(str(tmp_path / "a.jsonl"), settings_of("a")))
    assert time.process_time() - start < 2
    assert blocks == [(range(1, 2), b"x" * (1 << 24)), (range(2, 3), b"y")]


BAD_LINES = {
    "not UTF-8": (b'{"text": "caf\xe9"}', r"not UTF-8 \(byte 13"),
    "cut JSON": (b'{"text": "cut', "invalid JSON"),
    "other field": (b'{"content": "x"}', "no text field 'text' but 'content'; name the text field by --text_field"),
    "no field": (b"{}", "no text field 'text' but an empty object"),
    "no object": (b'["text"]', "no text field 'text' but list"),
    "number": (b'{"text": 3}', "not a string but int"),
    "null": (b'{"text": null}', "not a string but NoneType"),
    "surrogate": (b'{"text": "\\ud800"}', "lone surrogate"),
    "too deep": (b'{"text":' + b"[" * 10_000 + b"}", "invalid JSON"),
}


def check_bad(tmp_path, source, where, message, kept):
    """Check that the error names place and remedy, and that following the remedy leaves the document out."""
    settings, folder = settings_of(source, shard_tokens=10), tmp_path / "out" / "train"
    with pytest.raises(PreparationError, match=f"{where}: .*{message}.*--skip_bad_documents"):
        prepare(settings, tmp_path / "out", workers=1)
    assert list(folder.glob("shard-*.npy")) and not (folder / "metadata.json").exists()
    dataset = prepare(settings, tmp_path / "out", workers=1, skip_bad_documents=True)
    assert dataset.metadata["num_skipped_documents"] == 1
    check_split(folder, kept)
    with pytest.raises(PreparationError, match="skip_bad_documents: 1 skipped before, off now"):
        prepare(settings, tmp_path / "out", workers=1)


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_line(tmp_path, name):
    line, message = BAD_LINES[name]
    path, good = tmp_path / "bad.jsonl", b'{"text": "good"}\n'
    path.write_bytes(3 * good + b"\n" + line + b"\n" + good)
    check_bad(tmp_path, path, f"{path}, line 5", message, ["good"] * 4)


def test_bad_text_file(tmp_path):
    for name in ("a", "b", "d"):
        (tmp_path / f"{name}.txt").write_bytes(b"more than ten bytes")
    (tmp_path / "c.txt").write_bytes(b"caf\xe9")
    check_bad(tmp_path, tmp_path / "*.txt", tmp_path / "c.txt", "not UTF-8", ["more than ten bytes"] * 3)


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        ("zst", "truncated", "truncated; fetch it again"),
        ("zst", "overwritten", "damaged zstd data"),
        ("gz", "truncated", "truncated; fetch it again"),
        ("gz", "overwritten", "damaged gzip data"),
    ],
)
def test_damaged_compression(tmp_path, rng, suffix, damage, message):
    """The lines before the damage are kept, and the next file is read."""
    texts = [rng.bytes(1000).hex() for _ in range(600)]
    data, compress = jsonl(texts), zstandard.compress if suffix == "zst" else functools.partial(gzip.compress, mtime=0)
    frames = [compress(data[i : i + 100_000]) for i in range(0, len(data), 100_000)]
    whole, start = b"".join(frames), len(b"".join(frames[:5]))
    path = tmp_path / f"0.jsonl.{suffix}"
    if damage == "truncated":
        path.write_bytes(whole[: int(len(whole) * rng.uniform(0.3, 0.95))])
    else:
        path.write_bytes(whole[:start] + b"no frame at all" + whole[start:])
    (tmp_path / "1.jsonl").write_bytes(jsonl(["last"]))
    settings = settings_of(tmp_path / "?.jsonl*", shard_tokens=50_000)
    with pytest.raises(PreparationError, match=rf"{path}, line \d+: .*{message}.*--skip_bad_documents"):
        prepare(settings, tmp_path / "out")
    dataset = prepare(settings, tmp_path / "out", skip_bad_documents=True)
    assert dataset.metadata["num_skipped_documents"] == 1
    kept = dataset.n_documents - 1
    assert 50 < kept < 600
    check_split(tmp_path / "out" / "train", [*texts[:kept], "last"])


@pytest.mark.parametrize("suffix", ["zst", "gz"])
def test_a_compressed_file_without_a_byte_is_refused(tmp_path, suffix):
    (tmp_path / f"0.jsonl.{suffix}").write_bytes(b"")
    (tmp_path / "1.jsonl").write_bytes(jsonl(["more than ten bytes"]))
    (tmp_path / "2.jsonl").write_bytes(b"")  # holds no document
    with pytest.raises(PreparationError, match=f"0.jsonl.{suffix}, line 1: .*0 bytes, .*fetch it again"):
        prepare(settings_of(tmp_path / "*.jsonl*"), tmp_path / "out")


# ---- tables --------------------------------------------------------------------------------------


def not_utf8():
    offsets = pyarrow.py_buffer(np.array([0, 10, 14, 24], np.int32))
    return pyarrow.StringArray.from_buffers(3, offsets, pyarrow.py_buffer(b"0123456789caf\xe90123456789"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([("text", ["0123456789", "x", None])], "row 3: the text is not a string but NoneType"),
        ([("text", [1])], "row 1: the text is not a string but int"),
        ([("text", not_utf8())], r"row 2: damaged Parquet data \('utf-8' codec can't decode byte 0xe9"),
        ([("content", ["a"])], "row 1: no column 'text' but content; name the text column by --text_field"),
        ([("text", ["a"]), ("text", ["b"])], "row 1: damaged Parquet data .*exists 2 times"),
    ],
    ids=["null", "numbers", "not UTF-8", "no column", "two columns"],
)
def test_bad_parquet(tmp_path, columns, message):
    path = tmp_path / "a.parquet"
    arrays = [pyarrow.array(values) for _, values in columns]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, [name for name, _ in columns]), path)
    with pytest.raises(PreparationError, match=f"{path}, {message}") as error:
        prepare(settings_of(path), tmp_path / "out")
    assert "\n" not in str(error.value)


def test_damaged_parquet_is_skipped_with_the_rest_of_its_rows(tmp_path):
    write_table(tmp_path / "a.parquet", text=["a"] * 10)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: len(content) // 2])
    write_table(tmp_path / "b.parquet", text=["b"])
    settings = settings_of(tmp_path)
    with pytest.raises(PreparationError, match="a.parquet, row 1: damaged Parquet data"):
        prepare(settings, tmp_path / "out")
    assert prepare(settings, tmp_path / "out", skip_bad_documents=True).metadata["num_skipped_documents"] == 1
    check_split(tmp_path / "out" / "train", ["b"])


def test_an_error_of_the_system_is_no_bad_document(tmp_path, monkeypatch):
    """Nor is a home that cannot be written, of which nothing is needed for local files."""
    write_table(tmp_path / "a.parquet", text=["a"] * 10)
    arguments = [f"--source={tmp_path}/a.parquet", "--tokenizer=bytes", "--split=train", f"--out={tmp_path}/out"]
    environment = {name: value for name, value in os.environ.items() if name not in ("XDG_CACHE_HOME", "HF_HOME")}
    environment |= {"HOME": "/proc/nobody"}
    command = [sys.executable, ROOT / "scripts" / "prepare_data.py", "--skip_bad_documents", *arguments]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    check_split(tmp_path / "out" / "train", ["a"] * 10)

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere")

    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", refuse)
    with pytest.raises(PermissionError):
        prepare(settings_of(tmp_path / "a.parquet"), tmp_path / "other", skip_bad_documents=True)


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.string_view(), "dictionary"], ids=str)
def test_every_kind_of_string_column_is_read(tmp_path, kind):
    texts = pyarrow.array(["a", "漢", "a"])
    write_table(tmp_path / "a.parquet", text=texts.dictionary_encode() if kind == "dictionary" else texts.cast(kind))
    prepare(settings_of(tmp_path / "a.parquet"), tmp_path / "out")
    check_split(tmp_path / "out" / "train", ["a", "漢", "a"])


# ---- sources of documents ------------------------------------------------------------------------


def sources_of(dataset):
    names, indices = dataset.read_sources()
    return [names[index] for index in indices]


def test_a_source_is_one_line_of_text(tmp_path):
    lines = [{"text": str(i), "from": value} for i, value in enumerate(["  a\n b ", "", 7, None, ["a"], "\ud800"])]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    dataset = prepare(settings_of(tmp_path / "a.jsonl", source_field="from"), tmp_path / "out")
    assert sources_of(dataset) == ["a b", None, None, None, None, "?"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"meta": [{"pile_set_name": "x", "n": 1}, None, {"pile_set_name": "y", "n": 2}]}, ["x", None, "y"]),
        ({"meta": ['{"pile_set_name": "x"}', '{"pile', "{}"]}, ["x", None, None]),
        ({"meta.pile_set_name": ["x", None, "y"]}, ["x", None, "y"]),
        ({"meta": ["no struct", "a", "b"]}, [None, None, None]),
        ({}, [None, None, None]),
    ],
    ids=["struct", "JSON", "dot in its name", "other", "none"],
)
def test_sources_of_tables(tmp_path, hub, columns, expected):
    rows = {"text": ["a", "b", "c"], **columns}
    write_table(tmp_path / "a.parquet", **rows)
    assert sources_of(prepare(settings_of(tmp_path / "a.parquet"), tmp_path / "out")) == expected
    lines = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert sources_of(prepare(settings_of(tmp_path / "a.jsonl"), tmp_path / "lines")) == expected
    hub(**rows)
    assert sources_of(prepare(settings_of("owner/corpus"), tmp_path / "hub")) == expected
