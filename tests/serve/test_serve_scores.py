"""Prompts that are scored, not continued, and a teacher that is asked so."""

import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.config.schema import DistillConfig
from dualtune.data.batches import make_batch
from dualtune.data.documents import in_memory
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.show.run import run
from dualtune.train.fingerprints import plain_batch
from dualtune.train.objectives import served_teacher
from dualtune.train.objectives.served_teacher import ServedTeacher, TeacherLost
from dualtune.train.objectives.teachers import top_logprobs_of

SCORED = {"model": "base", "prompt": "Hello you", "echo": True, "max_tokens": 0}


def scored(served, **changes):
    return served.ask(SCORED | changes, path="/v1/completions")


def test_a_prompt_is_scored_by_its_text_or_its_tokens(serve):
    served = serve()
    tokenizer = served.server.answers._adapters.models["base"].tokenizer
    ids = tokenizer.encode_text("Hello you")
    logprobs_TV = served.engine.logprobs(plain_batch(ids))[0]
    status, answer = scored(served, logprobs=3)
    (choice,) = answer["choices"]
    said = choice["logprobs"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "Hello you", "length")
    assert answer["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
    assert "".join(said["tokens"]).endswith("Hello you") and said["text_offset"][1] == len(said["tokens"][0])
    assert said["token_logprobs"][0] is None and said["top_logprobs"][0] is None
    np.testing.assert_allclose(
        said["token_logprobs"][1:], logprobs_TV[np.arange(len(ids) - 1), ids[1:]], atol=1e-6
    )  # fmt: skip
    status, answer = scored(served, prompt=ids.tolist(), logprobs=3, return_tokens_as_token_ids=True)
    by_id = answer["choices"][0]["logprobs"]
    assert by_id["token_logprobs"] == said["token_logprobs"]
    assert by_id["tokens"] == [f"token_id:{id}" for id in ids]
    for place, top in enumerate(by_id["top_logprobs"][1:]):
        likely = np.argsort(-logprobs_TV[place])[:3]
        assert {f"token_id:{id}" for id in [*likely, ids[place + 1]]} == top.keys()
    assert scored(served)[1]["choices"][0]["logprobs"]["top_logprobs"] is None
    assert scored(served, prompt=ids.tolist(), max_tokens=2, echo=None)[1]["usage"]["completion_tokens"] == 2


def test_an_answer_has_the_logprobs_of_its_tokens(serve, hello):
    served = serve()
    tokenizer = served.server.answers._adapters.models["base"].tokenizer
    asked = {"max_tokens": 4, "temperature": 0.7, "seed": 3}
    _, answer = scored(served, **asked, echo=False, logprobs=2, return_tokens_as_token_ids=True)
    said, prompt = answer["choices"][0]["logprobs"], tokenizer.encode_text("Hello you")
    ids = [int(token.removeprefix("token_id:")) for token in said["tokens"]]
    logprobs_TV = served.engine.logprobs(plain_batch(np.array([*prompt, *ids], np.int32)))[0, len(prompt) - 1 : -1]
    assert len(ids) == 4 == answer["usage"]["completion_tokens"]
    np.testing.assert_allclose(said["token_logprobs"], logprobs_TV[np.arange(4), ids], atol=1e-6)
    for id, top, values_V in zip(ids, said["top_logprobs"], logprobs_TV, strict=True):
        assert {f"token_id:{each}" for each in [*np.argsort(-values_V)[:2], id]} == top.keys()
    _, answer = served.ask(hello | asked | {"logprobs": True, "top_logprobs": 2})
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 4 and all(len(each["top_logprobs"]) == 2 for each in content)
    assert {bytes(each["bytes"] or each["token"].encode()).decode() == each["token"] for each in content} == {True}
    assert all(each["logprob"] <= each["top_logprobs"][0]["logprob"] for each in content)
    assert served.ask(hello | asked)[1]["choices"][0]["logprobs"] is None
    assert served.ask(hello | {"top_logprobs": 2})[0] == served.ask(hello | {"top_logprobs": 21})[0] == 400


def streamed(served, body, path):
    """The choices of the events of a stream."""
    _, stream = served.ask(body | {"stream": True}, path)
    *events, end = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert end == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


@pytest.mark.parametrize("asked", [
    {"logprobs": 2}, {"logprobs": 0}, {"logprobs": 1, "return_tokens_as_token_ids": True},
    {"logprobs": 2, "return_tokens_as_token_ids": True, "ends": 4}, {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "ends": 4},
])  # fmt: skip
def test_a_stream_has_the_logprobs_of_the_whole_answer_each_with_its_text(serve, hello, asked):
    """`ends`: with a stop text from that character on."""
    served, is_chat = serve(), asked["logprobs"] is True
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body = (hello if is_chat else {"model": "base", "prompt": "ab"}) | {"max_tokens": 12, "temperature": 0} | asked
    ends = body.pop("ends", None)

    def text_of(choice):
        return choice.get("message", choice.get("delta", {})).get("content", "") if is_chat else choice["text"]

    if ends is not None:
        whole = text_of(served.ask(body, path)[1]["choices"][0])
        body["stop"] = [whole[ends : ends + 2], whole[1:3] + "never"]
    whole, events = served.ask(body, path)[1]["choices"][0], streamed(served, body, path)
    tables = [event["logprobs"] for event in events if event["logprobs"] is not None]
    joined = {key: [each for table in tables for each in table[key] or ()] for key in tables[0]}
    assert joined == {key: values or [] for key, values in whole["logprobs"].items()}
    assert "".join(map(text_of, events)) == text_of(whole) and len(tables) > 1
    ids, told, decode = list[int](), "", served.server.answers._adapters.models["base"].tokenizer.decode
    for event in events if "return_tokens_as_token_ids" in body else ():
        ids += [int(token.removeprefix("token_id:")) for token in (event["logprobs"] or {"tokens": []})["tokens"]]
        told += text_of(event)
        held = decode(ids).removeprefix(told)  # half a character, or what may become a stop text
        assert decode(ids).startswith(told) and (len(held) < 4 if ends else set(held) <= {"\ufffd"})


def test_the_openai_client_reads_the_logprobs_of_a_stream(serve, hello):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{serve().port}/v1", api_key="none", max_retries=0)
    chat = hello | {"logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**chat).choices[0].logprobs.content
    parts = [event.choices[0].logprobs for event in client.chat.completions.create(**chat, stream=True)]
    assert [each for part in parts if part for each in part.content] == whole and len(whole) == 5
    text = {"model": "base", "prompt": "ab", "max_tokens": 5, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**text).choices[0].logprobs
    parts = [event.choices[0].logprobs for event in client.completions.create(**text, stream=True)]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts if part for each in getattr(part, key)] == getattr(whole, key)


@pytest.mark.parametrize(("changes", "word"), [
    ({"max_tokens": 2}, "echo"), ({"echo": False}, "echo"), ({"stream": True}, "stream"),
    ({"logprobs": 257}, "logprobs"), ({"prompt": [10**6]}, "prompt"), ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
])  # fmt: skip
def test_what_cannot_be_scored_is_refused(serve, changes, word):
    status, answer = scored(serve(), **changes)
    assert status == 400 and answer["error"]["message"].startswith(word)


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_served_teacher_says_what_its_engine_says(serve, top_k):
    served = serve()
    tokenizer = served.server.answers._adapters.models["base"].tokenizer
    teacher = ServedTeacher(DistillConfig(teacher=f"http://127.0.0.1:{served.port}/v1", top_k=top_k), tokenizer)
    teacher.start(served.engine, None)
    rng = np.random.default_rng(0)
    documents = in_memory((rng.integers(5, 60, n).astype(np.int32), np.arange(n) >= n // 2) for n in (9, 4, 6))
    batch = make_batch(documents, [[0], [1], [2]], seed=0, step=0)
    tokens, logprobs = teacher(batch, top_k)
    expected_tokens, expected = top_logprobs_of(served.engine)(batch, top_k)
    assert tokens.shape == expected.shape
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_a_run_learns_from_a_served_teacher_what_it_learns_from_a_loaded_one(
    serve, open_backend, make_config, write_rows, tiny_softmax, tmp_path
):
    served, backend = serve(), open_backend("numpy")
    data = write_rows([{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(8)], "asked.jsonl")
    options = {
        "train.objective": "on_policy_distill", "train.steps": 3, "train.documents_per_step": 2, "adapter.dropout": 0.0,
        "rollouts.max_tokens": 4, "rollouts.samples": 2, "data.eval": 0, "distill.top_k": 4, "run.report": False,
    }  # fmt: skip

    def weights(name, teacher):
        values = {**options, "run.dir": tmp_path / name, "distill.teacher": teacher}
        result = run(make_config(data, values, tiny_softmax), backend)
        losses = [json.loads(line).get("loss") for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [loss for loss in losses if loss is not None]

    address = f"http://127.0.0.1:{served.port}/v1"
    losses = weights("loaded", str(tiny_softmax)), weights("served", address)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)

    # The run knows the teacher again by what it says, at the name that it had.
    options["train.steps"] = 4
    served.engine._weights["head.weight"] *= 1.5
    with pytest.raises(ConfigError, match=r"another model under this name .* differ by \d"):
        weights("served", address)
    served.engine._weights["head.weight"] /= 1.5
    assert weights("served", address)[:3] == losses[1]


def test_a_server_that_cannot_say_it_is_named(serve, monkeypatch):
    monkeypatch.setattr(served_teacher, "PAUSES_S", (0.0,))
    served = serve(key="secret")
    tokenizer = served.server.answers._adapters.models["base"].tokenizer
    settings = DistillConfig(teacher=f"http://127.0.0.1:{served.port}/v1")
    with pytest.raises(EnvironmentFault, match="401"):
        ServedTeacher(settings, tokenizer).start(served.engine, None)
    monkeypatch.setenv(served_teacher.KEY, "secret")
    with pytest.raises(ConfigError, match="served_as: got other"):
        ServedTeacher(settings.model_copy(update={"served_as": "other"}), tokenizer).start(served.engine, None)
    teacher = ServedTeacher(settings, tokenizer)
    teacher.start(served.engine, None)
    others = ({"token_logprobs": [None]}, {"token_logprobs": [None, -1.0], "top_logprobs": [None, {"a": -1.0}]}, None)
    for answer in ({}, {"choices": []}, *({"choices": [{"logprobs": each}]} for each in others)):
        monkeypatch.setattr(teacher, "_asked", lambda *_, answer=answer: answer)
        with pytest.raises(EnvironmentFault, match="return_tokens_as_token_ids"):
            teacher._scored([5, 6], 1)


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(("said", "told"), [
    (ANSWER + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{", "IncompleteRead"),
    (ANSWER + b"Content-Length: 100\r\n\r\n{", "Expecting"),
    (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH"), (b"", "closed connection"),
    (ANSWER + b"Content-Length: 2\r\n\r\n[]", "not a JSON object"), (None, "nothing came for 0.2 s"),
    (..., "after 0.5 s it has sent [1-9][0-9]* bytes, and no end"),
])  # fmt: skip
def test_a_server_that_dies_while_it_answers_or_is_too_slow_is_asked_again_and_then_named(
    tiny_softmax, said, told, monkeypatch
):
    """`said`: what it says before it closes the connection; None: nothing, and it stays open; ...: it never ends."""
    monkeypatch.setattr(served_teacher, "PAUSES_S", (0.0,))
    monkeypatch.setattr(served_teacher, "SILENCE_S", 0.2 if said is None else 60.0)
    monkeypatch.setattr(served_teacher, "ANSWER_S", 0.5)
    asked, kept = [], []

    def answer(server):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                asked.append(connection.recv(1 << 16))
                if said is None:
                    kept.append(connection)
                    continue
                connection.sendall(ANSWER + b"\r\n" if said is ... else said)
                with contextlib.suppress(OSError):  # until its client goes
                    while said is ...:
                        connection.sendall(b" ")
                        time.sleep(0.05)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        teacher = ServedTeacher(DistillConfig(teacher=address), Tokenizer(tiny_softmax, "none"))
        with pytest.raises(TeacherLost, match=f"{told}.*The run begins, or resumes"):
            teacher.start(None, None)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in kept:
        connection.close()
    assert len(asked) == 2 and all(each.startswith(b"GET /v1/models") for each in asked)
