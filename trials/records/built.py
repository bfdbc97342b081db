"""Properties of a built model, which a trial checks against its recipe. No torch here."""

from gpu_catalog.record import Record


class ParameterCounts(Record):
    """Parameters of a model under a recipe, in logical elements (a 4-bit weight counts once)."""

    total: int
    trainable: int
    four_bit: int
    eight_bit: int = 0


class Built(Record):
    """Properties of the built model, from its modules and one step; a trial checks them first.

    Attributes:
        parameters: parameter counts.
        dtypes: dtypes of the parameters that are not quantised, sorted.
        quantisation: formats of the quantised weights, sorted.
        adapters: number of LoRA layers.
        attention, experts, mamba: their implementations; absent where the model has none.
        checkpointed_layers, layers: decoder layers that ran twice in a step, and all of them.
        optimizer: class of the optimizer, with its module, and its implementation if not fused.
        product_dtypes: dtypes of the matrix products' results, sorted.
        micro_batches: forward passes in a step.
        kernels: names of operators in a step that identify the recipe's kernels, sorted.
        loss: function that computed the loss, as ``Recipe.loss`` names it; None for a model
            without logits.
        scores: numbers that the model returns for a sequence; 0 for a language model.
        offloaded_activations: copies of activations to the host in a step.
        liger_layers: layers that are liger-kernel's: rms_norm, rope, swiglu.
        compiled_graphs, graph_breaks: graphs that a step compiled, and its returns to Python.
        sequences: sequences of a forward pass with gradients, in a batch of one example.
        reference: the ``Recipe.reference`` of a pass without gradients; absent without such a pass.
        router_loss: whether the model computed a load-balancing loss of its routers in a pass with
            gradients.
        scores_itself: whether the model, with its adapters, also ran without gradients.
        separates_examples: whether attention keeps the examples of a packed row apart.
    """

    parameters: ParameterCounts
    dtypes: tuple[str, ...]
    quantisation: tuple[str, ...] = ()
    adapters: int
    attention: str | None
    experts: str | None
    mamba: str | None
    checkpointed_layers: int
    layers: int
    optimizer: str
    kernels: tuple[str, ...]
    product_dtypes: tuple[str, ...] = ()
    micro_batches: int = 1
    loss: str | None = "full-logits"
    scores: int = 0
    offloaded_activations: int = 0
    liger_layers: tuple[str, ...] = ()
    compiled_graphs: int = 0
    graph_breaks: int = 0
    sequences: int = 1
    reference: str | None = None
    router_loss: bool = False
    scores_itself: bool = False
    separates_examples: bool = False
