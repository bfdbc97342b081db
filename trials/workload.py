"""What is fine-tuned: a recipe, and the cell it makes with a GPU, a model and a sequence length."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gpu_catalog.record import Record

Method = Literal["full", "lora", "qlora"]
Precision = Literal["fp32", "bf16"]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]


class Recipe(Record):
    """How the model is fine-tuned. Each field is checked to have taken hold before measuring.

    Attributes:
        method: ``full`` trains every weight, ``lora`` adapters on frozen weights, ``qlora``
            adapters on frozen 4-bit NF4 weights.
        lora_rank: rank of the adapters; absent for ``full``.
        precision: dtype of weights and activations (4-bit weights are dequantised to it).
        gradient_checkpointing: recompute each layer's activations in the backward pass.
    """

    method: Method
    lora_rank: PositiveInt | None = None
    precision: Precision = "fp32"
    gradient_checkpointing: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _rank_belongs_to_adapters(self) -> Self:
        if self.method == "full" and self.lora_rank is not None:
            raise ValueError(
                f"lora_rank {self.lora_rank} has no meaning with method full: drop it, "
                "or use method lora or qlora"
            )
        if self.method != "full" and self.lora_rank is None:
            raise ValueError(f"method {self.method} needs lora_rank, for example lora_rank: 16")
        return self

    @property
    def key(self) -> str:
        """A stable short name, for example ``qlora-r16-bf16-checkpointed``."""
        parts: list[str] = [self.method]
        if self.lora_rank is not None:
            parts.append(f"r{self.lora_rank}")
        parts.append(self.precision)
        if self.gradient_checkpointing:
            parts.append("checkpointed")
        return "-".join(parts)


class Cell(Record):
    """One (GPU, model, recipe, sparsity, sequence length): what one coefficient set speaks of.

    Attributes:
        gpu: key of the GPU in the catalog.
        model: name of the model preset.
        recipe: how it is fine-tuned.
        experts: experts per layer; absent for a model without experts.
        active_experts: experts each token is routed to; absent for a model without experts.
        seq_len: tokens per query; every query is this long.
    """

    gpu: str
    model: str
    recipe: Recipe
    experts: PositiveInt | None = None
    active_experts: PositiveInt | None = None
    seq_len: PositiveInt

    @model_validator(mode="after")
    def _active_experts_exist(self) -> Self:
        if (self.experts is None) != (self.active_experts is None):
            raise ValueError("experts and active_experts are given together or not at all")
        if self.experts is not None and self.active_experts is not None:  # noqa: SIM102
            # Two conditions: the first narrows the types for the second.
            if self.active_experts > self.experts:
                raise ValueError(
                    f"active_experts {self.active_experts} exceeds the {self.experts} experts "
                    f"of {self.model}"
                )
        return self

    @property
    def sparsity(self) -> float:
        """Active experts over experts, the paper's s (2408.04693, Eq. 1): 1.0 without experts."""
        if self.experts is None or self.active_experts is None:
            return 1.0
        return self.active_experts / self.experts

    @property
    def key(self) -> str:
        """A stable name, for example ``cpu/mixtral-tiny/qlora-r8-fp32/2of8/seq128``."""
        routing = "dense" if self.experts is None else f"{self.active_experts}of{self.experts}"
        return f"{self.gpu}/{self.model}/{self.recipe.key}/{routing}/seq{self.seq_len}"
