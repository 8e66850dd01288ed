"""Environments of the package `verifiers`, in a process of their own: `python -m dualtune.train.rl.verifiers_process`.

An environment asks an OpenAI-compatible chat server, whatever the version of the package. The one here answers this
process alone: on the loopback, under a path that only this process knows, one for each conversation. It passes a
request on to the run, which draws the answer (`package_environments.py`).

There are two kinds. `load_environment` of verifiers 0.1 to 0.3 returns an environment with a rubric, which rewards the
conversations of a prompt together; verifiers 0.4 has task sets, whose tasks reward each alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, cast

from dualtune.base.errors import ConfigError
from dualtune.base.http_server import ApiHandler, ApiServer, BadRequest, json_object
from dualtune.train.rl.environments import KEY
from dualtune.train.rl.isolated import Answer, serve

MODEL = "policy"  # the name that requests ask for
INSTALL = "pip install 'dualtune[verifiers]'"
MAX_BODY = 1 << 24  # bytes of a request: a whole conversation
MAX_REQUESTS = 4096  # that wait at the same time: those of all conversations of a step
CHAT = "/chat/completions"
SESSION = "X-Session-ID"  # a header in which verifiers 0.4 names the conversation

Reply = Mapping[str, Any]


# ----------------------------------------------------------------------------------------------------------------------
# Conversations.


class LedConversation:
    """A conversation on its way. Requests that the run has answered before get that answer again, at once."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.replies = [*replies]
        self.waiting: deque[tuple[Mapping[str, Any], Future[Reply]]] = deque()
        self.task: asyncio.Task[Any] | None = None
        self._num_told = 0
        self._changed = asyncio.Event()

    def begin(self, work: Awaitable[Any]) -> None:
        self.task = asyncio.ensure_future(work)
        self.task.add_done_callback(lambda _: self._changed.set())

    def ask(self, body: Mapping[str, Any], reply: Future[Reply]) -> None:
        if self._num_told < len(self.replies):
            self._tell(reply)
        else:
            self.waiting.append((body, reply))
            self._changed.set()

    def go_on(self, reply: Reply) -> None:
        """Answer the request that has waited for longest."""
        self.replies.append(reply)
        self._tell(self.waiting.popleft()[1])

    def _tell(self, reply: Future[Reply]) -> None:
        self._num_told += 1
        reply.set_result(self.replies[self._num_told - 1])

    async def rest(self) -> None:
        """Wait until it asks, or has ended."""
        while not self.waiting and not (self.task and self.task.done()):
            self._changed.clear()
            await self._changed.wait()

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
        for _, reply in self.waiting:
            reply.cancel()


@dataclass(frozen=True, slots=True)
class Way:
    """How an environment reaches the run: a URL for its conversation, or one for all and the names of its sessions."""

    url: str
    shared_url: str
    name_session: Callable[[str], None]


class Environment(Protocol):
    """An environment of one of the kinds."""

    def rows(self, split: str) -> list[dict[str, Any]]: ...
    async def lead(self, row: Mapping[str, Any], way: Way) -> Any: ...
    def problem(self, result: Any) -> str: ...
    def is_whole(self, result: Any) -> bool: ...
    async def rewards(self, results: Sequence[Any]) -> list[float]: ...


