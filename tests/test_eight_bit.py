"""8-bit optimizer state: exact again after decoding, close to the value, and its mean over the steps."""

import numpy as np
import pytest

from dualtune.model.eight_bit import BLOCK, CODES, decode, dither, encode, rounded
from dualtune.model.optimizer import OPTIMIZERS, OptimizerSpec

RANGE = 2.0**-15  # of a block's largest value: what is above has its precision
SLOTS = pytest.mark.parametrize("slot", CODES)


def values_of(slot, size, seed=0, spread=3.0):
    """Values over many powers of two: m has both signs, the root of v none."""
    rng = np.random.default_rng(seed)
    values = (np.exp(spread * rng.normal(size=size)) * rng.choice([-1, 1], size)).astype(np.float32)
    return values if CODES[slot].is_signed else np.abs(values)


SPECIAL = {
    "zeros": np.zeros(3 * BLOCK, np.float32),
    "one value": np.float32([0.1]),
    "one value in a block": np.float32([0] * 300 + [0.7] + [0] * 300),
    "a tail of one": np.full(BLOCK + 1, 0.3, np.float32),
    "equal": np.full(BLOCK, np.float32(1 / 3)),
    "huge": np.float32([3.4e38, 3.3e38, 1.0, 1e-18, 0]),
    "tiny": np.float32([1.2e-19, 1.1e-19, 9e-20, 1e-30, 0]),
    "subnormal": np.float32([1e-45, 1e-40, 1.1e-38, 0]),
    "at the end of the range": np.float32([1.0, 2.0**-15.9, 2.0**-16, 2.0**-17, 2.0**-60, 0]),
    "powers of two": np.exp2(np.arange(-63, 128, dtype=np.float32)),
    "below powers of two": np.nextafter(np.exp2(np.arange(-63, 128, dtype=np.float32)), np.float32(0)),
}


@SLOTS
@pytest.mark.parametrize("name", SPECIAL)
def test_decoded_values_have_the_same_codes_again(slot, name):
    assert_stable(SPECIAL[name], slot)
    assert_stable(-SPECIAL[name] if CODES[slot].is_signed else SPECIAL[name][::-1].copy(), slot)


@SLOTS
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_decoded_random_values_have_the_same_codes_again(slot, spread):
    for seed in range(20):
        size = int(np.random.default_rng(seed).integers(1, 5 * BLOCK))
        assert_stable(values_of(slot, size, seed, spread), slot, step=seed)


def assert_stable(values, slot, step=1):
    """After any other step, with another dither."""
    code = CODES[slot]
    codes, tops = encode(values, code, step)
    again = decode(codes, tops, code)
    assert np.isfinite(again).all()
    for later in (step, step + 1, 12345, 2**24):
        found, found_tops = encode(again, code, later)
        assert np.array_equal(found, codes) and np.array_equal(found_tops, tops)
        assert np.array_equal(decode(found, found_tops, code).view(np.int32), again.view(np.int32))


@SLOTS
def test_every_code_of_every_top_is_stable(slot):
    code = CODES[slot]
    each = np.arange(-code.largest if code.is_signed else 0, code.largest + 1)
    blocks = np.zeros((40, BLOCK), np.int8 if code.is_signed else np.uint8)
    blocks[:, : len(each)] = each
    first = code.smallest_index + code.largest - 1  # a block with a lower top does not have all codes
    tops = np.linspace(first, code.largest_index, len(blocks)).astype(np.int16)
    found, found_tops = encode(decode(blocks.ravel(), tops, code), code, step=7)
    assert np.array_equal(found.reshape(blocks.shape), blocks) and np.array_equal(found_tops, tops)


@SLOTS
def test_values_in_the_range_change_by_less_than_one_code(slot):
    code, values = CODES[slot], values_of(slot, 100 * BLOCK, spread=1.5)
    found, blocks = rounded(values, code, 3).reshape(-1, BLOCK), values.reshape(-1, BLOCK)
    in_range = np.abs(blocks) > RANGE * np.abs(blocks).max(axis=1, keepdims=True)
    assert in_range.mean() > 0.9
    error = np.abs(found - blocks)[in_range] / np.abs(blocks)[in_range]
    assert error.max() < 2.0**-code.mantissa_bits and 0.2 * 2.0**-code.mantissa_bits < error.mean()


def test_only_what_is_zero_is_a_zero_denominator():
    root_v = rounded(np.float32([1, 1e-6, 1e-18, 1e-25, 0]), CODES["root_v"], 1)
    assert (root_v[:3] > 0).all() and root_v[1] == root_v[2] >= 1e-6
    assert (root_v[3:] == 0).all()
    tiny = rounded(np.float32(2.0) ** np.arange(-80, -40, dtype=np.float32), CODES["root_v"], 1)
    assert (tiny[tiny > 0] ** 2 >= np.finfo(np.float32).smallest_normal).all() and 15 < (tiny > 0).sum() < 25
    m = rounded(np.float32([1, -1e-6, 1e-3]), CODES["m"], 1)
    assert m[1] == 0 and m[2] == pytest.approx(1e-3, rel=0.13)


@SLOTS
def test_the_mean_over_the_steps_is_the_value(slot):
    """What rounding to the nearest lacks: here a fourteenth of the distance of two codes would always be lost."""
    code = CODES[slot]
    values = np.linspace(1, 2, 200, dtype=np.float32) * np.float32(0.01)
    values = np.concatenate([np.float32([1]), values])
    mean = np.mean([rounded(values, code, step) for step in range(1, 1001)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(mean, values, rtol=1e-3 * 2.0**-code.mantissa_bits * 8)
    assert np.abs(rounded(values, code, 1) / values - 1).max() > 0.02


def test_a_slow_second_moment_moves():
    """v falls by a thousandth a step, a thirtieth of the distance of two codes, beside one that does not."""
    spec, slots = OptimizerSpec("adamw_8bit"), {"m": np.zeros(8), "root_v": np.ones(8)}
    g = np.where(np.arange(8) == 0, 1.0, 0.0)
    for step in range(1, 1501):
        _, slots = spec.update(np.zeros(8), g, slots, step=step, lr=0.0)
    np.testing.assert_allclose(slots["root_v"][0], 1.0, rtol=0.07)
    np.testing.assert_allclose(slots["root_v"][1:], 0.999**750, rtol=0.35)


def test_the_dither_of_a_step_is_spread_evenly_over_a_block_and_over_the_steps():
    for code in CODES.values():
        whole = 1 << code.shift
        for sample in (dither(code, 5), np.array([dither(code, step)[9] for step in range(BLOCK)])):
            counts = np.histogram(sample, 16, range=(0, whole))[0]
            assert counts.sum() == BLOCK and counts.min() >= 14 and counts.max() <= 18
        assert dither(code, 2**24).min() >= 0


def test_the_table_has_the_bytes_of_the_codes():
    entry = OPTIMIZERS["adamw_8bit"]
    assert {*CODES} == {*entry.slots}
    codes, tops = zip(*(encode(values_of(slot, 4 * BLOCK), code, 1) for slot, code in CODES.items()), strict=True)
    assert sum(array.nbytes for array in (*codes, *tops)) == entry.bytes_of("w", (4 * BLOCK,))
    assert tops[0].itemsize == 2
    assert OPTIMIZERS["lion_8bit"].bytes_of("w", (4 * BLOCK,)) == entry.bytes_of("w", (4 * BLOCK,)) / 2
    assert OPTIMIZERS["adamw"].bytes_of("w", (1000,)) - entry.bytes_of("w", (1000,)) > 5980
