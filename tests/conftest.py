"""What several test folders share: a tiny model with a tokenizer, small data files, configs, and the command line.

The tokenizer has one token per byte, so that tokens can be counted by hand, and one merge ("=7"), so that a token can
lie across a border.
"""

import gc
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: threads only wait for each other on tiny matrices
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a test asks for more, none waits by computing
os.environ["HF_HUB_OFFLINE"] = "1"  # no test downloads

from dualtune.base import interrupt
from dualtune.base.errors import EnvironmentFault
from dualtune.config import parse_config
from dualtune.engine.backend import get_backend
from dualtune.engine.testing.tiny_models import write_softmax_model, write_tiny_llama

# A shell without job control lets its background processes ignore these two, and every program inherits that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# Without a deadline: a busy machine is no failure. `make test-long` takes the second profile.
hypothesis.settings.register_profile("push", deadline=None, max_examples=25)
hypothesis.settings.register_profile("long", deadline=None, max_examples=200)
hypothesis.settings.load_profile("push")

ROOT = Path(__file__).parents[1]
TAKES_LONG = (  # at least ten seconds of a processor; only the order of files depends on it
    "conformance/test_conformance.py", "memory/test_estimate_torch.py", "cli/test_demo.py", "validate/test_twins.py",
    "memory/test_estimate_mlx.py", "distributed/test_torch_runs.py", "torch/test_torch_kernels.py",
    "nogpu/test_fake_steps.py", "memory/test_counted.py", "torch/test_torch_choice.py", "journey/test_tunnel.py",
    "journey/test_journey.py", "faults/test_signals.py", "train/test_averages.py", "torch/test_torch_checkpointing.py",
    "train/test_rollouts.py", "parity/test_parity.py", "sweep/test_sweep.py", "cli/test_memory_ablate.py",
    "nogpu/kernels/test_inductor.py", "memory/test_loading.py", "parity/test_families.py", "serve/test_serve_tools.py",
    "selftest/test_selftest_checks.py", "distributed/test_listening.py", "hybrid/test_predictions.py",
    "torch/test_torch_streaming.py", "train/test_comparison.py", "mlx/test_mlx_checkpointing.py",
    "mlx/test_mlx_kernels.py", "selftest/test_selftest_command.py", "cli/test_validate.py", "test_architecture.py",
    "test_examples.py", "parity/test_interchange.py", "parity/test_affine4.py", "cli/test_bench.py",
    "faults/test_numbers.py", "train/test_resume.py", "train/test_shortages.py", "faults/test_killed.py",
    "faults/test_disk.py", "cli/test_terminal.py", "export/test_new_tokens.py", "chaos/test_chaos.py",
    "nogpu/kernels/test_numerics.py", "faults/test_kills.py", "journey/test_ssh.py", "journey/test_ssh_cuts.py",
    "test_quickstart.py", "test_same_bits.py",
)  # fmt: skip
PATIENCE_S = 1800  # until a process counts as hanging: a safety net on a machine of any load, never a judgement
REQUIRED = [name for name in os.environ.get("DUALTUNE_TEST_BACKENDS", "").split(",") if name]
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
VOCAB = len(SPECIAL) + 256 + 1
CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def hide_from_the_collector() -> None:
    """Each training run collects garbage, which takes as long as there are objects: what is old is no garbage."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart():
    gc.disable()


def pytest_collection_finish():
    gc.enable()
    hide_from_the_collector()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    num_imported = len(sys.modules)
    result = yield
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > num_imported + 100:
        hide_from_the_collector()
    return result


def pytest_configure(config):
    """xdist hands out files in the order below, and not those with few tests last: these are the longest."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if not hasattr(config, "workerinput"):
        precompile_the_header_of_mlx()


