"""Environment variables of child processes that import PyTorch and transformers."""

import os
from pathlib import Path

# Python files in the working directory, which anybody may have written, are never imported.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
# Without them transformers fetches kernels from the hub, and torch.cuda.is_available() makes a CUDA
# context, which a forked child could not use (torch.cuda: PYTORCH_NVML_BASED_CUDA_CHECK).
CHILD_VARIABLES = {"USE_HUB_KERNELS": "NO", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def child_environment() -> dict[str, str]:
    """Environment of a child: this process's own, with ``CHILD_VARIABLES`` and the packages."""
    # The packages may come from a Ray job's working directory, which is in sys.path alone.
    packages = str(Path(__file__).resolve().parents[2])
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, (packages, *given)))  # an empty one: working directory
    return os.environ | CHILD_VARIABLES | SAFE_PATH | {"PYTHONPATH": path}
