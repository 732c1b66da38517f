"""Evaluate a run's newest parameters on a whole split, document by document."""

import dataclasses
import math
import sys

from jax.sharding import Mesh

from heinsen.data.documents import DocumentBatches, Documents, find_documents
from heinsen.data.loader import Batch, evaluation_batches
from heinsen.data.tokenizer import Tokenizer, get_tokenizer
from heinsen.errors import HeinsenError
from heinsen.evaluation.bootstrap import Estimate, Mixture, estimate, estimate_sources
from heinsen.evaluation.by_document import (
    DocumentLosses,
    make_stream_step,
    make_window_step,
    measure_streaming,
    measure_windows,
)
from heinsen.evaluation.positions import ByPosition, compare_positions
from heinsen.models import Params, check_room, init_model_state
from heinsen.parallel import n_batch_parts
from heinsen.progress import track
from heinsen.training.mirror import local_run
from heinsen.training.run import TrainConfig, open_split
from heinsen.weights import load_params, mesh_for_reading


class EvaluationError(HeinsenError, ValueError):
    """An evaluation that does not fit the model, or that has no meaningful result."""


@dataclasses.dataclass(frozen=True)
class SplitResult:
    """Losses over a split.

    Attributes:
      workdir, step: the run or export, and the training step of its parameters.
      streaming: whether documents were read whole, rather than windows of the training length.
      n_bytes: size of the split's text.
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
    dataset_losses: list[tuple[str, float, float]]
    total: Estimate
    sources: dict[str | None, Estimate] | None
    positions: ByPosition | None


def evaluate_split(config: TrainConfig, workdir: str, split: str, streaming: bool, with_positions: bool) -> SplitResult:
    """Evaluate the newest parameters in `workdir` on every token of a split of the config's data.

    Args:
      streaming: read each document from its start and carry the state on, instead of windows of the training length.
      with_positions: measure in both ways, and compare them by the position in the document.

    Raises:
      DatasetError, RunError, CheckpointError, MeshError: the data or the parameters cannot be used.
      EvaluationError: the way of reading does not fit the model, or the loss is not finite.
    """
    datasets = open_split(config, split)
    if not config.model.causal and (streaming or with_positions):
        raise EvaluationError("a masked model reads whole windows: it has no state for --streaming or --by_position")
    mesh = mesh_for_reading(config)
    step, params = load_params(local_run(workdir), config.model, mesh)
    tokenizer = _find_tokenizer(datasets[0][0].tokenizer_name)
    mixture = [(share, find_documents(dataset, tokenizer)) for dataset, share in datasets]
    in_windows: Mixture = []
    in_streams: Mixture = []
    if with_positions or not streaming:
        in_windows = [(share, _measure_windows(config, params, mesh, documents)) for share, documents in mixture]
    if with_positions or streaming:
        in_streams = [(share, _measure_streaming(config, params, mesh, documents)) for share, documents in mixture]
    measured = in_streams if streaming else in_windows
    total = estimate(measured)
    if not math.isfinite(total.loss):
        raise EvaluationError(f"the loss is {total.loss}: the parameters of {workdir}, step {step}, are useless")
    return SplitResult(
        workdir=workdir,
        step=step,
        config=config,
        split=split,
        streaming=streaming,
        n_bytes=sum(dataset.num_bytes for dataset, _ in datasets),
        dataset_losses=[(x.documents.dataset.path.parent.name, share, x.loss) for share, x in measured],
        total=total,
        sources=estimate_sources(measured),
        positions=compare_positions(in_windows, in_streams) if with_positions else None,
    )


def _find_tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer, or None if its files are missing: it is only needed for the bytes of each document."""
    try:
        return get_tokenizer(name)
    except RuntimeError as error:
        print(f"bytes of documents are estimated in proportion to their tokens: {error}", file=sys.stderr)
        return None


def _measure_windows(config: TrainConfig, params: Params, mesh: Mesh, documents: Documents) -> DocumentLosses:
    losses = _no_losses(config, documents)
    batches = evaluation_batches(documents.dataset, config.sequence_length, _batch_size(config, mesh))
    tracked = track(batches, f"{documents.dataset.path}, windows", batches.num_tokens, _count_targets, "tokens")
    measure_windows(make_window_step(config.model, mesh), params, tracked, mesh, losses)
    return losses


def _measure_streaming(config: TrainConfig, params: Params, mesh: Mesh, documents: Documents) -> DocumentLosses:
    losses = _no_losses(config, documents)
    lanes = min(_batch_size(config, mesh), _round_up(len(documents), n_batch_parts(mesh)))
    multiple = mesh.shape["sequence"] * mesh.shape["tensor"]
    batches = DocumentBatches(documents, config.sequence_length, lanes, multiple)
    longest = int(documents.lengths.max())  # caches, where an attention kind has them, hold it
    check_room(config.model, longest)
    state = init_model_state(config.model, lanes, longest)
    tracked = track(batches, f"{documents.dataset.path}, streaming", batches.num_tokens, _count_targets, "tokens")
    measure_streaming(make_stream_step(config.model, mesh), params, tracked, mesh, losses, state)
    return losses


def _no_losses(config: TrainConfig, documents: Documents) -> DocumentLosses:
    return DocumentLosses(documents, config.sequence_length, config.model.document_token is not None)


def _batch_size(config: TrainConfig, mesh: Mesh) -> int:
    """Return as many sequences as training holds at a time, rounded up to a multiple of the devices."""
    return _round_up(config.sequences_per_pass, n_batch_parts(mesh))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _count_targets(batch: Batch) -> int:
    return int(batch["mask"].sum())
