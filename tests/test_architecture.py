"""The rules of the house that a reader of one file cannot see: who imports whom, and what nobody does.

cli -> platform, transfer, launch, report -> train -> memory, hybrid, data -> backend, hooks -> base_model
    -> adapter, config, limits -> disk, interrupt -> errors, faults, redaction
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    {"escape", "secret_forms"},
    {"errors", "redaction", "faults", "show", "versions"},
    {"disk", "interrupt", "checks"},
    {"adapter", "config", "limits"},
    {"base_model", "capabilities"},
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
FOR_BACKENDS = {"backend", "base_model", "adapter", "config", "errors"}
NUMPY_ENGINE = "dualtune/testing/numpy_engine.py"
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


def imported_anywhere(file: Path) -> set[str]:
    """Top-level modules that a file imports, also in functions."""
    return {name.partition(".")[0] for name in imports_of(ast.walk(tree_of(file)))}


def parts_imported(file: Path) -> set[str]:
    """The parts of dualtune (adapter, backend, …) that a file imports anywhere, also late or for types alone."""
    names = [name.split(".") for name in imports_of(ast.walk(tree_of(file)))]
    parts = {name[1] if len(name) > 1 else FACADE for name in names if name[0] == "dualtune"}
    return {part if part in LEVEL or part == "testing" else FACADE for part in parts}


def offenders(files: Iterable[Path], crimes: Callable[[Path], Iterable[str]]) -> list[str]:
    """A line for every file that breaks a rule: its name, and what `crimes` finds in it."""
    found = {name_of(file): sorted(crimes(file)) for file in files}
    return [f"{name}: {', '.join(what)}" for name, what in found.items() if what]


def part_of(file: Path) -> str:
    return file.relative_to(ROOT / "dualtune").parts[0].removesuffix(".py")


# --- who imports whom ------------------------------------------------------------------------------------------------


def test_every_part_has_its_place():
    assert {part_of(file) for file in CORE} - {"__init__", "__main__", "testing", "demo"} <= LEVEL.keys()


def test_imports_go_down():
    def upwards(file: Path) -> Iterator[str]:
        level, below = LEVEL[part_of(file)], {part_of(file), FACADE}
        return (f"imports {part}" for part in parts_imported(file) - below if LEVEL.get(part, 99) >= level)

    assert not offenders([file for file in CORE if part_of(file) in LEVEL], upwards)


def test_the_test_tools_import_what_lies_below_train_and_nobody_imports_them():
    for file in CORE:
        if part_of(file) == "testing":
            assert {LEVEL[part] for part in parts_imported(file) - {"testing", FACADE}} <= set(range(LEVEL["train"]))
        else:
            assert "testing" not in parts_imported(file), name_of(file)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert project.count("dualtune.testing") == 1 and 'numpy = "dualtune.testing.numpy_engine:backend"' in project


def test_backends_know_the_boundary_and_not_each_other():
    names = {path.name for path in (ROOT / "backends").iterdir()}

    def forbidden(file: Path) -> set[str]:
        others = names - {file.relative_to(ROOT / "backends").parts[0]}
        return (parts_imported(file) - FOR_BACKENDS) | (others & imported_anywhere(file))

    assert not offenders(BACKENDS, forbidden)


def test_the_core_knows_no_backend_and_loads_no_framework():
    never = {"dualtune_torch", "dualtune_mlx", *FRAMEWORKS} - {"transformers"}

    def forbidden(file: Path) -> set[str]:
        return (never & imported_anywhere(file)) | (FRAMEWORKS & imported_when_loaded(file))

    assert not offenders(CORE, forbidden)


def test_the_example_engine_is_an_ordinary_backend():
    assert parts_imported(ROOT / NUMPY_ENGINE) <= FOR_BACKENDS


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
    assert not offenders([*CORE, *BACKENDS, *TOOLS], lambda file: crimes_of(tree_of(file)))


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
    def faults(file: Path) -> Iterator[str]:
        if not ast.get_docstring(tree_of(file)):
            yield "no docstring"
        if (num_lines := len(file.read_text(encoding="utf-8").splitlines())) > MAX_LINES:
            yield f"{num_lines} lines: split it by idea"

    assert not offenders([*CORE, *BACKENDS, *TOOLS, *TESTS], faults)


def test_the_folders_of_the_backends_hold_the_same_files():
    """The same thing has the same name in both; either may have more."""
    torch, mlx = (
        {file.name for file in (ROOT / "backends" / f"dualtune_{name}").iterdir()} for name in ("torch", "mlx")
    )
    assert {"__init__.py", "backend.py", "engine.py", "model.py", "lora.py", "losses.py"} <= torch & mlx
