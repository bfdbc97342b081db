"""Products in bf16 that take no longer than in fp32 where a CPU has no instructions for bf16."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


@contextmanager
def products_by_fp32() -> Iterator[None]:
    """Multiply bf16 matrices in fp32, and round once: sums are fp32 in either case.

    PyTorch takes 15 times as long for them as for fp32 without AVX-512. Dispatch modes see the same
    operators with the same results in memory.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in PRODUCTS:
                library.impl(name, _by_fp32(getattr(torch, name)), "CPU", allow_override=True)
        yield


def _by_fp32(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def multiplied(*matrices: torch.Tensor, **scales: Any) -> torch.Tensor:
        dtype = matrices[-1].dtype
        is_narrow = dtype == torch.bfloat16
        given = [matrix.float() for matrix in matrices] if is_narrow else matrices
        # The form with a result to fill has a kernel of its own, which is PyTorch's.
        return product(*given, **scales, out=given[-1].new_empty(0)).to(dtype)

    return multiplied
