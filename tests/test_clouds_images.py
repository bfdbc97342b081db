"""Images in deploy/: every step names what there is. `make image-check` asks the indexes, too."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch

import pytest
from builders.clusters import CATALOG, ROOT, SHIPPED, deployment_on, shipped
from builders.dockerfiles import FILES, arguments, filled, installed_by, instructions, of_kind

from orchestrator.clouds.cuda_support import PINNED_CUDA, least_driver, too_old
from orchestrator.clouds.deployment import DeployError
from orchestrator.clouds.deployment_request import DeploymentRequest


def sources(file: str) -> list[str]:
    """Files and folders of the project that an image copies."""
    copies = [rest.split() for rest in of_kind(file, "COPY") if not rest.startswith("--from")]
    return [source for words in copies for source in words[:-1]]


def tracked() -> list[str]:
    """Files of the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    return listed.stdout.decode().splitlines()


def is_sent(path: str) -> bool:
    """Whether a builder sees a file: of the patterns that match it or a folder of it, the last."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    above = [path[: match.end() - 1] for match in re.finditer("/", path)] + [path]
    sent = True
    for line in lines:
        pattern = line.removeprefix("!")
        if any(matches(part, pattern) for part in above):
            sent = line.startswith("!")
    return sent


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern of .dockerignore matches a path; ``**`` stands for any folders."""
    if pattern.startswith("**/"):
        return fnmatch(path.rpartition("/")[2], pattern.removeprefix("**/"))
    return path.count("/") == pattern.count("/") and fnmatch(path, pattern)


@pytest.mark.parametrize("file", FILES)
def test_an_image_copies_files_of_the_repository_that_the_builder_sees(file: str) -> None:
    """Every one, and all that is below a folder; the rest of the folder is not sent."""
    files = tracked()
    for source in sources(file):
        below = [path for path in files if path == source or path.startswith(f"{source}/")]
        assert below, source
        assert [path for path in below if not is_sent(path)] == []
    others = [".git/config", ".venv/bin/python", "runs/x/sweep.yaml", "tests/conftest.py"]
    assert not any(is_sent(path) for path in [*others, "trials/__pycache__/trial.pyc"])


def test_an_image_copies_every_package_that_it_installs() -> None:
    """A package that setuptools looks for and an image lacks would be missing without a word."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {p.rstrip("*") for p in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    for file in FILES:
        assert packages <= {*sources(file)}


@pytest.mark.parametrize("file", FILES)
def test_every_stage_begins_with_one_above_it_or_with_a_pinned_image(file: str) -> None:
    """For each value of KERNELS; what is copied from a stage is copied from one of the file."""
    values = arguments(file)
    for kernels in ("with", "without"):
        stages = set[str]()
        for name, rest in instructions(file):
            if name == "FROM":
                image, _, stage = filled(rest, values | {"KERNELS": kernels}).partition(" AS ")
                assert image in stages or re.fullmatch(
                    r"[a-z0-9/]+:[a-z0-9.-]*\d[a-z0-9.-]*", image
                )
                stages.add(stage)
            elif rest.startswith("--from="):
                assert rest.partition(" ")[0].removeprefix("--from=") in stages
    python = [rest for rest in of_kind(file, "FROM") if rest.startswith("python:")]
    (version,) = re.findall(r"python:(3\.\d+)\.", " ".join(python))
    assert f'requires-python = ">={version}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("file", FILES)
def test_the_user_of_an_image_is_the_one_that_kubernetes_runs(file: str) -> None:
    """Ray's launcher takes root, so neither a USER nor an ENTRYPOINT stands in its way."""
    names = [name for name, _ in instructions(file)]
    assert not {"USER", "ENTRYPOINT"} & {*names}
    (user,) = re.findall(r"useradd .*--uid (\d+)", shipped(file))
    for manifest in ("kuberay-cluster.yaml", "kuberay-job.yaml"):
        assert {*re.findall(r"runAsUser: (\d+)", shipped(manifest))} == {user}


@pytest.mark.parametrize("file", FILES)
def test_an_image_has_the_pinned_versions(file: str) -> None:
    """Everything is installed under the constraints, with the versions that they name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines)
    named = 0
    for requirements, options in installed_by(file, "pip"):
        assert options["--constraint"] == "constraints.txt"
        for requirement in requirements:
            if requirement != ".":
                name, _, version = requirement.partition("==")
                assert pins[name.partition("[")[0]] == version
                named += 1
    assert named >= 3
    kernels = [line for line in shipped("kernels.txt").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+", line) for line in kernels)


def test_the_toolkit_and_the_drivers_are_those_of_the_pinned_torch() -> None:
    """Kernels compile with its CUDA; a machine image that names its driver has one that runs it."""
    assert arguments("Dockerfile.cuda")["CUDA"].rpartition(".")[0] == PINNED_CUDA
    least = least_driver(PINNED_CUDA)
    assert least is not None
    drivers = re.findall(r"-nvidia-(\d+)\n", "".join(shipped(file) for file in SHIPPED))
    assert drivers
    assert all(int(driver) >= least for driver in drivers)
    assert f"driver {least} or newer" in shipped("README.md")


@pytest.mark.parametrize("provider", ["aws", "skypilot", "local", "kuberay"])
def test_a_gpu_that_the_pinned_torch_does_not_run_on_is_left_out(provider: str) -> None:
    """A V100's node would be refused by its own check, again and again."""
    request = DeploymentRequest(provider)
    made = deployment_on("V100-16GB-SXM", "L4", request=request)
    (line,) = made.left_out
    assert line.startswith(
        f"V100-16GB-SXM: excluded: the pinned PyTorch is built with CUDA {PINNED_CUDA}"
    )
    # A task of SkyPilot's has the specification as it was written.
    assert not re.search("^(?!#| *SPEC: ).*V100", made.text, flags=re.MULTILINE)
    with pytest.raises(DeployError, match=r"^V100-16GB-SXM: excluded"):
        deployment_on("V100-16GB-SXM", request=request)


def test_cuda_12_runs_on_gpus_of_before() -> None:
    """For those who install another PyTorch."""
    assert too_old(CATALOG.gpu("V100-16GB-SXM"), "12.8") is None
    assert too_old(CATALOG.gpu("T4")) is None
    assert least_driver("11.8") is None
