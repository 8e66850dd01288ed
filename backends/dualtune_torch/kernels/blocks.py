"""The elementwise parts of a transformer block, compiled: norms, the rotary embedding, the activation of a gated MLP.

Norms and activations are the model's own code, so there is no second version that could be wrong. A module keeps its
class and its parameters. Only its `forward` is replaced, on the instance: other instances of the class do not change.

Compiled code gets two or three dimensions, with all tokens in one: the compiler treats a batch of one row and a batch
of two as different programs, and would recompile when the other kind comes.

Legend: B rows, T tokens, N = B · T, F width, H heads, d head size, r rotated channels of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dualtune_torch.kernels import allocator, compiled
from dualtune_torch.kernels.attention import NotCovered

Compile = Callable[[Any], Any]  # `compiled.compile_function`, or the identity

ROTARY = "apply_rotary_pos_emb"  # the function that transformers' attention modules call
MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")


def compile_norms(model: nn.Module, maybe_compile: Compile) -> bool:
    """Compile every RMSNorm. This and the next two functions return whether they found one."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if compiled.is_plain():
            return type(self).forward(self, x)
        return maybe_compile(type(self).forward)(self, x.reshape(-1, x.shape[-1])).view(x.shape)

    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.forward = MethodType(forward, norm)
    return bool(norms)


def compile_mlps(model: nn.Module, maybe_compile: Compile) -> bool:
    """Compile the code between the matrix products of every MLP of the form down(act(gate(x)) · up(x))."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if compiled.is_plain():
            return type(self).forward(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)

        def inner(gate: Tensor, up: Tensor) -> Tensor:
            return maybe_compile(gated)(self.act_fn, gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)

        group = getattr(self.down_proj, "group", None)  # of LoRA layers; gate and up are kept anyway
        if group is not None:
            group.recompute = lambda: inner(gate.detach(), up.detach())
        return self.down_proj(inner(gate, up))

    mlps = [module for module in model.modules() if _names_in(module) == {*MLP}]
    for mlp in mlps:
        mlp.forward = MethodType(forward, mlp)
    return bool(mlps)


def compile_rotary(model: nn.Module, maybe_compile: Compile) -> bool:
    """Rotate queries and keys by `Rotate` in every attention module with an equivalent function."""
    has_rotary = False
    for module in model.modules():
        forward = _forward_of(module)
        if ROTARY not in _names_in(module) or not _rotates_alike(forward.__globals__[ROTARY]):
            continue
        rotate = partial(rotate_both, maybe_compile=maybe_compile, own=forward.__globals__[ROTARY])
        names = {**forward.__globals__, ROTARY: rotate}
        own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        module.forward = MethodType(own, module)
        has_rotary = True
    return has_rotary


def gated(activation: nn.Module, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """The activation of a gated MLP. Shazeer, GLU variants improve transformer, arXiv 2002.05202."""
    return activation(gate_NF) * up_NF


def rotated(x_NHd: Tensor, cos_Nr: Tensor, sin_Nr: Tensor) -> Tensor:
    """Rotate the first r channels, channel i with channel i + r/2. Su et al., RoFormer, arXiv 2104.09864."""
    r = cos_Nr.shape[-1]
    a, b, unrotated = x_NHd[..., : r // 2], x_NHd[..., r // 2 : r], x_NHd[..., r:]
    cos, sin = cos_Nr[:, None, : r // 2], sin_Nr[:, None, : r // 2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, unrotated), dim=-1)


def rotated_back(x_NHd: Tensor, cos_Nr: Tensor, sin_Nr: Tensor) -> Tensor:
    """Undo `rotated`. The sines are negated in the same loop."""
    return rotated(x_NHd, cos_Nr, -sin_Nr)


class Rotate(torch.autograd.Function):
    """`rotated` for [B, H, T, d], laid out by token. Its gradient is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x_BHTd: Tensor, cos_Nr: Tensor, sin_Nr: Tensor, maybe_compile: Compile) -> Tensor:
        ctx.save_for_backward(cos_Nr, sin_Nr)
        ctx.maybe_compile = maybe_compile
        return _by_token(maybe_compile(rotated), x_BHTd, cos_Nr, sin_Nr)

    @staticmethod
    def backward(ctx: Any, grad_BHTd: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos_Nr, sin_Nr = ctx.saved_tensors
        return _by_token(ctx.maybe_compile(rotated_back), grad_BHTd, cos_Nr, sin_Nr), None, None, None


def _by_token(rotate: Callable[..., Tensor], x_BHTd: Tensor, cos_Nr: Tensor, sin_Nr: Tensor) -> Tensor:
    x_BTHd = x_BHTd.detach().transpose(1, 2)
    return rotate(x_BTHd.flatten(0, 1), cos_Nr, sin_Nr).view(x_BTHd.shape).transpose(1, 2)


def rotate_both(
    q_BHTd: Tensor, k_BGTd: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, maybe_compile: Compile,
    own: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Replace transformers' function, with the same arguments; cosines and sines [B or 1, T, r].

    `own`: theirs, for where nothing is compiled.
    """
    if own is not None and compiled.is_plain():
        return own(q_BHTd, k_BGTd, cos, sin, unsqueeze_dim)
    if unsqueeze_dim != 1:
        raise NotCovered(f"rotates heads along dimension {unsqueeze_dim}")
    B, _, T, _ = q_BHTd.shape
    cos_Nr, sin_Nr = (x.expand(B, T, -1).flatten(0, 1) for x in (cos, sin))
    return Rotate.apply(q_BHTd, cos_Nr, sin_Nr, maybe_compile), Rotate.apply(k_BGTd, cos_Nr, sin_Nr, maybe_compile)


def _rotates_alike(function: Callable[..., Any]) -> bool:
    """Whether a model's rotary function computes the same as `rotate_both`: some are interleaved."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (torch.randn(*s, generator=generator) for s in ((1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 4), (1, 3, 4)))
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    rotated_here = rotate_both(q, k, cos, sin, maybe_compile=lambda function: function)
    try:
        return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(rotated_here, function(q, k, cos, sin), strict=True))
    except (TypeError, ValueError, RuntimeError) as error:  # it takes other arguments
        if allocator.is_out_of_memory(error):
            raise
        return False


def _forward_of(module: nn.Module) -> Any:
    """The `forward` that computes: transformers wraps some, to take the old names of arguments."""
    return inspect.unwrap(type(module).forward)


def _names_in(module: nn.Module) -> set[str]:
    """The attributes and globals that a module's `forward` names."""
    forward = _forward_of(module)
    return {*forward.__code__.co_names} if isinstance(forward, FunctionType) else set()
