"""The live view's window. It redraws a terminal in place when its caller requests it; it has no thread, clock or input.

Only this module imports rich. rich gets styled text that was already made harmless, and does not interpret markup in
it.
"""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from gpurun.view.live_layout import live_screen
from gpurun.view.live_state import Screen
from gpurun.view.style import Style
from gpurun.view.styled_text import Line, spell

if TYPE_CHECKING:
    from rich.text import Text

_LOOKS = {
    "title": "bold",
    "dim": "dim",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "accent": "cyan",
    "money": "bold",
}


class LiveWindow:
    """A context manager inside which `show` redraws the view. Use `PlainView` if `style.redraw` is false.

    The last picture stays on the terminal, unless `keep` is false. Leaving restores the cursor, even after an
    exception.
    """

    def __init__(self, stream: TextIO, style: Style, *, keep: bool = True) -> None:
        from rich.console import Console
        from rich.live import Live

        self._style = style
        self._console = Console(
            file=stream,
            force_terminal=True,
            color_system="standard",
            no_color=False,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
        )
        self._size = self._console.size
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=not keep,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, screen: Screen, *, now: float, keys: bool = False, helps: bool = False) -> None:
        """Draw the screen for the current size of the terminal; see `live_screen`."""
        if self._console.size != self._size:
            # A narrower terminal has wrapped the old picture, and rich cannot know where its lines are now.
            self._size = self._console.size
            self._console.clear()
        style = replace(self._style, width=self._size.width, height=self._size.height)
        self._live.update(_to_rich(live_screen(screen, style, now=now, keys=keys, helps=helps), style), refresh=True)


def _to_rich(lines: list[Line], style: Style) -> Text:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop", end="")
    for index, spans in enumerate(lines):
        if index:
            text.append("\n")
        for span in spans:
            shown = spell(span, style)
            text.append(shown.text, _LOOKS.get(shown.look))
    return text
