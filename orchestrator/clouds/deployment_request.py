"""Request for a cluster file: provider, region, market and nodes."""

import re
from dataclasses import dataclass

from gpu_catalog.errors import UserError

CLOUDS = ("aws", "gcp", "azure")
PROVIDERS = (*CLOUDS, "skypilot", "local", "kuberay")
METADATA = "http://169.254.169.254"
"""Address of the metadata service of all three clouds, reached from their own machines alone."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")


class DeployError(UserError):
    """The requested cluster file cannot be made; one line for each reason."""


@dataclass(frozen=True, slots=True)
class DeploymentRequest:
    """Options of ``deploy``.

    Attributes:
        provider: one of ``PROVIDERS``.
        region: region of the provider; None for the one with the best prices.
        spot: True for spot instances only, False for on-demand only, None for spot first.
        nodes_each: most nodes of each GPU at once.
        hosts: addresses for ``local``, the head's first.
        job: for KubeRay, whether to make a job that starts its own cluster.
        cache_claim: for KubeRay, name of the PersistentVolumeClaim in which all pods keep weights;
            None for a disk of each pod's own.
        providers: for SkyPilot, providers of its offers; empty for any.
    """

    provider: str
    region: str | None = None
    spot: bool | None = None
    nodes_each: int = 1
    hosts: tuple[str, ...] = ()
    job: bool = False
    cache_claim: str | None = None
    providers: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """These options as words of the command line."""
        spot = {None: "", True: " --spot", False: " --no-spot"}[self.spot]
        return (
            f"--provider {self.provider}"
            + (f" --region {self.region}" if self.region else "")
            + (f" --max-workers {self.nodes_each}" if self.nodes_each != 1 else "")
            + spot
            + (f" --hosts {','.join(self.hosts)}" if self.hosts else "")
            + (" --job" if self.job else "")
            + (f" --cache-claim {self.cache_claim}" if self.cache_claim else "")
            + (f" --providers {','.join(self.providers)}" if self.providers else "")
        )

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            DeployError: they do, or a name is none.
        """
        provider, names = self.provider, [*self.hosts, *filter(None, [self.region])]
        is_cloud = provider in CLOUDS
        unusable = next((name for name in names if not NAME.fullmatch(name)), None)
        if self.hosts and provider != "local":
            raise DeployError("--hosts needs --provider local")
        if self.job and provider != "kuberay":
            raise DeployError("--job needs --provider kuberay")
        if self.cache_claim is not None:
            if provider != "kuberay":
                raise DeployError("--cache-claim needs --provider kuberay")
            if not CLAIM.fullmatch(self.cache_claim):
                text = "is no name of a claim: use small letters, digits, . and -"
                raise DeployError(f"--cache-claim: {self.cache_claim!r} {text}")
        if self.providers and provider != "skypilot":
            raise DeployError("--providers needs --provider skypilot")
        rents_spot = is_cloud or provider == "skypilot"
        if (self.region and not is_cloud) or (self.spot is not None and not rents_spot):
            raise DeployError(
                f"--region, --spot and --no-spot need a cloud, not --provider {provider}"
            )
        if len(self.hosts) == 1:
            raise DeployError("--hosts: one host: give HEAD,HOST,…, the head and at least one more")
        if unusable is not None:
            text = "is neither a host nor a region: use letters, digits, . and -"
            raise DeployError(f"{unusable!r} {text}")
