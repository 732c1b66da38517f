"""FLOPs of matrix products and convolutions in a compiled program, by the kind of product."""

import functools
import math
import re
from collections import Counter

import numpy as np

from heinsen.contrib.hlo_cost.hlo import Computation, Instruction


def product_flops(computation: Computation, instruction: Instruction, platform: str) -> Counter[str]:
    """FLOPs of one instruction by kind: bfloat16, tf32 or float32, or KIND_xN for N passes (`Chip.rate`).

    platform: "gpu" or "tpu". An instruction that is no product has none.
    """
    if instruction.opcode == "dot":
        return Counter({_product_kind(computation, instruction, platform): _dot_flops(computation, instruction)})
    if instruction.opcode == "convolution":
        flops = _convolution_flops(computation, instruction)
        return Counter({_product_kind(computation, instruction, platform): flops})
    if instruction.opcode == "custom-call":
        return _custom_call_flops(computation, instruction, platform)
    return Counter()


def _product_kind(computation: Computation, instruction: Instruction, platform: str) -> str:
    """How a chip multiplies: bfloat16, tf32 or float32, or KIND_xN for N passes (`Chip.rate`)."""
    dtypes = {computation.operand(instruction, i).arrays[0].dtype for i in (0, 1)}
    if not dtypes & {"f32", "f64"}:
        return "bfloat16"
    exact = "bfloat16_x6" if platform == "tpu" else "float32"
    algorithm = instruction.text(r"\balgorithm=dot_(\w+)")
    if algorithm:
        base = {"b": "bfloat16", "t": "tf32"}.get(algorithm[0])
        passes = re.search(r"_x\d+$", algorithm)
        return exact if base is None else base + (passes[0] if passes else "")
    precisions = instruction.text(r"\boperand_precision=\{([\w,]*)\}").split(",")
    if "highest" in precisions or "f64" in dtypes:
        return exact
    if platform == "gpu":
        return "tf32"
    return "bfloat16_x3" if "high" in precisions else "bfloat16"


def _dot_flops(computation: Computation, instruction: Instruction) -> int:
    lhs = computation.operand(instruction, 0).arrays[0]
    summed = math.prod(lhs.shape[axis] for axis in instruction.numbers("lhs_contracting_dims"))
    return 2 * instruction.arrays[0].size * summed


def _convolution_flops(computation: Computation, instruction: Instruction) -> int:
    """Two FLOPs for each product of a kernel's and an input's element, without those with padding and holes."""
    inputs, kernel, output = instruction.text(r"\bdim_labels=(\w+_\w+->\w+)").replace("->", "_").split("_")
    lhs, rhs = (computation.operand(instruction, i).arrays[0].shape for i in (0, 1))
    result = instruction.arrays[0].shape
    window = instruction.text(r"\bwindow=\{([^}]*)\}")

    def numbers(key: str, default: str, n: int) -> list[str]:
        match = re.search(rf"\b{key}=([\dx_\-]+)", window)
        return match[1].split("x") if match else [default] * n

    n_spatial = len(inputs) - 2
    strides, dilations, holes = (numbers(key, "1", n_spatial) for key in ("stride", "rhs_dilate", "lhs_dilate"))
    pads = numbers("pad", "0_0", n_spatial)
    flops = 2 * result[output.index("b")] * result[output.index("f")] * rhs[kernel.index("i")]
    for axis in range(n_spatial):
        label = str(axis)
        flops *= _valid_pairs(
            lhs[inputs.index(label)], rhs[kernel.index(label)], result[output.index(label)],
            int(strides[axis]), int(dilations[axis]), int(holes[axis]), int(pads[axis].split("_")[0]),
        )  # fmt: skip
    return flops


@functools.cache
def _valid_pairs(n_in: int, n_kernel: int, n_out: int, stride: int, dilation: int, hole: int, pad: int) -> int:
    """Pairs of an output's and a kernel's position that meet an element of the input."""
    at = np.arange(n_out)[:, None] * stride + np.arange(n_kernel) * dilation - pad
    return int(((at >= 0) & (at <= (n_in - 1) * hole) & (at % hole == 0)).sum())


def _custom_call_flops(computation: Computation, instruction: Instruction, platform: str) -> Counter[str]:
    """FLOPs of cuBLAS's products, and of kernels that state a cost estimate, as those of Pallas for TPUs may."""
    target = instruction.text(r'custom_call_target="([^"]*)"')
    if target.startswith("__cublas"):
        lhs = computation.operand(instruction, 0).arrays[0]
        axes = re.findall(r"\d+", instruction.text(r'"lhs_contracting_dimensions":\[([^\]]*)\]'))
        summed = math.prod(lhs.shape[int(axis)] for axis in axes)
        exact = '"HIGHEST"' in instruction.attributes and lhs.dtype == "f32"
        kind = "float32" if exact else _product_kind(computation, instruction, platform)
        return Counter({kind: 2 * instruction.arrays[0].size * summed})
    estimate = instruction.text(r'"cost_estimate":\{[^}]*"flops":"?(\d+)')
    return Counter({"bfloat16": int(estimate)}) if estimate and int(estimate) else Counter()
