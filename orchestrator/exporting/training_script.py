"""Bash lines that train: TRL's command, or a Python file where the command lacks a field."""

import textwrap
from collections.abc import Mapping
from typing import Any

from orchestrator.exporting.deepspeed_file import file_text
from orchestrator.exporting.training import TrainingJob
from orchestrator.exporting.trl_options import Options, trl_options
from orchestrator.safe_templates import (
    Verbatim,
    shell_value,
    shell_word,
    template_environment,
    yaml_value,
)
from orchestrator.spec.job import MINUTES_PER_HOUR
from trials.recipes.fields import Task
from trials.recipes.recipe import Recipe

TRAINERS: Mapping[Task, str] = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}
"""Names of TRL's trainers and of their configurations, without the ending."""
WIDTH = 96

COMMANDS: Mapping[str, tuple[str, str]] = {
    "axolotl": (
        'axolotl train "$CONFIG" --output-dir "$OUTPUT"',
        "--resume-from-checkpoint ",
    ),
    "LLaMA-Factory": (
        'llamafactory-cli train "$CONFIG" output_dir="$OUTPUT" overwrite_output_dir=true',
        "resume_from_checkpoint=",
    ),
    "TRL": ('trl TASK --config "$CONFIG" --output_dir "$OUTPUT"', "--resume_from_checkpoint "),
}
"""Commands of trainers, and the beginning of the option that resumes; options go before the file's.

LLaMA-Factory would otherwise resume from a checkpoint that was not written to its end.
"""


SEVERAL: Mapping[str, tuple[str, str]] = {
    "axolotl": ("", "--launcher torchrun -- --nproc_per_node={gpus}{rendezvous}"),
    "LLaMA-Factory": ("FORCE_TORCHRUN=1 {rendezvous}NPROC_PER_NODE={gpus} ", ""),
    "TRL": ("", "--multi_gpu {processes} --mixed_precision no"),
}
"""What comes before and after the command of a trainer so that it starts a process for each GPU."""
ONE_PROCESS = "torchrun --standalone --nproc_per_node 1"
"""Launcher of the only process of one GPU, whose variables DeepSpeed needs.

Accelerate's starts one process without them.
"""
RENDEZVOUS: Mapping[str, str] = {
    "axolotl": (
        " --nnodes={nodes} --node_rank=$NODE_RANK --master_addr=$MASTER_ADDR "
        "--master_port=$MASTER_PORT"
    ),
    "LLaMA-Factory": "NNODES={nodes} ",  # it reads the other variables itself
    "TRL": (
        " --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT"
    ),
}
"""Options and variables by which the processes of several nodes meet."""
SHARDS = (
    "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
    "--fsdp_reshard_after_forward true --fsdp_state_dict_type FULL_STATE_DICT"
)
"""Options of ``accelerate launch`` that divide the model, as ``fsdp2`` does."""
ON_HOST = " --fsdp_offload_params true"
"""Further one, that leaves the shards to the host."""
WITH_GLOO = "ACCELERATE_USE_FSDP=true FSDP_OFFLOAD_PARAMS=true "
"""Variables that ``accelerate launch`` sets with it: NCCL alone cannot sum the norm of gradients on
the host. axolotl sets them itself."""
REPLICAS = (
    " --use_parallelism_config --parallelism_config_dp_replicate_size {replicas} "
    "--parallelism_config_dp_shard_size {shards}"
)
"""Further ones, that copy it to groups of neighbours, each of which divides it: ``hsdp``."""


def training_script(training: TrainingJob, links: Mapping[str, str] | None = None) -> str:
    """Bash that trains on the GPUs of a node into ``$OUTPUT``, and resumes from there.

    It reads the variables ``MODEL``, ``DATASET`` and ``OUTPUT``; with a configuration, the last. On
    each of several nodes it also reads ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, which
    have to be exported: the node's number, and the place where the processes meet on the first.

    Args:
        training: the training.
        links: names of data in its configuration, each with the place of the data on the machine.

    Raises:
        ExportError: TRL does not train by the recipe.
    """
    gpus = training.gpus_per_node
    is_shared = any(place.gpus_per_instance > gpus for place in training.placements)
    # Several nodes may share the folder of the output.
    suffix = "-$NODE_RANK" if training.nodes > 1 else ""
    setting = {
        "training": training,
        "visible": ",".join(map(str, range(gpus))) if is_shared else None,
        "suffix": suffix,
        "expandable_segments": training.expandable_segments,
    }
    if training.configuration is not None:
        trainer = training.configuration.trainer
        command, resume = COMMANDS[trainer]
        rendezvous = RENDEZVOUS[trainer].format(nodes=training.nodes) if training.nodes > 1 else ""
        before, after = (
            part.format(gpus=gpus, rendezvous=rendezvous, processes=_processes(training))
            for part in SEVERAL[trainer]
        )
        alone, has_own = training.gpus == 1, trainer == "axolotl"
        gloo = WITH_GLOO if training.shards_on_host and not has_own else ""
        if alone and training.is_by_deepspeed:
            alone = trainer == "TRL"
            command = command.replace("trl TASK", f"{ONE_PROCESS} -m trl.scripts.TASK")
        return filled(
            "train_config",
            **setting,
            configuration=training.configuration,
            before="" if alone else gloo + before,
            command=command.replace("TASK", training.recipe.task),
            resume=resume,
            after=f" {after}" if after and not alone else "",
            links=links or {},
        )
    options = trl_options(training)
    additions = python_additions(training.recipe)
    python = None
    if additions:
        python = filled(
            "train_py",
            recipe=training.recipe,
            trainer=TRAINERS[training.recipe.task],
            additions=additions,
        )
    return filled(
        "train_sh",
        **setting,
        python=python,
        deepspeed=file_text(training) if training.is_by_deepspeed else None,
        program=_program(training, f'"$OUTPUT/train{suffix}.py"' if python else None),
        options=[_written(name, value) for name, value in _all_options(training, options).items()],
    )


