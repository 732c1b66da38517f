"""The attention in plain JAX: train on whole sequences, then run on a stream with a state of constant size.

    python examples/plain_jax.py

Numbers come one after the other, some of them marked. After each the model is to say the mean of the marked ones so
far: a head that gives them large keys does it exactly. Parameters are three matrices in a dict, the optimizer is two
lines of gradient descent with momentum.
"""

from functools import partial

import jax
import jax.numpy as jnp

import heinsen

D_KEY = 4


def init(key):
    """Maps of a token (number, mark, 1) to a query, a key and a value."""
    widths = {"q": D_KEY, "k": D_KEY, "v": 1}
    keys = jax.random.split(key, len(widths))
    return {name: 0.5 * jax.random.normal(k, (3, n)) for (name, n), k in zip(widths.items(), keys, strict=True)}


def predict(params, tokens):
    """[B, T, 3] -> [B, T], all tokens at once."""
    return heinsen.attention(*(tokens @ params[name] for name in "qkv"))[..., 0]


def predict_next(params, state, token):
    """One token [B, 3] of each stream: (prediction [B], the new state)."""
    q, k, v = (token @ params[name] for name in "qkv")
    state = heinsen.update_state(state, k, v)
    return heinsen.query_state(state, q)[..., 0], state


@partial(jax.jit, static_argnums=(1, 2))
def draw(key, n_sequences: int, n_tokens: int):
    """(tokens [B, T, 3], means of the marked numbers so far [B, T]); the first number of a sequence is marked."""
    numbers_key, marks_key = jax.random.split(key)
    numbers = jax.random.normal(numbers_key, (n_sequences, n_tokens))
    marks = jax.random.bernoulli(marks_key, 0.3, numbers.shape).at[:, 0].set(True).astype(numbers.dtype)
    means = jnp.cumsum(numbers * marks, axis=1) / jnp.cumsum(marks, axis=1)
    return jnp.stack([numbers, marks, jnp.ones_like(numbers)], axis=-1), means


def main(steps: int = 300, batch: int = 32, n_tokens: int = 16, seed: int = 0) -> dict[str, float]:
    """Train, stream, print; returns the figures that are printed."""
    key = jax.random.key(seed)
    params = init(key)

    def loss(params, key):
        tokens, means = draw(key, batch, n_tokens)
        return jnp.mean((predict(params, tokens) - means) ** 2)

    @jax.jit
    def step(params, velocity, key):
        value, gradient = jax.value_and_grad(loss)(params, key)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
        return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity, value

    velocity, losses = jax.tree.map(jnp.zeros_like, params), []
    for i in range(steps):
        params, velocity, value = step(params, velocity, jax.random.fold_in(key, i))
        losses.append(float(value))
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i:3}: mean squared error {value:.5f}")

    # The same on streams eight times as long as any sequence of the training.
    tokens, means = draw(jax.random.fold_in(key, steps), batch, 8 * n_tokens)
    state, answers = heinsen.init_state((batch,), D_KEY, 1, signed=True), []
    stream = jax.jit(predict_next)
    for t in range(tokens.shape[1]):
        answer, state = stream(params, state, tokens[:, t])
        answers.append(answer)
    answers = jnp.stack(answers, axis=1)
    figures = {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "stream_error": float(jnp.mean((answers - means) ** 2)),
        "stream_difference": float(jnp.max(jnp.abs(answers - jax.jit(predict)(params, tokens)))),
        "state_size": sum(x.size for x in state) // batch,
    }
    print(f"streams of {tokens.shape[1]} numbers, one at a time: mean squared error {figures['stream_error']:.5f},")
    print(
        f"the same to {figures['stream_difference']:.0e} as all at once; {figures['state_size']} numbers of state each"
    )
    return figures


if __name__ == "__main__":
    main()
