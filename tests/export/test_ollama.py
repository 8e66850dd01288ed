"""Modelfiles: which of Ollama's templates writes what a chat template writes, and what stands beside it."""

import pytest

from dualtune.base.errors import ConfigError
from dualtune.data.chat.template import NAMES, named_template
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.use.export.ollama import TEMPLATES, modelfile, template_for


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_recognized_by_what_it_writes(tiny_llama, name):
    assert template_for(Tokenizer(tiny_llama, name)) == TEMPLATES[name]


@pytest.mark.parametrize(("system", "is_known"), [("You are SmolLM.", True), ("Not {{ this }}.", False)])
def test_chatml_with_a_system_message_of_its_own_is_recognized(tiny_llama, tmp_path, system, is_known):
    turn = f"<|im_start|>system\n{system}<|im_end|>\n"
    guard = "{% if messages[0].role != 'system' %}{% raw %}" + turn + "{% endraw %}\n{% endif %}"
    (tmp_path / "t.jinja").write_text(guard + named_template("chatml"))
    found = template_for(Tokenizer(tiny_llama, str(tmp_path / "t.jinja")))
    expected = "{{ if not .System }}" + turn + "{{ end }}" + TEMPLATES["chatml"]
    assert found == (expected if is_known else None)


def test_an_empty_thought_that_variables_of_the_template_bring_stands_behind_the_prompt(tiny_llama):
    tokenizer = Tokenizer(tiny_llama, "qwen-3", template_variables={"enable_thinking": False})
    assert template_for(tokenizer) == TEMPLATES["qwen-3"] + "<think>\n\n</think>\n\n"


def test_a_model_without_a_template_gets_the_prompt_and_an_unknown_one_nothing(tiny_llama, tmp_path):
    assert template_for(Tokenizer(tiny_llama, "none")) == "{{ .Prompt }}"
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert template_for(Tokenizer(tiny_llama, str(tmp_path / "t.jinja"))) is None


def test_a_modelfile_names_the_weights_the_template_and_where_to_stop():
    found = modelfile("m.gguf", TEMPLATES["chatml"], ["<|im_end|>", "</s>"], "Be\nbrief.")
    assert found.startswith('FROM ./m.gguf\nTEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}\n')
    assert found.endswith('PARAMETER stop "<|im_end|>"\nPARAMETER stop "</s>"\nSYSTEM """Be\nbrief."""\n')
    assert "TEMPLATE" not in modelfile("m.gguf", None, [], None)
    assert modelfile("m.gguf", None, ['a"b'], "Be brief.").endswith('stop """a"b"""\nSYSTEM "Be brief."\n')
    for stops, system in (([], 'say """'), (['"'], None)):
        with pytest.raises(ConfigError, match="which a Modelfile cannot hold"):
            modelfile("m.gguf", None, stops, system)
