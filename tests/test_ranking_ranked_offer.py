"""A ranking as CSV and JSON, and the cells that are comparable."""

import csv
import datetime as dt
import io
import math

import pytest
from builders.catalog_offers import offer as offer_row
from builders.rankings import (
    DESK,
    JOB,
    LAP,
    SPEC,
    ranked,
)
from builders.runs import ONE_CELL, SIMULATED, results, whole_trial

from orchestrator.ranking.ranked_offer import (
    RankedOffer,
    Ranking,
    comparable,
    ranking_csv,
    ranking_json,
)
from orchestrator.reporting.notes.ranking_notes import prices_text, ranking_notes
from orchestrator.reporting.sections.recommendation import doubts


def full_ranking() -> Ranking:
    """A ranking with offers and exclusions, with and without dates."""
    ranking = ranked([*whole_trial(DESK, SPEC), *whole_trial(LAP, SPEC, largest=64)])
    assert len(ranking.offers) == 3
    assert len(ranking.excluded) == 1
    return ranking


def test_random_and_pretrained_weights_are_not_compared() -> None:
    """The two route tokens differently, so a lower cost does not make one the better choice."""
    loaded = DESK.model_copy(update={"weights": "pretrained"})
    assert comparable(DESK) == comparable(LAP)
    assert comparable(DESK) != comparable(loaded)


def test_csv_has_the_parts_of_the_cell_first_and_no_column_twice() -> None:
    """Lines end as on Unix, and the job has the last columns."""
    text = ranking_csv(full_ranking())
    header = text.splitlines()[0].split(",")
    assert header[:7] == [
        *("gpu", "model", "weights", "recipe", "sparsity", "active_experts", "seq_len"),
    ]
    assert header[-2:] == ["examples", "epochs"]
    assert len(set(header)) == len(header)
    assert "cell" not in header
    assert "\r" not in text


def test_csv_has_the_numbers_of_the_ranking() -> None:
    """Numbers have all digits, each part of the cell a column, and unknown values are empty."""
    ranking = full_ranking()
    rows = list(csv.DictReader(io.StringIO(ranking_csv(ranking))))
    assert len(rows) == len(ranking.offers)
    for row, offer in zip(rows, ranking.offers, strict=True):
        for name in RankedOffer.model_fields:
            if name != "cell":
                value = getattr(offer, name)
                kind = type(value) if isinstance(value, int | float) else str
                read = row[name] == "True" if kind is bool else kind(row[name])
                assert read == ("" if value is None else value if kind is not str else str(value))
        assert {name: row[name] for name in ("gpu", "model", "recipe", "sparsity")} == {
            "gpu": offer.cell.gpu,
            "model": "llama-tiny",
            "recipe": "full-fp32",
            "sparsity": "1.0",
        }
        assert (row["active_experts"], row["seq_len"]) == ("", "16")
        assert (row["examples"], row["epochs"]) == ("1000", "3")
    assert {row["limited_by"] for row in rows} == {"OUT_OF_MEMORY at 41", "the search's limit"}


def test_csv_has_the_number_of_instances_that_the_price_is_of() -> None:
    """A layout of two nodes rents two instances, whose prices the column adds up."""
    nodes = "parallel: [{gpus: 16, nodes: 2, strategy: fsdp2}]"
    block = SIMULATED.replace("A40, H100-SXM]\n", f"H100-SXM]\n    {nodes}\n")
    run = results(ONE_CELL.replace("workload:", f"{block}workload:"))
    rows = [*csv.DictReader(io.StringIO(ranking_csv(run.ranking)))]
    several = next(row for row in rows if row["instance"] == "p5.48xlarge")
    price = next(
        offer.usd_per_hour
        for offer in run.catalog.offers("H100-SXM")
        if all(several[name] == getattr(offer, name) for name in ("instance", "region", "market"))
    )
    assert several["instances"] == "2"
    assert float(several["usd_per_hour"]) == pytest.approx(2 * price)
    assert {row["instances"] for row in rows if row["gpu"] == "cpu"} == {"1"}
    assert "the price of all rented instances" in ranking_notes(run.ranking.offers, run.ranking)


def test_an_offer_taken_to_be_as_fast_as_this_machine_says_so() -> None:
    """A column of the CSV and a doubt of the recommendation; a machine of one's own has neither."""
    own = offer_row(0.02, instance="desk") + offer_row(0.05, provider="them", instance="rack")
    ranking = results(f"{ONE_CELL}catalog:\n  offers:\n{own}").ranking
    rows = {row["instance"]: row for row in csv.DictReader(io.StringIO(ranking_csv(ranking)))}
    assert (rows["desk"]["elsewhere"], rows["rack"]["elsewhere"]) == ("False", "True")
    shown = {row.instance: doubts(ranking.workload, row) for row in ranking.offers}
    assert [text for text in shown["rack"] if "machine that ran the sweep" in text] != []
    assert [text for text in shown["desk"] if "machine that ran the sweep" in text] == []


def test_ranking_survives_a_round_trip_through_json() -> None:
    """The run folder keeps the ranking as JSON."""
    ranking = full_ranking()
    assert Ranking.model_validate_json(ranking.model_dump_json()) == ranking


@pytest.mark.parametrize("offers", [0, 1, None])
def test_json_offer_by_offer_is_that_of_the_whole(offers: int | None) -> None:
    """The file is the same as if it were made at once, to the byte; also with extreme numbers."""
    whole = full_ranking()
    extreme = {"probability_cheapest": 5e-5, "usd": 1e-7, "usd_low": 5e-324, "usd_high": math.inf}
    rows = [whole.offers[0].model_copy(update=extreme), *whole.offers[1:]]
    ranking = whole.model_copy(update={"offers": tuple(rows[:offers])})
    assert b"".join(ranking_json(ranking)).decode() == ranking.model_dump_json(indent=1) + "\n"


def test_csv_of_an_empty_ranking_is_its_header() -> None:
    """A program that reads the file still sees the columns."""
    empty = Ranking(workload=JOB, offers=(), excluded=())
    assert list(csv.reader(io.StringIO(ranking_csv(empty)))) == [
        [*next(csv.reader(io.StringIO(ranking_csv(full_ranking()))))]
    ]


def test_a_frame_has_the_columns_and_rows_of_the_csv() -> None:
    """A notebook shows it as a table of HTML, without an index."""
    ranking = full_ranking()
    frame = ranking.to_frame()
    assert list(frame.columns) == ranking_csv(ranking).splitlines()[0].split(",")
    assert frame["usd"].tolist() == [offer.usd for offer in ranking.offers]
    assert ranking._repr_html_() == frame.to_html(index=False)


def test_prices_have_their_currency_their_dates_and_the_old_ones_by_provider() -> None:
    """The source's date counts before that of the record; without a day of ranking none is old."""
    ranking = full_ranking()
    text = prices_text(ranking)
    assert text == (
        "Prices are in US dollars before tax, quoted from 2025-12-24 to 2026-01-31 (or recorded, "
        "where their source gives no date)."
    )
    on = ranking.model_copy(update={"priced_on": dt.date(2026, 1, 31)})
    assert prices_text(on) == f"{text} Quotes over 30 days old (oldest): pit 2025-12-24."
    assert prices_text(ranking.model_copy(update={"offers": ()})) == ""
