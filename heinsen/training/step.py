"""One optimizer step as a pure function, jitted over a mesh with a donated state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from heinsen.model import ModelConfig, Params, init_params, mean_loss
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
    model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """(state, tokens [A, B, T + 1]) -> (state, metrics): the mean over A accumulated passes of B rows.

    The state given is donated. A step whose loss or gradient is not finite changes nothing but the count of such steps.

    metrics: "loss" in nats a token; "grad_norm", the gradient's before clipping; "param_norm"; "skipped" and
    "skipped_in_a_row", the counts after the step.
    """

    def loss_fn(params, tokens_BxT1):
        return mean_loss(model, params, tokens_BxT1, mesh)

    def gradients(params, tokens_AxBxT1):
        if tokens_AxBxT1.shape[0] == 1:
            return jax.value_and_grad(loss_fn)(params, tokens_AxBxT1[0])
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        add = lambda total, tokens: (jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, tokens)), None)
        total, _ = jax.lax.scan(add, zeros, tokens_AxBxT1)
        return jax.tree.map(lambda x: x / tokens_AxBxT1.shape[0], total)

    def step(state, tokens_AxBxT1):
        loss, grads = gradients(state.params, tokens_AxBxT1)
        grad_norm = optax.tree.norm(grads)
        usable = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updated = optax.apply_updates(state.params, updates), opt_state
        kept = jax.tree.map(lambda new, old: jnp.where(usable, new, old), updated, (state.params, state.opt_state))
        skipped = {
            "all": state.skipped["all"] + ~usable,
            "in_a_row": jnp.where(usable, 0, state.skipped["in_a_row"] + 1),
        }
        metrics = {"loss": loss, "grad_norm": grad_norm, "param_norm": optax.tree.norm(kept[0])}
        metrics |= {"skipped": skipped["all"], "skipped_in_a_row": skipped["in_a_row"]}
        return TrainState(*kept, skipped), metrics

    where = jax.tree.map(lambda x: x.sharding, abstract_train_state(model, optimizer, mesh))
    return jax.jit(
        step,
        in_shardings=(where, split_batch(mesh, axis=1)),
        out_shardings=(where, replicated(mesh)),
        donate_argnums=0,
    )
