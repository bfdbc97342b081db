"""A server on this machine that answers with what it is given, for tests of sources."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class PriceServer:
    """Answers paths with bytes; what it does not have is not found.

    Attributes:
        url: its address.
        pages: content by path, beginning with a slash.
        asked: the paths that were asked for, in order.
        missing_bytes: how many more than it sends it promises of each page.
        hangs_up: whether it says nothing of what it does not have.
    """

    url: str
    pages: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    missing_bytes: int = 0
    hangs_up: bool = False


@contextmanager
def price_server() -> Iterator[PriceServer]:
    """A server that is there as long as the context."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.asked.append(self.path)
            content = told.pages.get(self.path)
            if content is None:
                self.close_connection = True
                if not told.hangs_up:
                    self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) + told.missing_bytes))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 32  # gpuhunt asks for all at once

    server = Server(("127.0.0.1", 0), Handler)
    told = PriceServer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
