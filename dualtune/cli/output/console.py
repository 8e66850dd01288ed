"""The console of rich, for bars and tables, which escapes foreign text like `terminal.say`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from dualtune.text.escape import visible


class Console(rich.console.Console):
    """A console that prints text literally: brackets are no markup, and only rich's own control codes get through."""

    def __init__(self, file: IO[str] | None = None) -> None:
        super().__init__(file=file, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
