"""The rules of the house that a reader of one file cannot see: who imports whom, and what nobody does.

cli -> platform, transfer, launch, report -> train -> memory, hybrid, data -> backend, hooks -> base_model
    -> config -> adapter, limits -> disk, interrupt -> errors, faults, redaction
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    {"escape", "secret_forms"},
    {"errors", "redaction", "faults", "show", "versions"},
    {"disk", "interrupt", "checks", "optimizer"},
    {"adapter", "config", "limits"},
    {"base_model", "capabilities", "card"},
    {"backend", "hooks"},
    {"memory", "hybrid", "data"},
    {"train"},
    {"platform", "transfer", "launch", "report"},
    {"validate"},
    {"cli"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FACADE = "dualtune"  # __init__.py: the version for everybody, and the way in from outside, with imports in functions
FRAMEWORKS = {"torch", "mlx", "mlx_lm", "transformers", "bitsandbytes", "accelerate"}
FOR_BACKENDS = {"backend", "base_model", "adapter", "config", "errors", "optimizer"}
NUMPY_ENGINE = "dualtune/testing/numpy_engine.py"
FOR_BACKENDS = {"backend", "base_model", "adapter", "config", "errors"}
FOR_CARDS = {"card", "checks", "memory", "platform"}  # what a backend says of itself before its framework is imported
CARD_FILES = {"card.py", "checks.py", "memory.py", "sizes.py"}
NUMPY_ENGINE, NUMPY_CARD = "dualtune/testing/numpy_engine.py", "dualtune/testing/numpy_card.py"
MAX_LINES = 400

CORE = sorted((ROOT / "dualtune").rglob("*.py"))
BACKENDS = sorted((ROOT / "backends").rglob("*.py"))
TOOLS = sorted(file for folder in ("scripts", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=name_of(file))


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


def parts_imported(file: Path) -> set[str]:
    """The parts of dualtune (adapter, backend, …) that a file imports anywhere, also late or for types alone."""
    names = [name.split(".") for name in imports_of(ast.walk(tree_of(file)))]
    parts = {name[1] if len(name) > 1 else FACADE for name in names if name[0] == "dualtune"}
    return {part if part in LEVEL or part == "testing" else FACADE for part in parts}


def part_of(file: Path) -> str:
    return file.relative_to(ROOT / "dualtune").parts[0].removesuffix(".py")


# --- who imports whom ------------------------------------------------------------------------------------------------


def test_every_part_has_its_place():
    assert {part_of(file) for file in CORE} - {"__init__", "__main__", "testing", "demo"} <= LEVEL.keys()


@pytest.mark.parametrize("file", [f for f in CORE if part_of(f) in LEVEL], ids=name_of)
def test_imports_go_down(file):
    own = part_of(file)
    upwards = {part for part in parts_imported(file) - {own, FACADE} if LEVEL.get(part, 99) >= LEVEL[own]}
    assert not upwards, f"{own} imports {', '.join(sorted(upwards))}"


def test_the_test_tools_import_what_lies_below_train_and_nobody_imports_them():
    for file in CORE:
        if part_of(file) == "testing":
            assert {LEVEL[part] for part in parts_imported(file) - {"testing", FACADE}} <= set(range(LEVEL["train"]))
        else:
            assert "testing" not in parts_imported(file), name_of(file)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert project.count("dualtune.testing") == 2 and 'numpy = "dualtune.testing.numpy_engine:backend"' in project


@pytest.mark.parametrize("file", BACKENDS, ids=name_of)
def test_backends_know_the_boundary_and_not_each_other(file):
    own = file.relative_to(ROOT / "backends").parts[0]
    others = {path.name for path in (ROOT / "backends").iterdir()} - {own}
    assert not parts_imported(file) - (FOR_CARDS if file.name in CARD_FILES else FOR_BACKENDS)
    assert not others & {name.partition(".")[0] for name in imports_of(ast.walk(tree_of(file)))}


@pytest.mark.parametrize("file", CORE, ids=name_of)
def test_the_core_knows_no_backend_and_loads_no_framework(file):
    anywhere = {name.partition(".")[0] for name in imports_of(ast.walk(tree_of(file)))}
    assert not {"dualtune_torch", "dualtune_mlx"} & anywhere
    assert not (FRAMEWORKS - {"transformers"}) & anywhere
    assert not FRAMEWORKS & imported_when_loaded(file)


def test_the_example_engine_is_an_ordinary_backend():
    assert parts_imported(ROOT / NUMPY_ENGINE) <= FOR_BACKENDS | {"testing"}  # its card
    assert parts_imported(ROOT / NUMPY_CARD) <= FOR_CARDS


@pytest.mark.parametrize("file", [f for f in BACKENDS if f.name in (*CARD_FILES, "__init__.py")], ids=name_of)
def test_a_card_is_read_without_a_framework_and_without_an_engine(file):
    own = file.relative_to(ROOT / "backends").parts[0]
    assert not FRAMEWORKS & imported_when_loaded(file)
    beside = {name.split(".")[1] for name in imports_of(ast.walk(tree_of(file))) if name.startswith(f"{own}.")}
    assert {f"{name}.py" for name in beside} <= CARD_FILES


# --- the core names no backend ---------------------------------------------------------------------------------------

A_BACKEND = re.compile(r"\b(torch|mlx(?!-lm)|dualtune_torch|dualtune_mlx)\b", re.IGNORECASE)  # mlx-lm is a file format
# Files of the core that may have the name of a backend in a text, and why.
NAMES_A_BACKEND = {
    "adapter/": "`mlx` is a layout of adapter files, that of mlx-lm",
    "base_model/config_file.py": "MLX's packed weights, a file format",
    "transfer/remotes/model_card.py": "a tag of model cards on the hub",
    "platform/machines.py": "machines that are not here, with the software of a proper installation",
    "platform/detect.py": "the field torch_cuda of a machine, a key of `check-gpu --json`",
    "launch/mlx.py": "the program mlx.launch",
    "cli/training/launch.py": "`--on mlx` and the programs that it stands for",
    "cli/adapters/adapter.py": "`--layout mlx` of adapter files",
    "cli/suggest.py": "words that somebody may type for a command, such as to-mlx",
}


def docstrings_of(tree: ast.Module) -> set[int]:
    """The ids of the nodes that are docstrings, also of an attribute."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def backends_named(tree: ast.Module) -> set[str]:
    """Texts, also in f-strings, that hold the name of a backend; docstrings and comments may."""
    told = docstrings_of(tree)
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text.value for text in texts if id(text) not in told and A_BACKEND.search(text.value)}


