"""Access to a bucket: every exchange with S3 or a compatible service. Replies are checked, refusals explained.

boto3 finds the key in its usual way (environment, profile; AWS_ENDPOINT_URL_S3 for another service).
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
from gpurun.remote.s3.s3_errors import PASSING, SKEWED, UNKNOWN_KEY, BucketLost, explain_s3_refusal, skewed_clock_error

MOST_SIGNED_S = 7 * 24 * 3600
"""The limit for a presigned URL (SigV4). The URL also ends with the credentials that signed it."""
FALLBACK_REGION = "us-east-1"
# Seconds to connect, seconds without a reply, tries: while nothing is billed, and while a machine is.
PATIENT, BRISK = (5, 60, 4), (3, 5, 2)
_BLOCK_BYTES = 1 << 20
_ABSENT = frozenset({"NoSuchKey", "404", "NotFound", "NoSuchUpload"})
# Operations on objects that may be missing. If an upload is finished a second time, the first time counts.
_MAY_LACK = frozenset({"get_object", "head_object", "delete_object", "list_parts", "complete_multipart_upload"})


@dataclass(frozen=True)
class Head:
    """An object's size, and the tag that changes with its content."""

    bytes: int
    etag: str


class Bucket:
    """One bucket, for use by several threads. Each method may raise SetupError or BucketLost.

    `is_paid` means that a billed machine is waiting for the reply, so each call gives up soon.
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
        """Return the address of the service."""
        return str(self._client().meta.endpoint_url)

    @property
    def has_session(self) -> bool:
        """Return whether the key belongs to a session. When the session ends, all URLs signed with the key expire."""
        self._client()
        try:
            found = self._session.keyed().get_credentials()
            return bool(found and found.get_frozen_credentials().token)
        except Exception as error:  # noqa: BLE001 - any error of the SDK is translated
            self._raise_as_own_error(error, "get_object", "")

    @property
    def region(self) -> str:
        """Return the bucket's own region, once `look` has found it; until then the configured one."""
        return self._region or str(self._client().meta.region_name)

    def look(self) -> None:
        """Check that the bucket exists and may be read. Find its region."""
        answer = self._call("list_objects_v2", "", Prefix=self.address.key(), MaxKeys=1)
        if answer.keys().isdisjoint(("Name", "KeyCount", "IsTruncated")):
            what = f"{self.endpoint} answers, but not like S3."
            raise SetupError(
                "stage.refused",
                what,
                hint="Check AWS_ENDPOINT_URL_S3: it must have the port of the S3 API, not of a web console.",
            )
        region = _read_headers(answer).get("x-amz-bucket-region", "")
        if region and region != self._client().meta.region_name:
            self._region = region  # Presigned URLs must be for the bucket's own region.
            self._made = None

    def get(self, key: str, most_bytes: int) -> bytes | None:
        """Return a small object's content; None if it is missing or larger than `most_bytes`."""
        answer = self._call("get_object", key, Key=key)
        if answer is None:
            return None
        with answer["Body"] as body:
            content: bytes = self._read(body, most_bytes + 1)
        return content if len(content) <= most_bytes else None

    def stream(self, key: str, offset: int, size: int) -> Iterator[bytes]:
        """Yield a range of an object as it arrives; nothing if the object is missing."""
        answer = self._call("get_object", key, Key=key, Range=f"bytes={offset}-{offset + size - 1}")
        if answer is None:
            return
        with answer["Body"] as body:
            while block := self._read(body, _BLOCK_BYTES):
                yield block

    def below(self) -> dict[str, int]:
        """Return the size in bytes of each object below the prefix, by its name without the prefix."""
        prefix = f"{self.address.key()}/".lstrip("/")
        found = dict[str, int]()
        after = dict[str, str]()
        while True:
            answer = self._call("list_objects_v2", "", Prefix=prefix, **after)
            for entry in answer.get("Contents") or ():
                found[str(entry["Key"]).removeprefix(prefix)] = int(entry["Size"])
            if not answer.get("IsTruncated"):
                return found
            after = {"ContinuationToken": answer["NextContinuationToken"]}

    def head(self, key: str) -> Head | None:
        """Return an object's size and tag; None if it is missing or archived (reading it would take hours)."""
        answer = self._call("head_object", key, Key=key)
        return None if answer is None or _is_archived(answer) else Head(int(answer["ContentLength"]), _read_tag(answer))

    def put(self, key: str, content: bytes) -> str:
        """Write a whole object, and return its tag."""
        return _read_tag(self._call("put_object", key, Key=key, Body=content))

    def drop(self, key: str) -> None:
        """Delete an object, if it exists."""
        self._call("delete_object", key, Key=key)

    def begin(self, key: str) -> str:
        """Start an object that is sent in several pieces. Return the upload's id."""
        return str(self._call("create_multipart_upload", key, Key=key)["UploadId"])

    def put_piece(self, key: str, upload: str, number: int, content: bytes) -> str:
        """Send one piece, and return its tag."""
        request = {"Key": key, "UploadId": upload, "PartNumber": number, "Body": content}
        return _read_tag(self._call("upload_part", key, **request))

    def pieces(self, key: str, upload: str) -> dict[int, str] | None:
        """Return the tags of the existing pieces, by number; None if the upload no longer exists."""
        found: dict[int, str] = {}
        after = 0
        while True:
            answer = self._call("list_parts", key, Key=key, UploadId=upload, PartNumberMarker=after)
            if answer is None:
                return None
            found |= {int(piece["PartNumber"]): str(piece["ETag"]).strip('"') for piece in answer.get("Parts") or ()}
            if not answer.get("IsTruncated"):
                return found
            after = int(answer["NextPartNumberMarker"])

    def finish(self, key: str, upload: str, tags: dict[int, str]) -> None:
        """Join all pieces into one object."""
        pieces = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(tags.items())]
        request = {"Key": key, "UploadId": upload, "MultipartUpload": {"Parts": pieces}}
        self._call("complete_multipart_upload", key, **request)

    def url_to_get(self, key: str, seconds: float) -> Secret:
        """Return a URL that lets anyone read this object for `seconds`."""
        return self._sign_url("get_object", key, seconds)

    def url_to_put(self, key: str, seconds: float) -> Secret:
        """Return a URL that lets anyone write this object for `seconds`, any number of times."""
        return self._sign_url("put_object", key, seconds)

    def _sign_url(self, operation: str, key: str, seconds: float) -> Secret:
        request = {"Bucket": self.address.bucket, "Key": key}
        lives_s = int(max(1, min(seconds, MOST_SIGNED_S)))
        try:
            return Secret(self._client().generate_presigned_url(operation, Params=request, ExpiresIn=lives_s))
        except Exception as error:  # noqa: BLE001 - any error of the SDK is translated
            self._raise_as_own_error(error, operation, key)

    def _call(self, operation: str, key: str, **arguments: Any) -> Any:
        """Make one exchange; return None for an object that is missing."""
        is_change = operation.startswith(("put", "upload", "create", "complete"))
        if is_change:
            crashpoint(f"before s3.{operation}")
        for is_last in (False, True):
            try:
                answer = getattr(self._client(), operation)(Bucket=self.address.bucket, **arguments)
                if is_change:
                    crashpoint(f"after s3.{operation}")
                return answer
            except Exception as error:  # noqa: BLE001 - as above
                response = getattr(error, "response", None) or {}
                code = str(response.get("Error", {}).get("Code", ""))
                if code in _ABSENT and operation in _MAY_LACK:
                    return None
                if code in SKEWED and is_last:
                    raise skewed_clock_error(self._compute_ahead_s(response), self.endpoint) from None
                if code in SKEWED | UNKNOWN_KEY and not is_last:
                    # The key may have been renewed, or this computer may have slept after signing.
                    self._session = AwsSession(self._clock)
                    continue
                self._raise_as_own_error(error, operation, key)
        raise AssertionError("not reached")

    def _read(self, body: Any, most: int) -> bytes:
        try:
            return bytes(body.read(most))
        except Exception as error:  # noqa: BLE001 - as above
            self._raise_as_own_error(error, "get_object", "")

    def _compute_ahead_s(self, answer: Any) -> float | None:
        """Return how far this computer's clock is ahead of the reply's date; None if the reply has no date."""
        try:
            return self._clock.wall() - parsedate_to_datetime(_read_headers(answer).get("date", "")).timestamp()
        except (ValueError, TypeError, OverflowError):
            return None

    def _raise_as_own_error(self, error: Exception, operation: str, key: str) -> NoReturn:
        """Raise the SDK's error as one of gpurun's errors."""
        from botocore.exceptions import ClientError  # type: ignore[import-untyped]

        if isinstance(error, SetupError | BucketLost):
            raise error
        if isinstance(error, ClientError):
            details = error.response.get("Error", {})
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
            code = str(details.get("Code") or status)
            words = " ".join(str(details.get("Message") or "").split())[:300]
            if (status >= 500 and status != 507) or code in PASSING:
                raise BucketLost(f"{self.endpoint} gave no clear answer to {operation}: {code} {words}") from None
            region = str(details.get("Region") or _read_headers(error.response).get("x-amz-bucket-region") or "")
            raise explain_s3_refusal(operation, code, words, region, key, self.address, self.endpoint) from None
        name = type(error).__name__
        if "Credential" in name or name in ("ProfileNotFound", "TokenRetrievalError", "SSOTokenLoadError"):
            hint = "Run `aws configure` or `aws sso login`, or set AWS_PROFILE; then `gpurun doctor`."
            raise SetupError("auth.aws", f"The AWS SDK finds no usable credentials: {error}.", hint=hint) from None
        if "Invalid" in name or name == "ParamValidationError" or isinstance(error, ValueError):
            what = f"{self.address} is not a valid address: {name}."
            raise SetupError("stage.address", what, hint="Check --stage and AWS_ENDPOINT_URL_S3.") from None
        raise BucketLost(f"{self.address} gave no answer to {operation}: {name}.") from None

    def _client(self) -> Any:
        session = self._session.keyed()
        with self._lock:  # Creating a client is not thread-safe; using one is.
            if self._made is None or self._made_of is not session:
                from botocore.config import Config  # type: ignore[import-untyped]

                # Checksums are sent only if S3 requires them: some compatible services do not know the new ones.
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


def _read_headers(answer: Any) -> dict[str, str]:
    found: dict[str, str] = answer.get("ResponseMetadata", {}).get("HTTPHeaders") or {}
    return found


def _is_archived(answer: Any) -> bool:
    """Return whether an object must be restored before it can be read. A rule of the bucket may archive objects."""
    is_away = answer.get("StorageClass") in ("GLACIER", "DEEP_ARCHIVE") or bool(answer.get("ArchiveStatus"))
    return is_away and 'ongoing-request="false"' not in str(answer.get("Restore"))


def _read_tag(answer: Any) -> str:
    return str((answer or {}).get("ETag") or "").strip('"')
