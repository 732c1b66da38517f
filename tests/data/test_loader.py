"""Training covers each window once per epoch, evaluation each token once, whichever process reads which rows."""

import io
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import grain
import numpy as np
import pytest

from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.loader import count_windows, evaluation_batches, train_iterator
from heinsen.files import seal

LENGTH = 5


@pytest.fixture
def stream(rng):
    """Return tokens of which any two windows differ (almost certainly)."""
    return rng.integers(0, 257, 1000 + rng.integers(0, 100))


@pytest.fixture
def dataset(make_dataset, stream, rng):
    cuts = np.sort(rng.choice(np.arange(1, len(stream)), 7, replace=False))
    return TokenDataset(make_dataset(np.split(stream, cuts)))


def _windows(stream):
    """Return the reference: a dictionary from window stream[w·T : w·T + T + 1] to w."""
    count = (len(stream) - 1) // LENGTH
    windows = {tuple(stream[w * LENGTH : w * LENGTH + LENGTH + 1].tolist()): w for w in range(count)}
    assert len(windows) == count
    return windows


def _take(iterator, count):
    return [batch["tokens"] for batch in itertools.islice(iterator, count)]


def _random_rows(batch_size, count, rng):
    """Divide the rows of a batch at random, unevenly, among `count` processes; each gets at least one."""
    owner = rng.permutation(np.concatenate([np.arange(count), rng.integers(0, count, batch_size - count)]))
    return [np.flatnonzero(owner == process) for process in range(count)]


def _join_rows(per_process, rows):
    """Assemble the global batches from the rows of each process."""
    for shares in zip(*per_process, strict=True):
        whole = np.empty((sum(map(len, rows)), *shares[0].shape[1:]), shares[0].dtype)
        for share, own_rows in zip(shares, rows, strict=True):
            whole[own_rows] = share
        yield whole


