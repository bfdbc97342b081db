"""Times of collectives calibrate the links of simulated ranks."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders.gangs import gang_cell, link_times
from builders.observations import environment, measurement, observation
from builders.runs import ONE_CELL, spec_of

from fitting.link_calibration import fitted_links
from gpu_catalog.catalog import load_catalog
from gpu_catalog.links.within_nodes import CollectiveName, LinkSpeed, MeasuredLink, link_speed
from orchestrator.cli.main import main
from orchestrator.estimating.calibration_file import links_text
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import open_run
from trials.recipes.parallel import Parallel
from trials.records.collectives import CollectiveTime
from trials.records.profile import LinkTimes
from trials.simulation.ranks.rank_links import layout_notes
from trials.simulation.ranks.rank_timeline import collective_seconds
from trials.simulation.recording import Collective, Column

CATALOG = load_catalog()
GPUS = {gpu.key: gpu for gpu in CATALOG.gpus}
L40S = CATALOG.gpu("L40S")
SIZES = tuple(2**20 * 4**n for n in range(6))
OWN = LinkSpeed(alpha_seconds=40e-6, bytes_per_second=11e9)
DDP = Parallel(gpus=2, strategy="ddp")


def timed(
    seconds: Callable[[CollectiveName, int], float],
    *,
    gpu: str = "L40S",
    layout: Parallel = DDP,
    names: tuple[CollectiveName, ...] = ("all-gather", "all-reduce"),
    host: str = "box",
) -> LinkTimes:
    """Links of two GPUs over which collectives of growing buffers took these seconds."""
    cell = gang_cell(gpus=2, seq_len=128).model_copy(update={"gpu": gpu, "parallel": layout})
    times = tuple(
        CollectiveTime(collective=name, buffer_bytes=size, seconds=seconds(name, size))
        for name in names
        for size in SIZES
    )
    return link_times(cell, *times, environment=environment(host=host))


def by_own_link(name: CollectiveName, size: int) -> float:
    """Seconds by the equation of the catalog's links."""
    return OWN.seconds(name, 2, size)


def test_start_and_bandwidth_of_each_collective_are_found_again() -> None:
    """Of two hosts together; CPUs and several nodes are left out."""
    between = Parallel(gpus=2, strategy="ddp", nodes=2)
    fitted = fitted_links(
        [
            timed(by_own_link),
            timed(by_own_link, host="other"),
            timed(lambda *_: 1.0, gpu="cpu"),
            timed(lambda *_: 1.0, layout=between),
        ],
        GPUS,
    )
    assert [(f.link.gpu, f.link.gpus, f.link.collective) for f in fitted] == [
        ("L40S", 2, "all-gather"),
        ("L40S", 2, "all-reduce"),
    ]
    for row in fitted:
        assert row.link.alpha_us == pytest.approx(40, rel=1e-6)
        assert row.link.bus_gb_per_second == pytest.approx(11, rel=1e-6)
        assert row.mean_error == pytest.approx(0, abs=1e-9)
        assert row.largest_mib == 1024


def test_times_that_do_not_grow_with_the_buffer_give_no_bandwidth() -> None:
    """Nor does one size; noise shows in the error, and a start is never negative."""
    assert fitted_links([timed(lambda _, size: 1e6 / size)], GPUS) == ()
    (steep,) = fitted_links([timed(lambda _, size: 1e-12 * size**1.1, names=("all-gather",))], GPUS)
    assert steep.link.alpha_us == 0
    assert 0.05 < steep.mean_error < 0.5
    one = timed(by_own_link)
    assert fitted_links([one.model_copy(update={"times": one.times[:1]})], GPUS) == ()


def test_a_second_bandwidth_is_printed_and_kept_in_the_file() -> None:
    """The first 8 MB at another bandwidth, as NCCL has on eight A100."""
    speed = LinkSpeed(
        alpha_seconds=40e-6, small_bytes=8e6, small_bytes_per_second=5e9, bytes_per_second=11e9
    )
    fitted = fitted_links([timed(lambda name, size: speed.seconds(name, 2, size))], GPUS)
    link = next(row.link for row in fitted if row.link.collective == "all-reduce")
    assert link.speed(link.alpha_us).seconds("all-reduce", 2, 1e9) == pytest.approx(
        speed.seconds("all-reduce", 2, 1e9)
    )
    assert "| 2xL40S by pcie4 | all-reduce | 40       | 8 at 5 " in links_text(fitted)
    assert MeasuredLink.model_validate_json(link.model_dump_json()) == link


