"""Configurations that train on several GPUs: what they come to, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.configurations.configuration import Configuration, ConfigurationError
from orchestrator.configurations.estimate_options import with_configuration
from orchestrator.configurations.layouts.several_gpus import on_several_gpus
from orchestrator.configurations.read_file import read_configuration, read_configuration_text
from orchestrator.estimating.choosing.layouts import names_by_count
from orchestrator.estimating.estimate_request import EstimateRequest
from orchestrator.request import request_of

AXOLOTL: dict[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3-8B",
    "sequence_len": 1024,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
}
TRL: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "packing": False}
FACTORY: dict[str, Any] = TRL | {"stage": "sft", "do_train": True, "bf16": True}
FACTORY.pop("packing")
V2 = {"fsdp_version": 2}
FSDP, DEEPSPEED = {"distributed_type": "FSDP"}, {"distributed_type": "DEEPSPEED"}
ZERO_2 = {"zero_stage": 2, "offload_optimizer_device": "none"}
CONTEXTS = {"parallelism_config": {"parallelism_config_cp_size": 2}}


def read(values: dict[str, Any]) -> Configuration:
    """Read a configuration as its file has it."""
    return read_configuration_text(yaml.safe_dump(values), Path("f.yaml"))


def request(values: dict[str, Any], **given: Any) -> EstimateRequest:
    """Request of an estimate of a configuration under options of the command line."""
    configuration = read(values)
    configuration.check()
    options: Any = with_configuration(configuration, given)[0]
    first = request_of(EstimateRequest, options)
    counts = names_by_count(first.gpu, first.counts)
    return request_of(EstimateRequest, on_several_gpus(configuration, options, given, counts))


@pytest.mark.parametrize(
    ("values", "strategy"),
    [
        (AXOLOTL | {"fsdp_config": V2}, "fsdp2"),
        (AXOLOTL | {"fsdp_version": 2, "fsdp": ["full_shard", "auto_wrap"]}, "fsdp2"),
        (AXOLOTL | {"fsdp_version": "2", "fsdp_config": {"reshard_after_forward": True}}, "fsdp2"),
        (AXOLOTL | {"fsdp_config": V2 | {"fsdp_offload_params": False}}, "fsdp2"),
        (AXOLOTL | {"ddp": True}, "ddp"),
        (AXOLOTL, "ddp"),
        (TRL | {"fsdp": True}, "fsdp2"),
        (TRL | {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}, "fsdp2"),
        (TRL | {"fsdp_config": {"version": 1}}, "ddp"),
        (FACTORY | {"fsdp": "full_shard auto_wrap"}, "fsdp2"),
        (FACTORY, "ddp"),
    ],
)
def test_a_file_trains_by_fsdp2_or_else_by_ddp(values: dict[str, Any], strategy: str) -> None:
    """On several GPUs, the layout is that of the file; what is not sharded is copied."""
    assert request(values, gpu="8xH100-SXM").strategy == strategy


@pytest.mark.parametrize(
    ("values", "is_on_host"),
    [
        (AXOLOTL | {"fsdp_config": V2 | {"offload_params": True}}, True),
        (AXOLOTL | {"fsdp_config": V2 | {"fsdp_offload_params": True}}, True),
        (AXOLOTL | {"fsdp_config": V2 | {"offload_params": False}}, False),
        (TRL | {"fsdp": True, "fsdp_config": {"cpu_offload": True}}, True),
        (FACTORY | {"fsdp": "full_shard auto_wrap offload"}, True),
        (FACTORY | {"fsdp": "full_shard"}, False),
    ],
)
def test_a_file_may_leave_its_shards_to_the_host(
    values: dict[str, Any], *, is_on_host: bool
) -> None:
    """The command line may train otherwise; one GPU has no shards."""
    (layout,) = request(values, gpu="8xH100-SXM").layouts(8)
    assert layout is not None
    assert layout.offload == ("all" if is_on_host else None)
    asked = request(values, gpu="8xH100-SXM", strategy="ddp")
    assert (asked.strategy, asked.offload) == ("ddp", None)
    stated = {"offload": "all", "strategy": "fsdp2"}
    (layout,) = request(values, gpu="8xH100-SXM", **stated).layouts(8)
    assert layout is not None
    assert layout.shards_on_host


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (AXOLOTL | {"fsdp": ["full_shard"]}, "fsdp"),
        (AXOLOTL | {"fsdp_config": {"fsdp_version": 1}}, "fsdp_config"),
        (TRL | {"fsdp": True, "fsdp_config": {"offload_params": True}}, "fsdp"),
        (AXOLOTL | {"fsdp_config": V2 | {"reshard_after_forward": False}}, "fsdp_config"),
        (AXOLOTL | {"fsdp_config": V2 | {"auto_wrap_policy": "SIZE_BASED_WRAP"}}, "fsdp_config"),
        (AXOLOTL | {"fsdp_config": V2 | {"mixed_precision_policy": "fp16"}}, "fsdp_config"),
        (AXOLOTL | {"fsdp_version": 2, "fsdp": ["hybrid_shard"]}, "fsdp"),
        (AXOLOTL | {"fsdp_config": V2, "dp_replicate_size": 2}, "dp_replicate_size"),
        (AXOLOTL | {"dp_shard_size": 2}, "dp_shard_size"),
        (AXOLOTL | {"dp_replicate_size": "all"}, "dp_replicate_size"),
        (AXOLOTL | {"deepspeed": "zero3.json", "fsdp_config": V2}, "fsdp_config"),
        (AXOLOTL | {"fsdp_config": V2, "context_parallel_size": 2}, "context_parallel_size"),
        (TRL | {"fsdp": "shard_grad_op"}, "fsdp"),
        (TRL | {"fsdp": True, "fsdp_config": {"version": 1}}, "fsdp"),
    ],
)
def test_other_layouts_are_refused_by_name(values: dict[str, Any], key: str) -> None:
    """FSDP1, partial shards and others are refused; transformers reads no ``offload_params``."""
    reason = "several GPUs|whole number|excludes deepspeed"
    with pytest.raises(ConfigurationError, match=f"f.yaml: {key}: .*({reason})"):
        read(values).check()


def test_each_gpu_takes_the_micro_batches_of_the_file() -> None:
    """The effective batch is that of all GPUs."""
    asked = request(AXOLOTL | {"fsdp_config": V2}, gpu="8xH100-SXM")
    assert (asked.batch_size, asked.recipe.effective_batch) == (2, 64)


def test_the_gpus_of_a_node_take_one_batch_of_the_file_under_tp() -> None:
    """Eight GPUs have the effective batch of the file."""
    asked = request(AXOLOTL, gpu="8xH100-SXM", strategy="tp")
    assert (asked.batch_size, asked.recipe.effective_batch) == (2, 8)


def test_a_stated_effective_batch_stays() -> None:
    """What the command line states is that of all GPUs, for any number of them."""
    asked = request(AXOLOTL, gpu="H100-SXM", gpus=(1, 2), effective_batch=16)
    assert asked.recipe.effective_batch == 16


def test_the_number_of_shards_is_that_of_the_gpus() -> None:
    """A file that states how many GPUs share a model needs no option."""
    asked = request(AXOLOTL | {"fsdp_config": V2, "dp_shard_size": 4}, gpu="H100-SXM")
    assert (asked.gpus, asked.strategy, asked.recipe.effective_batch) == ((4,), "fsdp2", 32)


def test_one_gpu_is_answered_as_before() -> None:
    """A file that shards nothing has on one GPU the options that it states."""
    asked = request(AXOLOTL, gpu="H100-SXM")
    assert (asked.recipe.effective_batch, asked.strategy) == (8, "auto")


def test_the_number_of_gpus_must_be_known_and_one() -> None:
    """A layout without its number of GPUs, or with several, is an error that says what to give."""
    with pytest.raises(ConfigurationError, match="by fsdp2: give their number, as --gpu 8xH100"):
        request(AXOLOTL | {"fsdp_config": V2}, gpu="H100-SXM")
    with pytest.raises(
        ConfigurationError, match="which are 1, 2: give one, as --gpus 2, or --effective-batch N"
    ):
        request(AXOLOTL, gpu="H100-SXM", gpus=(1, 2))


def test_layers_are_checkpointed_by_fsdp_too() -> None:
    """FSDP's own checkpointing is checkpointing."""
    config = V2 | {"activation_checkpointing": True}
    assert request(AXOLOTL | {"fsdp_config": config}, gpu="2xA40").recipe.gradient_checkpointing


