"""One optimizer step as a pure function, jitted over a mesh with a donated state."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from heinsen.models import (
    ModelConfig,
    ModelState,
    Params,
    init_model_state,
    init_params,
    masked_loss,
    mean_loss,
    mean_loss_with_state,
    state_shardings,
)
from heinsen.parallel import replicated, shardings, split_batch, with_shardings
from heinsen.training.passes import join_carry, scale_weights, split_carry


class TrainState(NamedTuple):
    """Everything that a step updates.

    opt_state counts the updates. skipped counts the steps whose loss or gradient was not finite: in "all", and
    "in_a_row" up to now. carry is what the model remembers of the rows of the batch, from which the next batch's rows
    continue; None: nothing is carried.
    """

    params: Params
    opt_state: Any
    skipped: dict[str, Int[Array, ""]]
    carry: ModelState | None = None


Metrics = dict[str, jax.Array]


@runtime_checkable
class TrainStep(Protocol):
    """A jitted step."""

    def __call__(self, state: TrainState, batches: Any, /) -> tuple[TrainState, Metrics]: ...

    def lower(self, state: TrainState, batches: Any, /) -> jax.stages.Lowered: ...


def _init_function(
    model: ModelConfig, optimizer: optax.GradientTransformation, seed: int, carry_rows: int | None
) -> Callable[[], TrainState]:
    def init() -> TrainState:
        params = init_params(model, jax.random.key(seed))
        zero = jnp.zeros((), jnp.int32)
        carry = None if carry_rows is None else init_model_state(model, carry_rows)
        return TrainState(params, optimizer.init(params), {"all": zero, "in_a_row": zero}, carry)

    return init


def init_train_state(
    model: ModelConfig, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh, carry_rows: int | None = None
) -> TrainState:
    """Return the state before the first step; each device computes only its own part.

    carry_rows: rows of a batch whose state is carried on from step to step; None: none is.
    """
    where = jax.tree.map(lambda x: x.sharding, abstract_train_state(model, optimizer, mesh, carry_rows))
    return jax.jit(_init_function(model, optimizer, seed, carry_rows), out_shardings=where)()


def abstract_train_state(
    model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, carry_rows: int | None = None
) -> TrainState:
    """Return the shapes, dtypes and shardings of a state. Raises MeshError if the mesh does not divide it."""
    abstract = jax.eval_shape(_init_function(model, optimizer, 0, carry_rows))
    where = shardings(mesh, abstract)
    if abstract.carry is not None:
        where = where._replace(carry=state_shardings(mesh, abstract.carry))
    return with_shardings(abstract, where)


def make_train_step(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    loss: Callable[..., Any] | None = None,
    carry_rows: int | None = None,
) -> TrainStep:
    """Return the jitted step (state, batches [A, B, ...]) -> (state, metrics).

    The batches are of `make_passes`. The loss is the mean over A accumulated passes of B rows. The given state is
    donated. A step whose loss or gradient is not finite only counts itself as skipped, and empties the carried
    state of all rows, which may be the cause.

    Args:
      loss: (model, params, batch, mesh) -> scalar, or with carry_rows (model, params, batch, mesh, state) -> (scalar,
        state after); None: that of the model's objective.
      carry_rows: A B, to carry a state on from each row of a batch to that of the next, without its gradient; row b of
        pass a is row `b A + a` of TrainState.carry. None: none is carried.

    Returns:
      The step. Its metrics are "loss" in nats per token; "grad_norm" before clipping; "param_norm"; "skipped" and
      "skipped_in_a_row", the counts after the step.
    """
    causal_loss: Callable[..., Any] = mean_loss if carry_rows is None else mean_loss_with_state
    own_loss: Callable[..., Any] = causal_loss if model.causal else masked_loss
    pass_loss = loss or own_loss

    def loss_fn(params: Params, batch: Any, carry: ModelState | None) -> tuple[jax.Array, ModelState | None]:
        if carry is None:
            return pass_loss(model, params, batch, mesh), None
        value, after = pass_loss(model, params, batch, mesh, carry)
        return value, after

    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def loss_and_grads(
        params: Params, batches: Any, carry: ModelState | None
    ) -> tuple[jax.Array, Params, ModelState | None]:
        batches = scale_weights(batches)
        n_passes = jax.tree.leaves(batches)[0].shape[0]
        if n_passes == 1:
            (value, carry), grads = value_and_grad(params, jax.tree.map(lambda x: x[0], batches), carry)
            return value, grads, carry

        def add(total: Any, given: Any) -> tuple[Any, ModelState | None]:
            (value, after), grads = value_and_grad(params, *given)
            return jax.tree.map(jnp.add, total, (value, grads)), after

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, carry = jax.lax.scan(add, zeros, (batches, jax.tree.map(partial(split_carry, n_passes), carry)))
        return *jax.tree.map(lambda x: x / n_passes, total), jax.tree.map(join_carry, carry)

    def step(state: TrainState, batches: Any) -> tuple[TrainState, Metrics]:
        value, grads, carry = loss_and_grads(state.params, batches, state.carry)
        grad_norm = optax.tree.norm(grads)
        is_finite = jnp.isfinite(value) & jnp.isfinite(grad_norm)
        if carry is not None and carry_rows is not None:
            is_finite &= _can_carry(carry)
            begin = init_model_state(model, carry_rows)
            carry = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), carry, begin)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        updated = optax.apply_updates(state.params, updates), opt_state
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old), updated, (state.params, state.opt_state)
        )
        skipped = {
            "all": state.skipped["all"] + ~is_finite,
            "in_a_row": jnp.where(is_finite, 0, state.skipped["in_a_row"] + 1),
        }
        metrics = {"loss": value, "grad_norm": grad_norm, "param_norm": optax.tree.norm(params)}
        metrics |= {"skipped": skipped["all"], "skipped_in_a_row": skipped["in_a_row"]}
        return TrainState(params, opt_state, skipped, carry), metrics

    where = jax.tree.map(lambda x: x.sharding, abstract_train_state(model, optimizer, mesh, carry_rows))
    return jax.jit(
        step,
        in_shardings=(where, split_batch(mesh, axis=1)),
        out_shardings=(where, replicated(mesh)),
        donate_argnums=0,
    )


def _can_carry(state: ModelState) -> Array:
    """Return whether no number of the state is NaN or infinity; -infinity is the logarithm of nothing."""
    return jnp.stack([jnp.all(x < jnp.inf) for x in jax.tree.leaves(state)]).all()
