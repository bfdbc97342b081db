"""Labels of the trials of a sweep, as long as a table has room for."""

from builders.observations import tiny_cell

from orchestrator.trial_labels import fitted_labels, label_forms, labels
from trials.recipes.parallel import Parallel


def test_labels_have_the_parts_in_which_trials_differ() -> None:
    """Also where only some train on several GPUs, or a model of the hub has a slash in its name."""
    one, other = tiny_cell("mixtral-tiny", seq_len=16), tiny_cell("mixtral-tiny", seq_len=32)
    assert labels([one, other]) == ("cpu/mixtral-tiny/full-fp32-grouped/2of8", ["seq16", "seq32"])
    assert labels([one]) == ("", [one.key])
    two = one.model_copy(update={"parallel": Parallel(gpus=2, strategy="ddp")})
    assert labels([one, two]) == (one.key, ["1x", "2xddp"])
    on_hub = one.model_copy(update={"model": "who/mixtral"})
    assert labels([one, on_hub])[1] == ["mixtral-tiny", "who/mixtral"]


def test_labels_lose_the_words_that_tell_no_trials_apart() -> None:
    """A word stays without which a GPU would read as the general case of another."""
    names = ("A40", "A100-40GB-SXM", "A100-80GB-SXM")
    cells = [tiny_cell(seq_len=16).model_copy(update={"gpu": n, "simulated": True}) for n in names]
    forms = label_forms(cells)
    assert fitted_labels(forms, 40) == [f"{name}(simulated)" for name in names]
    assert fitted_labels(forms, 20) == ["A40", "A100-40GB", "A100-80GB"]
    assert fitted_labels(forms, 5) == ["A40", "40GB", "80GB"]


def test_labels_that_have_no_room_are_cut_in_the_middle() -> None:
    """Where they would read alike, they begin with their number."""
    assert fitted_labels([("abcdefgh",), ("abcdefxy",)], 5) == ["ab…gh", "ab…xy"]
    assert fitted_labels([("ab1efgh",), ("ab2efgh",)], 5) == ["1 …gh", "2 …gh"]
