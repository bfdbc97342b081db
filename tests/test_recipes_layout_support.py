"""Models and recipes that tensor parallelism takes, and its layouts."""

import re
from typing import Any

import pytest
from builders.observations import recipe
from pydantic import ValidationError

from trials.recipes.layout_support import SPLIT_FAMILIES, unmeasured, unsupported
from trials.recipes.parallel import Parallel, ZeroStrategy
from trials.recipes.recipe import Recipe
from trials.records.model import find_model

EIGHT = Parallel(gpus=8, strategy="tp")
LLAMA = find_model("llama-3.1-8b").config


def test_the_degree_is_that_of_a_node_and_divides_the_ranks_of_a_batch() -> None:
    """A stated degree of the same size is the same record, and has the same key."""
    alone = Parallel(gpus=16, strategy="tp", nodes=2)
    assert (alone.degree, alone.data_parallel_ranks) == (8, 2)
    assert alone == Parallel(gpus=16, strategy="tp", nodes=2, degree=8)
    assert alone.on_one_node.data_parallel_ranks == 2
    assert (EIGHT.key, alone.key) == ("8xtp", "16xtp-8degree-2nodes")
    assert (EIGHT.is_gathered, alone.is_gathered) == (False, True)
    assert (EIGHT.sharers, alone.sharers) == ("1 group of 8 GPUs", "2 groups of 8 GPUs")


def test_other_layouts_have_no_degree_in_their_records() -> None:
    """Records of them are what they were, and all their GPUs share a batch."""
    layout = Parallel(gpus=8, strategy="fsdp2")
    assert "degree" not in layout.model_dump()
    assert layout.data_parallel_ranks == 8
    assert Parallel.model_validate(alone := EIGHT.model_dump()) == EIGHT
    assert alone["degree"] == 8


def test_a_layout_may_leave_its_shards_to_the_host() -> None:
    """It says so as DeepSpeed's do, and its key names it; other layouts are what they were."""
    layout = Parallel.model_validate({"gpus": 8, "strategy": "fsdp2", "offload": "all"})
    assert layout == Parallel(gpus=8, strategy="fsdp2", shards_on_host=True)
    assert Parallel.model_validate_json(layout.model_dump_json()) == layout
    assert (layout.key, layout.offload) == ("8xfsdp2-all-offloaded", "all")
    plain = Parallel(gpus=8, strategy="fsdp2")
    assert Parallel.model_validate({"gpus": 8, "strategy": "fsdp2", "offload": "none"}) == plain
    assert "shards_on_host" not in plain.model_dump()
    with pytest.raises(ValidationError, match="shards_on_host is a choice of fsdp2 and hsdp"):
        Parallel(gpus=8, strategy="deepspeed-zero3", shards_on_host=True)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"strategy": "deepspeed-zero2", "zero": {"offload": "optimizer"}, "offload": "none"},
            "offload none contradicts zero: {offload: optimizer}: leave out one of them",
        ),
        (
            {"strategy": "deepspeed-zero3", "zero": {"offload": "optimizer"}, "offload": "all"},
            "offload all contradicts zero: {offload: optimizer}: leave out one of them",
        ),
        (
            {"strategy": "fsdp2", "shards_on_host": True, "offload": "none"},
            "offload none contradicts shards_on_host: true: leave out one of them",
        ),
    ],
)
def test_two_fields_of_a_layout_do_not_contradict_each_other(
    fields: dict[str, Any], line: str
) -> None:
    """What the host holds is stated once, or twice alike; ``null`` states nothing."""
    with pytest.raises(ValidationError, match=re.escape(line)):
        Parallel.model_validate({"gpus": 8, **fields})
    plain = Parallel.model_validate({"gpus": 8, **fields, "offload": None})
    assert Parallel.model_validate({"gpus": 8, **fields, "offload": plain.offload}) == plain


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_32bit", "torchao_adamw_4bit"])
def test_shards_on_the_host_are_updated_by_pytorch(optimizer: str) -> None:
    """Those of bitsandbytes and torchao are a GPU's."""
    layout = Parallel(gpus=2, strategy="fsdp2", shards_on_host=True)
    reason = unsupported(recipe("lora", optimizer=optimizer), LLAMA, layout)
    assert reason == f"optimizer {optimizer} is not simulated with fsdp2: use adamw"
    assert unsupported(recipe("qlora"), LLAMA, layout) is None


