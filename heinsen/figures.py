"""Figures as all programs draw them: into files, with one legend that covers nothing."""

from typing import Any


def pyplot() -> Any:
    """Return matplotlib.pyplot, which needs no display then."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def place_legend(figure: Any, n_columns: int = 3) -> None:
    """Put one legend below all panels of a figure of constrained layout, with each label once."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if found:
        columns = min(n_columns, len(found))
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize="small")


def count_tokens(axis: Any) -> None:
    """Label an axis of tokens, linear or logarithmic, by 200k, 4M and the like."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))
