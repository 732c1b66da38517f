"""The reader serves the shards as one stream, and rejects datasets that are incomplete or damaged."""

import gc
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.files import seal


@pytest.fixture
def shards(rng):
    return [rng.integers(0, 257, n) for n in rng.integers(1, 60, 9)]


def test_read_equals_slice_of_the_concatenation(make_dataset, shards, rng):
    dataset = TokenDataset(make_dataset(shards))
    stream = np.concatenate(shards)
    assert dataset.n_tokens == len(dataset) == len(stream)
    assert (dataset.tokenizer_name, dataset.vocab_size, dataset.eot_id) == ("bytes", 257, 256)
    n_documents = np.sum(stream == 256)
    assert (dataset.n_documents, dataset.n_bytes) == (n_documents, len(stream) - n_documents)
    boundaries = np.cumsum([0, *map(len, shards)]).tolist()
    points = boundaries + rng.integers(0, len(stream) + 1, 20).tolist()
    for start in points:
        for stop in points:
            if start <= stop:
                tokens = dataset.read(start, stop)
                assert tokens.dtype == np.uint16
                np.testing.assert_array_equal(tokens, stream[start:stop])
    for start, stop in [(-1, 2), (3, 2), (0, len(stream) + 1)]:
        with pytest.raises(IndexError):
            dataset.read(start, stop)
    dataset.read(0, dataset.n_tokens)[:] = 0  # a copy
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    for each in (dataset, pickle.loads(pickled)):
        np.testing.assert_array_equal(each.read(0, len(stream)), stream)


def test_shards_may_lie_in_folders_of_the_split(make_dataset, shards):
    """As those of splits that several machines prepared do, by code before 2026-11-29."""
    folder = make_dataset(shards)
    metadata = json.loads((folder / "metadata.json").read_text())
    (folder / "part-00000-of-00002").mkdir()
    for shard in metadata["shards"]:
        (folder / shard["file"]).rename(folder / "part-00000-of-00002" / shard["file"])
        shard["file"] = f"part-00000-of-00002/{shard['file']}"
    (folder / "metadata.json").write_text(json.dumps(seal(metadata)))
    dataset = TokenDataset(folder)
    dataset.verify()
    np.testing.assert_array_equal(dataset.read(0, dataset.n_tokens), np.concatenate(shards))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_few_files_are_open_however_many_shards(make_dataset, rng):
    """The same with several threads, whose reads close each other's least recently used files."""
    shards = [rng.integers(0, 257, n) for n in rng.integers(1, 6, 400)]
    dataset, stream = TokenDataset(make_dataset(shards)), np.concatenate(shards)
    count_open = lambda: sum(
        os.path.realpath(f"/proc/self/fd/{n}").startswith(str(dataset.path)) for n in os.listdir("/proc/self/fd")
    )
    assert count_open() == 0

    def read(start):
        np.testing.assert_array_equal(dataset.read(start, start + 9), stream[start : start + 9])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read, rng.integers(0, len(stream) - 9, 3000).tolist()))
    gc.collect()
    assert 0 < count_open() <= 256


def _make_unreadable(path):
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size // 2), "bytes instead of|ends at byte"),
        (Path.unlink, "No such file"),
        (_make_unreadable, "Too many levels of symbolic links"),
    ],
    ids=["truncated", "removed", "unreadable"],
)
@pytest.mark.parametrize("is_open", [False, True])
def test_shard_that_changes_under_a_dataset_is_an_error_and_no_crash(make_dataset, rng, change, message, is_open):
    shards = [rng.integers(0, 257, n) for n in rng.integers(5, 60, 3)]
    dataset, stream = TokenDataset(make_dataset(shards)), np.concatenate(shards)
    path, start = dataset.path / "shard-00001.npy", len(shards[0]) + len(shards[1])
    if is_open:
        dataset.read(0, dataset.n_tokens)
    change(path)
    if is_open and "bytes" not in message:  # the open file is still the old one
        np.testing.assert_array_equal(dataset.read(0, dataset.n_tokens), stream)
    else:
        with pytest.raises(DatasetError, match=rf"{path} was whole .* cannot be read now: .*({message}).*Restore the"):
            dataset.read(len(shards[0]), len(stream))
    np.testing.assert_array_equal(dataset.read(start, len(stream)), shards[2])
    path.unlink(missing_ok=True)
    np.save(path, shards[1].astype(np.uint16))
    if not is_open:  # a truncated file that is open is not opened again
        np.testing.assert_array_equal(dataset.read(0, len(stream)), stream)


