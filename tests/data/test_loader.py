"""Training covers each window once an epoch, evaluation each token once, whatever the number of processes."""

import itertools

import numpy as np
import pytest

from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.loader import evaluation_batches, num_windows, train_iterator

LENGTH = 5


@pytest.fixture
def stream(rng):
    """Tokens of which any two windows differ (all but certainly)."""
    return rng.integers(0, 257, 1000 + rng.integers(0, 100))


@pytest.fixture
def dataset(make_dataset, stream, rng):
    cuts = np.sort(rng.choice(np.arange(1, len(stream)), 7, replace=False))
    return TokenDataset(make_dataset(np.split(stream, cuts)))


def _windows(stream):
    """The reference: window w is stream[w·T : w·T + T + 1], in a dictionary that gives w."""
    count = (len(stream) - 1) // LENGTH
    windows = {tuple(stream[w * LENGTH : w * LENGTH + LENGTH + 1].tolist()): w for w in range(count)}
    assert len(windows) == count
    return windows


def _take(iterator, count):
    return [batch["tokens"] for batch in itertools.islice(iterator, count)]


def _order(stream, batches):
    """Numbers of the windows in `batches`; KeyError for a row that is no window."""
    windows = _windows(stream)
    return [windows[tuple(row.tolist())] for batch in batches for row in batch]


def test_windows_are_slices_of_the_stream(dataset, stream):
    iterator = train_iterator(dataset, LENGTH, 4, seed=0)
    batch = next(iterator)
    assert batch.keys() == {"tokens"}
    assert batch["tokens"].shape == (4, LENGTH + 1) and batch["tokens"].dtype == np.int32
    _order(stream, [batch["tokens"]])
    assert num_windows(dataset, LENGTH) == len(_windows(stream))


