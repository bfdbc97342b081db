"""Cluster files for trials that train on several GPUs together."""

import re
from pathlib import Path
from typing import Any

import pytest
from builders.clusters import CATALOG, ray_config, yaml_documents
from test_clouds_node_types import launched

from orchestrator.cli.main import main
from orchestrator.clouds.deployment import DeployedSweep, DeployError, Deployment, deployment
from orchestrator.clouds.deployment_request import DeploymentRequest
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import make_plan
from orchestrator.spec.spec_file import parse_spec
from orchestrator.spec.sweep_spec import SweepSpec

TOGETHER = "[{gpus: 4, strategy: fsdp2}]"


def gangs_on(
    *gpus: str, parallel: str = TOGETHER, alone: bool = True, model: str = "llama-tiny"
) -> tuple[SweepSpec, str]:
    """A specification with a layout of several GPUs, beside cells of one, and its text."""
    cell = f"  - {{models: [{model}], recipes: [{{method: full, precision: bf16}}], seq_lens: [32]"
    text = (
        f"name: gangs\ngpus: [{', '.join(gpus)}]\ncells:\n{cell}, parallel: {parallel}}}\n"
        f"{f'{cell}}}' if alone else ''}\nworkload: {{examples: 100, epochs: 1}}\n"
    )
    return parse_spec(text, "gangs.yaml"), text


def deployed(spec: tuple[SweepSpec, str], provider: str, **options: Any) -> Deployment:
    """Its cluster file with the shipped prices."""
    sweep = DeployedSweep(*spec, "gangs.yaml", spec[0].merged_catalog())
    return deployment(DeploymentRequest(provider, **options), sweep)


def trial(key: str, gpus: int) -> dict[str, float]:
    """Request of a trial on so many GPUs of a node."""
    return {"CPU": 1.0, "GPU": float(gpus), key: float(gpus)}


@pytest.mark.parametrize(
    ("provider", "instances"),
    [
        ("aws", {"l4": "g6.xlarge", "4xl4": "g6.12xlarge", "4xh100-sxm": "p5.48xlarge"}),
        ("gcp", {"l4": "g2-standard-4", "4xl4": "g2-standard-48", "4xh100-sxm": "a3-highgpu-4g"}),
    ],
)
def test_a_trial_gets_the_smallest_instance_with_all_its_gpus(
    provider: str, instances: dict[str, str]
) -> None:
    """Ray's own scheduler starts one for each number of GPUs; the head says which it can start."""
    text = deployed(gangs_on("L4", "H100-SXM"), provider).text
    types = ray_config(text)["available_node_types"]
    named = {
        name.removesuffix("-spot"): node["node_config"].get("InstanceType")
        or node["node_config"].get("machineType")
        for name, node in types.items()
        if name.endswith("-spot")
    }
    assert named.items() >= instances.items()
    assert launched(text, [trial("L4", 1), trial("L4", 4)], ()) == ["4xl4-spot", "l4-spot"]
    assert launched(text, [trial("H100-SXM", 4)], ()) == ["4xh100-sxm-spot"]
    in_each = 8 if provider == "aws" else 4
    resources = types["4xh100-sxm-spot"]["resources"]
    assert (resources["GPU"], resources["H100-SXM"]) == (in_each, in_each)
    head = types["head"]["resources"]
    assert {name for name in head if name.startswith("scales-to-")} == {
        f"scales-to-{devices}" for devices in ("4xL4", "4xH100-SXM", "L4", "H100-SXM")
    }
    # So a sweep on it plans its trials before any node is there, and Ray starts their nodes.
    spec, _ = gangs_on("L4", "H100-SXM")
    cluster = ClusterResources((Node(head, None, "head"),))
    plan = make_plan(spec, spec.merged_catalog(), cluster, [])
    assert {cell.devices for cell in plan.pending} == {"4xL4", "4xH100-SXM", "L4", "H100-SXM"}
    request = cluster.trial_resources(CATALOG.gpu("H100-SXM"), 4)
    assert request == trial("H100-SXM", 4)
    assert cluster.at_a_time(CATALOG.gpu("H100-SXM"), 4) == 1
    other = make_plan(gangs_on("L4", parallel=TOGETHER.replace("4", "2"))[0], CATALOG, cluster, [])
    assert [skip.cell.devices for skip in other.skipped] == ["2xL4"]


def test_whole_instances_are_priced() -> None:
    """Four of eight GPUs cost the instance; a GPU that no instance has four of is named."""
    made = deployed(gangs_on("H100-SXM", "A100-80GB-SXM", "RTX-4090", alone=False), "aws")
    lines = "\n".join(made.bill)
    for market, usd in (("spot", "9.372"), ("on-demand", "55.04")):
        assert re.search(rf"4xH100-SXM: p5.48xlarge {market} (price unknown|{usd} )", lines)
    (left_out,) = made.left_out
    assert left_out.startswith("4xRTX-4090: aws does not offer it")


def test_a_layout_that_no_cluster_measures_is_named() -> None:
    """Others of the sweep are deployed; without any, there is no file."""
    adapters = "parallel: [{gpus: 8, strategy: fsdp2}, {gpus: 2, strategy: ddp}]"
    made = deployed(qlora_on("L4", adapters), "gcp")
    (left_out,) = made.left_out
    assert left_out.startswith("8xL4 fsdp2: method qlora is not measured with fsdp2")
    types = ray_config(made.text)["available_node_types"]
    assert types.keys() == {"head", "2xl4-spot", "2xl4-on-demand"}
    with pytest.raises(DeployError, match=r"^8xL4 fsdp2: method qlora is not measured with fsdp2"):
        deployed(qlora_on("L4", "parallel: [{gpus: 8, strategy: fsdp2}]"), "gcp")


