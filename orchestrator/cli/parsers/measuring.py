"""Commands that measure: sweep, plan, gpu-check, host-speed, profile, learn; clusters."""

import argparse
from pathlib import Path
from typing import Any

from orchestrator.cli.options.groups import (
    CATALOG,
    MODEL,
    PRECISION,
    PRICES,
    RENDERING,
    RENTED,
    add_recipe,
)
from orchestrator.cli.options.table import add_table
from orchestrator.cli.options.value_types import (
    above_zero,
    count,
    largest_or_size,
    not_negative,
    positive,
    positives,
    run_folder,
)
from orchestrator.clouds.deployment_request import CLOUDS, METADATA, PROVIDERS

SWEEP = f"""
[spec] SPEC              a YAML file, or a shipped sweep: laptop (the default), paper,
                         memory-saving, memory-saving-tiny
--out DIR                the run folder (default: runs/NAME); like every command that takes a run
                         folder, it takes s3://BUCKET/FOLDER, too
--resume                 resume the run in --out with its own specification
--constants FILE         constants that 'calibrate' wrote
--dry-run                print the plan and start nothing
--adaptive               measure what helps most to choose a GPU, and stop when the choice is clear
--budget-usd USD         start no probe once the run has cost this much; the output lists what is
                         missing
--strict                 start nothing if any trial would be skipped
--wait-for-nodes MINUTES
                         wait this long for a node to start, to return or to start a worker, then
                         skip its cells (default: 20)
--log-to {{tensorboard,mlflow}}...
                         also log trials to this tool: tensorboard writes to the folder tensorboard
                         in the run, mlflow to MLFLOW_TRACKING_URI; repeatable
{RENTED}{PRICES}
"""
PLAN = f"""
[spec_or_run] SPEC|RUN   a specification or a run folder (default: the shipped sweep laptop)
--next                   list what to measure next, and its price
--most MOST              with --next: number of measurements to list (default: 10)
{RENTED}{PRICES}
"""
LEARN = f"""
dataset DATA             a JSON, JSONL, CSV or Parquet file, a folder of them, or a data set of the
                         hub
--model MODEL            {MODEL}
--out DIR                folder of the results, such as a run folder (default: runs/learn)
--gpu KEY                key of 'catalog gpus' (default: this machine's GPU, else cpu)
--weights {{random,pretrained}}
                         initial weights (default: pretrained if there are any)
--active-experts N,N     experts per token; one curve for each (default: the model's own number, and
                         all)
--choices FIELD|A,B,…    possible answers: one field with a list, or one field per answer. An
                         example then counts as correct if the right answer is the most likely one
                         (default: if greedy decoding would give the answer)
--held-out SHARE|N       share or number of examples to test on (default: a tenth, or all of
                         --held-out-data or --held-out-split; at most 1000)
--held-out-data DATA     test on this data set
--held-out-split NAME    test on this split
--epochs EPOCHS          largest number of epochs (default: 10)
--batch-size BATCH_SIZE  examples per step (default: 8)
--learning-rate RATE     learning rate (default: 5e-5, as in arXiv 2408.04693; random weights need
                         more)
--schedule {{constant,linear,cosine}}
                         schedule of the learning rate (default: constant). The others reach zero
                         after the last of --epochs, so that every curve levels off there
--warmup-steps N         steps in which the learning rate rises from zero (default: 0)
--patience N             stop after N epochs in a row without an improvement beyond noise (default:
                         2)
--whole                  train all of --epochs, even without improvement
--seed N                 seed of the split, the weights and the order of examples (default: 0)
--threads N              CPU threads (default: one per core)
--no-checkpoints         save no checkpoints (trained weights and optimizer state, in DIR/learning).
                         An interrupted curve then starts from the beginning
--json                   print all results as JSON
{CATALOG}
"""
GPU_CHECK = f"""
--out DIR                the run folder (default: runs/gpu-check)
--seconds SECONDS        time limit in seconds (default: 480)
{PRICES}
"""
HOST_SPEED = """
--json                   print all results as JSON
"""
DEPLOY = f"""
spec SPEC                a YAML file, or a shipped sweep
--provider {{{",".join(PROVIDERS)}}}
                         provider of the machines
--region R               region (default: of those with prices of most of these GPUs, the cheapest)
--out FILE               file to write (default: print it)
--max-workers N          largest number of nodes per GPU (default: 1)
--[no-]spot              only spot instances, or only on-demand instances (default: spot where there
                         is any)
--providers A,B          with --provider skypilot: only offers of these providers
--hosts HEAD,HOST        with --provider local: addresses of the machines, the head first
--job                    with --provider kuberay: write a RayJob, which measures SPEC and then
                         removes its cluster
--cache-claim NAME       with --provider kuberay: PersistentVolumeClaim (ReadWriteMany) in which all
                         pods keep weights of the hub (default: a disk of each pod's own)
{PRICES}
"""
LAUNCH = """
cluster CLUSTER          the file that 'deploy' wrote
spec SPEC                a YAML file; its folder is uploaded
"""
JOIN_CHECK = f"""
keys KEY[,KEY]           keys of 'catalog gpus'; one must match
--head HOST              address of the cluster's head, whose clock this machine's is compared with
--weights-gib N          size of the weights that the node loads from the hub (default: 0)
{PRICES}
"""
NODE_NOTICE = f"""
provider {{{",".join(CLOUDS)}}}
                         the cloud of this machine
--node-id ID             id of the Ray node (default: the one on this machine)
--metadata URL           address of the metadata service (default: {METADATA})
"""
MODEL_AND_DEVICE = f"""
--model MODEL            {MODEL}
--device KEY             key of 'catalog gpus' (default: this machine's GPU, else cpu)
"""
ACTIVE_EXPERTS = """
--active-experts N,…     experts per token; several are compared, such as 2,8 (default: the model's
                         own)
"""
MEASURING = f"""
--batch-size N|max       examples per step (default: 1 and the largest that fits)
--max-batch-size MAX_BATCH_SIZE
                         limit of the search for the largest batch (default: 1024)
--weights {{random,pretrained}}
                         initial weights (default: random)
--steps STEPS            number of steps without the profiler, and of steps with it (default: 3)
--training-steps TRAINING_STEPS
                         training steps between the two counts of each expert's tokens (default: 10)
--json                   print all results as JSON
{PRICES}
"""


