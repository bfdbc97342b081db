"""Reader of specifications, which reports all mistakes of a file at once."""

import contextlib
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, CatalogError, load_catalog
from gpu_catalog.errors import UserError
from gpu_catalog.suggestions import did_you_mean, near_matches
from gpu_catalog.user_file import text_of
from orchestrator.datasets.lengths import DataLengths
from orchestrator.datasets.source import DataError
from orchestrator.spec.job import PACKED, Job
from orchestrator.spec.job_request import NO_EXAMPLES, SOURCES, JobRequest, requested_job
from orchestrator.spec.spec_checks import (
    as_if_problems,
    auto_problems,
    cell_problems,
    excess_cells,
    items,
    layout_problems,
    missing_gpus,
    models_of,
    own_keys,
    repetitions,
    with_recipe_defaults,
)
from orchestrator.spec.sweep_spec import CatalogRows, Models, SweepSpec
from orchestrator.spec.validation_messages import problems_of
from orchestrator.spec.yaml_lines import LocatedYaml, Problem, read_yaml

DEFAULT_SPEC = "laptop"
SPEC_SUFFIX = ".yaml"


class SpecError(UserError):
    """A specification that cannot be run; the message has one line per mistake."""


def shipped_specs() -> dict[str, str]:
    """Texts of the shipped specifications by name."""
    folder = resources.files("orchestrator.spec") / "shipped"
    return {
        file.name.removesuffix(SPEC_SUFFIX): file.read_text(encoding="utf-8")
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(SPEC_SUFFIX)
    }


def read_spec_text(path: Path) -> str:
    """Text of a specification file.

    Raises:
        SpecError: the file cannot be read; one line says why.
    """
    if path.exists():
        return text_of(path, SpecError)
    names = list(shipped_specs())
    near = did_you_mean(str(path), names) or f"; shipped sweeps are {', '.join(names)}"
    raise SpecError(f"{path}: no such file or shipped sweep{near}")


def named_spec_text(name: Path | None) -> tuple[str, str]:
    """The text of a specification, and its name for messages.

    Args:
        name: a file, or a shipped sweep; None for the default sweep.

    Raises:
        SpecError: there is neither, or the file cannot be read.
    """
    if name is None:
        return shipped_specs()[DEFAULT_SPEC], "the default sweep"
    if not name.exists() and str(name) in shipped_specs():
        return shipped_specs()[str(name)], f"the shipped sweep {name}"
    return read_spec_text(name), str(name)


def decoded(content: bytes, name: str) -> str:
    """Specification as text.

    Raises:
        SpecError: the bytes are not UTF-8 text.
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
    """Specification from its YAML text.

    Args:
        text: the YAML.
        name: name in messages, usually the path.
        models: models by name; others are looked up.
        base: catalog to which the file's own rows are added; None for the shipped one.
        lengths: lengths of the examples; None to read the data set, if any.

    Raises:
        SpecError: the file has mistakes; one line for each: file, line, key, mistake, remedy.
    """
    located = with_recipe_defaults(read_yaml(text))
    too_many = list(excess_cells(located))
    problems = [*located.problems, *too_many]
    if located.data is None and not problems:
        problems.append(Problem(1, "is empty: a sweep needs name, gpus, cells and workload"))
    elif not too_many and located.data is not None:
        catalog, catalog_problems = _own_catalog(located, base or load_catalog())
        problems += catalog_problems
        models = dict(models or {})
        own = own_keys(located.data)
        context = {"catalog": catalog, "own": own, "models": models, "base": base}
        request = None
        try:
            request = _WrittenSpec.model_validate(located.data, context=context).workload
        except ValidationError as error:
            problems += [*_lacking_examples(located), *problems_of(error, located, _WrittenSpec)]
            with contextlib.suppress(ValidationError, TypeError, KeyError):
                request = JobRequest.model_validate(located.data["workload"])
        problems += [
            *missing_gpus(located),
            *repetitions(located),
            *cell_problems(located, models),
            *as_if_problems(located, catalog),
            *auto_problems(located, catalog),
            *layout_problems(located),
        ]
        used = [m for block in items(located.data, "cells") for m in models_of(block, models)]
        try:
            if request is not None:
                job = requested_job(request, used, lengths)
                problems += _without_drawn_lengths(located, job)
        except DataError as error:
            lines = [(located.line(("workload", m.part)), m) for m in error.mistakes]
            problems += [Problem(line, f"workload.{m.part}: {m.text}") for line, m in lines]
    if problems:
        # Some parts are checked twice; each mistake is reported once.
        ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.line)
        raise SpecError("\n".join(f"{name}:{p.line}: {p.text}" for p in ordered))
    return SweepSpec.model_validate(located.data | {"workload": job}, context=context)


class _WrittenSpec(SweepSpec):
    """A specification as written: its job may name data that is not read yet."""

    workload: JobRequest  # type: ignore[assignment]


def _without_drawn_lengths(located: LocatedYaml, job: Job) -> list[Problem]:
    """The mistake of lengths to be drawn where the job's batches do not vary in length."""
    if located.data.get("lengths") != "drawn":
        return []
    if job.padding in PACKED:
        text = f"packed rows ({job.padding}) do not vary in length: leave it out"
    elif job.lengths is None:
        text = "the workload has no lengths to draw from: give it dataset, or leave this out"
    else:
        return []
    return [Problem(located.line(("lengths",)), f"lengths: drawn: {text}")]


def _lacking_examples(located: LocatedYaml) -> list[Problem]:
    """The mistake of a workload without a key, correct or misspelt, that gives its examples."""
    raw = located.data.get("workload") if isinstance(located.data, dict) else None
    keys = ("examples", *JobRequest.FORMER, *SOURCES)
    if not isinstance(raw, dict) or any(k in keys or near_matches(k, keys) for k in raw):
        return []
    return [Problem(located.line(("workload",)), f"workload.examples: {NO_EXAMPLES}")]


def _own_catalog(located: LocatedYaml, base: Catalog) -> tuple[Catalog, list[Problem]]:
    """Catalog with the file's own rows, or without them and the problems with them."""
    rows = located.data.get("catalog", {}) if isinstance(located.data, dict) else {}
    try:
        parsed = CatalogRows.model_validate(rows)
        return base.merged(parsed.gpus, parsed.offers), []
    except ValidationError:
        return base, []  # SweepSpec reports it
    except CatalogError as error:
        line = located.line(("catalog",))
        return base, [Problem(line, f"catalog: {text}") for text in str(error).split("\n")]
