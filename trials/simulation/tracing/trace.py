"""Traces one step of a cell: the model, recipe and step of the real run, without its memory."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trials.models.build import auto_config
from trials.models.weight_placement import decoder_layers
from trials.records.cell import Cell
from trials.records.model import Model
from trials.simulation.recording import Held, Purpose, Recording, Segment, with_updates_of
from trials.simulation.tracing.fake_model import FLASH, fake_model, stand_in_for_mamba
from trials.simulation.tracing.fake_optimizers import simulated_optimizer
from trials.simulation.tracing.fused_kernels import as_on_gpu
from trials.simulation.tracing.layer_repetition import RepeatedLayers, mark_passes
from trials.simulation.tracing.tracer import Tracer, UntraceableError, fake_like
from trials.simulation.tracing.watchdog import innermost_module
from trials.training.finetune import import_libraries, model_tensors
from trials.training.optimizers import DeviceStepper

Target = Literal["cuda", "cpu"]
Shares = Callable[[torch.Tensor], int]
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")
FORWARD_SEGMENTS = (Segment.FORWARD_1, Segment.FORWARD_2, Segment.FORWARD_3, Segment.HEAD)
BACKWARD_SEGMENTS = (
    Segment.AFTER,
    Segment.BACKWARD_1,
    Segment.BACKWARD_2,
    Segment.BACKWARD_3,
)


@dataclass(frozen=True, slots=True)
class Traced:
    """One traced step.

    Attributes:
        recording: its events.
        held: what the model holds throughout.
        copies: turns of layers that were not traced.
    """

    recording: Recording
    held: Held
    copies: int


class TraceableCell:
    """A cell whose steps can be traced, at any batch size.

    Args:
        cell: what is fine-tuned; its GPU does not matter.
        model: the model of the cell's name.
        target: whose kernels are traced: a CUDA GPU's, or as the CPU runs it.
        whole: trace every layer, not only those that stand for all.

    Raises:
        UntraceableError: its recipe or model cannot be traced; one line on why.
    """

    def __init__(
        self, cell: Cell, model: Model, *, target: Target = "cuda", whole: bool = False
    ) -> None:
        recipe = cell.recipe
        if recipe.offload_optimizer:
            raise UntraceableError(
                "offload_optimizer: DeepSpeed moves tensors between devices, which is not "
                "simulated: leave it out, or measure"
            )
        if target == "cuda":
            if recipe.mamba == "mamba-ssm":
                stand_in_for_mamba()
            if recipe.attention == FLASH:
                model = _without_window(model)
        import_libraries(recipe)
        self._cell = cell
        self._target: Target = target
        self._mode = FakeTensorMode()
        self._model, self._turns = fake_model(
            model, recipe, cell.active_experts, self._mode, whole=whole
        )
        self._recipe = recipe
        _check_positions(self._model, cell)

    def trace(
        self,
        batch_size: int,
        shares: Shares,
        updates_of: Recording | None = None,
        *,
        with_updates: bool = True,
    ) -> Traced:
        """Traces a step of so many queries.

        Args:
            batch_size: queries per step.
            shares: how many entries of a routing mask are set.
            updates_of: a recording at another batch size to take the updates from, which are the
                same at every one, if all else has its structure; absent to trace them.
            with_updates: trace them; else there are none, unless they are taken.
        """
        with warnings.catch_warnings(), _masks_as_ever(), self._on_target(), self._mode:
            warnings.simplefilter("ignore")  # libraries', about devices that are not there
            has_own = with_updates and updates_of is None
            traced = _Step(self, batch_size, shares, has_updates=has_own).traced()
        if updates_of is None:
            return traced
        return replace(traced, recording=with_updates_of(traced.recording, updates_of))

    @contextlib.contextmanager
    def _on_target(self) -> Iterator[None]:
        if self._target == "cpu":
            yield
            return
        nothing = contextlib.nullcontext()
        autocast = self._recipe.precision == "fp16"
        before = torch.is_autocast_enabled("cuda")
        # Libraries ask whether CUDA casts, whatever the device.
        torch.set_autocast_enabled("cuda", autocast)
        try:
            capped = _scores_capped_within() if self._recipe.attention == FLASH else nothing
            with as_on_gpu(), capped:
                yield
        finally:
            torch.set_autocast_enabled("cuda", before)

    def set_length(self, seq_len: int) -> None:
        """Makes the queries of further traces so long.

        Raises:
            UntraceableError: the model takes none so long.
        """
        cell = self._cell.model_copy(update={"seq_len": seq_len})
        _check_positions(self._model, cell)
        self._cell = cell

    @property
    def remembers(self) -> bool:
        """Whether the model keeps what lengths it has seen: frequencies that grow with them."""
        kinds = [str(getattr(module, "rope_type", "")) for module in self._model.modules()]
        return any("dynamic" in kind or "longrope" in kind for kind in kinds)

    @property
    def model(self) -> nn.Module:
        """The model that is traced."""
        return self._model

    @property
    def turns(self) -> RepeatedLayers:
        """Which of its layers stand for more."""
        return self._turns

    @property
    def seq_len(self) -> int:
        """Tokens per query."""
        return self._cell.seq_len

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU's kernels are traced."""
        return self._target == "cuda"

    def stepper(self, trainable: list[nn.Parameter]) -> DeviceStepper:
        """What makes the steps of the recipe."""
        device = torch.device("cpu")
        optimizer = simulated_optimizer(trainable, self._recipe, self._target)
        return DeviceStepper(self._model, optimizer, self._recipe, device)


