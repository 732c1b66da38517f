"""One optimizer step as a pure function, jitted over a mesh with a donated state."""

from collections.abc import Callable, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from heinsen.models import ModelConfig, Params, init_params, masked_loss, mean_loss
from heinsen.parallel import replicated, shardings, split_batch, with_shardings
from heinsen.promotion import usual_promotion
from heinsen.training.devices import compiler_options


class TrainState(NamedTuple):
    """Everything that a step updates.

    opt_state counts the updates. skipped counts the steps whose loss or gradient was not finite: in "all", and
    "in_a_row" up to now.
    """

    params: Params
    opt_state: Any
    skipped: dict[str, Int[Array, ""]]


Metrics = dict[str, jax.Array]


def init_function(
    model: ModelConfig, optimizer: optax.GradientTransformation, seed: int | jax.Array
) -> Callable[[], TrainState]:
    """Return the function that computes the state before the first step; the seed may be traced."""
    return lambda: begin_training(optimizer, init_params(model, jax.random.key(seed)))


def begin_training(optimizer: optax.GradientTransformation, params: Params) -> TrainState:
    """Return the state before the first step from these parameters."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(params), {"all": zero, "in_a_row": zero})


def init_train_state(
    model: ModelConfig, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh, params: Params | None = None
) -> TrainState:
    """Return the state before the first step of a stage; each device computes only its own part.

    params: those to start with, which are donated; None: random ones.
    """
    where = jax.tree.map(lambda x: x.sharding, abstract_train_state(model, optimizer, mesh))
    if params is not None:
        return jax.jit(partial(begin_training, optimizer), out_shardings=where, donate_argnums=0)(params)
    return jax.jit(init_function(model, optimizer, seed), out_shardings=where)()


def abstract_train_state(model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Return the shapes, dtypes and shardings of a state. Raises MeshError if the mesh does not divide it."""
    abstract = jax.eval_shape(init_function(model, optimizer, 0))
    return with_shardings(abstract, shardings(mesh, abstract))


def make_train_step(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    loss: Callable[..., Any] | None = None,
    trained: Set[str] | None = None,
) -> jax.stages.Wrapped:
    """Return `make_step` jitted over the mesh, with XLA's options for its devices. The given state is donated."""
    where = jax.tree.map(lambda x: x.sharding, abstract_train_state(model, optimizer, mesh))
    return jax.jit(
        make_step(model, optimizer, mesh, loss, trained),
        in_shardings=(where, split_batch(mesh, axis=1)),
        out_shardings=(where, replicated(mesh)),
        donate_argnums=0,
        compiler_options=compiler_options(),
    )


def make_step(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
    loss: Callable[..., Any] | None = None,
    trained: Set[str] | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """Return the step (state, batches [A, R, ...]) -> (state, metrics), a pure function.

    The batches are of `heinsen.training.data.make_microbatches`. The loss is the mean over A microbatches of R rows. A
    step with a loss or gradient that is not finite changes neither parameters nor optimizer state, and is counted as
    skipped.

    Args:
      loss: (model, params, batch, mesh) -> scalar, or (scalar, metrics); None: that of the model's objective.
      trained: names of the parameters that learn, joined by dots; None: all.

    Returns:
      The step. Its metrics are "loss", by default in nats per token, and the metrics that come with it; "grad_norm"
      before clipping; "param_norm"; "skipped" and "skipped_in_a_row", the counts after the step.
    """
    microbatch_loss: Callable[..., Any] = loss or (mean_loss if model.causal else masked_loss)

    def with_metrics(params: Params, batch: Any) -> tuple[jax.Array, Metrics]:
        frozen = _select(trained, params, jax.lax.stop_gradient)
        result = microbatch_loss(model, frozen, batch, mesh)
        return result if isinstance(result, tuple) else (result, {})

    value_and_grad = jax.value_and_grad(with_metrics, has_aux=True)

    def loss_and_grads(params: Params, batches: Any) -> tuple[tuple[jax.Array, Metrics], Params]:
        if microbatch_loss is masked_loss:
            batches = _scale_weights(batches)
        n_microbatches = jax.tree.leaves(batches)[0].shape[0]
        if n_microbatches == 1:
            return value_and_grad(params, jax.tree.map(lambda x: x[0], batches))

        def add(total: tuple[jax.Array, Params], batch: Any) -> tuple[tuple[jax.Array, Params], Metrics]:
            (value, metrics), grads = value_and_grad(params, batch)
            return jax.tree.map(jnp.add, total, (value, grads)), metrics

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, metrics = jax.lax.scan(add, zeros, batches)
        mean, grads = jax.tree.map(lambda x: x / n_microbatches, total)
        return (mean, jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)), grads

    @usual_promotion
    def step(state: TrainState, batches: Any) -> tuple[TrainState, Metrics]:
        (mean, metrics), grads = loss_and_grads(state.params, batches)
        grad_norm = optax.tree.norm(grads)
        is_finite = jnp.isfinite(mean) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updates = _select(trained, updates, jnp.zeros_like)
        updated = optax.apply_updates(state.params, updates), opt_state
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old), updated, (state.params, state.opt_state)
        )
        skipped = {
            "all": state.skipped["all"] + ~is_finite,
            "in_a_row": jnp.where(is_finite, 0, state.skipped["in_a_row"] + 1),
        }
        metrics |= {"loss": mean, "grad_norm": grad_norm, "param_norm": optax.tree.norm(params)}
        metrics |= {"skipped": skipped["all"], "skipped_in_a_row": skipped["in_a_row"]}
        return TrainState(params, opt_state, skipped), metrics

    return step


def _select(trained: Set[str] | None, params: Params, otherwise: Callable[[jax.Array], jax.Array]) -> Params:
    """Return a tree of parameters with `otherwise` applied to those that do not learn."""
    if trained is None:
        return params
    learns = lambda path: jax.tree_util.keystr(path, simple=True, separator=".") in trained
    return jax.tree_util.tree_map_with_path(lambda path, x: x if learns(path) else otherwise(x), params)


def _scale_weights(batches: dict[str, Array]) -> dict[str, Array]:
    """Scale a masked model's "weights": the mean over the microbatches becomes the mean over all hidden tokens.

    Microbatches hide different numbers of tokens.
    """
    weights = batches["weights"]
    return batches | {"weights": weights * (len(weights) / jnp.maximum(jnp.sum(weights), 1))}
