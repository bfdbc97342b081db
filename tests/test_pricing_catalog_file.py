"""GPUs and prices from a user's files: optional fields, and one line per mistake."""

import datetime as dt
import os
from pathlib import Path

import pytest

from gpu_catalog.catalog import Catalog, CatalogError, load_catalog
from orchestrator.pricing.catalog_file import read_catalog_file, read_price_file

CATALOG = load_catalog()
WRITTEN = dt.date(2026, 11, 1)
GPU_YAML = """\
gpus:
  - key: A30
    kind: cuda
    device_names: [NVIDIA A30]
    marketed_memory_gb: 48
    source: its data sheet
    recorded: 2026-11-20
offers:
  - {gpu: A30, usd_per_hour: 0.31}
  - {gpu: A40, provider: acme, region: moon, instance: a40.8, gpus_per_instance: 8,
     usd_per_hour: 2.4, market: spot, source: a letter, recorded: 2026-11-20}
"""
GPU_TOML = """\
[[gpus]]
key = "A30"
kind = "cuda"
device_names = ["NVIDIA A30"]
marketed_memory_gb = 48
source = "its data sheet"
recorded = 2026-11-20

[[offers]]
gpu = "A30"
usd_per_hour = 0.31

[[offers]]
gpu = "A40"
provider = "acme"
region = "moon"
instance = "a40.8"
gpus_per_instance = 8
usd_per_hour = 2.4
market = "spot"
source = "a letter"
recorded = 2026-11-20
"""


def written(folder: Path, name: str, text: str) -> Path:
    """Write a file with this text, dated 1 November."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    day = dt.datetime(2026, 11, 1, 12, tzinfo=dt.UTC).timestamp()
    os.utime(path, (day, day))
    return path


def mistakes(path: Path, catalog: Catalog = CATALOG) -> list[str]:
    """Return the mistakes of a price file, without its name."""
    with pytest.raises(CatalogError) as error:
        read_price_file(path, catalog)
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{path}:") for line in lines)
    return [line.removeprefix(f"{path}:") for line in lines]


@pytest.mark.parametrize(("name", "text"), [("a.yaml", GPU_YAML), ("a.toml", GPU_TOML)])
def test_a_file_of_gpus_and_offers_is_merged_over_the_catalog(
    name: str, text: str, tmp_path: Path
) -> None:
    """YAML and TOML are equivalent; no shipped GPU or offer is lost."""
    rows = read_catalog_file(written(tmp_path, name, text), CATALOG)
    merged = CATALOG.merged(rows.gpus, rows.offers)
    assert merged.gpu_by_device_name("NVIDIA A30").key == "A30"
    [own] = merged.offers("A30")
    assert (own.provider, own.region, own.instance, own.usd_per_hour) == ("own", "own", "A30", 0.31)
    assert (own.recorded, own.source, own.as_of) == (WRITTEN, name, None)
    assert len(merged.all_offers) == len(CATALOG.all_offers) + 2
    assert [o.usd_per_gpu_hour for o in merged.offers("A40") if o.provider == "acme"] == [0.3]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.csv", "gpu,usd_per_hour\nA40,0.12\n"),
        ("p.csv", "\ufeffgpu;usd_per_hour;currency\n\nA40;0.12;usd\n"),
        ("p.csv", "gpu;usd_per_hour;note\nA40;0.12;big, fast\n"),
        ("p.csv", "usd_per_hour\tgpu\tprovider\n 0.12 \tA40\t\n"),
        ("p.yaml", "offers:\n  - {gpu: A40, usd_per_hour: 0.12}\n"),
        ("p.yml", "- gpu: A40\n  usd_per_hour: 0.12\n"),
        ("p.toml", '[[offers]]\ngpu = "A40"\nusd_per_hour = 0.12\n'),
    ],
)
def test_an_owned_gpu_needs_only_its_key_and_hourly_cost(
    name: str, text: str, tmp_path: Path
) -> None:
    """Provider, region and date have defaults; the date is that of the file."""
    [own] = read_price_file(written(tmp_path, name, text), CATALOG)
    assert (own.gpu, own.usd_per_hour, own.provider, own.instance) == ("A40", 0.12, "own", "A40")
    assert (own.recorded, own.market, own.gpus_per_instance) == (WRITTEN, "on-demand", 1)


def test_a_users_price_replaces_the_catalogs(tmp_path: Path) -> None:
    """A discount on an instance of the catalog is not a second offer."""
    offer = CATALOG.offers("H100-SXM")[0]
    text = (
        "gpu,provider,region,instance,gpus_per_instance,market,usd_per_hour\n"
        f"{offer.gpu},{offer.provider},{offer.region},{offer.instance},"
        f"{offer.gpus_per_instance},{offer.market},0.5\n"
    )
    own = read_price_file(written(tmp_path, "p.csv", text), CATALOG)
    merged = CATALOG.merged((), own)
    assert len(merged.all_offers) == len(CATALOG.all_offers)
    assert merged.offers("H100-SXM")[0].usd_per_hour == 0.5


def test_every_mistake_of_a_csv_is_reported_with_its_line(tmp_path: Path) -> None:
    """Each line has the wrong value, its place and the remedy."""
    text = """\