def _without_window(model: Model) -> Model:
    """A model whose attention needs no mask for its window: FlashAttention-2 takes none."""
    if model.window is None or getattr(auto_config(model, None), "layer_types", None):
        return model  # some of its layers have it, others not
    return model.model_copy(update={"config": model.config | {"sliding_window": None}})


def _check_positions(model: nn.Module, cell: Cell) -> None:
    """Fake tensors look nothing up, so do not mind positions that a table has not."""
    for name, module in model.named_modules():
        is_table = name.endswith(POSITION_TABLES) and isinstance(module, nn.Embedding)
        if is_table and module.num_embeddings < cell.seq_len:
            raise UntraceableError(
                f"seq_len {cell.seq_len}: {cell.model} has positions for {module.num_embeddings} "
                "tokens: give at most as many"
            )


@contextlib.contextmanager
def _scores_capped_within() -> Iterator[None]:
    """FlashAttention-2 caps scores as it goes; transformers refuses PyTorch's kernel a cap."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415 - as below

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def capped(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        del softcap
        return own(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = capped
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own


@contextlib.contextmanager
def _masks_as_ever() -> Iterator[None]:
    """Hugging Face's masks for fake tensors are made even where real ones would not need them."""
    from transformers import masking_utils  # noqa: PLC0415 - seconds to import

    own = masking_utils.is_tracing
    masking_utils.is_tracing = lambda _tensor=None: False
    try:
        yield
    finally:
        masking_utils.is_tracing = own


