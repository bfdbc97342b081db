"""The help's layout, and the examples below the help of each command."""

import argparse

PROGRAM = "finetune-cost"  # the command that pip installs; python -m orchestrator is the same
EPILOG = """\
examples:
  finetune-cost estimate --model llama-3.1-8b --method qlora --seq-len 2048
  finetune-cost sweep                       small models on this machine, in minutes
  finetune-cost sweep my.yaml --dry-run     print what would be measured or skipped
  RAY_AUTH_MODE=token ray job submit --working-dir . -- python -m orchestrator sweep my.yaml
  finetune-cost profile --model mixtral-tiny --seq-len 64    where a step's time goes
  finetune-cost rank runs/laptop --examples 50000 --epochs 3
"""
EXAMPLES = """\
sweep my.yaml --dry-run  # print what would run, and what is skipped and why
sweep my.yaml  # results go to runs/my; run it again to resume
sweep my.yaml --adaptive --budget-usd 20  # measure only what helps to decide
sweep my.yaml --out s3://my-bucket/runs/my  # keep the run in a bucket
plan my.yaml  # print what a sweep would measure
plan my.yaml --next  # list the most useful measurements and their price
plan runs/my  # print what a run still has to measure
estimate --model llama-3.1-8b --method lora --seq-len 2048 --gpu A40,H100-SXM
estimate --model ./my-model --seq-len 512 --explain  # print what fills the memory
estimate --model llama-3.1-8b --seq-len 2048 --export task.yaml --to skypilot  # and start it
check --config qlora.yml --gpu RTX-4090  # exit code 0 fits, 1 does not, 2 unknown
check --model llama-3.1-8b --method lora --seq-len 2048 --gpu A40 --json
dataset data.jsonl --model llama-3.1-8b --text-fields question,answer
dataset openai/gsm8k --subset main --model qwen2.5-7b --save lengths.csv
fit runs/my  # write fits.json again
fit mine.csv --predict steps.csv  # fit a CSV, predict the rows of another
rank runs/my --examples 50000 --epochs 3  # another job
rank runs/my --deadline 24 --no-spot  # within a day, without spot instances
rank runs/my --prices mine.csv  # use your own prices
what-if runs/my --deadline 24 --no-spot  # print the ranking and leave the run unchanged
what-if runs/my --dataset data.jsonl --text-fields question,answer  # use your own data
profile --model mixtral-tiny --method qlora --seq-len 64 --device cpu
profile --model mixtral-tiny --active-experts 2,8 --seq-len 64  # compare sparse and dense
profile --model llama-tiny --seq-lens 64,128,256 --batch-size max --json
learn data.jsonl --model ./my-model --text-fields question,answer --out runs/my
learn chats/ --model qwen2.5-7b --method qlora --chat messages --epochs 5
report runs/my  # write report.html and report.md
report runs/my runs/other  # compare two runs, also in comparison-other.html
status runs/my  # during the sweep or after it
export runs/my --to skypilot --out task.yaml  # write a task file that starts the training
export runs/my --format ado  # write runs/my/ado.csv
calibrate runs/gpu-check --out constants.json  # constants for estimate and sweep
gpu-check --seconds 600  # run it again to resume
host-speed  # the value for estimate --host-speed
estimate --model llama-3.2-1b --method lora --seq-len 128 --gpu H100-SXM --host-speed 2.9
reproduce --out reproduction  # write tables as Markdown and figures as SVG
catalog gpus  # list GPUs and their keys
catalog refresh  # download today's prices
mcp  # an assistant starts it, in the folder that it may read
deploy my.yaml --provider aws --out cluster.yaml  # write the file, print the cost
launch cluster.yaml my.yaml --out s3://my-bucket/runs/my  # run it again to reconnect
launch cluster.yaml my.yaml --budget-usd 20  # results are copied to runs/my at the end
eval "$(finetune-cost completion bash)"  # add this line to ~/.bashrc
finetune-cost completion zsh > ~/.zfunc/_finetune-cost  # write it to a folder of fpath
"""


class Help(argparse.HelpFormatter):
    """Wraps descriptions and leaves examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if not text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        return "".join(indent + line for line in text.splitlines(keepends=True))


def examples_of(command: str) -> list[tuple[str, str]]:
    """The examples of a command, each with its comment; empty where there is none."""
    parts = [line.partition("  # ") for line in EXAMPLES.splitlines()]
    return [(text, comment) for text, _, comment in parts if f" {command} " in f" {text} "]


def examples_text(command: str) -> str | None:
    """The examples of a command for its help; None where it has none."""
    lines = [
        (text if PROGRAM in text else f"{PROGRAM} {text}", comment)
        for text, comment in examples_of(command)
    ]
    if not lines:
        return None
    width = max((len(text) for text, comment in lines if comment), default=0)
    return "\n".join(
        ["examples:", *(f"  {text:<{width}}  {comment}".rstrip() for text, comment in lines)]
    )
