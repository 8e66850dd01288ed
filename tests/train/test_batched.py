"""Many prompts at once: each gets the tokens that it gets alone, whatever the batch; what is done is kept."""

import json
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, Preempted
from dualtune.engine.adapter_bank import NO_ADAPTER, AdapterBank, kept_ranks
from dualtune.engine.decoding import CannotBatch, GenerationCache
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.numpy_engine import NumpyNextLogits
from dualtune.train.generation.batched import (
    FEWEST_CACHED,
    Bounds,
    RowBatch,
    _checked,
    check_decoding,
    continue_all,
    continue_rows,
    ended_rows,
    prompted_row,
)
from dualtune.train.generation.caches import TextCaches
from dualtune.train.generation.inference import BASE_ONLY, GenerationProgress, load_model, stream_text
from dualtune.train.generation.sampling import Chooser, Sampling
from dualtune.use.scoring.answers import KeptAnswers

pytestmark = pytest.mark.covering(1)

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
    choose = Chooser(sampling, model.tokenizer.stop_ids, numbers=(number,))
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


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_row_gets_the_tokens_that_its_own_adapter_gives_alone(model, sampling):
    """Of two adapters and the base in turn, in batches in which rows leave and others enter, also where memory is
    short."""
    engine = model.engine
    states = [random_adapter(engine.adapter_state(), seed) for seed in (1, 2)]
    expected = []
    for number, prompt in enumerate(prompts_of(model)):
        engine.load_adapter_state([*states, engine.neutral_state()][number % 3])
        choose = Chooser(sampling, model.tokenizer.stop_ids, numbers=(number,))
        expected.append([*engine.generate(prompt, choose=choose)])
    engine.load_adapter_state(random_adapter(engine.adapter_state(), 9))  # which takes no part
    bank = AdapterBank([(replace(BASE_ONLY, rank=4), state) for state in states])
    short = Wrapped(engine, lambda bank=None: Short(engine.decoding(bank), 2))
    for own, bounds in ((engine, Bounds()), (engine, Bounds(rows=3, least_share=0.0, entering=20)), (short, Bounds())):
        rows = [prompted_row(model, number, prompt, sampling) for number, prompt in enumerate(prompts_of(model))]
        for row in rows:
            row.adapter = (0, 1, NO_ADAPTER)[row.number % 3]
        is_short = lambda error: isinstance(error, MemoryError)  # noqa: E731
        ended = [*ended_rows(own, rows, bounds, is_short, lambda text: None, bank)]
        assert [row.tokens for row in sorted(ended, key=lambda row: row.number)] == expected
    assert len({*map(tuple, expected)}) >= 3


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
    first = next(iter(model.engine.generate(prompts_of(model)[0], choose=Chooser(Sampling(1), frozenset()))))
    tokenizer = type("Stops", (), {"stop_ids": frozenset({first}), "stop_text": "", "decode": model.tokenizer.decode})()
    stopped = {
        each.number: each for each in continue_all(replace(model, tokenizer=tokenizer), prompts_of(model), GREEDY)
    }
    assert (stopped[0].text, stopped[0].num_tokens, stopped[0].is_whole) == ("", 0, True)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_each_row_ends_at_its_own_stop_text(model, sampling):
    """The others go on with the tokens that they get without stop texts, each up to its own limit."""
    spelled = SimpleNamespace(  # a character is a token
        stop_ids=model.tokenizer.stop_ids, decode=lambda ids: "".join(chr(0x4E00 + token) for token in ids),
        encode_prompt=model.tokenizer.encode_prompt, stop_text=None,
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

    def enter(self, texts, *text_of):
        self._passes.append(len(texts))
        return self._inner.enter(texts, *text_of)

    def advance(self, tokens_B):
        self._passes.append(len(tokens_B))
        return self._inner.advance(tokens_B)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_takes_a_forward_pass_per_token(model, sampling):
    """The texts themselves give the first tokens, and nothing is computed after the last ones."""
    endless = type("Endless", (), {"stop_ids": frozenset(), "stop_text": "", "decode": model.tokenizer.decode})()
    check_decoding(model.engine, prompts_of(model)[:2])
    passes = []
    counted = Wrapped(model.engine, lambda: Counted(model.engine.decoding(), passes))
    _checked[counted] = {frozenset()}
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
    endless = type("Endless", (), {"stop_ids": frozenset(), "stop_text": "", "decode": model.tokenizer.decode})()
    endless = replace(model, tokenizer=endless)
    check_decoding(model.engine, [prompt, prompt])
    for answers in (
        lambda: continue_all(endless, [prompt], GREEDY),
        lambda: continue_all(endless, [prompt, prompt], GREEDY),
        lambda: stream_text(endless, prompt, GREEDY),
    ):
        calls.clear()
        assert len([*answers()])
        assert len(calls) == starts + GREEDY.max_tokens - 1


@pytest.mark.parametrize("model", ["numpy"], indirect=True)
def test_a_row_goes_on_while_others_enter_without_end(model):
    batch = RowBatch(model.engine, Bounds(least_share=0.0), lambda error: False, print)
    row = partial(prompted_row, model)
    long = row(0, prompts_of(model)[0], replace(SAMPLED, temperature=9.0))
    batch.waiting.append(long)
    for step in range(2 * SAMPLED.max_tokens):
        batch.waiting.append(row(step, prompts_of(model)[1], Sampling(max_tokens=1)))
        batch.step()
    assert long.has_ended


# --- shortages, and models that cannot -------------------------------------------------------------------------------


class Short:
    """A decoding for which memory is short: of more rows than `most`, in `enter` or in `advance`."""

    def __init__(self, inner, most):
        self._inner, self._most, self._rows = inner, most, 0

    def enter(self, texts, *text_of, **adapters):
        self._rows += len(text_of[0] if text_of else texts)
        return self._inner.enter(texts, *text_of, **adapters)

    def advance(self, tokens_B):
        if self._rows > self._most:
            raise MemoryError("no room")
        return self._inner.advance(tokens_B)

    def leave(self, staying):
        self._rows = len(staying)
        self._inner.leave(staying)


def test_a_shortage_halves_the_batch_and_changes_no_token(model, wording):
    engine, told = model.engine, []
    short = replace(model, engine=Wrapped(engine, lambda: Short(engine.decoding(), 2)))
    is_shortage = lambda error: isinstance(error, MemoryError)  # noqa: E731
    assert together(short, SAMPLED, is_shortage=is_shortage, tell=told.append) == one_by_one(model, SAMPLED)
    wording(told)
    with pytest.raises(MemoryError):
        together(short, SAMPLED)


def test_a_model_that_cannot_batch_answers_one_by_one_and_says_so_once(model, wording):
    def refuses():
        raise CannotBatch("its layers keep a state")

    told = []
    alone_only = replace(model, engine=Wrapped(model.engine, refuses))
    assert together(alone_only, SAMPLED, tell=told.append) == one_by_one(model, SAMPLED)
    wording(told)


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


@pytest.mark.parametrize("model", ["numpy"], indirect=True)
def test_a_bank_whose_rows_have_each_others_adapters_is_found(model, monkeypatch):
    """Also before the adapters have learned anything, while they compute the same."""
    monkeypatch.setattr(
        "dualtune.engine.testing.numpy_engine.kept_ranks", lambda layout, adapters: kept_ranks(layout, adapters[::-1])
    )
    new = AdapterBank([(replace(BASE_ONLY, rank=4), model.engine.neutral_state())] * 2)
    with pytest.raises(CannotBatch, match="differ by"):
        check_decoding(model.engine, prompts_of(model)[:2], new)


@pytest.mark.parametrize("model", ["numpy"], indirect=True)
def test_a_bank_that_scores_otherwise_than_it_continues_is_found(model, monkeypatch):
    bank, scoring = AdapterBank([(replace(BASE_ONLY, rank=4), model.engine.neutral_state())] * 2), model.engine.scoring
    monkeypatch.setattr(model.engine, "scoring", lambda bank, adapters: scoring(bank, adapters[::-1]))
    with pytest.raises(CannotBatch, match="differ by"):
        check_decoding(model.engine, prompts_of(model)[:2], bank)
    monkeypatch.undo()
    check_decoding(model.engine, prompts_of(model)[:2], bank)


# --- kept ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["numpy"], indirect=True)
def test_what_was_answered_before_a_stop_is_not_answered_again(model, tmp_path, monkeypatch, wording):
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
    wording(told)
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


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_answer_ends_at_the_text_that_ends_a_turn(
    open_backend, tiny_softmax, tmp_path, monkeypatch, sampling, batches
):
    """The model counts through the bytes of a text, which it goes on with behind the end of its turn."""
    template = tmp_path / "lines.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n# End\n{% endfor %}")
    model = load_model(open_backend("numpy"), str(tiny_softmax), template=str(template))
    says = model.tokenizer.encode("Hé\n# Endus", special=False).tolist()
    start = next(id for id in range(5, 99) if id not in says)
    following = dict(zip([start, *says[:-1]], says, strict=True))
    prompts = [np.array([start], np.int32)] * 2

    def logits(last):
        row = np.full(model.tokenizer.vocabulary_size, -50, np.float32)
        row[following[last]] = 50
        return row

    def generate(prompt, *, choose, cache=None):
        last = int(prompt[-1])
        while (last := choose(logits(last))) is not None:
            yield last

    monkeypatch.setattr(model.engine, "generate", generate)
    if batches:
        monkeypatch.setattr("dualtune.train.generation.batched.check_decoding", lambda *_: None)
        monkeypatch.setattr(model.engine, "decoding", lambda: Scripted(logits))
    else:
        monkeypatch.setattr("dualtune.train.generation.batched.check_decoding", cannot)
    long = replace(sampling, max_tokens=50)
    progress = GenerationProgress()
    pieces = [*stream_text(model, prompts[0], long, progress=progress)]
    assert ("".join(pieces), progress.is_ended, progress.num_tokens) == ("Hé", True, len("Hé\n# End".encode()))
    for each in continue_all(model, prompts, long):
        assert (each.text, each.is_whole, each.num_tokens) == ("Hé", True, len("Hé\n# End".encode()))
    (cut,) = continue_all(model, prompts[:1], replace(sampling, max_tokens=6))
    assert (cut.text, cut.is_whole) == ("Hé\n# ", False)


