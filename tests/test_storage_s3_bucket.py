"""Errors of a bucket are one line each, without a secret; what is read is what was written."""

import re
from collections.abc import Callable

import pytest
from builders.s3_runs import (
    URL,
    one_line,
    the_run,
)
from fakes.s3_server import KEY, SECRET, TOKEN, S3Server

from orchestrator.cli.main import main
from orchestrator.storage import s3_bucket
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


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (lambda content: (content[:-9], len(content)), "cannot be reached"),
        (lambda content: (content[:-9], len(content) - 9), "was cut or altered"),
        (lambda content: (content[:-9], None), "was cut or altered"),
        (lambda content: (content.replace(b"1", b"7"), len(content)), "was cut or altered"),
    ],
    ids=["cut", "cut-with-its-length", "cut-without-length", "altered"],
)
def test_an_object_that_arrives_cut_or_altered_is_read_again(
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reading: Callable[[bytes], tuple[bytes, int | None]],
    words: str,
) -> None:
    """Its status is 200. Nothing of it counts as read, and it is an error if it stays so."""
    bucket, content = Bucket(URL, 5.0), b'{"batch_size": 1}\n' * 9
    bucket.put("one", content)
    monkeypatch.setattr(s3_bucket.time, "sleep", lambda _: setattr(server, "reading", None))
    server.reading = reading
    stored = bucket.retry(lambda: bucket.get("one"))
    assert stored is not None
    assert stored.content == content
    assert words in caplog.text
    server.reading = reading
    with pytest.raises(OutageError, match=words):
        bucket.get("one")
    with pytest.raises(OutageError, match=words):
        bucket.put("one", content)  # which reads it back


def test_an_object_that_is_damaged_in_the_bucket_is_one_line(server: S3Server) -> None:
    """Read again and again it stays so: the line names the object, and what to do with it."""
    bucket = Bucket(URL, 0.6)
    bucket.put("report.md", b"# One\n")
    server.reading = lambda _: (b"# Two\n", 6)
    text = one_line(lambda: bucket.retry(lambda: bucket.get("report.md")))
    assert text.startswith(f"{URL}/report.md: was cut or altered, ")
    assert text.endswith(" s: restore it from a copy, or delete it")


@pytest.mark.usefixtures("server")
def test_an_object_of_another_program_is_read_as_it_is() -> None:
    """A person may put a file into a run by Amazon's own tool, which adds no checksum."""
    client = Bucket(URL, 1.0)._client
    client.put_object(Bucket=URL.bucket, Key=f"{URL.key}/one", Body=b"1")
    stored = Bucket(URL, 1.0).get("one")
    assert stored is not None
    assert stored.content == b"1"


@pytest.mark.parametrize("code", ["BadDigest", "IncompleteBody"])
def test_an_upload_that_the_service_received_otherwise_is_sent_again(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """The service compares it with its MD5; such a reply is no refusal."""
    bucket, server.answers = Bucket(URL, 5.0), (400, code)
    monkeypatch.setattr(s3_bucket.time, "sleep", lambda _: setattr(server, "answers", None))
    assert bucket.retry(lambda: bucket.put("one", b"1"))
    assert server.objects("teams/one/") == {"one": b"1"}
