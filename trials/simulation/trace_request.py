"""Requests for traces, their keys in the cache, and the limits of a simulation. No torch."""

import hashlib
import json
import math
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from gpu_catalog import kernel_rates
from gpu_catalog.catalog import shipped_text
from gpu_catalog.gpu import Gpu
from gpu_catalog.links import between_nodes, within_nodes
from gpu_catalog.record import Record
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.recipes.zero_settings import BY_LAYOUT
from trials.records.cell import Cell
from trials.records.compatibility import (
    AMPERE,
    GRID_FAMILIES,
    has_own_mask,
    has_square_mask,
)
from trials.records.model import Model
from trials.simulation.ranks.layout_approximations import layout_approximations
from trials.simulation.tracing_child import key_start

STACK = ("torch", "transformers", "peft", "bitsandbytes")
TURING = 7.5  # the first compute capability with tensor cores for int8
HOPPER = 9.0  # the first compute capability of Hopper
# Families whose layers call the one function of mamba-ssm that has simulated operators.
SCANS_WHOLE = frozenset({"blackmamba", "mamba"})
SMALLEST = 2  # a batch of one example runs other operators in places, so it has its own trace
SMALLEST_OFFLOADED = 1024  # bytes; TRL leaves smaller activations on the GPU


class Routing(Record):
    """Shares of the tokens that the experts get.

    Attributes:
        sigma: standard deviation of the shares' logarithms; 0 gives equal shares.
    """

    sigma: float = 0.0
    seed: int = 0


class TraceRequest(Record):
    """Request to trace one cell; the trace serves any GPU.

    Attributes:
        batch_size: batch size to trace; absent for the two or three that determine all sizes from
            ``SMALLEST`` on.
        padded: whether some examples of each batch are padded, so that it has a mask.
        whole: whether to trace every layer.
        with_updates: whether to trace the optimizer's updates, which another trace may provide.
        target: device whose kernels are traced: a CUDA GPU or the CPU.
    """

    cell: Cell
    model: Model
    routing: Routing = Routing()
    batch_size: int | None = None
    padded: bool = False
    whole: bool = False
    with_updates: bool = True
    target: Literal["cuda", "cpu"] = "cuda"

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Batch sizes to trace, with whole tokens per expert so that all numbers are affine.

        With offloading, even a tensor of one byte per predicted token is large enough for it at
        each of them; a smaller batch has less than ``SMALLEST_OFFLOADED`` more bytes of it on the
        GPU.
        """
        if self.batch_size is not None:
            return (self.batch_size,)
        experts, active = self.cell.experts or 1, self.cell.active_experts or 1
        unit = experts // math.gcd(self.cell.seq_len * active, experts)
        least = SMALLEST
        if self.cell.recipe.activation_offloading:
            least = max(least, -(-SMALLEST_OFFLOADED // max(self.cell.seq_len - 1, 1)))
        first = unit * -(-least // unit)
        number = 3 if has_square_mask(self.cell.recipe, self.model) else 2
        return tuple(first * n for n in range(1, number + 1))

    @property
    def key(self) -> str:
        """Key by content: the request, the versions of the libraries and the code that traces."""
        cell = self.cell.model_copy(
            update={
                "gpu": "any",
                "simulated": False,
                "recipe": self._traced_recipe,
                "parallel": self.sharded,
            }
        )
        content = (
            cell.model_dump_json(),
            json.dumps(self.model.config, sort_keys=True),
            self.routing.model_dump_json(),
            self.batch_sizes,
            self.padded,
            self.whole,
            self.with_updates,
            self.target,
        )
        start = key_start(self.model.name, self.cell.seq_len)
        return "-".join((start, *self.digests_of_updates, self._digest(content)[:24]))

    @property
    def digests_of_updates(self) -> tuple[str, str]:
        """Parts of the key that traces with the same updates share.

        Returns:
            Those of the same parameters and optimizer, and of the same passes before them, too: a
            batch of one example, or a padded one, runs other operators, and the reference scan
            loops over the tokens.
        """
        if not self.with_updates:
            return "none", "none"
        tokens = self.cell.seq_len if self.cell.recipe.mamba == "reference" else None
        alike = (self.updates, self.batch_sizes[0] < SMALLEST, self.padded, tokens)
        return self._digest(self.shared_updates)[:12], self._digest(alike)[:12]

    def _digest(self, content: object) -> str:
        """Digest of content, the versions of the libraries and the code that traces."""
        recipe = self.cell.recipe
        optional = (
            _version("trl") if recipe.activation_offloading else None,
            _version("torchao") if recipe.optimizer.startswith("torchao") else None,
            _version("deepspeed") if self.is_by_engine else None,
        )
        return hashlib.sha256(repr((content, optional, versions(), _code())).encode()).hexdigest()

    @property
    def updates(self) -> str:
        """Key of the optimizer's updates: the model, the recipe and the shards."""
        recipe = self._traced_recipe.model_dump_json()
        config = json.dumps(self.model.config, sort_keys=True)
        shards = None if self.sharded is None else self.sharded.key
        return repr((config, recipe, self.whole, self.target, shards))

    @property
    def shared_updates(self) -> str:
        """Key of updates by parameters and optimizer alone, whatever the passes before them."""
        return self._updates_with(gradient_checkpointing=False, loss="chunked", attention="sdpa")

    @property
    def built(self) -> str:
        """Key of the model that is built: one with checkpointing can do without it later."""
        recipe = self.cell.recipe
        is_bound = recipe.activation_offloading or recipe.trained_layers is not None
        if is_bound or self.is_by_engine:
            return self.updates
        return self._updates_with(gradient_checkpointing=False)

    def _updates_with(self, **fields: Any) -> str:
        recipe = self.cell.recipe.model_copy(update=fields)
        cell = self.cell.model_copy(update={"recipe": recipe})
        return self.model_copy(update={"cell": cell}).updates

    @property
    def sharded(self) -> Parallel | None:
        """Layout of shards, if any: only these change what a rank runs between two reductions."""
        layout = self.cell.parallel
        return layout.on_one_node if layout is not None and layout.is_sharded else None

    @property
    def is_by_engine(self) -> bool:
        """Whether DeepSpeed's engine runs the steps."""
        return self.sharded is not None and self.sharded.zero_stage is not None

    @property
    def _traced_recipe(self) -> Recipe:
        """Recipe of one micro-batch, whose trace serves any number of them."""
        return self.cell.recipe.model_copy(
            update={"gradient_accumulation": 1, "effective_batch": None}
        )

    @property
    def process_choice(self) -> str:
        """Choice of Mamba kernels that a process can make only once, before its first trace."""
        return self.cell.recipe.mamba or ""


