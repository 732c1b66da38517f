"""Legends: whole, below all panels, with each label once. Titles: whole."""

import json

import numpy as np
import pytest
from matplotlib.text import Text

from heinsen.figures import make_figure, place_legend, pyplot, save_figure
from heinsen.training import plots


@pytest.mark.parametrize("size", [(5, 4), (8, 5), (11, 9)])
def test_legends_are_whole_and_below_all_panels(rng, size):
    figure, panels = make_figure(1, 2, figsize=size)
    labels = ["".join(rng.choice([*"abc, "], rng.integers(2, 45))) + str(i) for i in range(rng.integers(1, 12))]
    for axes in panels:
        for label in labels:
            axes.plot([1, 2], rng.standard_normal(2), label=label)
        axes.set(xlabel="tokens")
    place_legend(figure)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.width and 0 <= box.y0
    assert all(box.y1 <= axes.get_tightbbox().y0 for axes in panels)
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(labels)
    pyplot().close(figure)


def test_short_labels_share_a_row():
    figure, axes = make_figure(figsize=(6, 4))
    for label in "abcd":
        axes.plot(np.arange(2), label=label)
    place_legend(figure)
    figure.draw_without_rendering()
    assert len({round(text.get_window_extent().y0) for text in figure.legends[0].get_texts()}) == 1
    pyplot().close(figure)


def test_a_figure_is_written_by_its_suffix_and_closed(tmp_path):
    figure, axes = make_figure()
    axes.plot([1, 2])
    save_figure(tmp_path / "new" / "x.svg", figure)
    assert "<svg" in (tmp_path / "new" / "x.svg").read_text() and not pyplot().fignum_exists(figure.number)
    assert not figure.legends, "no label"


def test_titles_of_a_run_are_whole(tmp_path, monkeypatch):
    """With one layer and a long name, such as a sweep's."""
    folder, figures = tmp_path / ("learning_rate=0.0003__" * 4 + "n_layers=1"), {}
    folder.mkdir()
    entry = {"step": 1, "tokens": 8, "loss": 2.5, "time_constant/layer_0/head_0": 3.0}
    (folder / "metrics.jsonl").write_text(json.dumps(entry) + "\n")
    monkeypatch.setattr(plots, "save_figure", lambda path, figure: figures.update({path.name: figure}))
    plots.plot_run(folder)
    for figure in figures.values():
        figure.draw_without_rendering()
        (title,) = figure.findobj(lambda artist: isinstance(artist, Text) and "rate" in artist.get_text())
        box = title.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
    assert set(figures) == {"loss.png", "time_constants.png"}
