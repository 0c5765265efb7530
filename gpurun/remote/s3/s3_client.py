"""The way to a bucket: every exchange with S3 or with what speaks like it, its answers checked, its refusals told.

boto3 finds the key as it does for everything else (environment, profile, AWS_ENDPOINT_URL_S3 for another service).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

from gpurun import __version__
from gpurun.core.aws_session import AwsSession
from gpurun.core.clock import Clock
from gpurun.core.crashpoint import crashpoint
from gpurun.core.errors import SetupError
from gpurun.core.secrets import Secret
from gpurun.remote.s3.address import BucketAddress
from gpurun.remote.s3.s3_errors import PASSING, SKEWED, UNKNOWN_KEY, BucketLost, explain_s3_refusal, skewed

MOST_SIGNED_S = 7 * 24 * 3600
"""No presigned URL lives longer (SigV4), and none longer than the credentials that signed it."""
FALLBACK_REGION = "us-east-1"
# Seconds to connect, seconds without an answer, tries: while nothing is paid for, and while a machine is.
PATIENT, BRISK = (5, 60, 4), (3, 5, 2)
_BLOCK_BYTES = 1 << 20
_ABSENT = frozenset({"NoSuchKey", "404", "NotFound", "NoSuchUpload"})
# What is asked of things that need not be there. An end that is asked for twice has come with the first.
_MAY_LACK = frozenset({"get_object", "head_object", "delete_object", "list_parts", "complete_multipart_upload"})


@dataclass(frozen=True)
class Head:
    """An object's size, and the tag that changes with its content."""

    bytes: int
    etag: str


