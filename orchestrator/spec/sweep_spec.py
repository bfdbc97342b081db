"""The sweep specification: which cells to measure, how, and for which job to rank them."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, WrapValidator

from gpu_catalog.catalog import Catalog, UnknownGpuError, load_catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.links.between_nodes import distinct_links
from gpu_catalog.offer import Offer
from gpu_catalog.record import Record
from orchestrator.spec.job import Job, Seconds
from orchestrator.spec.recipe_options import AutoRecipe, ChosenRecipe, OpenCell, recipe_or_auto
from orchestrator.spec.trainer_defaults import RecipeDefaults, trl_defaults
from trials.recipes.fields import PositiveInt, Switch
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.recipes.parallel import Parallel, on_instances
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell, Weights
from trials.records.compatibility import with_defaults
from trials.records.model import Model, UnknownModelError, find_model
from trials.records.timing_rule import TimingRule

Models = dict[str, Model]


def _known_gpu(key: str, info: ValidationInfo) -> str:
    assert info.context is not None  # parse_spec gives it
    catalog: Catalog = info.context["catalog"]
    if key in info.context["own"]:
        return key  # mistakes in its row are reported there
    try:
        return catalog.gpu(key).key
    except UnknownGpuError as error:
        raise ValueError(str(error)) from None


def _known_model(name: str, info: ValidationInfo) -> str:
    assert info.context is not None  # parse_spec gives it
    models: Models = info.context["models"]
    try:
        if name not in models:
            model = _with_absolute_weights(find_model(name))
            models |= {name: model, model.name: model}
    except UnknownModelError as error:
        raise ValueError(str(error)) from None
    return name


def _with_absolute_weights(model: Model) -> Model:
    """Model with the absolute path of its weights, if they are in a folder.

    The user's path is relative to where the sweep starts; Tune's workers, a resumed sweep and the
    child of a trial have other working directories.
    """
    folder = Path(model.weights or "").expanduser()
    if model.weights is None or Path(model.source) != folder / "config.json":
        return model  # a preset, or a model of the hub
    return model.model_copy(update={"weights": str(folder.absolute())})


KnownGpu = Annotated[str, AfterValidator(_known_gpu)]
KnownModel = Annotated[str, AfterValidator(_known_model)]
# An axis of a sweep: at least one value. parse_spec rejects repeated values.
GpuAxis = Annotated[tuple[KnownGpu, ...], Field(min_length=1)]
ModelAxis = Annotated[tuple[KnownModel, ...], Field(min_length=1)]
if TYPE_CHECKING:
    WrittenRecipe = Recipe | AutoRecipe
else:  # a union would be part of the locations of mistakes
    WrittenRecipe = Annotated[Recipe, WrapValidator(recipe_or_auto)]
RecipeAxis = Annotated[tuple[WrittenRecipe, ...], Field(min_length=1)]
IntAxis = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
LayoutAxis = Annotated[tuple[Parallel, ...], Field(min_length=1)]


class CellBlock(Record):
    """Every combination of these lists, on every GPU of the sweep.

    Attributes:
        models: presets, hub names, or folders with a config.json (``./NAME``, relative to the
            folder where the sweep starts).
        weights: initial weights.
        recipes: recipes written out, named (``paper-mixtral``), or named with changes: ``{named:
            paper-mixtral, attention: sdpa}``. ``auto`` is the recipe that ``estimate`` chooses on
            each GPU; ``{named: auto, method: lora}`` leaves the stated fields as they are.
        active_experts: experts per token; by default the model's own. Leave it out for models
            without experts.
        seq_lens: tokens per example.
        simulated_on: catalog keys of GPUs on which the block is simulated instead of measured.
        parallel: layouts of several GPUs that train together; by default one GPU. Such a block is
            not measured under the memory caps of ``as_if``. A layout of several nodes is simulated
            on each network of the GPU's instances unless it names one; measured, it is priced by
            instances with the network that it names.
    """

    models: ModelAxis
    weights: Weights = "random"
    recipes: RecipeAxis
    active_experts: IntAxis | None = None
    seq_lens: IntAxis
    simulated_on: GpuAxis | None = None
    parallel: LayoutAxis | None = None


class CatalogRows(Record):
    """A user's own GPUs and prices, added to the shipped catalog.

    Attributes:
        gpus: GPUs that the catalog does not have.
        offers: prices of GPUs, of the catalog or your own.
    """

    gpus: tuple[Gpu, ...] = ()
    offers: tuple[Offer, ...] = ()


class SweepSpec(Record):
    """A sweep: the cells to measure, the rules of measuring, and the job to price.

    Attributes:
        name: name of the run folder.
        gpus: catalog keys of the GPUs to measure on; it may be left out where all blocks are
            simulated.
        as_if: catalog keys of smaller GPUs. Their largest batches are measured on a larger GPU of
            ``gpus``, under a memory cap.
        cells: models, recipes and lengths to fine-tune on each GPU.
        workload: the job that the ranking prices.
        recipe_defaults: defaults of fields that a written-out recipe lacks: ``trl``, those of
            TRL's trainer, or ``plain``, those of ``Recipe``; by default plain. A named recipe is
            complete.
        seed: seed of the weights, the tokens and the order of batch sizes.
        max_batch_size: largest batch size to try.
        boundary_repeats: number of repeats of the largest batch, each in a fresh process.
        lengths: lengths of the batches that must fit: the cell's alone (``constant``), or also
            batches drawn from the lengths of the workload's data (``drawn``); by default drawn in
            simulated cells alone.
        timing: when to stop timing steps.
        build_timeout_seconds: longest time to build a model.
        probe_timeout_seconds: longest time of one probe.
        profile: whether to profile each measured cell, at batch size 1 and at its largest batch,
            after all measurements.
        catalog: GPUs and prices that the shipped catalog does not have.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    gpus: GpuAxis = ()
    as_if: tuple[KnownGpu, ...] = ()
    cells: Annotated[tuple[CellBlock, ...], Field(min_length=1)]
    workload: Job
    recipe_defaults: RecipeDefaults | None = None
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    max_batch_size: PositiveInt = 1024
    boundary_repeats: Annotated[int, Field(strict=True, ge=0)] = 1
    lengths: Literal["constant", "drawn"] | None = None
    timing: TimingRule = TimingRule()
    build_timeout_seconds: Seconds = 600.0
    probe_timeout_seconds: Seconds = 600.0
    profile: Switch = False
    catalog: CatalogRows = CatalogRows()
    _models: Models
    _base: Catalog | None
    _chosen: tuple[ChosenRecipe, ...] = ()
    __slots__ = ("_cells",)  # not a part of the specification: copies and comparisons leave it out

    def model_post_init(self, context: Any) -> None:
        """Keep the models and the base catalog of the reader, ``parse_spec``."""
        self._models, self._base = context["models"], context["base"]

    def merged_catalog(self) -> Catalog:
        """Base catalog (by default the shipped one) with the file's own rows."""
        base = self._base or load_catalog()
        return base.merged(self.catalog.gpus, self.catalog.offers)

    @property
    def models(self) -> Models:
        """Models that the specification names, by name."""
        return self._models

    def model(self, name: str) -> Model:
        """A model, as it was when the specification was read."""
        return self._models[name]

    @property
    def chosen(self) -> tuple[ChosenRecipe, ...]:
        """Recipes that were chosen where the specification has ``auto``."""
        return self._chosen

    def with_chosen(self, chosen: Iterable[ChosenRecipe]) -> Self:
        """Copy with further chosen recipes."""
        copy = self.model_copy()
        copy._chosen = (*self._chosen, *chosen)  # noqa: SLF001 - of this class
        return copy

    def open_cells(self) -> list[OpenCell]:
        """Cells whose recipe is still to be chosen, each once."""
        there = [choice.cell for choice in self._chosen]
        cells: list[OpenCell] = []
        for place in self._places():
            if isinstance(place.recipe, AutoRecipe):
                cell = place.open_cell(place.recipe)
                if cell not in there and cell not in cells:
                    cells.append(cell)
        return cells

    def draws_lengths(self, cell: Cell) -> bool:
        """Whether the largest batch of a cell is to survive drawn lengths."""
        return self.lengths == "drawn" or (self.lengths is None and cell.simulated)

    @property
    def has_plain_recipes(self) -> bool:
        """Whether recipes leave out fields, without a choice of their defaults."""
        recipes = {r for block in self.cells for r in block.recipes if isinstance(r, Recipe)}
        written = recipes - set(NAMED_RECIPES.values())
        return self.recipe_defaults is None and any(map(_leaves_out, written))

    def _blocks(self) -> Iterator[tuple[Gpu, Gpu | None, CellBlock]]:
        """Each block with a GPU that runs it, and the smaller GPU that this one stands in for."""
        gpu = self.merged_catalog().gpu
        hosts = [gpu(key) for key in self.gpus]
        devices: list[tuple[Gpu, Gpu | None]] = [(host, None) for host in hosts]
        for small in map(gpu, self.as_if):
            devices += [(host, small) for host in hosts if can_stand_in(host, small)]
        measured = [block for block in self.cells if block.simulated_on is None]
        for device, target in devices:
            blocks = (b for b in measured if target is None or b.parallel is None)
            yield from ((device, target, block) for block in blocks)
        for block in self.cells:
            yield from ((gpu(key), None, block) for key in block.simulated_on or ())

    def _places(self) -> Iterator["_Place"]:
        """Each combination of a block's lists, on each of its devices."""
        for device, target, block in self._blocks():
            layouts = self._layouts(device, block)
            for model, recipe, active, seq_len, layout in itertools.product(
                (self.model(name) for name in block.models),
                block.recipes,
                block.active_experts or (None,),
                block.seq_lens,
                layouts,
            ):
                experts = active if active is not None else model.active_experts
                yield _Place(device, target, block, model, recipe, experts, seq_len, layout)

    def _layouts(self, device: Gpu, block: CellBlock) -> list[Parallel | None]:
        """Layouts of a block; simulated ones by the links of each instance."""
        if block.parallel is None:
            return [None]
        if block.simulated_on is None:
            return [*block.parallel]
        offers = self.merged_catalog().offers(device.key)
        return [
            placed
            for layout in block.parallel
            for placed in on_instances(layout, distinct_links(offers, layout.gpus_per_node))
        ]

    def all_cells(self) -> list[Cell]:
        """All cells, each once, in the order written; simulated ones come last.

        Recipes must be chosen where the specification has ``auto``.
        """
        made: tuple[Cell, ...] | None = getattr(self, "_cells", None)
        if made is not None:  # the same objects each time, which makes look-ups of them fast
            return [*made]
        cells: dict[Cell, None] = {}  # two recipes may come to the same on a model
        filled: dict[tuple[Recipe, str, str], Recipe] = {}
        for place in self._places():
            recipe = self._recipe_at(place)
            same = recipe, place.model.name, place.device.kind
            if same not in filled:  # as long as to make ten cells
                filled[same] = with_defaults(recipe, place.model, place.device)
            cells[place.cell(filled[same])] = None
        object.__setattr__(self, "_cells", tuple(cells))
        return [*cells]

    def _recipe_at(self, place: "_Place") -> Recipe:
        if isinstance(place.recipe, Recipe):
            return place.recipe
        cell = place.open_cell(place.recipe)
        return next(choice.recipe for choice in self._chosen if choice.cell == cell)


