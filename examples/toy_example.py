"""The same causal attention three times: at quadratic cost, at linear cost, and in chunks that pass on a state.

    python examples/toy_example.py

The paper's modified attention (eq. 1) is softmax(log(exp(Q) exp(K)^T)) V. As written, it visits every pair of tokens.
As log-sums of exponentials (eqs. 2-4) it has linear cost. With the state of eqs. 5-6, tokens may arrive piece by piece,
without end.
"""

from functools import partial

import jax
import jax.numpy as jnp

import heinsen


def quadratic(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return eq. (1) as written: [T, K], [T, K], [T, V] -> [T, V]. Subtracting the maxima cancels in the softmax."""
    similarities = jnp.log(jnp.exp(q - q.max()) @ jnp.exp(k - k.max()).T)
    visible = jnp.tril(jnp.ones(similarities.shape, bool))
    return jax.nn.softmax(jnp.where(visible, similarities, -jnp.inf), axis=-1) @ v


def sequential(q: jax.Array, k: jax.Array, log_v: jax.Array, chunk: int) -> tuple[jax.Array, list[int]]:
    """Return eqs. (5) and (6), computed `chunk` tokens at a time, and the size of the state after each chunk."""
    attend = jax.jit(partial(heinsen.log_attention, return_state=True))
    state = heinsen.init_state((), k.shape[-1], log_v.shape[-1])
    pieces, sizes = [], []
    for start in range(0, len(q), chunk):
        log_y, state = attend(*(x[start : start + chunk] for x in (q, k, log_v)), state=state)
        pieces.append(jnp.exp(log_y))
        sizes.append(sum(x.size for x in state))
    return jnp.concatenate(pieces), sizes


def token_by_token(q: jax.Array, k: jax.Array, log_v: jax.Array) -> jax.Array:
    """Return the same, computed one token per call, as in text generation."""

    def step(state, token):
        q, k, log_v = token
        state = heinsen.update_state(state, k, log_v)
        return state, jnp.exp(heinsen.query_state(state, q))

    return jax.lax.scan(step, heinsen.init_state((), k.shape[-1], log_v.shape[-1]), (q, k, log_v))[1]


def main(seed: int = 0, n_tokens: int = 12, d_key: int = 4, d_value: int = 4, chunk: int = 3) -> dict[str, jax.Array]:
    """Print the example; return its results, each [n_tokens, d_value]."""
    q, k, log_v = (
        jax.random.normal(key, (n_tokens, width))
        for key, width in zip(jax.random.split(jax.random.key(seed), 3), (d_key, d_key, d_value), strict=True)
    )
    v = jnp.exp(log_v)
    in_chunks, sizes = sequential(q, k, log_v, chunk)
    linear = jax.jit(heinsen.log_attention)
    results = {
        "quadratic": quadratic(q, k, v),
        "linear": jnp.exp(linear(q, k, log_v)),
        "linear, from v itself": jax.jit(heinsen.attention)(q, k, v),
        f"in chunks of {chunk}": in_chunks,
        "token by token": token_by_token(q, k, log_v),
    }
    print(f"y of {n_tokens} tokens with {d_value} value features, by eq. (1) at quadratic cost:\n")
    print(results["quadratic"], "\n")
    for name, y in results.items():
        print(f"{name:<22} differs from it by at most {jnp.max(jnp.abs(y - results['quadratic'])):.1e}")
    print(f"\nnumbers in the state after each chunk: {sizes}, independent of the context")

    # The quadratic form fails for widely spread exponents: their exponentials underflow in float32.
    wide = 60.0
    exact = linear(wide * q, wide * k, log_v)
    lost = int(jnp.sum(~jnp.isfinite(quadratic(wide * q, wide * k, v)).all(-1)))
    print(
        f"\nqueries and keys times {wide:.0f}: the quadratic form loses {lost} of {n_tokens} tokens, "
        f"log_attention {int(jnp.sum(~jnp.isfinite(exact).all(-1)))}"
    )
    return results


if __name__ == "__main__":
    main()
