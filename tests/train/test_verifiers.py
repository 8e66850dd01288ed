"""Environments of the package `verifiers`: what is drawn and learned of them, and what they can do to a run.

Each test runs with a stand-in of the package, and in `make test-verifiers` with the package itself, whose processes are
forked from one that has imported it: it takes as long to import as all tests together.
"""

import json
import multiprocessing
import os
import signal
import subprocess
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, Paused
from dualtune.data.chat.conversations import Message
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.train.generation.batched import Completion
from dualtune.train.generation.sampling import Sampling
from dualtune.train.prepare import prepare
from dualtune.train.rl import isolated, package_environments
from dualtune.train.rl.drawing import Drawing
from dualtune.train.rl.environments import StepPrompt
from dualtune.train.rl.package_environments import PackageEpisodes, environment_rows
from dualtune.train.run import load_engine, run
from dualtune.train.step import TrainingStep

HERE = Path(__file__).parent
OWN = """
class Game:
    def reset(self, row):
        self.seen = 0
        return row["question"]

    def step(self, text):
        self.seen += 1
        return f"<{len(text)}>", len(text) / 10, self.seen == 3
"""
RL = {"train__objective": "grpo", "train__steps": 3, "train__documents_per_step": 3, "adapter__dropout": 0.0,
      "data__format": "prompt", "data__max_length": 200, "rollouts__samples": 3, "rollouts__max_tokens": 5,
      "data__eval": 0.2, "run__save_every": 1, "train__learning_rate": 1e-2, "run__report": False}  # fmt: skip


def installed() -> str:
    """The version of the package, "" if it is not installed."""
    try:
        return version("verifiers")
    except PackageNotFoundError:
        return ""


TASK_SETS = installed().startswith("0.4")
package = pytest.mark.verifiers, pytest.mark.skipif(TASK_SETS, reason="verifiers 0.4 has task sets alone")
task_sets = pytest.mark.verifiers, pytest.mark.skipif(not TASK_SETS, reason="verifiers before 0.4 has other task sets")


@pytest.fixture(params=["stand_in", pytest.param("package", marks=package), pytest.param("task_sets", marks=task_sets)])
def games(request, monkeypatch, start_forked, tmp_path_factory):
    """The path of our environments, and of the stand-in, in the processes that are started.

    Those of the package are forked where the run is in this process, and started where it has one of its own.
    """
    folders = [HERE / "verifiers_environments", *([HERE / "verifiers_stand_in"] * (request.param == "stand_in"))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if request.param != "stand_in":

        def popen(command, **_):
            return Forked(start_forked, tmp_path_factory.mktemp("game"), command)

        monkeypatch.setattr(isolated, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))
    return request.param


PRELOADED = (  # of those that a version has not, nothing is said
    "datasets", "openai", "verifiers.envs.environment", "verifiers.legacy.envs.environment",
    "verifiers.legacy.envs.tool_env", "verifiers.v1.utils.loaders", "verifiers.v1.clients",
    "dualtune.train.rl.package_environments",
)  # fmt: skip


@pytest.fixture(scope="session")
def from_a_server(from_a_server):
    """With what an environment of the package imports, which takes ten times as long as a test."""
    if installed():
        preload = multiprocessing.get_context("forkserver").set_forkserver_preload
        preload([*PRELOADED, "dualtune_torch.engine", "dualtune_torch.backend", "dualtune.show.run"])
    return from_a_server


class Forked:
    """The process of an environment, forked: as much of Popen as `Isolated` uses."""

    def __init__(self, start, folder, command):
        into, out = (folder / name for name in ("in", "out"))
        for path in (into, out):
            os.mkfifo(path)
        self._process = start(*command[1:], stdin=into, out=out, err=folder / "err")
        self.pid = self._process.pid
        self.stdin, self.stdout = into.open("w", encoding="utf-8"), out.open(encoding="utf-8")

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired("environment", timeout)


no_task_sets = pytest.mark.parametrize(
    "games", ["stand_in", pytest.param("package", marks=package)], indirect=True
)  # what only the classes of 0.1 to 0.3 have


@pytest.fixture
def game_lab(games, lab, write_rows):
    rows = [{"prompt": f"{n} + {n} =", "question": f"{n} + {n} =", "answer": str(2 * n)} for n in range(9)]
    return replace(lab, data=write_rows(rows, "asked.jsonl"))


def settings(games, kind="game", **changes):
    name, arguments = "verifiers:tiny-games", {"kind": kind}
    if games == "task_sets":
        name, arguments = "verifiers:tiny-tasks", {"agent": {"runtime": {"type": "subprocess"}}}
    return {**RL, "rollouts__environment": name, "rollouts__environment_args": arguments,
            "rollouts__reward_timeout_s": 60, **changes}  # fmt: skip


