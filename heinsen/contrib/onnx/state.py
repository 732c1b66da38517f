"""The tensors that an exported step carries from token to token, all zeros before the first.

    position               [D]           e of recurrent positions
    place                  []            int32: number of the document's tokens so far, of learned positions
    layer_I.key_sum        [H, K]        sum over tokens of exp(k), up to a factor exp(key_sum_exponent)
    layer_I.mean           [H, K, V]     mean of v under these weights; of log values, up to exp(mean_exponent)
    layer_I.inputs         [H, N - 1, F] last inputs of a convolution of N taps
    layer_I.key_sum_exponent, layer_I.mean_exponent     of the same shapes, whole numbers

Each has a batch axis in front and is float32 but for `place`. A number with an exponent of its own neither overflows
nor underflows, whatever the keys and values. So a step loses no more than rounding does, and never has to be repeated
as those of `heinsen.ops.running.RunningState` may.
"""

import numpy as np

from heinsen.models import ModelConfig, ModelState


def state_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a step's state without the batch axis, in the order of the step's inputs."""
    shapes: dict[str, tuple[int, ...]] = {}
    if config.position == "recurrent":
        shapes["position"] = (config.d_model,)
    if config.position == "learned":
        shapes["place"] = ()
    heads, n_features = (config.n_heads, config.d_key), 2 * config.d_key + config.d_value
    for i in range(config.n_layers):
        shapes[f"layer_{i}.key_sum"] = shapes[f"layer_{i}.key_sum_exponent"] = heads
        shapes[f"layer_{i}.mean"] = (*heads, config.d_value)
        if config.value_domain == "log":
            shapes[f"layer_{i}.mean_exponent"] = (*heads, config.d_value)
        if config.convolution:
            shapes[f"layer_{i}.inputs"] = (config.n_heads, config.convolution - 1, n_features)
    return shapes


def state_dtype(name: str) -> str:
    """Return the dtype of a tensor of the state."""
    return "int32" if name == "place" else "float32"


def to_step_state(config: ModelConfig, state: ModelState) -> dict[str, np.ndarray]:
    """Convert a state of `heinsen.models.forward`, such as a saved one, to the tensors [B, ...] of `state_shapes`."""
    places = np.asarray(state.n_tokens - state.document_start)
    found = {"position": np.asarray(state.position), "place": places}
    for i, (attention, inputs) in enumerate(zip(state.attention, state.convolution, strict=True)):
        h_z = np.asarray(attention.h_z, np.float64)
        found[f"layer_{i}.key_sum"], found[f"layer_{i}.key_sum_exponent"] = _scaled(h_z)
        if config.value_domain == "log":
            log_mean = np.asarray(attention.h_s, np.float64) - np.where(h_z == -np.inf, 0, h_z)[..., None]
            found[f"layer_{i}.mean"], found[f"layer_{i}.mean_exponent"] = _scaled(log_mean)
        else:
            found[f"layer_{i}.mean"] = np.asarray(attention.mean)
        if inputs is not None:  # those of an earlier document are not seen
            age = np.arange(inputs.shape[2], 0, -1)
            seen = age <= places[:, None]
            found[f"layer_{i}.inputs"] = np.where(seen[:, None, :, None], inputs, 0)
    return {name: np.asarray(found[name], state_dtype(name)) for name in state_shapes(config)}


def _scaled(log_x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (x exp(-e), e) with whole e, such that the first is in (1/e, 1], or both 0."""
    exponent = np.where(log_x == -np.inf, 0, np.ceil(log_x))
    return np.exp(log_x - exponent), exponent
