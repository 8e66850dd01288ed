"""Help, the config commands and the manners of a console program. Help is quick because it imports nothing heavy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualtune.cli.main import COMMANDS
from dualtune.config import load_config, parse_config

HEAVY = {"torch", "mlx", "transformers", "numpy", "pydantic", "rich", "huggingface_hub"}
FRAMEWORKS = {"torch", "mlx", "transformers"}
SUBCOMMANDS = [
    *([name] for name in COMMANDS),
    *(["adapter", name] for name in ("inspect", "convert", "import", "diff", "merge")),
    ["memory", "ablate"],
    ["data", "clean"],
    ["distill", "record"],
    *(["bench", name] for name in ("lora-backward", "attention")),
    *(["runs", name] for name in ("compare", "clean")),
    *(["bundle", name] for name in ("pack", "inspect", "unpack")),
]


def imported_by(python, code: str) -> set[str]:
    """The top-level modules that a program has imported when it ends."""
    program = f"import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{code}"
    result = python("-c", program)
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in result.stderr.split()}


def call(*args: str) -> str:
    return f"sys.argv = {['dualtune', *args]!r}\nfrom dualtune.cli.main import main\nmain()"


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command(dualtune_main):
    result = dualtune_main("--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert {
        "check-gpu", "check-env", "check-config", "check-data", "preview", "train", "bench", "validate", "eval",
        "generate", "plan", "runs", "profile", "memory", "checkpoints", "verify", "bundle", "push", "pull", "launch",
        "adapter", "config", "hybrid", "selftest", "chat", "report", "serve", "data", "watch", "export", "track",
        "sweep", "quantize", "distill", "tunnel",
    } == COMMANDS.keys()  # fmt: skip
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)
    assert dualtune_main("-h").stdout == result.stdout


@pytest.mark.parametrize("code", ["import dualtune.cli.main", call("--help"), call("--version")])
def test_help_imports_nothing_heavy(python, code):
    assert not HEAVY & imported_by(python, code)


def test_the_package_imports_nothing_heavy(python):
    assert not HEAVY & imported_by(python, "import dualtune, dualtune.base.errors")


@pytest.mark.parametrize("command", SUBCOMMANDS, ids=" ".join)
def test_every_command_has_help(dualtune_main, command):
    result = dualtune_main(*command, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: dualtune {' '.join(command)} ")


def test_help_of_the_commands_imports_no_framework(python):
    """All in one process: each would show."""
    code = (
        "from click.testing import CliRunner\nfrom dualtune.cli.main import cli\n"
        f"for command in {SUBCOMMANDS!r}:\n"
        "    result = CliRunner().invoke(cli, [*command, '--help'])\n"
        "    assert result.exit_code == 0, result.output\n"
    )
    assert not FRAMEWORKS & imported_by(python, code)


@pytest.mark.parametrize("code", [call("config"), call("config", "--schema")])
def test_the_config_commands_import_no_framework(python, code):
    assert not FRAMEWORKS & imported_by(python, code)


def test_the_descriptions_of_a_command_agree(dualtune_main):
    """`dualtune --help` shows a line of its own, because asking the command would import it."""
    for name, (_, line) in COMMANDS.items():
        said = " ".join(dualtune_main(name, "--help").stdout.split()).lower()
        assert line.split()[0].lower() in said


def test_the_console_script_is_installed():
    script = Path(sys.executable).with_name("dualtune")
    if not script.exists():
        pytest.skip("dualtune is not installed with its console script")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"dualtune, version {__import__('dualtune').__version__}\n"


# --- usage -----------------------------------------------------------------------------------------------------------


def test_train_without_arguments_explains_itself(dualtune_main):
    result = dualtune_main("train")
    assert (result.returncode, result.stdout) == (2, "")
    error = "Error: Give a config file, or --model and --data, or --demo (one of them)."
    assert result.stderr.splitlines()[-1] == error
    assert "Usage: dualtune train [OPTIONS] [CONFIG]" in result.stderr
    assert "dualtune train --help" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["train", "--sett", "a=b", "c.yaml"], "No such option '--sett'"),
        (["train", "c.yaml", "--demo"], "Give a config file, or --model and --data, or --demo (one of them)."),
        (["generate", "model"], "Give --prompt TEXT or --prompts FILE."),
        (["generate", "model", "--prompt", "x", "--temperature", "-1"], "-1.0 is not in the range x>=0"),
        (["adapter", "convert", "a", "b", "--to", "onnx"], "'onnx' is not one of 'dual', 'peft', 'mlx'"),
        (["eval"], "Missing argument 'CONFIG'"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(dualtune_main, args, message):
    result = dualtune_main(*args)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("Error: ") == 1
    assert message in result.stderr


def test_dualtune_alone_shows_its_help(dualtune_main):
    result = dualtune_main()
    assert "Commands:" in result.stdout + result.stderr


# --- dualtune config -------------------------------------------------------------------------------------------------


def test_the_printed_config_can_be_loaded(dualtune_main, tmp_path):
    result = dualtune_main("config")
    (tmp_path / "config.yaml").write_text(result.stdout, encoding="utf-8")
    config = load_config(tmp_path / "config.yaml")
    assert config == parse_config(f"model: {{name: {config.model.name}}}\ndata: {{train: {config.data.train}}}")


def test_the_printed_schema_is_json_and_closed(dualtune_main):
    schema = json.loads(dualtune_main("config", "--schema").stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {
        "model",
        "adapter",
        "data",
        "train",
        "preference",
        "distill",
        "rollouts",
        "memory",
        "hybrid",
        "guards",
        "run",
    }


def test_the_schema_accepts_the_default_and_refuses_a_typing_error(dualtune_main):
    jsonschema = pytest.importorskip("jsonschema")
    import yaml

    schema = json.loads(dualtune_main("config", "--schema").stdout)
    default = yaml.safe_load(dualtune_main("config").stdout)
    jsonschema.validate(default, schema)
    for wrong in ({"rnk": 8}, {"rank": 0}, {"rank": "8"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(default | {"adapter": wrong}, schema)


@pytest.mark.parametrize("args", [["config"], ["--help"], ["check-gpu"]])
def test_a_closed_pipe_is_no_error_to_talk_about(python, args):
    """What `dualtune config | head -1` meets when `head` is quick."""
    read, write = os.pipe()
    os.close(read)
    try:
        result = python("-m", "dualtune.cli.main", *args, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert result.stderr == ""
    assert result.returncode in (0, 1, 4)  # 4 is the verdict of check-gpu where there is no GPU
