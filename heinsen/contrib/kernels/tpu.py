"""The forward and the backward pass of the chunked form as one kernel each, for TPUs (Pallas).

A step of a kernel takes one chunk of a few heads; the chunks of a head follow one another, backwards in the backward
pass, with their summary between them (or the gradient of its sums) on chip. Factors and pairwise weights never leave
the chip. The mathematics is that of `chunk`, whose functions the kernels call; the functions here take the place of
those of `schedule`, which computes the rows that lose terms here (`form`).

A TPU tiles the last axis of an array to 128 lanes, so that [..., T, 32] would take four times its bytes. The kernels
have arrays [..., K, T], with tokens in the lanes, and transpose each chunk on chip.

Axes: G heads of all sequences, P of them in a step; T tokens; N chunks; C tokens of a chunk; K key and V value
features, filled up to whole sublanes.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from heinsen.contrib.kernels import interpret
from heinsen.contrib.kernels.form import Kernels, pad_axis
from heinsen.errors import InputError
from heinsen.logspace import NEG_INF
from heinsen.ops import chunk
from heinsen.ops.chunk import Keys, ValueScales
from heinsen.ops.chunked import attend_in_order
from heinsen.ops.exact import Output, multiply
from heinsen.ops.schedule import Split, SumsGrads, group_grad
from heinsen.ops.values import REAL_DOMAIN, SMALLEST_SUM, Domain, Shifts, StateT, Summary, Sums

LANES = 128
CHUNK = LANES  # tokens
SUBLANES = 8
VMEM_BYTES = 32 * 2**20

KernelArray = Any  # an array, its type and block, or a kernel's reference to it


class Inputs(NamedTuple):
    """A call's tokens."""

    q: KernelArray  # [G, K, T]
    k: KernelArray  # [G, K, T]
    values: KernelArray  # [G, V, T]
    resets: KernelArray  # [G, 1, T], 0 or 1; None: one document
    log_decay: KernelArray  # [G, 1, T]; None: 0

    def read(self) -> tuple[Array, Keys]:
        """A chunk's queries and keys [C, ...]."""
        resets = None if self.resets is None else self.resets[:, 0][..., None] > 0
        log_decay = None if self.log_decay is None else self.log_decay[:, 0][..., None]
        return self.q[...].mT, Keys(self.k[...].mT, self.values[...].mT, resets, log_decay)


class KernelSums(NamedTuple):
    """A summary between chunks, or gradients of its sums."""

    s: KernelArray  # [G, K, V]
    z: KernelArray  # [G, 1, K]
    c: KernelArray = None  # [G, 1, K]; None for gradients
    b: KernelArray = None  # [G, 1, V]; None for gradients and real values

    def read_sums(self) -> Sums:
        return Sums(self.s[...], self.z[:, 0])

    def read(self) -> Summary:
        return Summary(self.read_sums(), Shifts(self.c[:, 0], None if self.b is None else self.b[:, 0]))

    def write_sums(self, sums: Sums) -> None:
        self.s[...], self.z[:, 0] = sums

    def write(self, summary: Summary) -> None:
        self.write_sums(summary.sums)
        self.c[:, 0] = summary.shifts.c
        if self.b is not None:
            self.b[:, 0] = summary.shifts.b


class Before(NamedTuple):
    """Summaries before each chunk. The P heads of a block share the lanes of M_s."""

    s: KernelArray  # [G / P, N, K, P V]
    z: KernelArray  # [G, N, 1, K]
    shifts: Any  # `Shifts` of [G, N, 1, ...]

    def read(self) -> Summary:
        z, shifts = jax.tree.map(lambda ref: ref[:, 0, 0], (self.z, self.shifts))
        s, d_value = self.s[0, 0], self.s.shape[-1] // len(z)
        return Summary(Sums(jnp.stack([s[:, i : i + d_value] for i in range(0, s.shape[1], d_value)]), z), shifts)

    def write(self, summary: Summary) -> None:
        def write_one(ref: KernelArray, x: Array) -> None:
            ref[:, 0, 0] = x

        self.s[0, 0] = jnp.concatenate(list(summary.sums.s), axis=-1)
        jax.tree.map(write_one, (self.z, self.shifts), (summary.sums.z, summary.shifts))


