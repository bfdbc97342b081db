"""Child process of ``host-speed``: times steps of a small model on the CPU.

The model has four layers of Llama with LoRA and checkpointing, as TRL trains by default, but
tensors of at most 1,024 elements. So a step runs the Python code, the autograd graph and the
dispatch of a real one, while its kernels take next to nothing. Meta tensors would not do: in Python
their shape rules take up to 100 times as long as the dispatch of a kernel.
"""

import sys
import time

import torch

from gpu_catalog.catalog import load_catalog
from trials.host.host_speed import DispatchedSteps
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import Model
from trials.simulation.timing_model import EfficiencyConstants, timeline_of
from trials.simulation.trace_request import TraceRequest
from trials.simulation.tracing.tracing_worker import Tracing
from trials.simulation.whole_step import Steps
from trials.training.finetune import FineTuning

MEASURING_SECONDS = 4.0
LEAST_STEPS = 20
WARMUP_STEPS = 5
BATCH_SIZE = 2
SEQ_LEN = 8
ANY_GPU = "A100-80GB-SXM"
"""A timeline is one of a GPU, but its host's times depend on none."""
MODEL = Model(
    name="host-speed",
    source="a Llama of the smallest sizes",
    config={
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
)
RECIPE = Recipe(
    method="lora", lora_rank=4, precision="fp32", gradient_checkpointing=True, attention="eager"
)


def cell() -> Cell:
    """Cell of the steps."""
    recipe = with_defaults(RECIPE, MODEL, load_catalog().gpu("cpu"))
    return Cell(gpu="cpu", simulated=False, model=MODEL.name, recipe=recipe, seq_len=SEQ_LEN)


def step_seconds(measuring_seconds: float) -> tuple[float, ...]:
    """Processor seconds of steps in so many seconds, and of at least ``LEAST_STEPS``."""
    training = FineTuning(cell(), MODEL, device=torch.device("cpu"), seed=0)
    tokens = training.tokens(BATCH_SIZE)
    for _ in range(WARMUP_STEPS):
        training.step(tokens)
    seconds: list[float] = []
    end = time.monotonic() + measuring_seconds
    while len(seconds) < LEAST_STEPS or time.monotonic() < end:
        before = time.process_time()
        training.step(tokens)
        seconds.append(time.process_time() - before)
    return tuple(seconds)


def assumed() -> tuple[float, int]:
    """Host seconds of the same step by the clock, and its number of operators."""
    request = TraceRequest(cell=cell(), model=MODEL, batch_size=BATCH_SIZE, whole=True)
    operators = Steps(Tracing().trace(request)).operators(BATCH_SIZE)
    gpu = load_catalog().gpu(ANY_GPU)
    host = timeline_of(operators, gpu, EfficiencyConstants()).host
    return float(host.sum()), len(host)


def main() -> None:
    """Print the steps as a line of JSON, the last of the output."""
    output, sys.stdout = sys.stdout, sys.stderr  # libraries print to stdout
    torch.set_num_threads(1)
    seconds = step_seconds(MEASURING_SECONDS)
    assumed_seconds, operators = assumed()
    steps = DispatchedSteps(seconds=seconds, assumed_seconds=assumed_seconds, operators=operators)
    output.write(steps.model_dump_json())


if __name__ == "__main__":
    main()
