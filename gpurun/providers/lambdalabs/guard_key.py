"""Checks the key with which a machine ends itself, before a plan or a launch relies on that key."""

from __future__ import annotations

from gpurun.core.clock import Clock
from gpurun.core.errors import SetupError
from gpurun.core.secrets import Secret
from gpurun.providers._http import Http
from gpurun.providers.errors import RejectedFor, bad_key
from gpurun.providers.lambdalabs import ssh_keys

_HINT = "Give another key: gpurun auth set lambda-guard."


class GuardKey:
    """The key that the guard on a machine uses.

    `http` sends requests with this key. It is None if the key is the user's own, because any request checks that key.
    """

    def __init__(self, secret: Secret, http: Http | None, clock: Clock, pause_s: float) -> None:
        self.secret = secret
        self._http = http
        self._clock = clock
        self._pause_s = pause_s

    @property
    def is_own(self) -> bool:
        """Return whether the guard's key is a different one from the user's."""
        return self._http is not None

    def require_accepted(self) -> None:
        """Raise SetupError if Lambda refuses the key: the machine could not end itself, without any sign of that."""
        if self._http is not None:
            self._list_ssh_keys(self._http)

    def require_same_account(self, key_name: str) -> None:
        """Raise RejectedFor if the key cannot list the new SSH key, because it could not list the machine either."""
        if self._http is None:
            return
        try:
            is_visible = key_name in self._list_ssh_keys(self._http)
        except SetupError as error:
            raise RejectedFor(error) from error
        if not is_visible:
            what = "The key for --lambda-guard belongs to another account, so it could not end the machine."
            raise RejectedFor(bad_key(what, hint=_HINT))

    def _list_ssh_keys(self, http: Http) -> list[str]:
        """Return the names of the SSH keys that this key can list. Wait first: both keys share one rate limit."""
        self._clock.sleep(self._pause_s)
        try:
            return ssh_keys.list_key_names(http)
        except SetupError as error:
            raise SetupError(error.code, f"The key for --lambda-guard fails. {error.what}", hint=_HINT) from error
        finally:
            self._clock.sleep(self._pause_s)
