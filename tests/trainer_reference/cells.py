"""Cells of the reference: the axes along which the trainer and the project's step are compared."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest

IN_SMALL_STEPS = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`.*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:OptimState.bit does not implement:UserWarning"),
]
"""Marks of a file that trains by trainers, which warn."""

METHODS = ("full", "lora", "qlora")
PRECISIONS = ("fp32", "bf16", "bf16-mixed")
ACCUMULATIONS = (1, 4)
CHECKPOINTING = (False, True)
CLIPPING = (None, 1.0)
LOSSES = ("full-logits", "chunked")

ADAPTERS: dict[str, dict[str, Any]] = {
    "all-linear": {},
    "saved": {"modules_to_save": ("embed_tokens", "lm_head")},
    "head": {"lora_targets": ("all-linear", "lm_head", "embed_tokens")},
    "experts": {"lora_targets": ("attention", "experts"), "experts": "grouped"},
    "attention": {"lora_targets": ("attention",)},
    "dora": {"dora": True},
    "dora-dropout": {"dora": True, "lora_dropout": 0.1},
}
"""Fields of a recipe by the name of its adapters; ``lora_targets`` is all-linear if absent."""


@dataclass(frozen=True, slots=True)
class ReferenceCell:
    """One combination of the axes.

    Attributes:
        method: ``full``, ``lora`` or ``qlora``.
        precision: ``fp32``; ``bf16``, all of it; ``bf16-mixed``, frozen weights in bf16, trained
            ones in fp32, autocast; ``fp32-mixed-load``, frozen weights in fp32, too.
        accumulation: micro-steps of an optimizer step.
        loss: ``full-logits`` is ``Trainer.compute_loss``, ``chunked`` ``SFTTrainer.compute_loss``;
            absent for a task without logits.
        checkpointing: whether the backward pass recomputes each layer.
        max_grad_norm: norm that gradients are clipped to; absent for none.
        activation_offloading: whether saved activations are on the host.
        model: one of ``models.CONFIGURATIONS``.
        adapters: one of ``ADAPTERS``.
        task: ``sft`` or a task with a trainer in ``preference``.
        reference: source of the reference's log-probabilities; absent for a task without one.
        quantisation: format of the weights of ``qlora``.
        kbit_preparation: whether PEFT's ``prepare_model_for_kbit_training`` prepares the model.
        optimizer: ``adamw``; ``adamw_foreach``, the Trainer's ``adamw_torch`` on a GPU;
            ``adafactor``; ``adamw_8bit``; or one of torchao's.
        packing: ``packed`` rows of two examples, or batches of twice as many examples that are
            ``padding-free``; absent for batches as rows.
        attention: ``sdpa`` or ``eager``.
        generation_share: share of vLLM, zero for generation by transformers; absent but for
            ``grpo``.
        steps: optimizer steps that are compared; not part of the cell's identity.
    """

    method: str = "full"
    precision: str = "fp32"
    accumulation: int = 1
    loss: str | None = "full-logits"
    checkpointing: bool = False
    max_grad_norm: float | None = None
    model: str = "llama"
    activation_offloading: bool = False
    adapters: str = "all-linear"
    task: str = "sft"
    reference: str | None = None
    quantisation: str = "nf4"
    kbit_preparation: bool = False
    optimizer: str = "adamw"
    packing: str | None = None
    attention: str = "sdpa"
    generation_share: float | None = None
    steps: int = field(default=10, compare=False)

    @property
    def key(self) -> str:
        """A short name."""
        parts = [
            self.model,
            self.task if self.task != "sft" else None,
            self.reference,
            self.method,
            self.quantisation if self.quantisation != "nf4" else None,
            "kbit-prepared" if self.kbit_preparation else None,
            self.precision,
            self.optimizer if self.optimizer != "adamw" else None,
            f"x{self.accumulation}",
            self.loss,
            "checkpointed" if self.checkpointing else None,
            "clipped" if self.max_grad_norm is not None else None,
            "offloaded" if self.activation_offloading else None,
            self.adapters if self.adapters != "all-linear" else None,
            self.packing,
            "eager" if self.attention == "eager" else None,
            "no-vllm" if self.generation_share == 0 else None,
        ]
        return "-".join(part for part in parts if part)


QUICK_STEPS = 3
"""Steps of quick cells: the second has the optimizer's state, the third two updates."""
QUICK = (
    *(
        ReferenceCell(method, precision, 2, "full-logits", checkpointing=True, max_grad_norm=1.0)
        for method, precision in zip(METHODS, PRECISIONS, strict=True)
    ),
    *(ReferenceCell(method, "bf16-mixed") for method in ("full", "qlora")),
    ReferenceCell("full", "bf16", 2, "chunked", checkpointing=True, max_grad_norm=1.0),
    ReferenceCell("lora", "bf16-mixed", loss="chunked"),
    ReferenceCell("lora", "fp32-mixed-load", 1, "chunked", checkpointing=True, max_grad_norm=1.0),
)
"""Cells that are compared in few steps: each method and each precision once, the plain, and TRL's
own loss. More than two micro-batches, of which the third is like the second, are left to the
rest."""
COMPARED = tuple(
    ReferenceCell(*axes)
    for axes in product(METHODS, PRECISIONS, ACCUMULATIONS, LOSSES, CHECKPOINTING, CLIPPING)
)
"""Every cell of the reference."""
OFFLOADED = tuple(
    ReferenceCell(method, precision, 2, loss, checkpointing=checks, activation_offloading=True)
    for method, precision, loss, checks in (
        ("full", "fp32", "full-logits", False),
        ("lora", "bf16-mixed", "chunked", False),
        ("qlora", "bf16-mixed", "full-logits", True),
    )
)
"""Cells with activations on a stand-in for the host (``offloading``)."""
COMPARED_OFFLOADED = tuple(
    ReferenceCell(method, precision, loss=loss, checkpointing=checks, activation_offloading=True)
    for method, precision, loss, checks in product(
        METHODS, ("fp32", "bf16-mixed"), LOSSES, CHECKPOINTING
    )
)
"""Every cell with activations on the host."""
QUANTISED = tuple(
    ReferenceCell(
        "qlora",
        precision,
        accumulation,
        checkpointing=checkpointing,
        quantisation=quantisation,
        kbit_preparation=prepared,
    )
    for quantisation, precision, accumulation, checkpointing, prepared in (
        ("fp4", "bf16-mixed", 1, False, False),
        ("int8", "bf16", 2, True, False),
        ("nf4", "bf16-mixed", 1, True, True),
    )
)
"""Other formats of quantised weights, and prepared ones."""
COMPARED_QUANTISED = tuple(
    ReferenceCell(
        "qlora",
        precision,
        accumulation,
        checkpointing=checkpointing,
        quantisation=quantisation,
        kbit_preparation=prepared,
    )
    for (quantisation, prepared), precision, (accumulation, checkpointing) in product(
        (("fp4", False), ("int8", False), ("int8", True), ("nf4", True)),
        ("bf16", "bf16-mixed"),
        zip(ACCUMULATIONS, CHECKPOINTING, strict=True),
    )
    if not (prepared and precision == "bf16")
)
"""Every cell of other formats of quantised weights, and of prepared ones."""
FOREACH = tuple(
    ReferenceCell(method, precision, accumulation, max_grad_norm=norm, optimizer="adamw_foreach")
    for method, precision, accumulation, norm in (
        ("full", "bf16-mixed", 2, 1.0),
        ("lora", "bf16-mixed", 1, 1.0),
    )
)
"""Cells whose update takes memory for a group of parameters at once."""
ADAFACTOR = tuple(
    ReferenceCell(method, precision, accumulation, max_grad_norm=norm, optimizer="adafactor")
    for method, precision, accumulation, norm in (
        ("full", "bf16-mixed", 2, 1.0),
        ("lora", "bf16-mixed", 1, None),
    )
)
"""Cells whose update takes memory for the largest parameter alone, several times over."""
EIGHT_BIT = tuple(
    ReferenceCell(method, precision, adapters=adapters, model=model, optimizer="adamw_8bit")
    for method, precision, adapters, model in (
        ("full", "bf16-mixed", "all-linear", "llama-tied"),
        ("lora", "bf16-mixed", "saved", "llama"),
    )
)
"""Cells with state in 8 bits, but for that of embeddings, in 32."""
TORCHAO = tuple(
    ReferenceCell(
        method, precision, accumulation, max_grad_norm=norm, optimizer=f"torchao_adamw_{bits}bit"
    )
    for bits, method, precision, accumulation, norm in (
        (8, "full", "bf16", 1, None),
        (8, "lora", "bf16-mixed", 4, 1.0),
        (8, "full", "fp32", 1, None),
        (4, "full", "bf16-mixed", 4, 1.0),
        (4, "lora", "fp32", 1, None),
        (4, "full", "bf16", 1, 1.0),
    )
)
"""Cells whose update torch.compile compiles, which takes up to a minute each."""
COMPARED_FOREACH = tuple(
    ReferenceCell(method, precision, accumulation, max_grad_norm=norm, optimizer="adamw_foreach")
    for method, precision, (accumulation, norm) in product(
        METHODS, PRECISIONS, zip(ACCUMULATIONS, CLIPPING, strict=True)
    )
)
"""Every cell with an update of a group of parameters at once."""
OTHER_MODELS = tuple(
    ReferenceCell(method=method, model=model)
    for model, method in (("llama-tied", "full"), ("mistral", "full"), ("qwen2", "lora"))
)
QUICK_ADAPTERS = (
    ReferenceCell("lora", "fp32", loss="chunked", model="llama-tied", adapters="saved"),
    ReferenceCell("qlora", "bf16", checkpointing=True, adapters="saved"),
    ReferenceCell("qlora", "fp32", checkpointing=True, adapters="head"),
    ReferenceCell("lora", "bf16-mixed", 2, model="mixtral", adapters="experts"),
    ReferenceCell("lora", "bf16-mixed", 2, max_grad_norm=1.0, adapters="dora"),
    ReferenceCell("lora", "fp32", loss="chunked", adapters="dora-dropout"),
)
"""Cells of other adapters that are compared in few steps."""
FURTHER = (
    ReferenceCell("full", "bf16", optimizer="adafactor"),
    ReferenceCell("full", "bf16", optimizer="adamw_8bit"),
    ReferenceCell("lora", "fp32", checkpointing=True, model="mixtral", adapters="experts"),
    ReferenceCell("lora", "bf16-mixed", 2, "full-logits", max_grad_norm=1.0, adapters="saved"),
    ReferenceCell("lora", "bf16-mixed", 2, adapters="head"),
    ReferenceCell(
        *("qlora", "bf16-mixed", 2), checkpointing=True, quantisation="int8", kbit_preparation=True
    ),
    ReferenceCell(
        *("full", "bf16-mixed", 2, "chunked"), checkpointing=True, activation_offloading=True
    ),
)
"""Cells of the variants above that are like others of the same optimizer or adapters."""
COMPARED_ADAPTERS = tuple(
    ReferenceCell(method, precision, accumulation, loss, checkpointing, adapters=adapters)
    for adapters, method, precision, loss, (accumulation, checkpointing) in product(
        ("saved", "head", "dora"),
        ("lora", "qlora"),
        PRECISIONS,
        LOSSES,
        zip(ACCUMULATIONS, CHECKPOINTING, strict=True),
    )
    if (adapters, loss) != ("head", "chunked")  # TRL refuses it
)
"""Every cell of other adapters."""
QUICK_ROUTERS = (
    ReferenceCell("full", "bf16-mixed", 1, "chunked", checkpointing=True, model="mixtral"),
    ReferenceCell("lora", "fp32", loss="chunked", model="mixtral", adapters="attention"),
)
"""Cells with the load-balancing loss of routers that are compared in few steps."""
ROUTERS = tuple(
    ReferenceCell(
        method,
        precision,
        accumulation,
        loss,
        checkpointing=accumulation > 1,
        model=model,
        adapters=adapters,
        packing=packing,
    )
    for model, loss, (method, adapters, precision), (accumulation, packing) in product(
        ("mixtral", "qwen3-moe"),
        LOSSES,
        (
            ("full", "all-linear", "fp32"),
            ("full", "all-linear", "bf16-mixed"),
            ("lora", "attention", "bf16-mixed"),
            ("lora", "experts", "bf16"),
        ),
        ((4, None), (1, "packed")),
    )
)
"""Cells with the load-balancing loss of routers."""
STEPS_OF_PREFERENCE = tuple(
    {
        "method": method,
        "precision": precision,
        "accumulation": accumulation,
        "checkpointing": accumulation > 1,
        "max_grad_norm": 1.0,
    }
    for method, precision, accumulation in product(METHODS, ("fp32", "bf16-mixed"), ACCUMULATIONS)
)
"""Axes of the preference tasks that they share."""
REFERRING = tuple(
    ReferenceCell(**axes, loss="chunked", task=task, reference=reference)
    for task, reference, axes in product(
        ("dpo", "kto"), ("adapter-off", "separate", "precomputed"), STEPS_OF_PREFERENCE
    )
    if (axes["method"], reference) != ("full", "adapter-off")
)
"""Every cell of a task with a reference."""
UNREFERRING = tuple(
    ReferenceCell(**axes | {"checkpointing": checkpointing}, task="orpo")
    for axes, checkpointing in product(STEPS_OF_PREFERENCE, CHECKPOINTING)
)
"""Every cell of a preference task without a reference."""
REWARD = tuple(replace(cell, task="reward", loss=None) for cell in UNREFERRING)
"""Every cell of a reward model."""
PREFERENCE = REFERRING + UNREFERRING + REWARD
"""Every cell of a preference task."""
PREFERENCE_ROUTERS = tuple(
    ReferenceCell(
        method,
        "bf16-mixed",
        1,
        "chunked",
        model="mixtral",
        adapters=adapters,
        task=task,
        reference=reference,
    )
    for task in ("dpo", "kto")
    for method, adapters, reference in (
        ("full", "all-linear", "separate"),
        ("lora", "attention", "adapter-off"),
    )
)
"""Cells of preference tasks with the load-balancing loss of routers."""
QUICK_PREFERENCE = tuple(
    cell
    for cell in PREFERENCE
    if (cell.precision, cell.accumulation, cell.checkpointing) == ("bf16-mixed", 1, False)
    and (cell.task, cell.method, cell.reference)
    in {
        ("dpo", "full", "separate"),
        ("dpo", "lora", "precomputed"),
        ("dpo", "qlora", "adapter-off"),
        ("kto", "full", "separate"),
        ("kto", "lora", "adapter-off"),
        ("orpo", "lora", None),
        ("reward", "full", None),
        ("reward", "qlora", None),
    }
)
"""Cells of preference tasks that are compared in few steps."""
UPDATES = tuple(
    ReferenceCell(
        **axes,
        loss="chunked",
        task="grpo",
        reference=reference,
        generation_share=share,
    )
    for axes, share in product(STEPS_OF_PREFERENCE, (0.3, 0.0))
    for reference in (None, "separate" if axes["method"] == "full" else "adapter-off")
)
"""Every cell of GRPO's update."""
QUICK_UPDATES = tuple(
    cell
    for cell in UPDATES
    if (cell.precision, cell.accumulation) == ("bf16-mixed", 1)
    and (cell.method, cell.reference, cell.generation_share)
    in {("full", "separate", 0.0), ("lora", "adapter-off", 0.3), ("lora", None, 0.3)}
)
"""Cells of GRPO that are compared in few steps."""
PACKED_QUICK = (
    ReferenceCell("lora", "bf16-mixed", 1, "chunked", packing="packed"),
    ReferenceCell("full", "fp32", 2, checkpointing=True, max_grad_norm=1.0, packing="padding-free"),
    ReferenceCell("full", "bf16", 2, "chunked", packing="packed", attention="eager"),
)
"""Packed cells that are compared in few steps."""
PACKED = tuple(
    ReferenceCell(method, precision, 4, loss, checkpointing, packing=packing, attention=attention)
    for method, precision, checkpointing in (
        ("full", "fp32", False),
        ("full", "bf16", True),
        ("lora", "bf16-mixed", False),
    )
    for packing, attention in product(("packed", "padding-free"), ("sdpa", "eager"))
    for loss in LOSSES
)
"""Packed cells of the reference."""

Compare = Callable[[ReferenceCell, float], None]
"""Comparison of a cell with the trainer, of peaks within a relative tolerance."""