class Fidelity(StrEnum):
    """Similarity of the traced stack to the one that would run."""

    REPRODUCED = "reproduced"
    """The installed libraries themselves ran under the trace, with all their operators."""
    APPROXIMATE = "approximate"
    """Substitutes ran for some operators: ``approximations`` lists them."""


def not_simulated(recipe: Recipe, model: Model, gpu: Gpu) -> str | None:
    """Reason why a recipe on a GPU is not simulated, with an alternative; None when it is."""
    if recipe.offload_optimizer:
        return f"offload_optimizer is not simulated: {BY_LAYOUT}"
    if recipe.quantisation == "int8" and not _since(gpu, TURING):
        return (
            f"below compute capability {TURING} quantisation int8 falls back to fp32 products, "
            "which are not simulated: use nf4"
        )
    if recipe.compile is not None:
        return f"compile {recipe.compile} is not simulated: leave it out, or measure"
    reason = _not_with_images(recipe, model) if model.has_vision else _not_offloaded(recipe)
    if reason is not None:
        return reason
    has_shared_heads = model.has_grouped_queries and not recipe.packing  # a mask repeats them
    if recipe.attention == "sdpa" and has_shared_heads and not _since(gpu, AMPERE):
        return (
            f"below compute capability {AMPERE} sdpa has no kernel for the grouped "
            f"queries of {model.name}, and its fallback is not simulated: use eager"
        )
    return None


def _not_with_images(recipe: Recipe, model: Model) -> str | None:
    """Reason why a recipe of a vision-language model is not simulated; None when it is."""
    if recipe.activation_offloading:
        return "activation_offloading is not simulated with images: leave it out"
    if recipe.attention == "eager" and model.family in GRID_FAMILIES:
        return (
            f"attention eager is not simulated for images of any size, as {model.name} takes them: "
            "use sdpa"
        )
    return None


def _not_offloaded(recipe: Recipe) -> str | None:
    """Reason why offloaded activations of a recipe are not simulated; None when they are."""
    casts_frozen = recipe.method == "lora" and recipe.precision == "fp32-mixed-load"
    if recipe.activation_offloading and casts_frozen and not recipe.gradient_checkpointing:
        # TRL takes a tensor at the address of a freed cast for that cast, and keeps it on the GPU.
        return (
            "activation_offloading of a layer's casts of frozen fp32 weights depends on addresses "
            "in memory, which are not simulated: use precision bf16-mixed or "
            "gradient_checkpointing, or measure"
        )
    return None


