"""The attention in a Flax model of your own, trained for a few seconds on a lookup task.

    python examples/flax_model.py

Each sequence is a list of (name, value) pairs, then one name alone, whose value the model must predict. The model is an
ordinary Transformer block with `heinsen.attention` in place of softmax attention.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import heinsen

N_NAMES, N_VALUES = 8, 8


class Attention(nn.Module):
    """Causal self-attention over [B, T, D]."""

    n_heads: int
    d_head: int

    @nn.compact
    def __call__(self, x):
        heads = lambda name: nn.DenseGeneral((self.n_heads, self.d_head), name=name)(x).swapaxes(1, 2)  # [B, H, T, K]
        y = heinsen.attention(heads("q"), heads("k"), heads("v"))  # no 1/sqrt(d): q and k are exponents
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(y.swapaxes(1, 2))


class Lookup(nn.Module):
    """One Transformer block; returns the logits of the last token's value."""

    d_model: int = 32
    n_heads: int = 2
    d_head: int = 16

    @nn.compact
    def __call__(self, names, values):
        x = nn.Embed(N_NAMES, self.d_model)(names) + nn.Embed(N_VALUES + 1, self.d_model)(values)
        x = x + Attention(self.n_heads, self.d_head)(nn.LayerNorm()(x))
        x = x + nn.Dense(self.d_model)(nn.gelu(nn.Dense(2 * self.d_model)(nn.LayerNorm()(x))))
        return nn.Dense(N_VALUES)(nn.LayerNorm()(x[:, -1]))


@partial(jax.jit, static_argnums=1)
def draw(key, n_sequences: int):
    """Return (names [B, T], values [B, T], answers [B]): all names in random order, then one of them without value."""
    order_key, value_key, asked_key = jax.random.split(key, 3)
    order = jax.vmap(lambda k: jax.random.permutation(k, N_NAMES))(jax.random.split(order_key, n_sequences))
    values = jax.random.randint(value_key, (n_sequences, N_NAMES), 0, N_VALUES)
    asked = jax.random.randint(asked_key, (n_sequences, 1), 0, N_NAMES)
    names = jnp.concatenate([order, jnp.take_along_axis(order, asked, axis=1)], axis=1)
    nothing = jnp.full((n_sequences, 1), N_VALUES)
    return names, jnp.concatenate([values, nothing], axis=1), jnp.take_along_axis(values, asked, axis=1)[:, 0]


def main(steps: int = 150, batch: int = 64, seed: int = 0) -> tuple[float, float]:
    """Train and print; return the accuracies on new sequences before and after."""
    model, optimizer = Lookup(), optax.adam(1e-2)
    key = jax.random.key(seed)
    params = jax.jit(model.init)(key, *draw(key, batch)[:2])
    optimizer_state = optimizer.init(params)

    def loss_and_accuracy(params, key):
        names, values, answers = draw(key, batch)
        logits = model.apply(params, names, values)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean()
        return loss, jnp.mean(logits.argmax(-1) == answers)

    @jax.jit
    def step(i, params, optimizer_state):
        (loss, accuracy), grad = jax.value_and_grad(loss_and_accuracy, has_aux=True)(params, jax.random.fold_in(key, i))
        updates, optimizer_state = optimizer.update(grad, optimizer_state)
        return optax.apply_updates(params, updates), optimizer_state, loss, accuracy

    print(f"chance: {1 / N_VALUES:.0%} right\nstep   loss   right")
    shares = []
    for i in range(steps):
        params, optimizer_state, loss, accuracy = step(i, params, optimizer_state)
        shares.append(float(accuracy))
        if i % 25 == 0 or i == steps - 1:
            print(f"{i:4}  {loss:.3f}  {accuracy:6.1%}")
    return shares[0], shares[-1]


if __name__ == "__main__":
    main()
