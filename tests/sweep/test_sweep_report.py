"""The page of a sweep: its numbers against independent ones, and that it needs nothing from outside."""

import base64
import html.parser
import itertools
import json
import re
import shutil
import statistics
import subprocess

import numpy as np
import pytest

from heinsen.sweep.definition import Definition
from heinsen.sweep.effects import Result, effect_of, grid_of, seed_spread, swept_fields
from heinsen.sweep.folder import SweepFolder
from heinsen.sweep.report import write_report
from heinsen.sweep.runs import SweepRun
from heinsen.sweep.space import Range


def definition(space, **changes):
    fields = dict(config="c.py", overrides={}, base={}, seeds=None, search="grid", trials=None, search_seed=0)
    return Definition(**(fields | {"space": space} | changes))


@pytest.fixture
def grid(rng):
    """A grid with seeds, two of whose runs are missing, in random order: its definition and {point: loss}."""
    space = {"a.rate": (1e-4, 1e-3, 1e-2), "b.name": ("x", "y"), "seed": (0, 1)}
    points = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    chosen = [points[i] for i in rng.permutation(len(points))[:-2]]
    return definition(space), [
        Result(point, float(loss)) for point, loss in zip(chosen, rng.normal(3, 1, 10), strict=True)
    ]


def test_marginal_effects_are_means_over_everything_else(grid):
    whole, runs = grid
    for field, values in whole.space.items():
        effect = effect_of(whole, field, runs)
        assert [group.label for group in effect.groups] == [str(value) for value in values]
        means = []
        for value, group in zip(values, effect.groups, strict=True):
            losses = [run.loss for run in runs if run.point[field] == value]
            assert sorted(group.losses) == sorted(losses)
            means.append(sum(losses) / len(losses))
        np.testing.assert_allclose(effect.size, max(means) - min(means))
    assert effect_of(whole, "b.name", [run for run in runs if run.point["b.name"] == "x"]) is None


def test_ranges_are_cut_into_parts_of_as_many_runs(rng):
    rates = rng.uniform(0, 1, 11)
    runs = [Result({"rate": float(rate)}, float(rate)) for rate in rates]
    effect = effect_of(definition({"rate": Range(0, 1, False, False)}, search="random", trials=11), "rate", runs)
    assert [len(group.losses) for group in effect.groups] == [3, 3, 3, 2]
    np.testing.assert_array_equal(np.concatenate([group.losses for group in effect.groups]), np.sort(rates))


def test_the_spread_over_seeds_is_within_equal_settings(grid):
    whole, runs = grid
    spread, freedom = seed_spread(runs)
    pairs = [
        [r.loss for r in runs if (r.point["a.rate"], r.point["b.name"]) == each]
        for each in itertools.product(whole.space["a.rate"], whole.space["b.name"])
    ]
    pairs = [pair for pair in pairs if len(pair) == 2]
    assert freedom == len(pairs)
    np.testing.assert_allclose(spread, np.sqrt(sum((a - b) ** 2 / 2 for a, b in pairs) / len(pairs)))
    assert seed_spread([run for run in runs if run.point["seed"] == 0]) is None


