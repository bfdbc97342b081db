"""Options that state a job, and the job they come to."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.datasets.lengths import PUBLISHED
from orchestrator.datasets.mixture import mixed_lengths
from orchestrator.datasets.source import DataError, Mistake
from orchestrator.model_names import named_model, preset_of
from orchestrator.request import OptionError, PathText
from orchestrator.spec.job import NOT_PACKED, Job, JobTerms, LongExamples, Overheads, Padding
from orchestrator.spec.job_request import RENDERINGS, SOURCES, JobRequest, requested_job
from orchestrator.spec.validation_messages import WORDS, shown
from trials.records.model import Model

AUTO = "auto"
OF_ONE_DATASET = ("dataset", "subset", "split", "most", *RENDERINGS)
PADDINGS = {"packed": "packing", "grouped": "group_by_length"}  # the option of each padding


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """A job and its data; an absent option is the job's own.

    Attributes:
        others: further data sets that are trained on with ``dataset``, by the options of each.
        set_aside: examples of the data that are not trained on but evaluated: their share up to 1,
            or their number.
    """

    examples: int | None = None
    epochs: int | str | None = None
    dataset: PathText | None = None
    length_histogram: PathText | None = None
    text_fields: str | tuple[str, ...] | None = None
    template: str | None = None
    chat: str | None = None
    tokenizer: PathText | None = None
    subset: str | None = None
    split: str | None = None
    most: int | None = None
    cutoff: int | None = None
    pad_to_multiple: int | None = None
    packing: bool = False
    group_by_length: bool = False
    long_examples: LongExamples = "cut"
    padding: Padding | None = None
    others: tuple[Mapping[str, Any], ...] = ()
    set_aside: float | None = None

    def fields(self) -> dict[str, Any]:
        """The options that were given, by the fields of ``JobRequest``.

        ``dataset`` also takes the name of one of the paper's sets, unless a file has that name.
        """
        fields = {
            field.name: value
            for field in dataclasses.fields(self)
            if field.name in JobRequest.model_fields
            if (value := getattr(self, field.name)) is not None
        }
        if fields.get("epochs") == AUTO:
            del fields["epochs"]  # the ranking takes them from the training curves
        name = fields.get("dataset")
        if name in PUBLISHED and not Path(name).exists():
            fields["named"] = fields.pop("dataset")
        if isinstance(self.text_fields, str):
            fields["text_fields"] = tuple(name.strip() for name in self.text_fields.split(","))
        if self.packing and self.group_by_length:
            raise OptionError("packing, group_by_length: give one of them")
        for padding, option in PADDINGS.items():
            if getattr(self, option):
                fields["padding"] = padding
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadOptions:
    """Overheads of a job in place of its own; see ``Overheads``."""

    startup_minutes: float | None = None
    checkpoint_seconds: float | None = None
    checkpoint_minutes: float | None = None
    interruptions_per_day: float | None = None
    price_drift: float | None = None
    spot_price_drift: float | None = None


def with_overheads(options: OverheadOptions, job: Job) -> Job:
    """Replace overheads of a job by those that were given.

    Raises:
        OptionError: a value is out of range; a line for each.
    """
    given = {
        name: value
        for name in Overheads.model_fields
        if (value := getattr(options, name)) is not None
    }
    try:
        overheads = Overheads.model_validate(job.overheads.model_dump() | given)
    except ValidationError as error:
        lines = [f"--{e['loc'][0]} {e['input']:g}: {e['msg']}" for e in error.errors()]
        raise OptionError("\n".join(line.replace("_", "-") for line in lines)) from None
    return job.model_copy(update={"overheads": overheads})


def job_request(fields: dict[str, Any]) -> JobRequest:
    """Validate the fields of a job request.

    Raises:
        DataError: values are invalid; a line for each.
    """
    try:
        return JobRequest.model_validate(fields)
    except ValidationError as error:
        raise DataError(
            Mistake(
                str(detail["loc"][0]),
                f"{shown(detail['input'])}: {_words(dict(detail))}",
            )
            for detail in error.errors()
        ) from None


def _words(detail: dict[str, Any]) -> str:
    words = WORDS.get(detail["type"])
    return str(detail["msg"]) if words is None else words.format(**detail.get("ctx", {}))


def data_job(
    options: JobOptions, model: str | None, progress: Callable[[int], None] | None = None
) -> Job:
    """Read a data set and count its examples' tokens; the job is one epoch over it.

    Args:
        options: the data set and how to render it.
        model: name of the model whose tokenizer counts, unless a tokenizer is given.
        progress: called with the number of examples counted so far.

    Raises:
        DataError: the options contradict themselves, or their data cannot be read.
        UnknownModelError: there is no such model.
    """
    fields = options.fields() | {"epochs": 1}
    if not fields.keys() & set(SOURCES):
        text = "no data set: name a file, a folder or OWNER/NAME, or give --length-histogram"
        raise DataError([Mistake("dataset", text)])
    models: list[Model] = []
    hub_model: str | None = None
    if model is not None and "dataset" in fields and "tokenizer" not in fields:
        is_hub = model.count("/") == 1 and not model.startswith((".", "/", "~"))
        if is_hub and preset_of(model) is None:
            hub_model = model  # the tokenizer of the hub is under its own name
        else:
            models = [named_model(model)]
    return requested_job(job_request(fields), models, progress=progress, hub_model=hub_model)


def changed_job(job: Job, options: JobOptions, models: Collection[Model]) -> Job:
    """Change a job by options: other data, or other terms for the same data.

    Args:
        job: the job as it is.
        options: the changes.
        models: models that it is priced for; the only one's tokenizer counts.

    Raises:
        DataError: the options contradict themselves, or their data cannot be read.
    """
    fields = options.fields()
    job_request({"epochs": 1} | fields)  # values are checked before what goes with what
    terms = {name: getattr(job, name) for name in JobTerms.model_fields}
    if fields.keys() & set(SOURCES):
        # As many examples as the new data has, unless their number is given.
        job = _mixed_job(terms | {"examples": None} | fields, options.others, models)
        job = job.with_long_examples(options.long_examples)
        return job if options.examples is not None else job.without(options.set_aside)
    # The job keeps its lengths, which options of another data set would contradict.
    others = sorted(fields.keys() - terms.keys())
    if others:
        raise DataError(
            Mistake(name, f"{fields[name]!r}: goes with --dataset: add it, or leave this out")
            for name in others
        )
    if job.lengths is None:
        idle = sorted(fields.keys() & {"cutoff", "padding", "pad_to_multiple"})
        if idle:
            raise DataError(_without_lengths(name, fields[name]) for name in idle)
    try:
        return Job(**terms | fields, lengths=job.lengths)
    except ValidationError:  # of packing, the one thing that a job must have for its terms
        text = "needs --cutoff (the tokens per row) and the lengths of the examples"
        if job.lengths is not None and job.lengths.is_preference:
            text = NOT_PACKED
        raise DataError([Mistake("packing", text)]) from None


def _mixed_job(
    fields: dict[str, Any], others: Collection[Mapping[str, Any]], models: Collection[Model]
) -> Job:
    """Job on a data set, and on others that go by the same terms."""
    terms = {name: value for name, value in fields.items() if name not in OF_ONE_DATASET}
    first, *more = (
        requested_job(job_request(one), models)
        for one in (fields, *({**terms, **other} for other in others))
    )
    if not more:
        return first
    parts = [job.lengths for job in (first, *more) if job.lengths is not None]
    examples = fields["examples"] or sum(part.examples for part in parts)
    return first.model_copy(update={"lengths": mixed_lengths(parts), "examples": examples})


def _without_lengths(name: str, value: Any) -> Mistake:
    if name == "padding":
        text = "needs the lengths of the examples: add --dataset or --length-histogram"
        return Mistake(PADDINGS[value], text)
    return Mistake(name, f"{value!r}: the job has no lengths: add --dataset")
