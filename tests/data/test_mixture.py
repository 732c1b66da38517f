"""Weights are parsed with errors that name the problem, and respected exactly for any number of windows."""

import math
from fractions import Fraction

import numpy as np
import pytest

from heinsen.data.dataset import DatasetError, TokenDataset
from heinsen.data.mixture import bytes_per_token, check_mixture, deal, open_mixture, parse_mixture, whole_weights


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("data/pile", [("data/pile", 1)]),
        ("data/pile/:0.2", [("data/pile", 1)]),
        ("data/pile:0.7,data/code:0.3", [("data/pile", 0.7), ("data/code", 0.3)]),
        (" a:1 , /b/c:2,d:1e0", [("a", 0.25), ("/b/c", 0.5), ("d", 0.25)]),
        ("a:1e308,b:1e308", [("a", 0.5), ("b", 0.5)]),
        ("a:1,~/b:3", [("a", 0.25), ("/home/me/b", 0.75)]),
    ],
)
def test_parse(path, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    parsed = parse_mixture(path)
    assert [folder for folder, _ in parsed] == [folder for folder, _ in expected]
    assert [weight for _, weight in parsed] == pytest.approx([weight for _, weight in expected], rel=1e-15)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("data/pile,data/code:0.3", "'data/pile' has no weight"),
        ("data/pile:0.7,data/code", "'data/code' has no weight"),
        ("data/pile:0.7,s3://bucket/code:0.3", "an address is not read"),
        ("a:1,:2", "':2' has no folder"),
        ("", "empty entry"),
        ("a:1,", "empty entry"),
        ("a:,b:1", "weight '' of 'a' is not a number"),
        ("a:much,b:1", "weight 'much' of 'a' is not a number"),
        ("/mnt/x:y", "weight 'y' of '/mnt/x' is not a number"),
        ("a:0,b:1", "weight 0 of 'a' is not positive"),
        ("a:1,b:-2", "weight -2 of 'b' is not positive"),
        ("a:nan,b:1", "weight nan of 'a' is not positive"),
        ("a:inf,b:1", "weight inf of 'a' is not positive"),
        ("data/a:1,b:2,data/../data/a/:3", "'data/a' is named twice"),
    ],
)
def test_parse_names_what_is_wrong(path, message):
    with pytest.raises(DatasetError, match="data path") as error:
        parse_mixture(path)
    assert repr(path) in str(error.value) and message in str(error.value)
    assert "Expected one folder" in str(error.value)


def test_each_dataset_gets_its_share_of_any_number_of_windows(rng):
    for count in (1, 2, 3, 8):
        weights = whole_weights(rng.uniform(0.01, 1, count) ** 2)
        n = 5000
        dealt = [deal(index, weights) for index in range(n)]
        shares = np.array(weights, float) / sum(weights)
        given = np.cumsum(np.eye(count)[[which for which, _ in dealt]], axis=0)
        assert np.abs(given - shares * np.arange(1, n + 1)[:, None]).max() <= count / 2 + 1e-6
        for which in range(count):  # each dataset's own windows come in order
            positions = [position for dataset, position in dealt if dataset == which]
            assert positions == list(range(len(positions)))


def test_shares_are_exact_after_a_trillion_windows(rng):
    """Weights that are rounded, as to hundredths of the smallest, are off by hundreds of millions there."""
    values = [0.7, 0.3, *rng.uniform(0.01, 1, 3).tolist()]
    weights = whole_weights(values)
    assert [Fraction(w, sum(weights)) for w in weights] == [Fraction(v) / sum(map(Fraction, values)) for v in values]
    start, seen = int(rng.integers(10**12, 2 * 10**12)), {}
    for index in range(start, start + 5000):
        which, position = deal(index, weights)
        seen[which] = position
        assert abs(position - Fraction(weights[which], sum(weights)) * index) <= len(weights) / 2 + 1
    assert len(seen) == len(values)


def test_datasets_with_different_tokenizers(make_dataset, rng):
    tokens = rng.integers(0, 200, 50)
    # A tokenizer of another version: the sizes of those that this one knows are checked when a dataset is opened.
    foreign = {"tokenizer": "foreign", "vocab_size": 257, "eot_id": 256}
    plain = TokenDataset(make_dataset([tokens], name="plain", **foreign))
    check_mixture([(plain, 1), (TokenDataset(make_dataset([tokens], name="same", **foreign)), 2.5)])
    for change in ({"tokenizer": "bytes"}, {"vocab_size": 300}, {"eot_id": 7}):
        name = next(iter(change))
        other = TokenDataset(make_dataset([tokens], name=name, **foreign | change))
        with pytest.raises(
            DatasetError, match=rf"{plain.path} and {other.path} cannot be mixed: {name}.* is .*same tok"
        ):
            check_mixture([(plain, 0.5), (other, 0.5)])
    for weight in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight of .*plain must be positive"):
            check_mixture([(plain, weight)])
    with pytest.raises(ValueError, match="at least one"):
        check_mixture([])


def test_open_mixture_and_its_bytes_per_token(make_dataset, rng):
    sizes = {"a": (300, 1200), "b": (500, 800)}  # tokens, bytes
    for name, (n_tokens, n_bytes) in sizes.items():
        make_dataset([rng.integers(0, 257, n_tokens)], name=f"{name}/train", num_bytes=n_bytes)
        root = make_dataset([[1, 2]], name=f"{name}/validation").parent.parent
    mixture = open_mixture(f"{root}/a:3,{root}/b:1", "train")
    assert [(dataset.path, dataset.n_tokens) for dataset, _ in mixture] == [
        (root / name / "train", sizes[name][0]) for name in sizes
    ]
    # Of 4 tokens, 3 are of `a`, with 4 bytes each, and one of `b`, with 1.6.
    assert bytes_per_token(mixture) == pytest.approx((3 * 4 + 1.6) / 4, rel=1e-12)
    assert bytes_per_token([(dataset, 8 * weight) for dataset, weight in mixture]) == bytes_per_token(mixture)
    with pytest.raises(DatasetError, match=f"no token dataset at {root}/c/train"):
        open_mixture(f"{root}/a:3,{root}/c:1", "train")
