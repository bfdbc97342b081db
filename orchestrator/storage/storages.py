"""Storage at an address: a local folder, or a folder in a bucket."""

from typing import TYPE_CHECKING

from orchestrator.storage.local_storage import LocalStorage
from orchestrator.storage.run_storage import RunPath, S3Url

if TYPE_CHECKING:
    from orchestrator.storage.s3_storage import S3Storage


def storage_of(path: RunPath) -> "LocalStorage | S3Storage":
    """Storage of a folder."""
    if not isinstance(path, S3Url):
        return LocalStorage(path)
    from orchestrator.storage.s3_storage import S3Storage  # noqa: PLC0415 - boto3, for buckets only

    return S3Storage(path)
