"""Specifications: what a right one stands for, and how a wrong one is told, all of it at once."""

import copy
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from builders.runs import ONE_CELL, ROUTED, spec_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.run_folder.run_folder import open_run
from orchestrator.spec.spec_file import SpecError, parse_spec, read_spec_text, shipped_specs
from orchestrator.spec.sweep_spec import SweepSpec


def told(text: str) -> list[str]:
    """The mistakes of a specification, a line each, without the file's name."""
    with pytest.raises(SpecError) as error:
        parse_spec(text, "x.yaml")
    lines = str(error.value).split("\n")
    assert all(line.startswith("x.yaml:") for line in lines), lines
    return [line.removeprefix("x.yaml:") for line in lines]


def spoilt(old: str, new: str, text: str = ONE_CELL) -> str:
    """The one-cell specification with one of its parts changed."""
    assert text.count(old) == 1, old
    return text.replace(old, new)


def test_default_sweep_is_valid_and_holds_three_families_on_the_cpu() -> None:
    """The sweep that runs when none is given: small ones here, then the paper's, simulated."""
    cells = parse_spec(shipped_specs()["laptop"], "the default").all_cells()
    assert [cell.simulated for cell in cells] == 10 * [False] + 32 * [True]
    assert {(c.gpu, c.model, c.active_experts, c.seq_len) for c in cells if c.simulated} == set(
        itertools.product(
            ("A40", "A100-40GB-SXM", "A100-80GB-SXM", "H100-SXM"),
            ("mixtral-8x7b", "blackmamba-2.8b"),
            (2, 8),
            (80, 176),
        )
    )
    assert [cell.key for cell in cells if not cell.simulated] == [
        "cpu/mixtral-tiny/qlora-r8-experts+router-fp32-looped/2of8/seq32",
        "cpu/mixtral-tiny/qlora-r8-experts+router-fp32-looped/2of8/seq64",
        "cpu/mixtral-tiny/qlora-r8-experts+router-fp32-looped/8of8/seq32",
        "cpu/mixtral-tiny/qlora-r8-experts+router-fp32-looped/8of8/seq64",
        "cpu/blackmamba-tiny/full-fp32-grouped/2of8/seq32",
        "cpu/blackmamba-tiny/full-fp32-grouped/2of8/seq64",
        "cpu/blackmamba-tiny/full-fp32-grouped/8of8/seq32",
        "cpu/blackmamba-tiny/full-fp32-grouped/8of8/seq64",
        "cpu/llama-tiny/lora-r8-all-linear-fp32-checkpointed/dense/seq32",
        "cpu/llama-tiny/lora-r8-all-linear-fp32-checkpointed/dense/seq64",
    ]


def test_cells_are_the_product_of_a_blocks_axes_on_every_gpu() -> None:
    """A model with experts that are not mentioned has its own routing."""
    text = spoilt("[llama-tiny]", "[llama-tiny, mixtral-tiny]")
    text = spoilt("[16]", "[16, 8]", spoilt("[cpu]", "[cpu, A40]", text))
    assert [cell.key for cell in spec_of(text).all_cells()] == [
        f"{gpu}/{model}/seq{length}"
        for gpu in ("cpu", "A40")
        for model in ("llama-tiny/full-fp32/dense", "mixtral-tiny/full-fp32-grouped/2of8")
        for length in (16, 8)
    ]


@pytest.mark.parametrize("name", shipped_specs())
def test_shipped_sweeps_are_valid_and_named_after_themselves(name: str) -> None:
    """Each can be asked for by its name, and no cell of it is impossible on its model."""
    spec = parse_spec(shipped_specs()[name], name)
    assert spec.name == name
    assert spec.all_cells()


def test_recipes_can_be_named_and_changed() -> None:
    """A paper's recipe, and the same with another attention kernel."""
    text = spoilt("{method: full, precision: fp32}", NAMED, ROUTED)
    keys = [cell.recipe.key for cell in spec_of(text).all_cells()]
    stem = "qlora-r16-experts+router-bf16-checkpointed"
    assert keys == [f"{stem}-flash_attention_2-looped", f"{stem}-looped"]


NAMED = "paper-mixtral, {named: paper-mixtral, attention: sdpa}"


def test_alias_and_name_of_a_model_are_the_same_cell() -> None:
    """630M are the active parameters of the model of 2.8B."""
    text = spoilt("llama-tiny", "blackmamba-630m")
    assert [cell.model for cell in spec_of(text).all_cells()] == ["blackmamba-2.8b"]


