"""Training code: a model under a recipe, and one optimizer step."""

import contextlib
import gc
import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from trials.devices.storages import OperatorMode, local_tensor
from trials.models.activation_offloading import activation_offloading
from trials.models.build import build_model, stock_model
from trials.models.fused_head import REFERENCE_OUTPUTS, TRAINED_OUTPUTS, fuse_head
from trials.models.liger_layers import apply_liger_layers
from trials.models.parameter_count import implied_parameters
from trials.models.reference import reference_recipe, set_evaluating, without_dropout
from trials.models.weight_placement import (
    DTYPES,
    Destination,
    autocast_to,
    quantisation_constants,
)
from trials.ranks.rank import Rank, build_destination
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.built import Built, ParameterCounts
from trials.records.cell import Cell
from trials.records.model import Model
from trials.training.census import StepCensus
from trials.training.compilation import (
    compile_model,
    compiled_graphs,
    forget_graphs,
    uncompiled,
)
from trials.training.loss import model_inputs
from trials.training.optimizers.construction import make_stepper
from trials.training.optimizers.deepspeed_stepper import deepspeed_library
from trials.training.optimizers.stepper import Stepper
from trials.training.tasks.batch import TaskBatch
from trials.training.tasks.grpo import alternating_advantages
from trials.training.tasks.losses import LossOf, precomputed_log_probs, step_losses

RANKS_APART = 10**15  # between the seeds of two ranks' tokens
MicroBatch = tuple[torch.Tensor, torch.Tensor | None]
SEVERAL = 2  # micro-batches that show that gradients accumulate


def import_libraries(recipe: Recipe, layout: Parallel | None = None) -> None:
    """Import libraries beyond torch and transformers; each takes seconds.

    Args:
        recipe: recipe that needs them.
        layout: layout of ranks on CPUs, whose parent imports what they need; absent for none.
    """
    if layout is not None and layout.zero_stage is not None:
        with contextlib.suppress(ImportError):  # a rank says what to install
            deepspeed_library("cpu")
    if recipe.method != "full":
        importlib.import_module("peft")
    if recipe.method == "qlora" or recipe.optimizer.startswith(("paged", "adamw_8bit")):
        importlib.import_module("bitsandbytes")
        # Every product of LLM.int8 would warn that it casts its inputs to fp16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def model_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors of a model itself: weights, constants of quantised weights, buffers."""
    return [*model.parameters(), *model.buffers(), *quantisation_constants(model)]


def implied_counts(cell: Cell, model: Model) -> ParameterCounts:
    """Parameter counts that the recipe implies for the stock model; nothing is built."""
    return implied_parameters(stock_model(model, cell.recipe, cell.active_experts), cell.recipe)


def least_weight_bytes(recipe: Recipe, implied: ParameterCounts) -> int:
    """Bytes of the weights alone, without the constants of quantised ones: less than any step."""
    quantised = implied.four_bit + implied.eight_bit
    plain = (implied.total - quantised) * DTYPES[recipe.base_dtype].itemsize
    return plain + implied.eight_bit + implied.four_bit // 2


class NotTrainingError(RuntimeError):
    """The loss of a step is not finite."""


