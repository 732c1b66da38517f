"""Exactness for every input: what a fast form may have lost is computed again, and what is not finite is left out.

A form (`Form`) is one function of arrays with a fast and an exact way to compute it. A row is one head of one sequence.
The fast way also says which rows lost terms to underflow, which their sums show; `run` computes those again the exact
way, a few at a time (`for_rows`). The same for the gradients, where JAX differentiates the exact way.

Underflow is repaired in three places. Of weights: within a group of chunks, by `chunk.exact_weights`. Of log values,
where all that a query sees lies far below the largest value of its column: its chunk is read in logarithms, in
`schedule.read_group`. If the sums before the chunk have lost terms as well: here, where `run` computes the whole row in
logarithms (`logarithms`).

Products of 0 and NaN would spread what is not finite to all tokens. So neutral tokens take its place, and every output
that sees one is set to NaN, with a gradient of 0: of the chunked form for each group of chunks (`isolate_if_any`), of
other forms for each call (`isolate_nonfinite`). -inf counts as finite where it stands for zero: in queries and keys,
and in logarithms of values.

Axes: `*batch` any leading axes, the rows; N chunks of a group; T tokens, C those of a chunk; V value features.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from heinsen import backend
from heinsen.logspace import NEG_INF
from heinsen.ops.chunk import Keys
from heinsen.ops.decay import ChunkDecay
from heinsen.ops.documents import document_ranges
from heinsen.ops.modes import Name, forward_mode_only, reverse_mode_only
from heinsen.ops.values import Domain, StateT

# Cotangents are divided by sums of at least values.SMALLEST_SUM = 1e-27, and some 1e4 quotients are added.
LARGE_COTANGENT = 1e6

# Rows that are computed exactly at a time on CPUs, and the numbers in their largest array on accelerators.
MAX_ROWS = 4
_MAX_ELEMENTS = 2**24

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
        """Gradients of the arguments, computed from those of the output divided by `divisor`."""

    def recompute(self, *args: Any) -> Any:
        """The output, of any rows."""

    @property
    def max_rows(self) -> int:
        """Rows that are computed exactly at a time."""


@partial(jax.jit, static_argnums=0)
def run(form: Form, *args: Any) -> Any:
    """The output of a form, exact, with gradients. Jitted, so that a second call outside jit compiles nothing."""

    def recompute_lost(lost: Array | None, exactly: Callable[..., X], args: Any, out: X) -> X:
        """The output, with the rows that lost terms computed by `exactly`."""
        if lost is None:
            return out
        args = vary_together(lost, args, out)[1]
        update = lambda rows, out: rows.write(out, exactly(*rows.take(args)))
        return for_rows(lost, update, out, form.max_rows)

    @jax.custom_vjp
    def compute(*args: Any) -> Any:
        out, _, lost = form.forward(*args, save_residuals=False)
        return recompute_lost(lost, form.recompute, args, out)

    def forward(*args: Any) -> tuple[Any, Any]:
        out, residuals, lost = form.forward(*args, save_residuals=True)
        return recompute_lost(lost, form.recompute, args, out), (args, residuals, lost)

    def backward(saved: Any, grads: Any) -> tuple[Any, ...]:
        args, residuals, lost = saved
        grads = lax.optimization_barrier(grads)  # XLA would reduce a constant when compiling, which takes it seconds
        divisor = cotangent_divisor(grads)
        fast = form.backward(*args, residuals=residuals, grads=grads, divisor=divisor)
        exactly = lambda args, grads: gradients(form.recompute, args, grads, divisor)
        return recompute_lost(lost, exactly, (args, grads), fast)

    compute.defvjp(forward, backward)
    return compute(*_reverse_mode_only(vary_together(*args)))


class Rows(NamedTuple):
    """The place of some rows in arrays [*batch, ...]: a block of neighbors along the batch axes."""

    at: tuple[Array, ...]
    sizes: tuple[int, ...]
    are_left: Array  # whether one of them is; true within `for_rows`

    @classmethod
    def first(cls, rows: Array, sizes: tuple[int, ...]) -> "Rows":
        """The block of these sizes, counted from the beginning, that holds the first true one of `rows` [*batch]."""
        flat, at = jnp.argmax(rows), []
        for size in reversed(rows.shape[1:]):
            at.append(flat % size)
            flat = flat // size
        at = [flat, *reversed(at)][: rows.ndim]
        return cls(tuple(x // n * n for x, n in zip(at, sizes, strict=True)), sizes, jnp.any(rows))

    def take(self, arrays: X) -> X:
        """The rows, [*sizes, ...]."""

        def take(x: Array) -> Array:
            rest = x.shape[len(self.at) :]
            rows = lax.dynamic_slice(x, (*self.at, *(0,) * len(rest)), (*self.sizes, *rest))
            # A block of all rows is the same in each turn, so XLA would compute it before the loop, lost or not.
            rows = jnp.where(self.are_left, rows, jnp.zeros_like(rows))
            if backend.current() != "gpu":
                return rows
            # As a vector, in the order of its axes: else XLA's GPU compiler copies all rows into a layout for the loop.
            return lax.optimization_barrier(rows.reshape(-1)).reshape(rows.shape)

        return jax.tree.map(take, arrays)

    def write(self, arrays: X, parts: X) -> X:
        """Arrays with the rows overwritten by parts [*sizes, ...]."""
        at = lambda x: (*self.at, *(0,) * (x.ndim - len(self.at)))
        return jax.tree.map(lambda x, part: lax.dynamic_update_slice(x, part, at(x)), arrays, parts)


def rows_together(size: int) -> int:
    """Rows to compute exactly at a time, if the largest array has so many numbers for each.

    With few, a loop's steps cost more than their work (on GPUs, launching kernels); with many, rows that lost nothing
    are computed beside one that did, and all need memory at once.
    """
    return MAX_ROWS if backend.current() == "cpu" else max(1, _MAX_ELEMENTS // size)


def for_rows(rows: Array, update: Callable[[Rows, X], X], out: X, max_rows: int) -> X:
    """out = update(some rows, out) in turn, at most so many, until all are done where `rows` [*batch] is true.

    A loop, as it takes no time without such rows, and writes in place where `lax.cond` would have buffers for both.
    """
    rows, out = vary_together(rows, out)
    sizes = _block_sizes(rows.shape, max_rows)

    def body(carry: tuple[Array, X]) -> tuple[Array, X]:
        left, out = carry
        some = Rows.first(left, sizes)
        return some.write(left, jnp.zeros_like(some.take(left))), update(some, out)

    return forward_mode_only(NAME, lax.while_loop(lambda carry: jnp.any(carry[0]), body, (rows, out))[1])


def _block_sizes(shape: Sequence[Any], most: int) -> tuple[int, ...]:
    """Sizes of equal blocks of at most so many neighbors, along the last axes; 1 where a size is symbolic."""
    sizes: list[int] = []
    for size in reversed(shape):
        n = next(n for n in range(most, 0, -1) if size % n == 0) if isinstance(size, int) else 1
        sizes.append(n)
        most = most // n if n == size else 1
    return tuple(reversed(sizes))


def cotangent_divisor(grads: Any) -> Array:
    """A divisor of the cotangents that keeps their quotients by sums in range: 1 unless some are very large."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(grads)]))
    return jnp.where(jnp.isfinite(largest) & (largest > LARGE_COTANGENT), largest, 1.0)


