"""Recipes of fine-tuning: their axes, their short names, and the recipes of papers."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gpu_catalog.record import Record

Method = Literal["full", "lora", "qlora"]
Dtype = Literal["fp32", "bf16", "fp16"]
Precision = Literal["bf16", "bf16-mixed", "fp32-mixed-load", "fp16", "fp32"]
AdapterDtype = Literal["bf16", "fp32"]
Attention = Literal["eager", "sdpa", "flash_attention_2"]
Experts = Literal["looped", "grouped"]
Mamba = Literal["mamba-ssm", "reference"]
Optimizer = Literal[
    "adamw",
    "adamw_foreach",
    "adamw_loop",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "adafactor",
    "sgd",
]
Loss = Literal["full-logits", "chunked", "liger", "cce"]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
Switch = Annotated[bool, Field(strict=True)]
Target = Annotated[str, Field(pattern=r"^(all-linear|[A-Za-z_][A-Za-z0-9_.]*)$")]

TARGET_GROUPS = ("attention", "experts", "router", "all-linear")
"""Groups that ``lora_targets`` may name besides linear layers."""

# Dtypes of frozen and of trained weights, and of autocast.
_DTYPES: dict[Precision, tuple[Dtype, Dtype, Dtype | None]] = {
    "bf16": ("bf16", "bf16", None),
    "bf16-mixed": ("bf16", "fp32", "bf16"),
    "fp32-mixed-load": ("fp32", "fp32", "bf16"),
    "fp16": ("fp16", "fp32", "fp16"),
    "fp32": ("fp32", "fp32", None),
}


def _norm(value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"must be above 0, not {value:g}: give none (null in YAML) not to clip")
    return value


class Recipe(Record):
    """Recipe of fine-tuning. A trial checks that the built model follows every field.

    A field is None where it does not apply, or where its default depends on the model or device;
    ``trials.records.compatibility.with_defaults`` fills in the latter. The defaults here are what a
    stored recipe without the field means.

    Attributes:
        method: ``full`` trains every weight, ``lora`` adapters on frozen weights, ``qlora``
            adapters on frozen 4-bit NF4 weights.
        lora_rank: rank of the adapters; required for ``lora`` and ``qlora``.
        lora_alpha: adapters are scaled by alpha / rank; by default twice the rank.
        lora_dropout: fraction of an adapter's inputs that is dropped in training; by default 0.
        lora_targets: linear layers with adapters: ``attention``, ``experts``, ``router``,
            ``all-linear`` (all but the head), or names of layers. By default experts and router,
            as in arXiv 2408.04693; ``attention`` if the experts are grouped, and ``all-linear``
            for a model without experts.
        adapter_dtype: dtype of the adapters; by default that of trained weights under
            ``precision``.
        double_quantisation: whether the quantisation constants of 4-bit weights are quantised, too
            (QLoRA, arXiv 2305.14314); only for ``qlora``, by default true.
        kbit_preparation: whether norms, embeddings and head of a 4-bit model are cast to fp32, as
            PEFT's ``prepare_model_for_kbit_training`` does; only for ``qlora``.
        precision: ``fp32`` and ``bf16`` hold weights, adapters, activations and optimizer state in
            that dtype. ``bf16-mixed`` holds frozen weights in bf16 and trained ones in fp32, and
            runs under autocast to bf16; ``fp32-mixed-load`` also holds frozen weights in fp32.
            ``fp16`` holds frozen weights in fp16 and runs under autocast with loss scaling;
            trained weights and optimizer state are fp32.
        gradient_checkpointing: whether each layer's activations are recomputed in the backward
            pass.
        attention: attention kernel; by default ``sdpa``. Leave it out for models without attention.
        experts: ``looped`` has one linear layer per expert and projection; ``grouped`` uses
            transformers' grouped matrix product. By default looped if adapters or 4-bit weights
            need it, else grouped. Leave it out for models without experts.
        mamba: kernels of the selective scan: ``mamba-ssm``, the default on CUDA, or ``reference``,
            plain PyTorch. Leave it out for models without Mamba layers.
        optimizer: ``adamw`` is PyTorch's fused AdamW, ``adamw_foreach`` and ``adamw_loop`` are its
            other implementations; the 8-bit and paged optimizers are bitsandbytes'.
        offload_optimizer: whether the host holds the optimizer state, in fp32, with a copy of the
            trained weights, and computes the update (ZeRO-Offload, by DeepSpeed). It needs g++.
        gradient_accumulation: micro-batches per optimizer step.
        effective_batch: examples per optimizer step; each batch size is then a micro-batch, which
            as many micro-batches accumulate to. None for a fixed number of micro-batches.
        max_grad_norm: norm that gradients are clipped to; None for no clipping.
        loss: ``full-logits`` is the loss of transformers, from the logits of all tokens.
            ``chunked`` is TRL's fused head, which computes logits in tiles; ``liger`` is
            liger-kernel's fused linear cross entropy, ``cce`` that of cut-cross-entropy.
    """

    method: Method
    lora_rank: PositiveInt | None = None
    lora_alpha: PositiveInt | None = None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    lora_targets: Annotated[tuple[Target, ...], Field(min_length=1)] | None = None
    adapter_dtype: AdapterDtype | None = None
    double_quantisation: Switch | None = None
    kbit_preparation: Switch = False
    precision: Precision = "bf16"
    gradient_checkpointing: Switch = False
    attention: Attention | None = None
    experts: Experts | None = None
    mamba: Mamba | None = None
    optimizer: Optimizer = "adamw"
    offload_optimizer: Switch = False
    gradient_accumulation: PositiveInt = 1
    effective_batch: PositiveInt | None = None
    max_grad_norm: Annotated[float, AfterValidator(_norm)] | None = None
    loss: Loss = "full-logits"

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Fill in the defaults that depend on the method and the precision alone."""
        if not isinstance(given, dict):
            return given
        filled = dict(given)
        if filled.get("method") == "qlora" and filled.get("double_quantisation") is None:
            filled["double_quantisation"] = True
        rank = filled.get("lora_rank")
        if filled.get("method") in ("lora", "qlora") and type(rank) is int and rank > 0:
            if filled.get("lora_alpha") is None:
                filled["lora_alpha"] = 2 * rank
            if filled.get("lora_dropout") is None:
                filled["lora_dropout"] = 0.0
            precision = filled.get("precision", "bf16")
            if filled.get("adapter_dtype") is None and precision in _DTYPES:
                filled["adapter_dtype"] = _DTYPES[precision][1]
        return filled

    @model_validator(mode="after")
    def _fields_belong_together(self) -> Self:
        wrong = [*_misplaced(self), *_incompatible(self)]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def micro_batches(self, batch_size: int) -> int:
        """Micro-batches per optimizer step, for a micro-batch of so many examples."""
        if self.effective_batch is None:
            return self.gradient_accumulation
        return -(-self.effective_batch // batch_size)

    def batch_limit(self, limit: int) -> int:
        """Largest batch size to try below a limit: none is larger than the effective batch."""
        return limit if self.effective_batch is None else min(limit, self.effective_batch)

    @property
    def base_dtype(self) -> Dtype:
        """Dtype of the model's weights, 4-bit ones and adapters apart."""
        frozen, trained, _ = _DTYPES[self.precision]
        return trained if self.method == "full" else frozen

    @property
    def autocast(self) -> Dtype | None:
        """Dtype that autocast runs products in; None without autocast."""
        return _DTYPES[self.precision][2]

    @property
    def compute_dtype(self) -> Dtype:
        """Dtype of matrix products."""
        return self.autocast or self.base_dtype

    @property
    def has_own_adapter_dtype(self) -> bool:
        """Whether the adapters have another dtype than trained weights under the precision."""
        return self.adapter_dtype not in (None, _DTYPES[self.precision][1])

    @property
    def extras(self) -> tuple[str, ...]:
        """Optional packages that this recipe needs, sorted."""
        needed = {
            "flash_attn": self.attention == "flash_attention_2",
            "mamba_ssm": self.mamba == "mamba-ssm",
            "causal_conv1d": self.mamba == "mamba-ssm",
            "deepspeed": self.offload_optimizer,
            "trl": self.loss == "chunked",
            "liger_kernel": self.loss == "liger",
            "cut_cross_entropy": self.loss == "cce",
        }
        return tuple(sorted(name for name, wanted in needed.items() if wanted))

    @property
    def key(self) -> str:
        """A stable short name, for example ``qlora-r16-experts+router-bf16-checkpointed-looped``.

        It lists the axes that differ from their first choice, so no two recipes share a key.
        """
        rank = self.lora_rank
        accumulates = self.gradient_accumulation > 1
        parts: list[str | None] = [
            self.method,
            None if rank is None else f"r{rank}",
            f"alpha{self.lora_alpha}" if rank is not None and self.lora_alpha != 2 * rank else None,
            f"dropout{self.lora_dropout:g}" if self.lora_dropout else None,
            "+".join(self.lora_targets) if self.lora_targets else None,
            f"{self.adapter_dtype}-adapters" if self.has_own_adapter_dtype else None,
            "singly-quantised" if self.double_quantisation is False else None,
            "kbit-prepared" if self.kbit_preparation else None,
            self.precision,
            "checkpointed" if self.gradient_checkpointing else None,
            self.attention if self.attention != "sdpa" else None,
            self.experts,
            self.mamba if self.mamba != "reference" else None,
            self.optimizer if self.optimizer != "adamw" else None,
            "offloaded" if self.offload_optimizer else None,
            f"accumulation{self.gradient_accumulation}" if accumulates else None,
            f"effective{self.effective_batch}" if self.effective_batch is not None else None,
            f"clip{self.max_grad_norm:g}" if self.max_grad_norm is not None else None,
            self.loss if self.loss != "full-logits" else None,
        ]
        return "-".join(part for part in parts if part is not None)


def _misplaced(recipe: Recipe) -> list[str]:
    """Errors of fields that the method excludes or requires."""
    wrong = []
    method = recipe.method
    adapter_fields = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "adapter_dtype")
    if method == "full":
        wrong += [
            f"{name} {_plain(getattr(recipe, name))} does not apply to method full: remove it, "
            "or use method lora or qlora"
            for name in adapter_fields
            if getattr(recipe, name) is not None
        ]
    elif recipe.lora_rank is None:
        wrong.append(f"method {method} needs lora_rank, for example lora_rank: 16")
    four_bit_fields = {
        "double_quantisation": recipe.double_quantisation is not None,
        "kbit_preparation": recipe.kbit_preparation,
    }
    wrong += [
        f"{name} does not apply to method {method}: remove it, or use method qlora"
        for name, is_given in four_bit_fields.items()
        if is_given and method != "qlora"
    ]
    targets = recipe.lora_targets or ()
    if len(set(targets)) < len(targets):
        wrong.append(f"lora_targets {_plain(targets)} has a duplicate: remove it")
    if "all-linear" in targets and len(targets) > 1:
        wrong.append(f"lora_targets {_plain(targets)}: all-linear includes the others: remove them")
    return wrong


