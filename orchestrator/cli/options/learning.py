"""The options of ``learn`` that are its own."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

EPOCHS, BATCH_SIZE, PATIENCE = 10, 8, 2


def add_learn(
    commands: Any, positive: Callable[[str], int], above_zero: Callable[[str], float]
) -> argparse.ArgumentParser:
    """Add the command to a parser; the caller adds options of recipes and data sets."""
    learn: argparse.ArgumentParser = commands.add_parser(
        "learn",
        help="fine-tune on a data set and test each epoch: sparse beside dense, when it stops",
        description="Fine-tunes a model on this machine, on its GPU or else its CPU, and tests it "
        "on held-out examples before and after every epoch. The last field or message of an "
        "example is its answer, the only part with a loss. Run again, it resumes after the last "
        "epoch.",
    )
    add = learn.add_argument
    data = "a JSON, JSONL, CSV or Parquet file, a folder of them, or a data set of the hub"
    add("dataset", metavar="DATA", help=data)
    add("--model", required=True, help="a preset, a hub name, a folder or file with a config.json")
    add("--out", metavar="DIR", help="a run folder, or any (default: runs/learn)")
    add("--gpu", metavar="KEY", help="of 'catalog gpus' (default: this machine's, else cpu)")
    add("--catalog", type=Path, metavar="FILE", help="GPUs of your own, YAML or TOML")
    weights = "default: pretrained where there are any"
    add("--weights", choices=("random", "pretrained"), help=weights)
    active = "for each token, one curve each (default: the model's own, and all)"
    add("--active-experts", metavar="N,N", help=active)
    choices = (
        "possible answers: a field with a list of them, or fields; accuracy is then of the "
        "likeliest choice (default: of answers, token for token)"
    )
    add("--choices", metavar="FIELD|A,B,…", help=choices)
    share = "of the examples, to test with (default: a tenth; of other data all; at most 1000)"
    add("--held-out", type=above_zero, metavar="SHARE|N", help=share)
    add("--held-out-data", metavar="DATA", help="test with these instead")
    add("--held-out-split", metavar="NAME", help="test with this split instead")
    add("--epochs", type=positive, default=EPOCHS, help=f"at most (default: {EPOCHS})")
    add("--batch-size", type=positive, default=BATCH_SIZE, help=f"per step (default: {BATCH_SIZE})")
    rate = "default: 5e-5, as in arXiv 2408.04693; random weights need more"
    add("--learning-rate", type=above_zero, default=5e-5, metavar="RATE", help=rate)
    schedule = (
        "of the learning rate; the others fall to zero at the last of --epochs, where every curve "
        "then levels off (default: constant)"
    )
    names = ("constant", "linear", "cosine")
    add("--schedule", choices=names, default="constant", help=schedule)
    warmup = "in which the learning rate rises (default: 0)"
    add("--warmup-steps", type=_count, default=0, metavar="N", help=warmup)
    patience = (
        "learning has stopped when so many epochs in a row are not better than the best one beyond "
        f"noise (default: {PATIENCE})"
    )
    add("--patience", type=positive, default=PATIENCE, metavar="N", help=patience)
    add("--whole", action="store_true", help="all of --epochs, also after learning has stopped")
    seed = "of the split, the weights and the order of examples (default: 0)"
    add("--seed", type=_count, default=0, metavar="N", help=seed)
    add("--threads", type=positive, metavar="N", help="of the CPU (default: one a core)")
    checkpoints = (
        "save none in DIR/learning (trained weights and optimizer state, a file each curve): "
        "killed or asked for more, a curve begins anew"
    )
    add("--no-checkpoints", action="store_true", help=checkpoints)
    add("--json", action="store_true", help="all of it, for programs")
    return learn


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)
