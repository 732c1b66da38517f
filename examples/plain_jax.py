"""The attention in plain JAX: train on whole sequences, then run on a stream with a state of constant size.

    python examples/plain_jax.py

The input is a sequence of numbers, some of them marked. After each one, the model must output the mean of the marked
numbers so far, which a head with large keys for them computes exactly. The parameters are three matrices in a dict, and
the optimizer is two lines of gradient descent with momentum.
"""

from functools import partial

import jax
import jax.numpy as jnp

import heinsen

D_KEY = 4

Params = dict[str, jax.Array]


def init(key: jax.Array) -> Params:
    """Return the matrices that map a token (number, mark, 1) to a query, a key and a value."""
    widths = {"q": D_KEY, "k": D_KEY, "v": 1}
    keys = jax.random.split(key, len(widths))
    return {name: 0.5 * jax.random.normal(k, (3, n)) for (name, n), k in zip(widths.items(), keys, strict=True)}


def predict(params: Params, tokens: jax.Array) -> jax.Array:
    """Return the predictions [B, T] for tokens [B, T, 3], all at once."""
    return heinsen.attention(*(tokens @ params[name] for name in "qkv"))[..., 0]


def predict_next(params: Params, state: heinsen.MeanState, token: jax.Array) -> tuple[jax.Array, heinsen.MeanState]:
    """Return (predictions [B], new state) for the next token [B, 3] of each stream."""
    q, k, v = (token @ params[name] for name in "qkv")
    state = heinsen.update_state(state, k, v)
    return heinsen.query_state(state, q)[..., 0], state


@partial(jax.jit, static_argnums=(1, 2))
def draw(key: jax.Array, n_sequences: int, n_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return tokens [B, T, 3] and the means of the marked numbers so far [B, T]; every first number is marked."""
    numbers_key, marks_key = jax.random.split(key)
    numbers = jax.random.normal(numbers_key, (n_sequences, n_tokens))
    marks = jax.random.bernoulli(marks_key, 0.3, numbers.shape).at[:, 0].set(True).astype(numbers.dtype)
    means = jnp.cumsum(numbers * marks, axis=1) / jnp.cumsum(marks, axis=1)
    return jnp.stack([numbers, marks, jnp.ones_like(numbers)], axis=-1), means


def main(steps: int = 300, batch: int = 32, n_tokens: int = 16, seed: int = 0) -> dict[str, float]:
    """Train, stream and print; return the results that are printed."""
    key = jax.random.key(seed)
    params = init(key)

    def loss(params, key):
        tokens, means = draw(key, batch, n_tokens)
        return jnp.mean((predict(params, tokens) - means) ** 2)

    @jax.jit
    def step(params, velocity, key):
        value, grad = jax.value_and_grad(loss)(params, key)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grad)
        return jax.tree.map(lambda p, v: p - 0.1 * v, params, velocity), velocity, value

    velocity, losses = jax.tree.map(jnp.zeros_like, params), []
    for i in range(steps):
        params, velocity, value = step(params, velocity, jax.random.fold_in(key, i))
        losses.append(float(value))
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i:3}: mean squared error {value:.5f}")

    # Run on streams eight times as long as the training sequences.
    tokens, means = draw(jax.random.fold_in(key, steps), batch, 8 * n_tokens)
    state, answers = heinsen.init_state((batch,), D_KEY, 1, signed=True), []
    stream = jax.jit(predict_next)
    for t in range(tokens.shape[1]):
        answer, state = stream(params, state, tokens[:, t])
        answers.append(answer)
    answers = jnp.stack(answers, axis=1)
    results = {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "stream_error": float(jnp.mean((answers - means) ** 2)),
        "stream_difference": float(jnp.max(jnp.abs(answers - jax.jit(predict)(params, tokens)))),
        "state_size": sum(x.size for x in state) // batch,
    }
    print(f"streams of {tokens.shape[1]} numbers, one at a time: mean squared error {results['stream_error']:.5f},")
    print(
        f"equal to all at once within {results['stream_difference']:.0e}; {results['state_size']} numbers of state each"
    )
    return results


if __name__ == "__main__":
    main()
