"""The options that say something of a job, as what they mean."""

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.datasets.lengths import PUBLISHED
from orchestrator.datasets.source import DataError, Mistake
from orchestrator.spec.job import Job, JobTerms
from orchestrator.spec.job_request import SOURCES, JobRequest, workload_of
from orchestrator.spec.validation_messages import WORDS, shown
from trials.records.model import Model, find_model

AUTO = "auto"
PADDINGS = {"packed": "packing", "grouped": "group_by_length"}  # the options that say so
OWN_WORDS = frozenset({"batch_size", "overheads"})  # options that say these in ways of their own


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options that say something of examples, by the keys of ``workload`` in a specification.

    ``dataset`` takes the name of a set of the paper as well, where there is no such file.
    """
    names = JobRequest.model_fields.keys() - OWN_WORDS
    fields = {name: getattr(options, name, None) for name in names}
    found = {name: value for name, value in fields.items() if value is not None}
    if found.get("epochs") == AUTO:
        del found["epochs"]  # the ranking asks what was learned
    name = found.get("dataset")
    if name in PUBLISHED and not Path(name).exists():
        found["named"] = found.pop("dataset")
    if "text_fields" in found:
        found["text_fields"] = tuple(name.strip() for name in found["text_fields"].split(","))
    for padding, option in PADDINGS.items():
        if getattr(options, option, False):
            found["padding"] = padding
    return found


def asked_workload(fields: dict[str, Any]) -> JobRequest:
    """The job that options state.

    Raises:
        DataError: a value cannot be; a line for each mistake.
    """
    try:
        return JobRequest.model_validate(fields)
    except ValidationError as error:
        raise DataError(
            Mistake(
                str(detail["loc"][0]),
                f"{shown(detail['input'])}: {WORDS.get(detail['type'], detail['msg'])}",
            )
            for detail in error.errors()
        ) from None


def data_workload(
    options: argparse.Namespace, progress: Callable[[int], None] | None = None
) -> Job:
    """One epoch over the data that the options name, by the tokenizer or model that they name.

    Args:
        options: those of ``dataset``.
        progress: told how many examples were counted so far.

    Raises:
        DataError: the options contradict themselves, or their data cannot be read.
        UnknownModelError: there is no such model.
    """
    fields = given_options(options) | {"epochs": 1}
    if not fields.keys() & set(SOURCES):
        text = "no data set: name a file, a folder or OWNER/NAME, or give --length-histogram"
        raise DataError([Mistake("dataset", text)])
    models: list[Model] = []
    hub_model: str | None = None
    if options.model is not None and "dataset" in fields and "tokenizer" not in fields:
        if options.model.count("/") == 1 and not options.model.startswith((".", "/", "~")):
            hub_model = options.model  # the tokenizer of the hub is under its own name
        else:
            models = [find_model(options.model)]
    return workload_of(asked_workload(fields), models, progress=progress, hub_model=hub_model)


def changed_workload(workload: Job, options: argparse.Namespace, models: Collection[Model]) -> Job:
    """A job with what the options say instead: of other data, or only on other terms.

    Args:
        workload: the job as it is.
        options: those of a command.
        models: those it is priced for.

    Raises:
        DataError: the options contradict themselves, or their data cannot be read.
    """
    fields = given_options(options)
    terms = {name: getattr(workload, name) for name in JobTerms.model_fields}
    if fields.keys() & set(SOURCES):
        # As many examples as the new data has, unless told.
        return workload_of(asked_workload(terms | {"examples": None} | fields), models)
    # The lengths that are known serve on, as if what they are of was named anew.
    others = sorted(fields.keys() - terms.keys())
    if others:
        raise DataError(
            Mistake(name, f"{fields[name]!r}: goes with --dataset: add it, or leave this out")
            for name in others
        )
    if workload.lengths is None:
        idle = sorted(fields.keys() & {"cutoff", "padding", "pad_to_multiple"})
        if idle:
            raise DataError(_without_lengths(name, fields[name]) for name in idle)
    try:
        return Job(**terms | fields, lengths=workload.lengths)
    except ValidationError:  # the one thing that a job must have for its terms
        text = "needs --cutoff, the tokens of a row, and a job whose examples' lengths are known"
        raise DataError([Mistake("packing", text)]) from None


def _without_lengths(name: str, value: Any) -> Mistake:
    """A mistake: what is asked of examples whose lengths are not known."""
    if name == "padding":
        text = "needs a job whose examples' lengths are known: add --dataset"
        return Mistake(PADDINGS[value], text)
    return Mistake(name, f"{value!r}: the job has no lengths: add --dataset")
