"""``FineTuneForecast`` in a real ``trl.SFTTrainer`` on the CPU."""

import datetime as dt
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.runs import made_run
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from trainer_reference.counting import PeakCounter
from trainer_reference.models import VOCABULARY, tokenizer, write_model
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from gpu_catalog.catalog import load_catalog
from gpu_catalog.errors import UserError
from orchestrator.callback import FineTuneForecast
from orchestrator.callback.step_forecast import step_forecast
from orchestrator.callback.step_meter import MeasuredStep
from orchestrator.callback.training_cost import TrainingCost
from orchestrator.callback.training_measurement import TrainingMeasurement
from orchestrator.callback.training_run import record
from orchestrator.cli.main import main
from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import Basis, MemoryReading
from trials.training.finetune import model_tensors

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore"),  # trainers warn
]
PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "forecast-a-training.md"
GIB = 2**30


@dataclass(frozen=True)
class Trained:
    """A training that was counted from outside."""

    callback: FineTuneForecast
    counted_gib: float
    steps: int
    lines: list[str]
    losses: list[float]


def counted(trainer: Trainer, callback: FineTuneForecast, lines: list[str]) -> Trained:
    """Train, and count live tensors."""
    counter = PeakCounter(model_tensors(trainer.model))
    with counter:
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    peak = counter.peak_bytes / GIB
    return Trained(callback, peak, trainer.state.global_step, lines, losses)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Working directory with ``my-model`` and ``data.jsonl``, as the page names them."""
    path = tmp_path_factory.mktemp("training")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        patched.setenv("HF_DATASETS_CACHE", str(path / "datasets"))
        patched.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        patched.chdir(path)
        write_model("llama", path).rename(path / "my-model")
        special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        words = {word: n for n, word in enumerate([*special.values(), "one", "two", "three"])}
        plain = Tokenizer(WordLevel(words, unk_token=special["unk_token"]))
        plain.pre_tokenizer = WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained("my-model")
        draw = random.Random(0)
        texts = (" ".join(draw.choices(["one", "two", "three"], k=40 + n)) for n in range(10))
        (path / "data.jsonl").write_text(
            "".join(f'{{"text": "{text}"}}\n' for text in texts), encoding="utf-8"
        )
        yield path


@pytest.fixture(scope="module")
def documented(folder: Path) -> Trained:
    """The training of the page, run as it stands there, on the CPU."""
    del folder
    snippet = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    before, start, _ = snippet.partition("trainer.train()")
    assert start
    names: dict[str, Any] = {}
    exec(before.replace("SFTConfig(out", "SFTConfig(use_cpu=True, out"), names)  # noqa: S102 - the snippet is ours
    trainer = names["trainer"]
    callback = next(c for c in trainer.callback_handler.callbacks if type(c) is FineTuneForecast)
    lines: list[str] = []
    callback._report = lines.append
    return counted(trainer, callback, lines)


def test_the_forecast_of_the_peak_is_that_of_the_trainer(documented: Trained) -> None:
    """Within 3 % of the live tensors that are counted from outside."""
    assert documented.callback.forecast is not None
    assert documented.callback.forecast.peak_gib == pytest.approx(documented.counted_gib, rel=0.03)
    assert not any("warning" in line for line in documented.lines)


def test_the_training_is_measured_into_a_run_folder(documented: Trained, folder: Path) -> None:
    """Its cell is the training's own; its memory and its lengths are those of the steps."""
    run = RunFolder.existing(folder / "runs" / "my-training")
    (observation,) = run.observations()
    assert observation == documented.callback.observation
    cell, measurement = observation.cell, observation.measurement
    assert (observation.basis, observation.batch_size) == (Basis.MEASURED, 2)
    assert (cell.gpu, cell.weights, cell.recipe.method) == ("cpu", "pretrained", "full")
    assert (cell.recipe.precision, cell.recipe.loss) == ("bf16-mixed", "chunked")
    assert cell.recipe.gradient_checkpointing
    assert 40 <= cell.seq_len <= 50
    assert cell in run.spec().all_cells()
    assert run.spec().workload.examples == 10
    assert measurement is not None
    assert measurement.memory.peak_allocated_bytes / GIB == pytest.approx(
        documented.counted_gib, rel=0.03
    )
    assert len(measurement.step_seconds) >= 6
    assert documented.steps == 10


