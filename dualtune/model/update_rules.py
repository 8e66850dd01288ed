"""The formulas of the optimizers: each is here once, as a plain function of arrays.

A backend has a fast version of the elementwise ones that torch or MLX compute best in a way of their own, and the
conformance suite compares it with the one here. All other formulas run on the device as they stand: they use operators,
methods that all array libraries have, and functions of `xp`, which is numpy, torch or mlx.core.

Legend: w weights, g their gradient after clipping, slots the state. Without a remark all arrays have one shape, and any
part of a tensor may be updated alone. A formula BY TENSOR gets [K, *shape]: K tensors of one shape, each of which is
updated for itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

Settings = Mapping[str, float]
Array = Any  # of numpy, torch or mlx.core
Slots = Mapping[str, Array]


class UpdateRule(Protocol):
    """Return (w, slots) after update number `step`, counted from 1, in the precision of the arguments.

    On a device `step` is an array without axes, and with MLX `lr` is one too: nothing waits for their values.
    """

    def __call__(
        self, w: Array, g: Array, slots: Slots, *, step: Any, lr: Any, settings: Settings, xp: Any
    ) -> tuple[Array, dict[str, Array]]: ...


class ResultRule(Protocol):
    """Return the weights that the run evaluates and writes, in the precision of the arguments."""

    def __call__(self, w: Array, slots: Slots, *, settings: Settings) -> Array: ...


def adamw(
    w: Array, g: Array, slots: Slots, *, step: Any, lr: Any, settings: Settings, xp: Any
) -> tuple[Array, dict[str, Array]]:
    """AdamW with bias correction (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2):

    m ← β1·m + (1 − β1)·g, v ← β2·v + (1 − β2)·g²,
    w ← w·(1 − lr·decay) − lr·m̂ / (√v̂ + ε) with m̂ = m / (1 − β1^step), v̂ = v / (1 − β2^step).
    """
    beta1, beta2 = settings["beta1"], settings["beta2"]
    m = beta1 * slots["m"] + (1 - beta1) * g
    v = beta2 * slots["v"] + (1 - beta2) * g**2
    m_hat, v_hat = m / one_minus_power(beta1, step, xp), v / one_minus_power(beta2, step, xp)
    w = w * (1 - lr * settings["weight_decay"]) - lr * m_hat / (xp.sqrt(v_hat) + settings["eps"])
    return w, {"m": m, "v": v}


def one_minus_power(beta: float, step: Any, xp: Any) -> Any:
    """1 − beta^step, to all digits: in float32 a plain subtraction would be 2e-5 off in early steps."""
    return -xp.expm1(step * math.log(beta))


def adamw_root(
    w: Array, g: Array, slots: Slots, *, step: Any, lr: Any, settings: Settings, xp: Any
) -> tuple[Array, dict[str, Array]]:
    """`adamw` that keeps √v: codes then have half the exponents to cover, and a value is the step's own denominator."""
    w, new = adamw(w, g, {"m": slots["m"], "v": slots["root_v"] ** 2}, step=step, lr=lr, settings=settings, xp=xp)
    return w, {"m": new["m"], "root_v": xp.sqrt(new["v"])}


def sgd(
    w: Array, g: Array, slots: Slots, *, step: Any, lr: Any, settings: Settings, xp: Any
) -> tuple[Array, dict[str, Array]]:
    """Plain gradient descent, without momentum and so without state: w ← w·(1 − lr·decay) − lr·g.

    Goodfellow et al., Deep Learning, algorithm 8.1. For SGD, decoupled decay equals the L2 penalty of
    `torch.optim.SGD` (arXiv 1711.05101, proposition 1).
    """
    return w * (1 - lr * settings["weight_decay"]) - lr * g, {}


def schedule_free(
    w: Array, g: Array, slots: Slots, *, step: Any, lr: Any, settings: Settings, xp: Any
) -> tuple[Array, dict[str, Array]]:
    """Schedule-free AdamW (Defazio et al., arXiv 2405.15682, algorithm 1), by the offset d of its base sequence.

    The paper has three sequences: z, which gradients move; their average x; and y = (1 − β1)·z + β1·x, where the
    gradient is taken. Here w is y and the slot d is z − y, zero at the start, so x = w − ((1 − β1) / β1)·d is the
    result. With u = g / (√v̂ + ε) + decay·w, and c the share of the newest z in the average, the paper's

        z ← z − lr·u,  x ← (1 − c)·x + c·z,  y ← (1 − β1)·z + β1·x

    is, after x and z are replaced by w and d,

        w ← w + c·d − (1 − β1·(1 − c))·lr·u,  d ← (1 − c)·(d − β1·lr·u).
    """
    beta1, beta2, c = settings["beta1"], settings["beta2"], newest_share(step, settings["warmup_steps"])
    v = beta2 * slots["v"] + (1 - beta2) * g**2
    u = lr * (g / (xp.sqrt(v / (1 - beta2**step)) + settings["eps"]) + settings["weight_decay"] * w)
    return w + c * slots["d"] - (1 - beta1 * (1 - c)) * u, {"d": (1 - c) * (slots["d"] - beta1 * u), "v": v}


def newest_share(step: float, warmup_steps: float) -> float:
    """Return c, the weight of the newest z in x: its squared relative rate, divided by the sum of all of them so far.

    Update i has the relative rate min(1, i / (warmup_steps + 1)), as in `train/objective.py`; squares are the paper's.
    The sum in closed form makes c a function of the number of updates, so there is nothing to save.
    """
    end, m = warmup_steps + 1, min(step, warmup_steps)
    rising = m * (m + 1) * (2 * m + 1) / 6 / end**2
    return min(1.0, step / end) ** 2 / (rising + max(0.0, step - warmup_steps))


