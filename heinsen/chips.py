"""The accelerators that plans and utilization know, with their vendors' figures.

Sources: NVIDIA's data sheets of A100 (SXM, 80 GB), H100 (SXM), H200 (SXM) and HGX B200, dense rates without sparsity;
Google's pages cloud.google.com/tpu/docs/v4, v5e, v5p and v6e. Interconnect rates are what one device can send, half of
the vendors' figure for both directions (NVLink; ICI, all links of a chip together).
"""

import dataclasses
from typing import Literal

# Between two kernels of one CUDA graph: 3.4 us per kernel of 2.9 us (developer.nvidia.com/blog/cuda-graphs, on a V100).
# Kernels that are launched one by one take 0.9 us more than their own time there.
_GPU_LAUNCH = 0.5e-6


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts them: a GPU, or a TPU chip.

    device_kind is the beginning of JAX's name. memory is in bytes, bandwidth (of its memory) and interconnect in B/s,
    the rates of matrix products in FLOP/s, launch in seconds per kernel. tf32 and float32 are None where the matrix
    units multiply bfloat16 only: TPUs make float32 products from several bfloat16 ones.
    """

    name: str
    platform: Literal["gpu", "tpu"]
    device_kind: str
    memory: int
    bandwidth: float
    interconnect: float
    bfloat16: float
    tf32: float | None = None
    float32: float | None = None
    launch: float = 0.0

    def rate(self, kind: str) -> float:
        """FLOP/s of products of a kind: bfloat16, tf32, float32, or KIND_xN for N passes of one of them."""
        base, _, passes = kind.partition("_x")
        rate = {"bfloat16": self.bfloat16, "tf32": self.tf32, "float32": self.float32}[base]
        if rate is None:
            raise ValueError(f"{self.name} has no matrix units for {kind}")
        return rate / int(passes or 1)


_GPUS = [
    Chip("a100", "gpu", "NVIDIA A100", 85_100_068_864, 2.039e12, 300e9, 312e12, 156e12, 19.5e12, _GPU_LAUNCH),
    Chip("h100", "gpu", "NVIDIA H100", 84_942_979_072, 3.35e12, 450e9, 989e12, 494.5e12, 67e12, _GPU_LAUNCH),
    Chip("h200", "gpu", "NVIDIA H200", 151_397_597_184, 4.8e12, 450e9, 989e12, 494.5e12, 67e12, _GPU_LAUNCH),
    Chip("b200", "gpu", "NVIDIA B200", 191_514_411_008, 8e12, 900e9, 2250e12, 1125e12, 75e12, _GPU_LAUNCH),
]
_TPUS = [
    Chip("v4", "tpu", "TPU v4", 32 * 2**30, 1.228e12, 300e9, 275e12),
    Chip("v5e", "tpu", "TPU v5 lite", 16 * 2**30, 0.819e12, 200e9, 197e12),
    Chip("v5p", "tpu", "TPU v5", 95 * 2**30, 2.765e12, 600e9, 459e12),
    Chip("v6e", "tpu", "TPU v6 lite", 32 * 2**30, 1.64e12, 448e9, 918e12),
]
CHIPS = {chip.name: chip for chip in (*_GPUS, *_TPUS)}


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip of JAX's device_kind; None if it is not known."""
    # The longest name first: "TPU v5 lite" is not a "TPU v5".
    by_length = sorted(CHIPS.values(), key=lambda chip: len(chip.device_kind), reverse=True)
    return next((chip for chip in by_length if device_kind.startswith(chip.device_kind)), None)