def _program(training: TrainingJob, python: str | None) -> str:
    """Command that starts the processes, one for each GPU; the trainer sets the precision.

    Args:
        training: the training.
        python: Python file that trains; None to train by TRL's command.
    """
    task, gpus = training.recipe.task, training.gpus
    if gpus == 1:
        if training.is_by_deepspeed:
            return f"{ONE_PROCESS} {python or f'-m trl.scripts.{task}'}"
        return f"trl {task}" if python is None else f"python {python}"
    shares, precision = "--multi_gpu", "no"
    if training.is_sharded:  # its policy of precisions is the launcher's
        on_host = ON_HOST if training.shards_on_host else ""
        shares, precision = SHARDS + on_host, training.recipe.autocast or "no"
    if training.replicas is not None:
        shards = gpus // training.replicas
        shares += REPLICAS.format(replicas=training.replicas, shards=shards)
    launched = f"{shares} {_processes(training)} --mixed_precision {precision}"
    return f"trl {task} {launched}" if python is None else f"accelerate launch {launched} {python}"


def _processes(training: TrainingJob) -> str:
    """Options of ``accelerate launch`` for the processes of all nodes, one for each GPU."""
    counts = f"--num_machines {training.nodes} --num_processes {training.gpus}"
    return counts if training.nodes == 1 else counts + RENDEZVOUS["TRL"]


def python_additions(recipe: Recipe) -> list[str]:
    """Fields of a recipe that need a Python file beside TRL's command line, in words."""
    usual = "bf16" if recipe.method == "qlora" else "fp32"
    additions = {
        f"adapters in {recipe.adapter_dtype}": (
            recipe.method != "full"
            and recipe.adapter_dtype != usual
            and (recipe.method == "qlora" or recipe.base_dtype != "fp32")
        ),
        "PEFT's preparation of quantised models": recipe.kbit_preparation,
        "the loss from all logits": recipe.task == "sft" and recipe.loss == "full-logits",
    }
    return [text for text, applies in additions.items() if applies]


def save_steps(training: TrainingJob) -> int:
    """Optimizer steps between two checkpoints, the fewest of any offer."""
    shares = (p.checkpoint_minutes / MINUTES_PER_HOUR / p.hours for p in training.placements)
    return max(1, round(training.steps * min(shares)))


def filled(template: str, **values: Any) -> str:
    """Template of this package, filled in: each value is a scalar of YAML or a word of bash.

    ``comment`` makes comment lines of a text.
    """
    write = {"dstack": yaml_value, "skypilot": yaml_value, "train_py": _name_of_program}
    finalize = write.get(template, shell_value)
    environment = template_environment("orchestrator.exporting", finalize, comment=_comment)
    return environment.get_template(f"{template}.template").render(**values)


def _name_of_program(value: object) -> object:
    """Value for Python: of the fields of a recipe, whose texts are this program's own."""
    return value


def _comment(text: str) -> Verbatim:
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, WIDTH) or [""]]
    return Verbatim("\n".join(f"# {line}".rstrip() for line in lines))


def _all_options(training: TrainingJob, options: Options) -> Options:
    """Options of the recipe, and those of checkpoints and logs."""
    return options | {
        "save_strategy": "steps",
        "save_steps": str(save_steps(training)),
        "save_total_limit": "2",
        "report_to": "none",
    }


def _written(name: str, value: str | tuple[str, ...]) -> str:
    values = (value,) if isinstance(value, str) else value
    return " ".join([f"--{name}", *map(shell_word, values)])
