"""Cluster files have the keys of their templates alone, whatever the names in prices and sweeps."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.clusters import CATALOG, spec_on, yaml_documents
from builders.hostile_texts import INJECTIONS, MADE, keys, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_catalog.catalog import Catalog
from orchestrator.cli.main import main
from orchestrator.clouds.cluster_file import (
    Weights,
    cloud_file,
    kuberay_file,
    local_file,
    skypilot_file,
)
from orchestrator.clouds.deployment import DeployedSweep, deployment
from orchestrator.clouds.deployment_request import CLOUDS, PROVIDERS, DeploymentRequest
from orchestrator.clouds.node_types import ChosenNodes, CloudInstance, Devices, NodeType
from orchestrator.clouds.skypilot import Place
from orchestrator.spec.spec_file import parse_spec

BENIGN = "benign"
L4 = Devices("L4")
WEIGHTS = Weights(pretrained=True, gib=5)
OFFER = CATALOG.offers("L4")[0]
SWEEP = spec_on("L4", "A40", "A100-80GB-PCIe", "H100-SXM")
KEYS_OF_GPUS = ("L4", "4090", "1e5", "0x1F", "on", "null", "1.5", "y")
AS_TEXT = st.fixed_dictionaries({name: texts() for name in ("a", "b", "c", "d")})


def one_file(provider: str, gpu: str, *, a: str, b: str, c: str, d: str) -> str:
    """A file with a text in each place that a template has for one, but for its header."""
    devices = Devices(gpu)
    if provider in CLOUDS:
        instance = CloudInstance(a, gpu, 1, 4, ("spot",))
        node = NodeType(devices, "cuda", instance, "spot", None)
        return cloud_file(provider, ChosenNodes(b, (node,), ()), 1, "#", WEIGHTS)
    described = CATALOG.gpu("L4").model_copy(update={"key": gpu, "device_names": (a, b)})
    if provider == "local":
        return local_file([gpu, "L4"], [a, b, c], "#", WEIGHTS)
    if provider == "kuberay":
        request = DeploymentRequest("kuberay", cache_claim=c or BENIGN)
        return kuberay_file([(devices, described)], request, "#", WEIGHTS, (a, d))
    offer = OFFER.model_copy(update={"provider": a, "region": b, "instance": c})
    return skypilot_file([(devices, described, [Place(a, b, offer)])], 1, "#", (c, d), WEIGHTS)


@pytest.mark.parametrize("gpu", KEYS_OF_GPUS)
@pytest.mark.parametrize("provider", PROVIDERS)
@settings(max_examples=20)
@given(given_texts=AS_TEXT)
def test_a_text_adds_no_key(provider: str, gpu: str, given_texts: dict[str, str]) -> None:
    """The keys of a file are those with ordinary names; so is the number of its documents."""
    hostile = one_file(provider, gpu, **given_texts)
    assert keys(yaml_documents(hostile)) == plain_keys(provider, gpu)


@cache
def plain_keys(provider: str, gpu: str) -> list[Any]:
    """Keys of a file with ordinary names, read once for all examples."""
    return keys(yaml_documents(one_file(provider, gpu, **dict.fromkeys("abcd", BENIGN))))


@pytest.mark.parametrize("text", INJECTIONS)
def test_a_text_is_read_as_it_is(text: str) -> None:
    """By each provider's reader: regions, instances, hosts and specifications."""
    values = {"a": text, "b": text, "c": text, "d": text}
    (aws,) = yaml_documents(one_file("aws", "L4", **values))
    worker = aws["available_node_types"]["l4-spot"]
    assert aws["provider"]["region"] == worker["labels"]["finetune-cost/region"] == text
    assert worker["node_config"]["InstanceType"] == text
    (gcp,) = yaml_documents(one_file("gcp", "L4", **values))
    assert gcp["provider"]["availability_zone"] == f"{text}-a"
    (local,) = yaml_documents(one_file("local", "L4", **values))
    assert [local["provider"]["head_ip"], *local["provider"]["worker_ips"]] == [text] * 3
    _, _, spec, job = yaml_documents(one_file("kuberay", "L4", **values))
    assert spec["data"]["sweep.yaml"] == text.rstrip("\n") + "\n"
    assert job["spec"]["entrypoint"].count("\n") == 0
    (task,) = yaml_documents(one_file("skypilot", "L4", **values))
    assert task["envs"]["SPEC"] == text
    assert task["resources"]["ordered"][0]["instance_type"] == text


@pytest.mark.parametrize("gpu", KEYS_OF_GPUS)
def test_a_key_of_a_gpu_is_text(gpu: str) -> None:
    """Also where it looks like a number."""
    (config,) = yaml_documents(one_file("aws", gpu, **dict.fromkeys("abcd", BENIGN)))
    (worker,) = (node for name, node in config["available_node_types"].items() if name != "head")
    assert worker["resources"] == {"CPU": 4, "GPU": 1, gpu: 1}


