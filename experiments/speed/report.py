"""report.md and speed.png, from results.json."""

from matplotlib.figure import Figure

from experiments.reports import Results, table
from heinsen.figures import make_figure

DRAWN = {f"{kind}, additions, GPT-2's block": kind for kind in ("exponential", "linear", "delta rule", "gated softmax")}


def report(results: Results) -> list[str]:
    """Return the lines of report.md."""
    lengths, contexts = (list(max(results[what].values(), key=len)) for what in ("speed", "decoding"))

    def decoding(name: str, context: int) -> str:
        found = results["decoding"][name].get(context)
        return f"{found['milliseconds']:.2f} ms, {found['state_bytes'] / 1e6:,.2f} MB" if found else "too large"

    rows = [
        [name, *(f"{rates[n]:,.0f}" for n in lengths), *(decoding(name, n) for n in contexts)]
        for name, rates in results["speed"].items()
    ]
    head = ["", *(f"tokens/s, T = {int(n):,}" for n in lengths), *(f"decoding after {int(n):,}" for n in contexts)]
    return [
        "# What attentions cost",
        "",
        f"`python experiments/speed/run.py`, {results['machine']}, jax {results['jax']}. Cells of experiments/"
        "attribution of 0.5M parameters. Tokens/s of training steps, all with as many tokens. Decoding: time per token "
        "and state of one text after so many tokens. Medians of calls in turn.",
        "",
        *table(head, rows),
        "",
        "![Time and state of decoding](speed.png)",
    ]


def draw(results: Results) -> Figure:
    """Draw the time of decoding and the state by the tokens of context, of models with additions in GPT-2's block."""
    figure, axes = make_figure(1, 2, figsize=(10, 4.5))
    for (name, kind), line in zip(DRAWN.items(), ("-", "--", ":", "-"), strict=True):
        found = results["decoding"].get(name, {})  # a rehearsal has two
        style = dict(marker="o", ms=4, lw=1.4, ls=line)
        axes[0].plot(list(found), [each["milliseconds"] for each in found.values()], label=kind, **style)
        axes[1].plot(list(found), [each["state_bytes"] / 1e6 for each in found.values()], **style)
    for one, label in zip(axes, ("decoding, ms per token", "state (MB)"), strict=True):
        one.set(xlabel="tokens of context", ylabel=label, xscale="log", yscale="log")
        one.grid(alpha=0.3)
    return figure


FIGURES = {"speed.png": draw}
