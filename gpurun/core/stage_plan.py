"""The bucket in which shards are staged, as a plan records it."""

from __future__ import annotations

from urllib.parse import urlsplit

from gpurun.core.places import AWS, place_facts
from gpurun.core.records import Frozen, Offer


class StagePlan(Frozen):
    """The bucket for staging. `files` and `bytes` count the files that are worth staging.

    `there_files` and `there_bytes` count those that were in the bucket when the plan was made. `upload_s` is the time
    to upload the missing ones before anything is rented. `saves_s` is how much longer it would take to send all of them
    from this computer to the machine. Both use the transfer rates that plans assume.
    """

    url: str
    endpoint: str
    region: str
    files: int
    bytes: int
    there_files: int
    there_bytes: int
    upload_s: int
    saves_s: int

    @property
    def is_of_aws(self) -> bool:
        """Return whether the bucket is AWS's own: then AWS bills data that leaves its region."""
        return (urlsplit(self.endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def is_beside(self, offer: Offer) -> bool:
        """Return whether an offer's machine and the bucket are AWS's, in the same region: then transfers are free."""
        return self.is_of_aws and place_facts(offer.provider).store == AWS and offer.region == self.region