@pytest.mark.parametrize("field", ["provider", "region", "instance", "note", "source"])
@pytest.mark.parametrize("provider", PROVIDERS)
@settings(max_examples=20)
@given(text=texts())
def test_an_offer_adds_no_key(provider: str, field: str, text: str) -> None:
    """Nor to the comment, which has the cheapest offers; its table is not asked to refuse it."""
    assert keys_with(provider, field, text) == keys_with_ordinary(provider, field)


def keys_with(provider: str, field: str, value: str) -> list[Any]:
    """Keys of a deployment where the cheapest offer has this value."""
    cheap = {"usd_per_hour": 1e-6, "provider": {"local": "x"}.get(provider, "aws")}
    offer = OFFER.model_copy(update=cheap | {"instance": "g6.xlarge", field: value})
    catalog = Catalog(CATALOG.gpus, [*CATALOG.all_offers, offer])
    sweep = DeployedSweep(*SWEEP, value, catalog)
    documents = yaml_documents(deployment(DeploymentRequest(provider), sweep).text)
    for document in documents if provider == "skypilot" else ():
        # One that SkyPilot cannot name makes room for another.
        if "resources" in document:
            del document["resources"]["ordered"][1:]
    return keys(documents)


@cache
def keys_with_ordinary(provider: str, field: str) -> list[Any]:
    """Those with an ordinary name, made once for all examples."""
    return keys_with(provider, field, BENIGN)


@pytest.mark.parametrize("first", ["  # a comment", "", " ", "# a comment", "---"])
def test_a_job_on_kubernetes_has_the_specification_as_it_is(first: str) -> None:
    """Whatever its first line; an indented comment would count as the block's indentation."""
    _, text = spec_on("L4")
    text = f"{first}\n{text}"
    sweep = DeployedSweep(parse_spec(text, "x"), text, "x", CATALOG)
    made = deployment(DeploymentRequest("kuberay", job=True), sweep).text
    _, _, spec, _ = yaml_documents(made)
    assert spec["data"]["sweep.yaml"] == text


HOSTILE_REGION = f"us-east-1\\ndocker: {{image: evil/x, container_name: x}}\\n{MADE}: |1"
ROWS = {
    "p.csv": "gpu,provider,instance,region,usd_per_hour\n"
    f'L4,aws,g6.xlarge,"{HOSTILE_REGION}",0.01\n'.replace("\\n", "\n"),
    "p.yaml": "- {gpu: L4, provider: aws, instance: g6.xlarge, usd_per_hour: 0.01,\n"
    f'   region: "{HOSTILE_REGION}"}}\n',
}


@pytest.mark.parametrize("field", ["provider", "region", "instance"])
@pytest.mark.parametrize("table", ROWS)
def test_a_table_with_such_a_name_is_refused_in_a_line(
    table: str,
    field: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With its file, its row and its text."""
    monkeypatch.chdir(tmp_path)
    content = ROWS[table]
    if field != "region":
        ordinary = "us-east-1" if table == "p.csv" else '"us-east-1"'
        hostile = {"provider": "aws", "instance": "g6.xlarge"}[field]
        quoted = HOSTILE_REGION.replace("\\n", "\n") if table == "p.csv" else HOSTILE_REGION
        content = content.replace(f'"{quoted}"', ordinary).replace(hostile, f'"{quoted}"', 1)
    Path("small.yaml").write_text(spec_on("L4")[1], encoding="utf-8")
    Path(table).write_text(content, encoding="utf-8")
    options = ["deploy", "small.yaml", "--provider", "aws", "--prices", table]
    assert main([*options, "--out", "cluster.yaml"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{table}:")
    assert f"{field}: must be letters, digits, spaces or " in line
    assert "us-east-1\\ndocker: " in line
    assert not Path("cluster.yaml").exists()


@pytest.mark.parametrize("region", ["all listed regions", "own", "US East (N. Virginia)"])
def test_prices_of_no_single_region_choose_none(region: str) -> None:
    """The nodes start where they would without that price."""
    offer = OFFER.model_copy(
        update={"provider": "aws", "instance": "g6.xlarge", "region": region, "usd_per_hour": 1e-6}
    )
    spec, text = spec_on("L4")
    sweep = DeployedSweep(spec, text, "x", Catalog(CATALOG.gpus, [*CATALOG.all_offers, offer]))
    plain = deployment(DeploymentRequest("aws"), replace(sweep, catalog=CATALOG)).text
    made = yaml.safe_load(deployment(DeploymentRequest("aws"), sweep).text)
    assert made["provider"]["region"] == yaml.safe_load(plain)["provider"]["region"]
