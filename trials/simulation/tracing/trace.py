"""Trace of one step of a cell: model, recipe and step of the real run, without its memory."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trials.models.build import disable_checkpointing
from trials.models.fused_head import REFERENCE_OUTPUTS, TRAINED_OUTPUTS
from trials.models.weight_placement import DTYPES, decoder_layers
from trials.records.cell import Cell
from trials.records.model import Model
from trials.simulation.recording import (
    BACKWARD,
    FORWARD,
    HEADS,
    Held,
    Recording,
    Segment,
    with_updates_of,
)
from trials.simulation.tracing.fake_model import (
    FLASH,
    FakePlace,
    TracedCensus,
    check_positions,
    fake_model,
    masks_as_ever,
    untraceable,
    without_window,
)
from trials.simulation.tracing.held_storages import held_storages, shards_on_host
from trials.simulation.tracing.host_copies import HostLink, simulated_offloading
from trials.simulation.tracing.kernels.eight_bit_products import install_eight_bit_products
from trials.simulation.tracing.kernels.equal_images import traced_images
from trials.simulation.tracing.kernels.fused_heads import give_head
from trials.simulation.tracing.kernels.fused_kernels import as_on_gpu, flash_by_sdpa
from trials.simulation.tracing.kernels.liger_layers import give_liger_layers, liger_rope
from trials.simulation.tracing.kernels.mamba_kernels import install_simulated_mamba
from trials.simulation.tracing.kernels.packed_attention import varlen_by_simulation
from trials.simulation.tracing.layer_repetition import RouterLoops, mark_passes
from trials.simulation.tracing.ranks.fake_rank import FakeRank
from trials.simulation.tracing.ranks.rank_tracer import RankTracer
from trials.simulation.tracing.ranks.zero_rank import ZeroRank
from trials.simulation.tracing.ranks.zero_step import trace_engine
from trials.simulation.tracing.shape_rules import CPU, GPU_BESIDE_HOST
from trials.simulation.tracing.tracer import Effects, Tracer, UntraceableError
from trials.simulation.tracing.updates.fake_optimizers import simulated_optimizer
from trials.simulation.tracing.updates.shared_updates import Updates, with_shared_updates
from trials.simulation.tracing.updates.untraced_parameters import UntracedParameters
from trials.simulation.tracing.watchdog import innermost_module
from trials.training.finetune import import_libraries, model_tensors
from trials.training.optimizers.construction import parameter_groups
from trials.training.optimizers.stepper import DeviceStepper
from trials.training.tasks.batch import TaskBatch
from trials.training.tasks.grpo import alternating_advantages
from trials.training.tasks.images import image_inputs, images_for
from trials.training.tasks.losses import precomputed_log_probs, task_loss

Target = Literal["cuda", "cpu"]
Shares = Callable[[torch.Tensor], int]


@dataclass(frozen=True, slots=True)
class Traced:
    """One traced step, as in ``StepTrace``."""

    recording: Recording
    held: Held
    copies: int
    host_bytes: tuple[int, ...] = ()


class TraceableCell:
    """A cell whose steps can be traced, at any batch size.

    Args:
        cell: cell to trace; its GPU does not matter.
        model: the model of the cell's name.
        target: device whose kernels are traced: a CUDA GPU or the CPU.
        whole: whether to trace every layer instead of a few that represent all.

    Attributes:
        model: the fake model.
        repeated_layers: its layers that represent more.
        parameters: parameter counts of the whole model, on all ranks.

    Raises:
        UntraceableError: recipe or model cannot be traced; one line says why.
    """

    def __init__(
        self, cell: Cell, model: Model, *, target: Target = "cuda", whole: bool = False
    ) -> None:
        recipe = cell.recipe
        if (reason := untraceable(recipe)) is not None:
            raise UntraceableError(reason)
        if target == "cuda":
            if recipe.mamba == "mamba-ssm":
                install_simulated_mamba()
            if recipe.quantisation == "int8":
                install_eight_bit_products()
            if recipe.attention == FLASH:
                model = without_window(model)
        import_libraries(recipe)
        self._cell = cell
        self._target: Target = target
        self._mode = FakeTensorMode()
        self._facts = model
        layout = cell.parallel
        # Buckets of DeepSpeed span layers, so that a few do not represent the others.
        whole = whole or (layout is not None and layout.zero_stage is not None)
        has_host = layout is not None and layout.offload is not None
        self.device = GPU_BESIDE_HOST if has_host and self.is_on_gpu else CPU
        place = FakePlace(self._mode, self.device)
        self._fake = fake_model(model, recipe, cell.active_experts, place, whole=whole)
        self.model, self.repeated_layers = self._fake.module, self._fake.repeated_layers
        self.reference, self.parameters = self._fake.reference, self._fake.parameters
        give_head(self.model, recipe.loss, target, TRAINED_OUTPUTS[recipe.task])
        if self.reference is not None:
            give_head(self.reference, recipe.loss, target, REFERENCE_OUTPUTS)
        if recipe.liger_kernels:
            give_liger_layers(self.model)
        self.rank: FakeRank | None = None
        self.zero: ZeroRank | None = None
        if layout is not None and layout.zero_stage is not None:
            self.zero = ZeroRank(
                self.model, layout, recipe, device=self.device, has_streams=self.is_on_gpu
            )
        elif layout is not None and layout.is_sharded:
            self.rank = FakeRank(self.model, layout, recipe, place)
        self.has_host = self.rank is not None and self.rank.has_host
        self._updated_by: Target = "cpu" if self.has_host else target
        self.link = HostLink()
        self.offloading = simulated_offloading(self.model, recipe, self.link)
        self.recipe = recipe
        self._is_checked = False
        self.effects: Effects = {}
        self.is_padded = False
        self.image_tokens = cell.image_tokens
        self._images = self._images_of(cell)
        self.traced_images = traced_images(self.model, cell)
        check_positions(self.model, cell)

    def trace(
        self,
        batch_size: int,
        shares: Shares,
        updates_of: Recording | None = None,
        *,
        with_updates: bool = True,
        shared: Recording | None = None,
    ) -> Traced:
        """Trace a step of a batch size.

        Args:
            batch_size: examples per step.
            shares: returns the number of set entries of a routing mask.
            updates_of: recording at another batch size, whose updates are the same.
            with_updates: whether to trace updates where ``updates_of`` is absent.
            shared: recording of a step that may differ but for its gradients, whose updates to use.

        Raises:
            RecipeError: the model or its step is not what the recipe implies, as in a trial.
            StructureError: ``updates_of`` has another structure, or ``shared`` other gradients.
            UntraceableError: the step cannot be traced.
        """
        if self.zero is not None and self.zero.is_used:  # an engine takes a model of its own
            fresh = TraceableCell(self._cell, self._facts, target=self._target)
            fresh.is_padded, fresh._is_checked = self.is_padded, self._is_checked
            return fresh.trace(batch_size, shares, updates_of)
        census = None if self._is_checked else TracedCensus(self._fake, self._facts)
        if census is not None:  # it takes note of operators without known effects
            self.effects.clear()
        with warnings.catch_warnings(), masks_as_ever(), self._on_target(), self._mode:
            warnings.simplefilter("ignore")  # libraries warn about missing devices
            updates = Updates.TRACED if shared is None else Updates.SHARED
            if updates_of is not None or not with_updates:
                updates = Updates.DROPPED
            dtypes = self._fake.dtypes
            if self.zero is not None:
                recording, held, on_host = trace_engine(self, batch_size, shares, census)
                traced = Traced(recording, held, 0, on_host)
            else:
                traced = _Step(self, batch_size, shares, census, updates).traced()
            if self._fake.dtypes != dtypes:  # biases, which bitsandbytes casts once
                traced = _Step(self, batch_size, shares, None, updates).traced()
        if census is not None:
            census.check(self._cell, batch_size)
            self._is_checked = True
        if (other := updates_of or shared) is None:
            return traced
        joined = with_shared_updates if updates_of is None else with_updates_of
        return replace(traced, recording=joined(traced.recording, other))

    def _images_of(self, cell: Cell) -> int:
        """Images of each sequence."""
        if cell.image_tokens is None:
            return 0
        with self._on_target(), self._mode:
            return images_for(self.model, cell.image_tokens)

    @contextlib.contextmanager
    def _on_target(self) -> Iterator[None]:
        if self._target == "cpu":
            yield
            return
        nothing = contextlib.nullcontext()
        autocast = self.recipe.autocast
        before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        # Libraries read CUDA's autocast setting on every device.
        torch.set_autocast_enabled("cuda", autocast is not None)
        torch.set_autocast_dtype("cuda", DTYPES[autocast or "fp16"])
        try:
            flash = varlen_by_simulation if self.recipe.packing else flash_by_sdpa
            fused = flash() if self.recipe.attention == FLASH else nothing
            rope = liger_rope(self.model) if self.recipe.liger_kernels else nothing
            with as_on_gpu(), fused, rope:
                yield
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])

    def set_cell(self, cell: Cell, *, padded: bool = False) -> None:
        """Set the cell of further traces, of another length or without checkpointing.

        With ``padded``, some examples are padded to the length.

        Raises:
            UntraceableError: the model has fewer positions.
        """
        check_positions(self.model, cell)
        if self.recipe.gradient_checkpointing and not cell.recipe.gradient_checkpointing:
            disable_checkpointing(self.model)
            self._is_checked = False
        self._cell, self.recipe, self.is_padded = cell, cell.recipe, padded

    def batch(self, batch_size: int) -> TaskBatch:
        """Batch of a step; to be made in the step, which holds it."""
        rows = batch_size * self.recipe.sequences
        tokens = torch.zeros(rows, self._cell.seq_len, dtype=torch.int64, device=self.device)
        log_probs = precomputed_log_probs(self.recipe, rows, tokens.device)
        advantages = alternating_advantages(self.recipe, rows, tokens.device)
        mask = torch.ones_like(tokens) if self.is_padded else None
        images = None
        if self.image_tokens is not None:
            images = image_inputs(self.model, tokens, self.image_tokens, self._images)
        return TaskBatch(
            tokens, tokens, self.reference, log_probs, advantages, mask=mask, images=images
        )

    @property
    def models(self) -> list[nn.Module]:
        """Model that is traced, and the separate reference if there is one."""
        return [self.model, *([] if self.reference is None else [self.reference])]

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU's kernels are traced."""
        return self._target == "cuda"

    def optimizer(self, groups: list[list[nn.Parameter]]) -> torch.optim.Optimizer:
        """Optimizer of the recipe for groups of parameters."""
        return simulated_optimizer(self.model, groups, self.recipe, self._updated_by)

    def stepper(self, groups: list[list[nn.Parameter]]) -> DeviceStepper:
        """Stepper of the recipe for groups of parameters."""
        made = DeviceStepper(self.model, self.optimizer(groups), self.recipe, CPU, self._updated_by)
        made.offloading = self.offloading
        return made


