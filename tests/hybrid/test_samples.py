"""Sample answers in a run with predictive training: they change neither its predictions nor its weights."""

import pytest

pytestmark = pytest.mark.covering(1)


def test_samples_change_no_bit_of_a_run_that_predicts(lab):
    settings = {"data__eval": 0.2, "run__eval_every": 8}
    plain = lab.run("plain", **settings)
    sampled = lab.run("sampled", run__sample_prompts=["3 plus 3?"], **settings)
    assert plain.events("predicted")
    assert sampled.updates() == plain.updates()
    adapters = [(each.path / "adapter" / "adapter_model.safetensors").read_bytes() for each in (plain, sampled)]
    assert adapters[0] == adapters[1]
    assert (sampled.path / "samples.jsonl").read_text().count("\n") == 7  # before, and after 8, 16, … 48 steps