def test_missing_and_incomplete_folders_are_named_with_the_command(make_dataset, shards):
    folder = make_dataset(shards)
    command = f"prepare_data.py .*--out={folder.parent} --split="
    with pytest.raises(DatasetError, match=rf"{folder.parent}/test .{folder.parent} has train.; .*{command}test"):
        TokenDataset(folder.parent / "test")
    (folder / "metadata.json").unlink()
    with pytest.raises(DatasetError, match=f"not a complete token dataset.*{command}train"):
        TokenDataset(folder)


def tenfold(metadata):
    """Tenfold bytes in the total and in every shard: bits per byte would be a tenth."""
    shards = [shard | {"num_bytes": 10 * shard["num_bytes"]} for shard in metadata["shards"]]
    return json.dumps(metadata | {"num_bytes": 10 * metadata["num_bytes"], "shards": shards})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format version 99"),
        ({"dtype": "uint32"}, "dtype is 'uint32', not uint16"),
        ({"num_tokens": 3}, r"its totals are Totals\(n_tokens=3, .* those of its shards Totals\(n_tokens=\d\d"),
        ({"vocab_size": 200}, "vocab_size is 200 and eot_id 256"),
        ({"tokenizer": "gpt2"}, "but those of tokenizer 'gpt2' are 50257 and 50256"),
        ({"shards": [{}]}, "KeyError.'num_tokens'"),
        ({"shards": [], "num_tokens": 0, "num_documents": 0, "num_bytes": 0}, "no text in 0 documents"),
        *((lambda _, text=text: text, "metadata.json is damaged") for text in ("{", "[" * 100_000)),
        (tenfold, r"metadata.json is damaged .its digest does not fit its contents.; restore it, or delete"),
        (lambda old: json.dumps({name: old[name] for name in old if name != "digest"}), "damaged .it has no digest"),
    ],
)
def test_unusable_metadata(make_dataset, shards, change, message):
    path = make_dataset(shards) / "metadata.json"
    old = json.loads(path.read_text())
    path.write_text(change(old) if callable(change) else json.dumps(seal(old | change)))
    with pytest.raises(DatasetError, match=f"^{path.parent}.*{message}"):
        TokenDataset(path.parent)


def test_ids_beyond_the_vocabulary_are_an_error_that_names_their_place(make_dataset, rng):
    shards = [rng.integers(0, 257, n) for n in rng.integers(2, 60, 5)]
    folder, which = make_dataset(shards), int(rng.integers(5))
    path, number = folder / f"shard-{which:05d}.npy", int(rng.integers(len(shards[which])))
    offset = path.stat().st_size - 2 * (len(shards[which]) - number)
    with path.open("r+b") as file:
        file.seek(offset + 1)
        high = file.read(1)[0]
        file.seek(offset + 1)
        file.write(bytes([high ^ 0x40]))
    dataset, start = TokenDataset(folder), sum(map(len, shards[:which])) + number
    dataset.read(0, start), dataset.read(start + 1, dataset.n_tokens)
    value = int(shards[which][number]) ^ 0x4000
    message = rf"{path} is damaged: token {number} \(byte {offset} of the file\) is {value}, .* has 257 ids.*--verify"
    for begin, end in ((0, dataset.n_tokens), (start, start + 1)):
        with pytest.raises(DatasetError, match=message):
            dataset.read(begin, end)


