"""docs/troubleshooting.md names texts that the program prints, exit codes that it has, and commands that exist."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from dualtune.base import errors
from dualtune.cli.main import cli
from dualtune.config import parse_config
from dualtune.config.schema import sections
from dualtune.engine import problems
from dualtune.train.state.lock import Lock
from dualtune_mlx.card import checks as mlx
from dualtune_torch.card import checks as torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUICKSTART = ROOT / "docs" / "TRAINING_QUICKSTART.md"
HOLE = "\0"  # in a text of the source: where a value is put in
LEAST_LETTERS = 7  # of a documented text, so that it cannot be found anywhere by chance

# What users search for, and a word of the entry that has to answer it.
WANTED = {
    "CUDA is not available": "without CUDA",
    "The model is not found": "HF_HOME",
    "The config does not fit": "train.micro_batch_tokens",
    "It still runs out of memory": "memory.checkpointing",
    "MLX or torch is missing": "dualtune[mlx]",
    "The driver is missing or not loaded": "modprobe",
    "The driver and its library do not fit together": "mismatch",
    "A key is not known, or its value is not allowed": "dualtune config",
    "Rows cannot be used": "check-data",
    "The run directory is in use": "lock",
    "The run cannot be resumed": "run.dir",
    "The disk is full, or not ours": "run.keep",
    "The loss is NaN": "train.learning_rate",
    "It stopped with 75": "signal",
    "The adapter is damaged, or of a kind that cannot be converted": "adapters.md",
}


@cache
def entries() -> dict[str, str]:
    """Heading of an entry (### …) -> what stands below it."""
    found = re.findall(r"^### (.+)\n((?:(?!^##).*\n)*)", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(dict(found)) == len(found), "a heading comes twice"
    return dict(found)


def texts_of(body: str) -> list[str]:
    return re.findall(r"^- `([^`]+)`$", body, re.M)


TEXTS = [text for body in entries().values() for text in texts_of(body)]


# --- the texts, held against the source ------------------------------------------------------------------------------


@cache
def printed() -> str:
    """Every string of the program, a value in it as HOLE, one after the other."""
    found = set()
    for file in (*(ROOT / "dualtune").rglob("*.py"), *(ROOT / "backends").rglob("*.py")):
        found |= set(_strings(ast.parse(file.read_text(encoding="utf-8"))))
    for file in (ROOT / "setup_m4.sh", *(ROOT / "scripts").glob("*.sh")):
        quoted = re.findall(r'"([^"\n]*)"', file.read_text(encoding="utf-8"))
        found |= {re.sub(r"\$(\w+|\{[^}]*\}|\([^)]*\))", HOLE, text) for text in quoted}
    return "\n\n".join(sorted(found))


def _strings(node: ast.AST) -> Iterator[str]:
    """The texts in a tree. Docstrings are not printed."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant):
            continue  # a piece of what was given as a whole
        if (text := _text(child)) is not None:
            yield text
        yield from _strings(child)


def _text(node: ast.AST) -> str | None:
    """What a literal says; an f-string is one text, with a HOLE for each value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or HOLE for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def is_printed(text: str, strings: str | None = None) -> bool:
    """Whether a string of the source has the fixed pieces of a text in this order, with a value at each … between."""
    pieces = [re.escape(piece.strip()) for piece in text.split("…")]
    gap = f"[^{HOLE}…]*?[{HOLE}…](?:(?!\n\n).)*?"
    pattern = gap.join(pieces).removeprefix(gap).removesuffix(gap)
    return re.search(pattern, printed() if strings is None else strings, re.S) is not None


@pytest.mark.parametrize("text", TEXTS)
def test_each_text_is_one_that_the_program_prints(text):
    assert sum(char.isalpha() for char in text) >= LEAST_LETTERS
    assert is_printed(text)


def test_a_text_that_nobody_prints_is_noticed():
    assert is_printed("model.name: there is no model directory …")
    assert not is_printed("model.name: there is no model folder …")
    assert not is_printed("model.name: … is no model directory")  # no value stands there
    assert not is_printed("there is no model directory … has no config.json")  # the pieces of two messages


def test_each_problem_that_check_gpu_finds_has_an_entry():
    trees = [ast.parse(Path(module.__file__).read_text(encoding="utf-8")) for module in (problems, torch, mlx)]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = [text for node in functions if node.name.endswith("problems") for text in _yielded(node)]
    assert len(found) > 15
    assert [text for text in found if not any(is_printed(known, text) for known in TEXTS)] == []


def _yielded(function: ast.FunctionDef) -> Iterator[str]:
    """The texts of the rows that a function yields, by themselves or by the name of a variable."""
    nodes = list(ast.walk(function))
    assigned = [(ast.unparse(node.targets[0]), node.value) for node in nodes if isinstance(node, ast.Assign)]
    for row in (node.value for node in nodes if isinstance(node, ast.Yield)):
        text = row.args[2]
        values = [value for name, value in assigned if isinstance(text, ast.Name) and name == text.id]
        yield from filter(None, map(_text, values or [text]))


def test_every_heading_that_users_look_for_is_there_and_answers():
    bodies = {heading.partition(" (exit ")[0]: body for heading, body in entries().items()}
    assert {heading: word for heading, word in WANTED.items() if word not in bodies.get(heading, "")} == {}


def test_links_within_the_page_lead_to_its_headings():
    page = PAGE.read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page, re.M)
    }
    links = re.findall(r"\]\((?:troubleshooting\.md)?#([^)]+)\)", page + QUICKSTART.read_text(encoding="utf-8"))
    assert len(links) > 5
    assert set(links) - anchors == set()


