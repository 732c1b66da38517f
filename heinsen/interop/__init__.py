"""Parameters to and from PyTorch: the published module, transformers, and self-contained folders of weights."""

from heinsen.interop.arrays import InteropError
from heinsen.interop.folders import DTYPES, Manifest, is_export, load_folder, read_manifest, save_folder
from heinsen.interop.huggingface import from_huggingface_state_dict, push_to_hub, to_huggingface_state_dict
from heinsen.interop.reference import from_reference_state_dict, is_reference_model, to_reference_state_dict

__all__ = [
    "DTYPES",
    "InteropError",
    "Manifest",
    "from_huggingface_state_dict",
    "from_reference_state_dict",
    "is_export",
    "is_reference_model",
    "load_folder",
    "push_to_hub",
    "read_manifest",
    "save_folder",
    "to_huggingface_state_dict",
    "to_reference_state_dict",
]
