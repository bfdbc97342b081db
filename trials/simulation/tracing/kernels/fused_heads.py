"""Simulated heads fused with the loss, by the buffers and work of the kernels that a GPU would run.

Sources: TRL 1.16.0, ``trl/trainer/utils.py`` (``add_fused_lm_head``) and
``trl/kernels/chunked_logprob.py``; liger-kernel 0.8.5, ``ops/fused_linear_cross_entropy.py``;
cut-cross-entropy 25.1.1, ``cce.py``, ``cce_lse_forward.py`` and ``cce_backward.py``.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from trials.models.fused_head import (
    IGNORED,
    HeadLoss,
    HeadOutput,
    base_of,
    check_adapters,
    check_head,
    fuse_head,
    patch_head,
)
from trials.recipes.fields import WEIGHTED, Loss
from trials.simulation.recording import OperatorClass, Rate
from trials.simulation.tracing.operator_costs import (
    RATES,
    DeclaredKernel,
    Described,
    Tile,
    declare,
    moved_bytes,
    touched_bytes,
)

TILE_ROWS, TILE_COLUMNS = 4096, 32_768  # TRL: tokens and vocabulary of a tile of logits


def give_head(
    model: nn.Module, loss: Loss | None, target: Literal["cuda", "cpu"], outputs: tuple[str, ...]
) -> None:
    """Give a model the fused head of a loss as the target device runs it, in place.

    Args:
        model: causal language model, with or without adapters; or a reward model.
        loss: loss of the recipe; None for a reward model.
        target: device whose kernels run.
        outputs: what ``chunked`` computes for each token; on a GPU always the same few bytes.

    Raises:
        ImportError: for the CPU, the package of the loss is not installed.
        KernelError: the loss does not support the model's head.
    """
    if target == "cpu" or loss in WEIGHTED:
        fuse_head(model, loss, outputs)
        return
    if loss is None or loss == "full-logits":
        return
    base = base_of(model)
    check_adapters(base, loss)
    if loss != "chunked":
        check_head(base, loss)
    patch_head(base, HEADS[loss])


def _dtype(hidden: Tensor) -> torch.dtype:
    """Dtype of products."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return hidden.dtype


def _product(dtype: torch.dtype, rows: float, inner: float, columns: float) -> Described:
    """Costs of a matrix product in one dtype."""
    moved = dtype.itemsize * (rows * inner + inner * columns + rows * columns)
    numbers = (moved, 2.0 * rows * inner * columns, rows, inner, columns, 1.0, 1.0)
    return OperatorClass.MATRIX_PRODUCT, RATES.get(dtype, Rate.FP32), numbers