def add_sweep(commands: Any) -> None:
    """Add the commands."""
    sweep = commands.add_parser(
        "sweep",
        run="sweep.run_sweep",
        usage="%(prog)s [SPEC] [options]",
        help="measure the cells of a specification and rank GPUs",
    )
    add_table(sweep, SWEEP, spec=Path, wait_for_nodes=not_negative)
    plan = commands.add_parser(
        "plan",
        run="sweep.run_plan",
        help="print what a sweep would measure, or which measurements help most to choose a GPU",
        description="Print what a sweep would do, or still has to do. With --next, list the "
        "measurements that help most, relative to their price, to find the cheapest GPU.",
    )
    add_table(plan, PLAN, spec_or_run=run_folder, most=positive)
    plan.set_defaults(most=10)


def add_learn(commands: Any) -> None:
    """Add the command."""
    learn = commands.add_parser(
        "learn",
        run="learn.run",
        usage="%(prog)s DATA --model MODEL [options]",
        help="fine-tune on a data set, test each epoch, and find when learning stops",
        description="Fine-tune a model on this machine's GPU, or on its CPU without one, and test "
        "it on held-out examples before training and after every epoch. A model with experts "
        "is trained sparse and dense. The last field or message of an example is its answer; the "
        "loss covers only the answer. To resume after the last epoch, run the command again.",
    )
    add_table(
        learn,
        LEARN,
        required=["--model"],
        held_out=above_zero,
        epochs=positive,
        batch_size=positive,
        learning_rate=above_zero,
        warmup_steps=count,
        seed=count,
    )
    add_recipe(
        learn,
        method="lora; full for random weights",
        precision=f"fp32 on the CPU; on a GPU {PRECISION}",
        loss="full-logits",
    )
    add_table(learn, RENDERING)


