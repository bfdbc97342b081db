"""Command ``export``, and ``estimate --export``, as a user meets them."""

from pathlib import Path

import pytest
import yaml
from builders.runs import ONE_CELL, made_run

from gpu_catalog.links.between_nodes import NodeNetwork
from orchestrator.cli.main import main
from orchestrator.configurations.cells import with_cells
from orchestrator.exporting.chosen_offers import ranked_training
from orchestrator.reporting.write_reports import write_ranking
from trials.recipes.parallel import Parallel

OWN = """\
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: 100000000, source: me, recorded: 2026-01-31}
  offers:
    - {gpu: desk, provider: aws, region: here-1, instance: big, usd_per_hour: 7.2, source: me,
       recorded: 2026-01-31}
    - {gpu: desk, provider: aws, region: here-1, instance: big, usd_per_hour: 3.6, market: spot,
       source: me, recorded: 2026-01-31}
"""


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty working directory."""
    monkeypatch.chdir(tmp_path)


def test_a_run_with_a_ranking_is_written_as_a_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cheapest offer is first; batch and epochs are the ranking's."""
    text = ONE_CELL.replace("[cpu]", "[desk]").replace("fp32}", "fp32, loss: chunked}") + OWN
    made_run(tmp_path / "run", text)
    arguments = ["export", "run", "--to", "skypilot", "--out", "task.yaml"]
    assert main(arguments) == 1
    assert "rank run" in capsys.readouterr().err
    assert main(["rank", "run", "--epochs", "5", "--batch-size", "40"]) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    assert "sky jobs launch" in capsys.readouterr().out
    task = yaml.safe_load(Path("task.yaml").read_text(encoding="utf-8"))
    assert [place["use_spot"] for place in task["resources"]["ordered"]] == [True, False]
    assert "--per_device_train_batch_size 40 " in task["run"]
    assert "--num_train_epochs 5 " in task["run"]


@pytest.mark.parametrize(("usd", "is_best"), [(9, False), (1, True)])
def test_formats_take_offers_of_ones_own_first_or_rented_ones_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, usd: int, is_best: bool
) -> None:
    """A remark says what is passed over for it, and whose price a rented one is."""
    text = ONE_CELL.replace("[cpu]", "[desk]").replace("fp32}", "fp32, loss: chunked}") + OWN
    mine = "{gpu: desk, provider: own, region: own, instance: desk, source: me,"
    mine = f"    - {mine} recorded: 2026-01-31, usd_per_hour: {usd}}}\n"
    made_run(tmp_path / "run", text + mine)
    assert main(["rank", "run", "--batch-size", "8"]) == 0
    export = ["export", "run", "--out", "job", "--to"]
    own_first, no_rent = "slurm takes an offer of your own first", "ray rents nothing: the price is"
    own_left_out = "skypilot rents: your own desk, which ranks higher, is left out"
    for words, taken, lines in (
        (["slurm"], "your own (desk)", {own_first} if not is_best else set()),
        (["ray", "--no-spot", "--providers", "aws"], "aws big", {no_rent}),
        (["skypilot"], "aws big here-1 spot", {own_left_out} if is_best else set()),
    ):
        capsys.readouterr()
        assert main([*export, *words]) == 0
        output = capsys.readouterr()
        assert f"job: desk: {taken}" in output.out
        assert {line for line in (own_first, no_rent, own_left_out) if line in output.err} == lines
        job = Path("job").read_text(encoding="utf-8")
        assert ("(measured, a rented offer): desk: aws" in job) is (words[0] == "ray")
    assert main([*export, "slurm", "--providers", "own", "--spot"]) == 1
    assert "no offer with --providers own --spot" in capsys.readouterr().err


def test_a_ranking_of_several_gpus_starts_as_many(tmp_path: Path) -> None:
    """A trainer's launcher for the layout that the offer was ranked with."""
    text = ONE_CELL.replace("[cpu]", "[desk]").replace(
        "precision: fp32}]",
        "precision: fp32, loss: chunked}]\n    parallel: [{gpus: 2, strategy: fsdp2}]",
    )
    pair = "instance: pair, gpus_per_instance: 2,"
    made_run(tmp_path / "run", text + OWN.replace("instance: big,", pair))
    assert main(["rank", "run", "--batch-size", "8"]) == 0
    assert main(["export", "run", "--to", "slurm", "--out", "job"]) == 0
    job = Path("job").read_text(encoding="utf-8")
    assert "--gpus-per-node" not in job  # its device is a CPU
    assert "--use_fsdp --fsdp_version 2 " in job
    assert "8 x 1 accumulated x 2 GPUs (fsdp2) = 16 examples" in job


