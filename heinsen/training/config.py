"""The config of a run, and checks of its mesh."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from jax.sharding import Mesh

from heinsen.config import RENAMED, Limits, added, check_numbers, comparable
from heinsen.models import ModelConfig, check_halo
from heinsen.models.config import GATES, POSITIONS
from heinsen.parallel import MeshConfig, MeshError, n_batch_parts
from heinsen.training.optimizer import OptimizerConfig, make_schedule

# Fields that may change when a run resumes: they concern the machine, or what is reported and saved.
_CHANGEABLE = (
    "mesh", "accumulation_steps", "model.remat", "log_every", "validate_every", "validation_tokens",
    "sample_tokens", "checkpoint_every", "keep_checkpoints", "keep_every", "trace_steps", "wandb_project",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Token datasets PATH/train and PATH/VALIDATION_SPLIT, written by scripts/prepare_data.py.

    path is one folder, or several with their shares, as in A:0.7,B:0.3 (`heinsen.data.mixture`). The datasets know
    their tokenizer.
    """

    path: str
    validation_split: str


@dataclasses.dataclass(frozen=True)
class ConversionConfig:
    """The conversion of a softmax model (`heinsen.training.conversion`), which `init_from` names.

    Attributes:
      share: of the steps, the first ones: each layer learns to attend as the teacher (None: no conversion).
      attention_learning_rate: in these steps, after warm-up; it decays by the same factor as the optimizer's.
      window_starts: with rotary positions windows start at a random place below so many windows.
      forget_gate, position: the teacher's (None: as `init_from` says).
    """

    share: float | None = None
    attention_learning_rate: float = 3e-2
    window_starts: Annotated[int, Limits(at_least=0, below=2**10)] = 16
    forget_gate: str | None = None
    position: str | None = None

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            raise ValueError(f"conversion.share = {self.share}: it must lie between 0 and 1, as both stages need steps")
        check_numbers(self, "conversion.")
        if self.forget_gate is not None and self.forget_gate not in GATES:
            raise ValueError(f"conversion.forget_gate = {self.forget_gate!r}: choose {', '.join(GATES)}")
        if self.position is not None and self.position not in POSITIONS:
            raise ValueError(f"conversion.position = {self.position!r}: choose {', '.join(POSITIONS)}")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The config of a run; `configs/default.py` documents the fields and holds the defaults."""

    seed: Annotated[int, Limits(at_least=0)]
    init_from: str | None
    total_tokens: int
    sequence_length: Annotated[int, Limits(below=2**31)]
    batch_size: Annotated[int, Limits(below=2**31)]
    accumulation_steps: int
    mesh: MeshConfig
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    log_every: int
    validate_every: int
    validation_tokens: int
    sample_tokens: Annotated[int, Limits(at_least=0)]
    checkpoint_every: int
    keep_checkpoints: int
    keep_every: int | None
    trace_steps: str | None
    wandb_project: str | None
    conversion: ConversionConfig = added(ConversionConfig())

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"batch_size = {self.batch_size} does not divide into accumulation_steps = {self.accumulation_steps}"
            )
        n_positions = self.model.n_positions
        if self.model.position == "learned" and n_positions is not None and self.sequence_length > n_positions:
            raise ValueError(
                f"sequence_length = {self.sequence_length} is longer than model.n_positions = "
                f"{n_positions}: raise it, or shorten the sequences"
            )
        if self.sample_tokens:
            check_samples(self.model, self.sample_tokens)
        if self.conversion.share is not None:
            self._check_conversion()
        for n_steps in self.stage_steps:
            make_schedule(self.optimizer, n_steps)  # raises if the warm-up does not fit
        if self.traced is not None and not 1 <= self.traced.start < self.traced.stop:
            raise ValueError(f"trace_steps = {self.trace_steps!r}: expected FIRST:LAST, such as 10:12")

    def _check_conversion(self) -> None:
        model = self.model
        if len(model.pattern) > 1 or model.n_features is None or model.value_domain != "real" or not model.causal:
            raise ValueError(
                "a conversion (conversion.share) makes a model with model.attention = heinsen in all layers, "
                "value_domain = real, a feature_map and objective = next_token: they are "
                f"{model.attention}, {model.value_domain}, {model.feature_map} and {model.objective}"
            )
        gate, position = self.conversion.forget_gate, self.conversion.position
        if gate is None or position is None:
            raise ValueError(
                f"conversion.forget_gate = {gate}, position = {position}: say the teacher's, {' or '.join(GATES)} and "
                f"{' or '.join(POSITIONS)}"
            )
        if model.position != position and (position, model.position) != ("rotary", "none"):
            raise ValueError(
                f"model.position = {model.position!r}: the teacher has {position!r}, and only rotary positions can be "
                "left out, with 'none'"
            )
        _ = self.teacher  # raises if no softmax model has these sizes
        if gate == "head" and model.forget_gate == "none":
            raise ValueError(
                "model.forget_gate = 'none': the teacher has a forget gate, which must stay: set it to head"
            )

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length

    @property
    def total_steps(self) -> int:
        return -(-self.total_tokens // self.tokens_per_step)

    @property
    def teacher(self) -> ModelConfig:
        """The model whose attention a conversion replaces: the run's, with softmax attention. Raises ValueError."""
        assert self.conversion.forget_gate is not None and self.conversion.position is not None
        return dataclasses.replace(
            self.model,
            attention="softmax",
            value_domain="log",
            feature_map="none",
            d_features=None,
            forget_gate=self.conversion.forget_gate,
            position=self.conversion.position,
        )

    @property
    def stage_steps(self) -> tuple[int, ...]:
        """Number of steps of each stage: of the two of a conversion, or of the only one."""
        if self.conversion.share is None:
            return (self.total_steps,)
        first = max(1, round(self.conversion.share * self.total_steps))
        return first, self.total_steps - first

    @property
    def sequences_per_microbatch(self) -> int:
        return self.batch_size // self.accumulation_steps

    @property
    def traced(self) -> range | None:
        """The steps that trace_steps names; an empty range if they cannot be parsed."""
        if self.trace_steps is None:
            return None
        first, _, last = self.trace_steps.partition(":")
        return range(int(first), int(last) + 1) if first.isdecimal() and last.isdecimal() else range(0)

    @property
    def fingerprint(self) -> str:
        """A digest of all fields that may not change: a checkpoint with another one belongs to another run.

        Not of the data's path, as what lies there identifies data (`RunData.digest`).
        """
        return self.fingerprints[0]

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprint, and those of earlier checkpoints: with former names, and with the data's path, too."""
        fields = fixed_fields(dataclasses.asdict(self))
        here = {name: value for name, value in fields["data"].items() if name != "path"}
        digest = lambda fields: hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
        former = {new: old for old, new in RENAMED.items()}
        model = {former.get(name, name): value for name, value in fields["model"].items()}
        earlier = fields | {"model": model}
        return digest(fields | {"data": here}), digest(earlier | {"data": here}), digest(earlier)


