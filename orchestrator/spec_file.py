"""A specification's YAML, read and validated, with all its mistakes told at once."""

import itertools
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, ValidationError

from gpu_catalog.catalog import Catalog, CatalogError, load_catalog
from gpu_catalog.near import near_matches
from gpu_catalog.record import Record
from orchestrator.asked_workload import NO_QUERIES, SOURCES, AskedWorkload, workload_of
from orchestrator.data_lengths import DataLengths
from orchestrator.examples import DataError
from orchestrator.located_yaml import LocatedYaml, Location, Problem, read_yaml
from orchestrator.sweep import (
    CatalogRows,
    Models,
    SweepSpec,
    Workload,
    can_stand_in,
    written_out,
)
from orchestrator.wording import dotted, say, shown
from trials.models.model import Model
from trials.possible import impossible_on_model
from trials.recipe import Recipe

DEFAULT_SPEC = "laptop"
SPEC_SUFFIX = ".yaml"


class SpecError(ValueError):
    """A specification that cannot be run; the message has one line per mistake."""


def shipped_specs() -> dict[str, str]:
    """The sweeps that can be asked for by name, with their texts."""
    folder = resources.files("orchestrator") / "data"
    return {
        file.name.removesuffix(SPEC_SUFFIX): file.read_text(encoding="utf-8")
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(SPEC_SUFFIX)
    }


def read_spec_text(path: Path) -> str:
    """The text of a specification file.

    Raises:
        SpecError: it cannot be read; one line says why.
    """
    try:
        return decoded(path.read_bytes(), str(path))
    except FileNotFoundError:
        names = ", ".join(shipped_specs())
        raise SpecError(f"{path}: no such file, nor one of the shipped sweeps: {names}") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a folder; name the YAML file in it") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None


def decoded(content: bytes, name: str) -> str:
    """A specification as text.

    Raises:
        SpecError: it is none.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"{name}: not UTF-8 text (byte {error.start}): save it as UTF-8") from None


def parse_spec(
    text: str,
    name: str,
    models: Models | None = None,
    base: Catalog | None = None,
    lengths: DataLengths | None = None,
) -> SweepSpec:
    """A specification from its YAML text.

    Args:
        text: the YAML.
        name: what to call it in messages, usually its path.
        models: those it names, where they are known; others are looked up.
        base: the catalog that its own rows go over; absent for the shipped one.
        lengths: of its queries, where they are known; else its data set, if any, is read.

    Raises:
        SpecError: every mistake in it, a line each: file, line, where, what, what to do.
    """
    located = read_yaml(text)
    problems = list(located.problems)
    spec = None
    if located.data is None and not problems:
        problems.append(Problem(1, "is empty: a sweep needs name, gpus, cells and workload"))
    elif located.data is not None:
        catalog, catalog_problems = _own_catalog(located, base or load_catalog())
        problems += catalog_problems
        models = dict(models or {})
        context = {"catalog": catalog, "own": _own_keys(located.data), "models": models}
        asked, asked_problems = _asked_workload(located)
        problems += asked_problems
        try:
            spec = SweepSpec.model_validate(_with_some_workload(located.data), context=context)
            spec = spec.with_models(models).with_base(base)
        except ValidationError as error:
            problems += say(error, located, SweepSpec)
        problems += [
            *_repetitions(located),
            *_cell_problems(located, models),
            *_as_if_problems(located, catalog),
        ]
        if asked is not None:
            used = [m for block in _items(located.data, "cells") for m in _models_of(block, models)]
            workload, workload_problems = _workload(located, asked, used, lengths)
            problems += workload_problems
            spec = None if spec is None else spec.model_copy(update={"workload": workload})
    if problems:
        # Parts are checked more than once; a mistake is told once.
        ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.line)
        raise SpecError("\n".join(f"{name}:{p.line}: {p.text}" for p in ordered))
    assert spec is not None
    return spec


class _OfTheJob(Record):
    """What a specification says of its job; the rest is validated apart."""

    model_config = ConfigDict(extra="ignore")
    workload: AskedWorkload


def _asked_workload(located: LocatedYaml) -> tuple[AskedWorkload | None, list[Problem]]:
    """The job as it is stated; None where it is not, or not rightly."""
    if not isinstance(located.data, dict) or "workload" not in located.data:
        return None, []  # told where the whole file is validated
    try:
        return _OfTheJob.model_validate(located.data).workload, []
    except ValidationError as error:
        problems = say(error, located, _OfTheJob)
    if _says_no_queries(located.data["workload"]):
        line = located.line(("workload",))
        problems.insert(0, Problem(line, f"workload.queries: {NO_QUERIES}"))
    return None, problems


def _says_no_queries(raw: object) -> bool:
    """Whether a workload says in no way, right or misspelt, which queries it has."""
    says = ("queries", *SOURCES)
    return isinstance(raw, dict) and not any(key in says or near_matches(key, says) for key in raw)


def _with_some_workload(data: object) -> object:
    """The same, with a workload that is right: what is wrong with its own is told apart."""
    if not isinstance(data, dict) or "workload" not in data:
        return data
    return data | {"workload": Workload(queries=1, epochs=1)}


def _workload(
    located: LocatedYaml,
    asked: AskedWorkload,
    models: Sequence[Model],
    lengths: DataLengths | None,
) -> tuple[Workload | None, list[Problem]]:
    """What the job comes to, its data read unless its lengths are known."""
    try:
        return workload_of(asked, models, lengths), []
    except DataError as error:
        lines = [(located.line(("workload", m.part)), m) for m in error.mistakes]
        return None, [Problem(line, f"workload.{m.part}: {m.text}") for line, m in lines]


def _own_catalog(located: LocatedYaml, base: Catalog) -> tuple[Catalog, list[Problem]]:
    """The catalog the GPU keys are looked up in, even where the file's own rows are wrong."""
    rows = located.data.get("catalog", {}) if isinstance(located.data, dict) else {}
    try:
        parsed = CatalogRows.model_validate(rows)
        return base.merged(parsed.gpus, parsed.offers), []
    except ValidationError:
        return base, []  # told where the whole file is validated
    except CatalogError as error:
        line = located.line(("catalog",))
        return base, [Problem(line, f"catalog: {text}") for text in str(error).split("\n")]


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
            value = _recipe(raw) if axis[-1] == "recipes" else raw
            if type(value) not in {str, int, Recipe}:
                continue  # told where the whole file is validated
            if value in seen:
                where = (*axis, index)
                text = f"{dotted(where)}: {shown(raw)} is listed twice: keep one"
                yield Problem(located.line(where), text)
            seen.add(value)


