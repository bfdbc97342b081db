"""Prints the tasks of a file as SkyPilot reads them; run by the Python of `make trainers`.

The catalog of instances in ``HOME`` is the caller's.
"""

import json
import sys

from sky.utils import dag_utils

dag = dag_utils.load_chain_dag_from_yaml(sys.argv[1])
tasks = [
    {
        "resources": [
            {
                "cloud": str(one.cloud).lower(),
                "region": one.region,
                "instance": one.instance_type,
                "spot": one.use_spot,
                "gpus": dict(one.accelerators),
                "disk": one.disk_size,
                "network": one.network_tier and one.network_tier.value,
            }
            for one in task.resources
        ],
        "modes": [mount.mode.name for mount in task.storage_mounts.values()],
        "envs": task.envs,
        "secrets": list(task.secrets),
        "setup": task.setup,
        "run": task.run,
        "files": task.file_mounts,
        "nodes": task.num_nodes,
        "name": task.name,
    }
    for task in dag.tasks
]
print(json.dumps(tasks))  # noqa: T201 - its output
