"""Weights that ranks draw layer by layer and keep in slices until they are divided."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders.observations import recipe

from trials.recipes.host_bytes import is_built_in_slices
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe

RANKS = 3
PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
from torch import nn
from trials.ranks.weight_slices import WeightSlices

number, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=ranks)
torch.manual_seed(0)
device = torch.device("cpu")
slices = WeightSlices(device, device)
layer, shared = nn.Linear(5, 7), nn.Linear(5, 7, bias=False, dtype=torch.bfloat16)
model = nn.Sequential(layer, shared, nn.Linear(5, 7, bias=False))
model[2].weight = shared.weight


def held(part):
    return sum({p.data_ptr(): p.untyped_storage().nbytes() for p in part.parameters()}.values())


drawn = [p.detach().clone() for p in model.parameters()]
slices.keep(layer)
first = held(layer), held(model)
slices.keep(model)  # the rest of it: what is kept stays as it is
own = sum(len(one.own) for one in slices._slices.values())
slices.restore(layer)
second = held(layer), held(model)
slices.restore(model)
same = all(map(torch.equal, drawn, model.parameters()))
print(json.dumps([first, own, second, held(model), same, len(slices._slices)]))
"""


@pytest.mark.long
def test_ranks_hold_slices_until_they_gather_a_part(tmp_path: Path) -> None:
    """Bytes that each rank holds, of a layer in fp32 and a matrix in bf16 that two layers share."""
    arguments = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen(
            [*arguments, str(number), str(RANKS), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(RANKS)
    ]
    layer, shared = 4 * (5 * 7 + 7), 2 * 5 * 7
    slices = -(-4 * 5 * 7 // RANKS) + -(-4 * 7 // RANKS) + -(-shared // RANKS)
    for rank in ranks:
        answer = json.loads(rank.communicate(timeout=300)[0])
        assert answer == [[0, shared], slices, [layer, layer], layer + shared, True, 0]


@pytest.mark.parametrize(
    ("layout", "settings", "expected"),
    [
        (Parallel(gpus=8, strategy="fsdp2"), {}, True),
        (Parallel(gpus=8, strategy="tp"), {}, True),
        (Parallel(gpus=8, strategy="ddp"), {}, False),  # each holds all weights for good
        (Parallel(gpus=8, strategy="deepspeed-zero3"), {}, False),
        (Parallel(gpus=8, strategy="fsdp2"), {"modules_to_save": ("lm_head",)}, False),
    ],
)
def test_what_reads_whole_weights_is_built_from_whole_weights(
    layout: Parallel, settings: dict[str, object], *, expected: bool
) -> None:
    """A copy of a weight, and DeepSpeed's own division, need all of its bytes."""
    made = Recipe.model_validate(recipe("lora").model_dump() | settings)
    assert is_built_in_slices(layout, made) is expected