def _memory(moved: float) -> Described:
    return OperatorClass.MEMORY, Rate.BF16, (float(moved), 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def _cast_bytes(tensor: Tensor, dtype: torch.dtype, elements: int | None = None) -> int:
    """Bytes of a copy in another dtype of a tensor or some of its elements; 0 in its own dtype."""
    count = tensor.numel() if elements is None else elements
    return 0 if tensor.dtype == dtype else count * dtype.itemsize


def _labelled(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the tokens with a loss: all of them, as in random tokens."""
    return tuple(mask.new_empty(mask.numel(), dtype=torch.int64) for _ in range(2))  # type: ignore[return-value]


declare(
    "labelled(Tensor mask) -> (Tensor, Tensor)",
    _labelled,
    DeclaredKernel(lambda args, result: [_memory(moved_bytes(args, result))]),
)


def _chunked_loss(
    hidden: Tensor,
    weight: Tensor,  # noqa: ARG001 - the operator's signature
    targets: Tensor,  # noqa: ARG001 - as above
    dtype: torch.dtype,  # noqa: ARG001 - as above
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, hits of the best token and normalisers, of each token."""
    rows = hidden.shape[0]
    log_probs, entropy, log_z = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(3))
    return log_probs, entropy, hidden.new_empty(rows, dtype=torch.bool), log_z


def _chunked_loss_backward(  # noqa: PLR0913, PLR0917 - the operator's signature
    hidden: Tensor,
    weight: Tensor,
    grad: Tensor,  # noqa: ARG001 - as above
    log_z: Tensor,  # noqa: ARG001 - as above
    dtype: torch.dtype,  # noqa: ARG001 - as above
    with_weight: bool,  # noqa: FBT001 - as above
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), _gradient_of(weight, with_weight)


def _gradient_of(weight: Tensor, is_trained: bool) -> Tensor:  # noqa: FBT001 - as above
    return torch.empty_like(weight) if is_trained else weight.new_empty(0)


def _chunked_tile(args: Sequence[Any]) -> Tile:
    """Tile of logits, and hidden states of its tokens if they are cast."""
    hidden, dtype = args[0], args[3] if len(args) == 4 else args[4]
    rows, width = hidden.shape
    row_bytes = TILE_COLUMNS * dtype.itemsize + _cast_bytes(hidden, dtype, width)
    return Tile(row_bytes, rows, most_rows=TILE_ROWS)


def _chunk_cast(weight: Tensor, dtype: torch.dtype) -> int:
    """Bytes of the weights of a tile's vocabulary, if they are cast."""
    vocabulary, width = weight.shape
    return _cast_bytes(weight, dtype, min(vocabulary, TILE_COLUMNS) * width)


def _chunked_workspace(args: Sequence[Any]) -> int:
    """Seven running statistics of each token; the cast weights."""
    hidden, weight, _, dtype = args
    return int(7 * 4 * hidden.shape[0] + _chunk_cast(weight, dtype))


def _chunked_backward_workspace(args: Sequence[Any]) -> int:
    """Sums of the gradients in fp32, where these are not; their factors; the cast weights."""
    hidden, weight, _, _, dtype, with_weight = args
    sums = _cast_bytes(hidden, torch.float32)
    if with_weight:
        sums += _cast_bytes(weight, torch.float32)
    return int(sums + 4 * hidden.shape[0] + _chunk_cast(weight, dtype))


def _chunked_work(args: Sequence[Any], result: Any) -> list[Described]:
    hidden, weight, _, dtype = args
    rows, (vocabulary, width) = hidden.shape[0], weight.shape
    cast = sum(_cast_bytes(tensor, dtype) for tensor in (hidden, weight))
    logits = rows * vocabulary * dtype.itemsize
    return [
        _product(dtype, rows, width, vocabulary),
        _memory(logits + cast + moved_bytes((), result)),
    ]


def _chunked_backward_work(args: Sequence[Any], result: Any) -> list[Described]:
    hidden, weight, _, _, dtype, with_weight = args
    rows, (vocabulary, width) = hidden.shape[0], weight.shape
    cast = sum(_cast_bytes(tensor, dtype) for tensor in (hidden, weight))
    logits = rows * vocabulary * dtype.itemsize
    # Each tile reads and writes its part of the sums in fp32.
    sums = 8.0 * rows * width * math.ceil(vocabulary / TILE_COLUMNS)
    sums += 8.0 * vocabulary * width * rows / TILE_ROWS if with_weight else 0
    return [
        _product(dtype, rows, width, vocabulary),
        _memory(2 * logits + cast + sums + moved_bytes((), result)),
        _product(dtype, rows, vocabulary, width),
        *([_product(dtype, vocabulary, rows, width)] if with_weight else []),
    ]


declare(
    "chunked_loss(Tensor hidden, Tensor weight, Tensor targets, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _chunked_loss,
    DeclaredKernel(_chunked_work, _chunked_workspace, _chunked_tile),
)
declare(
    "chunked_loss_backward(Tensor hidden, Tensor weight, Tensor grad, Tensor log_z, "
    "ScalarType dtype, bool with_weight) -> (Tensor, Tensor)",
    _chunked_loss_backward,
    DeclaredKernel(_chunked_backward_work, _chunked_backward_workspace, _chunked_tile),
)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.dtype = _dtype(hidden)
        *outputs, log_z = torch.ops.simulated.chunked_loss(hidden, weight, targets, ctx.dtype)
        ctx.save_for_backward(hidden, weight, targets, log_z, outputs[1])
        ctx.mark_non_differentiable(outputs[2])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, _, log_z, _ = ctx.saved_tensors
        with_weight = ctx.needs_input_grad[1]
        for_hidden, for_weight = torch.ops.simulated.chunked_loss_backward(
            hidden, weight, grads[0], log_z, ctx.dtype, with_weight
        )
        return for_hidden, for_weight if with_weight else None, None


def _chunked(hidden: Tensor, head: nn.Linear, labels: Tensor, softcap: float | None) -> HeadOutput:
    del softcap  # the kernel's own
    labels, hidden = labels[:, 1:], hidden[:, :-1]
    mask = labels != IGNORED
    at = torch.ops.simulated.labelled(mask)
    log_probs, *_ = _ChunkedLogProbs.apply(hidden[at], head.weight, labels[at])  # type: ignore[no-untyped-call]
    loss = -log_probs.sum() / mask.sum().clamp(min=1)
    return HeadOutput(loss=loss, log_probs=log_probs.view(mask.shape))


def _liger_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,  # noqa: ARG001 - the operator's signature
    dtype: torch.dtype,  # noqa: ARG001 - as above
    with_weight: bool,  # noqa: FBT001 - as above
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and both gradients, which the forward pass makes."""
    loss = hidden.new_empty((), dtype=torch.float32)
    return loss, torch.empty_like(hidden), _gradient_of(weight, with_weight)


def _liger_tile(args: Sequence[Any]) -> Tile:
    """Logits of a chunk of tokens; their hidden states and gradients if these are cast."""
    hidden, weight, _, dtype, _ = args
    (rows, width), vocabulary = hidden.shape, weight.shape[0]
    row_bytes = vocabulary * dtype.itemsize + 2 * _cast_bytes(hidden, dtype, width)
    return Tile(row_bytes, rows, parts=math.ceil(vocabulary / width))


def _liger_workspace(args: Sequence[Any]) -> int:
    """Loss and mask of each token; casts of the weights; in fp32 a chunk's gradient of these."""
    hidden, weight, _, dtype, with_weight = args
    summed = 4 * weight.numel() if with_weight and dtype == torch.float32 else 0
    return int(5 * hidden.shape[0] + 2 * _cast_bytes(weight, dtype) + summed)


def _liger_work(args: Sequence[Any], result: Any) -> list[Described]:
    hidden, weight, _, dtype, with_weight = args
    rows, (vocabulary, width) = hidden.shape[0], weight.shape
    chunks = math.ceil(vocabulary / width)
    logits = rows * vocabulary * dtype.itemsize
    # Every chunk reads and writes the whole gradient of the weights.
    sums = 2.0 * chunks * touched_bytes(weight) if with_weight else 0
    return [
        _product(dtype, rows, width, vocabulary),
        # Two passes over the logits; the second replaces them by their gradient.
        _memory(3 * logits + sums + moved_bytes((), result)),
        _product(dtype, rows, vocabulary, width),
        *([_product(dtype, vocabulary, rows, width)] if with_weight else []),
    ]


declare(
    "liger_loss(Tensor hidden, Tensor weight, Tensor labels, ScalarType dtype, bool with_weight) "
    "-> (Tensor, Tensor, Tensor)",
    _liger_loss,
    DeclaredKernel(_liger_work, _liger_workspace, _liger_tile),
)


class _LigerLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss, *gradients = torch.ops.simulated.liger_loss(
            hidden, weight, labels, _dtype(hidden), ctx.needs_input_grad[1]
        )
        ctx.save_for_backward(*gradients)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for_hidden, for_weight = (saved.mul_(grads[0]) for saved in ctx.saved_tensors)
        return for_hidden, for_weight if ctx.needs_input_grad[1] else None, None


def _liger(hidden: Tensor, head: nn.Linear, labels: Tensor, softcap: float | None) -> HeadOutput:
    del softcap  # the kernel's own
    count = (labels[:, 1:] != IGNORED).sum()
    shifted = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous().view(-1)
    flat = hidden.view(-1, hidden.shape[-1])
    loss = _LigerLoss.apply(flat, head.weight, shifted) / count  # type: ignore[no-untyped-call]
    return HeadOutput(loss=loss)


def _cce_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,  # noqa: ARG001 - the operator's signature
    labelled: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and normalisers of the labelled tokens, and the mean logit of each word."""
    rows, words = labelled.shape[0], weight.shape[0]
    sizes = (rows, rows, words)
    return tuple(hidden.new_empty(size, dtype=torch.float32) for size in sizes)  # type: ignore[return-value]


def _cce_loss_backward(  # noqa: PLR0913, PLR0917 - the operator's signature
    hidden: Tensor,
    weight: Tensor,
    grad: Tensor,  # noqa: ARG001 - as above
    lse: Tensor,  # noqa: ARG001 - as above
    logit_average: Tensor,  # noqa: ARG001 - as above
    with_weight: bool,  # noqa: FBT001 - as above
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), _gradient_of(weight, with_weight)


def _cce_work(args: Sequence[Any], result: Any) -> list[Described]:
    hidden, weight, _, labelled = args
    vocabulary, width = weight.shape
    product = _product(hidden.dtype, labelled.shape[0], width, vocabulary)
    return [_without_logits(product, moved_bytes(args, result), 1)]


def _cce_backward_work(args: Sequence[Any], result: Any) -> list[Described]:
    """Costs of the logits and both gradients; no block of small gradients is skipped."""
    hidden, weight, _, lse, _, with_weight = args
    vocabulary, width = weight.shape
    product = _product(hidden.dtype, lse.shape[0], width, vocabulary)
    return [_without_logits(product, moved_bytes(args, result), 3 if with_weight else 2)]


def _without_logits(product: Described, moved: float, products: int) -> Described:
    """One kernel that computes several products and keeps their results on the chip."""
    work, peak, (_, flops, *shape, _, launches) = product
    return work, peak, (moved, products * flops, *shape, float(products), launches)


def _cce_backward_workspace(args: Sequence[Any]) -> int:
    """Locks of tokens and words, the words' order, the weights' gradient before its cast."""
    hidden, weight, _, lse, _, with_weight = args
    summed = _cast_bytes(weight, hidden.dtype) if with_weight else 0
    return int(4 * lse.shape[0] + 8 * weight.shape[0] + summed)


declare(
    "cce_loss(Tensor hidden, Tensor weight, Tensor targets, Tensor labelled) "
    "-> (Tensor, Tensor, Tensor)",
    _cce_loss,
    DeclaredKernel(_cce_work),
)
declare(
    "cce_loss_backward(Tensor hidden, Tensor weight, Tensor grad, Tensor lse, "
    "Tensor logit_average, bool with_weight) -> (Tensor, Tensor)",
    _cce_loss_backward,
    DeclaredKernel(_cce_backward_work, _cce_backward_workspace),
)


class _CceLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, labelled: Tensor
    ) -> Tensor:
        losses, lse, average = torch.ops.simulated.cce_loss(hidden, weight, targets, labelled)
        ctx.save_for_backward(hidden, weight, lse, targets, labelled, average)
        return losses.mean()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, lse, _, _, average = ctx.saved_tensors
        with_weight = ctx.needs_input_grad[1]
        for_hidden, for_weight = torch.ops.simulated.cce_loss_backward(
            hidden, weight, grads[0], lse, average, with_weight
        )
        return for_hidden, for_weight if with_weight else None, None, None


def _cce(hidden: Tensor, head: nn.Linear, labels: Tensor, softcap: float | None) -> HeadOutput:
    del softcap  # the kernel's own
    hidden = hidden.to(_dtype(hidden)).flatten(0, -2)
    labelled, _ = torch.ops.simulated.labelled(labels[:, 1:] != IGNORED)
    loss = _CceLoss.apply(hidden, head.weight, labels.flatten(), labelled)  # type: ignore[no-untyped-call]
    return HeadOutput(loss=loss)


HEADS: dict[Loss, HeadLoss] = {"chunked": _chunked, "liger": _liger, "cce": _cce}
