"""The metadata services of three clouds, as far as they announce the end of a node."""

import datetime as dt
import email.utils
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAME = "ray-finetune-cost-worker-1"
TOKEN = "of-version-2"  # noqa: S105 - of nobody


class Metadata:
    """State of the services; at first none announces anything. Times are in seconds from now."""

    def __init__(self) -> None:
        self.address = ""
        self.requests = 0
        self.is_down = False
        self.spot_action_in: float | None = None
        self.preempted = "FALSE"
        self.maintenance = "NONE"
        self.events: list[dict[str, object]] = []

    def event(self, kind: str, machine: str, seconds: float | None) -> None:
        """Add an event of Azure's; without seconds it has begun."""
        when = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=seconds or 0)
        self.events.append(
            {
                "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": [machine],
                "EventStatus": "Started" if seconds is None else "Scheduled",
                "NotBefore": ""
                if seconds is None
                else email.utils.format_datetime(when, usegmt=True),
            }
        )

    def respond(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Reply as each service is documented: requests without its header are refused."""
        self.requests += 1
        if self.is_down:
            return 503, ""
        if path.startswith("/latest/"):
            return self._aws(method, path, headers)
        if path.startswith("/computeMetadata/v1/instance/"):
            values = {"preempted": self.preempted, "maintenance-event": self.maintenance}
            accepted = headers.get("metadata-flavor") == "Google"
            return (200, values[path.rpartition("/")[2]]) if accepted else (403, "")
        if headers.get("metadata") != "true":
            return 400, ""
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events})
        return 200, NAME

    def _aws(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path == "/latest/api/token":
            accepted = method == "PUT" and "x-aws-ec2-metadata-token-ttl-seconds" in headers
            return (200, TOKEN) if accepted else (405, "")
        if headers.get("x-aws-ec2-metadata-token") != TOKEN:
            return 401, ""
        if self.spot_action_in is None:
            return 404, "<html>not found</html>"
        when = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=self.spot_action_in)
        return 200, json.dumps({"action": "terminate", "time": f"{when:%Y-%m-%dT%H:%M:%SZ}"})


@contextmanager
def metadata_server() -> Iterator[Metadata]:
    """A metadata server on this machine."""
    metadata = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, text = metadata.respond(self.command, self.path, headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET  # noqa: N815 - http.server's name

        def log_message(self, *arguments: object) -> None:
            del arguments

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        metadata.address = f"http://127.0.0.1:{server.server_port}"
        try:
            yield metadata
        finally:
            server.shutdown()
            thread.join()
