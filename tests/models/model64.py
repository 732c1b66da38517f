"""The language model in float64, by NumPy, loops and quadratic forms: what heinsen.models is tested against.

It is written from the definitions (docs/design.md), document by document and head by head, and shares no code with the
package, but that `MovingAverage` is a kind for it. A part is in the model where its parameters are in the tree.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from heinsen.models import abstract_params
from heinsen.models.mixers import Mixer

B, T = 2, 8  # of `draw_tokens`
DOCUMENT = 3

# No two sizes alike but where a kind asks for it, so that no axis passes for another.
SIZES = dict(vocab_size=13, padded_vocab_size=16, d_model=10, n_heads=3, d_key=2, d_value=4, implementation="reference")


def draw_params(config, rng):
    """Parameters that are random everywhere: fresh norms and biases would hide theirs."""

    def draw(path, x):
        is_scale = path[-1].key == "scale"
        size = 0.3 if is_scale else 1 / np.sqrt(x.shape[-2] if path[-1].key == "kernel" else 2)
        x = np.float32(is_scale + size * rng.standard_normal(x.shape))
        # A gate's scale below 0 is 0, and has a gradient all the same, which is not the derivative.
        return np.abs(x) if is_scale and path[-2].key.startswith("gate") else x

    return jax.tree_util.tree_map_with_path(draw, abstract_params(config))


def draw_tokens(config, rng):
    """Tokens [B, T], with documents that begin anywhere where the model has a token for it."""
    tokens = rng.integers(4, config.vocab_size, (B, T))
    if config.document_token is not None:
        tokens[0, [2, 3, 6]] = tokens[1, [0, 5]] = DOCUMENT
    return np.int32(tokens)


# ---- the model -----------------------------------------------------------------------------------


def logits64(config, params, tokens, records=None):
    """Logits [B, T, padded vocabulary], each document of each row by itself.

    Appends what each layer's attention and the layer itself give, of every document, to `records`.
    """
    params, records = jax.tree.map(np.float64, params), [] if records is None else records
    rows = []
    for row in tokens:
        begins = [] if config.document_token is None else np.flatnonzero(row == config.document_token)
        documents = [document for document in np.split(row, begins) if len(document)]
        rows.append(np.concatenate([document64(config, params, document, records) for document in documents]))
    return np.stack(rows)


def document64(config, params, tokens, records):
    x = params["embedding"][tokens]
    position = params.get("position", {})
    if "embedding" in position:
        x = x + position["embedding"][: len(x)]
    if "dense" in position:
        maps = dense64(position["dense"], x)
        c, l, *after = np.split(maps, maps.shape[-1] // config.d_model, axis=-1)  # noqa: E741
        e = recurrence64(c, l)
        x = x + (e if config.causal else e + recurrence64(*(m[::-1] for m in after))[::-1])
    kinds = config.attention.split(",")
    for i in range(config.n_layers):
        place, stack = i % len(kinds), i // len(kinds)
        layers = params["layers"] if len(kinds) == 1 else params["layers"][f"layer_{place}"]
        x = layer64(config, kinds[place], x, jax.tree.map(lambda p, stack=stack: p[stack], layers), records)
    return norm64(params["norm"], x) @ params["embedding"].T


def layer64(config, kind, x, p, records):
    h, n_k = norm64(p["norm"], x), config.d_key
    heads = []
    for i, qkv in enumerate(np.split(dense64(p["w1"], h), config.n_heads, axis=-1)):
        if "convolution" in p:
            taps = p["convolution"]["taps"][i]
            qkv = sum(tap * np.pad(qkv, [(j, 0), (0, 0)])[: len(qkv)] for j, tap in enumerate(taps))
        log_decays = [
            p[name]["scale"][i] * np.log(sigmoid64(h @ p[name]["kernel"][:, i] + p[name]["bias"][i]))
            for name in ("gate", "gate_after")
            if name in p
        ]
        q, k, v = np.split(qkv, [n_k, 2 * n_k], axis=-1)
        if config.position == "rotary" and (kind in ("softmax", "sigmoid") or "feature_map" in p):
            q, k = rotate64(q, np.arange(len(q))), rotate64(k, np.arange(len(k)))
        if "feature_map" in p:
            maps = zip((q, k), p["feature_map"]["kernel"][:, i], p["feature_map"]["bias"][:, i], strict=True)
            q, k = (log_features64(config, x @ a + b) for x, a, b in maps)
        if kind == "delta":
            beta = sigmoid64(h @ p["strength"]["kernel"][:, i] + p["strength"]["bias"][i])
            heads.append(delta64(q, k, v, beta, *log_decays))
        elif kind == "moving_average":
            weights = (1 - DECAY) * DECAY ** np.arange(len(v))
            heads.append(np.stack([weights[: t + 1][::-1] @ v[: t + 1] for t in range(len(v))]))
        else:
            heads.append(attention64(config, kind, q, k, v, log_decays))
    y = np.concatenate(heads, axis=-1)
    if "output_gate" in p:
        y = 2 * sigmoid64(dense64(p["output_gate"], h)) * y
    if "w2" in p:  # the paper's block
        a, b = np.split(dense64(p["w2"], y), 2, axis=-1)
        x = x + dense64(p["w3"], a * sigmoid64(b))
    else:
        x = x + dense64(p["attention_out"], y)
        h = dense64(p["mlp_in"], norm64(p["mlp_norm"], x))
        x = x + dense64(p["mlp_out"], 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))))
    records.append((y, x))
    return x


def attention64(config, kind, q, k, v, log_decays):
    """One head of one document, [T, K], [T, K], [T, V], [T]s -> [T, V]: the weights of all pairs."""
    place = np.arange(len(q))
    seen = np.tril(np.ones((len(q), len(q)))) if config.causal else np.ones((len(q), len(q)))
    if kind == "sigmoid":
        count = seen.sum(-1, keepdims=True)
        bias = -np.log(count) if config.sigmoid_bias == "-log_n" else float(config.sigmoid_bias)
        return seen * sigmoid64(q @ k.T / np.sqrt(config.d_key) + bias) / count**config.sigmoid_alpha @ v
    if kind == "softmax":
        weights = np.exp(q @ k.T / np.sqrt(config.d_key))
    elif kind == "linear":
        elu = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
        weights = elu(q) @ elu(k).T
    else:
        weights = np.exp(q) @ np.exp(k).T
    if log_decays:
        left = [[log_decays[0][s + 1 : t + 1].sum() for s in place] for t in place]
        if not config.causal:  # the tokens between, for later ones
            left += np.array([[log_decays[1][t + 1 : s].sum() for s in place] for t in place])
        weights = weights * np.exp(left)
    weights = seen * weights / (seen * weights).sum(-1, keepdims=True)
    return np.log(weights @ np.exp(v)) if kind == "heinsen" and config.value_domain == "log" else weights @ v


def log_features64(config, z):
    """Logarithms of the features of a feature map."""
    features = {
        "exponential": np.exp,
        "elu": lambda z: np.where(z > 0, z + 1, np.exp(np.minimum(z, 0))),
        "relu": lambda z: np.maximum(z, 0) + 1e-6,
        "softmax": lambda z: np.exp(z) / np.exp(z).sum(-1, keepdims=True),
    }
    return np.log(features[config.feature_map](z))


def delta64(q, k, v, beta, log_decays=None):
    """One head of one document with the gated delta rule, token by token."""
    q, k, v = (x * sigmoid64(x) for x in (q, k, v))
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    memory, out = np.zeros((k.shape[-1], v.shape[-1])), []
    for t in range(len(q)):
        left = 1.0 if log_decays is None else np.exp(log_decays[t])
        memory = left * (memory - beta[t] * np.outer(k[t], k[t] @ memory)) + beta[t] * np.outer(k[t], v[t])
        y = q[t] @ memory / np.sqrt(k.shape[-1])
        out.append(y / np.sqrt((y**2).mean() + 1e-5))
    return np.stack(out)


def recurrence64(c, l):  # noqa: E741
    """e_t = log(sigmoid(c_t) exp(e_{t-1}) + exp(l_t)), from e_0 = 0."""
    e, out = np.zeros(c.shape[-1]), []
    for t in range(len(c)):
        e = np.log(sigmoid64(c[t]) * np.exp(e) + np.exp(l[t]))
        out.append(e)
    return np.stack(out)


def rotate64(x, place):
    half = x.shape[-1] // 2
    turn = np.exp(1j * place[:, None] * 10000.0 ** (-np.arange(half) / half))
    z = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def dense64(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def norm64(p, x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def sigmoid64(x):
    return 1 / (1 + np.exp(-x))


# ---- one more kind -------------------------------------------------------------------------------

DECAY = 0.8


@dataclasses.dataclass(frozen=True)
class MovingAverage(Mixer[jax.Array]):
    """y[t] = m[t] = DECAY m[t-1] + (1 - DECAY) v[t], from m = 0. The state is m, [B, H, V]."""

    def init_state(self, batch_size, capacity):
        return jnp.zeros((batch_size, self.n_heads, self.d_value), self.accumulator_dtype)

    def _attend(self, q, k, values, state, tokens):
        n_batch, _, n_tokens, _ = values.shape
        begins = jnp.zeros((n_batch, n_tokens), bool)
        if tokens.segment_ids is not None:
            begins = begins.at[:, 1:].set(jnp.diff(tokens.segment_ids[:, 0], axis=-1) != 0)
        valid = jnp.ones_like(begins) if tokens.valid is None else tokens.valid

        def token(m, at_t):
            v, begins, valid = at_t
            new = DECAY * jnp.where(begins[:, None, None], 0, m) + (1 - DECAY) * v
            m = jnp.where(valid[:, None, None], new, m)
            return m, m

        state = self.init_state(n_batch, 0) if state is None else state
        state, y = jax.lax.scan(token, state, (jnp.moveaxis(values, 2, 0), begins.T, valid.T))
        return jnp.moveaxis(y, 0, 2), state


# ---- losses and comparisons ----------------------------------------------------------------------


def losses64(logits, targets):
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return log_z - np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


def slope64(loss, params, direction):
    """The derivative of a loss along a direction through all parameters."""
    moved = lambda step: jax.tree.map(lambda x, d: np.float64(x) + step * d, params, direction)
    return (loss(moved(1e-6)) - loss(moved(-1e-6))) / 2e-6


def assert_close(got, want, tolerance):
    want = np.asarray(want, np.float64)
    assert np.abs(np.asarray(got, np.float64) - want).max() <= tolerance * np.abs(want).max()


def assert_gradients(rng, params, grads, loss):
    """Compare gradients with the derivative of `loss`, in float64, along a random direction; none is 0 everywhere."""
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), params)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda d, g: np.sum(d * np.float64(g)), direction, grads)))
    scale = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(grads)))
    assert abs(slope64(loss, params, direction) - slope) < 1e-4 * max(scale, abs(slope))
    assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grads))
