"""A program: every Triton kernel in Triton's interpreter, on a CPU, beside float64 or the code that it replaces.

It prints a JSON table for `test_numerics.py`: case -> what differs. The interpreter must be chosen before Triton is
imported, so this is a process of its own.

The interpreter truncates where a GPU rounds to bfloat16, and multiplies bfloat16 as integers. The first is mended
below, so the kernels that unpack weights are compared to the bit; products are tested in float32 and float16.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
os.environ["DUALTUNE_KERNELS"] = "triton"  # all of them, also where no byte is saved

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from dualtune.engine.backend import LoadRequest, get_backend
from dualtune.engine.testing.conformance import gradient, random_adapter
from dualtune.engine.testing.tiny_models import random_batch, write_tiny_llama
from dualtune.model.adapter import AdapterSpec
from dualtune.model.dropout import channel_keys, keep_mask
from dualtune.model.optimizer import OptimizerSpec
from dualtune_torch.kernels.gpu import (
    affine_dequant,
    launches,
    lora_back_g,
    lora_da,
    lora_down,
    lora_dx,
    nf4_dequant,
    select,
)
from dualtune_torch.lora import drop_rule, dropped
from dualtune_torch.weights import affine, nf4

SCALE = 1.7
P = 0.3
truncated = interpreter._convert_float


def rounded(data, source, target, mode):
    if (source, target) != (tl.float32, tl.bfloat16):
        return truncated(data, source, target, mode)
    numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
    return numbers.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(data.shape)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def gap(found, expected):
    """The largest difference, relative to the largest number; 0 for no numbers."""
    if not found.numel():
        return 0.0
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def mask_of(M, in_dim):
    """Seeds and keys, as the kernels take them, and the mask by the NumPy reference of the core."""
    seeds, keys = np.random.default_rng(M).integers(0, 1 << 32, M, dtype=np.uint32), channel_keys("a.q_proj", in_dim)
    mask = torch.from_numpy(keep_mask(seeds, keys, P))
    return torch.from_numpy(seeds.view(np.int32)), torch.from_numpy(keys.view(np.int32)), mask


def lora(M, in_dim, out_dim, r, layers, dtype):
    """What the kernels of a group of layers give, against float64: ragged sizes, strided rows, one part and several."""
    S = r * layers
    (seeds, keys, mask), rule = mask_of(M, in_dim), drop_rule(P)
    x, A = randn(M, in_dim + 3, dtype=dtype)[:, :in_dim], randn(S, in_dim, dtype=dtype)
    g, B = randn(M, out_dim, dtype=dtype), randn(out_dim, r, dtype=dtype)
    kept = x.double() * mask * rule[1]
    found = {"u": gap(lora_down.lora_down(x, A, seeds, keys, *rule), kept @ A.double().T)}

    wide_u, wide_v = randn(M, S, dtype=dtype), torch.empty(M, S, dtype=dtype)
    u, v, dB = wide_u[:, S - r :], wide_v[:, S - r :], randn(out_dim, r)
    wanted = dB.double() + SCALE * g.double().T @ u.double()
    lora_back_g.back_g(g, B, u, SCALE, v, dB)
    found |= {"v": gap(v, SCALE * g.double() @ B.double()), "dB": gap(dB, wanted)}
    u, v, dB = randn(M, r), torch.empty(M, r), torch.zeros(out_dim, r)  # wider than g, as `lora_backward` has them
    lora_back_g.back_g(g, B, u, SCALE, v, dB)
    found |= {"wide v": gap(v, SCALE * g.double() @ B.double()), "wide dB": gap(dB, SCALE * g.double().T @ u.double())}

    v, dA, dx = randn(M, S, dtype=dtype), randn(S, in_dim), randn(M, in_dim, dtype=dtype)
    wanted_dA, wanted_dx = dA.double() + v.double().T @ kept, dx.double() + (v.double() @ A.double()) * mask * rule[1]
    lora_da.add_dA(dA, v, x, seeds, keys, *rule)
    lora_dx.add_dx(dx, v, A, seeds, keys, *rule)
    return found | {"dA": gap(dA, wanted_dA), "dx": gap(dx, wanted_dx)}


def mask_bits(M, in_dim):
    """In how many places the masks of the kernels differ from the core's."""
    (seeds, keys, mask), rule = mask_of(M, in_dim), drop_rule(P)
    ones, eye = torch.ones(M, in_dim), torch.eye(in_dim)
    by_down = lora_down.lora_down(ones, eye, seeds, keys, *rule) != 0
    by_dx, by_dA = torch.zeros(M, in_dim), torch.zeros(M, in_dim)
    lora_dx.add_dx(by_dx, ones, eye, seeds, keys, *rule)
    lora_da.add_dA(by_dA, torch.eye(M), ones, seeds, keys, *rule)
    assert torch.equal(mask, dropped(ones, seeds, keys, *rule) != 0)
    return {name: int(((m != 0) != mask).sum()) for name, m in (("u", by_down), ("dx", by_dx), ("dA", by_dA))}


