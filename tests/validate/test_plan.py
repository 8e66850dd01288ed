"""What a tier comes to on a device, the data it trains on, and the check of memory before it."""

import json
import re
from dataclasses import replace

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import load_config
from dualtune.config.render import example_path
from dualtune.data.documents import Data
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.doctor.validate.tiers import (
    ALL,
    DEMO_MODEL,
    KEYWORDS,
    NUM_KEYWORDS,
    NUM_ROWS,
    TIERS,
    ValidationSetup,
    check_memory,
    compare,
    free_directory,
    plan,
    random_model,
    rows,
    tiers_of,
    write_rows,
)
from dualtune.engine.backend import DeviceInfo
from dualtune.engine.machine import Budget
from dualtune.engine.memory.shapes import KNOWN, decoder_of

STEPS = {"quick": 10, "convergence": 100, "memory": 50, "extended": 500, "full": 1000}


class OnGpu:
    """What a plan asks of a backend that has a GPU."""

    name = "torch"

    def capabilities(self):
        return {"model.quantization": frozenset({"auto", "none", "nf4"})}

    def devices(self):
        return [DeviceInfo("H100", "cuda", 80_000_000_000)]


@pytest.fixture
def on_gpu(tmp_path):
    return ValidationSetup("cuda", OnGpu(), tmp_path / "out")


def settings(config) -> dict:
    found = config.model_dump(mode="json")
    del found["data"]["train"], found["run"]["dir"]
    return found


@pytest.mark.parametrize("tier", TIERS.values(), ids=lambda tier: tier.name)
def test_on_a_gpu_a_tier_is_its_config_and_nothing_else(on_gpu, tier):
    made = plan(tier, on_gpu)
    assert settings(made.config) == settings(load_config(example_path(tier.config)))
    assert (made.notes, made.is_twin, made.steps_per_window) == ((), False, 50)
    assert [(c.measure, c.limit) for c in made.criteria] == [(c.measure, c.limit) for c in tier.criteria]
    assert made.config.train.steps == STEPS[tier.name]
    assert made.config.model.quantization == "nf4"


