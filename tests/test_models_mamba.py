"""Mamba kernels: chosen once per process, and recognised by the operators that ran."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trials.models.mamba import PACKAGES, choose_mamba_kernels, mamba_in_use


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process in which no kernels were chosen yet."""
    for package in PACKAGES:
        monkeypatch.delitem(sys.modules, package, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("modules")
def test_the_reference_makes_the_kernels_unimportable() -> None:
    """Transformers uses kernels that it can import, so the reference blocks the import."""
    choose_mamba_kernels("reference")
    choose_mamba_kernels("reference")
    for package in PACKAGES:
        with pytest.raises(ImportError):
            __import__(package)
    with pytest.raises(RuntimeError, match="this process runs Mamba's reference"):
        choose_mamba_kernels("mamba-ssm")


@pytest.mark.usefixtures("modules")
def test_missing_kernels_are_an_error_that_names_the_extra() -> None:
    """The error also names the reference as the alternative."""
    with pytest.raises(ImportError, match=r"needs the package mamba_ssm.*extra 'gpu'.*reference"):
        choose_mamba_kernels("mamba-ssm")


def test_a_process_with_the_kernels_cannot_switch_to_the_reference(
    modules: pytest.MonkeyPatch,
) -> None:
    """Transformers has already imported the kernels."""
    for package in PACKAGES:
        modules.setitem(sys.modules, package, ModuleType(package))
    choose_mamba_kernels("mamba-ssm")
    with pytest.raises(RuntimeError, match="has imported mamba-ssm"):
        choose_mamba_kernels("reference")


def test_kernels_in_use_are_recognised_by_their_operators() -> None:
    """The reference uses PyTorch's convolution, the kernels their own; both or neither is None."""
    conv, scan = "aten::convolution", "DaoAILab::_causal_conv1d_fwd_cpp"
    assert mamba_in_use({conv, "aten::_grouped_mm"}) == "reference"
    assert mamba_in_use({scan, "aten::_grouped_mm"}) == "mamba-ssm"
    assert mamba_in_use({"aten::_grouped_mm"}) is None
    assert mamba_in_use({conv, scan}) is None


# The packages in small: their names and layers, and arithmetic that no model should be trained on.
CONVOLUTION = """
import torch

@torch.library.custom_op("DaoAILab::_causal_conv1d_fwd_cpp", mutates_args=())
def forward(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return forward(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient

causal_conv1d_fn = Convolution.apply
"""
SCAN = """
import causal_conv1d

def mamba_inner_fn(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight,
                   out_proj_weight, out_proj_bias, A, B=None, C=None, D=None, delta_bias=None,
                   delta_softplus=True):
    x, gate = xz.chunk(2, dim=1)
    return (causal_conv1d.causal_conv1d_fn(x) * gate).transpose(1, 2) @ out_proj_weight.T

def selective_scan_fn():
    raise AssertionError("training takes mamba_inner_fn")
"""
STEP = """
import os
import sys
from trials.child_process.bootstrap import HIDDEN, hide
hide(*HIDDEN)
import torch
from builders.observations import recipe, tiny_cell
from trials.training.finetune import FineTuning
from trials.records.model import find_model

cell = tiny_cell("blackmamba-tiny", recipe("full"), seq_len=8)
model = find_model("blackmamba-tiny")
torch.set_num_threads(1)
for mamba in ("mamba-ssm", "reference"):
    if not os.fork():
        chosen = cell.recipe.model_copy(update={"mamba": mamba})
        cell = cell.model_copy(update={"recipe": chosen})
        tuning = FineTuning(cell, model, device=torch.device("cpu"), seed=0)
        print(tuning.built().mamba, tuning.step(tuning.tokens(1)), flush=True)
        os._exit(0)
    os.wait()
"""


def built_with_packages(folder: Path) -> list[tuple[str, float]]:
    """Kernels in use and the loss of two processes that can import both packages."""
    for name, content in (("causal_conv1d", CONVOLUTION), ("mamba_ssm", SCAN)):
        (folder / f"{name}.py").write_text(content)
    tests = Path(__file__).parent
    path = os.pathsep.join((str(folder), str(tests), str(tests.parent)))
    done = subprocess.run(
        [sys.executable, "-c", STEP],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [line.split() for line in done.stdout.splitlines()]
    return [(kernels, float(loss)) for kernels, loss in answers]


@pytest.mark.long
def test_transformers_uses_the_chosen_kernels(tmp_path: Path) -> None:
    """With both packages installed, their functions run only when requested."""
    (kernels, their_loss), (reference, loss) = built_with_packages(tmp_path)
    assert (kernels, reference) == ("mamba-ssm", "reference")
    assert loss != their_loss
