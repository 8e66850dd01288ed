"""The HTTP side of `dualtune serve --train`: paths, bodies and answers in the form of Tinker's client."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from dualtune.base.errors import DualtuneError
from dualtune.base.http_server import ApiHandler, ApiServer, BadRequest
from dualtune.use.tinker import requests
from dualtune.use.tinker.futures import Failure, Future, Reply
from dualtune.use.tinker.requests import MAX_BODY, BadTurn, decompressed, read, read_turn
from dualtune.use.tinker.service import TrainingService

PROTOBUF = "application/x-protobuf"
MAX_CONNECTIONS = 1024  # a client has several, which wait for results
MAX_PAGE = 1000

# What is not served, and why: it is answered with 404, which the client does not try again.
NOT_SERVED = {
    r"POST auth/token": "a key is sent as it is, there is no token for it",
    r"(GET|DELETE) auth/apikey/me": "keys are not stored here: the server has one, or none",
    r"POST create_custom_loss": "custom losses are computed by the client: forward_backward_custom",
    r"GET training_runs/[^/]+/checkpoints/.+/external_weights_urls": "download the archive of the checkpoint instead",
    r"(POST|DELETE) training_runs/[^/]+/checkpoints/.+/publish": "there is nobody to publish to: `dualtune push`",
    r"POST copy_weights": "there are no projects: copy the directory of the checkpoint",
    r"PUT sessions/[^/]+/project": "there are no projects",
    r"GET sessions/[^/]+/trace_export": "there are no traces",
    r"POST sessions/search": "list the sessions instead",
    r"GET (audit|billing/.+)": "there is nothing to account for",
}  # fmt: skip


class TrainingServer(ApiServer):
    """A server whose requests are answered by `service`."""

    def __init__(
        self, host: str, port: int, service: TrainingService, *, key: str | None, tell: Callable[[str], None]
    ) -> None:
        self.service = service
        super().__init__(host, port, TrainingHandler, key=key, tell=tell)
        self.max_connections = MAX_CONNECTIONS


class TrainingHandler(ApiHandler):
    """One connection."""

    server: TrainingServer  # pyright: ignore[reportIncompatibleVariableOverride]
    body_types = ("application/json", PROTOBUF)

    def do_GET(self) -> None:
        """Answer the requests that read."""
        self.answer_with(self._without_body)

    def do_DELETE(self) -> None:
        """Delete a checkpoint."""
        self.answer_with(self._without_body)

    def do_POST(self) -> None:
        """Do what a client asks."""
        self.answer_with(self._with_body)

    def do_PUT(self) -> None:
        """Change the settings of a checkpoint."""
        self.answer_with(self._with_body)

    def client_key(self) -> str:
        """Return the key, which Tinker's client sends in a header of its own."""
        return self.headers.get("X-API-Key") or super().client_key()

    def error_table(self, error: BadRequest) -> Mapping[str, Any]:
        """Return an error as the client shows it."""
        return {"detail": str(error)}

    def _without_body(self) -> str:
        self.read_no_body()
        return self._route(b"")

    def _with_body(self) -> str:
        return self._route(decompressed(self.read_body(MAX_BODY), self.headers.get("Content-Encoding")))

    def _route(self, body: bytes) -> str:
        url = urlsplit(self.path)
        path = unquote(url.path).rstrip("/")
        if self.command == "GET" and not path:
            self.send_bytes(200, front_page(self.server).encode(), "text/plain; charset=utf-8")
            return "200"
        called = f"{self.command} {path.removeprefix('/api/v1/')}"
        if path.startswith("/api/v1/"):
            for pattern, answer in ROUTES:
                if match := pattern.fullmatch(called):
                    return _answered(answer, Call(self, body, parse_qs(url.query), match.groups()))
            for pattern, reason in NOT_SERVED.items():
                if re.fullmatch(pattern, called):
                    raise BadRequest(404, f"{called[:100]} is not served by dualtune: {reason}")
        raise BadRequest(404, f"there is no {self.command} {self.path[:100]}; see docs/tinker.md for what is served")


