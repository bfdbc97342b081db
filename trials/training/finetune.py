"""Training code: a model under a recipe, and one optimizer step."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trials.models.build import build_model, stock_model
from trials.models.experts import experts_in_use
from trials.models.fused_head import fuse_head, loss_in_use
from trials.models.mamba import mamba_in_use
from trials.models.parameter_count import implied_parameters
from trials.models.weight_placement import autocast_to, decoder_layers
from trials.records.cell import Cell
from trials.records.model import Model
from trials.records.observation import Built, ParameterCounts
from trials.records.recipe import Recipe
from trials.training.loss import micro_batch_losses
from trials.training.optimizers import make_stepper

# Parts of operator names that identify the kernels that ran.
IDENTIFYING = (
    "bitsandbytes",
    "causal_conv1d",
    "convolution",
    "flash_attn",
    "grouped_mm",
    "linalg_vector_norm",
    "scaled_dot_product",
)
SEVERAL = 2  # micro-batches that show that gradients accumulate
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "bitsandbytes::gemm_4bit")


def import_libraries(recipe: Recipe) -> None:
    """Import the libraries of a recipe beyond torch and transformers; each takes seconds."""
    if recipe.method != "full":
        importlib.import_module("peft")
    if recipe.method == "qlora" or recipe.optimizer.startswith(("paged", "adamw_8bit")):
        importlib.import_module("bitsandbytes")


def model_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors of a model itself: weights, constants of 4-bit weights, buffers."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += [state.absmax, state.code]
            if state.nested:
                tensors += [state.offset, state.state2.absmax, state.state2.code]
    return tensors


class NotTrainingError(RuntimeError):
    """The loss of a step is not finite."""


class FineTuning:
    """A model under a recipe, its optimizer and its data, on one device.

    Args:
        cell: cell to fine-tune.
        model: the model of the cell's name.
        device: device that runs it.
        seed: seed of weights and tokens, which are equal in every process.
    """

    def __init__(self, cell: Cell, model: Model, *, device: torch.device, seed: int) -> None:
        self._cell = cell
        self._facts = model
        self._device = device
        self._seed = seed
        self.model = build_model(
            model,
            cell.recipe,
            active_experts=cell.active_experts,
            weights=cell.weights,
            device=device,
            seed=seed,
        )
        fuse_head(self.model, cell.recipe.loss)
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        # Every probe starts from the same weights, since routing depends on weights and memory on
        # routing. The copy is on the host, outside the measured memory.
        self._initial = [p.detach().to("cpu", copy=True) for p in self.trainable]
        self.stepper = make_stepper(self.model, self.trainable, cell.recipe, device)

    def start_over(self) -> None:
        """Restore initial weights, drop gradients and optimizer state, as in a fresh process."""
        self.stepper.close()
        with torch.no_grad():
            for parameter, initial in zip(self.trainable, self._initial, strict=True):
                parameter.copy_(initial)
                parameter.grad = None
        torch.manual_seed(self._seed)  # dropout draws from it
        self.stepper = make_stepper(self.model, self.trainable, self._cell.recipe, self._device)

    def tokens(self, batch_size: int, draw: int = 0) -> torch.Tensor:
        """Random token ids of one step, equal for every probe of a size and draw.

        Returns:
            Token ids (micro-batches x batch_size, seq_len).
        """
        generator = torch.Generator().manual_seed(
            (self._seed * 1_000_003 + batch_size) * 1_009 + draw
        )
        examples = self._cell.recipe.micro_batches(batch_size) * batch_size
        shape = (examples, self._cell.seq_len)
        return torch.randint(self._facts.vocab_size, shape, generator=generator).to(self._device)

    def step(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, *, micro_batches: int = 1
    ) -> float:
        """Run one whole optimizer step on a batch.

        Args:
            tokens: (batch, length) token ids.
            labels: (batch, length) token ids, -100 for tokens without a loss; absent for
                ``tokens``.
            micro_batches: parts of the batch whose gradients accumulate.

        Returns:
            Loss in nats per token. Reading it waits for the device, as a loop that logs does.

        Raises:
            NotTrainingError: the loss is not finite.
        """
        value = self.stepper.step(
            *micro_batch_losses(
                tokens, tokens if labels is None else labels, self._cell.recipe, micro_batches
            )
        )
        if not value < float("inf"):
            raise NotTrainingError(f"the loss is {value}: these steps train nothing")
        return value

    def forward(self, tokens: torch.Tensor) -> None:
        """Run a forward pass without gradients, in the precision of a step."""
        with torch.no_grad(), autocast_to(self._cell.recipe.autocast, self._device.type):
            self.model(input_ids=tokens)

    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the model itself (``model_tensors``)."""
        return model_tensors(self.model)

    def implied(self) -> ParameterCounts:
        """Parameter counts that the recipe implies for the stock model of transformers."""
        stock = stock_model(self._facts, self._cell.recipe, self._cell.active_experts)
        return implied_parameters(stock, self._cell.recipe)

    def built(self) -> Built:
        """Properties of the built model. It runs one step of micro-batches of one example."""
        layers = decoder_layers(self.model)
        with _Census(layers, self.model) as census:
            micro_batches = min(self._cell.recipe.micro_batches(1), SEVERAL)
            self.step(self.tokens(1)[:micro_batches], micro_batches=micro_batches)
        built = Built(
            parameters=self._parameters(),
            dtypes=self._dtypes(),
            adapters=sum(1 for module in self.model.modules() if hasattr(module, "lora_A")),
            attention=self._attention(),
            experts=experts_in_use(self.model),
            mamba=mamba_in_use(census.kernels) if self._facts.has_mamba else None,
            checkpointed_layers=census.layers_run_twice,
            layers=len(layers),
            optimizer=self.stepper.name,
            kernels=tuple(sorted(census.kernels)),
            product_dtypes=tuple(sorted(census.product_dtypes)),
            micro_batches=census.forward_passes,
            loss=census.loss,
        )
        self.start_over()
        return built

    def _attention(self) -> str | None:
        config: Any = self.model.config
        return str(config._attn_implementation) if self._facts.has_attention else None  # noqa: SLF001 - no other name

    def _parameters(self) -> ParameterCounts:
        """Logical parameters of the built model; two 4-bit weights share a stored byte."""
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

    def _dtypes(self) -> tuple[str, ...]:
        plain = (p for p in self.model.parameters() if getattr(p, "quant_state", None) is None)
        return tuple(sorted({str(p.dtype).removeprefix("torch.") for p in plain}))


