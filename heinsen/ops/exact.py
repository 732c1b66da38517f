"""Exactness for every input: what a fast form may have lost is computed again, and what is not finite is left out.

A form (`Form`) is one function of arrays with a fast and an exact way to compute it. A row is one head of one sequence.
The fast way also says which rows lost terms to underflow, which their sums show; `run` computes those again the exact
way, a few at a time (`for_rows`). The same for the gradients, where JAX differentiates the exact way.

The weights of queries are exact already (`chunk.exact_weights`). What may be lost are log values, where all that a
query or a key feature sees lies far below the largest value of its column. The exact ways are for them (`logarithms`).

Products of 0 and NaN would spread what is not finite to all tokens. So neutral tokens take its place, and every output
that sees one is set to NaN, with a gradient of 0: of the chunked form for each group of chunks (`isolate_if_any`), of
other forms for each call (`isolate_non_finite`). -inf counts as finite where it stands for zero: in queries and keys,
and in logarithms of values.

Axes: `*batch` any leading axes, the rows; N chunks of a group; T tokens, C those of a chunk; V value features.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen import backend
from heinsen.logspace import NEG_INF
from heinsen.ops.chunk import Keys
from heinsen.ops.documents import document_ranges
from heinsen.ops.modes import Name, forward_mode_only, reverse_mode_only
from heinsen.ops.values import Domain, StateT

# Cotangents are divided by sums of at least values.SMALLEST_SUM = 1e-27, and some 1e4 quotients are added.
LARGE_COTANGENT = 1e6

# Rows that are computed exactly at a time, on CPUs. With few, a loop's steps cost more than their work; with many,
# rows that lost nothing are computed beside one that did, and all need memory at once.
MOST_ROWS = 4

NAME = Name("this implementation of attention", ', or pass implementation="scan" or "reference"')  # in errors

_reverse_mode_only = reverse_mode_only(NAME)

X = TypeVar("X")


class Output(NamedTuple, Generic[StateT]):
    """y or log y, and the state after all tokens."""

    y: Array  # [*batch, T, V]
    state: StateT  # normalized


class Form(Protocol):
    """One way to compute a function of arrays fast, and one that is exact. Hashable: it is a constant when compiled."""

    def forward(self, *args: Any, save_residuals: bool) -> tuple[Any, Any, Array | None]:
        """(the output, what `backward` needs if it is saved, the rows [*batch] that lost terms; None: none can)."""

    def backward(self, *args: Any, residuals: Any, grads: Any, divisor: Array) -> tuple[Any, ...]:
        """Gradients of the arguments, from those of the output, divided by `divisor` meanwhile."""

    def exact(self, *args: Any) -> Any:
        """The output, of any rows."""

    @property
    def most_rows(self) -> int:
        """Rows that are computed exactly at a time, on CPUs."""


@partial(jax.jit, static_argnums=0)
def run(form: Form, *args: Any) -> Any:
    """The output of a form, exact, with gradients. Jitted, so that a second call outside jit compiles nothing."""

    def recompute_lost(lost: Array | None, exactly: Callable[..., X], args: Any, out: X) -> X:
        """The output, with the rows that lost terms computed by `exactly`."""
        if lost is None:
            return out
        args = vary_together(lost, args, out)[1]
        update = lambda rows, out: rows.write(out, exactly(*rows.take(args)))
        return for_rows(lost, update, out, form.most_rows)

    @jax.custom_vjp
    def compute(*args: Any) -> Any:
        out, _, lost = form.forward(*args, save_residuals=False)
        return recompute_lost(lost, form.exact, args, out)

    def forward(*args: Any) -> tuple[Any, Any]:
        out, residuals, lost = form.forward(*args, save_residuals=True)
        return recompute_lost(lost, form.exact, args, out), (args, residuals, lost)

    def backward(saved: Any, grads: Any) -> tuple[Any, ...]:
        args, residuals, lost = saved
        grads = lax.optimization_barrier(grads)  # XLA would reduce a constant when compiling, which takes it seconds
        divisor = cotangent_divisor(grads)
        fast = form.backward(*args, residuals=residuals, grads=grads, divisor=divisor)
        exactly = lambda args, grads: gradients(form.exact, args, grads, divisor)
        return recompute_lost(lost, exactly, (args, grads), fast)

    compute.defvjp(forward, backward)
    return compute(*_reverse_mode_only(vary_together(*args)))


class Rows(NamedTuple):
    """The place of some rows in arrays [*batch, ...]: n neighbors along the last of the batch axes."""

    at: tuple[Array, ...]
    n: int

    @classmethod
    def first(cls, rows: Array, n: int) -> "Rows":
        """The block of n rows, counted from the beginning, that holds the first true one of `rows` [*batch]."""
        flat, at = jnp.argmax(rows), []
        for size in reversed(rows.shape[1:]):
            at.append(flat % size)
            flat = flat // size
        at = [flat, *reversed(at)][: rows.ndim]
        return cls((*at[:-1], *(x // n * n for x in at[-1:])), n)

    def take(self, arrays: X) -> X:
        """The rows, [1, ..., n, ...]."""
        n_axes = len(self.at)
        sizes = [1] * (n_axes - 1) + [self.n] * min(n_axes, 1)

        def take(x: Array) -> Array:
            rows = lax.dynamic_slice(x, (*self.at, *(0,) * (x.ndim - n_axes)), (*sizes, *x.shape[n_axes:]))
            if backend.current() != "gpu":
                return rows
            # As a vector, in the order of its axes: else XLA's GPU compiler copies all rows into a layout for the loop.
            return lax.optimization_barrier(rows.reshape(-1)).reshape(rows.shape)

        return jax.tree.map(take, arrays)

    def write(self, arrays: X, parts: X) -> X:
        """Arrays with the rows overwritten by parts [1, ..., n, ...]."""
        at = lambda x: (*self.at, *(0,) * (x.ndim - len(self.at)))
        return jax.tree.map(lambda x, part: lax.dynamic_update_slice(x, part, at(x)), arrays, parts)


def for_rows(rows: Array, update: Callable[[Rows, X], X], out: X, most_rows: int = MOST_ROWS) -> X:
    """out = update(some rows, out) in turn, until all are done where `rows` [*batch] is true.

    A loop, as it takes no time without such rows, and writes in place where `lax.cond` would have buffers for both.
    """
    rows, out = vary_together(rows, out)
    n_rows = rows.shape[-1] if rows.ndim else 1
    most = most_rows if backend.current() == "cpu" and isinstance(n_rows, int) else 1
    n = next(n for n in range(most, 0, -1) if n_rows % n == 0) if isinstance(n_rows, int) else 1

    def body(carry: tuple[Array, X]) -> tuple[Array, X]:
        left, out = carry
        some = Rows.first(left, n)
        return some.write(left, jnp.zeros_like(some.take(left))), update(some, out)

    return forward_mode_only(NAME, lax.while_loop(lambda carry: jnp.any(carry[0]), body, (rows, out))[1])


def cotangent_divisor(grads: Any) -> Array:
    """A divisor of the cotangents that keeps their quotients by sums in range: 1 unless some are very large."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(grads)]))
    return jnp.where(jnp.isfinite(largest) & (largest > LARGE_COTANGENT), largest, 1.0)


