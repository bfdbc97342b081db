"""Properties of a built model, read from its modules and from the operators of one step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from trials.models.adapter_targets import ROUTER_LINEAR
from trials.models.experts import experts_in_use
from trials.models.fused_head import base_of, loss_in_use
from trials.models.liger_layers import liger_layers_in_use
from trials.models.mamba import mamba_in_use
from trials.models.weight_placement import decoder_layers, format_of, language_modules
from trials.records.built import Built, ParameterCounts
from trials.records.model import Model

# Parts of operator names that identify the kernels that ran.
IDENTIFYING = (
    "bitsandbytes",
    "causal_conv1d",
    "convolution",
    "flash_attn",
    "grouped_mm",
    "scaled_dot_product",
)
NORM = "aten::linalg_vector_norm"
HOST_COPY = "simulated::host_copy"
"""Name under which a trace reports an activation's copy to the host."""
PRODUCTS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm"),
    *("bitsandbytes::gemm_4bit", "bitsandbytes::int8_mixed_scaled_mm"),
)
MASK_DIMENSIONS = 4
SCORE_DIMENSIONS = 2  # sequences and scores; logits of a language model also have tokens


class StepCensus:
    """Census of one step: its kernels, its passes, and the layers that run again backward.

    Running a checkpointed layer again may skip the layer's own hooks, but not those of the modules
    in it. Passes alone do not show it: some families run a module several times in one pass.

    Args:
        model: model that runs the step; it has hooks until ``built`` is called.
        reference: the separate reference model, likewise; absent without one.
    """

    def __init__(self, model: nn.Module, reference: nn.Module | None = None) -> None:
        self._model = model
        self._layers = decoder_layers(model)
        self._is_on_gpu = next(model.parameters()).device.type != "cpu"
        self._kernels: set[str] = set()
        self._product_dtypes: set[str] = set()
        self._passes = self._sequences = 0
        self._reference: str | None = None
        self._scores_itself = False
        self._recomputed: set[int] = set()
        self._loss: str | None = ""
        self._scores = 0
        self._router_loss = False
        self._offloaded = 0
        self._liger_layers: tuple[str, ...] = ()
        self._has_blocks: list[bool] = []  # of each call of a layer
        self._hooks = [
            model.register_forward_pre_hook(self._pass, with_kwargs=True),
            model.register_forward_hook(self._note_loss),
        ]
        if reference is not None:
            self._hooks.append(reference.register_forward_pre_hook(self._pass_of_reference))
        for index, layer in enumerate(self._layers):
            recomputed = self._noting_recomputed(index)
            self._hooks.append(layer.register_forward_pre_hook(self._note_mask, with_kwargs=True))
            self._hooks += [c.register_forward_pre_hook(recomputed) for c in layer.children()]

    def note(self, operator: str, result: Any) -> None:
        """Note an operator that ran, by its full name, and the dtype of a matrix product."""
        name = operator.partition(".")[0]
        # Clipping ends in the norm of all gradients, a number; DoRA takes norms of columns.
        clips = name == NORM and not result.dim()
        if clips or any(part in name for part in IDENTIFYING):
            self._kernels.add(name)
        # DistributedDataParallel copies the order of its buckets, whole numbers, to the host.
        if name == HOST_COPY or (
            name == "aten::copy_"
            and self._is_on_gpu
            and result.device.type == "cpu"
            and result.is_floating_point()
        ):
            self._offloaded += 1
        if name in PRODUCTS:
            product = result[0] if isinstance(result, (tuple, list)) else result
            self._product_dtypes.add(str(product.dtype).removeprefix("torch."))

    def built(self, facts: Model, optimizer: str) -> Built:
        """Properties of the model after the step.

        Args:
            facts: configuration of the model.
            optimizer: name of the stepper that ran the step.
        """
        for hook in self._hooks:
            hook.remove()
        config: Any = self._model.config
        return Built(
            parameters=_parameters(self._model),
            dtypes=_dtypes(self._model),
            quantisation=_formats(self._model),
            adapters=sum(map(_has_adapter, self._model.modules())),
            attention=str(config._attn_implementation) if facts.has_attention else None,  # noqa: SLF001 - no other name
            experts=experts_in_use(self._model),
            mamba=mamba_in_use(self._kernels) if facts.has_mamba else None,
            checkpointed_layers=len(self._recomputed),
            layers=len(self._layers),
            optimizer=optimizer,
            kernels=tuple(sorted(self._kernels)),
            product_dtypes=tuple(sorted(self._product_dtypes)),
            micro_batches=self._passes,
            loss=self._loss,
            scores=self._scores,
            offloaded_activations=self._offloaded,
            liger_layers=self._liger_layers,
            router_loss=self._router_loss,
            sequences=self._sequences,
            reference=self._reference,
            scores_itself=self._scores_itself,
            separates_examples=bool(self._has_blocks and all(self._has_blocks))
            or any("varlen" in kernel for kernel in self._kernels),
        )

    def _pass(self, model: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._passes += 1
            self._sequences = len(kwargs["input_ids"])
        elif any(getattr(module, "disable_adapters", None) is True for module in model.modules()):
            self._reference = "adapter-off"
        else:
            self._scores_itself = True

    def _pass_of_reference(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            self._reference = "separate"

    def _note_mask(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        masks = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        self._has_blocks.append(any(_separates(t) for t in masks if t.dim() == MASK_DIMENSIONS))

    def _note_loss(self, _model: nn.Module, _inputs: object, output: Any) -> None:
        if torch.is_grad_enabled():
            # The loss of a task may be computed from the model's logits, outside the model.
            is_own = output.loss is not None or "logits" not in output
            self._loss = loss_in_use(output.loss) if is_own else "full-logits"
            if not is_own and output.logits.dim() == SCORE_DIMENSIONS:
                self._loss, self._scores = None, output.logits.shape[-1]
            self._liger_layers = liger_layers_in_use(self._model)
            router_loss = getattr(output, "aux_loss", None)
            self._router_loss |= router_loss is not None and router_loss.requires_grad

    def _noting_recomputed(self, layer: int) -> Callable[..., None]:
        def note(*_: object) -> None:
            if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - as torch.utils.checkpoint does
                self._recomputed.add(layer)

        return note


def _has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") or hasattr(module, "oft_R")


def _separates(mask: torch.Tensor) -> bool:
    """Whether a mask (batch, heads, queries, keys) hides the first token from the last one.

    A fake tensor has no values: there, a mask as such counts.
    """
    if isinstance(mask, FakeTensor):
        return True
    score = mask[0, 0, -1, 0].item()
    return score is False or score < -1


def _parameters(model: nn.Module) -> ParameterCounts:
    """Logical parameters of the built model; two 4-bit weights share a stored byte."""
    total = trainable = four_bit = eight_bit = 0
    for parameter in model.parameters():
        elements = getattr(parameter, "ds_numel", parameter.numel())  # in DeepSpeed's shards
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            elements = state.shape.numel()
            four_bit += elements
        elif format_of(parameter) == "int8":
            eight_bit += elements
        total += elements
        trainable += elements if parameter.requires_grad else 0
    return ParameterCounts(total=total, trainable=trainable, four_bit=four_bit, eight_bit=eight_bit)


def _dtypes(model: nn.Module) -> tuple[str, ...]:
    # bitsandbytes casts biases to the inputs' dtype, which a vision tower's layers have.
    own = (
        (f"{name}.{key}", parameter)
        for name, part in language_modules(model)
        for key, parameter in part.named_parameters(recurse=False)
    )
    # Some classes hold routers in fp32, whatever the dtype of the others.
    base: Any = base_of(model)
    kept = tuple(getattr(base, "_keep_in_fp32_modules_strict", None) or ())
    chosen = (p for name, p in own if not any(f".{part}." in _plain_name(name) for part in kept))
    plain = (p for p in chosen if format_of(p) is None)
    return tuple(sorted({str(p.dtype).removeprefix("torch.") for p in plain}))


def _plain_name(name: str) -> str:
    """Name that a parameter has without layers for adapters around it, with a dot at both ends."""
    return f".{name}.".replace(f".{ROUTER_LINEAR}.", ".").replace(".base_layer.", ".")


def _formats(model: nn.Module) -> tuple[str, ...]:
    formats = {format_of(parameter) for parameter in model.parameters()}
    return tuple(sorted(name for name in formats if name is not None))
