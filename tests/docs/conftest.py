"""What the tests of the documentation share: its pages, the scripts that read and build them, a browser."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts" / "site"), str(Path(__file__).parent)]


@pytest.fixture(scope="session")
def chromium():
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    return browser or pytest.skip("needs Chromium (Debian: chromium)")