def gradients(function: Callable[..., Any], args: Any, grads: Any, divisor: Array) -> tuple[Any, ...]:
    """Gradients of the arguments; those of the output are divided by `divisor` meanwhile, and booleans have None."""
    found = jax.vjp(function, *args)[1](multiply(grads, 1 / divisor))
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g * divisor, found)


# ---- trees of arrays ------------------------------------------------------------------------------


def multiply(arrays: X, factor: Array) -> X:
    """Every array times a factor."""
    return jax.tree.map(lambda x: x * factor, arrays)


def vary_together(*trees: Any) -> Any:
    """The trees of arrays, each array varying over all mesh axes over which any of them does.

    Inside `jax.shard_map` an array varies over some axes of the mesh, or is the same on all devices. What a loop
    carries must vary over as many axes at its beginning as at its end, but an array made from a shape varies over none.
    """

    def axes_of(x: Array) -> frozenset[Any]:
        aval: Any = jax.typeof(x)
        return aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying  # depends on JAX's version

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    axes = frozenset[Any]().union(*map(axes_of, jax.tree.leaves(trees)))
    return jax.tree.map(vary, trees) if axes else trees


# ---- what is not finite ---------------------------------------------------------------------------


def find_nonfinite(domain: Domain[Any], q: Array, keys: Keys) -> tuple[Array, Array]:
    """Which queries are not finite, and which tokens' key, value or log decay is not, [*batch, ...] each."""
    bad_key = ~(jnp.all(keys.k < jnp.inf, axis=-1) & jnp.all(domain.is_value(keys.values), axis=-1))
    for log_decay in keys.log_decays():
        bad_key |= ~jnp.isfinite(log_decay[..., 0])
    return ~jnp.all(q < jnp.inf, axis=-1), bad_key


