"""How the output of sigmoid attention scales with the number of keys n, in float64: the laws, and what is measured.

    python scripts/sigmoid_scaling.py --out=DIR [--workdir=RUN [--data=DATASET/SPLIT]]

    y(x) = n^-alpha sum_{j <= n} sigmoid(q(x) . k(z_j) / sqrt(d)) v(z_j)

Of tokens z_j drawn from one distribution, n^(alpha - 1) y converges to the integral I(x) = E_z[sigmoid(q(x) . k(z) /
sqrt(d)) v(z)]: the norm of y grows as n^(1 - alpha), at alpha = 1 y tends to I as n^-1/2, and every token twice
multiplies y by exactly 2^(1 - alpha). For independent tokens and any n, with C(x) the variance of what one token adds,

    E |y|^2 = n^(-2 alpha) (n^2 |I|^2 + n C)

so that below n* = C / |I|^2 it is the fluctuation that is seen, which grows as n^(1/2 - alpha). Softmax and heinsen
attention, which tend to a limit and do not change when every token is doubled, are measured beside.

Tokens are (a) random ones: a vocabulary of random vectors around a common mean; (b) with --workdir, hidden states of a
trained model on its validation text, or that of --data, in windows of its training length: in the order of the text,
where neighbours resemble each other, and drawn independently. Queries, keys and values are random maps of them.

Prints a table, and writes results.json, sigmoid_scaling.png and sigmoid_scaling.svg. A few minutes on 2 CPU cores.
"""

import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

FLAGS = flags.FLAGS

ALPHAS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5)
HEADS, FEATURES, QUERIES = 2, 32, 16
WIDTH, VOCABULARY = 256, 4096  # of the random tokens
DOUBLED = 1024  # tokens that are doubled, at most
AT_ONCE = 2**19  # keys of all sequences that one call takes


def define_flags() -> None:
    """In a function: tests import this module."""
    flags.DEFINE_string("out", None, "Folder for results.json and the figure.", required=True)
    flags.DEFINE_string("workdir", None, "Run folder of train.py, for hidden states of text; none: random tokens only.")
    flags.DEFINE_string("data", None, "Folder of one split of a token dataset; none: the run's validation split.")
    flags.DEFINE_list("lengths", [str(2**i) for i in range(4, 16)], "Numbers of keys n.")
    flags.DEFINE_integer("sequences", 32, "Drawn for each n; standard errors are over them.", lower_bound=2)
    flags.DEFINE_float("mean", 1.0, "Length of the random tokens' mean, by that of their spread.", lower_bound=0.0)
    flags.DEFINE_integer("tokens", 2**19, "Tokens of text to take hidden states of, at most.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of all draws.", lower_bound=0)


# ---- forms of attention ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Form:
    """attend(q [*batch, Q, d], k [*batch, n, d], v [*batch, n, d]) -> y, every query seeing every key; its laws.

    growth: exponent of the norm of y. doubling: the ratio when every token is doubled; None: none that is exact.
    """

    attend: Callable[..., Any]
    alpha: float | None
    growth: float
    doubling: float | None
    converges: bool


def softmax_attention(q, k, v):
    import jax
    import jax.numpy as jnp

    return jax.nn.softmax(jnp.einsum("...qd,...nd->...qn", q, k) * q.shape[-1] ** -0.5, axis=-1) @ v


def make_forms(alphas: tuple[float, ...] = ALPHAS) -> dict[str, Form]:
    """{name: Form}: sigmoid attention for each alpha and with the bias -log n, and the controls."""
    import heinsen

    sigmoid = functools.partial(heinsen.sigmoid_attention, causal=False)
    forms = {
        f"sigmoid, alpha = {alpha:g}": Form(
            functools.partial(sigmoid, alpha=alpha), alpha, 1 - alpha, 2 ** (1 - alpha), alpha == 1
        )
        for alpha in alphas
    }
    forms["sigmoid, bias = -log n"] = Form(functools.partial(sigmoid, alpha=0.0, bias="-log_n"), None, 0.0, None, False)
    forms["softmax"] = Form(softmax_attention, None, 0.0, 1.0, True)
    forms["heinsen"] = Form(functools.partial(heinsen.attention, causal=False), None, 0.0, 1.0, True)
    return forms


