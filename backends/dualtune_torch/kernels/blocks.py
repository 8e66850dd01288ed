"""The elementwise parts of a transformer block, compiled: norms, the rotary embedding, the activation of a gated MLP.

Norms and activations are the model's own code, so there is no second version of it that could be wrong. A module keeps
its class and its parameters; only its `forward` is replaced, on the instance, and the class stays as it is for others.

Legend: B rows, T tokens, H heads, d head size, r of its channels that are rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

Fuse = Callable[[Any], Any]  # `compiled.fuse`, or the identity

ROTARY = "apply_rotary_pos_emb"  # what transformers' attention modules call
MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")


def compile_norms(model: nn.Module, fuse: Fuse) -> bool:
    """Compile every RMSNorm. Returns whether there was one, as the next two do."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.forward = MethodType(fuse(type(norm).forward), norm)
    return bool(norms)


def compile_mlps(model: nn.Module, fuse: Fuse) -> bool:
    """Compile what lies between the matrix products of every MLP that is down(act(gate(x)) · up(x))."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(fuse(gated)(self.act_fn, self.gate_proj(x), self.up_proj(x)))

    mlps = [module for module in model.modules() if _names_in(module) == {*MLP}]
    for mlp in mlps:
        mlp.forward = MethodType(forward, mlp)
    return bool(mlps)


def compile_rotary(model: nn.Module, fuse: Fuse) -> bool:
    """Rotate queries and keys by `Rotate` in every attention module whose own function computes the same."""
    found = False
    for module in model.modules():
        forward: Any = type(module).forward
        if ROTARY not in _names_in(module) or not _rotates_alike(forward.__globals__[ROTARY]):
            continue
        names = {**forward.__globals__, ROTARY: partial(rotate_both, fuse=fuse)}
        own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        module.forward = MethodType(own, module)
        found = True
    return found


def gated(activation: nn.Module, gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    """The inside of a gated MLP. Shazeer, GLU variants improve transformer, arXiv 2002.05202."""
    return activation(gate_BTF) * up_BTF


def rotated(x_BHTd: Tensor, cos_B1Tr: Tensor, sin_B1Tr: Tensor) -> Tensor:
    """The first r channels rotated, channel i with channel i + r/2. Su et al., RoFormer, arXiv 2104.09864."""
    r = cos_B1Tr.shape[-1]
    a, b, rest = x_BHTd[..., : r // 2], x_BHTd[..., r // 2 : r], x_BHTd[..., r:]
    cos, sin = cos_B1Tr[..., : r // 2], sin_B1Tr[..., : r // 2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


class Rotate(torch.autograd.Function):
    """`rotated`, whose gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x_BHTd: Tensor, cos_B1Tr: Tensor, sin_B1Tr: Tensor, fuse: Fuse) -> Tensor:
        ctx.save_for_backward(cos_B1Tr, sin_B1Tr)
        ctx.fuse = fuse
        return fuse(rotated)(x_BHTd, cos_B1Tr, sin_B1Tr)

    @staticmethod
    def backward(ctx: Any, grad_BHTd: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos_B1Tr, sin_B1Tr = ctx.saved_tensors
        return ctx.fuse(rotated)(grad_BHTd, cos_B1Tr, -sin_B1Tr), None, None, None


def rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, fuse: Fuse
) -> tuple[Tensor, Tensor]:
    """In place of transformers' function, with its arguments."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return Rotate.apply(q, cos, sin, fuse), Rotate.apply(k, cos, sin, fuse)


def _rotates_alike(theirs: Callable[..., Any]) -> bool:
    """Whether a model's rotary function does what `rotate_both` does: there are interleaved ones too."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(*s, generator=generator) for s in ((1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 4), (1, 3, 4)))
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    ours = rotate_both(q, k, cos, sin, fuse=lambda function: function)
    try:
        return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs(q, k, cos, sin), strict=True))
    except (TypeError, ValueError, RuntimeError):  # it takes other arguments
        return False


def _names_in(module: nn.Module) -> set[str]:
    """The attributes and globals that a module's `forward` speaks of."""
    forward = type(module).forward
    return {*forward.__code__.co_names} if isinstance(forward, FunctionType) else set()
