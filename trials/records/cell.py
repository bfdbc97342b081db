"""Cells: a (GPU, model, recipe, parallel layout, sparsity, sequence length) to measure."""

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Literal, Protocol, Self, TypeVar

from pydantic import Field, model_validator

from gpu_catalog.record import Record
from trials.recipes.fields import PositiveInt
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe

Weights = Literal["random", "pretrained"]


def devices_name(key: str, count: int, nodes: int = 1) -> str:
    """Name of so many GPUs of one kind on each of so many nodes.

    It is the key of a single GPU, ``8xH100-SXM`` on one node, and ``2x8xH100-SXM`` on two.
    """
    if nodes > 1:
        return f"{nodes}x{count}x{key}"
    return key if count == 1 else f"{count}x{key}"


class Cell(Record):
    """One (GPU, model, recipe, layout, sparsity, length): the scope of one set of coefficients.

    Attributes:
        gpu: key of the GPU in the catalog.
        capped_on: key of the larger GPU that stands in for ``gpu`` with only its memory; such a
            cell gives the largest batch of ``gpu`` but not its speed. Absent when ``gpu`` itself is
            measured.
        simulated: whether a model of ``gpu`` runs it instead of a device.
        model: name of the model: a preset, a folder or a hub name.
        weights: random ones need no download and run as fast; pretrained ones route tokens as in
            real fine-tuning.
        recipe: recipe of fine-tuning, with every field that applies filled in.
        experts: experts per layer; absent for a model without experts.
        active_experts: experts each token is routed to; absent for a model without experts.
        seq_len: tokens per example; every example is this long, and so is each sequence of a pair.
        parallel: layout of several GPUs; absent for one GPU.
        image_tokens: tokens of each example that come from images; absent for text alone.
    """

    gpu: str
    capped_on: str | None = None
    simulated: Annotated[bool, Field(strict=True)] = False
    model: str
    weights: Weights = "random"
    recipe: Recipe
    experts: PositiveInt | None = None
    active_experts: PositiveInt | None = None
    seq_len: PositiveInt
    # Records of one GPU stay as they were before there were layouts.
    parallel: Annotated[Parallel | None, Field(exclude_if=lambda layout: layout is None)] = None
    image_tokens: Annotated[PositiveInt | None, Field(exclude_if=lambda n: n is None)] = None

    @model_validator(mode="after")
    def _active_experts_exist(self) -> Self:
        if (self.experts is None) != (self.active_experts is None):
            raise ValueError("experts and active_experts are given together or not at all")
        if self.experts is not None and self.active_experts is not None:  # noqa: SIM102
            # Two conditions: the first narrows the types for the second.
            if self.active_experts > self.experts:
                raise ValueError(
                    f"active_experts {self.active_experts} exceeds the {self.experts} experts "
                    f"of {self.model}"
                )
        return self

    @model_validator(mode="after")
    def _some_tokens_are_text(self) -> Self:
        if self.image_tokens is not None and self.image_tokens >= self.seq_len:
            raise ValueError(
                f"image_tokens {self.image_tokens} leave no text in the {self.seq_len} tokens of "
                "an example: give fewer, or a longer seq_len"
            )
        return self

    @model_validator(mode="after")
    def _ranks_share_the_batch(self) -> Self:
        whole = self.recipe.effective_batch
        if self.parallel is not None and whole is not None and whole % self.data_parallel_ranks:
            raise ValueError(
                f"effective_batch {whole} cannot be shared by {self.parallel.sharers}: use a "
                "multiple"
            )
        return self

    @property
    def ranks(self) -> int:
        """GPUs that train together."""
        return 1 if self.parallel is None else self.parallel.gpus

    @property
    def data_parallel_ranks(self) -> int:
        """GPUs, or groups of them under ``tp``, that train on parts of their own of a batch."""
        return 1 if self.parallel is None else self.parallel.data_parallel_ranks

    def examples_per_second(self, batch_size: int, seconds: float) -> float:
        """Throughput of all GPUs.

        Args:
            batch_size: examples of a micro-batch on each of them.
            seconds: duration of a micro-batch, with its share of the update.
        """
        return self.data_parallel_ranks * batch_size / seconds

    @property
    def nodes(self) -> int:
        """Nodes that these GPUs are on."""
        return 1 if self.parallel is None else self.parallel.nodes

    def node_of(self, rank: int) -> int:
        """Number of the node that a rank is on."""
        return 0 if self.parallel is None else rank // self.parallel.gpus_per_node

    @property
    def rank_recipe(self) -> Recipe:
        """Recipe of one GPU, whose effective batch is its part of the whole one."""
        if self.parallel is None:
            return self.recipe
        return self.recipe.of_rank(self.data_parallel_ranks)

    def limit_name(self, batch_size: int) -> str:
        """Limit of batch sizes that the largest one has reached."""
        whole = self.rank_recipe.effective_batch
        return "effective batch" if whole is not None and batch_size >= whole else "search's limit"

    @property
    def sparsity(self) -> float:
        """Active experts over experts, the paper's s (2408.04693, Eq. 1): 1.0 without experts."""
        if self.experts is None or self.active_experts is None:
            return 1.0
        return self.active_experts / self.experts

    @property
    def device(self) -> str:
        """Key of the GPU that runs the cell."""
        return self.capped_on or self.gpu

    @property
    def devices(self) -> str:
        """Number and key of the GPUs that run the cell, by ``devices_name``."""
        if self.parallel is None:
            return self.device
        return devices_name(self.device, self.ranks_per_node, self.nodes)

    @property
    def ranks_per_node(self) -> int:
        """GPUs on each node that train together."""
        return self.ranks // self.nodes

    @property
    def node_devices(self) -> str:
        """Number and key of the GPUs of each node."""
        return devices_name(self.device, self.ranks_per_node)

    @property
    def gpus(self) -> str:
        """GPU in question, or how many of them train together and how, in a table."""
        layout = self.parallel
        if layout is None:
            return self.gpu
        nodes = f", {layout.nodes} nodes" if layout.nodes > 1 else ""
        return f"{layout.counted(self.gpu)} {layout.strategy}{nodes}"

    @property
    @lru_cache(maxsize=4096)  # noqa: B019 - asked for each probe and each offer of a cell
    def key(self) -> str:
        """A stable name, for example ``cpu/mixtral-tiny/full-fp32-grouped/2of8/seq128``."""
        return "/".join(filter(None, self.key_parts))

    @property
    def key_parts(self) -> tuple[str, ...]:
        """Parts of the key in their order; one that the cell does not have is empty."""
        gpu = self.gpu if self.capped_on is None else f"{self.gpu}@{self.capped_on}"
        gpu = f"{gpu}(simulated)" if self.simulated else gpu
        model = self.model if self.weights == "random" else f"{self.model}+{self.weights}"
        routing = "dense" if self.experts is None else f"{self.active_experts}of{self.experts}"
        layout = "" if self.parallel is None else self.parallel.key
        images = "" if self.image_tokens is None else f"images{self.image_tokens}"
        return gpu, model, self.recipe.key, routing, f"seq{self.seq_len}", images, layout


class OfCell(Protocol):
    """Record that belongs to one cell."""

    @property
    def cell(self) -> Cell:
        """Cell of the record."""


S = TypeVar("S", bound=OfCell)


def by_cell(records: Iterable[S]) -> defaultdict[Cell, list[S]]:
    """Group records by cell, in their order; a cell without records has an empty list."""
    groups: defaultdict[Cell, list[S]] = defaultdict(list)
    cell = None
    for record in records:
        if record.cell is not cell:  # most follow another one of their cell
            cell = record.cell
            group = groups[cell]
        group.append(record)
    return groups
