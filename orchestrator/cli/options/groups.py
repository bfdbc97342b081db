"""Options that several commands share: the recipe, the job and its data, offers and prices."""

import argparse

from orchestrator.cli.options.table import add_table, titled
from orchestrator.cli.options.value_types import (
    above_zero,
    batch_size,
    epochs,
    norm,
    not_negative,
    positive,
)

MODEL = "a preset, a hub name, or a folder or file with a config.json"
JOB = """
job:
--epochs N|auto          number of epochs; auto: those after which the training curves in the run
                         stop improving
--learned FILE           with --epochs auto: training curves that 'learn' wrote elsewhere
"""
BATCH_SIZE = """
job:
--batch-size N|max|fastest
                         examples per step; max: the largest that fits; fastest: the fastest that
                         was timed (default: fastest)
"""
OUTPUT = """
--json                   print the content of ranking.json
--csv                    print the content of ranking.csv
"""
DATASET = """
--dataset DATA           price the examples of this data set; 'dataset --help' lists what it can be
"""
RENDERING = """
--text-fields A,B        build each example from these fields, one after the other
--template TEXT          build each example from a template, such as 'Question:
                         {question}\\nAnswer: {answer}'
--chat FIELD             build each example from the list of messages in this field, with the
                         tokenizer's chat template
--tokenizer NAME         folder or hub name of the tokenizer (default: the model's own)
--subset NAME            configuration of a hub data set
--split NAME             split of a folder or a hub data set (default: train)
--most N                 read only the first N examples
--cutoff N               truncate examples to N tokens
"""
HISTOGRAM = """
--length-histogram FILE.csv
                         histogram of lengths instead of a data set: columns tokens and examples
"""
WRAPPING = """
--packing                pack examples into full rows of --cutoff tokens, without padding
"""
GROUPING = """
--group-by-length        batch examples of similar length (default: random batches, padded to the
                         longest example)
"""
_ASSUMED = "(default: the specification's value, else an assumed one)"
_BY_SIZE = "(default: the specification's value, else by the model's bytes at assumed rates)"
OVERHEADS = f"""
time and price changes beside the steps:
--startup-minutes N      minutes from renting a node to the first step {_BY_SIZE}
--checkpoint-seconds N   seconds to write a checkpoint {_BY_SIZE}
--checkpoint-minutes N   minutes of work between two checkpoints, on demand (default: the
                         specification's value, else 60, or longer where checkpoints would take
                         over 5 % of it)
--interruptions-per-day N
                         interruptions of a spot instance per day {_ASSUMED}
--price-drift N          relative change of an on-demand price in 30 days, one standard deviation
                         {_ASSUMED}
--spot-price-drift N     relative change of a spot price in 30 days, one standard deviation
                         {_ASSUMED}
"""
CONSTRAINTS = """
prices and offers:
--objective {cost,time,both}
                         recommend the cheapest offer, the fastest, or both, within --deadline and
                         --budget-usd (default: cost)
--deadline HOURS         exclude offers on which the job takes longer
--budget-usd USD         exclude offers on which the job costs more
--providers A,B          only offers of these providers
--regions A,B            only offers in these regions, as the provider names them
--[no-]spot              only spot instances, or only on-demand instances (default: both)
--single-gpu-instances   exclude instances with several GPUs, whose other GPUs would idle
"""
RENTED = """
prices and offers:
--providers A,B          providers of your nodes; the sweep is priced at their cheapest offer,
                         unless a node names its own (default: as stored in the run, else any)
--regions A,B            regions of your nodes, as the provider names them (default: as stored in
                         the run, else any)
--[no-]spot              whether your nodes are spot instances (default: the cheaper market)
"""
CATALOG = """
prices and offers:
--catalog FILE           YAML or TOML file of your own GPUs and offers, added to the catalog
"""
PRICES = f"""{CATALOG}\
--prices TABLE|FILE...   a price table: refreshed (the default once it exists), shipped or paper; or
                         a CSV or YAML file of your own prices, added to the table's: one of the
                         same GPU, provider, region, instance and market replaces the table's;
                         or a folder of snapshots or s3://BUCKET/FOLDER, of which the last counts
                         and whose history the report draws; repeatable
--as-of DATE             the last snapshot until this date, of the folder that --prices names
"""


