"""How results are written: as the client's protobuf messages, which it wants of losses and samples, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from dualtune.use.tinker.futures import Reply
from dualtune.use.tinker.messages import LossResult, SampleResult, TopLogprobs
from dualtune.use.tinker.requests import protobufs

NO_LOGPROB = -99999.0  # of an empty cell of the most probable tokens, whose token is 0


def plain(table: Mapping[str, Any]) -> Reply:
    """Return an answer that is JSON for every client."""
    return Reply(lambda: table)


def of_losses(result: LossResult) -> Reply:
    """Return the answer to losses."""
    size = sum(array.nbytes for output in result.outputs for array in output.values())
    return Reply(lambda: _losses_table(result), lambda: _losses_message(result), size)


def of_samples(result: SampleResult, last: int | None) -> Reply:
    """Return the answer to a request for samples. `last`: how many tokens of the prompt are scored."""
    size = sum(sequence.tokens.nbytes + sequence.logprobs.nbytes for sequence in result.sequences)
    if last is not None:
        result = _scored_from(result, last)
    return Reply(lambda: _samples_table(result), lambda: _samples_message(result), size)


def _losses_table(result: LossResult) -> dict[str, Any]:
    outputs = [{name: _tensor(array) for name, array in output.items()} for output in result.outputs]
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": dict(result.metrics)}


def _tensor(array: np.ndarray) -> dict[str, Any]:
    return {"data": array.ravel().tolist(), "dtype": _dtype(array), "shape": list(array.shape)}


def _dtype(array: np.ndarray) -> str:
    return "int64" if array.dtype.kind == "i" else "float32"


def _losses_message(result: LossResult) -> bytes:
    message = protobufs().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(result.metrics))
    # A record holds arrays of one form: their first dimension may differ, the others may not.
    for _, group in groupby(result.outputs, lambda output: [(name, array.shape[1:]) for name, array in output.items()]):
        outputs = [*group]
        record = message.loss_fn_outputs.add(num_datums=len(outputs))
        for name, first in outputs[0].items():
            _write_batch(record.fields[name], [output[name] for output in outputs], _dtype(first))
    return message.SerializeToString()


def _write_batch(field: Any, arrays: Sequence[np.ndarray], dtype: str) -> None:
    field.dtype = getattr(protobufs(), f"DTYPE_{dtype.upper()}")
    field.trailing_shape.extend(arrays[0].shape[1:])
    parts = [np.ascontiguousarray(array, dtype).tobytes() for array in arrays]
    field.data = b"".join(parts)
    field.offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64).tobytes()


def _scored_from(result: SampleResult, last: int) -> SampleResult:
    prompt = result.prompt_logprobs
    if prompt is None:
        return result
    scored = prompt.copy()
    scored[: max(0, len(prompt) - last)] = np.nan
    top = result.prompt_top
    if top is not None:
        logprobs = top.logprobs.copy()
        logprobs[: max(0, len(prompt) - last)] = np.nan
        top = TopLogprobs(top.tokens, logprobs)
    return SampleResult(result.sequences, scored, top)


def _samples_table(result: SampleResult) -> dict[str, Any]:
    return {
        "type": "sample",
        "sequences": [
            {
                "tokens": sequence.tokens.tolist(),
                "logprobs": sequence.logprobs.tolist(),
                "stop_reason": sequence.stop_reason,
                "topk_logprobs": _pairs(sequence.top),
            }
            for sequence in result.sequences
        ],
        "prompt_logprobs": None if result.prompt_logprobs is None else _numbers(result.prompt_logprobs),
        "topk_prompt_logprobs": _pairs(result.prompt_top),
    }


def _numbers(array: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in array]


def _pairs(top: TopLogprobs | None) -> list[list[tuple[int, float]] | None] | None:
    if top is None:
        return None
    rows = zip(top.tokens.tolist(), top.logprobs.tolist(), strict=True)
    return [None if np.isnan(logprobs).any() else [*zip(tokens, logprobs, strict=True)] for tokens, logprobs in rows]


def _samples_message(result: SampleResult) -> bytes:
    proto = protobufs()
    message = proto.SampleResponse()
    for sequence in result.sequences:
        written = message.sequences.add(
            stop_reason=proto.STOP_REASON_STOP if sequence.stop_reason == "stop" else proto.STOP_REASON_LENGTH,
            tokens=np.asarray(sequence.tokens, np.int32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, np.float32).tobytes(),
        )
        if sequence.top is not None:
            _write_top(written.topk_sampled_logprobs, sequence.top)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(result.prompt_logprobs, np.float32).tobytes()
    if result.prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, result.prompt_top)
    return message.SerializeToString()


def _write_top(message: Any, top: TopLogprobs) -> None:
    is_empty = np.isnan(top.logprobs)
    message.length, message.k = top.logprobs.shape
    message.token_ids = np.where(is_empty, 0, top.tokens).astype(np.int32).tobytes()
    message.logprobs = np.where(is_empty, NO_LOGPROB, top.logprobs).astype(np.float32).tobytes()
