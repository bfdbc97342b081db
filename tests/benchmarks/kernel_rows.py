"""Rows of published kernel measurements, as operators of the clock (``kernel_times.py``)."""

import csv
import dataclasses
import datetime as dt
import gzip
import io
import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from kernel_blocks import Script, Sizes, block_works
from kernel_sweep import MOST_CALLS, RUN_SECONDS

from gpu_catalog.catalog import load_catalog
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from trials.simulation.clock.attention import (
    ASYNCHRONOUS,
    BACKWARD_PRODUCTS,
    FLASH2,
    FORWARD_PRODUCTS,
)
from trials.simulation.clock.moving import l2_bytes
from trials.simulation.clock.operators import Operators
from trials.simulation.clock.products import STEP, Surroundings
from trials.simulation.recording import Column, FloatArray, Kind, OperatorClass, Rate
from trials.simulation.tracing.operator_costs import SUMMED_ELEMENTS

Work = tuple[OperatorClass, Rate, tuple[float, ...]]
ROWS_OF = {"bf16": Rate.BF16, "fp16": Rate.FP16, "fp32": Rate.FP32}
WIDTH = {Rate.BF16: 2, Rate.FP16: 2, Rate.FP32: 4}
FEW_ROWS, NARROW, THIN = 256, 512, 64
LEAST_ROWS = 16  # fewer tokens than this are inference
# Kernel libraries whose rows hold the kernel that PyTorch's attention runs on that architecture:
# FlashAttention-2 on Ampere and Ada; on Hopper FlashAttention-3, whose rates cuDNN's kernel shares.
# SGLang's ``flash_attention`` is FlashAttention-3 on all of them.
LIBRARIES = {
    "8": ("pytorch_flash", "vllm_flash_attn", "vllm_flash_attn_fa2"),
    "9": ("flash_attention", "pytorch_cudnn", "vllm_flash_attn", "vllm_flash_attn_fa3", "fa3"),
    "10": ("pytorch_cudnn", "trtllm_mha", "vllm_flashinfer", "vllm_flashinfer_trtllmprefill"),
    "12": ("pytorch_flash", "vllm_flash_attn", "vllm_flash_attn_fa2"),
}
FLASH2_KERNEL = "pytorch_flash"  # which PyTorch runs on Hopper and B200 on request alone
MOST_WIDTH = 256  # of a head in PyTorch's kernels
# How collectors write keys and values into their cache beside the kernel, by their scripts and the
# code of the versions they run: by a kernel that copies rows, element by element, or not at all
# (vLLM's 0.18 to 0.22 moved it out of the call that was measured). SGLang's 0.5.6 did it by
# PyTorch's index_put, which computes the address of each element twice: in the tensor and in the
# cache.
CACHE_WRITES = {
    "aiconfigurator/sglang-0.5.6": (OperatorClass.SCATTERED, 2),
    "aiconfigurator/sglang": (OperatorClass.MEMORY, 1),
    "aiconfigurator/vllm-0.14": (OperatorClass.SCATTERED, 1),
    "aiconfigurator/vllm-0.24": (OperatorClass.SCATTERED, 1),
}
LEAST_LENGTH = 128  # shorter sequences measure the launch
# Rows of ``kernel_sweep`` of less measure their host: PyTorch's call took it 8 to 15 us, a product
# 20 to 26 us (from 1 to 44 MB alike), attention in a context 40 to 90 us, and autograd 100 to 170.
LEAST_SWEPT_SECONDS = 20e-6
LEAST_SWEPT_BY_CALL = {"attention_forward_causal": 100e-6, "backward": 200e-6}
LEAST_SWEPT_BY_CALL |= dict.fromkeys(("linear", "linear_grad_input", "linear_grad_weight"), 30e-6)
LEAST_SWEPT_WIDTH = 64.0  # of a head: the smallest models are those of tests
# Seconds that a row needs at the GPU's peak rates. NeuSight left out all that took less than 50 us,
# so its rows of smaller shapes are the slow ones alone, and each of its products took some 50 us
# more than its kernel; vidur has whole microseconds.
LEAST_SECONDS = {"NeuSight": 50e-6}
# Seconds beside each of NeuSight's kernels that move data, the clock's fixed time among them, and
# the part of the L2 cache that keeps what vidur's repeats wrote, so that it never reaches the
# memory: both fitted with the rates.
BESIDE_SECONDS = {"NeuSight": 19e-6, "NeuSight/softmax": 30e-6, "NeuSight/ln": 42e-6}
KEPT_OF_CACHE = {"vidur": 0.135}
# Collectors whose times leave out the clock's fixed time of a kernel: vidur's are a profiler's.
WITHOUT_LAUNCH = ("NeuSight", "vidur")
# Seconds in which autograd starts a run of ``kernel_sweep``'s backward passes, on an idle GPU.
START_SECONDS = 60e-6
LEAST_FP32_SECONDS = 500e-6
SWEEP = "kernel_sweep"
LEAST_MOVING_SECONDS = 10e-6
# Blocks whose bytes take less than this at the peak, for each of their kernels, measure the host
# that launches them (``EfficiencyConstants.host_kernel_us``).
HOST_SECONDS = 6.8e-6
ELEMENTWISE = {"add", "addu", "sub", "mul", "mulu", "div", "divu", "pow", "powu", "relu"}
ELEMENTWISE |= {"gelu", "tanh"}
FUSED = {"attn_rope", "mlp_act", "input_layernorm"}  # by the kernels of vLLM
# Threads of the block of vLLM's activation, which takes as many columns at a time, and strided
# elements in whose time it completes one, with an exponential and a division.
ACTIVATION_THREADS, ACTIVATION_ELEMENTS = 1024, 1.07
# Columns of Phi-2's GELU, a stream without a gate.
GELU_COLUMNS = 10240
# Columns of Phi-2's LayerNorm. Other models' norms are vLLM's RMSNorm, which loads elements one by
# one: twice the time of PyTorch's norms for each.
LAYER_NORM_COLUMNS, RMS_NORM_ELEMENTS = 2560, 2
# Files of Liger-Kernel that its scripts since 2026 wrote.
SHARED_SCRIPT = "_cutile.csv"
# PyTorch's kernel of embeddings up to 2025 copied element by element: Liger-Kernel's A100 took 1.25
# times as long for each as for one of the sums of the backward pass.
FORMER_EMBEDDING_ELEMENTS = 1.25
# NeuSight's softmax is PyTorch's of 2023, which had no kernel that holds a long row.
FORMER_SOFTMAX = "memory/softmax"
# Matrices that collectors of products go through, by their scripts. vLLM's weights are allocated
# but never set: its products of more than 10 ms take 0.78 (L40S) to 0.91 of TensorRT-LLM's time.
COLLECTORS = {
    "aiconfigurator/sglang": Surroundings(inputs=6, weights=6, results=1),
    "aiconfigurator/trtllm": Surroundings(inputs=1, weights=5, results=1),
    "aiconfigurator/vllm": Surroundings(inputs=1, weights=6, results=1, has_values=False),
    SWEEP: Surroundings(inputs=1, weights=1, results=1),
}
# Kernels of ``kernel_sweep``, by their class in the report. A transposed copy is part of no step,
# and AdamW by lists of tensors is many kernels.
SWEPT = {
    **dict.fromkeys(("add", "add_fp32", "cast_down"), "stream"),
    "cast_up": "widening",
    "adamw_fused": "adamw",
}
PATTERNS = {
    **dict.fromkeys(("attn_rope", "mlp_act", "cast_up"), OperatorClass.SCATTERED),
    "adamw_fused": OperatorClass.UPDATE,
    **dict.fromkeys(("ln", "input_layernorm"), OperatorClass.NORM),
    "softmax": OperatorClass.SOFTMAX,
}
FORMER_NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100-80GB-SXM",
    "NVIDIA A100 80GB PCIe": "A100-80GB-PCIe",
    "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 3090": "RTX-3090",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured kernel or block of kernels.

    Attributes:
        label: class of the row in the report.
        gpu: key of the GPU.
        works: operators of it, as a trace records them.
        seconds: measured duration on the GPU.
        beside_seconds: part of them that its collector adds to any kernel.
        surroundings: work that its collector measures a product amid.
    """

    label: str
    gpu: str
    works: tuple[Work, ...]
    seconds: float
    beside_seconds: float
    surroundings: Surroundings


@cache
def measured_gpus() -> dict[str, Gpu]:
    """GPUs by key: those of the catalog, and those of ``kernel_gpus.toml``."""
    text = Path(__file__).with_name("kernel_gpus.toml").read_text(encoding="utf-8")
    others = {
        key: Gpu(
            key=key,
            kind="cuda",
            device_names=(key,),
            source="kernel_gpus.toml",
            recorded=dt.date(2026, 11, 23),
            **facts,
        )
        for key, facts in tomllib.loads(text).items()
    }
    return others | {gpu.key: gpu for gpu in load_catalog().gpus}


def measured_rows(folder: Path) -> Iterator[Measured]:
    """Every usable row of the files of a folder, on GPUs with known facts.

    Raises:
        UserError: the folder has none of the files, or a file lacks a column.
    """
    readers = {
        "gemm_*": _product,
        "memory_bound*": _moving,
        "attention_forward_aiconfigurator": _attention,
        "attention_*_sweep": _attention,
        "dequantisation_sweep": _dequantised,
        "eager_blocks_*": _block,
    }
    paths = {path: read for name, read in readers.items() for path in _files(folder, name)}
    if not paths:
        names = ", ".join(f"{name}.csv" for name in readers)
        raise UserError(f"{folder}: has none of {names} (or .csv.gz): give a folder with some")
    known = measured_gpus()
    for path, read in paths.items():
        for number, row in enumerate(_rows(path), 2):
            try:
                gpu = FORMER_NAMES.get(row["gpu"], row["gpu"])
                measured = read(row, known[gpu]) if gpu in known else None
                seconds = float(row["us"]) * 1e-6
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{path}: line {number}: cannot be read: {error!r}") from None
            of_host = row["source"].startswith(SWEEP) and seconds < _least_swept_seconds(row)
            if measured is not None and not of_host:
                label, works = measured
                beside = _beside_seconds(row, label, seconds)
                yield Measured(label, gpu, works, seconds, beside, _surroundings(row))


def stacked(rows: list[Measured]) -> Surroundings:
    """Surroundings of rows, each of its arrays (rows,)."""
    columns = zip(*(dataclasses.astuple(row.surroundings) for row in rows), strict=True)
    return Surroundings(*map(np.array, columns))


def operators_of(rows: list[Measured]) -> tuple[Operators, FloatArray]:
    """Operators of rows one after another, and the row (operators,) that each belongs to."""
    works = [(at, work) for at, row in enumerate(rows) for work in row.works]
    return Operators(
        kinds=np.full(len(works), int(Kind.RUN)),
        names=np.array([4 * work[0] + work[1] for _, work in works]),
        numbers=np.array([work[2] for _, work in works], np.float64),
    ), np.array([at for at, _ in works])


def _files(folder: Path, name: str) -> list[Path]:
    return sorted((*folder.glob(f"{name}.csv"), *folder.glob(f"{name}.csv.gz")))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    yield from csv.DictReader(io.StringIO(text.decode("utf-8")))


Read = tuple[str, tuple[Work, ...]] | None


def _surroundings(row: dict[str, str]) -> Surroundings:
    collectors = (own for name, own in COLLECTORS.items() if row["source"].startswith(name))
    return next(collectors, STEP)


def _least_swept_seconds(row: dict[str, str]) -> float:
    is_backward = row.get("mode") == "backward" or "backward" in row["op"]
    name = "backward" if is_backward else row["op"]
    return LEAST_SWEPT_BY_CALL.get(name, LEAST_SWEPT_SECONDS)


def _collector(row: dict[str, str]) -> str:
    return row["source"].partition("/")[0]


def calls_of_run(seconds: FloatArray) -> FloatArray:
    """(rows,) calls in a run of ``kernel_sweep``, by the seconds of each."""
    return np.clip(np.floor(RUN_SECONDS / seconds), 1, MOST_CALLS)


def _beside_seconds(row: dict[str, str], label: str, seconds: float) -> float:
    """Seconds that a collector adds to a kernel that moves data."""
    if not label.startswith("memory/"):
        return 0.0
    if row["source"].startswith(SWEEP) and row.get("mode") == "backward":
        return float(START_SECONDS / calls_of_run(np.array(seconds)))
    name = _collector(row)
    return BESIDE_SECONDS.get(f"{name}/{row['op']}", BESIDE_SECONDS.get(name, 0.0))


def _product(row: dict[str, str], gpu: Gpu) -> Read:
    rate = ROWS_OF[row["dtype"]]
    count, rows, columns, inner = (float(row.get(name) or 1) for name in ("b", "m", "n", "k"))
    if rows < LEAST_ROWS:
        return None
    size = "fp32" if rate is Rate.FP32 else _size(rows, columns, inner)
    if size is None:
        return None
    moved = WIDTH[rate] * count * (rows * inner + inner * columns + rows * columns)
    flops = 2.0 * count * rows * columns * inner
    if rate is Rate.FP32 and flops < LEAST_FP32_SECONDS * (gpu.fp32_tflops or 0.0) * 1e12:
        return None
    numbers = (moved, flops, rows, inner, columns, count, 1.0)
    label = f"product/{size} backward" if "_grad_" in row["op"] else f"product/{size}"
    return label, ((OperatorClass.MATRIX_PRODUCT, rate, numbers),)


def _size(rows: float, columns: float, inner: float) -> str | None:
    least = min(columns, inner)
    if least >= NARROW:
        return "linear" if rows >= FEW_ROWS else "few-tokens"
    if rows < FEW_ROWS:
        return None
    return "thin" if least <= THIN else "narrow"


def _moving(row: dict[str, str], gpu: Gpu) -> Read:
    moved, name = float(row["bytes"] or 0.0), row["op"]
    is_swept = row["source"].startswith(SWEEP)
    if is_swept and name not in SWEPT:
        return None
    least = max(LEAST_SECONDS.get(_collector(row), 0.0), LEAST_MOVING_SECONDS)
    if moved < least * (gpu.memory_bandwidth_gb_per_second or 0.0) * 1e9:
        return None
    label = "elementwise" if name in ELEMENTWISE else f"fused {name}" if name in FUSED else name
    label = SWEPT[name] if is_swept else label
    rows, columns = (float(row.get(field) or 0.0) for field in ("rows", "cols"))
    row_bytes = columns * WIDTH[ROWS_OF[row["dtype"]]]
    moved -= KEPT_OF_CACHE.get(_collector(row), 0.0) * l2_bytes(gpu)
    pattern = PATTERNS.get(name, OperatorClass.MEMORY)
    if name == "mlp_act" and columns == GELU_COLUMNS:
        pattern, moved = OperatorClass.MEMORY, 2 * rows * row_bytes
    elif name == "mlp_act":
        columns = ACTIVATION_THREADS * math.ceil(columns / ACTIVATION_THREADS)
        rows *= ACTIVATION_ELEMENTS
    elif name == "input_layernorm" and columns != LAYER_NORM_COLUMNS:
        columns *= RMS_NORM_ELEMENTS
    launches = float(_collector(row) not in WITHOUT_LAUNCH)
    numbers = (moved, 0.0, rows, row_bytes, columns, 0.0, launches)
    return f"memory/{label}", ((pattern, Rate.BF16, numbers),)


def _attention(row: dict[str, str], gpu: Gpu) -> Read:
    major = (gpu.compute_capability or "").partition(".")[0]
    names = ("batch", "seq", "heads", "kv", "hd")
    batch, length, heads, shared, width = (float(row[name]) for name in names)
    is_flash2 = row["kernel"] == FLASH2_KERNEL and major in ASYNCHRONOUS
    is_pytorchs = is_flash2 or row["kernel"] in LIBRARIES.get(major, ())
    is_of_test = row["source"].startswith(SWEEP) and width < LEAST_SWEPT_WIDTH
    if not is_pytorchs or length < LEAST_LENGTH or width > MOST_WIDTH or is_of_test:
        return None
    is_backward = "backward" in row["op"]
    # Forward: queries, keys, values and result; backward: these, and a gradient of each.
    passes, products = (2, BACKWARD_PRODUCTS) if is_backward else (1, FORWARD_PRODUCTS)
    moved = passes * 2 * batch * length * width * (2 * heads + 2 * shared)
    moved += 4 * batch * length * heads
    flops = products * batch * heads * length * length * width  # half of the scores are masked
    numbers = (moved, flops, length, width, length, batch * heads, 1.0)
    fused = OperatorClass.ATTENTION_BACKWARD if is_backward else OperatorClass.ATTENTION_FORWARD
    work = (FLASH2[fused] if is_flash2 else fused, Rate.BF16, numbers)
    copied = 2 * batch * length * shared
    written = _cache_write(row["source"], copied, width, fits=moved <= l2_bytes(gpu))
    return f"attention/{'backward' if is_backward else 'forward'} {row['kernel']}", (work, *written)


def _cache_write(source: str, rows: float, width: float, *, fits: bool) -> tuple[Work, ...]:
    """Copy of keys and values into the cache of an inference server, where it was measured.

    Args:
        source: collector and its version.
        rows: of keys and values.
        width: of a row.
        fits: whether the L2 cache holds them, so that no byte reaches the memory.
    """
    for name, (pattern, addresses) in CACHE_WRITES.items():
        if source.startswith(name):
            moved, elements = 0.0 if fits else 2 * 2 * rows * width, addresses * width
            # It follows the kernel of attention without a launch of its own.
            return ((pattern, Rate.BF16, (moved, 0.0, rows, 2 * width, elements, 0.0, 0.0)),)
    return ()


def _dequantised(row: dict[str, str], _: Gpu) -> Read:
    numbers = (float(row["bytes"]), float(row["rows"]) * float(row["cols"]), 0, 0, 0, 0, 1.0)
    return "memory/dequantisation", ((OperatorClass.DEQUANTISATION, Rate.BF16, numbers),)


def _block(row: dict[str, str], gpu: Gpu) -> Read:
    options = json.loads(row["extra_benchmark_config_str"])
    sizes = {**options, row["x_name"]: int(float(row["x_value"]))}
    script = Script.SHARED if row["source"].endswith(SHARED_SCRIPT) else Script.FIRST
    script = Script.SWEEP if row["source"].startswith(SWEEP) else script
    works = block_works(row["op"], row["mode"], tuple(sorted(sizes.items())), script)
    if works is None:
        return None
    if row["op"] == "embedding":
        works = tuple(_of_embedding(one, sizes, script) for one in works)
    bandwidth = (gpu.memory_bandwidth_gb_per_second or 0.0) * 1e9
    launching = HOST_SECONDS * len(works) * bandwidth
    is_of_host = sum(numbers[Column.BYTES] for _, _, numbers in works) < launching
    return None if is_of_host else (f"memory/block {row['op']}", works)


def _of_embedding(one: Work, sizes: Sizes, script: Script) -> Work:
    """Operator of an embedding of random tokens, by the kernel of its time."""
    work, rate, numbers = one
    tokens, words, width = sizes["B"] * sizes["T"], sizes["V"], sizes["D"]
    if work is OperatorClass.GATHER:
        # A step takes all tokens for different ones.
        distinct = words * -math.expm1(-tokens / words)
        elements = (tokens + (SUMMED_ELEMENTS - 1) * distinct) * width
    elif script is Script.FIRST and numbers[Column.BYTES] == 2 * 4 * tokens * width:
        work, elements = OperatorClass.GATHER, FORMER_EMBEDDING_ELEMENTS * tokens * width
    else:
        return one
    moved, launches = numbers[Column.BYTES], numbers[Column.LAUNCHES]
    return work, rate, (moved, 0.0, elements, 0.0, 1.0, 0.0, launches)