# --- what a user sees leads to its entry ------------------------------------------------------------------------------


def entries_for(output: str) -> set[str]:
    """The headings under which a screen's words are listed."""

    def is_in(text: str) -> bool:
        return re.search(".*?".join(re.escape(piece.strip()) for piece in text.split("…")), output) is not None

    return {heading for heading, body in entries().items() if any(is_in(text) for text in texts_of(body))}


@pytest.fixture
def mistake(dualtune_main, tiny_softmax, tmp_path, monkeypatch):
    """Train by a small config with one mistake in it; return (exit code, what was said)."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"prompt": "1?", "completion": "2"}\n' * 4, encoding="utf-8")
    Path("empty").mkdir()

    def make(changes: dict, *args: str):
        settings = {
            "model.name": tiny_softmax, "data.train": "train.jsonl", "data.eval": 0, "data.max_length": 64,
            "adapter.targets": "all-linear", "train.steps": 2, "train.warmup": 1, "run.dir": "runs/a",
        }  # fmt: skip
        lines = [f"{key}={json.dumps(value, default=str)}" for key, value in (settings | changes).items()]
        Path("config.yaml").write_text("model: {}\n", encoding="utf-8")
        overrides = [part for line in lines for part in ("--set", line)]
        result = dualtune_main("train", "config.yaml", *overrides, *(args or ("--platform", "numpy")))
        return result.returncode, result.stdout + result.stderr

    return make


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # the NaN is the point
@pytest.mark.parametrize(
    ("changes", "heading"),
    [
        ({"model.nmae": "x"}, "A key is not known, or its value is not allowed (exit 2)"),
        ({"train.steps": 0}, "A key is not known, or its value is not allowed (exit 2)"),
        ({"train.micro_batch_tokens": 8}, "Values that do not go together (exit 2)"),
        ({"memory.checkpointing": "full"}, "The backend does not honour a value (exit 2)"),
        ({"adapter.targets": ["q_prj"]}, "The adapter's targets do not exist (exit 2)"),
        ({"data.train": "nowhere.jsonl"}, "The file is not found (exit 3)"),
        ({"data.train": "odd.jsonl"}, "The layout is not known (exit 3)"),
        ({"data.train": "bad.jsonl"}, "Rows cannot be used (exit 3)"),
        ({"data.max_length": 2}, "No token would be trained on (exit 3)"),
        ({"model.name": "./nowhere"}, "The model is not found (exit 4)"),
        ({"model.name": "no-such/model"}, "The model is not found (exit 4)"),
        ({"model.name": "empty"}, "The model's directory is incomplete (exit 4)"),
        ({"run.dir": "config.yaml/runs"}, "The disk is full, or not ours (exit 5)"),
        ({"train.learning_rate": 1e300, "guards.nonfinite_limit": 1, "train.steps": 4}, "The loss is NaN (exit 7)"),
    ],
    ids=str,
)
def test_what_a_mistake_prints_is_found_under_its_heading(mistake, changes, heading):
    Path("odd.jsonl").write_text('{"question": "a"}\n', encoding="utf-8")
    Path("bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\nnot JSON\n', encoding="utf-8")
    code, said = mistake(changes)
    assert heading in entries_for(said), said
    assert heading.endswith(f"(exit {code})")


def test_a_gpu_that_is_not_there_is_found_under_its_heading(mistake, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, said = mistake({}, "--platform", "cuda")
    assert (code, entries_for(said)) == (4, {"CUDA is not available (exit 4)"})


@pytest.mark.parametrize(
    ("command", "heading"),
    [
        ("check-gpu --machine rtx-3060-12", "The machine has too little for models of 7B"),
        ("check-gpu --machine m4-16", "The machine has too little for models of 7B"),
        ("check-gpu --machine nowhere", "The platform or the machine is not known (exit 2)"),
        ("check-config configs/training_config_h100.yaml --machine rtx-3060-12", "The config does not fit (exit 4)"),
        ("check-config configs/rtx_16gb.yaml --set adapter.rnk=4", "A key is not known, or its value is not allowed"),
        ("eval configs/rtx_16gb.yaml --platform cpu", "The adapter is not found"),
        ("adapter inspect nowhere", "The adapter is not found"),
    ],
)
def test_what_a_command_prints_is_found_under_its_heading(dualtune_main, monkeypatch, command, heading):
    monkeypatch.chdir(ROOT)
    result = dualtune_main(*command.split())
    found = entries_for(result.stdout + result.stderr)
    assert any(entry.startswith(heading) for entry in found), result.stdout + result.stderr


def test_a_run_that_cannot_be_continued_is_found_under_its_heading(mistake):
    assert mistake({})[0] == 0
    code, said = mistake({"adapter.rank": 3})
    assert (code, entries_for(said)) == (2, {"The run cannot be resumed (exit 2)"})
    code, said = mistake({})
    assert (code, "There is nothing to do" in entries_for(said)) == (0, True)


def test_a_directory_in_use_and_damaged_checkpoints_are_found_under_their_headings(mistake):
    run_dir = Path("runs/a")
    run_dir.mkdir(parents=True)
    holder = Lock(run_dir)
    code, said = mistake({})
    assert (code, entries_for(said)) == (9, {"The run directory is in use (exit 9)"})
    holder.remove()
    assert mistake({})[0] == 0
    for checkpoint in (run_dir / "checkpoints").iterdir():
        (checkpoint / "state.json").unlink()
    code, said = mistake({})
    assert (code, entries_for(said)) == (6, {"No checkpoint is whole (exit 6)"})


# --- codes, commands and keys -----------------------------------------------------------------------------------------


def test_the_table_of_exit_codes_is_complete():
    rows = re.findall(r"^\| (\d+) \| ", PAGE.read_text(encoding="utf-8"), re.M)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert [int(row) for row in rows] == sorted({0, 130, *(kind.exit_code for kind in kinds)})


def commands_of(page: Path) -> list[str]:
    """Every `dualtune …` of a page: lines of shell blocks, and code marks."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    marked = re.findall(r"`(dualtune [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    found = [line[line.index("dualtune ") :] for line in lines if re.search(r"(^|[-\w] )dualtune ", line)]
    return found + marked


def parse(command: str) -> None:
    """click's own parser, with no command run. UsageError for a command, option or choice that does not exist."""
    words = shlex.split(re.split(r" (?:>|2>|&|\|) ?", command)[0], comments=True)[1:]
    found: click.Command = cli
    context = click.Context(cli, **cli.context_settings)  # click remembers the names of --help that it meets first
    while isinstance(found, click.Group) and words:
        name, following, words = found.resolve_command(context, words)
        assert following is not None
        found, context = following, click.Context(following, info_name=name, parent=context)
    if words:  # otherwise the text speaks of the command and does not call it
        found.make_context(found.name, words, parent=context.parent)


@pytest.mark.parametrize("command", sorted({*commands_of(PAGE), *commands_of(QUICKSTART)}))
def test_each_command_exists_with_its_options(command):
    parse(command)


def test_a_command_that_does_not_exist_is_noticed():
    for wrong in ("dualtune chekc-gpu", "dualtune train config.yaml --stpes 3", "dualtune adapter insepct DIR"):
        with pytest.raises(click.UsageError):
            parse(wrong)


@pytest.mark.parametrize("page", [PAGE, QUICKSTART], ids=lambda page: page.name)
def test_each_key_exists_and_takes_the_value_that_is_named(page):
    names = "|".join(sections())
    text = re.sub(r"^- `.*", "", page.read_text(encoding="utf-8"), flags=re.M)  # without what is printed
    settings = re.findall(
        rf"(?:`|--set )((?:{names})\.(?!csv\b)[a-z_]+)(?:(?:: |=)(\{{[^`]*\}}|[^`\s]+))?(?=`|\s)", text
    )
    assert len(settings) >= 5
    for key, value in settings:
        section, name = key.split(".")
        assert name in sections()[section].model_fields, key
        if value:
            wanted = [f"{key}={value}", *(["data.eval=0.1"] if key != "data.eval" else [])]
            parse_config("model: {name: a/b}\ndata: {train: train.jsonl}\n", overrides=wanted)
