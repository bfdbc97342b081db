"""Tracing process under an old stack (``stacks.py``): ``python child.py STACK WHEELS``."""

# ruff: noqa: E402 - torchao is hidden first; old libraries replace private functions
import __future__

import ast
import math
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from trials.child_process.bootstrap import HIDDEN, hide

hide(*HIDDEN)

import bitsandbytes
import torch
from torch import nn
from torch.optim import adam
from transformers.loss import loss_utils

from trials.models import weight_placement
from trials.models.fused_head import base_of
from trials.recipes.recipe import Recipe
from trials.simulation.tracing import fake_model, trace, tracing_worker
from trials.training.tasks.batch import TaskBatch

CHUNK = 128  # tokens of which LitGPT computes logits at once
KEPT: dict[int, int] = {}
"""Bytes of the storages that 4-bit products keep, by their addresses."""


def definitions(
    wheels: Path, wheel: str, module: str, names: set[str], namespace: dict[str, Any]
) -> dict[str, Any]:
    """Run the definitions of these names in a module of a wheel, and return the namespace.

    Args:
        wheels: folder of wheels.
        wheel: name and version at the start of the wheel's file name.
        module: path of the module in the wheel.
        names: functions and classes to define.
        namespace: other names that they use.
    """
    (path,) = wheels.glob(f"{wheel}-*.whl")
    with zipfile.ZipFile(path) as archive:
        tree = ast.parse(archive.read(module))
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    code = compile(
        tree, module, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True
    )
    exec(code, namespace)  # noqa: S102 - the library's own code
    return namespace


def litgpt(wheels: Path) -> None:
    """Replace head and loss by LitGPT's."""
    chunked_cross_entropy = definitions(
        wheels, "litgpt-0.4.0", "litgpt/utils.py", {"chunked_cross_entropy"}, {"torch": torch}
    )["chunked_cross_entropy"]

    def loss(model: nn.Module, batch: TaskBatch, recipe: Recipe) -> torch.Tensor:
        KEPT.clear()
        base: Any = base_of(model)
        hidden = base.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        head = base.get_output_embeddings()
        parts = [hidden] if recipe.method == "full" else hidden.split(CHUNK, dim=1)
        # What the loop's names still hold of the last micro-batch: its logits until those of this
        # one are there, its graph until its loss is. Allocated here, where nothing is freed before.
        logits: Any = [
            part.new_empty((*part.shape[:2], head.out_features), dtype=torch.float32)
            for part in parts
        ]
        graph = [torch.empty(size, dtype=torch.uint8) for size in KEPT.values()]
        in_half = [head(part) for part in parts]
        logits = [part.float() for part in in_half]
        del in_half
        logits[-1] = logits[-1][..., :-1, :]
        of_loss = logits[0] if recipe.method == "full" else logits
        loss = chunked_cross_entropy(of_loss, batch.labels[..., 1:])
        del graph
        tokens: Any = batch.tokens
        tokens.logits = logits  # they live as long as the batch
        return loss  # type: ignore[no-any-return]

    trace.task_loss = loss
    _leave_unchecked()


def litgpt_4bit(wheels: Path) -> None:
    """Replace head and loss by LitGPT's, and 4-bit layers by Lightning's with bitsandbytes 0.42."""
    litgpt(wheels)
    own = fake_model._four_bit

    def four_bit(plain: nn.Linear, recipe: Recipe) -> nn.Parameter:
        weight: Any = own(plain, recipe)
        weight.quant_state.dtype = torch.float16
        return weight  # type: ignore[no-any-return]

    def quantise_all(
        model: nn.Module,
        recipe: Recipe,
        quantise: Callable[[Any, nn.Linear, Recipe], None],
        _: weight_placement.QuantisedValues,
    ) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.__class__ = nn.Linear
        weight_placement._quantise_linears(model, recipe, keep=None, quantise=quantise)
        weight_placement._declare_quantised(model, recipe)

    product = definitions(
        wheels,
        "bitsandbytes-0.42.0",
        "bitsandbytes/autograd/_functions.py",
        {"MatMul4Bit"},
        {"torch": torch, "F": bitsandbytes.functional, "prod": math.prod},
    )["MatMul4Bit"]

    def matmul_4bit(
        inputs: torch.Tensor, weight: torch.Tensor, *, quant_state: Any, bias: Any = None
    ) -> torch.Tensor:
        if inputs.requires_grad:
            storage = inputs.untyped_storage()
            KEPT[storage._cdata] = storage.nbytes()
        return product.apply(inputs, weight.t(), None, bias, quant_state)  # type: ignore[no-any-return]

    fake_model._four_bit = four_bit
    fake_model.quantise_laid_out = quantise_all
    bitsandbytes.matmul_4bit = matmul_4bit