@pytest.mark.parametrize("process_count", [1, 2, 3])
def test_each_epoch_covers_each_window_once_in_another_order(dataset, stream, rng, process_count):
    """No batch size or process count here divides the number of windows in general."""
    batch_size, seed, epochs = 7 * process_count, int(rng.integers(2**31)), 3
    index_of = _windows(stream)
    windows = count_windows(dataset, LENGTH)
    assert windows == len(index_of)
    steps = -(-epochs * windows // batch_size)
    rows = _random_rows(batch_size, process_count, rng)
    per_process = [_take(train_iterator(dataset, LENGTH, batch_size, seed, own), steps) for own in rows]
    assert all(tokens.dtype == np.int32 for tokens in per_process[0])
    order = [index_of[tuple(row)] for batch in _join_rows(per_process, rows) for row in batch.tolist()]
    orders = [order[e * windows : (e + 1) * windows] for e in range(epochs)]
    for epoch in orders:
        assert sorted(epoch) == list(range(windows))
    for a, b in itertools.combinations([list(range(windows)), *orders], 2):
        assert np.mean(np.equal(a, b)) < 0.1  # of two random permutations, 1 in `windows` agrees


def test_order_is_as_good_as_random(make_dataset, rng):
    """Grain's single shuffle fails this: it places neighbors side by side four times too rarely."""
    windows, rows = 65_000, 10_000
    # With T = 1 a row's first token is its window.
    sizes = {"tokenizer": "numbers", "vocab_size": windows + 1, "eot_id": windows}
    dataset = TokenDataset(make_dataset([np.arange(windows + 1)], **sizes))
    order = next(train_iterator(dataset, 1, rows, int(rng.integers(2**31))))["tokens"][:, 0]
    assert np.mean(np.abs(np.diff(order)) <= windows // 100) == pytest.approx(0.02, abs=0.0085)  # 6 sigma
    assert np.count_nonzero(order == np.arange(rows)) < 12  # Poisson(0.15)


def test_each_batch_is_the_rows_asked_for(dataset, rng):
    seed, steps, batch_size = int(rng.integers(2**31)), 20, 8
    whole = _take(train_iterator(dataset, LENGTH, batch_size, seed), steps)
    for rows in ([5], [0, 3, 4], [2, 7], range(batch_size)):
        rows = np.array(rows, rng.choice([np.int32, np.uint8, np.int64]))
        iterator = train_iterator(dataset, LENGTH, batch_size, seed, rows)
        kept = rows.copy()
        rows[:] = 0  # a change of the caller's array has no effect
        np.testing.assert_array_equal(_take(iterator, steps), [batch[kept] for batch in whole])


def test_order_is_that_of_grains_own_batches(dataset, rng):
    """The order of a run must survive changes of this code: Grain's shuffle twice, repeated, cut into batches."""
    windows, seed = count_windows(dataset, LENGTH), int(rng.integers(2**31))
    order = grain.MapDataset.range(windows).seed(seed).shuffle().shuffle().repeat().batch(7)
    steps = 3 * windows // 7
    expected = [[dataset.read(w * LENGTH, w * LENGTH + LENGTH + 1) for w in order[i].tolist()] for i in range(steps)]
    np.testing.assert_array_equal(_take(train_iterator(dataset, LENGTH, 7, seed), steps), expected)


@pytest.mark.parametrize("stop", ["start", "middle", "before the seam", "after the seam"])
def test_state_continues_exactly(dataset, stop):
    batch_size, rows = 14, np.arange(7, 14)
    seam = count_windows(dataset, LENGTH) // batch_size
    done = {"start": 0, "middle": seam // 2, "before the seam": seam, "after the seam": seam + 3}[stop]
    iterator = train_iterator(dataset, LENGTH, batch_size, 3, rows)
    _take(iterator, done)
    state = iterator.get_state()
    assert state == {"next_index": done}  # the contents of checkpoints
    expected = _take(iterator, 2 * seam)
    resumed = train_iterator(dataset, LENGTH, batch_size, 3, rows)
    _take(resumed, 2)
    resumed.set_state(state)
    np.testing.assert_array_equal(_take(resumed, 2 * seam), expected)
    # The state is that of the global batch: one process resumes where two stopped.
    alone = train_iterator(dataset, LENGTH, batch_size, 3)
    alone.set_state(state)
    np.testing.assert_array_equal([b[rows] for b in _take(alone, 2 * seam)], expected)


def test_lost_shard_is_an_error_and_the_batch_comes_once_it_is_back(make_dataset, stream):
    dataset = TokenDataset(make_dataset([stream]))
    iterator, again = (train_iterator(dataset, LENGTH, 8, 1) for _ in range(2))
    shard = dataset.path / "shard-00000.npy"
    shard.rename(shard.with_suffix(".away"))
    with pytest.raises(DatasetError, match=f"{shard} was whole"):
        next(iterator)
    shard.with_suffix(".away").rename(shard)
    np.testing.assert_array_equal(_take(iterator, 5), _take(again, 5))


def test_too_few_windows(make_dataset, rng):
    dataset = TokenDataset(make_dataset([rng.integers(0, 257, 4 * LENGTH + 1)]))
    next(train_iterator(dataset, LENGTH, 4, 0, np.array([0, 2])))
    with pytest.raises(DatasetError, match=r"21 tokens, which make 4 windows of 5 .* than the 6 rows of a batch\. Use"):
        train_iterator(dataset, LENGTH, 6, 0, np.array([0, 2]))
    with pytest.raises(DatasetError, match="make 0 windows"):
        train_iterator(dataset, 21, 1, 0)
    np.testing.assert_array_equal(next(train_iterator(dataset, 20, 1, 0))["tokens"][0], dataset.read(0, 21))


@pytest.mark.parametrize("process_count", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [None, "random", 1, 10**9])
def test_evaluation_predicts_each_token_once_in_order(dataset, stream, rng, process_count, max_tokens):
    if max_tokens == "random":
        max_tokens = int(rng.integers(2, len(stream)))
    batch_size = process_count * int(rng.integers(1, 9))
    rows = _random_rows(batch_size, process_count, rng)
    per_process = [evaluation_batches(dataset, LENGTH, batch_size, own, max_tokens) for own in rows]
    assert {batches.n_tokens for batches in per_process} == {min(max_tokens or len(stream), len(stream))}
    lengths = {len(batches) for batches in per_process} | {len(list(batches)) for batches in per_process}
    assert len(lengths) == 1  # as announced, and the same in all processes
    inputs, targets = [], []
    shares = lambda name: _join_rows([[batch[name] for batch in batches] for batches in per_process], rows)
    for tokens, mask in zip(shares("tokens"), shares("mask"), strict=True):
        assert tokens.shape == (batch_size, LENGTH + 1) and tokens.dtype == np.int32
        assert mask.shape == (batch_size, LENGTH) and mask.dtype == np.bool_
        assert (tokens[:, 1:][~mask] == 256).all()
        inputs.append(tokens[:, :-1][mask])
        targets.append(tokens[:, 1:][mask])
    expected = stream[:max_tokens]
    assert sum(map(len, targets)) == per_process[0].n_tokens == len(expected)
    np.testing.assert_array_equal(np.concatenate(targets), expected)
    np.testing.assert_array_equal(np.concatenate(inputs), np.concatenate([[256], expected[:-1]]))


def test_evaluation_of_a_split_that_fills_its_batches(make_dataset, rng):
    batches = evaluation_batches(TokenDataset(make_dataset([rng.integers(0, 257, 4 * LENGTH)])), LENGTH, 2)
    assert len(batches) == 2 and all(batch["mask"].all() for batch in batches)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sequence_length": 0},
        {"batch_size": 0},
        {"rows": np.array([0, 2])},
        {"rows": np.array([-1, 0])},
        {"rows": np.array([1, 0])},
        {"rows": np.array([0, 0])},
        {"rows": np.array([], np.int64)},
        {"rows": np.array([[0, 1]])},
        {"rows": np.array([0.0])},
        {"rows": np.array([True, False])},
    ],
    ids=str,
)
def test_arguments_out_of_range(dataset, arguments):
    arguments = {"sequence_length": LENGTH, "batch_size": 2, **arguments}
    with pytest.raises(ValueError, match="must be"):
        train_iterator(dataset, seed=0, **arguments)
    with pytest.raises(ValueError, match="must be"):
        evaluation_batches(dataset, **arguments)


def test_seed_and_limit_out_of_range(dataset):
    with pytest.raises(ValueError, match="seed"):
        train_iterator(dataset, LENGTH, 2, seed=-1)
    with pytest.raises(ValueError, match="max_tokens"):
        evaluation_batches(dataset, LENGTH, 2, max_tokens=0)


# ---- mixtures ------------------------------------------------------------------------------------


@pytest.fixture
def sources(make_dataset, rng):
    """Return three datasets of different sizes with weights, and their streams; no window is in two of them."""
    streams = [rng.integers(85 * i, 85 * i + 85, n) for i, n in enumerate(rng.integers(300, 900, 3))]
    datasets = [TokenDataset(make_dataset(np.array_split(s, 3), name=f"d{i}")) for i, s in enumerate(streams)]
    return list(zip(datasets, rng.uniform(0.5, 5, 3).tolist(), strict=True)), streams


def test_mixture_keeps_the_weights_and_each_datasets_epochs(sources, rng):
    """Holds after any number of windows; a dataset's epoch is complete whatever the others do."""
    mixture, streams = sources
    steps, batch_size, seed = 150, 11, int(rng.integers(2**31))
    rows = _random_rows(batch_size, 2, rng)
    iterators = [train_iterator(mixture, LENGTH, batch_size, seed, own) for own in rows]
    batches = _join_rows([_take(iterator, steps) for iterator in iterators], rows)
    index_of = [_windows(stream) for stream in streams]
    dealt = [(row[0] // 85, index_of[row[0] // 85][tuple(row)]) for batch in batches for row in batch.tolist()]
    total, seen = sum(weight for _, weight in mixture), []
    for which, (dataset, weight) in enumerate(mixture):
        given = np.cumsum([source == which for source, _ in dealt])
        assert np.abs(given - weight / total * np.arange(1, len(dealt) + 1)).max() <= 1.5
        windows = count_windows(dataset, LENGTH)
        order = [window for source, window in dealt if source == which]
        epochs = [order[i : i + windows] for i in range(0, len(order), windows)]
        for epoch in epochs[:-1]:
            assert sorted(epoch) == list(range(windows))
        assert len(set(epochs[-1])) == len(epochs[-1])
        for a, b in itertools.pairwise(epochs):
            assert np.mean(np.equal(a[: len(b)], b)) < 0.3 or len(b) < 20
        seen.append(len(epochs))
    assert max(seen) > 2


def test_mixture_resumes_from_a_number(sources):
    mixture, _ = sources
    iterator = train_iterator(mixture, LENGTH, 6, 1)
    _take(iterator, 40)
    state = iterator.get_state()
    assert state == {"next_index": 40}
    expected = _take(iterator, 40)
    resumed = train_iterator(mixture, LENGTH, 6, 1, np.array([1, 4]))
    resumed.set_state(state)
    np.testing.assert_array_equal(_take(resumed, 40), [batch[[1, 4]] for batch in expected])


def test_mixture_of_one_is_that_dataset(dataset):
    alone, mixed = (_take(train_iterator(data, LENGTH, 8, 3), 30) for data in (dataset, [(dataset, 0.3)]))
    np.testing.assert_array_equal(alone, mixed)


def test_datasets_of_one_size_get_different_orders(make_dataset, rng):
    tokens = rng.permutation(250)
    mixture = [(TokenDataset(make_dataset([tokens], name=name)), 1.0) for name in "ab"]
    order = np.concatenate(_take(train_iterator(mixture, 1, 2, int(rng.integers(2**31))), 200))[:, 0]
    assert np.mean(order[::2] == order[1::2]) < 0.05


def test_mixture_with_too_small_a_dataset(make_dataset, rng):
    large, small = (TokenDataset(make_dataset([rng.integers(0, 257, n)], name=str(n))) for n in (500, 11))
    next(train_iterator([(large, 0.8), (small, 0.2)], LENGTH, 10, 0))
    with pytest.raises(DatasetError, match="/11 has 11 tokens, .* 2 windows .* fewer than its share of 3 of the"):
        train_iterator([(large, 0.7), (small, 0.3)], LENGTH, 10, 0)


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
