"""The training code itself: a model under a recipe, and one optimizer step."""

import importlib

import torch
from torch import nn

from trials.models.build import build_model
from trials.models.preset import Preset
from trials.observation import ParameterCounts
from trials.workload import Cell, Recipe

LEARNING_RATE = 5e-5  # the paper's, 2408.04693 section III
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAPTED_EXPERTS = ["router_linear", "gate_linear", "up_linear", "down_linear"]
ADAPTED_DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def import_libraries(recipe: Recipe) -> None:
    """Imports what a recipe needs beyond torch and transformers; seconds each, so not more."""
    if recipe.method != "full":
        importlib.import_module("peft")
    if recipe.method == "qlora":
        importlib.import_module("bitsandbytes")


class NotTrainingError(RuntimeError):
    """The step did not do what fine-tuning does."""


class FineTuning:
    """A model under a recipe, its optimizer and its data, on one device.

    Args:
        cell: what is fine-tuned.
        preset: the architecture of ``cell.model``.
        seed: weights and tokens are drawn from it, alike in every process.
    """

    def __init__(self, cell: Cell, preset: Preset, *, seed: int) -> None:
        self._seq_len = cell.seq_len
        self._vocab_size = preset.architecture.vocab_size
        self._seed = seed
        model = build_model(
            preset.architecture,
            active_experts=cell.active_experts,
            seed=seed,
            seq_len=cell.seq_len,
        )
        self.model = _under_recipe(model, cell.recipe, has_experts=cell.experts is not None)
        self.model.train()
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        # Every probe starts from the same weights: routing follows them, memory follows routing.
        self._initial = [p.detach().clone() for p in self.trainable]
        self.start_over()

    def start_over(self) -> None:
        """Initial weights, no gradients, an optimizer without state: as in a fresh process."""
        with torch.no_grad():
            for parameter, initial in zip(self.trainable, self._initial, strict=True):
                parameter.copy_(initial)
                parameter.grad = None
        self.optimizer = torch.optim.AdamW(self.trainable, lr=LEARNING_RATE)

    def tokens(self, batch_size: int) -> torch.Tensor:
        """Random token ids (batch_size, seq_len), the same for every probe of a batch size."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + batch_size)
        shape = (batch_size, self._seq_len)
        return torch.randint(self._vocab_size, shape, generator=generator)

    def step(self, tokens: torch.Tensor) -> float:
        """One whole optimizer step on a batch.

        Returns:
            The loss, in nats per token.

        Raises:
            NotTrainingError: the loss is not a number.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        value = float(loss.detach())
        if not value < float("inf"):
            raise NotTrainingError(f"the loss is {value}: these steps train nothing")
        return value

    def tensors(self) -> list[torch.Tensor]:
        """Weights, 4-bit quantisation constants, buffers: what the model itself occupies."""
        found: list[torch.Tensor] = [*self.model.parameters(), *self.model.buffers()]
        for parameter in self.model.parameters():
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                found += [state.absmax, state.code, state.offset]
                found += [state.state2.absmax, state.state2.code]
        return found

    def parameters(self) -> ParameterCounts:
        """Logical parameters in the model as built; two 4-bit weights share a stored byte."""
        total = trainable = four_bit = 0
        for parameter in self.model.parameters():
            elements = parameter.numel()
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                elements = state.shape.numel()
                four_bit += elements
            total += elements
            trainable += elements if parameter.requires_grad else 0
        return ParameterCounts(total=total, trainable=trainable, four_bit=four_bit)


def _under_recipe(model: nn.Module, recipe: Recipe, *, has_experts: bool) -> nn.Module:
    dtype = DTYPES[recipe.precision]
    model.to(dtype)
    if recipe.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    if recipe.lora_rank is None:
        return model
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - see import_libraries

    if recipe.method == "qlora":
        _quantise_linears(model, dtype, keep="lm_head")
    config = LoraConfig(
        r=recipe.lora_rank,
        lora_alpha=2 * recipe.lora_rank,
        target_modules=ADAPTED_EXPERTS if has_experts else ADAPTED_DENSE,
        task_type="CAUSAL_LM",
    )
    # PEFT keeps adapters in fp32 unless told not to; the recipe says what precision to train in.
    return get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[no-any-return]


def _quantise_linears(module: nn.Module, dtype: torch.dtype, *, keep: str) -> None:
    """Replaces every linear layer but the head by its 4-bit NF4 form, doubly quantised (QLoRA)."""
    import bitsandbytes as bnb  # noqa: PLC0415 - see import_libraries

    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and name != keep:
            linear = bnb.nn.Linear4bit(
                child.in_features,
                child.out_features,
                bias=False,
                compute_dtype=dtype,
                compress_statistics=True,
                quant_type="nf4",
            )
            linear.weight = bnb.nn.Params4bit(
                child.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
            )
            setattr(module, name, linear.to(child.weight.device))
        else:
            _quantise_linears(child, dtype, keep=keep)
