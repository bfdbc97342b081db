"""The ranking of a job whose examples have the lengths of its data."""

import pytest
from builders.observations import measurement, observation
from builders.rankings import JOB, TEXT, limit_probes, ranked, timed
from builders.runs import ONE_CELL, spec_of

from fitting.families.fit_family import fit_families
from fitting.laws.forms import Form
from orchestrator.datasets.lengths import DataLengths
from orchestrator.datasets.preference import Kind
from orchestrator.ranking.job_lengths import padding, unsuited
from orchestrator.reporting.markdown_report import headline
from orchestrator.reporting.sections.law_section import LAW_NAMES
from orchestrator.reporting.sections.recommendation import recommendations
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation, Outcome

LONG = spec_of(TEXT.replace("[16]", "[64, 128]").replace("[desk, lap, attic]", "[desk]"))


MISS = Outcome.OUT_OF_MEMORY
SHORTER = ONE_CELL.replace("[16]", "[128]\n    simulated_on: [A40]")
SHORT = spec_of(TEXT.replace("[16]", "[64]").replace("[desk, lap, attic]", "[desk]"))


def by_tokens(cell: Cell) -> list[Observation]:
    """A device that takes 0.1 s per step and 0.1 ms per token."""
    return [
        *limit_probes(40, cell),
        *(timed(b, *6 * [0.1 + 1e-4 * b * cell.seq_len], cell=cell) for b in (1, 3, 9, 18, 40)),
    ]


def test_examples_have_the_lengths_of_the_data() -> None:
    """Half of the examples have 32 tokens and half 128: 80 on average."""
    data = DataLengths(source="made", histogram=((32, 500), (128, 500)))
    short, long = LONG.all_cells()
    observations = [o for cell in (short, long) for o in by_tokens(cell)]
    job = JOB.model_copy(update={"lengths": data, "batch_size": 1})
    ranking = ranked(observations, job, spec=LONG)
    assert {row.cell for row in ranking.offers} == {long}
    (reason,) = [e.reason for e in ranking.excluded]
    for part in ("length is 64", "128 tokens", "cell at 128", "--cutoff 64"):
        assert part in reason
    (reason,) = [e.reason for e in ranked(by_tokens(short), job, spec=SHORT).excluded]
    for part in ("length is 64", "128 tokens", "--cutoff 64", "a sweep at 128"):
        assert part in reason
    one = ranking.offers[0]
    assert one.tokens_per_example == pytest.approx(80)
    assert one.hours * 3600 == pytest.approx(3000 * 0.108, rel=1e-3)
    assert not one.extrapolated
    cut = job.model_copy(update={"cutoff": 64})
    rows = ranked(observations, cut, spec=LONG).offers
    assert {row.cell.seq_len: row.tokens_per_example for row in rows} == {64: 48, 128: 48}
    assert all(row.extrapolated for row in rows)  # no length as short was measured


def test_approximate_lengths_widen_the_interval() -> None:
    """The expected hours stay; every offer has the same error, which the report names."""
    exact = DataLengths(source="made", histogram=((32, 500), (128, 500)))
    rough = exact.model_copy(update={"error": 0.15, "tokenizer": "rates"})
    short, long = LONG.all_cells()
    observations = [o for cell in (short, long) for o in by_tokens(cell)]
    rankings = [
        ranked(observations, JOB.model_copy(update={"lengths": data, "batch_size": 1}), spec=LONG)
        for data in (exact, rough)
    ]
    before, after = (ranking.offers[0] for ranking in rankings)
    assert after.hours == before.hours
    assert after.hours_low == pytest.approx(before.hours / 1.15, rel=0.02)
    assert after.hours_high == pytest.approx(before.hours * 1.15, rel=0.02)
    assert "15% off" in headline(rankings[1])


def test_examples_as_long_as_the_cell_fit_it() -> None:
    """One token more does not; the shortest cell that differs in its length alone is suggested."""
    short, long = LONG.all_cells()
    longer = long.model_copy(update={"seq_len": 256})
    other = long.model_copy(update={"gpu": "lap"})
    assert unsuited(JOB, short, [long]) is None
    for tokens, others, parts in (
        (64, [short, long], None),
        (65, [short, longer, long], ("length is 64", "65 tokens", "cell at 128", "--cutoff 64")),
        (128, [short, long], ("cell at 128",)),
        (129, [short, long, longer], ("cell at 256",)),
        (129, [short, long], ("--cutoff 64", "a sweep at 136")),
        (65, [short, other], ("--cutoff 64", "a sweep at 72")),
    ):
        data = DataLengths(source="made", histogram=((16, 500), (tokens, 500)))
        reason = unsuited(JOB.model_copy(update={"lengths": data}), short, others)
        assert (reason is None) == (parts is None)
        assert all(part in str(reason) for part in parts or ())


def test_padded_tokens_are_at_most_the_length_of_the_cell() -> None:
    """Rounding up to a multiple does not exceed it; without lengths there is no padding."""
    short, _ = LONG.all_cells()
    assert padding(JOB, short) is None
    data = DataLengths(source="made", histogram=((20, 500), (60, 500)))
    for multiple, tokens in ((1, 40.0), (8, 44.0), (100, 64.0)):
        job = JOB.model_copy(update={"lengths": data, "pad_to_multiple": multiple})
        padded = padding(job, short)
        assert padded is not None
        assert padded(1) == pytest.approx(tokens)


