"""The rules of the house that a reader of one file cannot see: who imports whom, and what nobody does.

A file imports only from its own room and from the rooms that stand above it in docs/architecture.md.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("base", "model", "config", "engine", "data", "train", "show", "use", "doctor", "cli")
FOR_BACKENDS = {"base", "model", "engine"}
FRAMEWORKS = {"torch", "mlx", "mlx_lm", "transformers", "bitsandbytes", "accelerate"}
TESTING = "dualtune/engine/testing/"  # for authors of backends; also a small complete backend

CORE = sorted((ROOT / "dualtune").rglob("*.py"))
BACKENDS = sorted((ROOT / "backends").rglob("*.py"))
TOOLS = sorted(file for folder in ("scripts", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=name_of(file))


def room_of(dotted: str) -> str | None:
    """The room of a module of dualtune, or of a name in one. None: of the package root, the way in from outside."""
    names = dotted.split(".")
    return names[1] if names[0] == "dualtune" and len(names) > 1 and names[1] in ROOMS else None


def room_of_file(file: Path) -> str | None:
    return room_of(".".join(file.relative_to(ROOT).with_suffix("").parts))


def imports_of(nodes) -> Iterator[str]:
    """The dotted names that are imported. `from a import b` gives a.b, which may be a module or a name in one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def running(body, *, functions: bool = True) -> Iterator[ast.AST]:
    """The nodes that run: those of functions too, if wanted, but not what is there for types alone."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not functions:
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from running(ast.iter_child_nodes(node), functions=functions)


def imported_when_loaded(file: Path) -> set[str]:
    """Top-level modules that loading the file imports: functions do not count, nor does `if TYPE_CHECKING`."""

    return {name.partition(".")[0] for name in imports_of(running(tree_of(file).body, functions=False))}


def imported_anywhere(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(ast.walk(tree_of(file)))}


@cache
def rooms_imported(file: Path) -> set[str]:
    """The rooms that a file imports anywhere, also late or for types alone."""
    return {room for name in imports_of(ast.walk(tree_of(file))) if (room := room_of(name))}


# --- who imports whom ------------------------------------------------------------------------------------------------


def test_the_rooms_are_those_of_the_page_each_with_its_own_first_sentence():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    first = {
        room: ast.get_docstring(tree_of(ROOT / "dualtune" / room / "__init__.py")).split("\n")[0] for room in ROOMS
    }
    assert [(room, rows.get(room)) for room in ROOMS] == [*first.items()]
    assert {file.name for file in (ROOT / "dualtune").glob("*.py")} == {"__init__.py", "__main__.py"}
    assert {file.parts[len(ROOT.parts) + 1] for file in CORE if file.parent.name != "dualtune"} == {*ROOMS}


def imports_upwards(rooms: tuple[str, ...]) -> list[str]:
    found = []
    for file in CORE:
        if (own := room_of_file(file)) is not None:
            below = rooms[rooms.index(own) + 1 :]
            found += [f"{name_of(file)} imports {room}" for room in sorted(rooms_imported(file)) if room in below]
    return found


def test_a_room_imports_only_from_rooms_above_it():
    assert imports_upwards(ROOMS) == []


def test_the_rule_sees_an_import_from_below():
    assert "dualtune/cli/main.py imports base" in imports_upwards(ROOMS[::-1])


def circles(imports: dict[str, set[str]]) -> list[str]:
    """The files that import themselves by way of others: what is left when those at either end are taken away."""
    while leaves := [file for file, others in imports.items() if not others & imports.keys()]:
        imports = {file: others for file, others in imports.items() if file not in leaves}
    while roots := [file for file in imports if not any(file in others for others in imports.values())]:
        imports = {file: others for file, others in imports.items() if file not in roots}
    return sorted(imports)


def files_imported(file: Path, modules: dict[str, Path]) -> set[str]:
    """The files that a file imports when it is loaded or later; for types alone does not count."""
    found = set()
    for name in imports_of(running(tree_of(file).body)):
        module = next((part for part in (name, name.rpartition(".")[0]) if part in modules), None)
        if module is not None and modules[module] != file:
            found.add(name_of(modules[module]))
    return found


def test_files_do_not_import_each_other_in_circles():
    files = [file for file in (*CORE, *BACKENDS) if file.name != "__init__.py" or room_of_file(file)]
    modules = {}
    for file in files:
        parts = file.relative_to(ROOT if file in CORE else ROOT / "backends").with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = file
    assert circles({name_of(file): files_imported(file, modules) for file in files}) == []


def test_the_search_for_circles_finds_them():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


def test_the_test_tools_are_imported_by_the_self_test_alone():
    importers = [
        name_of(file) for file in CORE
        if any(name.startswith("dualtune.engine.testing") for name in imports_of(ast.walk(tree_of(file))))
    ]  # fmt: skip
    assert [name for name in importers if not name.startswith((TESTING, "dualtune/doctor/selftest/"))] == []
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert project.count("dualtune.engine.testing") == 2


def test_backends_know_the_boundary_and_not_each_other():
    names = {path.name for path in (ROOT / "backends").iterdir()}
    for file in BACKENDS:
        own = file.relative_to(ROOT / "backends").parts[0]
        assert rooms_imported(file) <= FOR_BACKENDS, name_of(file)
        assert not (names - {own}) & imported_anywhere(file), name_of(file)
    for file in (ROOT / TESTING).glob("numpy_*.py"):  # the example is an ordinary backend
        assert rooms_imported(file) <= FOR_BACKENDS, name_of(file)


def test_the_core_knows_no_backend_and_loads_no_framework():
    for file in CORE:
        assert not {"dualtune_torch", "dualtune_mlx"} & imported_anywhere(file), name_of(file)
        assert not (FRAMEWORKS - {"transformers"}) & imported_anywhere(file), name_of(file)
        assert not FRAMEWORKS & imported_when_loaded(file), name_of(file)


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
    "model/formats/": "`mlx` is a layout of adapter files, that of mlx-lm",
    "model/importing/": "the same",
    "model/inspection.py": "the same",
    "config/importing/": "data sets of mlx-lm's organisation on the hub",
    "use/model_card.py": "a tag of model cards on the hub, and the library that reads an export",
    "engine/machines.py": "machines that are not here, with the software of a proper installation",
    "engine/detect.py": "the field torch_cuda of a machine, a key of `check-gpu --json`",
    "train/launch/mlx.py": "the program mlx.launch",
    "cli/launch.py": "`--on mlx` and the programs that it stands for",
    "cli/adapter.py": "`--layout mlx` of adapter files",
    "cli/export.py": "`--to mlx`, and the kinds of `--quantize` for it",
    "use/export/": "the target of that name, and mlx-lm's converter",
    "cli/suggest.py": "words that somebody may type for a command, such as to-mlx",
}


def backends_named(tree: ast.Module) -> set[str]:
    """Texts, also in f-strings, that hold the name of a backend; docstrings and comments may."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # also of an attribute
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text.value for text in texts if id(text) not in docstrings and A_BACKEND.search(text.value)}