def precompile_the_header_of_mlx() -> None:
    """On Linux MLX has g++ compile each of its some hundred kernels, from one large header: a quarter of the time.

    g++ looks for it beside the kernel first, in MLX's own cache, whose path has MLX's version.
    """
    if sys.platform != "linux" or not shutil.which("g++") or importlib.util.find_spec("mlx") is None:
        return
    (mlx,) = importlib.util.find_spec("mlx").submodule_search_locations
    header, version = Path("mlx/backend/cpu/compiled_preamble.h"), importlib.metadata.version("mlx")
    compiled = Path(tempfile.gettempdir()) / "mlx" / version / "cpu" / header.with_suffix(".h.gch")
    if compiled.exists():
        return
    compiled.parent.mkdir(parents=True, exist_ok=True)
    part = compiled.with_name(f"{os.getpid()}.part")
    options = ["-std=c++17", "-O3", "-Wall", "-fPIC", "-I", f"{mlx}/include", "-x", "c++-header"]  # those of MLX
    done = subprocess.run(["g++", *options, f"{mlx}/include/{header}", "-o", part], capture_output=True, check=False)
    if done.returncode == 0:  # without it, a kernel only takes longer
        part.replace(compiled)


def covering(cases, strength):
    """Choose few of the cases of a test, with each combination of values of so many parameters that any case has."""
    values = [[*values_in(case)] for case in cases]
    combinations = [{*itertools.combinations(each, min(strength, len(each)))} for each in values]
    left, chosen = set().union(*combinations), []
    while left:
        best = max(range(len(cases)), key=lambda n: len(combinations[n] & left))  # the first of the best
        left -= combinations[best]
        chosen.append(cases[best])
    return chosen


def values_in(case):
    """What tells the cases of a test apart: the values of each `parametrize`, and of each fixture with parameters."""
    params = dict(case.callspec.params)
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].replace(" ", "").split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield (*names, *(id(params.pop(name)) for name in names))
    yield from ((name, id(value)) for name, value in params.items())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave to `make test-long` the cases whose values others have, as `covering` asks.

    Begin with the files that take long, so that no process is left alone with one of them at the end.
    """
    cases = {}
    for item in items:
        if item.get_closest_marker("covering") and hasattr(item, "callspec") and not item.get_closest_marker("long"):
            cases.setdefault((item.parent, item.originalname), []).append(item)
    for function in cases.values():
        (strength,) = function[0].get_closest_marker("covering").args
        for item in {*function} - {*covering(function, strength)}:
            item.add_marker(pytest.mark.long)
    if hasattr(config, "workerinput"):
        place = {ROOT / "tests" / name: n for n, name in enumerate(TAKES_LONG)}
        items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(autouse=True)
def _signals_as_before():
    """A run that a signal has stopped ignores the next one, and so would every program that a later test starts."""
    before = {number: signal.getsignal(number) for number in interrupt.ALL}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Layers with random weights are the same in every run: MLX starts from the time, torch from the test before."""
    if "torch" in sys.modules:  # `torch.manual_seed` also takes a traceback for each kind of device that is absent
        sys.modules["torch"].default_generator.manual_seed(0)
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_disks():
    """No test cuts the power, and a run flushes a hundred files, at some milliseconds each; processes still do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is not open, too
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Tokenized data of tests stay out of the user's cache."""
    os.environ["DUALTUNE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def shared():
    """The path of test material beside the repository; the test is skipped where it is absent."""

    def locate(name: str) -> Path:
        path = ROOT.parent / "shared" / name
        if not path.exists():
            pytest.skip(f"needs the test material {path}")
        return path

    return locate


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "=7"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("=", "7")]))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHATML
    ).save_pretrained(path)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A random Llama with the byte tokenizer and a ChatML template."""
    path = tmp_path_factory.mktemp("models") / "llama"
    write_tiny_llama(path, vocab_size=VOCAB, hidden_size=32, intermediate_size=64, head_dim=8,
                     max_position_embeddings=512)  # fmt: skip
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tiny_softmax(tmp_path_factory) -> Path:
    """The NumPy engine's model with the same tokenizer."""
    path = write_softmax_model(tmp_path_factory.mktemp("models") / "softmax", vocab=VOCAB)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def open_backend():
    """`get_backend` on the CPU; a backend that is not installed skips the test, unless it is required."""

    def open_(name: str):
        try:
            return get_backend(name, "cpu")
        except EnvironmentFault as error:
            if name in REQUIRED:
                raise
            pytest.skip(str(error))

    return open_


