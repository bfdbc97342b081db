"""Damaged and hostile input of every kind, a process each: `make fuzz`, `EXAMPLES=` inputs.

Every command must end with an answer or an error in lines: with no traceback, no more than
`CPU_SECONDS` and no more than `MOST_BYTES`. The inputs are drawn by hypothesis from valid ones, of
which values are replaced, taken away or doubled, and bytes cut, doubled or put in. A file for a
cluster or a job that they lead to must have no key and run no command of theirs. The seed is
printed; `SEED=` repeats a run. Inputs that failed are kept in the folder that is named at the end.
"""

import contextlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from builders.fuzz_inputs import Case, Draw, altered, damaged, json_of, text_of
from builders.fuzz_written import cluster_file, task, wrong_file
from builders.runs import ONE_CELL, spec_of, whole_trial

from orchestrator.cli.main import main as run_command
from orchestrator.run_folder.file_names import SPEC
from orchestrator.storage.local_storage import OBSERVATIONS
from trials.records.model import find_model

CPU_SECONDS = 10.0
MOST_BYTES = 2 * 2**30
HANG_SECONDS = 90.0  # of a machine that other work may use
TRACEBACK = "Traceback (most recent call last)"
COMMANDS = ("catalog", "cluster", "dataset", "estimate", "export", "fit", "run", "sweep")

MODEL = "meta-llama/Llama-3.1-8B"
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "axolotl": {
        "base_model": MODEL,
        "adapter": "qlora",
        "load_in_4bit": True,
        "lora_r": 16,
        "lora_alpha": 32,
        "sequence_len": 512,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_epochs": 3,
        "optimizer": "adamw_torch",
        "bf16": True,
        "sample_packing": True,
        "datasets": [{"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"}],
    },
    "llama-factory": {
        "model_name_or_path": MODEL,
        "stage": "sft",
        "finetuning_type": "lora",
        "cutoff_len": 512,
        "per_device_train_batch_size": 1,
        "template": "llama3",
        "dataset": "identity",
        "lora_rank": 8,
        "do_train": True,
        "output_dir": "out",
    },
    "trl": {
        "model_name_or_path": MODEL,
        "use_peft": True,
        "lora_r": 16,
        "max_length": 512,
        "per_device_train_batch_size": 2,
        "dataset_name": "trl-lib/Capybara",
        "bf16": True,
    },
}
GPU = {
    "key": "mine",
    "kind": "cuda",
    "device_names": ["Mine"],
    "usable_memory_bytes": 10**10,
    "source": "me",
    "recorded": "2026-01-31",
}
CHAT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
SHAPE = find_model("llama-tiny").config
PRICES = "gpu,usd_per_hour\nA40,0.4\nH100-SXM,2.5\n"
TABLE = "gpu,model,seq_len,batch_size,step_seconds\n" + "".join(
    f"A40,llama-2-7b,{length},{size},{0.1 * size * length / 128}\n"
    for length in (128, 256)
    for size in (1, 2, 4)
)
WORDS = (
    *("plan", "catalog", "gpus", "prices", "fit", "rank", "what-if", "status", "report", "export"),
    *("deploy", "estimate", "--explain-config", "completion", "--prices", "--prices=--", "--csv"),
    *("--gpu", "--model", "--json", "--epochs", "--examples", "--batch-size", "--budget-usd", "-1"),
    *("auto", "run", "spec.yaml", "nan", "1e999", "--to", "slurm", "--provider", "aws", "=", "--"),
)


@cache
def observations() -> list[dict[str, Any]]:
    """Log of a trial, as dictionaries."""
    spec = spec_of(ONE_CELL)
    (cell,) = spec.all_cells()
    return [json.loads(o.model_dump_json()) for o in whole_trial(cell, spec)]


@st.composite
def cases(draw: Draw) -> Case:
    """An input of any kind."""
    return KINDS[draw(st.sampled_from(sorted(KINDS)))](draw, observations())


def _spec(draw: Draw, _log: Any) -> Case:
    content = damaged(draw, text_of(altered(draw, yaml.safe_load(ONE_CELL))))
    return Case("specification", ("plan", "spec.yaml"), {"spec.yaml": content})


def _model(draw: Draw, _log: Any) -> Case:
    spec = ONE_CELL.replace("llama-tiny", "./model").encode()
    files = {"spec.yaml": spec, "model/config.json": damaged(draw, json_of(altered(draw, SHAPE)))}
    return Case("model", ("plan", "spec.yaml"), files)


def _catalog(draw: Draw, _log: Any) -> Case:
    content = damaged(draw, text_of(altered(draw, {"gpus": [GPU], "offers": []})))
    return Case("catalog", ("catalog", "gpus", "--catalog", "c.yaml"), {"c.yaml": content})


def _prices(draw: Draw, _log: Any) -> Case:
    content = damaged(draw, damaged(draw, PRICES.encode()))
    return Case("prices", ("catalog", "prices", "--prices", "p.csv"), {"p.csv": content})


def _table(draw: Draw, _log: Any) -> Case:
    content = damaged(draw, damaged(draw, TABLE.encode()))
    return Case("table", ("fit", "t.csv"), {"t.csv": content})


