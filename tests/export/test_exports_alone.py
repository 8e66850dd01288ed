"""`dualtune export` without llama.cpp: the merge that is verified, MLX's converter, Modelfiles, and what goes wrong."""

import json
import math
import shutil
import stat
import sys
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from dualtune.base.errors import ConfigError, EnvironmentFault, FormatError
from dualtune.cli.export import TARGETS
from dualtune.config import Config
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.show.run import run
from dualtune.use.export import export as module
from dualtune.use.export.llama_environment import environment_of, find_llama_cpp
from dualtune.use.export.request import KINDS, LOST, deviation, lost_share
from dualtune_torch.weights.nf4 import unpack


@pytest.fixture
def adapter(tmp_path):
    """An adapter of `tiny_llama` that changes much."""
    rng, shapes = np.random.default_rng(0), {"model.layers.0.self_attn.q_proj": (32, 32)}
    tensors = {n: rng.normal(0, 0.5, t.shape).astype(np.float32) for n, t in init_adapter(shapes, 2, 0).items()}
    write_adapter(tmp_path / "tuned", Adapter(AdapterSpec(2, 40.0, 0.0, (*shapes,)), tensors))
    return tmp_path / "tuned"


@pytest.fixture
def export(dualtune_main, adapter, tiny_llama, tmp_path, open_backend):
    open_backend("torch")

    def export_(*options, out=tmp_path / "out"):
        return dualtune_main("export", adapter, out, "--base", tiny_llama, "--platform", "cpu", *options)

    return export_


def logs(*rows):
    return [np.log(np.array(rows))]


# --- distances -------------------------------------------------------------------------------------------------------


def test_a_deviation_is_the_divergence_of_each_position():
    found = deviation(logs([0.5, 0.5], [0.9, 0.1]), logs([0.5, 0.5], [0.1, 0.9]))
    largest = 0.8 * math.log(9)
    assert (found.kl, found.largest, found.same_token) == pytest.approx((largest / 2, largest, 0.5))


def test_other_tokens_at_the_end_of_a_vocabulary_are_left_out_and_nan_is_infinite():
    assert deviation(logs([0.5, 0.5]), [np.log([[0.5, 0.5, 0.1]])]).kl == pytest.approx(0)
    assert deviation(logs([0.5, 0.5]), [np.full((1, 2), np.nan)]).kl == math.inf


def test_the_lost_share_of_an_adapter_without_effect_is_judged_by_noise():
    none, some = deviation(logs([0.5, 0.5]), logs([0.5, 0.5])), deviation(logs([0.5, 0.5]), logs([0.6, 0.4]))
    assert lost_share(none, none) == 0 and lost_share(some, none) > 1
    assert lost_share(some, some) == pytest.approx(1)


# --- a Hugging Face directory, and MLX -------------------------------------------------------------------------------


def test_the_base_is_the_one_that_the_adapter_names(dualtune_main, adapter, tiny_llama, tmp_path, open_backend):
    open_backend("torch")
    words = ("export", adapter, tmp_path / "out", "--to", "hf", "--platform", "cpu")
    unnamed = dualtune_main(*words)
    assert unnamed.returncode == 2 and "the adapter names no base model. Give one: --base MODEL" in unnamed.stderr
    unnamed_adapter = read_adapter(adapter)
    shutil.rmtree(adapter)
    write_adapter(adapter, replace(unnamed_adapter, base_model=str(tiny_llama)))
    named = dualtune_main(*words)
    assert named.returncode == 0 and f"base        {tiny_llama}: the adapter names it\n" in named.stdout
    assert json.loads((tmp_path / "out" / "export.json").read_text())["base"] == str(tiny_llama)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/home/somebody/models/llama", "a path of another machine"),
        ("C:\\models\\llama", "a path of another machine"),
        ("../llama", "a path of another machine"),
        ("unsloth/llama-3-8b-bnb-4bit", "--base unsloth/llama-3-8b"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "--base unsloth/Qwen3-8B"),
        ("mlx-community/Qwen3-8B-4bit", "--base mlx-community/Qwen3-8B"),
        ("TheBloke/Mistral-7B-v0.1-GPTQ", "--base TheBloke/Mistral-7B-v0.1"),
    ],
)
def test_a_base_that_cannot_be_found_by_its_name_is_asked_for(name, said, dualtune_main, adapter, tmp_path):
    unnamed_adapter = read_adapter(adapter)
    shutil.rmtree(adapter)
    write_adapter(adapter, replace(unnamed_adapter, base_model=name))
    done = dualtune_main("export", adapter, tmp_path / "out", "--to", "hf", "--platform", "cpu")
    assert done.returncode == 2 and said in done.stderr and "--base MODEL" in done.stderr
    assert name in done.stderr