def fixed_fields(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `comparable` fields of a config that may not change; those of a conversion only where there is one."""

    def keep(fields: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        return {
            name: keep(value, f"{path}{name}.") if isinstance(value, Mapping) else value
            for name, value in fields.items()
            if path + name not in _CHANGEABLE
        }

    fixed = keep(comparable(TrainConfig, mapping))
    conversion = fixed.get("conversion")
    if isinstance(conversion, Mapping) and conversion.get("share") is None:
        del fixed["conversion"]
    return fixed


def check_samples(model: ModelConfig, sample_tokens: int) -> None:
    """Raise ValueError if the model cannot write a document of so many tokens."""
    if not model.causal:
        raise ValueError(
            f"sample_tokens = {sample_tokens}: a model with model.objective = {model.objective!r} predicts no next "
            "token; set it to 0"
        )
    if model.max_positions is not None and sample_tokens >= model.max_positions:
        raise ValueError(
            f"sample_tokens = {sample_tokens} and a document's beginning go beyond model.n_positions = "
            f"{model.n_positions}: ask for fewer"
        )


def check_mesh(config: TrainConfig, mesh: Mesh) -> None:
    """Raise MeshError if the mesh does not divide the batch, the heads or the tokens, or the model forbids it."""
    shape = mesh.shape
    if config.sequences_per_microbatch % n_batch_parts(mesh):
        raise MeshError(
            f"{config.sequences_per_microbatch} sequences per microbatch (batch_size {config.batch_size} / "
            f"accumulation_steps {config.accumulation_steps}) do not divide over {n_batch_parts(mesh)} devices "
            f"(mesh.data {shape['data']} x mesh.fsdp {shape['fsdp']}): change --config.batch_size, "
            "--config.accumulation_steps or --config.mesh"
        )
    if config.model.n_heads % shape["tensor"]:
        raise MeshError(f"model.n_heads = {config.model.n_heads} do not divide over mesh.tensor = {shape['tensor']}")
    if shape["sequence"] > 1 and not config.model.splits_sequences:
        raise MeshError(
            f"mesh.sequence = {shape['sequence']} divides the tokens of a sequence, which needs model.attention = "
            "heinsen in all layers, model.value_domain = log and model.objective = next_token: they are "
            f"{config.model.attention}, {config.model.value_domain} and {config.model.objective}. Use the mesh's other "
            "axes"
        )
    check_halo(mesh, config.sequence_length, config.model.convolution)
    parts = shape["sequence"] * shape["tensor"]  # the loss divides tokens over both
    if config.sequence_length % parts:
        raise MeshError(
            f"sequence_length = {config.sequence_length} does not divide into {parts} parts (mesh.sequence "
            f"{shape['sequence']} x mesh.tensor {shape['tensor']})"
        )
