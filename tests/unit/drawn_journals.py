"""Random journals with everything that affects cost. Their clocks count microseconds and are sometimes set back."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from gpurun.core.journal_records import Event
from gpurun.core.receipt_rules import RULES
from gpurun.core.records import digest_json

Json = dict[str, Any]
_GAPS_S = (0.0, 0.000001, 0.0005, 0.4, 1.0, 15.0, 119.9995, 120.0, 300.0, 7200.0)
_LIFE = (Event.READY_OBSERVED, Event.SHIP_OBSERVED, Event.TRAIN_STARTED, Event.RATE_OBSERVED, Event.TRAIN_OBSERVED)


class DrawnJournal:
    """A random journal of one to three rentals; `records` are its lines, parsed."""

    def __init__(self, seed: int, rules: int = RULES) -> None:
        self.dice = Random(seed)
        self.wall, self.mono, self.boot = 1_795_000_000.0 + self.dice.random() * 1e6, self.dice.random() * 1e5, "a"
        self.records: list[Json] = []
        self.billed = False
        cap = self.dice.choice((None, 100_000, 1_000_000, 5_000_000, 50_000_000))
        self.add(Event.RUN_OPENED, {
            "run": "fox-41", "home": "4f0c11", "mode": "paid", "recipe": "tiny", "form": "full", "provider": "runpod",
            "endpoint": "", "challenge": "", "rules": rules, "gpurun_version": "0.1.0", "cap_micros": cap,
            "worst_micros": 1,
            **{f"{name}_sha256": "0" * 64 for name in ("recipe", "request", "plan", "data", "bundle")},
        })  # fmt: skip
        rentals = self.dice.choice((1, 1, 1, 2, 3))
        for attempt in range(1, rentals + 1):
            self.rent(attempt, may_stay_open=attempt == rentals)

    def add(self, event: Event, data: Json) -> None:
        """Append a record after a random gap.

        The wall clock may be set, and a reboot may restart the monotonic clock.
        """
        gap_s = self.dice.choice(_GAPS_S) * self.dice.choice((1.0, self.dice.random()))
        self.wall, self.mono = self.wall + gap_s, self.mono + gap_s
        if self.dice.random() < 0.06:
            self.wall += self.dice.choice((-3600.0, -1.5, 0.25, 900.0)) * self.dice.random()
        if self.dice.random() < 0.04:
            self.boot, self.mono = f"{self.boot}b", self.dice.random() * 100
        clocks = {"wall": round(self.wall, 6), "mono": round(self.mono, 6), "boot_id": self.boot}
        self.records.append({"seq": len(self.records) + 1, "prev": "", "event": str(event), "data": data, **clocks})

    def instance(self) -> Json:
        """Return a provider's description of the machine; its price and times may be missing."""
        fields = {"id": "i-1", "provider": "runpod", "token": self.token, "run": "fox-41", "state": "RUNNING"}
        fields |= {"address": None, "gpu": "H100", "gpu_count": 1, "deadline_wall": None, "region": "EU"}
        fields |= {"rate_micros_per_hour": self.dice.choice((None, self.rate, self.rate, self.rate + 17))}
        fields |= {"created_wall": self.dice.choice((None, float(int(self.wall)), self.wall - self.dice.random() * 9))}
        if self.is_queued and self.dice.random() < 0.7:
            fields["started_wall"] = self.dice.choice((float(int(self.wall)), self.wall - self.dice.random() * 400))
        return fields

    def rent(self, attempt: int, *, may_stay_open: bool) -> None:
        """Order a machine, then add events until it is refused, gone, or still running."""
        dice = self.dice
        self.token, self.rate = f"gpr-fox-41-{attempt}", dice.choice((1, 2_490_000, 3_333_333, 23_920_000))
        self.is_queued = dice.random() < 0.25
        lease = dict.fromkeys(("boot_s", "ship_s", "train_s", "collect_s", "destroy_s"), dice.choice((60, 600)))
        lease |= {"kill_allowance_s": 60} | ({"queue_s": 3600} if self.is_queued else {})
        offer = {"provider": "runpod", "type_id": "x", "gpu": "H100", "gpu_count": dice.choice((0, 1, 8)), "region": ""}
        self.add(Event.CREATE_INTENDED, {
            "attempt": attempt, "token": self.token, "provider": "runpod", "offer": offer, "lease": lease,
            "rate_micros_per_hour": self.rate, "billing_unit_s": dice.choice((1, 1, 60, 3600)), "worst_micros": 1,
            "deadline_wall": self.wall + dice.choice((300.0, 3000.0)) + dice.random(),
            **dice.choice(({}, {"least_billed_s": 60, "beside_micros_per_hour": 12_345, "egress_micros": 98_765})),
            **dice.choice(({}, {"sends_itself": True})),
        })  # fmt: skip
        if dice.random() < 0.1:
            self.add(Event.CREATE_REFUSED, {"token": self.token, "reason": "no_capacity", "message": ""})
            return
        if dice.random() < 0.1:
            self.add(Event.CREATE_UNKNOWN, {"token": self.token, "message": ""})
        else:
            self.add(Event.CREATE_OBSERVED, {"token": self.token, "instance": self.instance()})
            self.live()
        if may_stay_open and dice.random() < 0.15:
            return
        self.end()
        for _ in range(dice.choice((0, 0, 0, 1))):
            self.happen()
        if dice.random() < 0.3:
            paid = dice.randint(0, 4 * self.rate)
            self.add(
                Event.BILL_OBSERVED, {"token": self.token, "id": "i-1", "micros": paid, "reads": 2, "spread_s": 600}
            )

    def live(self) -> None:
        """Add a working machine's events up to a random point, with random incidents between them."""
        for event in _LIFE[: self.dice.randint(0, len(_LIFE))]:
            for _ in range(self.dice.choice((0, 0, 1, 2))):
                self.happen()
            data: Json = {"manifest_sha256": "", "seconds": 1.0}
            if event is Event.READY_OBSERVED:
                data |= {"id": "i-1", "instance": self.instance(), "facts": {}}
            if event is Event.TRAIN_OBSERVED:
                outcome = self.dice.choice(("done", "done", "lost"))
                data |= {"outcome": outcome, "reason": "", "message": "", "exit_code": None}
            self.add(event, data)
        if self.dice.random() < 0.5:
            counted = self.dice.choice(({}, {"egress_micros": self.dice.randint(0, 10**6)}, {"remembered": True}))
            self.add(Event.COLLECT_OBSERVED, {"files": [], "missing": [], "latest": None, "best": None, **counted})

    def happen(self) -> None:
        """Add a random incident that affects cost, such as a new price, a second machine or a billed leftover."""
        code = self.dice.choice(("price.rose", "price.rose", "create.duplicate", "create.duplicate_gone", "create.late",
                                 "create.late_gone", "leftover", "machine.said", "machine.gone", "machine.gone",
                                 "machine.back", "death.denied"))  # fmt: skip
        incident: Json = {"code": code, "message": "", "token": self.token, "id": self.dice.choice(("x-1", "x-2"))}
        if code == "price.rose":
            incident |= {"rate_micros_per_hour": self.dice.choice((self.rate // 2, self.rate + 5, 2 * self.rate))}
            incident |= {"since_wall": self.wall - self.dice.choice((-5.0, 0.0, 700.0)) * self.dice.random()}
        if code == "machine.gone":
            incident["gone_s_ago"] = round(self.dice.choice((0.0, 40.0, 900.0)) * self.dice.random(), 3)
        if code == "create.duplicate" and self.dice.random() < 0.2:
            incident.pop("id")
        if code == "leftover":
            incident["billed"] = self.dice.random() < 0.05
        self.add(Event.INCIDENT, incident)

    def end(self) -> None:
        """Request the machine's end once or twice, and add readings that find it gone."""
        dice = self.dice
        for _ in range(dice.choice((1, 1, 1, 2))):
            intent = {"id": "i-1", "token": self.token, "reason": "done", "timer": dice.random() < 0.6}
            self.add(Event.DESTROY_INTENDED, intent)
            self.add(Event.DESTROY_ASKED, {"id": "i-1", "attempt": 1, "answer": "asked"})
        for read in self.reads(dice.choice((3, 3, 4))):
            self.add(Event.DEATH_READ, read)
            if dice.random() < 0.05:
                self.happen()
        claim = {"id": "i-1", "teardown": "destroyed", "reads": 3, "spread_s": 30.0, "evidence_sha256": digest_json(0)}
        self.add(Event.DEATH_PROVEN, claim)

    def reads(self, count: int) -> Iterator[Json]:
        """Yield readings that find the machine gone, with random times of its end and of when it was last seen."""
        dice = self.dice
        ended = dice.choice((None, None, float(int(self.wall)), self.wall - 3000 * dice.random()))
        ran = dice.choice((None, 0, 0.0, 77, 1234.5678)) if self.is_queued else None
        for place in range(count):
            alive_s, up_s, gone_s = (
                dice.choice((None, round(dice.choice((0.1, 60.0, 119.9, 4000.0)) * dice.random(), 3))) for _ in range(3)
            )
            yield {
                "id": "i-1", "at_s": 15.0 * place, "state": "GONE", "listed": False, "answer_sha256": "",
                "ended_wall": ended, "ran_s": ran, "alive_s_ago": alive_s, "up_s_ago": up_s,
                "gone_s_ago": gone_s,
            }  # fmt: skip
