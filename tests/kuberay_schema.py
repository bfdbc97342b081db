"""The manifests for KubeRay against its own schemas: `make kuberay-check FOLDER=`.

FOLDER is ``helm-chart/kuberay-operator/crds`` of a release of KubeRay. A field that a schema does
not have is a mistake here, where Kubernetes would drop it without a word.
"""

import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from builders.clusters import deployment_of_weights, shipped, yaml_documents

from orchestrator.clouds.deployment_request import DeploymentRequest

SCHEMAS = {"RayCluster": "ray.io_rayclusters.yaml", "RayJob": "ray.io_rayjobs.yaml"}
FILES = ("kuberay-cluster.yaml", "kuberay-job.yaml")


def schema_of(path: Path) -> dict[str, Any]:
    """JSON schema of version 1 of a resource."""
    definition = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    (version,) = (one for one in definition["spec"]["versions"] if one["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    close(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def close(schema: Any) -> None:
    """Refuse fields that a schema does not have, and write Kubernetes' own types as JSON's."""
    if isinstance(schema, list):
        for one in schema:
            close(one)
    if not isinstance(schema, dict):
        return
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        for name in ("anyOf", "pattern"):
            schema.pop(name, None)
        schema["type"] = ["integer", "string"]
    for one in schema.values():
        close(one)


def main(folder: Path) -> int:
    """Print the mistakes; 1 if there are any."""
    mistakes = []
    texts = {file: shipped(file) for file in FILES}
    for claim in (None, "weights"):
        request = DeploymentRequest("kuberay", cache_claim=claim)
        texts[f"deploy {request.words}"] = deployment_of_weights(request, "llama-3.1-70b").text
    for file, text in texts.items():
        for document in yaml_documents(text):
            if name := SCHEMAS.get(document["kind"]):
                checked = jsonschema.Draft7Validator(schema_of(folder / name))
                for error in checked.iter_errors(document):
                    place = "/".join(map(str, error.path))
                    mistakes.append(f"{file}: {place}: {error.message}")
    sys.stdout.write("\n".join([*mistakes, f"{len(mistakes)} mistakes"]) + "\n")
    return int(bool(mistakes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
