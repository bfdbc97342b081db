"""Fork server of gangs: ``trials.training.worker`` with several ranks in the place of a child."""

from trials.records.messages import Setup
from trials.training.gang.gang import serve_gang
from trials.training.serving.message_pipe import pipe_to_trial
from trials.training.worker import serve_forks

if __name__ == "__main__":
    serve_forks(pipe_to_trial(), Setup, serve_gang)
