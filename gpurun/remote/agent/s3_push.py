"""Pushes finished checkpoints to a bucket, so that they survive if the client sleeps and the machine ends.

gpurun/remote/s3/__init__.py describes the slots, the head and their invariants. `agent/push.json` has the presigned
URLs of the slots and the head, and the key that signs the head. All of it is secret, and nothing of it is logged.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from contextlib import suppress
from functools import partial

from gpurun.remote.agent.job_status import locate_finished, raw_name, read_finished_list
from gpurun.remote.agent.presigned import put_object
from gpurun.remote.agent.system import monotonic, path_in, read, read_part, say, stream, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Dict, Iterator, List, Optional, Set, Tuple

    from gpurun.remote.agent.system import Json

    Place = List[int]  # slot, offset in it, bytes

ORDER, STATE, PLACES = "push.json", "pushed.json", "pushed_places.json"
REST = 2
LOOK_S, AGAIN_S, MOST_AGAIN_S = 1.0, 2.0, 60.0
BLOCK_BYTES = 1 << 20
AT_ONCE = 4
# Smaller files share slots.
SMALL_BYTES = 1 << 20
# With this many slots of small files, all small files are packed again.
MOST_SMALL_SLOTS = 8
# The most important files are pushed first, and get slots first.
RANK = {"state": 0, "checkpoint": 0, "weights": 1, "optimizer": 2}
# How many seconds after the trainer's end unpushed files are still tried.
LAST_S = 1800.0


class Later(Exception):
    """A push is impossible now, and is tried again later. The message contains nothing secret."""


def begin_push(root: str) -> Pusher:
    """Start pushing in a thread. The keeper calls this if there is a bucket to push to."""
    pusher = Pusher(root)
    pusher.thread.start()
    return pusher


class Pusher:
    """Watches the manifest and pushes new files, until the trainer has ended and everything is pushed.

    `sure` has, for each file of the last head, its places. In `state`, `slots` are the slots of that head, `maybe` the
    slots of heads that may have arrived, and `left` the bytes that have been sent to slots.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.said, self.took_s = "", 0.0
        self.plan: Optional[PushPlan] = None
        self.spending = threading.Lock()
        self.state: Json = read(root, "agent", STATE) or {"seq": 0, "manifest": "", "maybe": []}
        # The places are in a separate file, which is written once per head, because they may be long.
        placed = places_noted(root)
        self.sure: Dict[str, List[Place]] = placed["sure"] if placed else self.state.pop("sure", {})
        if placed and placed["seq"] > self.state["seq"]:  # A head was sent, and the process ended right after that.
            self.state.update(seq=placed["seq"], manifest=placed["manifest"])

    def finish(self) -> None:
        """Wait for the last push once the trainer has ended: at most LAST_S, and not after a request to stop now."""
        self.over.set()
        end = monotonic() + LAST_S
        while self.thread.is_alive() and monotonic() < end:
            if (read(self.root, "agent", "stop.json") or {}).get("now"):
                return
            self.thread.join(0.2)

    def has_all(self) -> bool:
        """Return whether the last head has the current latest and best checkpoints. Other checkpoints are not needed.

        For a command without checkpoints, the head must have all outputs.
        """
        content = read_finished_list(self.root)
        if not content or hashlib.sha256(content).hexdigest() != self.state["manifest"]:
            return False
        manifest = json.loads(content)
        steps = (manifest["latest"], (manifest["best"] or {}).get("step"))
        files = manifest["files"]
        needed = [file for file in files if file["kind"] in RANK and file["step"] in steps]
        needed = files if manifest["latest"] is None else needed
        return bool(needed) and all(make_file_key(file) in self.sure for file in needed)

    def work(self) -> None:
        """Push repeatedly. Failures are retried, less and less often."""
        pause_s = AGAIN_S
        while True:
            is_last = self.over.is_set()  # This is checked first, so that the trainer's last files are seen afterwards.
            began = monotonic()
            try:
                self.push()
                self.took_s = monotonic() - began
            except Exception as error:  # noqa: BLE001 - nothing would restart this thread
                self.say("%s: %s" % (type(error).__name__, error))
                pause_s = min(MOST_AGAIN_S, 2 * pause_s)
                if is_last:
                    time.sleep(AGAIN_S)
                else:
                    self.over.wait(pause_s)
                continue
            if is_last:
                return
            pause_s = AGAIN_S
            self.over.wait(max(LOOK_S, REST * self.took_s))  # A long list must not be sent all the time.

    def say(self, what: str) -> None:
        """Write to the agent's log, once for each problem."""
        if what != self.said:
            say("push: " + what)
        self.said = what

    def push(self) -> None:
        """Push the files that are in the manifest but not in the last head, and then the new head."""
        content = read_finished_list(self.root)
        digest = hashlib.sha256(content).hexdigest()
        if not content or digest == self.state["manifest"]:
            return
        order = read(self.root, "agent", ORDER)
        if order is None:
            raise Later("there is no complete push order")
        if self.plan is None or self.plan.digest != digest:
            self.plan = PushPlan(digest, json.loads(content), order, self.state, self.sure)
        plan = self.plan
        plan.check_whole()
        if not self.is_paid_for(plan, order):
            return
        plan.send(self.root, order["slots"], self.spend)
        maybe = sorted(set(self.state["maybe"]) | plan.slots)
        # The state is saved before the head is sent: from now on these slots are not free.
        self.note(dict(self.state, maybe=maybe))
        seq = self.state["seq"] + 1
        head = {"v": 1, "seq": seq, "run": order["run"], "left_out": plan.left_out, "places": plan.places}
        body = json.dumps(dict(head, manifest=plan.manifest_of_placed), sort_keys=True).encode()
        signed = hmac.new(order["key"].encode(), body, hashlib.sha256).hexdigest().encode() + b"\n" + body
        put_object(order["head"], lambda: iter([signed]), len(signed))
        self.sure = plan.kept
        write(path_in(self.root, "agent", PLACES), {"seq": seq, "manifest": digest, "sure": self.sure})
        self.note(dict(self.state, seq=seq, manifest=digest, slots=sorted(plan.slots), maybe=[]))
        self.said = ""

    def is_paid_for(self, plan: PushPlan, order: Json) -> bool:
        """Return whether the budget allows the push. If each byte is charged, the budget is spread over the steps."""
        most = order.get("most_bytes")
        new_bytes = sum(length for _, pieces in plan.todo for _, _, length in pieces)
        if most is None or not new_bytes:
            return True
        if not self.over.is_set():
            most = (most - new_bytes) * min(1.0, (plan.manifest["latest"] or 0) / order["steps"])
        return bool(self.state.get("left", 0) + new_bytes <= most)

    def spend(self, size: int) -> None:
        """Record that `size` bytes are being sent."""
        with self.spending:
            self.note(dict(self.state, left=self.state.get("left", 0) + size))

    def note(self, state: Json) -> None:
        """Save the state across a restart of the keeper."""
        self.state = state
        write(path_in(self.root, "agent", STATE), state)