def _incompatible(recipe: Recipe) -> list[str]:
    """Errors of pairs of fields that no device supports."""
    wrong = []
    if recipe.method == "qlora" and recipe.experts == "grouped":
        wrong.append(
            "experts grouped cannot be 4-bit: the grouped product has no 4-bit kernel; "
            "use experts: looped"
        )
    if "experts" in (recipe.lora_targets or ()) and recipe.experts == "grouped":
        wrong.append(
            "adapters on experts need one linear layer per expert: use experts: looped, or "
            "other lora_targets"
        )
    if recipe.attention == "flash_attention_2" and recipe.compute_dtype == "fp32":
        wrong.append("attention flash_attention_2 does not support fp32: use bf16 or fp16")
    if recipe.effective_batch is not None and recipe.gradient_accumulation > 1:
        wrong.append(
            f"effective_batch {recipe.effective_batch} and gradient_accumulation "
            f"{recipe.gradient_accumulation} exclude each other: leave one of them out"
        )
    if recipe.loss == "cce" and recipe.compute_dtype == "fp32":
        wrong.append("loss cce does not support fp32: use bf16 or fp16, or loss: liger")
    if recipe.adapter_dtype == "bf16" and recipe.precision == "fp16":
        wrong.append("adapter_dtype bf16 does not go with precision fp16: use fp32")
    if recipe.offload_optimizer:
        wrong += _incompatible_with_offloading(recipe)
    return wrong


