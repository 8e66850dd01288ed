"""LoRA in a torch module of your own: a small denoiser with cross-attention, as in a diffusion model.

    python examples/diffusion_block.py

The block learns to denoise circles, then is frozen. LoRA on its linear layers teaches it figures that it has not seen,
with an ordinary torch loop, and leaves an adapter in dualtune's files. An mlx.nn.Module takes the same calls.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from dualtune.engine.kernels import add_lora, load_lora, lora_tensors
from dualtune.model.adapter import AdapterSpec
from dualtune.model.formats.directory import Adapter, read_adapter, write_adapter

POINTS, BATCH, WIDTH, HEADS = 16, 64, 64, 4


class Denoiser(nn.Module):
    """Predicts the noise in x [B, points, 2] at the noise level t [B], given context tokens c [B, 2, 2]."""

    def __init__(self):
        super().__init__()
        self.embed, self.level, self.context = nn.Linear(2, WIDTH), nn.Linear(1, WIDTH), nn.Linear(2, WIDTH)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, t, c):
        h, c = self.embed(x) + self.level(t[:, None, None]), self.context(c)
        c = torch.cat((c, self.norm1(h)), dim=1)  # the points see the context and each other
        q, k, v = (
            proj(z).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for proj, z in ((self.to_q, self.norm1(h)), (self.to_k, c), (self.to_v, c))
        )
        h = h + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(h + self.fc2(F.gelu(self.fc1(self.norm2(h)))))


def figures(corners, generator):
    """Points of polygons around the origin (a circle has many corners), with radius and angle as context tokens."""
    radius = 0.5 + torch.rand(BATCH, 1, generator=generator)
    turn = 2 * math.pi * torch.rand(BATCH, 1, generator=generator)
    angle = 2 * math.pi * torch.rand(BATCH, POINTS, generator=generator)
    side = math.pi / corners
    r = radius * math.cos(side) / torch.cos(torch.remainder(angle, 2 * side) - side)
    points = torch.stack((r * torch.cos(angle + turn), r * torch.sin(angle + turn)), dim=-1)
    return points, torch.stack((torch.cat((radius, radius), 1), torch.cat((turn.cos(), turn.sin()), 1)), dim=1)


def loss_of(model, corners, generator):
    """Mean square error of the predicted noise (Ho et al., arXiv 2006.11239, equation 14), at any noise level."""
    points, context = figures(corners, generator)
    t, noise = torch.rand(BATCH, generator=generator), torch.randn(points.shape, generator=generator)
    angle = t[:, None, None] * math.pi / 2
    return F.mse_loss(model(torch.cos(angle) * points + torch.sin(angle) * noise, t, context), noise)


@torch.no_grad()
def held_out(model, corners):
    generator = torch.Generator().manual_seed(10_000)
    return sum(float(loss_of(model, corners, generator)) for _ in range(8)) / 8


def fit(model, corners, steps, lr):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, corners, generator).backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="of LoRA; the block itself gets twice as many before")
    parser.add_argument("--out", type=Path, default=Path("diffusion-adapter"), help="where the adapter goes")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Denoiser()
    fit(model, corners=64, steps=2 * args.steps, lr=2e-3)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = held_out(model, corners=3)

    spec = AdapterSpec(rank=8, alpha=16, dropout=0.0, targets=("to_q", "to_k", "to_v", "to_out", "fc1", "fc2"))
    paths = add_lora(model, spec, seed=0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"LoRA on {len(paths)} layers: {trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters")
    fit(model, corners=3, steps=args.steps, lr=2e-3)
    after = held_out(model, corners=3)
    print(f"held-out loss on triangles: {before:.4f} before, {after:.4f} after")

    write_adapter(args.out, Adapter(spec, lora_tensors(model)))
    again = Denoiser()
    again.load_state_dict(base)
    saved = read_adapter(args.out)
    add_lora(again, saved.spec)
    load_lora(again, saved.tensors)
    print(f"loaded from {args.out}: {held_out(again, corners=3):.4f}")


if __name__ == "__main__":
    main()
