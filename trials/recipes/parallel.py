"""Layouts of several GPUs that train one model."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from gpu_catalog.record import Record
from trials.recipes.recipe import Recipe

Strategy = Literal["ddp", "fsdp2"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
MOST_GPUS = 64
"""Most GPUs of a layout. The fake process group of a trace has as many ranks."""


class Parallel(Record):
    """GPUs of one node that train a model together, each on its own part of every batch.

    Attributes:
        gpus: number of GPUs, which is that of the ranks.
        strategy: ``ddp`` for a copy of the model on each GPU (torch's DistributedDataParallel);
            ``fsdp2`` for weights, gradients and optimizer state in shards (torch's
            ``fully_shard``).
        reshard_after_forward: whether ``fsdp2`` frees gathered weights between a layer's forward
            and backward pass (true is ZeRO-3, false is about ZeRO-2); absent for ``ddp``.
    """

    gpus: Annotated[int, Field(ge=2, le=MOST_GPUS)]
    strategy: Strategy
    reshard_after_forward: bool | None = None

    @model_validator(mode="after")
    def _reshards_shards(self) -> Self:
        if self.strategy == "ddp" and self.reshard_after_forward is not None:
            raise ValueError("reshard_after_forward is a choice of strategy fsdp2: leave it out")
        return self

    @property
    def reshards(self) -> bool:
        """Whether gathered weights are freed between the passes: fsdp2's default."""
        return self.strategy == "fsdp2" and self.reshard_after_forward is not False

    @property
    def key(self) -> str:
        """A stable short name, for example ``8xfsdp2``."""
        kept = "" if self.reshards or self.strategy == "ddp" else "-unresharded"
        return f"{self.gpus}x{self.strategy}{kept}"


def unsupported(recipe: Recipe, parallel: Parallel) -> str | None:
    """Reason why a recipe is not simulated on several GPUs, with an alternative; None if it is."""
    if recipe.activation_offloading:
        return "activation_offloading is not simulated on several GPUs: leave it out"
    if parallel.strategy == "ddp":
        return None
    is_plain = recipe.optimizer.startswith(("adamw", "sgd")) and "8bit" not in recipe.optimizer
    problems = {
        f"optimizer {recipe.optimizer} is not simulated with fsdp2: use adamw": not is_plain,
        "quantisation int8 is not simulated with fsdp2: use nf4": recipe.quantisation == "int8",
        "reference separate is not simulated with fsdp2: use precomputed or adapter-off": (
            recipe.reference == "separate"
        ),
        "dora is not simulated with fsdp2: leave it out": recipe.dora,
        "precision fp16 is not simulated with fsdp2: use bf16-mixed, or strategy ddp": (
            recipe.precision == "fp16"
        ),
    }
    return next((text for text, applies in problems.items() if applies), None)


def unmeasured(recipe: Recipe, parallel: Parallel) -> str | None:
    """Reason why a recipe is not measured on several GPUs, with an alternative; None if it is."""
    problems = {
        f"compile {recipe.compile} is not measured on several GPUs: leave it out": (
            recipe.compile is not None
        ),
        "offload_optimizer is not measured on several GPUs: leave it out": recipe.offload_optimizer,
        f"task {recipe.task} is not measured on several GPUs: use sft": recipe.task != "sft",
        "method qlora is not measured with fsdp2: use lora, or strategy ddp": (
            recipe.method == "qlora" and parallel.strategy == "fsdp2"
        ),
    }
    reason = next((text for text, applies in problems.items() if applies), None)
    return reason or _in_measured_words(unsupported(recipe, parallel))


def _in_measured_words(reason: str | None) -> str | None:
    return None if reason is None else reason.replace("is not simulated", "is not measured")
