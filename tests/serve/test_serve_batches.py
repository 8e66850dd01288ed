"""Requests at the same time are one batch: each is answered as if it were alone, whatever the others ask for."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.http_server import BadRequest
from dualtune.engine.decoding import CannotBatch, copied_tokens
from dualtune.engine.testing import tolerances
from dualtune.model.adapter import AdapterSpec, init_adapter, tensor_name
from dualtune.model.config_file import vocabulary_size
from dualtune.model.formats.directory import Adapter, write_adapter
from dualtune.use.chat import load_adapter_set
from dualtune.use.serve.answers import AT_ONCE, Answers
from dualtune.use.serve.requests import read_request

ASKED = [
    {"model": "base", "temperature": 0},
    {"model": "one", "temperature": 1.0, "seed": 1, "max_tokens": 3},
    {"model": "two", "temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"model": "one", "temperature": 0, "stop": ["e", "a"]},
    {"model": "two", "temperature": 0, "frequency_penalty": 2.0},
    {"model": "base", "temperature": 2.0, "seed": 3, "top_k": 5, "max_tokens": 4},
    {"model": "one", "prompt": "12", "max_tokens": 0, "echo": True, "logprobs": 1},
    {"model": "two", "temperature": 1.5, "seed": 5, "min_p": 0.1, "presence_penalty": 1.0, "max_tokens": 12},
    {"model": "base", "temperature": 0, "max_tokens": 1},
]


def written(path, shapes, rank, seed, **spec):
    rng = np.random.default_rng(seed)
    tensors = {n: rng.normal(0, 0.4, t.shape).astype(np.float32) for n, t in init_adapter(shapes, rank, 0).items()}
    spec = AdapterSpec(rank, 2.0 * rank, 0.0, (*shapes,), **spec)
    if spec.method == "dora":
        for module, (rows, _) in shapes.items():
            tensors[tensor_name(module, "m", "dora")] = np.ones(rows, np.float32)
    write_adapter(path, Adapter(spec, tensors))
    return path


@pytest.fixture
def open_set(open_backend, tiny_softmax, tiny_llama, tmp_path):
    """A function from a backend to a set of two adapters of unlike ranks and layers."""

    def opened(name, **spec):
        if name == "numpy":
            model, shapes = tiny_softmax, {"mixer": (8, 8), "head": (vocabulary_size(tiny_softmax), 8)}
            each = {"mixer": (8, 8)}, shapes
        else:
            model, q = tiny_llama, "model.layers.0.self_attn.q_proj"
            each = {q: (32, 32)}, {q: (32, 32), "model.layers.1.self_attn.o_proj": (32, 32)}
        directories = {
            label: written(tmp_path / label, shapes, rank, rank, **spec)
            for label, shapes, rank in (("one", each[0], 2), ("two", each[1], 3))
        }
        return load_adapter_set(open_backend(name), str(model), directories)

    return opened


def answers_of(adapters, **options):
    return Answers(adapters, max_tokens=9, max_prompt=100, max_waiting=64, time_limit_s=600, **options)


def submitted(answers, number):
    body = ASKED[number % len(ASKED)]
    body = body if "prompt" in body else {"prompt": "12 and so on"[: 2 + number], **body}
    return answers.submit(read_request(json.dumps(body).encode(), is_chat=False))


def said(job):
    """What a client has got: the pieces joined, and the end."""
    pieces = [job.pieces.get_nowait() for _ in range(job.pieces.qsize())]
    texts = "".join(piece for piece in pieces if isinstance(piece, str))
    return texts, [piece for piece in pieces if not isinstance(piece, str)]


def answered(answers, jobs):
    for _ in range(1000):
        if not answers._running and answers._next is None and answers._waiting.empty():
            return [said(job) for job in jobs]
        answers.answer_next()
    pytest.fail("requests are not answered")


def alone(adapters):
    answers = answers_of(adapters, bounds=replace(AT_ONCE, rows=1))
    return answered(answers, [submitted(answers, number) for number in range(len(ASKED))])


def count_rows(monkeypatch, engine):
    """How many rows each step of a batch has."""
    counts, decoding = [], engine.decoding

    def counted(*bank):
        made = decoding(*bank)
        advance = made.advance
        made.advance = lambda tokens_B: counts.append(len(tokens_B)) or advance(tokens_B)
        return made

    monkeypatch.setattr(engine, "decoding", counted)
    return counts


@pytest.mark.parametrize("backend", ["numpy", "torch", "mlx"])
def test_each_request_is_answered_as_if_it_were_alone(open_set, backend, monkeypatch):
    """They come one by one, while others are answered, in a batch that is full at times."""
    adapters = open_set(backend)
    expected, counts = alone(adapters), count_rows(monkeypatch, adapters.engine)
    told = []
    answers = answers_of(adapters, bounds=replace(AT_ONCE, rows=5), tell=told.append)
    jobs = []
    for number in range(len(ASKED)):
        jobs.append(submitted(answers, number))
        answers.answer_next()
    gone = submitted(answers, 0)
    answers.answer_next()
    gone.is_cancelled = True
    assert answered(answers, jobs) == expected
    assert len({text for text, _ in expected}) > 5 and max(counts) >= 4 and not told
    assert sum(counts) < 100 and said(gone)[0] != expected[0][0]


class Failing:
    """A decoding that fails at its second step, or where memory is short for more than three rows."""

    def __init__(self, inner, is_short):
        self.enter, self.hold = inner.enter, inner.hold
        self._inner, self._is_short, self._steps = inner, is_short, 0

    def advance(self, tokens_B):
        self._steps += 1
        if self._is_short and len(tokens_B) > 3:
            raise MemoryError
        if not self._is_short and self._steps == 2:
            raise RuntimeError("a bad row")
        return self._inner.advance(tokens_B)

    def leave(self, staying):
        self._inner.leave(staying)


def refuse(*bank):
    raise CannotBatch("its layers keep a state")


@pytest.mark.parametrize(
    ("trouble", "most"),
    [("fails", 14), ("short", 14), ("dora", 2), ("no bank", 2), ("no batch", 0), ("no room for a bank", 4)],
)
def test_what_is_no_batch_is_answered_one_after_another(open_set, trouble, most, monkeypatch, wording):
    """Requests for the same adapter are a batch where unlike adapters are none."""
    adapters = open_set("numpy", **({"method": "dora"} if trouble == "dora" else {}))
    expected, engine, told = alone(adapters), adapters.engine, []
    decoding = engine.decoding
    if trouble in ("fails", "short"):
        monkeypatch.setattr(engine, "decoding", lambda *bank: Failing(decoding(*bank), trouble == "short"))
    elif trouble == "no bank":
        monkeypatch.setattr(engine, "decoding", lambda *bank: refuse() if bank else decoding())
    elif trouble == "no batch":
        monkeypatch.setattr(engine, "decoding", refuse)
    counts = count_rows(monkeypatch, engine)
    options = {"bank_numbers": 1} if trouble == "no room for a bank" else {}
    is_shortage = lambda error: isinstance(error, MemoryError)  # noqa: E731
    answers = answers_of(adapters, tell=told.append, is_shortage=is_shortage, **options)
    order = [number for number in range(len(ASKED)) for _ in range(2)]
    jobs = [submitted(answers, number) for number in order]
    assert answered(answers, jobs) == [expected[number] for number in order]
    assert max(counts, default=0) == most
    wording(told)


def test_an_answer_that_fails_in_a_batch_is_an_error_for_its_client_alone(open_set, monkeypatch):
    adapters = open_set("numpy")
    expected, answers = alone(adapters), answers_of(adapters)
    jobs = [submitted(answers, number) for number in range(4)]
    answers.answer_next()
    failing = answers._running[1]
    monkeypatch.setattr(failing._tokens, "feed", lambda token: 1 / 0)
    found = answered(answers, jobs)
    assert [found[i] for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
    (error,) = found[1][1]
    assert isinstance(error, BadRequest) and error.status == 500 and "ZeroDivisionError" in str(error)


def test_a_stop_ends_all_that_is_answered(open_set, monkeypatch):
    adapters = open_set("numpy")
    answers = answers_of(adapters, is_fatal=lambda error: isinstance(error, MemoryError))
    jobs = [submitted(answers, number) for number in range(3)]
    answers.answer_next()
    monkeypatch.setattr(answers._rows._batch, "step", lambda: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        answers.answer_next()
    assert [said(job)[1][-1].status for job in jobs] == [503] * 3


@pytest.mark.parametrize("rows", [64, 2])
def test_an_error_that_ends_all_where_a_batch_begins_is_told_to_each_client_once(open_set, rows, monkeypatch):
    """Also to those that wait, because nothing asks for them any more; whether there is room changes nothing."""
    adapters = open_set("numpy")
    bounds = replace(AT_ONCE, rows=rows)
    answers = answers_of(adapters, is_fatal=lambda error: isinstance(error, MemoryError), bounds=bounds)
    monkeypatch.setattr(adapters.engine, "decoding", lambda *bank: (_ for _ in ()).throw(MemoryError))
    jobs = [submitted(answers, 0)]
    answers.answer_next()
    assert answers._rows.has_room("base")
    jobs += [submitted(answers, number) for number in (1, 2, 3)]
    with pytest.raises(MemoryError):
        answers.answer_next()
    assert [[piece.status for piece in said(job)[1]] for job in jobs] == [[503]] * 4


def test_rows_of_unlike_adapters_for_which_a_bank_fails_follow_each_other(open_set, monkeypatch):
    adapters = open_set("numpy")
    expected, decoding = alone(adapters), adapters.engine.decoding
    monkeypatch.setattr(adapters.engine, "decoding", lambda *bank: refuse() if bank else decoding())
    answers, order = answers_of(adapters), [1, 2, 0, 1]
    jobs = [submitted(answers, order[0])]
    answers.answer_next()
    jobs.append(submitted(answers, order[1]))
    answers.answer_next()
    assert [name for name, _ in answers._rows._apart] == ["one", "two"] and not answers._rows.has_room("two")
    jobs += [submitted(answers, number) for number in order[2:]]
    assert answered(answers, jobs) == [expected[number] for number in order]


@pytest.mark.parametrize("backend", ["numpy", "torch", "mlx"])
def test_prompts_of_several_models_are_scored_in_one_pass(open_set, backend, monkeypatch):
    """Each as it is alone, while others are answered; one that fails, fails alone."""
    adapters = open_set(backend)
    texts = ["12 and so on", "12", "34 and 56", "12 and so on"]
    bodies = [
        {"model": name, "prompt": text, "max_tokens": 0, "echo": True, "logprobs": top}
        for name, text, top in zip(("one", "two", "base", "base"), texts, (2, 0, 3, 1), strict=True)
    ]
    requests = [read_request(json.dumps(body).encode(), is_chat=False) for body in bodies]
    answers = answers_of(adapters)
    expected = [answered(answers, [answers.submit(request)])[0] for request in requests]
    answered(answers, [*map(answers.submit, requests)])  # an engine is tried before it computes with a bank
    passes, engine = [], adapters.engine
    target_logprobs = engine.target_logprobs
    monkeypatch.setattr(
        engine, "target_logprobs", lambda batch: passes.append(len(batch.tokens_BT)) or target_logprobs(batch)
    )
    running = submitted(answers, 0)
    answers.answer_next()
    found = answered(answers, [*map(answers.submit, requests)])
    assert passes == [4] and said(running)[0]
    for (text, pieces), (own_text, own) in zip(found, expected, strict=True):
        (table, end), (own_table, own_end) = ((dict(each[0].table), each[1]) for each in (pieces, own))
        assert (text, end) == (own_text, own_end)
        for key in ("token_logprobs", "top_logprobs"):
            mine, its = (flat(each.pop(key)) for each in (table, own_table))
            assert [*mine] == [*its] and [*mine.values()] == pytest.approx([*its.values()], abs=tolerances.LOGPROBS)
        assert table == own_table
    fails = lambda batch: 1 / 0 if batch.num_targets < 5 or len(batch.tokens_BT) > 1 else target_logprobs(batch)  # noqa: E731
    monkeypatch.setattr(engine, "target_logprobs", fails)
    found = answered(answers, [*map(answers.submit, requests[:2])])
    assert found[0][0] == texts[0] and [error.status for error in found[1][1]] == [500]


def flat(values):
    """The numbers of a table's list, each by its place, and token."""
    named = [each if isinstance(each, dict) else {"": each} for each in values or ()]
    return {
        (i, token): value for i, each in enumerate(named) for token, value in sorted(each.items()) if value is not None
    }