class FineTuning:
    """A model under a recipe, its optimizer and its data, on one device.

    Attributes:
        model: the model.
        reference: the separate reference model; absent without one.
        trainable: trained parameters.
        stepper: runs optimizer steps.
        on_loss: called after each forward pass, before its backward pass.

    Args:
        cell: cell to fine-tune.
        model: the model of the cell's name.
        device: device that runs it.
        seed: seed of weights and tokens, which are equal in every process.
        rank: this process among those that train the model; absent where it is alone. The cell is
            that of one rank.
    """

    def __init__(
        self, cell: Cell, model: Model, *, device: torch.device, seed: int, rank: Rank | None = None
    ) -> None:
        self._cell = cell
        self._facts = model
        self._device = device
        self._seed = seed
        self._rank = rank
        self._build()
        self.reference: nn.Module | None = None
        if cell.recipe.reference == "separate":
            recipe = reference_recipe(cell.recipe)
            self.reference = self._make(recipe, REFERENCE_OUTPUTS, Destination(device))
            set_evaluating(self.reference)
        self.on_loss: Callable[[], None] = lambda: None

    def _build(self) -> None:
        """Make the model that is trained, and its stepper."""
        recipe = self._cell.recipe
        to = build_destination(self._rank, self._device, recipe, self._cell.weights)
        self.model = self._make(recipe, TRAINED_OUTPUTS[recipe.task], to)
        if recipe.liger_kernels:
            apply_liger_layers(self.model)
        if self._rank is not None:
            self._rank.shard(self.model, recipe, to)
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        # Every probe starts from the same weights, since routing depends on weights and memory on
        # routing. The copy is on the host, outside the measured memory.
        by_deepspeed = self._rank is not None and self._rank.parallel.zero_stage is not None
        own = [] if by_deepspeed else [local_tensor(p.detach()) for p in self.trainable]
        self._initial = [tensor.to("cpu", copy=True) for tensor in own]
        compile_model(self.model, recipe.compile)
        self._offloading = activation_offloading(self.model, recipe)
        self.stepper = self._new_stepper()

    def _make(self, recipe: Recipe, outputs: tuple[str, ...], to: Destination) -> nn.Module:
        model = build_model(
            self._facts,
            recipe,
            active_experts=self._cell.active_experts,
            weights=self._cell.weights,
            destination=to,
            seed=self._seed,
        )
        without_dropout(model, recipe)
        fuse_head(model, recipe.loss, outputs)
        return model

    def start_over(self) -> None:
        """Restore initial weights, drop gradients and optimizer state, as in a fresh process."""
        self.stepper.close()
        if not self._initial:  # DeepSpeed has put its own tensors in place
            del self.model, self.trainable, self.stepper
            gc.collect()  # hooks are in reference cycles
            torch.manual_seed(self._seed)
            self._build()
            return
        with torch.no_grad():
            for parameter, initial in zip(self.trainable, self._initial, strict=True):
                local_tensor(parameter).copy_(initial)
                parameter.grad = None
        forget_graphs(self._cell.recipe.compile)
        torch.manual_seed(self._seed)  # dropout draws from it
        self.stepper = self._new_stepper()

    def _new_stepper(self) -> Stepper:
        return make_stepper(
            self.model,
            self.trainable,
            self._cell.recipe,
            self._device,
            self._offloading,
            parallel=None if self._rank is None else self._rank.parallel,
        )

    def tokens(self, batch_size: int, draw: int = 0) -> torch.Tensor:
        """Random token ids of one step, equal for every probe of a size and draw on a rank.

        Returns:
            Token ids (micro-batches x batch_size x sequences of an example, seq_len).
        """
        place = 0 if self._rank is None else self._rank.parallel.data_rank(self._rank.number)
        seed = (self._seed * 1_000_003 + batch_size) * 1_009 + draw + place * RANKS_APART
        generator = torch.Generator().manual_seed(seed)
        examples = self._cell.recipe.micro_batches(batch_size) * batch_size
        shape = (examples * self._cell.recipe.sequences, self._cell.seq_len)
        return torch.randint(self._facts.vocab_size, shape, generator=generator).to(self._device)

    @property
    def sequences(self) -> int:
        """Sequences of an example."""
        return self._cell.recipe.sequences

    def batch(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> TaskBatch:
        """Batch of a step.

        Args:
            tokens: (sequences, length) token ids.
            labels: (sequences, length) token ids, -100 for tokens without a loss; absent for
                ``tokens``.
        """
        return TaskBatch(
            tokens,
            tokens if labels is None else labels,
            self.reference,
            precomputed_log_probs(self._cell.recipe, len(tokens), self._device),
            alternating_advantages(self._cell.recipe, len(tokens), self._device),
        )

    def step(self, batch: torch.Tensor | TaskBatch, *, micro_batches: int = 1) -> float:
        """Run one whole optimizer step on a batch.

        Args:
            batch: batch, or token ids (sequences, length) that all have a loss.
            micro_batches: parts of the batch whose gradients accumulate.

        Returns:
            Loss, of ``sft`` in nats per token. Reading it waits for the device, as a loop that
            logs does.

        Raises:
            NotTrainingError: the loss is not finite.
        """
        if isinstance(batch, torch.Tensor):
            batch = self.batch(batch)
        return self._step(step_losses(batch, self._cell.recipe, micro_batches))

    def step_of(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Run one whole optimizer step on micro-batches of different lengths.

        Args:
            micro_batches: token ids (sequences, length) of each, which all have a loss, and their
                mask, absent without padding. They are copied to the device one after another.

        Returns:
            Sum of their losses.

        Raises:
            NotTrainingError: as in ``step``.
        """
        held: list[TaskBatch] = []  # a micro-batch stays until the next one comes
        return self._step(partial(self._copied_loss, held, part) for part in micro_batches)

    def _copied_loss(self, held: list[TaskBatch], part: MicroBatch, model: nn.Module) -> Any:
        held.clear()
        tokens, mask = part
        batch = self.batch(tokens.to(self._device, copy=True))
        mask = None if mask is None else mask.to(self._device, copy=True)
        held.append(replace(batch, mask=mask))
        del batch, mask
        (loss_of,) = step_losses(held[0], self._cell.recipe, 1)
        return loss_of(model)

    def _step(self, losses: Iterable[LossOf]) -> float:
        value = self.stepper.step(*(partial(self._loss, loss_of) for loss_of in losses))
        if not value < float("inf"):
            raise NotTrainingError(f"the loss is {value}: these steps train nothing")
        return value

    def _loss(self, loss_of: LossOf, model: nn.Module) -> torch.Tensor:
        loss = loss_of(model)
        self.on_loss()
        return loss

    def forward(self, tokens: torch.Tensor) -> None:
        """Run a forward pass without gradients, in the precision of a step."""
        with torch.no_grad(), autocast_to(self._cell.recipe.autocast, self._device.type):
            self.model(**model_inputs(tokens, self._cell.recipe))

    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the model itself and of a separate reference (``model_tensors``)."""
        models = [self.model, *([] if self.reference is None else [self.reference])]
        return [tensor for model in models for tensor in model_tensors(model)]

    def implied(self) -> ParameterCounts:
        """Parameter counts that the recipe implies for the stock model of transformers."""
        return implied_counts(self._cell, self._facts)

    def built(self) -> Built:
        """Properties of the built model. It runs one step of micro-batches of one example."""
        return _built(self, self._cell, self._facts)


def _built(tuning: FineTuning, cell: Cell, model: Model) -> Built:
    census = StepCensus(tuning.model, tuning.reference)
    recipe = cell.recipe
    micro_batches = min(recipe.micro_batches(1), SEVERAL)
    tokens = tuning.tokens(1)[: micro_batches * recipe.sequences]
    step = partial(tuning.step, tokens, micro_batches=micro_batches)
    with _Watched(census), uncompiled(recipe.compile):
        step()
    built = census.built(model, tuning.stepper.name)
    built = built.model_copy(update=compiled_graphs(step, recipe.compile))
    tuning.start_over()
    return built


class _Watched(OperatorMode):
    """Reports every operator of a step to a census."""

    def __init__(self, census: StepCensus) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._census = census

    def note_result(self, func: Any, args: tuple[Any, ...], result: object) -> None:  # noqa: ARG002 - as of every mode
        """Report an operator."""
        self._census.note(func.name(), result)
