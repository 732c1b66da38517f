"""heinsen's language models in PyTorch, for transformers: softmax attention with constant cost per token.

    y[t] = sum_s w[t, s] v[s] / sum_s w[t, s],   w[t, s] = d[t, s] sum_k exp(q[t, k] + k[s, k])     over s <= t

where d[t, s] is what forget gates leave of token s at token t (1 without gates). A layer's state is, for each feature
k, the logarithm h_z of the total weight of the tokens before, and the mean of their values under these weights: to a
query it is K more tokens. It has one size whatever the number of tokens. With log values (the paper's), v is given and
y is returned as logarithms.

Weights may have any floating-point dtype; the residual stream, attention and states are float32.

Padding, wherever the attention mask has it, leaves the state as it is: each row's padding is moved behind its tokens.

Axes: B batch, H heads, T tokens, C tokens of a chunk, K key features, V value features, F = 2K + V, D hidden size.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_heinsen import HeinsenConfig

CHUNK = 64  # tokens whose weights are computed at once
NEG_INF = float("-inf")


@dataclass
class AttentionState:
    """State of a layer's attention."""

    h_z: Tensor  # [B, H, K]: log of the total weight; -inf: nothing
    mean: Tensor  # [B, H, K, V]: mean value, its logarithm with log values


@dataclass
class LayerState:
    """State of a layer. None: nothing came before, or there is none."""

    attention: AttentionState | None = None
    convolution: Tensor | None = None  # [B, H, taps - 1, F]: the last inputs


@dataclass
class HeinsenState:
    """State of the model after the tokens it has read; forward returns a new one and leaves the old as it was."""

    layers: list[LayerState]
    position: Tensor | None  # [B, D]: e of the position recurrence
    place: Tensor  # [B]: tokens of the current document; 0: nothing but padding was read
    n_seen: int  # tokens read, padding included
    # What transformers asks of a state: that it has one size, and that no compiled code writes into it.
    is_linear: ClassVar[list[bool]] = [True]
    is_compileable: ClassVar[bool] = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read."""
        return self.n_seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take these rows, as a search over beams does."""

        def take(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(0, beam_idx.to(x.device))

        def take_attention(state: AttentionState | None) -> AttentionState | None:
            return None if state is None else AttentionState(take(state.h_z), take(state.mean))

        self.layers = [LayerState(take_attention(each.attention), take(each.convolution)) for each in self.layers]
        self.position, self.place = take(self.position), take(self.place)


@dataclass
class Places:
    """Where the tokens of a piece of text are. Each field is [B, T]."""

    is_token: Tensor  # False for padding, which is behind the tokens
    begins: Tensor  # whether a document begins
    place: Tensor  # of a token in its document, from 0


class Linear(nn.Linear):
    """y = W x + b, with the product in the dtype of W, and y float32."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.to(self.weight.dtype), self.weight).float()
        return y if self.bias is None else y + self.bias.float()


class LayerNorm(nn.LayerNorm):
    """Layer normalization in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class ForgetGate(nn.Module):
    """log_decay[t, h] = scale[h] log_sigmoid(W x[t] + b)[h] <= 0."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_heads, d_model))
        self.bias = nn.Parameter(torch.zeros(n_heads))
        self.scale = nn.Parameter(torch.ones(n_heads))

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x.to(self.weight.dtype), self.weight).float() + self.bias.float()
        return (self.scale.float().clamp(min=0) * F.logsigmoid(logits)).transpose(1, 2)


class Convolution(nn.Module):
    """y[t] = sum_i taps[i] x[t - i], for each feature, over the tokens t - i of t's document."""

    def __init__(self, n_heads: int, n_taps: int, n_features: int):
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(n_heads, n_taps, n_features))

    def forward(self, x: Tensor, before: Tensor | None, places: Places) -> tuple[Tensor, Tensor]:
        """Return y and the last inputs, where x is [B, H, T, F]."""
        n_tokens, n_before = x.shape[2], self.taps.shape[1] - 1
        if before is None:
            before = x.new_zeros(*x.shape[:2], n_before, x.shape[3])
        inputs = torch.cat([before, x], dim=2)
        y = torch.zeros_like(x)
        for i in range(n_before + 1):
            seen = (places.place >= i)[:, None, :, None]
            shifted = inputs[:, :, n_before - i : n_before - i + n_tokens]
            y = y + self.taps[:, i : i + 1].float() * torch.where(seen, shifted, 0.0)
        last = places.is_token.sum(dim=1)[:, None] + torch.arange(n_before, device=x.device)
        return y, inputs.take_along_dim(last[:, None, :, None], dim=2)


