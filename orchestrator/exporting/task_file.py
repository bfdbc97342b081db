"""Task file that starts a training: one of five formats."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from gpu_catalog.safe_text import printable
from orchestrator.clouds.skypilot import (
    SKYPILOT_CLOUDS,
    UNMOUNTED_CLOUDS,
    old_driver,
    skypilot_instance,
)
from orchestrator.exporting.names import (
    DSTACK_BACKENDS,
    DSTACK_CLUSTERS,
    DSTACK_GPUS,
    SLURM_GPUS,
    Dstack,
)
from orchestrator.exporting.requirements import install_lines, needs_compiler
from orchestrator.exporting.training import FALLBACKS, ChosenOffer, ExportError, TrainingJob
from orchestrator.exporting.training_script import filled, save_steps, training_script
from orchestrator.pricing.catalog_file import OWN
from orchestrator.pricing.own_cards import PREFIX

Target = Literal["skypilot", "dstack", "hf-jobs", "ray", "slurm"]

TARGETS: tuple[Target, ...] = get_args(Target)
MODEL, DATASET = "YOUR_MODEL", "YOUR_DATASET"
DATA = "/data"
MOUNTING: tuple[Target, ...] = ("skypilot", "dstack")
"""Formats that take files of this machine along."""
OF_TRL = (
    "  MODEL: name on the hub, or a folder; it has the tokenizer, too",
    "  DATASET: name on the hub, or a folder of JSON Lines, CSV or Parquet files",
    "    in a format of TRL: messages; text; prompt and completion; chosen and rejected",
)
DEFAULT_FILES: Mapping[Target, str] = {
    "skypilot": "skypilot.yaml",
    "dstack": "finetune.dstack.yml",
    "hf-jobs": "hf-jobs.sh",
    "ray": "ray-job.sh",
    "slurm": "job.sbatch",
}
OWN_TARGETS: tuple[Target, ...] = ("ray", "slurm")
"""Formats that start a training on a machine of the user's own."""
HF_JOBS = "hf-jobs"
"""Hugging Face as a provider; its flavors are the catalog's instances."""
SLACK = 2.0
"""Time limit of a job, as a multiple of its predicted hours; their interval may end later."""


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A task file.

    Attributes:
        left_out: one line for each offer that the format cannot name, and that is cheaper than one
            in the file.
        placements: offers in the file, the first choice first.
        start: command that starts it; ``FILE`` stands for its name.
    """

    text: str
    start: str
    placements: tuple[ChosenOffer, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """Format of a task file.

    Attributes:
        start: command that starts the file; ``FILE`` stands for its name.
        output: value of ``OUTPUT_BUCKET`` to be replaced, and its meaning.
        refuses: reason why the format cannot name an offer; None where it can.
        fallbacks: offers that it can name besides the first.
        one_node: reason why it starts a training on one node alone; None where on several, too.
    """

    start: str
    output: tuple[str, str]
    refuses: Callable[[ChosenOffer], str | None]
    fallbacks: int = 0
    one_node: str | None = None


def _listed(what: str, names: Mapping[str, object]) -> Callable[[ChosenOffer], str | None]:
    def refuses(place: ChosenOffer) -> str | None:
        name = place.provider if what == "provider" else place.gpu
        return None if name in names else f"it has no {what} {name}"

    return refuses


def _refused_by_skypilot(place: ChosenOffer) -> str | None:
    by_provider = _listed("provider", SKYPILOT_CLOUDS)(place) or old_driver(place.provider)
    if by_provider is None and SKYPILOT_CLOUDS[place.provider] in UNMOUNTED_CLOUDS:
        return f"it mounts no bucket on machines of {place.provider}"
    has_name = skypilot_instance(place.provider, place.instance) is not None
    return by_provider or (None if has_name else f"it has no instance {place.instance}")


def _refused_by_dstack(place: ChosenOffer) -> str | None:
    by_provider = _listed("provider", DSTACK_BACKENDS)(place)
    if by_provider is None and place.instances > 1:
        backend = DSTACK_BACKENDS[place.provider]
        if backend not in DSTACK_CLUSTERS:
            return f"it starts no task on several nodes of {place.provider}"
    return by_provider or _listed("GPU", DSTACK_GPUS)(place)


def _refused_by_hugging_face(place: ChosenOffer) -> str | None:
    return None if place.provider == HF_JOBS else "its jobs run on its own hardware"


FORMATS: dict[Target, Format] = {
    "skypilot": Format(
        "sky jobs launch --secret HF_TOKEN FILE",
        ("YOUR_BUCKET", "bucket for checkpoints and the result; SkyPilot makes it"),
        _refused_by_skypilot,
        FALLBACKS,
    ),
    "dstack": Format(
        "dstack apply -f FILE",
        ("s3://YOUR_BUCKET/PATH", "folder of a bucket for checkpoints and the result"),
        _refused_by_dstack,
        FALLBACKS,
    ),
    "hf-jobs": Format(
        "bash FILE",
        ("YOUR_NAME/YOUR_BUCKET", "bucket of the hub for checkpoints and the result"),
        _refused_by_hugging_face,
        one_node="a job of Hugging Face is one machine",
    ),
    "ray": Format(
        "bash FILE",
        ("s3://YOUR_BUCKET/PATH", "folder of a bucket for checkpoints and the result"),
        lambda _: None,
        one_node="the command of a job of Ray runs on one node",
    ),
    "slurm": Format(
        "sbatch FILE",
        ("/YOUR_SHARED_FOLDER", "folder on all nodes for checkpoints and the result"),
        lambda _: None,
    ),
}


def task_file(training: TrainingJob, target: Target) -> TaskFile:
    """Write the task file of a training.

    Raises:
        ExportError: TRL does not train by the recipe, or the format can name none of the offers, or
            not so many nodes.
    """
    form = FORMATS[target]
    if training.nodes > 1 and form.one_node is not None:
        others = ", ".join(name for name in TARGETS if FORMATS[name].one_node is None)
        raise ExportError(
            f"--to {target}: {form.one_node}, and the training takes {training.nodes}: use --to "
            f"one of {others}, or a layout of one node"
        )
    chosen, left_out = _named(training.placements, form, target)
    training = replace(training, placements=chosen)
    mounts, links = _mounts(training, target)
    script = training_script(training, links)
    file = filled(
        target,
        training=training,
        first=chosen[0],
        name=re.sub(r"[^a-z0-9]+", "-", f"finetune-{training.model.name}".lower()).strip("-")[:40],
        header=_header(training, target, links),
        script=script,
        bucket_script=filled("bucket", script=script, nodes=training.nodes),
        install=install_lines(training, has_torch=target == "hf-jobs"),
        needs_compiler=needs_compiler(training),
        variables=_variables(training, target),
        mounts=mounts,
        output=form.output[0],
        clouds=SKYPILOT_CLOUDS,
        instance=skypilot_instance,
        dstack=dstack_lists(chosen) if target == "dstack" else None,
        resources=json.dumps({chosen[0].gpu: training.gpus}),
        slurm_gpu=SLURM_GPUS.get(chosen[0].gpu, chosen[0].gpu.lower()),
        limit_hours=math.ceil(max(max(SLACK * p.hours, p.hours_high) for p in chosen)),
    )
    return TaskFile(file, form.start, chosen, left_out)


def _rents(target: Target, place: ChosenOffer) -> bool:
    return target not in OWN_TARGETS and FORMATS[target].refuses(place) is None


def is_rented_elsewhere(place: ChosenOffer, target: Target) -> bool:
    """Whether the price is of an offer that the format does not rent."""
    return target in OWN_TARGETS and place.provider != OWN


def write_task(file: TaskFile, path: Path) -> str:
    """Write a task file; return the offers in it, and the command that starts it.

    Raises:
        ExportError: the file cannot be written.
    """
    try:
        path.write_text(file.text, encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{path}: cannot be written ({error.strerror})") from None
    return "\n".join(
        [
            f"{path}: {file.placements[0].text}",
            *(f"  fallback {place.text}" for place in file.placements[1:]),
            f"Set the variables at its top, then: {file.start.replace('FILE', str(path))}",
        ]
    )


def _named(
    placements: Sequence[ChosenOffer], form: Format, target: Target
) -> tuple[tuple[ChosenOffer, ...], tuple[str, ...]]:
    """The first offers that a format can name, and why it names no cheaper ones."""
    first = placements[0]
    if first.provider == OWN and target not in OWN_TARGETS:
        other = f"--gpu without {PREFIX}" if first.is_electricity else "--providers that rent"
        raise ExportError(
            f"--to {target}: the choice is your own {first.gpu}, which is not rented: use --to "
            f"{' or '.join(OWN_TARGETS)}, or {other}"
        )
    chosen: list[ChosenOffer] = []
    left_out: list[str] = []
    for place in placements:
        reason = form.refuses(place)
        if reason is None:
            chosen.append(place)
        else:
            left_out.append(f"{target} cannot use {place.text}: {reason}")
        if len(chosen) > form.fallbacks:
            break
    if not chosen:
        shown = "\n".join(left_out[: FALLBACKS + 1])
        others = [name for name in TARGETS if any(_rents(name, place) for place in placements)]
        remedy = f"--to {' or '.join(others)}, or " if others else ""
        raise ExportError(
            f"{shown}\n--to {target}: it can use none of the offers: give {remedy}other --providers"
        )
    return tuple(chosen), tuple(left_out)


def dstack_lists(placements: Iterable[ChosenOffer]) -> Dstack:
    """Lists that dstack chooses within; it takes the cheapest offer that they allow."""
    places = list(placements)
    regions = [place.named_region for place in places]
    counts = sorted({place.gpus_per_instance for place in places})
    spot = {place.is_spot for place in places}
    highest = max(place.usd_per_hour / place.instances for place in places)
    return Dstack(
        backends=_once(DSTACK_BACKENDS[place.provider] for place in places),
        # An offer of all regions allows them all.
        regions=() if None in regions else _once(name for name in regions if name is not None),
        gpus=_once(DSTACK_GPUS[place.gpu][0] for place in places),
        memory_gb=min(DSTACK_GPUS[place.gpu][1] for place in places),
        counts=f"{counts[0]}..{counts[-1]}" if len(counts) > 1 else str(counts[0]),
        spot_policy="auto" if len(spot) > 1 else "spot" if True in spot else "on-demand",
        max_price=math.ceil(highest * 1e4) / 1e4,  # rounded down, it would exclude the offer itself
    )


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _mounts(training: TrainingJob, target: Target) -> tuple[dict[str, Path], dict[str, str]]:
    """Data of this machine by its place on the rented one, and links from the trainer's names.

    Only names inside the working directory can be links.
    """
    if target not in MOUNTING:
        return {}, {}
    if training.configuration is None:
        local = _local_file(training.dataset)
        return ({DATA + f"/{local.name}" * local.is_file(): local} if local else {}), {}
    inside = [
        (name, path)
        for name, path in training.configuration.files.items()
        if not name.startswith(("/", "~")) and ".." not in Path(name).parts
    ]
    links = {name: f"{DATA}/{i}/{path.name}" for i, (name, path) in enumerate(inside)}
    return {links[name]: path for name, path in inside}, links


def _variables(training: TrainingJob, target: Target) -> dict[str, str]:
    """Variables of TRL's command; a configuration has none."""
    if training.configuration is not None:
        return {}
    is_mounted = target in MOUNTING and _local_file(training.dataset) is not None
    dataset = DATA if is_mounted else _dataset(training)
    return {"MODEL": _model(training, target), "DATASET": dataset}