class Call:
    """A request: its body, its query, and the parts of its path."""

    def __init__(
        self, handler: TrainingHandler, body: bytes, query: Mapping[str, list[str]], parts: tuple[str, ...]
    ) -> None:
        self.handler, self.service, self.body, self.query, self.parts = (
            handler,
            handler.server.service,
            body,
            query,
            parts,
        )

    def number(self, name: str, default: int, most: int) -> int:
        """Return a number of the query."""
        text = self.query.get(name, [str(default)])[0]
        if not text.isdecimal() or len(text) > 9 or int(text) > most:
            raise BadRequest(400, f"{name}: got '{text[:50]}', allowed: 0 to {most}", name)
        return int(text)

    def page(self) -> tuple[int, int]:
        """Return how many entries are wanted, and after how many."""
        return self.number("limit", 20, MAX_PAGE), self.number("offset", 0, 10**9)

    def send(self, table: Mapping[str, Any]) -> str:
        """Answer with JSON."""
        self.handler.send_table(200, table)
        return "200"

    def send_nothing(self) -> str:
        """Answer that it is done."""
        self.handler.send_bytes(204, b"", "application/json")
        return "204"

    def promise(self, future: Future, **more: Any) -> str:
        """Answer with the id of a result that is to come."""
        return self.send({"request_id": future.id, **more})

    def turn(self, submit: Callable[[], Future]) -> str:
        """File a request to a run. One that is wrong fails in its turn, so that the next ones do not wait for it."""
        try:
            return self.promise(submit())
        except BadTurn as error:
            return self.promise(self.service.fail_turn(error))


def _answered(answer: Callable[[Call], str], call: Call) -> str:
    """Return how a call went. What goes wrong here is the client's to know: without an answer it asks again."""
    try:
        return answer(call)
    except (BadRequest, ConnectionError, TimeoutError):
        raise
    except DualtuneError as error:
        raise BadRequest(400, str(error)) from error
    except Exception as error:
        raise BadRequest(500, f"the server failed: {type(error).__name__}: {error}"[:500]) from error


# ----------------------------------------------------------------------------------------------------------------------
def _health(call: Call) -> str:
    return call.send({"status": "ok"})


def _capabilities(call: Call) -> str:
    service = call.service
    model = {
        "model_name": service.base,
        "max_context_length": service.max_length,
        "trainable": True,
        "sampleable": True,
    }
    return call.send({"supported_models": [model]})


def _client_config(call: Call) -> str:
    """The client asks for the ends of a sampler's requests in one call, and numbers its copies here."""
    return call.send({"sample_use_retrieve_futures": True, "sample_join_sampling_session": True})


def _dynamic_config(call: Call) -> str:
    return call.send({"sample_cancel_enabled": True})


def _telemetry(call: Call) -> str:
    """Accept and drop it: the client repeats it until it is accepted."""
    return call.send({"status": "accepted"})


def _heartbeat(call: Call) -> str:
    call.service.sessions.get(read(requests.OfSessionBody, call.body).session_id)
    return call.send({"type": "session_heartbeat"})


def _finish(call: Call) -> str:
    call.service.finish_session(call.parts[0], read(requests.FinishBody, call.body))
    return call.send_nothing()


def _join(call: Call) -> str:
    sampler = read(requests.OfSamplerBody, call.body).sampling_session_id
    return call.send({"type": "join_sampling_session", "client_counter": call.service.sessions.join(sampler)})


def _losses(call: Call, *, forward_only: bool) -> str:
    kind = call.handler.headers.get_content_type()
    return call.turn(
        lambda: call.service.losses(requests.read_loss(call.body, kind, forward_only=forward_only), len(call.body))
    )


def _sample(call: Call) -> str:
    body = read(requests.SampleBody, call.body)
    future = call.service.sample(body, len(call.body))
    return call.promise(future, sample_sequence_ids=[f"{future.id}:{i}" for i in range(body.num_samples)])


def _retrieve(call: Call) -> str:
    id = read(requests.RetrieveFutureBody, call.body).request_id
    future = call.service.retrieve(id, call.handler.client_is_gone)
    if future is None:  # a request that takes longer than one connection should: the client asks again
        call.handler.send_table(408, {"type": "try_again", "request_id": id, "queue_state": "active"})
        return "408 try again"
    outcome = future.outcome
    call.service.futures.mark_sent(future)  # a connection that breaks now is made again soon
    if isinstance(outcome, Failure):
        call.send({"error": outcome.message, "category": outcome.category})
    else:
        assert isinstance(outcome, Reply)
        if outcome.protobuf is not None and PROTOBUF in call.handler.headers.get("Accept", ""):
            call.handler.send_bytes(200, outcome.protobuf(), PROTOBUF)
        else:
            call.send(outcome.table())
    return "200" if isinstance(outcome, Reply) else f"200 failed: {outcome.message[:200]}"


def _external(call: Call) -> str:
    """Refuse another form of weights, in its turn: the client counts it as a request to the run."""
    reason = (
        "save_weights_external is not served by dualtune: a checkpoint is in PEFT's form already; `dualtune export`"
    )
    return call.turn(lambda: call.service.fail_turn(requests.refused_turn(call.body, reason)))


def _cancel(call: Call) -> str:
    call.service.cancel(read(requests.OfFutureBody, call.body).request_id)
    return call.send_nothing()


def _archive(call: Call) -> str:
    """Send an adapter in PEFT's form as a tar file."""
    checkpoint = call.service.adapter_files(_path(call))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in sorted(checkpoint.directory.iterdir()):
            if file.is_file() and file.name.startswith("adapter_"):
                archive.add(file, file.name)
    call.handler.send_bytes(200, buffer.getvalue(), "application/x-tar")
    return f"200 {checkpoint.path}"


