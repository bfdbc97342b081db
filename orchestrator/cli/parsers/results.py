"""Commands on what was measured, simulated or published, and on prices."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.cli.options.groups import (
    CONSTRAINTS,
    GROUPING,
    HISTOGRAM,
    MODEL,
    NAMED,
    PRICES,
    RENDERING,
    add_dataset,
    add_examples,
    add_job,
    add_overheads,
    add_recipe,
)
from orchestrator.cli.options.table import add_table, titled
from orchestrator.cli.options.value_types import (
    above_zero,
    batch_size,
    positive,
    positives,
    run_folder,
    seq_lens,
    strategy,
)

GPUS = f"""
model and GPUs:
--model MODEL            {MODEL}
--gpu GPU                keys of 'catalog gpus', or names such as A100, separated by commas;
                         own:A40 and own:4xA40 are yours, which cost electricity, no rent (default
                         of estimate: all)
--memory-gib MEMORY_GIB  usable memory of --gpu, instead of the catalog's value; required for a GPU
                         that the catalog lacks
--usd-per-kwh USD        price of a kilowatt hour for --gpu own:GPU, at the card's board power
"""
STRATEGY = """
several GPUs:
--strategy STRATEGY      how several GPUs share a training: ddp, fsdp2, hsdp (a copy of the model
                         on each node, in shards there), tp (linear layers divided among the GPUs
                         of a node), deepspeed-zero1, -zero2, -zero3, or auto for the best of the
                         first three that fits (default: auto)
--deepspeed FILE.json    DeepSpeed's configuration, in place of --strategy: its stage and sizes
--offload {none,optimizer,parameters,all}
                         with --strategy deepspeed-zero1 to -zero3: the host holds the optimizer's
                         state and updates the weights; with -zero3 it may hold these, or all;
                         fsdp2 and hsdp take all; none for nothing, whatever a file states
--degree N               with --strategy tp: GPUs of a group that divides layers; the groups share
                         the model in shards, as fsdp2 (default: all GPUs of a node)
--nodes NODES            nodes that the GPUs are on, as many on each (default: 1)
"""
SEVERAL = """
several GPUs:
--gpus N[,N...]          GPUs that train together, on all nodes; several numbers are compared. --gpu
                         8xH100-SXM states it for one GPU (default: 1 with --gpu; without, of each
                         GPU the best of 1, 2, 4 and 8 that an instance has; 8 a node with --nodes)
