"""List every safeguard of the source that can be removed alone: each sync, lock, digest check and read-back.

Syncs, locks and comparisons of digests are found by their syntax, so that a new one is listed without further work.
Code that checks twice (a second reading, a count of readings, a check of a token) has no common syntax, and is listed
by its text in WORDS. A text that does not occur exactly once is an error, because nothing would be tested.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CALLS = {
    "os.fsync": "sync",
    "fsync_file": "sync",
    "fsync_folder": "sync",
    "sync_folder": "sync",
    "sync_filesystem": "sync",
    "fcntl.flock": "lock",
    "locked": "lock",
}
_LOCKS = re.compile(r"(exclusive|locked|RunLock)\(|self\._lock$")
_DIGEST = re.compile(r"sha256|digest|\bhead\b|fingerprint")
_NO_CHECK = re.compile(
    r"digest_size|head\[|len\(self\.digests\)|error\.reason|not in came\.files|in digests$|'sha256' in one"
)
# The value of each comparison if nothing is wrong.
_GOOD = {ast.Eq: "True", ast.In: "True", ast.NotEq: "False", ast.NotIn: "False"}
_DRAWN = ("gpurun/view/", "gpurun/planning/")

WORDS: dict[str, tuple[tuple[str, str], ...]] = {
    "gpurun/remote/agent/public_files.py": (
        ("if not all(is_public(address) for address in found):", "if False:"),
        ("demand_https(newurl)", "pass"),
        ("demand_https(request.full_url)", "pass"),
    ),
    "gpurun/lifecycle/instance/terminate.py": (
        ("yield from requests.take_alive(reading, looked_mono, len(readings))\n            readings = []", "pass"),
        ("if requests.may_be_hidden(elapsed, hidden_s) and reading.gone:", "if False:"),
        ("elapsed - requests.requested_s >= ASK_AGAIN_S", "requests.attempt == 0"),
        ("if not requests.sees_machines:", "if False:"),
        ("self.sees_machines = self.sees_machines or self.was_seen", "pass"),
        ("due_s = reading.at_s + gap_s(provider)", "due_s = 0.0"),
        ("return living_instances(provider.find(token), token), []", "return [], []"),
        ("return living_instances(error.found, token), [str(error)]", "return [], [str(error)]"),
        ("{instance.id for instance in found} - {identifier}", "set()"),
        ("    if identifier:\n        ask(identifier)\n", ""),
        ("round(looked_mono - started, 3)", "elapsed"),
    ),
    "gpurun/lifecycle/instance/readings.py": (
        ("self.state is InstanceState.GONE and not self.listed", "not self.listed"),
        ("self.state is InstanceState.GONE and not self.listed", "self.state is InstanceState.GONE"),
        (" and now_mono - self.last_mono <= WATCHED_S", ""),
        ("len(readings) >= traits.death_reads and ", ""),
        (" and _spread_s(readings) >= traits.death_spread_s", ""),
        ("InstanceState.UNKNOWN, listed=True, answer", "InstanceState.GONE, listed=False, answer"),
        ("instance.token == token and ", ""),
        (" and instance.state is not InstanceState.GONE", ""),
    ),
    "gpurun/lifecycle/steps/create_machine.py": (
        ("deadline_wall = _their_wall(context)", "deadline_wall = context.clock.wall()"),
        ("if instance.token != order.token:", "if False:"),
        ("return [name for name in names if name != context.provider.name]", "return []"),
        ("elapsed - steady_since >= traits.settle_s and looked_late:", "False:"),
        ("if elapsed - steady_since >= traits.settle_s:", "if True:"),
        ('unclear, steady_since = str(error), float("inf")', "unclear = str(error)"),
        ("[] if found or is_seeing else check_account(state, context)", "[]"),
        ("[] if found or is_seeing else", "[] if is_seeing else"),
        ("check_price(context.plan, context.provider, context.clock)", "pass"),
        ("if context.clock.wall() > asked_wall + LATE_S:", "if False:"),
        (" or [machine for machine in listed if machine.token == token]", ""),
    ),
    "gpurun/lifecycle/steps/await_ready.py": (
        ('refuse_beside_copy(context.provider, state, context, "This machine was ended.")', "pass"),
        ("context.reach(by_our_clock(instance, state))", "context.reach(instance)"),
        ("and not extras:", ":"),
        ("check_made(born, context.plan)", "pass"),
        ("if differs_since_created(instance, born, context.plan):", "if False:"),
        (
            "check_box(facts, plan.offer, accept_cpu=plan.choices.accept_cpu, needs_torch=plan.job.needs_torch)",
            "()",
        ),
        (" and instance.token == token", ""),
        ("        if status.taken:\n", "        if True:\n"),
        ("check_nodes(network, facts, context.plan.offer, context.plan.choices)", "pass"),
    ),
    "gpurun/planning/verify_machine.py": (
        ("if rate < LEAST_GIGABYTES_PER_S and not choices.slow_network:", "if False:"),
        ("if rate is not None and _costs_more(instance, plan):", "if False:"),
        ("if _is_other_type(instance, plan):", "if False:"),
        ("if same and min(same) > agreed.rate_micros_per_hour:", "if False:"),
    ),
    "gpurun/lifecycle/instance/monitor.py": (
        ("(second.id in self._listed or _is_alive(provider, second))", "True"),
        (" and instance.token in tokens", ""),
        ("return [instance for instance in alive if instance.id != own]", "return alive"),
        ("            readings.clear()\n", "            pass\n"),
        ("self._slower * 2 if seen.is_throttled else 1.0", "1.0"),
        ("if there_wall + hard_s > announced_wall - _CHANGED_S:", "if True:"),
        ("if rate is not None and rate > known:", "if False:"),
    ),
    "gpurun/lifecycle/supervisor.py": (("if context.must_end(state):", "if False:"),),
    "gpurun/lifecycle/driver.py": (
        ("if not state.may_be_billing:\n                raise\n", "if True:\n                raise\n"),
        ("if self._context_at(state).is_lease_over(state):", "if False:"),
        ("(may_wait and self._end_if_unneeded(after if is_new else state, after))", "False"),
        (" and state.phase in WORKING\n", "\n"),
        ("if step not in _ABANDONED_TO_DESTROY or not self._context_at(state).must_end(state):", "if True:"),
        ("            self._attend()\n            if step", "            if step"),
        ("may_wait = is_new or ", "may_wait = "),
        ("if self._context_at(state).must_end(state):", "if False:"),
    ),
    "gpurun/core/stop_request.py": (("return unread if os.path.exists(folder.control) else None", "return None"),),
    "gpurun/lifecycle/context.py": (
        (
            "if request is not None and STRENGTH[request.how] > STRENGTH[state.stop_of_user]:\n            state",
            "if False:\n            state",
        ),
        ('state.stop == "destroy" or ', ""),
        ("is_known_late or ", ""),
        (" - taken_s) / burn", " - taken_s)"),
        (" - taken_s) / burn", ") / burn"),
        ("spent.append(max(rental.micros, whole))", "spent.append(rental.micros)"),
        ("rental.longest_gpu_hours if _is_unclear(rental, state, leg) else rental.most_gpu_hours", "0.0"),
        (" + (tail_s if extra.ended is None else 0.0)", ""),
        ('request.answer == "unseen" or ', ""),
        ("return min(by_wall, ask_wall", "return max(by_wall, ask_wall"),
        ("return min(by_wall, self.ends_mono", "return max(by_wall, self.ends_mono"),
        (
            "if any(instance.state is not InstanceState.GONE for instance in self.provider.find(known.token)):",
            "if False:",
        ),
        ("if machine.state is InstanceState.PENDING and self.plan.lease.queue_s:", "if False:"),
        (
            "if machine.state not in (InstanceState.STOPPED, InstanceState.GONE):",
            "if machine.state is InstanceState.RUNNING:",
        ),
    ),
    "gpurun/lifecycle/steps/collect_files.py": (
        ("partial(far.manifest, MOST_ANNOUNCED_BYTES)", "partial(far.manifest, 1 << 62)"),
        ("with far.many_lanes(), ", "with "),
        ("if all(file.name in downloads.here for file in newest_files(manifest)):", "if True:"),
        ("done = {*downloads.here, *downloads.missing}", "done = downloads.here"),
    ),
    "gpurun/lifecycle/steps/move_run.py": (
        ("if number > state.legs:", "if False:"),
        ("if fruitless > MOST_FRUITLESS:", "if False:"),
        ("if is_whole and all(inventory.has(file) for file in files.values()):", "if is_whole:"),
        ("if found and not is_too_late:", "if found:"),
        ("context.raise_if_stopped(state)", "pass"),
        ("if proof.wall - last.get(place, -OFTEN_S - 1) <= OFTEN_S:", "if False:"),
        (" and inventory.has(file)]", "]"),
        (", *inventory.memory.whole]", "]"),
    ),
    "gpurun/core/run_plan.py": (("self.caches if machine_kind(offer) in self.cached_on else ()", "self.caches"),),
    "gpurun/planning/legs.py": (
        (" and offer.rate_micros_per_hour <= most_rate(plan)", ""),
        (" and (offer.provider, offer.region) not in standing.avoided", ""),
        ("cap=standing.left_micros", "cap=plan.cap_micros"),
        ("plan.choices.weak_lease or not is_weak(offer)", "True"),
        ("if not lease.limit_s and lease.train_s < min(least_s, (hours or inf) * SECONDS_PER_HOUR):", "if False:"),
    ),
    "gpurun/ledger/run_state.py": (
        ("not state.legs or state.stop_of_user or state.stays", "not state.legs or state.stays"),
        ("state.stop_of_user or state.stays or state.cancelled", "state.stop_of_user or state.cancelled"),
        (" or state.stays or state.cancelled:", " or state.stays:"),
        ("return state.limited and is_only_late and", "return is_only_late and"),
        ('failure.code in _LOST and state.outcome in ("", "done")', "failure.code in _LOST"),
    ),
    "gpurun/ledger/audit/event_sequence.py": (
        ("if not is_over or late or billed:", "if False:"),
        ("total(spent, Micros(intent.worst_micros)) > cap:", "False:"),
        ("legs > opened.legs:", "False:"),
    ),
    "gpurun/lifecycle/steps/watch_training.py": (
        ("except (MachineLost, FarRefusal):", "except MachineLost:"),
        ("self._asked_mono - self._beat_mono > SILENCE_S", "self._clock.monotonic() - self._beat_mono > SILENCE_S"),
        ("if self._asked_mono - self._refused_last_mono > PAUSE_S:", "if self._refused_mono < 0:"),
    ),
    "gpurun/lifecycle/connect.py": (
        ("if down is None:", "if False:"),
        (
            "        if down:\n            raise make_taken_error(down",
            "        if False:\n            raise make_taken_error(down",
        ),
        ("        if self._context.seconds_left(self._state) <= 0:\n", "        if False:\n"),
        ("is_late or self._unheard_s > self._most_unheard_s()", "is_late"),
        ("slow_s > self.limit_s or ", ""),
        ("gap_s if gap_s > AWAY_S else 0.0", "0.0"),
        ("min(clock.monotonic() - self._tried_mono, LONGEST_TRY_S)", "clock.monotonic() - self._tried_mono"),
    ),
    "gpurun/lifecycle/artifacts/downloader.py": (
        (
            "                    self.missing[file.name] = error\n            else",
            "                    pass\n            else",
        ),
        ("if not self._is_stuck(file):", "if False:"),
        ("if newest and {file.name for file in newest} <= here:", "if newest:"),
        (" - {*noted.kept}", ""),
    ),
    "gpurun/jobs/training/compile_cache.py": (
        ("return is_of_here\n", "return True\n"),
        ("before.host == request.host", "True"),
    ),
    "gpurun/jobs/earlier_run.py": (
        ("receipt.signature is not Signature.OK", "False"),
        ("if look_at_run(home, name).unfinished:", "if False:"),
    ),
    "gpurun/jobs/training/continued_training.py": (
        ("plan is None or plan.data.sha256 != data.sha256", "plan is None"),
        ("    if changed:\n", "    if False:\n"),
        ("== len(_KINDS)", ">= 1"),
        ('"bytes": data.bytes + earlier.bytes', '"bytes": data.bytes'),
    ),
    "gpurun/lifecycle/steps/close_run.py": (
        ("if empty_lists >= EMPTY_LISTS:", "if empty_lists:"),
        ("for part in (_end_late_machines, _remove_leftovers):", "for part in (_remove_leftovers,):"),
        ("late = list(request.late)", "late: list[str] = []"),
        ("if billed:", "if False:"),
        ('if state.shared == "kept" and request.token == state.token and not is_given_up:', "if False:"),
        ("in _check_account_of(request, provider, state, context)():", "in ():"),
        ('update={"billed": is_billed}', "update={}"),
    ),
    "gpurun/core/paths.py": (
        ('(record["event"], rest) == ("run.closed", b"")', 'record["event"] == "run.closed"'),
        ('closes and int(record["data"]["exit_code"]) != ExitCode.MAY_BE_BILLING', "closes"),
    ),
    "gpurun/lifecycle/reaper.py": (
        ("            if instance.state is InstanceState.GONE:", "            if False:"),
        ('orphan.fate == "overdue" or (is_named and', "True or (is_named and"),
        ("instance.id in others or (destroy_all and orphan.owner.is_here)", "destroy_all"),
        ('fate: Fate = "owned" if owner.whose == "supervisor" else ', "fate: Fate = "),
        (" and sight.state.token == token", ""),
        ("(token.deadline_wall if token else None) or here or instance.deadline_wall", "instance.deadline_wall"),
        (" or deadline_wall <= max(now, since_wall + LONGEST_LEASE_S)", " or True"),
        ("(orphan.has_outlived and journal_has_id(orphan.owner, instance, home))", "orphan.has_outlived"),
        ("reported.token == instance.token and reported.state not in", "reported.state not in"),
        ("for name in ours.keys() - {machine.id for machine in found}:", "for name in ():"),
        ("remove_all and (owner.is_here or anyones)", "remove_all"),
        ("left.token in needed or ", ""),
        ("elif left.holds and not remove_all:", "elif False:"),
        ("and is_older(orphan, older_than_s) ", ""),
    ),
    "gpurun/lifecycle/machine_owner.py": (
        (
            "if is_of_run and machine.state is not InstanceState.GONE and machine.token not in state.attempts:",
            "if False:",
        ),
        ("token.home in homes", "token.home == context.home.id"),
        ("replay_journal(folder.name, reading.records).token == token", "True"),
        ("if has_requested(home.run(name), token):", "if True:"),
        ("return state.token != instance.token or state.phase in _ENDED", "return True"),
        ("if holder_of(folder.lock) is not None:\n            return None", "if False:\n            return None"),
    ),
    "gpurun/lifecycle/instance/absence.py": (
        ("(self.is_listed and not is_first) or ", ""),
        (" or now_mono - self.since_mono >= settle_s", ""),
        ("absence.is_listed and total(", "total("),
        ("pays_for_another(state, plan.cap_left_micros, worst)", "False"),
    ),
    "gpurun/lifecycle/steps/upload_files.py": (("if isinstance(free, int) and needed > free:", "if False:"),),
    "gpurun/ledger/rental.py": (("times(total(", "(lambda a, b: a)(total("),),
    "gpurun/ledger/billed_time.py": (
        ("max(0, min(waits))", "max(0, max(waits))"),
        ("(alive_ms == 0 or requests == 1)", "requests == 1"),
    ),
    "gpurun/providers/slurm/provider.py": (
        ("minutes = order.lease_s // 60", "minutes = -(-order.lease_s // 60)"),
        ('            "--dependency=singleton",\n', ""),
    ),
    "gpurun/ledger/journal.py": (("if record.seq != number:", "if False:"),),
    "gpurun/ledger/fsync.py": (
        ("if os.fstat(descriptor).st_size != after:", "if False:"),
        ("if not excluded:", "if False:"),
        ("os.ftruncate(descriptor, after)", "pass"),
    ),
    "gpurun/ledger/signing.py": (("keys[keyid].verify(made, message)", "pass"),),
    "gpurun/remote/archive.py": (
        ("len(content) != size or _identify_version(os.fstat(descriptor)) != file.seen", "len(content) != size"),
        ("self.survey.demand_clean()", "pass"),
    ),
    "gpurun/remote/resumable_file.py": (
        ("os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW", "os.O_RDWR | os.O_CREAT"),
        ("os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW", "os.O_RDWR | os.O_CREAT | os.O_APPEND"),
        (" and os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):", ":"),
        ("if not is_this_boot:\n            text", "if False:\n            text"),
        ("        noted_bytes = os.fstat(self._list).st_size\n", "        noted_bytes = 1 << 30\n"),
        ("if piece[1] <= here_bytes", "if True"),
        ('elif not text.endswith(b"\\n"):', "elif False:"),
    ),
    "gpurun/remote/download.py": (
        ("os.O_RDONLY | os.O_NOFOLLOW", "os.O_RDONLY"),
        ("if expected.size_bytes - have > room():", "if False:"),
        ("sized.bytes != len(content) or ", ""),
    ),
    "gpurun/remote/messages.py": (
        ("check_name(file.name)", "pass"),
        ("if folded in taken:", "if False:"),
        ("if not folders.isdisjoint(taken):", "if False:"),
        ("if manifest.total_bytes > most_bytes:", "if False:"),
        ("if len(line) > most_bytes:", "if False:"),
    ),
    "gpurun/remote/client.py": (
        ("if piece.name not in wants or piece.name in chunks:", "if False:"),
        ("if at != len(content) or set(chunks) != set(wants):", "if False:"),
        ("piece.offset != offset or piece.bytes > most or ", ""),
        ("answer.bytes != len(content) or ", ""),
        (" or answer.bytes > most:", ":"),
        (" or len(data) != piece.bytes", ""),
    ),
    "gpurun/remote/ssh/transport.py": (
        ("if not 0 <= n <= MOST_PACKET_BYTES:", "if False:"),
        ("if self.allowance_bytes < 0:", "if False:"),
        ("if len(channel.in_buffer) + len(channel.in_stderr_buffer) > channel.in_window_size:", "if False:"),
        (" and channel in self._ended:", " and False:"),
        ("self._ended.discard(channel)", "pass"),
        ("and not self.clear_to_send.is_set():", "and False:"),
    ),
    "gpurun/lifecycle/steps/destroy_machine.py": (
        (" and _shares_key(state, context):", " and False:"),
        ("        return state.timer_shares_key\n", "        pass\n"),
    ),
    "gpurun/remote/agent/end_early.py": ((" and 0.0 <= age_s <= TAKEN_S:", ":"),),
    "gpurun/remote/agent/watchdog.py": (
        ("    if not pusher.has_all():\n", "    if False:\n"),
        ("        if last_heard(root) != seen:\n", "        if False:\n"),
    ),
    "gpurun/remote/agent/system.py": (
        ('if getattr(ctypes.CDLL(None), "syncfs", lambda _: -1)(descriptor):', "if False:"),
    ),
    "gpurun/remote/ssh/program.py": (
        (" conv=fsync", ""),
        ("""[ "$(wc -c < "$part")" -eq "$2" ] && """, ""),
    ),
    "gpurun/remote/agent/receive.py": (
        ("if len(content) != size or hashlib.sha256(content).digest() != sha256:", "if False:"),
        (" | os.O_NOFOLLOW, 0o644)\n        except", ", 0o644)\n        except"),
        ("check_name(name)\n        if", "if"),
        (" or hash_file(part[1]) == part[0]", " or True"),
        ('if not lines or lines[0] != "boot %s\\n" % boot_id():', "if False:"),
    ),
    "gpurun/remote/agent/finish_upload.py": (
        ("if incoming.verified != dict(enumerate(digests)):", "if False:"),
        (
            'if arrived.pop(name) != entry["bytes"] or os.path.getsize(path) != entry["bytes"]:',
            "arrived.pop(name)\n            if False:",
        ),
        ('if read(root, "agent", "job.json"):', "if False:"),
        ('{} if record.pop("boot", boot_id()) != boot_id() else dict(record)', "dict(record)"),
        ("dict(record, boot=boot_id())", "dict(record)"),
        ("if not boot_id():", "if False:"),
        ('if read(root, "agent", "shipped.json") == record:', "if True:"),
    ),
    "gpurun/remote/agent/setup_process.py": (
        ("        if os.path.lexists(path):\n            return\n", ""),
        ('state = "running" if held is None else "lost" if is_same_boot else "rebooted"', 'state = "running"'),
    ),
    "gpurun/remote/upload.py": (
        ("            demand_unchanged(file)\n", "            pass\n"),
        (" or not all(found):", ":"),
        ("self._unsure.extend(taken)", "pass"),
    ),
    "gpurun/providers/local.py": (("if self.read(token).state is InstanceState.GONE:", "if True:"),),
}


@dataclass(frozen=True)
class Safeguard:
    """One safeguard in one file; `mutant` is the whole text of the file without it."""

    kind: str
    path: str
    line: int
    words: str
    mutant: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.path.removeprefix('gpurun/')}:{self.line} {self.words}"


def safeguards(root: Path = ROOT) -> Iterator[Safeguard]:
    """Yield every safeguard of the tree, file by file."""
    for path in sorted((root / "gpurun").rglob("*.py")):
        place, text = str(path.relative_to(root)), path.read_text(encoding="utf-8")
        if not place.startswith(_DRAWN):
            yield from _by_form(place, text)
        for before, after in WORDS.get(place, ()):
            if text.count(before) != 1:
                raise LookupError(f"{place} has {before!r} {text.count(before)} times: mend the list of safeguards")
            line, words = text[: text.index(before)].count("\n") + 1, " ".join(f"{before} -> {after}".split())
            yield Safeguard("read-back", place, line, words, text.replace(before, after))
    if missing := [place for place in WORDS if not (root / place).is_file()]:
        raise LookupError(f"{', '.join(missing)}: no such files; mend the list of safeguards")


def _by_form(place: str, text: str) -> Iterator[Safeguard]:
    tree = ast.parse(text)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        found: list[tuple[str, ast.expr, str]] = []
        if "/agent/" in place and isinstance(node, ast.Call) and id(node) not in alone:
            if ast.unparse(node.func) in ("lock", "locked"):
                found = [("lock", node, "os.open(os.devnull, os.O_RDONLY)")]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            kind = _CALLS.get(ast.unparse(node.value.func))
            found = [(kind, node.value, "None")] if kind else []
        elif isinstance(node, ast.With):
            held = [item.context_expr for item in node.items if _LOCKS.match(ast.unparse(item.context_expr))]
            found = [("lock", expression, '__import__("contextlib").nullcontext()') for expression in held]
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _GOOD:
            words = ast.unparse(node)
            if _DIGEST.search(words) and not _NO_CHECK.search(words):
                found = [("digest", node, _GOOD[type(node.ops[0])])]
        for kind, part, instead in found:
            words = re.sub(r"\s+", " ", ast.unparse(part))[:70]
            yield Safeguard(kind, place, part.lineno, words, _without(text, part, instead))


def _without(text: str, node: ast.expr, instead: str) -> str:
    """Return the text with `instead` in the place of a node."""
    lines = text.splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    head = lines[first].encode()[: node.col_offset].decode()
    tail = lines[last].encode()[node.end_col_offset :].decode()
    return "".join([*lines[:first], head + instead + tail, *lines[last + 1 :]])
