"""Prints a task file as SkyPilot reads it; run by the Python of `make trainers`.

The catalog of instances in ``HOME`` is the caller's.
"""

import json
import sys

import sky
import yaml

with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123 - the script of another environment
    task = sky.Task.from_yaml_config(yaml.safe_load(file))
resources = [
    {
        "cloud": str(one.cloud).lower(),
        "region": one.region,
        "instance": one.instance_type,
        "spot": one.use_spot,
        "gpus": dict(one.accelerators),
    }
    for one in task.resources
]
mode = task.storage_mounts["/outputs"].mode.name
text = {"envs": task.envs, "run": task.run, "files": task.file_mounts}
print(json.dumps({"resources": resources, "mode": mode, **text}))  # noqa: T201 - its output