@pytest.mark.parametrize("command", ["rank", "fit", "status", "report"])
def test_commands_on_runs_take_it(
    command: str, documented: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job is priced at the measured speed, which is no maximum of the batch."""
    del documented
    assert main([command, "runs/my-training"]) == 0
    assert "Traceback" not in capsys.readouterr().err
    ranking = RunFolder("runs/my-training").ranking()
    if command == "rank":
        assert ranking is not None
        assert {(o.batch_size, o.largest_batch) for o in ranking.offers} == {(2, None)}


def sft_trainer(folder: Path, callback: FineTuneForecast | None, **changed: Any) -> SFTTrainer:
    """A trainer on random tokens of 24 to 64 per example."""
    lora, name = changed.pop("lora", None), changed.pop("model", "my-model")
    if not (folder / name).exists():
        write_model(name, folder)
    draw = random.Random(1)
    rows = [[draw.randrange(4, VOCABULARY) for _ in range(24 + n)] for n in range(40)]
    settings = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 2,
        "max_steps": 10,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / name),
        args=SFTConfig(**settings | changed),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer(),
        peft_config=lora,
        callbacks=[] if callback is None else [callback],
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "changed",
    [
        {"bf16": False, "gradient_checkpointing": False},
        {"bf16": False, "lora": LoraConfig(r=8, target_modules="all-linear")},
        {"bf16": True, "lora": LoraConfig(r=8), "gradient_accumulation_steps": 2},
        {"bf16": True, "max_grad_norm": 0.0, "optim": "adafactor"},
        {"bf16": False, "packing": True, "max_length": 128},
        {"bf16": True, "model": "mixtral"},
        {"bf16": True, "model": "mixtral", "lora": LoraConfig(r=8, target_modules=["q_proj"])},
    ],
    ids=["full", "lora", "accumulated", "adafactor", "packed", "experts", "experts-lora"],
)
def test_recipes_are_forecast_within_3_percent(changed: dict[str, Any], folder: Path) -> None:
    """Other methods, precisions, optimizers and packed rows."""
    lines: list[str] = []
    callback = FineTuneForecast(report=lines.append)
    trained = counted(sft_trainer(folder, callback, **changed), callback, lines)
    assert callback.forecast is not None, lines
    assert callback.forecast.peak_gib == pytest.approx(trained.counted_gib, rel=0.03)


@pytest.mark.long
def test_a_plain_trainer_is_forecast_within_3_percent(folder: Path) -> None:
    """Transformers' own ``Trainer``, which computes all logits."""
    rows = torch.randint(4, VOCABULARY, (20, 48), generator=torch.Generator().manual_seed(0))
    lines: list[str] = []
    callback = FineTuneForecast(report=lines.append)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "my-model"),
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=2,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            num_train_epochs=1,
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()}),
        callbacks=[callback],
    )
    trained = counted(trainer, callback, lines)
    assert callback.forecast is not None, lines
    assert callback.forecast.peak_gib == pytest.approx(trained.counted_gib, rel=0.03)


@pytest.mark.long
def test_a_training_on_a_gpu_is_forecast_and_calibrates(documented: Trained, folder: Path) -> None:
    """Its step is simulated with a time; ``calibrate`` takes its measurement."""
    training, observation = documented.callback._training, documented.callback.observation
    assert training is not None
    assert observation is not None
    assert observation.measurement is not None
    assert observation.environment is not None
    on_gpu = replace(training, gpu=load_catalog().gpu("A40"))
    lines: list[str] = []
    forecast = step_forecast(on_gpu, None, lines.append)
    assert forecast.seconds is not None
    assert forecast.reserved_gib is not None
    assert forecast.peak_gib <= forecast.reserved_gib
    assert not forecast.exceeds_memory
    low, high = forecast.seconds[1].low, forecast.seconds[1].high
    assert forecast.time_differs(1.01 * high, is_longest=False)
    assert forecast.time_differs(0.99 * low, is_longest=True)
    assert not forecast.time_differs(0.99 * low, is_longest=False)
    measured = TrainingMeasurement(
        measurement=observation.measurement,
        environment=observation.environment.model_copy(update={"allocator": ""}),
        seq_len=training.longest,
        memory_limit_bytes=48 * GIB,
        started_at=dt.datetime.now(dt.UTC),
        seconds=1.0,
    )
    record(folder / "runs" / "a40", on_gpu, measured, 0)
    out = folder / "constants.json"
    assert main(["calibrate", str(folder / "runs" / "a40"), "--out", str(out)]) == 0
    calibrated = step_forecast(on_gpu, out, lines.append)
    assert calibrated.seconds is not None
    assert calibrated.seconds[0] > forecast.seconds[0]