DAMAGES = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has [0-9]+ bytes instead of"),
    "header cut": (lambda path: path.write_bytes(path.read_bytes()[:50]), "cannot be read: .*the file is damaged"),
    "a token less": (
        lambda path: np.save(path, np.load(path)[:-1]),
        r"shape \([0-9]+,\), metadata.json says \([0-9]+,\)",
    ),
    "wider numbers": (lambda path: np.save(path, np.load(path).astype(np.int32)), "dtype int32, expected uint16"),
    "missing": (Path.unlink, "listed in metadata.json but missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("kind", ["", ".sources"])
def test_a_damaged_shard_is_found_at_opening(make_dataset, shards, kind, name):
    """Of tokens, or of sources; tests/faults/test_fuzz.py does all kinds of damage to both."""
    shards = [np.append(shard, 256) for shard in shards]
    sources = [["a"] * int(np.sum(shard == 256)) for shard in shards]
    path = make_dataset(shards, sources=sources) / f"shard-00003{kind}.npy"
    damage, message = DAMAGES[name]
    damage(path)
    with pytest.raises(DatasetError, match=f"{path}.*{message}.*delete the folder .* and rerun the command that prep"):
        TokenDataset(path.parent)


def test_verify_names_every_damaged_shard_even_a_missing_one(make_dataset, shards, rng):
    dataset = TokenDataset(make_dataset(shards))
    dataset.verify()
    flipped, missing = (dataset.path / f"shard-{i:05d}.npy" for i in rng.choice(len(shards), 2, replace=False))
    content = bytearray(flipped.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    flipped.write_bytes(content)
    missing.unlink()
    with pytest.raises(DatasetError, match="SHA-256 differs") as error:
        dataset.verify()
    assert set(re.findall(r"shard-\d+\.npy", str(error.value))) == {flipped.name, missing.name}


# ---- size ----------------------------------------------------------------------------------------


def _write_sparse(folder, n_shards, shard_tokens):
    """Write a dataset whose shards have headers and sizes but no blocks on disk: all tokens are 0."""
    folder.mkdir()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": (shard_tokens,)})
    names = [f"shard-{i:05d}.npy" for i in range(n_shards)]
    for name in names:
        (folder / name).write_bytes(header.getvalue())
        os.truncate(folder / name, header.tell() + 2 * shard_tokens)
    counts = {"num_tokens": shard_tokens, "num_documents": 1, "num_bytes": shard_tokens, "sha256": ""}
    metadata = {"format_version": 1, "tokenizer": "bytes", "vocab_size": 257, "eot_id": 256, "dtype": "uint16"}
    metadata |= {"shards": [{"file": name, **counts} for name in names], "num_skipped_documents": 0, "source": {}}
    metadata |= {key: n_shards * counts[key] for key in ("num_tokens", "num_documents", "num_bytes")}
    (folder / "metadata.json").write_text(json.dumps(seal(metadata)))


_AT_SCALE = """
import json, os, re, sys, time
from pathlib import Path
from heinsen.data.dataset import TokenDataset
from heinsen.data.loader import train_iterator

def megabytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

before, start = megabytes("VmRSS"), time.perf_counter()
dataset = TokenDataset(sys.argv[1])
opening = time.perf_counter() - start
starts, read = [], dataset.read
def recording_read(start, stop):
    starts.append(start)
    return read(start, stop)
dataset.read = recording_read
iterator = train_iterator(dataset, 1024, 480, 0)
for _ in range(3):
    assert next(iterator)["tokens"].shape == (480, 1025)
start = time.perf_counter()
iterator.set_state({"next_index": 500_000})
next(iterator)
seeking = time.perf_counter() - start
print(json.dumps({"opening": opening, "seeking": seeking, "megabytes": megabytes("VmHWM") - before, "starts": starts,
    "state": iterator.get_state(), "open_files": len(os.listdir("/proc/self/fd"))}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_300_billion_tokens_need_no_memory(tmp_path):
    folder, n_shards, shard_tokens = tmp_path / "train", 1000, 300_000_000
    _write_sparse(folder, n_shards, shard_tokens)
    try:
        run = subprocess.run(
            [sys.executable, "-c", _AT_SCALE, str(folder)],
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        shutil.rmtree(folder)
    found = json.loads(run.stdout)
    assert found["opening"] < 10 and found["seeking"] < 5  # seconds; both take a tenth on a quiet machine
    assert found["megabytes"] < 30  # the tokens take 600,000, a permutation of the windows 1,100
    assert found["state"] == {"next_index": 500_001}
    assert found["open_files"] < 300
    starts = np.array(found["starts"])
    assert len(set(found["starts"])) == len(starts) == 4 * 480 and (starts % 1024 == 0).all()
    counts = np.histogram(starts, 10, (0, n_shards * shard_tokens))[0]
    assert counts.min() > 120  # of 192 expected
