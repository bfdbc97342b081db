"""Pipe between a trial and the fork server of its children, which take turns at it."""

import os
import sys

from pydantic import BaseModel

from trials.child_process.parent_death import die_with_parent


class MessagePipe:
    """The two pipes to the trial, unbuffered because fork server and child take turns at them."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests = os.fdopen(requests, "rb", buffering=0)
        self._replies = os.fdopen(replies, "wb", buffering=0)

    @property
    def requests(self) -> int:
        """Descriptor of the pipe that requests come by."""
        return self._requests.fileno()

    def receive(self) -> str:
        """Wait for the next line; empty when the trial is gone."""
        return self._requests.readline().decode()

    def send(self, message: BaseModel, *, before: bytes = b"") -> None:
        """Send one message as a line of JSON, after the bytes ``before``."""
        self._replies.write(before + message.model_dump_json().encode() + b"\n")


def pipe_to_trial() -> MessagePipe:
    """Open the pipes to the trial that started this process, and let this process die with it."""
    die_with_parent(int(sys.argv[1]))
    # Libraries print to standard output, so it becomes standard error and replies get a copy.
    replies_fd = os.dup(1)
    os.dup2(2, 1)
    return MessagePipe(os.dup(0), replies_fd)
