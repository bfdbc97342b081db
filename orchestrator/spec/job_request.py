"""The job as it is asked for, by numbers, a histogram or a data set, and what it comes to."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gpu_catalog.suggestions import did_you_mean
from orchestrator.datasets.lengths import (
    PUBLISHED,
    DataLengths,
    counted_lengths,
    first_mistakes,
    known_lengths,
    read_histogram,
)
from orchestrator.datasets.rendering import Chat, Rendering, TextFields, parsed_template
from orchestrator.datasets.source import DataError, DatasetSource, Mistake
from orchestrator.spec.job import Job, JobTerms
from orchestrator.spec.validation_messages import shown
from trials.child_process.token_counter import mention_own_tokenizer
from trials.records.model import Model
from trials.records.recipe import PositiveInt

Text = Annotated[str, Field(strict=True, min_length=1)]
RENDERINGS = ("text_fields", "template", "chat")
OF_A_DATASET = ("subset", "split", "most", *RENDERINGS, "tokenizer")
SOURCES = ("dataset", "named", "length_histogram")
NO_EXAMPLES = f"is missing: add it, or one of {', '.join(SOURCES)}"


class JobRequest(JobTerms):
    """The job to be priced, as a specification or a command line states it.

    Attributes:
        dataset: the examples: a file, a folder, or a data set of the hub.
        subset: which of a hub data set's configurations.
        split: which part of a folder or a hub data set; absent for training.
        most: examples to read, the first ones.
        text_fields: fields whose texts, one after the other, are an example.
        template: an example with fields in it, as in ``Question: {question}``.
        chat: a field of messages, which the tokenizer's chat template makes an example.
        tokenizer: a folder, a tokenizer.json or a hub name; absent for the model's own.
        named: a data set of the paper's, instead.
        length_histogram: a CSV of tokens and examples, instead.
    """

    dataset: Text | None = None
    subset: Text | None = None
    split: Text | None = None
    most: PositiveInt | None = None
    text_fields: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    template: Text | None = None
    chat: Text | None = None
    tokenizer: Text | None = None
    named: Text | None = None
    length_histogram: Text | None = None

    @property
    def has_lengths(self) -> bool:
        """Whether it says how long examples are."""
        if self.named in PUBLISHED:
            return PUBLISHED[self.named].median is not None
        return bool(self.dataset or self.length_histogram)


def workload_of(
    asked: JobRequest,
    models: Collection[Model],
    known: DataLengths | None = None,
    progress: Callable[[int], None] | None = None,
    hub_model: str | None = None,
) -> Job:
    """What is asked for, its lengths counted or looked up.

    Args:
        asked: the job.
        models: those it is priced for; the only one's tokenizer counts, unless one is named.
        known: lengths that were counted before; nothing is read then.
        progress: told how many examples were counted so far.
        hub_model: the hub's name of the only model, instead, where that is all that is known of it.

    Raises:
        DataError: it contradicts itself, or its data cannot be read; a line for each mistake.
    """
    mistakes = list(_contradictions(asked))
    rendering = asked_rendering(asked, mistakes)
    tokenizer = ""
    if asked.dataset is not None and known is None:
        tokenizer = asked.tokenizer or hub_model or own_tokenizer(models, mistakes)
    source = None
    if asked.dataset is not None and known is None:
        source = DatasetSource(asked.dataset, asked.subset, asked.split)
    if mistakes:
        if source is not None and rendering is not None:
            mistakes += first_mistakes(source, rendering)
        raise DataError(mistakes)
    lengths = known
    if source is not None:
        assert rendering is not None  # else there is a mistake
        try:
            lengths = counted_lengths(source, rendering, tokenizer, asked.most, progress)
        except DataError as error:
            raise error if asked.tokenizer else _of_own(error, tokenizer) from None
    elif known is None and asked.length_histogram is not None:
        lengths = read_histogram(Path(asked.length_histogram).expanduser())
    elif known is None and asked.named is not None:
        lengths = known_lengths(asked.named)
    terms = {name: getattr(asked, name) for name in JobTerms.model_fields}
    terms["examples"] = asked.examples or _examples(asked, lengths)
    return Job(**terms, lengths=lengths)


def _of_own(error: DataError, tokenizer: str) -> DataError:
    """The same, said of a tokenizer that nobody named."""
    return DataError(
        Mistake(m.part, mention_own_tokenizer(m.text, tokenizer)) if m.part == "tokenizer" else m
        for m in error.mistakes
    )


def _examples(asked: JobRequest, lengths: DataLengths | None) -> int:
    if lengths is not None:
        return lengths.examples
    assert asked.named is not None  # else their number is asked for
    return PUBLISHED[asked.named].examples


def _contradictions(asked: JobRequest) -> Iterator[Mistake]:
    given = [name for name in SOURCES if getattr(asked, name) is not None]
    for extra in given[1:]:
        yield Mistake(extra, f"{_shown(asked, extra)}: {given[0]} is given as well: keep one")
    if not given and asked.examples is None:
        yield Mistake("examples", NO_EXAMPLES)
    if asked.named is not None and asked.named not in PUBLISHED:
        near = did_you_mean(asked.named, PUBLISHED) or f": known are {', '.join(PUBLISHED)}"
        yield Mistake("named", f"{asked.named!r}: no such set{near}")
    if asked.dataset is None:
        for name in OF_A_DATASET:
            if getattr(asked, name) is not None:
                yield Mistake(
                    name, f"{_shown(asked, name)}: goes with a dataset: add it, or leave this out"
                )
    yield from _padding_problems(asked)


def _padding_problems(asked: JobRequest) -> Iterator[Mistake]:
    if asked.padding == "packed" and asked.cutoff is None:
        yield Mistake("cutoff", "is missing: packing needs the tokens of a row")
    if asked.has_lengths or asked.named not in {None, *PUBLISHED}:
        return
    for name, unset in (("padding", "longest"), ("cutoff", None)):
        value = getattr(asked, name)
        if value != unset:
            yield Mistake(
                name,
                f"{value!r}: it is not known how long examples are: give a dataset or a histogram",
            )


def _shown(asked: JobRequest, name: str) -> str:
    value = getattr(asked, name)
    return shown(list(value) if isinstance(value, tuple) else value)


def asked_rendering(asked: JobRequest, mistakes: list[Mistake]) -> Rendering | None:
    """How examples become examples; what is wrong with that is added to the mistakes."""
    if asked.dataset is None:
        return None
    given = [name for name in RENDERINGS if getattr(asked, name) is not None]
    for extra in given[1:]:
        text = f"{_shown(asked, extra)}: {given[0]} is given as well: keep one"
        mistakes.append(Mistake(extra, text))
    if not given:
        text = f"is missing: {asked.dataset} needs it, or template or chat, to make examples of"
        mistakes.append(Mistake("text_fields", text))
    if asked.template is not None:
        template = parsed_template(asked.template)
        if isinstance(template, list):
            mistakes += template
            return None
        return template
    if asked.text_fields is not None:
        return TextFields(asked.text_fields)
    return None if asked.chat is None else Chat(asked.chat)


def own_tokenizer(models: Collection[Model], mistakes: list[Mistake]) -> str:
    """The tokenizer of the only model; that there is none is added to the mistakes."""
    named = {model.name: model.weights for model in models}
    found = set(named.values())
    if len(found) == 1 and None not in found:
        return str(found.pop())
    names = ", ".join(named)
    if len(found) > 1:
        why = f"is missing: {names} have different ones: name that which is to count"
    elif names:
        why = f"is missing: {names} has none of its own: give a folder or a hub name"
    else:
        why = "is missing: give a folder or a hub name, or the model"
    mistakes.append(Mistake("tokenizer", why))
    return ""
