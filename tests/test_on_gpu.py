"""Tests that need a GPU: `make gpu-check` runs them on a machine that has one."""

import json
import statistics
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from builders.observations import recipe

from gpu_catalog.catalog import load_catalog
from gpu_catalog.gpu import Gpu
from trials.child_process.child_prober import ChildProber
from trials.child_process.forked_child import ProbeEnd
from trials.devices.cuda import CudaDevice
from trials.devices.device import DeviceError
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.messages import ProbeRequest, Setup
from trials.records.model import find_model
from trials.records.observation import Outcome
from trials.records.profile import ProfileRule
from trials.records.timing_rule import TimingRule

pytestmark = [
    pytest.mark.gpu,
    # PEFT asks a transformers model under a name that transformers 5 has deprecated.
    pytest.mark.filterwarnings("default"),
]

# Tests that read or fill the memory of the whole GPU, or its energy: no other may run beside them.
alone = pytest.mark.alone

GIB = 2**30
REQUEST = ProbeRequest(batch_size=2, timing=None)
TIMED = ProbeRequest(batch_size=2, timing=TimingRule(warmup_seconds=0.2, max_seconds=2.0))


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    """Catalog row of this machine's GPU."""
    if not torch.cuda.is_available():
        pytest.exit("no NVIDIA GPU: CUDA shows none to PyTorch on this machine", returncode=1)
    return load_catalog().gpu_by_device_name(torch.cuda.get_device_name(0))


@pytest.fixture(scope="module")
def device(gpu: Gpu) -> CudaDevice:
    """This process's GPU, capped at 8 GiB; a process has one."""
    return CudaDevice(gpu, memory_cap_bytes=8 * GIB)


def fill(count: int) -> list[torch.Tensor]:
    """Allocate this many GiB."""
    return [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(count)]


def test_another_gpu_of_the_catalog_is_refused(gpu: Gpu) -> None:
    """The error names this GPU's key, which is its node's resource."""
    other = next(g for g in load_catalog().gpus if g.kind == "cuda" and g.key != gpu.key)
    with pytest.raises(DeviceError, match=f"this is {gpu.key}: .* not '{other.key}'"):
        CudaDevice(other, memory_cap_bytes=None)


@alone
def test_a_cap_holds(device: CudaDevice) -> None:
    """The cap includes CUDA's own memory; no more than the rest can be allocated."""
    assert 6 * GIB < device.memory_limit_bytes < 8 * GIB
    with pytest.raises(torch.OutOfMemoryError):
        fill(8)
    device.settle()
    assert torch.cuda.memory_reserved() < GIB


@alone
def test_peaks_are_those_of_the_steps_alone(device: CudaDevice) -> None:
    """Memory freed before the steps is not in their peaks."""
    fill(4)
    device.settle()
    reading = device.measure_memory(lambda: fill(2), steps=3, already_live=[])
    assert 2 * GIB <= reading.peak_allocated_bytes < 3 * GIB
    assert reading.peak_reserved_bytes is not None
    assert reading.peak_reserved_bytes >= reading.peak_allocated_bytes
    assert reading.allocator_retries == 0
    assert reading.overhead_bytes is not None
    assert 0 < reading.overhead_bytes < 2 * GIB


@alone
def test_a_retry_of_the_allocator_is_counted(device: CudaDevice) -> None:
    """The allocator retries where it must free cached blocks that cannot grow."""
    device.settle()

    def step() -> None:
        fill(5)
        torch.empty(6 * GIB, dtype=torch.uint8, device="cuda")

    reading = device.measure_memory(step, steps=1, already_live=[])
    grows = "expandable_segments:True" in str(device.allocator)
    assert reading.allocator_retries == (0 if grows else 1)
    device.settle()


