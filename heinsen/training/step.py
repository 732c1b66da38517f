"""One optimizer step as a pure function, jitted over a mesh with a donated state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from heinsen.models import ModelConfig, Params, init_params, mean_loss
from heinsen.parallel import replicated, shardings, split_batch, with_shardings


class TrainState(NamedTuple):
    params: Params
    opt_state: Any  # counts the steps done, skipped ones left out
    skipped: dict[
        str, Int[Array, ""]
    ]  # steps whose loss or gradient was not finite: in "all", and "in_a_row" until now


def _initialise(model: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> Callable[[], TrainState]:
    def init():
        params = init_params(model, jax.random.key(seed))
        zero = jnp.zeros((), jnp.int32)
        return TrainState(params, optimizer.init(params), {"all": zero, "in_a_row": zero})

    return init


def init_train_state(model: ModelConfig, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    """Every device makes its own part only."""
    where = jax.tree.map(lambda x: x.sharding, abstract_train_state(model, optimizer, mesh))
    return jax.jit(_initialise(model, optimizer, seed), out_shardings=where)()


def abstract_train_state(model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of a state. Raises MeshError where the mesh does not divide it."""
    abstract = jax.eval_shape(_initialise(model, optimizer, 0))
    return with_shardings(abstract, shardings(mesh, abstract))


def make_train_step(
    model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, loss: Callable[..., jax.Array] = mean_loss
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """(state, tokens [A, B, T + 1]) -> (state, metrics): the mean over A accumulated passes of B rows.

    Another `loss`, (model, params, batch, mesh) -> scalar, may take a tree of arrays [A, B, ...] instead of tokens.
    The state given is donated. A step whose loss or gradient is not finite changes nothing but the count of such steps.

    metrics: "loss" in nats a token; "grad_norm", the gradient's before clipping; "param_norm"; "skipped" and
    "skipped_in_a_row", the counts after the step.
    """

    def loss_fn(params, batch):
        return loss(model, params, batch, mesh)

    def gradients(params, batches):
        n_passes = jax.tree.leaves(batches)[0].shape[0]
        if n_passes == 1:
            return jax.value_and_grad(loss_fn)(params, jax.tree.map(lambda x: x[0], batches))
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        add = lambda total, batch: (jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, batch)), None)
        total, _ = jax.lax.scan(add, zeros, batches)
        return jax.tree.map(lambda x: x / n_passes, total)

    def step(state, batches):
        value, grads = gradients(state.params, batches)
        grad_norm = optax.tree.norm(grads)
        usable = jnp.isfinite(value) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updated = optax.apply_updates(state.params, updates), opt_state
        kept = jax.tree.map(lambda new, old: jnp.where(usable, new, old), updated, (state.params, state.opt_state))
        skipped = {
            "all": state.skipped["all"] + ~usable,
            "in_a_row": jnp.where(usable, 0, state.skipped["in_a_row"] + 1),
        }
        metrics = {"loss": value, "grad_norm": grad_norm, "param_norm": optax.tree.norm(kept[0])}
        metrics |= {"skipped": skipped["all"], "skipped_in_a_row": skipped["in_a_row"]}
        return TrainState(*kept, skipped), metrics

    where = jax.tree.map(lambda x: x.sharding, abstract_train_state(model, optimizer, mesh))
    return jax.jit(
        step,
        in_shardings=(where, split_batch(mesh, axis=1)),
        out_shardings=(where, replicated(mesh)),
        donate_argnums=0,
    )
