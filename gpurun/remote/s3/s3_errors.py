"""Explains S3's refusals: what is missing, and what to do."""

from __future__ import annotations

import re

from gpurun.core.errors import GpurunError, SetupError
from gpurun.remote.s3.address import BucketAddress

ACTIONS = {
    "list_objects_v2": "s3:ListBucket",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "list_parts": "s3:ListMultipartUploadParts",
    "delete_object": "s3:DeleteObject",
}
"""The permission that each operation needs."""

SKEWED = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture", "RequestExpired"})
PASSING = frozenset({"RequestTimeout", "IncompleteBody", "TooManyRequests", "SlowDown", "408", "429", "NoSuchUpload"})
"""A slow or broken connection, throttling, or an upload that was aborted elsewhere and is started again.

S3 reports these as errors of the client.
"""
_NO_BUCKET = frozenset({"NoSuchBucket", "InvalidBucketName"})
_DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "AccountProblem", "403", "Forbidden", "MethodNotAllowed"})
_ELSEWHERE = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301", "307"}
)
UNKNOWN_KEY = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired",
     "InvalidSecurity", "UnauthorizedAccess"}
)  # fmt: skip
_FULL = frozenset(
    {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "507"}
)
_ALLOW = "Allow your key s3:ListBucket on {bucket}, and s3:GetObject and s3:PutObject below {place}/."
_MISSING = re.compile(r"not authorized to perform: (s3:\w+)")


class BucketLost(GpurunError):
    """The bucket did not reply. The request may be repeated."""

    exit_code = SetupError.exit_code

    def __init__(self, what: str) -> None:
        hint = "Check the connection, or AWS_ENDPOINT_URL_S3; then the same command resumes."
        super().__init__("stage.unreachable", what, hint=hint)


def explain_s3_refusal(
    operation: str, code: str, words: str, region: str, key: str, place: BucketAddress, endpoint: str
) -> SetupError:
    """Return the error for a refusal of S3.

    `region` is the bucket's own if S3 reported it, `key` is the object's name.
    """
    message, status = words.rstrip("."), f"{endpoint} said {code}"
    if code in _NO_BUCKET:
        what = f"There is no bucket {place.bucket} at {endpoint}."
        return SetupError("stage.no_bucket", what, hint=f"Create it (aws s3 mb s3://{place.bucket}), or name another.")
    if code in _DENIED:
        named = _MISSING.search(words)
        action = named[1] if named else ACTIONS.get(operation, f"s3:{operation}")
        where = f"s3://{place.bucket}/{key}" if key else str(place)
        what = f"Your key may not {action} on {where} ({status}: {message})."
        return SetupError("stage.denied", what, hint=_ALLOW.format(place=place, bucket=place.bucket))
    if code in _ELSEWHERE:
        right = region or "another region, which S3 did not name"
        what = f"The bucket {place.bucket} is in {right}, and {endpoint} does not serve it ({status})."
        hint = f"Set AWS_DEFAULT_REGION={region}." if region else "Set AWS_DEFAULT_REGION to the bucket's own region."
        return SetupError("stage.wrong_region", what, hint=hint)
    if code in UNKNOWN_KEY:
        hint = "Run `aws configure` or `aws sso login`, or set AWS_PROFILE; another service has its own keys."
        return SetupError("stage.key", f"{endpoint} does not accept your key ({code}: {message}).", hint=hint)
    if code in _FULL:
        hint = "Remove what is no longer needed there, or name another bucket."
        return SetupError("stage.full", f"There is no room left in {place.bucket} ({status}: {message}).", hint=hint)
    what = f"{place} could not be used: {operation} was refused ({status}: {message})."
    return SetupError("stage.refused", what, hint="Try without --stage: then the files go over SSH.")


def skewed_clock_error(ahead_s: float | None, endpoint: str) -> SetupError:
    """Return the error for clocks that differ by more than S3 allows (AWS: 15 minutes).

    `ahead_s` is None if S3 sent no time.
    """
    what = f"{endpoint} refuses requests because of this machine's clock"
    if ahead_s is not None:
        what += f", which is {abs(ahead_s) / 60:.0f} min {'ahead of' if ahead_s > 0 else 'behind'} its own"
    return SetupError("stage.clock", f"{what}.", hint="Set this machine's clock: timedatectl set-ntp true.")
