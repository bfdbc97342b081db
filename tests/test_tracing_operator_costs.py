"""Costs of operators on a GPU, counted by hand: bytes read and written, FLOPs, kernels."""

import bitsandbytes  # noqa: F401 - registers its operators
import pytest
import torch

import trials.simulation.tracing.kernels.fused_kernels  # noqa: F401 - declares the costs of its kernels
from trials.simulation.tracing.kernels.eight_bit_products import install_eight_bit_products
from trials.simulation.tracing.operator_costs import KERNELS, describe, workspace_bytes

aten = torch.ops.aten
BF16 = torch.bfloat16
ROW = 64 * 4  # bytes of a row of 64 fp32
ONE, TWO = torch.ones(8, 64), torch.ones(8, 64)  # 2,048 bytes each
PICKED = torch.tensor([1, 3, 5])  # 24 bytes
LOGITS, LABELS = torch.ones(8, 64), torch.zeros(8, dtype=torch.int64)
LISTS = [[torch.ones(10), torch.ones(30)] for _ in range(4)]  # 160 bytes each
STEPS = [torch.ones(()), torch.ones(())]


@pytest.mark.parametrize(
    ("func", "args", "moved", "flops", "launches"),
    [
        (aten.add.Tensor, (ONE, TWO), 3 * 2048, 0, 1),
        # What is repeated is in memory once.
        (aten.add.Tensor, (ONE, torch.ones(64).expand(8, 64)), 2 * 2048 + ROW, 0, 1),
        (aten.mul_.Tensor, (ONE, TWO), 3 * 2048, 0, 1),
        (aten.zero_.default, (ONE,), 2048, 0, 1),
        (aten.zeros_like.default, (ONE,), 2048, 0, 1),
        (aten.copy_.default, (torch.empty(8, 64), TWO), 2 * 2048, 0, 1),
        (aten.copy_.default, (torch.empty(8, 64, dtype=BF16), TWO), 1024 + 2048, 0, 1),
        # Three rows are read and written; two of them are read, added and written.
        (aten.index_select.default, (ONE, 0, PICKED), 2 * 3 * ROW, 0, 1),
        (aten.embedding.default, (ONE, PICKED), 2 * 3 * ROW, 0, 1),
        (aten.index_add_.default, (torch.ones(8, 64), 0, PICKED, ONE[:3]), 3 * 3 * ROW, 0, 1),
        (aten.mm.default, (ONE, torch.ones(64, 32)), 2048 + 8192 + 1024, 2 * 8 * 64 * 32, 1),
        (aten.bmm.default, (torch.ones(3, 8, 64), torch.ones(3, 64, 8)), 13_056, 24_576, 1),
        (aten._foreach_mul_.Scalar, (LISTS[0], 2.0), 2 * 160, 0, 1),
        (aten._foreach_copy_.default, (LISTS[0], LISTS[1]), 3 * 160, 0, 1),
    ],
    ids=lambda each: str(each) if hasattr(each, "_schema") else None,
)
def test_bytes_and_flops_of_an_operator(
    func: object, args: tuple[object, ...], moved: float, flops: float, launches: float
) -> None:
    """Counted by hand for small tensors."""
    (described,) = describe(func, args, {}, func(*args))  # type: ignore[operator]
    _, _, numbers = described
    assert (numbers[0], numbers[1], numbers[6]) == (moved, flops, launches)


