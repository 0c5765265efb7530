"""Finds the files that a command has left: walks its folder, the home and /workspace by globs, and applies the rules.

Names are Python strings (with surrogates for undecodable bytes), relative to `out/`: `outputs/…` is the command's own
folder, `home/…` is what a glob below `~` matches, `workspace/…` is what a glob below /workspace matches.
"""

from __future__ import annotations

import os
import re
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    State = tuple[int, int]  # (which glob, which of its parts comes next)
    Stamp = tuple[int, int]  # (bytes, modification time in nanoseconds)

STAYS = frozenset({".cache", ".venv", ".git", "__pycache__", "node_modules"})
IGNORE_FILE, GIT_IGNORE_FILE = ".gpurunignore", ".gitignore"
EVERYTHING = ["**"]
WORKSPACE = "/workspace"
LINKS, DOTS = "links that lead elsewhere", "folders of ~ that begin with a dot"


class Glob:
    """One glob as the user wrote it, below one of the three roots. A matching folder includes everything in it."""

    def __init__(self, text: str) -> None:
        self.text, home = text, os.path.expanduser("~")
        rest = os.path.join(home, text[2:]) if text.startswith("~/") else text
        roots = {"home": home, "workspace": WORKSPACE}
        self.root = next((name for name, top in roots.items() if rest.startswith(top.rstrip("/") + "/")), "outputs")
        if os.path.isabs(rest):
            if self.root == "outputs":
                what = "--outputs %s is neither below the home (%s) nor below %s" % (text, home, WORKSPACE)
                raise OSError(22, what)
            rest = os.path.relpath(rest, roots[self.root])
        self.parts = [part for part in rest.split("/") if part not in ("", ".")]
        self.tests = [part_test(part) for part in self.parts]


def part_test(part: str) -> re.Pattern[str]:
    """Return the test for one part of a glob. A part with brackets may also match literally."""
    either = "(?:%s)|(?:%s)" % (part_pattern(part), re.escape(part))
    return re.compile(r"(?:%s)\Z" % (either if "[" in part else part_pattern(part)), re.DOTALL)


def part_pattern(part: str) -> str:
    """Return one part of a glob as a regular expression. A star also matches names that begin with a dot."""
    pattern, place = "", 0
    while place < len(part):
        letter, place = part[place], place + 1
        end = part.find("]", place + 2 if part[place : place + 1] in "!^" else place + 1)
        if letter == "[" and end > 0:
            body, place = part[place:end].replace("\\", r"\\"), end + 1
            pattern += "[%s%s]" % ("^" if body[0] in "!^" else "", body.lstrip("!^").replace("[", r"\["))
        elif letter == "\\" and place < len(part):
            pattern, place = pattern + re.escape(part[place]), place + 1
        else:
            pattern += {"*": "[^/]*", "?": "[^/]"}.get(letter) or re.escape(letter)
    return pattern


class MatchedFiles:
    """The result of one walk: new files, each checkpoint's files, matches per glob, and what is left out and why."""

    def __init__(self, globs: int, most_files: int) -> None:
        self.most_files = most_files
        self.files: dict[str, Stamp] = {}
        self.units: dict[str, list[str]] = {}
        self.matched = [0] * globs
        self.left: dict[str, list[tuple[str, str]]] = {}
        self.over_files, self.over_bytes = 0, 0


