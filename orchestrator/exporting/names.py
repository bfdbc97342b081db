"""Names of GPUs and providers in the formats of task files."""

from dataclasses import dataclass

DSTACK_BACKENDS = {
    **{name: name for name in ("aws", "azure", "crusoe", "gcp", "lambda", "nebius", "oci")},
    **{name: name for name in ("cloudrift", "hotaisle", "runpod", "vastai", "verda", "vultr")},
    "datacrunch": "verda",
    "digitalocean": "digitalocean",
    "do": "digitalocean",
    "vast": "vastai",
}
"""Backends of dstack 0.22 by the catalog's names of providers."""

DSTACK_CLUSTERS = frozenset(("aws", "azure", "crusoe", "gcp", "nebius", "oci", "runpod", "vultr"))
"""Backends on which dstack starts a task on several nodes."""

DSTACK_GPUS = {
    "A10": ("A10", 24),
    "A100-40GB-PCIe": ("A100", 40),
    "A100-40GB-SXM": ("A100", 40),
    "A100-80GB-PCIe": ("A100", 80),
    "A100-80GB-SXM": ("A100", 80),
    "A10G": ("A10G", 24),
    "A40": ("A40", 48),
    "B200": ("B200", 180),
    "B300": ("B300", 270),
    "GB200": ("GB200", 186),
    "GB300": ("GB300", 270),
    "GH200-96GB": ("GH200", 96),
    "H100-NVL": ("H100NVL", 94),
    "H100-PCIe": ("H100", 80),
    "H100-SXM": ("H100", 80),
    "H200-NVL": ("H200NVL", 141),
    "H200-SXM": ("H200", 141),
    "L4": ("L4", 24),
    "L40": ("L40", 48),
    "L40S": ("L40S", 48),
    "RTX-3090": ("RTX3090", 24),
    "RTX-3090-Ti": ("RTX3090Ti", 24),
    "RTX-4000-Ada": ("RTX4000Ada", 20),
    "RTX-4070-Ti-SUPER": ("RTX4070TiSUPER", 16),
    "RTX-4080": ("RTX4080", 16),
    "RTX-4080-SUPER": ("RTX4080SUPER", 16),
    "RTX-4090": ("RTX4090", 24),
    "RTX-5070-Ti": ("RTX5070Ti", 16),
    "RTX-5080": ("RTX5080", 16),
    "RTX-5090": ("RTX5090", 32),
    "RTX-6000-Ada": ("RTX6000Ada", 48),
    "RTX-A4000": ("A4000", 16),
    "RTX-A4500": ("A4500", 20),
    "RTX-A5000": ("A5000", 24),
    "RTX-A6000": ("A6000", 48),
    "RTX-PRO-6000-Server": ("RTXPRO6000", 96),
    "RTX-PRO-6000-Workstation": ("RTXPRO6000", 96),
    "T4": ("T4", 16),
    "V100-16GB-SXM": ("V100", 16),
    "V100-32GB-SXM": ("V100", 32),
}
"""Names and gigabytes of GPUs in dstack, which are gpuhunt's; it does not tell PCIe from SXM."""

SLURM_GPUS = {
    "A100-40GB-PCIe": "a100",
    "A100-40GB-SXM": "a100",
    "A100-80GB-PCIe": "a100",
    "A100-80GB-SXM": "a100",
    "GH200-96GB": "gh200",
    "H100-NVL": "h100",
    "H100-PCIe": "h100",
    "H100-SXM": "h100",
    "H200-SXM": "h200",
    "RTX-3090": "rtx3090",
    "RTX-4090": "rtx4090",
    "RTX-5090": "rtx5090",
    "RTX-6000-Ada": "rtx6000ada",
    "RTX-A6000": "a6000",
    "V100-16GB-SXM": "v100",
    "V100-32GB-SXM": "v100",
}
"""Usual types of GPUs in Slurm, which each site names itself; others are the key in lower case."""


@dataclass(frozen=True, slots=True)
class Dstack:
    """Lists of a task of dstack.

    Attributes:
        counts: number of GPUs of an instance, or a range.
        max_price: dollars per hour of the most expensive offer.
    """

    backends: tuple[str, ...]
    regions: tuple[str, ...]
    gpus: tuple[str, ...]
    memory_gb: int
    counts: str
    spot_policy: str
    max_price: float