def _local_file(dataset: str | None) -> Path | None:
    """Path of a data set on this machine; None for one of the hub."""
    if dataset is None:
        return None
    path = Path(dataset).expanduser()
    return path.absolute() if path.exists() else None


def _model(training: TrainingJob, target: Target) -> str:
    """Model by its name on the hub; only nodes of Slurm have the folders of this machine."""
    weights = training.model.weights or MODEL
    if not weights.startswith((".", "/", "~")):
        return weights
    return str(Path(weights).expanduser().absolute()) if target == "slurm" else MODEL


def _dataset(training: TrainingJob) -> str:
    is_hub = training.dataset is not None and _local_file(training.dataset) is None
    return str(training.dataset) if is_hub else DATASET


def _header(training: TrainingJob, target: Target, links: Mapping[str, str]) -> str:
    """Comment lines on the training, on its price, and on what is to be set."""
    recipe, first, form = training.recipe, training.placements[0], FORMATS[target]
    unit = "packed rows" if recipe.packing else "examples"
    nodes = f" on {training.nodes} nodes" if training.nodes > 1 else ""
    several = f" x {training.gpus} GPUs{nodes} ({training.strategy})" if training.gpus > 1 else ""
    lines = [
        f"Made by finetune-cost. Start it: {form.start}",
        f"{training.model.name}, {recipe.key}",
        f"{training.examples} examples x {training.epochs} epochs",
        (
            f"{training.micro_batch} x {training.accumulation} accumulated{several} = "
            f"{training.effective_batch} {unit} per optimizer step"
        ),
        (
            f"Chosen ({training.basis}{', a rented offer' * is_rented_elsewhere(first, target)}): "
            f"{first.text}"
        ),
        *(f"Fallback: {place.text}" for place in training.placements[1:]),
        *_remarks(training, links),
        "",
        "Set these:",
        *([] if training.configuration else OF_TRL),
        f"  OUTPUT_BUCKET: {form.output[1]}",
    ]
    return "\n".join(map(printable, lines))


def _remarks(training: TrainingJob, links: Mapping[str, str]) -> list[str]:
    configuration = training.configuration
    if configuration is None:
        return ["The learning rate and its schedule are TRL's defaults: add --learning_rate."]
    left = [name for name in configuration.files if name not in links]
    put = [f"Put these where the job runs, under these names: {', '.join(left)}"] if left else []
    steps = min(save_steps(training), training.steps)
    text = (
        f"The configuration is {configuration.name} of {configuration.trainer}. Checkpoints are as "
        f"frequent as it states; the price is for one every {steps} optimizer steps."
    )
    return [text, *put]