def rows_kept(run_dir):
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_it_draws_what_our_own_environment_of_the_same_task_draws(games, game_lab, weights_of):
    (game_lab.tmp_path / "games.py").write_text(OWN)
    theirs = game_lab.run("theirs", **settings(games))
    own = settings(games, rollouts__environment=f"{game_lab.tmp_path / 'games.py'}:Game", rollouts__environment_args={})
    ours = game_lab.run("ours", **own)
    assert rows_kept(theirs.run_dir) == rows_kept(ours.run_dir)
    assert len({row["rewards"]["environment"] for row in rows_kept(theirs.run_dir)}) > 1
    assert weights_of(theirs.run_dir) == weights_of(ours.run_dir)


@pytest.mark.parametrize("lab", ["numpy", pytest.param("torch", marks=pytest.mark.long)], indirect=True)
def test_a_resumed_run_holds_the_same_conversations(games, game_lab, weights_of, rows_of):
    straight = game_lab.run("straight", **settings(games))
    config = game_lab.config("stopped", **settings(games))
    with pytest.raises(Paused):
        run(config, game_lab.backend, pause_after=1)
    resumed = run(config, game_lab.backend)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    assert rows_kept(resumed.run_dir) == rows_kept(straight.run_dir)
    steps, evaluations = rows_of(resumed.run_dir)
    assert all(row["split"] == 0 and row["logprob_gap"] < 1e-4 for row in steps) and "eval_reward" in evaluations[-1]


@pytest.mark.parametrize("games", [
    pytest.param("stand_in", marks=pytest.mark.long), pytest.param("package", marks=package),
    pytest.param("task_sets", marks=task_sets),
], indirect=True)  # fmt: skip
@pytest.mark.parametrize("platform", ["cpu", "mlx"])
def test_a_run_that_was_killed_holds_the_same_conversations(games, platform, make_config, write_rows, forked, tmp_path):
    data = write_rows([{"prompt": f"{n} + {n} =", "question": "", "answer": str(2 * n)} for n in range(9)])

    def train(name, **variables):
        changes = {key.replace("__", "."): value for key, value in settings(games).items()}
        config = make_config(data, {"run.dir": tmp_path / name, **changes})
        (tmp_path / f"{name}.yaml").write_text(config.model_dump_json())
        return forked("dualtune", "train", tmp_path / f"{name}.yaml", "--platform", platform, env=variables)

    straight, killed = train("straight"), train("killed", DUALTUNE_FAULT="step:2")
    assert straight.returncode == 0, straight.stderr
    assert killed.returncode == -signal.SIGKILL
    again = train("killed")
    assert again.returncode == 0, again.stderr
    assert rows_kept(tmp_path / "killed") == rows_kept(tmp_path / "straight")
    files = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("killed", "straight")]
    assert files[0].read_bytes() == files[1].read_bytes()


@no_task_sets
@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_what_fails_or_hangs_costs_its_conversation(games, game_lab, monkeypatch, assert_some_are_lost):
    """One that raises, ends its process, or sleeps alone or with all others; these go on as if nothing had happened."""
    monkeypatch.setattr(package_environments, "HANGS_S", 1.0)
    options = {"train__steps": 1, "data__eval": 0, "rollouts__reward_timeout_s": 2}
    good, bad = (rows_kept(game_lab.run(kind, **settings(games, kind, **options)).run_dir) for kind in ("game", "bad"))
    assert_some_are_lost(good, bad)


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
@no_task_sets
def test_a_question_that_continues_nothing_is_a_document_of_its_own(games, game_lab):
    prepared = prepare(game_lab.config(**settings(games, "forgetful", data__eval=0)), game_lab.backend)
    engine = load_engine(prepared)
    step = TrainingStep(prepared, engine, 0, prepared.batches)
    try:
        step.add_gradients()
    finally:
        prepared.rollouts.close()
    samples = step.samples
    assert len(samples.rows) == 9 and len(samples.documents) == len(samples.old) == 27
    assert samples.metrics["split"] == 1 and step._loss.metrics["logprob_gap"] < 1e-4
    for n, row in enumerate(samples.rows):
        assert (samples.advantages_N[3 * n : 3 * n + 3] == row["advantage"]).all()
        assert row["tokens"] == sum(map(len, samples.old[3 * n : 3 * n + 3]))


# ----------------------------------------------------------------------------------------------------------------------
# Answers that are written here, not drawn.


class Scripted(Drawing):
    """Says what a test wants, in the order of its answers."""

    def samples(self, engine, prompts, numbers, caches=None):
        texts = [engine[number[-1]](*number) for number in numbers]
        end = [self.tokenizer.end_id]
        ids = [np.array([*self.tokenizer.encode_batch([text], special=False)[0][0], *end], np.int32) for text in texts]
        return [
            Completion(n, 0, tokens, np.zeros(len(tokens), np.float32), text, True)
            for n, (tokens, text) in enumerate(zip(ids, texts, strict=True))
        ]


