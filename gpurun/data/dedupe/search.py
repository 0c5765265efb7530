"""Finds documents that repeat an earlier document: first by address, then by text, then by similarity.

The keys are sorted one band at a time, and one part of the key space after another, so that memory grows by only
NUMBER_BYTES for each document. Documents with equal keys are candidates; their full signatures decide whether they are
similar. A document that was dropped is not compared again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpurun.core.errors import UsageError
from gpurun.data.dedupe.fingerprint import NO_KEY, similarity
from gpurun.data.dedupe.signatures import KINDS, Dedupe, SignatureFile

__all__ = ["FoundDuplicates", "search"]

NUMBER_BYTES = 4
_NONE = np.uint32(0xFFFFFFFF)
_KEYS_AT_ONCE = 2_000_000
"""The most keys that are sorted together: about 80 MB with the numbers, the order and the sorted copies."""
_PAIRS_AT_ONCE = 16_384
"""The most pairs whose signatures are compared together: 17 MB of signatures."""
_MOST_LEADERS = 64
"""The most documents of a group that the rest of the group is compared with; each band forms new groups."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class FoundDuplicates:
    """The positions of each task's dropped documents (ascending uint32), and the number dropped for each kind."""

    ordinals: tuple[np.ndarray, ...]
    documents: int
    counts: dict[str, int]


def search(files: Sequence[SignatureFile], dedupe: Dedupe, say: Say = lambda _: None) -> FoundDuplicates:
    """Find every document that repeats an earlier document; the order is that of the tasks and of their documents.

    The earlier document is kept. A near duplicate is a document whose similarity to a kept one reaches the threshold.
    """
    corpus = _Corpus(files, dedupe)
    counts = dict.fromkeys((kind for kind in KINDS if kind in dedupe.kinds), 0)
    for number, kind in enumerate(dedupe.columns):
        went = corpus.gone()
        for documents, groups in corpus.equal_keys(number):
            if kind == "near":
                corpus.compare(documents, groups)
            else:
                corpus.note(documents, _find_first_of_group(documents, groups))
        counts[kind] += corpus.gone() - went
        say(f"duplicates: {kind}, column {number + 1} of {len(dedupe.columns)}, {corpus.gone():,} documents dropped")
    if "near" in counts:
        counts["near"] -= corpus.settle()
    return FoundDuplicates(corpus.ordinals(), corpus.documents, counts)


class _Corpus:
    """All documents, numbered from 0, and for each dropped document the earlier document that it repeats."""

    def __init__(self, files: Sequence[SignatureFile], dedupe: Dedupe) -> None:
        self._files, self._threshold = files, dedupe.threshold
        self._starts = np.cumsum([0, *(file.documents for file in files)])
        self.documents = int(self._starts[-1])
        if self.documents >= int(_NONE):
            raise UsageError(
                "dedupe.too_many",
                f"{self.documents:,} documents are more than the limit of {int(_NONE) - 1:,} for one search.",
                hint="Divide the corpus, or deduplicate it on a cluster (docs/DATA.md).",
            )
        self._instead = np.full(self.documents, _NONE, dtype=np.uint32)
        self._compared: list[np.ndarray] = []

    def gone(self) -> int:
        """Return how many documents are dropped so far."""
        return int(np.count_nonzero(self._instead != _NONE))

    def note(self, documents: np.ndarray, instead: np.ndarray) -> None:
        """Record that `documents` are dropped in favour of the kept documents `instead`; equal pairs are ignored."""
        repeats = documents != instead
        self._instead[documents[repeats]] = instead[repeats]

    def equal_keys(self, column: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the remaining documents that share a key with another document, as (their numbers, the group of each).

        Numbers ascend within a group, and groups are numbered from 0 without a gap.
        """
        parts = np.uint64(-(-self.documents // _KEYS_AT_ONCE))
        for part in range(int(parts)):
            keys, numbers = self._select_part(column, np.uint64(part), parts)
            order = np.argsort(keys, kind="stable")
            keys, numbers = keys[order], numbers[order]
            begins = np.ones(len(keys), dtype=bool)
            begins[1:] = keys[1:] != keys[:-1]
            alone = begins.copy()
            alone[:-1] &= begins[1:]
            if not alone.all():
                yield numbers[~alone], np.cumsum(begins[~alone]) - 1

    def _select_part(self, column: int, part: np.uint64, parts: np.uint64) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys in one part of the key space and their documents, without the documents already dropped."""
        keys, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)]
        for file, start in zip(self._files, self._starts, strict=False):
            for block in file.column(column):
                places = np.arange(start, start + len(block), dtype=np.uint32)
                is_in_part = (block != NO_KEY) & (block % parts == part) & (self._instead[places] == _NONE)
                keys.append(block[is_in_part])
                numbers.append(places[is_in_part])
                start += len(block)
        return np.concatenate(keys), np.concatenate(numbers)

    def compare(self, documents: np.ndarray, groups: np.ndarray) -> None:
        """In each group, drop the documents similar to the first document; repeat this with the rest of the group."""
        for _ in range(_MOST_LEADERS):
            leaders = _find_first_of_group(documents, groups)
            others = np.flatnonzero(documents != leaders)
            if not len(others):
                return
            alike = self._are_similar(documents[others], leaders[others])
            self.note(documents[others[alike]], leaders[others[alike]])
            self._compared.append(documents[others[alike]])
            left = others[~alike]
            documents, groups = documents[left], np.unique(groups[left], return_inverse=True)[1]

    def _are_similar(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        found = [np.empty(0, dtype=bool)]
        for start in range(0, len(left), _PAIRS_AT_ONCE):
            pair = [self._read_signatures(side[start : start + _PAIRS_AT_ONCE]) for side in (left, right)]
            found.append(similarity(*pair) >= self._threshold)
        return np.concatenate(found)

    def _read_signatures(self, numbers: np.ndarray) -> np.ndarray:
        """Return the signatures of some documents; each file is opened once, and no document is read twice."""
        ordered, places = np.unique(numbers, return_inverse=True)
        bounds = np.searchsorted(ordered, self._starts)
        rows = [
            file.signatures(ordered[low:high] - start)
            for file, start, low, high in zip(self._files, self._starts, bounds, bounds[1:], strict=False)
            if low < high
        ]
        return np.concatenate(rows)[places]

    def settle(self) -> int:
        """Restore each document whose match was dropped, too, and whose match's match differs; return how many."""
        back = 0
        compared = np.concatenate([np.empty(0, dtype=np.uint32), *self._compared])
        chained = compared[self._instead[self._instead[compared]] != _NONE]
        # In ascending order, an earlier document is final before a later document depends on it.
        for number in np.sort(chained):
            stays = self._instead[self._instead[number]]
            if stays == _NONE:
                continue
            if self._are_similar(np.array([number]), np.array([stays]))[0]:
                self._instead[number] = stays
            else:
                self._instead[number] = _NONE
                back += 1
        return back

    def ordinals(self) -> tuple[np.ndarray, ...]:
        """Return the positions of each task's dropped documents."""
        going = self._instead != _NONE
        spans = zip(self._starts, self._starts[1:], strict=False)
        return tuple(np.flatnonzero(going[start:stop]).astype(np.uint32) for start, stop in spans)


def _find_first_of_group(documents: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the first document of each document's group."""
    begins = np.ones(len(groups), dtype=bool)
    begins[1:] = groups[1:] != groups[:-1]
    return np.asarray(documents[np.flatnonzero(begins)][groups])
