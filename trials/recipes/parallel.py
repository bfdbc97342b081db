"""Layouts of several GPUs that train one model."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from gpu_catalog.gpu import Gpu, Interconnect, Positive
from gpu_catalog.links.between_nodes import InstanceLinks, NodeNetwork
from gpu_catalog.record import Record
from trials.recipes.unsimulated_strategies import unsimulated_strategy
from trials.recipes.zero_settings import BY_WIDTH, Offload, ZeroSettings

ZeroStrategy = Literal["deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"]
Strategy = Literal["ddp", "fsdp2", "hsdp", "tp", ZeroStrategy]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
ZERO_STRATEGIES: tuple[ZeroStrategy, ...] = get_args(ZeroStrategy)
ZERO_STAGES: dict[str, int] = {name: int(name[-1]) for name in ZERO_STRATEGIES}
"""Stage of DeepSpeed's ZeRO by strategy."""
SHARDED_BY_TORCH = ("fsdp2", "hsdp")
"""Strategies whose shards the host may hold, all of them (torch's ``CPUOffloadPolicy``)."""
WEIGHTS_DIVIDED = 3
"""Stage of ZeRO that divides the weights, beside optimizer state and gradients."""
MOST_GPUS = 512
"""Most GPUs of a layout. The fake process group of a trace has as many ranks."""


