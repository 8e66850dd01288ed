"""The tokenizer and chat template of a base model, behind the few verbs that dualtune needs.

transformers does the work (it is imported here, late: `dualtune --help` must not pay for it); its chat templates run in
Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from jinja2 import TemplateError

from dualtune.data.formats import Message
from dualtune.errors import ConfigError, EnvironmentFault


class Tokenizer:
    """Encodes text with character offsets, decodes, renders chats.

    `template` is "auto" (the model's own, if it has one), "none", or the path of a Jinja file.
    """

    def __init__(self, model_dir: Path, template: str = "auto") -> None:
        self._hf = _load(model_dir)
        self.template = _template(self._hf, template)
        self.eos_id: int | None = self._hf.eos_token_id
        # A turn may end with another special token than EOS (Llama 3: <|eot_id|>).
        self.special_ids = frozenset(self._hf.all_special_ids) | frozenset(
            id for id, token in self._hf.added_tokens_decoder.items() if token.special
        )
        ends = {self.eos_id, *_generation_ends(model_dir), self._end_of_turn()}
        self.stop_ids = frozenset(id for id in ends if id is not None)  # tokens that end an answer

    def encode_batch(self, texts: Sequence[str], *, special: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """(token ids int32 [T], character offsets int32 [T, 2]) of each text.

        `special` adds what the tokenizer puts around a plain text (BOS); a rendered chat has its own already.
        """
        out = self._hf(
            list(texts), add_special_tokens=special, return_offsets_mapping=True, return_attention_mask=False
        )
        return [
            (np.asarray(ids, np.int32), np.asarray(offsets, np.int32).reshape(-1, 2))
            for ids, offsets in zip(out["input_ids"], out["offset_mapping"], strict=True)
        ]

    def encode(self, text: str, *, special: bool) -> np.ndarray:
        return self.encode_batch([text], special=special)[0][0]

    def decode(self, ids: Sequence[int]) -> str:
        return self._hf.decode(list(ids), skip_special_tokens=True)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The chat as text. Raises jinja2.TemplateError when the template refuses the conversation."""
        assert self.template is not None
        turns = [{"role": message.role, "content": message.content} for message in messages]
        return self._hf.apply_chat_template(
            turns, chat_template=self.template, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def encode_prompt(self, prompt: str) -> np.ndarray:
        """A user's prompt as the model was trained to see it: through the chat template, if there is one."""
        if self.template is None:
            return self.encode(prompt, special=True)
        return self.encode(self.render([Message("user", prompt)], add_generation_prompt=True), special=False)

    def _end_of_turn(self) -> int | None:
        """The special token that the template puts behind an assistant's message, if it puts one."""
        if self.template is None:
            return None
        question, answer = Message("user", "?"), Message("assistant", "!")
        try:
            before = self.render([question], add_generation_prompt=True)
            through = self.render([question, answer])
        except TemplateError:
            return None
        behind = self.encode(through[len(before) + len(answer.content) :], special=False)
        return int(behind[0]) if len(behind) and int(behind[0]) in self.special_ids else None


def _generation_ends(model_dir: Path) -> list[int]:
    """`eos_token_id` of generation_config.json: one id or several."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return []
    found: int | list[int] | None = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return found if isinstance(found, list) else [] if found is None else [found]


def _load(model_dir: Path) -> Any:
    # transformers says "PyTorch was not found" at import on an MLX-only machine; models come from the engines.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from huggingface_hub.errors import StrictDataclassError  # what transformers 5 raises for an impossible config.json
    from transformers import AutoTokenizer

    try:
        tokenizer = cast(Any, AutoTokenizer).from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, StrictDataclassError) as error:
        reason = str(error).strip().splitlines()[0]
        raise EnvironmentFault(f"{model_dir}: its tokenizer cannot be loaded: {reason}") from error
    if not tokenizer.is_fast:
        raise EnvironmentFault(f"{model_dir}: a tokenizer.json is needed (a fast tokenizer, with character offsets)")
    tokenizer.model_max_length = int(1e9)  # the length limit is data.max_length; no second opinion as a warning
    return tokenizer


def _template(tokenizer: Any, choice: str) -> str | None:
    if choice == "none":
        return None
    if choice == "auto":
        return tokenizer.get_chat_template() if tokenizer.chat_template else None
    path = Path(choice).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.template: got '{choice}', allowed: auto, none, or an existing Jinja file")
    return path.read_text(encoding="utf-8")
