"""Nothing from outside steers a terminal: names of files, values, rows of data, answers, messages of libraries."""

import ast
import io
import json
import logging
import os
import pty
import re
import warnings
from pathlib import Path

import pytest

from dualtune.base.text import one_line, visible
from dualtune.cli import terminal

PACKAGE = Path(terminal.__file__).parents[1]
# A title, cleared lines, a colour, C1, right-to-left overrides and isolates, what has no width, other ends of lines.
EVIL = "a\x1b]0;owned\x07\x1b[2K\x1b[31m\x9b1A\u202egnp\u2066x\u2069\u200bz\u200d\ufeff\u2028\x85\x7f\x08\rb"
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
NUMPY = ("--platform", "numpy")


def clean(done) -> str:
    """What a command said, which must steer nothing and show something of what was attempted."""
    said = done.stdout + done.stderr
    assert not STEERING.search(said), ascii(STEERING.findall(said))
    assert "Traceback" not in said
    return said


# --- the function ----------------------------------------------------------------------------------------------------


def test_what_could_steer_a_terminal_is_shown_and_the_rest_stays():
    assert visible(EVIL) == (
        r"a␛]0;owned␇␛[2K␛[31m\u009b1A\u202egnp\u2066x\u2069\u200bz\u200d\ufeff\u2028\u0085\u007f␈␍b"
    )
    ours = "tab\tand\nline é 日本 Ω “quotes” 👨‍👩‍👧 می‌خواهم क्‍ष ½ …"  # joiners join here
    assert visible(ours) == ours
    assert visible("\udcff \U000e0041") == r"\udcff \U000e0041"
    assert one_line("a\tb\nc") == "a␉b␊c"


def test_no_control_character_and_no_turn_of_direction_is_forgotten():
    import unicodedata

    kept = {"Cc": "\t\n", "Cf": "\u200c\u200d"}
    shown = {chr(code) for code in range(0x11000) if visible(f"é{chr(code)}é") == f"é{chr(code)}é"}
    assert {c for c in shown if unicodedata.category(c) == "Cc"} == set(kept["Cc"])
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI", "BN", "B", "S"}
    steering = {c for c in shown if unicodedata.bidirectional(c) in directions}
    assert steering == {"\t", "\n", *kept["Cf"]}


def test_json_means_the_same_after_it_was_printed(capsys):
    table = {EVIL: [EVIL, "\x7f"]}
    terminal.say(json.dumps(table))
    terminal.say(json.dumps(table, ensure_ascii=False))
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first) == json.loads(second) == table


# --- one place -------------------------------------------------------------------------------------------------------


def test_text_leaves_through_one_module():
    """Everything else that prints would have to remember to escape."""
    ways = {"click.echo", "click.secho", "print", "sys.stdout.write", "rich.print", "rich.console.Console", "Console"}
    found = {}
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
        if used := calls & ways:
            found[file.relative_to(PACKAGE).as_posix()] = used
    ours = {name: used for name, used in found.items() if "from dualtune.cli.console import Console" in
            (PACKAGE / name).read_text(encoding="utf-8") and used == {"Console"}}  # fmt: skip
    assert {name: used for name, used in found.items() if name not in ours} == {
        "cli/terminal.py": {"print"},
        "doctor/validate/losses.py": {"print"},  # scripts of their own
        "doctor/apart.py": {"print"},
        "use/export/in_llama_cpp.py": {"sys.stdout.write"},
        "use/tunnel/there.py": {"print", "sys.stdout.write"},  # what the near end reads
    }


