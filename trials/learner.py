"""Learning itself: epochs of the very step that is timed, on real queries, each tested after."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from trials.learn_queries import IGNORED, Encoded, HeldOut, padded, read_queries
from trials.learning import EpochReply, Heartbeat, HeldOutScores, LearnSetup
from trials.models.tokenizer import QueryTokenizer
from trials.models.tokens import TokenizerError, cannot_be_loaded, said_of_own
from trials.optimizers import SkippedStepError
from trials.worker import Worker

BEAT_SECONDS = 1.0
Listen = Callable[[Heartbeat], None]


@dataclass(frozen=True, slots=True)
class _Score:
    """What a model makes of one answer: nats, and whether each token is the likeliest."""

    nats: float
    tokens: int
    exact: bool


class Learner:
    """A model under its recipe with its queries, trained an epoch at a time.

    Attributes:
        epoch: epochs it has learnt; those of its checkpoint when it is made.
        attempt: at the curve; that of its checkpoint when it is made, None when there is none.
        queries: what it learns from and is tested with.
        remark: what to tell the user; None for nothing.

    Args:
        setup: what to learn, and how.
        listen: told of steps, now and then.

    Raises:
        QueriesError: the queries are no good for it.
        RecipeError: what was built is not what the recipe implies.
        TokenizerError: there is no such tokenizer.
    """

    def __init__(self, setup: LearnSetup, listen: Listen) -> None:
        self._training = setup.training
        self._curve = setup.curve
        try:
            tokenizer = QueryTokenizer(setup.tokenizer)
        except TokenizerError as error:
            text = cannot_be_loaded(setup.tokenizer, str(error))
            if setup.tokenizer == setup.model.weights:
                text = said_of_own(text, setup.tokenizer)
            raise TokenizerError(f"--tokenizer {text}") from None
        self.queries = read_queries(
            Path(setup.queries_file), tokenizer, setup.training.cutoff, setup.model.vocab_size
        )
        # What is built is tried on a query: one as long as these.
        cell = setup.cell.model_copy(update={"seq_len": max(self.queries.longest, 2)})
        self._worker = Worker(setup.model_copy(update={"cell": cell}))
        self._tuning = self._worker.tuning
        self._half = cell.recipe.precision == "fp16"
        self._listen = listen
        self._beat = time.monotonic()
        self.epoch = 0
        self.attempt: int | None = None
        self.remark: str | None = None
        self._last: EpochReply | None = None
        self._checkpoint: Path | None = None
        # DeepSpeed keeps its state in parts of its own.
        if setup.checkpoint_file is not None and not cell.recipe.offload_optimizer:
            self._checkpoint = Path(setup.checkpoint_file)
            self._restore()

    @property
    def worker(self) -> Worker:
        """The device and the built model."""
        return self._worker

    def reply(self, epoch: int, attempt: int = 1) -> EpochReply:
        """Comes to the end of an epoch: learns it, or tells of it anew, or begins anew at 0.

        Args:
            epoch: which one.
            attempt: at the curve; kept with the state.

        Raises:
            NotTrainingError: the loss is not a number.
            ValueError: the epoch is not the next one.
        """
        self.attempt = attempt
        if epoch == 0:
            self._tuning.start_over()
            self.epoch = 0
            return EpochReply(epoch=0, tested=self._tested())
        if epoch == self.epoch and self._last is not None:
            return self._last
        if epoch != self.epoch + 1:
            raise ValueError(f"asked for epoch {epoch}, {self.epoch} were learnt")
        loss, steps, skipped = self._learnt(epoch)
        self.epoch = epoch
        reply = EpochReply(
            epoch=epoch,
            train_loss=loss,
            steps=steps,
            skipped_steps=skipped,
            tested=self._tested(),
        )
        return reply.model_copy(update={"remark": self._keep(reply)})

    def _learnt(self, epoch: int) -> tuple[float | None, int, int]:
        """Trains for an epoch; nats a token, steps, and how many of them were skipped."""
        training, train = self._training, self.queries.train
        seed = training.seed * 1_000_003 + epoch
        torch.manual_seed(seed)  # dropout draws from it
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        steps = -(-len(train) // training.batch_size)
        nats = 0.0
        tokens = skipped = 0
        for step in range(steps):
            places = order[step * training.batch_size : (step + 1) * training.batch_size]
            batch = [train[place] for place in places]
            rate = training.rate((epoch - 1) * steps + step, training.epochs * steps)
            for group in self._tuning.stepper.optimizer.param_groups:
                group["lr"] = rate
            try:
                loss = self._tuning.step(*padded(batch, self._worker.device.torch_device))
            except SkippedStepError:  # the loss scale is halved, and the next batch goes on
                skipped += 1
                continue
            count = sum(each.answer_tokens for each in batch)
            nats, tokens = nats + loss * count, tokens + count
            self._say("training", step + 1, steps)
        return (nats / tokens if tokens else None), steps, skipped

    def _tested(self) -> HeldOutScores:
        """Every held-out query, without learning from it."""
        model = self._tuning.model
        model.eval()
        for module in model.modules():
            # On a CPU bitsandbytes packs 4-bit weights anew for layers that do not train, in a way
            # that not all of its kernels take; and they have nothing else to do with it.
            if getattr(getattr(module, "weight", None), "quant_state", None) is not None:
                module.training = True
        try:
            scores = self._scores()
        finally:
            model.train()
        nats, tokens, correct = [], [], []
        for query in self.queries.held_out:
            own = [next(scores) for _ in query.answers]
            right = own[query.right]
            nats.append(right.nats)
            tokens.append(right.tokens)
            correct.append(_is_correct(query, own))
        return HeldOutScores(nats=tuple(nats), tokens=tuple(tokens), correct=tuple(correct))

    def _scores(self) -> Iterator[_Score]:
        """Of each answer of each held-out query, in order; batches are of like lengths."""
        answers = [answer for query in self.queries.held_out for answer in query.answers]
        places = sorted(range(len(answers)), key=lambda place: len(answers[place].ids))
        found: dict[int, _Score] = {}
        size = self._training.batch_size
        for start in range(0, len(places), size):
            chosen = places[start : start + size]
            found |= zip(chosen, self._scored([answers[at] for at in chosen]), strict=True)
            self._say("testing", len(found), len(answers))
        return (found[place] for place in range(len(answers)))

    @torch.no_grad()
    def _scored(self, batch: Sequence[Encoded]) -> list[_Score]:
        device = self._worker.device.torch_device
        ids, labels = padded(batch, device)
        with torch.autocast(device.type, torch.float16, enabled=self._half):
            logits = self._tuning.model(input_ids=ids).logits[:, :-1]
        wanted = labels[:, 1:]
        asked = wanted != IGNORED
        # Of answers alone: in fp32 those of whole prompts would be the largest tensor by far.
        said, target = logits[asked].float(), wanted[asked]
        nats = functional.cross_entropy(said, target, reduction="none").double()
        wrong = said.argmax(-1) != target
        counts = asked.sum(1).tolist()
        return [
            _Score(float(own.sum()), len(own), not bool(missed.any()))
            for own, missed in zip(
                torch.split(nats, counts), torch.split(wrong, counts), strict=True
            )
        ]

    def _say(self, doing: Any, done: int, total: int) -> None:
        if time.monotonic() >= self._beat + BEAT_SECONDS:
            self._beat = time.monotonic()
            self._listen(Heartbeat(doing=doing, done=done, total=total))

    def _keep(self, reply: EpochReply) -> str | None:
        """Writes a checkpoint, whole or not at all; one line on why it could not be."""
        if self._checkpoint is None:
            return None
        part = self._checkpoint.with_suffix(".part")
        state = {
            "curve": self._curve,
            "attempt": self.attempt,
            "reply": reply.model_dump_json(),
            "trained": [p.detach() for p in self._tuning.trainable],
            "stepper": self._tuning.stepper.state_dict(),
        }
        try:
            torch.save(state, part)
            part.replace(self._checkpoint)
        except (OSError, RuntimeError) as error:  # the latter is what torch makes of a full disk
            with contextlib.suppress(OSError):
                part.unlink()
            why = str(error).splitlines()[0]
            return f"{self._checkpoint}: no checkpoint ({why}): killed now, it would begin anew"
        return None

    def _restore(self) -> None:
        """Goes on from a checkpoint, if there is one that can be read."""
        assert self._checkpoint is not None
        if not self._checkpoint.exists():
            return
        device = self._worker.device.torch_device
        try:
            state = torch.load(self._checkpoint, map_location=device, weights_only=True)
            if state["curve"] != self._curve:
                raise ValueError(f"it is of {state['curve']}")  # noqa: TRY301 - one way out
            reply = EpochReply.model_validate_json(state["reply"])
            with torch.no_grad():
                for parameter, value in zip(self._tuning.trainable, state["trained"], strict=True):
                    parameter.copy_(value)
            self._tuning.stepper.load_state_dict(state["stepper"])
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the file, it is of no use
            why = (str(error).splitlines() or [type(error).__name__])[0]
            self.remark = f"{self._checkpoint}: cannot be read ({why}): beginning anew"
            self._tuning.start_over()
            return
        self.epoch, self.attempt, self._last = reply.epoch, state["attempt"], reply


def _is_correct(query: HeldOut, scores: Sequence[_Score]) -> bool:
    """Whether the right answer is the likeliest; where any may be given, token for token.

    Token for token is what greedy decoding comes to: it writes an answer if and only if each of its
    tokens is the likeliest after those before it.
    """
    if len(scores) == 1:
        return scores[0].exact
    likeliest = min(range(len(scores)), key=lambda place: scores[place].nats)
    return likeliest == query.right
