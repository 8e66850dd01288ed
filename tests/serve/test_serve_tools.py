"""Tools over HTTP: how they reach the prompt, and how calls in the text of an answer become `tool_calls`.

The engine is made to say a text, token by token, through the chooser of the request.
"""

import shutil

import numpy as np
import pytest

from dualtune.data.chat.conversations import read_messages
from dualtune.data.chat.template import NAMES, WITH_TOOLS
from dualtune.engine.testing.tiny_models import write_softmax_model
from dualtune.model.config_file import vocabulary_size

openai = pytest.importorskip("openai")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name."}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "description": "Now.", "parameters": PARAMETERS}}
BERN, ROME = '{"city": "Bern \\"é\\""}', '{"city": "Rome"}'
ASK = {"role": "user", "content": "?"}


def json_call(arguments, name="weather", key="arguments"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{json_call(each)}\n</tool_call>" for each in calls)


def mistral(*calls):
    return "".join(f"[TOOL_CALLS]weather[CALL_ID]{n}bcdefghi[ARGS]{each}" for n, each in enumerate(calls))


ONE = {
    "chatml": hermes(BERN), "qwen-2.5": hermes(BERN), "qwen-3": hermes(BERN), "mistral-small": mistral(BERN),
    "llama-3.1": json_call(BERN, key="parameters"),
}  # fmt: skip
TWO = {name: mistral(BERN, ROME) if name == "mistral-small" else hermes(BERN, ROME) for name in ONE}
TWO["llama-3.1"] = f"{ONE['llama-3.1']}; {json_call(ROME, key='parameters')}"


@pytest.fixture(scope="session")
def with_marks(tiny_softmax, tmp_path_factory):
    """A model whose tokenizer has special tokens of Mistral."""
    from tokenizers import Tokenizer

    marks, size = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"], vocabulary_size(tiny_softmax)
    path = write_softmax_model(tmp_path_factory.mktemp("models") / "marks", vocab=size + len(marks))
    shutil.copytree(
        tiny_softmax, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json", "*.safetensors")
    )
    rust = Tokenizer.from_file(str(path / "tokenizer.json"))
    rust.add_special_tokens(marks)
    rust.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def client(serve, with_marks):
    """A client of a server with a template, whose model says a text; it also has the prompts that were asked."""

    def start(template, says, **limits):
        served = serve(model=with_marks, template=template, **{"max_tokens": 500, "max_prompt": 100_000} | limits)
        tokenizer = served.server.answers._adapters.models["base"].tokenizer
        prompts = []

        def generate(prompt, *, choose, cache=None):
            prompts.append(tokenizer.decode_all(prompt.tolist()))
            for token in [*tokenizer.encode(says, special=False).tolist(), tokenizer.eos_id]:
                logits = np.full(tokenizer.vocabulary_size, -20, np.float32)
                logits[token] = 20
                chosen = choose(logits)
                if chosen is None:
                    return
                yield chosen

        served.engine.generate = generate
        made = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)

        def ask(*messages, raw=False, **options):
            create = made.chat.completions.with_raw_response.create if raw else made.chat.completions.create
            return create(model="base", messages=list(messages) or [ASK], temperature=0, **options)

        ask.prompts, ask.tokenizer = prompts, tokenizer
        return ask

    return start


def streamed(chunks):
    """What a client puts together of a stream: the content, the calls by index, and why it ended."""
    content, calls, reason = "", {}, None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
        reason = choice.finish_reason or reason
    return content, [calls[index] for index in sorted(calls)], reason


def whole(answer):
    (choice,) = answer.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content, calls, choice.finish_reason


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("text", [ONE, TWO], ids=["one call", "two calls"])
def test_calls_of_each_template_are_returned_and_streamed(client, name, text):
    ask = client(name, text[name])
    expected = [("weather", each) for each in ((BERN,) if text is ONE else (BERN, ROME))]
    answer = ask(tools=[WEATHER, TIME])
    assert whole(answer) == (None, expected, "tool_calls")
    ids = [call.id for call in answer.choices[0].message.tool_calls]
    assert len(set(ids)) == len(ids) and (name != "mistral-small" or ids[0] == "0bcdefghi")
    assert streamed(ask(tools=[WEATHER, TIME], stream=True)) == ("", expected, "tool_calls")
    assert whole(ask(tools=[WEATHER, TIME], parallel_tool_calls=False))[1] == expected[:1]


