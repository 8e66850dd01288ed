"""An export stops where the training stopped: its files name the tokens that end a turn, wherever a program looks."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dualtune.cli.screen import Phases
from dualtune.config import Config, to_yaml
from dualtune.data.tokens.stop_tokens import stop_texts, stop_tokens, write_stop_tokens
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.copies import copy_without_weights
from dualtune.model.embeddings import untrained_rows
from dualtune.model.formats.chat_template import write_training_template
from dualtune.model.formats.directory import Adapter, write_adapter
from dualtune.show.run import run
from dualtune.use.export.ollama import modelfile

EOS, END = 2, 4  # </s>, at which the base stops, and <|im_end|>, with which its chat template ends a turn
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def eos_of(model, name, key="eos_token_id"):
    return json.loads((model / name).read_text()).get(key)


@pytest.fixture
def base(tiny_llama, tmp_path):
    """A base checkpoint: it knows the tokens of ChatML, and stops at </s> by each of its files."""
    shutil.copytree(tiny_llama, tmp_path / "base")
    (tmp_path / "base/generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.5}')
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path):
    tensors = init_adapter({"model.layers.0.self_attn.q_proj": (32, 32)}, 2, 0)
    tensors = {name: tensor + 0.3 for name, tensor in tensors.items()}
    spec = AdapterSpec(2, 40.0, 0.0, ("model.layers.0.self_attn.q_proj",))
    write_adapter(tmp_path / "tuned", Adapter(spec, tensors, template=TURNS))
    return tmp_path / "tuned"


def assert_stops(model):
    assert eos_of(model, "generation_config.json") == [END, EOS]
    assert eos_of(model, "config.json") == [END, EOS]
    assert AutoTokenizer.from_pretrained(model).eos_token_id == END
    assert GenerationConfig.from_pretrained(model).eos_token_id == [END, EOS]
    assert stop_tokens(Tokenizer(model)) == ([END, EOS], ["<|im_end|>", "</s>"])


@pytest.mark.parametrize("words", [("export", "--to", "hf"), ("export", "--to", "mlx"), ("adapter", "merge")])
def test_the_files_of_a_merged_model_name_the_end_of_a_turn(
    words, base, adapter, tmp_path, dualtune_main, open_backend, monkeypatch
):
    open_backend("torch")
    monkeypatch.setattr(Phases, "begin", lambda self, doing, what="", since=None: print(f"begin {doing} {what}"))
    command, options = (words[:1], words[1:]) if words[0] == "export" else (words, ())
    done = dualtune_main(*command, adapter, tmp_path / "out", "--base", base, "--platform", "cpu", *options)
    assert done.returncode == 0, done.stderr
    if "mlx" in words:
        assert "written as mlx: from base and adapter" in done.stdout and "as none" not in done.stdout
        begun = {"begin writing mlx, none", "begin computing the prompts with the model just written"}
        assert begun <= {*done.stdout.splitlines()}
    assert_stops(tmp_path / "out")
    assert eos_of(tmp_path / "out", "generation_config.json", "temperature") == 0.5
    assert eos_of(base, "config.json") == EOS  # the base's own files stay as they are


def test_a_model_that_was_trained_whole_stops_too(make_config, write_rows, qa_rows, open_backend, base, tmp_path):
    config = make_config(write_rows(qa_rows), {"train.steps": 1}, base)
    run(Config.model_validate(config.model_dump() | {"adapter": {"method": "full"}}), open_backend("torch"))
    assert_stops(tmp_path / "run" / "model")


def test_a_whole_model_of_an_older_run_is_exported_with_its_stops(base, tmp_path, dualtune_main, open_backend):
    open_backend("torch")
    words = ("export", base, tmp_path / "out", "--to", "hf", "--platform", "cpu")
    done = dualtune_main(*words)
    assert done.returncode == 0, done.stderr
    assert_stops(tmp_path / "out")
    assert eos_of(base, "config.json") == EOS


def test_the_tokenizer_keeps_its_eos_where_the_template_writes_it(base):
    """`{{ eos_token }}` in a template would otherwise become another text."""
    (base / "chat_template.jinja").write_text(TURNS + "{{ eos_token if messages | length > 4 }}")
    assert write_stop_tokens(base).ids == [END, EOS]
    assert AutoTokenizer.from_pretrained(base).eos_token_id == EOS
    assert eos_of(base, "generation_config.json") == [END, EOS]


def test_a_model_whose_turns_end_with_its_eos_is_left_alone(base):
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    before = {path.name: path.read_bytes() for path in base.iterdir() if path.name.startswith("tokenizer")}
    assert write_stop_tokens(base) == ([EOS], ["</s>"])
    assert eos_of(base, "config.json") == eos_of(base, "generation_config.json") == EOS
    assert before == {name: (base / name).read_bytes() for name in before}


def test_without_a_generation_config_one_is_written_with_what_the_config_says(base):
    (base / "generation_config.json").unlink()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"text_config": {"eos_token_id": 2}}))
    write_stop_tokens(base)
    assert json.loads((base / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [END, EOS]}
    assert eos_of(base, "config.json", "text_config") == {"eos_token_id": [END, EOS]}


OTHER_FILES = (
    "tekken.json", "tiktoken.model", "qwen.tiktoken", "tokenizer.model", "preprocessor_config.json",
    "processor_config.json", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip


@pytest.mark.parametrize("is_own_template", [True, False])
def test_every_file_of_the_tokenizer_travels(is_own_template, base, tmp_path):
    """An additional template belongs to the base's default one: with another, transformers would take it for tools."""
    for name in OTHER_FILES:
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("{}")
    (base / "secret.txt").write_text("not a file of a model")
    copy_without_weights(base, tmp_path / "copy")
    assert all((tmp_path / "copy" / name).read_text() == "{}" for name in OTHER_FILES)
    assert not (tmp_path / "copy/secret.txt").exists()
    source = TURNS if not is_own_template else (base / "chat_template.jinja").read_text()
    assert write_training_template(tmp_path / "copy", source, {}).startswith("of the training")
    assert (tmp_path / "copy" / OTHER_FILES[-1]).exists() == is_own_template


