"""Loops over events, compiled by numba."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function, and cache the result on disk where a folder can be written."""
    try:
        fast: F = numba.njit(function, cache=True, nogil=True)
    except RuntimeError:
        fast = numba.njit(function, nogil=True)
    return fast