def pytest_addoption(parser):
    parser.addoption(
        "--write-wording", action="store_true", help="write the golden texts of these files' messages anew"
    )


WORDING = {}  # the texts of a golden file by their test


def wording_in(file: Path, tests: str) -> dict[str, str]:
    """The sections of a golden file whose tests still are in the source."""
    if file not in WORDING:
        sections = file.read_text(encoding="utf-8").split("\n=== ")[1:] if file.exists() else []
        texts = dict(section.split("\n", 1) for section in sections)
        WORDING[file] = {name: texts[name] for name in texts if f"def {re.split('[ [(]', name)[0]}(" in tests}
    return WORDING[file]


@pytest.fixture
def wording(request, tmp_path, tmp_path_factory):
    """Compare a message with its golden text in tests/golden/wording, where all texts of a file of tests lie together.

    A message has been changed on purpose: run the tests with --write-wording, and read what git shows.
    """
    place = request.path.relative_to(ROOT / "tests")
    file = ROOT / "tests" / "golden" / "wording" / place.with_suffix(".txt")
    texts = wording_in(file, request.path.read_text(encoding="utf-8"))
    names = {tmp_path: "HERE", tmp_path_factory.getbasetemp(): "TMP", ROOT: "REPO"}
    count = iter(range(1, 1000))

    def compare(message: str | list) -> None:
        if not isinstance(message, str):
            message = "\n".join(map(str, message))
        for path, short in names.items():
            message = message.replace(str(path), short)
        message = re.sub(r"^tokenized .*\n", "", message, flags=re.M)  # not where another test has the same data
        message = re.sub(r"TMP/(\w+?)\d+", r"TMP/\1", message)
        message = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z|\b[\d.]+ s\b", "TIME", message)
        message = re.sub(r"(?<![\d.])\d+\.\d+\.\d+(\+\w+)?(?![\d.])", "VERSION", message)
        message = "\n".join(line.rstrip() for line in message.splitlines()).strip("\n")
        name = f"{request.node.name} {next(count)}"
        if request.config.getoption("--write-wording"):
            texts[name] = message + "\n"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f"\n=== {name}\n{text}" for name, text in texts.items()), encoding="utf-8")
        assert message == texts[name].rstrip("\n")

    return compare


@pytest.fixture
def write_rows(tmp_path):
    """Write rows as a .jsonl file and return its path."""

    def write(rows, name="train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def make_config(tiny_llama, tmp_path):
    """A small run over a data file, with overrides such as `{"train.steps": 4}`."""

    def make(data, overrides=None, model=tiny_llama):
        settings = {
            "model.name": model, "adapter.rank": 2, "adapter.alpha": 4, "adapter.dropout": 0,
            "adapter.targets": "all-linear", "data.train": data, "data.eval": 0, "data.max_length": 64,
            "train.steps": 4, "train.documents_per_step": 4, "train.learning_rate": 1e-2,
            "run.dir": tmp_path / "run", "run.seed": 1,
        } | (overrides or {})  # fmt: skip
        lines = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]
        return parse_config("model: {}", overrides=lines)

    return make


@pytest.fixture
def qa_rows():
    """Sixteen short chats of different lengths."""
    return [{"prompt": f"{i} plus {i}?", "completion": f"{2 * i}{'!' * (i % 5)}"} for i in range(16)]


