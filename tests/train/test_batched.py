"""Many prompts at once: each gets the tokens that it gets alone, whatever the batch; what is done is kept."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from dualtune import interrupt
from dualtune.backend.decoding import CannotBatch
from dualtune.errors import ConfigError, Preempted
from dualtune.evaluate.batched import Bounds, _checked, check_decoding, continue_all, continue_rows, prompted_row
from dualtune.evaluate.chat import Sampling
from dualtune.evaluate.fingerprints import MOST_TOKENS, PROMPTS, fingerprints, gap, logprobs_of, plain_batch, recompute
from dualtune.evaluate.inference import BASE_ONLY, chooser, load_model, stream_text
from dualtune.evaluate.kept_answers import KeptAnswers
from dualtune.testing.conformance import random_adapter

TEXTS = ("a", "Say something longer than the others, please.", "1 plus 1?", "b c", "", "Hello")
GREEDY, SAMPLED = Sampling(max_tokens=9), Sampling(max_tokens=9, temperature=1.0, top_p=0.9, seed=5)


@pytest.fixture(params=["numpy", "torch", "mlx"])
def model(request, open_backend):
    path = request.getfixturevalue("tiny_softmax" if request.param == "numpy" else "tiny_llama")
    modules = ("mixer", "head") if request.param == "numpy" else ("all-linear",)
    return load_model(open_backend(request.param), str(path), spec=replace(BASE_ONLY, rank=4, targets=modules))


def prompts_of(model):
    return [model.tokenizer.encode_prompt(text) if text else np.array([5], np.int32) for text in TEXTS]


def alone(model, sampling, number, prompt):
    """What an engine gives for this prompt by itself: (text, tokens, whether it ended)."""
    options = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed, "row": number}
    choose = chooser(sampling.max_tokens, model.tokenizer.stop_ids, **options)
    tokens = [*model.engine.generate(prompt, choose=choose)]
    before = prompt[-1:].tolist()
    text = model.tokenizer.decode(before + tokens)[len(model.tokenizer.decode(before)) :]
    return text, len(tokens), len(tokens) < sampling.max_tokens


def together(model, sampling, **options):
    found = continue_all(model, prompts_of(model), sampling, **options)
    ends = {each.number: (each.text, each.num_tokens, each.is_whole) for each in found}
    return [ends[number] for number in range(len(TEXTS))]


def one_by_one(model, sampling):
    return [alone(model, sampling, number, prompt) for number, prompt in enumerate(prompts_of(model))]


class Wrapped:
    """An engine of which `decoding` is another one."""

    def __init__(self, engine, decoding):
        self._engine, self.decoding = engine, decoding

    def __getattr__(self, name):
        return getattr(self._engine, name)


# --- equal to one by one ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_row_gets_the_tokens_that_it_gets_alone(model, sampling):
    """With two adapters, one after another, in batches in which rows leave and others enter."""
    answers = []
    for seed in (1, 2):
        model.engine.load_adapter_state(random_adapter(model.engine.adapter_state(), seed))
        told = []
        answers.append(together(model, sampling, tell=told.append))
        assert answers[-1] == one_by_one(model, sampling)
        assert answers[-1] == together(model, sampling, bounds=Bounds(rows=3), tell=told.append)
        assert answers[-1] == together(model, sampling, bounds=Bounds(tokens=60), tell=told.append)
        assert not told
    assert answers[0] != answers[1]


def test_random_numbers_are_those_of_seed_and_row(model):
    prompt = prompts_of(model)[1]

    def texts(numbers, **changes):
        found = continue_all(model, [prompt] * len(numbers), replace(SAMPLED, **changes), numbers=numbers)
        return {each.number: each.text for each in found}

    four = texts([0, 1, 2, 3])
    assert texts([3, 1]) == {number: four[number] for number in (1, 3)}
    assert len({*four.values()}) > 1 and four != texts([0, 1, 2, 3], seed=6)


def test_rows_end_where_the_positions_end_and_at_a_stop_token(model):
    positions = max(map(len, prompts_of(model))) + 2
    limited = replace(model, positions=positions)
    found = {each.number: each for each in continue_all(limited, prompts_of(model), GREEDY)}
    assert found[1].num_tokens == 2 and found[0].num_tokens == 9
    with pytest.raises(ConfigError, match="has positions up to 3"):
        next(continue_all(replace(model, positions=3), prompts_of(model), GREEDY))
    first = next(iter(model.engine.generate(prompts_of(model)[0], choose=chooser(1, frozenset()))))
    tokenizer = type("Stops", (), {"stop_ids": frozenset({first}), "decode": model.tokenizer.decode})()
    stopped = {
        each.number: each for each in continue_all(replace(model, tokenizer=tokenizer), prompts_of(model), GREEDY)
    }
    assert (stopped[0].text, stopped[0].num_tokens, stopped[0].is_whole) == ("", 0, True)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_row_ends_at_its_own_stop_text(model, sampling):
    """The others go on with the tokens that they get without stop texts, each up to its own limit."""
    spelled = SimpleNamespace(  # a character is a token
        stop_ids=model.tokenizer.stop_ids, decode=lambda ids: "".join(chr(0x4E00 + token) for token in ids),
        encode_prompt=model.tokenizer.encode_prompt,
    )  # fmt: skip
    model = replace(model, tokenizer=spelled)
    whole = together(model, sampling)
    stops = [(text[n : n + 2], "never") if n + 1 < len(text) else () for n, (text, *_) in enumerate(whole)]
    limits = [9 - number % 3 for number in range(len(TEXTS))]
    rows = [
        prompted_row(model, number, prompt, replace(sampling, max_tokens=limits[number]), stops=stops[number])
        for number, prompt in enumerate(prompts_of(model))
    ]
    assert sum(map(bool, stops)) > 2
    for each in continue_rows(model, rows):
        text, allowed = whole[each.number][0], limits[each.number]
        ends = [n for n in range(1, allowed + 1) if any(stop in text[:n] for stop in stops[each.number])]
        count = min([*ends, allowed, len(text)])
        assert (each.text, each.num_tokens) == (text[:count], count)


class Counted:
    """A decoding that counts the forward passes that its model does."""

    def __init__(self, inner, passes):
        self._inner, self._passes = inner, passes

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def enter(self, texts):
        self._passes.append(len(texts))
        return self._inner.enter(texts)

    def advance(self, tokens_B):
        self._passes.append(len(tokens_B))
        return self._inner.advance(tokens_B)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_takes_a_forward_pass_per_token(model, sampling):
    """The texts themselves give the first tokens, and nothing is computed after the last ones."""
    endless = type("Endless", (), {"stop_ids": frozenset(), "decode": model.tokenizer.decode})()
    check_decoding(model.engine, prompts_of(model)[:2])
    passes = []
    counted = Wrapped(model.engine, lambda: Counted(model.engine.decoding(), passes))
    _checked.add(counted)
    for count in (1, len(TEXTS)):
        passes.clear()
        few = replace(model, engine=counted, tokenizer=endless)
        assert len([*continue_all(few, prompts_of(model)[:count], sampling)]) == count
        assert passes == [count] * sampling.max_tokens


@pytest.mark.parametrize(("model", "starts"), [("torch", 1), ("mlx", 2)], indirect=["model"])
def test_no_logits_are_computed_after_the_last_token(model, starts, monkeypatch):
    """Neither in a batch, where MLX starts the next step ahead, nor in a single text.

    On MLX a prompt takes two calls: its last token follows by itself.
    """
    calls, prompt = [], prompts_of(model)[1]
    kind = type(model.engine.model)
    called = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *args, **options: calls.append(1) or called(*args, **options))
    endless = type("Endless", (), {"stop_ids": frozenset(), "decode": model.tokenizer.decode})()
    endless = replace(model, tokenizer=endless)
    check_decoding(model.engine, [prompt, prompt])
    for answers in (
        lambda: continue_all(endless, [prompt], GREEDY),
        lambda: continue_all(endless, [prompt, prompt], GREEDY),
        lambda: stream_text(endless, prompt, max_tokens=GREEDY.max_tokens),
    ):
        calls.clear()
        assert len([*answers()])
        assert len(calls) == starts + GREEDY.max_tokens - 1


# --- fingerprints ----------------------------------------------------------------------------------------------------


def test_fingerprints_take_a_pass_per_batch_and_those_recorded_alone_are_verified(model, monkeypatch):
    engine, tokenizer = model.engine, model.tokenizer
    engine.load_adapter_state(random_adapter(engine.adapter_state(), 1))
    texts = [tokenizer.encode(prompt, special=True) for prompt in PROMPTS]
    alone = [engine.logprobs(plain_batch(ids))[0, -8:] for ids in texts]
    batches, logprobs = [], engine.logprobs
    monkeypatch.setattr(type(engine), "logprobs", lambda _, batch: batches.append(batch.tokens_BT) or logprobs(batch))
    found = fingerprints(engine, tokenizer)
    assert sum(map(len, batches)) == len(PROMPTS) > len(batches)
    assert all(tokens_BT.size <= MOST_TOKENS for tokens_BT in batches)
    recorded = []
    for entry, ids, logprobs_PV in zip(found, texts, alone, strict=True):
        tops = [[(i, float(logprobs_V[i])) for i in np.argsort(-logprobs_V)[:5]] for logprobs_V in logprobs_PV]
        assert entry["tokens"] == ids.tolist() and len(tops) == 8
        for top, expected in zip([*entry["earlier"], entry["top"]], tops, strict=True):
            assert [i for i, _ in top] == [i for i, _ in expected]
            assert [p for _, p in top] == pytest.approx([p for _, p in expected], abs=1e-5)
        recorded.append({"tokens": entry["tokens"], "top": tops[-1], "earlier": tops[:-1]})
    difference = gap(recorded, recompute(engine, recorded))
    assert (difference.num_positions, difference.top1) == (40, 1.0)
    assert difference.logprob < 1e-5 and difference.kl < 1e-8


@pytest.mark.parametrize(("dtype", "winner"), [("float32", 3), ("bfloat16", 4)])
def test_a_tie_in_a_batch_is_decided_by_the_text_alone(dtype, winner):
    """Where rounding makes another token the most probable one. In 16 bits ties are everywhere, and limits are wide."""

    class Rounding:
        description = SimpleNamespace(dtype=dtype)
        shapes: ClassVar = []

        def logprobs(self, batch):
            self.shapes.append(batch.tokens_BT.shape)
            table = np.tile(-np.arange(9, dtype=np.float32), (*batch.tokens_BT.shape, 1))
            table[..., [3, 4]] = (1.0, 1.0 - 2e-5) if len(batch.tokens_BT) == 1 else (1.0, 1.0 + 2e-5)
            return table

    found = logprobs_of(Rounding(), [[7], [1, 2, 3], [5, 6]], [2, 2, 2])
    assert [each.shape for each in found] == [(1, 9), (2, 9), (2, 9)]
    assert {int(i) for each in found for i in each.argmax(-1)} == {winner}
    assert Rounding.shapes == [(3, 3), *([(1, 3), (1, 2), (1, 1)] if dtype == "float32" else [])]


def test_long_texts_are_computed_alone(model):
    """Records are not trusted: many long ones must not become one batch."""
    texts = [[5] * MOST_TOKENS, [6] * 90, [7] * 4]
    sizes = []
    wide = Wrapped(model.engine, None)
    wide.logprobs = lambda batch: sizes.append(batch.tokens_BT.size) or model.engine.logprobs(batch)
    assert [len(each) for each in logprobs_of(wide, texts, [3, 90, 9])] == [3, 90, 4]
    assert max(sizes) <= MOST_TOKENS


# --- shortages, and models that cannot -------------------------------------------------------------------------------


class Short:
    """A decoding for which memory is short: of more rows than `most`, in `enter` or in `advance`."""

    def __init__(self, inner, most):
        self._inner, self._most, self._rows = inner, most, 0

    def enter(self, texts):
        self._rows += len(texts)
        return self._inner.enter(texts)

    def advance(self, tokens_B):
        if self._rows > self._most:
            raise MemoryError("no room")
        return self._inner.advance(tokens_B)

    def leave(self, staying):
        self._rows = len(staying)
        self._inner.leave(staying)


def test_a_shortage_halves_the_batch_and_changes_no_token(model):
    engine, told = model.engine, []
    short = replace(model, engine=Wrapped(engine, lambda: Short(engine.decoding(), 2)))
    is_shortage = lambda error: isinstance(error, MemoryError)  # noqa: E731
    assert together(short, SAMPLED, is_shortage=is_shortage, tell=told.append) == one_by_one(model, SAMPLED)
    assert told == [
        "memory ran out with 6 answers at once; 3 from here on",
        "memory ran out with 3 answers at once; 1 from here on",
    ]
    with pytest.raises(MemoryError):
        together(short, SAMPLED)


def test_a_model_that_cannot_batch_answers_one_by_one_and_says_so_once(model):
    def refuses():
        raise CannotBatch("its layers keep a state")

    told = []
    alone_only = replace(model, engine=Wrapped(model.engine, refuses))
    assert together(alone_only, SAMPLED, tell=told.append) == one_by_one(model, SAMPLED)
    assert told == ["answers one by one: its layers keep a state"]


def test_a_batch_that_computes_something_else_is_found(model):
    """As with a family that ignores masks or positions."""

    class Wrong:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def advance(self, tokens_B):
            return self._inner.advance(tokens_B[::-1].copy())

    wrong = Wrapped(model.engine, lambda: Wrong(model.engine.decoding()))
    check_decoding(model.engine, prompts_of(model)[:2])
    with pytest.raises(CannotBatch, match="log-probabilities of this model differ"):
        check_decoding(wrong, prompts_of(model)[:2])


# --- kept ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["numpy"], indirect=True)
def test_what_was_answered_before_a_stop_is_not_answered_again(model, tmp_path, monkeypatch):
    target = tmp_path / "answers.jsonl"

    def answers(made_by, prompts=None):
        told = []
        kept = KeptAnswers(target, {"by": made_by})
        found = kept.continued(
            "adapter", model, prompts or prompts_of(model), SAMPLED, is_shortage=lambda _: False, tell=told.append
        )
        return kept, told, found

    kept, _, found = answers(1)
    first = [next(found), next(found)]
    monkeypatch.setattr(interrupt, "_received", 15)
    monkeypatch.setattr(interrupt, "poll", lambda: (_ for _ in ()).throw(Preempted("stopped")))
    with pytest.raises(Preempted):
        list(found)
    monkeypatch.undo()
    assert len(kept.path.read_text().splitlines()) == 3
    with kept.path.open("a") as file:
        file.write('{"side": "adapter", "numb')  # as a power cut leaves it
    kept, told, found = answers(1)
    assert told == [] and [next(found), next(found)] == first
    everything = [*first, *found]
    assert told == ["2 of 6 answers were generated before, by the same command"]
    assert sorted((each.number, each.text) for each in everything) == [
        (number, text) for number, (text, *_) in enumerate(together(model, SAMPLED))
    ]
    # Another prompt in place of the first is answered; all is answered again if something else decides the answers.
    changed = [np.array([7], np.int32), *prompts_of(model)[1:]]
    assert [len([*answers(1, changed)[2]]), answers(1, changed)[1]] == [6, []]
    _, told, found = answers(2)
    assert len([*found]) == 6 and told == []
    kept.finish()
    assert not kept.path.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.txt", "abc\n\nbc\n"),
        ("prompts.jsonl", '{"prompt": "abc"}\n{"messages": [{"role": "user", "content": "bc"}]}\n'),
    ],
)
def test_generate_answers_a_file_of_prompts(dualtune_main, tiny_softmax, tmp_path, name, content):
    file, output = tmp_path / name, tmp_path / "out.jsonl"
    file.write_text(content)
    command = ("generate", tiny_softmax, "--prompts", file, "--max-tokens", 7, "--platform", "numpy")
    shown = dualtune_main(*command)
    assert shown.returncode == 0, shown.stderr
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert sorted(row["row"] for row in rows) == [1, 2]
    for row, asked in zip(sorted(rows, key=lambda row: row["row"]), ("abc", "bc"), strict=True):
        single = dualtune_main(*command[:2], "--prompt", asked, *command[4:]).stdout
        assert (row["answer"] + "\n", row["tokens"] <= 7) == (single, True)
    assert dualtune_main(*command, "--output", output).returncode == 0
    assert [json.loads(line) for line in output.read_text().splitlines()] == sorted(rows, key=lambda row: row["row"])
    assert not output.with_name("out.jsonl.part").exists()


@pytest.mark.parametrize(
    ("args", "code"),
    [(("--prompts", "none.txt"), 6), ((), 2), (("--prompt", "a", "--output", "x"), 2), (("--prompts", "bad.jsonl"), 3)],
)
def test_what_holds_no_prompt_is_refused(dualtune_main, tiny_softmax, tmp_path, monkeypatch, args, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"question": "a"}\n')
    assert dualtune_main("generate", tiny_softmax, *args, "--platform", "numpy").returncode == code
