"""Which Mamba kernels run: chosen once for a process, told by what ran."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from trials.models.mamba import PACKAGES, choose_mamba_kernels, mamba_in_use


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process in which nothing was chosen yet."""
    for package in PACKAGES:
        monkeypatch.delitem(sys.modules, package, raising=False)
    return monkeypatch


@pytest.mark.usefixtures("modules")
def test_the_reference_hides_the_kernels_from_whoever_would_import_them() -> None:
    """Installed or not: transformers takes what it can import."""
    choose_mamba_kernels("reference")
    choose_mamba_kernels("reference")
    for package in PACKAGES:
        with pytest.raises(ImportError):
            __import__(package)
    with pytest.raises(RuntimeError, match="this process runs Mamba's reference"):
        choose_mamba_kernels("mamba-ssm")


@pytest.mark.usefixtures("modules")
def test_kernels_that_are_not_installed_are_told_with_the_extra() -> None:
    """In one line, with what to use instead."""
    with pytest.raises(ImportError, match=r"needs the package mamba_ssm.*extra 'gpu'.*reference"):
        choose_mamba_kernels("mamba-ssm")


def test_a_process_with_the_kernels_cannot_go_back(modules: pytest.MonkeyPatch) -> None:
    """Transformers has taken them by then."""
    for package in PACKAGES:
        modules.setitem(sys.modules, package, ModuleType(package))
    choose_mamba_kernels("mamba-ssm")
    with pytest.raises(RuntimeError, match="has imported mamba-ssm"):
        choose_mamba_kernels("reference")


def test_what_ran_is_told_by_the_operators() -> None:
    """The reference convolves with PyTorch's operator, the kernels with their own; or who knows."""
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
import sys
import torch
from builders.observations import recipe, tiny_cell
from trials.training.finetune import FineTuning
from trials.records.model import find_model

cell = tiny_cell("blackmamba-tiny", recipe("full"), seq_len=8)
of = cell.recipe.model_copy(update={"mamba": sys.argv[1]})
cell = cell.model_copy(update={"recipe": of})
model = find_model("blackmamba-tiny")
tuning = FineTuning(cell, model, device=torch.device("cpu"), seed=0)
print(tuning.built().mamba, tuning.step(tuning.tokens(1)))
"""


def built_with_packages(mamba: str, folder: Path) -> tuple[str, float]:
    """What a process where both packages can be imported finds in use, and a loss."""
    for name, content in (("causal_conv1d", CONVOLUTION), ("mamba_ssm", SCAN)):
        (folder / f"{name}.py").write_text(content)
    tests = Path(__file__).parent
    path = os.pathsep.join((str(folder), str(tests), str(tests.parent)))
    done = subprocess.run(
        [sys.executable, "-c", STEP, mamba],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, loss = done.stdout.split()
    return found, float(loss)


def test_transformers_takes_what_was_chosen(tmp_path: Path) -> None:
    """Both packages installed: their functions run when asked for, and not when not."""
    kernels, their_loss = built_with_packages("mamba-ssm", tmp_path)
    reference, loss = built_with_packages("reference", tmp_path)
    assert (kernels, reference) == ("mamba-ssm", "reference")
    assert loss != their_loss
