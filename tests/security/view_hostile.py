"""Hostile bytes for a terminal, by what they try, for test_view_hostile.py and other tests."""

from __future__ import annotations

from gpurun.core.untrusted import MAX_LINE_BYTES

HOSTILE: dict[str, bytes] = {
    "colour": b"\x1b[31mred\x1b[0m",
    "clear screen and home": b"\x1b[2J\x1b[H gone",
    "set the clipboard (OSC 52)": b"\x1b]52;c;cm0gLXJmIH4=\x07after",
    "set the clipboard, ended by ST": b"\x1b]52;c;cm0gLXJmIH4=\x1b\\after",
    "an OSC that never ends": b"\x1b]0;title" + b"x" * 10_000,
    "device control string": b'\x1bP$q"p\x1b\\after',
    "answer-back request": b"\x1b[c\x1b[6n\x05",
    "C1 CSI as a byte": b"\x9b31mred",
    "C1 CSI in UTF-8": "\x9b31mred\x9d52;c;eA==\x9c".encode(),
    "an escape inside an escape": b"\x1b\x1b[0m[31mred\x1b]\x1b]52;c;x\x07\x07",
    "bell, backspaces, delete": b"\x07\x08\x08\x7fbell",
    "carriage return": b"device: cpu\rdevice: cuda",
    "progress bar": b"\r 10%\r 20%\r 30%\n",
    "vertical movement": b"a\x0bb\x0cc\nd\x85e",
    "line separators": "a\u2028b\u2029c".encode(),
    "bidi override": "harmless \u202egpj.exe \u2066x\u2069".encode(),
    "zero width": "to\u200bken\u200d\ufeff\u2060".encode(),
    "tag characters": "a\U000e0041\U000e007f".encode(),
    "a tower of marks": ("e" + "\u0301" * 500).encode(),
    "invisible letters": "\u3164\u115f\uffa0".encode(),
    "invalid UTF-8": b"\xff\xfe\xc3\x28\xa0\xa1\xf0\x28\x8c\xbc",
    "a surrogate": "\ud800".encode("utf-8", "surrogatepass"),
    "an unfinished character at the cut": b"a" * (MAX_LINE_BYTES - 1) + "é".encode(),
    "markup": b"[bold red]x[/bold red] [link=file:///etc/passwd]y[/link] [/]",
    "html": b"<script>alert(1)</script><img src=x onerror=y>",
    "nothing": b"",
    "all bytes": bytes(range(256)) * 20,
}
