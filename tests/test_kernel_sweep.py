"""The sweep of a GPU's kernels, run on the CPU with a model of a few layers' widths."""

import csv
import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from builders.scripts import run_script

pytestmark = pytest.mark.usefixtures("made_for_small_steps")
SWEEP = "kernel_sweep.py"
REFERENCE = {
    "gemm_sweep": "gpu,op,dtype,m,n,k,us,source",
    "attention_forward_sweep": "gpu,op,dtype,batch,seq,heads,kv,hd,kernel,us,source",
    "attention_backward_sweep": "gpu,op,dtype,batch,seq,heads,kv,hd,kernel,us,source",
    "eager_blocks_sweep": "gpu,op,mode,x_name,x_value,extra_benchmark_config_str,us,source",
    "memory_bound_sweep": "gpu,op,dtype,rows,cols,bytes,us,source",
    "dequantisation_sweep": "gpu,op,dtype,rows,cols,bytes,us,source",
}


def sweep(folder: Path, *options: str) -> CompletedProcess[str]:
    """The sweep of one small model's kernels on the CPU."""
    small = ("--device", "cpu", "--tokens", "64", "--models", "llama-tiny")
    return run_script(SWEEP, str(folder), *small, *options)


def rows_in(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Rows of each table."""
    return {
        path.stem: list(csv.DictReader(path.read_text().splitlines()))
        for path in folder.glob("*.csv")
    }


def test_a_sweep_fills_tables_goes_on_and_can_be_compared(tmp_path: Path) -> None:
    """Cut short it has some rows; started again it adds the rest, and then no more.

    The clock is then compared with the rows, as if a GPU had measured them.
    """
    assert sweep(tmp_path, "--seconds", "0").stdout.startswith("0 new rows")
    done = sweep(tmp_path)
    assert done.returncode == 0, done.stderr
    tables = rows_in(tmp_path)
    headers = {path.stem: path.read_text().partition("\n")[0] for path in tmp_path.glob("*.csv")}
    assert headers == REFERENCE
    assert {row["op"] for row in tables["gemm_sweep"]} == {
        "linear",
        "linear_grad_input",
        "linear_grad_weight",
    }
    blocks = {(row["op"], row["mode"]) for row in tables["eager_blocks_sweep"]}
    assert {op for op, _ in blocks} == {
        *("cross_entropy", "layer_norm", "rms_norm", "softmax", "rope", "swiglu", "embedding")
    }
    assert {mode for _, mode in blocks} == {"forward", "backward"}
    assert all(float(row["us"]) > 0 for rows in tables.values() for row in rows)
    # One row lost, as by a kill: it alone is measured again.
    path = tmp_path / "gemm_sweep.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert sweep(tmp_path).stdout.startswith("1 new rows")

    for path in tmp_path.glob("*.csv"):
        path.write_text(path.read_text().replace("cpu,", "A40,"))
    read = run_script("kernel_times.py", str(tmp_path), "--json")
    assert read.returncode == 0, read.stderr
    classes = {row["class"] for row in json.loads(read.stdout)["rows"]}
    assert any(one.startswith("product/") for one in classes)


def test_without_a_gpu_the_sweep_says_so(tmp_path: Path) -> None:
    """One line, and no folder."""
    done = run_script(SWEEP, str(tmp_path / "rows"))
    assert done.returncode == 1
    assert "PyTorch sees no CUDA GPU on this machine" in done.stderr
    assert not (tmp_path / "rows").exists()
