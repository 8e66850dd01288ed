"""Teachers on servers of others: what vLLM has answered is read, and one that cannot be a teacher is refused.

tests/interop/test_servers.py asks vLLM and mlx_lm.server themselves.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config.schema import DistillConfig
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.train.objectives.served_teacher import ServedTeacher

RECORDED = json.loads((Path(__file__).parent / "data" / "vllm_scores.json").read_text(encoding="utf-8"))


@pytest.fixture
def teacher(tiny_llama):
    """Return a teacher at an address, asked for k tokens a place."""

    def at(address, k=2, model=tiny_llama, **settings):
        return ServedTeacher(DistillConfig(teacher=address, top_k=k, **settings), Tokenizer(model, "none"))

    return at


def answering(teacher, monkeypatch, answer):
    """Let a teacher's server have one model, and give this answer."""
    said = {"/models": {"data": [{"id": "m"}]}, "/completions": answer}
    monkeypatch.setattr(teacher, "_asked", lambda path, body=None: said[path])
    return teacher


@pytest.mark.parametrize("k", [0, 2])
def test_what_vllm_has_answered_is_read(teacher, monkeypatch, k):
    """Of a token that is none of the k most probable ones vLLM says k + 1."""
    asked, said = RECORDED["prompt"], RECORDED["answer"]["choices"][0]["logprobs"]
    tokens, logprobs = answering(teacher("http://x/v1"), monkeypatch, RECORDED["answer"])._scored(asked, k)
    assert {len(top) for top in said["top_logprobs"][1:]} == {2, 3} and said["tokens"][1] == f"token_id:{asked[1]}"
    assert tokens.shape == logprobs.shape == (len(asked), k or 1)
    for place, (ids, values) in enumerate(zip(tokens[1:], logprobs[1:], strict=True), start=1):
        likely = sorted(said["top_logprobs"][place].items(), key=lambda each: -each[1])[:k]
        expected = likely or [(f"token_id:{asked[place]}", said["token_logprobs"][place])]
        assert [f"token_id:{id}" for id in ids] == [name for name, _ in expected]
        np.testing.assert_allclose(values, [value for _, value in expected], rtol=1e-6)


def test_a_teacher_with_another_tokenizer_is_refused(teacher, monkeypatch):
    with pytest.raises(ConfigError, match=r"another tokenizer .* as '<\|im_start\|>"):
        answering(teacher("http://x/v1"), monkeypatch, RECORDED["answer as text"]).start(None, None)


def test_more_tokens_a_place_than_a_server_allows_are_refused_at_the_start(serve, teacher):
    address = f"http://127.0.0.1:{serve().port}/v1"
    with pytest.raises(ConfigError, match=r"400 .*logprobs.* lower distill\.top_k; vLLM allows 20"):
        teacher(address, 257).start(None, None)
