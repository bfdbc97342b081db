"""A bucket, asked with patience. What goes wrong is told in one line, without what was sent."""

import contextlib
import email.utils
import hashlib
import random
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import ConnectionError as NoConnectionError

from orchestrator.console import remark
from orchestrator.storage.run_storage import S3Url, StoreError

CONNECTIONS = 16
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 20.0
_Answer = TypeVar("_Answer")

_MISSING = {"NoSuchKey", "404", "NotFound"}
_THERE_ALREADY = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_BUSY = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequests"}
_BY_CODE = {
    "NoSuchBucket": ("there is no such bucket", "make it, or name another"),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set it"),
    "AuthorizationHeaderMalformed": ("is in another region", "set AWS_REGION to its own"),
} | dict.fromkeys(
    (
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    ),
    ("the AWS credentials are refused", "set AWS_PROFILE, or log in anew"),
)
_BY_STATUS = {
    301: ("is in another region", "set AWS_REGION to its own"),
    403: (
        "access is denied",
        "its credentials need s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject",
    ),
    501: (
        "its service knows no If-None-Match, which keeps a second sweep away",
        "take one that does, or a local folder",
    ),
}
_NO_CREDENTIALS = (
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
_NO_CONNECTION = (HTTPClientError, IncompleteReadError, NoConnectionError, OSError)


class OutageError(StoreError):
    """No answer, or none for now: the same may go well later."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object of a bucket."""

    content: bytes
    age_seconds: float
    """Since it was written, by the clock of the bucket's own service."""


class Bucket:
    """The objects below an address.

    Args:
        url: the address.
        patience_seconds: how long an outage is waited out.
    """

    def __init__(self, url: S3Url, patience_seconds: float) -> None:
        self.url = url
        self.patience_seconds = patience_seconds

    @cached_property
    def _client(self) -> Any:
        return boto3.session.Session().client(
            "s3",
            config=Config(
                connect_timeout=5,
                read_timeout=30,
                retries={"mode": "standard", "total_max_attempts": 2},
                max_pool_connections=CONNECTIONS,
                # Not every service that speaks S3 knows the newer checksums; all know MD5.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    @property
    def service(self) -> str:
        """Whose bucket it is: an address; empty for Amazon's, whose names are the same anywhere."""
        try:
            address = str(self._client.meta.endpoint_url)
        except Exception as error:  # noqa: BLE001 - as below
            raise _unanswered(self.url, error) from None
        return "" if (urlsplit(address).hostname or "").endswith(".amazonaws.com") else address

    def patiently(self, ask: Callable[[], _Answer]) -> _Answer:
        """Asks until there is an answer.

        Raises:
            OutageError: there was none for as long as patience lasts.
            StoreError: the answer is no.
        """
        begun, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        while True:
            try:
                return ask()
            except OutageError as error:
                passed = time.monotonic() - begun
                if passed + pause > self.patience_seconds:
                    raise OutageError(
                        f"{error}, for {passed:.0f} s now: run the same command again later"
                    ) from None
                if pause == FIRST_PAUSE_SECONDS:
                    remark(f"{error}; it is asked for up to {self.patience_seconds:.0f} s")
            time.sleep(random.uniform(pause / 2, pause))
            pause = longer(pause)

    def get(self, name: str) -> Found | None:
        """An object; None when there is none of this name."""
        try:
            answer = self._once("get_object", Key=self._key(name))
        except _MissingError:
            return None
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        told = email.utils.parsedate_tz(headers.get("date", ""))
        now = time.time() if told is None else email.utils.mktime_tz(told)
        return Found(answer["Body"], now - answer["LastModified"].timestamp())

    def put(self, name: str, content: bytes, *, new: bool = False) -> bool:
        """Writes an object as a whole.

        Args:
            name: below the address.
            content: of it.
            new: only when there is none of this name.

        Returns:
            Whether it was written.
        """
        condition = {"IfNoneMatch": "*"} if new else {}
        check = b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
        key = self._key(name)
        try:
            self._once("put_object", Key=key, Body=content, ContentMD5=check, **condition)
        except _ThereAlreadyError:
            return False
        return True

    def delete(self, name: str) -> None:
        """Takes an object away; it need not be there."""
        with contextlib.suppress(_MissingError):
            self._once("delete_object", Key=self._key(name))

    def names(self, folder: str = "") -> list[str]:
        """Files and folders right below a folder, sorted; those of folders end in a slash."""
        found, prefix = list[str](), self._key(folder)
        more: dict[str, str] = {}
        while True:
            page = self._once("list_objects_v2", Prefix=prefix, Delimiter="/", **more)
            found += [each["Key"] for each in page.get("Contents", [])]
            found += [each["Prefix"] for each in page.get("CommonPrefixes", [])]
            if not page.get("IsTruncated"):
                return sorted(name.removeprefix(prefix) for name in found if name != prefix)
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _key(self, name: str) -> str:
        return f"{self.url.key}/{name}".lstrip("/")

    def _once(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """One request, that botocore itself has tried a few times."""
        try:
            call = getattr(self._client, operation)
            answer: dict[str, Any] = call(Bucket=self.url.bucket, **parameters)
            if "Body" in answer:
                answer["Body"] = answer["Body"].read()
        except ClientError as error:
            raise _refused(self.url, error) from None
        except Exception as error:  # noqa: BLE001 - what is below may raise anything, keys in it
            raise _unanswered(self.url, error) from None
        return answer


def longer(pause: float) -> float:
    """The pause after the next failure, seconds."""
    return min(2 * pause, LONGEST_PAUSE_SECONDS)


class _MissingError(StoreError):
    """There is no such object."""


class _ThereAlreadyError(StoreError):
    """There is such an object."""


def _refused(url: S3Url, error: ClientError) -> StoreError:
    """What a service's no means. Its own words may repeat the request, signature and all."""
    code = str(error.response.get("Error", {}).get("Code", "no code"))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _MISSING:
        return _MissingError(f"{url}: {code}")
    if code in _THERE_ALREADY:
        return _ThereAlreadyError(f"{url}: {code}")
    if code in _BUSY or status == 429 or (status >= 500 and status != 501):
        return OutageError(f"{url}: does not answer ({code})")
    otherwise = (f"{error.operation_name} was refused", "see what its service says of that")
    what, advice = _BY_CODE.get(code) or _BY_STATUS.get(status) or otherwise
    return StoreError(f"{url}: {what} ({code}): {advice}")


def _unanswered(url: S3Url, error: Exception) -> StoreError:
    """What it means that there is no answer. Its words may have addresses with keys in them."""
    kind = type(error).__name__
    if isinstance(error, _NO_CREDENTIALS):
        return StoreError(
            f"{url}: no AWS credentials ({kind}): set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or log in with Amazon's own tool"
        )
    if isinstance(error, _NO_CONNECTION):
        return OutageError(
            f"{url}: cannot be reached ({kind}; check the network, and AWS_ENDPOINT_URL if set)"
        )
    if isinstance(error, BotoCoreError | ValueError):
        return StoreError(
            f"{url}: cannot be asked ({kind}): check the AWS configuration and AWS_ENDPOINT_URL"
        )
    return OutageError(f"{url}: no answer that can be read ({kind})")
