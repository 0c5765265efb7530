"""boto3's credentials under a time limit, for all that is asked of AWS.

The SDK may run a program for them (`credential_process`) or ask a server, at any request and without an end, and the
supervisor that must destroy a machine at its deadline would wait for it.
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
"""Credentials that hung are asked for again no sooner: each try may leave a program that hangs."""


class AwsSession:
    """A boto3 session as the SDK's own settings have it. Any number of threads may use it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._boto: Any = None
        self._asking: Background[Any] | None = None
        self._hung: tuple[float, SetupError] | None = None

    def boto(self) -> Any:
        """The boto3 session; no credentials are looked for yet. It raises what the SDK does."""
        with self._lock:
            if self._boto is None:
                import boto3  # type: ignore[import-untyped]

                self._boto = boto3.session.Session()
            return self._boto

    def keyed(self) -> Any:
        """The boto3 session with credentials that are good for now, if it finds any.

        SetupError where they are not there within LIMIT_S; the session is another one after that. Else what the SDK
        raises.
        """
        with self._lock:
            if self._hung is not None and self._clock.monotonic() < self._hung[0]:
                raise self._hung[1]
            if self._asking is None or self._asking.wait(0.0):
                self._asking = Background(self._renewed)
            asking = self._asking
        if asking.wait(LIMIT_S):
            return asking.result()
        with self._lock:
            told = _hangs(self._boto)
            if self._asking is asking:  # The thread that hangs holds locks of this session.
                self._asking = self._boto = None
                self._hung = self._clock.monotonic() + AGAIN_S, told
        raise told

    def _renewed(self) -> Any:
        boto = self.boto()
        found = boto.get_credentials()
        if found is not None:
            found.get_frozen_credentials()
        return boto


def _hangs(boto: Any) -> SetupError:
    """What to do about credentials that do not come, with the profile and the program that they should come from."""
    profile, program = str(getattr(boto, "profile_name", None) or "default"), ""
    with suppress(Exception):  # The words must not stand in the way of what they are about.
        settings = boto._session.full_config.get("profiles", {}).get(profile, {})
        program = str(settings.get("credential_process") or "").partition(" ")[0]
    where = f"the profile {profile}" + (f", whose credential_process is {program}" if program else "")
    return SetupError(
        "auth.aws",
        f"The AWS SDK has found no credentials within {LIMIT_S:.0f} s: {where}, does not answer.",
        hint="Check that the profile works (aws sts get-caller-identity), or set AWS_PROFILE to another.",
    )