def test_a_measured_link_comes_before_the_catalogs_and_its_note_goes() -> None:
    """On as many GPUs of that key, for that collective; others keep the catalog's."""
    (link,) = (f.link for f in fitted_links([timed(by_own_link, names=("all-reduce",))], GPUS))
    kinds = np.array([Collective.ALL_REDUCE, Collective.ALL_REDUCE, Collective.ALL_GATHER])
    moved = np.zeros((3, len(Column)))
    moved[:, Column.BYTES] = 1e9
    moved[:, [Column.PRODUCTS, Column.COLUMNS]] = (2, 1), (4, 1), (2, 1)
    seconds = collective_seconds(kinds, moved, L40S, DDP, (link,))
    before = collective_seconds(kinds, moved, L40S, DDP)
    assert seconds[0] == pytest.approx(by_own_link("all-reduce", 10**9))
    assert before[0] == pytest.approx(
        link_speed(L40S.interconnect, 2, "all-reduce").seconds("all-reduce", 2, 1e9)
    )
    assert seconds[1:].tolist() == before[1:].tolist()
    other = link.model_copy(update={"gpu": "A40"})
    assert collective_seconds(kinds, moved, L40S, DDP, (other,)).tolist() == before.tolist()
    assert layout_notes(L40S, DDP)
    assert layout_notes(L40S, DDP, (link,)) == []


def test_bridged_and_plain_boxes_have_links_of_their_own() -> None:
    """A layout takes the one by its own link; an entry without one is of the catalog's.

    Two GPUs whose link the catalog lacks are fitted, too.
    """
    a100 = CATALOG.gpu("A100-80GB-PCIe")
    unknown = a100.model_copy(update={"key": "made", "interconnect": None})
    bridged = DDP.on_network(None, "nvlink-pair-3")
    gpus = {gpu.key: gpu for gpu in (a100, unknown)}
    fast = LinkSpeed(alpha_seconds=60e-6, bytes_per_second=190e9)

    def by_bridge(name: CollectiveName, size: int) -> float:
        return fast.seconds(name, 2, size)

    fitted = fitted_links(
        [
            timed(seconds, gpu=gpu, layout=layout, names=("all-reduce",))
            for gpu in gpus
            for seconds, layout in ((by_own_link, DDP), (by_bridge, bridged))
        ],
        gpus,
    )
    links = tuple(row.link for row in fitted)
    assert [(link.name, round(link.bus_gb_per_second)) for link in links] == [
        ("2xA100-80GB-PCIe by nvlink-pair-3", 190),
        ("2xA100-80GB-PCIe by pcie4", 11),
        ("2xmade", 11),
        ("2xmade by nvlink-pair-3", 190),
    ]
    kinds, moved = np.array([Collective.ALL_REDUCE]), np.zeros((1, len(Column)))
    moved[:, Column.BYTES], moved[:, [Column.PRODUCTS, Column.COLUMNS]] = 1e9, (2, 1)
    for gpu in gpus.values():
        for layout, seconds in ((DDP, by_own_link), (bridged, by_bridge)):
            (took,) = collective_seconds(kinds, moved, gpu, layout, links)
            assert took == pytest.approx(seconds("all-reduce", 10**9))
            assert layout_notes(gpu, layout, links) == []
    former = MeasuredLink.model_validate(links[1].model_dump(exclude={"interconnect"}))
    assert former.interconnect is None
    (plain,), (joined,) = (
        collective_seconds(kinds, moved, a100, layout, (former,)) for layout in (DDP, bridged)
    )
    assert plain == pytest.approx(by_own_link("all-reduce", 10**9))
    assert joined == collective_seconds(kinds, moved, a100, bridged)[0]


SPEC = ONE_CELL.replace("[cpu]", "[L40S]").replace(
    "seq_lens: [16]", "seq_lens: [128]\n    parallel: [{gpus: 2, strategy: ddp}]"
)


def test_calibrate_hands_measured_links_to_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link a thousand times slower than the catalog's limits the step, which was host-bound."""
    monkeypatch.chdir(tmp_path)
    slow = LinkSpeed(alpha_seconds=40e-6, bytes_per_second=0.02e9)
    (cell,) = spec_of(SPEC).all_cells()
    link = timed(lambda name, size: slow.seconds(name, 2, size))
    measured = measurement(2**30, (0.02,) * 6)
    with ObservationWriter(open_run("run", SPEC, spec_of(SPEC))) as writer:
        writer.append(link.model_copy(update={"cell": cell}))
        writer.append(observation(4, cell=cell, measurement=measured))
    assert main(["calibrate", "run", "--out", "constants.json"]) == 0
    shown = capsys.readouterr().out
    assert "| 2xL40S by pcie4 | all-reduce | 40 " in shown
    constants = json.loads(Path("constants.json").read_text(encoding="utf-8"))["constants"]
    assert {link["gpu"] for link in constants["links"]} == {"L40S"}
    assert constants["source"].endswith("; links measured on 2xL40S by pcie4")
    without = Path("without.json")
    whole = json.loads(Path("constants.json").read_text(encoding="utf-8"))
    whole["constants"]["links"] = []
    without.write_text(json.dumps(whole), encoding="utf-8")

    def seconds(gpu: str, constants: str) -> float:
        job = ("--model", "llama-tiny", "--seq-len", "128", "--method", "full", "--gpu", gpu)
        recipe = ("--batch-size", "4", "--effective-batch", "8", "--strategy", "ddp", "--json")
        assert main(["estimate", *job, *recipe, "--constants", constants]) == 0
        return float(json.loads(capsys.readouterr().out)["step_seconds"])

    by_link, by_catalog = (seconds("2xL40S", name) for name in ("constants.json", "without.json"))
    assert by_link > 2 * by_catalog