@alone
def test_sensors_read_and_energy_grows(device: CudaDevice) -> None:
    """NVML reads clocks and used memory, and counts energy from Volta on."""
    reading, before = device.reading(), device.energy_joules()
    assert reading is not None
    assert reading.sm_clock_mhz is not None
    assert reading.memory_clock_mhz is not None
    assert reading.used_memory_bytes is not None
    big = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    seconds = sum(device.step_seconds(lambda: big @ big) for _ in range(500))
    after = device.energy_joules()
    assert seconds > 0
    assert before is not None
    assert after is not None
    assert after > before


def ends(model: str, tuning_recipe: Recipe, gpu: Gpu, *requests: ProbeRequest) -> list[ProbeEnd]:
    """Ends of probes of a model under a recipe on this GPU, in a real child."""
    facts = find_model(model)
    cell = Cell(
        gpu=gpu.key,
        model=model,
        recipe=with_defaults(tuning_recipe, facts, gpu),
        experts=facts.experts,
        active_experts=facts.active_experts,
        seq_len=64,
    )
    setup = Setup(cell=cell, model=facts, gpu=gpu, seed=0, threads=4)
    with ChildProber(setup, build_timeout_seconds=300, probe_timeout_seconds=120) as prober:
        return [prober.probe(request) for request in requests]


AXES = [
    ("llama-tiny", recipe("full", precision="bf16")),
    ("llama-tiny", recipe("full", precision="fp16")),
    ("llama-tiny", recipe("full", precision="fp32", attention="eager")),
    ("llama-tiny", recipe("full", precision="bf16", optimizer="adamw_8bit")),
    ("llama-tiny", recipe("full", precision="bf16", optimizer="paged_adamw_8bit")),
    ("llama-tiny", recipe("full", precision="bf16", optimizer="adafactor")),
    ("llama-tiny", recipe("qlora", precision="bf16", gradient_checkpointing=True)),
    ("llama-tiny", recipe("qlora", precision="fp16")),
    ("llama-tiny", recipe("qlora", precision="bf16", quantisation="fp4")),
    ("llama-tiny", recipe("qlora", precision="bf16", quantisation="int8")),
    ("mixtral-tiny", recipe("qlora", precision="bf16", gradient_checkpointing=True)),
    ("qwen3-moe-tiny", recipe("qlora", precision="bf16")),
    ("mixtral-tiny", recipe("full", precision="bf16", experts="grouped")),
    ("mixtral-tiny", recipe("full", precision="bf16", experts="looped")),
    ("blackmamba-tiny", recipe("full", precision="bf16", mamba="reference")),
]
if find_spec("flash_attn"):
    AXES.append(("llama-tiny", recipe("full", precision="bf16", attention="flash_attention_2")))
if find_spec("mamba_ssm") and find_spec("causal_conv1d"):
    AXES.append(("blackmamba-tiny", recipe("full", precision="bf16", mamba="mamba-ssm")))
if find_spec("torchao"):
    AXES += [
        ("llama-tiny", recipe("full", precision="bf16", optimizer="torchao_adamw_8bit")),
        ("llama-tiny", recipe("lora", optimizer="torchao_adamw_4bit")),
    ]
if find_spec("deepspeed"):
    AXES.append(("llama-tiny", recipe("full", precision="bf16", offload_optimizer=True)))


@pytest.mark.parametrize(
    ("model", "tuning_recipe"), AXES, ids=lambda value: getattr(value, "key", value)
)
def test_every_recipe_axis_is_applied_and_timed(
    model: str, tuning_recipe: Recipe, gpu: Gpu
) -> None:
    """The child checks the recipe itself; a recipe that is not applied would fail."""
    (end,) = ends(model, tuning_recipe, gpu, TIMED)
    assert (end.outcome, end.detail) == (Outcome.FITS, None)
    assert end.measurement is not None
    assert end.measurement.memory.peak_reserved_bytes is not None
    assert len(end.measurement.step_seconds) >= 6
    assert end.measurement.before is not None


PROFILED = ProbeRequest(batch_size=2, timing=None, profile=ProfileRule())