def _data(draw: Draw, _log: Any) -> Case:
    lines = [json_of(altered(draw, CHAT) if draw(st.booleans()) else CHAT) for _ in range(4)]
    name = draw(st.sampled_from(("d.jsonl", "d.json", "d.csv", "d.parquet")))
    arguments = ("dataset", name, "--model", "llama-3.1-8b")
    return Case("data set", arguments, {name: damaged(draw, b"".join(lines))})


def _configuration(draw: Draw, _log: Any) -> Case:
    tree = altered(draw, CONFIGURATIONS[draw(st.sampled_from(sorted(CONFIGURATIONS)))])
    arguments = ("estimate", "--config", "c.yml", "--explain-config")
    return Case("configuration", arguments, {"c.yml": damaged(draw, text_of(tree))})


def _run(draw: Draw, log: list[dict[str, Any]]) -> Case:
    chosen = draw(st.integers(0, len(log) - 1))
    lines = [json_of(altered(draw, o) if n == chosen else o) for n, o in enumerate(log)]
    command = draw(st.sampled_from(("status", "plan", "rank", "fit", "report", "what-if")))
    files = {
        f"run/{SPEC}": ONE_CELL.encode(),
        f"run/{OBSERVATIONS}": damaged(draw, b"".join(lines)),
    }
    return Case("log", (command, "run"), files)


def _words(draw: Draw, log: list[dict[str, Any]]) -> Case:
    words = draw(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=8)), max_size=6))
    files = {"spec.yaml": ONE_CELL.encode(), f"run/{SPEC}": ONE_CELL.encode()}
    files[f"run/{OBSERVATIONS}"] = b"".join(map(json_of, log))
    # An estimate without --explain-config traces a model, which takes longer than any input.
    explains = words[:1] != ["estimate"] or "--explain-config" in words
    return Case("command line", tuple(words if explains else [*words, "--explain-config"]), files)


KINDS: Mapping[str, Callable[[Draw, list[dict[str, Any]]], Case]] = {
    "specification": _spec,
    "model": _model,
    "catalog": _catalog,
    "prices": _prices,
    "table": _table,
    "data set": _data,
    "configuration": _configuration,
    "log": _run,
    "cluster file": cluster_file,
    "task": task,
    "command line": _words,
}


def failure(case: Case, folder: Path, run: Callable[[list[str]], int] = run_command) -> str | None:
    """What is wrong with the end of a case, which runs in a child process; None where nothing is.

    Args:
        case: command and files.
        folder: empty folder, for the files and for what the command prints (``printed``).
        run: runs a command.
    """
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    inherited = psutil.Process().memory_info().rss
    child = os.fork()
    if child == 0:
        os._exit(_in_child(case, folder, run))
    status, used = _waited(child)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it left behind
    printed = (folder / "printed").read_text(encoding="utf-8", errors="replace")
    if used.ru_utime + used.ru_stime > CPU_SECONDS or status is None:
        return "slow"
    if used.ru_maxrss * 1024 > inherited + MOST_BYTES or "MemoryError" in printed:
        return "large"
    if TRACEBACK in printed or os.WIFSIGNALED(status):
        return "traceback"
    return wrong_file(case, folder)


def _in_child(case: Case, folder: Path, run: Callable[[list[str]], int]) -> int:
    os.setsid()
    os.chdir(folder)
    output = os.open("printed", os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    # What pytest or another caller put in their place stays with the caller.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
    held = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (held + MOST_BYTES, held + MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(CPU_SECONDS) + 1, int(CPU_SECONDS) + 1))
    try:
        return run(list(case.arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - this is what is looked for
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _waited(child: int) -> tuple[int | None, Any]:
    """Exit status and use of a child; no status where it had to be killed."""
    ends = time.monotonic() + HANG_SECONDS
    while time.monotonic() < ends:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            return status, used
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    return None, os.wait4(child, 0)[2]


def fuzz(examples: int, drawn_from: int) -> tuple[Counter[str], Counter[str], Path]:
    """Run so many inputs; inputs by kind, failures by kind, and the folder of those that failed."""
    kept = Path(tempfile.mkdtemp(prefix="fuzz-"))
    tried: Counter[str] = Counter()
    failed: Counter[str] = Counter()

    @seed(drawn_from)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def one(case: Case) -> None:
        folder = kept / f"{sum(tried.values()):05}"
        folder.mkdir()
        tried[case.kind] += 1
        wrong = failure(case, folder)
        if wrong is None:
            shutil.rmtree(folder)
        else:
            failed[f"{case.kind}: {wrong}"] += 1
            (folder / "command").write_text(repr(case.arguments), encoding="utf-8")

    one()
    return tried, failed, kept


def main() -> None:
    """Print inputs and failures, and end with 1 where anything failed."""
    drawn_from = int(os.environ.get("SEED", "0"))
    os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    for name in COMMANDS:
        importlib.import_module(f"orchestrator.cli.commands.{name}")
    tried, failed, kept = fuzz(int(os.environ.get("EXAMPLES", "10000")), drawn_from)
    kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(tried.items()))
    sys.stdout.write(f"seed {drawn_from}: {sum(tried.values())} inputs: {kinds}\n")
    for wrong in ("traceback", "slow", "large", "unreadable", "injected"):
        count = sum(n for kind, n in failed.items() if kind.endswith(wrong))
        sys.stdout.write(f"{wrong}: {count}\n")
    if failed:
        sys.exit(f"{dict(failed)}: kept in {kept}")
    kept.rmdir()


if __name__ == "__main__":
    main()
