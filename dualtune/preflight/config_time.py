"""How long a step of a config takes, predicted: its documents, and a machine's limits."""

from __future__ import annotations

from dualtune.checks import Check
from dualtune.config import Config
from dualtune.errors import EnvironmentFault
from dualtune.performance.documents import StepDocuments
from dualtune.performance.prediction import SAID, Prediction, predict
from dualtune.platform.rates import Limits
from dualtune.preflight.config_data import check_sources, first_step
from dualtune.preflight.config_memory import MemoryNeed
from dualtune.preflight.config_model import find_model, load_tokenizer


def documents_of(config: Config) -> StepDocuments:
    """Return the documents of the first step, from a quick look at the data."""
    tokenizer, _ = load_tokenizer(config, find_model(config)[0])
    return first_step(config, check_sources(config, tokenizer)[1])


def predict_config(memory: MemoryNeed, documents: StepDocuments, limits: Limits) -> Prediction:
    """Predict a step with the settings that the memory was planned for. EnvironmentFault if there is no formula."""
    return predict(memory.plan.decoder, memory.plan.ask, documents, limits)


def time_row(memory: MemoryNeed, documents: StepDocuments, limits: Limits | None) -> Check:
    """Return a row on the time of a step, skipped if nothing is known of the machine."""
    if limits is None:
        return Check("time", "skipped", "no limits are known for this machine; dualtune bench measures a step")
    try:
        return Check("time", "ok", described(predict_config(memory, documents, limits)))
    except EnvironmentFault as error:
        return Check("time", "skipped", str(error))


def described(found: Prediction) -> str:
    """Say how long a step takes, and that this is no measurement."""
    return (
        f"about {found.tokens_per_s:,.0f} tokens/s, {found.step_s:.3g} s for a step of {found.tokens:,} tokens, bound "
        f"by {found.bound}; {SAID}"
    )
