"""What the checking commands do not import: torch and transformers take seconds, and nothing here needs them."""

import json

import pytest

HEAVY = ("torch", "transformers", "accelerate", "bitsandbytes", "mlx")
PROGRAM = """
import json, sys
from dualtune.cli.main import main
for words, codes in json.loads(sys.argv[1]):
    sys.argv = ["dualtune", *words]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    assert code in codes, (words, code)
    found = sorted({name.partition(".")[0] for name in sys.modules} & {*HEAVY})
    assert found == [], (words, found)
"""


@pytest.fixture
def import_nothing_heavy(python, tmp_path):
    """Run commands, each with the exit codes that it may have, one after another in a process that imports little."""

    def run(*calls) -> str:
        table = json.dumps([[[str(word) for word in words], codes] for words, codes in calls])
        result = python("-c", f"HEAVY = {HEAVY!r}{PROGRAM}", table, cwd=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


@pytest.fixture
def config_file(tmp_path, tiny_llama, write_rows):
    data = write_rows([{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes."}]}
                       for i in range(20)])  # fmt: skip
    settings = {"model": {"name": str(tiny_llama)}, "data": {"train": str(data), "max_length": 64, "eval": 0},
                "adapter": {"targets": "all-linear"}, "run": {"dir": str(tmp_path / "run")}}  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(settings))
    return path


def test_checking_imports_no_framework(import_nothing_heavy, config_file):
    pytest.importorskip("torch")
    options = {"check-config": ["--platform", "cpu"], "preview": [], "check-data": []}
    calls = [([command, config_file, *words], [0]) for command, words in options.items()]
    import_nothing_heavy(*calls, (["check-config", config_file, "--machine", "h100-80"], [0]))


def test_help_and_the_look_at_a_machine_import_no_framework(import_nothing_heavy):
    """They read every backend's card."""
    words = (["--help"], ["train", "--help"], ["check-gpu"], ["check-gpu", "--help"])
    import_nothing_heavy(*((each, [0, 4]) for each in words))


BROKEN = {
    "config": ({"adapter": {"rank": 0}}, 2),
    "value of the backend": ({"model": {"kernels": "graph"}}, 2),
    "data": ({"data": {"train": "nowhere.jsonl"}}, 3),
    "row": ({"data": {"train": "bad.jsonl"}}, 3),
    "model": ({"model": {"name": "./nowhere"}}, 4),
    "steps": ({"train": {"steps": 4, "warmup": 9}}, 2),
    "memory": ({"memory": {"limit": "1MB"}}, 2),
    "run directory": ({"run": {"dir": "bad.jsonl"}}, 2),
    "disk": ({"adapter": {"rank": 10**11, "alpha": 1}}, 5),
}


def test_an_error_of_a_run_comes_before_the_framework_is_imported(import_nothing_heavy, config_file, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "bad.jsonl").write_text('{"messages": 1}\n')
    calls = []
    for what, (changes, code) in BROKEN.items():
        settings = json.loads(config_file.read_text())
        for section, values in changes.items():
            settings[section] = settings.get(section, {}) | values
        file = tmp_path / f"wrong {what}.yaml"
        file.write_text(json.dumps(settings))
        calls.append((["train", file, "--platform", "cpu"], [code]))
    import_nothing_heavy(*calls)


def test_a_finished_run_imports_no_framework(import_nothing_heavy, config_file, dualtune_main):
    pytest.importorskip("torch")
    settings = json.loads(config_file.read_text()) | {"train": {"steps": 1}}
    config_file.write_text(json.dumps(settings))
    assert dualtune_main("train", config_file, "--platform", "cpu").returncode == 0
    said = import_nothing_heavy((["train", config_file, "--platform", "cpu"], [0]))
    assert "finished    this run has already ended, after 1 steps" in said


def test_a_model_that_is_not_there_is_told_before_the_framework_is_imported(import_nothing_heavy, tmp_path):
    pytest.importorskip("torch")
    options = {"generate": ["--prompt", "Hello"], "chat": [], "serve": []}
    calls = ([command, tmp_path / "nowhere", *words, "--platform", "cpu"] for command, words in options.items())
    import_nothing_heavy(*((words, [4]) for words in calls))
