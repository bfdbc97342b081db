"""Refresh of prices: fetch from sources, identify GPUs, check, and merge with the last table."""

import datetime as dt
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.live_prices.gpu_identification import (
    IdentificationFailure,
    UnidentifiedPrice,
    identify,
)
from gpu_catalog.live_prices.price_checks import (
    OLDEST_DAYS,
    RejectedOffer,
    SourcedOffer,
    age_of,
    check_offers,
    invalid_price_reason,
    market_text,
    offer_text,
)
from gpu_catalog.live_prices.sources.raw_offer import PriceSource, RawOffer, SourceError
from gpu_catalog.offer import Identity, Offer

MOST_NAMES = 6  # GPU names in a line that counts unidentified prices


@dataclass(frozen=True, slots=True)
class Refreshed:
    """Result of a refresh.

    Attributes:
        offers: the new table: live prices, and the last ones of sources without an answer.
        live: number of live prices among them.
        answered: names of the sources with accepted prices.
        unidentified: counts of prices without an identified GPU, a line per source and reason.
    """

    offers: tuple[Offer, ...]
    live: int
    answered: tuple[str, ...]
    warnings: tuple[str, ...]
    rejected: tuple[RejectedOffer, ...]
    unidentified: tuple[str, ...]


def refresh(
    sources: Sequence[PriceSource], catalog: Catalog, last: Sequence[Offer], today: dt.date
) -> Refreshed:
    """Fetch prices from all sources. A source that fails gives a warning and keeps its last prices.

    Of two prices with one identity, the later source's is used. The prices of the catalog count in
    the medians.
    """
    warnings: list[str] = []
    rejected: list[RejectedOffer] = []
    unidentified: list[str] = []
    sourced: list[SourcedOffer] = []
    by_region: set[str] = set()
    for source in sources:
        try:
            reply = source.fetch()
        except SourceError as error:
            warnings.append(f"{source.name}: {error}{_kept(source.name, last)}")
            continue
        warnings += [f"{source.name}: {text}" for text in reply.warnings]
        offers, invalid, failures = _catalog_offers(reply.offers, catalog, today)
        sourced += offers
        rejected += invalid
        by_region |= {source.name} if reply.regions_apart else set()
        unidentified += [f"{source.name}: {line}" for line in _counted(failures)]
        if not offers:
            text = f"{source.name}: no price of any GPU in the catalog"
            warnings.append(text + _kept(source.name, last))
    providers = {candidate.offer.provider for candidate in sourced}
    references = [offer for offer in catalog.all_offers if offer.provider not in providers]
    live, implausible = check_offers(_latest(sourced), references)
    kept, too_old = _still_valid(last, live, by_region, today)
    return Refreshed(
        offers=(*live, *kept),
        live=len(live),
        answered=tuple(s.name for s in sources if any(_source(o) == s.name for o in live)),
        warnings=tuple(warnings),
        rejected=(*rejected, *implausible, *too_old),
        unidentified=tuple(unidentified),
    )


def _still_valid(
    last: Sequence[Offer], live: Sequence[Offer], by_region: Collection[str], today: dt.date
) -> tuple[list[Offer], list[RejectedOffer]]:
    """Last prices that no live price replaces, and those of them that are too old.

    A source reports all offers of a provider: an offer that is missing now is gone. A source in
    ``by_region`` is asked region by region, so only offers in regions that answered are gone.
    """
    identities = {offer.identity for offer in live}
    covered = {_coverage(offer, by_region) for offer in live}
    kept, too_old = [], []
    for offer in last:
        if offer.identity in identities or _coverage(offer, by_region) in covered:
            continue
        if (today - offer.date).days > OLDEST_DAYS:
            reason = f"the last price is of {age_of(offer.date, today)}"
            too_old.append(RejectedOffer(offer_text(offer), reason))
        else:
            kept.append(offer)
    return kept, too_old


def _coverage(offer: Offer, by_region: Collection[str]) -> tuple[str, str, str, str | None]:
    """Source, provider, market and, where regions are asked one by one, region of an offer."""
    source = _source(offer)
    return source, offer.provider, offer.market, offer.region if source in by_region else None


def _kept(source: str, last: Sequence[Offer]) -> str:
    count = sum(_source(offer) == source for offer in last)
    return f"; its last {count} prices are kept" if count else ""


def _source(offer: Offer) -> str:
    return offer.source.partition(":")[0]


def _catalog_offers(
    raw_offers: Iterable[RawOffer], catalog: Catalog, today: dt.date
) -> tuple[list[SourcedOffer], list[RejectedOffer], list[UnidentifiedPrice]]:
    offers, rejected, unidentified = [], [], []
    for raw in raw_offers:
        gpu = identify(raw, catalog)
        if isinstance(gpu, Gpu):
            reason = invalid_price_reason(raw, today)
            if reason is None:
                offers.append(SourcedOffer(_offer(raw, gpu, today), raw.first_hand))
                continue
        elif gpu.failure is IdentificationFailure.INCONSISTENT:
            reason = gpu.detail
        else:
            unidentified.append(gpu)
            continue
        instance, name = raw.instance or "(no instance)", raw.gpu_name or "a GPU"
        text = f"{raw.provider} {instance} {raw.region} {market_text(raw.market)}, {name}"
        rejected.append(RejectedOffer(text, reason))
    return offers, rejected, unidentified


def _offer(raw: RawOffer, gpu: Gpu, today: dt.date) -> Offer:
    assert raw.price is not None  # invalid_price_reason has checked it
    return Offer(
        gpu=gpu.key,
        provider=raw.provider,
        region=raw.region or "not stated",
        instance=raw.instance,
        gpus_per_instance=raw.gpus,
        usd_per_hour=float(raw.price),
        market=raw.market,
        host_memory_gib=raw.host_memory_gib,
        as_of=raw.as_of,
        recorded=today,
        source=raw.source,
        note=raw.note,
    )


def _latest(sourced: Iterable[SourcedOffer]) -> list[SourcedOffer]:
    """One price per identity: that of the later source, the lower of one source."""
    best: dict[Identity, SourcedOffer] = {}
    for candidate in sourced:
        offer = candidate.offer
        other = best.setdefault(offer.identity, candidate).offer
        if _source(other) != _source(offer) or offer.usd_per_hour < other.usd_per_hour:
            best[offer.identity] = candidate
    return list(best.values())


def _counted(unidentified: Sequence[UnidentifiedPrice]) -> Iterator[str]:
    for failure in IdentificationFailure:
        names = Counter(price.detail for price in unidentified if price.failure is failure)
        if not names:
            continue
        shown = [f"{name} {count}" for name, count in names.most_common(MOST_NAMES)]
        more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
        yield f"{names.total()} prices skipped, {failure}: {', '.join([*shown, *more])}"
