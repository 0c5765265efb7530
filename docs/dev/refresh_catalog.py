"""Updates the packaged catalogue's prices for every cloud with a key, and shows what changed.

  make catalog        then check the difference, and commit it

A row keeps its place, its GPU and its comment; one that is not on offer now keeps its price and its source.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from difflib import unified_diff
from pathlib import Path

from gpurun.core.clock import SystemClock, utc
from gpurun.core.paths import Home, default_home
from gpurun.core.records import GpuNeed, Offer
from gpurun.core.run_plan import Choices
from gpurun.planning.live_offers import live_offers
from gpurun.providers import catalog
from gpurun.providers.registry import CLOUDS, ready_providers

TABLE = Path(catalog.__file__).with_name("catalog.toml")
_ROW = re.compile(r'  \["(\w+)", "([^"]+)", "[^"]+", (\d+), \d+, "([\d.]+)", "([^"]+)", "(\w+)"\],')


def refreshed(table: str, offers: Iterable[Offer], date: str) -> str:
    """Return the table with the lowest price of these offers for each row, and the day on which they were read."""
    prices: dict[tuple[str, str, int, str], int] = {}
    for offer in offers:
        for place in (offer.region, offer.place, "any"):
            key = (offer.provider, offer.type_id, offer.gpu_count, place)
            prices[key] = min(offer.rate_micros_per_hour, prices.get(key, offer.rate_micros_per_hour))

    def row(found: re.Match[str]) -> str:
        provider, type_id, count, before, place, source = found.groups()
        micros = prices.get((provider, type_id, int(count), place))
        if micros is None:
            return found[0]
        dollars = f"{micros / 1e6:.6f}".rstrip("0").rstrip(".")
        return found[0].replace(f'"{before}", "{place}", "{source}"', f'"{dollars}", "{place}", "LIVE"')

    table = _ROW.sub(row, re.sub(r'^date = ".*"$', f'date = "{date}"', table, count=1, flags=re.MULTILINE))
    table = re.sub(r"^LIVE = .*\n", "", table, flags=re.MULTILINE)
    return table.replace("[sources]\n", f'[sources]\nLIVE = "asked of the clouds themselves on {date}"\n', 1)


def main() -> int:
    """Request prices, write the table, and print the difference; return 4 if there is no key."""
    home, clock = Home(default_home()), SystemClock()
    names = [name for name in CLOUDS if name in ready_providers(home)]
    if not names:
        print("There is no key for any cloud; set one with gpurun auth set runpod.", file=sys.stderr)
        return 4
    needs = [GpuNeed(count=count, name="any" if count else "cpu") for count in (0, 1, 2, 4, 8)]
    markets = [live_offers(need, names, home, clock, Choices()) for need in needs]
    for name, why in sorted({item for market in markets for item in market.silent}):
        print(f"{name} could not be reached: {why}", file=sys.stderr)
    before = TABLE.read_text(encoding="utf-8")
    after = refreshed(before, (item for market in markets for item in market.offers), utc(clock.wall())[:10])
    TABLE.write_text(after, encoding="utf-8")
    sys.stdout.writelines(unified_diff(before.splitlines(True), after.splitlines(True), "before", "now", n=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
