"""`dualtune.engine.kernels.add_lora` in modules of one's own, on torch and MLX: what it trains and how it is saved."""

import importlib
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.engine.kernels import add_lora, load_lora, lora_tensors
from dualtune.model.adapter import AdapterSpec, init_adapter, tensor_name
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter

SPEC = AdapterSpec(4, 8.0, 0.0, ("to_q", "fc1"))
SHAPES = {"blocks.0.to_q": (12, 8), "blocks.1.to_q": (12, 8), "fc1": (5, 12)}  # of the targets
RNG = np.random.default_rng(0)
WEIGHTS = {path: RNG.normal(0, 0.3, shape).astype(np.float32) for path, shape in (SHAPES | {"head": (2, 5)}).items()}
TRAINED = {name: x + RNG.normal(0, 0.3, x.shape).astype(np.float32) for name, x in init_adapter(SHAPES, 4, 7).items()}
MERGED = WEIGHTS | {
    path: WEIGHTS[path] + SPEC.scale * TRAINED[tensor_name(path, "B")] @ TRAINED[tensor_name(path, "A")]
    for path in SHAPES
}
X = RNG.normal(0, 1, (3, 6, 8)).astype(np.float32)


def torch_model(weights=WEIGHTS):
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"to_q": linear("blocks.0.to_q")}) for _ in "ab"])
            self.fc1, self.head = linear("fc1"), linear("head")

        def forward(self, x):
            return self.head(self.fc1((self.blocks[0]["to_q"](x) * self.blocks[1]["to_q"](x)).tanh()))

    def linear(path):
        return torch.nn.Linear(*WEIGHTS[path].shape[::-1], bias=False)

    model = Model()
    model.load_state_dict({f"{path}.weight": torch.from_numpy(weight) for path, weight in weights.items()})
    return model


def mlx_model(weights=WEIGHTS):
    mx, nn = pytest.importorskip("mlx.core"), importlib.import_module("mlx.nn")

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.to_q = linear("blocks.0.to_q")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = [Block(), Block()]
            self.fc1, self.head = linear("fc1"), linear("head")

        def __call__(self, x):
            return self.head(self.fc1(mx.tanh(self.blocks[0].to_q(x) * self.blocks[1].to_q(x))))

    def linear(path):
        return nn.Linear(*WEIGHTS[path].shape[::-1], bias=False)

    return Model().load_weights([(f"{path}.weight", mx.array(weight)) for path, weight in weights.items()])


MODELS = {"torch": torch_model, "mlx": mlx_model}


@pytest.fixture(params=MODELS)
def framework(request):
    return request.param


def output(framework, model, x=X):
    if framework == "mlx":
        return np.array(model(importlib.import_module("mlx.core").array(x)))
    return model(importlib.import_module("torch").from_numpy(x)).detach().numpy()


def test_a_fresh_layer_changes_nothing_and_starts_as_the_core_says(framework):
    model = MODELS[framework]()
    before = output(framework, model)
    assert add_lora(model, SPEC, seed=7) == sorted(SHAPES)
    np.testing.assert_array_equal(output(framework, model), before)
    start, expected = lora_tensors(model), init_adapter(SHAPES, 4, seed=7)
    assert start.keys() == expected.keys()
    assert all(np.array_equal(start[name], expected[name]) for name in expected)
    other = MODELS[framework]()
    add_lora(other, replace(SPEC, init="normal"), seed=7)
    normal = init_adapter(SHAPES, 4, seed=7, init="normal")
    assert all(np.array_equal(value, normal[name]) for name, value in lora_tensors(other).items())


def test_an_adapter_goes_through_its_files_into_another_module(framework, tmp_path):
    write_adapter(tmp_path / "adapter", Adapter(SPEC, TRAINED))
    saved = read_adapter(tmp_path / "adapter")
    model = MODELS[framework]()
    add_lora(model, saved.spec)
    load_lora(model, saved.tensors)
    expected = output(framework, MODELS[framework](MERGED))
    np.testing.assert_allclose(output(framework, model), expected, rtol=1e-4, atol=1e-5)
    assert all(np.array_equal(value, TRAINED[name]) for name, value in lora_tensors(model).items())


def gradients(framework, model):
    """By tensor name, of the sum of the squared outputs; and the names of all that is trained."""
    if framework == "torch":
        torch = importlib.import_module("torch")
        model(torch.from_numpy(X)).square().sum().backward()
        grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad}
    else:
        nn, utils = importlib.import_module("mlx.nn"), importlib.import_module("mlx.utils")
        x = importlib.import_module("mlx.core").array(X)
        _, tree = nn.value_and_grad(model, lambda: model(x).square().sum())()
        grads = {name: np.array(value) for name, value in utils.tree_flatten(tree)}
    return {f"base_model.model.{name}.weight": value for name, value in grads.items()}


def test_only_a_and_b_are_trained_by_the_gradient_of_autograd(framework):
    """In float64 through the merged weight, of which autograd knows everything."""
    torch = pytest.importorskip("torch")
    model = MODELS[framework]()
    add_lora(model, SPEC)
    load_lora(model, TRAINED)
    found = gradients(framework, model)

    leaves = {name: torch.from_numpy(value).double().requires_grad_() for name, value in TRAINED.items()}
    plain = torch_model().double().requires_grad_(False)
    weights = {
        f"{path}.weight": plain.get_submodule(path).weight
        + SPEC.scale * leaves[tensor_name(path, "B")] @ leaves[tensor_name(path, "A")]
        for path in SHAPES
    }
    torch.func.functional_call(plain, weights, torch.from_numpy(X).double()).square().sum().backward()
    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        limit = 1e-5 * float(leaf.grad.abs().max())
        np.testing.assert_allclose(found[name], leaf.grad.numpy(), rtol=0, atol=limit)