def _leave_unchecked() -> None:
    """Skip the check of a built model: the recipe does not describe the head of an old stack."""

    def unchecked(census: Any, *_: Any) -> None:
        for hook in census._hooks:
            hook.remove()

    fake_model.TracedCensus.check = unchecked  # type: ignore[method-assign]


def qwen_loss(_: Path) -> None:
    """Replace the loss by that of Qwen's model."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        shifted = logits[..., :-1, :].contiguous()
        targets = labels[..., 1:].contiguous().view(-1)
        return nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]).float(), targets)

    loss_utils.LOSS_MAPPING["ForCausalLM"] = loss


def _shifted_loss(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous().view(-1)
    return nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), targets)


def transformers_4_48(_: Path) -> None:
    """Replace the loss by that of transformers 4.48, whose model keeps the logits it cast."""
    loss_utils.LOSS_MAPPING["ForCausalLM"] = _shifted_loss


def transformers_4_45(_: Path) -> None:
    """Replace head and loss by those of transformers to 4.45, whose model casts the logits."""

    def loss(model: nn.Module, batch: TaskBatch, _: Recipe) -> torch.Tensor:
        base: Any = base_of(model)
        hidden = base.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        logits = base.get_output_embeddings()(hidden)
        if hasattr(base.config, "logits_scaling"):
            logits = logits / base.config.logits_scaling
        logits = logits.float()
        return _shifted_loss(logits, batch.labels)

    trace.task_loss = loss
    _leave_unchecked()


def qwen(wheels: Path) -> None:
    """Replace AdamW by that of PyTorch 2.0, and the loss by that of Qwen's model."""
    wheel, namespace = "torch-2.0.1", vars(import_module("torch.optim.optimizer")) | vars(math)
    namespace |= {"defaultdict": defaultdict, "no_grad": torch.no_grad, "torch": torch}
    grouping = {"_group_tensors_by_device_and_dtype"}
    definitions(wheels, wheel, "torch/utils/_foreach_utils.py", grouping, namespace)
    helpers = {"_get_value", "_stack_if_compiling", "_dispatch_sqrt"}
    namespace |= {"math": math, "is_compiling": lambda: False}
    definitions(wheels, wheel, "torch/optim/optimizer.py", helpers, namespace)
    name = "_multi_tensor_adamw"
    own = definitions(wheels, wheel, "torch/optim/adamw.py", {name}, namespace)[name]

    def update(
        *tensors: Any, has_complex: bool, decoupled_weight_decay: bool, **options: Any
    ) -> None:
        assert decoupled_weight_decay
        assert not has_complex
        own(*tensors, **options)

    adam._multi_tensor_adam = update
    qwen_loss(wheels)


STACKS = {
    "litgpt": litgpt,
    "litgpt-4bit": litgpt_4bit,
    "qwen": qwen,
    "qwen-loss": qwen_loss,
    "transformers-4.45": transformers_4_45,
    "transformers-4.48": transformers_4_48,
}

if __name__ == "__main__":
    STACKS[sys.argv.pop(1)](Path(sys.argv.pop(1)))
    tracing_worker.main()