@pytest.mark.parametrize(("given", "place"), [(".", "run-hf"), ("adapter", "run-hf"), ("../other", "other-hf")])
def test_without_out_the_export_lies_beside_the_run(
    given, place, dualtune_main, adapter, tiny_llama, tmp_path, open_backend, monkeypatch
):
    open_backend("torch")
    home = tmp_path / "other" if "other" in given else tmp_path / "run" / "adapter"
    shutil.move(adapter, home)
    (tmp_path / "run").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "run")
    done = dualtune_main("export", given, "--base", tiny_llama, "--to", "hf", "--platform", "cpu")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / place / "export.json").is_file()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--name", "org/model", "--name: got 'org/model', which is a path"),
        ("--system", 'say "', "--system: got a text"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(export, option, value, said, monkeypatch, tmp_path):
    monkeypatch.setattr("dualtune.use.export.llama_environment.find_llama_cpp", lambda *_: None)
    monkeypatch.setattr(module, "export", pytest.fail)
    done = export("--to", "ollama", option, value)
    assert done.returncode == 2 and said in done.stderr


def test_the_merged_model_is_written_with_its_distances(export, tmp_path):
    done = export("--to", "hf")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out/export.json").read_text())
    distances = record["divergence_nats"]
    assert distances["merged from adapter"]["kl"] < 1e-6 < 0.01 < distances["adapter from base"]["kl"]
    assert (tmp_path / "out/model.safetensors").is_file() and "model.safetensors" in record["files"]
    assert f"{distances['adapter from base']['kl']:.2e}" in done.stdout
    again = export("--to", "hf")
    assert again.returncode == 2 and "already exists" in again.stderr


@pytest.mark.parametrize("command", [("export", "--to", "hf"), ("adapter", "merge")])
def test_another_base_than_that_of_the_training_is_refused_unless_it_is_meant(
    command, dualtune_main, make_config, write_rows, qa_rows, open_backend, tiny_llama, tmp_path
):
    trained = run(make_config(write_rows(qa_rows), {"train.steps": 1}), open_backend("torch")).adapter_dir
    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: 1.01 * tensor for name, tensor in tensors.items()}, other / "model.safetensors")

    def to(out, base, *options):
        words = command[:1] if command[0] == "export" else command
        options = (*options, *command[len(words) :])
        return dualtune_main(*words, trained, tmp_path / out, "--base", base, "--platform", "cpu", *options)

    refused = to("refused", other)
    assert refused.returncode == 2 and "is not the model that this adapter was trained on" in refused.stderr
    assert "--other-base" in refused.stderr and not (tmp_path / "refused").exists()
    assert to("own", tiny_llama).returncode == 0
    assert to("meant", other, "--other-base").returncode == 0


def test_an_adapter_that_computes_something_else_than_in_training_is_refused(
    dualtune_main, make_config, write_rows, qa_rows, open_backend, tiny_llama, tmp_path
):
    trained = run(make_config(write_rows(qa_rows), {"train.steps": 3}), open_backend("torch")).adapter_dir

    def export_to(out, *options):
        options = ("--base", tiny_llama, "--platform", "cpu", "--to", "hf", *options)
        return dualtune_main("export", trained, tmp_path / out, *options)

    done = export_to("same")
    assert "the same function, within the limits of float32" in done.stdout
    assert json.loads((tmp_path / "same" / "export.json").read_text())["verified"]["kind"] == "same"

    manifest = trained / "dualtune.json"
    table = json.loads(manifest.read_text())
    for entry in table["fingerprints"]["adapter"]:
        entry["top"] = [[token, 2 * logprob] for token, logprob in entry["top"]]
    manifest.write_text(json.dumps(table))
    refused = export_to("refused")
    assert (
        refused.returncode == 2 and "the base computes the recorded values, but the adapter does not" in refused.stderr
    )
    assert not (tmp_path / "refused").exists()
    assert export_to("all_the_same", "--other-base").returncode == 0


def test_a_merge_that_changes_the_function_is_refused_with_the_number(export, tmp_path, monkeypatch):
    write = module.write_merged

    def wrong(engine, *rest):
        engine.load_adapter_state({name: 0.7 * x for name, x in engine.adapter_state().items()})
        write(engine, *rest)

    monkeypatch.setattr(module, "write_merged", wrong)
    done = export("--to", "hf")

    assert done.returncode == 2 and "the merged model is not base and adapter: it differs by " in done.stderr
    share = int(done.stderr.partition("% of what the adapter changes")[0].rpartition(" ")[2])
    assert share > 100 * LOST and not [*tmp_path.glob("*out*")]


