# ruff: noqa
"""Prototype: recall by feature map, values and optimizer, all rates and seeds of a kind in one program.

PYTHONPATH=. python experiments/recall_prototype/run.py SECONDS OUT.json experiments/recall_prototype/grid.py
"""

import sys, time, json, functools, math
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from heinsen.config import from_mapping
from heinsen.models import ModelConfig, init_params
import heinsen
from configs import recall

N, T, NK, VS = 32, 129, 127, 256
HI = lax.Precision.HIGHEST
ein = functools.partial(jnp.einsum, precision=HI)


def config(v):
    c = recall.get_config().model
    c.update(
        n_layers=v.get("layers", 4),
        position="none",
        convolution=4,
        output_gate=v.get("og", True),
        gate="head" if v.get("gate", 1) else "none",
        n_heads=v.get("heads", 4),
        d_key=v.get("dk", 16),
        d_value=v.get("dv", 16),
    )
    c.update(value_domain="real" if v.get("real") else "log")
    if v.get("feat") == "softmax":
        c.update(attention="softmax", gate="none", value_domain="log")
    return from_mapping(ModelConfig, c.to_dict())


def draw(key, n, B):
    a, b, c = jax.random.split(key, 3)
    keys = 2 + jnp.argsort(jax.random.uniform(a, (B, NK)), axis=1)[:, :N]
    vals = jax.random.randint(b, (B, N), 2 + NK, VS)
    noise = jnp.where(jnp.arange(N) < n, jax.random.uniform(c, (B, N)), 2.0)
    order = jnp.argsort(noise, axis=1)
    pairs = jnp.stack([keys, vals], -1).reshape(B, 2 * N)
    asked = jnp.take_along_axis(jnp.stack([keys, vals], -1), order[..., None], axis=1).reshape(B, 2 * N)
    t = jnp.arange(T)
    at = lambda x, i: x[:, jnp.clip(i, 0, 2 * N - 1)]
    tok = jnp.where(
        t == 0, 0, jnp.where(t <= 2 * n, at(pairs, t - 1), jnp.where(t == 2 * n + 1, 1, at(asked, t - 2 * n - 2)))
    )
    tok = jnp.where(t < 4 * n + 1, tok, 0)
    j = jnp.arange(N)
    place = jnp.clip(2 * n + 2 + 2 * j, 0, T - 1)
    return tok, place, asked[:, 1::2], (j < n)


