"""Offers of a specification's own catalog, as YAML."""

import json

PRICE = "{{gpu: {gpu}, provider: {provider}, region: {region}, instance: {instance}, "
PRICE += "usd_per_hour: {usd}, market: {market}, source: me, recorded: 2026-01-31}}"


def offer(
    usd: float,
    *,
    gpu: str = "cpu",
    provider: str = "own",
    instance: str = "desk",
    region: str = "here",
    market: str = "on-demand",
) -> str:
    """A row of the specification's catalog."""
    quoted = {
        name: json.dumps(value)
        for name, value in (("provider", provider), ("instance", instance), ("region", region))
    }
    return f"    - {PRICE.format(gpu=json.dumps(gpu), usd=usd, market=market, **quoted)}\n"
