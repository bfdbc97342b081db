"""Training for learning curves in this process: labels, scores, and resuming after a stop."""

from pathlib import Path

import pytest
import torch
from builders import questions as made_questions
from builders.long_cases import long_cases
from builders.observations import FULL, recipe, tiny_cell

from trials.recipes.fields import Method
from trials.records.learning import HeldOutScores, LearnExample
from trials.training.learner import Learner
from trials.training.learning_batches import IGNORED, Encoded, padded, read_examples
from trials.training.tokenizer_worker import ExampleTokenizer

# PEFT asks a transformers model under a name that transformers 5 has deprecated.
pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer."""
    path = tmp_path_factory.mktemp("learner")
    made_questions.made_tokenizer(path / "tok")
    return path


def learner(
    folder: Path,
    model: str = "mixtral-tiny",
    method: Method = "full",
    *,
    examples: list[LearnExample] | None = None,
    fields: dict[str, object] | None = None,
    **training: object,
) -> Learner:
    """A model with forty training examples and twelve held out."""
    cell = tiny_cell(model, recipe(method, **fields or {}), seq_len=64)
    training_examples = examples or made_questions.learn_examples(52, 12)
    setup = made_questions.learn_setup(folder, cell, training_examples, **training)
    return Learner(setup, lambda _: None)


@pytest.fixture(autouse=True)
def _no_state(folder: Path) -> None:
    """Remove saved state before each test."""
    (folder / "state.pt").unlink(missing_ok=True)


def test_only_answer_tokens_have_labels() -> None:
    """Prompt and padding are ignored in the loss."""
    ids, labels = padded([Encoded([5, 6, 7, 8], 2), Encoded([5, 9], 1)])
    assert ids.tolist() == [[5, 6, 7, 8], [5, 9, 0, 0]]
    no = IGNORED
    assert labels.tolist() == [[no, no, 7, 8], [no, 9, no, no]]


def test_an_answer_runs_from_its_prompt_to_the_end_token(folder: Path) -> None:
    """A token across the boundary belongs to the answer; both parts together are the example."""
    tokenizer = ExampleTokenizer(str(folder / "tok"))
    examples = [
        LearnExample(held_out=False, prompt="Ada sees a cow.\n", answer="moo"),
        LearnExample(held_out=True, prompt="Ada sees a ", answer="cow"),
        LearnExample(held_out=False, prompt="", answer="moo"),
    ]
    file = folder / "few.jsonl"
    file.write_text("".join(f"{q.model_dump_json()}\n" for q in examples), encoding="utf-8")
    read = read_examples(file, tokenizer, 64, 1024)
    decode = tokenizer._tokenizer.decode
    first, all_of_it = read.train
    assert decode(first.ids).split() == ["<s>Ada", "sees", "a", "cow.", "moo</s>"]
    assert decode(first.ids[first.first :]) == "moo</s>"
    assert decode(all_of_it.ids[all_of_it.first :]) == "moo</s>"
    astride = read.held_out[0].answers[0]
    assert decode(astride.ids[astride.first :]) == " cow</s>"
    cut = read_examples(file, tokenizer, len(first.ids) - 1, 1024)
    assert (cut.cut_off, cut.train[0].ids) == (1, first.ids[:-1])


@pytest.mark.parametrize("model", ["mixtral-tiny", "blackmamba-tiny"])
def test_padding_changes_neither_a_test_nor_a_step(folder: Path, model: str) -> None:
    """Examples of many lengths have the same nats, one by one or padded together."""
    rows = made_questions.learn_examples(12, 6)
    longer = [
        q.model_copy(update={"prompt": f"{'so and ' * place}{q.prompt}"})
        for place, q in enumerate(rows)
    ]
    alone = learner(folder, model, examples=longer, batch_size=1)
    together = learner(folder, model, examples=longer, batch_size=6)
    one, all_of_them = alone.reply(0).tested, together.reply(0).tested
    assert one is not None
    assert all_of_them is not None
    assert one.nats == pytest.approx(all_of_them.nats, rel=1e-4)
    assert one.tokens == all_of_them.tokens
    train = alone.examples.train
    assert len({len(example.ids) for example in train}) > 2
    frozen = alone._tuning
    for group in frozen.stepper.optimizer.param_groups:
        group["lr"] = 0.0
    losses = [frozen.step(frozen.batch(*padded([example]))) for example in train]
    tokens = [example.answer_tokens for example in train]
    mean = sum(loss * n for loss, n in zip(losses, tokens, strict=True)) / sum(tokens)
    assert frozen.step(frozen.batch(*padded(train))) == pytest.approx(mean, rel=1e-4)


def test_an_answer_is_correct_when_greedy_decoding_gives_it(folder: Path) -> None:
    """Every token to the end must match; among choices, the most likely one counts."""
    made = learner(folder, learning_rate=5e-3)
    for epoch in (0, 1, 2):
        reply = made.reply(epoch)
    assert reply.tested is not None
    model = made._tuning.model.eval()
    correct = []
    for example in made.examples.held_out:
        right = example.answers[example.right]
        if len(example.answers) > 1:
            nats = [nats_of(model, answer) for answer in example.answers]
            correct.append(nats.index(min(nats)) == example.right)
            continue
        ids = right.ids[: right.first]
        while len(ids) < len(right.ids):
            with torch.no_grad():
                ids = [*ids, int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
        correct.append(ids == right.ids)
    assert reply.tested.correct == tuple(correct)
    assert 0 < reply.tested.accuracy < 1  # or the test tells nothing


def nats_of(model: torch.nn.Module, answer: Encoded) -> float:
    """Nats of an answer, one example at a time."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([answer.ids])).logits[0].log_softmax(-1)
    places = range(answer.first, len(answer.ids))
    return -sum(float(logits[at - 1, answer.ids[at]]) for at in places)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [("adamw_8bit", "fp32"), *long_cases((("adamw", "fp32"), ("adamw", "fp16")))],
)
def test_learning_resumes_after_a_kill_bit_for_bit(
    folder: Path, optimizer: str, precision: str
) -> None:
    """Weights, optimizer, loss scale, order and dropout continue with the same numbers."""
    fields: dict[str, object] = {
        "lora_dropout": 0.2,
        "optimizer": optimizer,
        "precision": precision,
    }

    def fresh() -> Learner:
        examples = made_questions.learn_examples(20, 4)
        return learner(folder, "llama-tiny", "lora", examples=examples, fields=fields)

    whole = fresh()
    replies = [whole.reply(epoch) for epoch in range(4)]
    (folder / "state.pt").unlink()
    killed = fresh()
    assert [killed.reply(epoch) for epoch in range(3)] == replies[:3]
    resumed = fresh()
    assert resumed.epoch == 2
    scalers = [run._tuning.stepper.state_dict()["scaler"] for run in (resumed, killed)]
    assert scalers[0] == scalers[1]
    assert resumed.reply(2) == replies[2]  # it was killed before anybody heard of it
    assert resumed.reply(3) == replies[3]
    assert resumed.reply(0) == replies[0]  # anew
    assert resumed.reply(1) == replies[1]


