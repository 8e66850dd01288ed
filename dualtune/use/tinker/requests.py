"""What a client may ask: bodies of requests, read without trust. Every key is honoured, or refused by name.

The form is that of Tinker's client. A key that is not known is refused, unless its value asks for nothing (null, false,
0, an empty text): newer clients send the defaults of what they have besides.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dualtune.base.errors import EnvironmentFault
from dualtune.base.http_server import BadRequest, invalid_body, json_object
from dualtune.use.tinker.messages import AdamSettings, Datum, LoraSettings, SampleRequest

MAX_BODY = 1 << 26  # bytes, also of what a compressed body holds; the client sends 5 MB, or one datum that is longer
MAX_TEXT, MAX_RANK, MAX_SAMPLES, MAX_TOP, MAX_STOPS = 1000, 512, 256, 128, 64
MAX_DATA = 4096
# The hints for keys that are not served, if there is something to do instead.
HINTS = {
    "record_stability_info": "the loss stable_reinforce has no public formula, so nothing is recorded for it. Take "
    "importance_sampling, ppo, cispo or gspo",
    "project_id": "there are no projects here; leave it out",
    "optimizer_params": "only AdamW is served: adam_params",
}
HOUR, TEN_YEARS = 3600, 10 * 366 * 24 * 3600

ID = r"^[A-Za-z0-9_-]{1,80}$"
RUN = r"^[A-Za-z0-9_-]{1,80}:train:\d{1,9}$"
SAMPLER = r"^[A-Za-z0-9_-]{1,80}:sample:\d{1,9}$"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
PATH = r"^tinker://[A-Za-z0-9_:-]{1,120}/(weights|sampler_weights)/[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"

Name = Annotated[str, Field(pattern=NAME)]
TinkerPath = Annotated[str, Field(pattern=PATH)]
Run = Annotated[str, Field(pattern=RUN)]
Number = Annotated[int, Field(ge=0, lt=1 << 62)]
Lifetime = Annotated[int, Field(ge=HOUR, le=TEN_YEARS)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Metadata = Annotated[
    dict[Text, Text | bool | int | Annotated[float, Field(allow_inf_nan=False)] | None], Field(max_length=64)
]


class BadTurn(BadRequest):
    """A request to a run that is wrong, but whose place is known: the next ones wait for it."""

    def __init__(self, error: BadRequest, run: str, seq: int | None) -> None:
        super().__init__(error.status, str(error), error.param)
        self.run, self.seq = run, seq


class TinkerBody(BaseModel):
    """A body, or a part of one."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    type: Any = None  # the client names the kind of a body, which its path says too

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        fields = cast("dict[str, Any]", table)
        return {key: value for key, value in fields.items() if key in cls.model_fields or value}


class CreateSessionBody(TinkerBody):
    tags: Annotated[list[Text], Field(max_length=64)] = []
    user_metadata: Metadata | None = None
    sdk_version: Text = ""
    display_name: Text | None = None


class OfSessionBody(TinkerBody):
    session_id: Annotated[str, Field(pattern=ID)]


class FinishBody(TinkerBody):
    reason: dict[str, str] | None = None
    detail: Text | None = None


class LoraBody(TinkerBody):
    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def settings(self) -> LoraSettings:
        """Return the settings in the form of the host."""
        return LoraSettings(**self.model_dump(exclude={"type"}))


class OptimizerBody(TinkerBody):
    type: Literal["adamw"] = "adamw"


class CreateModelBody(OfSessionBody):
    model_seq_id: Number
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: LoraBody
    optimizer_config: OptimizerBody = OptimizerBody()


class OfRunBody(TinkerBody):
    """A request to a run, executed in the order of `seq_id`."""

    model_id: Run
    seq_id: Annotated[int, Field(ge=1, lt=1 << 62)] | None = None


class AdamBody(TinkerBody):
    learning_rate: Positive = 1e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Positive = 1e-12
    weight_decay: Positive = 0.0
    grad_clip_norm: Positive = 0.0

    def settings(self) -> AdamSettings:
        """Return the settings in the form of the host."""
        return AdamSettings(**self.model_dump(exclude={"type"}))


class OptimStepBody(OfRunBody):
    adam_params: AdamBody


class SaveWeightsBody(OfRunBody):
    path: Name | None = None
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveSamplerBody(OfRunBody):
    path: Name | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Lifetime | None = None
    user_metadata: Metadata | None = None


class LoadWeightsBody(TinkerBody):
    """Into a run (`model_id`), or as a new run of a session."""

    model_id: Run | None = None
    seq_id: Number | None = None
    session_id: Annotated[str, Field(pattern=ID)] | None = None
    model_seq_id: Number | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    path: TinkerPath
    optimizer: bool
    optimizer_config: OptimizerBody | None = None


class CreateSamplerBody(OfSessionBody):
    sampling_session_seq_id: Number
    base_model: Text | None = None
    model_path: TinkerPath | None = None


class OfSamplerBody(TinkerBody):
    sampling_session_id: Annotated[str, Field(pattern=SAMPLER)]


