"""Parameters to and from PyTorch: the published module, transformers, and self-contained folders of weights."""

from heinsen.export.folders import DTYPES, Manifest, is_export, load_folder, read_manifest, save_folder
from heinsen.export.huggingface import from_huggingface_state_dict, to_huggingface_state_dict
from heinsen.export.published import from_reference_state_dict, is_reference_model, to_reference_state_dict
from heinsen.export.state_dicts import ExportError

__all__ = [
    "DTYPES",
    "ExportError",
    "Manifest",
    "from_huggingface_state_dict",
    "from_reference_state_dict",
    "is_export",
    "is_reference_model",
    "load_folder",
    "read_manifest",
    "save_folder",
    "to_huggingface_state_dict",
    "to_reference_state_dict",
]
