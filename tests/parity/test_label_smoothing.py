"""train.label_smoothing: a share of the loss is the mean over the vocabulary, on both backends without all logits."""

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.engine.backend import IGNORE_INDEX, LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, gradient, random_adapter
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")
from dualtune_torch.kernels.attention import capped  # noqa: E402
from dualtune_torch.kernels.cross_entropy import LinearCrossEntropy, Scaling  # noqa: E402

SHARE = 0.3


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def load(backends, model_dir):
    def load_(name, kernels="auto", smoothing=SHARE):
        spec = AdapterSpec(4, 8.0, 0.0, ("q_proj", "down_proj"))
        request = LoadRequest(
            model_dir, "float32", "none", "pretrained", spec, OptimizerSpec(), seed=5, kernels=kernels,
            label_smoothing=smoothing,
        )  # fmt: skip
        engine = backends[name].load(request)
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        return engine

    return load_


def weighted(batch):
    weights = np.random.default_rng(0).uniform(0.5, 2, batch.labels_BT.shape).astype(np.float32)
    return type(batch)(**{**{name: getattr(batch, name) for name in batch.__slots__}, "weights_BT": weights})


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("with_weights", [False, True])
def test_the_loss_is_transformers_and_the_gradient_that_of_all_logits(load, backend, with_weights):
    batch = random_batch([9, 7], 96, seed=1)
    batch = weighted(batch) if with_weights else batch
    engine, plain = load(backend), load("torch", kernels="reference")
    is_target_BT = batch.labels_BT != IGNORE_INDEX
    losses_N = -engine.logprobs(batch)[is_target_BT]
    own_N = losses_N[np.arange(len(losses_N)), batch.labels_BT[is_target_BT]]
    weights_N = batch.weights_BT[is_target_BT] if with_weights else 1.0
    expected = float((weights_N * ((1 - SHARE) * own_N + SHARE * losses_N.mean(-1))).sum())
    assert_close(gradient(engine, batch), gradient(plain, batch), tolerances.GRADIENT)
    for one in (engine, plain):
        one.discard()
        one.forward_backward(batch, divisor=1.0)
        assert float(one.optim_step(lr=0.0, max_grad_norm=None).loss) == pytest.approx(expected, rel=1e-5)
    evaluated = float(engine.evaluate(batch).loss_sum)
    assert evaluated == pytest.approx(float((weights_N * own_N).sum()), rel=1e-5)
    without = gradient(load(backend, smoothing=0.0), batch)
    assert any(np.abs(without[name] - g).max() > 1e-3 for name, g in gradient(engine, batch).items())


def test_mlx_without_the_fused_loss_is_the_same(load):
    batch = random_batch([9, 7], 96, seed=1)
    assert_close(gradient(load("mlx"), batch), gradient(load("mlx", kernels="reference"), batch), tolerances.GRADIENT)


def test_transformers_label_smoother_says_the_same(load):
    from transformers.trainer_pt_utils import LabelSmoother

    batch, engine = random_batch([9, 7], 96, seed=1), load("torch")
    labels = torch.from_numpy(batch.labels_BT).long()
    output = {"logits": torch.from_numpy(engine.logprobs(batch))}
    theirs = LabelSmoother(epsilon=SHARE)(output, labels) * batch.num_targets
    engine.forward_backward(batch, divisor=1.0)
    assert float(engine.optim_step(lr=0.0, max_grad_norm=None).loss) == pytest.approx(float(theirs), rel=1e-5)


def test_with_a_cap_and_a_trained_head():
    torch.manual_seed(0)
    hidden, head = torch.randn(20, 8), torch.randn(50, 8)
    labels, weights = torch.randint(50, (20,)), torch.rand(20)
    x, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(capped(x @ w.T, 5.0), labels, reduction="none", label_smoothing=SHARE)
    (losses * weights).sum().backward()
    ours, total = hidden.clone().requires_grad_(), torch.zeros_like(head)
    loss = LinearCrossEntropy.apply(ours, head, None, labels, Scaling(5.0), lambda f: f, weights, total, SHARE)
    loss.backward()
    assert torch.allclose(loss, (losses * weights).sum()) and torch.allclose(ours.grad, x.grad, atol=1e-5)
    assert torch.allclose(total, w.grad, atol=1e-5)


@pytest.mark.parametrize(
    "lines",
    ["train: {label_smoothing: 0.1, objective: orpo}", "train: {label_smoothing: 0.1}\nhybrid: {enabled: true}"],
)
def test_what_does_not_go_together(lines):
    with pytest.raises(ConfigError, match=r"train\.label_smoothing: got 0\.1"):
        parse_config(f"model: {{name: m}}\ndata: {{train: d.jsonl}}\n{lines}\n")


def test_a_config_says_it():
    config = parse_config("model: {name: m}\ndata: {train: d.jsonl}\ntrain: {label_smoothing: 0.1}\n")
    spec = AdapterSpec(4, 8.0, 0.0, ("q_proj",))
    request = LoadRequest.of(config, model_dir=None, adapter=spec, optimizer=OptimizerSpec())
    assert request.label_smoothing == 0.1
