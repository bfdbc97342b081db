"""With this folder on the path, trials run the law of ``law_worker.py`` instead of a model.

The variable ``REAL_WORKER`` keeps the model.
"""

import os
import sys

if "trials.training.worker" in sys.orig_argv and "REAL_WORKER" not in os.environ:
    import importlib.util

    law_worker = importlib.util.find_spec("fakes.law_worker")
    assert law_worker is not None
    assert law_worker.origin is not None
    os.execv(  # noqa: S606 - no shell is wanted
        sys.executable, [sys.executable, law_worker.origin, sys.orig_argv[-1]]
    )
