"""What the images in deploy/ install, held against the package indexes: `make image-check`.

Nothing is built or installed. pip asks the index that it is configured with for the wheels of the
image's Python and C library, and downloads those whose metadata the index does not serve by itself.
apt is asked where this machine has the release of the image.
"""

import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from builders.clusters import DEPLOY, ROOT
from builders.dockerfiles import FILES, arguments, installed_by, of_kind

GLIBC_MINOR = {"bookworm": 36}
"""Second number of the C library's version, 2.36, in each release of Debian that an image has."""


def base_image(file: str) -> tuple[str, str]:
    """Python's minor version and Debian's release of an image."""
    (found, *_) = re.findall(r"python:(3\.\d+)\.\d+-slim-(\w+)", " ".join(of_kind(file, "FROM")))
    return found


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    """Run pip without its notes."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    """Why a command has failed."""
    errors = [line for line in ended.stderr.splitlines() if "ERROR" in line or line[:2] == "E:"]
    return (errors or ended.stderr.splitlines() or ["no reason given"])[-1]


def apt_mistakes(file: str) -> Iterator[str]:
    """Packages that the release of the image does not have; apt only simulates."""
    _, release = base_image(file)
    if platform.freedesktop_os_release().get("VERSION_CODENAME") != release:
        sys.stdout.write(f"{file}: apt's packages are not looked up: this is no {release}\n")
        return
    for names, _ in installed_by(file, "apt-get"):
        command = ["apt-get", "install", "--simulate", "--no-install-recommends", *names]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            yield f"{file}: apt-get install {' '.join(names)}: {last_line(ended)}"


def requirements(file: str) -> list[str]:
    """What pip installs from wheels, the project's own dependencies included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [name for names, _ in installed_by(file, "pip") for name in names]
    return [*(name for name in wanted if name != "."), *project["dependencies"]]


def resolved(file: str) -> tuple[list[dict[str, Any]], str | None]:
    """Metadata of all packages that pip would install, or the reason why it cannot."""
    python, release = base_image(file)
    tags = ["linux", "manylinux1", "manylinux2010", "manylinux2014"]
    tags += [f"manylinux_2_{minor}" for minor in range(5, GLIBC_MINOR[release] + 1)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        ended = pip(
            *("install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)),
            *("--target", folder, "--only-binary", ":all:", "--python-version", python),
            *(word for tag in tags for word in ("--platform", f"{tag}_x86_64")),
            *("--constraint", "constraints.txt", *requirements(file)),
        )
        if ended.returncode:
            return [], last_line(ended)
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [item["metadata"] for item in installed], None


def pip_mistakes(file: str) -> Iterator[str]:
    """What pip cannot resolve for the image's Python, and a toolkit that is not torch's CUDA."""
    packages, reason = resolved(file)
    if reason is not None:
        yield f"{file}: pip: {reason}"
        return
    sys.stdout.write(f"{file}: {len(packages)} packages resolve\n")
    toolkit = arguments(file).get("CUDA")
    if toolkit is None:
        return
    (torch,) = (package for package in packages if package["name"] == "torch")
    needed = " ".join(torch.get("requires_dist", []))
    cuda = re.search(r"cuda-toolkit(?:\[[^]]*\])?==(\d+\.\d+)", needed)
    if cuda is None:
        yield f"{file}: torch {torch['version']} of this index is no build with CUDA: ask another"
    elif cuda[1] != toolkit.rpartition(".")[0]:
        yield f"{file}: torch is built with CUDA {cuda[1]}, the toolkit is {toolkit}"
    else:
        sys.stdout.write(f"{file}: torch {torch['version']} is built with CUDA {cuda[1]}\n")


def kernel_mistakes() -> Iterator[str]:
    """Pinned kernels that the index does not have: their metadata needs a compiler."""
    for line in (DEPLOY / "kernels.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            ended = pip("index", "versions", name)
            if version not in re.split(r"[\s,]+", ended.stdout):
                yield f"kernels.txt: {line}: the index does not have it"


def main() -> int:
    """Print the mistakes; 1 if there are any."""
    mistakes = [*kernel_mistakes()]
    for file in FILES:
        mistakes += [*apt_mistakes(file), *pip_mistakes(file)]
    sys.stdout.write("\n".join([*mistakes, f"{len(mistakes)} mistakes"]) + "\n")
    return int(bool(mistakes))


if __name__ == "__main__":
    sys.exit(main())
