"""A specification's YAML, read and validated, with all its mistakes told at once."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from pydantic import ConfigDict, ValidationError

from gpu_catalog.catalog import Catalog, CatalogError, load_catalog
from gpu_catalog.errors import UserError
from gpu_catalog.record import Record
from gpu_catalog.suggestions import near_matches
from orchestrator.datasets.lengths import DataLengths
from orchestrator.datasets.source import DataError
from orchestrator.spec.job import Job
from orchestrator.spec.job_request import NO_EXAMPLES, SOURCES, JobRequest, workload_of
from orchestrator.spec.spec_checks import (
    as_if_problems,
    cell_problems,
    items,
    models_of,
    own_keys,
    repetitions,
)
from orchestrator.spec.sweep_spec import CatalogRows, Models, SweepSpec
from orchestrator.spec.validation_messages import say
from orchestrator.spec.yaml_lines import LocatedYaml, Problem, read_yaml
from trials.records.model import Model

DEFAULT_SPEC = "laptop"
SPEC_SUFFIX = ".yaml"


class SpecError(UserError):
    """A specification that cannot be run; the message has one line per mistake."""


def shipped_specs() -> dict[str, str]:
    """The sweeps that can be asked for by name, with their texts."""
    folder = resources.files("orchestrator.spec") / "shipped"
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
        lengths: of its examples, where they are known; else its data set, if any, is read.

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
        context = {"catalog": catalog, "own": own_keys(located.data), "models": models}
        asked, asked_problems = _asked_workload(located)
        problems += asked_problems
        try:
            spec = SweepSpec.model_validate(_with_some_workload(located.data), context=context)
            spec = spec.with_models(models).with_base(base)
        except ValidationError as error:
            problems += say(error, located, SweepSpec)
        problems += [
            *repetitions(located),
            *cell_problems(located, models),
            *as_if_problems(located, catalog),
        ]
        if asked is not None:
            used = [m for block in items(located.data, "cells") for m in models_of(block, models)]
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
    workload: JobRequest


def _asked_workload(located: LocatedYaml) -> tuple[JobRequest | None, list[Problem]]:
    """The job as it is stated; None where it is not, or not rightly."""
    if not isinstance(located.data, dict) or "workload" not in located.data:
        return None, []  # told where the whole file is validated
    try:
        return _OfTheJob.model_validate(located.data).workload, []
    except ValidationError as error:
        problems = say(error, located, _OfTheJob)
    if _says_no_examples(located.data["workload"]):
        line = located.line(("workload",))
        problems.insert(0, Problem(line, f"workload.examples: {NO_EXAMPLES}"))
    return None, problems


def _says_no_examples(raw: object) -> bool:
    """Whether a workload says in no way, right or misspelt, which examples it has."""
    says = ("examples", *SOURCES)
    return isinstance(raw, dict) and not any(key in says or near_matches(key, says) for key in raw)


def _with_some_workload(data: object) -> object:
    """The same, with a workload that is right: what is wrong with its own is told apart."""
    if not isinstance(data, dict) or "workload" not in data:
        return data
    return data | {"workload": Job(examples=1, epochs=1)}


def _workload(
    located: LocatedYaml,
    asked: JobRequest,
    models: Sequence[Model],
    lengths: DataLengths | None,
) -> tuple[Job | None, list[Problem]]:
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
