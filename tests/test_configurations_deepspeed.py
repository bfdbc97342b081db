"""Configurations of DeepSpeed, alone and named by those of trainers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from orchestrator.cli.main import main
from orchestrator.cli.options.value_types import STRATEGIES as OPTION
from orchestrator.configurations.configuration import ConfigurationError
from orchestrator.configurations.estimate_options import with_configuration
from orchestrator.configurations.layouts.deepspeed import deepspeed_of, read_deepspeed
from orchestrator.configurations.layouts.several_gpus import on_several_gpus
from orchestrator.configurations.read_file import read_configuration
from orchestrator.estimating.estimate_request import EstimateRequest
from orchestrator.request import request_of
from trials.recipes.parallel import STRATEGIES, Parallel
from trials.recipes.zero_settings import BY_WIDTH, ZeroSettings

STAGE_3: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_param": {"device": "none"},
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "initial_scale_power": 16},
    "train_batch_size": "auto",
}
SETTINGS = ZeroSettings(
    overlap_comm=True,
    sub_group_size=10**9,
    reduce_bucket_size="auto",
    stage3_prefetch_bucket_size="auto",
    stage3_max_live_parameters=0,
)
AXOLOTL: dict[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3-8B",
    "sequence_len": 1024,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
}


def request(
    folder: Path, values: dict[str, Any], *, ranks: int = 8, **given: Any
) -> EstimateRequest:
    """Request of an estimate on eight GPUs of a configuration in a folder."""
    (folder / "run.yml").write_text(yaml.safe_dump(AXOLOTL | values))
    configuration = read_configuration(folder / "run.yml")
    configuration.check()
    gpu = f"{ranks}xH100-SXM"
    options: Any = with_configuration(configuration, {"gpu": gpu, **given})[0]
    return request_of(EstimateRequest, on_several_gpus(configuration, options, given, [ranks]))


def offloading(settings: dict[str, Any]) -> dict[str, Any]:
    """A file of stage 2 whose optimizer is elsewhere."""
    return {"zero_optimization": {"stage": 2, "offload_optimizer": settings}}


HOST = {"device": "cpu", "pin_memory": True}
NOWHERE = {"device": "none", "buffer_count": 4}


@pytest.mark.parametrize(
    ("places", "offload"),
    [
        ({"offload_optimizer": HOST, "offload_param": NOWHERE}, "optimizer"),
        ({"offload_param": HOST}, "parameters"),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": HOST}, "all"),
        ({"offload_optimizer": NOWHERE}, None),
    ],
)
def test_what_the_host_holds_is_that_of_the_file(
    places: dict[str, Any], offload: str | None
) -> None:
    """Pinned memory is DeepSpeed's default; the estimate's own file has the same places."""
    engine = deepspeed_of({"zero_optimization": {"stage": 3, **places}}, "z.json")
    assert engine.zero.offload == offload
    again = deepspeed_of({"zero_optimization": {"stage": 3, **engine.zero.given()}}, "z.json")
    assert again == engine


def test_stage_and_settings_are_those_of_the_file(tmp_path: Path) -> None:
    """Numbers may be written as 1e9, and sizes of stage 3 without its prefix."""
    file = tmp_path / "z3.json"
    file.write_text(json.dumps(STAGE_3))
    engine = read_deepspeed(file)
    assert (engine.strategy, engine.zero) == ("deepspeed-zero3", SETTINGS)


@pytest.mark.parametrize("content", ["z3.json", "deepspeed/z3.json", STAGE_3])
def test_a_trainer_names_a_file_or_has_its_content(tmp_path: Path, content: object) -> None:
    """The file is looked for beside the configuration, and in folders above; weights are bf16."""
    (tmp_path / "runs" / "deepspeed").mkdir(parents=True)
    (tmp_path / "z3.json").write_text(json.dumps(STAGE_3))
    (tmp_path / "runs" / "deepspeed" / "z3.json").write_text(json.dumps(STAGE_3))
    asked = request(tmp_path / "runs", {"deepspeed": content, "adapter": "lora", "lora_r": 8})
    (layout,) = asked.layouts(8)
    assert layout == Parallel(gpus=8, strategy="deepspeed-zero3", zero=SETTINGS)
    assert (asked.recipe.precision, asked.recipe.adapter_dtype) == ("bf16", None)
    assert asked.recipe.effective_batch == 64


@pytest.mark.parametrize(
    ("places", "offload"),
    [
        ({"offload_param": HOST}, "parameters"),
        ({"offload_optimizer": HOST, "offload_param": HOST}, "all"),
    ],
)
def test_one_gpu_trains_by_a_file_that_offloads(
    places: dict[str, Any], offload: str, tmp_path: Path
) -> None:
    """Without offloading, a file of DeepSpeed is for several."""
    zero = {"stage": 3, **places}
    asked = request(tmp_path, {"deepspeed": {"zero_optimization": zero}}, ranks=1)
    (layout,) = asked.layouts(1)
    assert layout is not None
    assert (layout.gpus, layout.strategy, layout.offload) == (1, "deepspeed-zero3", offload)
    assert asked.recipe.effective_batch == 8
    with pytest.raises(ConfigurationError, match="several GPUs by deepspeed-zero3: give their num"):
        request(tmp_path, {"deepspeed": STAGE_3}, ranks=1)


def test_the_command_line_replaces_the_file_of_a_trainer(tmp_path: Path) -> None:
    """A strategy that is given needs no file."""
    asked = request(tmp_path, {"deepspeed": "missing.json"}, strategy="fsdp2")
    assert (asked.strategy, asked.zero) == ("fsdp2", None)


@pytest.mark.parametrize("optimizer", ["adamw_bnb_8bit", "adamw_torch"])
def test_an_optimizer_that_is_not_simulated_is_named_as_in_the_file(
    tmp_path: Path, optimizer: str
) -> None:
    """With a value of the trainer that is simulated, and that of the command line."""
    values = {"optimizer": optimizer, "deepspeed": {"zero_optimization": {"stage": 2}}}
    line = (
        f"run\\.yml: optimizer: '?{optimizer}'?: not simulated with deepspeed-zero2: set "
        "adamw_torch_fused there, or add --optimizer adamw"
    )
    with pytest.raises(ConfigurationError, match=line):
        request(tmp_path, values)
    assert request(tmp_path, values, optimizer="adamw").recipe.optimizer == "adamw"
    fused = request(tmp_path, values | {"optimizer": "adamw_torch_fused"})
    assert fused.recipe.optimizer == "adamw"


def test_the_command_line_may_offload_nothing(tmp_path: Path) -> None:
    """Whatever the file of a trainer states; without a file it is the default."""
    values = {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": HOST}}}
    offloading, plain = (
        request(tmp_path, values, offload=offload).layouts(8)[0] for offload in (None, "none")
    )
    assert offloading is not None
    assert plain is not None
    assert (offloading.offload, plain.offload) == ("optimizer", None)
    sharded = {"fsdp_config": {"fsdp_version": 2, "offload_params": True}}
    (shards,) = request(tmp_path, sharded, offload="none").layouts(8)
    assert shards == Parallel(gpus=8, strategy="fsdp2")
    for strategy in ("ddp", "fsdp2", "deepspeed-zero3"):
        (layout,) = request(tmp_path, {}, strategy=strategy, offload="none").layouts(8)
        assert layout == Parallel(gpus=8, strategy=strategy)
    assert request(tmp_path, {}, ranks=1, offload="none").layouts(1) == (None,)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """The line says where it was looked for."""
    with pytest.raises(ConfigurationError, match=r"run\.yml: deepspeed: missing\.json: no such"):
        request(tmp_path, {"deepspeed": "missing.json"})
    with pytest.raises(ConfigurationError, match=r"by axolotl fetch deepspeed_configs\), or give"):
        request(tmp_path, {"deepspeed": "deepspeed_configs/missing.json"})


@pytest.mark.parametrize(
    ("batches", "line"),
    [
        ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 64}, None),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps: 8 where .* to 4,"),
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu: 1 where .* to 2"),
        ({"train_batch_size": 8}, "train_batch_size: 8 where .* to 64"),
    ],
)
def test_numbers_that_would_stop_the_trainer_are_refused(
    tmp_path: Path, batches: dict[str, int], line: str | None
) -> None:
    """Transformers compares those of the file with its own."""
    values = {"deepspeed": STAGE_3 | batches}
    if line is None:
        assert request(tmp_path, values).recipe.effective_batch == 64
        return
    with pytest.raises(ConfigurationError, match=rf"run\.yml: deepspeed: {line}"):
        request(tmp_path, values)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"zero_optimization": {"stage": 0}}, "stage: 0 is not simulated: use 1 to 3"),
        ({"zero_optimization": {"stage": True}}, "stage: true is not simulated"),
        ({"zero_optimization": {"stage": 2.0}}, "stage: 2.0 is not simulated: use 1 to 3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "offload_param: device 'nvme' is not simulated: use cpu",
        ),
        (offloading({"device": "cpu", "pin_memory": False}), "offload_optimizer: .* pinned memory"),
        (offloading({"device": "cpu", "ratio": 0.3}), "offload_optimizer: ratio 0.3 is not sim"),
        (offloading({"device": "cpu", "super_offload": True}), "offload_optimizer: super_offload"),
        ({"zero_force_ds_cpu_optimizer": False}, "zero_force_ds_cpu_optimizer: is simulated with"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_quantized_weights: true is not simulated",
        ),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": -3}}, "reduce_bucket_size: must"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": "often"}}, "overlap_comm: must be"),
        ({"fp16": {"enabled": True}}, "fp16: DeepSpeed is simulated with weights in bf16"),
        ({"bf16": {"enabled": False}}, "bf16: DeepSpeed is simulated with weights in bf16"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer: type 'Lamb' is not simulated"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: .* is not simulated"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "data_types: .*fp32.* is not simulated"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads: true is not simulated",
        ),
        ({"communication_data_type": "fp32"}, "communication_data_type: 'fp32' is not simulated"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast: .* is not"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine: .* is not simulated: remove it"),
        ({"progressive_layer_drop": {"enabled": True, "theta": 0.5}}, "progressive_layer_drop: "),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile: true is not simulated"),
        ({"zero_optimization": 3}, "must have zero_optimization"),
    ],
)
def test_other_files_are_refused_by_their_keys(changes: dict[str, Any], problem: str) -> None:
    """Each line has the file, the key and a remedy."""
    with pytest.raises(ConfigurationError) as error:
        deepspeed_of(STAGE_3 | changes, "z.json")
    assert re.match(f"z.json: {problem}", str(error.value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_clipping": 1.0, "scheduler": {"type": "WarmupLR"}, "steps_per_print": 2000},
        {"zero_allow_untested_optimizer": True, "wall_clock_breakdown": False, "_comment": "mine"},
        {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}, "hybrid_engine": None},
        {"data_types": {"grad_accum_dtype": None}, "progressive_layer_drop": {}},
        {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bf16"},
        {"activation_checkpointing": {"partition_activations": True}, "tensorboard": {"a": 1}},
        {"compile": {"disable": False, "backend": "inductor"}, "bf16": {"enabled": True}},
    ],
)
def test_keys_that_change_no_step_are_accepted(changes: dict[str, Any]) -> None:
    """Of batches, optimizers and logs, switched off, or with DeepSpeed's own default."""
    assert deepspeed_of(STAGE_3 | changes, "z.json").zero == SETTINGS


