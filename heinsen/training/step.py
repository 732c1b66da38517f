"""One optimizer step as a pure function, jitted over a mesh with a donated state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from heinsen.model import ModelConfig, Params, init_params, mean_loss
from heinsen.parallel import replicated, split_batch


class TrainState(NamedTuple):
    params: Params
    opt_state: Any  # counts the steps done


def init_train_state(model: ModelConfig, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh) -> TrainState:
    def init():
        params = init_params(model, jax.random.key(seed))
        return TrainState(params, optimizer.init(params))

    return jax.jit(init, out_shardings=replicated(mesh))()


def make_train_step(
    model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """(state, tokens [A, B, T + 1]) -> (state, {"loss", "grad_norm"}): the mean over A accumulated passes of B rows.

    The state given is donated. The loss is in nats a token, the norm the gradient's before clipping.
    """

    def loss_fn(params, tokens_BxT1):
        return mean_loss(model, params, tokens_BxT1, n_parts=mesh.shape["data"])

    def gradients(params, tokens_AxBxT1):
        if tokens_AxBxT1.shape[0] == 1:
            return jax.value_and_grad(loss_fn)(params, tokens_AxBxT1[0])
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        add = lambda total, tokens: (jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, tokens)), None)
        total, _ = jax.lax.scan(add, zeros, tokens_AxBxT1)
        return jax.tree.map(lambda x: x / tokens_AxBxT1.shape[0], total)

    def step(state, tokens_AxBxT1):
        loss, grads = gradients(state.params, tokens_AxBxT1)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    everywhere = replicated(mesh)
    return jax.jit(
        step,
        in_shardings=(everywhere, split_batch(mesh, axis=1)),
        out_shardings=(everywhere, everywhere),
        donate_argnums=0,
    )