def test_of_a_list_of_calls_only_the_first_is_returned_if_one_is_allowed(client, tmp_path):
    (tmp_path / "list.jinja").write_text(
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.tool_calls %}CALLS "
        "{{ m.tool_calls | map(attribute='function') | list | tojson }}{% else %}{{ m.content }}{% endif %}</s>"
        "{% endfor %}"
    )
    ask = client(str(tmp_path / "list.jinja"), f"CALLS [{json_call(BERN)}, {json_call(ROME)}]")
    assert whole(ask(tools=[WEATHER])) == (None, [("weather", BERN), ("weather", ROME)], "tool_calls")
    assert whole(ask(tools=[WEATHER], parallel_tool_calls=False)) == (None, [("weather", BERN)], "tool_calls")


@pytest.mark.parametrize("name", sorted({*WITH_TOOLS} - {"llama-3.1"}))
def test_what_is_said_beside_a_call_is_content(client, name):
    ask = client(name, "Let me see [1].\n\n" + ONE[name])
    assert whole(ask(tools=[WEATHER])) == ("Let me see [1].", [("weather", BERN)], "tool_calls")
    assert streamed(ask(tools=[WEATHER], stream=True)) == ("Let me see [1].", [("weather", BERN)], "tool_calls")


@pytest.mark.parametrize("text", [
    "A < b and [no] {call}.", '<tool_call>\n{"name": "weather", "argu', "<tool_call>\nnothing\n</tool_call>", "<tool",
    '{"name": "other", "parameters": {}}', '{"a": 1}', "\n\nHi\n",
])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen-2.5", "llama-3.1"])
def test_a_text_without_a_whole_call_is_content(client, name, text):
    ask = client(name, text)
    assert whole(ask(tools=[WEATHER])) == (text, [], "stop")
    assert streamed(ask(tools=[WEATHER], stream=True)) == (text, [], "stop")
    assert whole(ask(tools=[WEATHER], max_tokens=len(text.encode()) - 1))[2] == "length"


