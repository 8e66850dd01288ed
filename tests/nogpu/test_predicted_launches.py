"""The launches that a prediction assumes on a GPU are those that were counted on the stand-in for one."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from dualtune.data.batches import SequenceLayout, step_documents
from dualtune.engine.card import ActivationCheckpointing, card_of
from dualtune.engine.memory.estimate import Ask
from dualtune.engine.memory.shapes import decoder_of
from dualtune.engine.step_time import OPTIMIZER, pieces_of

HERE = Path(__file__).parent
SHAPES = runpy.run_path(str(HERE / "fake" / "shapes.py"), run_name="shapes")["SHAPES"]
BUDGET = json.loads((HERE.parents[1] / "benchmarks" / "results" / "launches.json").read_text())["torch"]
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NO_FORMULA = {"mixture", "reference"}  # a mixture of experts, and model.kernels: reference, are not predicted


def launches(shape, kernels="fused"):
    """(of a micro-batch, of the optimizer) by the formulas."""
    checkpointing = ActivationCheckpointing("all" if shape.checkpointing else 0)
    ask = Ask(
        "torch", "cuda", shape.quantization, "bfloat16", 16, SEVEN, shape.rows * shape.tokens, shape.tokens,
        dropout=shape.dropout > 0, kernels=kernels, checkpointing=checkpointing,
    )  # fmt: skip
    number = shape.rows * shape.documents
    lengths = np.full(number, shape.rows * shape.tokens // number)
    documents = step_documents(lengths, SequenceLayout(shape.rows * shape.tokens, shape.tokens), "the test")
    assert len(documents.rows) == 1
    pieces = pieces_of(decoder_of(shape.config()), ask, card_of("torch").costs["cuda"], documents)
    in_update = sum(piece.launches for piece in pieces if piece.part == OPTIMIZER)
    return sum(piece.launches for piece in pieces) - in_update, in_update


@pytest.mark.parametrize("name", [name for name in BUDGET if name not in NO_FORMULA])
def test_a_prediction_assumes_the_launches_that_were_counted(name):
    """Up to 10 %: the backward pass of attention counts as three, and the lowest layer has a few less."""
    found, line = launches(SHAPES[name]), BUDGET[name][-1]
    counted = [line[work]["kernels"] + line[work]["products"] for work in ("micro_batch", "step")]
    assert found == pytest.approx(counted, rel=0.1)


def test_a_recorded_micro_step_is_launched_at_once():
    shape = SHAPES["dropout"]
    assert launches(shape, "graph") == (1, launches(shape)[1])
