"""Cards that the user owns, priced by their electricity."""

import datetime as dt

import pytest

from gpu_catalog.catalog import load_catalog
from orchestrator.pricing.layout_offers import layout_offers
from orchestrator.pricing.own_cards import is_electricity, with_own_cards
from orchestrator.request import OptionError
from trials.recipes.parallel import Parallel

TODAY = dt.date(2026, 11, 23)
CATALOG = load_catalog()
A40 = CATALOG.gpu("A40")


def test_a_card_of_ones_own_costs_electricity_and_no_rent() -> None:
    """300 W for an hour at $0.25 per kWh; rented offers stay."""
    catalog = with_own_cards(CATALOG, [A40], 0.25, TODAY)
    (offer,) = filter(is_electricity, catalog.offers("A40"))
    assert (offer.provider, offer.usd_per_hour) == ("own", pytest.approx(0.075))
    assert set(catalog.all_offers) - {offer} == set(CATALOG.all_offers)


def test_several_cards_of_a_node_take_the_electricity_of_each() -> None:
    """An instance of a price list has the number of GPUs that it states."""
    catalog = with_own_cards(CATALOG, [A40], 0.25, TODAY)
    (listed,) = filter(is_electricity, catalog.offers("A40"))
    instance = listed.model_copy(update={"source": "mine"})
    (offer,) = layout_offers([listed, instance], Parallel(gpus=4, strategy="ddp"))
    assert (offer.gpus_per_instance, offer.usd_per_hour) == (4, pytest.approx(0.3))
    assert layout_offers([listed], Parallel(gpus=4, nodes=2, strategy="ddp")) == []


def test_a_card_outside_the_catalog_is_added() -> None:
    """Its memory was given, so that it has a key of its own."""
    changed = A40.model_copy(update={"key": "A40-24GiB", "device_names": ("mine",)})
    (offer,) = with_own_cards(CATALOG, [changed], 0.25, TODAY).offers("A40-24GiB")
    assert offer.usd_per_hour == pytest.approx(0.075)


def test_price_and_power_of_the_electricity_are_required() -> None:
    """Neither is guessed; a price without a card, or in cents, is a mistake."""
    with pytest.raises(OptionError, match="--usd-per-kwh"):
        with_own_cards(CATALOG, [A40], None, TODAY)
    with pytest.raises(OptionError, match="tdp_watts"):
        with_own_cards(CATALOG, [A40.model_copy(update={"tdp_watts": None})], 0.3, TODAY)
    with pytest.raises(OptionError, match="not cents"):
        with_own_cards(CATALOG, [A40], 32, TODAY)
    with pytest.raises(OptionError, match="own:"):
        with_own_cards(CATALOG, [], 0.3, TODAY)
    assert with_own_cards(CATALOG, [], None, TODAY) is CATALOG
