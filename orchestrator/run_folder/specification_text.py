"""Specification of measurements that no sweep planned: a training's own, or those of a table."""

import re
from collections.abc import Sequence
from typing import Any

from orchestrator.spec.job import Job
from orchestrator.storage.run_storage import RunPath
from trials.records.cell import Cell


def specification_of(path: RunPath | str, cells: Sequence[Cell], job: Job) -> dict[str, Any]:
    """Fields of a specification, in YAML's types, whose cells include the measured ones.

    Args:
        path: run folder, whose last part is the name.
        cells: measured cells; each GPU gets all others' models, recipes and lengths.
        job: job that a ranking prices.
    """
    last = str(path).rstrip("/").rpartition("/")[2]
    blocks = []
    for cell in cells:
        block = {
            "models": [cell.model],
            "weights": cell.weights,
            "recipes": [
                cell.recipe.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
            ],
            "seq_lens": [cell.seq_len],
        }
        if cell.active_experts is not None:
            block["active_experts"] = [cell.active_experts]
        if block not in blocks:
            blocks.append(block)
    return {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", last).lstrip("._-")[:100] or "measured",
        "gpus": list(dict.fromkeys(cell.gpu for cell in cells)),
        "cells": blocks,
        "workload": {"examples": job.examples, "epochs": job.epochs},
        "boundary_repeats": 0,
    }
