"""Errors of a bucket are one line each, without a secret."""

import re

import pytest
from builders.s3_runs import (
    URL,
    one_line,
    the_run,
)
from fakes.s3_server import KEY, SECRET, TOKEN, S3Server

from orchestrator.cli.main import main
from orchestrator.storage.s3_bucket import Bucket, OutageError
from orchestrator.storage.s3_log import S3Timings


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "NoSuchBucket"), "no such bucket"),
        ((403, "InvalidAccessKeyId"), "AWS_PROFILE"),
        ((403, "SignatureDoesNotMatch"), "AWS_PROFILE"),
        ((400, "ExpiredToken"), "AWS_PROFILE"),
        ((403, "AccessDenied"), "s3:ListBucket"),
        ((403, "RequestTimeTooSkewed"), "clock"),
        ((501, "NotImplemented"), "If-None-Match"),
        ((418, "Teapot"), "ListObjectsV2"),
    ],
)
def test_a_refused_request_is_one_line_without_a_secret(
    server: S3Server, capsys: pytest.CaptureFixture[str], answer: tuple[int, str], words: str
) -> None:
    """The command ends at once; the service's text is not shown, as it may repeat the request."""
    server.answers = answer
    assert main(["status", str(URL)]) == 1
    output = capsys.readouterr()
    assert output.err.startswith(f"{URL}: ")
    assert words in output.err
    assert answer[1] in output.err
    assert output.err.count("\n") == 1
    assert not any(secret in output.err for secret in (KEY, SECRET, TOKEN))
    assert output.out == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"AWS_ACCESS_KEY_ID": None}, "NoCredentialsError"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, "PartialCredentialsError"),
        ({"AWS_PROFILE": "none"}, "ProfileNotFound"),
        ({"AWS_ENDPOINT_URL": "nowhere"}, "AWS_ENDPOINT_URL"),
    ],
)
@pytest.mark.usefixtures("server")
def test_invalid_settings_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, str | None],
    words: str,
) -> None:
    """The error names the setting; no request is sent."""
    for name, value in settings.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    assert main(["rank", str(URL)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"{URL}: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("server")
def test_an_unreachable_bucket_is_retried_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A message says that requests are retried; the error says for how long they were."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    text = one_line(the_run(S3Timings(retry_seconds=2.0)).observations)
    assert text.startswith(f"{URL}: ")
    assert "EndpointConnectionError" in text
    assert re.search(r", for [1-9]\d* s: ", text)
    [message] = caplog.messages
    assert message.endswith(" 2 s")


def test_a_page_in_place_of_a_reply_is_an_outage(server: S3Server) -> None:
    """A proxy answers with 200: no object counts as read, written or listed."""
    bucket = Bucket(URL, 1.0)
    bucket.put("one", b"1")
    server.answers = (200, "")
    for request in (lambda: bucket.get("one"), bucket.names, lambda: bucket.put("one", b"2")):
        with pytest.raises(OutageError, match="proxies"):
            request()
    server.answers = None
    assert server.objects("teams/one/") == {"one": b"1"}
