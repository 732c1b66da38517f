"""The page of a sweep: its numbers against independent ones, and that it needs nothing from outside."""

import base64
import html.parser
import itertools
import json
import re
import subprocess
from html import escape

import numpy as np
import pytest

from heinsen.sweep import report
from heinsen.sweep.folder import SweepFolder
from heinsen.sweep.job import write_status
from heinsen.sweep.report import Result, find_effects, find_results, mean_of, seed_spread, write_report
from heinsen.sweep.runs import SweepRun
from heinsen.sweep.space import Range
from tests.documents import find_chromium
from tests.sweep.fake import definition


@pytest.fixture
def grid(rng):
    """A grid two of whose runs have no result: its definition, its results in random order, its losses with NaN."""
    space = {"a.rate": (1e-4, 1e-3, 1e-2), "b.name": ("x", "y"), "seed": (0, 1)}
    losses = rng.normal(3, 1, (3, 2, 2))
    losses.flat[rng.permutation(12)[:2]] = np.nan
    values = [dict(zip(space, point, strict=True)) for point in itertools.product(*space.values())]
    results = [Result(point, loss) for point, loss in zip(values, losses.flat, strict=True) if np.isfinite(loss)]
    rng.shuffle(results)
    return definition(space), results, losses


def test_values_are_compared_by_the_settings_that_each_has_a_result_with(grid):
    """A missing run with a bad setting must not make a value look good."""
    whole, results, losses = grid
    effects, sizes = find_effects(whole, results), {}
    for axis, (field, values) in enumerate(whole.space.items()):
        by_value = np.moveaxis(losses, axis, 0).reshape(len(values), -1)
        common = by_value[:, np.isfinite(by_value).all(axis=0)]
        assert list(effects[field]) == [str(value) for value in values]
        assert {len(group) for group in effects[field].values()} == {common.shape[1]}
        np.testing.assert_allclose([mean_of(group) for group in effects[field].values()], common.mean(axis=1))
        sizes[field] = np.ptp(common.mean(axis=1))
    first, second, last = effects
    assert sizes[first] >= sizes[second] and last == "seed"


def test_what_has_one_value_no_settings_in_common_or_is_a_zip_has_no_effect(grid):
    whole, results, _ = grid
    only_x = [result for result in results if result.point["b.name"] == "x"]
    assert "b.name" not in find_effects(whole, only_x)
    assert find_effects(definition({"a.rate": (1, 2)}, search="zip"), results) == {} == find_effects(whole, [])
    apart = [Result({"a.rate": 1e-4, "b.name": "x"}, 1.0), Result({"a.rate": 1e-3, "b.name": "y"}, 2.0)]
    assert find_effects(whole, apart) == {}
    searched = find_effects(definition(whole.space, search="random", trials=2), apart)
    assert {field: list(groups) for field, groups in searched.items()} == {
        "a.rate": ["0.0001", "0.001"],
        "b.name": ["x", "y"],
    }


def test_ranges_are_cut_into_parts_of_as_many_runs(rng):
    rates = rng.uniform(0, 1, 11)
    runs = [Result({"rate": float(rate)}, float(rate)) for rate in rates]
    (groups,) = find_effects(definition({"rate": Range(0, 1, False, False)}, search="random", trials=11), runs).values()
    assert list(map(len, groups.values())) == [3, 3, 3, 2]
    np.testing.assert_array_equal([run.loss for group in groups.values() for run in group], np.sort(rates))
    assert next(iter(groups)) == f"{min(rates):.3g} to {np.sort(rates)[2]:.3g}"


def test_the_spread_over_seeds_is_within_equal_settings(grid):
    _, results, losses = grid
    spread, freedom = seed_spread(results)
    pairs = losses.reshape(6, 2)[np.isfinite(losses.reshape(6, 2)).all(axis=1)]
    assert freedom == len(pairs)
    np.testing.assert_allclose(spread, np.sqrt(np.mean((pairs[:, 0] - pairs[:, 1]) ** 2) / 2))
    assert seed_spread([result for result in results if result.point["seed"] == 0]) is None


# ---- the page ------------------------------------------------------------------------------------