def replace_nonfinite(
    domain: Domain[Any], q: Array, keys: Keys, bad_query: Array, bad_key: Array
) -> tuple[Array, Keys]:
    """Queries and keys with neutral ones in place of bad ones."""
    k, values, resets, log_decay, later = keys
    if later is not None:
        later = later._replace(log_decay=fill_where(bad_key, later.log_decay, 0.0))
    clean = (
        fill_where(bad_key, k, NEG_INF),
        fill_where(bad_key, values, domain.zero),
        resets,
        fill_where(bad_key, log_decay, 0.0),
    )
    return fill_where(bad_query, q, 0.0), Keys(*clean, later)


class Clean(NamedTuple):
    """Tokens with neutral ones in place of those that are not finite.

    tainted: [*batch, ...], whether a query is not finite, or sees a token that is not. beyond: [*batch], whether such a
    token is seen from behind the last one; where queries see later tokens, also from before the first.
    """

    q: Array
    keys: Keys
    tainted: Array
    beyond: tuple[Array, ...]


def isolate(domain: Domain[Any], q: Array, keys: Keys, tainted: tuple[Array, ...]) -> Clean:
    """Tokens, T of them or N chunks of C, without what is not finite.

    `tainted` [*batch] is whether something before them is not, which they see up to the next reset; where queries see
    later tokens, whether something after them is not.
    """
    bad_query, bad_key = find_nonfinite(domain, q, keys)
    found = [_spread(tainted[0], bad_key, keys.resets, None, reverse=False)]
    if keys.later is not None:
        found.append(_spread(tainted[1], bad_key, keys.later.resets, keys.later.starts, reverse=True))
    beyond, tainted_at = zip(*found, strict=True)
    q, keys = replace_nonfinite(domain, q, keys, bad_query, bad_key)
    return Clean(q, keys, reduce(jnp.logical_or, tainted_at) | bad_query, beyond)


def _spread(
    tainted: Array, bad_key: Array, resets: Array | None, starts: Array | None, reverse: bool
) -> tuple[Array, Array]:
    """(whether a bad token is seen after the last token, whether one is at each), in one direction.

    The last token is the first one if `reverse`: then a token does not see its own key, and none before a start.
    """

    def step(tainted: Array, token: tuple[Array, Array | None, Array | None]) -> tuple[Array, Array]:
        bad_key, reset, start = token
        after = (tainted if reset is None else tainted & ~reset) | bad_key
        return after if start is None else after & ~start, tainted if reverse else after

    tokens_first = lambda x: jnp.moveaxis(x.reshape(*tainted.shape, -1), -1, 0)
    tokens = jax.tree.map(tokens_first, (bad_key, resets, starts))
    tainted, tokens = vary_together(tainted, tokens)
    last, at_tokens = lax.scan(step, tainted, tokens, reverse=reverse)
    return last, jnp.moveaxis(at_tokens, 0, -1).reshape(bad_key.shape)


