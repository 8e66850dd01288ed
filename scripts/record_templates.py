"""Record what the original chat templates of model families write, for tests/data/test_named_templates.py.

    python scripts/record_templates.py ORIGINALS

ORIGINALS is a directory with the original templates under the names of ORIGINAL below. llama.cpp has most of them in
models/templates (also in the source package of llama-cpp-python); docs/data.md says where the others are. transformers
renders each over the conversations below. Writes tests/golden/named_templates/NAME.json; the originals stay outside
the repository.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "named_templates"
ORIGINAL = {
    "chatml": "chatml",
    "llama-3": "meta-llama-Meta-Llama-3-8B-Instruct",
    "llama-3.1": "meta-llama-Llama-3.1-8B-Instruct",
    "qwen-2.5": "Qwen-Qwen2.5-7B-Instruct",
    "qwen-3": "Qwen-Qwen3-0.6B",
    "gemma-2": "google-gemma-2-2b-it",
    "gemma-3": "google-gemma-3-270m-it",
    "mistral-small": "Mistral-Small-3.2-24B-Instruct-2506",
    "phi-3": "microsoft-Phi-3.5-mini-instruct",
}
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
SYSTEM = {"role": "system", "content": " Be <b>brief</b>.\n"}
ASKS = {"role": "user", "content": ' "2+2"?\n'}
SAYS = {"role": "assistant", "content": "It's 4 — é "}
ASKS_AGAIN = {"role": "user", "content": "3+3?"}
SAYS_AGAIN = {"role": "assistant", "content": "\n6"}
THINKS = {"role": "assistant", "content": "<think>\n3+3 is 6\n</think>\n\n6"}
REASONS = {"role": "assistant", "content": "6", "reasoning_content": "\n3+3 is 6"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [ASKS],
    "turn": [ASKS, SAYS],
    "turns": [ASKS, SAYS, ASKS_AGAIN, SAYS_AGAIN],
    "system and question": [SYSTEM, ASKS],
    "system and turn": [SYSTEM, ASKS, SAYS],
    "system and turns": [SYSTEM, ASKS, SAYS, ASKS_AGAIN, SAYS_AGAIN],
    "questions after a system message": [SYSTEM, ASKS, SAYS, ASKS_AGAIN],
    "no answer": [ASKS, ASKS_AGAIN],
    "answer first": [SAYS, ASKS],
    "answers": [ASKS, SAYS, SAYS_AGAIN],
    "system later": [ASKS, SAYS, SYSTEM, ASKS_AGAIN, SAYS_AGAIN],
    "empty system": [{"role": "system", "content": ""}, ASKS, SAYS],
    "thoughts": [ASKS, THINKS],
    "thoughts before": [ASKS, THINKS, ASKS_AGAIN, SAYS_AGAIN],
    "reasoning": [ASKS, REASONS],
    "reasoning before": [ASKS, REASONS, ASKS_AGAIN, THINKS],
}


def main(originals: Path) -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, original in ORIGINAL.items():
        source = (originals / f"{original}.jinja").read_text(encoding="utf-8")
        found = {
            conversation: {str(prompt).lower(): rendered(source, messages, prompt) for prompt in (False, True)}
            for conversation, messages in CONVERSATIONS.items()
        }
        if name == "mistral-small":
            found = {key: texts if "system" in key else without_default(texts) for key, texts in found.items()}
        digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        table = {"original": original, "sha256": digest, "texts": found}
        text = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
        (GOLDEN / f"{name}.json").write_text(text, encoding="utf-8")


def rendered(source: str, messages: list[dict[str, Any]], prompt: bool) -> str | None:
    """Return what transformers writes; None if the template refuses the conversation."""
    from jinja2 import TemplateError

    try:
        texts, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=prompt, **SPECIAL)
    except TemplateError:
        return None
    return texts[0]


def without_default(texts: dict[str, str | None]) -> dict[str, str | None]:
    """Leave out the system message that Mistral's template adds by itself, a page with today's date: ours has none."""
    block = re.compile(r"\[SYSTEM_PROMPT\].*?\[/SYSTEM_PROMPT\]", re.DOTALL)
    return {key: text and block.sub("", text, count=1) for key, text in texts.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
