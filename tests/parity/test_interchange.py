"""One adapter directory, four readers: PEFT, mlx-lm and both engines compute the same function from it."""

import json
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import FormatError
from dualtune.config import Config
from dualtune.engine.testing import tolerances
from dualtune.model.adapter import modules_of, parse_name
from dualtune.model.formats.directory import read_adapter, write_adapter
from dualtune.show.run import run
from dualtune.train.generation.inference import load_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")
mlx_lora = pytest.importorskip("mlx_lm.lora")
mlx_trainer = pytest.importorskip("mlx_lm.tuner.trainer")

NUM_ROWS = 16  # of the other tools' training data
SEEN = 1e-3  # a mistake of orientation or scale changes the log-probabilities by more than this


@pytest.fixture(scope="module")
def trained(backend, material, tmp_path_factory) -> Path:
    """An adapter directory that a short run wrote."""
    train = {"steps": 6, "learning_rate": 1e-2, "warmup": 0, "schedule": "constant"}
    return run(material.config(tmp_path_factory.mktemp("run") / "r", train=train), backend).adapter_dir


@pytest.fixture(scope="module")
def square(backend, tiny, tmp_path_factory) -> Path:
    """The same with rank 64 on 64×64 projections of the last layer: as every tensor is square, no shape gives a
    transpose away."""
    config = tiny.config(
        tmp_path_factory.mktemp("square") / "r",
        adapter={"rank": 64, "alpha": 32.0, "targets": ["q_proj", "o_proj"], "layers": "last 1"},
        train={"steps": 6, "learning_rate": 1e-2, "warmup": 0, "schedule": "constant"},
    )
    return run(config, backend).adapter_dir


def test_a_trained_adapter_is_one_function_everywhere(trained, material, assert_one_function):
    assert_one_function(material, trained)
    base = material.oracle(trained, lambda name, tensor: tensor * 0)
    assert material.gap(base, material.oracle(trained)) > 0.1, "B is zero, so nothing is shown"


def test_a_square_adapter_is_one_function_everywhere(square, tiny, assert_one_function):
    adapted = [f"model.layers.2.self_attn.{name}_proj" for name in ("o", "q")]
    assert modules_of(read_adapter(square).tensors) == adapted == [*read_adapter(square).spec.targets]
    assert_one_function(tiny, square)
    for part in "AB":  # and a transposed tensor would be seen
        wrong = tiny.oracle(square, lambda n, w, part=part: w.T if parse_name(n)[1] == part else w)
        assert tiny.gap(wrong, tiny.oracle(square)) > SEEN


@pytest.fixture(scope="module")
def rank_stabilized(backend, tiny, tmp_path_factory) -> Path:
    """Trained with rsLoRA, at a rank that is no square: alpha / √rank is no fraction."""
    config = tiny.config(
        tmp_path_factory.mktemp("rslora") / "r",
        adapter={"rank": 6, "alpha": 3.0, "targets": ["q_proj", "o_proj", "down_proj"], "scaling": "rank_stabilized"},
        train={"steps": 6, "learning_rate": 1e-2, "warmup": 0, "schedule": "constant"},
    )
    return run(config, backend).adapter_dir


def test_an_adapter_with_a_start_of_the_weight_is_plain_lora_of_twice_the_rank(
    backend, tiny, assert_one_function, tmp_path
):
    """OLoRA, rsLoRA and a rank per module: what is written, other tools read beside the unchanged base."""
    config = tiny.config(
        tmp_path / "r",
        adapter={"rank": 3, "alpha": 2.0, "targets": ["q_proj", "o_proj"], "scaling": "rank_stabilized",
                 "init": "olora", "rank_pattern": {"o_proj": 2}},
        train={"steps": 4, "learning_rate": 1e-2, "warmup": 0, "schedule": "constant"},
    )  # fmt: skip
    path = run(config, backend).adapter_dir
    spec = read_adapter(path).spec
    assert (spec.rank, dict(spec.rank_pattern), spec.init) == (6, {"o_proj": 4}, "kaiming")
    assert json.loads((path / "adapter_config.json").read_text())["init_lora_weights"] is True
    assert_one_function(tiny, path)
    base = tiny.oracle(path, lambda name, tensor: tensor * 0)
    assert tiny.gap(base, tiny.oracle(path)) > SEEN, "B A is B0 A0, so nothing is shown"