PRECISION = (
    "fp32-mixed-load; full: bf16-mixed; with --offload-optimizer: bf16; on a GPU without bf16: fp16"
)
RECIPE = """
training step:
--method {full,lora,qlora}
                         fine-tuning method (default: METHOD)
--recipe NAME            NAMED
--defaults {trl,plain}   where the options below that you leave out come from: trl, TRL's
                         SFTTrainer; plain, all bf16 without checkpointing or clipping, as a
                         specification has without recipe_defaults (default: trl)
--precision {bf16,bf16-mixed,fp32-mixed-load,fp16,fp32}
                         bf16, fp32: everything in that type; bf16-mixed: trained weights in fp32,
                         autocast to bf16; fp32-mixed-load: frozen weights in fp32, too; fp16:
                         trained weights in fp32, autocast to fp16 (default: PRECISION)
--gradient-checkpointing {on,off,reentrant}
                         recompute activations in the backward pass; reentrant: by PyTorch's older
                         implementation, as axolotl and LLaMA-Factory do (default: on)
--activation-offloading {on,off}
                         keep saved activations on the host until the backward pass, by TRL
                         (default: off)
--gradient-accumulation N
                         micro-batches per optimizer step (default: 1)
--effective-batch N      examples per optimizer step: micro-batches of the batch size accumulate to
                         it (estimate assumes 16 unless --gradient-accumulation is given)
--optimizer NAME         adamw (fused), adamw_foreach, adamw_loop, adamw_8bit, paged_adamw_8bit,
                         paged_adamw_32bit, torchao_adamw_8bit, torchao_adamw_4bit, adafactor, sgd
                         or muon (default: adamw)
--max-grad-norm N|none   norm that gradients are clipped to (default: 1)
--offload-optimizer {on,off}
                         hold the optimizer's state and compute its update on the host, by DeepSpeed
                         (default: off)
--attention {eager,sdpa,flash_attention_2}
                         attention kernel (default: sdpa)
--liger-kernels {on,off}
                         RMSNorm, rotary embedding and SwiGLU by liger-kernel (default: off)
--compile {model,layers}
                         let torch.compile compile the model or each layer (default: neither)
--[no-]packing           pack whole examples into rows of the sequence length, with position ids
                         that keep them apart, as TRL's packing does; batch sizes count rows
                         (default: off)
--examples-per-row N     examples in a packed row (default: as the data fill it, else 2)
--experts {looped,grouped,all-tokens}
                         run experts one after the other, in one grouped kernel, or each on all
                         tokens, as Llama 4 alone does (default: looped where adapters or quantised
                         weights need it, else grouped; Llama 4: all-tokens)
--mamba {mamba-ssm,reference}
                         kernels of Mamba layers (default: mamba-ssm on CUDA, else reference)
task and loss:
--task {sft,dpo,kto,orpo,reward,grpo}
                         trainer of TRL whose step runs; an example of dpo, orpo and reward is a
                         pair of sequences of the full length; grpo is its update alone, without the
                         generation of completions, which comes on top (default: sft)
--reference {adapter-off,separate,precomputed}
                         reference of dpo, kto, grpo: the model without its adapters, a second
                         model, or log-probabilities that come with the data (default: adapter-off;
                         full: separate; grpo: none)
--generation-share N     fraction of the GPU's memory that vLLM holds beside the update of grpo; 0
                         for generation by transformers (default: 0.3; only for grpo)
--loss {full-logits,chunked,liger,cce,dft,eaft}
                         loss from the logits of all tokens, or by TRL, liger-kernel or
                         cut-cross-entropy, which hold a part of them; dft, eaft: by LLaMA-Factory,
                         which weights tokens (default: LOSS)
--router-loss {on,off,auto}
                         add the load-balancing loss of a mixture of experts; auto: where TRL's
                         trainer does (default: auto)
trained weights and adapters:
--lora-rank LORA_RANK    rank of the LoRA adapters (default: 16)
--lora-alpha N           scale of the adapters times their rank (default: twice the rank)
--lora-dropout N         share of the adapters' inputs that is dropped (default: 0)
--lora-targets A,B       modules with adapters: attention, experts, router, all-linear (all but the
                         head), or module names, such as lm_head
--dora {on,off}          train the magnitudes of adapted weights apart, as DoRA does (default: off)
--oft-block-size N       adapt layers by rotations of blocks of so many inputs (OFT) in place of
                         LoRA's matrices
--adapter-dtype {bf16,fp32}
                         type of the adapters (default: that of trained weights; qlora: bf16)
--modules-to-save A,B     modules to train in full beside the adapters, such as embed_tokens,lm_head
                         (default: none)
--trained-layers N       train the last N decoder layers alone, or the first -N (method full)
--spread-layers {on,off}
                         train the last of each of so many equal stretches of layers, as LLaMA Pro
                         does (default: off)
quantised weights:
--quantisation {nf4,fp4,int8}
                         format of qlora's frozen weights: 4 bits, or 8 bits by LLM.int8
                         (default: nf4)
--double-quantisation {on,off}
                         quantise the quantisation constants of 4-bit weights (default: on)
--quantised-experts {on,off}
                         quantise the fused matrices of a mixture's experts, too, as axolotl's
                         quantize_moe_experts does (default: off)
--kbit-preparation {on,off}
                         cast the norms, embeddings and head of a quantised model to fp32, as PEFT's
                         prepare_model_for_kbit_training does (default: off)
"""


