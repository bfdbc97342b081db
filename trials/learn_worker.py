"""The child process that learns: the nursery of ``trials.worker``, another life."""

from trials.learner import Learner
from trials.learning import EpochReply, EpochRequest, LearnReady, LearnSetup
from trials.observation import Outcome
from trials.outcome import classify, is_final
from trials.probe import Refused
from trials.worker import Line, line_to_trial, nurse_of


def learn(setup: LearnSetup, line: Line) -> None:
    """A child's life: builds the model, learns an epoch at a time until one goes wrong."""
    try:
        learner = Learner(setup, line.say)
        line.say(
            LearnReady(
                environment=learner.worker.environment(),
                memory_limit_bytes=learner.worker.device.memory_limit_bytes,
                epoch=learner.epoch,
                attempt=learner.attempt,
                cut_off=learner.queries.cut_off,
                left_out=learner.queries.left_out,
                remark=learner.remark,
            )
        )
    except Exception as error:  # noqa: BLE001 - every failure of a build is an outcome
        outcome, detail = classify(error)
        line.say(Refused(outcome=outcome, detail=detail, final=is_final(error)))
        return
    while request := line.hear():
        asked = EpochRequest.model_validate_json(request)
        try:
            reply = learner.reply(asked.epoch, asked.attempt)
        except Exception as error:  # noqa: BLE001 - every failure of an epoch is an outcome
            outcome, detail = classify(error)
            reply = EpochReply(epoch=asked.epoch, outcome=outcome, detail=detail)
        line.say(reply)
        if reply.outcome is not Outcome.FITS:
            return


if __name__ == "__main__":
    nurse_of(line_to_trial(), LearnSetup, learn)
