"""Instance types that a cluster file names for each GPU."""

import re
from collections.abc import Collection, Mapping, Sequence

import pytest
import yaml
from builders.clusters import CATALOG, deployment_on, ray_config, shipped, spec_on
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest

from orchestrator.clouds.deployment_request import CLOUDS, DeploymentRequest
from orchestrator.clouds.node_types import HEADS, instances
from orchestrator.planning.cluster_resources import SCALES_TO, ClusterResources, Node
from orchestrator.planning.plan import trial_task
from orchestrator.scheduling.scheduler import Scheduler


def test_the_single_gpus_of_each_cloud_are_there() -> None:
    """AWS has g5 and g6e to p5.4xlarge, Google A2 and A3, Azure NC."""
    named = {
        file: set(re.findall(r"(?:InstanceType|machineType|vmSize): (\S+)", shipped(file)))
        for file in ("aws.yaml", "gcp.yaml", "azure.yaml")
    }
    assert named["aws.yaml"] == {
        *("g5.xlarge", "g6.xlarge", "g6e.xlarge", "p5.4xlarge", HEADS["aws"]),
    }
    assert named["gcp.yaml"] == {
        *("a2-highgpu-1g", "a2-ultragpu-1g", "a3-highgpu-1g", "g2-standard-4", HEADS["gcp"]),
    }
    assert named["azure.yaml"] == {
        *("Standard_NC24ads_A100_v4", "Standard_NC40ads_H100_v5", HEADS["azure"]),
    }


def launched(
    text: str,
    trials: Sequence[Mapping[str, float]],
    spent: Collection[str],
    nodes: int = 1,
) -> list[str]:
    """Node types that version 2 of Ray's autoscaler starts for trials, where some types are spent.

    Ray remembers for a while that a provider had no instance of a type. A trial on several nodes
    is a placement group, whose parts are all on different ones.
    """
    config = AutoscalingConfig(ray_config(text), skip_content_hash=True)
    types = config.get_node_type_configs()
    assert types is not None
    unavailable = dict.fromkeys(spent, 0.0)
    apart = ResourceRequestUtil.PlacementConstraintType.ANTI_AFFINITY
    requests = [ResourceRequestUtil.make(dict(trial)) for trial in trials]
    parts = [ResourceRequestUtil.make(dict(t), [(apart, "_PG_1", "")]) for t in trials] * nodes
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=types,
        max_num_nodes=config.get_max_num_nodes(),
        resource_requests=ResourceRequestUtil.group_by_count(requests if nodes == 1 else []),
        gang_resource_requests=[GangResourceRequest(requests=parts)] if nodes > 1 else [],
        cloud_resource_availabilities=unavailable,
        recoverable_resource_availabilities=unavailable,
    )
    launches = ResourceDemandScheduler().schedule(request).to_launch
    return sorted(str(launch.instance_type) for launch in launches for _ in range(launch.count))


def trial_on(key: str) -> dict[str, float]:
    """Request of a trial on a GPU."""
    return {"CPU": 1.0, "GPU": 1.0, key: 1.0}


def launched_for(key: str, text: str, *, without_spot: bool = False) -> str:
    """Node type that Ray's own scheduler starts for a trial on a GPU."""
    spent = [name for name in ray_config(text)["available_node_types"] if name.endswith("-spot")]
    (node,) = launched(text, [trial_on(key)], spent if without_spot else ())
    return node


@pytest.mark.parametrize("file", ["aws.yaml", "gcp.yaml", "azure.yaml"])
def test_spot_comes_first_and_on_demand_in_its_place(file: str) -> None:
    """Ray's own scheduler takes the on-demand type once the provider had no spot instance."""
    text = shipped(file)
    types = ray_config(text)["available_node_types"].keys() - {"head"}
    alone = {"h100-sxm-spot"} if file == "gcp.yaml" else set()  # A3 of one GPU is spot alone
    spots = {name for name in types if name.endswith("-spot")}
    assert {name.replace("-spot", "-on-demand") for name in spots - alone} == types - spots
    for spot in spots:
        key = next(gpu.key for gpu in CATALOG.gpus if spot == f"{gpu.key.lower()}-spot")
        assert launched_for(key, text) == spot
        if spot not in alone:
            instead = launched_for(key, text, without_spot=True)
            assert instead == spot.replace("-spot", "-on-demand")


