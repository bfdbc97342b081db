"""Fine-tuning on a data set with the optimizer step that trials time, and evaluation per epoch.

``transformers.get_scheduler`` and PyTorch's data loader do their parts. ``transformers.Trainer``
does not run the loop: its training step differs from the timed one (on a CPU it drops fp16 without
a warning), a kill leaves its checkpoint half-written, and a full disk ends its training.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import get_scheduler

from trials.child_process.token_counter import (
    TokenizerError,
    mention_own_tokenizer,
    tokenizer_load_failure,
)
from trials.models.fused_head import IGNORED
from trials.records.learning import EpochReply, Heartbeat, HeldOutScores, LearnSetup
from trials.training.evaluation import held_out_scores
from trials.training.learning_batches import padded, read_examples
from trials.training.optimizers.stepper import SkippedStepError
from trials.training.tokenizer_worker import ExampleTokenizer
from trials.training.worker import Worker


class Learner:
    """A model under its recipe, trained on a data set an epoch at a time.

    Attributes:
        epoch: epochs trained so far, those of the checkpoint included.
        attempt: attempt of the checkpoint at the curve; None without one.
        examples: training and held-out examples.
        remark: message for the user; None for nothing.

    Args:
        setup: model, data and training arguments.
        listen: called with progress after each batch.

    Raises:
        ExamplesError: the examples do not suit the model.
        RecipeError: the built model is not what the recipe implies.
        TokenizerError: the tokenizer cannot be loaded.
    """

    def __init__(self, setup: LearnSetup, listen: Callable[[Heartbeat], None]) -> None:
        self._training = setup.training
        self._curve = setup.curve
        self.examples = read_examples(
            Path(setup.examples_file),
            _tokenizer(setup),
            setup.training.cutoff,
            setup.model.vocab_size,
        )
        # One random sequence checks the build; it need not be longer than the longest example.
        longest = max(len(sequence.ids) for sequence in self.examples.sequences)
        cell = setup.cell.model_copy(update={"seq_len": max(longest, 2)})
        self.worker = Worker(setup.model_copy(update={"cell": cell}))
        self._device = self.worker.device.torch_device
        self._tuning = self.worker.tuning
        self._autocast = cell.recipe.autocast
        self._micro_batches = cell.recipe.gradient_accumulation
        self._listen = listen
        self.remark: str | None = None
        self._checkpoint: Path | None = None
        self._start_over()
        # DeepSpeed saves its state in a format of its own.
        if setup.checkpoint_file is not None and not cell.recipe.offload_optimizer:
            self._checkpoint = Path(setup.checkpoint_file)
            self._restore()

    def _start_over(self) -> None:
        self._tuning.start_over()
        self.epoch = 0
        self.attempt: int | None = None
        self._last: EpochReply | None = None
        optimizer = self._tuning.stepper.optimizer
        # DeepSpeed's optimizer is a wrapper, which PyTorch's schedulers refuse.
        optimizer = getattr(optimizer, "optimizer", optimizer)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # torchao's, which allows no other
                group["lr"].fill_(self._training.learning_rate)
            else:
                group["lr"] = self._training.learning_rate
        steps = -(-len(self.examples.train) // self._training.batch_size)
        schedule = self._training.schedule
        self._scheduler = get_scheduler(
            "constant_with_warmup" if schedule == "constant" else schedule,
            optimizer,
            num_warmup_steps=self._training.warmup_steps,
            num_training_steps=self._training.epochs * steps,
        )

    def reply(self, epoch: int, attempt: int = 1) -> EpochReply:
        """Train one epoch and evaluate; repeat the last reply; or at 0 start over and evaluate.

        Args:
            epoch: epoch to report.
            attempt: attempt at the curve, saved with the checkpoint.

        Raises:
            NotTrainingError: the loss is not finite.
            ValueError: the epoch is not the next one.
        """
        if epoch == self.epoch and self._last is not None:
            return self._last
        if epoch == 0:
            self._start_over()
            self.attempt = attempt
            return EpochReply(epoch=0, tested=self._tested())
        if epoch != self.epoch + 1:
            raise ValueError(f"asked for epoch {epoch} after {self.epoch} epochs")
        self.attempt = attempt
        loss, steps, skipped = self._trained(epoch)
        self.epoch = epoch
        reply = EpochReply(
            epoch=epoch,
            train_loss=loss,
            steps=steps,
            skipped_steps=skipped,
            tested=self._tested(),
        )
        return reply.model_copy(update={"remark": self._save(reply)})

    def _trained(self, epoch: int) -> tuple[float | None, int, int]:
        """Train one epoch; return the loss in nats per token, steps, and skipped steps."""
        seed = self._training.seed * 1_000_003 + epoch
        torch.manual_seed(seed)  # dropout draws from it
        batches: DataLoader[Any] = DataLoader(
            self.examples.train,  # type: ignore[arg-type]  # a list is a dataset to it
            self._training.batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=padded,
        )
        nats = 0.0
        tokens = skipped = 0
        for step, (ids, labels) in enumerate(batches, start=1):
            try:
                batch = self._tuning.batch(ids.to(self._device), labels.to(self._device))
                loss = self._tuning.step(batch, micro_batches=self._micro_batches)
            except SkippedStepError:  # the loss scale is halved; training goes on
                skipped += 1
            else:
                count = int((labels[:, 1:] != IGNORED).sum())
                nats, tokens = nats + loss * count, tokens + count
            self._scheduler.step()
            self._listen(Heartbeat(doing="training", done=step, total=len(batches)))
        return (nats / tokens if tokens else None), len(batches), skipped

    def _tested(self) -> HeldOutScores:
        """Evaluate all held-out examples."""
        return held_out_scores(
            self._tuning.model,
            self.examples.held_out,
            self._training.batch_size,
            autocast=self._autocast,
            listen=self._listen,
        )

    def _save(self, reply: EpochReply) -> str | None:
        """Write a checkpoint, whole or not at all; return one line on why it failed, or None."""
        self._last = reply
        if self._checkpoint is None:
            return None
        part = self._checkpoint.with_suffix(".part")
        state = {
            "curve": self._curve,
            "attempt": self.attempt,
            "reply": reply.model_dump_json(),
            "trained": [p.detach() for p in self._tuning.trainable],
            "stepper": self._tuning.stepper.state_dict(),
            "scheduler": self._scheduler.state_dict(),
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
        """Load the checkpoint, if there is one; start over when it cannot be used."""
        assert self._checkpoint is not None
        if not self._checkpoint.exists():
            return
        try:
            state = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
            if state["curve"] != self._curve:
                raise ValueError(f"it is of {state['curve']}")  # noqa: TRY301 - one way out
            reply = EpochReply.model_validate_json(state["reply"])
            with torch.no_grad():
                for parameter, value in zip(self._tuning.trainable, state["trained"], strict=True):
                    parameter.copy_(value)
            self._tuning.stepper.load_state_dict(state["stepper"])
            self._scheduler.load_state_dict(state["scheduler"])
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the file, it is of no use
            why = (str(error).splitlines() or [type(error).__name__])[0]
            self.remark = f"{self._checkpoint}: cannot be read ({why}): beginning anew"
            self._start_over()
            return
        self.epoch, self.attempt, self._last = reply.epoch, state["attempt"], reply


def _tokenizer(setup: LearnSetup) -> ExampleTokenizer:
    try:
        return ExampleTokenizer(setup.tokenizer)
    except TokenizerError as error:
        text = tokenizer_load_failure(setup.tokenizer, str(error))
        if setup.tokenizer == setup.model.weights:
            text = mention_own_tokenizer(text, setup.tokenizer)
        raise TokenizerError(f"--tokenizer {text}") from None
