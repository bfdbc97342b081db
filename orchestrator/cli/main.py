"""The command line. Parses, calls the one function of the command, and says errors in one line.

What a command needs is imported when it runs: ``--help`` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gpu_catalog.errors import UserError
from orchestrator.cli.options.cluster import add_deploy
from orchestrator.cli.options.groups import (
    add_data,
    add_dataset,
    add_histogram,
    add_job,
    add_overheads,
    add_prices,
    add_recipe,
    run_folder,
)
from orchestrator.cli.options.help import Help, examples_text
from orchestrator.cli.options.learning import add_learn
from orchestrator.cli.options.offers import add_constraints, add_rented
from orchestrator.cli.options.profile import add_profile
from orchestrator.cli.options.value_types import (
    Parser,
    above_zero,
    batch_size,
    not_negative,
    positive,
)
from orchestrator.console import log_to_stderr, print_result, remark

EPILOG = """\
examples:
  python -m orchestrator sweep                       small models on this machine, in minutes
  python -m orchestrator sweep my.yaml --dry-run     what would be measured, what skipped and why
  ray job submit --working-dir . -- python -m orchestrator sweep my.yaml
  python -m orchestrator estimate --model mixtral-8x7b --method qlora --seq-len 512
  python -m orchestrator profile --model mixtral-tiny --seq-len 64    where a step's time goes
  python -m orchestrator rank runs/laptop --examples 50000 --epochs 3
