"""Parameters from a run or an export, placed on a mesh."""

from pathlib import Path

import jax
from jax.sharding import Mesh

from heinsen.interop import InteropError, is_export, load_folder, read_manifest
from heinsen.models import ModelConfig, Params, abstract_params
from heinsen.parallel import MeshError, make_mesh, shardings, with_shardings
from heinsen.training.checkpoint import CheckpointError, restore_params
from heinsen.training.run import RunError, TrainConfig, check_mesh, check_same_model, load_run


def load_params(workdir: Path, model: ModelConfig, mesh: Mesh) -> tuple[int, Params]:
    """(step, parameters) of a run's newest good checkpoint, or of exported weights, split over the mesh.

    Raises CheckpointError, MeshError, and RunError for exported weights of another model.
    """
    abstract = abstract_params(model)
    abstract = with_shardings(abstract, shardings(mesh, abstract))
    if not is_export(workdir):
        return restore_params(workdir, abstract)
    try:
        manifest = read_manifest(workdir)
        check_same_model(manifest.model, model, workdir)
        _, _, params = load_folder(workdir)
    except InteropError as error:
        raise CheckpointError(str(error)) from error

    def place(x, like):  # each device its own part
        return jax.make_array_from_callback(like.shape, like.sharding, lambda part: x[part].astype(like.dtype))

    return manifest.step, jax.tree.map(place, params, abstract)


def load_initial_params(config: TrainConfig, mesh: Mesh) -> tuple[int, Params]:
    """(step, parameters) that `init_from` names, split over the mesh.

    Raises RunError where they are of another model or tokenizer, ConfigError, CheckpointError, MeshError.
    """
    source = Path(config.init_from)
    old = load_run(source)
    check_same_model(old.model, config.model, source)
    if old.data.tokenizer != config.data.tokenizer:
        raise RunError(
            f"{source} holds the weights of a model of {old.data.tokenizer!r} tokens, the config says data.tokenizer = "
            f"{config.data.tokenizer!r}: give other weights, or data of the same tokens"
        )
    return load_params(source, config.model, mesh)


def mesh_for_reading(config: TrainConfig) -> Mesh:
    """The run's mesh where it fits these devices, else all of them along `data`, to evaluate or generate."""
    try:
        mesh = make_mesh(config.mesh)
        check_mesh(config, mesh)
        shardings(mesh, abstract_params(config.model))
    except MeshError:
        return make_mesh()
    return mesh
