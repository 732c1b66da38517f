"""One decoding step of a language model as a graph: (tokens [B], state) -> (logits [B, vocab_size], new state).

It computes what `heinsen.models.forward` does of one token, in float32, on the state of `heinsen.contrib.onnx.state`.

Axes: B batch, D d_model, H heads, K key features, V value features, N taps, F features of a head: 2K + V.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
import onnx

from heinsen.contrib.onnx.graph import Graph, Operand, Value
from heinsen.contrib.onnx.state import state_dtype, state_shapes
from heinsen.export.state_dicts import named_leaves
from heinsen.models import ModelConfig, Params, unstack


def build_step(config: ModelConfig, params: Params, metadata: Mapping[str, str]) -> onnx.ModelProto:
    """Return the step of a model that `check_exportable` accepts.

    Its inputs are `tokens` (int32) and the tensors of `state_shapes`; its outputs are `logits` (float32) and the
    tensors after the token, as `new.NAME`.
    """
    arrays = {name: np.asarray(x, np.float32) for name, x in named_leaves(unstack(config, jax.device_get(params)))}
    arrays["embedding"] = arrays["embedding"][: config.vocab_size]
    step = _Step(config, arrays)
    step.run()
    return step.graph.build(metadata)


class _Sum(NamedTuple):
    """old + new, non-negative, up to a factor exp(exponent) with a whole exponent."""

    old: Value
    new: Value
    exponent: Value


class _Step:
    def __init__(self, config: ModelConfig, arrays: Mapping[str, np.ndarray]):
        self.config, self.arrays, self.graph = config, arrays, Graph()
        self.tokens = self.graph.input("tokens", "int32", ())
        self.before = {name: self._state(name, shape) for name, shape in state_shapes(config).items()}
        self.after: dict[str, Value] = {}

    def _state(self, name: str, shape: tuple[int, ...]) -> Value:
        """An input of the state, zeros where the token begins a document."""
        value = self.graph.input(name, state_dtype(name), shape)
        if self.config.document_token is None:
            return value
        begins = self.graph.apply("Equal", self.tokens, np.array(self.config.document_token, np.int32))
        begins = self._unsqueeze(begins, *range(1, len(shape) + 1)) if shape else begins
        return self.graph.apply("Where", begins, np.zeros((), state_dtype(name)), value)

    def run(self) -> None:
        c, g = self.config, self.graph
        embedding = self.weight("embedding")
        x = self.add_position(g.apply("Gather", embedding, self.tokens))
        for i in range(c.n_layers):
            x = self.layer(x, f"layer_{i}")
        logits = g.apply("Gemm", self.layer_norm(x, "norm"), embedding, transB=1)
        g.output("logits", logits, "float32", (c.vocab_size,))
        for name, shape in state_shapes(c).items():
            g.output(f"new.{name}", self.after[name], state_dtype(name), shape)

    # ---- the model (heinsen.models) ----

    def add_position(self, x: Value) -> Value:
        """x + e, e = logaddexp(e + log_sigmoid(c), l) with (c, l) a dense map of x; or x + a row of a table."""
        c, g = self.config, self.graph
        if c.position == "recurrent":
            gate, log_b = g.split(self.dense(x, "position.dense"), [c.d_model, c.d_model])
            e = self.logaddexp(self.before["position"] + self.log_sigmoid(gate), log_b)
            self.after["position"] = e
            return x + e
        if c.position == "learned":
            place = self.before["place"]
            self.after["place"] = place + np.array(1, np.int32)
            return x + g.apply("Gather", self.weight("position.embedding"), place)
        return x

    def layer(self, x: Value, name: str) -> Value:
        c, g = self.config, self.graph
        normed = self.layer_norm(x, f"{name}.norm")
        h = self.reshape(self.dense(normed, f"{name}.w1"), c.n_heads, 2 * c.d_key + c.d_value)
        if c.convolution:
            h = self.convolve(h, name)
        q, k, values = g.split(h, [c.d_key, c.d_key, c.d_value])
        y = self.reshape(self.attend(q, k, values, self.log_decay(normed, name), name), c.n_heads * c.d_value)
        if c.output_gate:
            y = y * (g.apply("Sigmoid", self.dense(normed, f"{name}.output_gate")) * 2.0)
        if c.block == "gpt2":
            x = x + self.dense(y, f"{name}.attention_out")
            h = self.gelu(self.dense(self.layer_norm(x, f"{name}.mlp_norm"), f"{name}.mlp_in"))
            return x + self.dense(h, f"{name}.mlp_out")
        a, b = g.split(self.dense(y, f"{name}.w2"), [c.d_model, c.d_model])
        return x + self.dense(a * g.apply("Sigmoid", b), f"{name}.w3")

    def convolve(self, h: Value, name: str) -> Value:
        """Sum of the last N inputs [B, H, F] of each feature, times its taps."""
        g, taps = self.graph, self.arrays[f"{name}.convolution.taps"]
        inputs = g.apply("Concat", self.before[f"{name}.inputs"], self._unsqueeze(h, 2), axis=2)
        self.after[f"{name}.inputs"] = g.apply("Slice", inputs, np.array([1]), np.array([taps.shape[1]]), np.array([2]))
        return self._reduce("Sum", inputs * g.weight(f"{name}.convolution.taps", taps[:, ::-1]), 2)

    def log_decay(self, normed: Value, name: str) -> Value | None:
        """The forget gate [B, H, 1], if the model has one."""
        if self.config.forget_gate == "none":
            return None
        gate = self.log_sigmoid(self.dense(normed, f"{name}.gate"))
        scale = self.graph.weight(f"{name}.gate.scale", np.maximum(self.arrays[f"{name}.gate.scale"], 0))
        return self._unsqueeze(gate * scale, 2)

    def attend(self, q: Value, k: Value, values: Value, log_decay: Value | None, name: str) -> Value:
        """Equations (6) and (5): update sums and means by k [B, H, K] and values [B, H, V], then read them with q."""
        mean, last = self.before[f"{name}.mean"], lambda x: self._unsqueeze(x, 3)
        values = self._unsqueeze(values, 2)
        z_before, z_exponent = self.before[f"{name}.key_sum"], self.before[f"{name}.key_sum_exponent"]
        sums = self.add_to(z_before, z_exponent, log_decay, k)
        z, mean_exponent = sums.old + sums.new, None
        if self.config.value_domain == "log":  # the mean's numerator, relative to the new exponent of its denominator
            exponent = self.before[f"{name}.mean_exponent"] + last(z_exponent - sums.exponent)
            decay = None if log_decay is None else last(log_decay)
            parts = self.add_to(mean * last(z_before), exponent, decay, last(k - sums.exponent), values)
            mean, mean_exponent = (parts.old + parts.new) / last(z), parts.exponent
            self.after[f"{name}.mean_exponent"] = mean_exponent
        else:
            mean = last(sums.old / z) * mean + last(sums.new / z) * values
        self.after |= {f"{name}.key_sum": z, f"{name}.key_sum_exponent": sums.exponent, f"{name}.mean": mean}
        return self.read(q, z, sums.exponent, mean, mean_exponent)

    def read(self, q: Value, z: Value, z_exponent: Value, mean: Value, mean_exponent: Value | None) -> Value:
        """Equation (5): mean [B, H, V] of the key features' means, with weights exp(q) z exp(z_exponent).

        Of log values it is the logarithm. Whole numbers are added without rounding, whatever their size; the rest is
        small.
        """
        g, last = self.graph, lambda x: self._unsqueeze(x, 3)
        floor = g.apply("Floor", q)
        whole, rest = floor + z_exponent, (q - floor) + g.apply("Log", z)
        whole = whole - self._reduce("Max", whole, 2, keepdims=1)
        weights = self.exp(whole + rest)
        total = self._reduce("Sum", weights, 2, keepdims=1)
        if mean_exponent is None:
            return self._squeeze(g.apply("MatMul", self._unsqueeze(weights / total, 2), mean), 2)
        whole = last(whole) + mean_exponent
        top = self._reduce("Max", whole, 2, keepdims=1)
        y = self._reduce("Sum", mean * self.exp((whole - top) + last(rest)), 2)
        return (g.apply("Log", y) + self._squeeze(top, 2)) - g.apply("Log", total)

    def add_to(
        self, x: Value, exponent: Value, log_factor: Value | None, log_term: Value, more: Value | None = None
    ) -> _Sum:
        """x exp(exponent + log_factor) + exp(log_term + more), under the whole exponent that brings it near 1."""
        g = self.graph
        scale = lambda exponent: exponent if log_factor is None else exponent + log_factor
        log_new = log_term if more is None else log_term + more
        top = g.apply("Ceil", g.apply("Max", g.apply("Log", x) + scale(exponent), log_new))
        kept = g.apply("Where", g.apply("Greater", x, 0.0), exponent, top)  # 0 has no exponent
        new = log_term - top if more is None else log_term + (more - top)
        return _Sum(x * self.exp(scale(kept - top)), self.exp(new), top)

    # ---- functions ----

    def weight(self, name: str) -> Value:
        return self.graph.weight(name, self.arrays[name])

    def dense(self, x: Value, name: str) -> Value:
        bias = [self.weight(f"{name}.bias")] if f"{name}.bias" in self.arrays else []
        return self.graph.apply("Gemm", x, self.weight(f"{name}.kernel"), *bias)

    def layer_norm(self, x: Value, name: str) -> Value:
        scale, bias = self.weight(f"{name}.scale"), self.weight(f"{name}.bias")
        return self.graph.apply("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-5)

    def gelu(self, x: Value) -> Value:
        """GELU by tanh."""
        inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
        return x * (self.graph.apply("Tanh", inner) + 1.0) * 0.5

    def exp(self, x: Value) -> Value:
        return self.graph.apply("Exp", x)

    def log1p(self, x: Value) -> Value:
        """log(1 + x) of x >= 0, with what the rounding of 1 + x took."""
        u = x + 1.0
        return self.graph.apply("Log", u) + (x - (u - 1.0)) / u

    def log_sigmoid(self, x: Value) -> Value:
        return self.graph.apply("Min", x, 0.0) - self.log1p(self.exp(-self.graph.apply("Abs", x)))

    def logaddexp(self, a: Value, b: Value) -> Value:
        return self.graph.apply("Max", a, b) + self.log1p(self.exp(-self.graph.apply("Abs", a - b)))

    def reshape(self, x: Value, *shape: int) -> Value:
        return self.graph.apply("Reshape", x, np.array([0, *shape]))

    def _unsqueeze(self, x: Value, *axes: int) -> Value:
        return self.graph.apply("Unsqueeze", x, np.array(axes))

    def _squeeze(self, x: Value, axis: int) -> Value:
        return self.graph.apply("Squeeze", x, np.array([axis]))

    def _reduce(self, how: str, x: Value, axis: int, keepdims: int = 0) -> Value:
        axes: Operand = np.array([axis])
        return self.graph.apply(f"Reduce{how}", x, axes, keepdims=keepdims)
