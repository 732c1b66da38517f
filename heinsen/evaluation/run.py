"""Evaluate a run's newest parameters on a whole split, document by document."""

import dataclasses
import math
import sys
from collections.abc import Callable

from jax.sharding import Mesh

from heinsen.data.documents import DocumentBatches, Documents, find_documents
from heinsen.data.loader import Batch, evaluation_batches
from heinsen.data.tokenizer import Tokenizer, get_tokenizer
from heinsen.errors import HeinsenError
from heinsen.evaluation import by_document
from heinsen.evaluation.by_document import ByPosition, Estimate, Parts, Sums
from heinsen.models import Params, check_room, init_model_state
from heinsen.parallel import n_batch_parts
from heinsen.progress import track
from heinsen.training.config import TrainConfig
from heinsen.training.data import open_split
from heinsen.training.folder import load_tokenizer_name
from heinsen.training.mirror import local_run
from heinsen.weights import load_params, mesh_for_reading


class EvaluationError(HeinsenError, ValueError):
    """An evaluation that does not fit the model, or that has no meaningful result."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to predict every token of a split once.

    Attributes:
      name: in the results.
      describe: (config) -> what the model reads.
      measure: (config, params, mesh, documents) -> the sums of losses over one dataset's documents.
      needs_causal: whether the model must carry a state from token to token.
    """

    name: str
    describe: Callable[[TrainConfig], str]
    measure: Callable[[TrainConfig, Params, Mesh, Documents], Sums]
    needs_causal: bool


@dataclasses.dataclass(frozen=True)
class SplitResult:
    """Losses over a split.

    Attributes:
      workdir, step: the run or export, and the training step of its parameters.
      split, description: what was read, and how.
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
    mode: Mode
    n_bytes: int
    dataset_losses: list[tuple[str, float, float]]
    total: Estimate
    sources: dict[str | None, Estimate] | None
    positions: ByPosition | None


def evaluate_split(config: TrainConfig, workdir: str, split: str, mode: Mode, with_positions: bool) -> SplitResult:
    """Evaluate the newest parameters in `workdir` on every token of a split of the config's data.

    Args:
      with_positions: measure in windows and streaming, and compare them by the position in the document.

    Raises:
      DatasetError, RunError, CheckpointError, MeshError: the data or the parameters cannot be used.
      EvaluationError: the mode does not fit the model, or the loss is not finite.
    """
    folder = local_run(workdir)
    datasets = open_split(config, split, load_tokenizer_name(folder))
    modes = [WINDOWS, STREAMING] if with_positions else [mode]
    if not config.model.causal and any(mode.needs_causal for mode in modes):
        raise EvaluationError("a masked model reads whole windows: it has no state for --streaming or --by_position")
    mesh = mesh_for_reading(config)
    step, params = load_params(folder, config.model, mesh)
    tokenizer = _find_tokenizer(datasets[0][0].tokenizer_name)
    documents = [find_documents(dataset, tokenizer) for dataset, _ in datasets]
    shares = [share for _, share in datasets]
    measured = {
        each.name: list(zip(shares, [each.measure(config, params, mesh, own) for own in documents], strict=True))
        for each in modes
    }
    parts: Parts = measured[mode.name]
    total = by_document.estimate(parts)
    if not math.isfinite(total.loss):
        raise EvaluationError(f"the loss is {total.loss}: the parameters of {workdir}, step {step}, are useless")
    return SplitResult(
        workdir,
        step,
        config,
        split,
        mode,
        sum(dataset.num_bytes for dataset, _ in datasets),
        [(sums.documents.dataset.path.parent.name, share, sums.loss) for share, sums in parts],
        total,
        by_document.estimate_sources(parts),
        by_document.by_position(measured[WINDOWS.name], measured[STREAMING.name]) if with_positions else None,
    )


def _find_tokenizer(name: str) -> Tokenizer | None:
    """Return the tokenizer, or None if its files are missing: it is only needed for the bytes of each document."""
    try:
        return get_tokenizer(name)
    except RuntimeError as error:
        print(f"bytes of documents are estimated in proportion to their tokens: {error}", file=sys.stderr)
        return None


def _measure_windows(config: TrainConfig, params: Params, mesh: Mesh, documents: Documents) -> Sums:
    sums = _empty_sums(config, documents)
    batches = evaluation_batches(documents.dataset, config.sequence_length, _batch_size(config, mesh))
    tracked = track(batches, f"{documents.dataset.path}, windows", batches.num_tokens, _count_targets, "tokens")
    by_document.measure_windows(by_document.make_window_step(config.model, mesh), params, tracked, mesh, sums)
    return sums


def _measure_streaming(config: TrainConfig, params: Params, mesh: Mesh, documents: Documents) -> Sums:
    sums = _empty_sums(config, documents)
    lanes = min(_batch_size(config, mesh), _round_up(len(documents), n_batch_parts(mesh)))
    multiple = mesh.shape["sequence"] * mesh.shape["tensor"]
    batches = DocumentBatches(documents, config.sequence_length, lanes, multiple)
    # Caches, where an attention kind has them, hold the longest document.
    longest = int(documents.lengths.max())
    check_room(config.model, longest)
    state = init_model_state(config.model, lanes, longest)
    tracked = track(batches, f"{documents.dataset.path}, streaming", batches.num_tokens, _count_targets, "tokens")
    step = by_document.make_stream_step(config.model, mesh)
    by_document.measure_streaming(step, params, tracked, mesh, sums, state)
    return sums


def _empty_sums(config: TrainConfig, documents: Documents) -> Sums:
    return Sums(documents, config.sequence_length, config.model.document_token is not None)


def _batch_size(config: TrainConfig, mesh: Mesh) -> int:
    """Return as many sequences as training holds at a time, rounded up to a multiple of the devices."""
    return _round_up(config.sequences_per_pass, n_batch_parts(mesh))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _count_targets(batch: Batch) -> int:
    return int(batch["mask"].sum())


WINDOWS = Mode(
    "windows", lambda config: f"windows of {config.sequence_length} tokens", _measure_windows, needs_causal=False
)
STREAMING = Mode("streaming", lambda config: "streaming, documents whole", _measure_streaming, needs_causal=True)