SHARDED = [
    AXOLOTL | {"fsdp_config": V2},
    TRL | {"fsdp": True, "gradient_accumulation_steps": 4},
    FACTORY | {"fsdp": True, "gradient_accumulation_steps": 4},
]
EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


@pytest.mark.parametrize("values", SHARDED)
def test_whole_gradients_between_micro_batches_are_named(values: dict[str, Any]) -> None:
    """Trainers reduce shards' gradients once a step, unless told otherwise; that is simulated."""
    key = "accelerator_config"

    def is_assumed(**changed: Any) -> bool:
        configuration = read(values | changed)
        remarks = with_configuration(configuration, {})[1]
        said = [text for text in remarks if text.startswith(f"Assumed for {key}: ")]
        assert all("sync_each_batch" in text for text in said)
        return len(said) == 1

    assert is_assumed()
    assert is_assumed(**{key: {"split_batches": True}})
    assert not is_assumed(**{key: EACH_BATCH})
    assert not is_assumed(gradient_accumulation_steps=1)
    copied = {name: v for name, v in values.items() if not name.startswith("fsdp")}
    (line,) = (line for line in read(copied | {key: EACH_BATCH}).lines if line.key == key)
    assert line.key_class == "irrelevant"


def test_accelerate_casts_trained_weights_up() -> None:
    """Full training of TRL in bf16 holds fp32 shards under FSDP2, and axolotl's holds bf16."""
    bf16 = TRL | {"dtype": "bfloat16"}
    assert request(bf16, gpu="2xA40").recipe.precision == "bf16"
    assert request(bf16 | {"fsdp": True}, gpu="2xA40").recipe.precision == "bf16-mixed"
    stated = request(bf16 | {"fsdp": True}, gpu="2xA40", effective_batch=32)
    assert stated.recipe.precision == "bf16-mixed"
    assert request(AXOLOTL | {"fsdp_config": V2}, gpu="2xA40").recipe.precision == "bf16"