class _Chunk(TinkerBody):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class _Input(TinkerBody):
    chunks: list[_Chunk]


class _SamplingParams(TinkerBody):
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: (
        Text
        | Annotated[list[Text], Field(max_length=MAX_STOPS)]
        | Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleBody(TinkerBody):
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: _Input
    sampling_params: _SamplingParams
    base_model: Text | None = None
    model_path: TinkerPath | None = None
    sampling_session_id: Annotated[str, Field(pattern=SAMPLER)] | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None

    def request(self) -> SampleRequest:
        """Return the request in the form of the host, without its source."""
        params = self.sampling_params
        tokens = [token for chunk in self.prompt.chunks for token in chunk.tokens]
        if not tokens:
            raise BadRequest(400, "prompt: has no token")
        return SampleRequest(
            source=None, prompt=np.array(tokens, np.int32), num_samples=self.num_samples, max_tokens=params.max_tokens,
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k,
            seed=None if params.seed is None else params.seed % ((1 << 63) - 1),
            stop=[params.stop] if isinstance(params.stop, str) else params.stop,
            prompt_logprobs=bool(self.prompt_logprobs), topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs,
        )  # fmt: skip


class RetrieveFutureBody(TinkerBody):
    request_id: Text
    allow_metadata_only: bool = False


class _Target(TinkerBody):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Annotated[str, Field(pattern=SAMPLER)]
    cloned_sampler_id: Number = 0


class RetrieveFuturesBody(TinkerBody):
    target: _Target
    prev_cursor: Number = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    retrieved_request_ids: Annotated[list[Text], Field(max_length=100_000)] = []


class OfFutureBody(TinkerBody):
    request_id: Text


class OfPathBody(TinkerBody):
    tinker_path: TinkerPath


class TtlBody(TinkerBody):
    ttl_seconds: Lifetime | None = None


# ----------------------------------------------------------------------------------------------------------------------
# Losses: a protobuf of the client, or JSON of the same form.


class _Tensor(TinkerBody):
    data: list[float] | list[int]
    dtype: Literal["float32", "int64"]
    shape: list[Number] | None = None


class _Datum(TinkerBody):
    model_input: _Input
    loss_fn_inputs: dict[Text, _Tensor]


class _LossInput(TinkerBody):
    data: Annotated[list[_Datum], Field(min_length=1, max_length=MAX_DATA)]
    loss_fn: Text
    loss_fn_config: dict[Text, float | str] | None = None


class ForwardBody(OfRunBody):
    forward_input: _LossInput | None = None
    forward_backward_input: _LossInput | None = None


@dataclass(frozen=True, slots=True)
class LossRequest:
    """The losses of data, with their gradient or `forward_only`."""

    run: str
    seq: int | None
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool


def read_loss(raw: bytes, kind: str, *, forward_only: bool) -> LossRequest:
    """Read a body of the kind that its Content-Type says."""
    return _from_protobuf(raw) if kind == "application/x-protobuf" else _from_json(raw, forward_only)


def _from_json(raw: bytes, forward_only: bool) -> LossRequest:
    body = read_turn(ForwardBody, raw)
    with _of_turn(body):
        losses = body.forward_input or body.forward_backward_input
        if losses is None:
            raise BadRequest(400, "forward_backward_input: is missing")
        data = [
            Datum(
                np.array([token for chunk in datum.model_input.chunks for token in chunk.tokens], np.int32),
                {
                    name: _shaped(np.array(tensor.data, tensor.dtype), tensor.shape, name)
                    for name, tensor in datum.loss_fn_inputs.items()
                },
            )
            for datum in losses.data
        ]
    return LossRequest(body.model_id, body.seq_id, data, losses.loss_fn, losses.loss_fn_config or {}, forward_only)


@functools.cache
def protobufs() -> Any:
    """Return the module of the client's protobuf messages. EnvironmentFault if the package is not installed.

    It is read from its file: to import it by its name would import the whole client, which takes seconds.
    """
    package = importlib.util.find_spec("tinker")
    try:
        if package is None or package.origin is None:
            raise ImportError("No module named 'tinker'")
        file = Path(package.origin).parent / "proto" / "tinker_public_pb2.py"
        spec = importlib.util.spec_from_file_location("tinker_public_pb2", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise EnvironmentFault(
            f"--train needs the package of Tinker's client ({error}): pip install 'dualtune[tinker]'"
        ) from error
    return module


def _from_protobuf(raw: bytes) -> LossRequest:
    message = protobufs().ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except Exception as error:  # noqa: BLE001  google's DecodeError has no place of its own in all versions
        raise BadRequest(400, f"body: is not a ForwardBackwardRequest: {error}"[:300]) from None
    address = _checked(OfRunBody, {"model_id": message.model_id, "seq_id": message.seq_id or None})
    with _of_turn(address):
        if not 1 <= len(message.data) <= MAX_DATA:
            raise BadRequest(400, f"data: got {len(message.data)}, allowed: 1 to {MAX_DATA}")
        config: dict[str, float | str] = dict(message.loss_fn_config)
        for name, value in message.loss_fn_config_v2.items():
            config[name] = getattr(value, value.WhichOneof("value") or "number")
        data = [Datum(_tokens(datum), _loss_inputs(datum)) for datum in message.data]
    return LossRequest(address.model_id, address.seq_id, data, message.loss_fn[:MAX_TEXT], config, message.forward_only)


def _tokens(datum: Any) -> np.ndarray:
    parts: list[np.ndarray] = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise BadRequest(400, f"model_input: got {kind}, served is text")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, "model_input"))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _loss_inputs(datum: Any) -> dict[str, np.ndarray]:
    return {name[:MAX_TEXT]: _dense(tensor, name[:MAX_TEXT]) for name, tensor in datum.loss_fn_inputs.items()}