@pytest.mark.parametrize(
    ("model", "tuning_recipe"),
    [
        ("mixtral-tiny", recipe("qlora", precision="bf16", gradient_checkpointing=True)),
        ("mixtral-tiny", recipe("full", precision="bf16", experts="grouped")),
        ("blackmamba-tiny", recipe("full", precision="bf16", mamba="reference")),
    ],
    ids=lambda value: getattr(value, "key", value),
)
def test_kernels_and_waiting_add_up_to_the_profiled_step(
    model: str, tuning_recipe: Recipe, gpu: Gpu
) -> None:
    """Stages and layers of the profile sum to the step within 5 %."""
    (end,) = ends(model, tuning_recipe, gpu, PROFILED)
    assert (end.outcome, end.detail) == (Outcome.FITS, None)
    profile = end.profile
    assert profile is not None
    assert profile.of == "gpu"
    step = statistics.median_low(profile.profiled_seconds)
    assert sum(row.seconds for row in profile.rows) == pytest.approx(step, rel=0.05)
    for stage in ("forward", "backward"):
        layers = {row.layer for row in profile.rows if row.stage == stage}
        assert layers >= {"experts", "norms", "head", "loss"}


@alone
def test_a_fresh_child_has_all_memory_again_after_out_of_memory(gpu: Gpu) -> None:
    """Peak and memory limit of the same batch size are equal before and after."""
    huge = ProbeRequest(batch_size=2_000_000, timing=None)
    before, miss, after = ends("llama-tiny", recipe("full"), gpu, REQUEST, huge, REQUEST)
    assert miss.outcome is Outcome.OUT_OF_MEMORY
    assert before.measurement is not None
    assert after.measurement is not None
    assert (
        before.measurement.memory.peak_allocated_bytes
        == after.measurement.memory.peak_allocated_bytes
    )
    assert before.memory_limit_bytes is not None
    assert after.memory_limit_bytes is not None
    assert abs(after.memory_limit_bytes - before.memory_limit_bytes) < GIB // 16


@alone
def test_memory_of_another_process_is_recorded(device: CudaDevice, gpu: Gpu) -> None:
    """For its child, this process is another one, with 3 GiB and its CUDA context."""
    device.settle()
    held = fill(3)
    (end,) = ends("llama-tiny", recipe("full"), gpu, REQUEST)
    assert end.measurement is not None
    foreign = end.measurement.memory.foreign_bytes
    assert foreign is not None
    assert len(held) * GIB <= foreign < (len(held) + 2) * GIB
    assert end.environment is not None
    assert {"cuda", "driver"} <= {name for name, _ in end.environment.versions}


ONE_RANK = """
import socket
import sys

from trials.ranks.rank import Rank
from trials.recipes.parallel import Parallel
from trials.records.messages import ProbeRequest, Setup
from trials.training.worker import Worker

setup = Setup.model_validate_json(sys.argv[1])
layout = Parallel.model_construct(gpus=1, strategy=sys.argv[2], reshard_after_forward=None)
with socket.create_server(("127.0.0.1", 0)) as meeting:
    port, listening = meeting.getsockname()[1], meeting.fileno()
    rank = Rank(0, layout, device="cuda", port=port, listening=listening)
    worker = Worker(setup, rank)
    print(worker.environment().model_dump_json())
    print(worker.probe(ProbeRequest.model_validate_json(sys.argv[3])).model_dump_json())
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_rank_trains_by_nccl(strategy: str, gpu: Gpu) -> None:
    """A single rank opens NCCL, wraps the model as many ranks do, and is measured."""
    facts = find_model("llama-tiny")
    lora = with_defaults(recipe("lora", precision="bf16"), facts, gpu)
    cell = Cell(gpu=gpu.key, model=facts.name, recipe=lora, seq_len=64)
    setup = Setup(cell=cell, model=facts, gpu=gpu, seed=0, threads=4)
    arguments = (setup.model_dump_json(), strategy, TIMED.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-c", ONE_RANK, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    environment, reply = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert environment["backend"] == "nccl"
    assert "nccl" in dict(environment["versions"])
    assert reply["outcome"] == "FITS"
    assert len(reply["measurement"]["step_seconds"]) >= 6
