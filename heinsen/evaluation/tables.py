"""Results of evaluations as tables and as JSON."""

import dataclasses
from typing import Any

from heinsen.evaluation.bootstrap import Estimate, Interval
from heinsen.evaluation.loss import perplexity
from heinsen.evaluation.positions import Comparison, Context, PositionLosses, PositionRange
from heinsen.evaluation.split import SplitResult
from heinsen.evaluation.tasks import TaskResult
from heinsen.quantities import count

# ---- losses over a split -------------------------------------------------------------------------


def format_split(result: SplitResult) -> str:
    """Return the tables of a split's losses: in all, by source if there are any, by position if it was measured."""
    tables = [_total_table(result)]
    if result.sources is not None:
        tables.append(_source_table(_name_sources(result.sources)))
    if result.positions is not None:
        tables.append(format_positions(result.positions))
    return "\n\n".join(tables)


def summarize_split(result: SplitResult) -> dict[str, Any]:
    """Return the same as JSON."""
    summary = {
        "workdir": result.workdir,
        "step": result.step,
        "split": result.split,
        "mode": "streaming" if result.streaming else "windows",
        "bytes": result.n_bytes,
        **dataclasses.asdict(result.total),
    }
    summary[_perplexity_name(result).replace("-", "_")] = summary.pop("perplexity")
    if result.n_lost_bytes:
        summary["lost_bytes"] = result.n_lost_bytes
    if result.sources is not None:
        named = _name_sources(result.sources)
        summary["sources"] = {name: dataclasses.asdict(source) for name, source in named.items()}
    if len(result.dataset_losses) > 1:
        summary["datasets"] = {name: dict(share=share, loss=loss) for name, share, loss in result.dataset_losses}
    if result.positions is not None:
        summary["by_position"] = dataclasses.asdict(result.positions)
    return summary


def _perplexity_name(result: SplitResult) -> str:
    return "perplexity" if result.config.model.causal else "pseudo-perplexity"


def _name_sources(sources: dict[str | None, Estimate]) -> dict[str, Estimate]:
    return {name or "(none named)": source for name, source in sources.items()}


def _total_table(result: SplitResult) -> str:
    total, label = result.total, _perplexity_name(result)
    bounds = total.loss_interval
    perplexity_interval = None if bounds is None else (perplexity(bounds[0]), perplexity(bounds[1]))
    way = "streaming, documents whole" if result.streaming else f"windows of {result.config.sequence_length} tokens"
    rows = [
        ("run", f"{result.workdir}, step {result.step}"),
        (
            "split",
            f"{result.split}: all {count(total.tokens, 'token')}, {count(result.n_bytes, 'byte')}, "
            f"{count(total.documents, 'document')}; {way}",
        ),
    ]
    if n := result.n_lost_bytes:
        rows.append(("lost text", f"{count(n, 'byte')} that the tokenizer cannot spell; bits per byte count them"))
    if len(result.dataset_losses) > 1:
        rows += [(name, f"{loss:.4f} nats per token, share {share:.3g}") for name, share, loss in result.dataset_losses]
    rows += [
        ("loss", f"{total.loss:.4f} nats per token{_format_interval(total.loss_interval)}"),
        (label, f"{total.perplexity:.3f}{_format_interval(perplexity_interval, 3)}"),
    ]
    if total.bits_per_byte is not None:
        rows.append(("bits per byte", f"{total.bits_per_byte:.4f}{_format_interval(total.bits_per_byte_interval)}"))
    width = max(14, len(label))
    return "\n".join(f"{name:<{width}} {value}" for name, value in rows)


def _source_table(sources: dict[str, Estimate]) -> str:
    width = max(len("source"), *map(len, sources))
    lines = [f"{'source':<{width}} {'documents':>10} {'tokens':>12}  loss [95%]                bits per byte [95%]"]
    for name, source in sources.items():
        loss = f"{source.loss:.4f}{_format_interval(source.loss_interval)}"
        bits = "" if source.bits_per_byte is None else f"{source.bits_per_byte:.4f}"
        lines.append(
            f"{name:<{width}} {source.documents:>10,} {source.tokens:>12,}  {loss:<25} "
            f"{bits}{_format_interval(source.bits_per_byte_interval)}"
        )
    return "\n".join(line.rstrip() for line in lines)


def format_positions(positions: PositionLosses) -> str:
    """Format, by ranges of positions, the losses of the same tokens in windows and streaming, and the conclusion."""
    context_losses = {context.first: f"{context.loss:.4f}" for context in positions.contexts}
    ranges = {r.first: r for r in positions.ranges}
    labels = {r.first: _format_range(r) for r in positions.ranges}
    labels |= {context.first: _format_range(context) for context in positions.contexts}
    lines = [
        f"Loss by position in the document (tokens before it), in windows of {positions.window} and streaming; right:",
        "loss in windows by the tokens before it that the window shows.",
        f"{'position':>12} {'tokens':>12} {'windows':>9} {'streaming':>10}  {'difference [95%]':<26} {'in window':>9}",
    ]
    for first, label in sorted(labels.items()):
        cells = f"{'':>12} {'':>9} {'':>10}  {'':<26}"
        if (r := ranges.get(first)) is not None:
            difference = f"{r.difference:+.4f}{_format_interval(r.difference_interval)}"
            cells = f"{r.tokens:>12,} {r.windows:>9.4f} {r.streaming:>10.4f}  {difference:<26}"
        lines.append(f"{label:>12} {cells} {context_losses.get(first, ''):>9}".rstrip())
    lines.append(_format_conclusion(positions.window, positions.far))
    return "\n".join(lines)


def _format_range(r: PositionRange | Context) -> str:
    if r.last is None:
        return f"{r.first}+"
    return f"{r.first}-{r.last}" if r.last > r.first else f"{r.first}"


def _format_conclusion(window: int, far: Comparison | None) -> str:
    if far is None:
        return f"No document continues beyond {window} tokens."
    return (
        f"A context beyond {window} tokens {far.verdict}: {far.difference:+.4f} nats per token"
        f"{_format_interval(far.difference_interval)}\n"
        f"over the {far.tokens:,} tokens there whose window shows half as many or more "
        f"({far.streaming:.4f} streaming, {far.windows:.4f} in windows)."
    )


def _format_interval(bounds: Interval | None, digits: int = 4) -> str:
    return "" if bounds is None else f" [{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


# ---- tasks ---------------------------------------------------------------------------------------


def format_tasks(result: TaskResult) -> list[str]:
    """Return a line per task and metric, with its standard error where there is one."""
    lines = []
    for task, metrics in result.metrics.items():
        for name, value in metrics.items():
            if "," in name and "_stderr," not in name:  # metric,filter
                error = metrics.get(name.replace(",", "_stderr,", 1))
                margin = "" if error is None else f" +- {error:.4f}"
                lines.append(f"{task:<24} {name:<24} {value:.4f}{margin}")
    if result.n_truncated:
        lines.append(
            f"{result.n_truncated} texts were longer than the model's positions: truncated, or read in windows"
        )
    return lines


def summarize_tasks(result: TaskResult) -> dict[str, Any]:
    """Return the same as JSON."""
    return {"workdir": result.workdir, "step": result.step, "tasks": result.metrics, "n_truncated": result.n_truncated}