gpu,usd_per_hour,currency,gpus_per_instance,market,recorded,instance
A4O,0.12,,,,,
A40,,,,,,
A40,0,,,,,
A40,-3,,,,,
A40,free,,,,,
A40,€2,,,,,
A40,1.5,EUR,,,,
A40,1.5,,two,,,
A40,1.5,,0,,,
A40,1.5,,,sale,,
A40,1.5,,,,yesterday,
,1.5,,,,,
A40,1.5,,,,,a
A40,1.6,,,,,a
A40,nan,,,,,
"""
    expected = [
        ("2: gpu: ", "did you mean 'A40'"),
        ("3: usd_per_hour: ", "missing"),
        ("4: usd_per_hour: ", "not '0'"),
        ("5: usd_per_hour: ", "not '-3'"),
        ("6: usd_per_hour: ", "'free': US dollars"),
        ("7: usd_per_hour: ", "'€2': US dollars"),
        ("8: currency: ", "USD, not 'EUR'"),
        ("9: gpus_per_instance: ", "not 'two'"),
        ("10: gpus_per_instance: ", "not '0'"),
        ("11: market: ", "'spot', not 'sale'"),
        ("12: recorded: ", "not 'yesterday'"),
        ("13: gpu: ", "missing"),
        ("16: usd_per_hour: ", "not 'nan'"),
    ]
    messages = mistakes(written(tmp_path, "p.csv", text))
    for message, (place, mistake) in zip(messages, expected, strict=True):
        assert message.startswith(place)
        assert mistake in message


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", ["1: no column gpu: add it", "1: no column usd_per_hour: add it"]),
        ("gpu,usd_per_hour\n", ["1: has no rows below a head: the first line names the columns"]),
        (
            "gpu,usd_per_hours,price\nA40,1,2\n",
            [
                "1: unknown column 'usd_per_hours': did you mean 'usd_per_hour'?",
                "1: unknown column 'price': did you mean 'usd_per_hour'?",
                "1: no column usd_per_hour: add it",
            ],
        ),
        (
            "gpu,usd_per_hour,eur\nA40,1,2\n",
            [
                (
                    "1: unknown column 'eur'; known: gpu, provider, region, instance, "
                    "gpus_per_instance, usd_per_hour, market, minimum_minutes, host_memory_gib, "
                    "as_of, recorded, source, note, currency"
                )
            ],
        ),
        (
            "gpu,usd_per_hour,note\nA40,1,big, fast\n",
            ["2: has 4 fields, where the head has 3: quote those with commas"],
        ),
        ('gpu,usd_per_hour\nA40,"1\n', ["2: is not CSV (unexpected end of data): repair the line"]),
        (
            "gpu,usd_per_hour\nA40,1\nA40,2\n",
            ["3: the same offer as in line 2: keep one, or name another instance"],
        ),
    ],
)
def test_a_csv_with_a_wrong_header_is_reported_once(
    text: str, lines: list[str], tmp_path: Path
) -> None:
    """The mistake is not repeated for every row."""
    assert mistakes(written(tmp_path, "p.csv", text)) == lines


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("p.yaml", "", ["1: is empty: list gpus, offers or both"]),
        ("p.yaml", "offers: 3\n", ["1: offers: must be a list, as in [a, b], not 3"]),
        ("p.yaml", "[1, 2]\n", None),
        ("p.yaml", "gpus:\n  - key: [A40]\noffers: [{gpu: A40, usd_per_hour: 1}]\n", None),
        ("p.yaml", "offers: [\n", None),
        ("p.yaml", "offer:\n  - {gpu: A40}\n", ["1: offer: unknown key: did you mean 'offers'?"]),
        (
            "p.yaml",
            "offers:\n  - {gpu: A40, usd_per_hour: true}\n  - {gpu: A4O, usd_per_hour: 1}\n",
            [
                "2: offers[0].usd_per_hour: must be a number, not true: US dollars, as in 1.25",
                (
                    "3: offers[1].gpu: unknown GPU 'A4O': did you mean 'A40'? ('finetune-cost "
                    "catalog gpus' lists all)"
                ),
            ],
        ),
        (
            "p.toml",
            (
                '[[offers]]\ngpu = "A40"\nusd_per_hour = -1\n\n[[offers]]\nusd_per_hour = 1\n'
                'prise = 2\n\n[[offers]]\ngpu = "A40"\nusd_per_hour = 1\ncurrency = "EUR"\n'
            ),
            [
                "3: offers[0].usd_per_hour: must be greater than 0, not -1",
                "5: offers[1].gpu: is missing: add it",
                "7: offers[1].prise: unknown key: did you mean 'provider'?",
                "12: offers[2].currency: must be USD, not 'EUR': convert the price",
            ],
        ),
        ("p.toml", "[[offers]]\ngpu = \n", ["2: not TOML: invalid value"]),
        ("p.toml", "offer = 3\n", ["1: offer: unknown key: did you mean 'offers'?"]),
        (
            "p.yml",
            "- gpu: A40\n  usd_per_hour: 1\n\n- gpu: A40\n  region: moon\n  usd_per_hour: 0\n",
            ["6: offers[1].usd_per_hour: must be greater than 0, not 0"],
        ),
    ],
)
def test_every_mistake_of_yaml_and_toml_is_reported_with_its_line(
    name: str, text: str, lines: list[str] | None, tmp_path: Path
) -> None:
    """The lines read like those of a specification."""
    messages = mistakes(written(tmp_path, name, text))
    assert messages
    if lines is not None:
        assert messages == lines


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("c.yaml", "gpu,usd_per_hour\nA40,0.12\n", ", not 'gpu"),
        ("c.csv", "gpu,usd_per_hour\nA40,0.12\n", ", not 'gpu"),
        ("c.csv", "gpu,usd_per_hour,note\nA40,0.12,a: b\n", ""),
        ("c.CSV", "", ""),
    ],
)
def test_prices_given_as_a_catalog_name_the_right_option(
    name: str, text: str, value: str, tmp_path: Path
) -> None:
    """The file's name and suffix do not matter; text that is not YAML is not shown."""
    path = written(tmp_path, name, text)
    with pytest.raises(CatalogError) as error:
        read_catalog_file(path, CATALOG)
    assert str(error.value).startswith(f"{path}:1: must be a mapping of keys to values{value}")
    assert (", not " in str(error.value)) == bool(value)
    assert "goes to --prices" in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("p.toml", "[[offers]]\ngpu = 'A40", "2: not TOML: "),
        ("p.yaml", "A40\n", "1: "),
        (
            "p.yaml",
            "offers:\n  - usd_per_hour: 1\n    gpu: A4O\n",
            "3: offers[0].gpu: unknown GPU 'A4O'",
        ),
        (
            "p.yaml",
            "offers:\n  [{gpu: A40, usd_per_hour: 1}, {gpu: A40, usd_per_hour: 1}]\n",
            "2: offers[1]: the same offer as in line 2",
        ),
    ],
)
def test_a_mistake_has_the_line_of_its_key(
    name: str, text: str, place: str, tmp_path: Path
) -> None:
    """A row may begin some lines before, or share its line with another row."""
    (message,) = mistakes(written(tmp_path, name, text))
    assert message.startswith(place)