def test_several_ranks_are_priced_at_the_batch_that_they_wait_for() -> None:
    """Of two examples one is long with three in four; of one, every other time."""
    short, _ = LONG.all_cells()
    two = short.model_copy(update={"parallel": Parallel(gpus=2, strategy="fsdp2")})
    data = DataLengths(source="made", histogram=((16, 500), (48, 500)))
    padded = padding(JOB.model_copy(update={"lengths": data}), two)
    assert padded is not None
    assert padded(1) == pytest.approx(16 / 4 + 48 * 3 / 4)


def test_times_at_one_length_are_priced_as_an_upper_bound() -> None:
    """The notes name the full length and a remedy, however well a law of tokens fits."""
    data = DataLengths(source="made", histogram=((32, 500), (128, 500)))
    _, long = LONG.all_cells()
    job = JOB.model_copy(update={"lengths": data, "batch_size": 1})
    ranking = ranked(by_tokens(long), job, spec=LONG)
    row = ranking.offers[0]
    assert (row.tokens_per_example, row.as_if_full, row.law) == (128, True, None)
    assert row.hours * 3600 == pytest.approx(3000 * 0.1128)
    head = headline(ranking)
    assert "full 128 tokens, not" in head
    assert "upper bounds" in head
    assert "at several `seq_lens`" in head
    assert "padded to" not in head
    (rent, *_) = recommendations(ranking)[0].sentences()
    assert rent.endswith("full length.")


def test_lengths_are_priced_by_a_law_of_lengths() -> None:
    """A law per series is not used, even if it fits the timed lengths better."""
    data = DataLengths(source="made", histogram=((32, 500), (128, 500)))
    job = JOB.model_copy(update={"lengths": data, "batch_size": 1})
    short, long = LONG.all_cells()
    # An example of the shorter length is dearer by itself: each length has a slope of its own.
    observations = [
        *by_tokens(long),
        *limit_probes(40, short),
        *(timed(b, *6 * [0.1 + 0.9e-2 * b], cell=short) for b in (1, 3, 9, 18, 40)),
    ]
    (family,) = fit_families(observations)
    assert family.form in {Form.AFFINE_EXAMPLES, Form.POOLED_BY_SERIES, Form.SMOOTH_MAXIMUM}
    assert family.by_length is not None
    ranking = ranked(observations, job, spec=LONG)
    row = ranking.offers[0]
    assert (row.as_if_full, row.law, row.length_error) == (
        False,
        family.by_length.form,
        family.by_length.error,
    )
    assert row.tokens_per_example == pytest.approx(80)
    assert row.hours * 3600 < 3000 * 0.1128
    assert row.law is not None
    assert f"{LAW_NAMES[row.law]} (error {row.length_error:.1%})" in headline(ranking)


def test_simulated_steps_of_shorter_examples_come_before_any_law() -> None:
    """Interpolated between simulated lengths; other batch sizes scale from the full length."""
    (cell,) = spec_of(SHORTER).all_cells()

    def simulated(batch: int) -> Observation:
        shorter = ((32, 0.1 + 1e-3 * batch), (96, 0.1 + 3e-3 * batch))
        steps = measurement(step_seconds=(0.1 + 9e-3 * batch,)).model_copy(
            update={"relative_error": 0.3, "shorter_step_seconds": shorter}
        )
        return timed(batch, cell=cell, basis=Basis.SIMULATED, measurement=steps)

    observations = [*(simulated(b) for b in (1, 4, 16, 40)), observation(41, MISS, cell=cell)]
    data = DataLengths(source="made", histogram=((48, 500), (112, 500)))
    job = JOB.model_copy(update={"lengths": data, "batch_size": 4, "pad_to_multiple": 1})
    tokens = 48 + 64 * (1 - 0.5**4)
    row = ranked(observations, job, spec=spec_of(SHORTER)).offers[0]
    assert row.tokens_per_example == pytest.approx(tokens)
    part = (tokens - 96) / 32
    seconds = 0.1 + 4e-3 * (3 + 6 * part)
    assert row.hours * 3600 == pytest.approx(750 * seconds)
    assert (row.law, row.as_if_full) == (None, False)
    between = job.model_copy(update={"batch_size": 8})
    row = ranked(observations, between, spec=spec_of(SHORTER)).offers[0]
    part = (row.tokens_per_example - 96) / 32
    assert row.hours * 3600 == pytest.approx(375 * (0.1 + 8e-3 * (3 + 6 * part)), rel=0.03)
    # Shorter than any that was simulated: only a law could tell.
    cut = job.model_copy(update={"cutoff": 16})
    assert ranked(observations, cut, spec=spec_of(SHORTER)).offers[0].as_if_full


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
def test_a_cell_that_trains_on_texts_does_not_suit_preference_data(kind: Kind) -> None:
    """The reason names the data; texts, and lengths of an unknown kind, suit."""
    data = DataLengths(source="made", histogram=((16, 500),), kind=kind)
    reason = unsuited(JOB.model_copy(update={"lengths": data}), SHORT.all_cells()[0], ())
    assert reason is not None
    assert "made" in reason
    paired = SHORT.all_cells()[0]
    dpo = paired.model_copy(update={"recipe": Recipe(method="full", task="dpo")})
    assert (unsuited(JOB.model_copy(update={"lengths": data}), dpo, ()) is None) == (
        kind == "pairs"
    )
    packed = JOB.model_copy(update={"padding": "packed"})
    assert unsuited(packed, dpo, ()) is not None
    for suited in ("texts", None):
        texts = data.model_copy(update={"kind": suited})
        assert unsuited(JOB.model_copy(update={"lengths": texts}), SHORT.all_cells()[0], ()) is None
