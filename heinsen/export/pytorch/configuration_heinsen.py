"""The configuration of heinsen's language models for transformers: a view of the export's own record."""

from typing import Any

from transformers import PretrainedConfig


class HeinsenConfig(PretrainedConfig):
    """Settings of a model that heinsen exported.

    Attributes:
      heinsen: the export's record; heinsen["model"] has the fields of heinsen's `ModelConfig`, which the model reads.
      vocab_size: number of logits: rows of the embedding, of which the last may be padding that no text has.
    """

    model_type = "heinsen"

    def __init__(self, heinsen: dict[str, Any] | None = None, vocab_size: int | None = None, **kwargs: Any):
        self.heinsen = heinsen or {}
        self.vocab_size = vocab_size
        super().__init__(**{"tie_word_embeddings": True, **kwargs})

    @property
    def model(self) -> dict[str, Any]:
        """Fields of heinsen's `ModelConfig`."""
        return self.heinsen.get("model", {})

    @property
    def hidden_size(self) -> int | None:
        return self.model.get("d_model")

    @property
    def num_hidden_layers(self) -> int | None:
        return self.model.get("n_layers")

    @property
    def num_attention_heads(self) -> int | None:
        return self.model.get("n_heads")
