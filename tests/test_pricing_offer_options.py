"""Options that choose offers, checked against a catalog."""

import pytest
from builders.rankings import SPEC

from orchestrator.pricing.offer_constraints import Constraints, OfferFilter
from orchestrator.pricing.offer_options import OfferOptions, RentalOptions
from orchestrator.request import OptionError

CATALOG = SPEC.merged_catalog()


def test_no_option_is_no_filter() -> None:
    """The filter that allows every offer stands for none."""
    assert RentalOptions().rented_as(CATALOG) is None
    assert RentalOptions().offer_filter(CATALOG) == OfferFilter()
    assert OfferOptions().constraints(CATALOG) == Constraints()


@pytest.mark.parametrize(("spot", "market"), [(True, "spot"), (False, "on-demand"), (None, None)])
def test_options_become_the_fields_of_a_filter(spot: bool | None, market: str | None) -> None:  # noqa: FBT001 - a parameter
    """Spot is a market of three states; the other options pass through."""
    options = RentalOptions(providers=("pit", "pub"), regions=("here",), spot=spot)
    expected = OfferFilter.model_validate(
        {"providers": ("pit", "pub"), "regions": ("here",), "market": market}
    )
    assert options.offer_filter(CATALOG) == expected
    assert options.rented_as(CATALOG) == expected


def test_constraints_have_the_filter_and_the_limits() -> None:
    """Deadline, budget and the number of GPUs join the providers, regions and market."""
    options = OfferOptions(
        providers=("pit",),
        regions=("there",),
        spot=True,
        deadline=2.0,
        budget_usd=3.0,
        single_gpu_instances=True,
    )
    assert options.constraints(CATALOG) == Constraints(
        providers=("pit",),
        regions=("there",),
        market="spot",
        single_gpu=True,
        deadline_hours=2.0,
        budget_usd=3.0,
    )


def test_all_unknown_providers_and_regions_are_reported_at_once() -> None:
    """One line for each, with its option and the nearest name."""
    options = RentalOptions(providers=("pit", "pubb", "zzz"), regions=("hera", "here"))
    with pytest.raises(OptionError) as error:
        options.offer_filter(CATALOG)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["--providers", "--providers", "--regions"]
    for line, name in zip(lines, ("'pubb'", "'zzz'", "'hera'"), strict=True):
        assert name in line
    assert "'pub'" in lines[0]
    assert "'here'" in lines[2]
