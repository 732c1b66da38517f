"""Several token datasets in given proportions: `data/pile:0.7,data/code:0.3`.

Windows are dealt by a fixed rule rather than at random: among the first n windows, for any n, each of D datasets
supplies its share to within D / 2 windows. Which dataset supplies window n, and which of its own windows that is,
depends only on n and the weights, so there is no state to save or replay.

(Grain's `MapDataset.mix` rounds the weights to whole hundredths of the smallest one: 0.7 and 0.3 become 233 to 100,
which is 600 windows off after two million.)
"""

import math
import os.path
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

from heinsen.data.dataset import TokenDataset
from heinsen.data.shards import DatasetError

Mixture = Sequence[tuple[TokenDataset, float | int]]


def parse_mixture(path: str) -> list[tuple[str, float]]:
    """Return the folders and addresses that the config's `data.path` names, with weights that sum to 1.

    `path` is one folder, `data/pile`, or several with positive weights, `data/pile:7,data/code:3`. `~` is the home
    folder. Raises DatasetError.
    """
    entries = [entry.strip() for entry in path.split(",")]
    if "" in entries:
        raise _bad_mixture(path, "there is an empty entry")
    if "://" in path:
        raise _bad_mixture(path, "an address is not read; copy the dataset to a folder (docs/scaling.md)")
    if len(entries) == 1 and ":" not in path:
        entries = [f"{entries[0]}:1"]
    weights: dict[str, float] = {}
    for entry in entries:
        folder, colon, text = entry.rpartition(":")
        if not colon or not folder:
            raise _bad_mixture(path, f"'{entry}' has no {'folder' if colon else 'weight'}")
        try:
            weight = float(text)
        except ValueError as error:
            raise _bad_mixture(path, f"the weight {text!r} of '{folder}' is not a number") from error
        if not (math.isfinite(weight) and weight > 0):
            raise _bad_mixture(path, f"the weight {text} of '{folder}' is not positive and finite")
        folder = os.path.normpath(os.path.expanduser(folder))
        if folder in weights:
            raise _bad_mixture(path, f"'{folder}' is named twice")
        weights[folder] = weight
    total = sum(map(Fraction, weights.values()))
    return [(folder, float(Fraction(weight) / total)) for folder, weight in weights.items()]


def _bad_mixture(path: str, what: str) -> DatasetError:
    return DatasetError(
        f"data path '{path}': {what}. Expected one folder, 'data/pile', or several with weights, "
        "'data/pile:0.7,data/code:0.3' (for a folder with ',' or ':' in its name, use a symbolic link)"
    )


def open_mixture(path: str, split: str) -> list[tuple[TokenDataset, float]]:
    """Open one split of the datasets that `path` names (see `parse_mixture`), with weights.

    Raises DatasetError.
    """
    mixture = [(TokenDataset(Path(folder) / split), weight) for folder, weight in parse_mixture(path)]
    check_mixture(mixture)
    return mixture


def check_mixture(mixture: Mixture) -> None:
    """Raise DatasetError if the datasets have different tokenizers, ValueError if there are none or a weight is bad."""
    if not mixture:
        raise ValueError("a mixture must hold at least one dataset")
    first = mixture[0][0]
    for dataset, weight in mixture:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight of {dataset.path} must be positive and finite, got {weight}")
        for name in ("tokenizer_name", "vocab_size", "eot_id"):
            if (value := getattr(dataset, name)) != (other := getattr(first, name)):
                raise DatasetError(
                    f"{first.path} and {dataset.path} cannot be mixed: {name} is {other!r} in the first and {value!r} "
                    "in the second. Prepare both with the same tokenizer."
                )


def bytes_per_token(mixture: Mixture) -> float:
    """Return the average number of UTF-8 bytes of text per token of the mixture."""
    total = sum(weight for _, weight in mixture)
    return sum(weight / total * dataset.bytes_per_token for dataset, weight in mixture)


def whole_weights(weights: Iterable[float | int]) -> list[int]:
    """Return integers in exactly the proportions of the weights."""
    fractions = [Fraction(weight) for weight in weights]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * denominator) for fraction in fractions]


def deal(index: int, weights: Sequence[int]) -> tuple[int, int]:
    """Return which dataset supplies window `index` of a mixture, and how many windows it supplied before.

    Among any number of windows, the first dataset gets its share rounded to the nearest integer; of the remaining
    windows, the second gets its share of the remaining weight; and so on. These numbers never decrease as windows are
    added, so each window belongs to exactly one dataset. Each rounding is off by at most half a window.
    """
    rest = sum(weights)
    for which, weight in enumerate(weights[:-1]):
        supplied = (2 * index * weight + rest) // (2 * rest)
        if (2 * (index + 1) * weight + rest) // (2 * rest) > supplied:
            return which, supplied
        index -= supplied
        rest -= weight
    return len(weights) - 1, index
