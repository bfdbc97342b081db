"""Architecture facts of the models to fine-tune, and the parameter counts they imply. No torch.

The counts are worked out from the architecture alone, apart from the code that builds the model:
a trial compares them with what it built, so that a recipe that silently did something else is
found out before anything is measured.
"""

import datetime as dt
import tomllib
from functools import cache
from importlib import resources
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from gpu_catalog.near import did_you_mean
from gpu_catalog.record import Record
from trials.observation import ParameterCounts
from trials.workload import Method, PositiveInt, Recipe


class UnknownModelError(LookupError):
    """No preset of this name."""


class LinearShape(Record):
    """So many linear layers of one shape, without bias, in the layers of a model."""

    inputs: int
    outputs: int
    count: int
    adapted: bool

    @property
    def elements(self) -> int:
        """Weights of all of them together."""
        return self.inputs * self.outputs * self.count

    def adapter_elements(self, rank: int) -> int:
        """Weights of their LoRA adapters: A is (rank, inputs), B is (outputs, rank)."""
        return rank * (self.inputs + self.outputs) * self.count


class MixtralArchitecture(Record):
    """A decoder whose feed-forward layers are experts, each token routed to a few of them.

    LoRA adapts the experts' three matrices and the router, as the paper does (2408.04693, III).
    """

    family: Literal["mixtral"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    layers: PositiveInt
    attention_heads: PositiveInt
    key_value_heads: PositiveInt
    expert_width: PositiveInt
    experts: PositiveInt
    active_experts: PositiveInt

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods this family can be fine-tuned with."""
        return ("full", "lora", "qlora")

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """The linear layers a 4-bit recipe quantises."""
        hidden, width = self.hidden_size, self.expert_width
        return (
            *_attention_linears(
                hidden, self.attention_heads, self.key_value_heads, self.layers, adapted=False
            ),
            LinearShape(inputs=hidden, outputs=self.experts, count=self.layers, adapted=True),
            *_gated_linears(hidden, width, self.layers * self.experts),
        )

    @property
    def other_parameters(self) -> int:
        """Embedding, head (untied), two norms a layer and the last norm."""
        return 2 * self.vocab_size * self.hidden_size + self.hidden_size * (2 * self.layers + 1)


class BlackMambaArchitecture(Record):
    """Alternating Mamba and expert layers, half of ``layers`` each. Trained whole (2408.04693)."""

    family: Literal["blackmamba"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    layers: Annotated[int, Field(strict=True, ge=2, multiple_of=2)]
    state_size: PositiveInt
    conv_kernel: PositiveInt
    expand: PositiveInt
    expert_width: PositiveInt
    experts: PositiveInt
    active_experts: PositiveInt

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods this family can be fine-tuned with."""
        return ("full",)

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """The linear layers of the Mamba mixers, the routers and the experts."""
        hidden, pairs = self.hidden_size, self.layers // 2
        inner, rank = self.expand * hidden, self._time_step_rank
        shapes = (
            (hidden, 2 * inner),
            (inner, rank + 2 * self.state_size),
            (rank, inner),
            (inner, hidden),
            (hidden, self.experts),
        )
        return (
            *(LinearShape(inputs=i, outputs=o, count=pairs, adapted=False) for i, o in shapes),
            *_gated_linears(hidden, self.expert_width, pairs * self.experts),
        )

    @property
    def other_parameters(self) -> int:
        """Tied embedding, norms, and each mixer's convolution, time-step bias, A and D."""
        inner = self.expand * self.hidden_size
        mixer = inner * (self.conv_kernel + 1) + inner + inner * self.state_size + inner
        norms = self.hidden_size * (self.layers + 1)
        return self.vocab_size * self.hidden_size + norms + self.layers // 2 * mixer

    @property
    def _time_step_rank(self) -> int:
        return -(-self.hidden_size // 16)  # Mamba's own rule: the hidden size over 16, rounded up


class LlamaArchitecture(Record):
    """A dense decoder with gated feed-forward layers. LoRA adapts every linear layer."""

    family: Literal["llama"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    layers: PositiveInt
    attention_heads: PositiveInt
    key_value_heads: PositiveInt
    mlp_width: PositiveInt

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods this family can be fine-tuned with."""
        return ("full", "lora", "qlora")

    @property
    def experts(self) -> None:
        """A dense model has none."""
        return

    @property
    def active_experts(self) -> None:
        """A dense model has none."""
        return

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """The linear layers a 4-bit recipe quantises."""
        return (
            *_attention_linears(
                self.hidden_size,
                self.attention_heads,
                self.key_value_heads,
                self.layers,
                adapted=True,
            ),
            *_gated_linears(self.hidden_size, self.mlp_width, self.layers),
        )

    @property
    def other_parameters(self) -> int:
        """Embedding, head (untied), two norms a layer and the last norm."""
        return 2 * self.vocab_size * self.hidden_size + self.hidden_size * (2 * self.layers + 1)


def _attention_linears(
    hidden: int, heads: int, key_value_heads: int, layers: int, *, adapted: bool
) -> tuple[LinearShape, ...]:
    narrow = hidden // heads * key_value_heads
    return (
        LinearShape(inputs=hidden, outputs=hidden, count=2 * layers, adapted=adapted),
        LinearShape(inputs=hidden, outputs=narrow, count=2 * layers, adapted=adapted),
    )


def _gated_linears(hidden: int, width: int, count: int) -> tuple[LinearShape, ...]:
    return (
        LinearShape(inputs=hidden, outputs=width, count=2 * count, adapted=True),
        LinearShape(inputs=width, outputs=hidden, count=count, adapted=True),
    )


Architecture = MixtralArchitecture | BlackMambaArchitecture | LlamaArchitecture


class Preset(Record):
    """A named architecture, with where its facts come from."""

    name: str
    source: str
    recorded: dt.date
    architecture: Annotated[Architecture, Field(discriminator="family")]

    def parameters(self, recipe: Recipe) -> ParameterCounts:
        """What a model of this architecture must hold under a recipe."""
        linears = self.architecture.linears
        base = sum(shape.elements for shape in linears) + self.architecture.other_parameters
        if recipe.lora_rank is None:
            return ParameterCounts(total=base, trainable=base, four_bit=0)
        adapters = sum(s.adapter_elements(recipe.lora_rank) for s in linears if s.adapted)
        four_bit = sum(s.elements for s in linears) if recipe.method == "qlora" else 0
        return ParameterCounts(total=base + adapters, trainable=adapters, four_bit=four_bit)


@cache
def presets() -> dict[str, Preset]:
    """Every shipped preset by name, in alphabetical order.

    Raises:
        ValueError: a preset file does not describe a model; the message names the file.
    """
    found = {}
    folder = resources.files("trials.models") / "presets"
    for file in sorted(folder.iterdir(), key=lambda path: path.name):
        try:
            preset = Preset.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        except (ValidationError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{file.name}: {error}") from error
        found[preset.name] = preset
    return found


def preset_by_name(name: str) -> Preset:
    """The preset of exactly this name.

    Raises:
        UnknownModelError: there is none; the message names near ones.
    """
    try:
        return presets()[name]
    except KeyError:
        near = did_you_mean(name, presets()) or f"; known: {', '.join(presets())}"
        raise UnknownModelError(f"unknown model {name!r}{near}") from None
