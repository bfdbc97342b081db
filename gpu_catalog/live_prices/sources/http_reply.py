"""Replies of web servers, with one line of text for each way in which they fail."""

import http.client
import io
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpu_catalog.live_prices.sources.raw_offer import SourceError

SECONDS = 60.0  # without a byte, until a request fails


@contextmanager
def reply_lines(url: str, body: object = None) -> Iterator[io.TextIOWrapper]:
    """Lines of a page; a body is posted as JSON.

    Raises:
        SourceError: the server does not answer, or the page breaks off.
    """
    data = None if body is None else json.dumps(body).encode()
    # Some servers refuse the name of Python's own client.
    headers = {"User-Agent": "finetune-cost", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - https, or a test's own server
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:  # noqa: S310 - as above
            yield io.TextIOWrapper(response, encoding="utf-8", newline="")
            # A broken connection looks like the end of the page.
            if response.length:
                raise SourceError(f"{url} broke off, {response.length} bytes are missing")
    except urllib.error.HTTPError as error:
        error.close()
        raise SourceError(f"{url} is not available (HTTP {error.code})") from None
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        reason = getattr(error, "reason", None) or error
        raise SourceError(f"{url} does not answer ({reason})") from None


def json_reply(url: str, body: object = None) -> Any:
    """Content of a reply in JSON.

    Raises:
        SourceError: the server does not answer, or not in JSON.
    """
    with reply_lines(url, body) as lines:
        text = lines.read()
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise SourceError(f"{url} does not answer in JSON") from None