def test_the_heat_map_holds_the_mean_of_each_pair(grid):
    _, runs = grid
    ys, xs, means = grid_of(runs, "b.name", "a.rate")
    assert ys == ["x", "y"] and xs == [1e-4, 1e-3, 1e-2]
    for i, j in np.ndindex(means.shape):
        losses = [r.loss for r in runs if r.point["b.name"] == ys[i] and r.point["a.rate"] == xs[j]]
        expected = statistics.fmean(losses) if losses else np.nan
        np.testing.assert_allclose(means[i, j], expected)


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
        end, floor = 100 if state == "finished" else 40, rng.uniform(2, 3)
        entries = []
        for step in range(5, end + 1, 5):
            loss = floor + 3 / np.sqrt(step) + 0.05 * rng.normal()
            entries.append({"step": step, "tokens": 64 * step, "loss": loss, "tokens_per_second": 1e4})
            if step % 20 == 0:
                entries.append(
                    {"step": step, "tokens": 64 * step, "validation_loss": loss, "validation_bits_per_byte": loss / 3}
                )
        (where / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        (where / "status.json").write_text(json.dumps({"state": state, "returncode": 1, "started": 0.0, "ended": 60.0}))
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
    return request.param, folder, write_report(folder, folder.views())


class Outside(html.parser.HTMLParser):
    """What a page would load, and the tags that are still open at its end."""

    def __init__(self):
        super().__init__()
        self.sources, self.open = [], []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href", "data", "action")]
        if tag not in ("meta", "link", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(page):
    kind, folder, path = page
    text = path.read_text()
    parser = Outside()
    parser.feed(text)
    assert not parser.open
    assert all(source.startswith("data:") for source in parser.sources)
    images = [base64.b64decode(s.partition("base64,")[2]).decode() for s in parser.sources if "svg" in s]
    assert len(images) == 4 and all("<svg" in image for image in images)
    assert not re.search(r"url\((?!#)|@import|<script [^>]*src", text + "".join(images)), "nor do its figures"
    best = min(view.validation_loss for view in folder.views() if view.state == "finished")
    assert f"<b>{best:.4f}</b>" in text
    assert "error: &lt;loss&gt; is no longer finite" in text and "<two>" not in text
    assert text.count("<tr data-name=") == len(folder.runs), "all runs are listed"
    charts = [json.loads(chart) for chart in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    logged = {view.name for view in folder.views() if view.loss is not None}
    assert [{series["name"] for series in chart["series"]} for chart in charts] == [logged, logged]
    assert 'http-equiv="refresh"' not in text
    assert 'http-equiv="refresh" content="15"' in write_report(folder, folder.views(), 15).read_text()


def test_a_sweep_without_finished_runs_has_a_page_too(tmp_path, rng):
    folder = make_sweep(tmp_path / "s", rng, {"a": (1, 2)}, {0: "waiting", 1: "waiting"})
    assert "No run has finished yet" in write_report(folder, folder.views()).read_text()
    assert swept_fields(folder.views()) == ["a"]


def find_chromium():
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    return chromium


# What a reader does with the page, and what they see then, as JSON in the title.
USE = """
const visible = () => [...document.querySelectorAll("table.sortable tbody tr:not([hidden])")];
const heads = [...document.querySelectorAll("table.sortable th")];
const column = heads.findIndex((head) => head.textContent == "validation loss");
const losses = () => visible().map((row) => row.cells[column].textContent);
const head = heads[column];
const seen = {width: document.documentElement.scrollWidth - innerWidth, charts: charts.length};
head.click(); seen.ascending = losses();
head.click(); seen.descending = losses();
const chart = charts[0].chart;
const name = charts[0].names[0];
chart.setCursor({left: chart.bbox.width / 4 / devicePixelRatio, top: 20});
seen.hover = chart.root.querySelectorAll(".u-legend .u-value")[1].textContent;
filter.value = name.toUpperCase(); filter.dispatchEvent(new Event("input"));
seen.filtered = visible().map((row) => row.dataset.name);
seen.shown = chart.series.slice(1).filter((series) => series.show).map((series) => series.label);
document.title = JSON.stringify(seen);
"""


@pytest.mark.long
@pytest.mark.parametrize("width", [1200, 390])
def test_a_reader_sorts_filters_and_points_at_the_page(page, tmp_path, width):
    _, folder, path = page
    used = tmp_path / "used.html"
    used.write_text(path.read_text().replace("</body>", f"<script>{USE}</script></body>"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},1000", "--dump-dom"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=3000"]
    command = [find_chromium(), *options, used.absolute().as_uri()]
    end = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "CONSOLE" not in end.stderr, "no errors in the console"
    seen = json.loads(html.unescape(re.search("<title>(.*?)</title>", end.stdout)[1]))
    assert seen["charts"] == 2 and seen["width"] <= 0, "nothing is wider than the window"
    finished = [float(text) for text in seen["ascending"] if text]
    assert finished == sorted(finished) and "" not in seen["ascending"][: len(finished)]
    assert [float(text) for text in seen["descending"] if text] == finished[::-1] and len(finished) > 3
    assert float(seen["hover"]) > 0, "the legend has the value under the mouse"
    assert seen["filtered"] == seen["shown"] and len(seen["shown"]) == 1


@pytest.mark.long
def test_a_browser_shows_the_page_without_a_network(page, tmp_path):
    import matplotlib.pyplot as plt

    _, _, path = page
    shot = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,2600"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command = [find_chromium(), *options, f"--screenshot={shot}", path.absolute().as_uri()]
    subprocess.run(command, capture_output=True, timeout=300, check=True)
    pixels = plt.imread(shot)[..., :3]
    assert pixels.shape[:2] == (2600, 1200)
    inked = (pixels < 0.97).any(axis=2)
    assert inked[:300].mean() > 0.01 and inked[600:1800].mean() > 0.02, "the text and the figures are drawn"
    orange = np.abs(pixels - np.array([0xC2, 0x41, 0x0C]) / 255).max(axis=2) < 0.02
    assert orange.sum() > 200, "the means of the marginal effects"
    assert not inked[:, -10:].any(), "nothing runs over the right edge"