def isolate_if_any(domain: Domain[Any], q: Array, keys: Keys, tainted: tuple[Array, ...]) -> Clean:
    """As `isolate`, in a loop of one iteration if there is anything, else of none, which takes no time."""
    # A sum over tokens is not finite if one of them is not. Over tokens first: XLA's CPU compiler vectorizes only that.
    q_sum, sums = jax.tree.map(lambda x: jnp.sum(x, axis=-2), (q, keys.numbers()))
    is_any = reduce(jnp.logical_or, map(jnp.any, tainted)) | jnp.any(jnp.stack(find_nonfinite(domain, q_sum, sums)))
    tokens = vary_together(Clean(q, keys, jnp.zeros(q.shape[:-1], bool), tainted))[0]
    return lax.fori_loop(0, is_any.astype(jnp.int32), lambda _, x: isolate(domain, x.q, x.keys, tainted), tokens)


def is_nonfinite_state(domain: Domain[StateT], state: StateT) -> Array:
    """Which states [*batch] are not finite."""
    return ~(jnp.all(domain.is_value(state[0]), axis=(-2, -1)) & jnp.all(state.h_z.value() < jnp.inf, axis=-1))


def replace_state(state: StateT, bad: Array) -> StateT:
    """The empty state in place of bad ones."""
    return fill_where(bad, state, state.empty())


def fill_where(bad: Array, arrays: X, fill: Any = jnp.nan) -> X:
    """Arrays with `fill`, a number or as many arrays, where `bad`, of their leading axes, is true."""
    fills = jax.tree.map(lambda _: fill, arrays) if isinstance(fill, float) else fill
    expand = lambda x: bad.reshape(*bad.shape, *(1,) * (x.ndim - bad.ndim))
    return jax.tree.map(lambda x, fill: jnp.where(expand(x), fill, x), arrays, fills)


class Attend(Protocol):
    """A form of attention; inputs are validated, of one floating-point dtype, float32 or wider."""

    def __call__(self, domain: Domain[Any], q: Array, keys: Keys, causal: bool, state: Any) -> tuple[Array, Any]:
        """(y or log y, the `LogState` or `MeanState` after all tokens)."""


def isolate_non_finite(attend: Attend) -> Attend:
    """`attend` with outputs of NaN where a query is not finite, or sees a key, value or log decay that is not."""

    def isolated(domain: Domain[Any], q: Array, keys: Keys, causal: bool, state: Any) -> tuple[Array, Any]:
        bad_query, bad_key = find_nonfinite(domain, q, keys)
        q, keys = replace_nonfinite(domain, q, keys, bad_query, bad_key)
        y, end = attend(domain, q, keys, causal, state)
        seen, seen_by_last = _sees(bad_key, causal, keys.per_token()[0])
        return fill_where(bad_query | seen, y), fill_where(seen_by_last, end)

    return isolated


def _sees(bad: Array, causal: bool, resets: Array | None) -> tuple[Array, Array]:
    """Whether each query [*batch, T or 1] sees a bad key, and whether the last document has one [*batch]."""
    count = jnp.cumsum(bad, axis=-1)
    if resets is None:
        return (count if causal else count[..., -1:]) > 0, count[..., -1] > 0
    first, end = document_ranges(resets)
    at = lambda i: jnp.take_along_axis(count, i, axis=-1)
    before_document = jnp.where(first == 0, 0, at(jnp.maximum(first - 1, 0)))
    in_document = at(end - 1) > before_document
    return count > before_document if causal else in_document, in_document[..., -1]