def ln(p, x):
    m = x.mean(-1, keepdims=True)
    d = x - m
    return d * lax.rsqrt((d * d).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


dense = lambda p, x: ein("...i,ij->...j", x, p["kernel"]) + (p["bias"] if "bias" in p else 0)


def features(v, p, q, k):
    kind = v.get("feat", "exp")
    if kind in ("norm", "lsm", "scale", "lsmk"):
        temp = jnp.exp(p["temp"])[:, None, None]  # [H]
    if kind == "exp":
        s = v.get("scale", 1.0)
        return s * q, s * k
    if kind == "scale":
        return temp * q, temp * k
    if kind == "norm":
        rms = lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return temp * rms(q), temp * rms(k)
    if kind == "lsm":
        return jax.nn.log_softmax(temp * q), jax.nn.log_softmax(temp * k)
    if kind == "lsmk":
        return temp * q, jax.nn.log_softmax(temp * k)
    if kind == "elu":
        f = lambda x: jnp.where(x > 0, jnp.log1p(jnp.maximum(x, 0)), jnp.minimum(x, 0))
        return f(q), f(k)
    if kind == "softplus":
        f = lambda x: jnp.log(jax.nn.softplus(x) + 1e-12)
        return f(q), f(k)
    if kind == "sq":
        f = lambda x: 2 * jnp.log(jnp.abs(x) + 1e-3)
        return f(q), f(k)


def attend(v, p, q, k, val, G):
    mask = jnp.tril(jnp.ones((q.shape[-2],) * 2, bool))
    if v.get("feat") == "softmax":
        A = jax.nn.softmax(jnp.where(mask, ein("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1]), -1e30))
        return ein("bhts,bhsv->bhtv", A, val)
    q, k = features(v, p, q, k)
    c = lax.stop_gradient(k.max(-2, keepdims=True))
    qc = q + c
    r = lax.stop_gradient(qc.max(-1, keepdims=True))
    A = ein("bhtk,bhsk->bhts", jnp.exp(qc - r), jnp.exp(k - c))
    D = 0.0 if G is None else G[..., :, None] - G[..., None, :]
    A = jnp.where(mask, A * jnp.exp(jnp.minimum(D, 0)), 0)
    Z = A.sum(-1, keepdims=True)
    if v.get("real"):
        return ein("bhts,bhsv->bhtv", A, val) / (Z + 1e-30)
    b = lax.stop_gradient(val.max(-2, keepdims=True))
    S = ein("bhts,bhsv->bhtv", A, jnp.exp(val - b))
    return jnp.log(S + 1e-30) - jnp.log(Z + 1e-30) + b


def model(v, c, params, tok):
    x = params["embedding"][tok]
    B = x.shape[0]

    def layer(x, p):
        n = ln(p["norm"], x)
        h = dense(p["w1"], n).reshape(B, T, c.n_heads, -1).swapaxes(1, 2)
        taps = p["convolution"]["taps"]
        hp = jnp.pad(h, [(0, 0), (0, 0), (taps.shape[1] - 1, 0), (0, 0)])
        h = sum(
            taps[:, i : i + 1] * hp[:, :, taps.shape[1] - 1 - i : taps.shape[1] - 1 - i + T]
            for i in range(taps.shape[1])
        )
        q, k, val = jnp.split(h, (c.d_key, 2 * c.d_key), axis=-1)
        G = None
        if "gate" in p:
            g = p["gate"]
            G = jnp.cumsum(
                (
                    jnp.maximum(g["scale"], 0) * jax.nn.log_sigmoid(ein("bti,ij->btj", n, g["kernel"]) + g["bias"])
                ).swapaxes(1, 2),
                -1,
            )
        y = attend(v, p, q, k, val, G).swapaxes(1, 2).reshape(B, T, -1)
        if v.get("rel") and not v.get("real"):
            y = y - 0
        if "output_gate" in p:
            y = y * 2 * jax.nn.sigmoid(dense(p["output_gate"], n))
        a, b = jnp.split(dense(p["w2"], y), 2, -1)
        return x + dense(p["w3"], a * jax.nn.sigmoid(b)), None

    x, _ = lax.scan(layer, x, params["layers"])
    return ln(params["norm"], x)


def logits_at(v, c, params, tok, place):
    x = model(v, c, params, tok)[:, place]
    return ein("bad,vd->bav", x, params["embedding"][:VS])


def loss_fn(params, v, c, batch):
    tok, place, target, m = batch
    l = jax.nn.log_softmax(logits_at(v, c, params, tok, place))
    return -(jnp.take_along_axis(l, target[..., None], -1)[..., 0] * m).sum() / (m.sum() * tok.shape[0])


def ortho(g):
    tall = g.shape[-2] > g.shape[-1]
    x = g.swapaxes(-1, -2) if tall else g
    x = x / (jnp.sqrt((x * x).sum((-1, -2), keepdims=True)) + 1e-7)
    for _ in range(5):
        A = x @ x.swapaxes(-1, -2)
        x = 3.4445 * x + (-4.775 * A + 2.0315 * A @ A) @ x
    return x.swapaxes(-1, -2) if tall else x


def is_matrix(path):
    return path[-1].key == "kernel" and path[0].key == "layers"


def train(v, steps, B, key, lr):
    """One run: seed key and rate lr. Returns losses and accuracies."""
    c = config(v)
    params = init_params(c, key)
    if v.get("feat") in ("norm", "lsm", "scale", "lsmk"):
        params["layers"]["temp"] = jnp.full((c.n_layers, c.n_heads), math.log(v.get("temp", 1.0)))
    zeros = jax.tree.map(jnp.zeros_like, params)
    muon, warm = v.get("opt", "muon") == "muon", 100
    decay = v.get("wd", 0.0)
    b1, b2 = 0.9, v.get("b2", 0.95)

    def step(carry, i):
        params, m, s = carry
        batch = draw(jax.random.fold_in(key, i), jnp.array([4, 8, 16, 32])[i % 4], B)
        loss, g = jax.value_and_grad(loss_fn)(params, v, c, batch)
        norm = jnp.sqrt(sum((x * x).sum() for x in jax.tree.leaves(g)))
        g = jax.tree.map(lambda x: x * jnp.minimum(1, 1 / (norm + 1e-9)), g)
        rate = jnp.where(
            i < warm, lr * i / warm, lr * (0.033 + 0.967 * 0.5 * (1 + jnp.cos(jnp.pi * (i - warm) / (steps - warm))))
        )

        def upd(path, p, g, m, s):
            if muon and is_matrix(path):
                m = 0.95 * m + g
                o = ortho(g + 0.95 * m)
                return p - v.get("mult", 3.0) * rate * 0.2 * math.sqrt(max(p.shape[-1], p.shape[-2])) * o, m, s
            m, s = b1 * m + (1 - b1) * g, b2 * s + (1 - b2) * g * g
            return p - rate * (m / (1 - b1 ** (i + 1))) / (jnp.sqrt(s / (1 - b2 ** (i + 1))) + 1e-8), m, s

        out = jax.tree_util.tree_map_with_path(upd, params, g, m, s)
        pick = lambda k: jax.tree.map(lambda o: o[k], out, is_leaf=lambda o: isinstance(o, tuple))
        return (pick(0), pick(1), pick(2)), loss

    (params, *_), losses = lax.scan(step, (params, zeros, zeros), jnp.arange(steps))

    def test(n):
        tok, place, target, m = draw(jax.random.fold_in(key, 10**6 + n), n, 128)
        right = jnp.argmax(logits_at(v, c, params, tok, place), -1) == target
        return (right * m).sum() / (m.sum() * 128)

    return losses, lax.map(test, jnp.array([4, 8, 16, 32]))


def run_all(variants, rates, seeds, steps, B, limit, out):
    keys = jnp.stack([jax.random.key(s) for s in seeds])
    jobs = {}
    pool = ThreadPoolExecutor(4)

    def prep(name):
        v = variants[name]
        rs = v.get("rates", rates)
        kk = jnp.repeat(keys, len(rs))
        ll = jnp.tile(jnp.array(rs), len(seeds))
        f = jax.jit(jax.vmap(functools.partial(train, v, steps, B)))
        t = time.time()
        comp = f.lower(kk, ll).compile()
        return comp, kk, ll, rs, time.time() - t

    futures = {n: pool.submit(prep, n) for n in variants}
    start, results = time.time(), {}
    for name in variants:
        if time.time() - start > limit:
            print("no time for", name)
            continue
        comp, kk, ll, rs, ct = futures[name].result()
        t = time.time()
        losses, acc = jax.block_until_ready(comp(kk, ll))
        took = time.time() - t
        acc = np.asarray(acc).reshape(len(seeds), len(rs), 4)
        losses = np.asarray(losses)
        fin = losses[:, -100:].mean(1).reshape(len(seeds), len(rs))
        half = losses[:, steps // 2 - 50 : steps // 2 + 50].mean(1).reshape(len(seeds), len(rs))
        results[name] = dict(
            v=variants[name],
            rates=list(map(float, rs)),
            acc=acc.tolist(),
            final=fin.tolist(),
            half=half.tolist(),
            seconds=took,
            compile=ct,
        )
        print(
            f"{name:28s} {took:5.1f}s compile {ct:4.1f}s | "
            + "  ".join(f"{r:g}: " + "/".join(f"{100 * a:.0f}" for a in acc[:, i, 3]) for i, r in enumerate(rs)),
            flush=True,
        )
        json.dump(results, open(out, "w"))
    pool.shutdown(wait=False, cancel_futures=True)
    return results


if __name__ == "__main__":
    import importlib.util

    spec = importlib.util.spec_from_file_location("g", sys.argv[3])
    g = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(g)
    run_all(g.VARIANTS, g.RATES, g.SEEDS, g.STEPS, 32, float(sys.argv[1]), sys.argv[2])
