"""The forms of sigmoid attention, the growth of each by its law, and the initial parameters of the controlled runs."""

import dataclasses
from pathlib import Path

import jax

from experiments.forgetting import config
from experiments.sigmoid_scaling.forms import window_growth
from experiments.tools import Contest
from heinsen.export import save_folder
from heinsen.models import Params, init_params
from heinsen.sweep.space import Value

ONE, STEEPER = "alpha 1", "alpha 1.5"
FORMS: dict[str, dict[str, Value]] = {
    ONE: dict(attention="sigmoid"),
    "alpha 0.5": dict(attention="sigmoid", sigmoid_alpha=0.5),
    STEEPER: dict(attention="sigmoid", sigmoid_alpha=1.5),
    "alpha 0, bias -log n": dict(attention="sigmoid", sigmoid_alpha=0.0, sigmoid_bias="-log_n"),
}
CONTEST = Contest(config, FORMS)


def growth(form: str, n_tokens: int) -> float:
    """Return `window_growth` of a form."""
    model = CONTEST.train_config(form).model
    return window_growth(n_tokens, model.sigmoid_alpha, model.sigmoid_bias)


def exchanged_scale(form: str) -> float:
    """Return what multiplies the initial outputs of `ONE` to be those of `STEEPER`, by the law, or the reverse."""
    length = config.get_config().sequence_length
    ratio = growth(STEEPER, length) / growth(ONE, length)
    return {ONE: ratio, STEEPER: 1 / ratio}[form]


def write_start(folder: Path, form: str, scale: float) -> None:
    """Write initial parameters for --config.init_from, with `scale` times the weights that read the attention (W2)."""
    if folder.exists():
        return
    run = CONTEST.train_config(form)
    params = scale_outputs(init_params(run.model, jax.random.key(1)), scale)
    folder.parent.mkdir(parents=True, exist_ok=True)
    card = f"# Initial parameters\n\n{form}, W2 times {scale:g}, of experiments/sigmoid_training.\n"
    save_folder(folder, run.model, "bytes", params, step=0, run=dataclasses.asdict(run), card=card)


def scale_outputs(params: Params, scale: float) -> Params:
    """Return the parameters with `scale` times the kernels of W2."""
    layers = params["layers"]
    w2 = layers["w2"] | {"kernel": layers["w2"]["kernel"] * scale}
    return params | {"layers": layers | {"w2": w2}}
