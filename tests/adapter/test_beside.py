"""Parameters of the base that are trained beside an adapter: the same numbers and files as PEFT's."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault, FormatError
from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.peft_trial import named
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_gpt2, write_tiny_llama
from dualtune.model.adapter import AdapterSpec, is_of_base
from dualtune.model.beside import BesideAdapter
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter
from dualtune.model.inspection import diff_adapters, inspect_adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.model.places import in_names_of
from dualtune.train.generation.inference import inference_spec, load_adapter

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ROWS = (7, 90)
TARGETS = ("q_proj", "v_proj")
# What PEFT is told, and the same here.
KINDS = {
    "rows": ({"trainable_token_indices": [*ROWS]}, BesideAdapter(rows=ROWS, row_modules=("embed_tokens",))),
    "rows_of_both": (
        {"trainable_token_indices": {"embed_tokens": [*ROWS], "lm_head": [*ROWS]}}, BesideAdapter(rows=ROWS),
    ),
    "modules": ({"modules_to_save": ["embed_tokens", "lm_head", "model.norm"]},
                BesideAdapter(modules=("embed_tokens", "lm_head", "model.norm"))),
}  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request, tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("base") / "llama", tie_word_embeddings=request.param)


def is_tied(base):
    return json.loads((base / "config.json").read_text())["tie_word_embeddings"]


def in_peft(base, options):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=[*TARGETS], **options)
    model = peft.get_peft_model(model, config)
    if "modules_to_save" in options and is_tied(base):  # PEFT unties the two; here they stay one
        tie(model)
    return model


def tie(model):
    saved = model.base_model.model.lm_head.modules_to_save["default"]
    saved.weight = model.base_model.model.model.embed_tokens.modules_to_save["default"].weight


def engine_of(base, spec, backend="torch", eps=1e-4):
    try:
        found = get_backend(backend, "cpu" if backend == "torch" else "auto")
    except EnvironmentFault as error:
        pytest.skip(str(error))
    optimizer = OptimizerSpec("adamw", {"weight_decay": 0.01, "eps": eps})
    return found.load(LoadRequest(base, "float32", "none", "pretrained", spec, optimizer, seed=0))


def logprobs_of(model, batch):
    with torch.no_grad():
        return model(torch.tensor(batch.tokens_BT.astype(np.int64))).logits.log_softmax(-1).numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_steps_are_those_of_peft(base, kind, backend):
    options, beside = KINDS[kind]
    if kind == "rows" and is_tied(base):
        beside = BesideAdapter(rows=ROWS)
    model, spec = in_peft(base, options), AdapterSpec(4, 8.0, 0.0, TARGETS, beside=beside)
    engine = engine_of(base, spec, backend)
    start = {
        name.replace(".default", ""): x.detach().numpy().copy()
        for name, x in model.named_parameters()
        if "lora_" in name
    }
    engine.load_adapter_state(engine.adapter_state() | start)
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.01, eps=1e-4)
    gaps = []
    for step in range(16):
        batch = random_batch([9, 14, 11], 96, seed=step)
        batch.tokens_BT[:, 2], batch.labels_BT[:, 3] = ROWS[step % 2], ROWS[0]
        engine.forward_backward(batch, divisor=batch.num_targets)
        ours = engine.optim_step(lr=1e-2, max_grad_norm=1.0)
        logits = model(torch.tensor(batch.tokens_BT.astype(np.int64))).logits
        labels = torch.tensor(batch.labels_BT.astype(np.int64))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        gaps.append(abs(float(ours.loss) - float(loss)))
    assert max(gaps) <= 1e-5, gaps
    batch = random_batch([16], 96, seed=99)
    assert np.abs(engine.logprobs(batch) - logprobs_of(model, batch)).max() <= 1e-4


def adamw_in_float64(state, gradients, lr):
    """torch's own AdamW in float64, with the gradients clipped to norm 1."""
    parameters = {name: torch.tensor(x, dtype=torch.float64, requires_grad=True) for name, x in state.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.01, eps=1e-8)
    for gradient in gradients:
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradient[name], dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
    return {name: parameter.detach().numpy() for name, parameter in parameters.items()}