NAMED = "start from a named recipe: paper-mixtral, paper-mixtral-uncheckpointed or paper-blackmamba"


def add_recipe(
    command: argparse.ArgumentParser,
    *,
    named: str = NAMED,
    method: str = "lora",
    precision: str = PRECISION,
    loss: str = "chunked",
) -> None:
    """Add an option for each field of ``Recipe``, with four texts for the help."""
    texts = {"NAMED": named, "METHOD": method, "PRECISION": precision, "LOSS": loss}
    table = RECIPE
    for word, text in texts.items():
        table = table.replace(word, text)
    add_table(
        command,
        table,
        examples_per_row=positive,
        generation_share=not_negative,
        lora_alpha=positive,
        lora_dropout=not_negative,
        lora_rank=positive,
        oft_block_size=positive,
        trained_layers=int,
        max_grad_norm=norm,
    )


def add_examples(
    command: argparse.ArgumentParser, text: str = "number of training examples"
) -> None:
    """Add ``--examples``, and ``--queries``, its former name, hidden."""
    add_table(command, f"job:\n--examples N  {text}")
    command.add_argument("--queries", dest="examples", type=positive, help=argparse.SUPPRESS)


def add_dataset(command: argparse.ArgumentParser, *, batching: str = WRAPPING + GROUPING) -> None:
    """Add the data set of a job, and how batches are made of it."""
    data = titled(command, "data set")
    add_table(data, DATASET + RENDERING + HISTOGRAM)
    add_table(data.add_mutually_exclusive_group(), batching)


def add_overheads(command: argparse.ArgumentParser) -> None:
    """Add the overheads of a job: time beside its steps, and price changes."""
    add_table(command, OVERHEADS, N=not_negative, checkpoint_minutes=above_zero)


def add_job(command: argparse.ArgumentParser) -> None:
    """Add the options of the job that a run is ranked for."""
    add_examples(command)
    add_table(command, JOB, epochs=epochs)
    add_dataset(command)
    add_table(command, BATCH_SIZE + CONSTRAINTS, batch_size=batch_size)
    add_overheads(command)
    add_table(command.add_mutually_exclusive_group(), OUTPUT)