@pytest.fixture(scope="session")
def python():
    """Run the interpreter in a clean process; text in, text out."""

    def run(*args, env=None, cwd=None, **options) -> subprocess.CompletedProcess:
        environment = os.environ | (env or {})
        command = [sys.executable, *map(str, args)]
        options = {"capture_output": True, "timeout": PATIENCE_S} | options
        return subprocess.run(command, env=environment, cwd=cwd, text=True, encoding="utf-8", check=False, **options)

    return run


@pytest.fixture(scope="session")
def from_a_server():
    """Start Python files in processes that are forked from one that has imported what takes long, such as torch."""
    context = multiprocessing.get_context("forkserver")
    engine, command = ("dualtune_torch.engine", "dualtune_torch.backend"), ("dualtune.show.run", "dualtune.cli.train")
    context.set_forkserver_preload([*engine, *command])

    def start(file: Path, task: dict) -> multiprocessing.Process:
        process = context.Process(target=runpy.run_path, args=(str(file), {"TASK": json.dumps(task)}, "__main__"))
        process.start()
        return process

    return start


@pytest.fixture(scope="session")
def start_forked(from_a_server):
    """Start a Python file, "-m" and a module, or "dualtune", as `python …` would, in a tenth of the time.

    Not where it matters what is imported, when or in which surroundings, or how the interpreter ends.
    """

    def start(program, *args, out: Path, err: Path, env=None, cwd=None, stdin=os.devnull) -> multiprocessing.Process:
        task = {
            "program": str(program), "arguments": [str(word) for word in args], "cwd": str(cwd or Path.cwd()),
            "env": os.environ | (env or {}), "stdin": str(stdin), "stdout": str(out), "stderr": str(err),
        }  # fmt: skip
        return from_a_server(ROOT / "tests" / "forked.py", task)

    return start


@pytest.fixture(scope="session")
def forked(start_forked, tmp_path_factory):
    """`start_forked`, and wait for the end."""

    def run(program, *args, **options) -> subprocess.CompletedProcess:
        streams = [tmp_path_factory.mktemp("forked") / name for name in ("out", "err")]
        process = start_forked(program, *args, out=streams[0], err=streams[1], **options)
        process.join(PATIENCE_S)
        process.kill()
        process.join()
        texts = (path.read_text(encoding="utf-8") for path in streams)
        return subprocess.CompletedProcess([program, *args], process.exitcode, *texts)

    return run


@pytest.fixture(scope="session")
def render_apart(python):
    """Render chat templates in one process with little address space: the outcome and the processor time of each."""
    code = """if True:
        import json, resource, sys, time
        from dualtune.data.chat import sandbox
        from dualtune.data.chat.template import ChatTemplate
        sandbox.CPU_S = 0.25  # instead of a second: there are many
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
        for line in sys.stdin:
            name, source = json.loads(line)
            started = time.thread_time()
            try:
                text = ChatTemplate(source, {}).render([{"role": "user", "content": "Hi"}])
                outcome = f"rendered {len(text)} characters"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"[:200]
            print(json.dumps([name, outcome, time.thread_time() - started]), flush=True)
    """

    def render(templates: dict[str, str], *, address_space: int) -> dict[str, tuple[str, float]]:
        lines = "".join(json.dumps(template) + "\n" for template in templates.items())
        done = python("-c", code, address_space, input=lines, timeout=1800)
        assert done.returncode == 0, done.stderr
        return {name: (outcome, took_s) for name, outcome, took_s in map(json.loads, done.stdout.splitlines())}

    return render


@pytest.fixture
def unscanned():
    """Hide what other tests have left from `gc.get_objects`."""
    hide_from_the_collector()


@pytest.fixture
def dualtune_main(capsys, monkeypatch):
    """The command line inside this process: fast, and an exception that it does not expect fails the test."""

    def run(*args) -> subprocess.CompletedProcess:
        from dualtune.cli.main import main

        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["dualtune", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(args, caught.value.code, out, err)

    return run
