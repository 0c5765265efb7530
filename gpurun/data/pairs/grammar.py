"""Generates English sentences and their German translations by rule: a parallel text that needs no download.

The translation is not word for word: articles and adjectives agree in gender, case and number, the verb is second in a
main clause and last after `dass`, infinitives and participles move to the end, and "not a" becomes one word.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["english_german"]


@dataclass(frozen=True)
class _Noun:
    english: str
    english_plural: str
    gender: str
    german: str
    german_plural: str


def _parse_nouns(table: str) -> list[_Noun]:
    return [_Noun(*entry.split()) for entry in table.split(",")]


_PEOPLE = _parse_nouns(
    "man men m Mann Männer, woman women f Frau Frauen, child children n Kind Kinder, girl girls n Mädchen Mädchen,"
    "teacher teachers m Lehrer Lehrer, friend friends m Freund Freunde, doctor doctors m Arzt Ärzte,"
    "mother mothers f Mutter Mütter, father fathers m Vater Väter, daughter daughters f Tochter Töchter,"
    "son sons m Sohn Söhne, king kings m König Könige, queen queens f Königin Königinnen,"
    "baker bakers m Bäcker Bäcker, sister sisters f Schwester Schwestern, guest guests m Gast Gäste"
)
_THINGS = _parse_nouns(
    "dog dogs m Hund Hunde, cat cats f Katze Katzen, horse horses n Pferd Pferde, bird birds m Vogel Vögel,"
    "cow cows f Kuh Kühe, mouse mice f Maus Mäuse, book books n Buch Bücher, apple apples m Apfel Äpfel,"
    "letter letters m Brief Briefe, table tables m Tisch Tische, flower flowers f Blume Blumen,"
    "lamp lamps f Lampe Lampen, picture pictures n Bild Bilder, chair chairs m Stuhl Stühle, cup cups f Tasse Tassen,"
    "key keys m Schlüssel Schlüssel, bicycle bicycles n Fahrrad Fahrräder, clock clocks f Uhr Uhren,"
    "hat hats m Hut Hüte, ball balls m Ball Bälle"
)
_PLACES = _parse_nouns(
    "garden gardens m Garten Gärten, house houses n Haus Häuser, school schools f Schule Schulen,"
    "forest forests m Wald Wälder, city cities f Stadt Städte, kitchen kitchens f Küche Küchen,"
    "village villages n Dorf Dörfer, park parks m Park Parks, room rooms n Zimmer Zimmer"
)


def _parse_pairs(table: str) -> list[tuple[str, ...]]:
    return [tuple(entry.split()) for entry in table.split(",")]


_OF_PEOPLE = _parse_pairs(
    "old alt, young jung, small klein, clever klug, happy glücklich, friendly freundlich, rich reich"
)
_OF_THINGS = _parse_pairs(
    "old alt, new neu, big groß, red rot, white weiß, black schwarz, beautiful schön, heavy schwer"
)
# English: infinitive, he …s, participle; German: infinitive (also the plural), er …, participle.
_TRANSITIVE = _parse_pairs(
    "see sees seen sehen sieht gesehen, find finds found finden findet gefunden,"
    "buy buys bought kaufen kauft gekauft, draw draws drawn zeichnen zeichnet gezeichnet,"
    "love loves loved lieben liebt geliebt, hear hears heard hören hört gehört,"
    "carry carries carried tragen trägt getragen, need needs needed brauchen braucht gebraucht,"
    "wash washes washed waschen wäscht gewaschen, take takes taken nehmen nimmt genommen"
)
_DITRANSITIVE = _parse_pairs(
    "give gives given geben gibt gegeben, show shows shown zeigen zeigt gezeigt,"
    "send sends sent schicken schickt geschickt"
)
_INTRANSITIVE = _parse_pairs(
    "sleep sleeps slept schlafen schläft geschlafen, work works worked arbeiten arbeitet gearbeitet,"
    "laugh laughs laughed lachen lacht gelacht, sing sings sung singen singt gesungen,"
    "wait waits waited warten wartet gewartet, dance dances danced tanzen tanzt getanzt"
)
_MODALS = _parse_pairs("can können kann, must müssen muss, will werden wird, should sollen soll, may dürfen darf")
_AUXILIARIES = {"has", "have", "do", "does", *(modal[0] for modal in _MODALS)}
_SAYING = _parse_pairs("say says sagen sagt, believe believes glauben glaubt, hope hopes hoffen hofft")
_ADVERBS = _parse_pairs("today heute, now jetzt, often oft, sometimes manchmal, here hier")

_Endings = dict[str, dict[str, str]]


def _list_endings(**cases: str) -> _Endings:
    """Return the endings by case, then by gender. Plurals have one gender, "p"."""
    return {case: dict(entry.split(":") for entry in row.split(" ")) for case, row in cases.items()}


_DER = _list_endings(nom="m:der f:die n:das p:die", acc="m:den f:die n:das p:die", dat="m:dem f:der n:dem p:den")
_STRONG = _list_endings(nom="m:er f:e n:es p:e", acc="m:en f:e n:es p:e", dat="m:em f:er n:em p:en")
_MIXED = _list_endings(nom="m: f:e n: p:e", acc="m:en f:e n: p:e", dat="m:em f:er n:em p:en")
_WEAK_ADJECTIVE = _list_endings(nom="m:e f:e n:e p:en", acc="m:en f:e n:e p:en", dat="m:en f:en n:en p:en")
_MIXED_ADJECTIVE = _list_endings(nom="m:er f:e n:es p:en", acc="m:en f:e n:es p:en", dat="m:en f:en n:en p:en")


@dataclass(frozen=True)
class _Phrase:
    """A noun with its article and an optional adjective, not yet declined."""

    article: str
    adjective: tuple[str, ...]
    noun: _Noun
    plural: bool

    def english(self) -> str:
        """Return, for example, `an old man` or `these men`."""
        noun = self.noun.english_plural if self.plural else self.noun.english
        rest = [*self.adjective[:1], noun]
        article = {"this": "these", "a": ""}.get(self.article, self.article) if self.plural else self.article
        if article == "a" and rest[0][0] in "aeiou":
            article = "an"
        return " ".join(filter(None, [article, *rest]))

    def german(self, case: str, negated: bool = False) -> str:
        """Return, for example, `einen alten Mann`; `negated` turns the indefinite article into `keinen`."""
        gender = "p" if self.plural else self.noun.gender
        bare = self.article == "a" and self.plural and not negated
        if bare:
            article, endings = "", _STRONG
        elif self.article == "the":
            article, endings = _DER[case][gender], _WEAK_ADJECTIVE
        elif self.article == "this":
            article, endings = "dies" + _STRONG[case][gender], _WEAK_ADJECTIVE
        else:
            stem = "mein" if self.article == "my" else "kein" if negated else "ein"
            article, endings = stem + _MIXED[case][gender], _MIXED_ADJECTIVE
        adjective = [stem + endings[case][gender] for stem in self.adjective[1:]]
        noun = self.noun.german_plural if self.plural else self.noun.german
        if case == "dat" and self.plural and noun[-1] not in "ns":
            noun += "n"
        return " ".join(filter(None, [article, *adjective, noun]))


@dataclass(frozen=True)
class _Clause:
    """A clause in both languages; the German clause is split into the parts whose order can change."""

    subject: str
    predicate: str
    german_subject: str
    middle: str
    finite: str
    end: str
    """The infinitive or participle that follows the middle part; empty if the verb is one word."""


class _Speaker:
    """Draws sentences. It uses only random(), because Python guarantees that method's sequence for a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def _draw_one(self, of: Sequence[Any]) -> Any:
        return of[int(self._random() * len(of))]

    def _happens_by_chance(self, percent: int) -> bool:
        return self._random() < percent / 100

    def _build_phrase(self, nouns: list[_Noun], adjectives: list[tuple[str, ...]]) -> _Phrase:
        article = self._draw_one(["the", "the", "a", "this", "my"])
        adjective = self._draw_one(adjectives) if self._happens_by_chance(40) else ()
        return _Phrase(article, adjective, self._draw_one(nouns), self._happens_by_chance(30))

    def _draw_objects(self, negated: bool) -> tuple[list[tuple[str, ...]], list[str], list[str], bool]:
        """Draw verbs and their objects in both languages; the last value is whether `kein` already negates them."""
        kind = int(self._random() * 10)
        if kind < 2:
            return _INTRANSITIVE, [], [], False
        thing = self._build_phrase(_THINGS, _OF_THINGS)
        is_negated = negated and thing.article == "a"
        german = [thing.german("acc", negated=is_negated)]
        if kind < 7:
            return _TRANSITIVE, [thing.english()], german, is_negated
        receiver = self._build_phrase(_PEOPLE, _OF_PEOPLE)
        # In "does not give a man the book", `kein` would negate the man, not the verb.
        if negated and receiver.article == "a":
            receiver = _Phrase("the", receiver.adjective, receiver.noun, receiver.plural)
        return _DITRANSITIVE, [receiver.english(), thing.english()], [receiver.german("dat"), *german], is_negated

    def _draw_clause(self) -> _Clause:
        """Draw a clause: a subject and a verb, sometimes with an auxiliary, a negation and a place."""
        subject = self._build_phrase(_PEOPLE, _OF_PEOPLE)
        plural, negated = subject.plural, self._happens_by_chance(20)
        verbs, objects, german_objects, is_negated = self._draw_objects(negated)
        base, third, participle, infinitive, er, perfect = self._draw_one(verbs)
        denial = ["not"] if negated else []
        form = int(self._random() * 10)
        if form < 3:
            modal, german_plural, german_singular = self._draw_one(_MODALS)
            english = [modal, *denial, base]
            finite, end = german_plural if plural else german_singular, infinitive
        elif form < 5:
            english = ["have" if plural else "has", *denial, participle]
            finite, end = "haben" if plural else "hat", perfect
        elif negated:
            english = ["do" if plural else "does", "not", base]
            finite, end = infinitive if plural else er, ""
        else:
            english = [base if plural else third]
            finite, end = infinitive if plural else er, ""
        middle = [*german_objects, *(["nicht"] if negated and not is_negated else [])]
        if self._happens_by_chance(25):
            place = self._draw_one(_PLACES)
            objects = [*objects, f"in the {place.english}"]
            middle.append(("in der " if place.gender == "f" else "im ") + place.german)
        predicate = " ".join([*english, *objects])
        return _Clause(subject.english(), predicate, subject.german("nom"), " ".join(middle), finite, end)

    def sentence(self) -> tuple[str, str]:
        """Draw a sentence and its translation."""
        clause = self._draw_clause()
        subject, predicate, wer = clause.subject, clause.predicate, clause.german_subject
        middle, finite, end = clause.middle, clause.finite, clause.end
        shape = int(self._random() * 10)
        if shape < 3:
            adverb, german_adverb = self._draw_one(_ADVERBS)
            return f"{adverb} {subject} {predicate}.", _join_words(german_adverb, finite, wer, middle, end) + "."
        if shape < 5:
            speaker = self._build_phrase(_PEOPLE, _OF_PEOPLE)
            say, says, sagen, sagt = self._draw_one(_SAYING)
            main = f"{speaker.english()} {say if speaker.plural else says}"
            german_main = f"{speaker.german('nom')} {sagen if speaker.plural else sagt}"
            return (
                f"{main} that {subject} {predicate}.",
                f"{german_main}, {_join_words('dass', wer, middle, end, finite)}.",
            )
        auxiliary, _, rest = predicate.partition(" ")
        if shape < 6 and auxiliary in _AUXILIARIES:
            return f"{auxiliary} {subject} {rest}?", _join_words(finite, wer, middle, end) + "?"
        return f"{subject} {predicate}.", _join_words(wer, finite, middle, end) + "."


def _join_words(*parts: str) -> str:
    return " ".join(filter(None, parts))


def english_german(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return `count` different sentences with their translations; the same seed gives the same sentences."""
    speaker, drawn = _Speaker(seed), dict[str, str]()
    while len(drawn) < count:
        english, german = speaker.sentence()
        drawn[english] = german
    return list(drawn.items())
