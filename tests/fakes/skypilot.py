"""Files as SkyPilot itself reads them, in the environment of `make trainers`."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / ".venv-trainers" / "bin" / "python"
COLUMNS = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "AvailabilityZone"
)


def json_of_trainers(home: Path, *arguments: object) -> Any:
    """JSON that a script in the other environment prints last."""
    done = subprocess.run(
        [PYTHON, *map(str, arguments)],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def read_by_skypilot(path: Path, home: Path, instances: Mapping[str, str]) -> Any:
    """Tasks of a file.

    Args:
        path: the file.
        home: home directory, which gets a catalog.
        instances: rows of SkyPilot's catalog by cloud, which is else downloaded.
    """
    for cloud, row in instances.items():
        file = home / ".sky" / "catalogs" / "v8" / cloud / "vms.csv"
        file.parent.mkdir(parents=True)
        file.write_text(f"{COLUMNS}\n{row}\n", encoding="utf-8")
    return json_of_trainers(home, ROOT / "tests" / "trainers_skypilot.py", path)