# ---- forward ------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """Outputs of the forward kernel for the backward kernel."""

    s: KernelArray  # [G, V, T]: S of each query
    before: Before


class Written(NamedTuple):
    """Outputs of the forward kernel."""

    y: KernelArray  # [G, V, T]
    z: KernelArray  # [G, 1, T]: Z of each query
    fine: KernelArray  # [G, 1, C]: 0 where a sum may have lost terms, in any chunk, else 1
    end: KernelSums
    saved: Any  # `Saved`, or None


def _forward_kernel(domain: Domain[Any], inputs: Inputs, first: KernelSums, out: Written) -> None:
    @pl.when(pl.program_id(1) == 0)
    def start() -> None:
        out.end.write(first.read())
        out.fine[...] = jnp.ones_like(out.fine)

    (q, keys), before = inputs.read(), out.end.read()
    (decay,) = keys.decays()
    factors = chunk.key_factors(domain, keys, decay)
    weights, query_weights = chunk.fast_weights(q, keys.k, [decay], factors.own.c, [before.shifts.c])
    scales = ValueScales.of(before.shifts.b, factors.own.b)
    sums = chunk.query_sums(weights, factors.vf, before.sums, scales)
    out.y[...], out.z[:, 0] = domain.mean(sums, scales.b).mT, sums.z
    if out.saved is not None:
        out.saved.s[...] = sums.s.mT
        out.saved.before.write(before)
    out.fine[:, 0] = out.fine[:, 0] * _are_fine(sums, query_weights.r, scales.b)
    shifts, scale_older, scale_newer = chunk.merge(before.shifts, decay.before_at_end, factors.shifts)
    own_sums = chunk.scale(chunk.own_sums(factors), scale_newer)
    out.end.write(Summary(chunk.add(chunk.scale(before.sums, scale_older), own_sums), shifts))


def _are_fine(sums: Sums, r: Array, b: Array | None) -> Array:
    """[P, C]: 0 where sums may have lost terms, or are not finite, else 1."""
    fine = jnp.where((sums.z >= SMALLEST_SUM) | (r == NEG_INF), 1.0, 0.0)
    if b is None:
        return fine
    can_be_zero = (sums.z == 0)[..., None] | (b == NEG_INF)[..., None, :]
    return fine * jnp.min(jnp.where(can_be_zero | (sums.s >= SMALLEST_SUM), 1.0, 0.0), axis=-1)


# ---- backward -----------------------------------------------------------------------------------------


class Cotangents(NamedTuple):
    """Inputs of the backward kernel beside those of the forward kernel."""

    dy: KernelArray  # [G, V, T]
    z: KernelArray  # [G, 1, T]
    saved: Saved
    factors: KernelArray  # [2]: 1 / divisor, divisor


class Gradients(NamedTuple):
    """Outputs of the backward kernel."""

    q: KernelArray  # [G, K, T]
    k: KernelArray  # [G, K, T]
    values: KernelArray  # [G, V, T]
    log_decay: KernelArray  # [G, 1, T]; None without log decays
    first: KernelSums  # of the sums before the first chunk


def _backward_kernel(domain: Domain[Any], inputs: Inputs, given: Cotangents, end: KernelSums, out: Gradients) -> None:
    @pl.when(pl.program_id(1) == 0)
    def start() -> None:
        out.first.write_sums(end.read_sums())

    (q, keys), before, dend = inputs.read(), given.saved.before.read(), out.first.read_sums()
    dy = given.dy[...].mT * given.factors[0]
    sums = Sums(given.saved.s[...].mT, given.z[:, 0])
    pass_back = lambda older, from_queries: SumsGrads(dend, chunk.add(chunk.scale(dend, older), from_queries))
    found = group_grad(domain, q, keys, before, (), sums, dy, pass_back)

    for ref, x in ((out.q, found.q), (out.k, found.keys.k), (out.values, found.keys.values)):
        ref[...] = x.mT * given.factors[1]
    if found.keys.log_decay is not None:
        out.log_decay[:, 0] = found.keys.log_decay[..., 0] * given.factors[1]
    out.first.write_sums(found.first)


# ---- running a kernel ---------------------------------------------------------------------------------


