"""moto's S3 server on this machine, over HTTP, with faults on demand."""

import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from moto.s3.models import s3_backends
from werkzeug.serving import make_server

BUCKET = "runs"
KEY, SECRET, TOKEN = "AKIAZXCVBNMASDFGHJKL", "qLrTNUDmfe+EXAMPLE/9secret", "IQoJb3TokenEXAMPLE"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": TOKEN,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REGION": "us-east-1",
}


@dataclass
class S3Server:
    """A server with one bucket.

    Attributes:
        url: its address.
        answers: status and error code that every request gets instead of its reply; with status
            200 it gets a page, as of a proxy that wants a log-in.
        reading: makes the body and the Content-Length (None for none) of the reply of status 200 to
            whoever reads an object, from its content.
        fails_every: one in this many requests fails with SlowDown.
        requests: method and path of all requests.
    """

    url: str
    answers: tuple[int, str] | None = None
    reading: Callable[[bytes], tuple[bytes, int | None]] | None = None
    fails_every: int = 0
    requests: list[str] = field(default_factory=list)

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Objects below a prefix, by the rest of their names."""
        keys = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET].keys
        below = {name: keys[name].value for name in sorted(keys) if name.startswith(prefix)}
        return {name.removeprefix(prefix): content for name, content in below.items()}

    def age(self, name: str, seconds: float) -> None:
        """Make an object older."""
        keys = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET].keys
        keys[name].last_modified -= timedelta(seconds=seconds)


class _Quiet(MotoRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - werkzeug's name
        """Log nothing."""


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server that runs as long as the context."""
    moto, one = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        served.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        fails = served.fails_every and len(served.requests) % served.fails_every == 0
        status, code = (503, "SlowDown") if fails else served.answers or (0, "")
        if status:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            if status == 200:
                start_response("200 OK", [("Content-Type", "text/html")])
                return [b"<html>Log in.</html>"]
            # As services do, it repeats what it was sent.
            sent = f"{KEY} {urllib.parse.quote(SECRET)} {SECRET} {TOKEN}"
            start_response(f"{status} No", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>{sent}</Message></Error>".encode()]
        with one:  # a condition is looked at and met at once, which moto alone does not do
            reads = (
                environ["REQUEST_METHOD"] == "GET" and "list-type" not in environ["QUERY_STRING"]
            )
            if served.reading is None or not reads:
                return list(moto(environ, start_response))
            headers = list[tuple[str, str]]()
            stored = b"".join(moto(environ, lambda _, sent, *__: headers.extend(sent)))
        body, length = served.reading(stored)
        # Capital letters, as of a service that is written in Go.
        kept = [(name.title(), text) for name, text in headers if name.lower() != "content-length"]
        start_response("200 OK", kept + [("Content-Length", str(length))] * (length is not None))
        return [body]

    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Quiet)
    served = S3Server(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(BUCKET, "us-east-1")
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()
