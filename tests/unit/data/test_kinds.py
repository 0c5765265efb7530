"""Tests that a file that is not text is refused by its kind, with a command line that converts it to text."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.unit.data.layouts import opened, refused, texts

RUSSIAN = "Однажды весною, в час небывало жаркого заката, в Москве появились два гражданина.\n" * 20
ENGLISH = "It’s a truth universally acknowledged — “Yes,” she said, and no more.\n" * 20
FRENCH = "Il était une fois une petite fille de village, la plus éclatante qu’on eût su voir.\n" * 20
POLISH = "Litwo! Ojczyzno moja! ty jesteś jak zdrowie; Ile cię trzeba cenić, ten tylko się dowie.\n" * 20
GERMAN = "Es war einmal ein Müller, der war arm, aber er hatte eine schöne Tochter.\n" * 20
PAGE = "<p>Some <b>text</b> of a page.</p>\n" * 20


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        *((RUSSIAN, encoding) for encoding in ("cp1251", "koi8-r", "utf-16", "utf-16-le")),
        *((text, "cp1252") for text in (ENGLISH, FRENCH, GERMAN)),
        (POLISH, "cp1250"),
        (ENGLISH, "utf-16-be"),
    ],
    ids=["ru-1251", "ru-koi8", "ru-16", "ru-16le", "en-1252", "fr-1252", "de-1252", "pl-1250", "en-16be"],
)
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_the_line_for_another_encoding_converts_it_rightly(
    tmp_path: Path, text: str, encoding: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {
        "a.txt": text,
        "a.csv": "id,text\n" + "".join(f'{n},"{line}"\n' for n, line in enumerate(text.splitlines())),
        "a.jsonl": "".join(f'{{"text": "{line}"}}\n' for line in text.splitlines()),
    }[name]
    (tmp_path / name).write_bytes(content.encode(encoding))
    with pytest.raises(Exception, match="not UTF-8") as error:
        texts(tmp_path / name)
    line = error.value.hint.partition(": ")[2]  # type: ignore[attr-defined]
    assert encoding != "cp1250" or "CP1250 (jesteś) or CP1252 (jesteœ)" in str(error.value)
    assert line.startswith("iconv -f ")
    monkeypatch.chdir(tmp_path)
    subprocess.run(line, shell=True, check=True)
    made = tmp_path / f"a-utf8{Path(name).suffix}"
    assert made.read_text(encoding="utf-8").removeprefix("\ufeff") == content


def test_an_encoding_that_is_not_clear_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text " * 4000 + b"\x81\x8d")
    refused(tmp_path / "a.txt", "data.not_utf8", "byte 0x81 at offset 20000", "iconv -f ENCODING")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.html", "<!DOCTYPE html>\n<html><body>" + PAGE),
        ("page", '<?xml version="1.0"?>\n<!-- made -->\n<HTML lang="en"><body>' + PAGE),
        ("part.htm", PAGE),
    ],
)
def test_html_is_named_and_in_a_folder_passed_over(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    refused(tmp_path / name, "data.no_text", "it is HTML", "pandoc -f html -t plain", "jq -Rsc '{text: .}'")
    refused(tmp_path, "data.empty", "1 HTML", f"For {name}: ", "pandoc")
    (tmp_path / "a.txt").write_text("A text with <b> in it.\n" * 90)
    assert opened(tmp_path).passed_over == {"HTML": 1}


def office(path: Path, names: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in names.items():
            archive.writestr(name, content)


def test_documents_that_are_zips_are_named_and_no_archives(tmp_path: Path) -> None:
    types = {"[Content_Types].xml": "<Types/>"}
    made = {
        "a.docx": (types | {"word/document.xml": "<a>text</a>"}, "(docx)", "pandoc -f docx"),
        "a.xlsx": (types | {"xl/workbook.xml": "<a>text</a>"}, "(xlsx)", "UTF-8"),
        "a.epub": ({"mimetype": "application/epub+zip", "META-INF/container.xml": "<a/>"}, "EPUB", "pandoc -f epub"),
        "a.odt": ({"content.xml": "<a/>", "META-INF/manifest.xml": "<a/>"}, "(odt)", "pandoc -f odt"),
        "a.pt": ({"archive/data.pkl": "x", "archive/version": "3\n"}, "PyTorch", "UTF-8"),
        "b.zip": (types | {"word/document.xml": "<a>text</a>"}, "(docx)", "pandoc -f docx"),
    }
    for name, (names, kind, line) in made.items():
        office(tmp_path / name, names)
        refused(tmp_path / name, "data.no_text", kind, line)
    (tmp_path / "a.rtf").write_text(r"{\rtf1\ansi Some text.}")
    refused(tmp_path / "a.rtf", "data.no_text", "RTF", "soffice --headless")
    (tmp_path / "texts.txt").write_text("A text.\n" * 500)
    assert [file.name for file in opened(tmp_path).files] == ["texts.txt"]
