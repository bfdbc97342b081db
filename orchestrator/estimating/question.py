"""Job to estimate, and the GPUs that it can be estimated on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from fitting.families.cell_step_time import Batch
from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from orchestrator.pricing.host_memory import OffersByHost, by_host_memory
from orchestrator.pricing.layout_offers import layout_offers
from orchestrator.pricing.offer_constraints import Constraints
from orchestrator.pricing.own_cards import is_electricity
from orchestrator.pricing.price_drift import PriceDrift
from orchestrator.request import validation_lines
from orchestrator.spec.job import Job
from orchestrator.spec.recipe_options import plain
from trials.recipes.layout_support import unsupported
from trials.recipes.optional_packages import EXTRAS
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import (
    has_bf16,
    has_square_mask,
    incompatibility,
    with_defaults,
)
from trials.records.model import Model
from trials.simulation.simulated_cell import CONTEXT_BYTES, GIB
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.trace_request import not_simulated

FLAGS = frozenset({"expandable_segments"})
"""Changes whose option takes no value."""


class EstimateError(UserError):
    """The job cannot be estimated; one line for each reason."""


@dataclass(frozen=True, slots=True)
class Question:
    """Job to estimate on every GPU.

    Attributes:
        fp16_recipe: the recipe on GPUs without bf16.
        recipe_text: source of the recipe, in a line.
        active_experts: experts that each token is routed to; None for the model's own number.
        seq_len: tokens of the longest example, padding included.
        image_tokens: tokens of each example that come from images; None for text alone.
        finds_seq_len: whether ``seq_len`` is the longest to try, and each GPU has its own.
        batch: examples per step, or the largest that fits, or the fastest of several.
        drift: change of prices since they were recorded.
        routing_draws: number of draws of the experts' shares, for the spread of the peak.
        expandable_segments: setting of PyTorch's allocator.
        expands_on_several: whether the trainer turns that setting on for several GPUs.
        is_own: whether the user owns the GPUs, and pays their electricity alone.
        assumes_batch: whether the effective batch is assumed.
        by_default: options that were not given, so that defaults define the job.
        draws_lengths: whether runs of varying lengths are replayed where the lengths vary.
        changes: options that differ from the given ones, by name.
        parallel: layout of several GPUs; absent for one.
    """

    model: Model
    recipe: Recipe
    fp16_recipe: Recipe
    recipe_text: str
    active_experts: int | None
    seq_len: int
    batch: Batch
    batch_limit: int
    workload: Job
    constraints: Constraints
    drift: PriceDrift
    routing_draws: int
    expandable_segments: bool
    image_tokens: int | None = None
    finds_seq_len: bool = False
    by_default: tuple[str, ...] = ()
    is_own: bool = False
    assumes_batch: bool = False
    draws_lengths: bool = True
    expands_on_several: bool = False
    changes: Mapping[str, object] = field(default_factory=dict)
    parallel: Parallel | None = None

    @property
    def has_square_mask(self) -> bool:
        """Whether a mask grows with the square of the batch."""
        return has_square_mask(self.recipe, self.model)

    @property
    def ranks(self) -> int:
        """GPUs that train together."""
        return 1 if self.parallel is None else self.parallel.gpus

    @property
    def data_parallel_ranks(self) -> int:
        """GPUs, or groups of them under ``tp``, that train on parts of their own of a batch."""
        return 1 if self.parallel is None else self.parallel.data_parallel_ranks

    @property
    def nodes(self) -> int:
        """Nodes that these GPUs are on."""
        return 1 if self.parallel is None else self.parallel.nodes

    @property
    def rank_recipe(self) -> Recipe:
        """Recipe of one GPU, whose effective batch is its part of the whole one."""
        return self.recipe.of_rank(self.data_parallel_ranks)

    def offers_of(self, gpu: Gpu, catalog: Catalog, host_gib: float | None) -> OffersByHost:
        """Offers with as many GPUs a node, at the price of all nodes, by the memory of a host.

        They are rented ones, or the electricity of cards that the user owns.
        """
        offers = filter(self._is_of_kind, catalog.offers(gpu.key))
        return by_host_memory(layout_offers(offers, self.parallel), host_gib)

    def allows(self, offer: Offer) -> bool:
        """Whether the constraints allow an offer; they do not apply to cards that the user owns."""
        return self._is_of_kind(offer) and (self.is_own or self.constraints.allows(offer))

    def _is_of_kind(self, offer: Offer) -> bool:
        return is_electricity(offer) is self.is_own

    def options_text(self) -> str:
        """The changes as options of the command line."""
        return " ".join(
            f"--{name.replace('_', '-')}{'' if name in FLAGS else f' {plain(value)}'}"
            for name, value in self.changes.items()
        )

    def cell(self, gpu: Gpu) -> Cell:
        """Simulated cell on one GPU.

        Raises:
            EstimateError: the recipe or model cannot run there; one line with the reason.
        """
        active = self.active_experts or self.model.active_experts
        if self.active_experts is not None and self.model.experts is None:
            raise EstimateError(f"--active-experts: {self.model.name} has no experts: leave it out")
        stated = self.recipe if has_bf16(gpu) else self.fp16_recipe
        recipe = with_defaults(stated, self.model, gpu)
        reason = incompatibility(recipe, self.model, gpu, frozenset(EXTRAS)) or not_simulated(
            recipe, self.model, gpu
        )
        if reason is not None:
            raise EstimateError(f"{gpu.key}: {reason}")
        if self.parallel is not None and (reason := self._unsupported(recipe, self.parallel)):
            raise EstimateError(f"{self.ranks}x{gpu.key}: {reason}")
        try:
            return Cell(
                gpu=gpu.key,
                simulated=True,
                model=self.model.name,
                recipe=recipe,
                experts=self.model.experts,
                active_experts=active,
                seq_len=self.seq_len,
                parallel=self.parallel,
                image_tokens=self.image_tokens,
            )
        except ValidationError as error:
            raise EstimateError(validation_lines(error)) from None

    def _unsupported(self, recipe: Recipe, layout: Parallel) -> str | None:
        if self.image_tokens is not None and layout.is_sharded:
            return (
                f"{layout.strategy} of a vision-language model is not estimated: use ddp, or one "
                "GPU"
            )
        return unsupported(recipe, self.model.text, layout)


EstimatedJob = tuple[Question, Gpu]
"""A question, and a GPU that it is asked of."""
Placement = tuple[str, Parallel | None, bool]
"""Key of a GPU, the layout of a question that is asked of it, and whether the user owns it."""


def placement(question: Question, gpu: Gpu) -> Placement:
    """Key of the GPU, layout and ownership of the question, which compared recipes share."""
    return gpu.key, question.parallel, question.is_own


def obstacle(question: Question, gpu: Gpu) -> str | None:
    """Reason why a job cannot be estimated on a GPU; None where it can."""
    try:
        question.cell(gpu)
    except EstimateError as error:
        return str(error)
    if gpu.usable_memory_bytes is None and gpu.marketed_memory_gb is None:
        return f"{gpu.key}: its memory is unknown: give --memory-gib"
    if usable_bytes(gpu, question.recipe) <= 0:
        share = question.recipe.generation_share
        vllm = f" and vLLM {share:.0%} of its memory" if share else ""
        context = f"CUDA's context alone takes {CONTEXT_BYTES / GIB:g} GiB{vllm}"
        return f"{gpu.key}: {context}: give more memory"
    return None
