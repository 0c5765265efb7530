"""What S3's refusals mean, in gpurun's terms: each with what is missing by its name, and what to do."""

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
"""What a key must be allowed for each operation."""

SKEWED = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture", "RequestExpired"})
PASSING = frozenset({"RequestTimeout", "IncompleteBody", "TooManyRequests", "SlowDown", "408", "429", "NoSuchUpload"})
"""A line that is slow or broke in the middle, too much at once, or an upload that somebody ended, which is begun again:
refused with a status of the asker's own fault."""
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
_ALLOW = "Allow your key s3:ListBucket on {bucket}, and s3:GetObject and s3:PutObject on what is below {place}/."
_MISSING = re.compile(r"not authorized to perform: (s3:\w+)")


class BucketLost(GpurunError):
    """The bucket did not answer; what was asked may be asked again."""

    exit_code = SetupError.exit_code

    def __init__(self, what: str) -> None:
        hint = "See to the line, or to AWS_ENDPOINT_URL_S3; then the same command goes on where this stopped."
        super().__init__("stage.unreachable", what, hint=hint)


def explain_s3_refusal(
    operation: str, code: str, words: str, region: str, key: str, place: BucketAddress, endpoint: str
) -> SetupError:
    """What a refusal of S3 means; `region` is the bucket's own as far as S3 told it, `key` the object's name."""
    said, told = words.rstrip("."), f"{endpoint} said {code}"
    if code in _NO_BUCKET:
        what = f"There is no bucket {place.bucket} at {endpoint}."
        return SetupError("stage.no_bucket", what, hint=f"Make it (aws s3 mb s3://{place.bucket}), or name another.")
    if code in _DENIED:
        named = _MISSING.search(words)
        action = named[1] if named else ACTIONS.get(operation, f"s3:{operation}")
        where = f"s3://{place.bucket}/{key}" if key else str(place)
        what = f"Your key may not {action} on {where} ({told}: {said})."
        return SetupError("stage.denied", what, hint=_ALLOW.format(place=place, bucket=place.bucket))
    if code in _ELSEWHERE:
        right = region or "another region, which S3 does not name"
        what = f"The bucket {place.bucket} is in {right}, and {endpoint} does not serve it ({told})."
        hint = f"Set AWS_DEFAULT_REGION={region}." if region else "Set AWS_DEFAULT_REGION to the bucket's own region."
        return SetupError("stage.wrong_region", what, hint=hint)
    if code in UNKNOWN_KEY:
        hint = "Run `aws configure` or `aws sso login`, or set AWS_PROFILE; for another service, the keys that it gave."
        return SetupError("stage.key", f"{endpoint} does not take your key ({code}: {said}).", hint=hint)
    if code in _FULL:
        hint = "Remove what is no longer needed there, or name another bucket."
        return SetupError("stage.full", f"There is no room left in {place.bucket} ({told}: {said}).", hint=hint)
    what = f"{place} could not be used: {operation} was refused ({told}: {said})."
    return SetupError("stage.refused", what, hint="Try without --stage: what is staged goes over SSH then.")


def skewed(ahead_s: float | None, endpoint: str) -> SetupError:
    """The clocks differ by more than S3 takes (AWS: 15 minutes); None where S3 did not tell its time."""
    what = f"{endpoint} refuses requests by this machine's clock"
    if ahead_s is not None:
        what += f", which is {abs(ahead_s) / 60:.0f} min {'ahead of' if ahead_s > 0 else 'behind'} its own"
    return SetupError("stage.clock", f"{what}.", hint="Set this machine's clock: timedatectl set-ntp true.")