def count_computed(monkeypatch, engine, computed):
    """How many tokens of each text that enters a batch are computed."""
    decoding = engine.decoding

    def counted(*bank):
        made = decoding(*bank)
        enter = made.enter

        def entered(texts, *args, caches=None, **options):
            pairs = zip(caches or [None] * len(texts), texts, strict=True)
            shared = [own.num_shared(text) if own else 0 for own, text in pairs]
            _, copied = copied_tokens(texts, shared)
            computed.extend(len(text) - own for text, own in zip(texts, copied, strict=True))
            return enter(texts, *args, caches=caches, **options)

        made.enter = entered
        return made

    monkeypatch.setattr(engine, "decoding", counted)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_batch_does_not_compute_what_the_batch_before_has_read(open_set, backend, monkeypatch):
    """Each conversation goes on, and others begin alike: only what is new is computed, as far as texts are held."""
    adapters = open_set(backend)
    texts = [f"{number} is a system message of some length, and a" for number in range(3)]
    asked = [(name, text) for name, text in zip(("one", "two", "one"), texts, strict=True)]

    def ask(answers, asked):
        bodies = [{"model": name, "prompt": text, "temperature": 0, "max_tokens": 6} for name, text in asked]
        jobs = [answers.submit(read_request(json.dumps(body).encode(), is_chat=False)) for body in bodies]
        return [text for text, _ in answered(answers, jobs)]

    def turns(answers):
        first = ask(answers, asked)
        computed.clear()
        following = [(name, f"{text}{said} or") for (name, text), said in zip(asked, first, strict=True)]
        return first, ask(answers, [*following, (asked[0][0], f"{asked[0][1]}nother")])

    computed = list[int]()
    expected = turns(answers_of(adapters, bounds=replace(AT_ONCE, rows=1)))
    adapters.caches.forget()
    count_computed(monkeypatch, adapters.engine, computed)
    adapters.caches.most_tokens = 1000
    assert turns(answers_of(adapters)) == expected
    assert len(computed) == 4 and max(computed) <= 12, computed  # a token is a character here
    adapters.caches.forget()
    adapters.caches.most_tokens = 0  # the last text of each model alone is held
    assert turns(answers_of(adapters)) == expected
    assert len(computed) == 4 and sorted(each > 12 for each in computed) == [False, False, True, True], computed


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_row_that_enters_the_batch_does_not_compute_what_its_adapter_has_read(open_set, backend, monkeypatch):
    """Neither its own text so far, nor the beginning that it shares with the last answer of the same adapter."""
    adapters, long, asked = open_set(backend), "a system message of some length", {"temperature": 0, "max_tokens": 6}
    bodies = [{"model": "one", "prompt": f"{long} and a", **asked}, {"model": "one", "prompt": f"{long} or", **asked},
              {"model": "two", "prompt": f"{long} and a", **asked}]  # fmt: skip
    requests = [read_request(json.dumps(body).encode(), is_chat=False) for body in bodies]
    answers = answers_of(adapters, bounds=replace(AT_ONCE, rows=1))
    expected, computed = answered(answers, [*map(answers.submit, requests)]), []
    count_computed(monkeypatch, adapters.engine, computed)
    answers = answers_of(adapters)
    jobs = [answers.submit(requests[0])]
    answers.answer_next()
    answers.answer_next()
    jobs += [*map(answers.submit, requests[1:])]
    for name in ("two", "base"):
        adapters.caches.forget(name)
    assert answered(answers, jobs) == expected
    first, second, third = computed[-3:]
    assert first == second < 6 and third == len(adapters.models["two"].tokenizer.encode_text(bodies[2]["prompt"]))
