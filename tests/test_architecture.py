"""The rules of the house that a reader of one file cannot see: who imports whom, and what nobody does.

The map of folders in docs/architecture.md is the rule: imports go from a layer to one below it.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FACADE = "the package root"  # __init__ and __main__: the way in from outside, with imports in functions
FRAMEWORKS = {"torch", "mlx", "mlx_lm", "transformers", "bitsandbytes", "accelerate"}
FOR_BACKENDS = {
    "activation_checkpointing", "adapter", "adapter/formats", "adapter/methods", "backend", "base_model",
    "base_model/spellings", "config", "errors", "io", "optimizer", "world",
}  # fmt: skip
# What is read before the framework.
FOR_CARDS = {"activation_checkpointing", "card", "checks", "memory", "optimizer", "platform", "preflight"}
NUMPY_ENGINE, NUMPY_CARD = "dualtune/testing/numpy_engine.py", "dualtune/testing/numpy_card.py"
MAX_LINES = 400
MAX_FILES = 15  # "about a dozen", and __init__.py

CORE = sorted((ROOT / "dualtune").rglob("*.py"))
BACKENDS = sorted((ROOT / "backends").rglob("*.py"))
TOOLS = sorted(file for folder in ("scripts", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=name_of(file))


@cache
def map_of_folders() -> tuple[dict[str, str], ...]:
    """The layers, from the top: in each, the parts (a folder, or a file of the root) with what lives there."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    layers = [[line.split(maxsplit=1) for line in layer.splitlines()] for layer in block.strip().split("\n\n")]
    return tuple(dict(layer) for layer in layers)


def levels() -> dict[str, int]:
    return {part: level for level, layer in enumerate(reversed(map_of_folders())) for part in layer}


def part_of(dotted: str) -> str:
    """The part of the map in which a module, or a name in one, lies."""
    names = dotted.split(".")[1:]
    if not names or names[0] == "__main__":
        return FACADE
    folders = [name for end, name in enumerate(names, 1) if (ROOT / "dualtune" / "/".join(names[:end])).is_dir()]
    return "/".join(folders) or (names[0] if (ROOT / "dualtune" / f"{names[0]}.py").exists() else FACADE)