def test_micro_batches_add_up_and_autocast_keeps_the_masters_in_float32():
    torch = pytest.importorskip("torch")
    model = torch_model()
    add_lora(model, SPEC)
    load_lora(model, TRAINED)
    whole = gradients("torch", model)
    model.zero_grad()
    for rows in np.split(X, 3):
        model(torch.from_numpy(rows)).square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected = whole[f"base_model.model.{name}.weight"]
            np.testing.assert_allclose(parameter.grad.numpy(), expected, rtol=1e-4, atol=1e-5)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.from_numpy(X))
    y.float().square().sum().backward()
    parameter = model.fc1.lora_A
    assert y.dtype == torch.bfloat16 and parameter.grad.dtype == parameter.dtype == torch.float32
    exact = whole[tensor_name("fc1", "A")]
    assert np.linalg.norm(parameter.grad.numpy() - exact) < 0.05 * np.linalg.norm(exact)


def test_attention_that_reads_the_weight_computes_with_the_adapter():
    torch = pytest.importorskip("torch")
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x, spec = torch.from_numpy(X), AdapterSpec(2, 4.0, 0.0, ("out_proj",))
    model = torch.nn.ModuleDict({"attention": attention})
    add_lora(model, spec)
    before = attention(x, x, x)[0]
    attention.out_proj.lora_B.data.normal_()
    after = attention(x, x, x)[0]
    assert not torch.allclose(before, after)
    after.square().sum().backward()
    assert attention.out_proj.lora_A.grad.norm() > 0 and attention.in_proj_weight.grad is None

    dropped = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(8, 2, batch_first=True)})
    add_lora(dropped, AdapterSpec(2, 4.0, 0.5, ("out_proj",)))
    with pytest.raises(ConfigError, match=r"dropout: got 0\.5, but a module reads the weight"):
        dropped["attention"](x, x, x)


def test_dropout_acts_in_training_alone(framework):
    model = MODELS[framework]()
    add_lora(model, AdapterSpec(4, 8.0, 0.5, ("to_q", "fc1")))
    load_lora(model, TRAINED)
    model.eval()
    assert np.array_equal(output(framework, model), output(framework, model))
    model.train()
    assert not np.array_equal(output(framework, model), output(framework, model))


@pytest.mark.parametrize(("targets", "message"), [
    (("q_proj",), "targets: no linear layer is called 'q_proj'. The module has: fc1, head, to_q"),
    (("to_q", "c"), "targets: no linear layer is called 'c'"),
])  # fmt: skip
def test_a_target_that_selects_nothing_is_refused(framework, targets, message):
    with pytest.raises(ConfigError, match=message):
        add_lora(MODELS[framework](), AdapterSpec(4, 8.0, 0.0, targets))


def test_what_does_not_fit_is_refused(framework):
    model = MODELS[framework]()
    with pytest.raises(ConfigError, match="method: got 'full', allowed: lora"):
        add_lora(model, AdapterSpec(4, 8.0, 0.0, ("fc1",), method="full"))
    assert add_lora(model, AdapterSpec(4, 8.0, 0.0, ("all-linear",))) == [*sorted(SHAPES), "head"]
    with pytest.raises(ConfigError, match="has LoRA already"):
        add_lora(model, SPEC)
    with pytest.raises(ValueError, match=r"load_lora: tensors missing: base_model\.model\.head\.lora_A\.weight"):
        load_lora(model, TRAINED)
    with pytest.raises(TypeError, match=r"add_lora: got builtins\.dict, allowed: a module of a framework"):
        add_lora({}, SPEC)


def test_a_base_in_four_bits_is_a_base():
    """By bitsandbytes on torch, by MLX itself: as QLoRA in a model of one's own."""
    torch, bnb = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes")
    base = bnb.nn.Linear4bit(64, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    base.load_state_dict({"weight": torch.randn(32, 64)})
    model = torch.nn.Sequential(base.to("cpu"))
    x = torch.randn(3, 64)
    before = model(x)
    add_lora(model, AdapterSpec(4, 8.0, 0.0, ("0",)))
    assert torch.equal(model(x), before) and model[0].base.weight.dtype == torch.uint8
    model(x).square().sum().backward()
    assert model[0].lora_B.grad.norm() > 0
    torch.testing.assert_close(x @ model[0].weight.T, before, rtol=1e-4, atol=1e-4)


def test_a_base_in_four_bits_of_mlx_is_a_base():
    mx, nn = pytest.importorskip("mlx.core"), importlib.import_module("mlx.nn")
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    nn.quantize(model)
    x = mx.random.normal((3, 64))
    before = model(x)
    add_lora(model, AdapterSpec(4, 8.0, 0.0, ("0",)))
    assert mx.array_equal(model(x), before)
    _, gradient = nn.value_and_grad(model, lambda: model(x).square().sum())()
    (layer,) = gradient["layers"]
    assert layer.keys() == {"lora_A", "lora_B", "base", "dropout"} and mx.linalg.norm(layer["lora_B"]).item() > 0