class LedConversations:
    """The conversations of a step. One that is missing, or is elsewhere, is led there by the answers that it got."""

    def __init__(self, environment: Environment, loop: asyncio.AbstractEventLoop) -> None:
        self._environment, self._loop = environment, loop
        self._live: dict[str, LedConversation] = {}
        self._paths: dict[str, LedConversation] = {}  # by the secret of a URL, or the name of a session
        self._shared = secrets.token_urlsafe(16)
        self._server = Endpoint(self)

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if "rows" in request:
            return {"rows": self._environment.rows(request["rows"])}
        if "forget" in request:
            self._loop.run_until_complete(self._forget())
            return {}
        work = {"advance": self._advance, "reward": self._reward}[request["kind"]]
        return self._loop.run_until_complete(_each_in_time(work, request["items"], request["timeout_s"]))

    def submit(self, path: str, session: str, body: Mapping[str, Any]) -> Future[Reply]:
        """Pass on a request, from the thread of its connection. BadRequest 404 for one of no conversation."""
        name = session if path == self._shared else path
        conversation = self._paths.get(name)
        if conversation is None:
            raise BadRequest(404, "there is no such conversation")
        reply: Future[Reply] = Future()
        self._loop.call_soon_threadsafe(conversation.ask, body, reply)
        return reply

    async def _advance(self, name: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
        conversation = self._led(name, item)
        await conversation.rest()
        if conversation.waiting:
            return {"request": conversation.waiting[0][0]}
        result = conversation.task.result()  # pyright: ignore[reportOptionalMemberAccess]
        if problem := self._environment.problem(result):
            return {"problem": problem}
        return {"is_whole": self._environment.is_whole(result)}

    async def _reward(self, _: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
        members = {name: self._led(name, member) for name, member in item["members"].items()}
        for conversation in members.values():
            await conversation.rest()
        results = [conversation.task.result() for conversation in members.values()]  # pyright: ignore[reportOptionalMemberAccess]
        return {"rewards": dict(zip(members, await self._environment.rewards(results), strict=True))}

    def _led(self, name: str, item: Mapping[str, Any]) -> LedConversation:
        conversation, replies = self._live.get(name), item["replies"]
        if conversation is not None and len(conversation.replies) == len(replies):
            return conversation
        if conversation is not None and conversation.waiting and len(conversation.replies) == len(replies) - 1:
            conversation.go_on(replies[-1])
            return conversation
        if conversation is not None:
            conversation.cancel()
        conversation = self._live[name] = LedConversation(replies)
        path = secrets.token_urlsafe(16)

        def named(session: str) -> None:
            self._paths[session] = conversation

        named(path)
        way = Way(self._server.url(path), self._server.url(self._shared), named)
        conversation.begin(self._environment.lead(item["row"], way))
        return conversation

    async def _forget(self) -> None:
        for conversation in self._live.values():
            conversation.cancel()
        tasks = [conversation.task for conversation in self._live.values() if conversation.task]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._live.clear()
        self._paths.clear()


async def _each_in_time(
    work: Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]], items: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    """Return the result of the work on each item; null where it is not done in time."""
    tasks = {name: asyncio.ensure_future(work(name, item)) for name, item in items.items()}
    await asyncio.wait(tasks.values(), timeout=timeout_s)
    results = dict[str, Any]()
    for name, task in tasks.items():
        if not task.done():
            task.cancel()
            results[name] = None
        elif error := task.exception():
            results[name] = {"problem": described(error)}
        else:
            results[name] = task.result()
    return results


def described(error: BaseException) -> str:
    """Return an error of the package with what has caused it."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return ", by ".join(f"{type(each).__name__}: {each}"[:500] for each in causes)


# ----------------------------------------------------------------------------------------------------------------------
# The chat server.


class Endpoint(ApiServer):
    """The chat server of this process."""

    def __init__(self, conversations: LedConversations) -> None:
        self.conversations = conversations
        super().__init__("127.0.0.1", 0, EndpointHandler, key=None, tell=lambda line: None)
        self.max_connections = MAX_REQUESTS
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{path}/v1"


class EndpointHandler(ApiHandler):
    """One request: a connection carries no other, because none may be waited for while the conversations stand."""

    server: Endpoint  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        self.answer_with(self._post)

    def error_table(self, error: BadRequest) -> Mapping[str, Any]:
        """Return an error as OpenAI's API writes it. The code tells a client that asking again does not help."""
        code = "context_length_exceeded" if "configured limit" in str(error) else None
        return {"error": {"message": str(error), "type": "invalid_request_error", "param": None, "code": code}}

    def _post(self) -> str:
        self.close_connection = True
        body = json_object(self.read_body(MAX_BODY))
        path, _, rest = self.path.removeprefix("/").partition("/v1")
        if rest != CHAT:
            raise BadRequest(404, f"POST goes to {CHAT}, got {rest[:100]}")
        future = self.server.conversations.submit(path, self.headers.get(SESSION, ""), body)
        try:
            reply = future.result()
        except BaseException as error:
            raise ConnectionAbortedError from error  # the conversation was given up
        if "error" in reply:
            raise BadRequest(400, reply["error"])
        table = completion(reply)
        if body.get("stream"):
            self.send_bytes(200, events(table), "text/event-stream")
        else:
            self.send_table(200, table)
        return "200"


def completion(reply: Reply) -> dict[str, Any]:
    """Return an answer as OpenAI's API writes it."""
    choice = {"index": 0, "message": reply["message"], "finish_reason": reply["finish_reason"], "logprobs": None}
    counts = {name: reply[name] for name in ("prompt_tokens", "completion_tokens")}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion", "created": int(time.time()),
        "model": MODEL, "choices": [choice], "usage": counts | {"total_tokens": sum(counts.values())},
    }  # fmt: skip


def events(table: Mapping[str, Any]) -> bytes:
    """Return an answer as a stream whose only piece is the whole."""
    (choice,) = table["choices"]
    calls = [{"index": n, **call} for n, call in enumerate(choice["message"].get("tool_calls", []))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    head = {**table, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    pieces: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**head, "choices": [], "usage": usage},
    ]
    return b"".join(b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces) + b"data: [DONE]\n\n"


# ----------------------------------------------------------------------------------------------------------------------
# The two kinds of environments.


