"""`dualtune chat`: what a user types, and what the model has to compute for it."""

import contextlib
import fcntl
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import termios
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.cli import chat as module
from dualtune.cli.chat import side_by_side
from dualtune.data.chat.template import named_template
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.beside import BesideAdapter
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run
from dualtune.train.generation.inference import load_model, stream_text
from dualtune.train.generation.sampling import Sampling
from dualtune.use import chat as chat_module
from dualtune.use.chat import Chat, common_spec, load_adapter_set

NUMPY = ("--platform", "numpy")
SHAPES = {"self_attn.q_proj": (32, 32), "mlp.down_proj": (32, 64)}  # out, in
SPECS = {  # ranks, scales and modules that differ
    "one": AdapterSpec(2, 3.0, 0.0, ("self_attn.q_proj",)),
    "two": AdapterSpec(4, 20.0, 0.0, ("self_attn.q_proj", "mlp.down_proj")),
}


def write_random(path, spec, shapes, seed=0):
    """An adapter that changes much."""
    rng = np.random.default_rng(seed)
    start = init_adapter(shapes, spec.rank, seed, method=spec.method, weight=lambda module: np.eye(*shapes[module]))
    tensors = {
        name: value if "lora_A" in name else rng.normal(0, 0.3, value.shape).astype(np.float32)
        for name, value in start.items()
    }
    write_adapter(path, Adapter(replace(spec, targets=(*shapes,)), tensors))
    return path


