"""Mistakes of a specification: each has its line, place, value and remedy."""

from collections.abc import Sequence

import pytest
from builders.runs import ONE_CELL, ROUTED, spec_of
from builders.specifications import altered, mistakes_in

MISTAKES: list[tuple[str, str, Sequence[tuple[str, ...]]]] = [
    # GPUs
    ("[cpu]", "[a40]", [("2: gpus[0]: ", "'a40'", "'A40'?")]),
    ("[cpu]", "\n  - cpu\n  - A4O", [("4: gpus[1]: ", "'A4O'", "'A40'")]),
    ("[cpu]", "[1, 2026-01-31, null, [cpu], {a: yes}]", [
        ("2: gpus[0]: must be text, not 1: put it in quotes",),
        ("2: gpus[1]: must be text, not 2026-01-31",),
        ("2: gpus[2]: must be text, not nothing",),
        ("2: gpus[3]: must be text, not ['cpu']",),
        ("2: gpus[4]: must be text, not {a: true}",),
    ]),
    ("[cpu]", "[]", [("2: gpus: must have at least 1 entry",)]),
    ("[cpu]", "cpu", [("2: gpus: must be a list", "not 'cpu'")]),
    ("[cpu]", "{cpu: 1}", [("2: gpus: must be a list", "not {cpu: 1}")]),
    ("[cpu]", "", [("2: gpus: must be a list", "not nothing")]),
    ("[cpu]", "[cpu, A40, cpu]", [("2: gpus[2]: 'cpu' is listed twice: keep one",)]),
    ("[cpu]", '["a\\nb\\ud800"]', [("2: gpus[0]: ", r"'a\nb\ud800'")]),
    # models
    ("llama-tiny", "lama-tiny", [("4: cells[0].models[0]: ", "'lama-tiny'", "'llama-tiny'")]),
    ("[llama-tiny]", "[]", [("4: cells[0].models: must have at least 1 entry",)]),
    ("[llama-tiny]", "[llama-tiny, llama-tiny, nix]", [
        ("4: cells[0].models[2]: ", "'nix'"),
        ("4: cells[0].models[1]: 'llama-tiny' is listed twice",),
    ]),
    # numbers
    ("[16]", "[0, -1, '32', 8.0, 8.5, true, null, .inf, .nan, 1e3, 2026-01-31]", [
        ("6: cells[0].seq_lens[0]: must be at least 1, not 0",),
        ("6: cells[0].seq_lens[1]: must be at least 1, not -1",),
        ("6: cells[0].seq_lens[2]: must be a whole number, not '32': ", "without quotes"),
        ("6: cells[0].seq_lens[3]: must be a whole number, not 8.0",),
        ("6: cells[0].seq_lens[4]: must be a whole number, not 8.5",),
        ("6: cells[0].seq_lens[5]: must be a whole number, not true",),
        ("6: cells[0].seq_lens[6]: must be a whole number, not nothing",),
        ("6: cells[0].seq_lens[7]: must be a whole number, not inf",),
        ("6: cells[0].seq_lens[8]: must be a whole number, not nan",),
        ("6: cells[0].seq_lens[9]: must be a whole number, not '1e3': write it out",),
        ("6: cells[0].seq_lens[10]: must be a whole number, not 2026-01-31",),
    ]),
    ("[16]", "[]", [("6: cells[0].seq_lens: must have at least 1 entry",)]),
    ("[16]", "[16, 32, 16]", [("6: cells[0].seq_lens[2]: 16 is listed twice",)]),
    ("1000", f"1{'0' * 30}", [("7: the number '1000", "too large")]),
    ("1000", "9" * 5000, [("7: the number '999", "too large")]),
    ("1000", "2026-99-99", [("7: workload.examples: must be a whole number, not '2026-99-99'",)]),
    ("1000", "!!int x", [("7: workload.examples: must be a whole number, not 'x'",)]),
    ("64", "0\nseed: -1", [
        ("8: max_batch_size: must be at least 1, not 0",),
        ("9: seed: must be at least 0, not -1",),
    ]),
    ("max_batch_size: 64", "lengths: drawn", [("8: lengths: drawn: ", "dataset")]),
    ("max_batch_size: 64", "lengths: long", [("8: lengths: ", "'long'")]),
    ("max_batch_size: 64", "build_timeout_seconds: yes\nprobe_timeout_seconds: '3'", [
        ("8: build_timeout_seconds: must be a number, not true",),
        ("9: probe_timeout_seconds: must be a number, not '3': ", "without quotes"),
    ]),
    ("max_batch_size: 64", "build_timeout_seconds: 0\nprobe_timeout_seconds: .inf", [
        ("8: build_timeout_seconds: must be greater than 0, not 0",),
        ("9: probe_timeout_seconds: must be a finite number, not inf",),
    ]),
    # keys
    ("seq_lens", "seqlens", [("6: cells[0].seqlens: unknown key: did you mean 'seq_lens'",)]),
    ("epochs", "epocs", [("7: workload.epocs: unknown key: did you mean 'epochs'",)]),
    ("max_batch_size", "zzz", [("8: zzz: unknown key: the known ones are name,",)]),
    ("max_batch_size: 64", "models: [x]", [("8: models: belongs below cells",)]),
    ("max_batch_size: 64", "epochs: 3", [("8: epochs: belongs below workload",)]),
    ("    seq_lens", "    lora_rank: 8\n    seq_lens", [
        ("6: cells[0].lora_rank: belongs below recipes",),
    ]),
    ("max_batch_size", '"a\\nb"', [(r"8: 'a\nb': unknown key",)]),
    ("name: made\n", "", [("1: name: is missing: add it",)]),
    ("    seq_lens: [16]\n", "", [("4: cells[0].seq_lens: is missing: add it",)]),
    ("{examples: 1000, epochs: 3}", "{}", [
        ("7: workload.examples: is missing",),
        ("7: workload.epochs: is missing",),
    ]),
    ("{examples: 1000", "{examples: 1, examples: 2", [("7: 'examples' is given twice: keep one",)]),
    ("max_batch_size: 64", "name: other", [("8: 'name' is given twice",)]),
    ("max_batch_size: 64", "? [a]\n: 1", [("8: a key must be text",)]),
    # the parts, of another kind
    ("made", "a b/c", [("1: name: must be letters, digits,", "not 'a b/c'")]),
    ("made", "2026-01-31", [("1: name: must be text, not 2026-01-31",)]),
    ("made", "a" * 101, [("1: name: must have at most 100 characters",)]),
    ("{examples: 1000, epochs: 3}", "3", [("7: workload: must be a mapping", "not 3")]),
    ("{examples: 1000, epochs: 3}", "", [("7: workload: must be a mapping", "not nothing")]),
    ("  - models", "    models", [("3: cells: must be a list", "not {models: ['llama-tiny']")]),
    ("max_batch_size: 64", "catalog:", [("8: catalog: must be a mapping", "not nothing")]),
    # recipes
    (
        "{method: full, precision: fp32}",
        "full",
        [("5: cells[0].recipes[0]: unknown recipe 'full'", "ones are paper-mixtral")],
    ),
    ("{method: full, precision: fp32}", "7", [("5: cells[0].recipes[0]: must be a map", "not 7")]),
    (
        "{method: full, precision: fp32}",
        "{named: paper-mixtrl}",
        [("5: cells[0].recipes[0]: unknown recipe 'paper-mixtrl'", "mean 'paper-mixtral'")],
    ),
    (
        "{method: full, precision: fp32}",
        "{named: paper-mixtral}",
        [("5: cells[0].recipes[0]: lora_targets experts, router: llama-tiny has no experts",)],
    ),
    (
        "[llama-tiny]",
        "[./nowhere]",
        [("4: cells[0].models[0]: model './nowhere': ", "config.json: no such file")],
    ),
    (
        "[cpu]",
        "[cpu]\nas_if: [A40]",
        [("3: as_if[0]: A40 has no less memory than any of gpus (cpu): remove it",)],
    ),
    ("seq_lens", "weights: pretrained\n    seq_lens", [("6: cells[0].weights: llama-tiny",)]),
    ("full", "qlor", [("5: cells[0].recipes[0].method: must be ", "'qlor'", "mean 'qlora'")]),
    ("full", "[full]", [("5: cells[0].recipes[0].method: must be ", "not ['full']")]),
    ("full", "full, lora_rank: 8", [("5: cells[0].recipes[0]: lora_rank 8 ", "remove it")]),
    ("full", "full, lora_rank: 8, kbit_preparation: true", [
        ("5: cells[0].recipes[0]: lora_rank 8 ", "remove it"),
        ("5: cells[0].recipes[0]: kbit_preparation ", "remove it"),
    ]),
    ("full, precision: fp32", "lora, precision: fp33, kbit_preparation: true, lora_rank: 0", [
        ("5: cells[0].recipes[0].lora_rank: must be at least 1",),
        ("5: cells[0].recipes[0].precision: must be ", "not 'fp33'"),
        ("5: cells[0].recipes[0]: kbit_preparation ", "remove it"),
    ]),
    ("full", "lora", [("5: cells[0].recipes[0]: method lora needs lora_rank", "lora_rank: 16")]),
    ("full", "full, gradient_checkpointing: 1", [
        ("5: cells[0].recipes[0].gradient_checkpointing: must be true, false or reentrant, not 1",),
    ]),
    ("{method: full, precision: fp32}", "{method: full}, {method: full, precision: bf16}", [
        ("5: cells[0].recipes[1]: {method: 'full', precision: 'bf16'} is listed twice",),
    ]),
    # a user's own rows
    ("max_batch_size: 64", "catalog: {gpus: [{key: x, kind: xpu}]}", [
        ("8: catalog.gpus[0].kind: must be 'cuda', 'cpu' or 'rocm', not 'xpu'",),
        ("8: catalog.gpus[0].source: is missing",),
        ("8: catalog.gpus[0].recorded: is missing",),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "mistakes"), MISTAKES)
def test_a_mistake_has_its_line_place_value_and_remedy(
    old: str, new: str, mistakes: Sequence[tuple[str, ...]]
) -> None:
    """Each mistake is one line, nothing else is told, and none twice."""
    lines = mistakes_in(altered(old, new))
    assert len(lines) == len(mistakes), lines
    for line, (start, *words) in zip(lines, mistakes, strict=True):
        assert line.startswith(start)
        assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            altered("[2]", "[9, 2]", ROUTED),
            "6: cells[0].active_experts[0]: 9 exceeds the 8 experts of mixtral-tiny",
        ),
        (
            altered("mixtral-tiny", "mixtral-tiny, llama-tiny", ROUTED),
            (
                "6: cells[0].active_experts: llama-tiny has no experts: remove active_experts, "
                "or list the model apart"
            ),
        ),
        (
            altered(
                "full",
                "qlora, lora_rank: 4",
                altered("mixtral-tiny", "mixtral-tiny, blackmamba-tiny", ROUTED),
            ),
            (
                "5: cells[0].recipes[0]: method qlora is not possible with blackmamba-tiny: Mamba "
                "layers use their matrices as they are, which quantised ones are not: use full or "
                "lora"
            ),
        ),
        (
            ONE_CELL
            + "catalog: {offers: [{gpu: A4O, provider: me, region: here, instance: desk, "
            + "usd_per_hour: 1, source: me, recorded: 2026-01-31}]}",
            "10: catalog: offer me desk: unknown GPU 'A4O': did you mean 'A40'",
        ),
    ],
)
def test_parts_that_contradict_each_other_are_mistakes(text: str, line: str) -> None:
    """Experts that a model has not, methods it cannot be tuned with, prices of no known GPU."""
    (only,) = mistakes_in(text)
    assert only.startswith(line)


