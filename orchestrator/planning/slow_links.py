"""Links between GPUs that are far slower than links of their kind. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpu_catalog.catalog import Catalog
from gpu_catalog.links.within_nodes import CollectiveName, link_speed
from trials.recipes.parallel import link_within
from trials.records.profile import LinkTimes

SLOW = 2.0  # ratio to the time of the same collective over such a link where it was measured


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A slow link of a node.

    Attributes:
        link: interconnect of its GPUs by the layout or the catalog.
        collective: collective that takes the longest.
        times: ratio of its time to that of the catalog's link.
    """

    host: str
    node_id: str | None
    gpu: str
    gpus: int
    link: str
    collective: CollectiveName
    times: float

    @property
    def text(self) -> str:
        """A line on the link, its slowness and the remedy."""
        node = f" ({self.node_id[:8]})" if self.node_id else ""
        return (
            f"{self.host}{node}: {self.collective} on {self.gpus} {self.gpu} takes "
            f"{self.times:.1f} times as long as by {self.link}, which the catalog has for them. "
            "Check the link (nvidia-smi topo -m, nvidia-smi nvlink --status), or correct the "
            "interconnect in a catalog file"
        )


def slow_links(links: Iterable[LinkTimes], catalog: Catalog) -> list[SlowLink]:
    """Find links over which the largest buffer of a collective takes several times as long."""
    slow: dict[tuple[str, int], SlowLink] = {}
    for link in links:
        # Links between nodes are the network's.
        if not link.times or link.environment is None or link.cell.nodes > 1:
            continue
        gpu, gpus = catalog.gpu(link.cell.device), link.cell.ranks
        interconnect = link_within(gpu, link.cell.parallel)
        if interconnect in (None, "none"):
            continue
        largest = {one.collective: one for one in sorted(link.times, key=lambda t: t.buffer_bytes)}
        ratios = {
            name: one.seconds
            / link_speed(interconnect, gpus, name).seconds(name, gpus, one.buffer_bytes)
            for name, one in largest.items()
        }
        worst = max(ratios, key=ratios.__getitem__)
        if ratios[worst] >= SLOW:
            host, node_id = link.environment.host, link.environment.node_id
            slow[node_id or host, gpus] = SlowLink(
                host, node_id, gpu.key, gpus, interconnect, worst, ratios[worst]
            )
    return list(slow.values())