def cannot(*_):
    raise CannotBatch("one by one")


class Scripted:
    """A batch of rows whose next token is a function of the last one."""

    def __init__(self, logits):
        self._logits, self._last = logits, []

    def enter(self, texts, text_of=None):
        rows = texts if text_of is None else [texts[i] for i in text_of]
        self._last += [int(text[-1]) for text in rows]
        return self._rows(self._last[-len(rows) :])

    def advance(self, tokens):
        self._last = tokens.tolist()
        return self._rows(self._last)

    def leave(self, staying):
        self._last = [self._last[i] for i in staying]

    def _rows(self, last):
        return NumpyNextLogits(np.stack([self._logits(each) for each in last]))


def test_what_is_held_of_a_text_is_not_computed_again(model, request):
    """A text that begins as one that was read enters with its keys and values, which stay as they are."""
    engine, rng, held = model.engine, np.random.default_rng(0), GenerationCache()
    has_cache = request.node.callspec.params["model"] != "numpy"
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    read = rng.integers(5, 60, 24).astype(np.int32)
    read_on = [*islice(engine.generate(read, choose=Chooser(GREEDY, frozenset()), cache=held), 3)]
    texts = [np.array([*read, *read_on]), np.array([*read[:20], 9, 8, 7]), read[::-1], read[:1]]
    texts = [text.astype(np.int32) for text in texts]
    each_alone, together = [[0], [1], [2], [3]], [[0, 1], [3, 2]]

    def entered(groups, held=None):
        decoding, found = engine.decoding(), dict[int, np.ndarray]()
        for group in groups:  # beside those that are there
            options = {} if held is None else {"caches": [None if i == 3 else held for i in group]}
            logits = decoding.enter([texts[i] for i in group], **options).rows()
            found |= zip(group, logits[-len(group) :], strict=True)
        advanced = decoding.advance(np.array([6 + i for group in groups for i in group], np.int32)).rows()
        after = dict(zip(chain(*groups), advanced, strict=True))
        return np.stack([*(found[i] for i in range(4)), *(after[i] for i in range(4))])

    expected = entered(each_alone)
    for groups in (each_alone, together, [[1, 3, 0]], [[0, 1, 3]]):
        groups = [*groups, [i for i in range(4) if i not in chain(*groups)]]
        np.testing.assert_allclose(entered([each for each in groups if each], held), expected, atol=1e-5)
    assert held.num_shared(texts[0]) == (26 if has_cache else 0) and (held.on_device is not None) == has_cache
    # Of another adapter, where it would be wrong, it shows that it is used, and of which texts.
    engine.load_adapter_state(random_adapter(engine.adapter_state(), seed=4))
    for groups in (each_alone, together):
        differs = np.abs(entered(groups, held) - entered(groups)).max(-1) > 1e-3
        assert differs.tolist() == [has_cache and i in (0, 1) for i in (0, 1, 2, 3) * 2]