def second_block(active_experts: str) -> str:
    """Two blocks of mixtral-tiny, the first with 2 active experts at 16 tokens."""
    block = f"""\
  - models: [mixtral-tiny]
    recipes: [{{method: full, precision: fp32}}]
    {active_experts}
    seq_lens: [8, 16]
"""
    return altered("workload", f"{block}workload", ROUTED)


@pytest.mark.parametrize("active_experts", ["active_experts: [8, 2]", "# the model's own: 2"])
def test_a_cell_in_two_blocks_is_one_mistake(active_experts: str) -> None:
    """However the second block comes to it."""
    assert mistakes_in(second_block(active_experts)) == [
        (
            "8: cells[1]: mixtral-tiny with the same recipe, active_experts and seq_len 16 is in "
            "cells[0] already: remove one"
        )
    ]


def test_blocks_that_differ_in_active_experts_go_together() -> None:
    """The same model and length at another sparsity is another cell."""
    assert len(spec_of(second_block("active_experts: [8]")).all_cells()) == 3


def test_every_mistake_of_a_file_is_reported_in_the_order_of_its_lines() -> None:
    """One attempt is enough to learn of them all."""
    lines = mistakes_in(
        """\
name: a b
gpus: [A4O]
cells:
  - models: [llama-tiny, llama-tiny, lama-tiny]
    recipes: [{method: full}]
    active_experts: [2]
    seq_lens: [0]
  - models: [blackmamba-tiny]
    recipes:
      - {method: full}
      - {method: qlora, lora_rank: 2}
    seq_len: [8]
workload: {examples: ten}
seed: 1
seed: 2
"""
    )
    assert [line.split(": ")[:2] for line in lines] == [
        ["1", "name"],
        ["2", "gpus[0]"],
        ["4", "cells[0].models[2]"],
        ["4", "cells[0].models[1]"],
        ["6", "cells[0].active_experts"],
        ["7", "cells[0].seq_lens[0]"],
        ["11", "cells[1].recipes[1]"],
        ["12", "cells[1].seq_len"],
        ["13", "workload.examples"],
        ["13", "workload.epochs"],
        ["15", "'seed' is given twice"],
    ]


def test_gpu_whose_own_row_is_wrong_is_not_called_unknown() -> None:
    """The mistake is in the row, and is told there alone."""
    row = "catalog: {gpus: [{key: mine, kind: cpu, source: me, recorded: 2026-01-31}]}\n"
    (only,) = mistakes_in(altered("[cpu]", "[mine]") + row)
    assert only.startswith("10: catalog.gpus[0]: mine: a cpu needs usable_memory_bytes")