@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_the_plans_of_the_families_are_of_two_styles(family: str) -> None:
    """Transformers divides the layers of attention and of the block after it, and nothing else."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - seconds

    plan = CONFIG_MAPPING[family].base_model_tp_plan
    assert set(plan.values()) == {"colwise", "rowwise"}
    assert {name.rsplit(".", 1)[0] for name in plan} == {"layers.*.self_attn", "layers.*.mlp"}


def test_adapters_in_four_bits_are_refused_by_name() -> None:
    """The line says what to use, and a measurement is refused for the same reason."""
    line = "method qlora is not simulated with tp: use lora, or ddp"
    assert unsupported(recipe("qlora"), LLAMA, EIGHT) == line
    measured = line.replace("not simulated", "not measured")
    assert unmeasured(recipe("qlora"), LLAMA, EIGHT) == measured


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"model_type": "qwen3"},
            "model_type qwen3 is not simulated with tp, only llama, mistral, qwen2, smollm3: use l",
        ),
        ({"model_type": "phi3"}, "model_type phi3 is not simulated with tp, only llama, "),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4 of the model cannot be divided among "),
        ({"num_key_value_heads": None}, "tp needs num_key_value_heads, which the model's "),
        (
            {"intermediate_size": 9},
            "intermediate_size 9 of the model cannot be divided among the 8",
        ),
    ],
)
def test_models_that_cannot_be_split_are_refused_by_name(
    changes: dict[str, object], line: str
) -> None:
    """The line has the value."""
    assert (unsupported(recipe("full"), LLAMA | changes, EIGHT) or "").startswith(line)


def test_what_is_taken_has_no_reason() -> None:
    """Nor has any other strategy."""
    for method in ("full", "lora"):
        assert unsupported(recipe(method), LLAMA, EIGHT) is None
        assert unmeasured(recipe(method), LLAMA, EIGHT) is None
    assert unsupported(recipe("lora"), LLAMA | {"model_type": "qwen3"}, EIGHT) is None
    assert unsupported(recipe("lora"), {}, Parallel(gpus=2, strategy="ddp")) is None


BF16 = recipe("full", precision="bf16")


@pytest.mark.parametrize(
    ("strategy", "changes", "line"),
    [
        ("deepspeed-zero1", {"precision": "bf16-mixed"}, "precision bf16-mixed is not simulated"),
        ("deepspeed-zero2", {"optimizer": "adafactor"}, "optimizer adafactor is not simulated"),
        ("deepspeed-zero2", {"task": "reward", "loss": None}, "task reward is not simulated"),
        ("deepspeed-zero2", {"liger_kernels": True}, "liger_kernels are not simulated"),
        ("deepspeed-zero3", {"loss": "chunked"}, "loss chunked is not simulated"),
        ("deepspeed-zero2", {"experts": "looped"}, "experts looped are not simulated"),
        ("deepspeed-zero3", {"method": "qlora", "lora_rank": 4}, "method qlora is not simulated"),
    ],
)
def test_what_deepspeed_does_not_take_is_refused_by_name(
    strategy: ZeroStrategy, changes: dict[str, object], line: str
) -> None:
    """The line names the strategy and an alternative; a measurement is refused alike."""
    layout = Parallel(gpus=2, strategy=strategy)
    changed = Recipe.model_validate(BF16.model_dump() | changes)
    assert (unsupported(changed, LLAMA, layout) or "").startswith(f"{line} with {strategy}")
    assert "not measured" in (unmeasured(changed, LLAMA, layout) or "")
    assert unsupported(BF16, LLAMA, layout) is None
    assert unmeasured(BF16, LLAMA, layout) is None


def test_quantised_adapters_are_measured_by_stages_that_keep_weights_whole() -> None:
    """Stage 2 takes QLoRA, on real ranks, too."""
    adapters = recipe("qlora", precision="bf16")
    assert unmeasured(adapters, LLAMA, Parallel(gpus=2, strategy="deepspeed-zero2")) is None


@pytest.mark.parametrize(("count", "name"), [(1, "A40"), (8, "8xA40")])
def test_one_gpu_has_its_own_name(count: int, name: str) -> None:
    """The same in estimates and rankings."""
    fields = {"gpus": count, "strategy": "deepspeed-zero2", "offload": "optimizer"}
    assert Parallel.model_validate(fields).counted("A40") == name
