"""The bucket that shards go by, as a plan has it."""

from __future__ import annotations

from urllib.parse import urlsplit

from gpurun.core.places import AWS, place_facts
from gpurun.core.records import Frozen, Offer


class StagePlan(Frozen):
    """The bucket that shards go by, and how many of the files that are worth it were there when the plan was made.

    `upload_s` is what the others take before anything is rented, `saves_s` what sending all of them to the machine from
    here would take longer; both by the rates that plans count with.
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
        """Whether AWS itself keeps the bucket, and bills what leaves its region."""
        return (urlsplit(self.endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def is_beside(self, offer: Offer) -> bool:
        """Whether machine and bucket are both AWS's and in one region, within which nothing is charged."""
        return self.is_of_aws and place_facts(offer.provider).store == AWS and offer.region == self.region