def _path(call: Call) -> str:
    """Return the path of a checkpoint that the URL names, in the form of all others."""
    run, checkpoint = call.parts
    return read(requests.OfPathBody, json.dumps({"tinker_path": f"tinker://{run}/{checkpoint}"}).encode()).tinker_path


def _delete(call: Call) -> str:
    call.service.delete(_path(call))
    return call.send_nothing()


def _set_ttl(call: Call) -> str:
    call.service.set_ttl(_path(call), read(requests.TtlBody, call.body).ttl_seconds)
    return call.send_nothing()


RUN = r"training_runs/([^/]+)"
CHECKPOINT = RUN + r"/checkpoints/((?:weights|sampler_weights)/[^/]+)"
_ANSWERS: dict[str, Callable[[Call], str]] = {
    r"GET healthz": _health,
    r"GET get_server_capabilities": _capabilities,
    r"POST client/config": _client_config,
    r"POST client/dynamic_config": _dynamic_config,
    r"POST telemetry": _telemetry,
    r"POST create_session": lambda c: c.send(c.service.create_session(read(requests.CreateSessionBody, c.body))),
    r"POST session_heartbeat": _heartbeat,
    r"GET sessions": lambda c: c.send(c.service.list_sessions(*c.page())),
    r"GET sessions/([^/]+)": lambda c: c.send(c.service.session(c.parts[0])),
    r"POST sessions/([^/]+)/finish": _finish,
    r"POST create_model": lambda c: c.promise(c.service.create_run(read(requests.CreateModelBody, c.body))),
    r"POST get_info": lambda c: c.send(c.service.info(read(requests.OfRunBody, c.body).model_id)),
    r"POST unload_model": lambda c: c.promise(c.service.unload(read(requests.OfRunBody, c.body).model_id)),
    r"POST forward": lambda c: _losses(c, forward_only=True),
    r"POST forward_backward": lambda c: _losses(c, forward_only=False),
    r"POST optim_step": lambda c: c.turn(lambda: c.service.optim_step(read_turn(requests.OptimStepBody, c.body))),
    r"POST save_weights": lambda c: c.turn(lambda: c.service.save_state(read_turn(requests.SaveWeightsBody, c.body))),
    r"POST save_weights_for_sampler": lambda c: c.turn(
        lambda: c.service.save_sampler(read_turn(requests.SaveSamplerBody, c.body))
    ),
    r"POST save_weights_external": _external,
    r"POST load_weights": lambda c: c.turn(lambda: c.service.load_run(requests.read_load(c.body))),
    r"POST create_sampling_session": lambda c: c.send(
        c.service.create_sampler(read(requests.CreateSamplerBody, c.body))
    ),
    r"POST join_sampling_session": _join,
    r"GET samplers/([^/]+)": lambda c: c.send(c.service.sampler(c.parts[0])),
    r"POST asample": _sample,
    r"POST retrieve_future": _retrieve,
    r"POST retrieve_futures": lambda c: c.send(c.service.retrieve_many(read(requests.RetrieveFuturesBody, c.body))),
    r"POST cancel_future": _cancel,
    r"POST weights_info": lambda c: c.send(c.service.weights_info(read(requests.OfPathBody, c.body).tinker_path)),
    r"GET training_runs": lambda c: c.send(c.service.list_runs(*c.page())),
    rf"GET {RUN}": lambda c: c.send(c.service.run_table(c.parts[0])),
    rf"GET {RUN}/checkpoints": lambda c: c.send(c.service.list_checkpoints(c.parts[0], None, 0)),
    r"GET checkpoints": lambda c: c.send(c.service.list_checkpoints(None, *c.page())),
    rf"GET {CHECKPOINT}/archive": _archive,
    rf"DELETE {CHECKPOINT}": _delete,
    rf"PUT {CHECKPOINT}/ttl": _set_ttl,
}
ROUTES = [(re.compile(pattern), answer) for pattern, answer in _ANSWERS.items()]


def front_page(server: TrainingServer) -> str:
    """Return what a person reads who opens the server in a browser."""
    service = server.service
    runs: list[dict[str, Any]] = service.list_runs(20, 0)["training_runs"]
    lines = [
        f"{run['training_run_id']}  rank {run['lora_rank']}  "
        + (run["last_checkpoint"]["tinker_path"] if run["last_checkpoint"] else "no checkpoint")
        for run in runs
    ]
    host, port = server.server_address[:2]
    return f"""dualtune serve --train: the interface of Tinker over {service.base}, on this machine.

A program that uses the package `tinker` trains here after

    export TINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY=tml-local

and with base_model="{service.base}".

Runs, the newest first:
{chr(10).join(lines) or "none yet"}
"""