def test_a_number_in_place_of_text_must_be_quoted(tmp_path: Path) -> None:
    """YAML reads an unquoted version as a number."""
    text = GPU_YAML.replace("    marketed", "    compute_capability: 12.0\n    marketed")
    with pytest.raises(CatalogError) as error:
        read_catalog_file(written(tmp_path, "c.yaml", text), CATALOG)
    assert ":5: gpus[0]." in str(error.value)
    assert "12.0: put it in quotes" in str(error.value)


def test_facts_of_a_known_gpu_cannot_be_replaced(tmp_path: Path) -> None:
    """Neither by key nor by the name that CUDA reports; repeating the same facts is allowed."""
    text = GPU_YAML.replace("key: A30", "key: A40").replace("gpu: A30", "gpu: A40")
    other = GPU_YAML.replace("NVIDIA A30", "NVIDIA A40")
    for changed, line in (
        (text, "2: gpus[0]: GPU 'A40' is in the catalog already: choose another key"),
        (other, "2: gpus[0]: GPU 'A30': device name 'NVIDIA A40' is that of 'A40' already"),
    ):
        path = written(tmp_path, "a.yaml", changed)
        with pytest.raises(CatalogError) as error:
            read_catalog_file(path, CATALOG)
        assert str(error.value) == f"{path}:{line}"
    rows = read_catalog_file(written(tmp_path, "a.yaml", GPU_YAML), CATALOG)
    again = CATALOG.merged(rows.gpus, rows.offers)
    assert read_catalog_file(tmp_path / "a.yaml", again) == rows
    assert again.merged(rows.gpus, rows.offers).gpus == again.gpus


