"""`dualtune check-config` as it is called: the table, JSON, exit codes."""

import json

import pytest


def test_a_good_config_is_a_table_and_the_memory_by_part(dualtune_main, config_file, tiny_llama, open_backend):
    open_backend("torch")
    result = dualtune_main("check-config", config_file({"model.name": tiny_llama}), "--platform", "cpu")
    assert (result.returncode, result.stderr) == (0, "")
    table, _, memory = result.stdout.partition("\n\n")
    rows = [line.split()[:2] for line in table.splitlines() if not line.startswith(" ")]
    assert ["ok", "schema"] in rows and ["ok", "memory"] in rows and ["ok", "run.dir"] in rows
    assert "fail" not in {level for level, _ in rows}
    assert memory.splitlines()[0].split()[0] == "memory" and " in all" in memory.splitlines()[-1]


def test_the_platform_of_this_machine_is_chosen_unless_one_is_named(dualtune_main, config_file):
    result = dualtune_main("check-config", config_file(), "--platform", "numpy", "--json")
    rows = {row["name"]: row for row in json.loads(result.stdout)["checks"]}
    assert rows["platform"]["found"] == "numpy: as requested"
    assert rows["backend"]["found"] == "numpy honours every key"
    assert rows["memory"] == {
        "name": "memory", "level": "skipped", "found": "there is no memory estimate for the backend numpy", "fix": None,
        "mend": None, "exit_code": 4,
    }  # fmt: skip


def test_json_has_the_rows_and_the_parts_with_their_formulas(dualtune_main, config_file, tiny_llama, open_backend):
    open_backend("torch")
    result = dualtune_main("check-config", config_file({"model.name": tiny_llama}), "--machine", "h100-80", "--json")
    report = json.loads(result.stdout)
    assert (result.returncode, report["ok"]) == (0, True)
    assert set(report["checks"][0]) == {"name", "level", "found", "fix", "mend", "exit_code"}
    assert all(row["mend"] == row["fix"] for row in report["checks"])  # the old name is written too
    memory = report["memory"]
    assert memory["total_bytes"] == sum(part["bytes"] for part in memory["parts"])
    assert memory["budget_bytes"] == 81559 * 2**20 - 2**29  # what an H100 reports, less what the driver takes
    assert all(part["formula"] for part in memory["parts"])


JUDGES = """
raise SystemExit("a check runs nothing")
def judge(completion): ...
class Game: ...
"""


@pytest.mark.parametrize(("key", "value", "fault"), [
    ("rewards", ["number", "regex:a+", "judges.py:judge"], ""),
    ("rewards", ["numbers"], "got 'numbers', allowed: exact, "),
    ("rewards", ["regex:("], "got 'regex:('"),
    ("rewards", ["number", "judges.py:judges"], "judges.py has no function or class 'judges'"),
    ("rewards", ["nowhere.py:judge"], "nowhere.py is not a file"),
    ("rewards", ["sql:nowhere.sql"], "nowhere.sql is not a file"),
    ("environment", "judges.py:Game", ""),
    ("environment", "judges.py:Play", "judges.py has no function or class 'Play'"),
    ("environment", "judges:Game", "got 'judges:Game', allowed: a Python class as FILE.py:CLASS, or verifiers:NAME"),
])  # fmt: skip
def test_what_judges_answers_must_be_there_and_is_not_run(
    dualtune_main, config_file, tmp_path, monkeypatch, key, value, fault
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judges.py").write_text(JUDGES)
    rewards = {"train.objective": "grpo", "rollouts.samples": 2, f"rollouts.{key}": value}
    result = dualtune_main("check-config", config_file(rewards), "--platform", "numpy", "--json")
    rows = {row["name"]: row for row in json.loads(result.stdout)["checks"]}
    assert (rows[key]["level"], result.returncode) == (("fail", 2) if fault else ("ok", 0))
    assert fault in rows[key]["found"]


@pytest.mark.parametrize(
    ("changes", "args", "code", "row"),
    [
        ({"adapter.rank": 0}, (), 2, "schema"),
        ({"data.train": "nowhere.jsonl"}, (), 3, "data"),
        ({"model.name": "./nowhere"}, (), 4, "model"),
        ({}, ("--machine", "p100", "--platform", "mlx", "--set", "model.quantization=nf4"), 2, "backend"),
        ({"run.dir": "/dev/null/run"}, (), 5, "run.dir"),
    ],
)
def test_each_kind_of_fault_has_its_exit_code(dualtune_main, config_file, open_backend, changes, args, code, row):
    for backend in ("torch", "mlx"):
        open_backend(backend)
    result = dualtune_main("check-config", config_file(changes), *(args or ("--platform", "cpu")))
    assert result.returncode == code
    assert any(line.startswith("fail") and line.split()[1] == row for line in result.stdout.splitlines())


def test_several_problems_of_a_config_are_shown_at_once(dualtune_main, config_file):
    result = dualtune_main("check-config", config_file({"adapter.rank": 0, "adapter.dropout": 2}), "--set", "train.x=1")
    assert result.returncode == 2
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [["fail", "schema"]] * 3


@pytest.mark.parametrize("args", [["--machine", "h100-8"], ["--platform", "tpu"]])
def test_an_unknown_machine_or_platform_is_wrong_usage(dualtune_main, config_file, args):
    result = dualtune_main("check-config", config_file(), *args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {args[0]}: got '{args[1]}', allowed: ")


def test_a_config_that_is_not_there_is_told(dualtune_main, tmp_path):
    result = dualtune_main("check-config", tmp_path / "none.yaml")
    assert result.returncode == 2 and "no such file" in result.stdout