@pytest.mark.long
def test_a_training_learns_the_same_with_it(folder: Path) -> None:
    """Losses are equal to the last bit."""
    losses = []
    for callback in (None, FineTuneForecast(report=lambda _: None)):
        trainer = sft_trainer(folder, callback, bf16=False)
        trainer.train()
        losses.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
    assert losses[0] == losses[1]


class Failing(FineTuneForecast):
    """A callback that fails at the end of a step, while it counts memory."""

    def _check_pace(self, state: Any) -> None:
        raise ZeroDivisionError(state)


@pytest.mark.parametrize("kind", [FineTuneForecast, Failing])
def test_a_failure_inside_it_leaves_the_training_alone(
    kind: type[FineTuneForecast], folder: Path
) -> None:
    """An unknown GPU, or an error of its own: a line for the reason, and all steps run."""
    lines: list[str] = []
    gpu = "no-such-gpu" if kind is FineTuneForecast else "cpu"
    callback = kind(run="runs/failed", gpu=gpu, report=lines.append)
    callback._forecast_steps = lambda *_: None  # type: ignore[method-assign]
    trainer = sft_trainer(folder, callback, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert sum("given up" in line for line in lines) == 1
    assert not Path("runs/failed").exists()


def test_further_trainings_add_their_observations(documented: Trained, folder: Path) -> None:
    """Of other micro-batches and lengths; the folder of a sweep stays as it is."""
    training, observation = documented.callback._training, documented.callback.observation
    assert training is not None
    assert observation is not None
    assert observation.measurement is not None
    assert observation.environment is not None
    measured = TrainingMeasurement(
        measurement=observation.measurement,
        environment=observation.environment,
        seq_len=observation.cell.seq_len,
        memory_limit_bytes=GIB,
        started_at=dt.datetime.now(dt.UTC),
        seconds=1.0,
    )
    path = folder / "runs" / "several"
    longer = replace(measured, seq_len=observation.cell.seq_len + 1)
    wider = replace(training, batch_size=4)
    written = [record(path, *one, 0) for one in ((training, measured), (wider, measured))]
    written += [record(path, *one, 0) for one in ((wider, measured), (wider, longer))]
    assert [(o.batch_size, o.repeat) for o in written] == [(2, 0), (4, 0), (4, 1), (4, 0)]
    run = RunFolder.existing(path)
    assert run.observations() == written
    assert run.spec().all_cells() == [written[0].cell, written[-1].cell]
    made_run(folder / "sweep")
    with pytest.raises(UserError, match="another run"):
        record(folder / "sweep", training, measured, 0)


def step_of(peak_gib: float, tokens: int) -> MeasuredStep:
    """A step with a peak, on rows of a length."""
    memory = MemoryReading(peak_allocated_bytes=round(peak_gib * GIB))
    return MeasuredStep(1.0, ((2, tokens),), memory)


@pytest.mark.parametrize(
    ("share", "tokens", "warnings"),
    [(2.0, 8, 1), (0.5, 8, 0), (0.5, 50, 1), (1.0, 50, 0)],
)
def test_steps_that_differ_from_the_forecast_are_a_warning(
    share: float, tokens: int, warnings: int, documented: Trained
) -> None:
    """A peak above the interval; one below it only where the rows are the longest."""
    lines: list[str] = []
    callback = FineTuneForecast(report=lines.append)
    callback.forecast = documented.callback.forecast
    callback._training = documented.callback._training
    assert callback.forecast is not None
    assert callback._training is not None
    assert callback._training.longest == 50
    callback._compare_memory([step_of(share * callback.forecast.peak_gib, tokens)])
    assert sum("warning" in line for line in lines) == warnings


@pytest.mark.parametrize(
    ("price", "budget", "left"),
    [(2.0, 5.0, 2.0), (2.0, 1.0, -2.0), (2.0, None, None), (None, None, None)],
)
def test_the_budget_that_is_left_is_that_at_the_end(
    price: float | None, budget: float | None, left: float | None
) -> None:
    """Without a price, it is computed at that of the GPU's cheapest offer."""
    assert TrainingCost(price, budget).left_usd(1.5, "A40") == left
    cheapest = min(offer.usd_per_hour for offer in load_catalog().offers("A40"))
    assert TrainingCost(None, 5.0).left_usd(1.5, "A40") == pytest.approx(5 - 1.5 * cheapest)
