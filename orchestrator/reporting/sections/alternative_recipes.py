"""Sentences of an estimate on recipes: which were chosen, the runners-up, and what would fit."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gpu_catalog.number_text import dollars, short
from orchestrator.estimating.choosing.boxes import COUNTS, could_hold
from orchestrator.estimating.choosing.recipe_choice import WORTHWHILE, fits, worthwhile_below
from orchestrator.estimating.choosing.remedies import (
    can_leave_to_host,
    lacks_offloading,
    largest_misfits,
)
from orchestrator.estimating.estimate_records import (
    SEVERAL_UNTRIED,
    Alternative,
    Estimate,
    Estimated,
)
from orchestrator.markdown_table import table
from orchestrator.spec.recipe_options import ChosenRecipe, OpenCell
from trials.recipes.optional_packages import EXTRAS

ALTERS = "which alters training"
CCE = "--loss cce"
NOT_BY_TRL = " (by cut-cross-entropy, as axolotl trains, and TRL does not)"


def recipe_words(row: Estimated) -> str:
    """The axes of a recipe that an estimate may choose, for a cell of a table."""
    recipe = row.cell.recipe
    kernel = recipe.attention if recipe.attention != "sdpa" else None
    checkpointed = "checkpointed" if recipe.gradient_checkpointing else None
    return ", ".join(filter(None, (recipe.method, checkpointed, kernel)))


def runners_up_text(rows: Sequence[Estimated]) -> Iterator[str]:
    """Other recipes on the recommended GPU, and the cheapest GPU by each other method."""
    best = rows[0]
    if not fits(best):
        return
    if best.estimate.alternatives:
        listed = "; ".join(_runners_up(best.estimate))
        drawn = " (their memory at the longest examples, without drawn lengths)" * bool(
            best.varying
        )
        yield f"Runners-up on {_whose(best.estimate)}{drawn}: {listed}."
    others: defaultdict[str, list[tuple[str, Estimate | Alternative]]] = defaultdict(list)
    for row in filter(fits, rows):
        recipes_there: tuple[Estimate | Alternative, ...] = (
            row.estimate,
            *row.estimate.alternatives,
        )
        for recipe in recipes_there:
            if recipe.method != best.estimate.method:
                others[recipe.method].append((_whose(row.estimate), recipe))
    for method, recipes in others.items():
        priced = [(usd, gpu, recipe) for gpu, recipe in recipes if (usd := _usd(recipe))]
        if priced:
            _, gpu, recipe = min(priced, key=lambda entry: entry[0])
            yield (
                f"{method} does not learn the same as {best.estimate.method}. Its cheapest GPU is "
                f"{gpu}: {recipe.options}, {_costs(recipe)}."
            )


def _whose(estimate: Estimate) -> str:
    """The GPU of an estimate, as the user's where it is: the same rented has a row, too."""
    return f"{'your ' * estimate.is_own}{estimate.gpu}"


def passed_over_text(row: Estimated) -> str:
    """Savings of quantised weights that were passed over, in a sentence; empty without any.

    They are below ``WORTHWHILE``, and such weights approximate the model.
    """
    best, wanted = row.estimate, row.question.constraints
    for other in best.alternatives if best.method != "qlora" else ():
        if other.method != "qlora" or not other.surely_fits:
            continue
        if best.price is None or other.usd is None or other.hours is None:
            continue
        cost, _ = wanted.preference(best.price.hours, best.price.usd)
        less, _ = wanted.preference(other.hours, other.usd)
        if less < cost <= worthwhile_below(less):
            is_time = wanted.objective == "time"
            saved = f"{short(cost - less, 2)} h" if is_time else f"${dollars(cost - less)}"
            share = f"{(cost - less) / cost:.1%}"
            return (
                f" {other.options} would save {saved} ({share}), less than the "
                f"{WORTHWHILE:.0%} that quantised weights have to save."
            )
    return ""


def chosen_recipe(cell: OpenCell, row: Estimated) -> ChosenRecipe:
    """The recipe of an estimate, for a cell of a sweep, with the reason and the runners-up."""
    runners_up: tuple[str, ...] = ()
    if fits(row):
        passed_over = passed_over_text(row)
        why = "chosen" if passed_over else "the cheapest that fits"
        reason = f"{why}: {_costs(row.estimate)}.{passed_over}"
        runners_up = tuple(_runners_up(row.estimate))
    else:
        reason = f"none fits, and it needs the least memory.{cheapest_remedy([row])}"
    return ChosenRecipe(
        cell=cell,
        recipe=row.cell.recipe,
        reason=reason.rstrip("."),
        runners_up=runners_up,
    )