@pytest.mark.parametrize("process_count", [1, 2, 3])
def test_each_epoch_covers_each_window_once_in_another_order(dataset, stream, rng, process_count):
    """No batch size or process count here divides the number of windows in general."""
    batch_size, seed, epochs = 7, int(rng.integers(2**31)), 3
    windows = num_windows(dataset, LENGTH)
    steps = -(-epochs * windows // (batch_size * process_count))
    per_process = [
        _take(train_iterator(dataset, LENGTH, batch_size, seed, p, process_count), steps) for p in range(process_count)
    ]
    order = _order(stream, [rows for step in zip(*per_process, strict=True) for rows in step])
    orders = [order[e * windows : (e + 1) * windows] for e in range(epochs)]
    for epoch in orders:
        assert sorted(epoch) == list(range(windows))
    for a, b in itertools.combinations([list(range(windows)), *orders], 2):
        assert np.mean(np.equal(a, b)) < 0.1  # of two random permutations, 1 in `windows` agrees


def test_order_is_as_good_as_random(make_dataset, rng):
    """Grain's single shuffle fails this: it puts neighbours next to each other four times too seldom."""
    windows, rows = 65_000, 20_000
    dataset = TokenDataset(make_dataset([np.arange(windows + 1)]))  # with T = 1 a row's first token is its window
    for seed in rng.integers(0, 2**31, 3).tolist():
        order = _take(train_iterator(dataset, 1, rows, seed), 1)[0][:, 0]
        assert np.mean(np.abs(np.diff(order)) <= windows // 100) == pytest.approx(0.02, abs=0.006)  # 6 sigma
        assert np.count_nonzero(order == np.arange(rows)) < 12  # Poisson(0.3)


@pytest.mark.parametrize("process_count", [2, 4])
def test_global_batches_do_not_depend_on_the_number_of_processes(dataset, rng, process_count):
    seed, steps = int(rng.integers(2**31)), 60
    alone = _take(train_iterator(dataset, LENGTH, 8, seed), steps)
    shares = [
        _take(train_iterator(dataset, LENGTH, 8 // process_count, seed, p, process_count), steps)
        for p in range(process_count)
    ]
    for whole, *parts in zip(alone, *shares, strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_order_is_a_function_of_the_seed(dataset):
    first, again, other = (_take(train_iterator(dataset, LENGTH, 8, seed), 10) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("stop", ["start", "middle", "before the seam", "after the seam"])
def test_state_continues_exactly(dataset, stop):
    batch_size = 7
    seam = num_windows(dataset, LENGTH) // batch_size
    done = {"start": 0, "middle": seam // 2, "before the seam": seam, "after the seam": seam + 3}[stop]
    iterator = train_iterator(dataset, LENGTH, batch_size, 3, 1, 2)
    _take(iterator, done)
    state = iterator.get_state()
    expected = _take(iterator, 2 * seam)
    resumed = train_iterator(dataset, LENGTH, batch_size, 3, 1, 2)
    _take(resumed, 2)
    resumed.set_state(state)
    np.testing.assert_array_equal(_take(resumed, 2 * seam), expected)
    # The state is that of the global batch: one process takes up where two stopped.
    alone = train_iterator(dataset, LENGTH, 2 * batch_size, 3)
    alone.set_state(state)
    np.testing.assert_array_equal([b[batch_size:] for b in _take(alone, 2 * seam)], expected)


def test_too_few_windows(make_dataset, rng):
    dataset = TokenDataset(make_dataset([rng.integers(0, 257, 4 * LENGTH + 1)]))
    next(train_iterator(dataset, LENGTH, 2, 0, 1, 2))
    with pytest.raises(
        DatasetError, match=r"21 tokens, which make 4 windows of 5 .* 6 rows of a batch \(3 a process, 2"
    ):
        train_iterator(dataset, LENGTH, 3, 0, 0, 2)
    with pytest.raises(DatasetError, match="make 0 windows"):
        train_iterator(dataset, 21, 1, 0)
    np.testing.assert_array_equal(next(train_iterator(dataset, 20, 1, 0))["tokens"][0], dataset.read(0, 21))


@pytest.mark.parametrize("process_count", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [None, "random", 1, 10**9])
def test_evaluation_predicts_each_token_once_in_order(dataset, stream, rng, process_count, max_tokens):
    if max_tokens == "random":
        max_tokens = int(rng.integers(2, len(stream)))
    batch_size = int(rng.integers(1, 9))
    per_process = [
        evaluation_batches(dataset, LENGTH, batch_size, p, process_count, max_tokens) for p in range(process_count)
    ]
    lengths = {len(batches) for batches in per_process} | {len(list(batches)) for batches in per_process}
    assert len(lengths) == 1  # as announced, and the same in all processes
    inputs, targets = [], []
    for batch in (b for step in zip(*per_process, strict=True) for b in step):
        tokens, mask = batch["tokens"], batch["mask"]
        assert tokens.shape == (batch_size, LENGTH + 1) and tokens.dtype == np.int32
        assert mask.shape == (batch_size, LENGTH) and mask.dtype == np.bool_
        assert (tokens[:, 1:][~mask] == 256).all()
        inputs.append(tokens[:, :-1][mask])
        targets.append(tokens[:, 1:][mask])
    expected = stream[:max_tokens]
    assert sum(map(len, targets)) == per_process[0].num_tokens == len(expected)
    np.testing.assert_array_equal(np.concatenate(targets), expected)
    np.testing.assert_array_equal(np.concatenate(inputs), np.concatenate([[256], expected[:-1]]))


def test_evaluation_of_a_split_that_fills_its_batches(make_dataset, rng):
    stream = rng.integers(0, 257, 4 * LENGTH)
    dataset = TokenDataset(make_dataset([stream]))
    batches = evaluation_batches(dataset, LENGTH, 2)
    assert len(batches) == 2 and all(batch["mask"].all() for batch in batches)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sequence_length": 0},
        {"batch_size": 0},
        {"process_index": 2, "process_count": 2},
        {"process_index": -1},
    ],
)
def test_arguments_out_of_range(dataset, arguments):
    arguments = {"sequence_length": LENGTH, "batch_size": 2, **arguments}
    with pytest.raises(ValueError, match="must be"):
        train_iterator(dataset, seed=0, **arguments)
    with pytest.raises(ValueError, match="must be"):
        evaluation_batches(dataset, **arguments)
    with pytest.raises(ValueError, match="seed"):
        train_iterator(dataset, LENGTH, 2, seed=-1)
    with pytest.raises(ValueError, match="max_tokens"):
        evaluation_batches(dataset, LENGTH, 2, max_tokens=0)
