"""Documents are found at their positions; batches of lanes read each from its start, every token once."""

import json

import numpy as np
import pytest

from heinsen.data import documents as documents_module
from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.documents import DocumentBatches, find_documents
from heinsen.data.tokenizer import get_tokenizer
from heinsen.files import seal

EOT = 256


@pytest.fixture
def open_dataset(make_dataset):
    return lambda shards, **changes: TokenDataset(make_dataset(shards, **changes))


def _draw(rng, lengths, ends=True):
    """Return tokens of documents of the given lengths, each with its end of text; without `ends` the last lacks it."""
    texts = [np.append(rng.integers(0, EOT, n - 1), EOT) for n in lengths]
    stream = np.concatenate(texts)
    return stream if ends else stream[:-1]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("block", [7, 10**6])
def test_documents_lie_between_ends_of_text(open_dataset, rng, monkeypatch, ends, block):
    monkeypatch.setattr(documents_module, "_BLOCK", block)
    lengths = [1, 3, 1, *rng.integers(1, 30, 12), 2]  # one end of text alone is an empty document
    stream = _draw(rng, lengths, ends)
    found = find_documents(open_dataset(np.split(stream, [20])), get_tokenizer("bytes"))
    lengths[-1] -= not ends
    np.testing.assert_array_equal(found.lengths, lengths)
    np.testing.assert_array_equal(found.starts, np.cumsum([0, *lengths]))
    texts = [stream[a:b] for a, b in zip(found.starts[:-1], found.starts[1:], strict=True)]
    np.testing.assert_array_equal(found.n_bytes, [np.sum(text != EOT) for text in texts])
    assert found.sources is None and found.names == [None] and len(found) == len(lengths)


def test_bytes_are_those_of_the_text(open_dataset):
    tokenizer = get_tokenizer("gpt2")
    texts = ["Hello world, 漢字 🙂🙂", "", "  é\r\n" * 5, "<|endoftext|>"]
    stream = np.concatenate([np.append(tokenizer.encode(text), tokenizer.eot_id) for text in texts])
    sizes = [len(text.encode()) for text in texts]
    changes = dict(tokenizer="gpt2", vocab_size=50257, eot_id=tokenizer.eot_id, num_bytes=sum(sizes))
    dataset = open_dataset([stream], **changes)
    np.testing.assert_array_equal(find_documents(dataset, tokenizer).n_bytes, sizes)
    in_proportion = find_documents(dataset, None).n_bytes
    assert in_proportion.sum() == pytest.approx(sum(sizes), rel=1e-12)
    np.testing.assert_allclose(
        in_proportion / in_proportion.sum(), np.array([len(tokenizer.encode(t)) + 1 for t in texts]) / stream.size
    )


def test_other_bytes_than_the_metadata_says_are_an_error(open_dataset, rng):
    dataset = open_dataset([_draw(rng, [5, 6])], num_bytes=10)
    with pytest.raises(DatasetError, match="stand for 9 bytes, but metadata.json says 10"):
        find_documents(dataset, get_tokenizer("bytes"))


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize(("window", "multiple"), [(64, 1), (48, 16), (20, 1)])
def test_every_token_is_predicted_once_in_its_documents_lane(open_dataset, rng, lanes, window, multiple):
    lengths = [1, 2, window, window + 1, *rng.integers(1, 5 * window, 14)]
    stream = _draw(rng, rng.permutation(lengths), ends=bool(rng.integers(2)))
    documents = find_documents(open_dataset(np.split(stream, [50])), get_tokenizer("bytes"))
    batches = DocumentBatches(documents, window, lanes, multiple)
    times, ends = np.zeros(len(stream), int), np.zeros(lanes, int)
    with_eot = np.append(EOT, stream)
    for batch in batches:
        size = batch["mask"].shape[1]
        assert size in batches.window_sizes and size <= window and size % multiple == 0
        assert batch["tokens"].shape == (lanes, size + 1) and batch["tokens"].dtype == np.int32
        for lane in range(lanes):
            count, first = int(batch["mask"][lane].sum()), int(batch["first"][lane])
            assert batch["mask"][lane, :count].all()
            if not count:
                assert not batch["begins"][lane]
                continue
            assert batch["begins"][lane] == (first in documents.starts) and (
                batch["begins"][lane] or first == ends[lane]
            )
            np.testing.assert_array_equal(batch["tokens"][lane, : count + 1], with_eot[first : first + count + 1])
            times[first : first + count] += 1
            ends[lane] = first + count
            document = np.searchsorted(documents.starts, first, side="right") - 1
            assert ends[lane] <= documents.starts[document + 1] and (count == size or ends[lane] in documents.starts)
    assert (times == 1).all() and batches.n_tokens == len(stream)


def test_lanes_stay_busy(open_dataset, rng):
    """One long document among many: lanes are empty only at the very end, and almost no token is padding."""
    lengths = rng.permutation([64 * 40, *[64 * 4] * 50, *rng.integers(1, 64, 2000)])
    documents = find_documents(open_dataset([_draw(rng, lengths)]), get_tokenizer("bytes"))
    masks = [batch["mask"] for batch in DocumentBatches(documents, 64, 8)]
    assert all(mask.any(axis=1).all() for mask in masks[:-1])
    assert sum(mask.size for mask in masks) < 1.5 * documents.lengths.sum()


# ---- sources ---------------------------------------------------------------------------------


@pytest.fixture
def with_sources(make_dataset, rng):
    """A folder of three shards; the second has no sources."""
    shards = [_draw(rng, rng.integers(1, 9, n)) for n in (4, 3, 2)]
    return make_dataset(shards, sources=[["a", None, "a", "b"], None, ["b", "c"]])


def test_sources_of_all_shards_have_one_list_of_names(with_sources):
    dataset = TokenDataset(with_sources)
    names, sources = dataset.read_sources()
    assert dataset.has_sources
    assert [names[i] for i in sources] == ["a", None, "a", "b", None, None, None, "b", "c"]
    assert sorted(names, key=str) == [None, "a", "b", "c"]
    documents = find_documents(dataset, get_tokenizer("bytes"))
    np.testing.assert_array_equal(documents.sources, sources)
    assert documents.names == names


def test_a_source_without_a_name_is_damage(with_sources):
    path = with_sources / "shard-00000.sources.npy"
    np.save(path, np.array([0, 1, 0, 3], np.uint16))
    with pytest.raises(DatasetError, match=f"{path} holds index 3 of a source, but there are 3 names"):
        TokenDataset(with_sources).read_sources()


def test_sources_of_another_number_of_documents_are_an_error(with_sources):
    metadata = json.loads((with_sources / "metadata.json").read_text())
    metadata["shards"][1]["num_documents"] += 1
    metadata["num_documents"] += 1
    (with_sources / "metadata.json").write_text(json.dumps(seal(metadata)))
    with pytest.raises(DatasetError, match="has 9 documents but the sources of 10"):
        find_documents(TokenDataset(with_sources), get_tokenizer("bytes"))
