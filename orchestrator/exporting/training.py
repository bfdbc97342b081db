"""A fine-tuning that is to be started, and the offers to start it on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_catalog.errors import UserError
from gpu_catalog.number_text import short
from orchestrator.clouds.node_types import named_region
from orchestrator.pricing.catalog_file import OWN
from orchestrator.pricing.own_cards import electricity_text
from trials.recipes.parallel import Strategy
from trials.recipes.recipe import Recipe
from trials.recipes.zero_settings import ZeroSettings
from trials.records.model import Model
from trials.records.observation import Basis

FALLBACKS = 3
"""Offers in a task file besides the first one."""


class ExportError(UserError):
    """The training cannot be exported; a line for each reason."""


@dataclass(frozen=True, slots=True)
class ChosenOffer:
    """Offer that the training may run on.

    Attributes:
        gpu: catalog key of the GPU.
        region: the provider's name of the region; a text such as "all listed regions" is none.
        usd_per_hour: price of the whole instance, or of all ``instances``, one a node.
        hours, usd: hours and dollars of the whole job.
        hours_high: upper end of the 90 % interval of the hours.
        checkpoint_minutes: minutes of work between two checkpoints.
        rdma: whether hours are those of a network between instances that bypasses the host.
        is_electricity: whether the price is the electricity of cards that the user owns.
    """

    gpu: str
    provider: str
    region: str
    instance: str
    market: str
    gpus_per_instance: int
    usd_per_hour: float
    hours: float
    hours_high: float
    usd: float
    checkpoint_minutes: float
    instances: int = 1
    rdma: bool = False
    is_electricity: bool = False

    @property
    def named_region(self) -> str | None:
        """The region, where the offer is of a single one."""
        return named_region(self.region)

    @property
    def is_spot(self) -> bool:
        """Whether the provider may reclaim the instance."""
        return self.market == "spot"

    @property
    def text(self) -> str:
        """The offer in a line."""
        number = f"{self.instances} x " if self.instances > 1 else ""
        where = f"{number}{self.provider} {self.instance} {self.region} {self.market}"
        if self.provider == OWN:
            where = f"your own ({self.instance})"
        alone = f" ({electricity_text(self.gpus_per_instance)})" * self.is_electricity
        return (
            f"{self.gpu}: {where}, ${short(self.usd_per_hour, 4)} per hour{alone}, "
            f"{self.hours:.1f} h, ${self.usd:.2f}"
        )


@dataclass(frozen=True, slots=True)
class PatchedConfiguration:
    """Configuration of a trainer for a task file.

    Attributes:
        name: name of the file, without folder.
        trainer: name of the trainer.
        version: version of the trainer.
        text: the configuration, with the micro-batch and accumulation of the export, and with the
            content of its file of DeepSpeed.
        diff: unified difference from the user's file; empty where there is none.
        files: local data by the names that the configuration has for them.
    """

    name: str
    trainer: str
    version: str
    text: str
    diff: str
    files: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Fine-tuning that is to be started.

    Attributes:
        recipe: recipe with every field that applies filled in.
        active_experts: experts that each token is routed to; None for a model without experts.
        seq_len: tokens that longer examples are truncated to, or tokens of a packed row.
        examples: number of training examples, for which hours and dollars are.
        micro_batch: examples per micro-batch.
        groups_by_length: whether a batch has examples of similar length.
        steps: optimizer steps of the whole training.
        placements: offers on which the micro-batch fits, the chosen one first.
        basis: basis of hours and dollars.
        dataset: data set of the hub, or a file or folder; None for one to be named.
        expandable_segments: setting of PyTorch's allocator.
        configuration: configuration of the user's trainer; None to train by TRL's command.
        gpus: GPUs of all nodes, which train together.
        strategy: how they share the training; None for one GPU.
        nodes: nodes with as many of the GPUs each.
        replicas: copies of the model, each in shards among GPUs of its own; for ``hsdp`` alone.
        zero: settings of DeepSpeed's ZeRO; None without it.
        shards_on_host: whether the host holds the shards of ``fsdp2`` or ``hsdp``.
        host_gib: memory that it keeps on the host of each node; None for none, or where unknown.
        on_cpu: whether the chosen offer is of a CPU, so that the job asks for no GPU.
    """

    model: Model
    recipe: Recipe
    active_experts: int | None
    seq_len: int
    examples: int
    epochs: int
    micro_batch: int
    groups_by_length: bool
    steps: int
    placements: tuple[ChosenOffer, ...]
    basis: Basis
    dataset: str | None = None
    subset: str | None = None
    split: str | None = None
    text_field: str | None = None
    expandable_segments: bool = False
    configuration: PatchedConfiguration | None = None
    gpus: int = 1
    strategy: Strategy | None = None
    nodes: int = 1
    replicas: int | None = None
    zero: ZeroSettings | None = None
    shards_on_host: bool = False
    host_gib: float | None = None
    on_cpu: bool = False

    @property
    def host_gib_asked(self) -> int:
        """Memory of a host to ask for, in whole GiB; 0 where it keeps nothing there."""
        return math.ceil(self.host_gib or 0)

    @property
    def is_sharded(self) -> bool:
        """Whether each GPU has a shard of the model, not a copy."""
        return self.strategy in {"fsdp2", "hsdp"}

    @property
    def is_by_deepspeed(self) -> bool:
        """Whether the GPUs share the training by DeepSpeed."""
        return self.zero is not None

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node."""
        return self.gpus // self.nodes

    @property
    def accumulation(self) -> int:
        """Micro-batches of each GPU per optimizer step."""
        return self.recipe.of_rank(self.gpus).micro_batches(self.micro_batch)

    @property
    def effective_batch(self) -> int:
        """Examples, or packed rows, per optimizer step."""
        return self.micro_batch * self.accumulation * self.gpus
