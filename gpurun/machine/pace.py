"""How many lanes a transfer uses: as many as a long way needs; not more, as a cut costs what is under way on each."""

from __future__ import annotations

MOST_LANES = 8
# What OpenSSH lets one program be sent before it has taken it in: so much is carried in a round trip, and no more.
WINDOW_BYTES = 2 << 20
# On a way as short as this two lanes are enough, whatever it carries: they keep two cores busy.
SHORT_S = 0.01
LOOK_S = 0.25
# Until a program runs, a server's kernel may keep an answer back for so long: a way that seems no longer may be short.
DELAYED_ANSWER_S = 0.04
# Lanes that carry this part of what they could are held back by their windows, not by the line.
FULL = 0.5
# A new lane carries nothing before its login and its program stand, some eight round trips; as long again it is worth.
WORTH_ROUND_TRIPS = 16


class Pace:
    """Looks at what was sent, and says how many lanes there should be."""

    def __init__(self, round_trip_s: float) -> None:
        self._round_trip_s = round_trip_s
        self.lanes = 2 if round_trip_s < SHORT_S else 1
        self._sent_bytes = self.lanes * WINDOW_BYTES
        self._looked_mono: float | None = None

    def learn(self, round_trip_s: float) -> None:
        """Take in how long the way is."""
        self._round_trip_s = round_trip_s

    def look(self, sent_bytes: int, left_bytes: int, now_mono: float) -> int:
        """Take in how much was sent so far, and how much there may be left; how many lanes there should be now."""
        if self._looked_mono is None:
            self._looked_mono = now_mono
        seconds = now_mono - self._looked_mono
        if seconds < LOOK_S or self._round_trip_s < SHORT_S:
            return self.lanes
        before, carried = self.lanes, sent_bytes - self._sent_bytes
        is_full = carried > FULL * self.lanes * WINDOW_BYTES * seconds / self._round_trip_s
        if is_full and left_bytes > carried / seconds * WORTH_ROUND_TRIPS * self._round_trip_s:
            self.lanes = min(MOST_LANES, 2 * self.lanes + 1)
        # A lane's first window is filled at once, however slow the line is: that tells nothing.
        self._sent_bytes = max(self._sent_bytes, sent_bytes) + (self.lanes - before) * WINDOW_BYTES
        self._looked_mono = now_mono
        return self.lanes


def lanes_for(round_trip_s: float) -> int:
    """How many lanes keep a way of this length busy, if the line carries that much.

    What comes home is taken in by one thread a connection: on a short way a second lane only has the digest wait.
    """
    if round_trip_s < SHORT_S + DELAYED_ANSWER_S:
        return 1
    return min(MOST_LANES, 2 + int(max(0.0, round_trip_s - DELAYED_ANSWER_S) / 0.012))
