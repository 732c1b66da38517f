"""Load parameters from a run or an export, placed on a mesh."""

import dataclasses
import os.path
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from heinsen.export import ExportError, is_export, load_folder, read_manifest
from heinsen.export.state_dicts import from_arrays, named_leaves
from heinsen.models import ModelConfig, Params, abstract_params
from heinsen.models.additions import ADDITIONS, identity_params
from heinsen.parallel import MeshError, make_mesh, shardings, with_shardings
from heinsen.training.checkpoint import CheckpointError, restore_params
from heinsen.training.config import TrainConfig, check_mesh
from heinsen.training.conversion import add_to_teacher
from heinsen.training.folder import RunError, check_same_model, load_run, load_tokenizer_name


class LoadedParams(NamedTuple):
    step: int  # of training
    params: Params


def load_params(workdir: Path, model: ModelConfig, mesh: Mesh) -> LoadedParams:
    """Load the parameters of a run's newest whole checkpoint, or of an export, split over the mesh.

    Raises:
      CheckpointError: there is no usable checkpoint, or the export is damaged.
      MeshError: the mesh does not divide the parameters.
      RunError: the export holds another model, or the run has no config.
    """
    abstract = abstract_params(model)
    abstract = with_shardings(abstract, shardings(mesh, abstract))
    if not is_export(workdir):
        # The hash tells a config.json that was damaged or edited since.
        return LoadedParams(*restore_params(workdir, abstract, load_run(workdir).fingerprints))
    try:
        manifest = read_manifest(workdir)
        check_same_model(manifest.model, model, workdir)
        _, _, params = load_folder(workdir)
    except ExportError as error:
        raise CheckpointError(str(error)) from error

    def place(x: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        # Each device copies only its own part.
        return jax.make_array_from_callback(like.shape, like.sharding, lambda part: x[part].astype(like.dtype))

    return LoadedParams(manifest.step, jax.tree.map(place, params, abstract))


def load_initial_params(config: TrainConfig, mesh: Mesh, tokenizer: str) -> LoadedParams:
    """Load the parameters that `config.init_from` names, split over the mesh.

    The run's model may have additions to the model there (`heinsen.models.additions`): they begin doing nothing, so
    that the run starts at that model's outputs. Or the run may convert that model. `tokenizer` is that of the run's
    data.

    Raises RunError if they belong to another model or tokenizer; ConfigError, CheckpointError, MeshError.
    """
    assert config.init_from is not None, "init_from is not set"
    source = Path(os.path.expanduser(config.init_from))
    old = load_run(source)
    absent = {name: each.absent for name, each in ADDITIONS.items() if getattr(old.model, name) == each.absent}
    converts = config.conversion.share is not None
    model = config.teacher if converts else dataclasses.replace(config.model, **absent)
    check_same_model(old.model, model, source)
    if (old_tokenizer := load_tokenizer_name(source)) != tokenizer:
        raise RunError(
            f"{source} holds the weights of a model of {old_tokenizer!r} tokens, the data of {config.data.path} has "
            f"{tokenizer!r} tokens: use other weights, or data of the same tokenizer"
        )
    loaded = load_params(source, model, mesh)
    if converts:
        return loaded._replace(params=add_to_teacher(config, loaded.params, mesh))
    if model == config.model:
        return loaded
    identity = partial(identity_params, config.model)
    added = jax.jit(identity, out_shardings=shardings(mesh, jax.eval_shape(identity)))()
    try:
        params = from_arrays(config.model, dict(named_leaves(added) + named_leaves(loaded.params)))
    except ExportError as error:
        raise RunError(f"{source} cannot start this model: {error}. Use weights of the same model") from error
    return loaded._replace(params=params)


def mesh_for_reading(config: TrainConfig) -> Mesh:
    """Return the run's mesh if it fits the devices here, else all of them along `data`; to evaluate or generate."""
    try:
        mesh = make_mesh(config.mesh)
        check_mesh(config, mesh)
        shardings(mesh, abstract_params(config.model))
    except MeshError:
        return make_mesh()
    return mesh