"""

WAIT_MINUTES = 20.0  # an instance, an image of some GB, and a second try


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = Parser(
        prog="python -m orchestrator",
        description="Measures fine-tuning on the GPUs you could rent and ranks them by cost.",
        epilog=EPILOG,
        formatter_class=Help,
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    parser.commands = commands
    _add_sweep(commands)
    _add_plan(commands)
    _add_estimate(commands)
    _add_dataset(commands)
    learn = add_learn(commands, positive, above_zero)
    add_recipe(
        learn,
        method="lora; full for random weights",
        precision="bf16 on a GPU, fp32 on the CPU",
    )
    add_data(learn)
    for name, text in (
        ("fit", "fit the laws to a run's observations, or to anybody's in a CSV"),
        ("rank", "price a job on every offer and write ranking.csv and ranking.json"),
        ("what-if", "price another job, or by other prices, and leave the run as it is"),
        ("report", "write report.html and report.md, and print that; or compare two runs"),
        ("status", "how far a run is"),
    ):
        command = commands.add_parser(name, help=text)
        if name == "fit":
            _add_fit(command)
            continue
        command.add_argument("run", type=run_folder, metavar="RUN", help="the run folder")
        if name == "report":
            told = "set beside it, into comparison-OTHER.html of the first"
            command.add_argument("other", nargs="?", type=run_folder, metavar="OTHER", help=told)
        add_prices(command)
        if name in ("rank", "what-if"):
            add_job(command)
    export = commands.add_parser(
        "export", help="write a run's observations in the columns of another project"
    )
    export.add_argument("run", type=run_folder, metavar="RUN", help="the run folder")
    export.add_argument(
        "--format",
        choices=("ado",),
        required=True,
        help="ado: IBM's ado and LLMFineTuningBench; basis (measured or simulated), sparsity, "
        "recipe, weights, software and stack stand beside their columns",
    )
    export.add_argument("--out", type=Path, metavar="FILE", help="default: ado.csv in the run")
    calibrate = commands.add_parser(
        "calibrate",
        help="fit what estimates take a GPU to reach to steps that runs have measured",
        description="Fits the constants of the simulated clock to the measured steps of runs on "
        "NVIDIA GPUs; one measured step is enough for the speed of a machine's host.",
    )
    calibrate.add_argument(
        "runs", nargs="+", type=run_folder, metavar="RUN", help="run folders with measured steps"
    )
    calibrate.add_argument(
        "--out", type=Path, default=Path("constants.json"), help="default: constants.json"
    )
    check = commands.add_parser(
        "gpu-check", help="measure the GPU of this machine, without Ray; again to go on"
    )
    check.add_argument("--out", metavar="DIR", help="the run folder (default: runs/gpu-check)")
    check.add_argument("--seconds", type=positive, default=480, help="end by then (default: 480)")
    add_prices(check)
    reproduce = commands.add_parser(
        "reproduce",
        help="the paper's tables and figures, its law's answers and ours beside them",
        description="Works out anew what arXiv 2408.04693 publishes, and how well its law and ours "
        "predict the points that they have not seen. Prints Markdown and draws the figures.",
    )
    reproduce.add_argument("--json", action="store_true", help="the figures alone, for programs")
    reproduce.add_argument(
        "--out",
        type=Path,
        default=Path("reproduction"),
        metavar="DIR",
        help="where reproduction.md and fig13.svg to fig15.svg go (default: reproduction)",
    )
    _add_catalog(commands)
    add_deploy(commands, positive, add_prices)
    recipe = partial(add_recipe, method="lora", precision="bf16")
    add_profile(commands, positive, recipe, add_prices)
    _add_completion(commands)
    commands.choices["launch"].set_defaults(parser=parser)  # it checks the words of its sweep
    for name, command in commands.choices.items():
        command.formatter_class = Help
        command.epilog = examples_text(name)
    return parser


def _add_sweep(commands: Any) -> None:
    sweep = commands.add_parser("sweep", help="measure the cells of a specification and rank them")
    sweep.add_argument(
        "spec",
        nargs="?",
        type=Path,
        metavar="SPEC",
        help="a YAML file, or a shipped sweep: laptop (the default), paper, memory-saving, "
        "memory-saving-tiny",
    )
    sweep.add_argument(
        "--out",
        metavar="DIR",
        help="the run folder (default: runs/NAME); s3://BUCKET/FOLDER is one, too, wherever a run "
        "is named",
    )
    sweep.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out, by its own specification",
    )
    sweep.add_argument(
        "--constants",
        type=Path,
        metavar="FILE",
        help="of the simulated clock, as 'calibrate' wrote them",
    )
    sweep.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    sweep.add_argument(
        "--adaptive",
        action="store_true",
        help="measure what helps most to decide on a GPU, and stop when that is decided",
    )
    sweep.add_argument(
        "--budget-usd",
        type=above_zero,
        metavar="USD",
        help="begin no probe once so much is spent, and say what is left out",
    )
    sweep.add_argument(
        "--strict", action="store_true", help="start nothing if any trial would be skipped"
    )
    sweep.add_argument(
        "--wait-for-nodes",
        type=not_negative,
        default=WAIT_MINUTES,
        metavar="MINUTES",
        help="for a GPU's node to start, come back or start a worker; then its cells are skipped "
        f"(default: {WAIT_MINUTES:g})",
    )
    sweep.add_argument(
        "--log-to",
        action="append",
        default=[],
        choices=("tensorboard", "mlflow"),
        help="have trials drawn there, too, while they run: in the run's folder tensorboard, or "
        "at MLFLOW_TRACKING_URI; may be given several times",
    )
    add_rented(sweep)
    add_prices(sweep)


def _add_completion(commands: Any) -> None:
    completion = commands.add_parser(
        "completion", help="a script that completes finetune-cost by Tab"
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))


def _add_dataset(commands: Any) -> None:
    dataset = commands.add_parser(
        "dataset",
        help="how long the examples of a data set are, and what padding makes of them",
        description="Counts the tokens of a data set's examples by a model's own tokenizer, and "
        "tells how many an example comes to in batches of 1 to 64, padded or packed.",
    )
    add = dataset.add_argument
    add(
        "dataset",
        nargs="?",
        metavar="DATA",
        help="a JSON, JSONL, CSV or Parquet file, a folder of them, a data set of the hub "
        "(OWNER/NAME), or one of arXiv 2408.04693: commonsense_15k, math_14k, hellaswag, gsm8k, "
        "openorca",
    )
    add_data(dataset)
    add_histogram(dataset)
    add("--model", metavar="NAME", help="its tokenizer counts: a preset, a hub name or a folder")
    add("--save", type=Path, metavar="FILE.csv", help="write it, for --length-histogram")
    add("--json", action="store_true", help="all of it, for programs")


def _add_catalog(commands: Any) -> None:
    catalog = commands.add_parser(
        "catalog", help="the GPUs and prices that are known, and new ones"
    )
    whats = catalog.add_subparsers(dest="what", required=True)
    for name, text in (
        ("gpus", "the GPUs that are known"),
        ("prices", "what they cost, which table that is from, and how old it is"),
        ("refresh", "ask for the prices of today and use them from then on"),
    ):
        what = whats.add_parser(name, help=text)
        add_prices(what)
    what.description = (
        "Asks sources for prices, leaves out what cannot be true and says so, and keeps the others "
        "for every command. A source that does not answer keeps its last prices."
    )
    what.add_argument(
        "--source",
        default="gpuhunt,aws",
        metavar="A,B",
        help="gpuhunt (catalogs of many providers; pip install '.[prices]'), aws (with your "
        "credentials, on demand and spot), aws-public (on demand, needs no account); default: "
        "gpuhunt,aws",
    )
    what.add_argument(
        "--regions",
        metavar="A,B",
        help="of Amazon; default: all that the account may use, of aws-public us-east-1,us-west-2",
    )
    what.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="a CSV to write instead of the one that every command uses",
    )


def _add_fit(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Writes fits.json into a run. Of a CSV with the columns gpu, model, sparsity, seq_len, "
        "batch_size and examples_per_second, or those of IBM's ado, prints the laws and writes "
        "fits.json and coefficients.csv."
    )
    command.add_argument(
        "run",
        type=run_folder,
        metavar="RUN|FILE.csv",
        help="the run folder, or a CSV of observations",
    )
    command.add_argument(
        "--predict",
        type=Path,
        metavar="ASKED.csv",
        help="answer these rows, with intervals, in predictions.csv",
    )
    command.add_argument(
        "--lengths",
        type=Path,
        metavar="LENGTHS.csv",
        help="dataset, tokens, examples: how long examples are, for rows with a dataset alone",
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="default: FILE.fits")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="what is to be measured, or what of it would help most to decide on a GPU",
        description="Prints what a sweep would do, or has left to do. With --next, which "
        "measurements would tell most of which GPU is the cheapest, for their price.",
    )
    plan.add_argument(
        "given", nargs="?", type=run_folder, metavar="SPEC|RUN", help="default: the default sweep"
    )
    add_rented(plan)
    add_prices(plan)
    plan.add_argument("--next", action="store_true", help="what to measure next, and its price")
    plan.add_argument("--most", type=positive, default=10, help="list so many (default: 10)")


def _add_estimate(commands: Any) -> None:
    estimate = commands.add_parser(
        "estimate",
        help="memory, largest batch, time and cost on GPUs you do not have, without measuring",
        description="Simulates fine-tuning on GPUs of the catalog by tracing the training code.",
    )
    add = estimate.add_argument
    add("--model", required=True, help="a preset, a hub name, a folder or file with a config.json")
    add("--gpu", default="all", help="keys of 'catalog gpus', with commas, or all (the default)")
    add("--memory-gib", type=above_zero, help="usable memory, of a GPU that does not exist yet")
    add_recipe(estimate, method="lora", precision="bf16")
    add("--active-experts", type=positive, help="for each token (default: the model's own)")
    add("--seq-len", type=positive, help="tokens per example (default: as --dataset has them)")
    add(
        "--batch-size",
        type=batch_size,
        metavar="N|max|fastest",
        help="examples per step, the largest that fits, or the fastest of powers of two and that "
        "(default: max; fastest where examples are padded to those of a data set)",
    )
    add(
        "--examples",
        type=positive,
        help="training examples (default: those of --dataset, or 15000)",
    )
    add("--epochs", type=positive, help="how often each is seen (default: 10)")
    add_dataset(estimate)
    add("--routing-draws", type=positive, help="draw the experts' shares so often: peak's spread")
    add(
        "--expandable-segments",
        action="store_true",
        help="as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )
    add("--explain", action="store_true", help="what fills the memory, where the time goes")
    add("--constants", type=Path, metavar="FILE", help="of the clock, as 'calibrate' wrote them")
    add("--json", action="store_true", help="all of it, for programs")
    add_prices(estimate)
    add_constraints(estimate)
    add_overheads(estimate)


def program() -> NoReturn:
    """The command ``finetune-cost``."""
    sys.exit(main(sys.argv[1:], is_alone=True))


def main(arguments: Sequence[str], *, is_alone: bool = False) -> int:
    """Runs one command.

    Args:
        arguments: of the command line.
        is_alone: whether the process is there for it, so that it may use what is idle.

    Returns:
        0 done, 1 a known error (said in a line on stderr), 2 usage, 130 interrupted.
    """
    try:
        try:
            return _run(arguments, is_alone=is_alone)
        finally:
            sys.stdout.flush()  # a reader that has left is noticed here, not when Python ends
    except BrokenPipeError:
        # Whoever read our output has had enough (`| head`); Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str], *, is_alone: bool) -> int:
    options = build_parser().parse_args(arguments)
    log_to_stderr()
    options.ahead = []
    if options.command != "estimate" or options.seq_len is None or not is_alone:
        return _command(options)
    from trials.simulation.tracing_child import started_ahead  # noqa: PLC0415 - as in _command

    with started_ahead(options.model, options.seq_len) as options.ahead:
        return _command(options)


def _command(options: argparse.Namespace) -> int:
    if options.command == "completion":
        from orchestrator.cli.completion import completion_script  # noqa: PLC0415 - for it alone

        print_result(completion_script(build_parser(), options.shell))
        return 0
    from orchestrator.cli.commands import commands  # noqa: PLC0415 - --help needs none of it

    try:
        return commands.run(options)
    except UserError as error:
        remark(str(error))
        return 1
    except KeyboardInterrupt:
        remark("stopped: run the same command again, it continues where this stopped")
        return 130
