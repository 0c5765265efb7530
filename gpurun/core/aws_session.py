"""boto3's credentials with a time limit, for every request to AWS.

To get credentials, the SDK may run a program (`credential_process`) or ask a server, at any request and without a time
limit. If that hung, the supervisor would wait, and could not destroy its machine at the deadline.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from gpurun.core.background_call import Background
from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError

LIMIT_S = 20.0
AGAIN_S = 60.0
"""The pause after a lookup of credentials that hung, because each lookup may leave a hanging program behind."""


class AwsSession:
    """A boto3 session with the user's own AWS settings, which several threads may use."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._boto: Any = None
        self._asking: Background[Any] | None = None
        self._hung: tuple[float, SetupError] | None = None

    def boto(self) -> Any:
        """Return the boto3 session, whose credentials are not looked up yet; raise what the SDK raises."""
        with self._lock:
            if self._boto is None:
                import boto3  # type: ignore[import-untyped]

                self._boto = boto3.session.Session()
            return self._boto

    def keyed(self) -> Any:
        """Return the boto3 session after it has looked up its credentials; it may have found none.

        Raise SetupError if the lookup takes longer than LIMIT_S, and at once for AGAIN_S after that; the next lookup
        uses a new session. Otherwise raise what the SDK raises.
        """
        with self._lock:
            if self._hung is not None and self._clock.monotonic() < self._hung[0]:
                raise self._hung[1]
            if self._asking is None or self._asking.wait(0.0):
                self._asking = Background(self._load_credentials)
            asking = self._asking
        if asking.wait(LIMIT_S):
            return asking.result()
        with self._lock:
            error = _hanging_error(self._boto)
            if self._asking is asking:  # The hanging thread holds locks of this session.
                self._asking = self._boto = None
                self._hung = self._clock.monotonic() + AGAIN_S, error
        raise error

    def _load_credentials(self) -> Any:
        boto = self.boto()
        found = boto.get_credentials()
        if found is not None:
            found.get_frozen_credentials()
        return boto


def _hanging_error(boto: Any) -> SetupError:
    """Return the error for credentials that do not arrive; it names their profile, and the program if there is one."""
    profile, program = str(getattr(boto, "profile_name", None) or "default"), ""
    with suppress(Exception):  # An error while looking for the program must not hide the real problem.
        settings = boto._session.full_config.get("profiles", {}).get(profile, {})
        program = str(settings.get("credential_process") or "").partition(" ")[0]
    where = f"the profile {profile}" + (f", whose credential_process is {program}" if program else "")
    return SetupError(
        "auth.aws",
        f"The AWS SDK found no credentials within {LIMIT_S:.0f} s: {where} does not answer.",
        hint="Check that the profile works (aws sts get-caller-identity), or set AWS_PROFILE to another.",
    )
