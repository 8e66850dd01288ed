"""8-bit optimizer state on every backend: the codes of the core, to the bit, and a state that moves between them."""

from itertools import permutations

import numpy as np
import pytest

from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing.conformance_case import SPEC, assert_equal, random_adapter
from dualtune.engine.testing.conformance_state import train
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.eight_bit import BLOCK, CODES, chunks_of, decode, dither, encode
from dualtune.model.optimizer import OptimizerSpec

SIZES = (1, BLOCK - 1, BLOCK, 9 * BLOCK + 1)


def values_of(slot, size, seed):
    """Over all exponents that are stored, zero and values below them included."""
    rng = np.random.default_rng(seed)
    values = (2.0 ** rng.uniform(-75, 127, size) * rng.choice([-1, 0, 1, 1], size)).astype(np.float32)
    values[: size // 2] = np.exp(2 * rng.normal(size=size // 2)) * np.sign(values[: size // 2])
    return values if CODES[slot].is_signed else np.abs(values)


@pytest.mark.parametrize("slot", CODES)
@pytest.mark.parametrize("step", [1, 77, 2**24 - 1])
def test_torch_has_the_codes_of_the_core(slot, step):
    torch = pytest.importorskip("torch")
    from dualtune_torch.kernels import eight_bit

    code = CODES[slot]
    for seed, size in enumerate(SIZES):
        values = values_of(slot, size, seed)
        blocks, added = eight_bit.as_blocks(torch.from_numpy(values)), torch.from_numpy(dither(code, step))
        codes, tops = eight_bit.encode(blocks, added, code)
        again = eight_bit.decode(codes, tops, code).numpy().ravel()[:size]
        assert_codes([codes.numpy().ravel()[:size], tops.numpy()], again, values, slot, step)


@pytest.mark.parametrize("slot", CODES)
@pytest.mark.parametrize("step", [1, 2**24 - 1])
def test_mlx_has_the_codes_of_the_core(slot, step):
    mx = pytest.importorskip("mlx.core")
    from dualtune_mlx.kernels import eight_bit

    code = CODES[slot]
    for seed, size in enumerate(SIZES):
        values = values_of(slot, size, seed)
        found = eight_bit.encode(mx.array(values), code, mx.array(float(step)))
        again = np.array(eight_bit.decode(*found, code))
        assert_codes([np.array(x) for x in found], again, values, slot, step)


def assert_codes(found, again, values, slot, step):
    expected = encode(values, CODES[slot], step)
    for ours, theirs in zip(expected, found, strict=True):
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    assert np.array_equal(decode(*expected, CODES[slot]).view(np.int32), again.view(np.int32))


def test_chunks_cover_all_and_no_block_has_two_tensors():
    for sizes in ([256, 512, 100, 300, 1024, 2048], [1], [], [255, 257], [4096], [3, 3, 3]):
        chunks = list(chunks_of(sizes, 1024))
        values, blocks = ([where for pair in chunks for where in (pair[i].start, pair[i].stop)] for i in (0, 1))
        assert values == sorted(values) and blocks == sorted(blocks)
        assert values[1:-1:2] == values[2::2] and values[:1] + values[-1:] == ([0, sum(sizes)] if sizes else [])
        assert blocks[-1:] == ([sum(-(-size // BLOCK) for size in sizes)] if sizes else [])
        ends = np.cumsum(sizes)
        for inside, _ in chunks:
            assert inside.stop - inside.start <= 1024
            starts = range(inside.start, inside.stop, BLOCK)
            assert all(not any(start < end < min(start + BLOCK, inside.stop) for end in ends) for start in starts)


def test_a_state_moves_between_backends_bitwise(open_backend, tiny_llama):
    """Each takes the others' state to the bit, and gives it back."""
    request = LoadRequest(
        tiny_llama, "float32", "auto", "pretrained", SPEC, OptimizerSpec("adamw_8bit"), seed=1, kernels="reference"
    )
    engines = {name: open_backend(name).load(request) for name in ("torch", "mlx")}
    for engine in engines.values():
        engine.load_adapter_state(random_adapter(engine.adapter_state()))
        train(engine, *(random_batch([9, 16, 5], 31, seed=seed) for seed in range(3)))
    for here, there in permutations(engines.values()):
        state = here.optimizer_state()
        there.load_optimizer_state(state)
        found = there.optimizer_state()
        assert found.step == state.step == 3
        for slot, tensors in state.slots.items():
            assert_equal(found.slots[slot], tensors)
            assert any(x.any() for x in tensors.values())