# ---- tokens ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens to draw sequences from, as the heads see them: q, k, v [H, N, d]. in_order: sequences are runs of them."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    in_order: bool

    def draw(self, rng: np.random.Generator, n_sequences: int, n: int) -> np.ndarray:
        """Indices of tokens, [n_sequences, n]."""
        n_tokens = self.k.shape[1]
        if not self.in_order:
            return rng.integers(n_tokens, size=(n_sequences, n))
        return rng.integers(n_tokens - n + 1, size=(n_sequences, 1)) + np.arange(n)


def draw_maps(rng: np.random.Generator, width: int) -> np.ndarray:
    """W_q, W_k and W_v of all heads, [3, H, width, d], with elements normal of variance 1 / width."""
    return rng.standard_normal((3, HEADS, width, FEATURES)) / np.sqrt(width)


def random_tokens(rng: np.random.Generator, mean: float) -> Tokens:
    """Normal vectors around a common one, `mean` times as long as their spread, of elements of order 1."""
    x = rng.standard_normal((VOCABULARY, WIDTH)) + mean * rng.standard_normal(WIDTH)
    x /= np.sqrt(1 + mean**2)
    return Tokens("random tokens", *np.einsum("nw,phwd->phnd", x, draw_maps(rng, WIDTH), optimize=True), False)


