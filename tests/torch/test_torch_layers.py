"""What is adapted: layers that compute x Wᵀ + b, however a model calls them, and no others."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from dualtune.base.errors import ConfigError  # noqa: E402
from dualtune.model.adapter import AdapterSpec  # noqa: E402
from dualtune_torch.adapter import adapter_buffer  # noqa: E402
from dualtune_torch.kernels.lora import add_groups  # noqa: E402
from dualtune_torch.lora import LoRALinear  # noqa: E402
from dualtune_torch.methods import DropoutSeeds  # noqa: E402
from dualtune_torch.weights.frozen import is_linear  # noqa: E402


class OwnProduct(nn.Linear):
    """Falcon's: the same product in other words."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


class Grouped(nn.Linear):
    """DeepSeek 4's: a part of the input for each part of the output."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.einsum("...gi,goi->...go", input.unflatten(-1, (2, -1)), self.weight.view(2, -1, 4)).flatten(-2)


class Router(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return super().forward(input).topk(1)


@pytest.mark.parametrize(
    ("kind", "expected"), [(nn.Linear, True), (OwnProduct, True), (Grouped, False), (Router, False)]
)
def test_a_subclass_is_linear_if_it_computes_the_product(kind: type[nn.Linear], expected: bool) -> None:
    assert is_linear(kind(8, 4)) is expected


def adapted(dropout: float = 0.0) -> LoRALinear:
    torch.manual_seed(0)
    base = nn.Linear(8, 4)
    base.requires_grad_(False)
    layer = LoRALinear(base, "layer", AdapterSpec(2, 4.0, dropout, ("layer",)), DropoutSeeds())
    for each in layer.trainable().values():
        nn.init.normal_(each)
    return layer


def test_a_model_that_reads_the_weight_computes_with_the_adapter_and_trains_it() -> None:
    layer, x = adapted(), torch.randn(3, 8)
    torch.testing.assert_close(x @ layer.weight.T + layer.bias, layer(x))
    by_weight = torch.autograd.grad((x @ layer.weight.T).square().sum(), [*layer.trainable().values()])
    by_call = torch.autograd.grad((layer(x) - layer.bias).square().sum(), [*layer.trainable().values()])
    torch.testing.assert_close(by_weight, by_call)


def test_the_weight_is_not_read_where_dropout_could_not_act() -> None:
    layer = adapted(dropout=0.5)
    assert layer.weight.shape == (4, 8)
    layer.dropout_seeds.seeds_BT = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"adapter\.dropout"):
        _ = layer.weight


def test_what_a_group_returns_may_be_changed_in_place() -> None:
    """As Llama 4 and Falcon do."""
    layer = adapted()
    buffer = adapter_buffer({"layer": layer}, torch.device("cpu"), torch.float32)
    nn.init.normal_(buffer.flat)
    x = torch.randn(2, 3, 8, requires_grad=True)
    (expected,) = torch.autograd.grad((2 * layer(x)).sum(), x)
    add_groups({"layer": layer}, buffer, lambda function: function)
    (found,) = torch.autograd.grad(layer(x).mul_(2).sum(), x)
    torch.testing.assert_close(found, expected)
