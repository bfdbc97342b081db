"""The sweep specification: YAML, validated, with all its mistakes told at once."""

import itertools
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo

from gpu_catalog.catalog import Catalog, CatalogError, UnknownGpuError, load_catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from gpu_catalog.record import Record
from orchestrator.located_yaml import LocatedYaml, Location, Problem, read_yaml
from orchestrator.wording import dotted, say, shown
from trials.models.preset import Preset, UnknownModelError, preset_by_name, presets
from trials.timing import TimingRule
from trials.workload import Cell, PositiveInt, Recipe

DEFAULT_SPEC = "laptop.yaml"


class SpecError(ValueError):
    """A specification that cannot be run; the message has one line per mistake."""


def _known_gpu(key: str, info: ValidationInfo) -> str:
    assert info.context is not None  # parse_spec gives it
    catalog: Catalog = info.context["catalog"]
    if key in info.context["own"]:
        return key  # what is wrong with its row, if anything, is told there
    try:
        return catalog.gpu(key).key
    except UnknownGpuError as error:
        raise ValueError(str(error)) from None


def _known_model(name: str) -> str:
    try:
        return preset_by_name(name).name
    except UnknownModelError as error:
        raise ValueError(str(error)) from None


Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
KnownGpu = Annotated[str, AfterValidator(_known_gpu)]
KnownModel = Annotated[str, AfterValidator(_known_model)]
# An axis of a sweep: at least one value. That none stands there twice is seen by parse_spec.
GpuAxis = Annotated[tuple[KnownGpu, ...], Field(min_length=1)]
ModelAxis = Annotated[tuple[KnownModel, ...], Field(min_length=1)]
RecipeAxis = Annotated[tuple[Recipe, ...], Field(min_length=1)]
IntAxis = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class Workload(Record):
    """The job to be priced.

    Attributes:
        queries: training examples.
        epochs: how often each is seen.
        batch_size: price the job at this batch size; absent for the fastest measured one.
    """

    queries: PositiveInt
    epochs: PositiveInt
    batch_size: PositiveInt | None = None


class CellBlock(Record):
    """The product of these axes, on every GPU of the sweep.

    ``active_experts`` is left out for models without experts, and for a model's own routing.
    """

    models: ModelAxis
    recipes: RecipeAxis
    active_experts: IntAxis | None = None
    seq_lens: IntAxis


class CatalogRows(Record):
    """A user's own GPUs and prices, added to the shipped catalog."""

    gpus: tuple[Gpu, ...] = ()
    offers: tuple[Offer, ...] = ()


class SweepSpec(Record):
    """One sweep: which cells to measure, how, and for which job to rank them.

    Attributes:
        name: the run folder's name.
        gpus: catalog keys.
        cells: what to fine-tune on each.
        workload: the job the ranking prices.
        seed: weights, tokens and the order of batch sizes are drawn from it.
        max_batch_size: the search stops there, and says so.
        timing: when to stop timing steps.
        build_timeout_seconds: how long building a model may take.
        probe_timeout_seconds: how long one probe may take.
        catalog: GPUs and prices the shipped catalog does not have.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    gpus: GpuAxis
    cells: Annotated[tuple[CellBlock, ...], Field(min_length=1)]
    workload: Workload
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    max_batch_size: PositiveInt = 1024
    timing: TimingRule = TimingRule()
    build_timeout_seconds: Seconds = 300.0
    probe_timeout_seconds: Seconds = 300.0
    catalog: CatalogRows = CatalogRows()

    def merged_catalog(self) -> Catalog:
        """The shipped catalog with this sweep's own rows."""
        return load_catalog(self.catalog.gpus, self.catalog.offers)

    def all_cells(self) -> list[Cell]:
        """Every cell once, in the order written."""
        return [
            cell
            for block in self.cells
            for gpu, model, recipe, active, seq_len in itertools.product(
                self.gpus,
                block.models,
                block.recipes,
                block.active_experts or (None,),
                block.seq_lens,
            )
            for cell in [_cell(gpu, preset_by_name(model), recipe, active, seq_len)]
        ]


def _cell(gpu: str, preset: Preset, recipe: Recipe, active: int | None, seq_len: int) -> Cell:
    facts = preset.architecture
    return Cell(
        gpu=gpu,
        model=preset.name,
        recipe=recipe,
        experts=facts.experts,
        active_experts=active if active is not None else facts.active_experts,
        seq_len=seq_len,
    )


def default_spec_text() -> str:
    """The sweep that runs when none is given."""
    return (resources.files("orchestrator") / "data" / DEFAULT_SPEC).read_text(encoding="utf-8")