def _dense(tensor: Any, name: str) -> np.ndarray:
    """Return the values of a tensor. Those that a sparse one does not list are 0."""
    try:
        dtype = {1: np.float32, 2: np.int64, 3: np.int32}[tensor.dtype]
    except KeyError:
        raise BadRequest(400, f"{name}: got dtype {tensor.dtype}, allowed: float32, int64, int32") from None
    if not tensor.HasField("sparse_csr"):
        return _shaped(_array(tensor.dense, dtype, name), list(tensor.shape) or None, name)
    sparse, shape = tensor.sparse_csr, list(tensor.shape)
    values = _array(sparse.values, dtype, name)
    rows, columns = _array(sparse.crow_indices, np.int64, name), _array(sparse.col_indices, np.int64, name)
    if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] * values.itemsize > MAX_BODY:
        raise BadRequest(400, f"{name}: got the shape {shape[:8]}, a sparse tensor has two dimensions")
    counts: np.ndarray = np.diff(rows)
    is_whole = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns)
    if not is_whole or (counts < 0).any() or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise BadRequest(400, f"{name}: its sparse indices do not describe {shape[0]} x {shape[1]} values")
    dense = np.zeros(shape, dtype)
    dense[np.searchsorted(rows, np.arange(len(columns)), side="right") - 1, columns] = values
    return dense


def _array(data: bytes, dtype: Any, name: str) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise BadRequest(400, f"{name}: {len(data)} bytes are not a whole number of {np.dtype(dtype)}")
    return np.frombuffer(data, dtype)


def _shaped(values: np.ndarray, shape: Sequence[int] | None, name: str) -> np.ndarray:
    if shape is None:
        return values
    if len(shape) > 4 or min(shape, default=0) < 0 or int(np.prod(shape, dtype=object)) != values.size:
        raise BadRequest(400, f"{name}: got {values.size} values for the shape {list(shape)[:8]}")
    return values.reshape(shape)


# ----------------------------------------------------------------------------------------------------------------------
BodyT = TypeVar("BodyT", bound=TinkerBody)
TurnT = TypeVar("TurnT", bound=OfRunBody)


def decompressed(raw: bytes, encoding: str | None) -> bytes:
    """Return a body as it was before `Content-Encoding`, if that is not too long."""
    if not encoding or encoding == "identity":
        return raw
    if encoding != "zstd":
        raise BadRequest(415, f"Content-Encoding: got {encoding[:50]}, allowed: zstd")
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        raise BadRequest(415, "Content-Encoding: zstd needs the package zstandard on the server") from None
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(io.BytesIO(raw)) as reader:
            body: bytes = reader.read(MAX_BODY + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise BadRequest(400, f"body: is not zstd: {error}"[:300]) from None
    if len(body) > MAX_BODY:
        raise BadRequest(413, f"the body has more than {MAX_BODY} bytes when it is decompressed")
    return body


def read(kind: type[BodyT], raw: bytes) -> BodyT:
    """Read a body of JSON. BadRequest, with the first wrong key, for anything that is not as it must be."""
    return _checked(kind, json_object(raw))


def read_load(raw: bytes) -> LoadWeightsBody:
    """Read a request for a load, which is to a run, or makes one."""
    table = json_object(raw)
    if table.get("model_id") is None:
        return _checked(LoadWeightsBody, table)
    with _of_turn(_address(table)):
        return _checked(LoadWeightsBody, table)


def read_turn(kind: type[TurnT], raw: bytes) -> TurnT:
    """Read a request to a run. BadTurn if it is wrong, but its place is known."""
    table = json_object(raw)
    with _of_turn(_address(table)):
        return _checked(kind, table)


def refused_turn(raw: bytes, reason: str) -> BadTurn:
    """Return the refusal of a request to a run, whatever else it says."""
    address = _address(json_object(raw))
    return BadTurn(BadRequest(400, reason), address.model_id, address.seq_id)


def _address(table: dict[str, Any]) -> OfRunBody:
    return _checked(OfRunBody, {key: table.get(key) for key in ("model_id", "seq_id")})


@contextlib.contextmanager
def _of_turn(address: OfRunBody) -> Generator[None]:
    try:
        yield
    except BadRequest as error:
        raise BadTurn(error, address.model_id, address.seq_id) from None


def _checked(kind: type[BodyT], table: dict[str, Any]) -> BodyT:
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise invalid_body(error, lambda key: HINTS.get(key, "is not served here")) from None
