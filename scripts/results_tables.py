"""Write the tables of README.md and docs/results.md from experiments/*/results.json.

    python scripts/results_tables.py [--check]

A table follows its mark, such as <!-- table: models -->, and ends at an empty line. Text is not touched.
"""

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from absl import app, flags

from scripts.cli import parse_flags, show_help

CHECK = flags.DEFINE_bool("check", False, "Write nothing; exit with status 1 if a table is not that of the results.")
show_help(__name__)

from experiments import reports
from experiments.attribution.report import bits_per_byte
from experiments.conversion import report as conversion_report
from experiments.long_contexts import report as contexts
from experiments.recall_by_state import report as recall_report
from experiments.scaling import report as scaling_report

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")

# Names in the results -> names in the tables.
MODELS = {
    "exponential, additions, GPT-2's block": "Exponential features",
    "linear, additions, GPT-2's block": "Linear attention",
    "delta rule, additions, GPT-2's block": "Gated delta rule",
    "gated softmax, additions, GPT-2's block": "Gated softmax",
    "softmax, additions, GPT-2's block": "Softmax with rotary positions, no forget gate",
}
ATTRIBUTION = {
    "exponential": "Exponential features",
    "exponential, additions": "+ additions",
    "exponential, additions, real values": "+ additions, real values",
    "linear": "Linear attention",
    "linear, additions": "+ additions",
    "delta rule, additions": "Gated delta rule + additions",
    "softmax": "Softmax",
    "softmax, additions": "+ additions",
    "gated softmax, additions": "Gated softmax + additions",
    "gated softmax, additions, rotary": "+ rotary positions",
}


@cache
def results(experiment: str) -> reports.Results:
    return reports.read_results(ROOT / "experiments" / experiment / "results.json")


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(reports.table(head, rows))


def loss(name: str, digits: int) -> str:
    """Bits per byte of a cell at 0.46M parameters, empty if it has not run."""
    if name not in results("attribution/0.5M")["cells"]:
        return ""
    bits = bits_per_byte(results("attribution/0.5M"), name)
    return f"{bits.mean():.{digits}f} ± {bits.std(ddof=1):.{digits}f}"


def milliseconds(decoding: reports.Results) -> str:
    found = decoding["milliseconds"]
    return f"{found:.2f}" if found < 1 else f"{found:.1f}"


def megabytes(decoding: reports.Results) -> str:
    found = decoding["state_bytes"] / 1e6
    return f"{found:.0f}" if found > 10 else f"{found:.2f}" if found > 0.1 else f"{found:.3f}"


def models() -> str:
    rows = []
    for name, label in MODELS.items():
        each = [results("speed")["decoding"][name][context] for context in (512, 65536)]
        times, states = (" / ".join(map(show, each)) for show in (milliseconds, megabytes))
        rows.append([label, loss(name, 3), times, states])
    heads = "loss, bits per byte", "ms per token after 512 / 65,536", "MB of context after 512 / 65,536"
    return table(["attention", *heads], rows)


def speed() -> str:
    r, rows = results("speed"), []
    for name, rates in r["speed"].items():
        decoding = [milliseconds(r["decoding"][name][context]) for context in (512, 65536)]
        rows.append([name, f"{rates[512]:,.0f}", f"{rates[8192]:,.0f}", *decoding])
    heads = ["training, T = 512, tokens/s", "T = 8,192", "decoding after 512, ms per token", "after 65,536"]
    return table(["model", *heads], rows)


def attribution() -> str:
    rows = [[label, loss(name, 3), loss(f"{name}, GPT-2's block", 3)] for name, label in ATTRIBUTION.items()]
    return table(["", "paper's block", "GPT-2's block"], rows)


def long_contexts() -> str:
    r = results("long_contexts/0.5M")
    spans = {
        name: i for i, name in enumerate(contexts.spans(r)) if name.startswith(("513 ", "2,049 ", "8,193 ", "16,"))
    }
    rows = []
    for name, cell in r["cells"].items():
        losses = [contexts.losses(r, name, reading).mean(0) for reading in contexts.READINGS]
        cells = [" / ".join(f"{each[i]:.3f}" for each in losses if i < len(each)) for i in spans.values()]
        state = " / ".join(f"{4 * cell['state_numbers'][reading] / 1e6:.2f}" for reading in contexts.READINGS)
        rows.append([name, state, *cells])
    return table(["windows / sliding by half / stream", "state, MB", *spans], rows)


def scaling() -> str:
    r, rows, baseline = results("scaling"), [], scaling_report.BASELINES[0]
    for kind in ("exponential", "linear"):
        shown = reports.show_family(scaling_report.differences(r, kind, baseline), "+.4f")
        for width, (ours, _) in scaling_report.pairs_of(r, kind, baseline).items():
            size = f"{r['cells'][ours]['parameters'] / 1e6:.2f}M"
            rows.append([kind, size, *(shown.get((width, place), "") for place in range(len(r["text"])))])
    return table(["", "parameters", *(f"{n / 1e6:.2f}M bytes" for n in r["text"])], rows)


def recall() -> str:
    r, rows = results("recall_by_state"), []
    for name, cell in r["cells"].items():
        found = recall_report.right(r, name)
        means, seeds = [f"{x:.0%}" for x in found.mean(0)], ", ".join(f"{x:.0%}" for x in found[:, -1])
        rows.append([name, f"{cell['state_numbers']:,}", *means, seeds])
    pairs = [f"{n} pairs" for n in r["pairs"]]
    return table(["", "numbers in the state", *pairs, f"{pairs[-1]} by seed"], rows)


def conversion() -> str:
    r = results("conversion")
    teacher = {"the softmax teacher": r["teachers"]["softmax, additions"]}
    rows = [
        [
            name,
            f"{conversion_report.scores(cell, 'text').mean():.3f}",
            *(f"{conversion_report.scores(cell, task).mean():.0%}" for task in conversion_report.TASKS),
            f"{conversion_report.scores(cell, 'streams').mean():.3f}",
            f"{cell['state_numbers']:,}",
        ]
        for name, cell in (teacher | r["cells"]).items()
    ]
    return table(["", "text", *conversion_report.TASKS.values(), "streams", "numbers in the state"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "models": models,
    "attribution": attribution,
    "long contexts": long_contexts,
    "speed": speed,
    "scaling": scaling,
    "recall": recall,
    "conversion": conversion,
}


def fill(text: str) -> str:
    """A page with every table after its mark made anew."""
    replace = lambda found: f"<!-- table: {found[1]} -->\n\n{TABLES[found[1]]()}\n\n"
    return re.sub(r"<!-- table: ([\w ]+) -->\n\n(?:\|.*\n)*\n*", replace, text)


def main(argv: list[str]) -> None:
    changed = [page for page in PAGES if fill(page.read_text()) != page.read_text()]
    for page in changed:
        print(f"{page.relative_to(ROOT)}: " + ("tables differ from the results" if CHECK.value else "tables written"))
        if not CHECK.value:
            page.write_text(fill(page.read_text()))
    sys.exit(1 if changed and CHECK.value else 0)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