@dataclass(frozen=True, slots=True)
class _Place:
    """A combination of a block's lists on a device, and the smaller GPU that this stands in for."""

    device: Gpu
    target: Gpu | None
    block: CellBlock
    model: Model
    recipe: Recipe | AutoRecipe
    active_experts: int | None
    seq_len: int
    parallel: Parallel | None

    def open_cell(self, auto: AutoRecipe) -> OpenCell:
        """The cell of a recipe that is to be chosen."""
        return OpenCell(
            gpu=(self.target or self.device).key,
            model=self.model.name,
            stated=auto.stated,
            active_experts=self.active_experts,
            seq_len=self.seq_len,
        )

    def cell(self, recipe: Recipe) -> Cell:
        """The cell of a recipe with its defaults."""
        return Cell(
            gpu=(self.target or self.device).key,
            capped_on=None if self.target is None else self.device.key,
            simulated=self.block.simulated_on is not None,
            model=self.model.name,
            weights=self.block.weights,
            recipe=recipe,
            experts=self.model.experts,
            active_experts=self.active_experts,
            seq_len=self.seq_len,
            parallel=self.parallel,
        )


def _leaves_out(recipe: Recipe) -> bool:
    """Whether a recipe leaves out a field that TRL's trainer has a default for."""
    defaults = trl_defaults(recipe.method, task=recipe.task, precision=recipe.precision)
    return not defaults.keys() <= recipe.model_fields_set


def can_stand_in(host: Gpu, small: Gpu) -> bool:
    """Whether a GPU can stand in for another: of its kind, with more memory."""
    return (
        host.kind == small.kind
        and small.usable_memory_bytes is not None
        and host.usable_memory_bytes is not None
        and host.usable_memory_bytes > small.usable_memory_bytes
    )
