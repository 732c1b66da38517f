"""Matrices of one warpgroup of a Hopper GPU, in Pallas Mosaic GPU: where they lie, and their products in float32.

The matrix units multiply bfloat16. A float32 matrix is the sum of three bfloat16 matrices, its pieces, and a product
is the sum of the six products of pieces that matter to float32: the relative error of a sum of non-negative terms is
some 2^-22, plus that of float32 sums. With one piece factors are rounded to bfloat16: an error of 2^-8. Pieces lie in
shared memory (SMEM), sums in registers.

Matrices in registers are in the layout of the matrix units' results (`MATRIX`), vectors in the layouts that belong to
it: a number for each row (`ROWS`), or for each column (`COLUMNS`). Rows come in multiples of 64.

JAX's interpret mode knows no layouts of registers and no transposed operands (jax 0.10): there loads, and products of
the same pieces, are those of jax.numpy.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

EXACT_PIECES = 3  # of float32

MATRIX, ROWS, COLUMNS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

# jax 0.10 wants an index beside the reference, 0.11 deprecates it, and 0.12 takes none.
NO_INDEX = ((),) if jax.__version_info__ < (0, 11) else ()

Ref = Any  # a reference to memory, of the GPU (GMEM) or of the block (SMEM)


def terms(n_pieces: int) -> list[tuple[int, int]]:
    """Pairs of pieces, the smallest products first: those left out are below 2^-24 of the product, of three pieces."""
    return [(i, order - i) for order in reversed(range(n_pieces)) for i in range(order + 1)]


def smem_pieces(n_pieces: int, n_rows: int, n_columns: int, tile: int) -> Any:
    """SMEM for the pieces of a matrix. All operands of one product need the same `tile`: 16, 32 or 64 columns."""
    transforms = plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(2 * tile)
    return plgpu.SMEM((1, n_pieces, n_rows, n_columns), jnp.bfloat16, transforms=transforms)


def smem_matrix(n_rows: int, n_columns: int, dtype: DTypeLike = jnp.float32) -> Any:
    """SMEM for a matrix as it lies in GMEM."""
    n_bytes = jnp.dtype(dtype).itemsize
    tile = min(128 // n_bytes, n_columns)
    transforms = plgpu.TilingTransform((8, tile)), plgpu.SwizzleTransform(n_bytes * tile)
    return plgpu.SMEM((1, n_rows, n_columns), dtype, transforms=transforms)


class Operand(NamedTuple):
    """The upper left part of a matrix in pieces, or its transpose."""

    ref: Ref  # [pieces, at least n_rows, at least n_columns] bfloat16
    n_rows: int
    n_columns: int
    transposed: bool = False

    @property
    def mT(self) -> "Operand":  # noqa: N802  # as NumPy calls it
        return self._replace(transposed=not self.transposed)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.n_columns, self.n_rows) if self.transposed else (self.n_rows, self.n_columns)

    def piece(self, i: int) -> Ref:
        """Piece i as it lies in memory."""
        if self.ref.shape[1:] == (self.n_rows, self.n_columns):
            return self.ref.at[i]
        return self.ref.at[i, pl.ds(0, self.n_rows), pl.ds(0, self.n_columns)]

    def store(self, x: Array) -> None:
        """Split a matrix [n_rows, n_columns] into pieces."""
        for i in range(self.ref.shape[0]):
            piece = x.astype(jnp.bfloat16)
            self.piece(i)[...] = piece
            x = x - piece.astype(jnp.float32)

    def load(self) -> Array:
        """The matrix [n_rows, n_columns], up to 2^-24 of each number with three pieces."""
        pieces = (self.piece(i)[...].astype(jnp.float32) for i in reversed(range(self.ref.shape[0])))
        return sum(pieces, start=jnp.float32(0.0))


class Registers(NamedTuple):
    """Products and barriers of registers, compiled or interpreted."""

    interpret: Any  # parameters of JAX's interpret mode, or None: compiled

    def matmul(self, *pairs: tuple[Operand, Operand]) -> Array:
        """Sum of the products of pairs of operands, which `commit_smem` must have made visible."""
        pieces = terms(pairs[0][0].ref.shape[0])
        if self.interpret:
            part = lambda x, i: jnp.swapaxes(x.piece(i)[...], 0, 1) if x.transposed else x.piece(i)[...]
            dot = lambda a, b: jnp.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
            return sum((dot(part(a, i), part(b, j)) for i, j in pieces for a, b in pairs), start=jnp.float32(0.0))

        def accumulate(sums: Ref) -> Array:
            operand = lambda x, i: x.piece(i).transpose((1, 0)) if x.transposed else x.piece(i)
            for i, j in pieces:
                for a, b in pairs:
                    plgpu.wgmma(sums, operand(a, i), operand(b, j))
            return sums[...]

        shape = pairs[0][0].shape[0], pairs[0][1].shape[1]
        return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def load(self, ref: Ref, layout: Any) -> Array:
        """Numbers of a matrix or vector in GMEM, in float32."""
        x = ref[...] if self.interpret else plgpu.load(ref, *NO_INDEX, layout=layout, optimized=False)
        return x.astype(jnp.float32)

    def store(self, ref: Ref, x: Array) -> None:
        """Write a matrix or vector to GMEM, in the dtype that it has there."""
        x = x.astype(ref.dtype)
        if self.interpret or jax.__version_info__ < (0, 12):  # which stores only whole cache lines so
            ref[...] = x
        else:
            plgpu.store(ref, x, optimized=False)

    def zeros(self, n_rows: int, n_columns: int) -> Array:
        """A matrix of zeros."""
        x = jnp.zeros((n_rows, n_columns), jnp.float32)
        return x if self.interpret else plgpu.layout_cast(x, MATRIX)


def rows(x: Array, n_columns: int) -> Array:
    """A matrix with a number for each row."""
    return lax.broadcast_in_dim(x, (x.shape[0], n_columns), [0])


def columns(x: Array, n_rows: int) -> Array:
    """A matrix with a number for each column."""
    return lax.broadcast_in_dim(x, (n_rows, x.shape[0]), [1])
