"""The forms of sigmoid attention, the growth of each by its law, and the initial parameters of the controlled runs.

It is also the config of their sweeps.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict

from experiments.attribution import config as attribution
from experiments.sigmoid_scaling.forms import window_growth
from experiments.tools import RATE, ExperimentError
from heinsen.config import from_mapping
from heinsen.export import save_folder
from heinsen.models import Params, init_params
from heinsen.sweep.runs import RunView, best_of
from heinsen.sweep.space import Value
from heinsen.training.config import TrainConfig

ONE, STEEPER = "alpha 1", "alpha 1.5"
FORMS: dict[str, dict[str, Value]] = {
    ONE: dict(attention="sigmoid"),
    "alpha 0.5": dict(attention="sigmoid", sigmoid_alpha=0.5),
    STEEPER: dict(attention="sigmoid", sigmoid_alpha=1.5),
    "alpha 0, bias -log n": dict(attention="sigmoid", sigmoid_alpha=0.0, sigmoid_bias="-log_n"),
}


def get_config() -> ConfigDict:
    return attribution.get_config("0.5M")


def train_config(form: str) -> TrainConfig:
    mapping = get_config()
    mapping.model.update(FORMS[form])
    return from_mapping(TrainConfig, mapping.to_dict())


def fields(form: str) -> dict[str, Value]:
    """Return the values of all fields in which forms differ, as a sweep sets them."""
    model = train_config(form).model
    return {f"model.{field}": getattr(model, field) for field in ("attention", "sigmoid_alpha", "sigmoid_bias")}


def runs_of(form: str, runs: Iterable[RunView]) -> list[RunView]:
    own = fields(form).items()
    return [run for run in runs if own <= run.run.point.items()]


def losses(form: str, runs: Sequence[RunView]) -> dict[float, float | None]:
    """Return a form's last validation loss by learning rate, None for crashed runs."""
    return dict(sorted((run.run.point[RATE], run.result) for run in runs_of(form, runs)))


def best_rate(form: str, runs: Sequence[RunView]) -> float:
    """Return the learning rate with the lowest validation loss. Raises ExperimentError."""
    best = best_of(runs_of(form, runs))
    if best is None:
        raise ExperimentError(f"{form} has crashed at all learning rates: lower them in run.py")
    return best.run.point[RATE]


def growth(form: str, n_tokens: int) -> float:
    """Return `window_growth` of a form."""
    model = train_config(form).model
    return window_growth(n_tokens, model.sigmoid_alpha, model.sigmoid_bias)


def exchanged_scale(form: str) -> float:
    """Return what multiplies the initial outputs of `ONE` to be those of `STEEPER`, by the law, or the reverse."""
    length = get_config().sequence_length
    ratio = growth(STEEPER, length) / growth(ONE, length)
    return {ONE: ratio, STEEPER: 1 / ratio}[form]


def write_start(folder: Path, form: str, scale: float) -> None:
    """Write initial parameters for --config.init_from, with `scale` times the weights that read the attention (W2)."""
    if folder.exists():
        return
    run = train_config(form)
    params = scale_outputs(init_params(run.model, jax.random.key(1)), scale)
    folder.parent.mkdir(parents=True, exist_ok=True)
    card = f"# Initial parameters\n\n{form}, W2 times {scale:g}, of experiments/sigmoid_training.\n"
    save_folder(folder, run.model, "bytes", params, step=0, run=dataclasses.asdict(run), card=card)


def scale_outputs(params: Params, scale: float) -> Params:
    """Return the parameters with `scale` times the kernels of W2."""
    layers = params["layers"]
    w2 = layers["w2"] | {"kernel": layers["w2"]["kernel"] * scale}
    return params | {"layers": layers | {"w2": w2}}