def schedule_free_result(w: Array, slots: Slots, *, settings: Settings) -> Array:
    """The average x of `schedule_free`."""
    beta1 = settings["beta1"]
    return w - w.dtype.type((1 - beta1) / beta1) * slots["d"]


def lion(
    w: Array, g: Array, slots: Slots, *, step: Any, lr: Any, settings: Settings, xp: Any
) -> tuple[Array, dict[str, Array]]:
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2): all weights move by the same amount, ± lr.

    u = sign(β1·m + (1 − β1)·g), m ← β2·m + (1 − β2)·g, w ← w·(1 − lr·decay) − lr·u.
    """
    beta1, beta2, m = settings["beta1"], settings["beta2"], slots["m"]
    u = xp.sign(beta1 * m + (1 - beta1) * g)
    return w * (1 - lr * settings["weight_decay"]) - lr * u, {"m": beta2 * m + (1 - beta2) * g}


def coded(rule: UpdateRule) -> UpdateRule:
    """Return a formula whose slots are rounded to 8-bit codes after each update (`eight_bit.py`)."""

    def update(
        w: Array, g: Array, slots: Slots, *, step: Any, lr: Any, settings: Settings, xp: Any
    ) -> tuple[Array, dict[str, Array]]:
        from dualtune.model.eight_bit import CODES, rounded

        w, exact = rule(w, g, slots, step=step, lr=lr, settings=settings, xp=xp)
        return w, {slot: rounded(values, CODES[slot], step) for slot, values in exact.items()}

    return update


# ----------------------------------------------------------------------------------------------------------------------
# By tensor: slots say how a tensor is updated.


def adafactor(
    w: Array, g: Array, slots: Slots, *, step: Any, lr: Any, settings: Settings, xp: Any
) -> tuple[Array, dict[str, Array]]:
    """Adafactor with a given learning rate and no momentum (Shazeer & Stern, arXiv 1804.04235, algorithms 4 and 5).

    The second moment of a matrix is the outer product of its means over columns and rows, r and c, divided by the mean
    of r; that of a vector is v. With G = g² + ε and s = step^−decay_rate, the share of the newest gradient,

        r ← (1 − s)·r + s·mean(G, columns), c ← (1 − s)·c + s·mean(G, rows),
        u = g / √(r cᵀ / mean(r)), u ← u / max(1, RMS(u) / threshold), w ← w·(1 − lr·decay) − lr·u.

    As `transformers.Adafactor` computes with relative_step=False and scale_parameter=False.
    """
    share, squares = step ** -settings["decay_rate"], g**2 + settings["eps"]
    if "v" in slots:
        new = {"v": (1 - share) * slots["v"] + share * squares}
        u = g / xp.sqrt(new["v"])
    else:
        means = {"v_row": squares.mean(axis=-1), "v_col": squares.mean(axis=-2)}
        new = {slot: (1 - share) * slots[slot] + share * mean for slot, mean in means.items()}
        row, col = new["v_row"], new["v_col"]
        u = g / xp.sqrt(row / row.mean(axis=-1, keepdims=True))[..., None] / xp.sqrt(col)[..., None, :]
    excess = root_mean_square(u, xp) / settings["clip_threshold"]
    u = u / xp.where(excess > 1, excess, 1.0)
    return w * (1 - lr * settings["weight_decay"]) - lr * u, new


def root_mean_square(x: Array, xp: Any) -> Array:
    """Return that of each of K tensors, [K, 1, …]; axis by axis, because one long float32 sum would lose digits."""
    squares = x**2
    for axis in range(1, x.ndim):
        squares = squares.mean(axis=axis, keepdims=True)
    return xp.sqrt(squares)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients: steepest at zero, so five iterations are enough
ADAMW_RMS = 0.2  # the usual root mean square of an update of AdamW


def muon(
    w: Array, g: Array, slots: Slots, *, step: Any, lr: Any, settings: Settings, xp: Any
) -> tuple[Array, dict[str, Array]]:
    """Muon with Nesterov's momentum for matrices [..., out, in] (Jordan et al., kellerjordan.github.io/posts/muon).

        m ← μ·m + (1 − μ)·g, U = orthogonal((1 − μ)·g + μ·m),
        w ← w·(1 − lr·decay) − lr·0.2·√max(out, in)·U

    The factor of U makes the update as long as one of AdamW, whatever the matrix's shape, so that AdamW's learning rate
    and decay fit (Liu et al., Muon is scalable for LLM training, arXiv 2502.16982, equation 4). It is that of
    `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which computes U in bfloat16; here it is in float32.

    A tensor with a slot v is not a matrix: AdamW updates it, with the same learning rate.
    """
    if "v" in slots:
        return adamw(w, g, slots, step=step, lr=lr, settings=settings, xp=xp)
    momentum, length = settings["momentum"], ADAMW_RMS * math.sqrt(max(w.shape[-2:]))
    m = momentum * slots["m"] + (1 - momentum) * g
    u = orthogonal((1 - momentum) * g + momentum * m, int(settings["iterations"]), xp)
    return w * (1 - lr * settings["weight_decay"]) - (lr * length) * u, {"m": m}


def orthogonal(x: Array, iterations: int, xp: Any) -> Array:
    """Return about U Vᵀ of the singular value decomposition U S Vᵀ of each matrix, by Newton and Schulz's iteration.

    Its singular values are not 1, but most lie between 0.7 and 1.2, which is enough.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.swapaxes(-1, -2) if is_tall else x
    x = x / (xp.sqrt((x**2).sum(axis=-1, keepdims=True).sum(axis=-2, keepdims=True)) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(iterations):
        gram = x @ x.swapaxes(-1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.swapaxes(-1, -2) if is_tall else x
