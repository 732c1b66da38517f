"""Causal attention by one fused kernel for each pass, on Hopper GPUs: implementation="pallas"."""

from heinsen.contrib.kernels.mosaic_gpu import attend as attend
