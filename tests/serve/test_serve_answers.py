"""What a server answers: the text of `dualtune generate`, in the form of OpenAI's API."""

import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, write_adapter
from dualtune.train.generation.inference import StopTexts, load_model, stream_text
from dualtune.train.generation.sampling import Sampling

PROMPT = "1 plus 1?"


@pytest.fixture
def adapter(tmp_path):
    """An adapter of `tiny_llama` that changes much."""
    rng, shapes = np.random.default_rng(0), {"model.layers.0.self_attn.q_proj": (32, 32)}
    tensors = {n: rng.normal(0, 0.5, t.shape).astype(np.float32) for n, t in init_adapter(shapes, 2, 0).items()}
    write_adapter(tmp_path / "tuned", Adapter(AdapterSpec(2, 40.0, 0.0, (*shapes,)), tensors))
    return tmp_path / "tuned"


def generated(backend, model, adapter=None):
    loaded = load_model(backend, str(model), adapter)
    ids = loaded.tokenizer.encode_prompt(PROMPT)
    return "".join(stream_text(loaded, ids, Sampling(5))), len(ids)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_openai_client_gets_what_generate_prints(serve, open_backend, tiny_llama, adapter, backend):
    openai = pytest.importorskip("openai")
    served = serve(backend, tiny_llama, {"tuned": adapter})
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["base", "tuned"]
    assert client.models.retrieve("tuned").id == "tuned"
    with pytest.raises(openai.NotFoundError, match="got 'other', there are: base, tuned"):
        client.models.retrieve("other")
    texts = {}
    for name, directory in (("base", None), ("tuned", adapter), ("base", None)):
        asked = {"model": name, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "temperature": 0}
        found = client.chat.completions.create(**asked)
        texts[name], length = generated(open_backend(backend), tiny_llama, directory)
        assert found.choices[0].message.content == texts[name]
        assert (found.choices[0].finish_reason, found.usage.prompt_tokens) == ("length", length)
        assert (found.usage.completion_tokens, found.usage.total_tokens) == (5, length + 5)
        *parts, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        assert "".join(part.choices[0].delta.content or "" for part in parts) == texts[name]
        assert parts[-1].choices[0].finish_reason == "length" and last.usage.completion_tokens == 5
    assert texts["base"] != texts["tuned"]
    with pytest.raises(openai.NotFoundError, match="got 'other', there are: base, tuned"):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])


def test_a_text_is_continued_and_ends_at_a_stop_text(serve):
    served = serve()
    asked = {"model": "base", "prompt": "ab", "max_tokens": 12, "temperature": 0}
    status, found = served.ask(asked, "/v1/completions")
    whole = found["choices"][0]["text"]
    assert (status, found["object"], found["choices"][0]["finish_reason"]) == (200, "text_completion", "length")
    asked["stop"] = [whole[-1] + "never"]  # what may be the beginning of a stop text is not lost
    assert served.ask(asked, "/v1/completions")[1]["choices"][0]["text"] == whole
    asked["stop"] = [whole[4:6], "never"]
    _, cut = served.ask(asked, "/v1/completions")
    _, stream = served.ask(asked | {"stream": True}, "/v1/completions")
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    expected = (whole[: whole.index(whole[4:6])], "stop")
    assert (cut["choices"][0]["text"], cut["choices"][0]["finish_reason"]) == expected
    assert ("".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]) == expected


def test_samples_differ_by_seed_and_the_limit_of_the_server_holds(serve, hello):
    served = serve(max_tokens=8)
    sampled = hello | {"max_tokens": 100, "temperature": 2.0}
    texts = [served.ask(sampled | {"seed": seed})[1]["choices"][0]["message"]["content"] for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert served.ask(sampled)[1]["usage"]["completion_tokens"] <= 8
    free = [served.ask(sampled)[1]["choices"][0]["message"]["content"] for _ in range(2)]  # without a seed
    assert free[0] != free[1]


def test_an_answer_ends_when_its_time_is_over(serve, hello):
    _, found = serve(time_limit_s=0).ask(hello)
    assert found["choices"][0]["finish_reason"] == "length" and found["usage"]["completion_tokens"] < 5


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_stop_text_is_found_however_the_text_is_cut(size):
    text = "one two END three"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for stops, expected in ((("END",), "one two "), (("EN ", "two END t"), "one "), (("ENDE",), text), ((), text)):
        cut, shown = StopTexts(stops), ""
        for piece in pieces:
            shown += cut.feed(piece)
            if cut.found:
                break
        assert shown + cut.rest() == expected and cut.found == (expected != text)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_of_stop_texts_that_overlap_the_one_that_is_complete_first_ends_the_text(size):
    cut, shown = StopTexts(("abcd", "bc", "d")), ""
    for at in range(0, 5, size):
        shown += "" if cut.found else cut.feed("xabcd"[at : at + size])
    assert cut.found and shown == "xa"


def test_the_command_serves_until_it_is_asked_to_stop(tiny_softmax):
    command = [sys.executable, "-m", "dualtune", "serve", str(tiny_softmax), "--port", "0", "--platform", "numpy"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        process.terminate()
        assert line.startswith("serving     base at http://127.0.0.1:"), process.stderr.read()
        assert process.wait() == 0 and "stopped" in process.stderr.read()


def test_another_address_needs_a_key(dualtune_main, tiny_softmax, monkeypatch, wording):
    monkeypatch.delenv("DUALTUNE_API_KEY", raising=False)
    result = dualtune_main("serve", tiny_softmax, "--host", "0.0.0.0", "--platform", "numpy")
    assert result.returncode == 2
    wording(result.stderr)


def test_a_host_that_is_none_is_not_a_matter_of_the_port(dualtune_main, tiny_softmax, monkeypatch):
    monkeypatch.setenv("DUALTUNE_API_KEY", "key")
    result = dualtune_main("serve", tiny_softmax, "--host", "192.0.2.1", "--platform", "numpy")  # of documentation
    assert result.returncode == 4 and "Give an address of this machine, such as 127.0.0.1" in result.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = dualtune_main("serve", tiny_softmax, "--port", taken.getsockname()[1], "--platform", "numpy")
    assert result.returncode == 4 and "Choose another port" in result.stderr


def test_a_conversation_without_a_system_message_gets_that_of_the_training(serve):
    """Its prompt is longer by exactly that turn; a conversation with one of its own, or of another model, stays."""
    user, system = {"role": "user", "content": "1 plus 1?"}, {"role": "system", "content": "Add."}
    plain, trained, other = serve(), serve(systems={"base": "Add."}), serve(systems={"another": "Add."})

    def tokens(served, *messages):
        status, answer = served.ask({"model": "base", "messages": messages, "max_tokens": 1})
        assert status == 200
        return answer["usage"]["prompt_tokens"]

    assert tokens(trained, user) == tokens(plain, system, user) > tokens(plain, user)
    own = {"role": "developer", "content": "Subtract!"}
    assert tokens(trained, own, user) == tokens(plain, own, user) != tokens(trained, user)
    assert tokens(other, user) == tokens(plain, user)
