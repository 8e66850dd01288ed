"""The template of a training is used again: on another machine, by generate and eval, by PEFT, mlx-lm, transformers."""

import json
import shutil

import pytest

from dualtune.base.errors import ConfigError
from dualtune.model.formats.chat_template import TEMPLATE_FILE, write_training_template
from dualtune.model.formats.directory import read_adapter
from dualtune.show.run import run, summary
from dualtune.train.generation.inference import load_model
from dualtune.train.hooks import Hook
from dualtune.train.prepare import prepare
from dualtune.use.model_card import adapter_card
from dualtune.use.transfer.bundles.bundle import inspect, unpack
from dualtune.use.transfer.bundles.pack import pack

TOOLS = (
    "TOOLS{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def bare(tiny_llama, tmp_path):
    """A model without a template."""
    path = shutil.copytree(tiny_llama, tmp_path / "bare")
    (path / TEMPLATE_FILE).unlink()
    return path


@pytest.fixture
def tools(tmp_path):
    path = tmp_path / "tools.jinja"
    path.write_text(TOOLS, encoding="utf-8")
    return path


@pytest.fixture
def make(make_config, write_rows, qa_rows, bare):
    data = write_rows(qa_rows)
    return lambda **settings: make_config(data, {k.replace("__", "."): v for k, v in settings.items()}, bare)


@pytest.fixture
def torch(open_backend):
    return open_backend("torch")


def prompt_of(model):
    return model.tokenizer.decode_all(model.tokenizer.encode_prompt("Hi").tolist())


def test_an_adapter_is_used_with_the_template_of_its_training(make, torch, bare, tools, tmp_path):
    done = run(make(data__template=tools), torch)
    tools.unlink()
    assert read_adapter(done.adapter_dir).template == TOOLS
    model = load_model(torch, str(bare), done.adapter_dir)
    assert prompt_of(model) == "TOOLS<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" and model.note is None
    gone = load_model(torch, str(bare), done.adapter_dir, template=str(tools))  # as in the config that came along
    assert prompt_of(gone) == prompt_of(model) and gone.note is None
    plain = load_model(torch, str(bare), done.adapter_dir, template="none")
    assert prompt_of(plain) == "<s>Hi" and plain.note.endswith("and none is used here")
    (other := tmp_path / "other.jinja").write_text("{{ messages }}")
    assert "used here is sha256" in load_model(torch, str(bare), done.adapter_dir, template=str(other)).note
    assert load_model(torch, str(bare)).note is None


def test_an_adapter_trained_without_a_template_says_so(make, torch, tiny_llama):
    done = run(make(data__template="none"), torch)
    model = load_model(torch, str(tiny_llama), done.adapter_dir)
    assert (
        prompt_of(model) == "<s>Hi" and "trained without a chat template, so the prompt is used unchanged" in model.note
    )


def test_the_hash_of_an_older_adapter_is_compared(make, torch, bare, tiny_llama, tools):
    done = run(make(data__template=tools), torch)
    (done.adapter_dir / TEMPLATE_FILE).unlink()
    record = json.loads((done.adapter_dir / "dualtune.json").read_text())
    del record["files"][TEMPLATE_FILE]
    (done.adapter_dir / "dualtune.json").write_text(json.dumps(record))
    assert "and none is used here" in load_model(torch, str(bare), done.adapter_dir).note
    assert "used here is sha256" in load_model(torch, str(tiny_llama), done.adapter_dir).note


class StopAfter2(Hook):
    def on_step(self, record):
        if record.step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["run", "bundle"])
def test_a_run_continues_where_its_template_file_is_not(make, torch, tools, tmp_path, place):
    config = make(data__template=tools, run__save_every=2)
    with pytest.raises(KeyboardInterrupt):
        run(config, torch, [StopAfter2()])
    there = tmp_path / "run"
    if place == "bundle":
        pack(tmp_path / "run", tmp_path / "run.tar")
        assert TEMPLATE_FILE in inspect(tmp_path / "run.tar").bundle.files
        unpack(tmp_path / "run.tar", there := tmp_path / "there")
    tools.unlink()
    elsewhere = make(data__template=tools, run__save_every=2, run__dir=there)
    assert read_adapter(run(elsewhere, torch).adapter_dir).template == TOOLS


def test_a_copy_that_is_not_the_checkpoint_s_is_neither_packed_nor_used(make, torch, tools, tmp_path):
    config = make(data__template=tools, run__save_every=2)
    with pytest.raises(KeyboardInterrupt):
        run(config, torch, [StopAfter2()])
    (tmp_path / "run" / TEMPLATE_FILE).write_text(f"{TOOLS}!")
    notes = pack(tmp_path / "run", tmp_path / "r.tar").notes
    assert any("is not the template of the checkpoint" in note for note in notes)
    assert TEMPLATE_FILE not in inspect(tmp_path / "r.tar").bundle.files
    tools.unlink()
    with pytest.raises(ConfigError, match="chat template"):
        run(config, torch)


