"""Examples that stand below the help of each command."""

import argparse

PROGRAM = "finetune-cost"  # what pip installs; python -m orchestrator is the same
EXAMPLES = {
    "sweep": (
        ("sweep my.yaml --dry-run", "what would run, what is skipped and why"),
        ("sweep my.yaml", "into runs/my; again, to go on where it stopped"),
        ("sweep my.yaml --adaptive --budget-usd 20", "only what helps to decide"),
        ("sweep my.yaml --out s3://my-bucket/runs/my", "kept in a bucket"),
    ),
    "plan": (
        ("plan my.yaml", "what a sweep would measure"),
        ("plan my.yaml --next", "which measurement would tell most, and its price"),
        ("plan runs/my", "what is left of a run"),
    ),
    "estimate": (
        ("estimate --model llama-3.1-8b --method lora --seq-len 2048 --gpu A40,H100-SXM", ""),
        ("estimate --model ./my-model --seq-len 512 --explain", "what fills the memory"),
    ),
    "dataset": (
        ("dataset data.jsonl --model llama-3.1-8b --text-fields question,answer", ""),
        ("dataset openai/gsm8k --subset main --model qwen2.5-7b --save lengths.csv", ""),
    ),
    "fit": (
        ("fit runs/my", "anew, into fits.json"),
        ("fit mine.csv --predict asked.csv", "anybody's observations, and questions to them"),
    ),
    "rank": (
        ("rank runs/my --examples 50000 --epochs 3", "another job"),
        ("rank runs/my --deadline 24 --no-spot", "in a day, on what is never taken away"),
        ("rank runs/my --prices mine.csv", "by your own prices"),
    ),
    "what-if": (
        ("what-if runs/my --deadline 24 --no-spot", "for the answer alone"),
        ("what-if runs/my --dataset data.jsonl --text-fields question,answer", "your own data"),
    ),
    "profile": (
        ("profile --model mixtral-tiny --method qlora --seq-len 64 --device cpu", ""),
        ("profile --model mixtral-tiny --active-experts 2,8 --seq-len 64", "sparse and dense"),
        ("profile --model llama-tiny --seq-lens 64,128,256 --batch-size max --json", ""),
    ),
    "learn": (
        ("learn data.jsonl --model ./my-model --text-fields question,answer --out runs/my", ""),
        ("learn chats/ --model qwen2.5-7b --method qlora --chat messages --epochs 5", ""),
    ),
    "report": (
        ("report runs/my", "report.html and report.md"),
        ("report runs/my runs/other", "what differs, also as runs/my/comparison-other.html"),
    ),
    "status": (("status runs/my", "while it runs, or after"),),
    "export": (("export runs/my --format ado", "into runs/my/ado.csv"),),
    "calibrate": (("calibrate runs/gpu-check --out constants.json", "for estimate and sweep"),),
    "gpu-check": (("gpu-check --seconds 600", "again, to go on"),),
    "reproduce": (("reproduce --out reproduction", "tables in Markdown, figures as SVG"),),
    "catalog": (
        ("catalog gpus", "the keys that commands take"),
        ("catalog refresh", "the prices of today"),
    ),
    "deploy": (("deploy my.yaml --provider aws --out cluster.yaml", "and what it would cost"),),
    "launch": (
        ("launch cluster.yaml my.yaml --out s3://my-bucket/runs/my", "again, to follow it again"),
        ("launch cluster.yaml my.yaml --budget-usd 20", "fetched into runs/my at the end"),
    ),
    "completion": (
        ('eval "$(finetune-cost completion bash)"', "in ~/.bashrc"),
        ("finetune-cost completion zsh > ~/.zfunc/_finetune-cost", "a folder of fpath"),
    ),
}


class Help(argparse.HelpFormatter):
    """Wraps descriptions, and leaves examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if not text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        return "".join(indent + line for line in text.splitlines(keepends=True))


def examples_text(command: str) -> str | None:
    """The examples of a command; None where it has none."""
    if command not in EXAMPLES:
        return None
    shown = [
        (text if PROGRAM in text else f"python -m orchestrator {text}", told)
        for text, told in EXAMPLES[command]
    ]
    width = max((len(text) for text, told in shown if told), default=0)
    lines = [f"  {text:<{width}}  {told}".rstrip() for text, told in shown]
    return "\n".join(["examples:", *lines])
