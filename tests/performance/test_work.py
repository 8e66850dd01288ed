"""What a step is predicted to compute, read and call, against independent counts of the real engine and by hand."""

import json
from collections import Counter

import numpy as np
import pytest

from dualtune.data.batches import SequenceLayout, micro_batches, step_documents
from dualtune.data.documents import in_memory
from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import card_of
from dualtune.engine.memory.estimate import Ask
from dualtune.engine.memory.shapes import decoder_of
from dualtune.engine.step_time import (
    ANSWERS,
    ATTENTION,
    BASE,
    HEAD,
    OPTIMIZER,
    PARTS,
    RECOMPUTATION,
    REST,
    TRANSFERS,
    pieces_of,
)
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from dualtune_torch.kernels import choose, compiled  # noqa: E402

SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 192,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IN_PLACE = {torch.ops.aten.addmm_: torch.ops.aten.addmm}  # torch counts it under the name of the other
LAYOUT, RANK = SequenceLayout(2048, 2048), 8
# Operators that compute nothing: they make a tensor that shares memory, or that is not filled yet.
NO_LAUNCH = {
    "view", "_unsafe_view", "_reshape_alias", "as_strided", "t", "transpose", "permute", "expand", "slice", "select",
    "split", "split_with_sizes", "unbind", "squeeze", "unsqueeze", "detach", "alias", "empty", "empty_like",
    "new_empty", "empty_strided", "new_empty_strided", "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip


class OperatorCounter(TorchDispatchMode):
    """Counts operators, and their operations by torch's own formulas.

    What `maybe_compile` gets counts as one call forward and one backward, as compiled code.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.flops = 0
        self.inside = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        if not self.inside and name not in NO_LAUNCH:
            self.counts[name] += 1
        out = function(*args, **(kwargs or {}))
        operator = IN_PLACE.get(function.overloadpacket, function.overloadpacket)
        if operator in flop_registry:
            self.flops += flop_registry[operator](*args, **(kwargs or {}), out_val=out)
        return out

    def as_one(self, function):
        counter = self

        class Once(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *args):
                counter.inside += 1
                ctx.args = [
                    x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args
                ]
                with torch.enable_grad():
                    ctx.out = function(*ctx.args)
                counter.inside -= 1
                counter.counts["compiled"] += 1
                return tuple(x.detach() for x in ctx.out) if isinstance(ctx.out, tuple) else ctx.out.detach()

            @staticmethod
            def backward(ctx, *grads):
                wanted = [x for x in ctx.args if isinstance(x, torch.Tensor) and x.requires_grad]
                counter.inside += 1
                found = iter(torch.autograd.grad(ctx.out, wanted, grads))
                counter.inside -= 1
                counter.counts["compiled"] += 1
                return tuple(next(found) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in ctx.args)

        return lambda *args: Once.apply(*args)


@pytest.fixture
def step_of(open_backend, tmp_path, monkeypatch):
    """(a step of the real engine on documents of these lengths, its launch counter, the predicted pieces)."""

    def build(lengths, *, dropout=0.05, quantization="none", method="lora", **changes):
        counter, config = OperatorCounter(), CONFIG | changes
        monkeypatch.setattr(compiled, "compile_function", counter.as_one)
        monkeypatch.setattr(compiled, "why_not", lambda device: None)
        monkeypatch.setattr(choose, "WORTH_COMPILING", 0)
        (tmp_path / "config.json").write_text(json.dumps(config))
        spec = AdapterSpec(RANK, 16.0, dropout, SEVEN, method=method)
        request = LoadRequest(tmp_path, "float32", quantization, "random", spec, OptimizerSpec(), seed=1)
        engine = open_backend("torch").load(request)
        assert engine.description.kernels.startswith("fused: lora, attention, loss, norms, mlp, rotary")
        rng = np.random.default_rng(0)
        documents = in_memory([(rng.integers(0, 256, n).astype(np.int32), np.ones(n, bool)) for n in lengths])
        batches = micro_batches(documents, range(len(lengths)), LAYOUT, seed=0, step=0)

        def step():
            for batch in batches:
                engine.forward_backward(batch, divisor=100)
            engine.optim_step(lr=0.0, max_grad_norm=1.0)

        step()
        counter.counts.clear()
        return step, counter, pieces(lengths, config, dropout=dropout > 0, quantization=quantization, method=method)

    return build


def pieces(lengths, config=CONFIG, kind="cpu", **changes):
    ask = Ask("torch", kind, changes.pop("quantization", "none"), "float32", RANK, SEVEN, 2048, max(lengths), **changes)
    documents = step_documents(np.array(lengths), LAYOUT, "the test")
    return pieces_of(decoder_of(config), ask, card_of("torch").costs[kind], documents)


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        ([100, 60], {}),
        ([300], {"dropout": 0.0, "num_key_value_heads": 4, "hidden_size": 96}),
        ([300], {"method": "dora"}),
    ],
)
def test_the_operations_are_those_that_torch_counts(step_of, lengths, changes):
    """Up to 4 %: documents are rounded up to 16. Torch has no formula for its flash kernel on a CPU, so the forward
    pass of attention is checked by hand below."""
    step, counter, found = step_of(lengths, **changes)
    with counter:
        step()
    counted = [piece for piece in found if piece.part != ATTENTION or piece.is_backward]
    assert sum(piece.products for piece in counted) == pytest.approx(counter.flops, rel=0.04)


def test_attention_multiplies_blocks_and_flash_attention_only_what_is_seen():
    """300 tokens are two blocks of 150 queries, which see 150 and 300 keys."""
    for kind, pairs in {"cpu": 150 * 150 + 150 * 300, "cuda": 300 * 301 // 2}.items():
        products = {p.is_backward: p.products for p in pieces([300], kind=kind) if p.part == ATTENTION and p.products}
        one = 2 * 4 * 16 * pairs * 3  # a product: heads × head size × pairs × layers
        assert products == {False: 2 * one, True: 5 * one}


def test_the_bytes_of_the_base_products_are_their_operands_and_results():
    tokens, layers = 208, 3
    widths = [(64, 64), (32, 64), (32, 64), (64, 64), (192, 64), (192, 64), (64, 192)]
    each = [4 * (tokens * (out + in_) + out * in_) for out, in_ in widths]
    below_lowest = sum(each[:3])  # q, k, v of the first layer: no gradient of their input
    found = sum(piece.bytes for piece in pieces([100, 108]) if piece.part == BASE)
    assert found == 2 * layers * sum(each) - below_lowest


def test_the_output_head_reads_its_weights_for_every_chunk():
    found = next(piece for piece in pieces([300]) if piece.part == HEAD and piece.products)
    chunks, targets = 3, 299  # of 128 rows
    assert found.products == 2 * 2 * targets * 64 * 256
    assert found.bytes == 4 * (2 * chunks * 64 * 256 + 2 * targets * 64)


# --- launches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "changes"),
    [([100, 100], {"dropout": 0.0}), ([600], {}), ([40] * 6, {"quantization": "affine4"}),
     ([100], {"quantization": "int8"}), ([600], {"method": "dora"})],
)  # fmt: skip
def test_the_launches_are_those_of_the_engine(step_of, lengths, changes):
    """Up to 4 %: the lowest layer has a few less, because nothing below it is trained."""
    step, counter, found = step_of(lengths, **changes)
    with counter:
        step()
    assert sum(piece.launches for piece in found) == pytest.approx(counter.counts.total(), rel=0.04)


def test_a_gpu_launches_as_many_for_many_documents_as_for_one():
    one, many = (sum(piece.launches for piece in pieces(lengths, kind="cuda")) for lengths in ([400], [100] * 4))
    assert one == many


def test_a_step_that_compares_answers_has_one_more_forward_pass():
    once, twice = (pieces([100, 100], compares=compares) for compares in (False, True))
    assert [piece for piece in twice if piece.part != ANSWERS] == once
    forward = [p for p in once if not p.is_backward and p.part not in (OPTIMIZER, REST, RECOMPUTATION, TRANSFERS)]
    more = [piece for piece in twice if piece.part == ANSWERS]
    for what in ("products", "elementwise", "bytes", "launches"):
        assert sum(getattr(p, what) for p in more) == pytest.approx(sum(getattr(p, what) for p in forward))


# --- the card ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "kind"), [("torch", "cpu"), ("torch", "cuda"), ("mlx", "metal")])
def test_a_card_names_parts_and_units_that_exist(backend, kind):
    costs = card_of(backend).costs[kind]
    tables = (costs.launches, costs.numbers, costs.operations)
    assert {part for table in tables for part in table} <= {*PARTS}
    ask = Ask(backend, kind, "none", "float32", RANK, SEVEN, 2048, 100, method="dora")  # which has all parts
    documents = step_documents(np.array([100]), LAYOUT, "the test")
    found = pieces_of(decoder_of(CONFIG), ask, costs, documents)  # KeyError for an unknown unit
    assert {piece.part for piece in found} >= {part for table in tables for part in table}
