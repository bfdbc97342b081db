"""``FineTuneForecast`` in a real ``trl.SFTTrainer`` on the CPU."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from trainer_reference.counting import PeakCounter
from trainer_reference.models import VOCABULARY, tokenizer, write_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from orchestrator.callback import FineTuneForecast
from orchestrator.cli.main import main
from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import Basis, Observation
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


def counted(trainer: SFTTrainer, callback: FineTuneForecast, lines: list[str]) -> Trained:
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
        patched.setenv("XDG_CACHE_HOME", str(path / "cache"))
        patched.setenv("HF_HUB_OFFLINE", "1")
        patched.setenv("HF_DATASETS_CACHE", str(path / "datasets"))
        patched.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        patched.chdir(path)
        write_model("llama", path).rename(path / "my-model")
        special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        words = {word: n for n, word in enumerate([*special.values(), "one", "two", "three"])}
        plain = Tokenizer(WordLevel(words, unk_token="<unk>"))
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
    """The training of the page, run as it stands there."""
    del folder
    snippet = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    before, start, _ = snippet.partition("trainer.train()")
    assert start
    names: dict[str, Any] = {}
    exec(before, names)  # noqa: S102 - the snippet is ours
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
    lora = changed.pop("lora", None)
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
        model=AutoModelForCausalLM.from_pretrained(folder / "my-model"),
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
    ],
    ids=["full", "lora", "accumulated", "adafactor", "packed"],
)
def test_recipes_are_forecast_within_3_percent(changed: dict[str, Any], folder: Path) -> None:
    """Other methods, precisions, optimizers and packed rows."""
    lines: list[str] = []
    callback = FineTuneForecast(report=lines.append)
    trained = counted(sft_trainer(folder, callback, **changed), callback, lines)
    assert callback.forecast is not None, lines
    assert callback.forecast.peak_gib == pytest.approx(trained.counted_gib, rel=0.03)


@pytest.mark.long
def test_a_training_learns_the_same_with_it(folder: Path) -> None:
    """Losses are equal to the last bit."""
    losses = []
    for callback in (None, FineTuneForecast(report=lambda _: None)):
        trainer = sft_trainer(folder, callback, bf16=False)
        trainer.train()
        losses.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "callback",
    [
        FineTuneForecast(gpu="no-such-gpu", report=lambda _: None),
        FineTuneForecast(run="data.jsonl", gpu="RTX-4090", report=lambda _: None),
    ],
    ids=["unknown-gpu", "mistaken-gpu"],
)
def test_a_failure_inside_it_leaves_the_training_alone(
    callback: FineTuneForecast, folder: Path
) -> None:
    """A line for the reason, and all steps run."""
    lines: list[str] = []
    callback._report = lines.append
    callback._forecast_steps = lambda *_: 1 / 0  # type: ignore[method-assign]
    trainer = sft_trainer(folder, callback, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert sum("given up" in line for line in lines) == 1
    assert callback.observation is None


def test_steps_outside_the_forecast_are_a_warning(documented: Trained) -> None:
    """A peak above the interval, and a step time outside it."""
    callback = documented.callback
    observation = callback.observation
    assert isinstance(observation, Observation)
    from dataclasses import replace

    lines: list[str] = []
    callback._report = lines.append
    from orchestrator.callback.step_meter import MeasuredStep
    from trials.records.observation import MemoryReading

    reading = MemoryReading(peak_allocated_bytes=round(2 * documented.counted_gib * GIB))
    callback._compare_memory([MeasuredStep(1.0, ((2, 8),), reading)])
    assert "warning" in lines[0]
    low = replace(reading_step(documented), rows=((2, 8),))
    callback._compare_memory([low])
    assert "warning" not in lines[1]


def reading_step(trained: Trained) -> Any:
    """A step with half the counted memory."""
    from orchestrator.callback.step_meter import MeasuredStep
    from trials.records.observation import MemoryReading

    half = MemoryReading(peak_allocated_bytes=round(trained.counted_gib * GIB / 2))
    return MeasuredStep(1.0, ((2, 49),), half)