def test_a_rank_stabilized_adapter_is_one_function_everywhere(rank_stabilized, tiny, assert_one_function, tmp_path):
    """PEFT by use_rslora and the alpha as it is, mlx-lm by the scale itself; and alpha / rank is another function."""
    config = json.loads((rank_stabilized / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["lora_alpha"]) == (True, 3)
    assert config["lora_parameters"]["scale"] == 3 / 6**0.5
    assert_one_function(tiny, rank_stabilized)
    adapter = read_adapter(rank_stabilized)
    standard = replace(adapter, spec=replace(adapter.spec, scaling="standard"))
    write_adapter(tmp_path / "standard", standard, metadata={})
    assert tiny.gap(tiny.oracle(tmp_path / "standard"), tiny.oracle(rank_stabilized)) > SEEN


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapters.safetensors"])
def test_a_transposed_square_tensor_is_refused(file, square, tmp_path):
    """Both files are compared, since the shapes cannot tell."""
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"):
        (tmp_path / name).write_bytes((square / name).read_bytes())  # without dualtune.json, which knows the hashes
    read_adapter(tmp_path)
    tensors = load_file(tmp_path / file)
    save_file({n: np.ascontiguousarray(w.T) for n, w in tensors.items()}, tmp_path / file)
    with pytest.raises(FormatError, match="differ"):
        read_adapter(tmp_path)


def continue_training(material, adapter, backend, run_dir, rows, **data):
    """A run from the adapter on, evaluated on what it is trained on."""
    files = {}
    for name in ("train", "eval"):
        files[name] = str(run_dir.with_name(f"{name}.jsonl"))
        Path(files[name]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    train = {"steps": 8, "learning_rate": 3e-3, "warmup": 0}
    values = material.config(run_dir, data=files | data, train=train).model_dump()
    values["adapter"] = {"init_from": str(adapter), "dropout": 0.0}  # rank, alpha and targets are the adapter's own
    return run(Config.model_validate(values), backend)


# --- PEFT's own -------------------------------------------------------------------------------------------------------


RANKS, ALPHAS = {"q_proj": 3, "layers.1.mlp.down_proj": 8}, {"down_proj": 4}


@pytest.fixture(scope="module")
def from_peft(material, peft_logprobs, tmp_path_factory):
    """(directory, log-probabilities, mean loss over all targets) of an adapter trained and saved by PEFT."""
    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(material.model_dir, dtype=torch.float32)
    lora = peft.LoraConfig(r=6, lora_alpha=9, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM",
                           rank_pattern=RANKS, alpha_pattern=ALPHAS)  # fmt: skip
    model = peft.get_peft_model(base, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    documents = [(torch.tensor([ids]), torch.tensor([labels])) for ids, labels in material.documents()[:NUM_ROWS]]
    for ids, labels in documents[:8]:
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    path = tmp_path_factory.mktemp("peft") / "adapter"
    model.save_pretrained(path)
    model.eval()
    loss_sum, num_targets = 0.0, 0
    with torch.no_grad():
        for ids, labels in documents:
            logits = model(input_ids=ids).logits[0, :-1]
            loss_sum += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
            num_targets += int((labels[0, 1:] != -100).sum())
    return path, peft_logprobs(model, material.batch()), loss_sum / num_targets


def test_an_adapter_of_peft_is_read(from_peft, material, backend):
    path, expected, _ = from_peft
    found = load_model(backend, str(material.model_dir), path).engine.logprobs(material.batch())
    assert material.gap(found, expected) <= material.tolerance


def test_an_adapter_of_peft_is_trained_on(from_peft, material, backend, assert_one_function, tmp_path):
    path, _, loss = from_peft
    result = continue_training(material, path, backend, tmp_path / "run", material.rows[:NUM_ROWS])
    assert abs(result.eval_loss_before - loss) <= tolerances.LOGPROBS
    assert result.eval_loss < loss - 0.01
    assert_one_function(material, result.adapter_dir)
    config = json.loads((result.adapter_dir / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"]) == (RANKS, ALPHAS)


# --- mlx-lm's own -----------------------------------------------------------------------------------------------------

# Every row is cut to as many tokens, because mlx-lm's loss counts a padding token of each shorter row.
WIDTH = 40


@pytest.fixture(scope="module")
def from_mlx_lm(material, mlx_lm_logprobs, tmp_path_factory):
    """(directory, rows, log-probabilities, mean loss) of an adapter of `mlx_lm.lora` with its defaults: scale 20, and
    only the last layers."""
    directory = tmp_path_factory.mktemp("mlx-lm")
    text = " ".join(row["question"] + row["answer"] for row in material.rows)
    rows = [{"text": text[i * 140 : (i + 1) * 140]} for i in range(NUM_ROWS)]
    for name in ("train", "valid"):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = directory / "adapter"
    changes = {
        "model": str(material.model_dir), "data": str(directory), "adapter_path": str(path), "train": True,
        "iters": 6, "num_layers": 2, "learning_rate": 1e-3, "max_seq_length": WIDTH,
    }  # fmt: skip
    mx.disable_compile()  # which would call the C++ compiler on a CPU
    mlx_lora.run(types.SimpleNamespace(**mlx_lora.CONFIG_DEFAULTS | changes))
    mx.enable_compile()
    model, tokenizer = mlx_lm.load(str(material.model_dir), adapter_path=str(path))
    dataset = mlx_lora.CacheDataset(mlx_lora.load_dataset(types.SimpleNamespace(**changes, test=False), tokenizer)[0])
    loss = mlx_trainer.evaluate(model, dataset, batch_size=4, num_batches=-1, max_seq_length=WIDTH)
    assert min(len(dataset[i][0]) for i in range(NUM_ROWS)) > WIDTH
    return path, rows, mlx_lm_logprobs(model, material.batch()), loss


def test_an_adapter_of_mlx_lm_is_read(from_mlx_lm, material, backend):
    path, _, expected, _ = from_mlx_lm
    adapter = read_adapter(path)
    last = json.loads((material.model_dir / "config.json").read_text())["num_hidden_layers"]
    layers = {int(module.split(".")[2]) for module in modules_of(adapter.tensors)}
    assert layers == {last - 2, last - 1}
    assert adapter.spec.scale == 20.0
    found = load_model(backend, str(material.model_dir), path).engine.logprobs(material.batch())
    assert material.gap(found, expected) <= material.tolerance
    base = load_model(backend, str(material.model_dir)).engine.logprobs(material.batch())
    assert material.gap(found, base) > 0.1, "B is zero, so nothing is shown"


def test_an_adapter_of_mlx_lm_is_trained_on(from_mlx_lm, material, backend, assert_one_function, tmp_path):
    path, texts, _, loss = from_mlx_lm
    # mlx-lm cuts a long text, where we would split it; an answer is cut on both sides.
    rows = [{"prompt": "", "completion": row["text"]} for row in texts]
    result = continue_training(material, path, backend, tmp_path / "run", rows, columns={}, max_length=WIDTH)
    assert abs(result.eval_loss_before - loss) <= tolerances.LOGPROBS
    assert result.eval_loss < loss - 0.01
    assert modules_of(read_adapter(result.adapter_dir).tensors) == modules_of(read_adapter(path).tensors)
    assert_one_function(material, result.adapter_dir)
