"""run.deterministic on Metal: models whose gradient is added up in any order are refused, on a CPU they are not."""

import importlib

import pytest

from dualtune.base.errors import ConfigError

mx = pytest.importorskip("mlx.core")
nn = importlib.import_module("mlx.nn")
order = importlib.import_module("dualtune_mlx.runtime")
switch_layers = importlib.import_module("mlx_lm.models.switch_layers")


def mixture():
    return nn.Sequential(nn.Linear(4, 4), switch_layers.SwitchGLU(4, 4, 2))


def test_experts_are_refused_on_a_gpu_by_name(monkeypatch):
    order.check_order(mixture())  # this machine computes on its CPU
    monkeypatch.setattr(order, "chip", lambda: "Apple M4 Max")
    order.check_order(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"run\.deterministic: got true, .*\(SwitchLinear\); allowed: false"):
        order.check_order(mixture())


@pytest.mark.parametrize(
    ("module", "name"),
    [("qwen3_next", "Qwen3NextGatedDeltaNet"), ("qwen3_5", "GatedDeltaNet"), ("kimi_linear", "KimiDeltaAttention")],
)
def test_the_layers_of_mlx_lm_are_still_called_so(module, name):
    """A class that is renamed would no longer be refused."""
    assert hasattr(importlib.import_module(f"mlx_lm.models.{module}"), name) and name.endswith(order.IN_ANY_ORDER)