def test_mlx_lms_own_converter_writes_and_quantizes(export, open_backend, tmp_path):
    open_backend("mlx")
    done = export("--to", "mlx", "--quantize", "affine8", "--without-base")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization"]["bits"] == 8
    distances = json.loads((tmp_path / "out/export.json").read_text())["divergence_nats"]
    assert 0 < distances["written from adapter"]["kl"] < 0.1 * distances["adapter from base"]["kl"]


def test_an_adapter_of_a_base_that_is_stored_quantized_needs_the_plain_one(
    dualtune_main, make_config, write_rows, qa_rows, open_backend, tiny_llama, tmp_path
):
    backend, stored = open_backend("mlx"), tmp_path / "stored"
    mlx_lm = pytest.importorskip("mlx_lm")
    mlx_lm.convert(str(tiny_llama), mlx_path=str(stored), quantize=True, q_group_size=32)
    trained = run(make_config(write_rows(qa_rows), {"train.steps": 1}, stored), backend).adapter_dir
    words = ("export", trained, tmp_path / "out", "--to", "hf", "--platform", "mlx")
    refused = dualtune_main(*words)
    assert refused.returncode == 2 and f"{stored} is stored quantized" in refused.stderr
    assert "Give the plain model as --base" in refused.stderr
    done = dualtune_main(*words, "--base", tiny_llama)
    assert done.returncode == 0, done.stderr
    assert "Verify with a --base that is stored as affine 4-bit, groups of 32, and --dtype float32" in done.stdout


def test_a_model_that_was_trained_whole_is_converted_and_compared(
    dualtune_main, make_config, write_rows, qa_rows, open_backend, tmp_path
):
    config = make_config(write_rows(qa_rows), {"train.steps": 1})
    run(Config.model_validate(config.model_dump() | {"adapter": {"method": "full"}}), open_backend("torch"))
    words = ("export", tmp_path / "run", "--to", "hf", "--platform", "cpu")
    done = dualtune_main(*words, "--quantize", "nf4")
    assert done.returncode == 0, done.stderr
    assert "written as nf4: from the model" in done.stdout and "merged" not in done.stdout
    record = json.loads((tmp_path / "run-hf" / "export.json").read_text())
    assert record["divergence_nats"]["written from adapter"]["kl"] > 1e-5
    assert record["base"] is record["divergence_nats"]["merged from adapter"] is record["lost_share_of_merge"] is None
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert dualtune_main(*words[:2], tmp_path / "plain", *words[2:]).returncode == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    assert all((plain[name] == value).all() for name, value in trained.state_dict().items())
    refused = dualtune_main(*words, "--dtype", "float32")
    assert refused.returncode == 2 and "is a whole model. Leave out --base, --other-base and --dtype" in refused.stderr


def test_transformers_writes_nf4_which_every_reader_of_it_takes(export, tmp_path):
    done = export("--to", "hf", "--quantize", "nf4")
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert stored["bnb_4bit_quant_type"] == "nf4" and stored["load_in_4bit"]
    record = json.loads((tmp_path / "out/export.json").read_text())
    assert (
        record["divergence_nats"]["written from adapter"]["kl"]
        > 1e-5
        < record["divergence_nats"]["base, quantized alike, from base"]["kl"]
    )
    assert "tokenizer.json" in record["files"] and not [*(tmp_path / "out").glob("*/")]
    assert export("--to", "hf", out=tmp_path / "plain").returncode == 0
    plain, read = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("plain", "out"))
    packed = {name: module.weight for name, module in read.named_modules() if type(module).__name__ == "Linear4bit"}
    assert len(packed) == 14
    for name, weight in packed.items():
        expected = plain.get_submodule(name).weight.detach()
        found = unpack(weight.data, weight.quant_state)
        largest = expected.flatten().unfold(0, 64, 64).abs().amax(1).repeat_interleave(64).view_as(expected)
        # Half of NF4's widest gap is 0.152 of the largest of a block, and the scales of blocks are in 8 bits.
        assert ((found - expected).abs() <= 0.16 * largest + 0.01 * expected.abs().max()).all()


