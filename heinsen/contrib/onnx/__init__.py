"""A model as one decoding step in ONNX, for any runtime, such as a browser's. `scripts/export.py` looks it up here."""

from heinsen.contrib.onnx.folder import check_exportable, save_step
from heinsen.contrib.onnx.state import state_shapes, to_step_state

__all__ = ["check_exportable", "save_step", "state_shapes", "to_step_state"]