def test_weights_of_a_whole_head_differ_between_backends_only_where_adamw_divides_rounding(base):
    """AdamW's first update of a weight is lr · g / (|g| + eps), whose slope at g is lr · eps / (|g| + eps)².

    The gradient of a head is p(token) · h, which is as near to 0 as h is: there the last bits of g are seen in the
    weight. Both backends are right: each has float64's weights for its gradients, and the gradients agree.
    """
    spec = AdapterSpec(4, 8.0, 0.0, TARGETS, beside=BesideAdapter(modules=("embed_tokens", "lm_head", "model.norm")))
    engines = {backend: engine_of(base, spec, backend, eps=1e-8) for backend in ("torch", "mlx")}
    start = engines["torch"].adapter_state()
    gradients = {backend: [] for backend in engines}
    for step in range(4):
        batch = random_batch([9, 14, 11], 96, seed=step)
        for backend, engine in engines.items():
            engine.forward_backward(batch, divisor=batch.num_targets)
            gradients[backend].append(engine.gradient())
            engine.optim_step(lr=1e-2, max_grad_norm=1.0)
        if step == 0:  # at equal weights
            first, other = gradients["torch"][0], gradients["mlx"][0]
            states = {backend: engine.adapter_state() for backend, engine in engines.items()}
            norm = np.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in first.values()))
            for name, g in first.items():
                gap = np.abs(g - other[name])
                assert gap.max() <= 1e-6 * norm, name
                smallest = np.where(g * other[name] > 0, np.minimum(np.abs(g), np.abs(other[name])), 0) / max(norm, 1)
                allowed = 1e-2 * gap * 1e-8 / (smallest + 1e-8) ** 2 + 2e-7
                assert np.all(np.abs(states["torch"][name] - states["mlx"][name]) <= allowed), name
    for backend, engine in engines.items():
        expected, state = adamw_in_float64(start, gradients[backend], 1e-2), engine.adapter_state()
        assert max(np.abs(state[name] - x).max() for name, x in expected.items()) <= 1e-5, backend


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_peft_s_files_are_read_and_ours_by_peft(base, kind, tmp_path):
    model, batch = in_peft(base, KINDS[kind][0]), random_batch([9], 96, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    expected = logprobs_of(model, batch)
    model.save_pretrained(tmp_path / "peft")
    adapter = in_names_of(read_adapter(tmp_path / "peft"), base)
    engine = engine_of(base, inference_spec(adapter))
    load_adapter(engine, adapter, "base")
    assert np.abs(engine.logprobs(batch) - expected).max() <= 1e-5
    written = named(replace(adapter, tensors=engine.adapter_state()), base)
    assert written.naming.notes == ()
    write_adapter(tmp_path / "ours", written)
    loaded = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours")
    assert np.abs(logprobs_of(loaded, batch) - expected).max() <= 1e-6
    again = in_names_of(read_adapter(tmp_path / "ours"), base)
    assert again.tensors.keys() == adapter.tensors.keys() == engine.adapter_shapes.keys()
    assert all(np.array_equal(x, adapter.tensors[name]) for name, x in again.tensors.items())
    engine.save_merged(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert np.abs(logprobs_of(merged, batch) - expected).max() <= 1e-5


@pytest.mark.filterwarnings("ignore")
def test_one_of_two_tied_modules_cannot_be_trained_alone(base, tmp_path):
    if not is_tied(base):
        pytest.skip("they are two")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    torch.nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    model.save_pretrained(tmp_path / "peft")
    with pytest.raises(FormatError, match="an embedding and an output head of their own"):
        in_names_of(read_adapter(tmp_path / "peft"), base)


def test_gpt2_has_the_names_of_peft_on_both_backends(tmp_path):
    base = write_tiny_gpt2(tmp_path / "gpt2")
    spec = AdapterSpec(4, 8.0, 0.0, ("c_attn",), beside=BesideAdapter(modules=("ln_f",), rows=ROWS))
    names = {backend: engine_of(base, spec, backend).adapter_shapes for backend in ("torch", "mlx")}
    assert {*names["torch"]} == {*names["mlx"]}
    assert {name for name in names["torch"] if is_of_base(name)} == {
        "base_model.model.transformer.ln_f.bias", "base_model.model.transformer.ln_f.weight",
        "base_model.model.transformer.wte.token_adapter.trainable_tokens_delta",
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("quantization", ["affine4", "int8"])
def test_rows_of_a_packed_base_are_trained(base, quantization, backend):
    spec = AdapterSpec(4, 8.0, 0.0, TARGETS, beside=BesideAdapter(rows=ROWS))
    found = engine_of(base, spec, backend)
    request = LoadRequest(base, "float32", quantization, "pretrained", spec, OptimizerSpec(), seed=0)
    engine, batch = get_backend(backend, "auto").load(request), random_batch([12, 9], 96, seed=1)
    before = engine.adapter_state()
    assert engine.adapter_shapes == found.adapter_shapes
    batch.tokens_BT[:, 2] = ROWS[0]
    losses = []
    for _ in range(4):
        engine.forward_backward(batch, divisor=batch.num_targets)
        losses.append(float(engine.optim_step(lr=1e-2, max_grad_norm=1.0).loss))
    assert losses == sorted(losses, reverse=True)
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    assert np.abs(engine.adapter_state()[name] - before[name])[0].min() > 1e-4


def test_what_differs_beside_two_adapters_is_a_difference(tmp_path):
    name, rows = "base_model.model.model.norm.weight", "base_model.model.model.embed_tokens.token_adapter."
    rows += "trainable_tokens_delta"
    lora = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": np.ones(shape, np.float32)
        for part, shape in (("A", (4, 8)), ("B", (8, 4)))
    }
    base = lora | {name: np.ones(8, np.float32), rows: np.ones((2, 8), np.float32)}
    spec = AdapterSpec(4, 8.0, 0.0, ("q_proj",), beside=BesideAdapter(("model.norm",), (3, 5), ("model.embed_tokens",)))
    kinds = {
        "same": (spec, base),
        "norm": (spec, base | {name: np.full(8, 2, np.float32)}),
        "tokens": (replace(spec, beside=replace(spec.beside, rows=(3, 6))), base),
        "none": (replace(spec, beside=BesideAdapter()), lora),
    }
    for kind, (own, tensors) in kinds.items():
        write_adapter(tmp_path / kind, Adapter(own, tensors))
    found = {kind: diff_adapters(tmp_path / "same", tmp_path / kind) for kind in kinds}
    assert [kind for kind in kinds if found[kind].is_same_function] == ["same"]
    largest = found["norm"].modules[0]
    assert (largest.module, largest.relative_difference, largest.norm_b) == ("model.norm.weight", 0.5, 32**0.5)
    assert len(found["tokens"].only_in_a) == len(found["tokens"].only_in_b) == 1
    assert len(found["none"].only_in_a) == 2 and not found["none"].only_in_b
    assert inspect_adapter(tmp_path / "same").trained_beside == {"model.norm": 8, "model.embed_tokens": 16}


def test_rows_of_other_tokens_in_each_module_are_refused(tmp_path):
    tensors = {
        f"base_model.model.{module}.token_adapter.trainable_tokens_delta": np.ones((2, 8), np.float32)
        for module in ("model.embed_tokens", "lm_head")
    }
    spec = AdapterSpec(4, 8.0, 0.0, ("q_proj",), beside=BesideAdapter(rows=ROWS))
    lora = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": np.ones(shape, np.float32)
        for part, shape in (("A", (4, 8)), ("B", (8, 4)))
    }
    write_adapter(tmp_path / "adapter", Adapter(spec, lora | tensors), layout="peft")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    assert config["trainable_token_indices"] == {"lm_head": [7, 90], "model.embed_tokens": [7, 90]}
    config["trainable_token_indices"]["lm_head"] = [7, 91]
    path.write_text(json.dumps(config))
    (tmp_path / "adapter" / "dualtune.json").unlink(missing_ok=True)
    with pytest.raises(FormatError, match=r"trainable_token_indices: .*the same ids for all modules"):
        read_adapter(tmp_path / "adapter")


def test_mlx_lm_has_no_file_for_it(tmp_path):
    name = "base_model.model.model.norm.weight"
    tensors = {name: np.ones(8, np.float32)} | {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": np.ones(shape, np.float32)
        for part, shape in (("A", (4, 8)), ("B", (8, 4)))
    }
    spec = AdapterSpec(4, 8.0, 0.0, ("q_proj",), beside=BesideAdapter(modules=("model.norm",)))
    with pytest.raises(ConfigError, match="layout: got mlx, but mlx-lm has no file"):
        write_adapter(tmp_path / "mlx", Adapter(spec, tensors), layout="mlx")
    write_adapter(tmp_path / "dual", Adapter(spec, tensors))
    adapter = read_adapter(tmp_path / "dual")
    assert adapter.layout == "peft" and adapter.tensors.keys() == tensors.keys()
    assert adapter.spec.beside == BesideAdapter(modules=("model.norm",))