def test_an_adapter_s_bundle_and_card_bring_the_template(make, torch, tools, tmp_path):
    done = run(make(data__template=tools), torch)
    pack(done.run_dir, tmp_path / "a.tar", adapter=True)
    unpack(tmp_path / "a.tar", tmp_path / "there")
    adapter = read_adapter(tmp_path / "there" / "adapter")
    assert adapter.template == TOOLS
    text = adapter_card("owner/name", adapter, None)
    assert f"| chat template | {adapter.template_hash}, in chat_template.jinja |" in text
    assert 'tokenizer.chat_template = open(hf_hub_download("owner/name", "chat_template.jinja")' in text


def test_peft_mlx_lm_and_transformers_load_what_was_written(make, torch, bare, tools, tmp_path, dualtune_main):
    peft, mlx_lm = pytest.importorskip("peft"), pytest.importorskip("mlx_lm")
    transformers = pytest.importorskip("transformers")
    done = run(make(data__template=tools), torch)
    base = transformers.AutoModelForCausalLM.from_pretrained(bare)
    assert peft.PeftModel.from_pretrained(base, done.adapter_dir).peft_config["default"].r == 2
    assert mlx_lm.load(str(bare), adapter_path=str(done.adapter_dir))[1].chat_template is None  # the base's tokenizer
    merged = dualtune_main("adapter", "merge", done.adapter_dir, tmp_path / "m", "--base", bare, "--platform", "cpu")
    assert "template    of the training, in chat_template.jinja" in merged.stdout
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "m").chat_template == TOOLS
    assert mlx_lm.load(str(tmp_path / "m"))[1].chat_template == TOOLS


def test_generate_and_eval_tell_the_mismatch_on_one_line(make, torch, bare, tools, tmp_path, dualtune_main, wording):
    done = run(make(data__template=tools, data__eval=0.25), torch)
    options = ("--adapter", done.adapter_dir, "--platform", "cpu")
    generate = ("generate", bare, *options, "--prompt", "Hi", "--max-tokens", 2)
    assert "template " not in dualtune_main(*generate).stderr
    said = dualtune_main(*generate, "--template", "none").stderr
    assert said.count("template    the adapter was trained with the chat template sha256 ") == 1
    assert dualtune_main(*generate, "--template", tools, "--raw").returncode == 2
    config = done.run_dir / "config.yaml"
    assert "template " not in dualtune_main("eval", config, *options).stderr
    wrong = dualtune_main("eval", config, *options, "--set", "data.template=none")
    assert wrong.returncode == 0
    wording(wrong.stderr)


def test_to_continue_an_adapter_with_another_template_is_told(make, torch, tools, tmp_path, wording):
    first = run(make(data__template=tools), torch)
    on = {"adapter__init_from": first.adapter_dir, "run__dir": tmp_path / "on"}
    told = [line for line in summary(prepare(make(data__template="none", **on), torch)) if "warning" in line]
    assert len(told) == 1
    wording(told[0])
    same = summary(prepare(make(data__template=tools, **on), torch))
    assert not any("warning" in line for line in same)


def test_template_variables_go_with_the_adapter_and_into_an_export(make, torch, bare, tmp_path):
    source = TOOLS.replace("assistant\n{%", "assistant\n{{ '' if thinking else '<think></think>' }}{%")
    (path := tmp_path / "t.jinja").write_text(source)
    done = run(make(data__template=path, data__template_variables={"thinking": True}), torch)
    asked = "TOOLS<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    model = load_model(torch, str(bare), done.adapter_dir)
    assert (prompt_of(model), model.note) == (asked, None)
    by_config = load_model(
        torch, str(bare), done.adapter_dir, template=str(path), template_variables={"thinking": True}
    )
    assert (prompt_of(by_config), by_config.note) == (asked, None)
    other = load_model(torch, str(bare), done.adapter_dir, template=str(path))  # the variable is not set here
    assert prompt_of(other).endswith("<think></think>") and "used here is sha256" in other.note
    adapter = read_adapter(done.adapter_dir)
    write_training_template(bare, adapter.template, adapter.metadata)
    assert prompt_of(load_model(torch, str(bare))) == asked


def test_what_the_template_leaves_out_is_told_before_the_first_step(make_config, write_rows, torch, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"} | extra]}
        for i, extra in enumerate([{"thinking": "Hm"}] + [{}] * 19)
    ]
    (tmp_path / "t.jinja").write_text(TOOLS)
    config = make_config(write_rows(rows), {"data.template": tmp_path / "t.jinja"})
    told = "warning     1 of 20 rows: thinking is not in the text of a trained turn"
    assert told in summary(prepare(config, torch))