def test_a_backend_without_nf4_says_so_before_it_merges(export, open_backend, tmp_path):
    open_backend("mlx")
    done = export("--to", "hf", "--quantize", "nf4", "--platform", "mlx")
    assert done.returncode == 2 and "the backend mlx cannot write it" in done.stderr and not (tmp_path / "out").exists()


# --- what is asked, and what the tools answer ------------------------------------------------------------------------


def test_the_command_offers_each_target():
    assert set(TARGETS) == KINDS.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "hf", "--quantize", "q4_k_m"), "--quantize: got 'q4_k_m', for hf allowed: none, nf4"),
        (("--to", "gguf", "--quantize", "affine4"), "for gguf allowed: bf16, f32, f16, q8_0"),
        (("--to", "hf", "--system", "Hi"), "--system: is for --to ollama"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_loaded(export, options, message):
    done = export(*options)
    assert done.returncode == 2 and message in done.stderr and "imported" not in done.stdout


def test_without_llama_cpp_the_error_says_how_to_get_it(export, tmp_path, monkeypatch):
    monkeypatch.delenv("DUALTUNE_LLAMA_CPP", raising=False)
    monkeypatch.setattr("dualtune.use.export.llama_environment._is_installed", lambda module: False)
    done = export("--to", "gguf")
    assert done.returncode == 4 and "scripts/interop_llama.sh DIR" in done.stderr
    with pytest.raises(EnvironmentFault, match=r"is not an environment with llama\.cpp"):
        find_llama_cpp(tmp_path)


@pytest.fixture
def stub(tmp_path):
    """An environment whose programs do what a test says."""
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/source/vendor/llama.cpp").mkdir(parents=True)
    (tmp_path / "env/source/vendor/llama.cpp/convert_hf_to_gguf.py").touch()

    def make(code):
        python = tmp_path / "env/bin/python"
        python.write_text(f"#!{sys.executable}\nimport json, sys\n{code}\n")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return environment_of(tmp_path / "env")

    return make


def test_a_converter_that_fails_is_one_line_and_leaves_nothing(export, stub, tmp_path):
    stub("print('first', file=sys.stderr); sys.exit('no such\\x1b[31m architecture' + 'x' * 10_000)")
    done = export("--to", "gguf", "--llama-cpp", tmp_path / "env")
    assert done.returncode == 4 and "convert_hf_to_gguf.py ended with 1: no such" in done.stderr
    assert "\x1b" not in done.stderr and len(done.stderr) < 500 and "first" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"env", "tuned"}


def test_a_tokenizer_that_llama_cpp_does_not_know_is_seen_before_the_merge(export, stub, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_model", pytest.fail)
    stub("assert '--vocab-only' in sys.argv; sys.exit('NotImplementedError: BPE pre-tokenizer was not recognized - …')")
    done = export("--to", "gguf", "--llama-cpp", tmp_path / "env")
    assert done.returncode == 2 and "llama.cpp does not know the tokenizer of this model" in done.stderr
    assert "Export to another format: --to hf or --to mlx" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "code",
    ["", "print(3)", "open(json.loads(sys.argv[3])['out'], 'wb').write(bytes(24)); print('three')",
     "open(json.loads(sys.argv[3])['out'], 'wb').write(bytes(20)); print(3)", "print(10 ** 30)"],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(stub, tmp_path, code):
    with pytest.raises(FormatError, match=r"llama\.cpp: got "):
        stub(code).logprobs(tmp_path / "m.gguf", [[1, 2]])


def test_a_whole_answer_is_read(stub, tmp_path):
    tools = stub("open(json.loads(sys.argv[3])['out'], 'wb').write(bytes(24)); print(3)")
    (found,) = tools.logprobs(tmp_path / "m.gguf", [[1, 2]])
    assert found == pytest.approx(np.full((2, 3), -math.log(3)))


@pytest.mark.parametrize(("options", "expected"), [
    ((), "Add."), (("--no-system",), None), (("--system", "Subtract."), "Subtract."),
])  # fmt: skip
def test_ollama_is_told_the_system_message_of_the_training(export, adapter, monkeypatch, options, expected):
    tuned = read_adapter(adapter)
    shutil.rmtree(adapter)
    write_adapter(adapter, replace(tuned, metadata={"training": {"system_message": "Add."}}))
    requests = []

    def stop(request, *_):
        requests.append(request)
        raise ConfigError("enough")

    monkeypatch.setattr("dualtune.use.export.llama_environment.find_llama_cpp", lambda *_: None)
    monkeypatch.setattr(module, "export", stop)
    export("--to", "ollama", *options)
    assert [request.system for request in requests] == [expected]