def approximations(
    cell: Cell, model: Model, gpu: Gpu, *, is_padded: bool = False
) -> tuple[str, ...]:
    """Differences between the traced operators of a cell and those its GPU would run.

    Batches with padding have a mask.
    """
    recipe = cell.recipe
    has_scan = recipe.mamba == "mamba-ssm"
    uses_sdpa = recipe.attention == "sdpa" and not recipe.packing
    uses_flash = recipe.attention == "flash_attention_2"
    # In fp32 no fused kernel takes shared heads: PyTorch's own steps are traced.
    is_fused = uses_sdpa and not (recipe.compute_dtype == "fp32" and model.has_grouped_queries)
    has_images = cell.image_tokens is not None
    has_own = has_own_mask(model, cell.seq_len, has_images=has_images)
    is_masked = recipe.packing or is_padded or has_own
    takes_flash = recipe.compute_dtype != "fp32" and _since(gpu, AMPERE)
    is_windowed = model.window is not None and cell.seq_len > model.window
    stands_in = {
        "FlashAttention-2 is traced as PyTorch's own FlashAttention-2 kernel": uses_flash
        and not recipe.packing,
        "FlashAttention-2 is traced by the declared outputs and memory of its varlen kernel": (
            uses_flash and recipe.packing
        ),
        "sdpa is traced as PyTorch's memory-efficient kernel with a mask; its backward pass takes "
        "declared memory": recipe.attention == "sdpa" and is_masked,
        "FlashAttention-2 is traced with the padding, which transformers drops": uses_flash
        and is_padded,
        f"the attention window of {model.window} tokens is traced as full attention": is_windowed
        and recipe.attention in {"flash_attention_2", "sdpa"},
        "sdpa is traced by the declared outputs and memory of its FlashAttention-2": is_fused
        and takes_flash
        and not _since(gpu, HOPPER),
        "sdpa is traced as FlashAttention-2; PyTorch may choose cuDNN's kernel": is_fused
        and takes_flash
        and _since(gpu, HOPPER),
        "sdpa is traced as FlashAttention-2; PyTorch uses its memory-efficient kernel": is_fused
        and not takes_flash,
        "mamba-ssm is traced as operators of the same shapes": has_scan
        and model.family in SCANS_WHOLE,
        "mamba-ssm is traced as transformers' slower code; memory and time differ": has_scan
        and model.family not in SCANS_WHOLE,
        f"{recipe.optimizer} is traced as its state and one kernel per tensor": (
            recipe.optimizer.startswith(("adamw_8bit", "paged"))
        ),
        f"{recipe.optimizer} is traced as its state and the temporaries and transfers of the code "
        "that Inductor generates": recipe.optimizer.startswith("torchao"),
        "activation_offloading is timed at 0.8 of PCIe's rate, which is assumed": (
            recipe.activation_offloading
        ),
        "liger_kernels are traced by declared buffers and transfers": recipe.liger_kernels,
        f"loss {recipe.loss} is traced by declared buffers and products": recipe.loss
        not in {"full-logits", "dft", "eaft", None},
        "bitsandbytes is traced as a product with dequantised weights": recipe.quantisation
        in {"nf4", "fp4"},
        "LLM.int8 is traced without outliers in its inputs, its products at the rate of fp16": (
            recipe.quantisation == "int8"
        ),
    }
    own = (text for text, applies in stands_in.items() if applies)
    return (*own, *_image_approximations(cell), *layout_approximations(cell))


def _image_approximations(cell: Cell) -> list[str]:
    if cell.image_tokens is None:
        return []
    source = (
        f"{cell.image_tokens} tokens of each example come from images, as few and as square as "
        "give so many; the vision tower is frozen with the projector"
    )
    return [source, "preparation of images on the host is not timed"]


def _since(gpu: Gpu, capability: float) -> bool:
    return gpu.compute_capability is None or float(gpu.compute_capability) >= capability


@cache
def versions() -> tuple[tuple[str, str], ...]:
    """Names and versions of the libraries whose code is traced."""
    return tuple((name, metadata.version(name)) for name in STACK)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def simulation_code() -> str:
    """Fingerprint of the code behind simulated numbers; two versions are never mixed."""
    digest = hashlib.sha256(_code().encode())
    for path in replay_sources(Path(__file__).parent.parent):
        digest.update(path.read_bytes())
    for file in (kernel_rates.__file__, within_nodes.__file__, between_nodes.__file__):
        digest.update(Path(file).read_bytes())
    for name in (kernel_rates.FILE, within_nodes.FILE, between_nodes.LINKS):
        digest.update(shipped_text(name).encode())
    return digest.hexdigest()[:8]


@cache
def _code() -> str:
    """Fingerprint of the code that builds, steps and traces."""
    digest = hashlib.sha256()
    for path in trace_sources(Path(__file__).parent.parent):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def replay_sources(trials: Path) -> Iterator[Path]:
    """Source files whose change, beside those of traces, makes simulated numbers invalid."""
    for folder in ("simulation", "simulation/clock", "simulation/memory", "simulation/ranks"):
        yield from sorted((trials / folder).glob("*.py"))


def trace_sources(trials: Path) -> Iterator[Path]:
    """Source files whose change makes stored traces invalid."""
    for folder in (
        "models",
        "devices",
        "ranks",
        "training/optimizers",
        "training/tasks",
        "simulation/tracing",
        "simulation/tracing/kernels",
        "simulation/tracing/ranks",
        "simulation/tracing/updates",
    ):
        yield from sorted((trials / folder).glob("*.py"))
    yield trials / "records" / "model.py"
    stepping = ("census.py", "compilation.py", "finetune.py", "loss.py")
    yield from (trials / "training" / name for name in stepping)
    traced = ("recording.py", "layer_expansion.py", "trace_cache.py", "trace_request.py")
    of_ranks = ("ranks/engine_steps.py", "ranks/stream_events.py")
    yield from (trials / "simulation" / name for name in (*traced, *of_ranks))
    yield trials / "recipes" / "zero_settings.py"
