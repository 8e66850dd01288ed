"""Whether Metal adds numbers up in the same order each time."""

from __future__ import annotations

from mlx import nn

from dualtune.errors import ConfigError
from dualtune_mlx.runtime.device import chip

# Layers whose backward pass adds by atomics, in any order, to one place from several threads: rows that go to several
# experts (a scatter), and the state of a gated delta rule. Of MLX 0.32's kernels, no other one in a step does
# (mlx/backend/metal/kernels: atomic_update in indexing/scatter.h and gated_delta_update_vjp.h).
IN_ANY_ORDER = ("SwitchLinear", "GatedDeltaNet", "DeltaAttention")  # how the names of their classes end


def check_order(model: nn.Module) -> None:
    """Raise ConfigError for a model whose gradient on Metal is not the same bits each time."""
    found = sorted({name for name in map(_name, model.modules()) if name.endswith(IN_ANY_ORDER)})
    if found and chip() is not None:
        raise ConfigError(
            f"run.deterministic: got true, but this model has layers whose gradient Metal adds up in any order "
            f"({', '.join(found)}); allowed: false. Or train it with --platform cpu"
        )


def _name(module: nn.Module) -> str:
    return type(module).__name__
