"""What the server does for its clients. Any thread may call the methods of `TrainingService`, but for the last ones.

The model is used by one thread, which calls `run_next`. All else only files requests and reads results.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dualtune.base.errors import (
    ConfigError,
    DataError,
    DeviceFault,
    DualtuneError,
    FormatError,
    NonFiniteError,
    Preempted,
)
from dualtune.base.http_server import BadRequest
from dualtune.use.tinker import answers, requests
from dualtune.use.tinker.checkpoints import delete_checkpoint, find_checkpoint, list_checkpoints, list_runs, run_of
from dualtune.use.tinker.futures import Failure, Future, Futures, Reply
from dualtune.use.tinker.host import TrainingHost
from dualtune.use.tinker.ledger import Ledger
from dualtune.use.tinker.messages import CheckpointInfo, SampleRequest, ServedRun
from dualtune.use.tinker.sessions import Sessions, TinkerSession
from dualtune.use.tinker.turns import RunJob, SampleJob, Turns

POLL_S = 0.2
CARE_S = 1.0  # how often sessions, results and checkpoints are looked after
WAIT_S = 30.0  # for a result, before the client is asked to ask again
LAST = "interrupted"  # the checkpoint of a run that ends with updates that no checkpoint has
OWNER = "local"
MAX_RUNS = 512  # loaded at once: each has its adapter and its optimizer in memory

Table = Mapping[str, Any]


class TrainingService:
    """The runs over one base, for many clients.

    `say` tells what happens without a request; `is_fatal`: whether an error leaves nothing that can compute.
    """

    def __init__(
        self, host: TrainingHost, *, max_waiting: int, max_tokens: int | None, timeout_s: float,
        say: Callable[[str], None],
        is_fatal: Callable[[BaseException], bool] = lambda error: False, seed: int | None = None,
    ) -> None:  # fmt: skip
        """`seed`: from which those are drawn that clients do not give; None: at random."""
        self.base, self.max_length = host.base, host.max_length
        self._host, self._runs_dir, self._max_tokens, self._say = host, host.runs_dir, max_tokens, say
        self._is_fatal, self._seed = is_fatal, seed
        # A directory of this machine has to be named whole: the client looks for its tokenizer there.
        self._tokenizer = str(host.directory.resolve()) if Path(host.base).is_dir() else host.base
        self.futures = Futures()
        self.turns = Turns(self.futures, max_waiting)
        self.sessions, self.ledger = Sessions(timeout_s), Ledger(host.runs_dir)
        self._unsaved: set[str] = set()  # runs with updates that no checkpoint has
        self._last_request: dict[str, float] = {}
        self._cared = 0.0
        self._executed: Future | None = None  # the request to a run that is computed now

    # Sessions and samplers.

    def create_session(self, body: requests.CreateSessionBody) -> Table:
        session = self.sessions.create(body.display_name, body.user_metadata)
        return {"type": "create_session", "session_id": session.id}

    def finish_session(self, id: str, body: requests.FinishBody) -> None:
        """End a session as its client asks. It may ask again."""
        if (session := self.sessions.end(id)) is not None:
            self._end(session, "its client has ended the session", save=False)

    def create_sampler(self, body: requests.CreateSamplerBody) -> Table:
        source = self._source(body.base_model, body.model_path)
        sampler = self.sessions.add_sampler(body.session_id, body.sampling_session_seq_id, source)
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    def _source(self, base: str | None, path: str | None) -> str | None:
        """Return the checkpoint to sample from, None for the base. It is looked for at once: a session is for long."""
        if path is None and base is None:
            raise BadRequest(400, "base_model: is missing, and so is model_path")
        if base is not None:
            self._check_base(base)
        if path is not None:
            self._checkpoint(path)
        return path

    def _check_base(self, name: str) -> None:
        if name != self.base:
            raise BadRequest(404, f"base_model: got '{name[:200]}', served is '{self.base}'", "base_model")

    def _checkpoint(self, path: str) -> CheckpointInfo:
        try:
            return find_checkpoint(self._runs_dir, path)
        except ConfigError as error:
            raise BadRequest(404, str(error)) from None

    def sampler(self, id: str) -> Table:
        sampler = self.sessions.sampler(id)
        path = sampler.source if (sampler.source or "").startswith("tinker://") else None
        return {"sampler_id": id, "base_model": self.base, "model_path": path}

    def session(self, id: str) -> Table:
        session = next((session for session in self.sessions if session.id == id), None)
        if session is None:
            raise BadRequest(404, f"there is no session {id[:100]}")
        return {
            "training_run_ids": session.runs, "sampler_ids": session.samplers, "display_name": session.display_name,
            "user_metadata": _texts(session.metadata),
        }  # fmt: skip

    def list_sessions(self, limit: int, offset: int) -> Table:
        ids = [session.id for session in sorted(self.sessions, key=lambda s: s.created, reverse=True)]
        return {"sessions": ids[offset : offset + limit]}

    # Runs.

    def create_run(self, body: requests.CreateModelBody) -> Future:
        self._check_base(body.base_model)
        settings = body.lora_config.settings()
        if settings.seed is None:
            settings = replace(settings, seed=self._drawn_seed(body.session_id, body.model_seq_id))
        return self._begin(
            body.session_id, body.model_seq_id, body.user_metadata, "create_model",
            lambda host, run: host.create_run(run, settings),
        )  # fmt: skip

    def load_run(self, body: requests.LoadWeightsBody) -> Future:
        """Load a checkpoint into a run, or as a new one."""
        if body.base_model is not None:
            self._check_base(body.base_model)
        if body.session_id is not None and body.model_seq_id is not None and body.model_id is None:
            return self._begin(
                body.session_id, body.model_seq_id, body.user_metadata, "load_weights",
                lambda host, run: host.create_run_from(run, body.path, optimizer=body.optimizer),
            )  # fmt: skip
        if body.model_id is None or body.session_id is not None or body.model_seq_id is not None:
            raise BadRequest(400, "model_id: a load is into a run (model_id), or a new run (session_id, model_seq_id)")
        run = body.model_id

        def work(host: TrainingHost) -> Reply:
            host.load_state(run, body.path, optimizer=body.optimizer)
            self._unsaved.discard(run)
            return answers.plain({"type": "load_weights", "path": body.path, "model_id": run})

        return self._submit(run, body.seq_id, work)

    def _begin(
        self, session: str, number: int, metadata: Mapping[str, Any] | None, kind: str,
        make: Callable[[TrainingHost, str], ServedRun],
    ) -> Future:  # fmt: skip
        if len(self.turns.runs()) >= MAX_RUNS:
            raise BadRequest(429, f"{MAX_RUNS} runs are loaded; try again when a session has ended")
        run = self.sessions.add_run(session, number)
        future, is_new = self.futures.get_or_add(f"{run}:0")
        if not is_new:
            return future

        def work(host: TrainingHost) -> Reply:
            make(host, run)
            if metadata:
                self.ledger.note(run, metadata=metadata)
            self.turns.open(run)
            return answers.plain({"type": kind, "model_id": run})

        self.turns.submit_first(RunJob(future, run, work))
        return future

    def _drawn_seed(self, session: str, *place: object) -> int | None:
        """Return the seed of an adapter or of samples, by their place; None: it is drawn at random."""
        if self._seed is None:
            return None
        text = repr((self._seed, self.sessions.get(session).number, *place))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])

    def info(self, run: str) -> Table:
        """Return what the client asks of a run that it has made."""
        info = self._run(run)
        data = {"arch": "lora", "model_name": self.base, "tokenizer_id": self._tokenizer}
        return {"type": "get_info", "model_id": run, "model_data": data, "is_lora": True, "lora_rank": info.rank,
                "model_name": self.base}  # fmt: skip

    def _run(self, run: str) -> ServedRun:
        info = next((info for info in list_runs(self._runs_dir) if info.name == run), None)
        if info is None:
            raise BadRequest(404, f"there is no run {run[:200]}")
        return info

    def run_table(self, run: str) -> Table:
        return self._run_table(self._run(run), list_checkpoints(self._runs_dir, run))

    def list_runs(self, limit: int, offset: int) -> Table:
        runs = sorted(list_runs(self._runs_dir), key=lambda run: run.created, reverse=True)
        tables = [
            self._run_table(run, list_checkpoints(self._runs_dir, run.name)) for run in runs[offset : offset + limit]
        ]
        return {"training_runs": tables, "cursor": _cursor(limit, offset, len(runs))}

    def _run_table(self, run: ServedRun, checkpoints: Sequence[CheckpointInfo]) -> Table:
        newest = {found.kind: found for found in sorted(checkpoints, key=lambda found: found.created)}
        last = {kind: self._checkpoint_table(found) for kind, found in newest.items()}
        last_request = self._last_request.get(run.name, max([run.created, *(found.created for found in checkpoints)]))
        return {
            "training_run_id": run.name, "base_model": run.base, "model_owner": OWNER, "is_lora": True,
            "lora_rank": run.rank, "last_request_time": _when(last_request), "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": _texts(self.ledger.metadata(run.name)),
        }  # fmt: skip

    def unload(self, run: str) -> Future:
        """Free a run."""

        def work(host: TrainingHost) -> Reply:
            host.unload(run)
            self._unsaved.discard(run)
            self.turns.close_run(run, f"{run} has been unloaded")
            return answers.plain({"type": "unload_model", "model_id": run})

        return self._submit(run, None, work)

    # Training.

    def losses(self, request: requests.LossRequest, num_bytes: int) -> Future:
        def work(host: TrainingHost) -> Reply:
            compute = host.forward if request.forward_only else host.forward_backward
            is_cancelled = self._is_cancelled
            return answers.of_losses(compute(request.run, request.data, request.loss, request.config, is_cancelled))

        return self._submit(request.run, request.seq, work, num_bytes)

    def optim_step(self, body: requests.OptimStepBody) -> Future:
        settings, run = body.adam_params.settings(), body.model_id

        def work(host: TrainingHost) -> Reply:
            metrics = host.optim_step(run, settings)
            self._unsaved.add(run)
            return answers.plain({"metrics": dict(metrics)})

        return self._submit(run, body.seq_id, work)

    def fail_turn(self, turn: requests.BadTurn) -> Future:
        """Let a request to a run fail in its turn: the next ones are not to wait for it."""

        def work(host: TrainingHost) -> Reply:
            raise ConfigError(str(turn))

        return self._submit(turn.run, turn.seq, work)

    def _submit(self, run: str, seq: int | None, work: Callable[[TrainingHost], Reply], num_bytes: int = 0) -> Future:
        future = self.turns.submit(run, seq, work, num_bytes)
        self.sessions.hear_of(run)
        self._last_request[run] = time.time()
        return future

    # Checkpoints.

    def save_state(self, body: requests.SaveWeightsBody) -> Future:
        run = body.model_id

        def work(host: TrainingHost) -> Reply:
            name = body.path or f"{host.run_info(run).steps:06d}"
            saved = host.save_state(run, name, overwrite=body.overwrite or body.path is None)
            self._unsaved.discard(run)
            self.ledger.note(saved.path, ttl_s=body.ttl_seconds, metadata=body.user_metadata)
            return answers.plain({"type": "save_weights", "path": saved.path})

        return self._submit(run, body.seq_id, work)

    def save_sampler(self, body: requests.SaveSamplerBody) -> Future:
        """Keep the weights of now for sampling: in a file, or in memory as a sampler."""
        run, number = body.model_id, body.sampling_session_seq_id
        if body.path is None and number is None:
            raise requests.BadTurn(
                BadRequest(400, "path: is missing, and so is sampling_session_seq_id"), run, body.seq_id
            )

        def work(host: TrainingHost) -> Reply:
            path = host.save_sampler(run, body.path)
            if body.path is not None:
                self.ledger.note(path, ttl_s=body.ttl_seconds, metadata=body.user_metadata)
                return answers.plain({"type": "save_weights_for_sampler", "path": path})
            assert number is not None
            follows = run if body.kind == "inflight" else None
            sampler = self.sessions.add_sampler(run.split(":")[0], number, path, follows=follows)
            return answers.plain({"type": "save_weights_for_sampler", "sampling_session_id": sampler.id})

        return self._submit(run, body.seq_id, work)

    def weights_info(self, path: str) -> Table:
        try:
            run = run_of(self._runs_dir, path)
        except ConfigError as error:
            raise BadRequest(404, str(error)) from None
        return {
            "base_model": run.base, "is_lora": True, "lora_rank": run.rank, "train_unembed": run.train_unembed,
            "train_mlp": run.train_mlp, "train_attn": run.train_attn,
        }  # fmt: skip

    def list_checkpoints(self, run: str | None, limit: int | None, offset: int) -> Table:
        if run is not None:
            self._run(run)
        checkpoints = sorted(list_checkpoints(self._runs_dir, run), key=lambda checkpoint: checkpoint.created)
        if limit is None:
            return {"checkpoints": [self._checkpoint_table(checkpoint) for checkpoint in checkpoints], "cursor": None}
        checkpoints.reverse()
        tables = [self._checkpoint_table(checkpoint) for checkpoint in checkpoints[offset : offset + limit]]
        return {"checkpoints": tables, "cursor": _cursor(limit, offset, len(checkpoints))}

    def _checkpoint_table(self, checkpoint: CheckpointInfo) -> Table:
        expires = self.ledger.expires_at(checkpoint.path)
        return {
            "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
            "checkpoint_type": "training" if checkpoint.kind == "weights" else "sampler",
            "time": _when(checkpoint.created), "tinker_path": checkpoint.path, "size_bytes": checkpoint.num_bytes,
            "public": False, "user_metadata": _texts(self.ledger.metadata(checkpoint.path)),
            "expires_at": None if expires is None else _when(expires),
        }  # fmt: skip

    def delete(self, path: str) -> None:
        self._checkpoint(path)
        delete_checkpoint(self._runs_dir, path)
        self.ledger.forget(path)

    def set_ttl(self, path: str, ttl_s: float | None) -> None:
        self._checkpoint(path)
        self.ledger.set_ttl(path, ttl_s)

    def adapter_files(self, path: str) -> CheckpointInfo:
        """Return the checkpoint of a path, whose directory holds the adapter in PEFT's form."""
        return self._checkpoint(path)

    # Samples.

    def sample(self, body: requests.SampleBody, num_bytes: int) -> Future:
        request = body.request()
        if body.prompt_logprobs_last_n is not None and not body.prompt_logprobs:
            raise BadRequest(400, "prompt_logprobs_last_n: needs prompt_logprobs")
        if request.max_tokens is not None and request.max_tokens > (self._max_tokens or request.max_tokens):
            raise BadRequest(400, f"max_tokens: got {request.max_tokens}, allowed: {self._max_tokens} (--max-tokens)")
        if len(request.prompt) >= self.max_length:
            raise BadRequest(
                400, f"prompt: has {len(request.prompt)} tokens, the model has {self.max_length} positions"
            )
        most = min(request.max_tokens or self._max_tokens or self.max_length, self.max_length - len(request.prompt))
        sampler = None if body.sampling_session_id is None else self.sessions.sampler(body.sampling_session_id)
        if sampler is None:
            path = self._source(body.base_model, body.model_path)
            future, is_new = self.futures.get_or_add(f"sample:{uuid.uuid4().hex}")
        else:
            if body.seq_id is None:
                raise BadRequest(400, "seq_id: is missing")
            path = self.sessions.source(sampler)
            clone = (sampler.id, body.seq_id // 1_000_000_000)
            future, is_new = self.futures.get_or_add(f"{sampler.id}:{body.seq_id}", clone)
        source = (lambda: path) if sampler is None else (lambda: self.sessions.source(sampler))
        if is_new:
            if request.seed is None and sampler is not None:
                request = replace(request, seed=self._drawn_seed(*sampler.id.split(":"), body.seq_id))
            request = replace(request, max_tokens=most)
            self.turns.submit_sample(SampleJob(future, source, request, body.prompt_logprobs_last_n, num_bytes))
        return future

    # Results.

    def retrieve(self, id: str, client_is_gone: Callable[[], bool]) -> Future | None:
        """Wait a while for the end of a request; None if it has not come. BadRequest 404 if it is not known."""
        future = self.futures.get(id)
        if future is None:
            raise BadRequest(404, f"request_id: {id[:200]} is not here: it has expired, or the server was restarted")
        ends = time.monotonic() + WAIT_S
        while not future.ended.wait(min(1.0, max(0.0, ends - time.monotonic()))):
            if time.monotonic() >= ends:
                return None
            if client_is_gone():
                raise ConnectionAbortedError
        return future

    def retrieve_many(self, body: requests.RetrieveFuturesBody) -> Table:
        """Wait for ends of a sampler's requests a while."""
        self.futures.drop(body.retrieved_request_ids)
        id = body.target.sampling_session_id
        self.sessions.sampler(id)
        timeout = WAIT_S if body.timeout is None else min(body.timeout, WAIT_S)
        ended, cursor = self.futures.ends_after((id, body.target.cloned_sampler_id), body.prev_cursor, timeout)
        return {"completions": [_completion(future) for future in ended], "cursor": cursor}

    def cancel(self, id: str) -> None:
        """Cancel a request. Samples that are drawn end after the next token, losses after the micro-batch; an update or
        a checkpoint that has begun ends as usual."""
        if (future := self.futures.get(id)) is not None:
            future.is_cancelled = True

    # What follows is for the thread that uses the model.

    def run_next(self) -> None:
        """Do what is next, or return after a moment."""
        item = self.turns.next(POLL_S)
        if isinstance(item, RunJob):
            self._execute(item)
        elif item is not None:
            self._draw(item)
        if time.monotonic() - self._cared > CARE_S:
            self._care()
            self._cared = time.monotonic()

    def _is_cancelled(self) -> bool:
        return self._executed is not None and self._executed.is_cancelled

    def _execute(self, job: RunJob) -> None:
        self._executed = job.future
        try:
            self.futures.end(job.future, job.work(self._host))
        except Exception as error:  # noqa: BLE001  the next request may be one that can be answered
            self._fail(job.future, error)

    def _draw(self, jobs: Sequence[SampleJob]) -> None:
        drawn: list[tuple[SampleJob, SampleRequest]] = []
        for job in jobs:
            try:
                drawn.append((job, replace(job.request, source=job.source())))
            except BadRequest as error:
                self._fail(job.future, error)
        try:
            requests = [request for _, request in drawn]
            for index, result in self._host.sample(requests, lambda index: drawn[index][0].future.is_cancelled):
                job = drawn[index][0]
                if isinstance(result, Exception):
                    self._fail(job.future, result)
                else:
                    self.futures.end(job.future, answers.of_samples(result, job.last))
        except Exception as error:  # noqa: BLE001
            for job, _ in drawn:  # those that have a result keep it
                self.futures.end(job.future, _failure(error))
            self._raise_if_fatal(error)

    def _fail(self, future: Future, error: Exception) -> None:
        """End a request with an error, and all else with one after which nothing can be computed."""
        self.futures.end(future, _failure(error))
        self._raise_if_fatal(error)

    def _raise_if_fatal(self, error: Exception) -> None:
        if isinstance(error, DeviceFault | Preempted) or self._is_fatal(error):
            raise error

    def _care(self) -> None:
        for id in self.sessions.late():
            if (session := self.sessions.end(id)) is not None:
                self._say(f"{id}: its client is gone")
                self._end(session, "its session has ended: the client was not heard from", save=True)
        self.turns.fail_gaps()
        self.futures.expire()
        for path in self.ledger.expired():
            try:
                self.delete(path)
                self._say(f"{path}: has expired and is deleted")
            except (BadRequest, DualtuneError):
                self.ledger.forget(path)

    def _end(self, session: TinkerSession, reason: str, *, save: bool) -> None:
        """Let the requests of a session fail, and free what it has as soon as the model's thread comes to it."""
        for run in session.runs:
            self.turns.close_run(run, f"{run}: {reason}")
        self.futures.drop_samplers(session.id)
        future, _ = self.futures.get_or_add(f"{session.id}:end")

        def work(host: TrainingHost) -> Reply:
            for run in session.runs:
                if save:
                    self._save(run)
                self._unsaved.discard(run)
                self.turns.close_run(run, f"{run}: {reason}")  # one that has been made meanwhile
                with contextlib.suppress(DualtuneError):  # one that could not be made
                    host.unload(run)
            self.futures.forget(future)
            return answers.plain({})

        self.turns.submit_always(RunJob(future, "", work))

    def _save(self, run: str) -> None:
        if run not in self._unsaved:
            return
        try:
            saved = self._host.save_state(run, LAST, overwrite=True)
            self._say(f"{run}: saved as {saved.path}")
        except Exception as error:  # noqa: BLE001  the others are to be saved too
            self._say(f"{run}: its last updates are lost: {_message(error)}")

    def stop(self, *, save: bool = True) -> None:
        """Refuse what waits, and save the runs with updates that no checkpoint has, or say that they are lost."""
        self.turns.close()
        for run in sorted(self._unsaved):
            if save:
                self._save(run)
            else:
                self._say(f"{run}: its last updates are lost")
        self._host.close()


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, DualtuneError) else f"{type(error).__name__}: {error}"


def _failure(error: Exception) -> Failure:
    is_clients = isinstance(error, ConfigError | DataError | FormatError | NonFiniteError | BadRequest)
    return Failure(_message(error), "user" if is_clients else "server")


def _completion(future: Future) -> Table:
    if isinstance(future.outcome, Reply):
        return {
            "state": "finished",
            "request_id": future.id,
            "response_payload_uncompressed_size": future.outcome.num_bytes,
        }
    return {"state": "failed", "request_id": future.id}


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _cursor(limit: int, offset: int, total: int) -> Table:
    return {"offset": offset, "limit": limit, "total_count": total}
