"""Requests to a bucket, with retries. Errors are one line and never repeat the request."""

import contextlib
import email.utils
import hashlib
import logging
import random
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
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

from orchestrator.storage.run_storage import S3Url, StoreError

logger = logging.getLogger(__name__)
CONNECTIONS = 16
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 20.0
_Reply = TypeVar("_Reply")

_MISSING = {"NoSuchKey", "404", "NotFound"}
_THERE_ALREADY = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_BUSY = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequests"}
_CUT_ON_ITS_WAY = {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}
# Of the content, in an object's own metadata. The ETag is an MD5 only where the object came in one
# part, without a key of KMS or of the client; metadata are kept by every service, and by copies.
_SHA256 = "sha256"
_BY_CODE = {
    "NoSuchBucket": ("there is no such bucket", "make it, or give another"),
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
    ("the AWS credentials are refused", "set AWS_PROFILE, or log in again"),
)
_BY_STATUS = {
    301: ("is in another region", "set AWS_REGION to its own"),
    403: (
        "access is denied",
        "its credentials need s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject",
    ),
    501: (
        "its service does not support If-None-Match, which keeps a second sweep away",
        "use one that does, or a local folder",
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
    """No usable reply for now: the same request may succeed later."""

    remedy = "run the same command again later"


class DamagedError(OutageError):
    """An object that was read is not what was written; the next reply may be."""

    remedy = "restore it from a copy, or delete it"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Content of an object, and seconds since it was written, by the clock of the service."""

    content: bytes
    age_seconds: float


class Bucket:
    """Objects below an address.

    Args:
        url: the address.
        retry_seconds: longest outage to wait for.
    """

    def __init__(self, url: S3Url, retry_seconds: float) -> None:
        self.url = url
        self.retry_seconds = retry_seconds

    @cached_property
    def _client(self) -> Any:
        return boto3.session.Session().client(
            "s3",
            config=Config(
                connect_timeout=5,
                read_timeout=30,
                retries={"mode": "standard", "total_max_attempts": 2},
                max_pool_connections=CONNECTIONS,
                # Not all S3 services support the newer checksums; all support MD5.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    @property
    def service(self) -> str:
        """Address of the service; empty for Amazon, where a bucket's name is unique."""
        try:
            address = str(self._client.meta.endpoint_url)
        except Exception as error:  # noqa: BLE001 - as below
            raise _no_reply(self.url, error) from None
        return "" if (urlsplit(address).hostname or "").endswith(".amazonaws.com") else address

    def retry(self, request: Callable[[], _Reply]) -> _Reply:
        """Repeat a request until there is a reply.

        Raises:
            OutageError: there was no usable one for ``retry_seconds``.
            StoreError: the service refuses the request.
        """
        begun, waits, is_first = time.monotonic(), pauses(), True
        while True:
            try:
                return request()
            except OutageError as error:
                passed, pause = time.monotonic() - begun, next(waits)
                if passed + pause > self.retry_seconds:
                    raise OutageError(f"{error}, for {passed:.0f} s: {error.remedy}") from None
                if is_first:
                    logger.warning("%s; retrying for up to %.0f s", error, self.retry_seconds)
                is_first = False
            time.sleep(pause)

    def get(self, name: str) -> StoredObject | None:
        """Read an object; None if there is none of this name.

        Raises:
            DamagedError: the reply is shorter or other than what ``put`` wrote.
        """
        try:
            reply = self._request("get_object", Key=self._key(name))
        except _MissingError:
            return None
        modified = reply.get("LastModified")
        if modified is None:
            raise self._no_service()
        headers = reply["ResponseMetadata"]["HTTPHeaders"]
        # An object of another program's has none. The header itself, as boto3's own names of
        # metadata begin with a capital where a service writes its headers so.
        if headers.get(f"x-amz-meta-{_SHA256}") not in {None, _sha256(reply["Body"])}:
            raise DamagedError(
                f"{self.url / name}: was cut or altered, in the bucket or on its way (its SHA-256 "
                "is not that of what was written)"
            )
        # The service's clock wrote the modification time, so its clock gives the age.
        date = email.utils.parsedate_tz(headers.get("date", ""))
        now = time.time() if date is None else email.utils.mktime_tz(date)
        return StoredObject(reply["Body"], now - modified.timestamp())

    def put(self, name: str, content: bytes, *, new: bool = False) -> bool:
        """Write an object atomically, and read it back unless it is new.

        A proxy may answer any request with a page of its own, so the reply alone proves nothing.

        Args:
            name: name below the address.
            content: its content.
            new: whether to write only if there is no object of this name.

        Returns:
            Whether the object was written.

        Raises:
            OutageError: the bucket does not have the content afterwards.
        """
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if new else {}
        checks = {
            "ContentMD5": b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode(),
            "Metadata": {_SHA256: _sha256(content)},
        }
        key = self._key(name)
        try:
            self._request("put_object", Key=key, Body=content, **checks, **condition)
        except _ThereAlreadyError:
            return False
        stored = None if new else self.get(name)
        if not new and (stored is None or stored.content != content):
            raise self._no_service()
        return True

    def delete(self, name: str) -> None:
        """Delete an object if it exists."""
        with contextlib.suppress(_MissingError):
            self._request("delete_object", Key=self._key(name))

    def names(self, folder: str = "") -> list[str]:
        """Sorted names of files and folders directly in a folder; folders end in a slash."""
        keys, prefix = list[str](), self._key(folder)
        more: dict[str, str] = {}
        while True:
            page = self._request("list_objects_v2", Prefix=prefix, Delimiter="/", **more)
            if "Name" not in page:
                raise self._no_service()
            keys += [entry["Key"] for entry in page.get("Contents", [])]
            keys += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
            if not page.get("IsTruncated"):
                return sorted(name.removeprefix(prefix) for name in keys if name != prefix)
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _no_service(self) -> OutageError:
        return OutageError(
            f"{self.url}: the reply is not that of an S3 service (check AWS_ENDPOINT_URL, "
            "and proxies on the way)"
        )

    def _key(self, name: str) -> str:
        return f"{self.url.key}/{name}".lstrip("/")

    def _request(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """Reply to a request, which botocore retries a few times itself."""
        try:
            call = getattr(self._client, operation)
            reply: dict[str, Any] = call(Bucket=self.url.bucket, **parameters)
            if "Body" in reply:
                reply["Body"] = reply["Body"].read()
        except ClientError as error:
            raise _refused(self.url, error) from None
        except Exception as error:  # noqa: BLE001 - botocore may raise anything, with keys in its text
            raise _no_reply(self.url, error) from None
        return reply


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def pauses() -> Iterator[float]:
    """Seconds to wait after each failure, at random, so that drivers do not return all at once."""
    longest = FIRST_PAUSE_SECONDS
    while True:
        yield random.uniform(longest / 2, longest)
        longest = min(2 * longest, LONGEST_PAUSE_SECONDS)


class _MissingError(StoreError):
    """The object does not exist."""


class _ThereAlreadyError(StoreError):
    """The object exists already."""


def _refused(url: S3Url, error: ClientError) -> StoreError:
    """Error for a refused request, without the service's text: it may repeat the signature."""
    code = str(error.response.get("Error", {}).get("Code", "no code"))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _MISSING:
        return _MissingError(f"{url}: {code}")
    if code in _THERE_ALREADY:
        return _ThereAlreadyError(f"{url}: {code}")
    if code in _CUT_ON_ITS_WAY:
        return OutageError(f"{url}: did not receive what was sent ({code})")
    if code in _BUSY or status == 429 or (status >= 500 and status != 501):
        return OutageError(f"{url}: does not answer ({code})")
    otherwise = (
        f"{error.operation_name} was refused",
        "look it up in the documentation of the service",
    )
    what, advice = _BY_CODE.get(code) or _BY_STATUS.get(status) or otherwise
    return StoreError(f"{url}: {what} ({code}): {advice}")


def _no_reply(url: S3Url, error: Exception) -> StoreError:
    """Error for a request without a reply, without botocore's text: it may contain keys."""
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
            f"{url}: no request can be sent ({kind}): check the AWS configuration and "
            "AWS_ENDPOINT_URL"
        )
    return OutageError(f"{url}: the reply cannot be read ({kind})")