class Walk:
    """Finds what globs match. `checkpoints` is one more glob, whose matches define the checkpoints."""

    def __init__(
        self, work: str, run: str, outputs: list[str], checkpoints: str, has_git_rules: bool = False
    ) -> None:  # fmt: skip
        self.globs = [Glob(text) for text in [*outputs, *([checkpoints] if checkpoints else [])]]
        self.checkpoint = len(self.globs) - 1 if checkpoints else -1
        self.roots = {"outputs": work, "home": os.path.expanduser("~"), "workspace": WORKSPACE}
        self.run = os.path.realpath(run)
        self.before: dict[str, Stamp] = {}
        self.held: Container[str] = ()
        self.has_git_rules = has_git_rules
        # If the user has named the outputs, the list of what is not uploaded does not apply to them.
        self.ignored = {"outputs": ignore_rules(os.path.join(work, IGNORE_FILE)) if outputs == EVERYTHING else []}

    def source(self, name: str) -> str:
        """Return the path of the file with this name; for a link, the path of its target."""
        root, _, rest = name.partition("/")
        return os.path.realpath(os.path.join(self.roots[root], rest))

    def find(self, most_files: int) -> MatchedFiles:
        """Search all roots. Return the files that are new or changed since `before`, at most `most_files` of them."""
        found = MatchedFiles(len(self.globs), most_files)
        for root, top in self.roots.items():
            states = frozenset((place, 0) for place, glob in enumerate(self.globs) if glob.root == root)
            if states and os.path.isdir(top):
                self.below(root, top, states, found)
        return found

    def below(self, root: str, top: str, states: frozenset[State], found: MatchedFiles) -> None:
        """Walk one root. Follow a link to a folder only if a glob names the link and its target is inside the root."""
        inside = os.path.realpath(top) + "/"
        stack = [(top, root, states, "")]
        while stack:
            folder, name, states, unit = stack.pop()
            if self.has_git_rules and root == "outputs":  # Users change the rules while they work.
                files = (GIT_IGNORE_FILE, IGNORE_FILE)
                self.ignored[name] = [rule for file in files for rule in ignore_rules(os.path.join(folder, file))]
            for entry in entries_of(folder):
                deeper, done = self.step(states, entry.name)
                path, child = os.path.join(folder, entry.name), "%s/%s" % (name, entry.name)
                if not deeper and not done:
                    continue
                real = os.path.realpath(path) if entry.is_symlink() else path
                if entry.is_symlink() and not real.startswith(inside):
                    found.left.setdefault(LINKS, []).append((child, real))
                    continue
                is_folder = os.path.isdir(real)
                rule = self.rule(root, child, entry.name, is_folder)
                if rule or (is_folder and entry.is_symlink()):  # Such a path is downloaded only if a glob names it.
                    deeper, done = self.step(states, entry.name, by_name=True, exactly=rule == DOTS)
                if rule and not deeper and not done:
                    found.left.setdefault(rule, []).append((child, path))
                elif is_folder:
                    if os.path.realpath(real) != self.run and deeper:
                        stack.append((path, child, deeper, self.unit(unit, child, done)))
                elif done:
                    self.take(child, real, done, self.unit(unit, child, done, is_file=True), found)

    def step(
        self, states: frozenset[State], part: str, by_name: bool = False, exactly: bool = False
    ) -> tuple[frozenset[State], set[int]]:
        """Match one more part of a path. Return what may match below it, and which globs it completes.

        With `by_name`, a glob counts only if its part is more than `*` or `**`; with `exactly`, only if its part is the
        exact name.
        """
        deeper, done = set(), set()
        for glob, place in states:
            parts, tests = self.globs[glob].parts, self.globs[glob].tests
            while place < len(parts) and parts[place] == "**":
                if not by_name:
                    deeper.add((glob, place))
                place += 1
                if place == len(parts) and not by_name:
                    done.add(glob)
            if place == len(parts):
                if not by_name:
                    deeper.add((glob, place))
                    done.add(glob)
            elif tests[place].match(part):
                if by_name and parts[place] != part and (exactly or not parts[place].strip("*")):
                    continue
                deeper.add((glob, place + 1))
                if all(rest == "**" for rest in parts[place + 1 :]):
                    done.add(glob)
        return frozenset(deeper), done

    def rule(self, root: str, child: str, name: str, is_folder: bool) -> str:
        """Return the rule because of which a path is left out unless a glob names it; "" if no rule applies."""
        if root == "home" and child.count("/") == 1 and name.startswith("."):
            return DOTS
        if is_folder and name in STAYS:
            return name
        kept, parts = "", child.split("/")
        for depth in range(1, len(parts)) if root == "outputs" else ():
            for pattern, test, only_folders, is_back in self.ignored.get("/".join(parts[:depth]), ()):
                if (is_folder or not only_folders) and test.match("/".join(parts[depth:])):
                    kept = "" if is_back else pattern
        return kept

    def unit(self, above: str, child: str, done: set[int], is_file: bool = False) -> str:
        """Return the checkpoint of a path: the topmost match, or each file itself if the glob ends in `**`."""
        if self.checkpoint not in done:
            return above
        is_open = self.globs[self.checkpoint].parts[-1:] == ["**"]
        return child if is_open and is_file else "" if is_open else above or child

    def take(self, child: str, real: str, done: set[int], unit: str, found: MatchedFiles) -> None:
        """Add one file to `found` if it is a regular file and new."""
        try:
            facts = os.lstat(real)
        except OSError:
            return  # The file was removed in the meantime.
        stamp = facts.st_size, facts.st_mtime_ns
        if not stat.S_ISREG(facts.st_mode) or self.before.get(child) == stamp:
            return
        for glob in done:
            found.matched[glob] += 1
        if len(found.files) >= found.most_files and child not in self.held:
            found.over_files, found.over_bytes = found.over_files + 1, found.over_bytes + stamp[0]
            return
        found.files[child] = stamp
        if unit:
            found.units.setdefault(unit, []).append(child)


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it cannot be read, or is gone."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def count_new_files(path: str, since_wall: float) -> tuple[int, int]:
    """Return how many files at or below a path were written since `since_wall`, and how many bytes they have."""
    files, size = 0, 0
    for file in files_below(path):
        try:
            facts = os.lstat(file)
        except OSError:
            continue
        if stat.S_ISREG(facts.st_mode) and facts.st_mtime >= since_wall:
            files, size = files + 1, size + facts.st_size
    return files, size


def files_below(path: str) -> Iterator[str]:
    """Yield a file, or all files below a folder, without following links."""
    if not os.path.isdir(path) or os.path.islink(path):
        yield path
    for folder, _, names in os.walk(path):
        for name in names:
            yield os.path.join(folder, name)


def ignore_rules(path: str) -> list[tuple[str, re.Pattern[str], bool, bool]]:
    """Return the lines of a .gpurunignore or .gitignore as git reads them.

    Each is (text, test, whether it is only for folders, whether it re-includes).
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file]
    except OSError:
        return []
    rules = []
    for text in lines:
        body = text[1:] if text.startswith("!") else text
        parts = [part for part in body.split("/") if part]
        if parts and not text.startswith("#"):
            test = re.compile(path_pattern(parts, "/" in body.rstrip("/")) + r"\Z", re.DOTALL)
            rules.append((text, test, body.endswith("/"), text.startswith("!")))
    return rules


def path_pattern(parts: list[str], is_anchored: bool) -> str:
    """Return the parts of such a line as a regular expression for a path. Without a slash it matches at any depth."""
    pattern = "" if is_anchored else "(?:.*/)?"
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        if part == "**":
            pattern += ".*" if is_last else "(?:.*/)?"
        else:
            pattern += part_pattern(part) + ("" if is_last else "/")
    return pattern
