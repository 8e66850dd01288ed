"""`dualtune export`: llama.cpp answers as dualtune does, and Go writes Ollama's templates as ours write chats."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dualtune.data.chat.template import NAMES, ChatTemplate, named_template
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.train.generation.inference import load_model
from dualtune.train.generation.sampling import Chooser, Sampling
from dualtune.use.export.ollama import TEMPLATES, template_for
from dualtune.use.export.request import logprobs

pytestmark = pytest.mark.interop
SPECIAL = {"bos_token": "", "eos_token": "</s>"}  # llama.cpp adds the token at the beginning
SYSTEM = {"role": "system", "content": "Be {{ brief }}."}
ASKS, SAYS = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4\nor so"}
TIE = 1e-4  # nats; llama.cpp and we differ by 1e-5 (docs/adapters.md)
CHATS = ([ASKS], [ASKS, SAYS, ASKS], [SYSTEM, ASKS], [SYSTEM, ASKS, SAYS, ASKS])


def exported(dualtune_main, environment, stories, out, *options):
    model, adapter, _ = stories
    words = ("export", adapter, out, "--base", model, "--platform", "cpu", "--llama-cpp", environment, *options)
    done = dualtune_main(*words)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "export.json").read_text())["divergence_nats"]


def test_50_greedy_answers_through_llama_cpp_are_ours(
    llama_cpp, environment, stories, open_backend, dualtune_main, tmp_path
):
    model, adapter, texts = stories
    distances = exported(dualtune_main, environment, stories, tmp_path / "out", "--to", "gguf", "--quantize", "f32")
    assert distances["written from adapter"]["kl"] < 1e-6 < 0.1 < distances["adapter from base"]["kl"]
    ours = load_model(open_backend("torch"), str(model), adapter, dtype="float32")
    prompts = [ours.tokenizer.encode(text, special=True) for text in texts]
    expected = [list(ours.engine.generate(ids, choose=Chooser(Sampling(24), frozenset()))) for ids in prompts]
    gguf = tmp_path / "out" / "out-F32.gguf"
    found = llama_cpp.greedy(gguf, [ids.tolist() for ids in prompts], 24)
    others = [each for each in zip(prompts, found, expected, strict=True) if each[1] != each[2]]
    assert all(are_equally_probable(ours.engine, *each) for each in others) and len(others) <= 2
    assert len({tuple(answer) for answer in expected}) > 25


def are_equally_probable(engine, prompt, found, expected):
    """Whether the first tokens that differ are so close that another order of sums may exchange them."""
    same = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    logprobs_V = logprobs(engine, [[*prompt.tolist(), *expected[:same]]])[0][-1]
    return abs(logprobs_V[found[same]] - logprobs_V[expected[same]]) < TIE


# Of the format alone, on this model: the bound is twice what the base loses by it.
@pytest.mark.parametrize(("kind", "most"), [("q8_0", 0.01), ("q4_k_m", 1.0), ("f16", 1e-4), ("bf16", 1e-2)])
def test_a_quantized_file_is_within_the_bound_of_its_format(
    environment, stories, dualtune_main, tmp_path, kind, most, llama_cpp
):
    found = exported(dualtune_main, environment, stories, tmp_path / "out", "--to", "gguf", "--quantize", kind)
    written, base = found["written from adapter"]["kl"], found["base, quantized alike, from base"]
    assert 0 < written < most
    if base is not None:
        assert written < 2 * base["kl"] and base["same_token"] > 0.5


def test_the_layouts_of_ollama_and_lm_studio(environment, stories, dualtune_main, tmp_path, llama_cpp):
    exported(dualtune_main, environment, stories, tmp_path / "o", "--to", "ollama", "--name", "tuned", "--without-base")
    assert (tmp_path / "o/Modelfile").read_text().startswith('FROM ./tuned-Q4_K_M.gguf\nTEMPLATE """{{ .Prompt }}"""\n')
    options = ("--to", "lmstudio", "--quantize", "q8_0", "--without-base")
    exported(dualtune_main, environment, stories, tmp_path / "l", *options)
    assert (tmp_path / "l/dualtune/l/l-Q8_0.gguf").is_file()


# SmolLM2's, of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct: ChatML with a system message of its own.
SMOLLM_2 = (
    r"{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    r"are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    r"message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    r"{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_go_writes_each_template_of_ollama_as_ours_write_it(environment, llama_cpp, shared, tmp_path):
    (tmp_path / "smollm.jinja").write_text(SMOLLM_2)
    smollm_2 = template_for(Tokenizer(shared("models/stories260k"), str(tmp_path / "smollm.jinja")))
    twins = [(named_template(name), name, TEMPLATES[name]) for name in NAMES] + [(SMOLLM_2, "smollm-2", smollm_2)]
    jobs, expected = [], []
    for source, name, twin in twins:
        ours = ChatTemplate(source, SPECIAL)
        for chat in CHATS:
            if name == "gemma-2" and SYSTEM in chat:  # refused by ours; Ollama writes it as Gemma 3 does
                continue
            messages = [{"Role": message["role"], "Content": message["content"]} for message in chat]
            system = SYSTEM["content"] if SYSTEM in chat else ""
            jobs.append({"Template": twin, "System": system, "Messages": messages})
            expected.append(ours.render(chat, add_generation_prompt=True))
    command = [environment / "bin" / "go", "run", Path(__file__).with_name("render.go")]
    env = os.environ | {"GOCACHE": str(environment / "go-cache"), "GOFLAGS": "-mod=mod"}
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    for job, found, wanted in zip(jobs, json.loads(done.stdout), expected, strict=True):
        assert found == wanted, job["Template"]