@pytest.mark.parametrize("text", ['{"a', "[]", "null", "[" * 3000])
def test_a_file_that_is_no_configuration_is_one_line(tmp_path: Path, text: str) -> None:
    """It names the file."""
    file = tmp_path / "z.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"z\.json: (cannot be read|must have)"):
        read_deepspeed(file)


def test_settings_are_part_of_the_key_of_a_layout() -> None:
    """Layouts with other sizes are other cells."""
    plain, set_ = (Parallel(gpus=2, strategy="deepspeed-zero2", zero=z) for z in (None, SETTINGS))
    assert plain.key == "2xdeepspeed-zero2"
    assert set_.key.startswith("2xdeepspeed-zero2-")
    assert Parallel.model_validate_json(set_.model_dump_json()) == set_
    with pytest.raises(ValueError, match="zero has settings of DeepSpeed, not of ddp"):
        Parallel(gpus=2, strategy="ddp", zero=SETTINGS)


def test_a_layout_states_what_the_host_holds() -> None:
    """Beside its strategy or among the settings of ZeRO; keys say it."""
    stage_3 = {"gpus": 2, "strategy": "deepspeed-zero3"}
    layout = Parallel.model_validate({**stage_3, "offload": "all"})
    assert layout.key == "2xdeepspeed-zero3-all-offloaded"
    assert layout.zero == BY_WIDTH.model_copy(update={"offload": "all"})
    assert Parallel.model_validate_json(layout.model_dump_json()) == layout
    assert Parallel.model_validate({**stage_3, "offload": "none"}) == Parallel(**stage_3)
    with_sizes = Parallel.model_validate({**stage_3, "zero": SETTINGS, "offload": "optimizer"})
    assert with_sizes.zero == SETTINGS.model_copy(update={"offload": "optimizer"})
    assert re.fullmatch(r"2xdeepspeed-zero3-optimizer-offloaded-\w{6}", with_sizes.key)