def test_a_pulled_run_chats_with_the_base_that_its_adapter_names(
    make_config, write_rows, qa_rows, open_backend, dualtune_main, tmp_path, monkeypatch, wording
):
    run(make_config(write_rows(qa_rows), {"train.steps": 1}), open_backend("torch"))
    assert dualtune_main("push", tmp_path / "share", tmp_path / "run").returncode == 0
    monkeypatch.chdir(tmp_path)
    pulled = dualtune_main("pull", tmp_path / "share", "pulled")
    assert pulled.stdout.splitlines()[-1] == f"chat        dualtune chat {tmp_path / 'pulled'}"
    shutil.copytree(make_config(write_rows(qa_rows)).model.name, tmp_path / "llama")  # a path is cut to its last part

    def chat(directory):
        monkeypatch.setattr("sys.stdin", io.StringIO("1 plus 1?\n"))
        return dualtune_main("chat", directory, "--platform", "cpu", "--max-tokens", "2")

    for directory in ("pulled", "pulled/adapter", tmp_path / "run"):
        done = chat(directory)
        assert done.returncode == 0, done.stderr
        wording(done.stderr)
    shutil.rmtree(tmp_path / "pulled/adapter")
    assert chat("pulled").returncode != 0


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Adapters of `tiny_llama`."""
    found = {}
    for name, spec in SPECS.items():
        shapes = {f"model.layers.{i}.{module}": SHAPES[module] for i in range(2) for module in spec.targets}
        found[name] = write_random(tmp_path_factory.mktemp("adapters") / name, spec, shapes, seed=len(found))
    return found


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_each_adapter_of_a_set_is_the_function_that_it_is_alone(open_backend, tiny_llama, directories, backend):
    backend, batch = open_backend(backend), random_batch([7, 5], vocab=262)
    found = load_adapter_set(backend, str(tiny_llama), directories, dtype="float32")
    assert found.names == ("base", "one", "two")
    alone = {
        name: load_model(backend, str(tiny_llama), directories.get(name), dtype="float32").engine.logprobs(batch)
        for name in found.names
    }
    assert abs(alone["one"] - alone["base"]).max() > 0.1 < abs(alone["one"] - alone["two"]).max()
    for name in ("two", "base", "one", "base"):
        found.use(name)
        np.testing.assert_allclose(found.engine.logprobs(batch), alone[name], atol=1e-5)
    with pytest.raises(ConfigError, match="got 'three', allowed: base, one, two"):
        found.use("three")


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_set_has_what_each_adapter_trains_beside_its_layers(open_backend, tiny_llama, directories, tmp_path, backend):
    backend, batch, found = open_backend(backend), random_batch([7, 5], vocab=262), {"one": directories["one"]}
    batch.tokens_BT[:, 2] = 7
    for name, beside in (("rows", BesideAdapter(rows=(7, 90))), ("norm", BesideAdapter(modules=("model.norm",)))):
        spec = replace(SPECS["one"], targets=("q_proj",), beside=beside)
        engine = backend.load(LoadRequest(tiny_llama, "float32", "none", "pretrained", spec, OptimizerSpec(), seed=0))
        engine.load_adapter_state({key: x + np.float32(0.1) for key, x in engine.adapter_state().items()})
        found[name] = tmp_path / name
        write_adapter(found[name], Adapter(replace(spec, beside=beside), engine.adapter_state()))
    models = load_adapter_set(backend, str(tiny_llama), found, dtype="float32")
    for name in ("rows", "base", "norm", "one"):
        alone = load_model(backend, str(tiny_llama), found.get(name), dtype="float32").engine.logprobs(batch)
        models.use(name)
        np.testing.assert_allclose(models.engine.logprobs(batch), alone, atol=1e-5)
    adapter = read_adapter(found["rows"])
    other = replace(adapter, spec=replace(adapter.spec, beside=BesideAdapter(rows=(7, 91))))
    with pytest.raises(ConfigError, match="trained rows of different tokens"):
        common_spec([adapter, other])


def test_a_set_of_dora_leaves_what_one_does_not_adapt_as_it_is(open_backend, tiny_llama, directories, tmp_path):
    """Magnitudes of zero would silence the layer. Adapters of LoRA and DoRA do not share an engine."""
    backend, batch, found = open_backend("torch"), random_batch([7, 5], vocab=262), {}
    for name, spec in SPECS.items():
        shapes = {f"model.layers.{i}.{module}": SHAPES[module] for i in range(2) for module in spec.targets}
        found[name] = write_random(tmp_path / name, replace(spec, method="dora"), shapes, seed=len(found))
    models = load_adapter_set(backend, str(tiny_llama), found, dtype="float32")
    for name in ("one", "two", "base"):
        alone = load_model(backend, str(tiny_llama), found.get(name), dtype="float32").engine.logprobs(batch)
        models.use(name)
        np.testing.assert_allclose(models.engine.logprobs(batch), alone, atol=1e-5)
    with pytest.raises(ConfigError, match="got adapters of dora and lora"):
        load_adapter_set(backend, str(tiny_llama), {"a": found["one"], "b": directories["two"]})


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_each_adapter_answers_with_the_template_of_its_own_training(
    open_backend, tiny_llama, tiny_softmax, make_config, write_rows, qa_rows, tmp_path, backend
):
    backend, model = open_backend(backend), str({"torch": tiny_llama, "numpy": tiny_softmax}[backend])
    directories = {}
    for name in ("mistral-small", "chatml", "none"):
        changes = {"data.template": name, "run.dir": tmp_path / name, "adapter.targets": "all-linear"}
        directories[name] = run(make_config(write_rows(qa_rows), changes, model), backend).adapter_dir
    found = load_adapter_set(backend, model, directories)

    def answer(name, directory, **options):
        loaded = load_model(backend, model, directory, **options)
        return "".join(stream_text(loaded, loaded.tokenizer.encode_prompt("1 plus 1?"), Sampling(6)))

    chat = Chat(found, "base", Sampling(max_tokens=6))
    for name in ("mistral-small", "base", "chatml"):  # the base: its own, which is ChatML
        chat.switch(name)
        chat.reset()
        expected = answer(name, directories.get(name))
        assert "".join(chat.ask("1 plus 1?")) == expected
        other = "chatml" if name == "mistral-small" else "mistral-small"
        assert expected != answer(name, directories.get(name), template=other)
    with pytest.raises(ConfigError, match="the adapter 'none' has no chat template"):
        chat.switch("none")
    assert chat.name == "chatml"


def test_a_base_without_a_template_has_that_of_the_first_adapter_and_one_that_is_given_holds_for_all(
    open_backend, tiny_softmax, make_config, write_rows, qa_rows, tmp_path
):
    backend, model = open_backend("numpy"), tmp_path / "model"
    shutil.copytree(tiny_softmax, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    changes = {"data.template": "phi-3", "run.dir": tmp_path / "run"}
    directories = {"a": run(make_config(write_rows(qa_rows), changes, model), backend).adapter_dir}
    found = load_adapter_set(backend, str(model), directories)
    sources = {name: loaded.tokenizer.template.source for name, loaded in found.models.items()}
    assert sources["base"] == sources["a"] == named_template("phi-3") and not found.models["a"].note
    found = load_adapter_set(backend, str(model), directories, template="gemma-2")
    sources = {name: loaded.tokenizer.template.source for name, loaded in found.models.items()}
    assert sources["base"] == sources["a"] == named_template("gemma-2")
    assert "was trained with the chat template" in found.models["a"].note and not found.models["base"].note


def test_an_adapter_of_another_model_is_refused(open_backend, tiny_llama, tmp_path):
    wide = write_random(tmp_path / "wide", SPECS["one"], {"model.layers.0.self_attn.q_proj": (48, 48)})
    with pytest.raises(ConfigError, match="the adapter does not fit the model"):
        load_adapter_set(open_backend("torch"), str(tiny_llama), {"wide": wide})


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_turn_computes_only_what_is_new_and_answers_as_without_a_cache(
    open_backend, tiny_llama, directories, backend
):
    found = load_adapter_set(open_backend(backend), str(tiny_llama), directories, dtype="float32")
    sampling, engine, question = (
        Sampling(max_tokens=6),
        found.engine,
        "Hello, this is a long question, is it not?",
    )
    chat, computed = Chat(found, "one", sampling, "Be brief."), []
    owner, name = (engine._continuation, "next_logits") if backend == "torch" else (engine, "_next_logits")
    forward = getattr(owner, name)
    setattr(owner, name, lambda tokens, held: computed.append(len(tokens)) or forward(tokens, held))
    first, start = "".join(chat.ask(question)), computed[0]
    computed.clear()
    second = "".join(chat.ask("Hi"))
    assert computed[0] < start, "the first turn was computed again"
    fresh = Chat(found, "one", sampling, "Be brief.")
    for text, answer in ((question, first), ("Hi", second)):
        found.caches.forget("one")
        assert "".join(fresh.ask(text)) == answer
    assert [message.content for message in fresh.messages] == ["Be brief.", question, first, "Hi", second]
    fresh.reset()
    assert [message.role for message in fresh.messages] == ["system"]


def test_an_answer_that_is_stopped_is_remembered_as_far_as_it_was_read(open_backend, tiny_llama):
    chat = Chat(load_adapter_set(open_backend("torch"), str(tiny_llama), {}), "base", Sampling(max_tokens=20))
    pieces = chat.ask("Hi")
    said = next(piece for piece in pieces if piece)
    pieces.close()
    assert [message.content for message in chat.messages] == ["Hi", said]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(dualtune_main, config_file, tmp_path):
    assert dualtune_main("train", config_file(), *NUMPY).returncode == 0
    return tmp_path / "runs" / "a" / "adapter"


@pytest.fixture
def talk(dualtune_main, monkeypatch, tiny_softmax):
    def run(lines, *options):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return dualtune_main("chat", tiny_softmax, "--max-tokens", 5, *options, *NUMPY)

    return run


def test_a_conversation_by_pipe(talk, adapter, tmp_path, wording):
    saved = tmp_path / "talk.jsonl"
    lines = [
        "half \udcff of a pair",
        "1 plus 1?",
        "",
        "/base",
        "1 plus 1?",
        f"/save {saved}",
        "/nothing",
        "/adapter no",
        "/exit",
        "more",
    ]
    result = talk(lines, "--adapter", adapter)
    assert result.returncode == 0, result.stderr
    wording(result.stderr)
    (row,) = map(json.loads, saved.read_text().splitlines())
    assert [each["role"] for each in row["messages"]] == ["user", "assistant"] * 2
    assert "".join(each["content"] + "\n" for each in row["messages"][1::2]) == result.stdout


def test_base_and_adapter_answer_each_with_its_own_history(talk, adapter, tmp_path):
    saved = tmp_path / "talk.jsonl"
    lines = [f"/save {saved}", "1 plus 1?", f"/save {saved}", "/reset", f"/save {saved}"]
    result = talk(lines, "--adapter", f"tuned={adapter}", "--compare", "--system", "S")
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if line.startswith("[")] == ["[base]", "[tuned]"]
    rows = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [row["adapter"] for row in rows] == ["base", "tuned"]
    assert all([each["role"] for each in row["messages"]] == ["system", "user", "assistant"] for row in rows)
    assert result.stderr.count("/save: there is no answer yet") == 2


def test_what_is_saved_of_a_comparison_can_be_trained_on(talk, adapter, tmp_path, make_config, open_backend):
    saved = tmp_path / "talk.jsonl"
    assert talk(["1 plus 1?", f"/save {saved}"], "--adapter", adapter, "--compare").returncode == 0
    assert run(make_config(saved, {"train.steps": 1}), open_backend("torch")).adapter_dir.is_dir()


def test_compared_answers_come_piece_by_piece(talk, adapter, monkeypatch):
    passed = []
    monkeypatch.setattr(module, "pass_on", passed.append)
    talk(["1 plus 1?"], "--adapter", f"tuned={adapter}", "--compare")
    second = passed.index("\n[tuned]\n")
    assert passed[0] == "[base]\n" and passed[-1] == "\n"
    assert len(list(filter(None, passed[1:second]))) > 2 < len(list(filter(None, passed[second + 1 : -1])))


def test_ctrl_c_drops_a_compared_turn_for_all(talk, adapter, monkeypatch, tmp_path, wording):
    saved, asked, stream = tmp_path / "talk.jsonl", [], chat_module.stream_text

    def interrupted(*args, **options):
        asked.append(args)
        yield "some"
        if len(asked) == 2:  # the second of both, in the first turn
            raise KeyboardInterrupt
        yield from stream(*args, **options)

    monkeypatch.setattr(chat_module, "stream_text", interrupted)
    lines = ["1 plus 1?", f"/save {saved}", "2 plus 2?", f"/save {saved}"]
    result = talk(lines, "--adapter", adapter, "--compare")
    wording(result.stderr)
    rows = [json.loads(line)["messages"] for line in saved.read_text().splitlines()]
    assert [row[0]["content"] for row in rows] == ["2 plus 2?"] * 2 and [len(row) for row in rows] == [2, 2]


def test_on_a_wide_terminal_the_answers_stand_side_by_side_while_they_come(adapter, tiny_softmax):
    leader, follower = os.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    command = [sys.executable, "-m", "dualtune", "chat", tiny_softmax, "--adapter", f"tuned={adapter}", "--compare"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment["TERM"] = "xterm"
    with subprocess.Popen(
        [*map(str, command), "--max-tokens", "5", *NUMPY], stdin=subprocess.PIPE, stdout=follower,
        stderr=subprocess.DEVNULL, env=environment,
    ) as process:  # fmt: skip
        os.close(follower)
        process.stdin.write(b"1 plus 1?\n")
        process.stdin.close()
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(leader, 4096):
                shown += piece
    os.close(leader)
    assert process.returncode == 0
    assert shown.count(b"[base]".ljust(48) + b" | [tuned]") >= 2  # live, and whole at the end


def test_ctrl_c_on_a_line_that_is_not_finished_ends_it(monkeypatch, capsys):
    def half_typed(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", half_typed)
    assert module._next_line(True) == "\n"
    assert capsys.readouterr().err == "\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare"], "--compare needs an --adapter"),
        (["--adapter", "x/one", "--adapter", "y/one"], "the name 'one' is taken. Give another one: NAME=y/one"),
        (["--adapter", "base=x"], "the name 'base' is taken"),
        (["--template", "none"], "the model has no chat template"),
    ],
)
def test_what_cannot_be_done_is_said(talk, options, message):
    result = talk(["Hi"], *options)
    assert result.returncode == 2 and message in result.stderr


def test_columns_share_the_width():
    answers = [("base", "one two three " * 6), ("tuned", "four\n\nfive")]
    lines = side_by_side(answers, 79)
    assert max(map(len, lines)) <= 79 and lines[0] == "[base]".ljust(38) + " | [tuned]"
    assert " ".join(line.split("|")[0].strip() for line in lines[1:]) == answers[0][1].strip()


def test_adapters_of_different_bases_need_a_model(dualtune_main, directories, tmp_path, wording):
    spec = SPECS["one"]
    for name in ("a", "b"):
        shapes = {"model.layers.0.self_attn.q_proj": (32, 32)}
        write_adapter(
            tmp_path / name, Adapter(replace(spec, targets=(*shapes,)), init_adapter(shapes, 2, 0), f"org/{name}")
        )
    result = dualtune_main("chat", "--adapter", tmp_path / "a", "--adapter", tmp_path / "b", *NUMPY)
    assert result.returncode == 2 and "org/a" in result.stderr and "org/b" in result.stderr
    unnamed = dualtune_main("chat", "--adapter", directories["one"], *NUMPY)
    assert unnamed.returncode == 2
    wording(unnamed.stderr)
