"""Evaluate a run's newest parameters on a whole split, document by document."""

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

from heinsen.data.dataset import TokenDataset
from heinsen.data.documents import find_documents
from heinsen.data.tokenizer import Tokenizer, get_tokenizer
from heinsen.errors import InputError
from heinsen.evaluation.bootstrap import Estimate, MixtureLosses, estimate, estimate_sources
from heinsen.evaluation.document_losses import DocumentLosses, measure_streaming, measure_windows, round_up
from heinsen.evaluation.positions import PositionLosses, compare_positions
from heinsen.parallel import n_batch_parts
from heinsen.training.config import TrainConfig
from heinsen.training.data import open_split
from heinsen.training.folder import load_tokenizer_name
from heinsen.weights import load_params, mesh_for_reading


@dataclasses.dataclass(frozen=True)
class SplitResult:
    """Losses over a split.

    Attributes:
      workdir, step: the run or export, and the training step of its parameters.
      streaming: whether documents were read whole, rather than windows of the training length.
      n_bytes: size of the split's text.
      n_lost_bytes: of these, what the tokenizer cannot spell.
      dataset_losses: (name, share, nats per token) of each dataset of a mixture.
      total: over all documents.
      sources: over the documents of each source; None if no document names its source.
      positions: losses by position, in windows and streaming, if they were asked for.
    """

    workdir: str
    step: int
    config: TrainConfig
    split: str
    streaming: bool
    n_bytes: int
    n_lost_bytes: int
    dataset_losses: list[tuple[str, float, float]]
    total: Estimate
    sources: dict[str | None, Estimate] | None
    positions: PositionLosses | None


def evaluate_split(config: TrainConfig, workdir: str, split: str, streaming: bool, with_positions: bool) -> SplitResult:
    """Evaluate the newest parameters in `workdir` on every token of a split of the config's data.

    Args:
      streaming: read each document from its start and carry the state on, instead of windows of the training length.
      with_positions: measure in both ways, and compare them by the position in the document.

    Raises:
      DatasetError, RunError, CheckpointError, MeshError: the data or the parameters cannot be used.
      InputError: the way of reading does not fit the model, or the loss is not finite.
    """
    folder = Path(workdir)
    datasets = open_split(config, split, load_tokenizer_name(folder))
    if not config.model.causal and (streaming or with_positions):
        raise InputError("a masked model reads whole windows: it has no state for --streaming or --by_position")
    mesh = mesh_for_reading(config)
    step, params = load_params(folder, config.model, mesh)
    tokenizer = _find_tokenizer(datasets[0][0])
    documents = [(find_documents(dataset, tokenizer), share) for dataset, share in datasets]
    # As many sequences as training holds at a time, rounded up to a multiple of the devices.
    batch_size = round_up(config.sequences_per_microbatch, n_batch_parts(mesh))
    options = dict(window=config.sequence_length, batch_size=batch_size)

    def measure(measure_documents: Callable[..., DocumentLosses]) -> MixtureLosses:
        return [(measure_documents(config.model, params, mesh, each, **options), share) for each, share in documents]

    in_windows = measure(measure_windows) if with_positions or not streaming else []
    in_streams = measure(measure_streaming) if with_positions or streaming else []
    measured = in_streams if streaming else in_windows
    total = estimate(measured)
    if not math.isfinite(total.loss):
        raise InputError(f"the loss is {total.loss}: the parameters of {workdir}, step {step}, are useless")
    return SplitResult(
        workdir=workdir,
        step=step,
        config=config,
        split=split,
        streaming=streaming,
        n_bytes=sum(dataset.n_bytes for dataset, _ in datasets),
        n_lost_bytes=sum(dataset.n_lost_bytes for dataset, _ in datasets),
        dataset_losses=[(x.documents.dataset.path.parent.name, share, x.loss) for x, share in measured],
        total=total,
        sources=estimate_sources(measured),
        positions=compare_positions(in_windows, in_streams) if with_positions else None,
    )


def _find_tokenizer(dataset: TokenDataset) -> Tokenizer | None:
    """Return its tokenizer, or None if its files are missing: it is only needed for the bytes of each document."""
    try:
        return get_tokenizer(dataset.tokenizer_name, dataset.path)
    except RuntimeError as error:
        print(f"bytes of documents are estimated in proportion to their tokens: {error}", file=sys.stderr)
        return None
