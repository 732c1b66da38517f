"""Prototypes of changes to the gated attention, to be deleted once they are measured.

    python experiments/candidates.py --candidate=NAME --config=experiments/forgetting/config.py --workdir=DIR ...

The other flags are those of train.py. NAME is

    per_feature  one decay per key feature: exp(q_t + k_s + G_t - G_s), G the sums of the features' log decays
    pairs        order-2 features beside the others: q_i + q_{i+1} and k_i + k_{i+1}, twice the state
    levels       a state per power of two (log-linear attention): the weight of s at t is multiplied by
                 exp(l[t, level]) <= 1, level = the highest bit in which t and s differ, plus 1; l is computed from x_t,
                 one per head and level
    half, triple queries and keys times 0.5, times 3
    elu          features elu + 1 in place of exponentials, in the exact operator: their logarithms for q and k
    softplus     features softplus, likewise
    baseline     the gated attention, as it is

No sharding, no decoding, and for `levels` the quadratic form, of exponents that do not spread.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from heinsen.logspace import log_sigmoid
from heinsen.models import language_model
from heinsen.models.dense import Dense
from heinsen.models.gate import ForgetGate
from heinsen.models.mixers.heinsen import Heinsen, LogHeinsen
from heinsen.ops.api import log_attention

N_LEVELS = 10


def attend_per_feature(self: Heinsen[Any], q: Array, k: Array, values: Array, state: Any, context: Any) -> Any:
    decays = context.log_decay
    if decays is not None:
        sums = jnp.cumsum(decays.reshape(*q.shape[:2], -1, q.shape[2]), axis=-1).swapaxes(2, 3)  # [B, H, T, K]
        q, k = q + sums, k - sums
    return log_attention(q, k, values, segment_ids=context.segment_ids, state=state, return_state=True)


def attend_pairs(self: Heinsen[Any], q: Array, k: Array, values: Array, state: Any, context: Any) -> Any:
    pair = lambda x: jnp.concatenate([x, x + jnp.roll(x, 1, axis=-1)], axis=-1)
    given = dict(log_decay=context.log_decay, segment_ids=context.segment_ids, return_state=True)
    return log_attention(pair(q), pair(k), values, **given)


def attend_levels(self: Heinsen[Any], q: Array, k: Array, values: Array, state: Any, context: Any) -> Any:
    n_tokens, n_heads = q.shape[2], q.shape[1]
    decays, levels = context.log_decay[:, :n_heads], context.log_decay[:, n_heads:]
    levels = levels.reshape(q.shape[0], n_heads, N_LEVELS, n_tokens)
    t, s = jnp.arange(n_tokens)[:, None], jnp.arange(n_tokens)[None]
    # Level 0 is s = t; else the highest bit in which t and s differ, plus 1.
    level = 32 - jax.lax.clz(jnp.bitwise_xor(t, s).astype(jnp.int32))
    shift_k = jax.lax.stop_gradient(jnp.max(k, axis=2, keepdims=True))
    shift_q = jax.lax.stop_gradient(jnp.max(q + shift_k, axis=3, keepdims=True))
    product = jnp.einsum("bhtk,bhsk->bhts", jnp.exp(q + shift_k - shift_q), jnp.exp(k - shift_k))
    sums = jnp.cumsum(decays, axis=-1)
    scores = jnp.log(jnp.maximum(product, 1e-30)) + sums[..., :, None] - sums[..., None, :]
    scores += jnp.take_along_axis(levels.swapaxes(2, 3), level[None, None], axis=3)
    seen = t >= s
    if context.segment_ids is not None:
        ids = context.segment_ids[:, 0]
        seen = seen & (ids[:, :, None] == ids[:, None, :])[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    shift_v = jax.lax.stop_gradient(jnp.max(values, axis=2, keepdims=True))
    mean = jnp.einsum("bhts,bhsv->bhtv", weights, jnp.exp(values - shift_v))
    return jnp.log(jnp.maximum(mean, 1e-30)) + shift_v, self._empty(*q.shape[:2])


FEATURES: dict[str, Callable[[Array], Array]] = {
    "half": lambda x: 0.5 * x,
    "triple": lambda x: 3 * x,
    "elu": lambda x: jnp.where(x > 0, jnp.log1p(jnp.maximum(x, 0)), jnp.minimum(x, 0)),  # log(elu(x) + 1)
    "softplus": lambda x: jnp.log(jax.nn.softplus(jnp.maximum(x, -20))),
}


def decays_per_feature(self: Any, normed: Array, context: Any) -> Any:
    c = self.config
    gate = ForgetGate(c.n_heads * c.d_key, c.gate_shortest, c.gate_longest, c.dtype, self.deviation, name="gate")
    return context._replace(log_decay=gate(normed))


def decays_and_levels(self: Any, normed: Array, context: Any) -> Any:
    c = self.config
    gate = ForgetGate(c.n_heads, c.gate_shortest, c.gate_longest, c.dtype, self.deviation, name="gate")
    levels = Dense(c.n_heads * N_LEVELS, c.dtype, deviation=self.deviation, name="levels")(normed)
    levels = log_sigmoid(levels + 2.0).swapaxes(1, 2)
    return context._replace(log_decay=jnp.concatenate([gate(normed), levels], axis=1))


def main() -> None:
    [name] = [x.partition("=")[2] for x in sys.argv if x.startswith("--candidate=")]
    sys.argv = [x for x in sys.argv if not x.startswith("--candidate=")]
    if name == "per_feature":
        LogHeinsen._attend, language_model.Layer.add_log_decays = attend_per_feature, decays_per_feature
    elif name == "pairs":
        LogHeinsen._attend = attend_pairs
    elif name == "levels":
        LogHeinsen._attend, language_model.Layer.add_log_decays = attend_levels, decays_and_levels
    elif name in FEATURES:
        of, attend = FEATURES[name], Heinsen._attend
        Heinsen._attend = lambda self, q, k, *rest: attend(self, of(q), of(k), *rest)
    elif name != "baseline":
        raise SystemExit(f"--candidate={name}: see the top of this file")
    from absl import app

    import train
    from scripts.cli import parse_flags

    app.run(train.main, flags_parser=parse_flags)


if __name__ == "__main__":
    main()