def test_deepspeed_has_one_dtype_where_none_is_stated() -> None:
    """TRL's default is autocast, which accelerate leaves out."""
    values = TRL | {"deepspeed": {"zero_optimization": {"stage": 2}}}
    assert request(values, gpu="2xA40").recipe.precision == "bf16"


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({**FSDP, "fsdp_config": V2}, ", with --gpus 8 --strategy fsdp2"),
        (
            {**FSDP, "fsdp_config": V2, "num_machines": 2},
            ", with --gpus 8 --strategy fsdp2 --nodes 2",
        ),
        ({**FSDP, "fsdp_config": {"fsdp_version": 1}}, ""),
        (
            {**FSDP, "fsdp_config": {**V2, "fsdp_offload_params": True}},
            ", with --gpus 8 --strategy fsdp2 --offload all",
        ),
        ({**FSDP, "fsdp_config": V2, **CONTEXTS}, ""),
        ({"distributed_type": "MULTI_GPU"}, ", with --gpus 8 --strategy ddp"),
        ({"distributed_type": "MULTI_GPU", "num_processes": 1}, ""),
        ({**DEEPSPEED, "deepspeed_config": ZERO_2}, ", with --gpus 8 --strategy deepspeed-zero2"),
        (
            {**DEEPSPEED, "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}},
            ", with --gpus 8 --strategy deepspeed-zero3 --offload parameters",
        ),
        ({**DEEPSPEED, "deepspeed_config": {**ZERO_2, "offload_optimizer_device": "nvme"}}, ""),
        (DEEPSPEED, ""),
    ],
)
def test_a_file_of_accelerate_names_the_options_that_it_comes_to(
    tmp_path: Path, values: dict[str, Any], options: str
) -> None:
    """It describes machines, which options state beside the trainer's own file."""
    file = tmp_path / "accelerate.yaml"
    machines = {"compute_environment": "LOCAL_MACHINE", "num_processes": 8}
    file.write_text(yaml.safe_dump(machines | values), "utf-8")
    with pytest.raises(ConfigurationError, match=f"give the trainer's own file{options}$"):
        read_configuration(file)