def test_what_a_batch_has_computed_of_a_text_is_held(model, request, monkeypatch):
    """Of rows that entered late, with others between them, that ended at a token or at their limit: a text that goes on
    is the one that it is without, by itself and in a batch; without memory for a copy nothing is held."""
    engine, rng = model.engine, np.random.default_rng(1)
    has_cache = request.node.callspec.params["model"] != "numpy"
    engine.load_adapter_state(random_adapter(engine.adapter_state()))
    prompts = [rng.integers(5, 60, n).astype(np.int32) for n in (9, 30, 4, 21)]
    rows = [prompted_row(model, i, prompt, replace(GREEDY, max_tokens=2 + 3 * i)) for i, prompt in enumerate(prompts)]
    held = dict[int, GenerationCache]()
    for row in rows:
        row.keep = partial(held.__setitem__, row.number)
    monkeypatch.setattr(rows[1], "ends", lambda tokens: len(tokens) == 3)
    assert len([*continue_rows(model, rows, bounds=Bounds(rows=3, least_share=0.0))]) == 4
    for row in rows:
        cache = held[row.number]
        assert cache.tokens == (row.text[:-1].tolist() if has_cache else [])
        text = np.array([*row.text, 7, 8, 9], np.int32)
        logits = [engine.decoding().enter([text], **each).rows() for each in ({}, {"caches": [cache]})]
        np.testing.assert_allclose(*logits, atol=1e-5)
        said = [[*islice(engine.generate(text, choose=Chooser(GREEDY, frozenset()), cache=each), 3)]
                for each in (None, cache)]  # fmt: skip
        assert said[0] == said[1]
        shorter = np.append(row.text[:-5], 9).astype(np.int32)  # it is cropped
        assert next(engine.generate(shorter, choose=Chooser(GREEDY, frozenset()), cache=cache)) == next(
            engine.generate(shorter, choose=Chooser(GREEDY, frozenset()))
        )
    # Of another adapter, where it would be wrong, it shows that it is used.
    engine.load_adapter_state(random_adapter(engine.adapter_state(), seed=4))
    text, cache = prompts[3], held[3]
    logits = [engine.decoding().enter([text], **each).rows() for each in ({}, {"caches": [cache]})]
    assert (np.abs(logits[0] - logits[1]).max() > 1e-3) == has_cache


