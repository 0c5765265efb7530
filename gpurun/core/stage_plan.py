"""The bucket that shards are staged in, as recorded in a plan."""

from __future__ import annotations

from urllib.parse import urlsplit

from gpurun.core.places import AWS, place_facts
from gpurun.core.records import Frozen, Offer


class StagePlan(Frozen):
    """The bucket for staging, and how many of the files that are worth staging were there when the plan was made.

    `upload_s` is the time to upload the missing ones before anything is rented. `saves_s` is how much longer it would
    take to send all of them from here to the machine. Both use the transfer rates that plans assume.
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
        """Return whether the bucket is AWS's own, so that AWS bills what leaves its region."""
        return (urlsplit(self.endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def is_beside(self, offer: Offer) -> bool:
        """Return whether machine and bucket are both AWS's and in one region, where transfers are free."""
        return self.is_of_aws and place_facts(offer.provider).store == AWS and offer.region == self.region