def part_of_file(file: Path) -> str:
    return part_of(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def imports_of(nodes) -> Iterator[str]:
    """The dotted names that are imported. `from a import b` gives a.b, which may be a module or a name in one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_when_loaded(file: Path) -> set[str]:
    """Top-level modules that loading the file imports: functions do not count, nor does `if TYPE_CHECKING`."""

    def statements(body) -> Iterator[ast.AST]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                continue
            yield node
            yield from statements(ast.iter_child_nodes(node))

    return {name.partition(".")[0] for name in imports_of(statements(tree_of(file).body))}


def imported_anywhere(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(ast.walk(tree_of(file)))}


def parts_imported(file: Path) -> set[str]:
    """The parts of dualtune that a file imports anywhere, also late or for types alone."""
    return {part_of(name) for name in imports_of(ast.walk(tree_of(file))) if name.split(".")[0] == "dualtune"}


# --- who imports whom ------------------------------------------------------------------------------------------------


def test_every_part_is_on_the_map_with_its_own_first_sentence():
    parts = {part_of_file(file): file for file in CORE if file.name == "__init__.py" or file.parent.name == "dualtune"}
    parts.pop(FACADE)
    written = {part: sentence for layer in map_of_folders() for part, sentence in layer.items()}
    said = {}
    for part, file in parts.items():
        first, _, _ = (ast.get_docstring(tree_of(file)) or "").partition("\n")
        said[part] = first.strip()
    assert written == said
    assert sum(map(len, map_of_folders())) == len(written), "a part is on the map twice"


def test_imports_go_down():
    level, wrong = levels(), []
    for file in CORE:
        own = part_of_file(file)
        if own == FACADE:
            continue
        above = [part for part in sorted(parts_imported(file) - {own}) if level.get(part, 99) >= level[own]]
        wrong += [f"{name_of(file)} imports {part}" for part in above]
    assert not wrong, "\n".join(wrong)


def test_the_rule_sees_an_import_upwards(monkeypatch):
    """The map turned upside down forbids nearly everything."""
    upside_down = tuple(reversed(map_of_folders()))
    monkeypatch.setattr(f"{__name__}.map_of_folders", lambda: upside_down)
    with pytest.raises(AssertionError, match=r"dualtune/cli/main\.py imports errors"):
        test_imports_go_down()


def test_folders_are_small():
    sizes = {folder: len(list(folder.glob("*.py"))) for folder in {file.parent for file in (*CORE, *BACKENDS)}}
    assert {name_of(folder): size for folder, size in sizes.items() if size > MAX_FILES} == {}


def test_the_test_tools_import_what_lies_below_train_and_the_self_test_alone_imports_them():
    own = ("testing", "selftest", "selftest/checks")
    importers = [name_of(file) for file in CORE if "testing" in parts_imported(file) and part_of_file(file) not in own]
    assert not importers
    assert levels()["testing"] < levels()["train"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert project.count("dualtune.testing") == 2 and 'numpy = "dualtune.testing.numpy_engine:backend"' in project


def test_backends_know_the_boundary_and_not_each_other():
    names = {path.name for path in (ROOT / "backends").iterdir()}
    for file in BACKENDS:
        own = file.relative_to(ROOT / "backends").parts[0]
        allowed = FOR_CARDS if file.parent.name == "card" else FOR_BACKENDS
        if file.parent.name == "counting":  # what a card asks the framework
            allowed = FOR_BACKENDS | {"memory"}
        assert not parts_imported(file) - allowed, name_of(file)
        assert not (names - {own}) & imported_anywhere(file), name_of(file)


def test_the_core_knows_no_backend_and_loads_no_framework():
    for file in CORE:
        assert not {"dualtune_torch", "dualtune_mlx"} & imported_anywhere(file), name_of(file)
        assert not (FRAMEWORKS - {"transformers"}) & imported_anywhere(file), name_of(file)
        assert not FRAMEWORKS & imported_when_loaded(file), name_of(file)


def test_the_example_engine_is_an_ordinary_backend():
    assert parts_imported(ROOT / NUMPY_ENGINE) <= FOR_BACKENDS | {"testing"}  # its card
    assert parts_imported(ROOT / NUMPY_CARD) <= FOR_CARDS


def test_a_card_is_read_without_a_framework_and_without_an_engine():
    for file in (file for file in BACKENDS if file.parent.name == "card" or file.name == "__init__.py"):
        own = file.relative_to(ROOT / "backends").parts[0]
        assert not FRAMEWORKS & imported_when_loaded(file), name_of(file)
        beside = {name.split(".")[1] for name in imports_of(ast.walk(tree_of(file))) if name.startswith(f"{own}.")}
        assert beside <= {"card"}, name_of(file)


# --- the core names no backend ---------------------------------------------------------------------------------------

A_BACKEND = re.compile(r"\b(torch|mlx(?!-lm)|dualtune_torch|dualtune_mlx)\b", re.IGNORECASE)  # mlx-lm is a file format
# Files of the core that may have the name of a backend in a text, and why.
NAMES_A_BACKEND = {
    "adapter/": "`mlx` is a layout of adapter files, that of mlx-lm",
    "config/importing/": "data sets of mlx-lm's organisation on the hub",
    "transfer/remotes/model_card.py": "a tag of model cards on the hub",
    "platform/machines.py": "machines that are not here, with the software of a proper installation",
    "platform/detect.py": "the field torch_cuda of a machine, a key of `check-gpu --json`",
    "launch/mlx.py": "the program mlx.launch",
    "cli/training/launch.py": "`--on mlx` and the programs that it stands for",
    "cli/adapters/adapter.py": "`--layout mlx` of adapter files",
    "cli/adapters/export.py": "`--to mlx`, and the kinds of `--quantize` for it",
    "export/": "the target of that name, and mlx-lm's converter",
    "cli/suggest.py": "words that somebody may type for a command, such as to-mlx",
}


def backends_named(tree: ast.Module) -> set[str]:
    """Texts, also in f-strings, that hold the name of a backend; docstrings and comments may."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # also of an attribute
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text.value for text in texts if id(text) not in docstrings and A_BACKEND.search(text.value)}


