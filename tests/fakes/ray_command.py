"""Ray's command line, without two parts that take more time than the rest and that nobody uses.

These are the commands of Ray Serve, and the server of Ray's client, at a fixed port as well.
"""

import sys
from typing import Any

if __name__ == "__main__":
    modules: Any = sys.modules
    modules["ray.serve.scripts"] = None  # importing it raises ImportError
    from ray.scripts import scripts

    scripts.get_ray_client_dependency_error = lambda: "left out"
    scripts.main()