@pytest.fixture
def scripted(tiny_chatml):
    """Return what leads conversations with an environment of a kind, whose answers are written by functions."""
    opened = []

    def lead(kind, answers, *, turns=8, max_length=400, samples=2):
        sampling = Sampling(max_tokens=50, temperature=1.0, top_p=1.0, seed=0)
        drawing = Scripted(None, tiny_chatml, None, sampling, samples, ())
        options = {"turns": turns, "max_length": max_length, "timeout_s": 20.0}
        opened.append(PackageEpisodes("verifiers:tiny_games", {"kind": kind}, drawing, **options))
        row = {"prompt": "1 + 1 =", "answer": "2"}
        return opened[-1].draw(answers, [StepPrompt(tiny_chatml.encode_text("x"), row, (0,))])

    yield lead
    for each in opened:
        each.close()


@pytest.fixture
def tiny_chatml(tiny_llama):
    return Tokenizer(tiny_llama, template="chatml")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'


@no_task_sets
def test_a_tool_is_called_and_its_result_continues_the_conversation(games, scripted, tiny_chatml):
    episodes = scripted(
        "tool",
        [lambda _, sample, turn: f"let me see\n{CALL}" if sample else "42", lambda *_: "It is 42"],
        max_length=4000,
    )
    plain, calling = episodes
    assert [each.texts for each in episodes] == [["42"], [f"let me see\n{CALL}", "It is 42"]]
    assert (plain.reward, calling.reward) == (pytest.approx(0.2), pytest.approx(1.8))
    (dialogue,) = calling.dialogues
    tokens, is_own = dialogue.document
    said = tiny_chatml.decode_all(tokens[~is_own].tolist())
    assert '"name": "add"' in said.partition("1 + 1 =")[0]  # the tools, as the template writes them
    assert "<tool_response>\n42\n</tool_response>" in said
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 2, "b": 40}}}
    whole = [
        Message("user", "1 + 1 ="), Message("assistant", "let me see", extra={"tool_calls": [call]}),
        Message("tool", "42", extra={"tool_call_id": "call00000"}),
    ]  # fmt: skip
    rendered = tiny_chatml.decode_all(tiny_chatml.encode_chat(whole).tolist())
    behind = (text.partition("1 + 1 =")[2] for text in (tiny_chatml.decode_all(tokens.tolist()), rendered))
    assert next(behind) == f"{next(behind)}It is 42<|im_end|>"


@no_task_sets
def test_a_reward_that_compares_sees_all_conversations_of_a_prompt(games, scripted):
    episodes = scripted("ranked", [lambda _, sample, turn: "x" * (3 - sample)] * 3, samples=3)
    assert [each.reward for each in episodes] == [2.0, 1.0, 0.0]


@no_task_sets
def test_a_conversation_without_an_answer_has_no_reward(games, scripted):
    episodes = scripted("game", [lambda *_: "x"], max_length=10)
    for each in episodes:
        assert "data.max_length: 10" in each.problem and each.texts == ["x"] and len(each.dialogues) == 1


@no_task_sets
@pytest.mark.parametrize(("limit", "answers"), [({"turns": 2}, 2), ({"max_length": 60}, 1)])
def test_a_limit_of_the_config_ends_a_conversation_that_is_rewarded(games, scripted, limit, answers):
    episodes = scripted("game", [lambda *_: "x" * 20] * 3, **limit)
    for each in episodes:
        assert (len(each.drawn), each.is_whole, each.problem) == (answers, False, "")
        assert each.reward == pytest.approx(2.0 * answers)


@no_task_sets
def test_the_rows_of_an_environment_are_data(games, dualtune_main, tmp_path):
    rollouts = {"environment": "verifiers:tiny-games", "environment_args": {"kind": "single"}}
    settings = {"adapter": {"dropout": 0}, "train": {"objective": "grpo"}, "model": {"name": "m"}}
    data = {"train": str(tmp_path / "new" / "rows.jsonl"), "eval": 0, "format": "prompt"}
    (tmp_path / "c.yaml").write_text(json.dumps({**settings, "data": data, "rollouts": rollouts}))
    written = dualtune_main("data", "environment", tmp_path / "c.yaml", "--json")
    assert json.loads(written.stdout) == {"rows": {data["train"]: 9}}
    rows = [json.loads(line) for line in Path(data["train"]).read_text().splitlines()]
    assert [row["answer"] for row in rows] == [str(2 * n) for n in range(9)]
    assert rows[4]["prompt"] == [{"role": "user", "content": "4 + 4 ="}]
    again = dualtune_main("data", "environment", tmp_path / "c.yaml")
    assert again.returncode == 2 and "data.train" in again.stderr


def test_arguments_without_an_environment_are_refused(make_config, wording):
    with pytest.raises(ConfigError) as error:
        make_config(
            "t", {"train.objective": "grpo", "rollouts.rewards": ["exact"], "rollouts.environment_args": {"a": 1}}
        )
    wording(str(error.value))


@pytest.mark.parametrize("name", ["verifiers:none", "verifiers:tiny_games"])
@no_task_sets
def test_an_environment_that_is_not_there_is_refused(games, name):
    with pytest.raises(ConfigError, match=r"rollouts\.environment: verifiers .* does not load"):
        environment_rows(name, {"unknown": 1}, held_out=False)