class _Step:
    """One step during its trace."""

    def __init__(
        self,
        cell: TraceableCell,
        batch_size: int,
        shares: Shares,
        census: TracedCensus | None,
        updates: Updates,
    ) -> None:
        self._cell = cell
        self._batch_size = batch_size
        self._updates = updates
        self._layers = decoder_layers(cell.model)
        self._untraced = UntracedParameters(
            cell.repeated_layers, [] if updates is Updates.DROPPED else self._layers
        )
        self._layers_of_each = [decoder_layers(model) for model in cell.models]
        held = [t for model in cell.models for t in model_tensors(model)]
        held += self._untraced.parameters
        self._pass = -1
        note = None if census is None else census.note
        needs_mask = cell.recipe.packing or cell.is_padded
        kind = Tracer if cell.rank is None else partial(RankTracer, has_host=cell.has_host)
        self._tracer = kind(
            shares, held, with_workspaces=cell.is_on_gpu, needs_mask=needs_mask, note=note
        )
        self._tracer.image_tokens, self._tracer.effects = cell.image_tokens, cell.effects
        if cell.traced_images is not None:
            cell.traced_images.tracer = self._tracer
        cell.link.tracer = self._tracer
        self._trainable = [p for p in cell.model.parameters() if p.requires_grad]
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._tracer.accumulated)  # type: ignore[no-untyped-call]
            for p in ([] if cell.has_host else self._trainable)
        ]

    def traced(self) -> Traced:
        kinds = [(layer, type(layer)) for layers in self._layers_of_each for layer in layers]
        loops = RouterLoops(self._cell.model, self._tracer)
        for layers in self._layers_of_each:
            mark_passes(layers, self._cell.repeated_layers, self._on_forward, self._on_backward)
        try:
            self._run(loops)
        except UntraceableError as error:
            where = innermost_module(error) or "the model"
            raise UntraceableError(f"{error} (in {where})") from None
        finally:
            for layer, kind in kinds:
                layer.__class__ = kind
            loops.close()
            for parameter in self._trainable:
                parameter.grad = None
            for hook in self._hooks:
                hook.remove()
        cell = self._cell
        return Traced(
            recording=self._tracer.recording(self._gradients),
            held=held_storages(cell.models, cell.repeated_layers, cell.device),
            copies=cell.repeated_layers.copies,
            host_bytes=shards_on_host(cell.model, cell.repeated_layers, cell.recipe, cell.device),
        )

    def _run(self, loops: RouterLoops) -> None:
        tracer = self._tracer
        groups = parameter_groups(self._cell.model, self._trainable, self._cell.recipe.optimizer)
        stepper = self._cell.stepper([self._untraced.among(group) for group in groups])
        with self._on_rank(), tracer:
            batch = [self._cell.batch(self._batch_size)]
            # Detached, as in a step: a loss would keep what the functions of autograd hold.
            loss = stepper.backward(lambda model: self._loss(model, batch[0], loops)).detach()
            names = (self._gradient_name(p) for p in self._trainable)
            # Gradients that ranks reduce together are one storage.
            self._gradients = np.array(
                [*dict.fromkeys(n for n in names if n is not None)], np.int64
            )
            if self._updates is Updates.DROPPED:
                tracer.segment = Segment.FORGET  # with_updates_of drops this segment
                return
            self._untraced.register_gradients(tracer)
            for segment in self._updates.traced:
                tracer.segment = segment
                stepper.update()
                float(loss)
            tracer.segment = Segment.FORGET
            del loss
            batch.clear()
            stepper.forget_gradients()
            with self._cell.offloading:
                pass  # the next micro-batch drops what the last one's left
        stepper.close()

    def _on_rank(self) -> contextlib.AbstractContextManager[None]:
        if self._cell.rank is None:
            return contextlib.nullcontext()
        assert isinstance(self._tracer, RankTracer)
        return self._cell.rank.traced_by(self._tracer)

    def _loss(self, model: nn.Module, batch: TaskBatch, loops: RouterLoops) -> torch.Tensor:
        loss = task_loss(model, batch, self._cell.recipe)
        self._tracer.segment = Segment.HEAD_BACKWARD
        loops.mark_backward(loss)
        return loss

    def _gradient_name(self, parameter: nn.Parameter) -> int | None:
        return None if parameter.grad is None else self._tracer.name_of(parameter.grad)

    def _on_forward(self, turn: int) -> None:
        # The arguments of the last layer are freed after its return; that belongs to its turn.
        if turn == 1:
            self._pass += 1
        self._tracer.pass_on_to((*FORWARD[self._pass], HEADS[self._pass])[turn - 1])

    def _on_backward(self, turn: int) -> None:
        self._tracer.segment = (Segment.AFTER, *BACKWARD)[turn - 1]
        if turn == 2:
            # The input of the first turn has no gradient where only adapters are trained. What the
            # functions of autograd hold (inputs of int8 products) is freed after the pass.
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - as FSDP does
            engine.queue_callback(lambda: self._on_backward(1))