def test_kernels_that_address_single_elements_are_told_from_those_that_stream() -> None:
    """By layout and dtype, as ATen's kernels load several elements at a time or one."""
    half, turned = ONE.to(BF16), torch.ones(64, 8).t()
    streams = [
        (aten.add.Tensor, (ONE, TWO)),
        (aten.add.Tensor, (turned, turned)),  # one dense layout, whichever
        (aten.mul.Scalar, (ONE, 2.0)),
        (aten.copy_.default, (half, ONE)),  # fewer bits have a kernel
        (aten.masked_fill.Scalar, (ONE, ONE > 0, 0.0)),
        (aten.sum.dim_IntList, (ONE, [1])),
        (aten.cat.default, ([ONE, TWO],)),
    ]
    scattered = [
        (aten.add.Tensor, (ONE, turned)),
        (aten.add.Tensor, (ONE, torch.ones(64))),
        (aten.add.Tensor, (ONE, half)),
        (aten.neg.default, (torch.ones(8, 128)[:, :64],)),
        (aten._to_copy.default, (half,), {"dtype": torch.float32}),
        (aten.sum.dim_IntList, (ONE, [0])),
        (aten.cat.default, ([turned, turned],)),
    ]
    for name, cases in (("MEMORY", streams), ("SCATTERED", scattered)):
        for func, args, *options in cases:
            kwargs = options[0] if options else {}
            ((work, _, numbers),) = describe(func, args, kwargs, func(*args, **kwargs))
            assert work.name == name, (func, name)
            elements = 1024 if func is aten.cat.default else 512
            assert numbers[2] * numbers[4] == (elements if name == "SCATTERED" else 0)


def test_row_kernels_have_rows_their_length_and_what_they_read_again() -> None:
    """Eight rows of 64 fp32; a softmax's backward pass reads the gradient and the result."""
    mean = torch.ones(8, 1)
    weight = torch.ones(64)
    cases = [
        (aten._softmax.default, (ONE, -1, False), "SOFTMAX", ROW),
        (aten._log_softmax_backward_data.default, (ONE, TWO, -1, torch.float32), "", 2 * ROW),
        (aten.native_layer_norm.default, (ONE, [64], weight, weight, 1e-5), "NORM", ROW),
    ]
    for func, args, name, again in cases:
        ((work, _, numbers),) = describe(func, args, {}, func(*args))
        assert work.name == (name or "SOFTMAX_BACKWARD")
        assert numbers[2:5] == (8, again, 64)
    func = aten.native_layer_norm_backward.default
    args = (ONE, TWO, [64], mean, mean, weight, weight, [True, True, True])
    rows, weights = describe(func, args, {}, func(*args))
    assert (rows[0].name, rows[2][3]) == ("NORM_BACKWARD", 2 * ROW)
    assert (weights[0].name, weights[2][2]) == ("SCATTERED", 512)


def test_a_view_moves_nothing() -> None:
    """The same holds for memory that is allocated and not filled."""
    for func, args in (
        (aten.view.default, (ONE, [64, 8])),
        (aten._unsafe_view.default, (ONE, [64, 8])),
        (aten.t.default, (ONE,)),
        (aten.empty_like.default, (ONE,)),
    ):
        ((work, _, numbers),) = describe(func, args, {}, func(*args))
        assert (work.name, set(numbers)) == ("VIEW", {0.0})


def test_a_loss_reads_one_number_of_each_row() -> None:
    """The log-softmax before it reads the logits."""
    arguments = (LOGITS, LABELS, None, 1, -100)
    result = aten.nll_loss_forward.default(*arguments)
    ((work, _, numbers),) = describe(aten.nll_loss_forward.default, arguments, {}, result)
    assert numbers[0] == 8  # the loss and what it is divided by
    assert (work.name, numbers[2]) == ("PICKED_LOSS", 8)  # rows that one block adds up
    kept = (LOGITS, LABELS, None, 0, -100)  # a loss for each row
    result = aten.nll_loss_forward.default(*kept)
    assert describe(aten.nll_loss_forward.default, kept, {}, result)[0][2][2] == 0


def test_fused_adamw_reads_four_lists_and_writes_three() -> None:
    """It writes weights and both moments, and only reads gradients; step counters do not count."""
    func = aten._fused_adamw_.default
    args = (*LISTS, [], STEPS)
    ((_, _, numbers),) = describe(func, args, {}, None)
    assert numbers[0] == 4 * 160 + 8 + 3 * 160