def add_gpu_check(commands: Any) -> None:
    """Add the command."""
    check = commands.add_parser(
        "gpu-check",
        run="gpu_check.run",
        help="measure the GPU of this machine without Ray; run it again to resume",
    )
    add_table(check, GPU_CHECK, seconds=positive)
    check.set_defaults(seconds=480)
    speed = commands.add_parser(
        "host-speed",
        run="gpu_check.run_host_speed",
        help="measure this machine's host for estimate --host-speed, in seconds and without a GPU",
        description="Time the steps of a small model on the CPU, whose kernels take next to "
        "nothing, and print how many times as long they take as the clock of 'estimate' assumes. "
        "Run it on the machine that will train: its host limits small batches.",
    )
    add_table(speed, HOST_SPEED)


def add_cluster(commands: Any) -> None:
    """Add the commands."""
    deploy = commands.add_parser(
        "deploy",
        run="cluster.run_deploy",
        help="write a cluster file for the GPUs of a specification, and print its cost",
        description="Write the file from which 'ray up', 'kubectl apply' or SkyPilot creates a "
        "cluster. Its nodes start when a trial needs their GPU. deploy/README.md describes the "
        "next steps.",
    )
    add_table(deploy, DEPLOY, required=["--provider"], spec=Path)
    launch = commands.add_parser(
        "launch",
        run="cluster.run_launch",
        usage="%(prog)s CLUSTER SPEC [--out RUN] [any option of sweep]",
        help="from a laptop: start a cluster, sweep on it, follow the sweep, stop the cluster",
        description="Start the cluster of a file that 'deploy' wrote, submit the sweep, print its "
        "output until it ends, and stop the cluster. The command reconnects after a lost "
        "connection. To reconnect to a sweep that is still running, run the same command again. "
        "Files for Kubernetes and SkyPilot are not supported: use kubectl and sky.",
    )
    add_table(launch, LAUNCH, cluster=Path, spec=Path)
    launch.add_argument(
        "more",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="options of 'sweep', which runs on the cluster's head; unless --out is a bucket, the "
        "run is downloaded at the end",
    )
    join_check = commands.add_parser(
        "join-check",
        run="cluster.run_join_check",
        help="check that this machine has the GPU of a key; print the resources of its Ray node",
        description="Compare the name and memory of this machine's GPU, as NVML reports them, with "
        "the catalog's GPU of that key, and try it: PyTorch's CUDA against the driver, a product "
        "in fp32 and bf16, free memory, free disk, and its clock against the head's. If all is "
        "well, print the value for 'ray start --resources'; otherwise print what is wrong, with "
        "the remedy, and exit with 1.",
    )
    add_table(join_check, JOIN_CHECK, N=not_negative)
    notice = commands.add_parser(
        "node-notice",
        run="cluster.run_node_notice",
        help="wait until the cloud announces the end of this machine, then drain its Ray node",
        description="Ask the cloud's metadata service every five seconds whether this machine will "
        "be taken away. If so, make Ray drain the node, and exit. The nodes of a cluster that "
        "'deploy' describes run this command automatically.",
    )
    add_table(notice, NODE_NOTICE)
    notice.set_defaults(metadata=METADATA)


def add_profile(commands: Any) -> None:
    """Add the command."""
    profile = commands.add_parser(
        "profile",
        run="profile.run",
        usage="%(prog)s --model MODEL --seq-len N,… [options]",
        help="break a step's time down into stages, layers, kernels and experts",
        description="Fine-tune for a few steps under torch.profiler in a child process, and print "
        "where the time went, as arXiv 2408.04693 does in Fig. 4 to 6 and 11.",
    )
    add_table(profile, MODEL_AND_DEVICE, required=["--model"])
    add_recipe(profile)
    add_table(profile, ACTIVE_EXPERTS, active_experts=positives)
    profile.add_argument(
        "--seq-len",
        "--seq-lens",
        dest="seq_lens",
        required=True,
        type=positives,
        metavar="N,…",
        help="tokens per example; several are compared",
    )
    add_table(
        profile,
        MEASURING,
        batch_size=largest_or_size,
        max_batch_size=positive,
        steps=positive,
        training_steps=positive,
    )