class _Step:
    """One step being traced."""

    def __init__(
        self,
        cell: TraceableCell,
        batch_size: int,
        shares: Shares,
        *,
        has_updates: bool,
    ) -> None:
        self._cell = cell
        self._batch_size = batch_size
        self._has_updates = has_updates
        self._layers = decoder_layers(cell.model)
        self._ghosts = _Ghosts(cell, self._layers if has_updates else [])
        held = [*model_tensors(cell.model), *self._ghosts.parameters]
        self._tracer = Tracer(shares, held, with_workspaces=cell.is_on_gpu)
        self._trainable = [p for p in cell.model.parameters() if p.requires_grad]

    def traced(self) -> Traced:
        kinds = [(layer, type(layer)) for layer in self._layers]
        mark_passes(self._layers, self._cell.turns, self._on_forward, self._on_backward)
        try:
            self._run()
        except UntraceableError as error:
            where = innermost_module(error) or "the model"
            raise UntraceableError(f"{error} (in {where})") from None
        finally:
            for layer, kind in kinds:
                layer.__class__ = kind
            for parameter in self._trainable:
                parameter.grad = None
        return Traced(
            recording=self._tracer.recording(self._gradients),
            held=_held(self._cell),
            copies=self._cell.turns.copies,
        )

    def _run(self) -> None:
        tracer = self._tracer
        stepper = self._cell.stepper(self._ghosts.among(self._trainable))
        with tracer:
            batch = [torch.zeros(self._batch_size, self._cell.seq_len, dtype=torch.int64)]
            loss = stepper.backward(lambda model: self._loss(model, batch[0]))
            self._gradients = np.array(
                [name for p in self._trainable if (name := self._gradient_name(p)) is not None],
                np.int64,
            )
            if not self._has_updates:
                tracer.segment = Segment.FORGET  # what the end of this brings is not kept
                return
            self._ghosts.have_gradients(tracer)
            for segment in (Segment.FIRST_UPDATE, Segment.UPDATE):
                tracer.segment = segment
                stepper.update()
                float(loss.detach())
            tracer.segment = Segment.FORGET
            del loss
            batch.clear()
            stepper.forget_gradients()
        stepper.close()

    def _loss(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        self._tracer.segment = Segment.HEAD_BACKWARD
        return loss

    def _gradient_name(self, parameter: nn.Parameter) -> int | None:
        return None if parameter.grad is None else self._tracer.name_of(parameter.grad)

    def _on_forward(self, turn: int) -> None:
        # What the last turn was given goes when it returns, as it does between turns.
        self._tracer.pass_on_to(FORWARD_SEGMENTS[turn - 1])

    def _on_backward(self, turn: int) -> None:
        self._tracer.segment = BACKWARD_SEGMENTS[turn - 1]


class _Ghosts:
    """Parameters of the layers that are not traced: without them the update would be too small."""

    def __init__(self, cell: TraceableCell, layers: list[nn.Module]) -> None:
        self._of: dict[int, list[nn.Parameter]] = {}
        self._pairs: list[tuple[nn.Parameter, nn.Parameter, int]] = []
        turns = cell.turns
        if turns.copies == 0 or not layers:
            return
        start, end = turns.starts[1:3]
        second = [p for layer in layers[start:end] for p in layer.parameters() if p.requires_grad]
        if not second:
            return
        last = self._of.setdefault(id(second[-1]), [])
        for copy in range(1, turns.copies + 1):
            for parameter in second:
                # To an optimizer it is a parameter; to make it one would take longer.
                ghost: Any = fake_like(parameter).requires_grad_()
                ghost.grad = fake_like(parameter)
                last.append(ghost)
                self._pairs.append((ghost, parameter, copy))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All of them."""
        return [ghost for ghost, _, _ in self._pairs]

    def among(self, trainable: list[nn.Parameter]) -> list[nn.Parameter]:
        """All that the whole model trains, in its order."""
        return [each for p in trainable for each in (p, *self._of.get(id(p), ()))]

    def have_gradients(self, tracer: Tracer) -> None:
        """Gives each the gradient that the backward pass of its layer would have left."""
        for ghost, parameter, copy in self._pairs:
            if parameter.grad is None:
                ghost.grad = None
                continue
            like = tracer.name_of(parameter.grad)
            assert ghost.grad is not None
            assert like is not None
            tracer.add_ghost(ghost.grad, like, copy)


def _held(cell: TraceableCell) -> Held:
    """The storages of the model itself, each once, in the order they are made: layer by layer."""
    layers = decoder_layers(cell.model)
    starts = cell.turns.starts if cell.turns.copies else []
    sizes, purposes, turns = [], [], []
    seen: set[int] = set()
    for index, part in enumerate((*layers, cell.model)):
        turn = sum(start <= index for start in starts) if index < len(layers) else 0
        turn = 0 if turn > cell.turns.traced else turn  # what follows the last one
        constants = {id(t) for t in _quantisation_constants(part)}
        for tensor in model_tensors(part):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:  # noqa: SLF001 - the one name of a storage
                seen.add(storage._cdata)  # noqa: SLF001 - as above
                sizes.append(storage.nbytes())
                constant = id(tensor) in constants
                purposes.append(Purpose.QUANTISATION if constant else Purpose.WEIGHT)
                turns.append(turn)
    return Held(*(np.array(column, np.int64) for column in (sizes, purposes, turns)))


def _quantisation_constants(part: nn.Module) -> list[torch.Tensor]:
    plain = {id(t) for t in (*part.parameters(), *part.buffers())}
    return [t for t in model_tensors(part) if id(t) not in plain]
