"""torchao's AdamW with quantised state, whose updates torch.compile compiles."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from trials.child_process.bootstrap import reveal

Update = Callable[..., None]
"""Update of one parameter, with the arguments of torchao's ``single_param_adam``."""

TRAINERS_BLOCK = 256
"""Elements per scale; transformers' Trainer passes it to both optimizers."""


def torchao_adamw(
    name: str, groups: list[dict[str, Any]], lr: float, update: Update | None = None
) -> torch.optim.Optimizer:
    """Make an optimizer of torchao, without state.

    torch.compile refuses to run where operators are observed one by one, as memory on a CPU is.
    There torchao's own step runs, with another update of each parameter.

    Args:
        name: class of ``torchao.optim``.
        groups: parameters to update.
        lr: learning rate.
        update: update where operators are observed; absent for the compiled one, unobserved.

    Raises:
        ImportError: torchao is not installed.
    """
    reveal("torchao")
    try:
        adam: Any = importlib.import_module("torchao.optim.adam")
    except ImportError as error:
        raise ImportError(
            f"optimizer torchao_adamw_* needs the package torchao ({error}): install the extra "
            "'torchao', or use adamw_8bit"
        ) from None
    made: Any = getattr(adam, name)(groups, lr=lr, weight_decay=0.0, block_size=TRAINERS_BLOCK)
    own_step, own_update = made.step, adam.single_param_adam

    def compiled(*args: Any) -> None:
        with _disable_current_modes(), torch.compiler.set_stance("default"):
            own: Update = torch.compile(own_update, fullgraph=True, dynamic=False)
            own(*args)

    def step(closure: Any = None) -> Any:
        if not is_in_torch_dispatch_mode():
            return own_step(closure)
        adam.single_param_adam = update or compiled
        try:
            with torch.compiler.set_stance("force_eager"):
                return own_step(closure)
        finally:
            adam.single_param_adam = own_update

    made.step = step
    optimizer: torch.optim.Optimizer = made
    return optimizer
