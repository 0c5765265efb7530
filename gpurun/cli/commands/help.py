"""`gpurun help`: show a verb's help or a page of docs/."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError, did_you_mean
from gpurun.core.installed_files import page

app = typer.Typer(rich_markup_mode=None)


def _complete_topic(incomplete: str) -> list[str]:
    return [name for name in (*_topics(), *_verbs()) if name.startswith(incomplete)]


Topics = Annotated[list[str], typer.Argument(metavar="TOPIC", help="A verb or a page.", autocompletion=_complete_topic)]


@verb(app, "help", examples=["gpurun help", "gpurun help train", "gpurun help receipts"])
def show_help(
    session: Session,
    words: Topics = [],  # noqa: B006
) -> Result:
    """Show a verb's help or a page of the handbook; without a topic, list both."""
    topics = _topics()
    if not words:
        wide = max(map(len, topics))
        listed = "\n".join(f"  {name.ljust(wide)}  {title}" for name, title in topics.items())
        text = f"{_help_text([])}\n\nPages (gpurun help PAGE):\n{listed}"
        return Result(data={"verbs": list(_verbs()), "pages": topics}, text=text)
    name = words[0].lower()
    if name in _verbs():
        return Result(data={"verb": name}, text=_help_text(words))
    if name in topics and len(words) == 1:
        text = page(f"{name.removesuffix('.md').upper()}.md").read_text(encoding="utf-8")
        return Result(data={"page": name}, text=text)
    hint = did_you_mean(name, (*topics, *_verbs()), otherwise="gpurun help lists all verbs and pages.")
    raise UsageError("help.unknown", f"There is no verb or page {' '.join(words)!r}.", hint=hint)


def _verbs() -> tuple[str, ...]:
    from gpurun.cli.app import VERBS

    return tuple(VERBS)


def _topics() -> dict[str, str]:
    """Return each page's title, keyed by name; a page with the same name as a command keeps its `.md`."""
    verbs, pages = _verbs(), sorted(path for path in page("").glob("*.md") if path.stem != "README")
    names = {path: path.stem.lower() for path in pages}
    return {
        f"{name}.md" if name in verbs else name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        for path, name in names.items()
    }


def _help_text(words: list[str]) -> str:
    """Return what `gpurun WORDS --help` shows."""
    from gpurun.cli.app import build_app

    command: Any = typer.main.get_command(build_app())
    context = typer.Context(command, info_name="gpurun", **command.context_settings)
    for number, word in enumerate(words):
        found = command.get_command(None, word) if hasattr(command, "get_command") else None
        if found is None:
            hint = f"gpurun help {' '.join(words[:number])} lists its verbs."
            raise UsageError("help.unknown", f"There is no verb {' '.join(words)!r}.", hint=hint)
        command, context = found, typer.Context(found, info_name=word, parent=context)
    return str(command.get_help(context))