# --- a token that the model never learned ----------------------------------------------------------------------------


def write_rows_of(model, rows):
    """Replace rows of the embedding and the output head, by token."""
    tensors = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        for token, values in rows.items():
            tensors[name][token] = values
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


LIKE_OTHERS = np.linspace(0.5, 1.5, 32, dtype=np.float32) / 6


@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        ({END: 0.0}, (), "it is zero"),
        ({END: 0.001 * LIKE_OTHERS}, (), "its norm is 0.0"),
        ({END: LIKE_OTHERS, 3: LIKE_OTHERS, 0: LIKE_OTHERS}, (), "2 other reserved tokens have the same"),
        ({END: LIKE_OTHERS, 3: LIKE_OTHERS}, (), None),
        ({3: 0.0, EOS: 0.0}, (), None),  # neither ends a turn of this template
        ({END: 0.0}, ("--set", "adapter.targets=[q_proj, lm_head]"), None),
        ({END: 0.0}, ("--set", "adapter.method=full"), None),
        ({END: 0.0}, ("--set", "data.template=none"), None),
        ({EOS: 0.0}, ("--set", "data.template=none"), "it is zero"),
    ],
)
def test_check_config_says_that_the_end_of_a_turn_is_untrained(
    rows, options, reason, base, dualtune_main, make_config, write_rows, qa_rows, tmp_path
):
    write_rows_of(base, rows)
    (tmp_path / "config.yaml").write_text(to_yaml(make_config(write_rows(qa_rows), model=base)))
    words = ("check-config", tmp_path / "config.yaml", "--platform", "cpu", "--json", *options)
    checks = json.loads(dualtune_main(*words).stdout)["checks"]
    found = [check for check in checks if check["name"] == "stop token"]
    assert [check["level"] for check in found] == (["advice"] if reason else [])
    if reason:
        names = ("lm_head.weight", "model.embed_tokens.weight")
        assert all(f"{name}: {reason}" in found[0]["found"] for name in names)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_are_read_in_the_precision_of_the_file(dtype, base):
    import torch
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    tensors = {n: x.to(getattr(torch, dtype)) for n, x in load_torch(base / "model.safetensors").items()}
    tensors["lm_head.weight"][END] = 0
    save_torch(tensors, base / "model.safetensors", {"format": "pt"})
    assert untrained_rows(base, END, range(5)) == [("lm_head.weight", "it is zero")]


LINES = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n### End\n{% endfor %}"


def test_a_turn_that_ends_with_a_text_stops_there(base, dualtune_main, open_backend, tmp_path):
    open_backend("torch")
    (base / "chat_template.jinja").write_text(LINES)
    done = dualtune_main("export", base, tmp_path / "out", "--to", "hf", "--platform", "cpu")
    assert done.returncode == 0, done.stderr
    assert "stop_strings" in done.stdout + done.stderr
    assert GenerationConfig.from_pretrained(tmp_path / "out").stop_strings == ["\n### End"]
    assert json.loads((tmp_path / "out/export.json").read_text())["stops"] == ["</s>", "\n### End"]
    tokenizer = Tokenizer(tmp_path / "out")
    assert stop_texts(tokenizer) == ["</s>", "\n### End"]
    text = modelfile("m.gguf", None, stop_texts(tokenizer), None)
    assert text == 'FROM ./m.gguf\nPARAMETER stop "</s>"\nPARAMETER stop """\n### End"""\n'
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model.generate(**loaded("### user:\nHi", return_tensors="pt"), tokenizer=loaded, max_new_tokens=2)
