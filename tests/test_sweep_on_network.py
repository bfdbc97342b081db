"""Sweeps on nodes with networks of their own, of which one is killed and one cut off."""

import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import network_cluster
import pytest
from network_cluster import NetworkCluster, NetworkNode
from ray_sweeps import observations

from orchestrator.plan import make_plan, this
from orchestrator.store import RunFolder

SPEC = """\
name: network
gpus: [desk]
cells:
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [32, 48, 64]
workload: {queries: 100, epochs: 1}
max_batch_size: 16
seed: SEED
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: 14000000, source: test, recorded: 2026-11-20}
"""
SEEDS = (1, 2, 3, 4, 5)
