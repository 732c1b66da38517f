"""GPT-2 by NumPy in float64, and its folders in transformers' format; shares no code with the package."""

import json

import numpy as np
from safetensors.numpy import save_file

N_IDS = 50257
# As transformers 5 writes it for GPT-2.
CONFIG = dict(
    activation_function="gelu_new", add_cross_attention=False, architectures=["GPT2LMHeadModel"], attn_pdrop=0.1,
    initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="gpt2", n_embd=768, n_head=12, n_inner=None,
    n_layer=12, n_positions=1024, reorder_and_upcast_attn=False, scale_attn_by_inverse_layer_idx=False,
    scale_attn_weights=True, tie_word_embeddings=True, vocab_size=N_IDS,
)  # fmt: skip


def draw_weights(rng, config):
    """A state_dict of GPT2LMHeadModel without its head, in which no tensor is as initialized."""
    d, rows, places = config["n_embd"], config["vocab_size"], config["n_positions"]
    shapes = {"wte.weight": (rows, d), "wpe.weight": (places, d), "ln_f.weight": (d,), "ln_f.bias": (d,)}
    for h in (f"h.{i}." for i in range(config["n_layer"])):
        shapes |= {f"{h}{name}": (d,) for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")}
        for name, fan_in, fan_out in (("attn.c_attn", d, 3 * d), ("attn.c_proj", d, d), ("mlp.c_fc", d, 4 * d),
                                      ("mlp.c_proj", 4 * d, d)):  # fmt: skip
            shapes |= {f"{h}{name}.weight": (fan_in, fan_out), f"{h}{name}.bias": (fan_out,)}
    draw = lambda shape: rng.standard_normal(shape) / np.sqrt(shape[0] if len(shape) > 1 and shape[0] < rows else 3)
    return {
        name: np.float32(draw(shape) + (".ln" in f".{name}" and "weight" in name)) for name, shape in shapes.items()
    }


def logits64(config, weights, tokens):
    """GPT-2's logits [T, rows] of one text, in float64."""
    w = {name: np.float64(x) for name, x in weights.items()}
    linear = lambda name, x: x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][: len(tokens)]
    for h in (f"h.{i}." for i in range(config["n_layer"])):
        q, k, v = np.split(linear(f"{h}attn.c_attn", norm(f"{h}ln_1", x)), 3, axis=-1)
        columns = np.split(np.arange(config["n_embd"]), config["n_head"])
        scores = [np.tril(np.exp(q[:, i] @ k[:, i].T / np.sqrt(len(i)))) for i in columns]
        heads = [score / score.sum(-1, keepdims=True) @ v[:, i] for score, i in zip(scores, columns, strict=True)]
        x = x + linear(f"{h}attn.c_proj", np.concatenate(heads, axis=-1))
        a = linear(f"{h}mlp.c_fc", norm(f"{h}ln_2", x))
        x = x + linear(f"{h}mlp.c_proj", 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))))
    return norm("ln_f", x) @ w["wte.weight"].T


def write_source(folder, config, weights):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
