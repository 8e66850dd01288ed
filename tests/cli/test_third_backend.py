"""A backend from outside the tree: the NumPy engine as a package of its own, with its own metadata and card.

Nothing of dualtune knows its name, and every command works with it, or refuses it in its card's words.
"""

import json
from pathlib import Path

import pytest

from dualtune.engine.testing import numpy_engine

METADATA = "Metadata-Version: 2.1\nName: dualtune-outsider\nVersion: 1.2.3\nRequires-Dist: outsider-kernels>=7\n"
ENTRY_POINTS = (
    "[dualtune.backends]\noutsider = outsider.engine:backend\n\n[dualtune.cards]\noutsider = outsider.card:CARD\n"
)
CARD = """
from dualtune.engine.card import Card, Device, MemoryFormulas, Package
from dualtune.engine.memory.estimate import MemoryPart


def parts(decoder, ask):
    return (MemoryPart("weights", 8 * decoder.num_parameters, "everything in float64"),)


CARD = Card(
    name="outsider",
    title="Outsider",
    devices=(Device("cpu", auto_dtype="float64"),),
    platforms=("outsider",),
    honoured={"model.init": ("pretrained",), "data.packing": (False, True)},
    package=Package(distribution="dualtune-outsider", recorded=("dualtune-outsider",), detected=("dualtune-outsider",)),
    memory=MemoryFormulas(parts),
)
"""
# Runs several commands in one process: JSON of [code, stdout, stderr] of each.
DRIVER = """
import contextlib, io, json, sys
from dualtune.cli.main import main
found = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["dualtune", *words]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        found.append([end.code or 0, out.getvalue(), err.getvalue()])
print(json.dumps([found, sorted(name for name in ("torch", "mlx") if name in sys.modules)]))
"""
HERE = ("--platform", "outsider")


def install(site: Path) -> None:
    """The package and its metadata, as pip would leave them."""
    source = Path(numpy_engine.__file__).read_text(encoding="utf-8")
    engine = source.replace("from dualtune.engine.testing.numpy_card import", "from outsider.card import")
    assert engine != source
    package, info = site / "outsider", site / "dualtune_outsider-1.2.3.dist-info"
    package.mkdir()
    info.mkdir()
    files = {
        package / "__init__.py": "", package / "engine.py": engine, package / "card.py": CARD,
        info / "METADATA": METADATA, info / "entry_points.txt": ENTRY_POINTS,
    }  # fmt: skip
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def outsider(tmp_path, python):
    """Run commands where the package is installed: (code, stdout, stderr) of each."""
    site = tmp_path / "site"
    site.mkdir()
    install(site)

    def run(*commands):
        words = [[str(word) for word in command] for command in commands]
        result = python("-c", DRIVER, json.dumps(words), env={"PYTHONPATH": str(site)}, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        found, frameworks = json.loads(result.stdout.splitlines()[-1])
        run.frameworks = frameworks
        assert len(found) == len(commands)
        return found

    return run


def test_every_command_that_uses_an_engine_works(outsider, config_file, tiny_softmax, tmp_path):
    config, adapter = config_file(), tmp_path / "runs" / "a" / "adapter"
    found = outsider(
        ("train", config, *HERE),
        ("eval", config, "--adapter", adapter, *HERE, "--json"),
        ("generate", tiny_softmax, "--adapter", adapter, "--prompt", "1 plus 1?", "--max-tokens", 4, *HERE),
        ("verify", adapter, "--base", tiny_softmax, *HERE, "--json"),
        ("adapter", "merge", adapter, tmp_path / "merged", "--base", tiny_softmax, *HERE),
        ("bench", config, "--steps", 2, "--warmup", 1, "--out", tmp_path / "bench", *HERE),
    )
    assert [(code, err) for code, _, err in found if code] == []
    assert "platform    outsider: as requested" in found[0][1] + found[0][2]
    environment = json.loads((tmp_path / "runs" / "a" / "environment.json").read_text())
    assert environment["backend"] == "outsider"
    assert environment["packages"]["dualtune-outsider"] == "1.2.3"
    assert json.loads(found[3][1])["verdict"] == "same"
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "bench" / "result.json").read_text())["environment"]["backend"] == "outsider"
    assert outsider.frameworks == []


def test_every_command_that_checks_asks_the_card(outsider, config_file):
    config = config_file()
    known = ("--set", "model.name=Qwen/Qwen3-0.6B", "--set", "adapter.targets=[q_proj]")
    found = outsider(
        ("check-gpu", "--json"),
        ("check-env", "--for", "outsider", "--json"),
        ("check-config", config, *known, *HERE, "--json"),
        ("check-config", config, *HERE, "--set", "model.quantization=nf4"),
        ("train", "--help"),
    )
    gpu, env, checked = (json.loads(out) for _, out, _ in found[:3])
    assert gpu["machine"]["packages"]["dualtune-outsider"] == "1.2.3"
    rows = {row["name"]: row for row in env["checks"]}
    assert rows["outsider-kernels"]["fix"] == "pip install dualtune-outsider"  # its own requirement, and its command
    rows = {row["name"]: row for row in checked["checks"]}
    assert rows["backend"]["found"] == "outsider honours every key"
    assert rows["memory"]["found"].startswith("needs 4.4 GiB, has ")  # 8 B for each of 596 million parameters
    assert (found[3][0], "the backend 'outsider' honours: auto, none" in found[3][1]) == (2, True)
    assert "auto|mlx|outsider|cuda|cpu|cuda:N" in "".join(found[4][1].split())
    assert outsider.frameworks == []


def test_what_it_cannot_do_is_refused_in_a_sentence(outsider, config_file, tmp_path):
    config = config_file()
    found = outsider(
        ("launch", config, "--on", "local", *HERE),
        ("launch", config, "--on", "mlx", *HERE),
        ("validate", "--tier", "quick", "--platform", "outsider", "--out", tmp_path / "out"),
        ("train", config, "--platform", "outsider:1"),
        ("check-env", "--for", "nobody"),
    )
    said = [(code, " ".join(err.split())) for code, _, err in found]
    assert said[0] == (2, "Error: --platform: got 'outsider', --on local takes cuda or cpu: torchrun runs torch")
    assert said[1] == (2, "Error: --platform: got 'outsider', --on mlx takes mlx: mlx.launch runs MLX")
    assert said[2][0] == 4 and "the backend 'outsider' has no 4-bit weights" in said[2][1]
    assert said[3][0] == 2 and "--platform: got 'outsider:1', allowed: auto, mlx, outsider, cuda" in said[3][1]
    assert said[4][0] == 2 and "--for: got 'nobody', allowed: auto, h100, m4, rtx, cpu, mlx, numpy" in said[4][1]


def test_a_card_that_cannot_be_read_is_named(tmp_path, python):
    install(tmp_path)
    (tmp_path / "outsider" / "card.py").write_text("import a_module_that_nobody_has\n")
    code = "from dualtune.cli.main import main; main()"
    result = python("-c", code, "check-gpu", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 4, result.stderr
    assert "The card of the backend 'outsider' (outsider.card:CARD) cannot be read" in " ".join(result.stderr.split())


def test_a_backend_without_a_card_is_chosen_by_its_name(tmp_path, python, config_file):
    install(tmp_path)
    (tmp_path / "dualtune_outsider-1.2.3.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS.partition("\n\n")[0])
    words = ("-m", "dualtune.cli.main", "train", config_file(), *HERE)
    result = python(*words, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs" / "a" / "adapter").is_dir()