WHOLE = -1  # in place of a layer's index


class _Census(TorchDispatchMode):
    """Observes one step: the operators that identify its kernels, and the passes of each layer.

    Args:
        layers: decoder layers. The backward pass runs a checkpointed layer again; that may skip the
            layer's own hooks, but not those of the modules in it.
        model: the whole model.
    """

    def __init__(self, layers: list[nn.Module], model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: set[str] = set()
        self.product_dtypes: set[str] = set()
        self.loss = ""
        self._runs: dict[tuple[int, str], int] = {}
        children = [
            (child, index, name)
            for index, layer in enumerate(layers)
            for name, child in layer.named_children()
        ]
        self._hooks = [
            module.register_forward_pre_hook(self._counter(index, name))
            for module, index, name in ((model, WHOLE, ""), *children)
        ]
        self._hooks.append(model.register_forward_hook(self._note_loss))

    @property
    def forward_passes(self) -> int:
        """Forward passes of the whole model."""
        return self._runs.get((WHOLE, ""), 0)

    @property
    def layers_run_twice(self) -> int:
        """Number of layers with a module that ran more than once in a forward pass."""
        passes = self.forward_passes
        return len({layer for (layer, _), runs in self._runs.items() if runs > passes})

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and note its name."""
        name = func.name().partition(".")[0]
        if any(part in name for part in IDENTIFYING):
            self.kernels.add(name)
        result = func(*args, **(kwargs or {}))
        if name in PRODUCTS:
            self.product_dtypes.add(str(result.dtype).removeprefix("torch."))
        return result

    def _note_loss(self, _model: nn.Module, _inputs: object, output: Any) -> None:
        self.loss = loss_in_use(output.loss)

    def _counter(self, layer: int, name: str) -> Callable[..., None]:
        def count(*_: object) -> None:
            self._runs[layer, name] = self._runs.get((layer, name), 0) + 1

        return count
