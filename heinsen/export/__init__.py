"""Parameters to and from PyTorch: the published module, transformers, and self-contained folders of weights."""

from heinsen.export.folders import DTYPES, Manifest, is_export, load_folder, read_manifest, save_folder
from heinsen.export.published import is_reference_model
from heinsen.export.state_dicts import ExportError

__all__ = [
    "DTYPES",
    "ExportError",
    "Manifest",
    "is_export",
    "is_reference_model",
    "load_folder",
    "read_manifest",
    "save_folder",
]
