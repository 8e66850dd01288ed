"""Every code block of the documentation says what is true of the code: commands, options, config keys, imports."""

import ast
import importlib
import json
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from pages import ROOT, Block, blocks, prose
from shell_commands import shell_problems

from dualtune.base.errors import ConfigError
from dualtune.config import load_config
from dualtune.config.importing.translate import import_config
from dualtune.config.schema import sections

FOLDERS = ("docs", "examples", "benchmarks/results")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
# Not the changes and the decisions: their text tells what was.
PRESENT = [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "decisions"]


# --- other languages -------------------------------------------------------------------------------------------------


def yaml_problems(text: str, path: Path) -> list[str]:
    """Our configs load, and those of trainers that we import are imported. The rest is YAML."""
    data = yaml.safe_load(text)
    if not isinstance(data, dict) or not (data.keys() & sections().keys() or "base_model" in data):
        return []
    try:
        if "base_model" in data or isinstance(data.get("model"), str):
            path.write_text(text, encoding="utf-8")
            import_config(path, None, lambda _: 28)
        else:
            needed = {"model": {"name": "m"}, "data": {"train": "rows.jsonl"}}
            load_config({key: needed.get(key, {}) | (data.get(key) or {}) for key in {**needed, **data}})
    except ConfigError as error:
        return [str(error)]
    return []


def python_problems(text: str) -> list[str]:
    """It compiles, and what it imports is there: names of ours, and modules of others where they are installed."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [str(error)]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if not module or find_spec(module.partition(".")[0]) is None:
                found += [f"no module {module}"] if str(module).startswith("dualtune") else []
                continue
            names = [each.name for each in node.names] if isinstance(node, ast.ImportFrom) else []
            found += [f"no {each} in {module}" for each in names if not _has(module, each)]
    return found


def _has(module: str, name: str) -> bool:
    if not module.startswith("dualtune") and module not in ("torch", "numpy", "pathlib"):
        return True  # the import of others' libraries costs seconds
    return hasattr(importlib.import_module(module), name) or find_spec(f"{module}.{name}") is not None


def problems_of(block: Block, path: Path) -> list[str]:
    """What is wrong with a code block, by its language."""
    try:
        match block.language:
            case "sh" | "bash":
                return shell_problems(block.text)
            case "console":
                return shell_problems("\n".join(re.findall(r"^\$ .*", block.text, re.M)))
            case "yaml":
                return yaml_problems(block.text, path)
            case "python":
                return python_problems(block.text)
            case "json":
                json.loads(block.text)
            case "toml":
                tomllib.loads(block.text)
            case "text" | "":
                pass
            case _:
                return [f"{block.language} is checked by nothing"]
    except (ValueError, yaml.YAMLError) as error:
        return [f"{type(error).__name__}: {error}"]
    return []


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_right(page, tmp_path):
    found = [(block.line, each) for block in blocks(page) for each in problems_of(block, tmp_path / "config.yaml")]
    assert found == []


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_text_exist(page):
    lines = []
    prose(page.read_text(encoding="utf-8"), lambda line: lines.append(line) or line)
    named = re.findall(r"`((?:dualtune [a-z]|(?:\.venv/bin/python -m )?pytest |python \w+/)[^`]*)`", "\n".join(lines))
    assert [problem for text in named for problem in shell_problems(text)] == []


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("sh", "dualtune trian c.yaml"),
        ("sh", "dualtune train c.yaml --no-such-option"),
        ("sh", "dualtune train c.yaml --set train.stepz=3"),
        ("sh", "cat x | dualtune adapter no-such-command \\\n  a"),
        ("sh", "dualtune config import a.yml --from no-such-trainer"),
        ("sh", "dualtune check-config a.yaml b.yaml"),
        ("sh", "make no-such-target"),
        ("sh", "python scripts/no_such.py"),
        ("sh", "python benchmarks/quality.py --no-such-option"),
        ("sh", "pytest tests/docs tests/no_such.py"),
        ("sh", ".venv/bin/python -m pytest tests/test_docs.py::test_no_such"),
        ("sh", "echo 'not closed"),
        ("yaml", "train: {stepz: 3}"),
        ("yaml", "train: {steps: 3}\nno_such_section: {}"),
        ("yaml", "base_model: m\nrl: dpo"),
        ("yaml", "a: [1"),
        ("python", "def f(:"),
        ("python", "from dualtune import no_such_name"),
        ("python", "import dualtune_no_such_module"),
        ("json", "{'a': 1}"),
        ("toml", "a = "),
        ("no-such-language", ""),
    ],
)
def test_a_wrong_block_is_found(language, text, tmp_path):
    assert problems_of(Block(Path("page.md"), 1, language, text), tmp_path / "config.yaml")


def test_a_block_that_is_not_closed_is_found(tmp_path):
    (tmp_path / "page.md").write_text("```sh\nls\n")
    with pytest.raises(ValueError, match=r"page\.md:1"):
        list(blocks(tmp_path / "page.md"))