class RubricEnvironment:
    """An environment of verifiers 0.1 to 0.3: `load_environment`, `rollout`, and a rubric."""

    def __init__(self, package: Any, name: str, arguments: Mapping[str, Any]) -> None:
        self._environment = package.load_environment(name, **arguments)
        self._wrap: Callable[[Any], Any] = getattr(package, "OpenAIChatCompletionsClient", _as_it_is)
        self._openai: Any = importlib.import_module("openai")
        # Making one takes as long as an answer, so all conversations have the same.
        self._http = self._openai.DefaultAsyncHttpxClient(timeout=None)

    def rows(self, split: str) -> list[dict[str, Any]]:
        read = self._environment.get_eval_dataset if split == "eval" else self._environment.get_dataset
        return [json.loads(json.dumps(row, default=str)) for row in read()]

    async def lead(self, row: Mapping[str, Any], way: Way) -> Any:
        client = self._openai.AsyncOpenAI(base_url=way.url, api_key="none", max_retries=0, http_client=self._http)
        prompt = row.get("prompt", "")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        row = {"example_id": 0, "answer": "", **row, "prompt": messages}
        return await self._environment.rollout(row, self._wrap(client), MODEL, {})

    def problem(self, result: Any) -> str:
        error = result.get("error")
        if error is None:
            return "took longer than its own limit" if result.get("timed_out") else ""
        return described(error) if isinstance(error, BaseException) else str(error)

    def is_whole(self, result: Any) -> bool:
        return not result.get("is_truncated")

    async def rewards(self, results: Sequence[Any]) -> list[float]:
        score = self._environment.rubric.score_group
        limits = {"score_sem": contextlib.nullcontext()} if "score_sem" in inspect.signature(score).parameters else {}
        await score(list(results), **limits)
        return [float(result["reward"]) for result in results]


def _as_it_is(client: Any) -> Any:
    return client


class TaskSetEnvironment:
    """An environment of verifiers 0.4: a task set, and the harness that its tasks are played with."""

    def __init__(self, name: str, arguments: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        loaders: Any = importlib.import_module("verifiers.v1.utils.loaders")
        taskset = {**cast("Mapping[str, Any]", arguments.get("taskset") or {}), "id": name}
        self._environment: Any = loaders.load_environment(loaders.resolve_env_config({**arguments, "taskset": taskset}))
        self._serving = self._environment.serving()  # its tools and the like, as long as this process
        loop.run_until_complete(self._serving.__aenter__())

    def rows(self, split: str) -> list[dict[str, Any]]:
        if split == "eval":
            raise ValueError("a task set has no rows to evaluate with; set data.eval to a share of the training rows")
        return [
            {"prompt": _prompt_messages(task.data), "task": task.data.model_dump(mode="json")}
            for task in self._environment.taskset
        ]

    async def lead(self, row: Mapping[str, Any], way: Way) -> Any:
        clients: Any = importlib.import_module("verifiers.v1.clients")
        taskset = self._environment.taskset
        kind: Any = taskset.task_type()
        task = kind(kind.data_type().model_validate(row.get("task", row)), taskset.config.task)
        client = clients.EvalClientConfig(base_url=way.shared_url, api_key_var="DUALTUNE_NO_KEY")
        context = clients.ModelContext(model=MODEL, client=client)

        def begun(trace: Any) -> None:
            way.name_session(trace.id)

        return await self._environment.run_episode(task, context, on_trace=begun)

    def problem(self, result: Any) -> str:
        errors = [*result.errors, *(error for trace in result.traces for error in trace.errors)]
        if not result.ok:
            return ", ".join(f"{error.type}: {error.message}"[:500] for error in errors) or "it did not end well"
        return "" if len(_trained(result)) == 1 else f"has {len(_trained(result))} agents that are trained, allowed: 1"

    def is_whole(self, result: Any) -> bool:
        return not any(trace.is_truncated for trace in result.traces)

    async def rewards(self, results: Sequence[Any]) -> list[float]:
        return [float(_trained(result)[0].reward) for result in results]


def _prompt_messages(data: Any) -> list[dict[str, Any]]:
    """Return the prompt of a task as messages."""
    messages: list[Any] = [] if isinstance(data.prompt, str) else data.prompt or []
    question = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else []
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, *question, *(message.model_dump(mode="json", exclude_none=True) for message in messages)]


def _trained(episode: Any) -> list[Any]:
    return [trace for trace in episode.traces if trace.agent.trainable]


def loaded(name: str, arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], Answer]:
    """Return an empty description, and what answers requests. ConfigError if there is no such environment."""
    os.environ.setdefault("VF_LOG_LEVEL", "WARNING")
    try:
        package: Any = importlib.import_module("verifiers")
    except ImportError as error:
        raise ConfigError(f"{KEY}: verifiers:{name} needs the package verifiers ({error}). {INSTALL}") from error
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        if hasattr(package, "load_environment"):
            environment: Environment = RubricEnvironment(package, name, arguments)
        else:
            environment = TaskSetEnvironment(name, arguments, loop)
    except Exception as error:  # whatever the code of the environment raises
        version = getattr(package, "__version__", "?")
        raise ConfigError(f"{KEY}: verifiers {version} does not load {name}: {described(error)}") from error
    return {}, LedConversations(environment, loop).answer


if __name__ == "__main__":
    serve(lambda: loaded(sys.argv[1], json.loads(sys.argv[2])))
