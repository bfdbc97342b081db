"""A ranking as CSV and JSON, and the cells that are compared."""

import csv
import io

from builders.rankings import (
    DESK,
    JOB,
    LAP,
    SPEC,
    ranked,
)
from builders.runs import whole_trial

from orchestrator.ranking.ranked_offer import (
    RankedOffer,
    Ranking,
    comparable,
    ranking_csv,
)


def full_ranking() -> Ranking:
    """One with offers and cells left out, dates given and not."""
    ranking = ranked([*whole_trial(DESK, SPEC), *whole_trial(LAP, SPEC, largest=64)])
    assert len(ranking.offers) == 3
    assert len(ranking.excluded) == 1
    return ranking


def test_random_and_pretrained_weights_are_not_compared() -> None:
    """They route differently, so the cheaper of the two is not the better choice."""
    loaded = DESK.model_copy(update={"weights": "pretrained"})
    assert comparable(DESK) == comparable(LAP)
    assert comparable(DESK) != comparable(loaded)


def test_csv_has_the_parts_of_the_cell_first_and_no_column_twice() -> None:
    """A table for other programs: lines end as on Unix, and the job stands last."""
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
    """To the last digit, a column for each part of the cell, and empty where nothing is known."""
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


def test_ranking_reads_back_from_json_as_it_was() -> None:
    """It is kept in the run folder."""
    ranking = full_ranking()
    assert Ranking.model_validate_json(ranking.model_dump_json()) == ranking


def test_csv_of_nothing_is_its_header() -> None:
    """A reader of it finds the columns."""
    empty = Ranking(workload=JOB, offers=(), excluded=())
    assert list(csv.reader(io.StringIO(ranking_csv(empty)))) == [
        [*next(csv.reader(io.StringIO(ranking_csv(full_ranking()))))]
    ]
