"""The comparison of the clock's kernels with measured ones, on rows worked out by hand."""

import json
from pathlib import Path

import pytest
from builders.scripts import run_script

SCRIPT = "kernel_times.py"
PRODUCTS = "gpu,op,dtype,m,n,k,us,source\n"


def rows(folder: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Lines of the script's JSON by class and GPU."""
    done = run_script(SCRIPT, str(folder), "--json")
    assert done.returncode == 0, done.stderr
    return {(row["class"], row["gpu"]): row for row in json.loads(done.stdout)["rows"]}


def test_the_error_and_the_total_of_two_rows(tmp_path: Path) -> None:
    """One row measured at twice another's time: half and double the clock's, whatever it says."""
    text = PRODUCTS
    for us in (100.0, 200.0):
        text += f"A100-80GB-SXM,linear,bf16,4096,4096,4096,{us},x\n"
    (tmp_path / "gemm_a.csv").write_text(text)
    both = rows(tmp_path)["product/linear", "A100-80GB-SXM"]
    predicted = both["total_ratio"] * (100 + 200) / 2
    expected = 50 * (abs(predicted / 100 - 1) + abs(predicted / 200 - 1))
    assert both["rows"] == 2
    assert both["mape_pct"] == pytest.approx(expected, abs=0.2)
    assert predicted * 1e-6 > 2 * 4096**3 / 312e12  # no faster than the peak


def test_rows_are_classified_and_unusable_ones_left_out(tmp_path: Path) -> None:
    """Unknown GPUs, single tokens and other attention kernels do not count."""
    (tmp_path / "gemm_a.csv").write_text(
        f"{PRODUCTS}A40,x,bf16,4096,16,4096,50,x\nA40,x,bf16,16,4096,4096,50,x\n"
        "A40,x,bf16,1,4096,4096,50,x\nK80,x,bf16,4096,4096,4096,50,x\n"
    )
    (tmp_path / "attention_forward_aiconfigurator.csv").write_text(
        "gpu,op,dtype,batch,seq,heads,kv,hd,us,kernel,source\n"
        "A100-80GB-SXM,a,bf16,4,4096,32,8,128,3000,vllm_flash_attn,x\n"
        "A100-80GB-SXM,a,bf16,4,4096,32,8,128,3000,triton,x\n"
        "A100-80GB-SXM,a,bf16,4,4096,32,8,128,3000,flash_attention,x\n"  # FlashAttention-3
        "A100-80GB-SXM,a,bf16,4,4096,32,8,512,3000,vllm_flash_attn,x\n"
    )
    (tmp_path / "eager_blocks_liger.csv").write_text(
        "gpu,op,mode,x_name,x_value,extra_benchmark_config_str,us,source\n"
        'NVIDIA B200,cross_entropy,forward,V,8192,"{""B"": 8, ""T"": 2048}",1188,x\n'
        'NVIDIA B200,sparsemax,forward,V,8192,"{""B"": 8, ""T"": 2048}",1188,x\n'
    )
    assert {key: row["rows"] for key, row in rows(tmp_path).items()} == {
        ("product/thin", "A40"): 1,
        ("product/few-tokens", "A40"): 1,
        ("attention/forward vllm_flash_attn", "A100-80GB-SXM"): 1,
        ("memory/block cross_entropy", "B200"): 1,
    }


def test_a_collector_finds_what_it_repeats_in_the_cache(tmp_path: Path) -> None:
    """32 MB of input fit into the L2 cache of an L40S once, not six times; zeros draw no power."""
    thin, long = "L40S,linear,bf16,16384,32,1024,100,", "L40S,linear,bf16,16384,16384,16384,1e5,"
    predicted: dict[str, dict[str, float]] = {}
    for source in ("aiconfigurator/sglang", "aiconfigurator/trtllm", "aiconfigurator/vllm", "x"):
        (tmp_path / "gemm_a.csv").write_text(f"{PRODUCTS}{thin}{source}\n{long}{source}\n")
        named = {label: row["total_ratio"] for (label, _), row in rows(tmp_path).items()}
        predicted[source.rpartition("/")[2]] = named
    thins = {source: named["product/thin"] for source, named in predicted.items()}
    assert thins["sglang"] > 1.5 * thins["trtllm"] == 1.5 * thins["vllm"]
    assert thins["x"] < thins["sglang"]  # a step finds the input there
    longs = {source: named["product/linear"] for source, named in predicted.items()}
    assert longs["vllm"] < 0.9 * longs["trtllm"] == 0.9 * longs["sglang"] == 0.9 * longs["x"]


def test_servers_write_keys_and_values_beside_attention(tmp_path: Path) -> None:
    """Reading and writing 134 MB takes an H100 80 us at its peak, and more element by element."""
    head = "gpu,op,dtype,batch,seq,heads,kv,hd,us,kernel,source\n"
    us = {}
    for source in ("sglang-0.5.6", "sglang-0.5.9", "vllm-0.14.0", "vllm-0.19.0", "vllm-0.24.0"):
        row = f"H100-SXM,a,bf16,8,1024,32,32,128,1000,fa3,aiconfigurator/{source}\n"
        (tmp_path / "attention_forward_aiconfigurator.csv").write_text(head + row)
        us[source] = 1000 * rows(tmp_path)["attention/forward fa3", "H100-SXM"]["total_ratio"]
    assert 80 < us["sglang-0.5.9"] - us["vllm-0.19.0"] < 110
    assert us["vllm-0.14.0"] == us["vllm-0.24.0"] > us["sglang-0.5.9"] + 80
    # PyTorch's index_put computes two addresses for each element.
    by_element, twice = (us[name] - us["vllm-0.19.0"] for name in ("vllm-0.14.0", "sglang-0.5.6"))
    assert twice == pytest.approx(2 * by_element, rel=0.05)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    """An empty folder, and a row without a time."""
    assert f"{tmp_path}: has none of gemm_" in run_script(SCRIPT, str(tmp_path)).stderr
    (tmp_path / "gemm_a.csv").write_text(f"{PRODUCTS}A40,x,bf16,4096,4096,4096,,x\n")
    done = run_script(SCRIPT, str(tmp_path))
    assert done.returncode == 2
    assert "gemm_a.csv: line 2: cannot be read" in done.stderr
