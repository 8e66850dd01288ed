"""What dualtune writes has the mode that the umask gives, as what any other program writes: nothing more, nothing less.

Libraries make files of their own modes (safetensors: for the owner alone), and a mode written down in the code would
keep a group out that shares a directory under umask 002.
"""

import os
import stat

import pytest

pytestmark = pytest.mark.covering(1)


@pytest.fixture(params=[0o002, 0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
def assert_follows(umask):
    """Every file and directory below the path, itself included; returns their names."""

    def check(path):
        found = {entry: stat.S_IMODE(entry.lstat().st_mode) for entry in [path, *path.rglob("*")]}
        wanted = {entry: (0o777 if entry.is_dir() else 0o666) & ~umask for entry in found}
        wrong = {str(entry.relative_to(path)): oct(mode) for entry, mode in found.items() if mode != wanted[entry]}
        assert not wrong, wrong
        return {entry.name for entry in found}

    return check


@pytest.fixture
def succeed(dualtune_main):
    def run(*args):
        done = dualtune_main(*args)
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.mark.parametrize("platform", ["cpu", "mlx"])
def test_what_train_merge_convert_and_a_bundle_write(
    platform, open_backend, config_file, tiny_llama, succeed, assert_follows, tmp_path, monkeypatch
):
    open_backend({"cpu": "torch"}.get(platform, platform))
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path / "new" / "cache"))
    out, run = tmp_path / "new" / "out", tmp_path / "new" / "runs" / "a"
    config = config_file({"model.name": str(tiny_llama), "train.steps": 2, "run.save_every": 1, "run.dir": str(run)})
    succeed("train", config, "--platform", platform)
    adapter = run / "adapter"
    succeed("adapter", "merge", adapter, out / "merged", "--base", tiny_llama, "--platform", platform)
    succeed("adapter", "convert", adapter, out / "mlx", "--to", "mlx")
    succeed("adapter", "import", adapter, out / "imported")
    succeed("bundle", "pack", run, out / "bundle.tar")
    succeed("bundle", "unpack", out / "bundle.tar", out / "unpacked")
    succeed("push", out / "pushed", run)
    succeed("pull", out / "pushed", out / "pulled")
    succeed("preview", config, "--html", out / "page.html")
    names = assert_follows(tmp_path / "new")
    assert {"model.safetensors", "adapters.safetensors", "bundle.tar", "metrics.jsonl", "lock", "page.html"} <= names
