"""Child process of learning: builds the model and answers requests for epochs."""

from trials.records.failure_classification import classify, is_final
from trials.records.learning import EpochRequest, LearnReady, LearnSetup
from trials.records.messages import Refused
from trials.training.learner import Learner
from trials.training.serving.message_pipe import MessagePipe, pipe_to_trial
from trials.training.worker import serve_forks


def learn(setup: LearnSetup, pipe: MessagePipe) -> None:
    """Build the model and train on request until a request fails or the parent is gone."""
    try:
        learner = Learner(setup, pipe.send)
        pipe.send(
            LearnReady(
                environment=learner.worker.environment(),
                memory_limit_bytes=learner.worker.device.memory_limit_bytes,
                epoch=learner.epoch,
                attempt=learner.attempt,
                cut_off=learner.examples.cut_off,
                left_out=learner.examples.left_out,
                remark=learner.remark,
            )
        )
        while line := pipe.receive():
            request = EpochRequest.model_validate_json(line)
            pipe.send(learner.reply(request.epoch, request.attempt))
    except Exception as error:  # noqa: BLE001 - every failure is an outcome
        outcome, detail = classify(error)
        pipe.send(Refused(outcome=outcome, detail=detail, final=is_final(error)))


if __name__ == "__main__":
    serve_forks(pipe_to_trial(), LearnSetup, learn)
