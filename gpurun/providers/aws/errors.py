"""Interprets AWS's error codes: whether an instance may exist, and whether key, account or quota is the reason."""

from __future__ import annotations

from gpurun.core.errors import SetupError
from gpurun.providers.aws.wire import AwsRefused
from gpurun.providers.base import NoCapacity, Rejected, Unknown
from gpurun.providers.errors import RejectedFor, bad_key, no_quota, not_allowed, not_ready

NO_CAPACITY = frozenset(
    {"InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientReservedInstanceCapacity",
     "InsufficientCapacity", "UnfulfillableCapacity", "SpotMaxPriceTooLow", "Unsupported",
     "InsufficientFreeAddressesInSubnet"}
)  # fmt: skip
NO_QUOTA = frozenset({"VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded"})
NOT_ALLOWED = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})
NO_KEY = frozenset(
    {"AuthFailure", "InvalidClientTokenId", "ExpiredToken", "ExpiredTokenException", "RequestExpired",
     "SignatureDoesNotMatch", "InvalidSignatureException", "UnrecognizedClientException", "IncompleteSignature",
     "MissingAuthenticationToken", "RequestTimeTooSkewed", "RequestInTheFuture"}
)  # fmt: skip
OFF_CLOCK = frozenset({"RequestExpired", "RequestTimeTooSkewed", "RequestInTheFuture"})
"""The codes for a wrong time in the request. EC2 uses RequestExpired for an expired session, too."""
_RENEW = "`aws configure`, `aws sso login` or AWS_PROFILE; then `gpurun doctor`."
_POLICY = "`gpurun aws setup --policy` shows the policy that gpurun needs."
_NO_SPOT_ROLE = "AuthFailure.ServiceLinkedRoleCreationNotPermitted"
_SUPPORT = "write to AWS: https://console.aws.amazon.com/support/home"
_ACCOUNT = {
    "OptInRequired": "Enable the region or the service for the account, or use another --region.",
    "SubscriptionRequiredException": "Finish signing up: https://portal.aws.amazon.com/billing/signup",
    "PendingVerification": f"AWS verifies a new account within a few hours; after a day {_SUPPORT}",
    "Blocked": f"Only AWS can unblock the account; {_SUPPORT}",
}
"""The codes for an account that cannot rent yet, and what to do about each."""
_SKEW_S = 240.0
"""AWS refuses requests if the clock is five minutes off, so a skew near that is taken as the cause."""
_WRONG = ("Invalid", "Missing", "UnknownParameter", "Malformed", "UnsupportedOperation", "OperationNotPermitted")

_QUOTAS = {
    ("P", False): ("L-417A185B", "Running On-Demand P instances"),
    ("G", False): ("L-DB2E81BA", "Running On-Demand G and VT instances"),
    ("", False): ("L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"),
    ("P5", True): ("L-C4BD4855", "All P5 Spot Instance Requests"),
    ("P", True): ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests"),
    ("G", True): ("L-3819A6DF", "All G and VT Spot Instance Requests"),
    ("", True): ("L-34B43A08", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"),
}


def judge_launch_refusal(
    error: AwsRefused, type_id: str, region: str, *, spot: bool
) -> NoCapacity | Rejected | Unknown:
    """Return the error for a refused launch; Unknown for an unrecognised code, because there may be an instance."""
    if error.code in NO_CAPACITY:
        return NoCapacity(str(error))
    if error.code in NO_QUOTA:
        what = f"The quota of this AWS account does not allow a {type_id} in {region} ({error})."
        refusal = no_quota(what, hint=f"Nothing was created; {quota_in_words(type_id, region, spot=spot)}")
        return RejectedFor(refusal, of_offer=True)  # A quota covers one region and one instance family.
    explained = _account_error(error)
    if explained is not None:
        return RejectedFor(explained)
    if 400 <= error.status < 500 and error.code.startswith(_WRONG):
        return Rejected(str(error))
    # IdempotentParameterMismatch, for example, means that an earlier launch with this client token was accepted.
    return Unknown(str(error))


def explain_early_refusal(error: AwsRefused) -> Rejected:
    """Return the error for a refusal before the launch. After a server error, another offer may be tried."""
    if error.status >= 500:
        return Rejected(f"{error.operation}: {error}", of_offer=True)
    explained = _account_error(error)
    return RejectedFor(explained) if explained else Rejected(f"{error.operation}: {error}")


def explain_refusal(error: AwsRefused) -> SetupError | Unknown:
    """Return the error for a refused request that was not part of a launch."""
    return _account_error(error) or Unknown(f"{error.operation}: {error}")


def _account_error(error: AwsRefused) -> SetupError | None:
    """Return the error if permissions, credentials, the account or this machine's clock is the reason; else None."""
    if error.code in NOT_ALLOWED:
        return not_allowed(f"These AWS credentials may not call {action_of(error.operation)} ({error}).", hint=_POLICY)
    if error.code == _NO_SPOT_ROLE:
        return not_allowed(f"These AWS credentials may not call iam:CreateServiceLinkedRole ({error}).", hint=_POLICY)
    ahead_s = error.clock_ahead_s or 0.0
    if error.code in NO_KEY and abs(ahead_s) > _SKEW_S:
        what = f"AWS refuses requests because this machine's clock is {ahead_s:+.0f} s off AWS's ({error})."
        return SetupError("clock.skewed", what, hint="Set the clock: on Linux `timedatectl set-ntp true`.")
    if error.code in OFF_CLOCK:
        what = f"AWS does not accept the time in the requests ({error})."
        hint = (
            "Set the clock (on Linux `timedatectl set-ntp true`). If it is right, a session may have expired: " + _RENEW
        )
        return SetupError("clock.skewed", what, hint=hint)
    if error.code in NO_KEY:
        return bad_key(f"AWS refuses these credentials ({error}).", hint=f"Renew them: {_RENEW}")
    if error.code in _ACCOUNT:
        return not_ready(f"AWS does not let this account rent yet ({error}).", hint=_ACCOUNT[error.code])
    return None


def action_of(operation: str) -> str:
    """Return the IAM action of an SDK operation: `ec2:RunInstances` for `run_instances`."""
    name = operation.title().replace("_", "")
    service = next((service for service, names in _SERVICES.items() if operation in names), "ec2")
    return f"{service}:{name}"


_SERVICES = {
    "ssm": ("get_parameters_by_path",),
    "pricing": ("get_products",),
    "scheduler": ("create_schedule", "delete_schedule", "list_schedules", "get_schedule"),
    "iam": ("get_role", "create_role", "put_role_policy", "update_assume_role_policy"),
    "sts": ("get_caller_identity",),
}


def quota_in_words(type_id: str, region: str, *, spot: bool) -> str:
    """Return a sentence: which quota limits a machine type, and where to request an increase."""
    family = type_id.partition(".")[0].upper()
    kind = "P5" if spot and family.startswith("P5") else "P" if family.startswith("P") else ""
    kind = "G" if family.startswith(("G", "VT")) else kind
    code, name = _QUOTAS[kind, spot]
    link = f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/{code}"
    return f'ask AWS for more of "{name}" ({code}), counted in vCPUs: {link}'