@pytest.mark.parametrize("file", [f for f in CORE if part_of(f) != "testing"], ids=name_of)
def test_the_core_names_no_backend(file):
    own = file.relative_to(ROOT / "dualtune").as_posix()
    is_allowed = own.startswith((*NAMES_A_BACKEND,))
    assert is_allowed or not backends_named(tree_of(file))


@pytest.mark.parametrize("name", NAMES_A_BACKEND)
def test_what_may_name_a_backend_does(name):
    files = [file for file in CORE if file.relative_to(ROOT / "dualtune").as_posix().startswith(name)]
    assert any(backends_named(tree_of(file)) for file in files)


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


@pytest.mark.parametrize("file", [*CORE, *BACKENDS, *TOOLS], ids=name_of)
def test_nobody_runs_what_was_loaded(file):
    assert not list(crimes_of(tree_of(file)))


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


@pytest.mark.parametrize("file", [*CORE, *BACKENDS, *TOOLS, *TESTS], ids=name_of)
def test_every_file_says_what_it_is_and_fits_a_reader(file):
    assert ast.get_docstring(tree_of(file)), "no docstring"
    num_lines = len(file.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, f"{num_lines} lines: split it by idea"


def test_the_folders_of_the_backends_hold_the_same_files():
    """The same thing has the same name in both; either may have more."""
    torch, mlx = (
        {file.name for file in (ROOT / "backends" / f"dualtune_{name}").iterdir()} for name in ("torch", "mlx")
    )
    assert {"__init__.py", *CARD_FILES, "backend.py", "engine.py", "model.py", "lora.py", "losses.py"} <= torch & mlx
