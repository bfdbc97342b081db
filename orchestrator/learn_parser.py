"""The options of ``learn`` that are its own."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

EPOCHS, BATCH_SIZE, PATIENCE = 10, 8, 2


def add_learn(
    commands: Any, positive: Callable[[str], int], above_zero: Callable[[str], float]
) -> argparse.ArgumentParser:
    """Adds the command to a parser; those of recipes and data sets are added to what it returns."""
    learn: argparse.ArgumentParser = commands.add_parser(
        "learn",
        help="fine-tune on a data set and test each epoch: sparse beside dense, when it stops",
        description="Fine-tunes a model on this machine, on its GPU or else its CPU, and tests it "
        "on held-out queries before and after every epoch. The last field or message of a query is "
        "its answer: that alone is learnt. Run again, it goes on after the last epoch.",
    )
    add = learn.add_argument
    add(
        "dataset",
        metavar="DATA",
        help="a JSON, JSONL, CSV or Parquet file, a folder of them, or a data set of the hub",
    )
    add("--model", required=True, help="a preset, a hub name, a folder or file with a config.json")
    add("--out", metavar="DIR", help="a run folder, or any (default: runs/learn)")
    add("--gpu", metavar="KEY", help="of 'catalog gpus' (default: this machine's, else cpu)")
    add("--catalog", type=Path, metavar="FILE", help="GPUs of your own, YAML or TOML")
    add(
        "--weights",
        choices=("random", "pretrained"),
        help="default: pretrained where there are any",
    )
    add(
        "--active-experts",
        metavar="N,N",
        help="for each token, one curve each (default: the model's own, and all)",
    )
    add(
        "--choices",
        metavar="FIELD|A,B,…",
        help="the answers that may be given: a field that lists them, or fields; accuracy "
        "is then of choosing (default: of answers, token for token)",
    )
    add(
        "--held-out",
        type=above_zero,
        metavar="SHARE|N",
        help="of the queries, to test with (default: a tenth; of other data all; at most 1000)",
    )
    add("--held-out-data", metavar="DATA", help="test with these instead")
    add("--held-out-split", metavar="NAME", help="test with this split instead")
    add(
        "--epochs",
        type=positive,
        default=EPOCHS,
        help=f"of each query, at most (default: {EPOCHS})",
    )
    add("--batch-size", type=positive, default=BATCH_SIZE, help=f"per step (default: {BATCH_SIZE})")
    add(
        "--learning-rate",
        type=above_zero,
        default=5e-5,
        metavar="RATE",
        help="default: 5e-5, as in arXiv 2408.04693; random weights need more",
    )
    add(
        "--schedule",
        choices=("constant", "linear", "cosine"),
        default="constant",
        help="of the learning rate; the others fall to zero at the last of --epochs, where every "
        "curve then levels off (default: constant)",
    )
    add(
        "--warmup-steps",
        type=_count,
        default=0,
        metavar="N",
        help="in which it rises (default: 0)",
    )
    add(
        "--patience",
        type=positive,
        default=PATIENCE,
        metavar="N",
        help="learning has stopped when so many epochs in a row are not better than the best one "
        f"beyond noise (default: {PATIENCE})",
    )
    add("--whole", action="store_true", help="all of --epochs, though learning has stopped")
    add(
        "--seed",
        type=_count,
        default=0,
        metavar="N",
        help="of the split, the weights and the order of queries (default: 0)",
    )
    add("--threads", type=positive, metavar="N", help="of the CPU (default: one a core)")
    add(
        "--no-checkpoints",
        action="store_true",
        help="keep no state in DIR/learning (what is trained and its optimizer's, a file each "
        "curve): killed or asked for more, a curve begins anew",
    )
    add("--json", action="store_true", help="all of it, for programs")
    return learn


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)