@pytest.mark.parametrize(
    ("strategy", "offload", "line"),
    [
        ("ddp", "optimizer", "offload is a choice of DeepSpeed, fsdp2 and hsdp, not of ddp"),
        ("tp", "all", "offload is a choice of DeepSpeed, fsdp2 and hsdp, not of tp"),
        ("fsdp2", "optimizer", "fsdp2 offloads weights, gradients and optimizer together: use all"),
        ("deepspeed-zero2", "all", "offload all needs deepspeed-zero3, not deepspeed-zero2"),
        ("deepspeed-zero3", "disk", "offload"),
    ],
)
def test_what_the_host_cannot_hold_is_refused(strategy: str, offload: str, line: str) -> None:
    """The weights of stages 1 and 2 are whole on each GPU."""
    with pytest.raises(ValidationError, match=line):
        Parallel.model_validate({"gpus": 2, "strategy": strategy, "offload": offload})


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--deepspeed", "none.json"], "none.json: no file of DeepSpeed"),
        (["--deepspeed", "none.json", "--strategy", "ddp"], "exclude each other"),
        (["--strategy", "deepspeed-zero2"], "deepspeed-zero2 on one GPU shares nothing"),
        (["--gpus", "2", "--offload", "optimizer"], "--offload optimizer needs --strategy deep"),
        (
            ["--gpus", "2", "--offload", "all", "--strategy", "deepspeed-zero2"],
            "--offload all needs --strategy deepspeed-zero3 or fsdp2 or hsdp, not deepspeed-zero2",
        ),
        (
            ["--gpus", "2", "--offload", "optimizer", "--strategy", "fsdp2"],
            "--offload optimizer: fsdp2 offloads weights, gradients and optimizer together: use",
        ),
        (["--offload", "all", "--strategy", "fsdp2"], "--offload all on one GPU is DeepSpeed's"),
        (["--offload", "none", "--strategy", "deepspeed-zero2"], "on one GPU shares nothing"),
    ],
)
def test_a_command_with_a_mistake_is_one_line(
    options: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is traced."""
    asked = ["--model", "llama-tiny", "--seq-len", "64", "--gpu", "A40"]
    assert main(["estimate", *asked, *options]) == 1
    assert line in capsys.readouterr().err


def test_the_option_has_all_strategies() -> None:
    """It lists them without the import of records."""
    assert OPTION == STRATEGIES


@pytest.mark.long
def test_an_estimate_says_that_varying_lengths_are_simulated_at_their_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under DeepSpeed; of a data set whose rows are all alike there is nothing to say."""
    monkeypatch.chdir(tmp_path)
    job = ["--model", "llama-tiny", "--method", "full", "--gpu", "2xA40"]
    for lengths, says in (("16,50\n64,50\n", True), ("64,100\n", False)):
        Path("lengths.csv").write_text(f"tokens,examples\n{lengths}", encoding="utf-8")
        asked = ["--strategy", "deepspeed-zero2", "--length-histogram", "lengths.csv"]
        assert main(["estimate", *job, *asked]) == 0
        assert ("fragment under DeepSpeed is not simulated" in capsys.readouterr().out) is says
