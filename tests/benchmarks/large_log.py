"""Time, CPU time and memory of commands on logs of up to a million observations.

The logs are synthetic: 12 GPUs (two of them simulated) x 9 models (four of them sparse and dense) x
16 recipes x 10 lengths, 24,960 cells. A cell has 46 observations: its search with fits and misses,
repeats of the limit, a killed child without an environment, a hang, and 36 timed visits of up to
eight batch sizes. If no example fits, it has seven. A GPU has four nodes that differ only in their
names. So laws are fitted to about 166,000 points of four or five visits each. The lines are equal
to those of the project's own records, which is checked, and have 2.2 kB each. `fit` takes two
minutes and 2.5 GB of disk for them.

`status`, `plan`, `rank` and `report` read a run of 5,000 cells with up to 20 observations each, all
of which its specification names.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders.observations import built, environment
from builders.runs import ONE_CELL

from orchestrator.markdown_table import table
from orchestrator.run_folder.file_names import PAGE, SPEC
from orchestrator.storage.local_storage import OBSERVATIONS
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation, Outcome

SIZES = (10_000, 100_000, 1_000_000)
STEPS = 12
NODES = 4
VISITS = 36  # of a cell's ladder
LIMIT = 1024
GIB = 2**30
COMMANDS = ("status", "plan", "rank", "report")
OF_EACH = 20  # observations of a cell in the run that these commands read
EVERY_SECONDS = 0.2  # interval between two readings of memory

# Key, usable GiB, relative speed.
GPUS = (
    *(("A40", 44.35, 1.0), ("A100-40GB-SXM", 39.49, 2.2), ("A100-80GB-SXM", 79.14, 2.3)),
    *(("H100-SXM", 79.18, 4.5), ("H100-PCIe", 79.11, 3.5), ("H200-SXM", 139.8, 4.8)),
    *(("L4", 22.03, 0.6), ("L40S", 44.52, 1.9), ("A10G", 22.06, 0.5), ("RTX-4090", 23.64, 1.5)),
)
SIMULATED_GPUS = (("B200", 178.35, 9.0), ("RTX-5090", 31.35, 2.0))
# Name, billions of parameters, layers, experts, active experts.
MODELS = (
    *(("mixtral-8x7b", 46.7, 32, 8, (2, 8)), ("blackmamba-2.8b", 2.8, 36, 8, (2, 8))),
    *(("qwen3-30b-a3b", 30.5, 48, 128, (8, 128)), ("olmoe-1b-7b", 6.9, 16, 64, (8, 64))),
    *(("llama-2-7b", 6.7, 32, None, (None,)), ("llama-2-13b", 13.0, 40, None, (None,))),
    *(("llama-3.1-8b", 8.0, 32, None, (None,)), ("mistral-7b", 7.2, 32, None, (None,))),
    ("qwen2.5-7b", 7.6, 28, None, (None,)),
)
LENGTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
RECIPES = tuple(
    Recipe.model_validate(
        {
            "method": method,
            "lora_rank": rank,
            "lora_targets": ("all-linear",),
            "precision": "bf16",
            "gradient_checkpointing": checkpointing,
            "attention": attention,
        }
    )
    for method, rank, checkpointing, attention in itertools.product(
        ("lora", "qlora"), (8, 64), (False, True), ("sdpa", "flash_attention_2")
    )
)


def cells() -> list[tuple[Cell, float, float, float]]:
    """Shuffled cells, each with GiB and speed of its GPU and GiB of its model."""
    drawn = []
    product = itertools.product(RECIPES, MODELS, LENGTHS, (*GPUS, *SIMULATED_GPUS))
    for recipe, (model, billions, _, experts, actives), length, (gpu, gib, speed) in product:
        for active in actives:
            cell = Cell(
                gpu=gpu,
                simulated=(gpu, gib, speed) in SIMULATED_GPUS,
                model=model,
                recipe=recipe,
                experts=experts,
                active_experts=active,
                seq_len=length,
            )
            model_gib = billions * (0.6 if recipe.method == "qlora" else 2.0) * 1e9 / GIB
            drawn.append((cell, gib, speed, model_gib))
    order = np.random.default_rng(1).permutation(len(drawn))
    return [drawn[place] for place in order]


Line = Callable[[int, str, int, Outcome, float, float], str]


class Lines:
    """Lines of a log, built from text templates, since records would take too long."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._wheres: dict[tuple[str, int], str] = {}

    def of_cell(self, cell: Cell, gib: float, speed: float, model_gib: float) -> Iterator[str]:
        """Lines of one cell."""
        per_token_gib = 2e-4 if cell.recipe.gradient_checkpointing else 1.2e-3
        free = gib * 0.97 - model_gib
        largest = int(min(max(free / per_token_gib / cell.seq_len, 0), LIMIT))
        numbers = self._templates(cell, gib, model_gib)
        for size, purpose, repeat in self._probes(largest):
            peak = model_gib + size * cell.seq_len * per_token_gib
            if size > largest:
                yield numbers(size, purpose, repeat, Outcome.OUT_OF_MEMORY, peak, 0.0)
                continue
            work = size * cell.seq_len * cell.sparsity**0.6 * 2e-5 / speed
            yield numbers(size, purpose, repeat, Outcome.FITS, peak, (0.05 + work) * model_gib / 20)
        yield numbers(1, "search", 9, Outcome.HOST_OUT_OF_MEMORY, 0.0, 0.0)
        yield numbers(1, "search", 8, Outcome.TIMED_OUT, 0.0, 0.0)

    def _probes(self, largest: int) -> Iterator[tuple[int, str, int]]:
        tried = sorted({1, 2, max(largest // 2, 1), max(largest, 1), largest + 1})
        for size in tried:
            yield size, "search", 0
        for repeat in range(3):
            yield max(largest + repeat % 2, 1), "boundary", repeat
        sizes = np.unique(np.geomspace(1, max(largest, 1), 8).round().astype(int)).tolist()
        for visit in range(VISITS if largest else 0):
            yield sizes[visit % len(sizes)], "ladder", visit // len(sizes)

    def _templates(self, cell: Cell, gib: float, model_gib: float) -> Line:
        """Function that makes a line from the numbers of a probe of this cell."""
        basis = Basis.SIMULATED if cell.simulated else Basis.MEASURED
        head = f'{{"cell":{cell.model_dump_json()},"purpose":"'
        made = built(
            attention=cell.recipe.attention,
            dtypes=("bfloat16", "float32"),
            kernels=("aten::_scaled_dot_product_flash_attention", "bitsandbytes::dequantize_4bit"),
            adapters=cell.recipe.lora_rank,
        ).model_dump_json()
        fixed = (
            f'"basis":"{basis}","memory_limit_bytes":{int(gib * 0.97 * GIB)},'
            f'"batch_limit":{LIMIT},"seed":0,"measurement":'
        )
        model_bytes = int(model_gib * GIB)
        wheres = [self._where(cell.gpu, node) for node in range(NODES)]

        def line(  # noqa: PLR0917 - the numbers of a line
            size: int, purpose: str, repeat: int, outcome: Outcome, peak: float, seconds: float
        ) -> str:
            where = "null" if outcome is Outcome.HOST_OUT_OF_MEMORY else wheres[size % NODES]
            detail = "null" if outcome is Outcome.FITS else '"CUDA out of memory. Tried to…"'
            measured = "null"
            if outcome is Outcome.FITS:
                measured = self._measured(purpose, model_bytes, int(peak * GIB), seconds, made)
            return (
                f'{head}{purpose}","batch_size":{size},"lengths":[],"repeat":{repeat},"attempt":1,'
                f'"outcome":"{outcome}","detail":{detail},{fixed}{measured},"environment":{where},'
                '"started_at":"2026-11-20T12:00:00+00:00","seconds":31.25,"log_version":1}\n'
            )

        return line

    def _measured(
        self, purpose: str, model_bytes: int, peak: int, seconds: float, made: str
    ) -> str:
        draws = self._random.normal(0, 0.01, STEPS + 5)
        steps, reading, further = "", "null", '"warmup_seconds":[],"step_seconds":[]'
        if purpose == "ladder":
            visit = seconds * np.exp(draws[-1])
            steps = ",".join(map(repr, (visit * np.exp(draws[:STEPS])).tolist()))
            warm = ",".join(map(repr, (visit * (1.1 + draws[-4:-1])).tolist()))
            further = f'"warmup_seconds":[{warm}],"step_seconds":[{steps}]'
            reading = self._reading(int(draws[0] * 1000), peak)
        reason = '"precise"' if steps else "null"
        energy = repr(float(seconds * 3000)) if steps else "null"
        return (
            '{"memory_steps":3,"memory":{"peak_allocated_bytes":'
            f'{peak},"peak_reserved_bytes":{peak + 2**21},"allocator_retries":0,'
            f'"overhead_bytes":546308096,"foreign_bytes":0}},"model_memory_bytes":{model_bytes},'
            f'{further},"stop_reason":{reason},"energy_joules":{energy},"before":{reading},'
            f'"after":{reading},"built":{made},"relative_error":null,"relative_error_above":null,'
            '"step_peak_bytes":[],"shorter_step_seconds":[]}'
        )

    @staticmethod
    def _reading(off: int, peak: int) -> str:
        return (
            f'{{"sm_clock_mhz":{1410 + off},"memory_clock_mhz":1215,"temperature_celsius":'
            f'{60 + off // 10},"power_watts":{300.5 + off},"throttle_reasons":[],'
            f'"used_memory_bytes":{peak + 2**29}}}'
        )

    def _where(self, gpu: str, node: int) -> str:
        if (gpu, node) not in self._wheres:
            names = ("accelerate", "bitsandbytes", "cuda", "cudnn", "driver", "flash_attn", "peft")
            names += ("python", "torch", "transformers", "triton")
            node_environment = environment(
                versions=tuple((name, "12.8.93") for name in names),
                device_name=f"NVIDIA {gpu}",
                threads=8,
                allocator="expandable_segments:True",
                host=f"ip-10-0-{node}-17.ec2.internal",
                node_id=f"{node}" * 56,
            )
            self._wheres[gpu, node] = node_environment.model_dump_json()
        return self._wheres[gpu, node]


def write_run(folder: Path, observations: int) -> None:
    """Write a run folder with a log of this many observations."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPEC).write_text(ONE_CELL, encoding="utf-8")
    lines, all_cells = Lines(), cells()
    for line in itertools.chain.from_iterable(
        Lines().of_cell(*values) for values in all_cells[:30]
    ):
        assert Observation.model_validate_json(line).model_dump_json() + "\n" == line
    every = itertools.chain.from_iterable(lines.of_cell(*values) for values in all_cells)
    with (folder / OBSERVATIONS).open("w", encoding="utf-8") as file:
        file.writelines(itertools.islice(every, observations))


def write_specified_run(folder: Path) -> int:
    """Write a run folder whose specification has its 5,000 cells; the number of observations."""
    gpus, models = (
        [gpu for gpu, *_ in GPUS],
        [name for name, *_, active in MODELS if active == (None,)],
    )
    recipes = RECIPES[:10]
    block = {
        "models": models,
        "recipes": [recipe.model_dump(mode="json", exclude_defaults=True) for recipe in recipes],
        "seq_lens": list(LENGTHS),
    }
    fields = {"name": "large", "gpus": gpus, "cells": [block], "max_batch_size": LIMIT}
    fields |= {"workload": {"examples": 1000, "epochs": 3}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPEC).write_text(yaml.safe_dump(fields), encoding="utf-8")
    lines, written = Lines(), 0
    with (folder / OBSERVATIONS).open("w", encoding="utf-8") as file:
        for cell, *numbers in cells():
            if cell.gpu in gpus and cell.model in models and cell.recipe in recipes:
                of_cell = list(itertools.islice(lines.of_cell(cell, *numbers), OF_EACH))
                file.writelines(of_cell)
                written += len(of_cell)
    return written


def measured(command: str, folder: Path) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak MiB of a command, over all its processes."""
    began, most = time.perf_counter(), 0
    words = [sys.executable, "-m", "orchestrator", command, str(folder)]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        ended, status, used = os.wait4(child.pid, os.WNOHANG)
        if ended:
            break
        most = max(most, held_bytes(child.pid))
        time.sleep(EVERY_SECONDS)
    assert status == 0
    cpu = used.ru_utime + used.ru_stime
    return time.perf_counter() - began, cpu, most / 2**20


def held_bytes(pid: int) -> int:
    """Bytes that a process and its children hold; shared pages count once."""
    held = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            held += process.memory_full_info().pss
    return held


def main() -> None:
    """Print the table: of ``fit`` and the other commands, or of the commands that are given."""
    commands, rows = sys.argv[1:] or ["fit", *COMMANDS], []

    def measure(command: str, observations: int, folder: Path) -> None:
        seconds, cpu, most = measured(command, folder)
        figures = (f"{seconds:.1f} s", f"{cpu:.1f} s", f"{most:.0f} MiB")
        rows.append((command, f"{observations:,}", *figures))

    for observations in SIZES if "fit" in commands else ():
        with tempfile.TemporaryDirectory() as scratch:
            write_run(Path(scratch), observations)
            measure("fit", observations, Path(scratch))
    with tempfile.TemporaryDirectory() as scratch:
        written = write_specified_run(Path(scratch))
        for command in COMMANDS:
            if command in commands:
                measure(command, written, Path(scratch))
        page = Path(scratch) / PAGE
        size = f"\nThe page has {page.stat().st_size / 1e6:.1f} MB.\n" if page.exists() else ""
    headings = ("command", "observations", "took", "CPU", "memory")
    sys.stdout.write(f"{table(headings, rows)}\n{size}")


if __name__ == "__main__":
    main()
