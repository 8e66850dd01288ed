"""A teacher on an OpenAI-compatible server, which is asked for the log-probabilities of tokens that it is given.

A request is a prompt of token ids with `echo`, without a token to follow it: as vLLM and `dualtune serve` answer it.
Other servers know the log-probabilities of what they have drawn alone, or none; docs/objectives.md has a table.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from itertools import repeat
from typing import Any, cast

import numpy as np

from dualtune.base import interrupt
from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.config.schema import DistillConfig
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Batch, Engine
from dualtune.model.adapter import AdapterSpec
from dualtune.train.fingerprints import PROMPTS

KEY = "DUALTUNE_TEACHER_KEY"  # the environment variable with the key of the server
AT_ONCE = 8  # requests
SILENCE_S, ANSWER_S = 120.0, 600.0  # until something comes, and until all has come
PAUSES_S = (1.0, 4.0, 16.0)
MAX_ANSWER = 1 << 28  # bytes
REFUSED = (400, 404, 405, 413, 422, 501)  # HTTP: of what is asked, not of who asks or when
INSTEAD = (
    "A teacher must honour echo, max_tokens: 0, logprobs and return_tokens_as_token_ids of /completions with a prompt "
    "of token ids, as dualtune serve and vLLM do; mlx_lm.server, transformers serve and llama.cpp's server do not. "
    "Instead, serve the model with dualtune serve, or let distill.teacher be its directory"
)
UNKNOWN = (
    "Does a server run there, and is this the address up to its last part before /models, as http://127.0.0.1:8000/v1? "
    "The run begins, or resumes, when it answers"
)
MORE_THAN_ALLOWED = (
    "If it allows fewer tokens a place, lower distill.top_k; vLLM allows 20, or what --max-logprobs says"
)
MOST_GAP = 0.05  # nats a token, on average: a server rounds otherwise in another batch or on another GPU


class TeacherLost(EnvironmentFault):
    """The server does not answer, or not what is needed. The run saves what it has and resumes when it does."""


class Unsuitable(TeacherLost):
    """The server answers, but does not say what its model makes of the tokens that it is given."""


class RequestRefused(Exception):
    """The server does not answer such a request."""


class ServedTeacher:
    """A model behind an address such as http://127.0.0.1:8000/v1."""

    probe: np.ndarray | None = None

    def __init__(self, settings: DistillConfig, tokenizer: Tokenizer) -> None:
        """`tokenizer`: the student's."""
        assert settings.teacher is not None
        self._tokenizer, self._top_k = tokenizer, settings.top_k
        self._address, self._model = settings.teacher.rstrip("/"), settings.served_as or ""
        self.identity = f"served, {settings.served_as or 'by its only name'}"
        self._has_answered = False

    def start(self, student: Engine, spec: AdapterSpec) -> None:
        """Ask for the names of its models, and for the probe.

        ConfigError if it is not clear which model is meant, if the server cannot score tokens, or reads others.
        """
        listed = self._asked("/models").get("data")
        self._has_answered = True
        names = [str(each["id"]) for each in cast("list[dict[str, Any]]", listed)] if isinstance(listed, list) else []
        if not self._model and len(names) == 1:
            (self._model,) = names
        if self._model not in names:
            raise ConfigError(
                f"distill.served_as: got {self._model or 'null'}, {self._address} has: {', '.join(names) or 'nothing'}"
            )
        try:
            texts = [self._tokenizer.encode(text, special=True) for text in PROMPTS]
            self._check_tokens(texts[0].tolist())
            self._scored(texts[0].tolist(), self._top_k)  # it may allow fewer
            self.probe = np.concatenate([self._scored(text.tolist(), 0)[1][1:, 0] for text in texts])
        except Unsuitable as error:
            raise ConfigError(str(error)) from error

    def _check_tokens(self, text: list[int]) -> None:
        """Raise ConfigError if the server reads the student's tokens as other texts."""
        theirs = "".join(map(str, cast("list[Any]", self._logprobs(text, 0, as_ids=False).get("tokens") or [])))
        ours = "".join(self._tokenizer.decode_all([token]) for token in text)
        if _letters(theirs) != _letters(ours):
            raise ConfigError(
                f"distill.teacher: {self._address} has another tokenizer than the student: it reads the tokens of "
                f"{ours!r} as {theirs!r}. A teacher reads the student's tokens: choose one of the same family"
            )

    def answering(self, student: Engine) -> contextlib.AbstractContextManager[ServedTeacher]:
        return contextlib.nullcontext(self)

    def __call__(self, batch: Batch, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and ln q of the targets, [M, k], or those of the labels, [M, 1]: see `teachers.TopLogprobs`."""
        if not batch.num_targets:  # it fills a gap
            return np.zeros((0, max(k, 1)), np.int32), np.zeros((0, max(k, 1)), np.float32)
        lengths = [int((row_T > 0).sum()) for row_T in batch.segments_BT]
        texts = [tokens_T[:length].tolist() for tokens_T, length in zip(batch.tokens_BT, lengths, strict=True)]
        with ThreadPoolExecutor(AT_ONCE, "dualtune-teacher") as pool:
            scored = list(pool.map(self._scored, texts, repeat(k)))
        tokens, logprobs = list[np.ndarray](), list[np.ndarray]()
        for is_target_T, (tokens_Tk, logprobs_Tk) in zip(batch.is_target_BT, scored, strict=True):
            after = np.flatnonzero(is_target_T) + 1  # the scores of a token stand in its own place
            tokens.append(tokens_Tk[after])
            logprobs.append(logprobs_Tk[after])
        return np.concatenate(tokens), np.concatenate(logprobs)

    def _scored(self, text: list[int], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and ln q in the place of each token of a text, [T, k] or [T, 1]; the first has zeros."""
        logprobs = self._logprobs(text, k, as_ids=True)
        try:
            rows = _rows(logprobs, text, k)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._unsuitable(str(error)) from error
        values = np.array([[(0, 0.0)] * max(k, 1), *rows], np.float64)
        return values[..., 0].astype(np.int32), values[..., 1].astype(np.float32)

    def _logprobs(self, text: list[int], k: int, *, as_ids: bool) -> dict[str, Any]:
        """Return what the API calls `logprobs` of a text. Unsuitable if the server does not say them."""
        try:
            answer = self._asked("/completions", {
                "model": self._model, "prompt": text, "echo": True, "max_tokens": 0, "logprobs": max(k, 1),
                "return_tokens_as_token_ids": as_ids,
            })  # fmt: skip
        except RequestRefused as error:
            raise self._unsuitable(f"{error}. {MORE_THAN_ALLOWED}" if k else str(error)) from error
        try:
            return dict(answer["choices"][0]["logprobs"])
        except (LookupError, TypeError, ValueError) as error:
            raise self._unsuitable("its answer has no logprobs") from error

    def _unsuitable(self, reason: str) -> Unsuitable:
        return Unsuitable(
            f"distill.teacher: {self._address} does not say what tokens that it is given are worth: {reason}. {INSTEAD}"
        )

    def _asked(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what the server answers. TeacherLost if it does not, even when asked again; RequestRefused."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, headers)
        reason = ""
        for pause in (*PAUSES_S, None):
            interrupt.poll()
            try:
                with urllib.request.urlopen(request, timeout=SILENCE_S) as answer:
                    parsed = json.loads(_read(answer))
                if isinstance(parsed, dict):
                    return cast("dict[str, Any]", parsed)
                reason = "its answer is not a JSON object"
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.read(300).decode(errors='replace')}"
                if body is not None and error.code in REFUSED:
                    raise RequestRefused(reason) from error
                if error.code < 500 and error.code != 429:  # it would say the same again
                    break
            except _TooLong as error:
                reason = str(error)
            except (OSError, HTTPException, ValueError) as error:  # cut off in the middle, too
                is_late = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
                reason = f"nothing came for {SILENCE_S:g} s" if is_late else str(error).strip() or type(error).__name__
            if pause is not None:
                time.sleep(pause)
        what_to_do = "The run resumes when it does" if self._has_answered else UNKNOWN
        raise TeacherLost(
            f"distill.teacher: {self._address}{path} does not answer: {reason}. {what_to_do}; a key is read from {KEY}"
        )


class _TooLong(Exception):
    """An answer that does not come to its end."""


def _read(answer: HTTPResponse) -> bytes:
    """Return the body of an answer. _TooLong for one that takes too long, or has too many bytes."""
    ends, body = time.monotonic() + ANSWER_S, bytearray()
    while piece := answer.read1(1 << 20):
        body += piece
        if time.monotonic() > ends:
            raise _TooLong(f"after {ANSWER_S:g} s it has sent {len(body)} bytes, and no end")
        if len(body) > MAX_ANSWER:
            raise _TooLong(f"it has sent more than {MAX_ANSWER} bytes")
    return bytes(body)


def same_teacher(before: str | None, probe: np.ndarray) -> str:
    """Return the probe that checkpoints store: that of the run's first start. ConfigError for another teacher.

    `before`: the probe in the checkpoint that is resumed; None: it has none.
    """
    if before is None:
        return " ".join(f"{logprob:.4f}" for logprob in probe)
    earlier = np.array(before.split(), np.float32)
    gap = float(np.abs(earlier - probe).mean()) if earlier.shape == probe.shape else math.inf
    if not gap <= MOST_GAP:  # it may be NaN
        raise ConfigError(
            "distill.teacher: the server has another model under this name than when the run began: of fixed texts "
            f"its log-probabilities differ by {gap:.3g} nats a token, allowed: {MOST_GAP:g}. Serve the previous one, "
            "or start a new run in another directory: --run-dir DIR or --set run.dir=DIR"
        )
    return before


def _rows(scores: Mapping[str, Any], text: Sequence[int], k: int) -> list[list[tuple[int, float]]]:
    """Return the most probable tokens in the place of each token but the first, or those themselves, with their ln q.

    ValueError, or another error of a wrong type, if the answer does not have them.
    """
    logprobs: list[float] = scores["token_logprobs"][1:]
    if len(logprobs) != len(text) - 1:
        raise ValueError(f"got {len(logprobs) + 1} log-probabilities of {len(text)} tokens")
    if not k:
        return [[(token, float(logprob))] for token, logprob in zip(text[1:], logprobs, strict=True)]
    tops: list[dict[str, float]] = scores["top_logprobs"][1:]
    rows = [sorted(((_id_of(token), float(logprob)) for token, logprob in top.items()), key=_rank)[:k] for top in tops]
    if len(rows) != len(logprobs) or any(len(row) < k for row in rows):
        raise ValueError(f"got fewer than {k} tokens in a place. {MORE_THAN_ALLOWED}")
    return rows


def _letters(text: str) -> str:
    """Return the ASCII characters but spaces: how a single token has others is a matter of the server."""
    return "".join(each for each in text if each.isascii() and not each.isspace())


def _rank(pair: tuple[int, float]) -> tuple[float, int]:
    return -pair[1], pair[0]


def _id_of(token: str) -> int:
    """Return the id of a token that is written as `token_id:5`."""
    prefix, _, number = token.rpartition(":")
    if prefix != "token_id":
        raise ValueError(f"its tokens have no ids ({token[:20]!r})")
    return int(number)
