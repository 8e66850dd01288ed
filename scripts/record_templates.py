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

from dualtune.data.chat import template

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
WITH_TOOLS = {name: original for name, original in ORIGINAL.items() if name in template.WITH_TOOLS} | {
    "chatml": "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"
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

# No arrays and no lists of types: the original of Hermes never ends with them.
PROPERTIES = {
    "a": {"type": "integer", "description": " The <first>. "},
    "b": {"type": "object", "additionalProperties": {"type": "number"}},
    "c": {"type": "object", "description": "é"},
    "d": {"enum": ["x", None], "description": "any"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "description": 'Adds "é".', "parameters": PARAMETERS}}
NOW = {
    "type": "function",
    "function": {"name": "now", "description": "Now.", "parameters": {"type": "object", "properties": {}}},
}
TOOLS = [ADD, NOW]


def calls(*each: tuple[str, str, dict[str, Any]], **extra: Any) -> dict[str, Any]:
    made = [{"type": "function", "id": id, "function": {"name": n, "arguments": values}} for id, n, values in each]
    return {"role": "assistant", "content": "", "tool_calls": made} | extra


ADDS = calls(("a1B2c3D4e", "add", {"a": 2, "b": ["é", None]}))
SUM = {"role": "tool", "content": ' {"sum": "<4>"}\n', "tool_call_id": "a1B2c3D4e", "name": "add"}
ASKS_TIME = calls(("000000001", "now", {}))
TIME = {"role": "tool", "content": "12:00", "tool_call_id": "000000001", "name": "now"}
BOTH = calls(("a1B2c3D4e", "add", {"a": 2}), ("000000001", "now", {}))
# What the templates of WITH_TOOLS are given beside it: these tools, or none.
TOOL_CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "tools": ([ASKS], TOOLS),
    "tools with a system message": ([SYSTEM, ASKS], TOOLS),
    "tools and turns": ([SYSTEM, ASKS, SAYS, ASKS_AGAIN, SAYS_AGAIN], TOOLS),
    "call": ([ASKS, ADDS], TOOLS),
    "result": ([ASKS, ADDS, SUM], TOOLS),
    "answer": ([SYSTEM, ASKS, ADDS, SUM, SAYS], TOOLS),
    "two calls": ([ASKS, BOTH, SUM, TIME, SAYS, ASKS_AGAIN, SAYS_AGAIN], TOOLS),
    "two results at the end": ([ASKS, BOTH, SUM, TIME], TOOLS),
    "calls after results": ([ASKS, ADDS, SUM, ASKS_TIME, TIME, SAYS, ASKS_AGAIN, ASKS_TIME, TIME, SAYS], TOOLS),
    "calls without tools": ([ASKS, ADDS, SUM, SAYS], []),
    "id of another form": ([ASKS, calls(("call_1", "now", {}))], TOOLS),
    "reasoning and a call": ([ASKS, ADDS | {"reasoning_content": "\nHm."}, SUM, REASONS], TOOLS),
}


def main(originals: Path) -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, original in ORIGINAL.items():
        path = GOLDEN / f"{name}.json"
        table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        plain = {conversation: (messages, []) for conversation, messages in CONVERSATIONS.items()}
        table |= recorded(originals, name, original, plain)
        if name in WITH_TOOLS:
            table["with_tools"] = recorded(originals, name, WITH_TOOLS[name], TOOL_CONVERSATIONS)
        path.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def recorded(originals: Path, name: str, original: str, conversations: dict[str, Any]) -> dict[str, Any]:
    """Return the texts of an original; nothing if it is not here."""
    path = originals / f"{original}.jinja"
    if not path.is_file():
        print(f"{name}: {path} is not here, its record stays")
        return {}
    source = path.read_text(encoding="utf-8")
    none = [] if original == WITH_TOOLS["chatml"] else None  # that of Hermes always lists the tools
    found = {
        conversation: {
            str(prompt).lower(): rendered(source, messages, tools or none, prompt) for prompt in (False, True)
        }
        for conversation, (messages, tools) in conversations.items()
    }
    if name == "mistral-small":
        has_system = {key for key, (messages, _) in conversations.items() if messages[0]["role"] == "system"}
        found = {key: texts if key in has_system else without_default(texts) for key, texts in found.items()}
    if original == WITH_TOOLS["chatml"]:  # without the BOS of Llama, and the system message that it writes for no tools
        found = {key: without_hermes(texts, bool(conversations[key][1])) for key, texts in found.items()}
    return {"original": original, "sha256": hashlib.sha256(source.encode()).hexdigest()[:16], "texts": found}


def rendered(source: str, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool) -> str | None:
    """Return what transformers writes; None if the template refuses the conversation."""
    from jinja2 import TemplateError

    try:
        texts, _ = render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **SPECIAL
        )
    except TemplateError:
        return None
    return texts[0]


def without_hermes(texts: dict[str, str | None], has_tools: bool) -> dict[str, str | None]:
    head = re.escape(SPECIAL["bos_token"]) + ("" if has_tools else r"<\|im_start\|>system\n.*?<\|im_end\|>\n")
    return {key: text and re.sub(rf"\A{head}", "", text, flags=re.DOTALL) for key, text in texts.items()}


def without_default(texts: dict[str, str | None]) -> dict[str, str | None]:
    """Leave out the system message that Mistral's template adds by itself, a page with today's date: ours has none."""
    block = re.compile(r"\[SYSTEM_PROMPT\].*?\[/SYSTEM_PROMPT\]", re.DOTALL)
    return {key: text and block.sub("", text, count=1) for key, text in texts.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
