"""What EC2's refusals mean: which certainly made nothing, which leave a doubt, which are about the key or a quota."""

from __future__ import annotations

from gpurun.core.errors import SetupError
from gpurun.providers.aws.wire import Refused
from gpurun.providers.base import NoCapacity, Rejected, Unknown

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
     "MissingAuthenticationToken"}
)  # fmt: skip
ACCOUNT = frozenset(
    {"OptInRequired", "Blocked", "PendingVerification", "SubscriptionRequiredException",
     "AuthFailure.ServiceLinkedRoleCreationNotPermitted"}
)  # fmt: skip
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


def refusal(error: Refused, type_id: str, region: str, *, spot: bool) -> NoCapacity | Rejected | Unknown:
    """What the answer to a launch says about whether there is an instance; whatever is not known leaves the doubt."""
    if error.code in NO_CAPACITY:
        return NoCapacity(str(error))
    if error.code in NO_QUOTA:
        return Rejected(f"{error}; {quota_in_words(type_id, region, spot=spot)}")
    if error.code in NOT_ALLOWED:
        return Rejected(f"these credentials may not call ec2:RunInstances in {region} ({error})")
    if error.code in NO_KEY:
        return Rejected(f"AWS refuses these credentials ({error}); `aws sts get-caller-identity` tells more")
    if error.code in ACCOUNT:
        return Rejected(f"AWS does not let this account launch in {region} yet ({error})")
    if 400 <= error.status < 500 and error.code.startswith(_WRONG):
        return Rejected(str(error))
    # The same client token with other parameters means that an earlier launch with it was accepted.
    return Unknown(str(error))


def preparing(error: Refused) -> Rejected | Unknown:
    """What a refusal before the launch means: nothing was made, unless it is AWS that is out of order."""
    if error.status >= 500:
        return Unknown(f"{error.operation}: {error}")
    if error.code in NOT_ALLOWED:
        return Rejected(f"these credentials may not call {action_of(error.operation)} ({error})")
    return Rejected(f"{error.operation}: {error}")


def trouble(error: Refused) -> SetupError | Unknown:
    """What an unexpected refusal of anything but a launch is."""
    if error.code in NOT_ALLOWED:
        what = f"These AWS credentials may not call {action_of(error.operation)} ({error})."
        return SetupError("auth.not_allowed", what, hint="`gpurun aws setup` shows the policy that gpurun needs.")
    if error.code in NO_KEY | ACCOUNT:
        hint = "Renew them: `aws configure`, `aws sso login` or AWS_PROFILE; then `gpurun doctor`."
        return SetupError("auth.refused", f"AWS refuses these credentials ({error}).", hint=hint)
    return Unknown(f"{error.operation}: {error}")


def action_of(operation: str) -> str:
    """`run_instances` as IAM writes it; the services that are not EC2 are few."""
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
    """Which quota limits a machine type, and where it can be raised."""
    family = type_id.partition(".")[0].upper()
    kind = "P5" if spot and family.startswith("P5") else "P" if family.startswith("P") else ""
    kind = "G" if family.startswith(("G", "VT")) else kind
    code, name = _QUOTAS[kind, spot]
    link = f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/{code}"
    return f'the quota is "{name}" ({code}), counted in vCPUs; raise it at {link}'
