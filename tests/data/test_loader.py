"""Training covers each window once per epoch, evaluation each token once, whichever process reads which rows."""

import itertools

import grain
import numpy as np
import pytest

from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.loader import EvaluationBatches, count_windows, train_iterator

LENGTH = 5


@pytest.fixture
def stream(rng):
    """Return tokens of which any two windows differ (almost certainly)."""
    return rng.integers(0, 257, 1000 + rng.integers(0, 100))


@pytest.fixture
def dataset(make_dataset, stream, rng):
    cuts = np.sort(rng.choice(np.arange(1, len(stream)), 7, replace=False))
    return TokenDataset(make_dataset(np.split(stream, cuts)))


@pytest.fixture
def streams(rng):
    """Return tokens of three datasets of different sizes; no window is in two of them."""
    return [rng.integers(85 * i, 85 * i + 85, n) for i, n in enumerate(rng.integers(300, 900, 3))]


@pytest.fixture
def mixture(make_dataset, streams, rng):
    datasets = [TokenDataset(make_dataset(np.array_split(s, 3), name=f"d{i}")) for i, s in enumerate(streams)]
    return list(zip(datasets, rng.uniform(0.5, 5, 3).tolist(), strict=True))


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


def test_order_is_that_of_grains_own_batches(dataset, rng):
    """The order of a run must survive changes of this code: Grain's shuffle twice, repeated, cut into batches."""
    windows, seed = count_windows(dataset, LENGTH), int(rng.integers(2**31))
    order = grain.MapDataset.range(windows).seed(seed).shuffle().shuffle().repeat().batch(7)
    steps = 3 * windows // 7
    expected = [[dataset.read(w * LENGTH, w * LENGTH + LENGTH + 1) for w in order[i].tolist()] for i in range(steps)]
    np.testing.assert_array_equal(_take(train_iterator(dataset, LENGTH, 7, seed), steps), expected)


@pytest.mark.parametrize("done", [0, 7, 14, 17])  # the seam of two epochs is after batch 14 or 15
@pytest.mark.parametrize("of", ["dataset", "mixture"])
def test_state_continues_exactly_on_any_rows(dataset, mixture, of, done):
    data = dataset if of == "dataset" else mixture
    rows = np.array([5, 7, 12, 13], np.uint8)
    iterator, resumed, some = (train_iterator(data, LENGTH, 14, 3, own) for own in (None, None, rows))
    kept = rows.copy()
    rows[:] = 0  # a change of the caller's array has no effect
    _take(iterator, done)
    state = iterator.get_state()
    assert state == {"next_index": done}  # the contents of checkpoints
    expected = _take(iterator, 30)
    _take(resumed, 2)
    resumed.set_state(state)
    np.testing.assert_array_equal(_take(resumed, 30), expected)
    some.set_state(state)
    np.testing.assert_array_equal(_take(some, 30), [batch[kept] for batch in expected])


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
    small = TokenDataset(make_dataset([rng.integers(0, 257, 11)], name="small"))
    next(train_iterator([(dataset, 0.6), (small, 0.4)], LENGTH, 5, 0))
    with pytest.raises(DatasetError, match="/small has 11 tokens, .* 2 windows .* fewer than its share of 3 of the"):
        train_iterator([(dataset, 0.5), (small, 0.5)], LENGTH, 6, 0)


@pytest.mark.parametrize("process_count", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [None, "random", 1, 10**9])
def test_evaluation_predicts_each_token_once_in_order(dataset, stream, rng, process_count, max_tokens):
    if max_tokens == "random":
        max_tokens = int(rng.integers(2, len(stream)))
    batch_size = process_count * int(rng.integers(1, 9))
    rows = _random_rows(batch_size, process_count, rng)
    per_process = [EvaluationBatches(dataset, LENGTH, batch_size, own, max_tokens) for own in rows]
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
    batches = EvaluationBatches(TokenDataset(make_dataset([rng.integers(0, 257, 4 * LENGTH)])), LENGTH, 2)
    assert len(batches) == 2 and all(batch["mask"].all() for batch in batches)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sequence_length": 0},
        {"batch_size": 0},
        *({"rows": np.array(rows)} for rows in ([0, 2], [-1, 0], [1, 0], [0, 0], [], [[0, 1]], [0.0], [True])),
    ],
    ids=str,
)
def test_arguments_out_of_range(dataset, arguments):
    arguments = {"sequence_length": LENGTH, "batch_size": 2, **arguments}
    for call in (
        lambda: train_iterator(dataset, seed=0, **arguments),
        lambda: EvaluationBatches(dataset, **arguments),
    ):
        with pytest.raises(ValueError, match="must be"):
            call()
    with pytest.raises(ValueError, match="seed"):
        train_iterator(dataset, LENGTH, 2, seed=-1)
    with pytest.raises(ValueError, match="max_tokens"):
        EvaluationBatches(dataset, LENGTH, 2, max_tokens=0)


# ---- mixtures ------------------------------------------------------------------------------------


def test_mixture_keeps_the_weights_and_each_datasets_epochs(mixture, streams, rng):
    """Holds after any number of windows; a dataset's epoch is complete whatever the others do."""
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


def test_mixture_of_one_is_that_dataset(dataset):
    alone, mixed = (_take(train_iterator(data, LENGTH, 8, 3), 30) for data in (dataset, [(dataset, 0.3)]))
    np.testing.assert_array_equal(alone, mixed)


def test_datasets_of_one_size_get_different_orders(make_dataset, rng):
    tokens = rng.permutation(250)
    mixture = [(TokenDataset(make_dataset([tokens], name=name)), 1.0) for name in "ab"]
    order = np.concatenate(_take(train_iterator(mixture, 1, 2, int(rng.integers(2**31))), 200))[:, 0]
    assert np.mean(order[::2] == order[1::2]) < 0.05
