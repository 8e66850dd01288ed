"""From a machine to a backend, always with the reason."""

from dataclasses import replace

import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.engine import choose as module
from dualtune.engine.choose import PlatformChoice, choose
from dualtune.engine.machines import named

MAC, H100, BARE = named("m4-32"), named("h100-80"), named("cpu-64")


def having(machine, *names):
    """The machine with exactly these frameworks installed."""
    return replace(machine, packages=dict.fromkeys(names, "1.0"))


@pytest.mark.parametrize(
    ("machine", "names", "expected"),
    [
        (MAC, ("mlx",), PlatformChoice("mlx", "mlx", "auto", "Apple silicon (Apple M4) with MLX installed")),
        (MAC, ("torch", "mlx"), PlatformChoice("mlx", "mlx", "auto", "Apple silicon (Apple M4) with MLX installed")),
        (MAC, ("torch",), PlatformChoice("cpu", "torch", "cpu", "MLX is not installed; torch on the CPU")),
        (H100, ("torch", "mlx"),
         PlatformChoice("cuda", "torch", "cuda", "NVIDIA GPU (NVIDIA H100 80GB HBM3) with torch installed")),
        (BARE, ("torch", "mlx"), PlatformChoice("cpu", "torch", "cpu", "no NVIDIA GPU; torch on the CPU")),
        (BARE, ("mlx",),
         PlatformChoice("mlx", "mlx", "auto", "no NVIDIA GPU and no torch; MLX on the CPU, which is slow")),
    ],
)  # fmt: skip
def test_auto_chooses_what_suits_and_says_why(machine, names, expected):
    assert choose("auto", having(machine, *names)) == expected


def test_a_gpu_without_torch_is_not_called_absent():
    choice = choose("auto", having(H100, "mlx"))
    assert choice.backend == "mlx"
    assert "no NVIDIA GPU" not in choice.reason and "torch" in choice.reason


@pytest.mark.parametrize(("machine", "extra"), [(MAC, "mlx"), (H100, "torch"), (BARE, "torch")])
def test_without_any_framework_the_line_that_installs_one_is_given(machine, extra):
    with pytest.raises(EnvironmentFault) as caught:
        choose("auto", having(machine))
    assert f"pip install 'dualtune[{extra}]'" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "backend", "device"),
    [("mlx", "mlx", "auto"), ("cuda", "torch", "cuda"), ("cuda:1", "torch", "cuda:1"), ("cpu", "torch", "cpu"),
     ("numpy", "numpy", "auto")],
)  # fmt: skip
def test_what_is_asked_for_is_taken(asked, backend, device):
    assert choose(asked, BARE) == PlatformChoice(asked, backend, device, "as requested")


@pytest.mark.parametrize("unknown", ["tpu", "cuda:", "cuda:a", "cuda:-1", "mlx:0", ""])
def test_an_unknown_platform_is_refused(unknown):
    with pytest.raises(ConfigError, match=f"--platform: got '{unknown}', allowed: auto, mlx, cuda, cpu, cuda:N"):
        choose(unknown)


def test_auto_looks_at_this_machine(monkeypatch):
    monkeypatch.setattr(module, "detect", lambda: MAC)
    assert choose("auto").platform == "mlx"