def read_spec_text(path: Path) -> str:
    """The text of a specification file.

    Raises:
        SpecError: it cannot be read; one line says why.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a folder; name the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


def parse_spec(text: str, name: str) -> SweepSpec:
    """A specification from its YAML text.

    Args:
        text: the YAML.
        name: what to call it in messages, usually its path.

    Raises:
        SpecError: every mistake in it, a line each: file, line, where, what, what to do.
    """
    located = read_yaml(text)
    problems = list(located.problems)
    spec = None
    if located.data is None and not problems:
        problems.append(Problem(1, "is empty: a sweep needs name, gpus, cells and workload"))
    elif located.data is not None:
        catalog, catalog_problems = _own_catalog(located)
        problems += catalog_problems
        context = {"catalog": catalog, "own": _own_keys(located.data)}
        try:
            spec = SweepSpec.model_validate(located.data, context=context)
        except ValidationError as error:
            problems += say(error, located, SweepSpec)
        problems += [*_repetitions(located), *_cell_problems(located)]
    if problems:
        # Parts are checked more than once; a mistake is told once.
        ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.line)
        raise SpecError("\n".join(f"{name}:{p.line}: {p.text}" for p in ordered))
    assert spec is not None
    return spec


def _own_catalog(located: LocatedYaml) -> tuple[Catalog, list[Problem]]:
    """The catalog the GPU keys are looked up in, even where the file's own rows are wrong."""
    rows = located.data.get("catalog", {}) if isinstance(located.data, dict) else {}
    try:
        parsed = CatalogRows.model_validate(rows)
        return load_catalog(parsed.gpus, parsed.offers), []
    except ValidationError:
        return load_catalog(), []  # told where the whole file is validated
    except CatalogError as error:
        line = located.line(("catalog",))
        return load_catalog(), [
            Problem(line, f"catalog: {text}") for text in str(error).split("\n")
        ]


def _own_keys(data: object) -> set[str]:
    """Keys of the file's own GPUs, be their rows right or wrong."""
    rows = _items(data.get("catalog") if isinstance(data, dict) else None, "gpus")
    keys = (row.get("key") for row in rows if isinstance(row, dict))
    return {key for key in keys if isinstance(key, str)}


def _repetitions(located: LocatedYaml) -> Iterator[Problem]:
    """Values that an axis lists twice."""
    for axis, values in _axes(located.data):
        seen: set[object] = set()
        for index, raw in enumerate(values):
            value = _recipe(raw) if isinstance(raw, dict) else raw
            if type(value) not in {str, int, Recipe}:
                continue  # told where the whole file is validated
            if value in seen:
                where = (*axis, index)
                text = f"{dotted(where)}: {shown(raw)} is listed twice: keep one"
                yield Problem(located.line(where), text)
            seen.add(value)


def _axes(data: object) -> Iterator[tuple[Location, list[Any]]]:
    yield ("gpus",), _items(data, "gpus")
    for index, block in enumerate(_items(data, "cells")):
        for name in ("models", "recipes", "active_experts", "seq_lens"):
            yield ("cells", index, name), _items(block, name)


def _recipe(raw: object) -> Recipe | None:
    try:
        return Recipe.model_validate(raw)
    except ValidationError:
        return None  # told where the whole file is validated


def _cell_problems(located: LocatedYaml) -> list[Problem]:
    """Mistakes between the parts: experts a model has not, methods it has not, cells twice.

    Looks at the raw data, so that a mistake elsewhere in the file does not hide these.
    """
    problems: list[Problem] = []
    first_seen: dict[tuple[object, ...], Location] = {}
    blocks = _items(located.data, "cells")
    for index, block in enumerate(blocks):
        where: Location = ("cells", index)
        for preset in _presets_of(block):
            problems += _model_problems(located, where, block, preset)
            for signature in _signatures(preset, block):
                other = first_seen.setdefault(signature, where)
                if other != where:
                    text = (
                        f"cells[{index}]: {preset.name} with the same recipe, active_experts and "
                        f"seq_len {signature[-1]} is in cells[{other[1]}] already: drop one"
                    )
                    problems.append(Problem(located.line(where), text))
    return problems


def _items(mapping: object, key: str) -> list[Any]:
    value = mapping.get(key) if isinstance(mapping, dict) else None
    return value if isinstance(value, list) else []


def _presets_of(block: object) -> list[Preset]:
    known = presets()
    return [known[m] for m in _items(block, "models") if isinstance(m, str) and m in known]


def _recipes_of(block: object) -> Iterator[tuple[int, Recipe]]:
    for index, raw in enumerate(_items(block, "recipes")):
        recipe = _recipe(raw)
        if recipe is not None:
            yield index, recipe


def _model_problems(
    located: LocatedYaml, where: Location, block: dict[str, Any], preset: Preset
) -> Iterator[Problem]:
    facts, label = preset.architecture, f"cells[{where[1]}]"
    for index, recipe in _recipes_of(block):
        if recipe.method not in facts.methods:
            line = located.line((*where, "recipes", index))
            methods = ", ".join(facts.methods)
            text = f"method {recipe.method!r} is not possible with {preset.name}: use {methods}"
            yield Problem(line, f"{label}.recipes[{index}]: {text}")
    for index, active in enumerate(_whole_numbers(block, "active_experts")):
        line = located.line((*where, "active_experts", index))
        if facts.experts is None:
            text = f"{preset.name} has no experts: leave active_experts out, or list it apart"
            yield Problem(line, f"{label}.active_experts: {text}")
            return
        if active > facts.experts:
            text = f"{active} exceeds the {facts.experts} experts of {preset.name}"
            yield Problem(line, f"{label}.active_experts[{index}]: {text}")


def _whole_numbers(block: object, key: str) -> list[int]:
    return [v for v in _items(block, key) if type(v) is int and v > 0]


def _signatures(preset: Preset, block: object) -> Iterator[tuple[object, ...]]:
    """What makes the cells of a block one of a kind, on any GPU."""
    recipes = [recipe.key for _, recipe in _recipes_of(block)]
    listed = isinstance(block, dict) and block.get("active_experts") is not None
    active: Sequence[int | None] = (
        _whole_numbers(block, "active_experts") if listed else [preset.architecture.active_experts]
    )
    seq_lens = _whole_numbers(block, "seq_lens")
    yield from set(itertools.product([preset.name], recipes, active, seq_lens))