def qlora_on(gpu: str, parallel: str) -> tuple[SweepSpec, str]:
    """A specification with layouts of several GPUs that train adapters, and its text."""
    text = gangs_on(gpu, alone=False)[1].replace("method: full", "method: qlora, lora_rank: 16")
    text = text.replace(f"parallel: {TOGETHER}", parallel)
    return parse_spec(text, "gangs.yaml"), text


def test_a_trial_on_several_nodes_has_them_at_once() -> None:
    """The autoscaler may start two, which one placement group makes it do, and both are paid."""
    spec, text = gangs_on("L4", parallel="[{gpus: 8, nodes: 2, strategy: fsdp2}]", alone=False)
    made = deployed((spec, text), "aws")
    types = ray_config(made.text)["available_node_types"]
    assert types["4xl4-spot"]["max_workers"] == 2
    head = types["head"]["resources"]
    assert head["scales-to-4xL4"] == 2
    cluster = ClusterResources((Node(head, None, "head"),))
    (cell,) = make_plan(spec, spec.merged_catalog(), cluster, []).pending
    assert cell.devices == "2x4xL4"
    assert cluster.at_a_time(CATALOG.gpu("L4"), 4, 2) == 1
    assert launched(made.text, [trial("L4", 4)], (), nodes=2) == ["4xl4-spot"] * 2
    both = ((spec, text), gangs_on("L4", alone=False))
    bills = "\n".join(deployed(one, "local", hosts=("a", "b", "c")).bill[-1] for one in both)
    dollars = [float(usd) for usd in re.findall(r"about \$([0-9.]+)", bills)]
    assert dollars[0] == pytest.approx(2 * dollars[1], abs=0.02)


def test_pods_and_tasks_have_all_the_gpus() -> None:
    """KubeRay's group and SkyPilot's task; a host's join-check counts its own."""
    documents = yaml_documents(deployed(gangs_on("L4"), "kuberay").text)
    (cluster,) = (d for d in documents if d["kind"] == "RayCluster")
    groups = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    together = groups["4xl4"]
    assert (together["resources"]["GPU"], together["resources"]["L4"]) == ("4", "4")
    (container,) = together["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert groups["l4"]["resources"]["L4"] == "1"
    tasks = yaml_documents(deployed(gangs_on("H100-SXM"), "skypilot").text)
    of_four = next(task for task in tasks if task["name"] == "finetune-cost-4xh100-sxm")
    names = {place["instance_type"] for place in of_four["resources"]["ordered"]}
    large = {o.instance for o in CATALOG.offers("H100-SXM") if o.gpus_per_instance >= 4}
    assert names
    assert names <= large
    hosts = deployed(gangs_on("L4"), "local", hosts=("10.0.0.1", "10.0.0.2")).text
    assert "join-check --head $RAY_HEAD_IP L4)" in hosts


def test_plan_prices_the_nodes_that_ranks_would_need(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for single GPUs, where no cluster is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    _, text = gangs_on("H100-SXM")
    (tmp_path / "gangs.yaml").write_text(text, encoding="utf-8")
    assert main(["plan", "gangs.yaml", "--providers", "aws", "--prices", "shipped"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| 4xH100-SXM \| 1 +\| 1 to be started \| 1 .*\| 9\.37 ", shown)
    assert re.search(r"\| H100-SXM +\| 1 +\| 1 to be started \| 1 ", shown)


def test_hosts_have_the_memory_that_ranks_take() -> None:
    """Eight times 70.6 billion weights in bf16, unless ranks draw them in slices, and offloads."""

    def of_70b(gpu: str, strategy: str, more: str = "") -> tuple[SweepSpec, str]:
        parallel = f"[{{gpus: 8, strategy: {strategy}}}]{more}"
        _, text = gangs_on(gpu, parallel=parallel, alone=False, model="llama-3.1-70b")
        return parse_spec(text, "gangs.yaml"), text

    def more_gib(strategy: str, more: str = "") -> int:
        file = deployed(of_70b("A100-80GB-SXM", strategy, more), "kuberay").text
        (group,) = yaml_documents(file)[-1]["spec"]["workerGroupSpecs"]
        (container,) = group["template"]["spec"]["containers"]
        return int(container["resources"]["limits"]["memory"].removesuffix("Gi")) - 8 * 28

    assert [more_gib("ddp"), more_gib("fsdp2"), more_gib("hsdp, replicas: 2")] == [0, 0, 0]
    assert more_gib("deepspeed-zero3") == 1052
    assert more_gib("fsdp2", ", weights: pretrained") == 1052
    assert more_gib("fsdp2, offload: all") == 526  # 8 bytes of each
    with pytest.raises(DeployError, match="8xL4: excluded: its ranks take 1051 GiB of host memory"):
        deployed(of_70b("L4", "deepspeed-zero3"), "aws")
    _, text = of_70b("H100-SXM", "fsdp2", ", weights: pretrained")
    text = text.replace("precision: bf16", "precision: fp32")
    in_fp32 = parse_spec(text, "gangs.yaml"), text
    with pytest.raises(DeployError, match=r"take 2103 GiB .* that SkyPilot can rent"):
        deployed(in_fp32, "skypilot", providers=("lambda",))
    with pytest.raises(DeployError, match="that SkyPilot can rent, by cudo"):
        deployed(of_70b("L4", "deepspeed-zero3"), "skypilot", providers=("cudo",))
    assert "8xH100-SXM" in deployed(of_70b("H100-SXM", "deepspeed-zero3"), "aws").text
