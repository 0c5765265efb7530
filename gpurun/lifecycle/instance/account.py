"""Whose account it is: what one account rented does not exist for another, so its absence there is no death."""

from __future__ import annotations

from gpurun.core.errors import MayBeBilling, NoOffer
from gpurun.core.progress import Event, RunState
from gpurun.lifecycle.context import Context, Note
from gpurun.lifecycle.control import read_wish
from gpurun.providers.base import HasAccounts, Provider, Unknown

NAMED = "account:"
"""How the mark begins where the provider itself names its customer: nobody needs to vouch, and nobody can."""


def account_asked(provider: Provider) -> str:
    """The mark of the account that is about to be asked for a machine; "" where there are no accounts."""
    if not isinstance(provider, HasAccounts):
        return ""
    try:
        return provider.account_mark()
    except Unknown as error:
        raise NoOffer(
            "account.unknown",
            f"{provider.name} does not say whose account the key belongs to: {error}.",
            hint="Nothing was made. Try again, or another --provider.",
        ) from error


def is_other_account(provider: Provider, account: str, token: str) -> bool:
    """Whether the key used now is another account's than the one that asked; `Unknown` where neither can be told.

    Whatever bears the token here, alive or dead, shows that it is the same one, whatever became of its key.
    """
    if not account or not isinstance(provider, HasAccounts) or provider.account_mark() == account:
        return False
    return not any(one.token == token for one in provider.find(token))


def demand_account(provider: Provider, state: RunState, *, same_account: bool = False) -> None:
    """MayBeBilling where the key used now is another account's than the run's, unless the user can and does vouch."""
    is_vouched = same_account and not state.account.startswith(NAMED)
    if not is_vouched and is_other_account(provider, state.account, state.token):
        raise other_account(provider, state)


def vouched(state: RunState, context: Context) -> list[Note]:
    """Nothing, if an absence at the provider says something; what the user vouched for, if only that makes it so.

    `Unknown` or SetupError when the provider does not say so now; MayBeBilling when the key is another account's and
    nobody vouches for it. Asked beside a request for a machine's end, never before it: silence here costs no money.
    """
    provider = context.provider
    if not is_other_account(provider, state.account, state.token):
        return []
    wish = read_wish(context.folder)
    if wish is not None and wish.same_account and not state.account.startswith(NAMED):
        message = f"the key of {provider.name} is a new one; the user vouches that it is of the same account"
        return [(Event.INCIDENT, {"code": "account.vouched", "message": message})]
    raise other_account(provider, state)


def other_account(provider: Provider, state: RunState) -> MayBeBilling:
    """The error of a run that is finished under another account's key."""
    hint = "Use the key of the account that rented it"
    if not state.account.startswith(NAMED):
        hint += f"; if it is the same account with a new key: gpurun destroy {state.run} --same-account"
    return MayBeBilling(
        "account.other",
        f"{state.token} was rented with another key of {provider.name} than the one used now, to which it does not "
        "exist: that proves nothing.",
        hint=f"{hint}. By hand: {provider.traits.console_url}.",
    )