def test_a_convolutions_backward_pass_is_twice_its_forward_pass() -> None:
    """It computes a gradient of the inputs and another of the weights."""
    inputs, weight = torch.ones(2, 4, 16), torch.ones(4, 1, 3)
    options = ([1], [2], [1], False, [0], 4)
    forward = aten.convolution.default
    out = forward(inputs, weight, None, *options)
    ((_, _, there),) = describe(forward, (inputs, weight, None, *options), {}, out)
    assert there[1] == 2 * 2 * 4 * 18 * 3
    backward = aten.convolution_backward.default
    args = (out, inputs, weight, None, *options, [True, True, False])
    ((_, _, back),) = describe(backward, args, {}, backward(*args))
    assert back[1] == 2 * there[1]


def test_four_bit_weights_take_their_own_constants_and_no_others() -> None:
    """64 x 128 weights take half a byte each, in bf16 two; 128 block constants only if nested."""
    func = torch.ops.bitsandbytes.gemm_4bit.default
    tokens, packed = torch.ones(8, 128, dtype=BF16), torch.zeros(4096, 1, dtype=torch.uint8)
    result = torch.ones(8, 64, dtype=BF16)
    plain = (tokens, packed, [64, 128], torch.ones(128), 64, "nf4")
    nested = (tokens, packed, [64, 128], torch.ones(1), 64, "nf4")
    constants = {"bias": None, "absmax_8bit": torch.zeros(128, dtype=torch.uint8)}
    weights = 64 * 128 * 2
    assert workspace_bytes(func, plain, {"bias": None}) == weights
    assert workspace_bytes(func, nested, constants) == weights + 128 * 4
    unpacking, product = describe(func, plain, {"bias": None}, result)
    assert unpacking[2][:2] == (4096 + 512 + weights, 64 * 128)
    assert product[2][:5] == (2048 + weights + 1024, 2 * 8 * 64 * 128, 8, 128, 64)
    first, *others = describe(func, nested, constants, result)
    assert first[2][0] == 128 * (1 + 4 + 4 + 4)  # read, written, read and written again
    assert [other[2] for other in others] == [unpacking[2], product[2]]


def test_attention_backward_takes_fp32_gradients_of_its_queries() -> None:
    """Where heads share keys, it takes gradients of keys and values per head of the queries too."""
    kernel = KERNELS["simulated::attention_backward"]
    query, shared = (torch.ones(2, heads, 256, 64, dtype=BF16) for heads in (8, 2))
    own = 4 * 2 * 8 * 256 * (64 + 1)

    def workspace(key: torch.Tensor) -> int:
        return kernel.workspace_bytes([query, query, key, key, query, None, True])

    assert workspace(query) == own
    assert workspace(shared) == own + 2 * (2 * 256 * 8 * 64 * 2)


def test_products_with_eight_bit_weights_take_unscaled_results() -> None:
    """For 8 tokens of 128 inputs and 64 outputs in bf16: int32, then fp16, beside the result.

    Their inputs take absolute values in fp16 and a comparison while they are quantised.
    """
    install_eight_bit_products()
    ops = torch.ops.bitsandbytes
    tokens, numbers = torch.ones(8, 128, dtype=BF16), torch.ones(8, 128, dtype=torch.int8)
    weights = torch.ones(64, 128, dtype=torch.int8)
    args = (tokens, numbers, weights, torch.ones(8), torch.ones(64), None, None)
    result = torch.ones(8, 64, dtype=BF16)
    func = ops.int8_mixed_scaled_mm.default
    assert workspace_bytes(func, args, {}) == 8 * 64 * (4 + 2)
    in_fp16 = (tokens.half(), *args[1:])
    assert workspace_bytes(func, in_fp16, {}) == 8 * 64 * 4
    product, scaling = describe(func, args, {}, (result, tokens[:0]))
    assert product[2][:5] == (1024 + 64 * 128 + 4 * 512, 2 * 8 * 64 * 128, 8, 128, 64)
    assert scaling[2][0] == 512 * (4 + 2 + 2 + 2)
    quantise = ops.int8_vectorwise_quant.default
    assert workspace_bytes(quantise, (tokens.half(), 6.0), {}) == 8 * 128 * (2 + 1)
