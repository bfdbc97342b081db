"""Profiles of real steps of tiny models under recipes of every kind."""

import re
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from builders.observations import cpu, recipe, tiny_cell
from torch import nn, profiler
from torch.utils.flop_counter import FlopCounterMode

from trials.devices.cpu import CpuDevice
from trials.recipes.recipe import Recipe
from trials.records.model import find_model
from trials.records.profile import Layer, Profile, ProfileRule, Stage
from trials.training.finetune import FineTuning
from trials.training.profiling.module_ranges import Ranges
from trials.training.profiling.profiler import StageMarks, event_flops, profiled

# PEFT asks a transformers model under a name that transformers 5 has deprecated.
pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

RULE = ProfileRule(steps=1, least_seconds=0.0, warmup_steps=0, training_steps=2)
EXAMPLES, LENGTH = 3, 16
EAGER = recipe("full", experts="looped", attention="eager")
LOOPED = EAGER.model_copy(update={"gradient_checkpointing": True})
QLORA = recipe("qlora", precision="fp16")
GROUPED = recipe("full", experts="grouped")
KINDS = {
    "eager": ("mixtral-tiny", EAGER),
    "looped": ("mixtral-tiny", LOOPED),
    "qlora": ("mixtral-tiny", QLORA),
    "grouped": ("blackmamba-tiny", GROUPED),
    "dense": ("llama-tiny", recipe("lora", gradient_checkpointing=True)),
}


def tuning(model: str, settings: Recipe) -> FineTuning:
    """A preset with a recipe after some training steps."""
    made = FineTuning(
        tiny_cell(model, settings, seq_len=LENGTH),
        find_model(model),
        device=torch.device("cpu"),
        seed=0,
    )
    made.step(made.tokens(EXAMPLES))
    return made


@pytest.fixture(scope="module")
def tunings() -> dict[str, FineTuning]:
    """One model of each kind."""
    return {kind: tuning(*arguments) for kind, arguments in KINDS.items()}


@pytest.fixture(scope="module")
def profiles(tunings: dict[str, FineTuning]) -> dict[str, Profile]:
    """The profile of each model."""
    device = CpuDevice(cpu(), threads=1)
    return {
        kind: profiled(made, device, made.tokens(EXAMPLES), RULE) for kind, made in tunings.items()
    }


def kernels(profile: Profile, layer: Layer, stage: Stage | None = None) -> set[str]:
    """Kinds of work in a layer."""
    return {r.kernel for r in profile.rows if r.layer == layer and stage in (None, r.stage)}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_add_up_to_the_profiled_step(
    profiles: dict[str, Profile], tunings: dict[str, FineTuning], kind: str
) -> None:
    """Operators and host account for the step to 5 % in one of three profiles."""

    def share(profile: Profile) -> float:
        return sum(r.seconds for r in profile.rows) / profile.profiled_seconds[0]

    def shares() -> Iterator[float]:
        yield share(profiles[kind])
        made, device = tunings[kind], CpuDevice(cpu(), threads=1)
        for _ in range(2):
            yield share(profiled(made, device, made.tokens(EXAMPLES), RULE))

    assert any(abs(found - 1) < 0.05 for found in shares())


def test_stages_add_up_to_the_step(tunings: dict[str, FineTuning]) -> None:
    """A clock around the stages agrees to 5 % in one of several steps."""
    made = tunings["dense"]
    tokens = made.tokens(EXAMPLES)
    ratios = []
    with StageMarks(made, CpuDevice(cpu(), threads=1)) as marks:
        for _ in range(3):
            started = time.perf_counter()
            stages = marks.timed(lambda: made.step(tokens))
            ratios.append(sum(stages) / (time.perf_counter() - started))
            assert min(stages) > 0
    assert max(ratios) == pytest.approx(1, abs=0.05)


def test_each_family_has_its_layers(profiles: dict[str, Profile]) -> None:
    """Every active layer has forward and backward rows; a frozen embedding has no backward."""
    common: set[Layer] = {"embeddings", "norms", "head", "loss", "other"}
    own: dict[str, set[Layer]] = {
        "eager": {"attention", "experts"},
        "looped": {"attention", "experts"},
        "qlora": {"attention", "experts"},
        "grouped": {"mamba", "experts"},
        "dense": {"attention", "mlp"},
    }
    for kind, profile in profiles.items():
        assert {r.layer for r in profile.rows if r.stage == "forward"} == common | own[kind]
        backward = {r.layer for r in profile.rows if r.stage == "backward"}
        assert backward - {"embeddings"} == (common | own[kind]) - {"embeddings"}
        assert {r.layer for r in profile.rows if r.stage == "optimizer"} == {"optimizer"}


def test_recomputation_has_its_own_rows(profiles: dict[str, Profile]) -> None:
    """Its rows belong to the backward pass; without checkpointing there are none."""
    for kind, layers in (("looped", {"attention", "experts"}), ("dense", {"attention", "mlp"})):
        profile = profiles[kind]
        assert {r.layer for r in profile.rows if r.stage == "recompute"} >= layers
        assert 0 < profile.stage_seconds("recompute") < profile.stage_seconds("backward")
    for kind in ("eager", "qlora", "grouped"):
        assert not any(r.stage == "recompute" for r in profiles[kind].rows)
        assert profiles[kind].stage_seconds("recompute") == 0