class RecurrentPosition(nn.Module):
    """x[t] + e[t], e[t] = logaddexp(e[t - 1] + log_sigmoid(c[t]), l[t]), with (c, l) a dense map of x."""

    def __init__(self, d_model: int):
        super().__init__()
        self.dense = Linear(d_model, 2 * d_model)

    def forward(self, x: Tensor, e: Tensor | None, places: Places) -> tuple[Tensor, Tensor]:
        c, log_b = self.dense(x).chunk(2, dim=-1)
        log_a = F.logsigmoid(c)
        e = torch.zeros_like(x[:, 0]) if e is None else e
        outputs = []
        for t in range(x.shape[1]):
            after = torch.logaddexp(torch.where(places.begins[:, t, None], 0.0, e) + log_a[:, t], log_b[:, t])
            e = torch.where(places.is_token[:, t, None], after, e)
            outputs.append(e)
        return x + torch.stack(outputs, dim=1), e


class LearnedPosition(nn.Module):
    """x[t] + a row of a table for t's place in its document."""

    def __init__(self, d_model: int, n_positions: int):
        super().__init__()
        self.embedding = nn.Embedding(n_positions, d_model)

    def forward(self, x: Tensor, e: Tensor | None, places: Places) -> tuple[Tensor, None]:
        if (last := int(places.place.max())) >= self.embedding.num_embeddings:
            raise ValueError(
                f"token {last + 1} of a document is beyond the {self.embedding.num_embeddings} positions "
                "that this model has learned: give fewer tokens"
            )
        return x + self.embedding(places.place).float(), None


class NoPosition(nn.Module):
    """Nothing: the model knows the order of tokens by other means."""

    def forward(self, x: Tensor, e: Tensor | None, places: Places) -> tuple[Tensor, None]:
        return x, None


def average(log_weights: Tensor, values: Tensor, log: bool) -> Tensor:
    """Mean [..., Q, V] of values [..., S, V] (broadcast with Q) under log weights [..., Q, S]; of logs, if `log`."""
    log_p = log_weights - torch.logsumexp(log_weights, dim=-1, keepdim=True)
    if log:
        return torch.logsumexp(log_p[..., None] + values, dim=-2)
    return torch.sum(log_p.exp()[..., None] * values, dim=-2)


def attend_chunk(
    q: Tensor, k: Tensor, values: Tensor, log_decay: Tensor, places: Places, state: AttentionState, log: bool
) -> tuple[Tensor, AttentionState]:
    """Outputs [B, H, C, V] of a chunk's tokens, and the state after them.

    Args:
      q, k, values: [B, H, C, K], [B, H, C, K], [B, H, C, V].
      log_decay: [B, H, C], what each token leaves of those before it; 0: everything.
      places: of the chunk's tokens, [B, C].
      state: before the chunk.
    """
    n_tokens = q.shape[2]
    document = places.begins.long().cumsum(dim=-1)  # 0: that of the state goes on
    total = log_decay.cumsum(dim=-1)
    causal = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=q.device).tril()
    visible = (causal & (document[:, :, None] == document[:, None, :]))[:, None]
    goes_on = (document == 0)[:, None, :, None]

    to_tokens = torch.logsumexp(q[:, :, :, None] + k[:, :, None], dim=-1) + (total[..., :, None] - total[..., None, :])
    to_tokens = torch.where(visible, to_tokens, NEG_INF)
    to_state = torch.where(goes_on, q + state.h_z[:, :, None] + total[..., None], NEG_INF)
    log_weights = torch.cat([to_state, to_tokens], dim=-1)
    y = average(log_weights, torch.cat([state.mean, values], dim=2)[:, :, None], log)

    last = (places.is_token & (document == document[:, -1:]))[:, None, :, None]
    kept_tokens = torch.where(last, k + (total[..., -1:] - total)[..., None], NEG_INF)
    kept_state = torch.where(goes_on[:, :, -1], state.h_z + total[..., -1:], NEG_INF)
    log_weights = torch.cat([kept_state[..., None], kept_tokens.transpose(2, 3)], dim=-1)  # [B, H, K, 1 + C]
    tokens = values[:, :, None].expand(-1, -1, k.shape[-1], -1, -1)
    mean = average(log_weights, torch.cat([state.mean[..., None, :], tokens], dim=3), log)
    return y, AttentionState(torch.logsumexp(log_weights, dim=-1), mean)


