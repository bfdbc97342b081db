"""Stacks of libraries that published runs had and this project does not install.

A run of such a stack is traced in a process of its own (``child.py``), in which functions of the
old libraries replace those of the installed ones. Their source runs where it can: it is read from
the wheels of the versions that the runs name, in a folder that this command fills:

    pip download --no-deps --dest WHEELS bitsandbytes==0.42.0 litgpt==0.4.0 torch==2.0.1

The rules are those of the sources alone; they were written before any error was computed, but for
the one that is marked.

litgpt: LitGPT 0.4 (its commits 5895df10 and 00af8b0d, which published the runs).
    With adapters, the head is applied to 128 tokens at a time; in full fine-tuning to all at once.
    Lightning's Fabric returns logits in fp32, the default dtype outside its own context
    (``convert_output`` of its plugins ``HalfPrecision`` and ``BitsandbytesPrecision``). Logits
    live until those of the next micro-batch are there, because the training loop has a name for
    them.
    ``chunked_cross_entropy`` is LitGPT's own.

litgpt-4bit: the above, and Lightning's plugin for bitsandbytes 0.42.
    All linear layers are quantised, the head too, whatever their class. Weights are quantised from
    fp16, so products take them in fp16 and copy them to bf16. ``MatMul4Bit`` is that of
    bitsandbytes 0.42, which keeps the inputs of products as an attribute: until the graph is freed,
    not until the backward pass is done. (Added after the first errors: the loop's name for the loss
    holds the graph until there is a loss of the next micro-batch.)

qwen: PyTorch 2.0 and Qwen's own model.
    ``_multi_tensor_adamw`` is PyTorch's own of 2.0.1. The loss copies the logits without those of
    the last token; autocast casts the copy to fp32.

qwen-loss: Qwen's loss alone, for its model under PyTorch 2.1, whose AdamW is as the installed one.

transformers-4.48: the loss of transformers 4.46 to 4.48. It casts all logits to fp32, and copies
    those without the last token's.

transformers-4.45: the same up to 4.45, where the model casts the logits, so that those in 16 bits
    are freed. (Added after the first errors.)

Models, adapters and attention are those of the installed libraries in all of them. LitGPT repeats
keys and values to the number of queries' heads and has one dropout for queries, keys and values;
Qwen's model has one product for them. Neither is simulated.
"""

import hashlib
import sys
from pathlib import Path
from typing import Literal

from trials.simulation.trace_cache import Traces
from trials.simulation.tracing_child import TracingChildren, cache_folder

OldStack = Literal[
    "litgpt", "litgpt-4bit", "qwen", "qwen-loss", "transformers-4.45", "transformers-4.48"
]
CHILD = Path(__file__).with_name("child.py")


def traces_of(stack: OldStack, wheels: Path) -> Traces:
    """Source of traces under an old stack, with a folder of its own for this version of its code.

    Args:
        stack: the old stack.
        wheels: folder of the old libraries' wheels.
    """
    code = hashlib.sha256(CHILD.read_bytes()).hexdigest()[:8]
    return Traces(
        cache_folder().with_name("old-stacks") / f"{stack}-{code}",
        workers=1,
        children=TracingChildren((sys.executable, str(CHILD), stack, str(wheels))),
    )