class PushPlan:
    """The place of each file of one manifest. Files of the last head stay where they are."""

    def __init__(
        self, digest: str, manifest: Json, order: Json, state: Json, sure: Dict[str, List[Place]]
    ) -> None:  # fmt: skip
        self.digest, self.manifest = digest, manifest
        self.slot_bytes: int = order["slot_bytes"]
        self.places: Dict[str, List[Place]] = {}
        self.todo: List[Tuple[int, List[Tuple[str, int, int]]]] = []
        self.left_out: List[str] = []
        taken = {slot for places in sure.values() for slot, _, _ in places}
        taken |= {*state["maybe"], *state.get("slots", ())}
        self.free = [slot for slot in range(len(order["slots"])) if slot not in taken]
        named = [entry for entry in manifest["files"] if raw_name(entry["name"])]
        # If each byte is charged, push only the newest checkpoint, in addition to what is in the bucket.
        if order.get("most_bytes") is not None and manifest["latest"] is not None:
            new = [file for file in named if file["step"] == manifest["latest"] or make_file_key(file) in sure]
            self.left_out = [file["name"] for file in named if file not in new]
            named = new
        files = sorted(named, key=lambda file: (RANK.get(file["kind"], 3), -(file["step"] or 0), file["name"]))
        self.put_small([file for file in files if file["bytes"] < SMALL_BYTES], sure)
        for entry in files:
            if entry["bytes"] >= SMALL_BYTES:
                known = sure.get(make_file_key(entry))
                if known:
                    self.places[entry["name"]] = known
                else:
                    self.put(entry)

    def put(self, entry: Json) -> None:
        """Give a file its own slots, if there are enough."""
        count = -(-entry["bytes"] // self.slot_bytes)
        if count > len(self.free):
            self.left_out.append(entry["name"])
            return
        places = []
        for number in range(count):
            slot, offset = self.free.pop(0), number * self.slot_bytes
            size = min(self.slot_bytes, entry["bytes"] - offset)
            places.append([slot, 0, size])
            self.todo.append((slot, [(entry["name"], offset, size)]))
        self.places[entry["name"]] = places

    def put_small(self, entries: List[Json], sure: Dict[str, List[Place]]) -> None:
        """Put new small files together into slots. If there are many such slots, pack all small files again.

        This frees the space of replaced files in old slots.
        """
        known = {entry["name"]: sure[make_file_key(entry)] for entry in entries if make_file_key(entry) in sure}
        slots = {slot for places in known.values() for slot, _, _ in places}
        new = [entry for entry in entries if entry["name"] not in known]
        if new and len(slots) >= MOST_SMALL_SLOTS:
            known, new = {}, entries
        self.places.update(known)
        slot, offset = -1, self.slot_bytes
        for file in new:
            if (slot < 0 or offset + file["bytes"] > self.slot_bytes) and self.free:
                slot, offset = self.free.pop(0), 0
                self.todo.append((slot, []))
            if slot < 0 or offset + file["bytes"] > self.slot_bytes:
                self.left_out.append(file["name"])
                continue
            self.places[file["name"]] = [[slot, offset, file["bytes"]]]
            self.todo[-1][1].append((file["name"], 0, file["bytes"]))
            offset += file["bytes"]

    @property
    def slots(self) -> Set[int]:
        """Return the slots to which the plan's head refers."""
        return {slot for places in self.places.values() for slot, _, _ in places}

    @property
    def manifest_of_placed(self) -> Json:
        """Return the manifest, reduced to the files that this plan puts into slots."""
        return dict(self.manifest, files=[file for file in self.manifest["files"] if file["name"] in self.places])

    @property
    def kept(self) -> Dict[str, List[Place]]:
        """Return the places by name and digest. A file that was replaced under its name counts as another file."""
        return {make_file_key(file): self.places[file["name"]] for file in self.manifest_of_placed["files"]}

    def check_whole(self) -> None:
        """Raise Later if the new head would drop a complete older checkpoint without containing the newest."""
        newest = [file for file in self.manifest["files"] if file["step"] == self.manifest["latest"]]
        missing = [file["name"] for file in newest if file["kind"] in RANK and file["name"] in self.left_out]
        if missing:
            raise Later("%d slots of %d bytes have no room for %s" % (len(self.free), self.slot_bytes, missing[0]))

    def send(self, root: str, urls: List[str], spend: Callable[[int], None]) -> None:
        """Send every slot with new content, some in parallel. The first error ends this; sent slots stay.

        `spend` is called with the bytes of each slot before they are sent, and afterwards with minus those that were
        not sent.
        """
        lock = threading.Lock()
        troubles: List[Exception] = []

        def work() -> None:
            while not troubles:
                with lock:
                    if not self.todo:
                        return
                    slot, pieces = self.todo.pop(0)
                gone: List[int] = []
                size = sum(length for _, _, length in pieces)
                try:
                    spend(size)
                    put_object(urls[slot], partial(read_parts, root, pieces, gone), size)
                except Exception as error:  # noqa: BLE001 - raised again below: the head must not refer to the slot
                    with lock:
                        self.todo.append((slot, pieces))
                    troubles.append(error)
                    with suppress(OSError):
                        spend(sum(gone) - size)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(AT_ONCE, len(self.todo)) - 1)]
        with suppress(RuntimeError):  # The trainer's loaders may use up a container's threads. Then fewer threads send.
            for thread in threads:
                thread.start()
        work()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if troubles:
            raise troubles[0]


def places_noted(root: str) -> Optional[Json]:
    """Return where the files of the last head are, as recorded at that time; None if there was no head."""
    content = b"".join(map(bytes, stream(path_in(root, "agent", PLACES), 0, 1 << 32)[0]))
    try:
        return dict(json.loads(content)) if content else None
    except ValueError:
        return None


def make_file_key(entry: Json) -> str:
    """Return a key that identifies a file by its name and its content."""
    return "%s %s" % (entry["name"], entry["sha256"])


def read_parts(root: str, pieces: List[Tuple[str, int, int]], gone: List[int]) -> Iterator[bytes]:
    """Yield the content of some parts of files in order. Raise Later if a file was replaced meanwhile.

    `gone` collects the size of each block that was read.
    """
    for name, offset, length in pieces:
        while length:
            block = read_part(locate_finished(root, name), offset, min(BLOCK_BYTES, length))[0]
            if not block:
                raise Later("%s is no longer there" % name)
            gone.append(len(block))
            yield block
            offset, length = offset + len(block), length - len(block)