def test_a_known_gpu_among_others_has_the_line_of_its_key(tmp_path: Path) -> None:
    """The GPUs before it are accepted, and its key need not come first."""
    own = GPU_YAML.partition("offers:")[0]
    second = own.partition("\n")[2].replace("key: A30", "note: mine\n    key: A40")
    path = written(tmp_path, "a.yaml", own + second.replace("NVIDIA A30", "Another"))
    with pytest.raises(CatalogError) as error:
        read_catalog_file(path, CATALOG)
    assert str(error.value).startswith(f"{path}:9: gpus[1]: GPU 'A40'")


def test_a_gpu_that_cannot_be_identified_is_refused(tmp_path: Path) -> None:
    """Without the name that CUDA reports, no measurement can be attributed to the GPU."""
    path = written(tmp_path, "a.yaml", GPU_YAML.replace("    device_names: [NVIDIA A30]\n", ""))
    with pytest.raises(CatalogError) as error:
        read_catalog_file(path, CATALOG)
    assert str(error.value).startswith(f"{path}:2: ")
    assert "needs device_names" in str(error.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, "no such file"),
        (lambda path: path.mkdir(), "is a folder: name the file in it"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not UTF-8 text (byte 0): save it as"),
    ],
)
def test_an_unreadable_file_is_one_line(make: object, words: str, tmp_path: Path) -> None:
    """The line names the file."""
    path = tmp_path / "p.csv"
    assert callable(make)
    make(path)
    with pytest.raises(CatalogError) as error:
        read_price_file(path, CATALOG)
    assert str(error.value).startswith(f"{path}: {words}")
