"""Which Mamba kernels run: chosen once for a process, told by what ran."""

import sys
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
    """The reference convolves with PyTorch's operator, the kernels with their own."""
    assert mamba_in_use({"aten::convolution", "aten::_grouped_mm"}) == "reference"
    assert mamba_in_use({"aten::_grouped_mm"}) == "mamba-ssm"