class _Block:
    """Type of an array, and its blocks."""

    def __init__(self, shape: tuple[int, ...], block: tuple[int, ...], index: Callable[[Any, Any], tuple[Any, ...]]):
        self.type = jax.ShapeDtypeStruct(shape, jnp.float32)
        self.spec = pl.BlockSpec(block, index)


class _Layout(NamedTuple):
    """How arrays [*batch, ...] become those of the kernels, and back."""

    domain: Domain[Any]
    split: Split
    batch: tuple[int, ...]
    d_key: int
    d_value: int
    resets: bool
    log_decay: bool

    @classmethod
    def of(cls, domain: Domain[Any], split: Split, keys: Keys) -> "_Layout":
        sizes = keys.k.shape[-1], keys.values.shape[-1]
        return cls(domain, split, keys.k.shape[:-2], *sizes, keys.resets is not None, keys.log_decay is not None)

    @property
    def n_heads(self) -> int:
        return math.prod(self.batch)

    @property
    def heads_per_block(self) -> int:
        """As many as share the lanes of M_s."""
        most = max(1, LANES // self.value_features)
        return next(n for n in range(most, 0, -1) if self.n_heads % n == 0)

    @property
    def key_features(self) -> int:
        return -(-self.d_key // SUBLANES) * SUBLANES

    @property
    def value_features(self) -> int:
        return -(-self.d_value // SUBLANES) * SUBLANES

    # ---- arrays ----

    def tokens(self, x: Array, size: int, fill: float = 0.0) -> Array:
        """[G, size, T] of x [*batch, T, at most size]."""
        return jnp.swapaxes(self.features(x, size, fill), -1, -2)

    def of_tokens(self, x: Array, size: int) -> Array:
        """[*batch, T, size] of x [G, at least size, T]."""
        return jnp.swapaxes(self.cut(x), -1, -2)[..., :size]

    def features(self, x: Array, size: int, fill: float = 0.0) -> Array:
        """[G, ..., size] of x [*batch, ..., at most size]."""
        return pad_axis(x.reshape(self.n_heads, *x.shape[len(self.batch) :]), size, with_=fill)

    def row(self, x: Array) -> Array:
        """[G, 1, T] of x [*batch, T]."""
        return x.reshape(self.n_heads, 1, -1)

    def cut(self, x: Array, *sizes: int) -> Array:
        """[*batch, ..., *sizes] of x [G, ...], which may have more in its last axes."""
        return x.reshape(*self.batch, *x.shape[1:])[(..., *map(slice, sizes))]

    def inputs(self, q: Array, keys: Keys) -> Inputs:
        k, values, resets, log_decay, _ = keys
        return Inputs(
            self.tokens(q, self.key_features),
            self.tokens(k, self.key_features, NEG_INF),
            self.tokens(values, self.value_features, self.domain.zero),
            None if resets is None else self.row(resets.astype(k.dtype)),
            None if log_decay is None else self.row(log_decay),
        )

    def state(self, m: Sums, shifts: Shifts | None = None) -> KernelSums:
        s = pad_axis(self.features(m.s, self.value_features), self.key_features, -2)
        row = lambda x, size, fill: None if x is None else self.features(x, size, fill)[:, None]
        c, b = (None, None) if shifts is None else shifts
        c, b = row(c, self.key_features, NEG_INF), row(b, self.value_features, NEG_INF)
        return KernelSums(s, row(m.z, self.key_features, 0.0), c, b)

    def sums(self, state: KernelSums) -> Sums:
        return Sums(self.cut(state.s, self.d_key, self.d_value), self.cut(state.z[:, 0], self.d_key))

    def summary(self, state: KernelSums) -> Summary:
        b = None if state.b is None else self.cut(state.b[:, 0], self.d_value)
        return Summary(self.sums(state), Shifts(self.cut(state.c[:, 0], self.d_key), b))

    # ---- blocks ----

    def blocks_of_tokens(self, width: int, backwards: bool = False) -> _Block:
        """Blocks of an array [G, width, T]."""
        at, size = self._chunk(backwards), self.split.chunk_size
        shape, block = (width, self.split.n_tokens), (width, size)
        return _Block((self.n_heads, *shape), (self.heads_per_block, *block), lambda g, i: (g, 0, at(i)))

    def blocks_of_chunks(self, rows: int, columns: int, backwards: bool = False, heads: int = 1) -> _Block:
        """Blocks of an array [G / heads, N, rows, columns]."""
        at, shape = self._chunk(backwards), (rows, columns)
        whole, block = (self.n_heads // heads, self.split.n_chunks), (self.heads_per_block // heads, 1)
        return _Block((*whole, *shape), (*block, *shape), lambda g, i: (g, at(i), 0, 0))

    def blocks_of_heads(self, rows: int, columns: int) -> _Block:
        """Blocks of an array [G, rows, columns]."""
        shape = rows, columns
        return _Block((self.n_heads, *shape), (self.heads_per_block, *shape), lambda g, i: (g, 0, 0))

    def blocks_of_inputs(self, backwards: bool = False) -> Inputs:
        tokens = partial(self.blocks_of_tokens, backwards=backwards)
        resets, log_decay = tokens(1) if self.resets else None, tokens(1) if self.log_decay else None
        return Inputs(
            tokens(self.key_features), tokens(self.key_features), tokens(self.value_features), resets, log_decay
        )

    def blocks_of_sums(self) -> KernelSums:
        key_features = self.key_features
        return KernelSums(
            self.blocks_of_heads(key_features, self.value_features), self.blocks_of_heads(1, key_features)
        )

    def blocks_of_state(self) -> KernelSums:
        sums, b = self.blocks_of_sums(), None
        if self.domain is not REAL_DOMAIN:
            b = self.blocks_of_heads(1, self.value_features)
        return sums._replace(c=sums.z, b=b)

    def blocks_of_saved(self, backwards: bool = False) -> Saved:
        key_features, value_features, heads = self.key_features, self.value_features, self.heads_per_block
        chunks = partial(self.blocks_of_chunks, backwards=backwards)
        c: Any = chunks(1, key_features)
        b: Any = None if self.domain is REAL_DOMAIN else chunks(1, value_features)
        before = Before(chunks(key_features, heads * value_features, heads=heads), c, Shifts(c, b))
        return Saved(self.blocks_of_tokens(value_features, backwards), before)

    def _chunk(self, backwards: bool) -> Callable[[Any], Any]:
        return (lambda i: self.split.n_chunks - 1 - i) if backwards else (lambda i: i)


def _run_kernel(
    kernel: Any, layout: _Layout, inputs: Any, blocks: Any, out: Any, *, pair_products: int, sum_products: int
) -> Any:
    """Run a kernel that writes `out`, from `inputs` in `blocks`.

    It makes so many products with matrices [C, C], and with M [K, V], of each chunk.
    """
    leaves, tree = jax.tree.flatten(inputs)
    out_leaves, out_tree = jax.tree.flatten(out)
    key_features, value_features, n_tokens = (
        layout.key_features,
        layout.value_features,
        layout.n_heads * layout.split.n_tokens,
    )
    of_pairs = pair_products * layout.split.chunk_size * (key_features + value_features) // 2
    cost = pl.CostEstimate(
        flops=2 * n_tokens * (of_pairs + sum_products * key_features * value_features),
        bytes_accessed=4 * sum(x.size for x in leaves) + 4 * sum(math.prod(block.type.shape) for block in out_leaves),
        transcendentals=2 * n_tokens * (key_features + value_features),
    )

    def body(*refs: Any) -> None:
        arguments, written = refs[: len(leaves)], refs[len(leaves) :]
        kernel(layout.domain, *jax.tree.unflatten(tree, arguments), jax.tree.unflatten(out_tree, written))

    written = pl.pallas_call(
        body,
        grid=(layout.n_heads // layout.heads_per_block, layout.split.n_chunks),
        in_specs=[block.spec if isinstance(block, _Block) else block for block in jax.tree.leaves(blocks)],
        out_specs=[block.spec for block in out_leaves],
        out_shape=[block.type for block in out_leaves],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=cost,
        interpret=interpret.params() or False,
        name=kernel.__name__.strip("_"),
    )(*leaves)
    return jax.tree.unflatten(out_tree, written)


# ---- in the place of `schedule` -----------------------------------------------------------------------


class _Residuals(NamedTuple):
    """Arrays that the forward pass saves for the backward pass, as the kernels have them."""

    saved: Saved
    z: Array  # [G, 1, T]
    end: KernelSums


class Fused(Kernels[StateT]):
    """The form for TPUs."""

    @classmethod
    def of(cls, domain: Domain[StateT], keys: Keys) -> "Fused[StateT]":
        """Raises InputError for what the kernels do not take."""
        if keys.k.dtype != jnp.float32:
            raise InputError(
                f'implementation="pallas" computes in float32, not {keys.k.dtype}: pass implementation="chunked"'
            )
        return cls(domain, Split(1, -(-keys.k.shape[-2] // CHUNK), CHUNK), "tpu", interpret=interpret.params())

    def recompute(self, q: Array, keys: Keys, state: StateT) -> Output[StateT]:
        # Else XLA may copy y, and gradients, of all rows into the layout that they have here, and out of it.
        tokens_last = Layout((*range(q.ndim - 2), q.ndim - 1, q.ndim - 2))
        q, k, values = (with_layout_constraint(x, tokens_last) for x in (q, keys.k, keys.values))
        keys = keys._replace(k=k, values=values)
        out = attend_in_order(self.domain, q, keys, state)
        return out._replace(y=with_layout_constraint(out.y, tokens_last))

    def forward(self, q: Array, keys: Keys, state: StateT, save_residuals: bool) -> tuple[Output[StateT], Any, Array]:
        domain, first = self.domain, self.domain.to_summary(state)
        layout = _Layout.of(domain, self.split, keys)
        inputs = layout.inputs(q, keys), layout.state(*first)
        blocks = layout.blocks_of_inputs(), layout.blocks_of_state()
        row = layout.blocks_of_tokens(1)
        out = Written(
            y=layout.blocks_of_tokens(layout.value_features),
            z=row,
            fine=layout.blocks_of_heads(1, self.split.chunk_size),
            end=layout.blocks_of_state(),
            saved=layout.blocks_of_saved() if save_residuals else None,
        )
        y, z, fine, end, saved = _run_kernel(
            _forward_kernel, layout, inputs, blocks, out, pair_products=2, sum_products=2
        )

        last = layout.summary(end)
        lost = self.lost_between(state, first, last) | ~jnp.all(layout.cut(fine) == 1, axis=(-2, -1))
        residuals = _Residuals(saved, z, end) if save_residuals else None
        return Output(layout.of_tokens(y, layout.d_value), domain.to_state(last)), residuals, lost

    def backward(
        self, q: Array, keys: Keys, state: StateT, residuals: Any, grads: Output[StateT], divisor: Array
    ) -> tuple[Array, Keys, StateT]:
        domain, layout = self.domain, _Layout.of(self.domain, self.split, keys)
        end, shifts = layout.summary(residuals.end)
        (dend,) = jax.vjp(lambda end: domain.to_state(Summary(end, shifts)), end)[1](multiply(grads.state, 1 / divisor))
        given = Cotangents(
            dy=layout.tokens(grads.y, layout.value_features),
            z=residuals.z,
            saved=residuals.saved,
            factors=jnp.stack([1 / divisor, divisor]).astype(jnp.float32),
        )
        inputs = layout.inputs(q, keys), given, layout.state(dend)

        of_tokens = partial(layout.blocks_of_tokens, backwards=True)
        of_keys, of_values, row = of_tokens(layout.key_features), of_tokens(layout.value_features), of_tokens(1)
        saved, in_smem = layout.blocks_of_saved(backwards=True), pl.BlockSpec(memory_space=pltpu.SMEM)
        cotangents = Cotangents(of_values, row, saved, in_smem)
        blocks = layout.blocks_of_inputs(backwards=True), cotangents, layout.blocks_of_sums()
        out = Gradients(of_keys, of_keys, of_values, row if layout.log_decay else None, layout.blocks_of_sums())
        dq, dk, dvalues, dlog_decay, first = _run_kernel(
            _backward_kernel, layout, inputs, blocks, out, pair_products=5, sum_products=4
        )

        dlog_decay = None if dlog_decay is None else layout.cut(dlog_decay[:, 0])[..., None]
        dkeys = Keys(layout.of_tokens(dk, layout.d_key), layout.of_tokens(dvalues, layout.d_value), None, dlog_decay)
        (dstate,) = jax.vjp(lambda state: domain.to_summary(state).sums, state)[1](layout.sums(first))
        return layout.of_tokens(dq, layout.d_key), dkeys, multiply(dstate, divisor)