def gradients(function: Callable[..., Any], args: Any, grads: Any, divisor: Array) -> tuple[Any, ...]:
    """Gradients of the arguments, computed from those of the output divided by `divisor`; booleans have None."""
    cotangents = jax.vjp(function, *args)[1](multiply(grads, 1 / divisor))
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g * divisor, cotangents)


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

    tainted: [*batch, N, C], whether a query is not finite, or sees a token that is not. beyond: [*batch], whether such
    a token is seen from behind the last one; where queries see later tokens, also from before the first.
    """

    q: Array
    keys: Keys
    tainted: Array
    beyond: tuple[Array, ...]


def isolate(domain: Domain[Any], q: Array, keys: Keys, tainted: tuple[Array, ...]) -> Clean:
    """The tokens of N chunks, [*batch, N, C, ...], without what is not finite.

    `tainted` [*batch] is whether something before them is not, which they see up to the next reset; where queries see
    later tokens, whether something after them is not.
    """
    bad_query, bad_key = find_nonfinite(domain, q, keys)
    later = None if keys.later is None else keys.later._replace(log_decay=None)
    # With bad_key: else XLA computes what resets alone decide in front of the loop that hardly ever runs, each time.
    bad_key, resets, later = lax.optimization_barrier((bad_key, keys.resets, later))
    decays = keys._replace(resets=resets, log_decay=None, later=later).decays()
    beyond, seen = zip(*(_spread(*each, bad_key) for each in zip(tainted, decays, strict=True)), strict=True)
    q, keys = replace_nonfinite(domain, q, keys, bad_query, bad_key)
    return Clean(q, keys, reduce(jnp.logical_or, seen) | bad_query, beyond)


def _spread(tainted: Array, decay: ChunkDecay, bad_key: Array) -> tuple[Array, Array]:
    """(whether a bad token is seen after the last chunk, whether one is seen by each query), in the decay's direction.

    The decay is that by resets alone. `tainted` is whether one is seen before the first chunk.
    """
    seen = lambda log_decay: log_decay > NEG_INF
    from_chunk = jnp.any(seen(decay.keys_at_end) & bad_key, axis=-1)
    chunks = jnp.broadcast_to(seen(decay.before_at_end), from_chunk.shape), from_chunk
    tainted, chunks = vary_together(tainted, jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), chunks))
    step = lambda tainted, chunk: ((tainted & chunk[0]) | chunk[1], tainted)
    last, before = lax.scan(step, tainted, chunks, reverse=decay.backwards)
    before = jnp.moveaxis(before, 0, -1)[..., None] & seen(decay.before_at_queries)
    return last, before | jnp.any(seen(decay.keys_at_queries) & bad_key[..., None, :], axis=-1)


def isolate_if_any(domain: Domain[Any], q: Array, keys: Keys, tainted: tuple[Array, ...]) -> Clean:
    """As `isolate`, in a loop of one iteration if there is anything, else of none, which takes no time."""
    # A sum over tokens is not finite if one of them is not. Over tokens first: XLA's CPU compiler vectorizes only that.
    q_sum, sums = jax.tree.map(lambda x: jnp.sum(x, axis=-2), (q, keys))
    is_any = reduce(jnp.logical_or, map(jnp.any, tainted)) | jnp.any(jnp.stack(find_nonfinite(domain, q_sum, sums)))
    tokens = vary_together(Clean(q, keys, jnp.zeros(q.shape[:-1], bool), tainted))[0]
    clean = lambda _, x: vary_together(isolate(domain, x.q, x.keys, tainted), x)[0]
    return lax.fori_loop(0, is_any.astype(jnp.int32), clean, tokens)


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


def isolate_nonfinite(attend: Attend) -> Attend:
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
