"""The report of scripts/on_device.py: what was measured on the device, from the results of its parts."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.tools import table, write_report
from scripts.benchmarking.accuracy_report import verdict
from scripts.benchmarking.contestants import BACKWARD
from scripts.benchmarking.measure import describe_versions
from scripts.benchmarking.parts import DONE, Outcome, Part

Result = Mapping[str, Any]


def name_of(device: Mapping[str, Any]) -> str:
    return f"{device['count']} x {device['device']}" if device["count"] > 1 else device["device"]


def write(
    out: Path, device: Mapping[str, Any], small: bool, parts: Sequence[Part], outcomes: Mapping[str, Outcome]
) -> str:
    """Write OUT/results.json and OUT/report.md, and return the report."""
    lines = [f"# {name_of(device)}", "", f"{describe_versions()}; written by `python scripts/on_device.py`."]
    if small:
        lines += ["", "Sizes are small: a rehearsal, whose figures say nothing about an accelerator."]
    rows = [[f"[{part.name}](#{part.name})", part.title, *_summarize(part, outcomes[part.name])] for part in parts]
    lines += ["", *table(["part", "what", "state", "seconds", "result"], rows)]
    for part in parts:
        lines += _section(part, outcomes[part.name], out)
    parts_results = {
        part.name: dict(
            arguments=part.arguments, state=outcomes[part.name].state, seconds=outcomes[part.name].seconds,
            result=outcomes[part.name].result,
        )
        for part in parts
    }  # fmt: skip
    return write_report(out, dict(device=device, small=small, parts=parts_results), lines)


def _summarize(part: Part, outcome: Outcome) -> list[str]:
    """Return a part's state, seconds and result in few words."""
    partial = outcome.result is not None and outcome.state != DONE
    words = "-" if outcome.result is None else HEADLINES[part.arguments[0]](outcome.result) + " (so far)" * partial
    return [outcome.state, f"{outcome.seconds:.0f}", words]


def _section(part: Part, outcome: Outcome, out: Path) -> list[str]:
    """Return a part's tables, pictures and what it printed; of one that has failed, its last lines."""
    lines = ["", f"## {part.name}", "", f"{part.title}: `python scripts/benchmark.py {shlex.join(part.arguments)}`"]
    if outcome.state != DONE:
        lines += ["", f"**{outcome.state}** after {outcome.seconds:.0f} s; see `{part.name}.log`"]
    if outcome.result is not None and part.arguments[0] == "attention":
        lines += ["", *attention_table(outcome.result)]
    if outcome.state == DONE:
        pictures = sorted((out / part.name).glob("*.png"))
        lines += [line for path in pictures for line in ("", f"![{path.stem}]({part.name}/{path.name})")]
    if outcome.text:
        lines += ["", "```text", *outcome.text.strip().splitlines(), "```"]
    return lines


def _accuracy(result: Result) -> str:
    return verdict(result)


def _step(result: Result) -> str:
    words = f"{result['tokens_per_second']:,.0f} tokens/s, MFU {result['mfu']:.1%}"
    if (bound := result["bound_seconds_per_step"]) is not None:
        words += f"; bound {result['tokens_per_step'] / bound:,.0f} tokens/s"
    return words


def _attention(result: Result) -> str:
    found = {(r["dtype"], r["tokens"], r["name"]): r["milliseconds"] for r in _backward(result)}
    ours = [(time, key) for key, time in found.items() if key[2].startswith("heinsen") and "gate" not in key[2]]
    words = []
    for dtype in dict.fromkeys(key[0] for _, key in ours):
        longest = max(key[1] for _, key in ours if key[0] == dtype)
        time, (_, n_tokens, name) = min((time, key) for time, key in ours if key[:2] == (dtype, longest))
        others = [t for key, t in found.items() if key[:2] == (dtype, n_tokens) and key[2].startswith("softmax")]
        against = f", {min(others) / time:.1f} times as fast as softmax" if others else ""
        words.append(f"{dtype}, T = {n_tokens}: {name} {time:.3g} ms{against}")
    return "; ".join(words)


def _losses(result: Result) -> str:
    differences = [f"{name}: {found['all steps']:.2g}" for name, found in result["differences"].items()]
    return f"largest difference from the CPU's: {', '.join(differences)} nats"


def _decode(result: Result) -> str:
    name = result["results"][0]["name"]
    rates = {r["batch"]: r["tokens_per_second"] for r in reversed(result["results"]) if r["name"] == name}
    return "; ".join(f"batch {batch}: {rate:,.0f} tokens/s" for batch, rate in sorted(rates.items()))


HEADLINES: dict[str, Callable[[Result], str]] = {
    "accuracy": _accuracy,
    "step": _step,
    "attention": _attention,
    "losses": _losses,
    "decode": _decode,
}


def _backward(result: Result) -> list[Mapping[str, Any]]:
    return [r for r in result["results"] if r["direction"] == BACKWARD]


def attention_table(result: Result) -> list[str]:
    """Return the lines of a table of ms forward + backward, by dtype, contestant and length."""
    found = {(r["dtype"], r["name"], r["tokens"]): r["milliseconds"] for r in _backward(result)}
    lengths = sorted({key[2] for key in found})
    rows = [
        [dtype, name, *(f"{found[dtype, name, n]:.4g}" if (dtype, name, n) in found else "-" for n in lengths)]
        for dtype, name in dict.fromkeys(key[:2] for key in found)
    ]
    return table(["ms, forward + backward", "", *(f"T = {n}" for n in lengths)], rows)