def test_an_unreadable_state_is_reported_and_training_restarts(folder: Path) -> None:
    """Only this curve is affected."""
    (folder / "state.pt").write_bytes(b"half a sta")
    made = learner(folder, "llama-tiny")
    assert made.epoch == 0
    assert made.remark is not None
    assert made.remark.startswith(str(folder / "state.pt"))
    assert "\n" not in made.remark


def test_the_state_of_another_curve_is_not_resumed(folder: Path) -> None:
    """Sparse and dense curves have weights of the same shapes."""
    sparse, dense = (
        made_questions.learn_setup(
            folder,
            tiny_cell("mixtral-tiny", FULL, active=active, seq_len=64),
            made_questions.learn_examples(20, 4),
        )
        for active in (2, 8)
    )
    made = Learner(dense, lambda _: None)
    made.reply(0)
    made.reply(1, attempt=3)
    again = Learner(dense, lambda _: None)
    assert (again.epoch, again.attempt) == (1, 3)
    refused = Learner(sparse, lambda _: None)
    assert (refused.epoch, refused.attempt) == (0, None)
    assert refused.remark is not None
    assert dense.curve in refused.remark


def test_4_bit_weights_learn_after_they_were_tested(folder: Path) -> None:
    """Bitsandbytes packs weights differently in layers that do not train."""
    made = learner(folder, method="qlora", learning_rate=1e-2)
    tested = [made.reply(epoch).tested for epoch in range(3)]
    losses = [reply.loss for reply in tested if isinstance(reply, HeldOutScores)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.5


def test_the_learning_rate_follows_its_schedule_over_all_epochs(folder: Path) -> None:
    """Half of it remains after half of the epochs, also after a kill in between."""
    two_of_four = {"schedule": "linear", "learning_rate": 4e-3}
    made = learner(folder, "llama-tiny", **two_of_four)
    rates = []
    for epoch in range(5):
        if epoch == 3:
            made = learner(folder, "llama-tiny", **two_of_four)
        made.reply(epoch)
        rates.append(made._tuning.stepper.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3, 0.0])
