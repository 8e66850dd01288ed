"""What a model says of the tokens of a prompt, as the older completions of OpenAI's API write it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np

from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.engine.backend import Engine
from dualtune.train.token_logprobs import token_logprobs


def prompt_scores(
    engine: Engine, tokenizer: Tokenizer, prompt: np.ndarray, top: int, *, as_ids: bool
) -> dict[str, Any]:
    """Return the table `logprobs` of a prompt (int32 [T]): its tokens, what they are worth, and others in their place.

    `as_ids`: in place of their texts, which different tokens may share.
    """
    (said,) = token_logprobs(engine, [prompt], top)
    texts = [tokenizer.decode_all([token]) for token in prompt.tolist()]
    name: Callable[[int], str] = "token_id:{}".format if as_ids else lambda token: tokenizer.decode_all([token])
    logprobs = [None, *said.logprobs[1:].tolist()]
    tops: list[dict[str, float] | None] | None = None
    if said.top is not None:
        places = zip(said.top.tokens_Tk[1:].tolist(), said.top.logprobs_Tk[1:].tolist(), strict=True)
        own = zip(prompt[1:].tolist(), said.logprobs[1:].tolist(), strict=True)
        # The token itself is there too. Of texts that are alike the most probable token's is kept, which comes first.
        tops = [None]
        for (tokens, values), mine in zip(places, own, strict=True):
            pairs = [mine, *reversed([*zip(tokens, values, strict=True)])]
            tops.append({name(token): value for token, value in pairs})
    return {
        "tokens": [name(token) for token in prompt.tolist()], "token_logprobs": logprobs, "top_logprobs": tops,
        "text_offset": [0, *accumulate(map(len, texts))][:-1],
    }  # fmt: skip