def test_tools_reach_the_prompt_as_in_training(client):
    ask = client("qwen-2.5", "Hi")
    ask(tools=[WEATHER])
    messages = read_messages([ASK], "messages")
    assert ask.prompts[-1] == ask.tokenizer.render(messages, tools=[WEATHER], add_generation_prompt=True)
    for none in ({"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}, {}):
        assert whole(ask(**none)) == ("Hi", [], "stop")
        assert ask.prompts[-1] == ask.tokenizer.render(messages, add_generation_prompt=True)


def test_without_tools_a_call_in_the_text_stays_text(client):
    ask = client("qwen-2.5", ONE["qwen-2.5"])
    assert whole(ask()) == (ONE["qwen-2.5"], [], "stop")
    assert whole(ask(tools=[WEATHER], tool_choice="none")) == (ONE["qwen-2.5"], [], "stop")


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_conversation_goes_on_with_the_result(client, name):
    ask = client(name, ONE[name])
    answer = ask(tools=[WEATHER]).choices[0].message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "Sunny"}
    ask(ASK, answer, result, tools=[WEATHER])
    assert "Sunny" in ask.prompts[-1] and BERN in ask.prompts[-1]
    by_hand = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": BERN}}]}  # fmt: skip
    ask(ASK, by_hand, {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Rain"}]})
    assert "Rain" in ask.prompts[-1] and BERN in ask.prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_choice_of_a_function_is_honoured(client, name, stream):
    """The answer is begun for the model, which goes on with the arguments."""
    ask = client(name, BERN + ("" if name == "mistral-small" else "}"))
    answer = ask(tools=[WEATHER, TIME], tool_choice={"type": "function", "function": {"name": "time"}}, stream=stream)
    found = streamed(answer) if stream else whole(answer)
    assert found == ("" if stream else None, [("time", BERN)], "tool_calls")
    begun = ask.prompts[-1].removeprefix(ask.tokenizer.render(
        read_messages([ASK], "messages"), tools=[WEATHER, TIME], add_generation_prompt=True))  # fmt: skip
    assert "time" in begun and len(begun) < 70


def test_a_required_call_begins_for_the_model_and_ends_when_it_is_whole(client):
    ask = client("qwen-2.5", f'weather", "arguments": {BERN}}}\n</tool_call> and so on')
    assert whole(ask(tools=[WEATHER, TIME], tool_choice="required")) == (None, [("weather", BERN)], "tool_calls")
    assert ask.prompts[-1].endswith('<|im_start|>assistant\n<tool_call>\n{"name": "')
    named = {"type": "function", "function": {"name": "weather"}}
    ask = client("qwen-2.5", f"{BERN}}} and so on")
    assert streamed(ask(tools=[WEATHER], tool_choice=named, stream=True)) == ("", [("weather", BERN)], "tool_calls")
    assert whole(ask(tools=[WEATHER], tool_choice="required")) == (None, [("weather", BERN)], "tool_calls")  # the only
    ask = client("qwen-2.5", "I will not.")
    with pytest.raises(openai.InternalServerError, match="arguments are not"):
        ask(tools=[WEATHER], tool_choice="required")


@pytest.mark.parametrize(
    ("says", "name"), [("time", "time"), ("weather_at", "weather_at"), ("we", "weather"), ("zzzz", "time")]
)
def test_a_required_call_is_of_one_of_the_functions_whatever_the_model_would_write(client, says, name):
    at = {"type": "function", "function": {"name": "weather_at", "parameters": PARAMETERS}}
    begin = f'{name}", "arguments": '
    says = says + "z" * (len(name) - len(says)) + begin[len(name) :]
    ask = client("qwen-2.5", f"{says}{BERN}}}")
    assert whole(ask(tools=[WEATHER, TIME, at], tool_choice="required")) == (None, [(name, BERN)], "tool_calls")


GLM = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + '\\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    "{{ v if v is string else v | tojson }}{{ '</arg_value>\\n' }}{% endfor %}</tool_call>{% endfor %}{{ m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)  # fmt: skip
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "string"}}}}}  # fmt: skip
ARGUMENTS = "<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n"
ADDED = f"<tool_call>add\n{ARGUMENTS}</tool_call>"


@pytest.mark.parametrize("text", [ADDED, "[add(a=2, b='3')]"])
def test_calls_without_json_are_returned_with_the_types_of_their_tool(client, tmp_path, text):
    (tmp_path / "glm.jinja").write_text(GLM)
    ask = client(str(tmp_path / "glm.jinja"), f"So:\n{text}\n{text}")
    expected = [("add", '{"a": 2, "b": "3"}')] * 2
    assert whole(ask(tools=[ADD])) == ("So:", expected, "tool_calls")
    assert streamed(ask(tools=[ADD], stream=True)) == ("So:", expected, "tool_calls")


def test_a_call_streams_when_it_closes(client, tmp_path):
    """Its deltas come before the text that the model says behind it, and that one before the next call."""
    (tmp_path / "glm.jinja").write_text(GLM)
    ask = client(str(tmp_path / "glm.jinja"), f"A {ADDED} B {ADDED}")
    came = []
    for chunk in ask(tools=[ADD], stream=True):
        delta = chunk.choices[0].delta
        came += [call.index for call in delta.tool_calls or []] if delta.tool_calls else [delta.content]
    assert [each for each in came if each] == ["A", "B", 1, 1] and came.index(0) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_without_json_can_be_required(client, tmp_path, choice):
    (tmp_path / "glm.jinja").write_text(GLM)
    says = ADDED.removeprefix("<tool_call>add\n")
    ask = client(str(tmp_path / "glm.jinja"), says if choice != "required" else f"add\n{says}")
    tools = [ADD] if choice != "required" else [ADD, TIME]
    assert whole(ask(tools=tools, tool_choice=choice)) == (None, [("add", '{"a": 2, "b": "3"}')], "tool_calls")


