"""Text that is hardly YAML: a specification is read from it, or its mistakes are reported."""

import copy
from pathlib import Path

import pytest
import yaml
from builders.runs import ONE_CELL, ROUTED, spec_of
from builders.specifications import altered, mistakes_in
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orchestrator.spec.spec_file import SpecError, parse_spec, read_spec_text, shipped_specs
from orchestrator.spec.sweep_spec import SweepSpec


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
        (altered("[cpu]", "&all [*all]"), "2: is nested more than 20 deep"),
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
        (
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1},' * 10}]}}\n" for n in range(1, 11)),
            "7: holds more than 100000 values: list fewer",
        ),
    ],
)
def test_text_that_is_no_specification_is_one_mistake(text: str, line: str) -> None:
    """Whatever stands in the file."""
    assert mistakes_in(text) == [line]


def test_merged_keys_can_be_overridden() -> None:
    """As YAML says; a key that is given twice beside them is still told."""
    merged = altered("{examples: 1000", "{<<: {examples: 1}, examples: 7")
    assert spec_of(merged).workload.examples == 7
    assert mistakes_in(altered("examples: 7", "examples: 7, examples: 7", merged)) == [
        "7: 'examples' is given twice: keep one"
    ]
    assert mistakes_in(altered("{examples: 1}", "{examples: 1, examples: 2}", merged)) == [
        "7: 'examples' is given twice: keep one"
    ]


def test_mapping_used_again_by_alias_is_read_as_if_written_again() -> None:
    """Though keys were merged into it."""
    text = altered("[{method: full, precision: fp32}]", "[&r {<<: {method: lora}, lora_rank: 2}]")
    block = """\
  - models: [llama-tiny]
    recipes: [*r]
    seq_lens: [8]
"""
    cells = spec_of(altered("workload", f"{block}workload", text)).all_cells()
    assert {cell.recipe.key for cell in cells} == {"lora-r2-all-linear-bf16"}


def test_a_file_that_cannot_be_read_is_one_mistake(tmp_path: Path) -> None:
    """Not there, a folder, a folder that is a file, not UTF-8."""
    (tmp_path / "latin.yaml").write_bytes("name: naïve".encode("latin-1"))
    absent = "no such file or shipped sweep; shipped sweeps are " + ", ".join(shipped_specs())
    for name, words in (
        ("none.yaml", absent),
        (".", "is a folder: name the file in it"),
        ("latin.yaml/x", absent),
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


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(DUMPED | SPLICED)
@example("cells: '\x85 \u2028 \u2029'\nname: null")
def test_any_text_is_a_specification_or_has_reported_mistakes(text: str) -> None:
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