def test_bars_and_tables_of_rich_are_escaped_and_keep_their_own_codes(monkeypatch):
    from rich.progress import Progress, TextColumn
    from rich.table import Table
    from rich.text import Text

    from dualtune.cli.console import Console

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    console = Console()
    table = Table(EVIL)
    table.add_row(Text(EVIL, style="green"))
    console.print(table)
    console.print(EVIL)
    console.print("[bold]no markup[/bold] :smile:")
    with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
        bar.add_task(EVIL)
    said = console.file.getvalue()  # standard output
    assert "[bold]no markup[/bold] :smile:" in said
    own = re.sub(r"\x1b\[[\d;]*[mKAlh]|\x1b\[\?25[lh]|\r", "", said)  # colours, cursor and lines: rich's own
    assert not STEERING.search(own), ascii(own)
    assert "\x1b]0;" not in said and "\x1b[31m" not in said and "\x1b[32m" in said


def test_our_colours_reach_the_terminal_and_those_of_a_text_do_not(capsys):
    terminal.say_styled([("green \x1b[31m", {"fg": "green"}), (" plain \x1b[31m", {})])
    assert capsys.readouterr().out == "\x1b[32mgreen ␛[31m\x1b[0m plain ␛[31m\n"


def test_what_libraries_log_and_warn_is_escaped_and_holds_no_secret(capsys, monkeypatch):
    factory, formatted = logging.getLogRecordFactory(), warnings.formatwarning
    monkeypatch.setenv("HF_TOKEN", "canary-0f0f0f0f")
    try:
        terminal.prepare_streams()
        logger = logging.Logger("some library")
        logger.addHandler(logging.StreamHandler())
        logger.warning("file %s of %s", EVIL, "canary-0f0f0f0f")
        said = warnings.formatwarning(UserWarning(EVIL), UserWarning, "x.py", 1)
    finally:
        logging.setLogRecordFactory(factory)
        warnings.formatwarning = formatted
    said += capsys.readouterr().err
    assert not STEERING.search(said) and "canary" not in said
    assert said.count(r"\u202egnp") == 2


# --- the commands ----------------------------------------------------------------------------------------------------


def test_no_command_passes_on_what_a_name_or_an_option_holds(dualtune_main, tmp_path, monkeypatch):
    """Every command of the program, with such words in the place of each argument and option."""
    from dualtune.cli.main import COMMANDS, cli

    monkeypatch.chdir(tmp_path)
    for words in (
        *([name, EVIL] for name in COMMANDS), [EVIL], ["--" + EVIL],
        ["train", EVIL + ".yaml"], ["train", "x", "--set", EVIL], ["config", EVIL], ["preview", EVIL],
        ["check-data", EVIL], ["check-config", EVIL], ["eval", EVIL], ["validate", "--tier", EVIL],
        ["runs", EVIL], ["checkpoints", EVIL], ["verify", EVIL, "--base", EVIL], ["bench", EVIL],
        ["generate", EVIL, "--prompt", EVIL, *NUMPY], ["generate", "x", "--prompt", "x", "--dtype", EVIL],
        ["adapter", "inspect", EVIL], ["adapter", "diff", EVIL, EVIL],
        ["adapter", "convert", EVIL, EVIL, "--to", "peft"],
        ["bundle", "inspect", EVIL], ["bundle", "pack", EVIL, EVIL], ["bundle", "unpack", EVIL, EVIL],
        ["push", EVIL], ["push", "share", EVIL], ["pull", EVIL], ["pull", "host:" + EVIL], ["launch", EVIL],
    ):  # fmt: skip
        done = dualtune_main(*words)
        said = clean(done)
        assert done.returncode in (0, 2, 3, 4, 5, 6), (words, said)
    assert set(COMMANDS) == set(cli.list_commands(None))


def test_a_listing_of_hostile_runs_stays_a_table(dualtune_main, tmp_path, golden_run):
    golden_run(tmp_path / "runs" / (EVIL.replace("/", "") + "\nok  all is well"))
    golden_run(tmp_path / "runs" / "good")
    for words in (("runs", tmp_path / "runs"), ("checkpoints", next((tmp_path / "runs").glob("a*")))):
        said = clean(dualtune_main(*words))
        assert not any(line.startswith("ok  all is well") for line in said.splitlines())


