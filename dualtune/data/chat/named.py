"""Chat templates by name: ours, each of which writes what the template of a model family writes, without tools.

A file in `templates` and its name in the schema make one. The test compares each with the renderings of its original.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from dualtune.config.values import TemplateName

NAMES: tuple[str, ...] = get_args(TemplateName)
_FOLDER = Path(__file__).parent / "templates"


def named_template(name: str) -> str:
    """Return the Jinja source of a name in NAMES. It refuses conversations with tools instead of hiding them."""
    guard, template = (_FOLDER / f"{each}.jinja" for each in ("guard", name))
    return guard.read_text(encoding="utf-8") + template.read_text(encoding="utf-8")