def test_smaller_gpus_are_found_on_every_larger_one_of_their_kind() -> None:
    """After the GPUs' own cells; a GPU with less memory cannot stand in."""
    text = spoilt("[cpu]", "[A100-80GB-SXM, A40, cpu]\nas_if: [A40, L4]")
    cells = [(cell.gpu, cell.capped_on) for cell in spec_of(text).all_cells()]
    assert cells == [
        ("A100-80GB-SXM", None),
        ("A40", None),
        ("cpu", None),
        ("A40", "A100-80GB-SXM"),
        ("L4", "A100-80GB-SXM"),
        ("L4", "A40"),
    ]


def test_models_folder_may_be_gone_when_the_run_is_read_again(tmp_path: Path) -> None:
    """The run folder keeps what the specification meant."""
    config = {"model_type": "llama", "vocab_size": 8, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = spoilt("llama-tiny", str(tmp_path))
    run = open_run(tmp_path / "run", text, spec_of(text))
    (tmp_path / "config.json").unlink()
    with pytest.raises(SpecError, match="No such file"):
        spec_of(text)
    (cell,) = run.spec().all_cells()
    assert (cell.model, run.spec().model(cell.model).vocab_size) == (str(tmp_path), 8)


def test_own_gpus_and_prices_join_the_catalog() -> None:
    """A user's rows can be swept and priced."""
    rows = """\
catalog:
  gpus:
    - {key: mine, kind: cpu, usable_memory_bytes: 9, source: me, recorded: 2026-01-31}
  offers:
    - {gpu: mine, provider: me, region: here, instance: desk, usd_per_hour: 1, source: me,
       recorded: 2026-01-31}
"""
    spec = spec_of(spoilt("[cpu]", "[mine]") + rows)
    catalog = spec.merged_catalog()
    assert (spec.gpus, catalog.gpu("mine").usable_memory_bytes) == (("mine",), 9)
    assert [offer.instance for offer in catalog.offers("mine")] == ["desk"]


# What is changed, and what is told: for each mistake its line, its place, and words that it needs.
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
        [("5: cells[0].recipes[0]: unknown recipe 'paper-mixtrl'", "mean 'paper-mixtral'?")],
    ),
    (
        "{method: full, precision: fp32}",
        "{named: paper-mixtral}",
        [("5: cells[0].recipes[0]: lora_targets experts, router: llama-tiny has no experts",)],
    ),
    (
        "[llama-tiny]",
        "[./nowhere]",
        [("4: cells[0].models[0]: model './nowhere': ", "config.json: No such file")],
    ),
    (
        "[cpu]",
        "[cpu]\nas_if: [A40]",
        [("3: as_if[0]: A40 has no less memory than any of gpus (cpu): remove it",)],
    ),
    ("seq_lens", "weights: pretrained\n    seq_lens", [("6: cells[0].weights: llama-tiny",)]),
    ("full", "qlor", [("5: cells[0].recipes[0].method: must be ", "'qlor'", "mean 'qlora'")]),
    ("full", "[full]", [("5: cells[0].recipes[0].method: must be ", "not ['full']")]),
    ("full", "full, lora_rank: 8", [("5: cells[0].recipes[0]: lora_rank 8 ", "drop it")]),
    ("full", "lora", [("5: cells[0].recipes[0]: method lora needs lora_rank", "lora_rank: 16")]),
    ("full", "full, gradient_checkpointing: 1", [
        ("5: cells[0].recipes[0].gradient_checkpointing: must be true or false, not 1",),
    ]),
    ("{method: full, precision: fp32}", "{method: full}, {method: full, precision: bf16}", [
        ("5: cells[0].recipes[1]: {method: 'full', precision: 'bf16'} is listed twice",),
    ]),
    # a user's own rows
    ("max_batch_size: 64", "catalog: {gpus: [{key: x, kind: xpu}]}", [
        ("8: catalog.gpus[0].kind: must be 'cuda' or 'cpu', not 'xpu'",),
        ("8: catalog.gpus[0].source: is missing",),
        ("8: catalog.gpus[0].recorded: is missing",),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "mistakes"), MISTAKES)