def test_what_is_held_of_texts_is_limited():
    caches, texts = TextCaches(most_tokens=10), [np.arange(n, n + 4) for n in range(0, 40, 4)]

    def put(name, text):
        caches.put(name, GenerationCache(text.tolist(), on_device=object()))

    for text in texts[:2]:
        put("a", text)
    put("b", texts[0])  # the third of four tokens: the first has to leave
    following = [np.append(text, [90, 91]) for text in texts]
    assert caches.longest("a", following[0]) is None and caches.num_tokens == 8
    assert caches.longest("a", following[1]).tokens == texts[1].tolist()
    assert caches.longest("c", following[1]) is None
    put("a", following[1])  # which begins with the one before
    assert caches.num_tokens == 10 and caches.longest("a", following[1][:5]).num_shared(following[1]) == 5
    put("a", texts[2])
    put("c", np.arange(100))  # the last one of each model stays
    assert caches.num_tokens == 4 + 4 + 100 and caches.longest("a", following[2]) is caches.cache_for("a", following[2])
    caches.forget("c")
    assert caches.longest("b", following[0]).tokens == texts[0].tolist() and caches.num_tokens == 8
    assert caches.cache_for("d", texts[5]).tokens == [] and caches.longest("d", texts[5]) is None
    caches.forget()
    assert caches.num_tokens == 0 and caches.longest("b", following[0]) is None


def test_rows_whose_beginnings_are_held_enter_apart_from_new_ones(model, monkeypatch):
    """As do rows that have read less than it is worth, and all get what they get alone."""
    read = np.arange(5, 5 + FEWEST_CACHED, dtype=np.int32)
    prompts = [np.append(read, 9), np.array([5, 6], np.int32), np.append(read[:-1], 9), np.append(read, 8),
               np.append(read, [8, 9])]  # fmt: skip
    prompts = [prompt.astype(np.int32) for prompt in prompts]
    expected = [alone(model, GREEDY, number, prompt) for number, prompt in enumerate(prompts)]
    rows = [prompted_row(model, number, prompt, GREEDY) for number, prompt in enumerate(prompts)]
    decoding, counts = model.engine.decoding, []
    for row in rows:
        row.cache = GenerationCache()
        list(model.engine.generate(read, choose=lambda logits_V: None, cache=row.cache))
        row.cache.tokens = read.tolist()  # also of the NumPy engine, which caches nothing

    def counted():
        made = decoding()
        enter = made.enter
        made.enter = lambda texts, *args, **options: (
            counts.append((len(texts), options.get("caches") is not None)) or enter(texts, *args, **options)
        )
        return made

    monkeypatch.setattr(model.engine, "decoding", counted)
    check_decoding(model.engine, prompts)
    counts.clear()
    found = {each.number: each for each in continue_rows(model, rows, bounds=Bounds(least_share=0.0))}
    assert [(found[n].text, found[n].num_tokens, found[n].is_whole) for n in range(5)] == expected
    assert counts == [(1, True), (2, False), (2, True)]
