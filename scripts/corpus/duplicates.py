"""Documents that repeat earlier ones for the most part: other editions, licenses with another name."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Integer, UInt64

N = 32  # bytes of an n-gram, a power of two
SHARE = 0.5  # of its n-grams that a document may have in common with earlier ones
_SAMPLED = 64  # one n-gram in so many, a power of two; equal ones are sampled alike
_FACTOR = 0x9E3779B97F4A7C15  # odd, 2^64 over the golden ratio


def repeats(hashes: list[int], seen: Iterable[set[int]]) -> bool:
    """Return whether a document with this `sample` repeats earlier ones, whose samples are in some sets."""
    return sum(any(each in own for own in seen) for each in hashes) > SHARE * len(hashes)


def sample(content: bytes) -> list[int]:
    """Return the hashes of some of the n-grams, which depend on these alone; those of equal n-grams are equal."""
    hashes = hash_n_grams(np.frombuffer(content, np.uint8))
    return hashes[hashes < np.uint64(2**64 // _SAMPLED)].tolist()


def hash_n_grams(tokens: Integer[np.ndarray, "*batch T"], n: int = N) -> UInt64[np.ndarray, "*batch M"]:
    """Return a hash modulo 2^64 of every n-gram, n a power of two: of 1 token, then of 2 from two of them, ..."""
    hashes, width = tokens.astype(np.uint64) + np.uint64(1), 1
    while width < n:
        first, second = hashes[..., :-width], hashes[..., width:]
        hashes = (first * np.uint64(_FACTOR) ^ (second >> np.uint64(7))) + second
        width *= 2
    return hashes * np.uint64(_FACTOR)