def test_a_template_that_writes_no_calls_reads_those_in_a_text_and_can_require_none(client, tmp_path):
    (tmp_path / "silent.jinja").write_text(
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    ask = client(str(tmp_path / "silent.jinja"), "[add(a=2, b='3')]")
    assert whole(ask(tools=[ADD])) == (None, [("add", '{"a": 2, "b": "3"}')], "tool_calls")
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ask(tools=[ADD], tool_choice="required")


@pytest.mark.parametrize(("options", "param"), [
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"logit_bias": {"5": 1}}, "logit_bias"), ({"n": 2}, "n"), ({"presence_penalty": -3}, "presence_penalty"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"reasoning_effort": "high"}, "reasoning_effort"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(client, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        client("qwen-2.5", "Hi")(**options)
    assert error.value.param.startswith(param)


CALLED = {"role": "assistant", "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]}  # fmt: skip


@pytest.mark.parametrize(("messages", "param"), [
    ([ASK, {"role": "assistant", "content": None}], "messages.1.content"),
    ([{"role": "user", "content": None}], "messages.0.content"),
    ([ASK, {"role": "tool", "content": "x", "tool_call_id": "a"}], "messages.1.role"),
    ([ASK, CALLED, {"role": "tool", "content": "x", "tool_call_id": "b"}], "messages.2.tool_call_id"),
    ([ASK | {"tool_calls": CALLED["tool_calls"]}], "messages.0.tool_calls"),
    ([ASK, {"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}]}], "messages"),
])  # fmt: skip
def test_messages_that_cannot_be_are_refused_by_name(client, messages, param):
    with pytest.raises(openai.BadRequestError) as error:
        client("qwen-2.5", "Hi")(*messages)
    assert error.value.param == param


@pytest.mark.parametrize("name", sorted({*NAMES} - {*WITH_TOOLS}))
def test_a_template_without_tools_names_those_with_some(client, name):
    with pytest.raises(openai.BadRequestError, match=f"{', '.join(WITH_TOOLS)}, or a Jinja file"):
        client(name, "Hi")(tools=[WEATHER])


def test_what_clients_send_by_default_is_accepted_and_what_has_no_effect_is_named(client):
    ask = client("qwen-2.5", "Hi")
    usual = {"n": 1, "logprobs": False, "user": "me", "stop": None, "seed": 1, "parallel_tool_calls": True,
             "store": False, "response_format": {"type": "text"}, "frequency_penalty": 0, "presence_penalty": 0.0,
             "logit_bias": {}, "service_tier": "auto", "max_completion_tokens": 20, "modalities": ["text"]}  # fmt: skip
    answer = ask(raw=True, **usual)
    assert "x-dualtune-ignored" not in answer.headers and whole(answer.parse()) == ("Hi", [], "stop")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for stream in (False, True):
        answer = ask(raw=True, stream=stream, metadata={"a": "b"}, store=True, tools=[strict])
        assert answer.headers["x-dualtune-ignored"] == "metadata, store, tools.function.strict"
        assert (streamed(answer.parse()) if stream else whole(answer.parse())) == ("Hi", [], "stop")


@pytest.mark.parametrize(("penalties", "second"), [
    ({}, 70), ({"frequency_penalty": 1.0}, 80), ({"presence_penalty": 1.0}, 80), ({"frequency_penalty": -1.0}, 70),
])  # fmt: skip
def test_penalties_count_the_tokens_of_the_answer(serve, penalties, second):
    served = serve()
    logits = np.zeros(served.server.answers._adapters.models["base"].tokenizer.vocabulary_size, np.float32)
    logits[[70, 80]] = 1.5, 1.0
    tokens = []

    def generate(prompt, *, choose, cache=None):
        for _ in range(2):
            tokens.append(choose(logits))
            yield tokens[-1]

    served.engine.generate = generate
    status, _ = served.ask(
        {"model": "base", "prompt": "a", "temperature": 0, "max_tokens": 2, **penalties}, "/v1/completions"
    )
    assert (status, tokens) == (200, [70, second])
