"""Request of a trial to Ray."""

from typing import Any

import pytest

from orchestrator.ray_backend.trial_worker import resources

PART = {"CPU": 1.0, "H100-SXM": 8.0, "GPU": 8.0}


def requested(nodes: int, *avoid: str) -> Any:
    """Placement group of a trial on so many nodes, away from others."""
    return resources({"trial": {"resources": PART, "avoid": list(avoid), "nodes": nodes}})


@pytest.mark.parametrize(("nodes", "strategy"), [(1, "PACK"), (2, "STRICT_SPREAD")])
def test_a_trial_has_a_part_on_each_of_its_nodes(nodes: int, strategy: str) -> None:
    """All parts are on different nodes, and equal requests are one object."""
    group = requested(nodes)
    assert (group.bundles, group.strategy) == ([PART] * nodes, strategy)
    assert group is requested(nodes)


def test_no_part_is_on_a_node_to_avoid() -> None:
    """Each part has the selector."""
    elsewhere = {"ray.io/node-id": "!in(n1,n2)"}
    assert str(requested(2, "n1", "n2")).count(str(elsewhere)) == 2