def test_offers_of_a_ranking_are_those_of_its_best_layout(tmp_path: Path) -> None:
    """On any network: a GPU alone is no fallback of four on two nodes."""
    text = ONE_CELL.replace("[cpu]", "[desk]").replace("fp32}", "fp32, loss: chunked}") + OWN
    folder = made_run(tmp_path / "run", text)
    assert main(["rank", "run", "--batch-size", "4"]) == 0
    ranking = folder.ranking()
    assert ranking is not None
    best, alone = ranking.offers
    two = Parallel(gpus=4, nodes=2, strategy="hsdp", replicas=2)
    fast = two.on_network(NodeNetwork(400.0, rdma=True))
    rows = [
        best.model_copy(update={"cell": best.cell.model_copy(update={"parallel": layout})})
        for layout in (fast, two)
    ]
    offers = (rows[0], alone, rows[1].model_copy(update={"rank": 3}))
    training = ranked_training(ranking.model_copy(update={"offers": offers}), folder.spec())
    assert (training.gpus, training.nodes, training.replicas) == (4, 2, 2)
    assert [(place.instances, place.rdma) for place in training.placements] == [
        (2, True),
        (2, False),
    ]
    engine = Parallel(gpus=2, strategy="deepspeed-zero2")
    cell = best.cell.model_copy(update={"parallel": engine})
    row = best.model_copy(update={"cell": cell})
    training = ranked_training(ranking.model_copy(update={"offers": (row,)}), folder.spec())
    assert (training.strategy, training.zero) == ("deepspeed-zero2", engine.zero_settings)


MINE = """\
model_name_or_path: llama-tiny
dtype: float32
bf16: false
max_length: 16
per_device_train_batch_size: 8  # what fits my card
gradient_accumulation_steps: 5
num_train_epochs: 5
"""


def test_a_run_of_a_configuration_starts_that_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The micro-batch is the ranking's, a diff shows it, and a price of other epochs is refused."""
    Path("mine.yml").write_text(MINE, encoding="utf-8")
    text = ONE_CELL.replace("[cpu]", "[desk]").replace(
        "- models: [llama-tiny]", "- config: mine.yml"
    )
    text = "\n".join(
        line for line in text.splitlines() if "recipes" not in line and "lens" not in line
    )
    made_run(tmp_path / "run", with_cells(text + "\n" + OWN, "made.yaml", tmp_path))
    arguments = ["export", "run", "--to", "slurm", "--config", "mine.yml"]
    assert main(["rank", "run", "--epochs", "3", "--batch-size", "40"]) == 0
    assert main(arguments) == 1
    assert "epochs" in capsys.readouterr().err
    assert main(["rank", "run", "--epochs", "5", "--batch-size", "40"]) == 0
    capsys.readouterr()
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "-per_device_train_batch_size: 8  # what fits my card\n" in out
    assert "+per_device_train_batch_size: 40  # what fits my card\n" in out
    assert "\ntrl sft --config " in Path("job.sbatch").read_text(encoding="utf-8")


def test_a_ranking_of_several_trainings_needs_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line lists the models."""
    text = ONE_CELL.replace("[cpu]", "[desk]").replace("fp32}", "fp32, loss: chunked}") + OWN
    text = text.replace("[llama-tiny]", "[llama-tiny, qwen3-moe-tiny]")
    made_run(tmp_path / "run", text, measured=2)
    assert main(["rank", "run"]) == 0
    capsys.readouterr()
    assert main(["export", "run", "--to", "slurm"]) == 1
    assert "llama-tiny, qwen3-moe-tiny" in capsys.readouterr().err
    assert main(["export", "run", "--to", "slurm", "--model", "llama-tiny"]) == 0
    assert Path("job.sbatch").read_text(encoding="utf-8").startswith("#!")


def test_a_ranking_of_several_trainings_of_a_model_needs_a_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines list the keys that --cell takes, and a job on a CPU asks for no GPU."""
    text = ONE_CELL.replace("[cpu]", "[desk]").replace("fp32}", "fp32, loss: chunked}") + OWN
    folder = made_run(tmp_path / "run", text)
    assert main(["rank", "run"]) == 0
    ranking = folder.ranking()
    assert ranking is not None
    longer = [
        row.model_copy(update={"cell": row.cell.model_copy(update={"seq_len": 99})})
        for row in ranking.offers
    ]
    offers = (*ranking.offers, *longer)
    write_ranking(folder, ranking.model_copy(update={"offers": offers}))
    capsys.readouterr()
    assert main(["export", "run", "--to", "slurm"]) == 1
    title, *keys = capsys.readouterr().err.splitlines()
    assert title == "the ranking has 2 trainings: add --cell, one of"
    for target, wanted in (("slurm", "--cpus-per-task"), ("ray", "--entrypoint-num-cpus 1 ")):
        arguments = ["export", "run", "--to", target, "--out", "job", "--cell", keys[1].strip()]
        assert main(arguments) == 0
        job = Path("job").read_text(encoding="utf-8")
        assert "--max_length 99 " in job
        assert wanted in job
        assert "gpus" not in job
    assert main(["export", "run", "--to", "slurm", "--cell", keys[1].strip() + "9"]) == 1
    assert f"did you mean {keys[1].strip()!r}" in capsys.readouterr().err