def test_mistake_is_told_with_its_line_place_value_and_remedy(
    old: str, new: str, mistakes: Sequence[tuple[str, ...]]
) -> None:
    """Each mistake is one line, nothing else is told, and none twice."""
    lines = told(spoilt(old, new))
    assert len(lines) == len(mistakes), lines
    for line, (start, *words) in zip(lines, mistakes, strict=True):
        assert line.startswith(start)
        assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            spoilt("[2]", "[9, 2]", ROUTED),
            "6: cells[0].active_experts[0]: 9 exceeds the 8 experts of mixtral-tiny",
        ),
        (
            spoilt("mixtral-tiny", "mixtral-tiny, llama-tiny", ROUTED),
            (
                "6: cells[0].active_experts: llama-tiny has no experts: remove active_experts, "
                "or list the model apart"
            ),
        ),
        (
            spoilt(
                "full",
                "qlora, lora_rank: 4",
                spoilt("mixtral-tiny", "mixtral-tiny, blackmamba-tiny", ROUTED),
            ),
            (
                "5: cells[0].recipes[0]: method qlora is not possible with blackmamba-tiny: Mamba "
                "layers use their matrices as they are, which 4-bit ones are not: use full or lora"
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
def test_parts_that_do_not_go_together_are_told(text: str, line: str) -> None:
    """Experts that a model has not, methods it cannot be tuned with, prices of no known GPU."""
    (only,) = told(text)
    assert only.startswith(line)


def second_block(active_experts: str) -> str:
    """Two blocks of mixtral-tiny, the first with 2 active experts at 16 tokens."""
    block = f"""\
  - models: [mixtral-tiny]
    recipes: [{{method: full, precision: fp32}}]
    {active_experts}
    seq_lens: [8, 16]
"""
    return spoilt("workload", f"{block}workload", ROUTED)


@pytest.mark.parametrize("active_experts", ["active_experts: [8, 2]", "# the model's own: 2"])
def test_cell_in_two_blocks_is_told_once(active_experts: str) -> None:
    """However the second block comes to it."""
    assert told(second_block(active_experts)) == [
        (
            "8: cells[1]: mixtral-tiny with the same recipe, active_experts and seq_len 16 is in "
            "cells[0] already: remove one"
        )
    ]


def test_blocks_that_differ_in_active_experts_go_together() -> None:
    """The same model and length at another sparsity is another cell."""
    assert len(spec_of(second_block("active_experts: [8]")).all_cells()) == 3


def test_every_mistake_of_a_file_is_told_in_the_order_of_its_lines() -> None:
    """One attempt is enough to learn of them all."""
    lines = told(
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
    (only,) = told(spoilt("[cpu]", "[mine]") + row)
    assert only.startswith("10: catalog.gpus[0]: mine: a cpu needs usable_memory_bytes")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "1: is empty: a sweep needs name, gpus, cells and workload"),
        ("# nothing yet\n", "1: is empty: a sweep needs name, gpus, cells and workload"),
        ("- 1\n- b\n", "1: must be a mapping of keys to values, not [1, 'b']"),
        ("hello", "1: must be a mapping of keys to values, not 'hello'"),
        (
            ONE_CELL + "seed: [1\n",
            (
                "11: not YAML: while parsing a flow sequence (line 10): "
                "expected ',' or ']', but got '<stream end>'"
            ),
        ),
        (
            "name: x\n\tgpus: [cpu]\n",
            (
                r"2: not YAML: while scanning for the next token: found character '\t' that cannot "
                "start any token"
            ),
        ),
        (
            ONE_CELL + "---\n" + ONE_CELL,
            (
                "10: not YAML: expected a single document in the stream (line 1): "
                "but found another document"
            ),
        ),
        (ONE_CELL + "seed: *x\n", "10: not YAML: found undefined alias 'x'"),
        (
            ONE_CELL + "seed: !x 1\n",
            "10: not YAML: could not determine a constructor for the tag '!x'",
        ),
        (ONE_CELL + "seed: \x07\n", "10: not YAML: the character U+0007 may not stand in it"),
        (spoilt("[cpu]", "&all [*all]"), "2: is nested more than 20 deep"),
        ("a: " + "[" * 1000, "1: is nested more than 20 deep"),
        (
            "&a\n<<: 3\n",
            (
                "2: not YAML: while constructing a mapping (line 1): "
                "expected a mapping or list of mappings for merging, but found scalar"
            ),
        ),
        (
            "a: &a [" + "1," * 999 + "]\nb: &b [" + "*a," * 999 + "]",
            "1: holds more than 100000 values: list fewer",
        ),
    ],
)
def test_text_that_is_no_specification_at_all_is_told_in_one_line(text: str, line: str) -> None:
    """Whatever stands in the file."""
    assert told(text) == [line]