class Bucket:
    """One bucket. Any number of threads may use it. Each method raises SetupError or BucketLost.

    `is_paid`: a machine waits for the answer and is billed, so it is given up soon.
    """

    def __init__(self, address: BucketAddress, clock: Clock, *, is_paid: bool = False) -> None:
        self.address = address
        self._clock = clock
        self._waits = BRISK if is_paid else PATIENT
        self._made: Any = None
        self._made_of: Any = None
        self._session = AwsSession(clock)
        self._region: str | None = None
        self._lock = threading.RLock()

    @property
    def endpoint(self) -> str:
        """Where the bucket is asked for."""
        return str(self._client().meta.endpoint_url)

    @property
    def has_session(self) -> bool:
        """Whether the key is of a session, with which everything ends that it has signed."""
        self._client()
        try:
            found = self._session.keyed().get_credentials()
            return bool(found and found.get_frozen_credentials().token)
        except Exception as error:  # noqa: BLE001 - everything that the SDK may raise is told in gpurun's terms
            self._tell(error, "get_object", "")

    @property
    def region(self) -> str:
        """The bucket's own region, once it was looked at."""
        return self._region or str(self._client().meta.region_name)

    def look(self) -> None:
        """See that the bucket is there and may be read; learn its region."""
        answer = self._call("list_objects_v2", "", Prefix=self.address.key(), MaxKeys=1)
        if answer.keys().isdisjoint(("Name", "KeyCount", "IsTruncated")):
            what = f"{self.endpoint} answers, and not as S3 does."
            raise SetupError("stage.refused", what, hint="See to AWS_ENDPOINT_URL_S3: the port of a console is none.")
        region = _headers(answer).get("x-amz-bucket-region", "")
        if region and region != self._client().meta.region_name:
            self._region = region  # What is presigned must be for the bucket's own region.
            self._made = None

    def get(self, key: str, most_bytes: int) -> bytes | None:
        """A small object whole; None when it is not there, or larger than that."""
        answer = self._call("get_object", key, Key=key)
        if answer is None:
            return None
        with answer["Body"] as body:
            content: bytes = self._read(body, most_bytes + 1)
        return content if len(content) <= most_bytes else None

    def stream(self, key: str, offset: int, size: int) -> Iterator[bytes]:
        """A part of an object as it comes; nothing where there is no such object."""
        answer = self._call("get_object", key, Key=key, Range=f"bytes={offset}-{offset + size - 1}")
        if answer is None:
            return
        with answer["Body"] as body:
            while block := self._read(body, _BLOCK_BYTES):
                yield block

    def below(self) -> dict[str, int]:
        """The objects below the prefix, by their names from there on, each with its size."""
        prefix = f"{self.address.key()}/".lstrip("/")
        found = dict[str, int]()
        after = dict[str, str]()
        while True:
            answer = self._call("list_objects_v2", "", Prefix=prefix, **after)
            for one in answer.get("Contents") or ():
                found[str(one["Key"]).removeprefix(prefix)] = int(one["Size"])
            if not answer.get("IsTruncated"):
                return found
            after = {"ContinuationToken": answer["NextContinuationToken"]}

    def head(self, key: str) -> Head | None:
        """What an object is; None when it is not there, or in an archive, from which it comes in hours."""
        answer = self._call("head_object", key, Key=key)
        return None if answer is None or _is_archived(answer) else Head(int(answer["ContentLength"]), _tag(answer))

    def put(self, key: str, content: bytes) -> str:
        """Put an object there whole; its tag."""
        return _tag(self._call("put_object", key, Key=key, Body=content))

    def drop(self, key: str) -> None:
        """Take an object away, if it is there."""
        self._call("delete_object", key, Key=key)

    def begin(self, key: str) -> str:
        """Begin an object that comes in several pieces; the name of that upload."""
        return str(self._call("create_multipart_upload", key, Key=key)["UploadId"])

    def put_piece(self, key: str, upload: str, number: int, content: bytes) -> str:
        """Put one piece there; its tag."""
        asked = {"Key": key, "UploadId": upload, "PartNumber": number, "Body": content}
        return _tag(self._call("upload_part", key, **asked))

    def pieces(self, key: str, upload: str) -> dict[int, str] | None:
        """The tags of the pieces that are there, by their numbers; None when there is no such upload any more."""
        found: dict[int, str] = {}
        after = 0
        while True:
            answer = self._call("list_parts", key, Key=key, UploadId=upload, PartNumberMarker=after)
            if answer is None:
                return None
            found |= {int(one["PartNumber"]): str(one["ETag"]).strip('"') for one in answer.get("Parts") or ()}
            if not answer.get("IsTruncated"):
                return found
            after = int(answer["NextPartNumberMarker"])

    def finish(self, key: str, upload: str, tags: dict[int, str]) -> None:
        """Make one object of the pieces."""
        pieces = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(tags.items())]
        asked = {"Key": key, "UploadId": upload, "MultipartUpload": {"Parts": pieces}}
        self._call("complete_multipart_upload", key, **asked)

    def url_to_get(self, key: str, seconds: float) -> Secret:
        """A URL with which anybody can read this object for so long."""
        return self._signed("get_object", key, seconds)

    def url_to_put(self, key: str, seconds: float) -> Secret:
        """A URL with which anybody can write this object for so long, any number of times."""
        return self._signed("put_object", key, seconds)

    def _signed(self, operation: str, key: str, seconds: float) -> Secret:
        asked = {"Bucket": self.address.bucket, "Key": key}
        lives_s = int(max(1, min(seconds, MOST_SIGNED_S)))
        try:
            return Secret(self._client().generate_presigned_url(operation, Params=asked, ExpiresIn=lives_s))
        except Exception as error:  # noqa: BLE001 - everything that the SDK may raise is told in gpurun's terms
            self._tell(error, operation, key)

    def _call(self, operation: str, key: str, **asked: Any) -> Any:
        """One exchange; None for an object that is not there."""
        is_change = operation.startswith(("put", "upload", "create", "complete"))
        if is_change:
            crashpoint(f"before s3.{operation}")
        for is_last in (False, True):
            try:
                answer = getattr(self._client(), operation)(Bucket=self.address.bucket, **asked)
                if is_change:
                    crashpoint(f"after s3.{operation}")
                return answer
            except Exception as error:  # noqa: BLE001 - as above
                response = getattr(error, "response", None) or {}
                code = str(response.get("Error", {}).get("Code", ""))
                if code in _ABSENT and operation in _MAY_LACK:
                    return None
                if code in SKEWED and is_last:
                    raise skewed(self._ahead_s(response), self.endpoint) from None
                if code in SKEWED | UNKNOWN_KEY and not is_last:
                    # The key may have been renewed, or the laptop slept after it had signed.
                    self._session = AwsSession(self._clock)
                    continue
                self._tell(error, operation, key)
        raise AssertionError("not reached")

    def _read(self, body: Any, most: int) -> bytes:
        try:
            return bytes(body.read(most))
        except Exception as error:  # noqa: BLE001 - as above
            self._tell(error, "get_object", "")

    def _ahead_s(self, answer: Any) -> float | None:
        """How far this machine's clock is ahead of that by which an answer was dated; None where it was not."""
        try:
            return self._clock.wall() - parsedate_to_datetime(_headers(answer).get("date", "")).timestamp()
        except (ValueError, TypeError, OverflowError):
            return None

    def _tell(self, error: Exception, operation: str, key: str) -> NoReturn:
        """Raise what went wrong, in gpurun's terms."""
        from botocore.exceptions import ClientError  # type: ignore[import-untyped]

        if isinstance(error, SetupError | BucketLost):
            raise error
        if isinstance(error, ClientError):
            told = error.response.get("Error", {})
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
            code = str(told.get("Code") or status)
            words = " ".join(str(told.get("Message") or "").split())[:300]
            if (status >= 500 and status != 507) or code in PASSING:
                raise BucketLost(f"{self.endpoint} gave no clear answer to {operation}: {code} {words}") from None
            region = str(told.get("Region") or _headers(error.response).get("x-amz-bucket-region") or "")
            raise explain_s3_refusal(operation, code, words, region, key, self.address, self.endpoint) from None
        name = type(error).__name__
        if "Credential" in name or name in ("ProfileNotFound", "TokenRetrievalError", "SSOTokenLoadError"):
            hint = "Run `aws configure` or `aws sso login`, or set AWS_PROFILE; then `gpurun doctor`."
            raise SetupError("auth.aws", f"The AWS SDK finds no usable credentials: {error}.", hint=hint) from None
        if "Invalid" in name or name == "ParamValidationError" or isinstance(error, ValueError):
            what = f"{self.address} cannot be asked for: {name}."
            raise SetupError("stage.address", what, hint="See to --stage and AWS_ENDPOINT_URL_S3.") from None
        raise BucketLost(f"{self.address} gave no answer to {operation}: {name}.") from None

    def _client(self) -> Any:
        session = self._session.keyed()
        with self._lock:  # Making one is not safe for threads; using one is.
            if self._made is None or self._made_of is not session:
                from botocore.config import Config  # type: ignore[import-untyped]

                # Checksums only where S3 wants them: not everything that speaks like S3 knows the new ones.
                connect_s, read_s, tries = self._waits
                config = Config(
                    connect_timeout=connect_s,
                    read_timeout=read_s,
                    retries={"mode": "standard", "total_max_attempts": tries},
                    signature_version="s3v4",
                    max_pool_connections=16,
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    user_agent_extra=f"gpurun/{__version__}",
                )
                region = self._region or session.region_name or FALLBACK_REGION
                self._made, self._made_of = session.client("s3", region_name=region, config=config), session
            return self._made


def _headers(answer: Any) -> dict[str, str]:
    found: dict[str, str] = answer.get("ResponseMetadata", {}).get("HTTPHeaders") or {}
    return found


def _is_archived(answer: Any) -> bool:
    """Whether an object cannot be read before somebody has it restored: a rule of the bucket may move it so far."""
    is_away = answer.get("StorageClass") in ("GLACIER", "DEEP_ARCHIVE") or bool(answer.get("ArchiveStatus"))
    return is_away and 'ongoing-request="false"' not in str(answer.get("Restore"))


def _tag(answer: Any) -> str:
    return str((answer or {}).get("ETag") or "").strip('"')
