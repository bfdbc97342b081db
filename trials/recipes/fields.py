"""Axes of a recipe: their values, their defaults, and what each means."""

from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gpu_catalog.record import Record

Method = Literal["full", "lora", "qlora"]
Dtype = Literal["fp32", "bf16", "fp16"]
Precision = Literal["bf16", "bf16-mixed", "fp32-mixed-load", "fp16", "fp32"]
AdapterDtype = Literal["bf16", "fp32"]
Quantisation = Literal["nf4", "fp4", "int8"]
Attention = Literal["eager", "sdpa", "flash_attention_2"]
Experts = Literal["looped", "grouped", "all-tokens"]
Mamba = Literal["mamba-ssm", "reference"]
Optimizer = Literal[
    "adamw",
    "adamw_foreach",
    "adamw_loop",
    "adamw_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "torchao_adamw_8bit",
    "torchao_adamw_4bit",
    "adafactor",
    "sgd",
    "muon",
]
Loss = Literal["full-logits", "chunked", "liger", "cce", "dft", "eaft"]
Task = Literal["sft", "dpo", "kto", "orpo", "reward", "grpo"]
Reference = Literal["adapter-off", "separate", "precomputed"]
Compile = Literal["model", "layers"]
MOST_COUNTED = 10**15
"""Largest number of anything: sums of products of larger ones overflow."""
PositiveInt = Annotated[int, Field(strict=True, ge=1, le=MOST_COUNTED)]
Switch = Annotated[bool, Field(strict=True)]
REENTRANT: Final = "reentrant"
Target = Annotated[str, Field(pattern=r"^(all-linear|[A-Za-z_][A-Za-z0-9_.]*)$")]

TARGET_GROUPS = ("attention", "experts", "router", "all-linear")
"""Groups that ``lora_targets`` may name besides linear layers."""

FEWEST_PACKED = 2
"""Fewest examples in a packed row; one alone is not packed."""

DTYPE_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a value of each dtype."""

DTYPES: dict[Precision, tuple[Dtype, Dtype, Dtype | None]] = {
    "bf16": ("bf16", "bf16", None),
    "bf16-mixed": ("bf16", "fp32", "bf16"),
    "fp32-mixed-load": ("fp32", "fp32", "bf16"),
    "fp16": ("fp16", "fp32", "fp16"),
    "fp32": ("fp32", "fp32", None),
}
"""Dtypes of frozen and of trained weights, and of autocast."""
TASK_LOSSES: dict[Task, Loss | None] = {
    "dpo": "chunked",
    "kto": "chunked",
    "orpo": "full-logits",
    "reward": None,
    "grpo": "chunked",
}
"""The way to the loss that TRL's trainer of a task has; None for a model without logits."""
FUSED_LOSSES: tuple[Loss, ...] = ("chunked", "liger", "cce")
"""Losses that take hidden states and the weights of the head."""
WEIGHTED: tuple[Loss, ...] = ("dft", "eaft")
"""Losses of LLaMA-Factory that weight each token."""
WITH_ALL_LOGITS: tuple[Task, ...] = ("dpo", "kto", "reward")
"""Tasks that LLaMA-Factory's own trainers run from the logits of all tokens."""
REFERRING: tuple[Task, ...] = ("dpo", "kto")
"""Tasks whose loss compares the model with a reference; that of ``grpo`` may do so."""
PAIRED: tuple[Task, ...] = ("dpo", "orpo", "reward")
"""Tasks whose examples are pairs of sequences, the chosen and the rejected."""
SCORE = "score"
"""Layer of a reward model that maps hidden states to a score."""
WITH_DROPOUT: tuple[Task, ...] = ("sft", "grpo")
"""Tasks whose trainer does not disable dropout."""
GENERATION_SHARE = 0.3
"""Default of TRL 1.16's ``vllm_gpu_memory_utilization`` (trl/trainer/grpo_config.py:656)."""