def test_the_core_names_no_backend():
    used, wrong = set(), {}
    for file in (file for file in CORE if part_of_file(file) != "testing"):
        own = file.relative_to(ROOT / "dualtune").as_posix()
        if found := backends_named(tree_of(file)):
            allowed = {name for name in NAMES_A_BACKEND if own.startswith(name)}
            used |= allowed
            wrong |= {} if allowed else {own: found}
    assert wrong == {}
    assert used == NAMES_A_BACKEND.keys(), "a file of the list names none any more"


@pytest.mark.parametrize(
    "code", ["if name == 'torch': pass", "T = {'mlx': 1}", "raise E(f'{x}: install torch')", "'dualtune_mlx.card'[0]"]
)
def test_the_search_for_backends_finds_them(code):
    assert backends_named(ast.parse(code))
    assert not backends_named(ast.parse('"""About torch."""\nkernels = "torchrun"  # and MLX'))


# --- what nobody does ------------------------------------------------------------------------------------------------


def crimes_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {name.partition(".")[0] for name in imports_of([node])}
            yield from (f"import {name}" for name in names & {"pickle", "dill", "cloudpickle", "marshal", "shelve"})
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen",
                          "np.load", "numpy.load"):  # fmt: skip
                yield f"{called}()"
            if called.rpartition(".")[2] == "extractall":
                yield f"{called}()"
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and value != "False":
                    yield f"{called}({keyword.arg}={value})"


def test_nobody_runs_what_was_loaded():
    crimes = {name_of(file): list(crimes_of(tree_of(file))) for file in (*CORE, *BACKENDS, *TOOLS)}
    assert {name: found for name, found in crimes.items() if found} == {}


@pytest.mark.parametrize(
    "code",
    ["import torch\ntorch.load('x')", "import pickle", "from pickle import loads", "archive.extractall()",
     "yaml.load(text)", "subprocess.run('x', shell=True)", "os.system('x')", "eval('1')",
     "Auto.from_pretrained(x, trust_remote_code=True)", "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_the_search_for_crimes_finds_them(code):
    assert list(crimes_of(ast.parse(code)))


def test_the_search_lets_the_innocent_go():
    code = "model.eval(); mx.eval(x); json.load(f); yaml.safe_load(t); run(shell=False); re.compile('torch.load(')"
    assert not list(crimes_of(ast.parse(code)))


# --- form ------------------------------------------------------------------------------------------------------------


def test_every_file_says_what_it_is_and_fits_a_reader():
    files = (*CORE, *BACKENDS, *TOOLS, *TESTS)
    assert [name_of(file) for file in files if not ast.get_docstring(tree_of(file))] == []
    lines = {name_of(file): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {name: number for name, number in lines.items() if number > MAX_LINES} == {}


def test_one_idea_has_one_class_name():
    """A class name stands once in the core and each backend, and a backend repeats only names of the other backend."""
    packages = {"dualtune": CORE} | {
        package: [file for file in BACKENDS if package in file.parts] for package in ("dualtune_torch", "dualtune_mlx")
    }
    named = {
        package: [node.name for file in files for node in ast.walk(tree_of(file)) if isinstance(node, ast.ClassDef)]
        for package, files in packages.items()
    }
    for package, names in named.items():
        public = [name for name in names if not name.startswith("_") and name != "Model"]  # mlx-lm asks for a Model
        others = set[str]() if package == "dualtune" else {*named["dualtune"]}
        assert len(public) > 5 and [name for name in public if public.count(name) > 1 or name in others] == []


def test_the_folders_of_the_backends_hold_the_same_files():
    """The same thing has the same name in both; either may have more."""
    torch, mlx = (
        {file.name for file in (ROOT / "backends" / f"dualtune_{name}").iterdir()} for name in ("torch", "mlx")
    )
    shared = {
        "__init__.py",
        "backend.py",
        "engine.py",
        "lora.py",
        "losses.py",
        "methods.py",
        "model.py",
        "optimizer.py",
    }
    assert shared | {"card", "kernels"} <= torch & mlx