def test_a_cell_that_is_not_the_best_comes_first(tmp_path: Path) -> None:
    """Offers ranked before its own are no fallbacks."""
    text = ONE_CELL.replace("[cpu]", "[desk]").replace("fp32}", "fp32, loss: chunked}") + OWN
    folder = made_run(tmp_path / "run", text)
    assert main(["rank", "run"]) == 0
    ranking = folder.ranking()
    assert ranking is not None
    best, other = ranking.offers
    cell = best.cell.model_copy(update={"gpu": "H100-SXM"})
    other = other.model_copy(update={"cell": cell})
    ranking = ranking.model_copy(update={"offers": (best, other)})
    training = ranked_training(ranking, folder.spec(), cell=cell.key)
    assert [place.gpu for place in training.placements] == ["H100-SXM"]
    assert not training.on_cpu


ESTIMATE = ("estimate", "--model", "llama-tiny", "--seq-len", "32")
STATED = ("--gradient-checkpointing", "off")  # else both are traced


def test_an_estimate_of_several_gpus_is_exported(tmp_path: Path) -> None:
    """Eight GPUs share the assumed effective batch of 16, by copies, shards or DeepSpeed."""
    path = tmp_path / "job.sbatch"
    words = [*ESTIMATE, *STATED, "--gpu", "8xH100-SXM", "--export", str(path), "--to", "slurm"]
    assert main([*words, "--strategy", "ddp"]) == 0
    text = path.read_text(encoding="utf-8")
    assert "#SBATCH --gpus-per-node=h100:8\n" in text
    assert "--num_processes 8 " in text
    assert "2 x 1 accumulated x 8 GPUs (ddp) = 16 examples" in text
    assert main([*words, "--strategy", "fsdp2"]) == 0
    text = path.read_text(encoding="utf-8")
    assert "--use_fsdp --fsdp_version 2 " in text
    assert "2 x 1 accumulated x 8 GPUs (fsdp2) = 16 examples" in text
    assert main([*words, "--strategy", "deepspeed-zero2", "--precision", "bf16"]) == 0
    text = path.read_text(encoding="utf-8")
    assert '"zero_optimization": {\n    "stage": 2\n' in text
    assert '--deepspeed "$OUTPUT/deepspeed.json" ' in text


def test_a_task_that_starts_another_offer_says_so_before_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SkyPilot mounts no bucket on machines of RunPod, whose offer is the cheapest here."""
    path = tmp_path / "task"
    words = [*ESTIMATE, *STATED, "--gpu", "L40S", "--no-spot", "--export", str(path)]
    for target, is_other in (("skypilot", True), ("dstack", False)):
        assert main([*words, "--providers", "runpod,aws", "--to", target]) == 0
        output = capsys.readouterr()
        assert "Rent **L40S** from runpod" in output.out
        before, _, _ = output.err.partition("Prices: ")
        reason = "which skypilot cannot start: it mounts no bucket on machines of runpod"
        assert (reason in before) is is_other


def test_a_configuration_is_exported_for_as_many_gpus_as_it_was_priced_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file stays as it is; the effective batch is that of all GPUs, as in the estimate."""
    config, path = tmp_path / "sft.yml", tmp_path / "job.sbatch"
    config.write_text("model_name_or_path: llama-tiny\nmax_length: 32\nfsdp: full_shard\n", "utf-8")
    words = ["estimate", "--config", str(config), "--model", "llama-tiny", "--gpu", "2xH100-SXM"]
    assert main([*words, "--export", str(path), "--to", "slurm"]) == 0
    assert "sft.yml is in it as it is" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    assert config.read_text("utf-8") in text
    assert "#SBATCH --gpus-per-node=h100:2\n" in text
    assert "--num_processes 2 " in text
    assert "8 x 1 accumulated x 2 GPUs (fsdp2) = 16 examples" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "run"],
        ["export", "run", "--to", "slurm", "--format", "ado"],
        ["export", "run", "--format", "ado", "--model", "llama-tiny"],
        ["export", "run", "--format", "ado", "--cell", "desk/llama-tiny"],
        ["export", "run", "--format", "ado", "--config", "mine.yml"],
        ["export", "run", "--format", "ado", "--no-spot"],
        [*ESTIMATE, "--export", "x.yaml"],
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written."""
    assert main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1