def text_tokens(
    rng: np.random.Generator, workdir: Path, data: Path | None, at_most: int, at_least: int = QUERIES
) -> list[Tokens]:
    """The last hidden states (LayerNorm outputs) of the run's model on text; in order, and drawn independently.

    Raises ConfigError, RunError, DatasetError, CheckpointError, and ValueError if there are fewer than `at_least`.
    """
    import jax
    import jax.numpy as jnp

    from heinsen.models import hidden_states
    from heinsen.parallel import make_mesh
    from heinsen.training.run import load_run, open_split
    from heinsen.weights import load_params

    config = load_run(workdir)
    split = config.data.validation_split
    if data is not None:
        split = data.name
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=str(data.parent)))
    length = config.sequence_length
    windows = [np.zeros((0, length), np.uint16)]
    for dataset, share in open_split(config, split):
        n = min(int(at_most * share), dataset.num_tokens) // length
        windows.append(dataset.read(0, n * length).reshape(n, length))
    windows = np.concatenate(windows)
    if windows.size < (at_least := max(at_least, QUERIES)):
        raise ValueError(
            f"{config.data.path}, {split}: windows of {length} hold {windows.size:,} of at most {at_most:,} tokens, a "
            f"sequence {at_least:,}: give smaller --lengths, more --tokens or a larger split"
        )
    _, params = load_params(workdir, config.model, make_mesh())
    maps = draw_maps(rng, config.model.d_model).astype(np.float32)

    @jax.jit
    def seen_by_heads(params, tokens, maps):
        x, _ = hidden_states(config.model, params, tokens)
        return jnp.einsum("btw,phwd->phbtd", x, maps)

    parts, start = [], time.monotonic()
    size = min(len(windows), max(1, 2**15 // length))
    for begin in range(0, len(windows), size):
        begin = min(begin, len(windows) - size)  # all calls of one shape; what comes twice is cut off below
        parts.append(np.asarray(seen_by_heads(params, windows[begin : begin + size].astype(np.int32), maps)))
        say(f"text: hidden states of {(begin + size) * length:,} of {windows.size:,} tokens", start)
    if surplus := len(parts) * size - len(windows):
        parts[-1] = parts[-1][:, :, surplus:]
    q, k, v = np.concatenate(parts, axis=2).reshape(3, HEADS, -1, FEATURES)
    return [Tokens("text, in order", q, k, v, True), Tokens("text, independent", q, k, v, False)]


# ---- measurements ------------------------------------------------------------------------------------


def moments(tokens: Tokens, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Over all tokens: I = mean of sigmoid(q . k / sqrt(d)) v, [H, Q, d], and C = the variance of that, [H, Q]."""
    q = tokens.q[:, queries].astype(np.float64)
    first, second, n_tokens = 0.0, 0.0, tokens.k.shape[1]
    for begin in range(0, n_tokens, 2**16):
        k, v = (x[:, begin : begin + 2**16].astype(np.float64) for x in (tokens.k, tokens.v))
        weights = 1 / (1 + np.exp(-(q @ k.swapaxes(-1, -2)) / np.sqrt(FEATURES)))
        first = first + weights @ v / n_tokens
        second = second + np.einsum("hqn,hn->hq", weights**2, np.sum(v**2, axis=-1)) / n_tokens
    return first, second - np.sum(first**2, axis=-1)


def together(forms: dict[str, Form]) -> Callable[..., dict[str, np.ndarray]]:
    """All forms in one compiled function: (q, k, v) -> {form: y}, in float64."""
    import jax

    compiled = jax.jit(lambda q, k, v: {name: form.attend(q, k, v) for name, form in forms.items()})

    def run(q, k, v):
        with jax.enable_x64(True):
            return jax.device_get(compiled(*(x.astype(np.float64) for x in (q, k, v))))

    return run


def measure_outputs(
    forms: dict[str, Form], run, tokens: Tokens, queries: np.ndarray, lengths: list[int], n_sequences: int, rng
) -> dict[str, dict[str, np.ndarray]]:
    """{form: {"norm", "error"}}, each [lengths, sequences]: |y|, and |y - limit|, root mean squares over queries.

    The limit is what all tokens together give; NaN for forms that have none. The sequences are the same for all forms.
    """
    rms = lambda y: np.sqrt(np.mean(np.sum(np.square(y), axis=-1), axis=(-2, -1)))
    start, q = time.monotonic(), tokens.q[:, queries]
    limits = {name: y if forms[name].converges else np.nan for name, y in run(q, tokens.k, tokens.v).items()}
    found = {name: {"norm": [], "error": []} for name in forms}
    for n in lengths:
        at_once = next(m for m in range(min(n_sequences, max(1, AT_ONCE // n)), 0, -1) if n_sequences % m == 0)
        parts = []
        for _ in range(n_sequences // at_once):
            drawn = tokens.draw(rng, at_once, n)
            k, v = (np.moveaxis(x[:, drawn], 0, 1) for x in (tokens.k, tokens.v))
            parts.append(run(np.broadcast_to(q, (at_once, *q.shape)), k, v))
        for name, row in found.items():
            y = np.concatenate([part[name] for part in parts])
            row["norm"].append(rms(y))
            row["error"].append(rms(y - limits[name]))
        say(f"{tokens.name}: n = {n}", start)
    return {name: {quantity: np.array(rows) for quantity, rows in row.items()} for name, row in found.items()}


def measure_doubling(forms: dict[str, Form], run, tokens: Tokens, n: int, rng) -> dict[str, dict[str, float]]:
    """(x_1, x_1, ..., x_n, x_n) against (x_1, ..., x_n), every token a query: {form: {"ratio", "departure"}}.

    ratio: of the norms, the mean over tokens. departure: the largest |y_twice - ratio predicted * y| / |y| of a token;
    NaN where none is predicted.
    """
    drawn = tokens.draw(rng, 1, n)[0]
    once = [x[:, drawn] for x in (tokens.q, tokens.k, tokens.v)]
    ys, ys_twice = run(*once), run(*(np.repeat(x, 2, axis=1) for x in once))
    norm, found = lambda y: np.linalg.norm(y, axis=-1), {}
    for name, form in forms.items():
        y, y_twice = np.repeat(ys[name], 2, axis=1), ys_twice[name]
        wanted = np.nan if form.doubling is None else form.doubling
        departure = np.max(norm(y_twice - wanted * y) / norm(y))
        found[name] = {"ratio": float(np.mean(norm(y_twice) / norm(y))), "departure": float(departure)}
    return found


def fit_exponent(lengths: list[int], values: np.ndarray) -> tuple[float, float]:
    """(exponent, its standard error) of values [lengths, sequences] by least squares of logarithms.

    A slope for each column, whose sequences are drawn apart from those of the others: their mean and its error, 0 for
    a single one.
    """
    x = np.log(lengths) - np.mean(np.log(lengths))
    slopes = x @ np.log(values) / np.sum(x**2)
    error = np.std(slopes, ddof=1) / np.sqrt(len(slopes)) if len(slopes) > 1 else 0.0
    return float(np.mean(slopes)), float(error)


def norm_by_law(lengths: list[int], alpha: float, square: float, variance: float) -> np.ndarray:
    """sqrt(E |y|^2) for each n, of independent tokens: `square` is |I|^2, `variance` C."""
    n = np.array(lengths, float)
    return n**-alpha * np.sqrt(n**2 * square + n * variance)


def upper_half(lengths: list[int]) -> list[int]:
    return lengths[(len(lengths) - 1) // 2 :]


def study(forms: dict[str, Form], run, tokens: Tokens, lengths: list[int], n_sequences: int, rng) -> dict[str, Any]:
    """All that is measured of one kind of tokens, to be written as JSON; run is `together(forms)`."""
    queries = rng.choice(tokens.k.shape[1], QUERIES, replace=False)
    integral, variance = moments(tokens, queries)
    square, variance = float(np.mean(np.sum(integral**2, axis=-1))), float(np.mean(variance))
    outputs = measure_outputs(forms, run, tokens, queries, lengths, n_sequences, rng)
    doubling = measure_doubling(forms, run, tokens, min(DOUBLED, tokens.k.shape[1]), rng)
    long = upper_half(lengths)
    by_law = lambda lengths: fit_exponent(lengths, norm_by_law(lengths, 1.0, square, variance)[:, None])[0]
    results = []
    for name, form in forms.items():
        norms, errors = outputs[name]["norm"], outputs[name]["error"]
        results.append(
            dict(
                form=name,
                alpha=form.alpha,
                growth_predicted=form.growth,
                growth=fit_exponent(lengths, norms),
                growth_of_long=fit_exponent(long, norms[-len(long) :]),
                doubling_predicted=form.doubling,
                doubling=doubling[name]["ratio"],
                doubling_departure=None if form.doubling is None else doubling[name]["departure"],
                convergence=fit_exponent(lengths, errors) if form.converges else None,
                norms=np.mean(norms, axis=1).tolist(),
                errors=np.mean(errors, axis=1).tolist() if form.converges else None,
            )
        )
    return dict(
        tokens=tokens.name,
        population=tokens.k.shape[1],
        lengths=lengths,
        fitted_long=long,
        sequences=n_sequences,
        norm_of_integral=square**0.5,
        variance_of_one=variance,
        crossover=variance / square,
        growth_of_fluctuation=[by_law(lengths), by_law(long)],
        results=results,
    )


# ---- what is told ------------------------------------------------------------------------------------


def say(text: str, start: float) -> None:
    print(f"{text}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def with_error(fit: tuple[float, float] | None) -> str:
    return "-" if fit is None else f"{fit[0]:.4f} +- {fit[1]:.4f}"


def concise(fit: tuple[float, float]) -> str:
    """0.9974(8): the error in units of the last digit."""
    digits = max(0, -math.floor(math.log10(fit[1]))) if fit[1] > 0 else 4
    return f"{fit[0]:.{digits}f}({round(fit[1] * 10**digits)})"


def table(found: dict[str, Any]) -> list[str]:
    long = found["fitted_long"]
    header = [
        f"{'':<22}",
        f"{'growth, all n':>20}",
        f"{f'growth, n >= {long[0]}':>21}",
        f"{'law':>8}",
        f"{'doubling':>11}",
        f"{'law':>9}",
        f"{'departure':>11}",
        f"{'convergence':>20}",
    ]
    off_all, off_long = found["growth_of_fluctuation"]
    lines = [
        f"{found['tokens']}: {found['population']:,} to draw from; |I| = {found['norm_of_integral']:.3f}, n* = "
        f"{found['crossover']:.1f}: growth of independent tokens {off_all:+.4f} off its law, {off_long:+.4f} from "
        f"{long[0]} on",
        "".join(header),
    ]
    for row in found["results"]:
        law = "-" if row["doubling_predicted"] is None else f"{row['doubling_predicted']:.6f}"
        departure = "-" if row["doubling_departure"] is None else f"{row['doubling_departure']:.0e}"
        lines.append(
            f"{row['form']:<22}{with_error(row['growth']):>20}{with_error(row['growth_of_long']):>21}"
            f"{row['growth_predicted']:>8.2f}{row['doubling']:>11.6f}{law:>9}{departure:>11}"
            f"{with_error(row['convergence']):>20}"
        )
    return lines


def plot(studies: list[dict[str, Any]], path: Path) -> None:
    """path.png and path.svg: norms against n, convergence at alpha = 1, doubling ratios against alpha.

    Lines are laws: of the norms sqrt(E |y|^2) for independent tokens, and dotted its limit n^(1 - alpha) |I|.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    of = {found["tokens"]: found for found in studies}
    shown = [of[name] for name in ("random tokens", "text, in order") if name in of]
    n_panels = len(shown) + 2
    shape = (2, 2) if n_panels == 4 else (1, n_panels)
    style = {
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 7,
        "svg.fonttype": "none",
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(*shape, figsize=(3.6 * shape[1], 2.9 * shape[0]), squeeze=False)
        *growth, convergence, doubling = axes.flat
        for axis, found in zip(growth, shown, strict=True):
            plot_growth(axis, found)
        plot_convergence(convergence, studies)
        plot_doubling(doubling, studies)
        for letter, axis in zip("abcd", axes.flat, strict=False):
            axis.set_title(f"({letter}) {axis.get_title()}", loc="left", fontsize=8)
            axis.set_title("")
        figure.tight_layout()
        figure.savefig(path.with_suffix(".png"), dpi=200)
        figure.savefig(path.with_suffix(".svg"))
        plt.close(figure)


def plot_growth(axis, found: dict[str, Any]) -> None:
    import matplotlib.pyplot as plt

    lengths, square = found["lengths"], found["norm_of_integral"] ** 2
    n, sigmoids = np.array(lengths, float), [row for row in found["results"] if row["alpha"] is not None]
    colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(sigmoids)))
    for row, color in zip(sigmoids, colors, strict=True):
        law = norm_by_law(lengths, row["alpha"], square, found["variance_of_one"])
        axis.loglog(n, law, color=color, linewidth=1)
        axis.loglog(n, n ** (1 - row["alpha"]) * square**0.5, ":", color=color, linewidth=1)
        label = rf"$\alpha$ = {row['alpha']:g}: {concise(row['growth_of_long'])}"
        axis.loglog(n, row["norms"], "o", color=color, markersize=3, label=label)
    for name, marker in (("softmax", "s"), ("heinsen", "^")):
        row = next(row for row in found["results"] if row["form"] == name)
        label = f"{name}: {concise(row['growth_of_long'])}"
        axis.loglog(n, row["norms"], marker, color="0.45", markersize=3, markerfacecolor="none", label=label)
    axis.set_xscale("log", base=2)
    axis.minorticks_off()
    axis.set_ylim(top=axis.get_ylim()[1] * 3e4)  # room for the legend
    axis.legend(
        title=rf"fitted exponent of $n \geq {found['fitted_long'][0]}$",
        title_fontsize=7,
        alignment="left",
        ncol=2,
        loc="upper left",
        handlelength=0.8,
        columnspacing=0.8,
    )
    axis.set(xlabel="keys $n$", ylabel=r"$\|y\|$", title=f"output norm, {found['tokens']}")


def plot_convergence(axis, studies: list[dict[str, Any]]) -> None:
    for found, marker in zip(studies, "os^", strict=False):
        row = next((row for row in found["results"] if row["alpha"] == 1), None)
        if row is None:
            continue
        n, errors = np.array(found["lengths"], float), np.array(row["errors"]) / found["norm_of_integral"]
        label = f"{found['tokens']}: {concise(row['convergence'])}"
        (line,) = axis.loglog(n, errors, marker, markersize=3, label=label)
        if not found["tokens"].endswith("in order"):
            axis.loglog(n, np.sqrt(found["crossover"] / n), color=line.get_color(), linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=axis.get_ylim()[0] / 6)  # room for the legend
    axis.legend(loc="lower left", title="fitted exponent of all $n$", title_fontsize=7, alignment="left")
    axis.set(xlabel="keys $n$", ylabel=r"$\|y - I\| \, / \, \|I\|$", title=r"convergence at $\alpha = 1$")


def plot_doubling(axis, studies: list[dict[str, Any]]) -> None:
    alphas = [row["alpha"] for row in studies[0]["results"] if row["alpha"] is not None]
    grid = np.linspace(min(alphas), max(alphas), 100)
    axis.plot(grid, 2 ** (1 - grid), color="0.2", linewidth=1, label=r"$2^{1 - \alpha}$")
    for found, marker, size in zip(studies, "os^", (3, 5.5, 8), strict=False):
        rows = [row for row in found["results"] if row["alpha"] is not None]
        points = [row["alpha"] for row in rows], [row["doubling"] for row in rows]
        axis.plot(*points, marker, markersize=size, markerfacecolor="none", label=found["tokens"])
    for name, line in (("softmax", dict(color="0.8", linewidth=3)), ("heinsen", dict(color="0.2", linestyle=":"))):
        ratio = next(row["doubling"] for row in studies[0]["results"] if row["form"] == name)
        axis.axhline(ratio, zorder=0, label=name, **line)
    axis.legend(loc="upper right")
    axis.set(xlabel=r"$\alpha$", ylabel=r"$\|\hat y\| \, / \, \|y\|$", title="every token twice")


# ---- the command -------------------------------------------------------------------------------------


def parse_lengths(texts: list[str]) -> list[int]:
    try:
        lengths = sorted({int(text) for text in texts})
    except ValueError:
        lengths = []
    if len(lengths) < 3 or lengths[0] < 1:
        raise app.UsageError(f"--lengths={','.join(texts)}: expected three numbers of keys or more, e.g. 16,256,4096")
    return lengths


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    if FLAGS.data is not None and FLAGS.workdir is None:
        raise app.UsageError("--data is text for the model of a run: give its --workdir too")
    lengths = parse_lengths(FLAGS.lengths)
    if not np.isfinite(FLAGS.mean):
        raise app.UsageError(f"--mean={FLAGS.mean}: expected a finite number")
    logging.set_verbosity(logging.WARNING)
    from heinsen.config import ConfigError
    from heinsen.data.dataset import DatasetError
    from heinsen.training.checkpoint import CheckpointError
    from heinsen.training.run import RunError

    rng, out = np.random.default_rng(FLAGS.seed), Path(FLAGS.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"error: --out={out} cannot be made: {error}")
    kinds = [random_tokens(rng, FLAGS.mean)]
    if FLAGS.workdir is not None:
        data = None if FLAGS.data is None else Path(FLAGS.data)
        try:
            kinds += text_tokens(rng, Path(FLAGS.workdir), data, FLAGS.tokens, lengths[-1])
        except (ConfigError, CheckpointError, DatasetError, RunError, ValueError) as error:
            sys.exit(f"error: {error}")
    forms = make_forms()
    run = together(forms)
    studies = [study(forms, run, tokens, lengths, FLAGS.sequences, rng) for tokens in kinds]
    print(
        f"{HEADS} heads of {FEATURES}, {QUERIES} queries, {FLAGS.sequences} sequences for each n; errors are standard"
    )
    for found in studies:
        print("\n" + "\n".join(table(found)))
    settings = {name: FLAGS[name].value for name in ("workdir", "data", "mean", "seed")}
    (out / "results.json").write_text(json.dumps(dict(settings=settings, studies=studies), indent=1) + "\n")
    plot(studies, out / "sigmoid_scaling")
    print(f"\nwritten: {out / 'results.json'}, {out / 'sigmoid_scaling.png'}, {out / 'sigmoid_scaling.svg'}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
