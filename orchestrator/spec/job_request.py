"""A job as requested by numbers, a histogram or a data set, and the resulting ``Job``."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gpu_catalog.suggestions import near_or_all
from orchestrator.datasets.approximate_tokens import Vocabulary, vocabulary_of
from orchestrator.datasets.file_formats import columns_text
from orchestrator.datasets.lengths import (
    PUBLISHED,
    DataLengths,
    counted_lengths,
    first_mistakes,
    published_lengths,
    read_histogram,
)
from orchestrator.datasets.preference import Preference
from orchestrator.datasets.recognition import Recognised, first_fields, recognised
from orchestrator.datasets.rendering import Chat, Rendering, TextFields, parsed_template
from orchestrator.datasets.source import DataError, DatasetSource, Mistake
from orchestrator.spec.job import NOT_PACKED, PACKED, Job, JobTerms
from orchestrator.spec.validation_messages import shown
from trials.child_process.token_counter import mention_own_tokenizer
from trials.recipes.fields import PositiveInt
from trials.records.model import Model

Text = Annotated[str, Field(strict=True, min_length=1)]
RENDERINGS = ("text_fields", "template", "chat")
OF_A_DATASET = ("subset", "split", "most", *RENDERINGS, "tokenizer")
SOURCES = ("dataset", "named", "length_histogram")
NO_EXAMPLES = f"is missing: add it, or one of {', '.join(SOURCES)}"


class JobRequest(JobTerms):
    """The job to price, as a specification or a command line describes it.

    Attributes:
        dataset: source of the examples: a file, a folder, or a data set of the hub.
        subset: configuration of a hub data set.
        split: split of a folder or a hub data set; by default the training split.
        most: number of examples to read, the first ones.
        text_fields: fields whose texts, one after the other, are an example.
        template: text with fields in braces, such as ``Question: {question}``.
        chat: field with a list of messages, rendered by the tokenizer's chat template.
        tokenizer: a folder, a tokenizer.json or a hub name; by default the model's own.
        named: name of a data set of the paper, instead of ``dataset``.
        length_histogram: CSV with the columns tokens and examples, instead of ``dataset``.
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
        """Whether the lengths of examples are given."""
        if self.named in PUBLISHED:
            return PUBLISHED[self.named].median is not None
        return bool(self.dataset or self.length_histogram)


def requested_job(
    request: JobRequest,
    models: Collection[Model],
    counted: DataLengths | None = None,
    progress: Callable[[int], None] | None = None,
    hub_model: str | None = None,
) -> Job:
    """Job of a request, with its lengths counted or looked up.

    Args:
        request: the request.
        models: models to price; the tokenizer of the only one counts by default.
        counted: lengths that were counted before; no data is read then.
        progress: called with the number of examples counted so far.
        hub_model: hub name of the only model, if nothing else of it is loaded.

    Raises:
        DataError: the request contradicts itself, or its data cannot be read; one line for each
            mistake.
    """
    mistakes = list(_contradictions(request))
    tokenizer: str | Vocabulary = ""
    source = None
    if request.dataset is not None and counted is None:
        tokenizer = request.tokenizer or hub_model or _own(models, mistakes)
        source = DatasetSource(request.dataset, request.subset, request.split)
    rendering = _rendering(request, source, mistakes)
    if mistakes:
        if source is not None and rendering is not None:
            mistakes += first_mistakes(source, rendering)
        raise DataError(mistakes)
    lengths = counted
    if source is not None:
        assert rendering is not None  # else mistakes are raised above
        count = partial(counted_lengths, source, rendering, most=request.most, progress=progress)
        own = not request.tokenizer
        lengths = _by_own(count, tokenizer, _vocabulary(models)) if own else count(tokenizer)
    elif counted is None and request.length_histogram is not None:
        lengths = read_histogram(Path(request.length_histogram).expanduser())
    elif counted is None and request.named is not None:
        lengths = published_lengths(request.named)
    return _job(request, lengths)


def _by_own(
    count: Callable[[str | Vocabulary], DataLengths],
    tokenizer: str | Vocabulary,
    rates: Vocabulary | None,
) -> DataLengths:
    """Lengths by the model's own tokenizer, or by the rates of its vocabulary if it is not there.

    Raises:
        DataError: the data cannot be read, or there are no rates either.
    """
    try:
        return count(tokenizer)
    except DataError as error:
        if not isinstance(tokenizer, str):
            raise
        others = [mistake for mistake in error.mistakes if mistake.part != "tokenizer"]
        if rates is None:
            own = (m for m in error.mistakes if m.part == "tokenizer")
            others[:0] = [Mistake(m.part, mention_own_tokenizer(m.text, tokenizer)) for m in own]
        elif not others:
            return count(rates)
        raise DataError(others) from None