def _norm(value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(f"must be above 0, not {value:g}: give none (null in YAML) not to clip")
    return value


def _with_rows(given: dict[str, Any]) -> dict[str, Any]:
    is_open = given.get("packing") is True and given.get("examples_per_row") is None
    return given | ({"examples_per_row": FEWEST_PACKED} if is_open else {})


def _with_task(given: dict[str, Any]) -> dict[str, Any]:
    filled = dict(given)
    task: Any = filled.get("task", "sft")
    if task in get_args(Task) and filled.get("loss") is None:
        filled["loss"] = TASK_LOSSES.get(task, "full-logits")
    if task in REFERRING and filled.get("reference") is None:
        filled["reference"] = "separate" if filled.get("method") == "full" else "adapter-off"
    if task == "grpo" and filled.get("generation_share") is None:
        filled["generation_share"] = GENERATION_SHARE
    return filled


def _checkpointing(value: object) -> object:
    if isinstance(value, bool) or value == REENTRANT:
        return value
    raise ValueError(f"must be true, false or {REENTRANT}, not {value!r}")


Checkpointing = Annotated[bool | Literal["reentrant"], BeforeValidator(_checkpointing)]


def _with_defaults(given: dict[str, Any]) -> dict[str, Any]:
    filled = _with_task(_with_rows(given))
    if filled.get("method") == "qlora":
        if filled.get("quantisation") is None:
            filled["quantisation"] = "nf4"
        if filled["quantisation"] != "int8" and filled.get("double_quantisation") is None:
            filled["double_quantisation"] = True
    if filled.get("method") in ("lora", "qlora"):
        _fill_in_adapters(filled)
    if filled.get("gradient_checkpointing") == REENTRANT:
        differs = filled.get("method") == "full" or filled.get("quantisation") == "int8"
        is_plain = filled.get("task", "sft") == "sft" and filled.get("trained_layers") is None
        is_plain = is_plain and not filled.get("activation_offloading")
        filled["gradient_checkpointing"] = REENTRANT if differs and is_plain else True
    return filled


def _fill_in_adapters(filled: dict[str, Any]) -> None:
    rank, block = filled.get("lora_rank"), filled.get("oft_block_size")
    if type(rank) is int and rank > 0:
        if filled.get("lora_alpha") is None:
            filled["lora_alpha"] = 2 * rank
        if filled.get("lora_dropout") is None:
            filled["lora_dropout"] = 0.0
    elif type(block) is not int:
        return
    precision = filled.get("precision", "bf16")
    if filled.get("adapter_dtype") is None and precision in get_args(Precision):
        filled["adapter_dtype"] = DTYPES[precision][1]


class WeightFields(Record):
    """Axes of a recipe that decide which weights there are, and which of them are trained.

    Attributes:
        method: ``full`` trains every weight, ``lora`` adapters on frozen weights, ``qlora``
            adapters on frozen quantised weights.
        lora_rank: rank of the adapters; required for ``lora`` and ``qlora`` without
            ``oft_block_size``.
        oft_block_size: side of the blocks of rotations that adapt the inputs of a layer (orthogonal
            fine-tuning, OFT, arXiv 2306.07280, by PEFT) in place of LoRA's matrices; it divides
            the width of each adapted layer's inputs.
        lora_alpha: adapters are scaled by alpha / rank; by default twice the rank. The scale,
            like that of rsLoRA, takes neither memory nor time.
        lora_dropout: fraction of an adapter's inputs that is dropped in training; by default 0.
        lora_targets: linear layers with adapters: ``attention``, ``experts``, ``router``,
            ``all-linear`` (all but the head; of a model with fused experts, all but these and
            their routers, too), or names of layers, which may be the head and
            embeddings (``lm_head``, ``embed_tokens``). By default experts and router, as in arXiv
            2408.04693; ``attention`` if the experts are fused, and ``all-linear``
            for a model without experts.
        dora: whether PEFT trains the magnitude of each column of adapted weights apart (DoRA, arXiv
            2402.09353). Magnitudes have the dtype of the adapters, on 4-bit weights fp32.
        trained_layers: number of decoder layers that method ``full`` trains, the last ones, or the
            first ones if it is negative; all else is frozen, and frozen layers are not
            checkpointed (LLaMA-Factory's ``finetuning_type: freeze``). None trains everything.
        spread_layers: whether the trained layers are the last ones of as many equal stretches of
            layers (LLaMA Pro, arXiv 2401.02415); only with positive ``trained_layers``.
        modules_to_save: modules of which PEFT trains a full copy beside the adapters, by the ends
            of their names, such as ``embed_tokens`` and ``lm_head``. The frozen originals stay.
            A copy has the dtype of its original, or bf16 if the adapters have; copies of tied
            weights are not tied.
        adapter_dtype: dtype of the adapters; by default that of trained weights under
            ``precision``.
        quantisation: format of the frozen weights, by bitsandbytes: ``nf4`` (QLoRA's) or ``fp4``
            in 4 bits, ``int8`` in 8 bits (LLM.int8, arXiv 2208.07339); only for ``qlora``, by
            default nf4.
        double_quantisation: whether the quantisation constants of 4-bit weights are quantised, too
            (QLoRA, arXiv 2305.14314); only for ``nf4`` and ``fp4``, by default true.
        kbit_preparation: whether norms, embeddings and head of a quantised model are cast to fp32,
            as PEFT's ``prepare_model_for_kbit_training`` does; only for ``qlora``.
        quantised_experts: whether the fused matrices of experts are quantised, too,
            and dequantised, all of a layer at once, in each of its passes (axolotl's
            ``quantize_moe_experts``); only for ``qlora``, without adapters on the experts.
        precision: ``fp32`` and ``bf16`` hold weights, adapters, activations and optimizer state in
            that dtype. ``bf16-mixed`` holds frozen weights in bf16 and trained ones in fp32, and
            runs under autocast to bf16; ``fp32-mixed-load`` also holds frozen weights in fp32.
            ``fp16`` holds frozen weights in fp16 and runs under autocast with loss scaling;
            trained weights and optimizer state are fp32.
    """

    method: Method
    lora_rank: PositiveInt | None = None
    oft_block_size: PositiveInt | None = None
    lora_alpha: PositiveInt | None = None
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    lora_targets: Annotated[tuple[Target, ...], Field(min_length=1)] | None = None
    dora: Switch = False
    trained_layers: Annotated[int, Field(strict=True)] | None = None
    spread_layers: Switch = False
    modules_to_save: Annotated[tuple[Target, ...], Field(min_length=1)] | None = None
    adapter_dtype: AdapterDtype | None = None
    quantisation: Quantisation | None = None
    double_quantisation: Switch | None = None
    kbit_preparation: Switch = False
    quantised_experts: Switch = False
    precision: Precision = "bf16"


class RecipeFields(WeightFields):
    """Axes of a recipe. A trial checks that the built model follows every field.

    A field is None where it does not apply, or where its default depends on the model or device;
    ``trials.records.compatibility.with_defaults`` fills in the latter. The defaults here are what a
    stored recipe without the field means.

    Attributes:
        gradient_checkpointing: whether each layer's activations are recomputed in the backward
            pass. ``reentrant`` is PyTorch's older implementation: it recomputes a layer to its end,
            and keeps no inputs of LLM.int8's layers, which the newer one cannot drop. It becomes
            true with adapters on other weights, where the two do not differ, and for other tasks,
            ``trained_layers`` and ``activation_offloading``.
        activation_offloading: whether saved activations are on the host between forward and
            backward pass, by TRL's context manager. It needs a CUDA GPU.
        attention: attention kernel; by default ``sdpa``, or ``eager`` where transformers has no
            other. Leave it out for models without attention.
        experts: ``looped`` has one linear layer per expert and projection; ``grouped`` uses
            transformers' grouped matrix product; ``all-tokens`` multiplies all tokens by every
            expert, as the class of Llama 4 does and no other. The last two have fused experts, with
            adapters by PEFT's ``target_parameters``, which only ``quantised_experts`` quantises. By
            default that of Llama 4's class; of others looped if adapters or 4-bit weights need it,
            else grouped. Leave it out for models without experts.
        mamba: kernels of the selective scan: ``mamba-ssm``, the default on CUDA, or ``reference``,
            plain PyTorch. Leave it out for models without Mamba layers.
        optimizer: ``adamw`` is PyTorch's fused AdamW, ``adamw_foreach`` and ``adamw_loop`` are its
            other implementations; ``adamw_8bit`` and the paged ones are bitsandbytes', in 8 bits
            but for embeddings, whose state the Trainer keeps in 32; those of ``torchao`` are the
            Trainer's ``adamw_torch_8bit`` and ``adamw_torch_4bit``, which torch.compile compiles:
            their first step takes long. ``muon`` is LLaMA-Factory's Muon, with AdamW for
            embeddings, head and vectors.
        offload_optimizer: whether the host holds the optimizer state, in fp32, with a copy of the
            trained weights, and computes the update (ZeRO-Offload, by DeepSpeed). It needs g++.
        gradient_accumulation: micro-batches per optimizer step.
        effective_batch: examples, or packed rows, per optimizer step; each batch size is then a
            micro-batch, which as many micro-batches accumulate to. None for a fixed number of
            micro-batches.
        max_grad_norm: norm that gradients are clipped to; None for no clipping.
        liger_kernels: whether RMSNorm, rotary embedding and SwiGLU are liger-kernel's; its loss is
            ``loss: liger``. It needs a CUDA GPU.
        compile: part that torch.compile compiles: the ``model`` as a whole, as transformers'
            Trainer does, or each of its ``layers``. It needs a CUDA GPU.
        loss: ``full-logits`` is the loss of transformers, from the logits of all tokens.
            ``chunked`` is TRL's fused head, which computes logits in tiles; ``liger`` is
            liger-kernel's fused linear cross entropy, ``cce`` that of cut-cross-entropy. ``dft``
            and ``eaft`` are LLaMA-Factory's losses that weight each token by its probability, or
            by the entropy of the 20 likeliest tokens, from the logits of all tokens. None for
            the task ``reward`` of TRL, whose model has no logits. For ``dpo`` and ``kto``,
            ``full-logits`` is the loss of LLaMA-Factory's trainers; that of ``reward`` trains a
            head of values beside the language head.
        router_loss: whether the loss includes the load-balancing loss of the routers, with the
            coefficient of the model's configuration. ``auto`` is on for the models whose trainer
            adds it, and off for all others.
        task: the trainer whose step runs: ``sft`` is TRL's SFTTrainer, ``dpo`` its DPOTrainer with
            the sigmoid loss, ``kto`` its KTOTrainer, whose first half of a batch is desirable,
            ``orpo`` its experimental ORPOTrainer, ``reward`` its RewardTrainer, which trains a
            model of sequence classification with one label: PEFT trains a copy of its layer
            ``score`` in full beside the adapters; ``grpo`` the update of its GRPOTrainer, without
            the generation of completions. An example of ``dpo``, ``orpo`` and ``reward`` is a pair,
            chosen and rejected: a batch of b pairs is 2 b sequences; one of ``grpo`` is a
            completion with its prompt. Each sequence is padded to ``seq_len``, and all of its
            tokens have a loss.
        reference: source of the reference's log-probabilities; only for ``dpo``, ``kto`` and
            ``grpo``. For ``grpo``, none is TRL's ``beta: 0``; with one, the loss has a KL term.
            ``adapter-off`` is a forward pass of the model without its adapters, ``separate`` one of
            a frozen second model, ``precomputed`` reads them with the batch. By default that of
            TRL: ``separate`` for method full, else ``adapter-off``; none for ``grpo``.
        generation_share: fraction of the GPU's memory that vLLM holds beside the update, colocated
            (TRL's ``vllm_gpu_memory_utilization``); only for ``grpo``, by default 0.3. The update
            then also computes the log-probabilities of completions without gradients, to correct
            those of vLLM. 0 is generation by transformers, which holds and needs neither.
        packing: whether examples are packed into rows of the sequence length. The rows of a
            micro-batch form one sequence with position ids that restart at each example, so that
            attention keeps the examples apart. It is TRL's ``packing`` with its default strategy,
            best-fit decreasing; batch sizes count rows.
        examples_per_row: examples in a packed row, of equal length; only for ``packing``, by
            default 2.
    """

    gradient_checkpointing: Checkpointing = False
    activation_offloading: Switch = False
    attention: Attention | None = None
    experts: Experts | None = None
    mamba: Mamba | None = None
    optimizer: Optimizer = "adamw"
    offload_optimizer: Switch = False
    gradient_accumulation: PositiveInt = 1
    effective_batch: PositiveInt | None = None
    max_grad_norm: Annotated[float, AfterValidator(_norm)] | None = None
    liger_kernels: Switch = False
    compile: Compile | None = None
    loss: Loss | None = "full-logits"
    router_loss: Switch | Literal["auto"] = False
    task: Task = "sft"
    reference: Reference | None = None
    packing: Switch = False
    examples_per_row: Annotated[int, Field(strict=True, ge=FEWEST_PACKED)] | None = None
    generation_share: Annotated[float, Field(ge=0, lt=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Fill in the defaults that depend on the method and the precision alone."""
        return _with_defaults(given) if isinstance(given, dict) else given

    @property
    def sequences(self) -> int:
        """Sequences of an example: two of a pair, else one."""
        return 2 if self.task in PAIRED else 1

    @property
    def is_scored(self) -> bool:
        """Whether the model is one of sequence classification, whose layer scores a sequence."""
        return self.task == "reward" and self.loss is None

    @property
    def has_value_head(self) -> bool:
        """Whether a head of values scores sequences beside the language head."""
        return self.task == "reward" and self.loss == "full-logits"

    @property
    def has_adapters(self) -> bool:
        """Whether layers have adapters; the reference of a model with adapters has none."""
        return self.lora_rank is not None or self.oft_block_size is not None

    @property
    def has_fused_experts(self) -> bool:
        """Whether the matrices of a layer's experts are one parameter, as transformers has them."""
        return self.experts in ("grouped", "all-tokens")

    @property
    def copied_modules(self) -> tuple[str, ...]:
        """Ends of the names of the modules of which PEFT trains a copy in full."""
        has_score = self.is_scored and self.method != "full"
        return (*(self.modules_to_save or ()), *([SCORE] if has_score else []))

    @property
    def base_dtype(self) -> Dtype:
        """Dtype of the model's weights, but for quantised ones, adapters and single layers."""
        frozen, trained, _ = DTYPES[self.precision]
        is_trained = self.method == "full" and self.trained_layers is None
        return trained if is_trained else frozen

    @property
    def trained_dtype(self) -> Dtype:
        """Dtype of trained weights, adapters apart."""
        return DTYPES[self.precision][1]

    @property
    def autocast(self) -> Dtype | None:
        """Dtype that autocast runs products in; None without autocast."""
        return DTYPES[self.precision][2]

    @property
    def compute_dtype(self) -> Dtype:
        """Dtype of matrix products."""
        return self.autocast or self.base_dtype

    @property
    def has_square_mask(self) -> bool:
        """Whether attention takes a mask with a row and a column for each token of a batch."""
        return self.packing and self.attention != "flash_attention_2"

    @property
    def has_own_adapter_dtype(self) -> bool:
        """Whether the adapters have another dtype than trained weights under the precision."""
        return self.adapter_dtype not in (None, DTYPES[self.precision][1])