def test_a_twin_says_everything_that_it_changes(place, wording):
    made = plan(TIERS["full"], place("mlx"))
    text = " ".join(made.notes)
    wording(text)
    assert (made.config.train.steps, made.config.run.save_every, made.steps_per_window) == (100, 10, 5)
    written, changed = settings(load_config(example_path("gpu_llama7b_full"))), settings(made.config)
    differences = {f"{s}.{k}" for s in written for k in written[s] if written[s][k] != changed[s][k]}
    assert differences == {
        "model.name", "model.quantization", "train.learning_rate", "train.steps", "run.save_every"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_a_model_that_is_asked_for_takes_the_place_of_the_twin_and_keeps_the_tiers_settings(place, tmp_path, name):
    there = replace(place(name), model=str(DEMO_MODEL), steps=40)
    made = plan(TIERS["convergence"], there)
    assert (made.is_twin, made.model, made.config.model.name) == (False, "model", str(DEMO_MODEL))
    assert (made.config.train.steps, made.steps_per_window) == (40, 20)
    assert made.config.train.learning_rate == load_config(example_path("gpu_smollm2_convergence")).train.learning_rate
    assert [note.split(" ")[0] for note in made.notes] == ["model", *["affine4"] * (name == "mlx"), "40"]
    assert "decrease" in {c.measure for c in made.criteria if c.not_judged is None}, "the weights are pretrained"
    assert {c.measure for c in made.criteria if c.not_judged} == {"peak_bytes", "elapsed"}


def test_no_tier_takes_more_steps_than_its_own(on_gpu):
    assert plan(TIERS["quick"], replace(on_gpu, steps=500)).config.train.steps == STEPS["quick"]


def test_all_is_the_four_short_tiers_in_order():
    assert [tier.name for tier in tiers_of("all")] == [*ALL] == ["quick", "convergence", "memory", "extended"]
    assert [tier.name for tier in tiers_of("full")] == ["full"]
    with pytest.raises(ConfigError, match="got 'fast', allowed: selftest, quick, "):
        tiers_of("fast")


def test_tiers_have_the_memory_of_their_criterion():
    found = {t.name: (t.peak_bytes, [c.limit for c in t.criteria if c.measure == "peak_bytes"]) for t in TIERS.values()}
    mb = 10**6
    wanted = {"quick": 256 * mb, "convergence": 256 * mb, "memory": 2000 * mb, "extended": 2000 * mb,
              "full": 12_000 * mb}  # fmt: skip
    assert found == {name: (limit, [limit]) for name, limit in wanted.items()}


def test_random_weights_have_the_published_shape_and_a_tokenizer(tmp_path):
    for name in {load_config(example_path(tier.config)).model.name for tier in TIERS.values()}:
        directory = random_model(name, tmp_path / name.replace("/", "_"))
        config = json.loads((directory / "config.json").read_text())
        assert decoder_of(config) == decoder_of(KNOWN[name])
        tokens = Tokenizer(directory).encode("Explain concept number 7.", special=False)
        assert len(tokens) > 0 and max(tokens) < config["vocab_size"]
        assert not list(directory.glob("*.safetensors"))
    with pytest.raises(ConfigError, match="the shape of 'a/b' is not known"):
        random_model("a/b", tmp_path / "none")


def test_random_weights_take_the_real_shape_on_a_cpu_too(place):
    made = plan(TIERS["quick"], place("torch", random_weights=True))
    assert (made.is_twin, made.config.model.init, made.model) == (False, "random", "HuggingFaceTB/SmolLM2-135M")
    assert {c.measure for c in made.criteria if c.not_judged} == {"peak_bytes", "elapsed"}


# --- data ------------------------------------------------------------------------------------------------------------


def test_the_rows_are_the_same_every_time_and_each_is_another():
    assert rows() == rows() and len(rows()) == NUM_ROWS
    assert len({row["output"] for row in rows()}) == NUM_ROWS
    assert rows(3)[2]["instruction"] == "Explain concept number 3." and rows(3) == rows()[:3]


def test_keywords_are_drawn_evenly():
    text = " ".join(row["output"] for row in rows())
    counts = [text.count(f" {word}") for word in KEYWORDS]
    expected = NUM_ROWS * NUM_KEYWORDS / len(KEYWORDS)
    assert sum(counts) == NUM_ROWS * NUM_KEYWORDS and all(0.8 < count / expected < 1.2 for count in counts)


@pytest.mark.parametrize("tokenizer", [DEMO_MODEL, "tokenizers/smollm2"], ids=["the twin's", "SmolLM2's"])
def test_every_row_fits_into_the_shortest_tier(on_gpu, shared, tmp_path, tokenizer):
    model = tokenizer if tokenizer == DEMO_MODEL else shared(tokenizer)
    data = Data(plan(TIERS["quick"], on_gpu).config)
    documents, _ = data.train_and_eval(Tokenizer(model), lambda what, share: None)
    assert (len(documents), documents.num_rows) == (NUM_ROWS, NUM_ROWS) and documents.longest <= 128


def test_a_row_is_needed_once_at_most(on_gpu):
    """Else a tier could learn the keywords by heart."""
    for tier in TIERS.values():
        train = plan(tier, on_gpu).config.train
        assert train.steps * train.documents_per_step <= NUM_ROWS


def test_the_file_is_written_into_a_directory_that_is_not_there_yet(tmp_path):
    path = write_rows(tmp_path / "a" / "b.jsonl")
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows()


# --- memory ----------------------------------------------------------------------------------------------------------


def test_the_buffer_is_what_is_free_less_what_is_needed(wording):
    check = compare(Budget(14_589_000_000, "of 16 GB"), 2_000_000_000)
    assert check.level == "ok"
    wording(check.found)


def test_a_machine_that_is_short_is_never_said_to_have_a_negative_buffer(wording):
    check = compare(Budget(1_500_000_000, "of 2 GB"), 2_000_000_001)
    assert (check.level, check.exit_code) == ("fail", 4)
    assert check.fix
    wording(check.found)
    wording(compare(Budget(2_000_000_000, ""), 2_000_000_000).found)


def test_the_next_free_directory_is_found(tmp_path):
    assert free_directory(tmp_path / "a") == tmp_path / "a"
    for name in ("a", "a-2"):
        (tmp_path / name).mkdir()
    assert free_directory(tmp_path / "a") == tmp_path / "a-3"


def test_a_backend_without_4_bits_is_refused(on_gpu):
    from dualtune.base.errors import EnvironmentFault

    class Plain(OnGpu):
        def capabilities(self):
            return {}

    with pytest.raises(EnvironmentFault, match="has no 4-bit weights"):
        plan(TIERS["quick"], replace(on_gpu, backend=Plain()))


def test_memory_is_judged_as_the_run_plans_it(open_backend, make_config, monkeypatch, tmp_path):
    """With `auto`, a run that fits only with recomputed activations passes; one that must keep them does not."""
    setup = ValidationSetup("cpu", open_backend("torch"), tmp_path / "out")
    planned = plan(TIERS["quick"], setup)

    def check(checkpointing, num_bytes):
        long = {"memory.checkpointing": checkpointing, "data.max_length": 512}
        monkeypatch.setattr(
            "dualtune.doctor.validate.tiers.budget", lambda machine, platform: Budget(num_bytes, "a test")
        )
        return check_memory(replace(planned, config=make_config("rows.jsonl", long)), setup, None)

    whole = int(re.search(r"(\d+) MB needed", check("none", 10**10).found)[1]) * 10**6
    assert [check(value, whole - 10**6).level for value in ("none", "auto")] == ["fail", "ok"]
