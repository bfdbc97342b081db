"""A server on this machine that serves given pages, for tests of price sources."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class PriceServer:
    """Pages of the server and the requests it received; a path without a page is a 404.

    Attributes:
        url: its address.
        pages: content by path; paths begin with a slash.
        requests: requested paths, in order.
        bodies: what was posted, in order.
        missing_bytes: bytes by which Content-Length exceeds each page.
        hangs_up: whether it closes the connection instead of replying 404.
    """

    url: str
    pages: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    missing_bytes: int = 0
    hangs_up: bool = False


@contextmanager
def price_server() -> Iterator[PriceServer]:
    """A server that runs as long as the context."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.requests.append(self.path)
            content = served.pages.get(self.path)
            if content is None:
                self.close_connection = True
                if not served.hangs_up:
                    self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) + served.missing_bytes))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            served.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 32  # gpuhunt asks for all at once

    server = Server(("127.0.0.1", 0), Handler)
    served = PriceServer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