def test_work_of_the_experts_is_split_by_kind(profiles: dict[str, Profile]) -> None:
    """Products, adapters, dequantisation, router, top-k choice and gathering have rows."""
    always = {"router", "top-k", "element-wise", "gather/scatter", "host"}
    products = {"matmul gate", "matmul up", "matmul down"}
    assert kernels(profiles["looped"], "experts") >= always | products
    assert kernels(profiles["grouped"], "experts") >= always | {"matmul gate+up", "matmul down"}
    qlora = profiles["qlora"]
    for stage in ("forward", "backward"):
        assert kernels(qlora, "experts", stage) >= products | {"dequantise", "matmul adapter"}
    for kind in ("looped", "grouped", "dense"):
        assert "dequantise" not in {r.kernel for r in profiles[kind].rows}
    assert kernels(profiles["dense"], "mlp") >= products | {"matmul adapter"}


def flops(made: FineTuning) -> FlopCounterMode:
    """FLOPs of a step as torch counts them."""
    with FlopCounterMode(display=False, depth=9) as counter:
        made.step(made.tokens(EXAMPLES))
    return counter


def test_flops_of_each_layer_are_those_that_torch_counts(
    profiles: dict[str, Profile], tunings: dict[str, FineTuning]
) -> None:
    """Torch attributes them in another way; forward, backward and recomputation agree."""
    counted = {kind: flops(tunings[kind]) for kind in ("eager", "looped")}
    for kind, counter in counted.items():
        assert sum(r.flops for r in profiles[kind].rows) == counter.get_total_flops()
    counts = counted["eager"].get_flop_counts()

    def theirs(module: str) -> int:
        return sum(
            sum(operators.values()) for name, operators in counts.items() if re.search(module, name)
        )

    # What goes back through attention it gives to the module above, which holds no other products.
    attention = theirs(r"layers\.\d$") - theirs(r"\.mlp$")
    expected = {"attention": attention, "experts": theirs(r"\.mlp$"), "head": theirs("lm_head$")}
    rows = profiles["eager"].rows
    for layer, of_layer in expected.items():
        assert sum(r.flops for r in rows if r.layer == layer) == of_layer > 0


def test_flops_of_the_grouped_product_are_those_of_the_loop(profiles: dict[str, Profile]) -> None:
    """Three products for each of a token's two experts, once forward and twice backward."""
    config = find_model("blackmamba-tiny").config
    hidden, width = config["hidden_size"], config["intermediate_size"]
    product = 2 * EXAMPLES * LENGTH * 2 * hidden * width
    rows = [r for r in profiles["grouped"].rows if r.layer == "experts"]
    for stage, times in (("forward", 1), ("backward", 2)):
        counts = {r.kernel: r.flops for r in rows if r.stage == stage}
        assert counts["matmul gate+up"] == 2 * times * product
        assert counts["matmul down"] == times * product


@pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_flops_of_attention_count_every_head_of_examples(kernel: str) -> None:
    """This holds with shared keys and values: two products forward, five backward."""
    examples, shared = (3, 8, 16, 32), (3, 2, 16, 32)
    product = 2 * 3 * 8 * 16 * 16 * 32
    name = f"aten::_scaled_dot_product_{kernel}"
    forward = SimpleNamespace(name=name, input_shapes=[examples, shared, shared], cpu_parent=None)
    backward = SimpleNamespace(
        name=f"{name}_backward", input_shapes=[examples, examples, shared, shared], cpu_parent=None
    )
    assert event_flops(forward) == 2 * product
    assert event_flops(backward) == 5 * product


def test_flops_of_products_that_add_are_those_of_the_factors() -> None:
    """The profiler lists the shape of the sum first, and empty shapes of numbers last."""
    total, left, right = (torch.ones(size) for size in ((4, 6), (4, 5), (5, 6)))
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU], record_shapes=True
    ) as recorded:
        torch.addmm(total, left, right, beta=2)
        total.addmm_(left, right)
        torch.addmm(total, left, right, out=torch.empty(4, 6))
        torch.baddbmm(total[None], left[None], right[None])
    counts = [event_flops(event) for event in recorded.events()]
    assert [count for count in counts if count] == 4 * [2 * 4 * 5 * 6]


def test_every_token_goes_to_top_k_experts_in_every_layer(profiles: dict[str, Profile]) -> None:
    """This holds before and after training; a model without experts has no counts."""
    for kind, layers in (("eager", 2), ("looped", 2), ("qlora", 2), ("grouped", 1)):
        load = profiles[kind].load
        assert load is not None
        for counts in (load.before, load.after):
            assert [sum(layer) for layer in counts] == [EXAMPLES * LENGTH * 2] * layers
            assert {len(layer) for layer in counts} == {8}
    assert profiles["dense"].load is None


def our_hooks(model: nn.Module) -> int:
    """Number of the profiler's hooks on a model, without those of transformers."""
    hooks = [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    return sum(getattr(hook, "__module__", "").startswith("trials.training.") for hook in hooks)


def test_no_hook_is_left_on_the_model(
    profiles: dict[str, Profile], tunings: dict[str, FineTuning]
) -> None:
    """The profiler removes its hooks when a profile is complete."""
    assert set(profiles) == set(tunings)
    for made in tunings.values():
        with Ranges(made.model):
            assert our_hooks(made.model) > 10
        assert our_hooks(made.model) == 0
