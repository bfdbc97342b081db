"""Write ``docs/explanation/well-known-configurations.md``: estimates of trainers' own examples.

Each configuration is estimated for four GPUs. Beside it, TRL's trainer and the project's step run
with the same axes on a tiny model of the same family on the CPU. It takes about two minutes.
"""

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.torch_process import small_steps
from trainer_reference.cells import ReferenceCell

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "well-known-configurations.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
GPUS = "RTX-4090,L40S,A100-80GB-SXM,H100-SXM"
ESTIMATES = (
    "| GPU | peak at this micro-batch | largest micro-batch | hours | dollars |\n"
    "|---|---|---|---|---|\n"
)
REFERENCE = "| | peak | from the trainer |\n|---|---|---|\n"


@dataclass(frozen=True, slots=True)
class Configuration:
    """An example of a trainer.

    Attributes:
        title: name of the example.
        link: page of the example.
        model: preset, or one of equal shape.
        options: options of ``estimate``, by their names on the command line.
        twin: the same axes on a tiny model.
        note: difference between the example's trainer and TRL's, if it matters.
    """

    title: str
    link: str
    model: str
    options: dict[str, Any]
    twin: ReferenceCell
    note: str = ""

    @property
    def command(self) -> str:
        """Command that estimates it."""
        options = "".join(
            f" --{name.replace('_', '-')}{'' if value is True else f' {value}'}"
            for name, value in self.options.items()
        )
        return f"finetune-cost estimate --model {self.model}{options} --gpu {GPUS}"


CONFIGURATIONS = (
    Configuration(
        "`trl sft`, full",
        "https://github.com/huggingface/trl#command-line-interface-cli",
        "qwen2.5-0.5b",
        {
            "method": "full",
            "batch_size": 8,
            "gradient_accumulation": 1,
            "seq_len": 1024,
            "examples": 15_806,
            "epochs": 3,
        },
        ReferenceCell(
            "full",
            "bf16-mixed",
            1,
            "chunked",
            checkpointing=True,
            max_grad_norm=1.0,
            model="qwen2-tied",
        ),
    ),
    Configuration(
        "`trl sft --use_peft`",
        "https://huggingface.co/docs/trl/peft_integration",
        "qwen2.5-0.5b",
        {
            "method": "lora",
            "lora_rank": 32,
            "lora_alpha": 16,
            "lora_dropout": 0.05,
            "lora_targets": "q_proj,v_proj",
            "batch_size": 2,
            "gradient_accumulation": 8,
            "seq_len": 1024,
            "examples": 15_806,
            "epochs": 1,
        },
        ReferenceCell(
            "lora",
            "fp32-mixed-load",
            4,
            "chunked",
            checkpointing=True,
            max_grad_norm=1.0,
            model="qwen2-tied",
        ),
    ),
    Configuration(
        "axolotl, `examples/llama-3/qlora.yml`",
        "https://github.com/axolotl-ai-cloud/axolotl/blob/main/examples/llama-3/qlora.yml",
        "llama-3.1-8b",
        {
            "method": "qlora",
            "lora_rank": 32,
            "lora_alpha": 16,
            "lora_dropout": 0.05,
            "lora_targets": "all-linear",
            "precision": "bf16-mixed",
            "adapter_dtype": "fp32",
            "loss": "full-logits",
            "optimizer": "paged_adamw_32bit",
            "attention": "flash_attention_2",
            "batch_size": 2,
            "gradient_accumulation": 4,
            "expandable_segments": True,  # as the command axolotl sets it
            "seq_len": 4096,
            "examples": 2000,
            "epochs": 4,
        },
        ReferenceCell(
            "qlora", "bf16-mixed", 4, "full-logits", checkpointing=True, max_grad_norm=1.0
        ),
    ),
    Configuration(
        "LLaMA-Factory, `qwen3_lora_sft.yaml`",
        "https://github.com/hiyouga/LLaMA-Factory/blob/main/examples/train_lora/qwen3_lora_sft.yaml",
        "qwen3-4b",
        {
            "method": "lora",
            "lora_rank": 8,
            "lora_targets": "all-linear",
            "precision": "bf16-mixed",
            "loss": "full-logits",
            "batch_size": 1,
            "gradient_accumulation": 8,
            "seq_len": 2048,
            "examples": 1000,
            "epochs": 3,
        },
        ReferenceCell(
            "lora",
            "bf16-mixed",
            4,
            "full-logits",
            checkpointing=True,
            max_grad_norm=1.0,
            model="qwen3",
        ),
    ),
    Configuration(
        "LLaMA-Factory, `qwen3_lora_dpo.yaml`",
        "https://github.com/hiyouga/LLaMA-Factory/blob/main/examples/train_lora/qwen3_lora_dpo.yaml",
        "qwen3-4b",
        {
            "task": "dpo",
            "reference": "adapter-off",
            "method": "lora",
            "lora_rank": 8,
            "lora_targets": "all-linear",
            "precision": "bf16-mixed",
            "batch_size": 1,
            "gradient_accumulation": 8,
            "seq_len": 2048,
            "examples": 1000,
            "epochs": 3,
        },
        ReferenceCell(
            "lora",
            "bf16-mixed",
            4,
            "chunked",
            checkpointing=True,
            max_grad_norm=1.0,
            model="qwen3",
            task="dpo",
            reference="adapter-off",
        ),
        " The estimate is of TRL's `DPOTrainer`. LLaMA-Factory's own subclass takes the "
        "log-probabilities from all logits in fp32, which needs more memory.",
    ),
)


def main() -> None:
    """Estimate and compare every configuration, and write the page."""
    from trainer_reference.models import write_model  # noqa: PLC0415 - imports torch and TRL

    parts = []
    with tempfile.TemporaryDirectory() as name:
        for configuration in CONFIGURATIONS:
            write_model(configuration.twin.model, Path(name))
            parts.append(_section(configuration, Path(name)))
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{''.join(parts)}{END}{after}", "utf-8")


def _section(configuration: Configuration, folder: Path) -> str:
    return (
        f"### {configuration.title}\n\n[Its page]({configuration.link}).{configuration.note}\n\n"
        f"```bash\n{configuration.command}\n```\n\n"
        f"{ESTIMATES}{_estimates(configuration)}\n"
        f"The same axes on a tiny model ({configuration.twin.key}):\n\n"
        f"{REFERENCE}{_reference(configuration.twin, folder)}\n"
    )


def _estimates(configuration: Configuration) -> str:
    import orchestrator  # noqa: PLC0415 - imports pandas

    frame = orchestrator.estimate(configuration.model, gpu=GPUS, **configuration.options).to_frame()
    return "".join(
        f"| {row.gpu} | {row.peak_gib:.1f} GiB | {row.max_batch_size} | "
        + (
            f"{row.hours:.2f} | {row.usd:.2f} |\n"
            if row.outcome == "FITS"
            else "does not fit | |\n"
        )
        for row in frame.itertuples()
    )


def _reference(twin: ReferenceCell, folder: Path) -> str:
    from trainer_reference.comparison import train_both  # noqa: PLC0415 - as above
    from trainer_reference.project import simulated_peak  # noqa: PLC0415 - as above

    with small_steps():
        run, peak_bytes, _ = train_both(twin, folder)
    peaks = {"trial": peak_bytes, "simulation": simulated_peak(twin, folder)}
    return f"| TRL's trainer | {run.peak_bytes / 2**20:.3f} MiB | |\n" + "".join(
        f"| {name} | {peak / 2**20:.3f} MiB | {peak / run.peak_bytes - 1:+.2%} |\n"
        for name, peak in peaks.items()
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