class Parallel(Record):
    """GPUs that train a model together, each on its own part of every batch.

    GPUs are numbered node by node, so that neighbours are on one node.

    Attributes:
        gpus: number of GPUs of all nodes, which is that of the ranks; one only where DeepSpeed
            offloads.
        strategy: ``ddp`` for a copy of the model on each GPU (torch's DistributedDataParallel);
            ``fsdp2`` for weights, gradients and optimizer state in shards (torch's
            ``fully_shard``); ``hsdp`` for copies of the model, each in shards among GPUs of its own
            (``fully_shard`` on a mesh of two dimensions); ``tp`` for linear layers in parts, whose
            results are summed among the GPUs of a group (torch's ``parallelize_module``), which all
            train on the same batch; ``deepspeed-zero1`` to ``-zero3`` for DeepSpeed's ZeRO, which
            divides the optimizer state, from stage 2 on gradients, and in stage 3 the weights.
        reshard_after_forward: whether gathered weights are freed between a layer's forward and
            backward pass (true is ZeRO-3, false is about ZeRO-2); absent for ``ddp``.
        degree: number of GPUs of a group of ``tp``, by default those of a node; with more than one
            group, weights are in shards among the groups, as by ``fsdp2``. For ``tp`` alone.
        zero: settings of ZeRO; for ``deepspeed-zero1`` to ``-zero3`` alone. Absent for DeepSpeed's
            own, with the sizes of stage 3 that transformers puts in place of ``auto``. A key
            ``offload`` beside ``strategy`` adds its own to these, and may not contradict them.
        shards_on_host: whether the host holds the shards and updates them; true, or absent. For
            ``fsdp2`` and ``hsdp`` alone, where it is ``offload: all``.
        replicas: number of copies of the model; for ``hsdp`` alone.
        nodes: number of nodes, with as many GPUs each.
        node_network_gbps: network of a node to the others, in 10^9 bits per second and direction;
            absent for one node, or where unknown.
        rdma: whether that network reaches memory without the host: InfiniBand, RoCE or EFA.
        interconnect: link between the GPUs of a node; absent for that of the GPU in the catalog.
    """

    gpus: Annotated[int, Field(ge=1, le=MOST_GPUS)]
    strategy: Strategy
    reshard_after_forward: bool | None = None
    # Records of one node stay as they were before there were several.
    zero: Annotated[ZeroSettings | None, Field(exclude_if=lambda n: n is None)] = None
    shards_on_host: Annotated[Literal[True] | None, Field(exclude_if=lambda n: n is None)] = None
    replicas: Annotated[int | None, Field(ge=2, exclude_if=lambda n: n is None)] = None
    degree: Annotated[int | None, Field(ge=2, exclude_if=lambda n: n is None)] = None
    nodes: Annotated[int, Field(ge=1, exclude_if=lambda n: n == 1)] = 1
    node_network_gbps: Annotated[Positive | None, Field(exclude_if=lambda n: n is None)] = None
    rdma: Annotated[bool | None, Field(exclude_if=lambda yes: yes is None)] = None
    interconnect: Annotated[Interconnect | None, Field(exclude_if=lambda n: n is None)] = None

    @field_validator("strategy", mode="before")
    @classmethod
    def _is_simulated(cls, name: Any) -> Any:
        reason = unsimulated_strategy(name) if isinstance(name, str) else None
        if reason is not None:
            raise ValueError(f"{reason}: use {', '.join(STRATEGIES[:-1])} or {STRATEGIES[-1]}")
        return name

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, fields: Any) -> Any:
        """Fill in offloading and degree, so that equal layouts are equal records."""
        if not isinstance(fields, dict):
            return fields
        if "offload" in fields:
            fields = _with_offload(fields)
        if fields.get("strategy") != "tp":
            return fields
        gpus, nodes = fields.get("gpus"), fields.get("nodes", 1)
        if fields.get("degree") is not None or not (
            isinstance(gpus, int) and nodes in range(1, 1 + gpus)
        ):
            return fields
        return fields | {"degree": gpus // nodes} if gpus // nodes > 1 else fields

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        problem = next(_problems(self), None)
        if problem is not None:
            raise ValueError(problem)
        return self

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks, or groups of them under ``tp``, that train on parts of their own of a batch."""
        return self.gpus // (self.degree or 1)

    def data_rank(self, rank: int) -> int:
        """Number of the part of a batch that a rank trains on; those of a group have the same."""
        return rank // (self.degree or 1)

    @property
    def sharers(self) -> str:
        """GPUs or groups that share a batch, in words: ``8 GPUs``."""
        groups = self.data_parallel_ranks
        if self.degree is None:
            return f"{self.gpus} GPUs"
        return f"{groups} {'group' if groups == 1 else 'groups'} of {self.degree} GPUs"

    def counted(self, gpu: str) -> str:
        """Name of a GPU with the number of those that train together: ``8xA40``; one is itself."""
        return gpu if self.gpus == 1 else f"{self.gpus}x{gpu}"

    @property
    def zero_stage(self) -> int | None:
        """Stage of DeepSpeed's ZeRO; None without DeepSpeed."""
        return ZERO_STAGES.get(self.strategy)

    @property
    def zero_settings(self) -> ZeroSettings | None:
        """Settings of ZeRO, given or by default; None without DeepSpeed."""
        if self.zero_stage is None:
            return None
        return self.zero or default_zero(self.strategy)

    @property
    def has_default_zero(self) -> bool:
        """Whether the settings of ZeRO are those by default, but for offloading."""
        return self.zero is None or (
            self.offload is not None
            and self.zero.model_copy(update={"offload": None}) == default_zero(self.strategy)
        )

    @property
    def offload(self) -> Offload | None:
        """Part of a training that the host holds; None for nothing."""
        if self.shards_on_host:
            return "all"
        return None if self.zero is None else self.zero.offload

    @property
    def updates_on_host(self) -> bool:
        """Whether DeepSpeed updates the weights on the host, which holds the optimizer's state."""
        return self.zero is not None and self.zero.updates_on_host

    @property
    def is_gathered(self) -> bool:
        """Whether weights are in shards that are gathered when they are used."""
        return self.is_sharded and self.data_parallel_ranks > 1

    @property
    def meets_once(self) -> bool:
        """Whether ranks wait for one another once in an optimizer step, not in each micro-batch."""
        return self.strategy == "ddp" or self.zero_stage == 1

    @property
    def is_sharded(self) -> bool:
        """Whether each GPU holds a shard of the training, not a copy of all of it."""
        return self.strategy != "ddp"

    @property
    def shards(self) -> int:
        """Parts that the weights are divided into."""
        is_whole = not self.is_sharded or self.zero_stage not in {None, WEIGHTS_DIVIDED}
        return 1 if is_whole else self.gpus // (self.replicas or 1)

    @property
    def reshards(self) -> bool:
        """Whether gathered weights are freed between the passes, as by default."""
        return self.is_gathered and self.reshard_after_forward is not False

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node."""
        return self.gpus // self.nodes

    @property
    def network(self) -> NodeNetwork | None:
        """Network of a node; None for one node, or where unknown."""
        if self.node_network_gbps is None or self.rdma is None:
            return None
        return NodeNetwork(self.node_network_gbps, self.rdma)

    def on_network(
        self, network: NodeNetwork | None, interconnect: Interconnect | None = None
    ) -> Self:
        """The same GPUs on nodes with this network, and with this link between those of a node."""
        fields = (None, None) if network is None else (network.gbps, network.rdma)
        names = ("node_network_gbps", "rdma", "interconnect")
        return self.model_copy(update=dict(zip(names, (*fields, interconnect), strict=True)))

    @property
    def on_one_node(self) -> Self:
        """The same ranks wherever they are: memory and operators do not depend on nodes."""
        return self.on_network(None).model_copy(update={"nodes": 1})

    @property
    def key(self) -> str:
        """A stable short name, for example ``8xfsdp2`` or ``16xhsdp-2replicas-2nodes``."""
        parts = {
            f"{self.gpus}x{self.strategy}": True,
            f"{self.replicas}replicas": self.replicas is not None,
            f"{self.degree}degree": self.degree not in {None, self.gpus},
            f"{self.offload}-offloaded": self.offload is not None,
            "" if self.zero is None else _digest(self.zero): not self.has_default_zero,
            "unresharded": self.is_gathered and not self.reshards,
            f"{self.nodes}nodes": self.nodes > 1,
            f"{self.node_network_gbps:g}gbps" if self.node_network_gbps else "": self.rdma
            is not None,
            "rdma": bool(self.rdma),
            f"{self.interconnect}": self.interconnect is not None,
        }
        return "-".join(part for part, is_there in parts.items() if is_there)


def link_within(gpu: Gpu, layout: Parallel | None) -> Interconnect | None:
    """Link between the GPUs of a node: the layout's, or else that of the GPU in the catalog."""
    return (layout and layout.interconnect) or gpu.interconnect


def on_instances(layout: Parallel, instances: Iterable[InstanceLinks]) -> list[Parallel]:
    """A layout by the links of each instance, each once; links of its own stay."""
    placed: dict[Parallel, None] = {}
    for links in instances:
        network = layout.network or (links.network if layout.nodes > 1 else None)
        inside = links.interconnect if layout.gpus_per_node > 1 else None
        placed[layout.on_network(network, layout.interconnect or inside)] = None
    return list(placed) or [layout]


def _problems(layout: Parallel) -> Iterator[str]:
    """Reasons why a layout cannot be, each with a remedy."""
    is_unsharded = layout.strategy == "ddp" or layout.zero_stage is not None
    if is_unsharded and layout.reshard_after_forward is not None:
        yield "reshard_after_forward is a choice of fsdp2 and hsdp: leave it out"
    yield from _problems_of_offload(layout)
    if layout.strategy != "hsdp" and layout.replicas is not None:
        yield f"replicas is a choice of hsdp, not of {layout.strategy}: leave it out"
    if layout.strategy == "hsdp" and layout.replicas is None:
        yield "hsdp needs replicas, the number of copies of the model: add it"
    yield from _problems_of_degree(layout)
    if layout.gpus == 1 and (layout.zero is None or layout.zero.offload is None):
        yield f"gpus must be at least 2 for {layout.strategy}, or 1 for DeepSpeed with offload"
    copies = layout.replicas
    if copies is not None and (layout.gpus % copies or layout.gpus < 2 * copies):
        yield (
            f"{layout.gpus} GPUs cannot be divided into {layout.replicas} replicas of at least 2: "
            "use a multiple"
        )
    if layout.gpus % layout.nodes:
        yield f"{layout.gpus} GPUs cannot be divided among {layout.nodes} nodes: use a multiple"
    if (
        layout.is_sharded
        and layout.shards % layout.gpus_per_node
        and layout.gpus_per_node % layout.shards
    ):
        yield (
            f"replicas of {layout.shards} GPUs do not fill whole nodes of {layout.gpus_per_node}: "
            f"use as many replicas as nodes, {layout.nodes}"
        )
    yield from _problems_of_links(layout)


def _problems_of_links(layout: Parallel) -> Iterator[str]:
    if (layout.node_network_gbps is None) != (layout.rdma is None):
        yield "node_network_gbps and rdma are given together or not at all"
    if layout.nodes == 1 and layout.rdma is not None:
        yield "node_network_gbps and rdma are those of several nodes: add nodes, or leave them"
    if layout.gpus_per_node == 1 and layout.interconnect is not None:
        yield "interconnect is the link between GPUs of a node, which has one: leave it out"


def _problems_of_offload(layout: Parallel) -> Iterator[str]:
    if layout.shards_on_host and layout.strategy not in SHARDED_BY_TORCH:
        yield f"shards_on_host is a choice of fsdp2 and hsdp, not of {layout.strategy}: remove it"
    if layout.zero is not None and layout.zero_stage is None:
        yield f"zero has settings of DeepSpeed, not of {layout.strategy}: leave it out"
    elif layout.zero_stage in {1, 2} and layout.offload in {"parameters", "all"}:
        yield (
            f"offload {layout.offload} needs deepspeed-zero3, not {layout.strategy}: use optimizer"
        )


def _problems_of_degree(layout: Parallel) -> Iterator[str]:
    if layout.strategy != "tp":
        if layout.degree is not None:
            yield f"degree is a choice of tp, not of {layout.strategy}: leave it out"
        return
    if layout.degree is None:
        yield "tp needs at least 2 GPUs on a node: use fsdp2, or fewer nodes"
    elif layout.gpus_per_node % layout.degree:
        yield (
            f"degree {layout.degree} of tp does not divide the {layout.gpus_per_node} GPUs of a "
            "node: use a divisor"
        )
    elif layout.degree == layout.gpus and layout.reshard_after_forward is not None:
        yield "reshard_after_forward is a choice of tp with a degree below gpus: leave it out"


def default_zero(strategy: str) -> ZeroSettings:
    """Settings of ZeRO by default."""
    return BY_WIDTH if ZERO_STAGES[strategy] == WEIGHTS_DIVIDED else ZeroSettings()


def _with_offload(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a layout with ``offload`` as its strategy has it: a setting of ZeRO, or of shards.

    Raises:
        ValueError: the strategy does not offload so, or another field says otherwise.
    """
    offload, strategy = fields["offload"], fields.get("strategy")
    others = {name: value for name, value in fields.items() if name != "offload"}
    for name, stated in _offloads_stated(others).items():
        if offload not in {None, stated}:
            raise ValueError(f"offload {offload} contradicts {name}: leave out one of them")
    if offload in (None, "none") or strategy not in STRATEGIES:
        return others  # a strategy that is none is a mistake of its own
    if strategy in SHARDED_BY_TORCH:
        if offload != "all":
            raise ValueError(
                f"offload {offload} is a choice of DeepSpeed: {strategy} offloads weights, "
                "gradients and optimizer together: use all"
            )
        return {**others, "shards_on_host": True}
    if strategy not in ZERO_STAGES:
        raise ValueError(
            f"offload is a choice of DeepSpeed, fsdp2 and hsdp, not of {strategy}: leave it out"
        )
    zero = fields.get("zero") or default_zero(strategy)
    if not isinstance(zero, (Mapping, ZeroSettings)):
        return others  # whose settings are a mistake
    return {**others, "zero": {**dict(zero), "offload": offload}}


def _offloads_stated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Offloading by each field of a layout that states it, by its text."""
    zero = fields.get("zero")
    own = dict(zero).get("offload") if isinstance(zero, (Mapping, ZeroSettings)) else None
    stated = {} if own is None else {f"zero: {{offload: {own}}}": own}
    return stated | ({"shards_on_host: true": "all"} if fields.get("shards_on_host") else {})


def _digest(settings: ZeroSettings) -> str:
    """Short name of settings of ZeRO."""
    return hashlib.sha256(repr(sorted(settings.given().items())).encode()).hexdigest()[:6]