def _incompatible_with_offloading(recipe: Recipe) -> list[str]:
    wrong = []
    if recipe.optimizer != "adamw":
        wrong.append(
            f"offload_optimizer does not support optimizer {recipe.optimizer}: use adamw, as "
            "DeepSpeed's update on the host does"
        )
    if recipe.precision not in ("bf16", "fp32"):
        wrong.append(
            f"offload_optimizer does not support precision {recipe.precision}: DeepSpeed keeps "
            "trained weights on the GPU in the dtype of products: use bf16 or fp32"
        )
    if recipe.has_own_adapter_dtype:
        wrong.append(
            f"offload_optimizer does not support adapter_dtype {recipe.adapter_dtype} with "
            f"precision {recipe.precision}: leave adapter_dtype out"
        )
    return wrong


def _plain(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


NAMED_RECIPES = {
    # 2408.04693, section III: rank 16 on the experts' three matrices and the router.
    "paper-mixtral": Recipe(
        method="qlora",
        lora_rank=16,
        lora_targets=("experts", "router"),
        precision="bf16",
        gradient_checkpointing=True,
        attention="flash_attention_2",
        experts="looped",
    ),
    # As above: BlackMamba is small enough to train whole.
    "paper-blackmamba": Recipe(
        method="full", precision="bf16", gradient_checkpointing=False, experts="looped"
    ),
}
"""Recipes that a specification may name instead of writing them out."""