def chosen_section(chosen: Sequence[ChosenRecipe]) -> str:
    """Recipes of the cells that a specification leaves open, as a table; empty without any."""
    if not chosen:
        return ""
    rows = []
    for choice in chosen:
        cell = choice.cell
        experts = f", {cell.active_experts} experts" if cell.active_experts else ""
        where = f"{cell.gpu}, {cell.model}, {cell.seq_len} tokens{experts}"
        rows.append((where, choice.recipe.key, choice.reason, "; ".join(choice.runners_up)))
    lines = table(("cell", "recipe by choice, simulated", "why", "runners-up"), rows)
    return f"Recipes that the specification leaves to be chosen:\n\n{lines}"


def remedies_text(rows: Sequence[Estimated]) -> Iterator[str]:
    """For GPUs on which the job does not fit, the cheapest change that does, or that none does."""
    gpus: defaultdict[tuple[bool, str], list[str]] = defaultdict(list)
    for row in rows:
        for change in () if fits(row) else row.estimate.alternatives:
            key = (not change.learns_alike, change.options)
            gpus[key].append(f"{row.estimate.gpu} ({_costs(change)}{_doubt(change)})")
    if [len(places) for places in gpus.values()] == [1] and not any(map(fits, rows)):
        gpus.clear()  # the recommendation has the only remedy
    for (alters, options), places in sorted(gpus.items()):
        which = f", {ALTERS}," * alters
        yield f"With {options}{which} the job fits on {', '.join(places)}."
    tried = () if rows[0].question.finds_seq_len else largest_misfits(rows)
    hopeless = [row for row in tried if not row.estimate.alternatives]
    if hopeless:
        names = ", ".join(row.estimate.gpu for row in hopeless)
        yield f"No change that was tried makes the job fit on {names}."
    if any(row.estimate.gpus == 1 and could_hold(row, COUNTS[-1]) for row in hopeless):
        yield f"{SEVERAL_UNTRIED}: --gpus {','.join(map(str, COUNTS))} compares them."
    if any(map(can_leave_to_host, hopeless)):
        yield (
            "--strategy deepspeed-zero3 --offload all was not tried: the host then holds weights "
            "and optimizer state."
        )
    untried = [row.estimate.gpu for row in rows if lacks_offloading(row)]
    if untried:
        yield (
            f"--activation-offloading on was not tried on {', '.join(untried)}: TRL simulates it "
            f"(pip install 'finetune-cost[{EXTRAS['trl']}]'). Training learns the same with it."
        )


def cheapest_change(rows: Sequence[Estimated]) -> tuple[str, Alternative] | None:
    """GPU and change of the cheapest change by which a job fits one; None without any."""
    changes = [(row.estimate.gpu, c) for row in rows for c in row.estimate.alternatives]
    return min(changes, key=lambda entry: _worth(entry[1]), default=None)


def cheapest_remedy(rows: Sequence[Estimated]) -> str:
    """The cheapest change by which a job fits a GPU, as a sentence; empty without one."""
    cheapest = cheapest_change(rows)
    if cheapest is None:
        return ""
    gpu, change = cheapest
    which = "" if change.learns_alike else f", {ALTERS},"
    return f" With {change.options}{which} the job fits on {gpu}: {_costs(change)}{_doubt(change)}."


def _worth(change: Alternative) -> tuple[bool, bool, float]:
    unpriced = change.usd is None
    return (not change.learns_alike, unpriced, (change.hours if unpriced else change.usd) or 0.0)


def _runners_up(best: Estimate) -> Iterator[str]:
    """Other recipes on the GPU of an estimate; one that is cheaper may not fit."""
    usd = _usd(best)
    for recipe in best.alternatives:
        is_cheaper = usd is not None and recipe.usd is not None and recipe.usd < usd
        doubt = f" ({'cheaper, but ' * is_cheaper}may not fit)"
        remarks = (
            "" if recipe.learns_alike else f", {ALTERS}",
            "" if recipe.surely_fits else doubt,
            NOT_BY_TRL if CCE in recipe.options else "",
        )
        yield f"{recipe.options}, {_costs(recipe)}{''.join(remarks)}"


def _costs(recipe: Estimate | Alternative) -> str:
    """Price of a recipe, or else its hours, and the batch."""
    usd, hours = _usd(recipe), recipe.hours
    batch = f"batch {recipe.batch_size} x {recipe.micro_batches}"
    cost = "" if hours is None else f"{short(hours)} h, "
    return f"{cost if usd is None else f'${dollars(usd)}, '}{batch}"


def _doubt(change: Alternative) -> str:
    return "" if change.surely_fits else ", too near the limit to be sure"


def _usd(recipe: Estimate | Alternative) -> float | None:
    if isinstance(recipe, Alternative):
        return recipe.usd
    return None if recipe.price is None else recipe.price.usd
