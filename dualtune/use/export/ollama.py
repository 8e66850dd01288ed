"""A Modelfile for Ollama: the file of weights, the chat template in Ollama's language, stop texts, a system message.

Ollama cannot read Jinja. The template of the training is recognized by what it writes: if that is what a template by
name writes (`data.template`), also with an empty thought behind the prompt, or ChatML with a system message of its own,
its twin below goes into the Modelfile, otherwise nothing does, and the caller says so. A model that was trained without
a template gets prompts as they are.
The language is Go's text/template, with the fields of
https://github.com/ollama/ollama/blob/main/docs/template.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dualtune.base.errors import ConfigError
from dualtune.data.chat.template import NAMES, ChatTemplate, named_template
from dualtune.data.sources.rows import RowError
from dualtune.data.tokens.tokenizer import Tokenizer

PLAIN = "none"  # trained without a template
_SYSTEM = {"role": "system", "content": "Be brief."}
_ASKS, _SAYS = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
_PROBES = ([_ASKS], [_ASKS, _SAYS, _ASKS], [_SYSTEM, _ASKS], [_SYSTEM, _ASKS, _SAYS, _ASKS])

_CHATML = """{{ range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
_LLAMA_TURNS = """{{ .Role }}<|end_header_id|>

{{ .Content }}<|eot_id|>"""
_LLAMA_ANSWER = """<|start_header_id|>assistant<|end_header_id|>

"""
_GEMMA = """{{ $first := true }}{{ range .Messages }}{{ if eq .Role "user" }}<start_of_turn>user
{{ if and $first $.System }}{{ $.System }}

{{ end }}{{ $first = false }}{{ .Content }}<end_of_turn>
{{ else if eq .Role "assistant" }}<start_of_turn>model
{{ .Content }}<end_of_turn>
{{ end }}{{ end }}<start_of_turn>model
"""


def _chatml_with_default(system_turn: str) -> str:
    return "{{ if not .System }}" + system_turn + "{{ end }}" + _CHATML


# Without the token at the beginning of a text, which llama.cpp adds.
TEMPLATES = {
    PLAIN: "{{ .Prompt }}",
    "chatml": _CHATML,
    "llama-3": "{{ range .Messages }}<|start_header_id|>" + _LLAMA_TURNS + "{{ end }}" + _LLAMA_ANSWER,
    "llama-3.1": """<|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: December 2023
Today Date: 26 Jul 2024

{{ .System }}<|eot_id|>{{ range .Messages }}{{ if ne .Role "system" }}<|start_header_id|>"""
    + _LLAMA_TURNS + "{{ end }}{{ end }}" + _LLAMA_ANSWER,
    "qwen-2.5": _chatml_with_default(
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    ),
    "qwen-3": _CHATML,
    "gemma-2": _GEMMA,
    "gemma-3": _GEMMA,
    "mistral-small": """{{ if .System }}[SYSTEM_PROMPT]{{ .System }}[/SYSTEM_PROMPT]{{ end }}{{ range .Messages }}"""
    """{{ if eq .Role "user" }}[INST]{{ .Content }}[/INST]{{ else if eq .Role "assistant" }}{{ .Content }}</s>"""
    """{{ end }}{{ end }}""",
    "phi-3": """{{ range .Messages }}<|{{ .Role }}|>
{{ .Content }}<|end|>
{{ end }}<|assistant|>
""",
}  # fmt: skip


def template_for(tokenizer: Tokenizer) -> str | None:
    """Return Ollama's template that writes what the tokenizer's template writes before an answer, or None."""
    template = tokenizer.template
    if template is None:
        return TEMPLATES[PLAIN]
    written = _written(template)
    tails = {name: _tail(written, ChatTemplate(named_template(name), tokenizer.special_tokens)) for name in NAMES}
    if twins := {name: tail for name, tail in tails.items() if tail is not None}:
        name = min(twins, key=lambda name: len(twins[name]))
        return TEMPLATES[name] + twins[name]
    default = re.match(r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n", written[0] or "", re.DOTALL)
    if default is None or "{{" in default[0] or '"""' in default[0]:
        return None
    chatml = _written(ChatTemplate(named_template("chatml"), {}))
    with_default = [
        text and default[0] * (_SYSTEM not in probe) + text for text, probe in zip(chatml, _PROBES, strict=True)
    ]
    return _chatml_with_default(default[0]) if written == with_default else None


def modelfile(weights: str, template: str | None, stops: Iterable[str], system: str | None) -> str:
    """Return the text of a Modelfile. `weights` is a path relative to it. ConfigError if a text cannot be quoted."""
    lines = [f"FROM ./{weights}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    lines += [f"PARAMETER stop {quoted(stop, 'a stop text')}" for stop in stops]
    if system is not None:
        lines.append(f"SYSTEM {quoted(system, '--system')}")
    return "\n".join(lines) + "\n"


def quoted(text: str, name: str) -> str:
    """Return a text as a Modelfile quotes it. ConfigError, which names `name`, if it cannot hold the text."""
    if '"' not in text and "\n" not in text:
        return f'"{text}"'
    if '"""' in text or text.endswith('"'):
        raise ConfigError(f'{name}: got a text with """ or a " at its end, which a Modelfile cannot hold')
    return f'"""{text}"""'


def _tail(written: list[str | None], named: ChatTemplate) -> str | None:
    """Return what these prompts have behind those of a template, such as an empty thought; None if they are others."""
    pairs = [*zip(written, _written(named), strict=True)]
    if any((text is None) != (twin is None) or not (text or "").startswith(twin or "") for text, twin in pairs):
        return None
    tails = {text[len(twin) :] for text, twin in pairs if text is not None and twin is not None}
    tail = tails.pop() if len(tails) == 1 else "{{"
    return None if "{{" in tail or '"""' in tail else tail


def _written(template: ChatTemplate) -> list[str | None]:
    """Return what a template writes for each of the probes, None for one that it refuses."""
    texts: list[str | None] = []
    for probe in _PROBES:
        try:
            texts.append(template.render(probe, add_generation_prompt=True))
        except RowError:
            texts.append(None)
    return texts
