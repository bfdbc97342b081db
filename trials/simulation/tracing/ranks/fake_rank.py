"""The first rank of a group that moves nothing, with its shards of a fake model.

No other rank takes more memory, or does more. FSDP2 divides rows by rounding up: the last ranks
have fewer, and what they gather and reduce is padded to the same bytes. Parts of ``tp`` are equal.
``tests/test_ranks_fake_and_real.py`` compares all ranks. A trace is of one length: examples of
varying length, by which ranks differ, are for those who use it.
"""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from trials.models.weight_placement import DTYPES, format_of
from trials.ranks.sharding import (
    GROUP_NAMES,
    MESH_NAMES,
    Meshes,
    divide,
    unseen_propagation,
    watched_resizes,
)
from trials.recipes.parallel import MOST_GPUS, Parallel
from trials.recipes.recipe import Recipe
from trials.simulation.recording import BACKWARD, Kind, Segment
from trials.simulation.tracing.fake_model import FakePlace, Params4bit
from trials.simulation.tracing.ranks.rank_streams import RankStreams
from trials.simulation.tracing.ranks.rank_tracer import RankTracer
from trials.simulation.tracing.shape_rules import CPU
from trials.simulation.tracing.tracer import NO_NUMBERS


@cache
def fake_mesh(ranks: int, replicas: int | None) -> DeviceMesh:
    """Mesh of so many ranks, of which this process is the first; of two dimensions for replicas."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=MOST_GPUS, store=FakeStore())
    shards = ranks // (replicas or 1)
    of_shards = dist.new_group(list(range(shards)))
    if replicas is None:
        return DeviceMesh.from_group(of_shards, "cpu")
    of_replicas = dist.new_group(list(range(0, ranks, shards)))
    every = torch.arange(ranks).view(replicas, shards)
    groups = [of_replicas, of_shards]
    return DeviceMesh.from_group(groups, "cpu", every, mesh_dim_names=MESH_NAMES)


@cache
def fake_groups(ranks: int, degree: int) -> Meshes:
    """Meshes of groups of a size, in each of which this process is first; no shards for one."""
    if ranks == degree:
        return Meshes(None, fake_mesh(ranks, None))
    own = fake_mesh(degree, None).get_group()
    among = dist.new_group(list(range(0, ranks, degree)))
    every = torch.arange(ranks).view(-1, degree)
    mesh = DeviceMesh.from_group([among, own], "cpu", every, mesh_dim_names=GROUP_NAMES)
    return Meshes(*(mesh[name] for name in GROUP_NAMES))


class FakeRank:
    """First rank of a layout whose weights are in shards.

    Args:
        model: fake model, whose weights are replaced by shards.
        parallel: the layout.
        recipe: recipe of the model.
        place: mode and device of its fake tensors.

    Attributes:
        has_host: whether the host holds the shards, apart from the GPU's tensors.
    """

    def __init__(
        self, model: nn.Module, parallel: Parallel, recipe: Recipe, place: FakePlace
    ) -> None:
        self._streams = RankStreams()
        self.has_host = place.device != CPU
        if parallel.degree is None:
            meshes = Meshes(fake_mesh(parallel.gpus, parallel.replicas), None)
        else:
            meshes = fake_groups(parallel.gpus, parallel.degree)
        with place.mode, self._streams.in_place(), _real_meshes(), _beside_host(place.device):
            states = dict(_in_floats(model, recipe))
            divide(model, parallel, recipe, meshes, is_pinned=self.has_host)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # Buffers of gathered weights are made once, and resized in every step.
                    module.unshard()
                    _keep(states, module)
                    module.reshard()
            _keep(states, model)

    @contextlib.contextmanager
    def traced_by(self, tracer: RankTracer) -> Iterator[None]:
        """Report collectives, streams and gathered weights to a tracer."""
        self._streams.tracer = tracer
        try:
            with (
                self._streams.in_place(),
                watched_resizes(tracer),
                unseen_propagation(),
                _watched_ends(tracer),
                _watched_copies(tracer) if self.has_host else contextlib.nullcontext(),
            ):
                yield
        finally:
            self._streams.tracer = None


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """Let meshes be put together under fake tensors: the numbers of their ranks have values."""
    kind: Any = DeviceMesh
    own = kind._concatenate  # noqa: SLF001 - FSDP2 calls it

    def concatenated(*args: Any) -> Any:
        with _disable_current_modes():
            return own(*args)

    kind._concatenate = staticmethod(concatenated)  # noqa: SLF001 - as above
    try:
        yield
    finally:
        kind._concatenate = staticmethod(own)  # noqa: SLF001 - as above


@contextlib.contextmanager
def _watched_ends(tracer: RankTracer) -> Iterator[None]:
    """Report what copies of shards were reduced in, which lives until a backward pass has ended."""
    kind: Any = FSDPParamGroup
    own = kind.finalize_backward

    def finalize(group: Any) -> None:
        state = group._all_reduce_state  # noqa: SLF001 - no public name
        if state is not None:
            if tracer.segment in BACKWARD:  # the last turn has ended
                tracer.segment = Segment.AFTER
            tracer.dropped(state.all_reduce_input)
        del state
        is_copied = any(param.grad_offload_event is not None for param in group.fsdp_params)
        own(group)
        if is_copied:  # the host waits for the gradients
            if tracer.segment in BACKWARD:
                tracer.segment = Segment.AFTER
            tracer.event(Kind.WAITED, 0, NO_NUMBERS)

    kind.finalize_backward = finalize
    try:
        yield
    finally:
        kind.finalize_backward = own


@contextlib.contextmanager
def _watched_copies(tracer: RankTracer) -> Iterator[None]:
    """Report gradients that were copied to the host.

    A hook of their parameters would see them, but then FSDP waits for each of the copies.
    """
    own = FSDPParam.to_sharded_dtensor

    def sharded(param: Any, gradient: torch.Tensor) -> Any:
        tracer.copied_to_host(gradient)
        return own(param, gradient)

    with in_place(FSDPParam, "to_sharded_dtensor", sharded):
        yield


@contextlib.contextmanager
def _beside_host(device: torch.device) -> Iterator[None]:
    """Let FSDP2 divide a model on this device among it and the host.

    It knows no number of a CPU, and fake tensors know no pinned memory.
    """
    with (
        in_place(_fully_shard, "_get_device_from_mesh", lambda _mesh: device),
        in_place(torch.Tensor, "pin_memory", lambda tensor: tensor),
        in_place(torch.Tensor, "is_pinned", lambda _tensor: True),
    ):
        yield


@contextlib.contextmanager
def in_place(place: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute."""
    own = getattr(place, name, None)
    is_own = name in vars(place) or isinstance(getattr(type(place), name, None), property)
    setattr(place, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(place, name, own)
        else:
            delattr(place, name)


def _in_floats(model: nn.Module, recipe: Recipe) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """Store packed 4-bit weights in the compute dtype (bitsandbytes' quant_storage).

    Only so does accelerate shard them. Yields each of their layers with what bitsandbytes and PEFT
    read from the weight.
    """
    dtype = DTYPES[recipe.compute_dtype]
    for module in model.modules():
        weight = module._parameters.get("weight")  # noqa: SLF001 - getattr would ask wrappers
        if weight is None or format_of(weight) not in {"nf4", "fp4"}:
            continue
        elements = -(-weight.numel() // dtype.itemsize)
        values = torch.empty(elements, 1, dtype=dtype, device=weight.device)
        packed = Params4bit(values, requires_grad=False)
        facts = dict(vars(weight))
        vars(packed).update(facts)
        module._parameters["weight"] = packed  # noqa: SLF001 - as above
        yield module, facts


def _keep(states: dict[nn.Module, dict[str, Any]], part: nn.Module) -> None:
    """Give the present weights of a part's layers what libraries read from them."""
    for module in part.modules():
        if module in states:
            vars(module._parameters["weight"]).update(states[module])  # noqa: SLF001 - as above