def _axes(data: object) -> Iterator[tuple[Location, list[Any]]]:
    yield ("gpus",), _items(data, "gpus")
    yield ("as_if",), _items(data, "as_if")
    for index, block in enumerate(_items(data, "cells")):
        for name in ("models", "recipes", "active_experts", "seq_lens"):
            yield ("cells", index, name), _items(block, name)


def _recipe(raw: object) -> Recipe | None:
    try:
        return Recipe.model_validate(written_out(raw))
    except ValueError:
        return None  # told where the whole file is validated


def _as_if_problems(located: LocatedYaml, catalog: Catalog) -> Iterator[Problem]:
    """GPUs that none of the sweep's GPUs can stand in for."""
    keys = {gpu.key: gpu for gpu in catalog.gpus}
    named = [key for key in _items(located.data, "gpus") if isinstance(key, str)]
    hosts = [keys[key] for key in named if key in keys]
    for index, key in enumerate(_items(located.data, "as_if")):
        small = keys.get(key) if isinstance(key, str) else None
        if small is not None and hosts and not any(can_stand_in(host, small) for host in hosts):
            names = ", ".join(host.key for host in hosts)
            text = f"as_if[{index}]: {key} has no less memory than any of gpus ({names}): drop it"
            yield Problem(located.line(("as_if", index)), text)


def _cell_problems(located: LocatedYaml, models: Models) -> list[Problem]:
    """Mistakes between the parts: experts a model has not, methods it has not, cells twice.

    Looks at the raw data, so that a mistake elsewhere in the file does not hide these.
    """
    problems: list[Problem] = []
    first_seen: dict[tuple[object, ...], Location] = {}
    blocks = _items(located.data, "cells")
    for index, block in enumerate(blocks):
        where: Location = ("cells", index)
        for model in _models_of(block, models):
            problems += _model_problems(located, where, block, model)
            for signature in _signatures(model, block):
                other = first_seen.setdefault(signature, where)
                if other != where:
                    text = (
                        f"cells[{index}]: {model.name} with the same recipe, active_experts and "
                        f"seq_len {signature[-1]} is in cells[{other[1]}] already: drop one"
                    )
                    problems.append(Problem(located.line(where), text))
    return problems


def _items(mapping: object, key: str) -> list[Any]:
    value = mapping.get(key) if isinstance(mapping, dict) else None
    return value if isinstance(value, list) else []


def _models_of(block: object, models: Models) -> list[Model]:
    return [models[m] for m in _items(block, "models") if isinstance(m, str) and m in models]


def _recipes_of(block: object) -> Iterator[tuple[int, Recipe]]:
    for index, raw in enumerate(_items(block, "recipes")):
        recipe = _recipe(raw)
        if recipe is not None:
            yield index, recipe


def _model_problems(
    located: LocatedYaml, where: Location, block: dict[str, Any], model: Model
) -> Iterator[Problem]:
    label = f"cells[{where[1]}]"
    for index, recipe in _recipes_of(block):
        reason = impossible_on_model(recipe, model)
        if reason is not None:
            line = located.line((*where, "recipes", index))
            yield Problem(line, f"{label}.recipes[{index}]: {reason}")
    if block.get("weights") == "pretrained" and model.weights is None:
        line = located.line((*where, "weights"))
        yield Problem(line, f"{label}.weights: no pretrained weights of {model.name} are known")
    for index, active in enumerate(_whole_numbers(block, "active_experts")):
        line = located.line((*where, "active_experts", index))
        if model.experts is None:
            text = f"{model.name} has no experts: leave active_experts out, or list it apart"
            yield Problem(line, f"{label}.active_experts: {text}")
            return
        if active > model.experts:
            text = f"{active} exceeds the {model.experts} experts of {model.name}"
            yield Problem(line, f"{label}.active_experts[{index}]: {text}")


def _whole_numbers(block: object, key: str) -> list[int]:
    return [v for v in _items(block, key) if type(v) is int and v > 0]


def _signatures(model: Model, block: object) -> Iterator[tuple[object, ...]]:
    """What makes the cells of a block one of a kind, on any GPU."""
    # What a recipe comes to on a device is the same function of it everywhere.
    recipes = [recipe.key for _, recipe in _recipes_of(block)]
    listed = isinstance(block, dict) and block.get("active_experts") is not None
    active: Sequence[int | None] = (
        _whole_numbers(block, "active_experts") if listed else [model.active_experts]
    )
    seq_lens = _whole_numbers(block, "seq_lens")
    weights = block.get("weights", "random") if isinstance(block, dict) else "random"
    yield from set(itertools.product([model.name], [weights], recipes, active, seq_lens))
