"""Causal attention by one fused kernel for each pass: implementation="pallas" on TPUs and Hopper GPUs.

The forms here take the place of `heinsen.ops.schedule.InOrder`, which computes the rows where they lose terms.
"""

from typing import Any

from heinsen import backend
from heinsen.ops.chunk import Keys
from heinsen.ops.schedule import InOrder
from heinsen.ops.values import Domain, StateT


def causal_form(domain: Domain[StateT], keys: Keys) -> InOrder[StateT]:
    """The form for the platform that is compiled for. Raises InputError for what its kernels do not take."""
    form: type[Any]
    if backend.current() == "tpu":  # each is slow to import
        from heinsen.contrib.kernels.tpu import Fused as form
    else:
        from heinsen.contrib.kernels.mosaic_gpu import Fused as form
    return form.of(domain, keys)
