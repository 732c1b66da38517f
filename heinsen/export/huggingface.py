"""The layout "huggingface": folders that transformers loads with AutoModelForCausalLM and AutoTokenizer.

    model.safetensors                         the state_dict of pytorch/modeling_heinsen.py
    config.json                               transformers' fields, and under "heinsen" the export's own record
    generation_config.json, tokenizer.json, tokenizer_config.json
    heinsen_tokenizer.json                    of a tokenizer that is a file: the file; tokenizer.json encodes alike
    modeling_heinsen.py, configuration_heinsen.py   the model in PyTorch (heinsen/export/pytorch)

The PyTorch module has the heinsen kind of attention, with everything that a layer can have around it.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heinsen.data.tokenizer import EOT_BYTES, TOKENIZER_FILE, Tokenizer, byte_characters, without_additions
from heinsen.export.state_dicts import ExportError, Tensor, parameter_names
from heinsen.models import ModelConfig
from heinsen.models.mixers import MIXERS

CODE_FILES = ("configuration_heinsen.py", "modeling_heinsen.py")
JSON_FILES = ("generation_config.json", "tokenizer_config.json", TOKENIZER_FILE)
RECORD = "heinsen"  # the field of config.json that holds the export's record, and transformers' name of the model

_CODE_FOLDER = Path(__file__).parent / "pytorch"
_EOT = EOT_BYTES.decode()


# ---- parameters ----------------------------------------------------------------------------------


def huggingface_tensors(config: ModelConfig) -> list[Tensor]:
    """Return the tensors of the PyTorch module. Raises ExportError for models that it cannot be."""
    if not config.causal or not all(mixer.is_exportable for mixer in config.mixers):
        kinds = " and ".join(name for name, build in MIXERS.items() if build(config).is_exportable)
        raise ExportError(
            f"transformers gets models of {kinds} attention that predict the next token, not model.attention = "
            f"{config.attention!r} with objective = {config.objective!r}: export it without --format=hf"
        )
    if config.n_features is not None:
        raise ExportError(
            f"model.feature_map = {config.feature_map!r}: transformers gets models without a feature map; export it "
            "without --format=hf"
        )
    tensors, period = [], len(config.pattern)
    for ours in parameter_names(config):
        # Linear's and LayerNorm's names for flax's: w1.kernel is w1.weight, norm.scale is norm.weight.
        name = re.sub(r"(?<=norm\.)scale$|kernel$", "weight", re.sub(r"embedding$", "embedding.weight", ours))
        match = re.fullmatch(r"layers\.(?:layer_(\d+)\.)?(.*)", name)
        if match is None:
            tensors.append(Tensor(name, ours, None))
            continue
        j = int(match[1] or 0)  # the layer of the pattern
        tensors += [Tensor(f"layers.{i * period + j}.{match[2]}", ours, i) for i in range(config.n_layers // period)]
    return tensors


# ---- the other files -----------------------------------------------------------------------------


def write_files(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Write CODE_FILES and JSON_FILES. Raises OSError."""
    for name in CODE_FILES:
        shutil.copy(_CODE_FOLDER / name, folder)
    contents = (_generation_config(config, tokenizer), _tokenizer_config(config, tokenizer), _tokenizer_json(tokenizer))
    for name, content in zip(JSON_FILES, contents, strict=True):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def transformers_config(
    record: Mapping[str, Any], config: ModelConfig, tokenizer: Tokenizer, dtype: str
) -> dict[str, Any]:
    """Return the contents of config.json around an export's record."""
    eot_id = tokenizer.eot_id
    return {
        "architectures": ["HeinsenForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_heinsen.HeinsenConfig",
            "AutoModelForCausalLM": "modeling_heinsen.HeinsenForCausalLM",
        },
        "model_type": RECORD,
        "dtype": dtype,
        "vocab_size": config.padded_vocab_size,
        "bos_token_id": eot_id,
        "eos_token_id": eot_id,
        "pad_token_id": eot_id,
        RECORD: dict(record),
    }


def _generation_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids of the padded rows are never sampled: they stand for no text."""
    padding = list(range(config.vocab_size, config.padded_vocab_size))
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot_id)
    return ids | ({"suppress_tokens": padding} if padding else {})


def _tokenizer_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.decode([tokenizer.eot_id])),
        "padding_side": "left",  # a text begins after its padding, and goes on after its last token
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions or int(1e30),  # transformers' own number for no limit, compared by ==
        "model_input_names": ["input_ids", "attention_mask"],
    }


def _tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the contents of tokenizer.json: the file's, or byte-level BPE; plain bytes are one without merges."""
    if tokenizer.content is not None:
        return without_additions(tokenizer.content)
    pieces = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size) if i != tokenizer.eot_id]
    characters = byte_characters()
    spell = lambda piece: "".join(characters[byte] for byte in piece)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    eot = {"id": tokenizer.eot_id, "content": _EOT, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [eot | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spell(piece): i for i, piece in enumerate(pieces)} | {_EOT: tokenizer.eot_id},
            "merges": [[spell(a), spell(b)] for a, b in _merges(pieces)],
        },
    }


def _merges(pieces: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair that makes each piece of more than one byte, in order, where ids are in the order of merging."""
    ranks = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in (piece for piece in pieces if len(piece) > 1):
        parts = [piece[i : i + 1] for i in range(len(piece))]
        while len(parts) > 2:
            first = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(ranks)))
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        merges.append((parts[0], parts[1]))
    return merges
