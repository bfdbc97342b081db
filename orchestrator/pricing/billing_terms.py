"""Billing terms of providers: the unit of billed time, and the shortest."""

import datetime as dt
from functools import cache

from gpu_catalog.catalog import shipped_rows
from gpu_catalog.gpu import Positive, Source
from gpu_catalog.offer import Offer, Text
from gpu_catalog.record import Record


class BillingTerms(Record):
    """Billing terms of a provider.

    Attributes:
        billed_seconds: unit of billed time; a started unit is paid in full.
        minimum_minutes: shortest billed time, if there is one.
    """

    provider: Text
    billed_seconds: Positive
    minimum_minutes: Positive | None = None
    recorded: dt.date
    source: Source


@cache
def billing_terms() -> dict[str, BillingTerms]:
    """Known terms by the name of the provider."""
    return {terms.provider: terms for terms in shipped_rows(BillingTerms, "billing_terms.csv")}


def minimum_minutes(offer: Offer) -> float:
    """Shortest billed time of an offer: its own, else its provider's, else 0."""
    terms = billing_terms().get(offer.provider)
    return offer.minimum_minutes or (terms and terms.minimum_minutes) or 0.0


def billed_seconds(offer: Offer) -> float | None:
    """Unit of billed time of an offer's provider; None where it is not known."""
    terms = billing_terms().get(offer.provider)
    return None if terms is None else terms.billed_seconds


def billing_text(offer: Offer) -> str:
    """Terms of an offer in words; empty where nothing is known."""
    units = {1.0: "by the second", 60.0: "by the minute", 3600.0: "by the hour"}
    seconds, least = billed_seconds(offer), minimum_minutes(offer)
    unit = [] if seconds is None else [units.get(seconds, f"in units of {seconds:g} s")]
    return ", ".join([*unit, *([f"at least {least:g} min"] if least else [])])
