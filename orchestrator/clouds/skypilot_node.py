"""Ray labels of a node that SkyPilot rented, by which its sweep is priced.

SkyPilot names a task's cloud and region in a variable, but not which of its offers was rented.
The task of ``deploy`` runs this module, with its offers in ``OFFERS``.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence

from pydantic import TypeAdapter

from gpu_catalog.record import Record
from orchestrator.clouds.node_types import named_region
from orchestrator.clouds.skypilot import Place
from orchestrator.planning.node_pricing import NodeRental

LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


class TaskOffer(Record):
    """An offer of a task.

    Attributes:
        infra: cloud in SkyPilot's words, and region where it is a single one.
        rental: the same offer in the words of price tables.
    """

    infra: str
    rental: NodeRental


OFFERS = TypeAdapter(tuple[TaskOffer, ...])


def offers_text(places: Sequence[Place]) -> str:
    """Offers of a task as JSON, for its variable ``OFFERS``."""
    offers = tuple(
        TaskOffer(
            infra=place.infra,
            rental=NodeRental(
                provider=place.offer.provider,
                instance=place.offer.instance,
                region=named_region(place.offer.region),
                market=place.offer.market,
            ),
        )
        for place in places
    )
    return OFFERS.dump_json(offers, exclude_none=True).decode()


def rented_offer(offers: Sequence[TaskOffer], cloud: str, region: str) -> NodeRental | None:
    """The offer of a task that was rented; None where none is of this cloud and region.

    Where a node there may be a spot or an on-demand one, it counts as on-demand: a budget is then
    not exceeded.
    """
    infras = {cloud.casefold(), f"{cloud}/{region}".casefold()}
    there = [offer.rental for offer in offers if offer.infra.casefold() in infras]
    on_demand = (rental for rental in there if rental.market == "on-demand")
    return next(on_demand, there[0] if there else None)


def labels_text(environment: Mapping[str, str]) -> str:
    """Value for ``ray start --labels``; empty where the offer is unknown, or no label can say it.

    Args:
        environment: variables of the task.
    """
    info = json.loads(environment.get("SKYPILOT_CLUSTER_INFO") or "{}")
    offers = OFFERS.validate_json(environment["OFFERS"])
    rental = rented_offer(offers, str(info.get("cloud")), str(info.get("region")))
    labels = {} if rental is None else rental.labels
    if not all(LABEL_VALUE.fullmatch(value) for value in labels.values()):
        return ""
    return ",".join(f"{name}={value}" for name, value in labels.items())


if __name__ == "__main__":
    sys.stdout.write(f"{labels_text(os.environ)}\n")
