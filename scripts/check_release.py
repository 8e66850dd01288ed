"""Check that a tag, the version of the code and the changelog agree: python scripts/check_release.py v1.2.3"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, code: str, changelog: str) -> list[str]:
    """Return what does not agree, as text; empty if the tag can be released."""
    version = re.search(r'^VERSION = "([^"]+)"', code, re.M)
    stated = version[1] if version else "nothing"
    found = [] if tag == f"v{stated}" else [f"the tag is {tag}, but dualtune/base/versions.py says {stated}"]
    if not re.search(rf"^## {re.escape(tag.removeprefix('v'))} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.M):
        found.append(f"CHANGELOG.md has no section `## {tag.removeprefix('v')} (YYYY-MM-DD)`")
    return found


if __name__ == "__main__":
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("dualtune/base/versions.py", "CHANGELOG.md")]
    sys.exit("\n".join(problems(sys.argv[1], *texts)) or None)