def _job(request: JobRequest, lengths: DataLengths | None) -> Job:
    terms = {name: getattr(request, name) for name in JobTerms.model_fields}
    if request.examples is None:
        # Without lengths there is a named data set, else NO_EXAMPLES is a mistake.
        source_of_number = lengths or PUBLISHED[request.named or ""]
        terms["examples"] = source_of_number.examples
    return Job(**terms, lengths=lengths)


def _contradictions(request: JobRequest) -> Iterator[Mistake]:
    given = [name for name in SOURCES if getattr(request, name) is not None]
    for extra in given[1:]:
        yield Mistake(extra, f"{_shown(request, extra)}: {given[0]} is given as well: keep one")
    if not given and request.examples is None:
        yield Mistake("examples", NO_EXAMPLES)
    if request.named is not None and request.named not in PUBLISHED:
        near = near_or_all(request.named, PUBLISHED)
        yield Mistake("named", f"{request.named!r}: no such data set{near}")
    if request.dataset is None:
        for name in (n for n in OF_A_DATASET if getattr(request, n) is not None):
            text = "applies only to a dataset: give one, or remove this"
            yield Mistake(name, f"{_shown(request, name)}: {text}")
    yield from _padding_problems(request)


def _padding_problems(request: JobRequest) -> Iterator[Mistake]:
    if request.padding in PACKED and request.cutoff is None:
        yield Mistake("cutoff", "is missing: packing needs the number of tokens per row")
    if request.has_lengths or request.named not in {None, *PUBLISHED}:
        return
    for name, unset in (("padding", "longest"), ("cutoff", None)):
        value = getattr(request, name)
        if value != unset:
            text = "the lengths of examples are unknown: give a dataset or a histogram"
            yield Mistake(name, f"{value!r}: {text}")


def _shown(request: JobRequest, name: str) -> str:
    value = getattr(request, name)
    return shown(list(value) if isinstance(value, tuple) else value)


def _rendering(
    request: JobRequest, source: DatasetSource | None, mistakes: list[Mistake]
) -> Rendering | Preference | Recognised | None:
    """Rendering as requested, or by the columns of the data; appends to the mistakes."""
    is_given = any(getattr(request, name) is not None for name in RENDERINGS)
    if is_given or request.dataset is None:
        return requested_rendering(request, mistakes)
    if source is None:
        return None  # the lengths were counted before
    try:
        by_columns = recognised(source)
        if by_columns is None:
            columns = columns_text(first_fields(source)) or "no columns"
            text = f"is missing: give it, or template or chat; {source.name} has {columns}"
            mistakes.append(Mistake("text_fields", text))
    except DataError as error:
        mistakes += error.mistakes
        return None
    if request.padding in PACKED and isinstance(by_columns, Preference):
        mistakes.append(Mistake("padding", f"'packed': {NOT_PACKED}"))
    return by_columns


def requested_rendering(request: JobRequest, mistakes: list[Mistake]) -> Rendering | None:
    """Rendering of the examples, or None; appends to the mistakes."""
    if request.dataset is None:
        return None
    given = [name for name in RENDERINGS if getattr(request, name) is not None]
    for extra in given[1:]:
        text = f"{_shown(request, extra)}: {given[0]} is given as well: keep one"
        mistakes.append(Mistake(extra, text))
    if not given:
        text = (
            f"is missing: give it, or template or chat, to render the examples of {request.dataset}"
        )
        mistakes.append(Mistake("text_fields", text))
    if request.template is not None:
        template = parsed_template(request.template)
        if isinstance(template, list):
            mistakes += template
            return None
        return template
    if request.text_fields is not None:
        return TextFields(request.text_fields)
    return None if request.chat is None else Chat(request.chat)


def _own(models: Collection[Model], mistakes: list[Mistake]) -> str | Vocabulary:
    """Tokenizer of the only model, or rates of its vocabulary where it has none."""
    rates = _vocabulary(models)
    if rates is not None and not any(model.weights for model in models):
        return rates
    return own_tokenizer(models, mistakes)


def _vocabulary(models: Collection[Model]) -> Vocabulary | None:
    """Rates of the vocabulary that all models share; None for several, or for a tiny one."""
    sizes = {model.vocab_size for model in models}
    return vocabulary_of(sizes.pop()) if len(sizes) == 1 else None


def own_tokenizer(models: Collection[Model], mistakes: list[Mistake]) -> str:
    """Tokenizer of the only model, or an empty text; appends to the mistakes if there is none."""
    by_model = {model.name: model.weights for model in models}
    tokenizers = set(by_model.values())
    if len(tokenizers) == 1 and None not in tokenizers:
        return str(tokenizers.pop())
    names = ", ".join(by_model)
    if len(tokenizers) > 1:
        why = f"is missing: {names} have different tokenizers: give one"
    elif names:
        why = f"is missing: {names} has no tokenizer: give a folder or a hub name"
    else:
        why = "is missing: give a folder or a hub name, or the model"
    mistakes.append(Mistake("tokenizer", why))
    return ""
