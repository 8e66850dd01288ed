"""Canaries: secrets in the environment, the config and on the command line show up nowhere, whatever happens.

Processes, because a traceback and what the interpreter says at its end count too.
"""

import json
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.covering(1)

NUMPY = ("--platform", "numpy")
FORMED = "hf_" + "C4nAry" * 6  # a Hugging Face token by its form
FORMLESS = "canary/" + "0f" * 12  # found in the environment alone, and no name of a file
HEX = "c4ca4238" * 5  # as older W&B keys are
ENVIRONMENT = {"HF_TOKEN": FORMED, "HUGGING_FACE_HUB_TOKEN": FORMLESS, "WANDB_API_KEY": HEX}
CANARIES = [value.encode() for value in ENVIRONMENT.values()] + [b"C4nAry", b"0f0f0f0f", b"c4ca4238", b"hunter22"]


@pytest.fixture
def canary(dualtune, forked, tmp_path):
    """Run a command among secrets, and look for them in all it says and leaves. Only its input files may hold some.

    One that ends in an error of ours is forked: there are many, and no traceback.
    """

    def check(code: int, *args) -> str:
        inputs = {path for path in (tmp_path / "config.yaml", tmp_path / "data.jsonl") if path.exists()}
        env = ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        run = partial(forked, "dualtune") if code > 1 else dualtune
        result = run(*args, env=env, cwd=tmp_path)
        assert result.returncode == code, result.stderr
        assert ("Traceback" in result.stderr) == (code == 1)
        said = {Path(name): text.encode() for name, text in (("stdout", result.stdout), ("stderr", result.stderr))}
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path not in inputs}
        for path, raw in (said | files).items():
            assert not [canary for canary in CANARIES if canary in raw or canary in str(path).encode()], (path, raw)
        return result.stdout + result.stderr

    return check


# --- commands that succeed -------------------------------------------------------------------------------------------


def test_the_commands_leave_no_secret_on_disk_or_screen(canary, config_file, tiny_softmax, tmp_path):
    config, adapter = config_file(), tmp_path / "runs" / "a" / "adapter"
    canary(0, "train", config, *NUMPY)
    assert (adapter.parent / "environment.json").exists()
    canary(0, "train", config, "--dry-run", *NUMPY, "--set", "run.dir=runs/b")
    canary(0, "eval", config, "--json", *NUMPY)
    canary(0, "generate", tiny_softmax, "--adapter", adapter, "--prompt", "1 plus 1?", "--max-tokens", 4, *NUMPY)
    canary(0, "adapter", "inspect", adapter)
    canary(0, "adapter", "convert", adapter, tmp_path / "peft", "--to", "peft")
    assert "Show what this machine is" in canary(0, "--help")


@pytest.mark.long  # the core writes what is written
def test_training_on_torch_leaves_no_secret(canary, config_file, tiny_llama):
    pytest.importorskip("torch")
    canary(0, "train", config_file({"model.name": tiny_llama, "train.steps": 1}), "--platform", "cpu")


# --- commands that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("model.name", FORMED, "a Hugging Face token"),
        ("model.name", f"https://user:{FORMED}@host/model", "a Hugging Face token"),
        ("model.name", "https://user:hunter22@host/model", "a URL with credentials"),
        ("data.train", "data/gh" + "p_" + "C4nAry" * 6 + ".jsonl", "a GitHub token"),
        ("run.dir", "runs/sk-" + "C4nAry" * 6, "an API key"),
        ("adapter.init_from", "Bearer C4nAry" * 2, "a bearer token"),
    ],
)
def test_a_secret_in_a_config_is_refused_by_its_kind_and_not_shown(canary, config_file, tmp_path, key, value, kind):
    message = f"{key}: looks like {kind} (not shown). Remove it from the config, and revoke it if the file was shared"
    assert message in canary(2, "train", config_file({key: value}), *NUMPY)
    assert message in canary(2, "train", config_file(), "--set", f"{key}={value}", *NUMPY)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("secret", [FORMED, FORMLESS, HEX])
@pytest.mark.parametrize(
    ("code", "args", "words"),
    [
        (2, ["train", "{config}", "--set", "{secret}"], "--set ***"),
        (2, ["train", "{config}", "--set", "adapter.{secret}=1"], "--set adapter."),
        (2, ["train", "{config}", "--set", "train.steps={secret}"], "train.steps: "),
        (2, ["train", "{config}", "--platform", "{secret}"], "--platform: got "),
        (2, ["train", "{config}", "--{secret}"], "No such option"),
        (2, ["{secret}"], "No such command"),
        (2, ["train", "{config}", "{secret}"], "unexpected extra argument"),
        (2, ["train", "{secret}.yaml"], "no such file"),
        (2, ["generate", "m", "--prompt", "x", "--dtype", "{secret}"], "is not one of"),
        (4, ["generate", "https://user:{secret}@host/model", "--prompt", "x", *NUMPY], "***@host/model"),
        (4, ["generate", "https://user:hunter22@host/{secret}", "--prompt", "x", *NUMPY], "https:/***@host/"),
        (4, ["generate", "user/{secret}", "--prompt", "x", *NUMPY], "Error: "),
        (6, ["adapter", "inspect", "runs/{secret}"], "Error: runs/"),
    ],
)
def test_no_error_shows_a_secret(canary, config_file, code, args, words, secret):
    config = config_file()
    assert words in canary(code, *(arg.format(config=config, secret=secret) for arg in args))


def test_a_secret_that_the_config_cannot_recognize_is_not_shown_by_later_errors(canary, config_file):
    assert "***.jsonl: no such file" in canary(3, "train", config_file({"data.train": f"{HEX}.jsonl"}), *NUMPY)


def test_bad_data_is_named_without_its_secrets(canary, config_file, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({FORMED: "x", HEX: "y"}) + "\n")
    message = canary(3, "train", config_file({"data.train": data, "data.eval": 0}), *NUMPY)
    assert "data.jsonl:1: no known format has the keys " in message and "***" in message


def test_the_search_for_canaries_finds_them(canary, config_file, tmp_path):
    (tmp_path / "elsewhere.txt").write_text(f"token {HEX}")
    with pytest.raises(AssertionError, match="elsewhere"):
        canary(0, "--version")


def test_a_traceback_shows_no_secret_and_is_still_one(python, tmp_path):
    program = (
        "import os\n"
        "import dualtune.cli.main as main\n"
        "def fail(*args, **options):\n"
        "    try:\n"
        "        raise KeyError(os.environ['WANDB_API_KEY'])\n"
        "    except KeyError as error:\n"
        "        error.add_note('https://user:hunter22@host')\n"
        "        raise RuntimeError(f\"token {os.environ['HF_TOKEN']}\") from error\n"
        "main.cli.invoke = fail\n"
        "main.main()\n"
    )
    result = python("-c", program, "check-gpu", env=ENVIRONMENT, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert result.stderr.endswith("\nRuntimeError: token ***\n")
    assert "KeyError: '***'\nhttps://***@host\n" in result.stderr
    assert "in main" in result.stderr
    assert not [canary for canary in CANARIES if canary in result.stderr.encode()]