def test_merged_keys_can_be_overridden() -> None:
    """As YAML says; a key that is given twice beside them is still told."""
    merged = spoilt("{examples: 1000", "{<<: {examples: 1}, examples: 7")
    assert spec_of(merged).workload.examples == 7
    assert told(spoilt("examples: 7", "examples: 7, examples: 7", merged)) == [
        "7: 'examples' is given twice: keep one"
    ]
    assert told(spoilt("{examples: 1}", "{examples: 1, examples: 2}", merged)) == [
        "7: 'examples' is given twice: keep one"
    ]


def test_mapping_used_again_by_alias_is_read_as_if_written_again() -> None:
    """Though keys were merged into it."""
    text = spoilt("[{method: full, precision: fp32}]", "[&r {<<: {method: lora}, lora_rank: 2}]")
    block = """\
  - models: [llama-tiny]
    recipes: [*r]
    seq_lens: [8]
"""
    cells = spec_of(spoilt("workload", f"{block}workload", text)).all_cells()
    assert {cell.recipe.key for cell in cells} == {"lora-r2-all-linear-bf16"}


def test_file_that_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    """Not there, a folder, a folder that is a file, not UTF-8."""
    (tmp_path / "latin.yaml").write_bytes("name: naïve".encode("latin-1"))
    for name, words in (
        (
            "none.yaml",
            "no such file or shipped sweep; shipped sweeps are " + ", ".join(shipped_specs()),
        ),
        (".", "is a folder: give the YAML file in it"),
        ("latin.yaml/x", "cannot be read: Not a directory"),
        ("latin.yaml", "not UTF-8 text (byte 8): save it as UTF-8"),
    ):
        path = tmp_path / name
        with pytest.raises(SpecError) as error:
            read_spec_text(path)
        assert str(error.value) == f"{path}: {words}"


def test_file_with_a_byte_order_mark_and_foreign_line_ends_is_read(tmp_path: Path) -> None:
    """As some editors save it."""
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + ONE_CELL.replace("\n", "\r\n").encode())
    assert spec_of(read_spec_text(path)) == spec_of()


WORDS = st.sampled_from(["cpu", "A40", "llama-tiny", "mixtral-tiny", "full", "qlora", "1e3", ""])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.dates()
    | st.datetimes()
    | st.binary(max_size=3)
    | st.text(max_size=5)
    | WORDS
)
KEYS = st.sampled_from(
    [*SweepSpec.model_fields, "models", "recipes", "seq_lens", "active_experts", "method"]
)
ANYTHING = st.recursive(
    SCALARS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(KEYS | SCALARS, part, max_size=3),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn) -> object:
    """A right specification, one or more of whose parts were replaced by something else."""
    data = copy.deepcopy(yaml.safe_load(draw(st.sampled_from([ONE_CELL, ROUTED]))))
    for _ in range(draw(st.integers(1, 3))):
        part = data
        while True:
            keys = list(part) if isinstance(part, dict) else range(len(part))
            key = draw(st.sampled_from(keys)) if keys else None
            if key is None:
                break
            if not isinstance(part[key], dict | list) or draw(st.booleans()):
                part[key] = draw(ANYTHING)
                break
            part = part[key]
    return data


DUMPED = st.builds(
    lambda data, flow: yaml.safe_dump(data, allow_unicode=True, default_flow_style=flow),
    st.one_of(mutated(), ANYTHING),
    st.booleans(),
)
PIECES = [
    *"&*!|<>[]{}:,-?'\"#\n\t\0 ",
    "&a ",
    "*a",
    "<<: ",
    "0x_",
    "2026-99-99",
    "!!int ",
    "- ",
    "1e3",
]
SPLICED = st.builds(
    lambda at, length, pieces: ROUTED[:at] + "".join(pieces) + ROUTED[at + length :],
    st.integers(0, len(ROUTED)),
    st.integers(0, 8),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DUMPED | SPLICED)
def test_any_text_whatsoever_is_a_specification_or_told_mistakes(text: str) -> None:
    """Never another exception; and what is told are lines that point into the file."""
    try:
        spec = parse_spec(text, "x.yaml")
    except SpecError as error:
        lines = str(error).split("\n")
        assert len(set(lines)) == len(lines)
        for line in lines:
            number = int(line.removeprefix("x.yaml:").partition(":")[0])
            assert 1 <= number <= text.count("\n") + 1
    else:
        assert len(spec.all_cells()) == len({cell.key for cell in spec.all_cells()}) > 0
