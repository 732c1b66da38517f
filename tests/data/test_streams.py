"""Rows as endless texts: each continues the row of the batch before, and all tokens are targets equally often."""

import itertools
from collections import Counter

import numpy as np
import pytest

from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.loader import evaluation_batches, stream_iterator
from heinsen.data.mixture import share_rows

LENGTH = 5


def take(iterator, count):
    return np.stack([batch["tokens"] for batch in itertools.islice(iterator, count)])


@pytest.fixture
def stream(rng):
    """Numbers of tokens, so that each is a target with a name of its own; of any length."""
    return np.arange(200 + rng.integers(0, 100))


@pytest.fixture
def dataset(make_dataset, stream):
    sizes = {"tokenizer": "numbers", "vocab_size": 300, "eot_id": 299}
    return TokenDataset(make_dataset(np.array_split(stream, 3), **sizes))


def test_rows_continue_and_go_around_the_split(dataset, stream, rng):
    steps = 2 * len(stream) // LENGTH  # each row meets the end of the split
    batches = take(stream_iterator(dataset, LENGTH, 7, int(rng.integers(2**31))), steps)
    assert batches.dtype == np.int32 and batches.shape == (steps, 7, LENGTH + 1)
    np.testing.assert_array_equal(batches[1:, :, 0], batches[:-1, :, -1])
    for row in range(7):
        text = np.concatenate([batches[:1, row, 0], batches[:, row, 1:].reshape(-1)])
        np.testing.assert_array_equal(np.diff(text) % len(stream), 1)


@pytest.mark.parametrize("batch_size", [1, 7, 16])
def test_after_any_number_of_batches_all_tokens_are_targets_equally_often(dataset, stream, rng, batch_size):
    """To within one: no token is dropped, or favored, at the end of an epoch."""
    counts: Counter[int] = Counter(dict.fromkeys(stream.tolist(), 0))
    for batch in take(stream_iterator(dataset, LENGTH, batch_size, int(rng.integers(2**31))), 150):
        counts.update(batch[:, 1:].reshape(-1).tolist())
        assert max(counts.values()) - min(counts.values()) <= 1
    assert set(counts) == set(stream.tolist()) and min(counts.values()) > 1


@pytest.mark.parametrize("rows", [[0], [1, 4, 6], range(7)], ids=str)
def test_rows_and_position_are_those_of_the_global_batch(dataset, rows):
    rows, seed = np.array(rows), 3
    whole = take(stream_iterator(dataset, LENGTH, 7, seed), 60)
    iterator = stream_iterator(dataset, LENGTH, 7, seed, rows)
    np.testing.assert_array_equal(take(iterator, 20), whole[:20, rows])
    state = iterator.get_state()
    assert state == {"next_index": 20}
    resumed = stream_iterator(dataset, LENGTH, 7, seed)
    resumed.set_state(state)
    np.testing.assert_array_equal(take(resumed, 40), whole[20:])


def test_the_seed_says_where_rows_begin(dataset):
    first, again, other = (take(stream_iterator(dataset, LENGTH, 7, seed), 5) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_rows_of_a_mixture_belong_to_a_dataset_by_its_weight(make_dataset, rng):
    sizes = {"tokenizer": "numbers", "vocab_size": 900, "eot_id": 899}
    texts = [300 * i + np.arange(n) for i, n in enumerate(rng.integers(100, 300, 3))]
    datasets = [TokenDataset(make_dataset([text], name=f"d{i}", **sizes)) for i, text in enumerate(texts)]
    mixture = list(zip(datasets, (5.0, 2.0, 1.0), strict=True))
    assert share_rows(mixture, 11) == [(datasets[0], 7), (datasets[1], 3), (datasets[2], 1)]  # of 6.9, 2.75, 1.4
    batches = take(stream_iterator(mixture, LENGTH, 11, int(rng.integers(2**31))), 200)
    owners = batches // 300
    assert (owners == owners[:1, :, :1]).all(), "a row stays with its dataset"
    assert np.bincount(owners[0, :, 0]).tolist() == [7, 3, 1]
    np.testing.assert_array_equal(batches[1:, :, 0], batches[:-1, :, -1])
    for i, text in enumerate(texts):
        counts = np.bincount(batches[:, owners[0, :, 0] == i, 1:].reshape(-1) - 300 * i, minlength=len(text))
        assert counts.max() - counts.min() <= 1
    with pytest.raises(DatasetError, match=r"/d2 has a share of 0.12, less than one of the 4 rows .* Raise its weight"):
        stream_iterator(mixture, LENGTH, 4, 0)


def test_too_small_a_split(make_dataset, rng):
    dataset = TokenDataset(make_dataset([rng.integers(0, 257, 4 * LENGTH + 1)]))
    next(stream_iterator(dataset, LENGTH, 4, 0))
    with pytest.raises(DatasetError, match=r"21 tokens, which make 4 windows of 5 .* than the 5 rows of a batch\. Use"):
        stream_iterator(dataset, LENGTH, 5, 0)
    with pytest.raises(ValueError, match="seed"):
        stream_iterator(dataset, LENGTH, 4, -1)


@pytest.mark.parametrize("max_tokens", [None, 101, 1])
def test_evaluation_in_streams_predicts_each_token_once(dataset, stream, max_tokens):
    batches = evaluation_batches(dataset, LENGTH, 7, max_tokens=max_tokens, in_streams=True)
    tokens = np.stack([batch["tokens"] for batch in batches])
    mask = np.stack([batch["mask"] for batch in batches])
    assert len(batches) == len(tokens) and mask.sum() == batches.num_tokens
    whole = np.concatenate([[299], stream[:max_tokens]])
    found = []
    for row in range(7):
        inputs, targets = (x[mask[:, row]] for x in (tokens[:, row, :-1], tokens[:, row, 1:]))
        np.testing.assert_array_equal(inputs[1:], targets[:-1])  # the row's windows are one text
        found += list(zip(inputs.tolist(), targets.tolist(), strict=True))
    assert found == list(itertools.pairwise(whole.tolist()))
