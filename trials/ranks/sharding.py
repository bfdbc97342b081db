"""A model in shards on several ranks, as accelerate divides it for transformers' Trainer."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import Replicate, _sharding_prop
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import _disable_current_modes

from trials.devices.storages import StorageWatch
from trials.models.fused_head import base_of
from trials.models.weight_placement import DTYPES, decoder_layers
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe

MESH_NAMES = ("replicate", "shard")
"""Dimensions of a mesh of several copies of a model, each in shards."""
GROUP_NAMES = ("shard", "tp")
"""Dimensions of a mesh of several groups, among whose ranks linear layers are divided."""
LAYERS = "layers.*."
"""Beginning of the names of a decoder layer's modules in transformers' plans."""
OF_EACH = ("aten::_foreach_", "aten::_fused_adam")
"""Names of operators on lists of tensors, each of which they treat by itself."""


class Meshes(NamedTuple):
    """Ranks among which a model is divided.

    Attributes:
        shards: ranks among which weights are in shards, in one dimension, or in the two of
            ``MESH_NAMES``; None for none.
        group: ranks among which linear layers are divided, by ``tp``; None for none.
    """

    shards: DeviceMesh | None
    group: DeviceMesh | None


def divide(  # noqa: PLR0913 - a model and its layout
    model: nn.Module,
    parallel: Parallel,
    recipe: Recipe,
    meshes: Meshes,
    *,
    is_pinned: bool,
    restore: Callable[[nn.Module], None] = lambda _: None,
) -> None:
    """Divide a model among ranks as its layout says, in place, a decoder layer at a time.

    The units whose shards are gathered together are those of accelerate 1.15
    (``fsdp2_prepare_model``): every decoder layer, the embedding, the last norm with the head, and
    what is left.

    Args:
        model: model under its recipe.
        parallel: layout of a strategy other than ``ddp``.
        recipe: recipe of the model, whose autocast dtype is that of gathered weights and of reduced
            gradients.
        meshes: ranks among which it is divided.
        is_pinned: whether shards on the host are in pinned memory, as beside a GPU.
        restore: gives a part of the model all of its weights on this rank, before it is divided.
    """
    shards, group = meshes
    styles = {} if group is None else _styles(model)
    settings = {} if shards is None else _settings(parallel, recipe, shards, is_pinned=is_pinned)

    def sharded(unit: Any, *, reshards: bool | None) -> None:
        if shards is not None:
            fully_shard(unit, reshard_after_forward=reshards, **settings)

    for layer in decoder_layers(model):
        restore(layer)
        if group is not None:
            # Every rank has the same weights, and takes its part of its own.
            parallelize_module(layer, group, styles, src_data_rank=None)
        sharded(layer, reshards=parallel.reshards)
    restore(model)
    if group is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type != group.device_type:  # what stays whole
                tensor.data = tensor.data.to(group.device_type)
    if shards is None:
        return
    given: Any = model
    embedding, head = given.get_input_embeddings(), given.get_output_embeddings()
    is_tied = embedding.weight is getattr(head, "weight", None)
    if not is_tied:
        sharded(embedding, reshards=parallel.reshards)
    tail = [_last_norm(base_of(model)), *([embedding] if is_tied else []), head]
    # The backward pass begins with these, so that freeing them would gather them twice in a row.
    sharded([m for m in tail if m is not None], reshards=False)
    sharded(model, reshards=None)


def _settings(
    parallel: Parallel, recipe: Recipe, mesh: DeviceMesh, *, is_pinned: bool
) -> dict[str, Any]:
    """Settings of every unit of shards."""
    dtype = None if recipe.autocast is None else DTYPES[recipe.autocast]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if parallel.shards_on_host:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=is_pinned)
    return settings


def _last_norm(model: Any) -> nn.Module | None:
    """Last norm among the children of the model below the head, as accelerate finds it."""
    norms = [m for m in model.base_model.children() if "Norm" in type(m).__name__]
    return norms[-1] if norms else None


def _styles(model: nn.Module) -> dict[str, ParallelStyle]:
    """Styles in which the linear layers of a decoder layer are divided in a group, by name.

    The layers, and the dimension that each is divided along, are those of transformers' own plan of
    the model's family (``base_model_tp_plan``). Embedding, norms and head stay whole on each rank.

    Where all weights are trained, what layers of one block read becomes one distributed tensor, so
    that their parts of its gradient are added before they are summed among the ranks: once for a
    block. With adapters each layer sums its own, as PEFT 0.21 does (``LoraModel``).
    """
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    base: Any = base_of(model).base_model
    first = decoder_layers(model)[0]
    layers: dict[str, ParallelStyle] = {
        part: styles[style]()
        for path, style in base.config.base_model_tp_plan.items()
        if style in styles  # others sum gradients of norms, which are frozen
        for name in [path.removeprefix(LAYERS)]
        for part in _divided(first.get_submodule(name), name, style)
    }
    if all(parameter.requires_grad for parameter in model.parameters()):
        layers |= _inputs_of_blocks()
    return layers


def _divided(layer: nn.Module, name: str, style: str) -> list[str]:
    """Names of the linear layers that are divided for a layer: of its adapter, the half beside it.

    The other half of an adapter reads, or makes, as many elements as the rank of the adapter, and
    stays whole.
    """
    if not hasattr(layer, "base_layer"):  # which a layer of PEFT has
        return [name]
    half = "lora_B" if style == "colwise" else "lora_A"
    return [f"{name}.base_layer", f"{name}.{half}.*"]


def _inputs_of_blocks() -> dict[str, ParallelStyle]:
    """Styles by which the input of attention, and of the block after it, is one tensor."""
    whole = Replicate()
    return {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
    }


@contextlib.contextmanager
def watched_resizes(watch: StorageWatch) -> Iterator[None]:
    """Let a watch see gathered weights come and go: FSDP resizes storages without an operator."""
    modules: list[Any] = [_fsdp_param, _fsdp_param_group]
    names = ("alloc_storage", "free_storage")
    own = [
        (module, name, getattr(module, name))
        for module in modules
        for name in names
        if hasattr(module, name)
    ]

    def watched(resize: Any) -> Any:
        def resized(tensor: torch.Tensor) -> None:
            resize(tensor)
            watch.note_tensor(tensor)

        return resized

    for module, name, resize in own:
        setattr(module, name, watched(resize))
    try:
        yield
    finally:
        for module, name, resize in own:
            setattr(module, name, resize)


@contextlib.contextmanager
def unseen_propagation() -> Iterator[None]:
    """Hide the tensors of global size on which DTensor works out the shapes of a result.

    On the way, DTensor looks for strided shards among all tensors of a list, for each of them.
    Shards along one dimension of a mesh have none, so the search is left out: it takes most of a
    trace. Much of the rest is left out by ``_by_distinct_tensors``.
    """
    kind: Any = ShardingPropagator
    shapes, shardings = "_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"
    own: dict[str, Callable[..., Any]] = {name: getattr(kind, name) for name in (shapes, shardings)}
    search: Callable[..., None] = _sharding_prop._propagate_use_strided_shard_flag  # noqa: SLF001 - no public name

    def unseen(*args: Any) -> Any:
        with _disable_current_modes():
            return own[shapes](*args)

    setattr(kind, shapes, unseen)
    setattr(kind, shardings, _by_distinct_tensors(own[shardings]))
    _sharding_prop._propagate_use_strided_shard_flag = lambda *_: None  # noqa: SLF001 - as above
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(kind, name, function)
        _sharding_prop._propagate_use_strided_shard_flag = search  # noqa: SLF001 - as above


def _by_distinct_tensors(
    propagate: Callable[[ShardingPropagator, OpSchema], OutputSharding],
) -> Callable[[ShardingPropagator, OpSchema], OutputSharding]:
    """Let DTensor work out how operators on lists divide them by their distinct tensors alone.

    A model of many layers has few. These operators treat each tensor of a list by itself.
    """

    def propagated(propagator: ShardingPropagator, schema: OpSchema) -> OutputSharding:
        operator: Any = schema.op
        if not operator.name().startswith(OF_EACH):
            return propagate(propagator, schema)
        args = schema.args_schema
        rows = list(zip(*(arg for arg in args if arg and isinstance(arg, list)), strict=True))
        places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        columns = iter(zip(*places, strict=True))
        few = tuple(list(next(columns)) if arg and isinstance(arg, list) else arg for arg in args)
        sharding = propagate(
            propagator, OpSchema(schema.op, few, schema.kwargs_schema, schema.schema_info)
        )
        if sharding.needs_redistribute:
            return propagate(propagator, schema)
        specs: Any = sharding.output_spec
        if specs is not None:
            sharding.output_spec = tuple(specs[places[row]] for row in rows)
        return sharding

    return propagated