def attend(
    q: Tensor, k: Tensor, values: Tensor, log_decay: Tensor, places: Places, state: AttentionState | None, log: bool
) -> tuple[Tensor, AttentionState]:
    """Outputs [B, H, T, V] of all tokens, chunk by chunk, and the state after them."""
    if state is None:
        h_z = k.new_full((*k.shape[:2], k.shape[3]), NEG_INF)
        state = AttentionState(h_z, values.new_zeros(*h_z.shape, values.shape[3]))
    outputs = []
    for start in range(0, q.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        chunk = Places(places.is_token[:, part], places.begins[:, part], places.place[:, part])
        y, state = attend_chunk(
            q[:, :, part], k[:, :, part], values[:, :, part], log_decay[:, :, part], chunk, state, log
        )
        outputs.append(y)
    return torch.cat(outputs, dim=2), state


def read_mask(attention_mask: Tensor | None, x: Tensor) -> Tensor:
    """Return [B, T], whether each vector of x [B, T, D] is a token's. Raises ValueError."""
    n_batch, n_tokens, _ = x.shape
    if attention_mask is None:
        return torch.ones(n_batch, n_tokens, dtype=torch.bool, device=x.device)
    if attention_mask.dim() != 2 or len(attention_mask) != n_batch or attention_mask.shape[1] < n_tokens:
        raise ValueError(
            f"attention_mask is {list(attention_mask.shape)}: give [{n_batch}, {n_tokens}], 0 for padding and 1 for "
            "tokens, with or without columns for what was read before"
        )
    return attention_mask[:, -n_tokens:].to(x.device, torch.bool)


def find_places(mask: Tensor, begins: Tensor, before: Tensor) -> tuple[Places, Tensor]:
    """Return the places of tokens, and the number of tokens of each row's current document after them.

    Args:
      mask: [B, T], True for tokens.
      begins: [B, T], of tokens with the padding behind them, whether they begin a document.
      before: [B], number of tokens of the current document before them; 0: nothing was read.
    """
    n_tokens, before = mask.sum(dim=1, keepdim=True), before[:, None]
    index = torch.arange(mask.shape[1], device=mask.device)
    is_token = index < n_tokens
    # As long as a row has been nothing but padding, that is read, and forgotten with the first token.
    is_read = is_token | ((n_tokens == 0) & (before == 0))
    begins = is_read & (begins | ((index == 0) & (before == 0)))
    slot = before + index
    place = torch.where(is_token, slot - torch.where(begins, slot, 0).cummax(dim=1).values, 0)
    last = place.take_along_dim((n_tokens - 1).clamp(min=0), dim=1)
    return Places(is_read, begins, place), torch.where(n_tokens > 0, last + 1, before)[:, 0]


class HeinsenLayer(nn.Module):
    """The paper's layer, x + W3 GLU(W2 mix(q, k, v)) with (q, k, v) = W1 LayerNorm(x), or GPT-2's with this mix."""

    def __init__(self, c: dict[str, Any]):
        super().__init__()
        self.c = c
        d_model, n_heads, d_key, d_value = c["d_model"], c["n_heads"], c["d_key"], c["d_value"]
        n_features = 2 * d_key + d_value
        self.norm = LayerNorm(d_model)
        self.w1 = Linear(d_model, n_heads * n_features)
        self.convolution = Convolution(n_heads, c["convolution"], n_features) if c["convolution"] else None
        self.gate = ForgetGate(d_model, n_heads) if c["forget_gate"] == "head" else None
        self.output_gate = Linear(d_model, n_heads * d_value) if c["output_gate"] else None
        if c["block"] == "gpt2":
            self.attention_out = Linear(n_heads * d_value, d_model)
            self.mlp_norm = LayerNorm(d_model)
            self.mlp_in = Linear(d_model, 4 * d_model)
            self.mlp_out = Linear(4 * d_model, d_model)
        else:
            self.w2 = Linear(n_heads * d_value, 2 * d_model)
            self.w3 = Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, state: LayerState, places: Places) -> tuple[Tensor, LayerState]:
        c = self.c
        n_batch, n_tokens, _ = x.shape
        normed = self.norm(x)
        h = self.w1(normed).view(n_batch, n_tokens, c["n_heads"], -1).transpose(1, 2)
        inputs = state.convolution
        if self.convolution is not None:
            h, inputs = self.convolution(h, inputs, places)
        q, k, values = h.split([c["d_key"], c["d_key"], c["d_value"]], dim=-1)
        log_decay = q.new_zeros(q.shape[:3]) if self.gate is None else self.gate(normed)
        log_decay = torch.where(places.is_token[:, None], log_decay, 0.0)
        y, attention = attend(q, k, values, log_decay, places, state.attention, c["value_domain"] == "log")
        y = y.transpose(1, 2).reshape(n_batch, n_tokens, -1)
        if self.output_gate is not None:
            y = y * (2 * torch.sigmoid(self.output_gate(normed)))
        if c["block"] == "gpt2":
            x = x + self.attention_out(y)
            x = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))
        else:
            x = x + self.w3(F.glu(self.w2(y), dim=-1))
        return x, LayerState(attention, inputs)


class HeinsenForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model that heinsen exported. Its embedding also makes the logits."""

    config_class = HeinsenConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    _is_stateful = True  # a state cannot be cut back to fewer tokens
    _no_split_modules = ["HeinsenLayer"]

    def __init__(self, config: HeinsenConfig):
        super().__init__(config)
        c = config.model
        self.embedding = nn.Embedding(config.vocab_size, c["d_model"])
        if c["position"] == "recurrent":
            self.position: nn.Module = RecurrentPosition(c["d_model"])
        elif c["position"] == "learned":
            self.position = LearnedPosition(c["d_model"], c["n_positions"])
        else:
            self.position = NoPosition()
        self.layers = nn.ModuleList(HeinsenLayer(c) for _ in range(c["n_layers"]))
        self.norm = LayerNorm(c["d_model"])
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def _init_weights(self, module: nn.Module) -> None:
        """Leave everything as the export has it: there is nothing to draw."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes the state, a HeinsenState

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: HeinsenState | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        cache: HeinsenState | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return the logits of every next token, and the state after the last token in `past_key_values`.

        Args:
          input_ids: [B, T], the tokens that follow those of past_key_values.
          attention_mask: [B, T] or [B, tokens read + T], 0 for padding.
          past_key_values: a state that forward returned; None: nothing came before.
          inputs_embeds: [B, T, D], in place of input_ids: rows of the embedding, or vectors of one's own.
          labels: [B, T], input_ids or -100 where a token counts for nothing; adds the loss.
          use_cache: whether to return the state; default: unless the model trains.
          output_attentions: an error where it is true: no weights between tokens are kept.
          output_hidden_states: adds the inputs [B, T, D] of every layer and those of the logits.
          logits_to_keep: number of last tokens whose logits are returned, or indices of tokens; 0: all.
          cache: the name of past_key_values in newer versions of transformers.
        """
        if output_attentions:
            raise ValueError("this attention keeps no weights between tokens: leave output_attentions out")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if x.shape[1] == 0:
            raise ValueError("there are no tokens to read: give at least one")
        mask = read_mask(attention_mask, x)
        order = torch.argsort((~mask).int(), dim=1, stable=True)  # padding goes behind the tokens
        sort = lambda x: x.take_along_dim(order[..., None], dim=1)
        put_back = lambda x: x.take_along_dim(order.argsort(dim=1)[..., None], dim=1)
        past = cache if past_key_values is None else past_key_values
        if past is None:
            past = HeinsenState([LayerState() for _ in self.layers], None, order.new_zeros(len(order)), 0)
        begins = self._begin_documents(input_ids, x).take_along_dim(order, dim=1)
        places, place = find_places(mask, begins, past.place)

        x, position = self.position(sort(x).float(), past.position, places)
        layers, hidden_states = [], ()
        for layer, state in zip(self.layers, past.layers, strict=True):
            hidden_states += (put_back(x),) if output_hidden_states else ()
            x, state = layer(x, state, places)
            layers.append(state)
        x = put_back(self.norm(x))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        weight = self.embedding.weight
        logits = F.linear(x[:, kept].to(weight.dtype), weight).float()

        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        keep = not self.training if use_cache is None else use_cache
        after = HeinsenState(layers, position, place, past.n_seen + x.shape[1]) if keep else None
        hidden = (*hidden_states, x) if output_hidden_states else None
        if return_dict is False:
            return tuple(x for x in (loss, logits, after, hidden) if x is not None)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=after, hidden_states=hidden)

    def _begin_documents(self, input_ids: Tensor | None, x: Tensor) -> Tensor:
        """Return [B, T], whether each token begins a document; without ids, whether x [B, T, D] is that token's row."""
        token = self.config.model["document_token"]
        if token is None:
            return torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        return (x == self.embedding.weight[token]).all(dim=-1) if input_ids is None else input_ids == token

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: HeinsenState | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = True,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 1,
        cache: HeinsenState | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of forward: the tokens that the state has not read."""
        state = cache if past_key_values is None else past_key_values
        n_seen = 0 if state is None else state.n_seen
        n_all = (input_ids if attention_mask is None else attention_mask).shape[1]
        if inputs_embeds is not None:  # of all of the prompt, after which generate reads token by token
            is_prompt = n_seen < inputs_embeds.shape[1]
            inputs = {"inputs_embeds": inputs_embeds[:, n_seen:]} if is_prompt else {"input_ids": input_ids[:, -1:]}
        elif n_seen < n_all:
            inputs = {"input_ids": input_ids[:, n_seen - n_all :]}
        else:
            raise ValueError(
                f"the state has read {n_seen} of {n_all} tokens: give those and the next ones, or the next ones and an "
                "attention_mask for all"
            )
        return inputs | {
            "past_key_values": state,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
            "logits_to_keep": logits_to_keep,
        }
