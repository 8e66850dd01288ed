"""Record `dualtune train --demo` on a pseudo-terminal and draw it: docs/pictures/demo.cast and demo.svg.

    python scripts/record_demo.py            # record, then draw
    python scripts/record_demo.py --redraw   # draw what was recorded before

demo.cast holds the output of the command with its times, in the format of asciinema (asciicast v2). demo.svg plays it
by CSS animation, without a script, and shows the last screen if animation is off. The only change to the output is that
the path of this clone becomes ~/dualtune.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
CAST, SVG = PICTURES / "demo.cast", PICTURES / "demo.svg"
SHOWN_ROOT = "~/dualtune"
COMMAND = ("dualtune", "train", "--demo")
COLUMNS, ROWS = 80, 24

PLAY_S = 14.0  # duration of the playback: longer recordings are played faster
HOLD_S = 6.0  # how long the last screen stays before the animation begins again
LEAST_S = 0.06  # of playback time: changes closer together are drawn as one
CHAR, LINE, PAD, FONT = 8.4, 19, 16, 14  # px
STYLE = """
rect{fill:#fff;stroke:#d0d7de}text{fill:#1f2328;white-space:pre}
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}
.p{fill:#0969da}.t{visibility:hidden}
@media(prefers-color-scheme:dark){rect{fill:#0d1117;stroke:#30363d}text{fill:#e6edf3}.p{fill:#58a6ff}}
@media(prefers-reduced-motion:reduce){*{animation:none!important}}
""".strip()

Event = tuple[float, str]  # seconds since the start, what was written


# --- record ---


def record(command: tuple[str, ...] = COMMAND) -> list[Event]:
    """Run a command of this Python's environment on a terminal, in an empty directory, and return its output.

    Its cache is empty too, as on a fresh machine. Raises SystemExit with the end of its output if the command fails.
    """
    found = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as directory:
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(directory)
            changes = {
                "TERM": "xterm-256color",
                "PATH": f"{found}:{os.environ['PATH']}",
                "DUALTUNE_CACHE": f"{directory}/cache",
            }
            os.execve(found / command[0], command, os.environ | changes)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        events = list(_read(terminal))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}:\n{''.join(text for _, text in events)[-2000:]}")
    return events


def _read(terminal: int):
    began, rest = time.monotonic(), b""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # on Linux, when the other side is closed
            data = b""
        if not data:
            return
        data = rest + data
        text = data.decode(errors="ignore")  # ignore a character that is cut at the end
        rest = data[len(text.encode()) :]
        yield round(time.monotonic() - began, 3), text


def cast_of(events: list[Event]) -> str:
    """Return an asciicast v2 file: a header, then a line for each event. The path of the clone becomes ~/dualtune."""
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": " ".join(COMMAND)}
    rows = [header, *([t, "o", text.replace(str(ROOT), SHOWN_ROOT)] for t, text in events)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def events_of(cast: str) -> list[Event]:
    _, *rows = map(json.loads, cast.splitlines())
    return [(t, text) for t, _, text in rows]


# --- replay ---


@dataclass
class Screen:
    """The lines of a terminal, including those scrolled away. It knows the control codes of rich and refuses others."""

    lines: list[str] = field(default_factory=lambda: [""])
    row: int = 0
    column: int = 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+|\x1b", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self._down()
            elif part.startswith("\x1b"):
                self._control(part[2:])
            else:
                self._put(part)

    def _control(self, code: str) -> None:
        if code == "2K":
            self.lines[self.row] = ""
        elif re.fullmatch(r"\d*A", code):
            self.row -= int(code[:-1] or 1)
        elif code not in ("?25l", "?25h") and not code.endswith("m"):  # the cursor and colours are not drawn
            raise ValueError(f"control code ESC[{code}: not known to this script; add it to Screen")

    def _put(self, text: str) -> None:
        while text:
            if self.column == COLUMNS:
                self._down()
                self.column = 0
            here, text = text[: COLUMNS - self.column], text[COLUMNS - self.column :]
            line = self.lines[self.row].ljust(self.column)
            self.column += len(here)
            self.lines[self.row] = line[: self.column - len(here)] + here + line[self.column :]

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")


@dataclass(frozen=True)
class Shown:
    """The text of a line, and when it is shown (end None: until the end)."""

    row: int
    text: str
    start: float
    end: float | None


def played(events: list[Event]) -> list[Event]:
    """Scale the times of the events evenly to the playback."""
    speed = max(1.0, events[-1][0] / PLAY_S)
    return [(t / speed, text) for t, text in events]


def replay(events: list[Event]) -> tuple[list[Shown], list[tuple[float, int]]]:
    """Return what each line shows when, and (time, number of lines scrolled away). The prompt is line 0."""
    screen, shown, scrolled = Screen(), list[Shown](), [(0.0, 0)]
    screen.write(f"$ {' '.join(COMMAND)}\r\n")
    since: dict[int, tuple[float, str]] = {}
    drawn = -LEAST_S  # so that the prompt is there from the start
    events = [(0.0, ""), *events]
    following = [*(t for t, _ in events[1:]), float("inf")]
    for (t, text), then in zip(events, following, strict=True):
        screen.write(text)
        if then - drawn < LEAST_S:
            continue
        drawn = t
        for row, line in enumerate(screen.lines):
            start, before = since.get(row, (0.0, ""))
            if line.rstrip() != before:
                if before:
                    shown.append(Shown(row, before, start, t))
                since[row] = (t, line.rstrip())
        away = max(0, len(screen.lines) - ROWS)
        if away != scrolled[-1][1]:
            scrolled.append((t, away))
    shown += [Shown(row, text, start, None) for row, (start, text) in since.items() if text]
    return sorted(shown, key=lambda line: (line.row, line.start)), scrolled


# --- draw ---


def draw(events: list[Event]) -> str:
    """Return the animated SVG. Keyframe times are shares of one loop: the recording, then a pause."""
    events = played(events)
    shown, scrolled = replay(events)
    whole = events[-1][0] + HOLD_S
    width, height = COLUMNS * CHAR + 2 * PAD, ROWS * LINE + 2 * PAD
    names: dict[tuple[float, float | None], str] = {}
    texts = [_text(line, names.setdefault((line.start, line.end), f"k{len(names)}")) for line in shown]
    # Move up by one line height for each line scrolled away.
    moves = "".join(f"{_share(t, whole)}{{transform:translateY({-LINE * away}px)}}" for t, away in scrolled)
    style = [
        STYLE,
        f"text,g g{{animation:{whole:.1f}s step-end infinite}}",
        f"g g{{transform:translateY({-LINE * scrolled[-1][1]}px);animation-name:s}}@keyframes s{{{moves}}}",
        *(f".{name}{{animation-name:{name}}}@keyframes {name}{{{_keys(*at, whole)}}}" for at, name in names.items()),
    ]
    label = f"A terminal recording of {' '.join(COMMAND)}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}" '
        f'role="img" aria-label="{label}">',
        f"<style>{chr(10).join(style)}</style>",
        f'<clipPath id="c"><path d="M0 {PAD}h{width:g}v{ROWS * LINE + 4}H0z"/></clipPath>',
        f'<rect x=".5" y=".5" width="{width - 1:g}" height="{height - 1}" rx="8"/>',
        '<g clip-path="url(#c)"><g>',
        *texts,
        "</g></g></svg>\n",
    ])  # fmt: skip


def _text(line: Shown, name: str) -> str:
    """Return a text element. `textLength` keeps the columns aligned if the font is not monospaced."""
    kind = "p " if line.row == 0 else "" if line.end is None else "t "
    at = f'x="{PAD}" y="{PAD + line.row * LINE + FONT}" textLength="{len(line.text) * CHAR:.1f}"'
    return f'<text class="{kind}{name}" {at}>{escape(line.text)}</text>'


def _keys(start: float, end: float | None, whole: float) -> str:
    keys = [(0.0, "hidden")] if start > 0 else []
    keys += [(start, "visible")] + ([(end, "hidden")] if end is not None else [])
    return "".join(f"{_share(t, whole)}{{visibility:{value}}}" for t, value in keys)


def _share(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.5g}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="draw the existing recording again")
    if not parser.parse_args().redraw:
        CAST.write_text(cast_of(record()), encoding="utf-8")
    SVG.write_text(draw(events_of(CAST.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"{SVG.relative_to(ROOT)}: {SVG.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
