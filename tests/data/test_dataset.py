"""The reader serves the shards as one stream, and rejects datasets that are incomplete or damaged."""

import contextlib
import gc
import json
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.documents import find_documents
from heinsen.data.loader import evaluation_batches, train_iterator
from heinsen.data.tokenizer import get_tokenizer
from heinsen.files import seal


@pytest.fixture
def shards(rng):
    return [rng.integers(0, 257, n) for n in rng.integers(1, 60, 9)]


def test_read_equals_slice_of_the_concatenation(make_dataset, shards, rng):
    dataset = TokenDataset(make_dataset(shards))
    stream = np.concatenate(shards)
    assert dataset.n_tokens == len(dataset) == len(stream)
    assert (dataset.tokenizer_name, dataset.vocab_size, dataset.eot_id) == ("bytes", 257, 256)
    assert (dataset.n_documents, dataset.n_bytes) == (9, len(stream) - 9)
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


# Shards that change while the dataset is open.


def _truncate(path, rng):
    os.truncate(path, rng.integers(path.stat().st_size))


def _replace(path, rng):
    """Replace the file by another valid one, as another preparation would."""
    np.save(path.with_suffix(".new.npy"), np.zeros(1, np.uint16))
    os.replace(path.with_suffix(".new.npy"), path)


def _make_unreadable(path, rng):
    path.unlink()
    path.symlink_to(path)


CHANGES = {
    "truncated": (_truncate, "bytes instead of|ends at byte"),
    "emptied": (lambda path, rng: os.truncate(path, 0), "bytes instead of|ends at byte 0"),
    "removed": (lambda path, rng: path.unlink(), "No such file"),
    "replaced": (_replace, "bytes instead of"),
    "unreadable": (_make_unreadable, "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("is_open", [False, True])
def test_shard_that_changes_is_an_error_and_no_crash(make_dataset, rng, name, is_open):
    shards = [rng.integers(0, 257, n) for n in rng.integers(5, 60, 3)]
    dataset, stream = TokenDataset(make_dataset(shards)), np.concatenate(shards)
    path, (change, message) = dataset.path / "shard-00001.npy", CHANGES[name]
    if is_open:
        dataset.read(0, dataset.n_tokens)
    change(path, rng)
    if is_open and name in ("removed", "replaced", "unreadable"):  # the open file is still the old one
        np.testing.assert_array_equal(dataset.read(0, dataset.n_tokens), stream)
    else:
        with pytest.raises(
            DatasetError, match=rf"{path} was whole .* cannot be read now: .*({message}).*Restore the file"
        ):
            dataset.read(len(shards[0]), len(stream))
    start = len(shards[0]) + len(shards[1])
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 99}, "format version 99"),
        ({"dtype": "uint32"}, "dtype is 'uint32', not uint16"),
        ({"num_tokens": 3}, r"its totals are Totals\(n_tokens=3, .* those of its shards Totals\(n_tokens=\d\d"),
        ({"num_bytes": 10**6}, r"its totals are .*n_bytes=1000000\), those of its shards"),
        ({"vocab_size": 200}, "vocab_size is 200 and eot_id 256"),
        ({"tokenizer": "x", "eot_id": -1}, "vocab_size is 257 and eot_id -1"),
        ({"tokenizer": "x", "vocab_size": 65537}, "dtype is 'uint16', not uint32"),
        ({"eot_id": "a"}, "TypeError"),
        ({"eot_id": 255}, "eot_id 255, but those of tokenizer 'bytes' are 257 and 256"),
        ({"tokenizer": "gpt2"}, "but those of tokenizer 'gpt2' are 50257 and 50256"),
        ({"shards": [{}]}, "KeyError.'num_tokens'"),
        ({"shards": [], "num_tokens": 0, "num_documents": 0, "num_bytes": 0}, "no text in 0 documents"),
        *((text, "metadata.json is damaged") for text in ("", "{", "[]", "{}", "[" * 100_000)),
    ],
)
def test_unusable_metadata(make_dataset, shards, change, message):
    folder = make_dataset(shards)
    if isinstance(change, dict):
        change = json.dumps(seal(json.loads((folder / "metadata.json").read_text()) | change))
    (folder / "metadata.json").write_text(change)
    with pytest.raises(DatasetError, match=f"^{folder}.*{message}"):
        TokenDataset(folder)


def test_damage_that_agrees_with_itself_is_found_by_the_digest(make_dataset, shards, rng):
    """Tenfold bytes in the total and in every shard: bits per byte would be a tenth."""
    folder = make_dataset(shards)
    path = folder / "metadata.json"
    metadata = json.loads(path.read_text())
    tenfold = metadata | {"num_bytes": 10 * metadata["num_bytes"]}
    tenfold["shards"] = [shard | {"num_bytes": 10 * shard["num_bytes"]} for shard in metadata["shards"]]
    path.write_text(json.dumps({name: tenfold[name] for name in tenfold if name != "digest"}))
    with pytest.raises(DatasetError, match=f"{path} is damaged .it has no digest"):
        TokenDataset(folder)
    path.write_text(json.dumps(seal(metadata)))
    assert TokenDataset(folder).n_bytes == metadata["num_bytes"]
    path.write_text(json.dumps(tenfold))
    with pytest.raises(
        DatasetError, match=f"{path} is damaged .its digest does not fit its contents.; restore it, or delete"
    ):
        TokenDataset(folder)
    content = json.dumps(seal(metadata)).encode()
    for place in rng.integers(len(content), size=100):  # whatever bit flips: an error, or the same data
        flipped = bytearray(content)
        flipped[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        with contextlib.suppress(DatasetError):
            assert metadata.items() <= TokenDataset(folder).metadata.items()


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
    with pytest.raises(DatasetError, match=message):
        find_documents(dataset, get_tokenizer("bytes"))
    with pytest.raises(DatasetError, match=message):
        list(evaluation_batches(dataset, 7, 2))
    small = dataset.n_tokens // 3  # windows that leave out no more than a third
    batches = train_iterator([(dataset, 1), (dataset, 2)], small, 1, 0)
    if start < small * ((dataset.n_tokens - 1) // small):
        with pytest.raises(DatasetError, match=message):
            for _ in range(12):
                next(batches)


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "header cut": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "empty": lambda path: path.write_bytes(b""),
    "lengthened": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a token less": lambda path: np.save(path, np.load(path)[:-1]),
    "wider numbers": lambda path: np.save(path, np.load(path).astype(np.int32)),
    "two axes": lambda path: np.save(path, np.load(path)[None]),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_is_found_at_opening(make_dataset, shards, rng, damage):
    folder = make_dataset(shards)
    name = f"shard-{rng.integers(len(shards)):05d}.npy"
    DAMAGES[damage](folder / name)
    with pytest.raises(DatasetError, match=f"{name}.*delete the folder .* and rerun the command that prepared it"):
        TokenDataset(folder)


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
