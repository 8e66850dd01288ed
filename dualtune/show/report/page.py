"""A page from a template of this folder: one file that may not load anything, and runs only the scripts that it names.

Every value of a template is escaped as text, and invisible characters in it are shown.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dualtune.base.text import visible

FOLDER = Path(__file__).parent
MAX_TEXT = 500  # characters that the filter `cut` leaves of a value from a file


def make_page(template: str, title: str, *, style: str = "", scripts: Sequence[str] = (), **values: Any) -> str:
    """Return a page that allows this style, these scripts and nothing else.

    The scripts are ours, run after the body and know it by its ids. ValueError for one that HTML would read otherwise.
    """
    if any(word in script.lower() for script in scripts for word in ("</script", "<!--", "\r")):
        raise ValueError("a script ends early, begins a comment, or has carriage returns")
    policy = f"default-src 'none'; style-src {_hash(style)}; "
    if scripts:
        policy += f"script-src {' '.join(map(_hash, scripts))}; "
    policy += "base-uri 'none'; form-action 'none'"
    return render(template, title=title, style=style, scripts=scripts, policy=policy, **values)


def render(template: str, **values: Any) -> str:
    """Return a template of this folder, filled in."""
    return environment().get_template(template).render(values)


@functools.cache
def environment() -> Environment:
    """Return where templates are read and compiled, once a process."""
    pages = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, finalize=_shown, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    pages.filters |= {"commas": lambda number: f"{number:,}", "px": lambda number: f"{number:.1f}", "cut": cut}
    pages.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return pages


def _shown(value: object) -> object:
    return visible(value) if type(value) is str else value  # not Markup, which a template has made


def cut(text: object, most: int = MAX_TEXT) -> str:
    """Return a value from a file as text in bounded length."""
    text = str(text)
    return text if len(text) <= most else text[:most] + "…"


@functools.cache
def asset(name: str) -> str:
    """Return a style or script of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
