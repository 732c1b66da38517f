"""The loss over a split and over each of its sources, with intervals of a bootstrap over documents.

Intervals are percentiles over `RESAMPLES` resamples of the documents, with replacement. In a mixture, each dataset's
documents are resampled separately.

Axes: D documents of all datasets, G groups of documents, R resamples.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from heinsen.evaluation.document_losses import DocumentLosses
from heinsen.evaluation.loss import perplexity

RESAMPLES = 1000
CONFIDENCE = 0.95

Interval = tuple[float, float]
MixtureLosses = Sequence[tuple[DocumentLosses, float]]  # each dataset's losses, and its share of the tokens


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The loss over some documents, with intervals, which are None for fewer than 2 documents.

    Attributes:
      loss: nats per token.
      bits_per_byte: bits per byte of UTF-8 text; None where there is no text.
    """

    documents: int
    tokens: int
    loss: float
    loss_interval: Interval | None
    perplexity: float
    bits_per_byte: float | None
    bits_per_byte_interval: Interval | None


def estimate(mixture: MixtureLosses) -> Estimate:
    """Return the loss over all documents of a mixture."""
    n_documents = sum(len(losses.documents) for losses, _ in mixture)
    return _estimate_groups(mixture, np.zeros(n_documents, np.int64), 1)[0]


def estimate_sources(mixture: MixtureLosses) -> dict[str | None, Estimate] | None:
    """Return the loss over the documents of each source, largest first; None if no document names its source."""
    if not any(losses.documents.dataset.has_sources for losses, _ in mixture):
        return None
    group_of: dict[str | None, int] = {}  # documents without a source are the group None
    groups = []
    for losses, _ in mixture:
        documents = losses.documents
        group_of_name = np.array([group_of.setdefault(name, len(group_of)) for name in documents.names])
        groups.append(group_of_name[np.zeros(len(documents), int) if documents.sources is None else documents.sources])
    estimates = zip(group_of, _estimate_groups(mixture, np.concatenate(groups), len(group_of)), strict=True)
    found = [(name, estimate) for name, estimate in estimates if estimate.documents]
    return dict(sorted(found, key=lambda item: -item[1].tokens))


def _estimate_groups(mixture: MixtureLosses, groups: Int[np.ndarray, " D"], n_groups: int) -> list[Estimate]:
    """Return the loss over each group of documents; `groups` has the group of each document."""
    nats = weigh(mixture, lambda losses: losses.nats.sum(1))
    tokens = weigh(mixture, lambda losses: losses.documents.lengths)
    n_bytes = weigh(mixture, lambda losses: losses.documents.n_bytes)

    def sum_groups(counts: Int[np.ndarray, " D"]) -> Float[np.ndarray, "3 G"]:
        return np.array([np.bincount(groups, counts * x, n_groups) for x in (nats, tokens, n_bytes)])

    sums, resampled = sum_groups(np.ones_like(groups)), resample(mixture, sum_groups)
    losses, bits = ratio(sums[0], sums[1]), ratio(sums[0], sums[2] * math.log(2))
    resampled_losses = ratio(resampled[:, 0], resampled[:, 1])
    resampled_bits = ratio(resampled[:, 0], resampled[:, 2] * math.log(2))
    lengths = np.concatenate([losses.documents.lengths for losses, _ in mixture])
    estimates = []
    for group in range(n_groups):
        in_group, loss = groups == group, float(losses[group])
        n_documents, has_text = int(in_group.sum()), bool(sums[2, group] > 0)
        estimates.append(
            Estimate(
                documents=n_documents,
                tokens=int(lengths[in_group].sum()),
                loss=loss,
                loss_interval=interval(resampled_losses[:, group]) if n_documents > 1 else None,
                perplexity=perplexity(loss),
                bits_per_byte=float(bits[group]) if has_text else None,
                bits_per_byte_interval=interval(resampled_bits[:, group]) if n_documents > 1 and has_text else None,
            )
        )
    return estimates


# ---- the bootstrap -------------------------------------------------------------------------------


def resample(
    mixture: MixtureLosses, statistic: Callable[[Int[np.ndarray, " D"]], Float[np.ndarray, "..."]]
) -> Float[np.ndarray, "R ..."]:
    """Return the statistic of each resample, a function of how often each document is drawn.

    The draws are the same in every call.
    """
    rng = np.random.default_rng(0)
    sizes = [len(losses.documents) for losses, _ in mixture]

    def draw_counts() -> np.ndarray:
        return np.concatenate([np.bincount(rng.integers(0, n, n), minlength=n) for n in sizes])

    return np.array([statistic(draw_counts()) for _ in range(RESAMPLES)])


def interval(values: Float[np.ndarray, " R"]) -> Interval:
    """Return the interval of a resampled statistic, without resamples that are NaN."""
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return float(low), float(high)


def ratio(
    numerator: Float[np.ndarray, "*shape"], denominator: Float[np.ndarray, "*shape"]
) -> Float[np.ndarray, "*shape"]:
    """Divide; NaN where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.full(np.shape(numerator), np.nan), where=denominator > 0)


def weigh(mixture: MixtureLosses, sums: Callable[[DocumentLosses], np.ndarray]) -> Float[np.ndarray, "N ..."]:
    """Return the sums of all datasets, each [n, ...] by document or [1, ...] in all.

    They are weighted so that each dataset has its share of all datasets' tokens.
    """
    n_tokens = [losses.documents.lengths.sum() for losses, _ in mixture]
    weighted = zip(mixture, n_tokens, strict=True)
    return np.concatenate([share * sum(n_tokens) / n * sums(losses) for (losses, share), n in weighted])
