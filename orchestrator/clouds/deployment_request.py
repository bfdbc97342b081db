"""Request for a cluster file: provider, region, market and nodes."""

from dataclasses import dataclass

CLOUDS = ("aws", "gcp", "azure")
PROVIDERS = (*CLOUDS, "skypilot", "local", "kuberay")
METADATA = "http://169.254.169.254"
"""Address of the metadata service of all three clouds, reached from their own machines alone."""


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
    """

    provider: str
    region: str | None = None
    spot: bool | None = None
    nodes_each: int = 1
    hosts: tuple[str, ...] = ()
    job: bool = False
    cache_claim: str | None = None

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
        )