def make_sweep(path, rng, space, states, **changes):
    """A sweep's folder with logs that look like training, its runs in the states given."""
    whole = definition(space, **changes)
    runs = [SweepRun(point, 100, 64) for point in whole.points()]
    folder = SweepFolder.open_or_create(path, whole, runs)
    for i, run in enumerate(runs):
        state, where = states.get(i, "finished"), folder.folder(run)
        if state == "waiting":
            continue
        where.mkdir()
        floor, entries = rng.uniform(2, 3), []
        for step in range(5, (100 if state == "finished" else 40) + 1, 5):
            entry = {"step": step, "tokens": 64 * step, "loss": floor + 3 / np.sqrt(step), "tokens_per_second": 1e4}
            if step % 20 == 0:
                entry |= {"validation_loss": entry["loss"] + 0.1, "validation_bits_per_byte": entry["loss"] / 3}
            entries.append(entry)
        (where / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        write_status(where, state=state, returncode=1, started=0.0, ended=60.0)
        (where / "train.log").write_text("step 40\nerror: <loss> is no longer finite\n")
    return folder


@pytest.fixture(params=["grid", "random"])
def page(request, rng, tmp_path):
    if request.param == "grid":
        space = {"optimizer.rate": (1e-4, 1e-3, 1e-2), "model.kind": ("one", "<two>")}
        folder = make_sweep(tmp_path / "s", rng, space, {2: "crashed", 5: "waiting"}, seeds=(0, 1))
    else:
        space = {"optimizer.rate": Range(1e-5, 1e-1, True, False), "size": Range(1, 64, True, True), "kind": ("a", "b")}
        folder = make_sweep(tmp_path / "s", rng, space, {3: "pruned", 7: "crashed"}, search="random", trials=24)
    return folder, write_report(folder, folder.views())


class Page(html.parser.HTMLParser):
    """What a page would load, its tables, and the tags that are still open at its end."""

    def __init__(self, text):
        super().__init__()
        self.sources, self.open, self.tables = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href", "data", "action")]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, text):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += text

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(page):
    folder, path = page
    text = path.read_text()
    parsed = Page(text)
    assert not parsed.open
    images = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in parsed.sources]
    assert len(images) == 2 and all(image.startswith(b"\x89PNG") for image in images), "effects and curves"
    assert not re.search(r"url\(|@import|<script", text)
    views = folder.views()
    ranked = sorted((view for view in views if view.state == "finished"), key=lambda view: view.validation_loss)
    assert f"<b>{ranked[0].validation_loss:.4f}</b> nats per token, {ranked[0].bits_per_byte:.4f} bits" in text
    assert str(folder.folder(ranked[0].run)) in text
    assert "error: &lt;loss&gt; is no longer finite" in text and "<two>" not in text
    assert ("standard deviation" in text) == (folder.definition.seeds is not None)
    unfinished = [f"{escape(view.name)} ({view.state})" for view in views if view.state != "finished"]
    assert f"Runs without a result: {', '.join(unfinished)}." in text
    effects, runs, settings = parsed.tables
    found = [
        [field, label, str(len(group)), f"{mean_of(group):.4f}", f"{min(run.loss for run in group):.4f}"]
        for field, groups in find_effects(folder.definition, find_results(views)).items()
        for label, group in groups.items()
    ]
    assert [row[:5] for row in effects[1:]] == found
    assert text.count("<tr class=best>") == len({row[0] for row in found} - {"seed"}) + 1
    assert len(runs) == 1 + len(views)
    column = runs[0].index("validation loss")
    assert [row[column] for row in runs[1:]][: len(ranked)] == [f"{view.validation_loss:.4f}" for view in ranked]
    assert ["--search", folder.definition.search] in settings and ["--config", "c.py"] in settings


def test_figures_show_unfinished_runs_as_such_and_ticks_at_what_was_run(page):
    folder, _ = page
    views, space = folder.views(), folder.definition.space
    effects = find_effects(folder.definition, find_results(views))
    for axes, (field, groups) in zip(report._draw_effects(effects, space).axes, effects.items(), strict=True):
        if isinstance(space.get(field), Range):
            assert axes.get_xscale() == ("log" if space[field].log else "linear")
        else:
            assert [tick.get_text() for tick in axes.get_xticklabels()] == list(groups)
            assert not len(axes.get_xticks(minor=True))
    begun = [view for view in views if view.loss is not None]
    for axes in report._draw_curves(folder, begun[-12:]).axes:
        for view, line in zip(begun[-12:], axes.lines, strict=True):
            is_finished = view.state == "finished"
            assert line.get_linestyle() == ("-" if is_finished else "--")
            assert line.get_label() == (view.name if is_finished else f"{view.name} ({view.state})")


def test_a_field_without_settings_in_common_is_named(tmp_path, rng):
    states = {1: "running", 2: "interrupted"}
    folder = make_sweep(tmp_path / "s", rng, {"a": (1, 2), "b": (3, 4)}, states)
    text = write_report(folder, folder.views()).read_text()
    assert "Not compared, as no settings have a result with each of its values: a, b. Runs without" in text
    assert "a result: a=1__b=4 (interrupted), a=2__b=3 (interrupted).</p>" in text and len(Page(text).sources) == 1


def test_a_sweep_without_finished_runs_has_a_page_too(tmp_path, rng):
    folder = make_sweep(tmp_path / "s", rng, {"a": (1, 2)}, {0: "waiting", 1: "waiting"})
    text = write_report(folder, folder.views()).read_text()
    assert "No run has finished yet" in text and len(Page(text).tables) == 2 and "<img" not in text


@pytest.mark.long
def test_a_browser_shows_the_page_without_a_network(page, tmp_path):
    import matplotlib.pyplot as plt

    chromium, shot = find_chromium(), tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,2600"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command = [chromium, *options, f"--screenshot={shot}", page[1].absolute().as_uri()]
    subprocess.run(command, capture_output=True, timeout=300, check=True)
    pixels = plt.imread(shot)[..., :3]
    assert pixels.shape[:2] == (2600, 1200)
    inked = (pixels < 0.97).any(axis=2)
    assert inked[:300].mean() > 0.01 and inked[400:1400].mean() > 0.02, "the text and the figures are drawn"
    orange = np.abs(pixels - np.array([0xC2, 0x41, 0x0C]) / 255).max(axis=2) < 0.02
    assert orange.sum() > 200, "the means of the marginal effects"
    assert not inked[:, -10:].any(), "nothing runs over the right edge"
