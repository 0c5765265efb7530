"""Builds the pages as a static site that needs no network: `make docs`, into build/site.

The pages keep their paths, so that a link works there as in the repository; the menu is made from docs/README.md's
tables. A broken link, or a page that is in no table, ends the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
PATHS = "Where to begin"
"""The index's table for readers, whose pages are also below the other headings."""
VALIDATION = {"links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "ignore"}}
_QUIET = re.compile(r"INFO|  - |$")
_HEADING, _ROW = re.compile(r"^## (.+)$"), re.compile(r"\[([^\]]+)\]\(([^)#]+\.md)\)")


def staged(folder: Path) -> None:
    """Copy everything that a page may link to."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        if not (ROOT / name).is_file():
            continue
        if name in PAGES or name.startswith(("docs/", "recipes/", "trainer/", "tests/", ".ci/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def menu() -> list[dict[str, object]]:
    """Return the index's tables as a menu, followed by the decision records."""
    sections: list[dict[str, object]] = [{"gpurun": "README.md"}]
    pages: list[dict[str, str]] = []
    for line in (ROOT / "docs" / "README.md").read_text(encoding="utf-8").splitlines():
        if heading := _HEADING.match(line):
            pages = []
            sections.append({PATHS: "docs/README.md"} if heading[1] == PATHS else {heading[1]: pages})
        elif line.startswith("|") and (row := _ROW.search(line)):
            path = (ROOT / "docs" / row[2]).resolve().relative_to(ROOT)
            pages.append({row[1]: str(path)})
    return [section for section in sections if next(iter(section.values()))]


def main() -> int:
    """Stage the pages, write the configuration, and run mkdocs; return its exit code."""
    source, config = BUILD / "site-source", BUILD / "mkdocs.yml"
    staged(source)
    settings = {
        "site_name": "gpurun",
        "docs_dir": str(source),
        "site_dir": str(BUILD / "site"),
        "use_directory_urls": False,
        "theme": {
            "name": "material", "font": False, "features": ["navigation.sections", "content.code.copy"],
            "palette": [
                {"media": f"(prefers-color-scheme: {scheme})", "scheme": name, "primary": "indigo"}
                for scheme, name in (("light", "default"), ("dark", "slate"))
            ],
        },
        "plugins": ["search", "offline"],
        "markdown_extensions": [
            "tables", "admonition", {"toc": {"permalink": True}},
            {"pymdownx.superfences": {"custom_fences": [{"name": "mermaid", "class": "mermaid"}]}},
        ],
        "validation": VALIDATION,
        "nav": menu(),
    }  # fmt: skip
    config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return built(config)


def built(config: Path) -> int:
    """Run mkdocs, show only its warnings, and return 1 if there is one.

    Its own -q removes the warnings before --strict counts them.
    """
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.writelines(line for line in done.stderr.splitlines(keepends=True) if not _QUIET.match(line))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