def unpacked_nf4(rows, columns, dtype):
    codes, state = nf4.quantize(randn(rows, columns), getattr(torch, dtype))
    assert nf4_dequant.fits(state)
    return {"bits": int((nf4_dequant.unpacked(codes, state) != nf4_dequant.reference(codes, state)).sum())}


def unpacked_affine(bits, shape, dtype):
    packed = affine.quantize(randn(int(np.prod(shape[:-1])), shape[-1]), bits).cast(getattr(torch, dtype))
    packed = affine.Packed(*(tensor.unflatten(0, shape[:-1]) for tensor in packed))
    found, expected = affine_dequant.unpacked(packed), affine_dequant.reference(packed)
    return {"bits": int((found != expected).sum()) if found.shape == expected.shape else found.numel()}


def step(quantization):
    """A whole step of an engine by the kernels, beside the same by the plain code: what was used, and the gradient."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_llama(Path(folder) / "model", hidden_size=64, intermediate_size=128, num_hidden_layers=1)
        spec, batch = AdapterSpec(4, 6.0, 0.3, ("all-linear",)), random_batch([9, 14], 96)
        gradients, used = [], []
        for kernels in ("auto", "reference"):
            request = LoadRequest(model, "float16", quantization, "pretrained", spec, OptimizerSpec(), 4, 0, kernels)
            engine = get_backend("torch", "cpu").load(request)
            engine.load_adapter_state(random_adapter(engine.adapter_state()))
            gradients.append(gradient(engine, batch))
            used.append(engine.description.kernels)
    ours, theirs = (np.concatenate([g[name].ravel() for name in sorted(g)]).astype(float) for g in gradients)
    return {"kernels": used[0], "gradient": float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))}


def main():
    np.seterr(over="ignore")  # the hash wraps
    torch.manual_seed(0)
    interpreter._convert_float = rounded
    select._why_impossible = lambda device: None  # the CPU
    launches.PROGRAMS, launches.BLOCKS_OF_A_PART = 8, 1  # several parts already at these sizes
    cases = {
        "lora float32": lambda: lora(70, 200, 150, 8, 3, torch.float32),
        "lora float16": lambda: lora(130, 96, 300, 16, 1, torch.float16),
        "lora of one token": lambda: lora(1, 64, 64, 16, 5, torch.float32),
        "lora of no token": lambda: lora(0, 64, 64, 16, 1, torch.float32),  # an expert that nothing was sent to
        "step nf4": lambda: step("nf4"),
        "step affine4": lambda: step("affine4"),
        "mask": lambda: mask_bits(37, 75),
        **{f"nf4 {dtype}": lambda d=dtype: unpacked_nf4(64, 192, d) for dtype in ("float32", "bfloat16", "float16")},
        **{
            f"affine{bits} {dtype}": lambda b=bits, d=dtype: unpacked_affine(b, (5, 7, 192), d)
            for bits in (4, 8)
            for dtype in ("float32", "bfloat16", "float16")
        },
    }
    json.dump({name: case() for name, case in cases.items()}, sys.stdout)


if __name__ == "__main__":
    main()
