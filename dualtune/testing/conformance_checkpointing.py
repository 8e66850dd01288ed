"""The conformance check of `memory.checkpointing`: what is recomputed is what would have been kept, to the bit."""

from __future__ import annotations

from dualtune.activation_checkpointing import KEEP_ALL, LAYERS, ActivationCheckpointing
from dualtune.errors import ConfigError
from dualtune.testing.conformance_case import Case, assert_equal, gradient
from dualtune.testing.tiny_models import row_of

VALUES = {
    "remade": ActivationCheckpointing(remade=True),
    LAYERS: ActivationCheckpointing(1),
    "full": ActivationCheckpointing("all"),
    "none": KEEP_ALL,
}


def check_checkpointing_changes_no_bit(case: Case) -> None:
    """Every value gives the same gradient, with dropout and accumulation; one that an engine lacks is refused."""
    honoured = case.backend.capabilities().get("memory.checkpointing", frozenset({"auto"}))
    engine, batch = case.engine(dropout=0.3), case.batch()
    fresh = engine.optimizer_state()
    expected, loss = gradient(engine, batch, row_of(batch, 1)), engine.evaluate(batch).loss_sum
    for value, checkpointing in VALUES.items():
        try:
            engine.set_checkpointing(checkpointing)
        except ConfigError:
            # The plain code may have nothing that could be recomputed from what it keeps anyway.
            assert value not in honoured or value == "remade", f"{value} is honoured, but refused"
            continue
        assert value in honoured or value == "none", f"{value} is not honoured, but accepted"
        assert (engine.description.checkpointing == "none") == (value == "none")
        engine.load_optimizer_state(fresh)
        assert_equal(gradient(engine, batch, row_of(batch, 1)), expected)
        assert engine.evaluate(batch).loss_sum == loss
