"""A cluster to deploy: provider, nodes and the clouds that are supported."""

from dataclasses import dataclass

CLOUDS = ("aws", "gcp", "azure")
PROVIDERS = (*CLOUDS, "local", "kuberay")


@dataclass(frozen=True, slots=True)
class DeploymentRequest:
    """What the options of ``deploy`` say.

    Attributes:
        provider: one of ``PROVIDERS``.
        region: of the provider; absent for the one with the best prices.
        spot: spot instances alone, or none; absent for spot first.
        nodes_each: most nodes for a GPU at once.
        hosts: of ``local``, the head's first.
        job: of KubeRay, whether to make a job that brings its own cluster.
    """

    provider: str
    region: str | None = None
    spot: bool | None = None
    nodes_each: int = 1
    hosts: tuple[str, ...] = ()
    job: bool = False

    @property
    def words(self) -> str:
        """These options, as they are given."""
        spot = {None: "", True: " --spot", False: " --no-spot"}[self.spot]
        return (
            f"--provider {self.provider}"
            + (f" --region {self.region}" if self.region else "")
            + (f" --max-workers {self.nodes_each}" if self.nodes_each != 1 else "")
            + spot
            + (f" --hosts {','.join(self.hosts)}" if self.hosts else "")
            + (" --job" if self.job else "")
        )
