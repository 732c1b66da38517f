"""The conversion of a trained softmax model to attention of constant cost per token (docs/conversion.md).

The model is the teacher's with another attention. It begins with the teacher's weights, feature maps and, if the
teacher has none, a forget gate. First these alone learn: in each layer, to give the teacher's attention outputs for the
teacher's inputs, as in T2R (arXiv:2103.13076), Hedgehog (2402.04347) and LoLCATs (2410.10254). All other weights stay
the teacher's, so that one set of parameters is both models. Then everything learns by the language-model loss.
"""

import dataclasses
import os.path
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from heinsen.config import ConfigError
from heinsen.export.state_dicts import from_arrays, named_leaves, parameter_names
from heinsen.models import ModelConfig, Params, abstract_params, attention_distances, init_params, mean_loss
from heinsen.models.mixers import MIXERS
from heinsen.parallel import shardings
from heinsen.training.config import TrainConfig
from heinsen.training.folder import load_run

# ---- the teacher -----------------------------------------------------------------------------


def take_from_teacher(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a config file: in a conversion, fields of the model that are None are the teacher's.

    Raises ConfigError for a teacher that cannot be converted, RunError where there is none.
    """
    match values:
        case {"conversion": {"share": float() | int()} as conversion, "model": {} as model, "init_from": source}:
            pass
        case _:
            return values
    if source is None:
        if None in (model["n_layers"], conversion["forget_gate"], conversion["position"]):
            raise ConfigError(
                "config.init_from = None: a conversion starts from a trained softmax model; give its run or its "
                "weights, --config.init_from=DIR"
            )
        return values
    teacher = load_run(Path(os.path.expanduser(source))).model
    if not (teacher.causal and len(teacher.pattern) == 1 and teacher.mixers[0].can_teach):
        kinds = " or ".join(name for name, build in MIXERS.items() if build(teacher).can_teach)
        raise ConfigError(
            f"{source} has model.attention = {teacher.attention!r} and objective = {teacher.objective!r}: a conversion "
            f"starts from {kinds} attention in all layers and objective = next_token; give another --config.init_from"
        )
    # Maps of rotated queries and keys would have to undo the rotations (docs/conversion.md).
    known = dataclasses.asdict(teacher) | {"position": "none" if teacher.position == "rotary" else teacher.position}
    model = {name: known.get(name) if value is None else value for name, value in model.items()}
    own = {name: conversion[name] or getattr(teacher, name) for name in ("forget_gate", "position")}
    conversion = {**conversion, **own}
    return {**values, "model": model, "conversion": conversion}


def names_of_added(config: TrainConfig) -> frozenset[str]:
    """Return the names of the parameters that the teacher lacks, the first to be trained."""
    return frozenset(parameter_names(config.model)) - {*parameter_names(config.teacher)}


def add_to_teacher(config: TrainConfig, params: Params, mesh: Mesh) -> Params:
    """Return the parameters of the run's model before the first step: the teacher's, and those that it lacks."""
    added = names_of_added(config)

    def draw() -> dict[str, Array]:
        drawn = init_params(config.model, jax.random.key(config.seed))
        return {name: x for name, x in named_leaves(drawn) if name in added}

    where = dict(named_leaves(shardings(mesh, abstract_params(config.model))))
    drawn = jax.jit(draw, out_shardings={name: where[name] for name in added})()
    return from_arrays(config.model, dict(named_leaves(params)) | drawn)


# ---- batches and losses ----------------------------------------------------------------------


def draw_first_places(config: TrainConfig, step: int, rows: Int[np.ndarray, " M"]) -> Int[np.ndarray, " M"]:
    """Return the place of the first token of each window: 0, or with rotary positions anything.

    It is below `conversion.window_starts` windows. The teacher's scores do not change with it, and the maps see every
    phase of the rotations. rows: indices of these rows in the global batch of the step.
    """
    n_places = config.conversion.window_starts * config.sequence_length
    if config.model.position != "rotary" or n_places == 0:
        return np.zeros(len(rows), np.int32)
    draw = lambda row: np.random.default_rng([config.seed, step, row]).integers(n_places)
    return np.array([draw(row) for row in rows.tolist()], np.int32)


def attention_loss(
    teacher: ModelConfig, model: ModelConfig, params: Params, batch: dict[str, Array], mesh: Mesh | None
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return the mean of all layers' distances from the teacher (`attention_distances`), and each as a metric."""
    tokens, first_place = batch["tokens"][:, :-1], batch["first_place"]
    distances = attention_distances(model, teacher, params, tokens, mesh, first_place)
    return jnp.mean(distances), {f"distance/layer_{i}": distance for i, distance in enumerate(distances)}


def text_loss(model: ModelConfig, params: Params, batch: dict[str, Array], mesh: Mesh | None) -> Float[Array, ""]:
    """Return the language-model loss."""
    return mean_loss(model, params, batch["tokens"], mesh, batch["first_place"])