"""
STEP = """
lengths and batches:
--active-experts ACTIVE_EXPERTS
                         experts per token (default: the model's own)
--seq-len N[,N...]|max   tokens per example; several: an estimate for each; max: the longest that
                         fits each GPU at --batch-size (default: 1), a multiple of 128 or the
                         model's own longest (default: the longest of --dataset; without data
                         1024, TRL's own)
--batch-size N|max|fastest
                         examples per step; max: the largest batch that fits; fastest: the fastest
                         of the largest and the powers of two below it (default: max; fastest for
                         padded examples of a data set)
--image-tokens N         tokens of each example that come from images; for a vision-language model,
                         of which only the language part is trained
"""
SIMULATION = f"""
simulated machine:
--expandable-segments    simulate PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
--constants FILE         constants that 'calibrate' wrote
--host-speed N           host times relative to the clock's, as 'host-speed' prints them on the
                         machine that will train (default: 1, or as calibrated)
{PRICES}{CONSTRAINTS}
"""
RESULTS = """
--explain-config         print how each key of the configuration is interpreted, and estimate
                         nothing
--routing-draws ROUTING_DRAWS
                         number of random expert routings, which show the spread of the peak memory
--explain                print what fills the memory and takes the time
--export FILE            write the cheapest offer and the recipe as a task file, which trains with
                         TRL or, with --config, with your own trainer; needs --to
--to {skypilot,dstack,hf-jobs,ray,slurm}
                         format of --export
"""
OUTPUT = """
--json                   print all results as JSON
--csv                    print a row for each GPU as CSV
"""
CHECK = """
--strict                 exit with 2 where the 90 % interval of the memory includes the GPU's limit
--json                   print all results as JSON
several GPUs:
--gpus N                 GPUs that train together, as in --gpu 8xH100-SXM (default: 1; 8 a node
                         with --nodes)
"""
CALIBRATE = """
runs RUN|FILE.csv...     run folders with measured steps, or CSVs of measurements with the recipe
--out OUT                file to write (default: constants.json)
"""
DATASET_OPTIONS = f"""
[dataset] DATA           a JSON, JSONL, CSV or Parquet file, a folder of them, a data set of the hub
                         (OWNER/NAME), or one of arXiv 2408.04693: commonsense_15k, math_14k,
                         hellaswag, gsm8k, openorca
{RENDERING}{HISTOGRAM}
--model NAME             count with the tokenizer of this model
--save FILE.csv          write a histogram for --length-histogram
--json                   print all results as JSON
"""
RUN = f"""
run RUN                  the run folder
{PRICES}
"""
RANK = f"""
run RUN|FILE.csv         the run folder, or a CSV of measurements with the recipe of each; FILE.run
                         beside it becomes the run folder
{PRICES}
"""
OTHER = """
[other] OTHER            another run to compare with; writes comparison-OTHER.html into the first
--image                  also write report.png, a picture of the page by Chromium, which sites show
                         beside a link to it
--url URL                with --image: address of the page; most sites show the picture only with
                         the whole address
"""
FIT = """
run RUN|FILE.csv         the run folder, or a CSV of observations
--predict STEPS.csv      write predictions.csv: these rows with predictions and intervals
--lengths LENGTHS.csv    example lengths, for rows that name a data set instead of a length: columns
                         dataset, tokens and examples
--out DIR                folder to write to (default: FILE.fits)
"""
EXPORT = """
run RUN                  the run folder
--to {skypilot,dstack,hf-jobs,ray,slurm}
                         write the cheapest offer of the ranking and its recipe as a task file,
                         which starts the training by TRL
--model NAME             with --to: the model to train, of several in the ranking
--cell KEY               with --to: the cell to train, of several in the ranking, by its key as
                         status prints it
--config FILE            with --to: train by this configuration, with the micro-batch and the
                         accumulation of the ranking, and by its own trainer
--providers A,B          with --to: only offers of these providers; ray and slurm take those of
                         provider own first
--regions A,B            with --to: only offers in these regions, as the ranking names them
--[no-]spot              with --to: only spot instances, or only on-demand instances
--format {ado}           write the observations for ado: IBM's ado and LLMFineTuningBench; further
                         columns hold the basis (measured or simulated), sparsity, recipe, weights,
                         software and stack
--out FILE               file to write (default: ado.csv in the run, or a file in this folder that
                         is named after --to)
"""
REPRODUCE = """
--json                   print only the figures, as JSON
--out DIR                folder for reproduction.md and fig13.svg to fig15.svg (default:
                         reproduction)
"""
REFRESH = f"""
--source A,B             sources of prices: gpuhunt (catalogs of many providers; pip install
                         '.[prices]'); vast, runpod-community (marketplaces); hf-jobs, modal
                         (serverless); aws (on-demand and spot prices, with your credentials) or
                         aws-public (on-demand prices, without an account); default: all but
                         aws-public
--regions A,B            regions of Amazon (default: all that the account may use; for aws-public,
                         us-east-1 and us-west-2)
--out FILE               write a CSV that commands use only with --prices FILE
{PRICES}
"""
SNAPSHOT = f"""
--out FILE.csv|FOLDER|s3://BUCKET/FOLDER
                         file to write; in a folder, prices-DATE.csv of today
{PRICES}
"""
HISTORY = """
folder FOLDER|s3://BUCKET/FOLDER
                         folder of the snapshots
--gpu A,B                keys of 'catalog gpus' (default: all that have prices)
"""


OF_LAYOUT: dict[str, Any] = {
    "strategy": strategy,
    "deepspeed": Path,
    "degree": positive,
    "nodes": positive,
}
"""Types of the options of ``STRATEGY``."""


class WithoutModel(argparse.Action):
    """Option that states the model, so that ``--model`` is not required beside it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the value."""
        del option_string
        setattr(namespace, self.dest, values)
        for action in parser._actions:  # noqa: SLF001 - no public name
            if action.dest == "model":
                action.required = False


def add_estimate(commands: Any) -> None:
    """Add the commands."""
    estimate = commands.add_parser(
        "estimate",
        run="estimate.run_estimate",
        checks=True,
        usage="%(prog)s (--model MODEL | --config FILE) [options]",
        help="simulate memory, largest batch, time and cost on GPUs that you do not have",
        description="Simulate fine-tuning on GPUs of the catalog by tracing the training code. "
        "Nothing is measured. The exit code is 1 if the training fits no GPU, if no offer is "
        "within --deadline and --budget-usd, or after an error, such as a mistake in the file; "
        "'check' exits with 2 after an error.",
    )
    add_table(estimate, RESULTS, routing_draws=positive)
    add_table(estimate.add_mutually_exclusive_group(), OUTPUT)
    _add_training(estimate, SEVERAL + STRATEGY, gpus=positives)
    estimate.set_defaults(gpu="all")
    check = commands.add_parser(
        "check",
        run="estimate.run_check",
        checks=True,
        usage="%(prog)s (--model MODEL | --config FILE) --gpu GPU [options]",
        help="check whether a training fits a GPU: exit code 0 fits, 1 does not, 2 unknown",
        description="Simulate a training on a GPU of the catalog, or on several GPUs of one or "
        "more nodes. The exit code is 0 if it fits, 1 if it does not (the cheapest change that "
        "makes it fit is printed), and 2 if that is unknown or an option is wrong. Nothing is "
        "measured.",
    )
    _add_training(check, CHECK + STRATEGY, required=["--model", "--gpu"], gpus=positive)
    calibrate = commands.add_parser(
        "calibrate",
        run="fit.run_calibrate",
        help="fit the constants of the simulated GPU to measured steps",
        description="Fit the constants of the simulated GPU to the measured steps of runs on "
        "NVIDIA GPUs. One measured step is enough for the speed of a machine's host.",
    )
    add_table(calibrate, CALIBRATE, runs=run_folder, out=Path)
    calibrate.set_defaults(out=Path("constants.json"))


def _add_training(
    command: argparse.ArgumentParser,
    layouts: str,
    *,
    required: Sequence[str] = ("--model",),
    gpus: Callable[[str], object],
) -> None:
    """Add the options of a training to simulate, and of its GPUs."""
    add_table(command, GPUS, required=required, memory_gib=above_zero)
    model = titled(command, "model and GPUs")
    model.add_argument(
        "--model-config",
        action=WithoutModel,
        dest="model",
        metavar="FILE.json",
        help="config.json of the model, where its name is out of reach; the same as --model",
    )
    model.add_argument(
        "--config",
        action=WithoutModel,
        type=Path,
        metavar="FILE",
        help="YAML of axolotl, LLaMA-Factory or TRL: the training to estimate. Options replace "
        "what it states; --model is not required",
    )
    add_table(command, layouts, gpus=gpus, **OF_LAYOUT)
    add_table(command, STEP, active_experts=positive, seq_len=seq_lens, batch_size=batch_size)
    add_examples(command, "number of training examples (default: those of --dataset, or 10000)")
    add_table(command, "job:\n--epochs EPOCHS  number of epochs (default: 3)", epochs=positive)
    add_dataset(command, batching=GROUPING)
    add_recipe(
        command,
        method="lora; with --recipe auto, lora and qlora",
        named="auto: the cheapest that fits each GPU, but lora where qlora saves less than 5 %, "
        f"with the options below as given; or {NAMED} (default: auto where only --method is given, "
        "else the defaults of --defaults)",
    )
    add_table(command, SIMULATION, host_speed=above_zero)
    add_overheads(command)


def add_dataset_command(commands: Any) -> None:
    """Add the command."""
    dataset = commands.add_parser(
        "dataset",
        run="dataset.run",
        help="count the tokens of a data set's examples, and what padding adds",
        description="Count the tokens of a data set's examples with a model's own tokenizer, and "
        "print the tokens per example in batches of 1 to 64, padded or packed.",
    )
    add_table(dataset, DATASET_OPTIONS, save=Path)


def add_run(commands: Any) -> None:
    """Add the commands."""
    for name, run, text in (
        ("rank", "run.run_rank", "price a job on every offer; write ranking.csv and ranking.json"),
        ("what-if", "run.run_rank", "price a job as rank does, and leave the run unchanged"),
        (
            "report",
            "run.run_report",
            "write report.html and report.md, print the latter; or compare two runs",
        ),
        ("status", "run.run_status", "print the progress of a run"),
    ):
        usage = "%(prog)s RUN|FILE.csv [options]" if run == "run.run_rank" else None
        command = commands.add_parser(name, run=run, usage=usage, help=text)
        add_table(command, RANK if run == "run.run_rank" else RUN, run=run_folder)
        if run == "run.run_rank":
            add_job(command)
        elif run == "run.run_report":
            add_table(command, OTHER, other=run_folder)


def add_fit(commands: Any) -> None:
    """Add the commands."""
    fit = commands.add_parser(
        "fit",
        run="fit.run_fit",
        help="fit the laws to the observations of a run or of a CSV",
        description="Fit the laws to a run, and write fits.json into it. Or fit a CSV of "
        "measurements, print the laws, and write fits.json and coefficients.csv. A CSV has the "
        "columns gpu, model, sparsity, seq_len, batch_size and examples_per_second, or those of "
        "IBM's ado.",
    )
    add_table(fit, FIT, run=run_folder, predict=Path, lengths=Path, out=Path)
    export = commands.add_parser(
        "export",
        run="export.run_export",
        help="write a task file that starts the training, or the observations for another project",
    )
    add_table(export, EXPORT, run=run_folder)
    reproduce = commands.add_parser(
        "reproduce",
        run="fit.run_reproduce",
        help="recompute the paper's tables and figures, and compare its law with ours",
        description="Recompute what arXiv 2408.04693 publishes, and test how well its law and ours "
        "predict held-out points. Print Markdown and draw the figures.",
    )
    add_table(reproduce, REPRODUCE, out=Path)
    reproduce.set_defaults(out=Path("reproduction"))


def add_catalog(commands: Any) -> None:
    """Add the command and its parts."""
    catalog = commands.add_parser("catalog", help="list GPUs and prices, or refresh the prices")
    parts = catalog.add_subparsers(dest="what", required=True)
    gpus = parts.add_parser("gpus", run="catalog.run_gpus", help="list the GPUs of the catalog")
    add_table(
        gpus, f"{PRICES}--sources                also print the source of each GPU's figures\n"
    )
    prices = parts.add_parser(
        "prices", run="catalog.run_prices", help="list the prices in use, their table and their age"
    )
    add_table(prices, PRICES)
    refresh = parts.add_parser(
        "refresh",
        run="catalog.run_refresh",
        help="download today's prices and use them from then on",
        description="Download prices, and reject those that cannot be right, with the reasons. "
        "From then on every command uses the others. A source that does not answer keeps its last "
        "prices.",
    )
    add_table(refresh, REFRESH)
    refresh.set_defaults(source="gpuhunt,runpod-community,vast,hf-jobs,modal,aws")
    snapshot = parts.add_parser(
        "snapshot",
        run="catalog.run_snapshot",
        help="keep the prices in use as a dated file",
        description="Write the prices in use to a file, for 'catalog history' and for --prices "
        "FOLDER --as-of DATE. Run 'catalog refresh' first for today's prices.",
    )
    add_table(snapshot, SNAPSHOT, required=("--out",), out=run_folder)
    history = parts.add_parser(
        "history",
        run="catalog.run_history",
        help="show what each GPU has cost, by the snapshots in a folder",
    )
    add_table(history, HISTORY, folder=run_folder)
    parts.metavar = "{" + ",".join(parts.choices) + "}"  # in the error where none is given