def test_the_core_names_no_backend():
    used, wrong = set(), {}
    for file in (file for file in CORE if not name_of(file).startswith(TESTING)):
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


def forbidden_calls(tree: ast.Module) -> Iterator[str]:
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
    forbidden = {name_of(file): list(forbidden_calls(tree_of(file))) for file in (*CORE, *BACKENDS, *TOOLS)}
    assert {name: found for name, found in forbidden.items() if found} == {}


@pytest.mark.parametrize(
    "code",
    ["import torch\ntorch.load('x')", "import pickle", "from pickle import loads", "archive.extractall()",
     "yaml.load(text)", "subprocess.run('x', shell=True)", "os.system('x')", "eval('1')",
     "Auto.from_pretrained(x, trust_remote_code=True)", "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_the_search_for_forbidden_calls_finds_them(code):
    assert list(forbidden_calls(ast.parse(code)))


def test_the_search_lets_the_innocent_go():
    code = "model.eval(); mx.eval(x); json.load(f); yaml.safe_load(t); run(shell=False); re.compile('torch.load(')"
    assert not list(forbidden_calls(ast.parse(code)))


# --- form ------------------------------------------------------------------------------------------------------------


def test_every_file_says_what_it_is():
    files = (*CORE, *BACKENDS, *TOOLS, *TESTS)
    assert [name_of(file) for file in files if not ast.get_docstring(tree_of(file))] == []


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