@pytest.mark.parametrize("file", ["aws.yaml", "gcp.yaml", "azure.yaml"])
def test_every_gpu_of_a_file_gets_one_node_of_the_cheapest_kind(file: str) -> None:
    """With several cells for each GPU, none has two nodes while another has none."""
    text = shipped(file)
    types = ray_config(text)["available_node_types"]
    head = Node(types["head"]["resources"], None, "head")
    keys = [name.removeprefix(SCALES_TO) for name in head.resources if name.startswith(SCALES_TO)]
    spec, _ = spec_on(*keys, more="max_batch_size: 4\n", seq_lens=(16, 32, 64))
    scheduler = Scheduler(
        spec.all_cells(),
        lambda cell: trial_task(spec, CATALOG, cell, []),
        {key: trial_on(key) for key in keys},
        ClusterResources((head,)),
        wait_seconds=600,
        nodes_out={},
        note=lambda _: None,
    )
    trials = [placement.resources for placement in iter(scheduler.next, None)]
    spots = sorted(f"{key.lower()}-spot" for key in keys)
    assert launched(text, trials, ()) == spots
    first = next(name for name in spots if name.replace("-spot", "-on-demand") in types)
    instead = first.replace("-spot", "-on-demand")
    assert launched(text, trials, [first]) == sorted([*{*spots} - {first}, instead])
    # One more trial for each GPU takes the cluster's cap for on-demand nodes of the first GPUs.
    assert {name.rpartition("-spot")[0] for name in launched(text, trials * 2, ())} != {
        key.lower() for key in keys
    }


def test_instances_are_of_gpus_of_the_catalog() -> None:
    """Each has as many as the price tables say."""
    for provider in CLOUDS:
        for instance in instances(provider):
            CATALOG.gpu(instance.gpu)
            for offer in CATALOG.offers(instance.gpu):
                if (offer.provider, offer.instance) == (provider, instance.name):
                    assert offer.gpus_per_instance == instance.gpus
    assert {HEADS[p] for p in CLOUDS} <= {i.name for p in CLOUDS for i in instances(p)}


def test_the_cheapest_of_several_instances_is_taken() -> None:
    """Each market uses its own price, in the requested region."""
    offers = "".join(
        f"    - {{gpu: A10G, provider: aws, region: {region}, instance: {name}, market: {market},\n"
        f"       usd_per_hour: {usd}, source: x, recorded: 2026-11-20}}\n"
        for region, name, market, usd in (
            ("eu-west-1", "g5.xlarge", "on-demand", 1.1),
            ("eu-west-1", "g5.xlarge", "spot", 0.5),
            ("eu-west-1", "g5.2xlarge", "spot", 0.4),
            ("eu-west-1", "g5.48xlarge", "spot", 0.1),
        )
    )
    made_of = deployment_on(
        "A10G",
        request=DeploymentRequest("aws", region="eu-west-1"),
        more=f"catalog:\n  offers:\n{offers}",
    )
    types = ray_config(made_of.text)["available_node_types"]
    assert types["a10g-spot"]["node_config"]["InstanceType"] == "g5.2xlarge"
    assert types["a10g-on-demand"]["node_config"]["InstanceType"] == "g5.xlarge"
    assert yaml.safe_load(made_of.text)["provider"]["region"] == "eu-west-1"
    assert launched_for("A10G", made_of.text) == "a10g-spot"  # the larger one


@pytest.mark.parametrize(("spot", "markets"), [(True, {"spot"}), (False, {"on-demand"})])
def test_one_market_alone_may_be_requested(spot: bool, markets: set[str]) -> None:  # noqa: FBT001
    """Spot without an on-demand replacement and on-demand alone are possible."""
    types = ray_config(deployment_on("L4", request=DeploymentRequest("aws", spot=spot)).text)[
        "available_node_types"
    ]
    assert {name.removeprefix("l4-") for name in types if name != "head"} == markets


def test_each_gpu_that_a_provider_lacks_has_a_line() -> None:
    """It lacks it, or has it only with several GPUs per instance, or not on that market."""
    left_out = deployment_on(
        "A40", "A100-80GB-SXM", "L4", request=DeploymentRequest("aws")
    ).left_out
    absent, several = left_out
    assert absent.startswith("A40: aws ")
    assert absent.endswith("elsewhere: runpod, cudo")
    assert several.startswith("A100-80GB-SXM: ")
    assert "8 GPUs per instance" in several
    assert "p4de.24xlarge, $12.55/h" in several
    on_demand = deployment_on(
        "H100-SXM", "A100-40GB-SXM", request=DeploymentRequest("gcp", spot=False)
    )
    (line,) = on_demand.left_out
    assert line.startswith("H100-SXM: gcp ")
    assert "spot" in line
