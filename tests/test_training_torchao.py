"""Optimizers of torchao: their state, and their update where operators are observed."""

import contextlib

import pytest
import torch
from torch import nn

from trials.devices.live_tensors import LiveTensorCounter
from trials.training.optimizers.torchao_optimizers import torchao_adamw

pytestmark = pytest.mark.filterwarnings("ignore")  # of torchao and torch.compile


@pytest.mark.parametrize(("name", "codes"), [("AdamW8bit", 8192), ("AdamW4bit", 4096)])
def test_observed_state_of_torchao_is_its_codes_scales_and_tables(name: str, codes: int) -> None:
    """A scale for 256 elements; a table of all codes and a step counter, for each parameter."""
    large, small = (nn.Parameter(torch.ones(*shape)) for shape in ((64, 128), (100,)))
    made = torchao_adamw(name, [{"params": [large, small]}], 1e-3, lambda *_: None)
    for parameter in (large, small):
        parameter.grad = torch.ones_like(parameter)
    with LiveTensorCounter([large, small], 2**40) as counter:
        weights = counter.current_bytes
        made.step()
    tables = 2 * 4 * (256 if codes == 8192 else 16)
    steps, moments_of_small = 2 * 4, 2 * 4 * 100
    state = 2 * codes + 2 * 4 * 32 + tables + steps + moments_of_small
    assert counter.current_bytes - weights == state


@pytest.mark.long
def test_an_observed_update_of_torchao_is_the_compiled_one() -> None:
    """A counter of memory changes no number."""
    weights = []
    for observer in (contextlib.nullcontext(), LiveTensorCounter([], 2**40)):
        parameter = nn.Parameter(torch.linspace(-1, 1, 8192))
        parameter.grad = torch.linspace(0, 1, 8192)
        made = torchao_adamw("AdamW8bit", [{"params": [parameter]}], 1e-3)
        with observer:
            made.step()
        weights.append(parameter.detach())
    assert torch.equal(*weights)
