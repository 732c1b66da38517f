"""GPT-2 of transformers: folders of GPT2LMHeadModel, read as our own model.

    DIR/config.json         transformers' fields
    DIR/model.safetensors   the state_dict, whose names may begin with "transformer.", with or without the head

The block is the same (`heinsen.models.language_model.GPT2Layer`). Matrices of transformers' Conv1D are [in, out], as
ours are. Its c_attn has the queries of all heads first, then all keys, then all values; our w1 has them head by head.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from heinsen.config import ConfigError, read_json_object
from heinsen.data.tokenizer import GPT2Tokenizer
from heinsen.errors import describe
from heinsen.export.state_dicts import ExportError, Tensor, from_state_dict
from heinsen.models import ModelConfig, Params

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

_HOW = f"download it with `hf download NAME {CONFIG_FILE} {WEIGHTS_FILE} --local-dir=DIR`"
_SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")

# Fields of config.json: the values that our model can have. The first is that of a file without the field.
_POSSIBLE: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}

# Our parameters -> the module's.
_NAMES = {
    "embedding": "wte.weight",  # tied with the head
    "position.embedding": "wpe.weight",
    "layers.norm.scale": "h.{layer}.ln_1.weight",
    "layers.norm.bias": "h.{layer}.ln_1.bias",
    "layers.w1.kernel": "h.{layer}.attn.c_attn.weight",
    "layers.w1.bias": "h.{layer}.attn.c_attn.bias",
    "layers.attention_out.kernel": "h.{layer}.attn.c_proj.weight",
    "layers.attention_out.bias": "h.{layer}.attn.c_proj.bias",
    "layers.mlp_norm.scale": "h.{layer}.ln_2.weight",
    "layers.mlp_norm.bias": "h.{layer}.ln_2.bias",
    "layers.mlp_in.kernel": "h.{layer}.mlp.c_fc.weight",
    "layers.mlp_in.bias": "h.{layer}.mlp.c_fc.bias",
    "layers.mlp_out.kernel": "h.{layer}.mlp.c_proj.weight",
    "layers.mlp_out.bias": "h.{layer}.mlp.c_proj.bias",
    "norm.scale": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
_HEAD = "lm_head.weight"
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # no parameters: causal masks in old files


class _GPT2Tensor(Tensor):
    """A tensor of the module, whose matrices are [in, out]."""

    def transpose(self, x: np.ndarray) -> np.ndarray:
        return x


def read_gpt2_config(folder: Path) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that a folder's config.json decides.

    vocab_size is that of GPT-2's tokenizer; padded_vocab_size is the number of rows of the embedding, 50257 in GPT-2.

    Raises ExportError if the file is missing or damaged, or describes a model that ours cannot be.
    """
    path = folder / CONFIG_FILE
    try:
        fields = read_json_object(path)
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error.strerror}): {_HOW}") from error
    except ConfigError as error:
        raise ExportError(f"{error}: {_HOW}") from error
    if (kind := fields.get("model_type")) != "gpt2":
        raise ExportError(f"{path}: model_type = {kind!r}: only models of transformers with 'gpt2' can be imported")
    for name, possible in _POSSIBLE.items():
        if (value := fields.get(name, possible[0])) not in possible:
            raise ExportError(f"{path}: {name} = {value!r}: only models with {possible[0]!r} can be imported")
    for name in _SIZES:
        if type(size := fields.get(name)) is not int or size < 1:
            raise ExportError(f"{path}: {name} = {size!r}: expected a number above 0")
    n_rows, n_positions, d_model, n_layers, n_heads = (fields[name] for name in _SIZES)
    if n_rows < (n_ids := GPT2Tokenizer.vocab_size):
        raise ExportError(f"{path}: vocab_size = {n_rows}: only models of GPT-2's {n_ids} tokens can be imported")
    if d_model % n_heads:
        raise ExportError(f"{path}: n_embd = {d_model} does not divide into n_head = {n_heads} heads")
    if (n_inner := fields.get("n_inner")) not in (None, 4 * d_model):
        raise ExportError(f"{path}: n_inner = {n_inner}: only models with 4 n_embd = {4 * d_model} can be imported")
    return {
        "attention": "softmax",
        "block": "gpt2",
        "position": "learned",
        "n_positions": n_positions,
        "vocab_size": n_ids,
        "padded_vocab_size": n_rows,
        "n_layers": n_layers,
        "d_model": d_model,
        "n_heads": n_heads,
        "d_key": d_model // n_heads,
        "d_value": d_model // n_heads,
    }


def load_gpt2(folder: Path, config: ModelConfig) -> Params:
    """Return the parameters of model.safetensors as NumPy arrays, in its dtypes.

    config: a model with the fields of `read_gpt2_config`.

    Raises ExportError, which names every tensor that is missing, unknown or of a wrong shape; or if the file cannot be
    read, or the head is another matrix than the embedding.
    """
    path = folder / WEIGHTS_FILE
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{path} cannot be read ({describe(error)}): {_HOW}. A model in several files is to be saved as one: "
            "save_pretrained(DIR, max_shard_size='1TB')"
        ) from error
    arrays = {name.removeprefix("transformer."): x for name, x in found.items()}
    arrays = {name: x for name, x in arrays.items() if not _MASK.fullmatch(name)}
    if _HEAD in arrays:
        head = arrays.pop(_HEAD)
        if not np.array_equal(head, arrays.setdefault(_NAMES["embedding"], head)):
            raise ExportError(
                f"{path}: {_HEAD} is not {_NAMES['embedding']}: only models with a tied head can be imported"
            )
    try:
        params = from_state_dict(config, _tensors(config), arrays)
    except ExportError as error:
        raise ExportError(f"{path}: {error}") from error
    params["layers"]["w1"] = {name: _by_heads(config, x) for name, x in params["layers"]["w1"].items()}
    return params


def _tensors(config: ModelConfig) -> list[Tensor]:
    tensors: list[Tensor] = []
    for ours, name in _NAMES.items():
        layers = range(config.n_layers) if "{layer}" in name else [None]
        tensors += [_GPT2Tensor(name.format(layer=layer), ours, layer) for layer in layers]
    return tensors


def _by_heads(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """Queries, keys and values, each of all heads [..., 3 H K], as each head's queries, keys and values."""
    return x.reshape(*x.shape[:-1], 3, config.n_heads, config.d_key).swapaxes(-3, -2).reshape(x.shape)
