"""Episodes with an environment of the user: what is learned of them, and what an environment can do to a run."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, NonFiniteError, Paused
from dualtune.data.chat.conversations import Message
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.decoding import copied_tokens
from dualtune.engine.testing.tolerances import RESUMED_LOSS
from dualtune.train.generation.batched import check_decoding
from dualtune.train.prepare import prepare
from dualtune.train.rl import environments
from dualtune.train.rl.environments import Episodes, Objects, environment_of, turns_of
from dualtune.train.run import load_engine, run
from dualtune.train.step import TrainingStep

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = '''
import os, time

class Game:
    """Says how long an answer was, and ends after as many as the row says."""
    def reset(self, row, seed):
        self.row, self.seen, self.seed = row, 0, seed
        return row.get("asked")

    def step(self, text):
        self.seen += 1
        return f"<{len(text)}>", len(text) / 10 + self.seed % 7, self.seen == self.row["turns"]

class Bad(Game):
    def step(self, text):
        if len(text) % 5 == 0:
            raise ValueError("no")
        if len(text) % 5 == 1:
            os._exit(3)
        if len(text) % 5 == 2:
            return [{"role": "user"}], 0.0, False
        return super().step(text)

class Slow(Game):
    def step(self, text):
        time.sleep(60)

class Half:
    def reset(self, row):
        return None
'''
ROWS = [{"prompt": f"{n} + {n} =", "turns": 1 + n // 3} for n in range(9)]
RL = {"train__objective": "grpo", "train__steps": 3, "train__documents_per_step": 3, "adapter__dropout": 0.0,
      "data__format": "prompt", "data__max_length": 200, "rollouts__samples": 3, "rollouts__max_tokens": 5,
      "data__eval": 0.2, "run__save_every": 1, "train__learning_rate": 1e-2, "run__report": False}  # fmt: skip


@pytest.fixture
def game_lab(lab, write_rows, tmp_path):
    (tmp_path / "games.py").write_text(SOURCE)
    return replace(lab, data=write_rows(ROWS, "asked.jsonl"))


def settings(lab, name="Game", **changes):
    return {**RL, "rollouts__environment": f"{lab.tmp_path / 'games.py'}:{name}", **changes}


def rows_kept(run_dir):
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


def test_a_conversation_is_one_document_in_which_the_models_tokens_are_targets(game_lab):
    prepared = prepare(game_lab.config(**settings(game_lab)), game_lab.backend)
    engine = load_engine(prepared)
    step = TrainingStep(prepared, engine, 0, prepared.batches)
    try:
        step.add_gradients()
    finally:
        prepared.rollouts.close()
    samples, tokenizer = step.samples, prepared.model.tokenizer
    seen = set()
    for n, row in enumerate(samples.rows):
        document = samples.documents[n]
        turns = ROWS[int(row["row"].rpartition(":")[2]) - 1]["turns"]
        own = np.diff(np.flatnonzero(np.diff(document.loss_mask, prepend=False, append=False)))[::2]
        assert len(own) == turns
        assert own.sum() == len(samples.old[n]) == row["tokens"]
        said = tokenizer.decode_all(document.tokens[~document.loss_mask].tolist())
        assert said.count("<|im_start|>user") == len(own)
        assert row["completion"].endswith(tokenizer.decode_all(document.tokens[document.loss_mask].tolist())[-1:])
        seen.add(len(own))
    assert len(seen) > 1 and step._loss.metrics["logprob_gap"] < 1e-4


@pytest.mark.parametrize("lab", ["torch", "mlx"], indirect=True)
def test_an_answer_computes_of_its_conversation_what_is_new(game_lab, monkeypatch):
    """The same conversations as if all of each were computed again; beyond the limit some are."""
    config = game_lab.config(**settings(game_lab, data__eval=0))

    def drawn(most_tokens):
        monkeypatch.setattr(environments, "MOST_TOKENS", most_tokens)
        prepared = prepare(config, game_lab.backend)
        engine = load_engine(prepared)
        check_decoding(engine, [np.arange(5, dtype=np.int32)])
        computed, decoding = list[list[int]](), engine.decoding

        def counted():
            made = decoding()
            enter = made.enter

            def entered(texts, *args, caches=None, **options):
                kept = [0 if own is None else own.num_shared(text)
                        for own, text in zip(caches or [None] * len(texts), texts, strict=True)]  # fmt: skip
                _, copied = copied_tokens(texts, kept)
                computed.append([len(text) - own for text, own in zip(texts, copied, strict=True)])
                return enter(texts, *args, caches=caches, **options)

            made.enter = entered
            return made

        monkeypatch.setattr(engine, "decoding", counted)
        step = TrainingStep(prepared, engine, 0, prepared.batches)
        try:
            step.add_gradients()
        finally:
            prepared.rollouts.close()
        return step, [*map(sum, computed)]

    (again, all_again), (step, computed), (_, some) = (drawn(most) for most in (0, 1 << 14, 100))
    assert step.samples.rows == again.samples.rows and step._loss.metrics["logprob_gap"] < 1e-4
    assert len(computed) == len(all_again) > 2 and computed[0] == all_again[0]
    assert sum(computed) < sum(some) < sum(all_again)
    assert sum(computed[1:]) < sum(all_again[1:]) / 2, (computed, all_again)


def test_a_resumed_run_holds_the_same_conversations(game_lab, weights_of):
    straight = game_lab.run("straight", **settings(game_lab))
    config = game_lab.config("stopped", **settings(game_lab))
    with pytest.raises(Paused):
        run(config, game_lab.backend, pause_after=1)
    resumed = run(config, game_lab.backend)
    assert weights_of(resumed.run_dir) == weights_of(straight.run_dir)
    assert rows_kept(resumed.run_dir) == rows_kept(straight.run_dir)
    rewards = [row["reward"] for row in rows_kept(resumed.run_dir)]
    assert len({*rewards}) > 5 and all(
        row["rewards"] == {"environment": row["reward"]} for row in rows_kept(resumed.run_dir)
    )


def test_a_run_that_dies_between_two_answers_on_mlx_goes_on_on_torch(
    open_backend, tiny_llama, make_config, write_rows, tmp_path, rows_of, monkeypatch
):
    """With the conversations, the rewards and the losses of a run on torch alone."""
    (tmp_path / "games.py").write_text(SOURCE)
    data, torch, mlx = write_rows(ROWS, "asked.jsonl"), open_backend("torch"), open_backend("mlx")
    options = {key.replace("__", "."): value for key, value in RL.items()}
    options |= {"rollouts.environment": f"{tmp_path / 'games.py'}:Game", "rollouts.temperature": 0.7}
    options |= {"train.steps": 2, "data.eval": 0, "rollouts.turns": 2}

    def config(name):
        return make_config(data, {**options, "model.dtype": "float32", "run.dir": tmp_path / name}, tiny_llama)

    straight, answer = run(config("straight"), torch), Episodes._answer

    def dying(self, episode, asked, drawn):
        if asked.numbers[0] == 1 and episode.drawn:  # in the second step, before a second answer is judged
            raise KeyboardInterrupt
        return answer(self, episode, asked, drawn)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Episodes, "_answer", dying)
        run(config("moved"), mlx)
    assert {row["step"] for row in rows_kept(tmp_path / "moved")} == {1}
    moved = run(config("moved"), torch)
    ours, theirs = (rows_kept(each.run_dir) for each in (moved, straight))
    told = ("step", "row", "sample", "prompt", "completion", "reward", "tokens")
    assert [[row[key] for key in told] for row in ours] == [[row[key] for key in told] for row in theirs]
    assert max(row["completion"].count("<|im_start|>user") for row in ours) > 0
    losses = ([row["loss"] for row in rows_of(each.run_dir)[0]] for each in (moved, straight))
    assert next(losses) == pytest.approx(next(losses), abs=RESUMED_LOSS)


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_an_environment_that_fails_costs_its_conversation(game_lab, assert_some_are_lost):
    """One that raises, says nonsense or ends its process; the others go on as if nothing had happened."""
    options = {"train__steps": 1, "data__eval": 0, "rollouts__turns": 2}
    good, bad = (
        rows_kept(game_lab.run(name, **settings(game_lab, name, **options)).run_dir) for name in ("Game", "Bad")
    )
    assert_some_are_lost(good, bad)


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_an_environment_that_hangs_does_not_hang_the_run(game_lab):
    options = {"train__steps": 1, "data__eval": 0, "rollouts__samples": 2, "train__documents_per_step": 1}
    with pytest.raises(NonFiniteError, match=r"^the only step of the run had no reward"):
        game_lab.run(**settings(game_lab, "Slow", rollouts__reward_timeout_s=0.1, **options))
    run_dir = game_lab.tmp_path / "run"
    assert [row["reward"] for row in rows_kept(run_dir)] == [None, None]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    events = [row for row in rows if row.get("event") == "reward_failed"]
    assert events and all(row["message"].startswith("environment: took longer than 0.1 s") for row in events)


@pytest.mark.parametrize("lab", ["numpy"], indirect=True)
def test_what_an_environment_asks_replaces_the_prompt_and_lengths_have_limits(game_lab, write_rows):
    rows = [{"prompt": "p", "turns": 9, "asked": "asked " + "long " * (50 * (n % 2))} for n in range(8)]
    lab = replace(game_lab, data=write_rows(rows, "asked.jsonl"))
    result = lab.run(**settings(lab, rollouts__turns=3, data__eval=0))
    for row in rows_kept(result.run_dir):
        is_long = int(row["row"].rpartition(":")[2]) % 2 == 0
        assert ("asked" in row["prompt"]) != is_long and (row["reward"] is None) == is_long
        assert not row["is_whole"] or is_long  # the limit of turns ended it


def test_an_object_that_was_lost_is_made_again_and_led_to_where_it_was():
    class Counting:
        def reset(self, row):
            self.seen = []

        def step(self, text):
            self.seen.append(text)
            return " ".join(self.seen), float(len(self.seen)), False

    def ask(objects, *texts):
        return objects.answer({"id": "0/0", "row": {}, "seed": 1, "texts": texts})

    objects = Objects(Counting)
    assert ask(objects) == {"turns": None}
    said = [ask(objects, "a"), ask(objects, "a", "b")]
    assert [(each["turns"][0]["content"], each["reward"]) for each in said] == [("a", 1.0), ("a b", 2.0)]
    assert ask(Objects(Counting), "a", "b") == said[1]
    assert ask(objects) == {"turns": None} and ask(objects, "c")["reward"] == 1.0  # another conversation of that name
    objects.answer({"forget": True})
    assert ask(objects, "a", "b") == said[1]


@pytest.mark.parametrize("name", ["games.py:None", "games.py:Half", "none.py:Game", "games", "games.py:SOURCE"])
def test_an_environment_that_is_not_there_is_refused(tmp_path, monkeypatch, name, wording):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "games.py").write_text(SOURCE + "\nSOURCE = 1\n")
    with pytest.raises(ConfigError) as error:
        environment_of(name, {})
    wording(str(error.value))


@pytest.mark.parametrize("said", [3, [3], [{"role": "user"}], [{"role": "user", "content": 3}]])
def test_an_environment_says_texts_or_messages(said):
    with pytest.raises((ValueError, TypeError, KeyError)):
        turns_of(said)
    with pytest.raises(ValueError, match=str(environments.MOST_CHARACTERS + 1)):
        turns_of([{"role": "user", "content": each} for each in ("x" * environments.MOST_CHARACTERS, "y")])
    assert (
        turns_of("a") == turns_of([{"role": "user", "content": "a", "name": "x"}]) == [{"role": "user", "content": "a"}]
    )


def test_the_calculator_of_the_examples_calculates():
    calculator = runpy.run_path(str(EXAMPLES / "calculator.py"))["Calculator"]()
    assert calculator.reset({"prompt": "12 * 34?", "answer": 408}).startswith("12 * 34?\n")
    assert calculator.step("let me see <calc>12 * -(30 + 4) / 2</calc>") == ("-204", 0.1, False)
    assert calculator.step("<calc>12 * 34</calc>") == ("408", 0.0, False)
    for wrong in ("<calc>1/0</calc>", "<calc>2 ** 9</calc>", "<calc>(</calc>", "<calc>open('x')</calc>"):
        reply, *rest = calculator.step(wrong)
        assert reply.startswith("error: ") and rest == [0.0, False]
    assert calculator.step("It is 408.") == ("", 1.0, True)
    assert calculator.step("It is 12.")[1:] == (0.0, True) and calculator.step("")[1:] == (0.0, True)


def test_what_follows_an_answer_is_what_training_has_there(tiny_softmax):
    """The tokens drawn one turn after another are those of the whole conversation; content stays content."""
    tokenizer = Tokenizer(tiny_softmax)
    ask, answer = Message("user", "one?"), Message("assistant", "two")
    reply = [Message("user", f"three? {tokenizer.decode_all([tokenizer.end_id])} no end")]
    beginning = tokenizer.encode_chat([ask])
    between = tokenizer.encode_after_answer(reply)
    drawn = tokenizer.encode("two", special=False)
    whole = tokenizer.encode_chat([ask, answer, *reply])
    assert [*beginning, *drawn, *between] == whole.tolist()
    assert tokenizer.encode_continuation([ask, answer, *reply], 1).tolist() == between.tolist()
    assert between[0] == tokenizer.end_id and between.tolist().count(tokenizer.end_id) == 2


def test_what_a_template_writes_anew_continues_nothing(tiny_softmax):
    """Qwen 3 leaves out the thoughts of an answer when another question follows, but not when a tool has answered."""
    tokenizer = Tokenizer(tiny_softmax, template="qwen-3")
    ask, thought = Message("user", "one?"), Message("assistant", "<think>\nhm\n</think>\n\ntwo")
    assert tokenizer.encode_continuation([ask, thought, Message("tool", "2")], 1) is not None
    assert (
        tokenizer.encode_continuation([ask, thought, Message("user", "three?"), thought, Message("user", "?")], 3)
        is None
    )


def test_arguments_make_the_object_of_an_environment(tmp_path, wording):
    (tmp_path / "games.py").write_text("class Game:\n    def __init__(self, size): self.size = size\n"
                                       "    def reset(self, row): ...\n    def step(self, text): ...\n")  # fmt: skip
    name = f"{tmp_path}/games.py:Game"
    assert environment_of(name, {"size": 3})().size == 3
    with pytest.raises(ConfigError) as error:
        environment_of(name, {"width": 3})
    wording(str(error.value).replace(str(tmp_path), "DIR"))
