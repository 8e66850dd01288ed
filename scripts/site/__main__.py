"""Build the site of the documentation: `python scripts/site [DIRECTORY]`, or `make docs`.

The pages are those of docs/ and of the root. They are gathered in DIRECTORY/docs, beside a reference that is generated
from the code, and built into DIRECTORY/site (default: build/docs/site). Links out of docs/, to code and results, lead
to the repository. A broken link ends the build with an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath

from pages import ROOT, prose, with_links
from reference import PAGES

REPOSITORY = "https://github.com/dualtune/dualtune/blob/main/"
STYLE = Path(__file__).parent / "site.css"
# Pages of the root, and their place on the site.
FROM_ROOT = {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")} | {"README.md": "index.md"}


def main(directory: Path) -> int:
    shutil.rmtree(directory, ignore_errors=True)
    gather(directory / "docs")
    return build(directory)


def build(directory: Path) -> int:
    """Build DIRECTORY/docs into DIRECTORY/site. Returns the exit status: not 0 if a link is broken."""
    shutil.copyfile(ROOT / "zensical.toml", directory / "zensical.toml")
    shutil.copyfile(STYLE, directory / "docs" / STYLE.name)
    return subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=directory).returncode


def gather(directory: Path) -> None:
    """Write all pages of the site to a directory."""
    for source in sorted(path for path in (ROOT / "docs").rglob("*") if path.is_file()):
        place(source, source.relative_to(ROOT / "docs").as_posix(), directory)
    for name, target in FROM_ROOT.items():
        place(ROOT / name, target, directory)
    for name, text in PAGES.items():
        _write(directory / "reference" / name, text())


def place(source: Path, target: str, directory: Path) -> None:
    """Put a page, or a picture, where the site has it."""
    if source.suffix != ".md":
        (directory / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, directory / target)
        return
    text = source.read_text(encoding="utf-8")
    text = re.sub(r"^(<!-- .* -->)$\n(?=\|)", r"\1\n\n", text, flags=re.M)  # a table needs an empty line before it here
    _write(directory / target, prose(text, lambda line: with_links(line, lambda link: moved(link, source, target))))


def moved(link: str, source: Path, target: str) -> str:
    """A link of a page in the repository, as the page at `target` of the site has it."""
    path, mark, anchor = link.partition("#")
    if not path or re.match(r"\w+:", path):
        return link
    file = (source.parent / path).resolve().relative_to(ROOT).as_posix()
    if (ROOT / file).is_dir() and (ROOT / file / "README.md").is_file():
        file += "/README.md"
    if file in FROM_ROOT:
        place = FROM_ROOT[file]
    elif file.startswith("docs/"):
        place = file.removeprefix("docs/")
    else:
        return REPOSITORY + file + mark + anchor
    return str(PurePosixPath(*[".."] * target.count("/"), place)) + mark + anchor


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs")))