@pytest.fixture
def golden_run():
    """A run directory with one checkpoint, as an older version wrote it."""
    import shutil

    golden = Path(__file__).parents[1] / "golden" / "checkpoint_v1"
    step = json.loads((golden / "MANIFEST.json").read_text())["step"]
    config = json.loads((golden / "state.json").read_text())["config"]

    def make(path):
        shutil.copytree(golden, path / "checkpoints" / f"step-{step:08d}")
        (path / "config.yaml").write_text("".join(f"{s}: {json.dumps(keys)}\n" for s, keys in config.items()))
        return path

    return make


def test_rows_of_data_steer_nothing(dualtune_main, tmp_path):
    data = tmp_path / f"d{EVIL.replace('/', '')}.jsonl"
    data.write_text(json.dumps({EVIL: EVIL, "x\x1b[2J": 1}) + "\n{" + EVIL.replace("\r", "").replace("\x85", "") + "\n")
    said = clean(dualtune_main("check-data", data))
    assert r"\u202egnp" in said


@pytest.mark.parametrize("value", ["\\e[2J\\e[31mx", "\\u202ex", "\\x9bx"])
def test_values_of_a_config_steer_nothing(dualtune_main, tmp_path, value):
    (tmp_path / "c.yaml").write_text(f'model: {{name: "{value}"}}\ndata: {{train: "{value}"}}\n"{value}": 1\n')
    for command in ("train", "check-config", "preview", "eval", "launch"):
        assert dualtune_main(command, tmp_path / "c.yaml").returncode != 0
        clean(dualtune_main(command, tmp_path / "c.yaml"))


def test_an_adapter_of_a_stranger_steers_nothing(dualtune_main, tmp_path):
    import numpy as np

    from dualtune.model.adapter import AdapterSpec, init_adapter
    from dualtune.model.formats.directory import Adapter, write_adapter

    tensors = {
        key: x + np.float32(1) for key, x in init_adapter({"model.layers.0.self_attn.q_proj": (8, 8)}, 2, 0).items()
    }
    write_adapter(tmp_path / "a", Adapter(AdapterSpec(2, 4, 0.0, ("q_proj",)), tensors, "org/base"))
    (tmp_path / "a" / "dualtune.json").unlink()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    for key in ("base_model_name_or_path", "peft_type", "task_type", "revision", "target_modules", EVIL):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | {key: EVIL}))
        clean(dualtune_main("adapter", "inspect", tmp_path / "a"))
        clean(dualtune_main("bundle", "pack", tmp_path / "a", tmp_path / f"{len(key)}.tar"))


# --- answers of a model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_answer_is_escaped_on_a_terminal_and_passed_on_as_it_is_to_a_program(monkeypatch, is_terminal):
    answer = "line\n\tof \x1b[2J text 👨‍👩‍👧\u202e"
    read, write = pty.openpty() if is_terminal else os.pipe()
    with os.fdopen(write, "w", encoding="utf-8", newline="") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        terminal.pass_on(answer)
        monkeypatch.undo()
        got = os.read(read, 4096).decode().replace("\r\n", "\n")
    os.close(read)
    assert got == (visible(answer) if is_terminal else answer)
    assert visible(answer) == "line\n\tof ␛[2J text 👨‍👩‍👧\\u202e"


def test_the_preview_and_its_page_show_a_turn_of_direction_and_do_not_make_it(
    dualtune_main, write_rows, tiny_softmax, tmp_path
):
    data = write_rows([{"prompt": EVIL, "completion": EVIL}] * 2)
    config = {"model": {"name": str(tiny_softmax)}, "data": {"train": str(data), "eval": 0, "max_length": 512}}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    done = dualtune_main("preview", tmp_path / "c.yaml", "--html", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for text in (clean(done), page):
        assert not STEERING.search(text)
        assert "202e" in text
