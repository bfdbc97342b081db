"""Live prices: asked of sources, put in the catalog's terms, judged, laid over what was known."""

import datetime as dt
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.live_prices.gpu_identification import IdentificationFailure, Miss, identify
from gpu_catalog.live_prices.price_checks import (
    OLDEST_DAYS,
    RejectedOffer,
    SourcedOffer,
    invalid_price_reason,
    named,
    rejected_offers,
)
from gpu_catalog.live_prices.sources.raw_offer import PriceSource, RawOffer, SourceError
from gpu_catalog.offer import Offer

MOST_NAMES = 6  # of GPUs, in a line that counts what was not told


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh brought.

    Attributes:
        offers: the table as it is now: live prices, and the last ones of sources that gave none.
        live: how many of them are new.
        answered: the sources that gave prices.
        warnings: sources that did not answer, a line each.
        doubts: prices that are left out as lies.
        missed: what was left out since its GPU was not told, a line for each source and reason.
    """

    offers: tuple[Offer, ...]
    live: int
    answered: tuple[str, ...]
    warnings: tuple[str, ...]
    doubts: tuple[RejectedOffer, ...]
    missed: tuple[str, ...]


def refresh(
    sources: Sequence[PriceSource], catalog: Catalog, last: Sequence[Offer], today: dt.date
) -> Refreshed:
    """Asks every source. One that does not answer costs a warning and keeps its last prices.

    Args:
        sources: where two tell the price of one thing, the later one is believed.
        catalog: its GPUs, and prices that say what is usual.
        last: the table before.
        today: the day of the refresh.
    """
    warnings: list[str] = []
    doubts: list[RejectedOffer] = []
    missed: list[str] = []
    told: list[SourcedOffer] = []
    apart: set[str] = set()
    for source in sources:
        try:
            answer = source.fetch()
        except SourceError as error:
            warnings.append(f"{source.name}: {error}{_kept(source.name, last)}")
            continue
        warnings += [f"{source.name}: {text}" for text in answer.warnings]
        mine, wrong, misses = _in_our_terms(answer.offers, catalog, today)
        told += mine
        doubts += wrong
        apart |= {source.name} if answer.regions_apart else set()
        missed += [f"{source.name}: {line}" for line in _counted(misses)]
        if not mine:
            text = f"{source.name}: no price of any GPU in the catalog"
            warnings.append(text + _kept(source.name, last))
    live, far_off = rejected_offers(_latest(told), _references(catalog, told))
    kept, too_old = _still_good(last, live, apart, today)
    return Refreshed(
        offers=(*live, *kept),
        live=len(live),
        answered=tuple(s.name for s in sources if any(_source(o) == s.name for o in live)),
        warnings=tuple(warnings),
        doubts=(*doubts, *far_off, *too_old),
        missed=tuple(missed),
    )


def _still_good(
    last: Sequence[Offer], live: Sequence[Offer], apart: Collection[str], today: dt.date
) -> tuple[list[Offer], list[RejectedOffer]]:
    """The last prices that nothing new was told of, and those of them that are too old.

    A source that tells a provider's prices tells all of them: what it has no longer is not to be
    had. One that asks region by region speaks of those that answered.
    """
    known = {offer.identity for offer in live}
    told = {_part(offer, apart) for offer in live}
    kept, too_old = [], []
    for offer in last:
        days = (today - offer.date).days
        if offer.identity in known or _part(offer, apart) in told:
            continue
        if days > OLDEST_DAYS:
            reason = f"the last price is of {offer.date}, {days} days old (at most {OLDEST_DAYS})"
            too_old.append(RejectedOffer(named(offer), reason))
        else:
            kept.append(offer)
    return kept, too_old


def _part(offer: Offer, apart: Collection[str]) -> tuple[str, str, str, str | None]:
    source = _source(offer)
    return source, offer.provider, offer.market, offer.region if source in apart else None


def _kept(source: str, last: Sequence[Offer]) -> str:
    count = sum(_source(offer) == source for offer in last)
    return f"; its last {count} prices are kept" if count else ""


def _source(offer: Offer) -> str:
    return offer.source.partition(":")[0]


def _in_our_terms(
    stated: Iterable[RawOffer], catalog: Catalog, today: dt.date
) -> tuple[list[SourcedOffer], list[RejectedOffer], list[Miss]]:
    told, doubts, misses = [], [], []
    for raw in stated:
        gpu = identify(raw, catalog)
        if isinstance(gpu, Miss) and gpu.why is not IdentificationFailure.MISSTATED:
            misses.append(gpu)
            continue
        reason = gpu.what if isinstance(gpu, Miss) else invalid_price_reason(raw, today)
        if reason is not None:
            doubts.append(RejectedOffer(_named(raw), reason))
            continue
        assert isinstance(gpu, Gpu)
        told.append(SourcedOffer(_offer(raw, gpu, today), raw.first_hand))
    return told, doubts, misses


def _named(raw: RawOffer) -> str:
    market = raw.market.replace("-", " ")
    of = raw.gpu_name or "a GPU"
    return f"{raw.provider} {raw.instance or '(no instance)'} {raw.region} {market}, {of}"


def _offer(raw: RawOffer, gpu: Gpu, today: dt.date) -> Offer:
    assert raw.price is not None  # judged before
    return Offer(
        gpu=gpu.key,
        provider=raw.provider,
        region=raw.region or "not stated",
        instance=raw.instance,
        gpus_per_instance=raw.gpus,
        usd_per_hour=float(raw.price),
        market=raw.market,
        minimum_minutes=raw.minimum_minutes,
        as_of=raw.as_of,
        recorded=today,
        source=raw.source,
        note=raw.note,
    )


def _latest(told: Iterable[SourcedOffer]) -> list[SourcedOffer]:
    """One price of each thing: that of the later source, the lower of one source."""
    best: dict[object, SourcedOffer] = {}
    for each in told:
        before = best.get(each.offer.identity)
        if (
            before is None
            or _source(before.offer) != _source(each.offer)
            or each.offer.usd_per_hour < before.offer.usd_per_hour
        ):
            best[each.offer.identity] = each
    return list(best.values())


def _references(catalog: Catalog, told: Sequence[SourcedOffer]) -> list[Offer]:
    """Prices known before, of providers that tell none now: what is usual elsewhere."""
    providers = {each.offer.provider for each in told}
    return [offer for offer in catalog.all_offers if offer.provider not in providers]


def _counted(misses: Sequence[Miss]) -> Iterator[str]:
    for why in IdentificationFailure:
        names = Counter(miss.what for miss in misses if miss.why is why)
        if not names:
            continue
        shown = [f"{name} {count}" for name, count in names.most_common(MOST_NAMES)]
        more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
        yield f"{names.total()} prices left out, {why}: {', '.join([*shown, *more])}"
