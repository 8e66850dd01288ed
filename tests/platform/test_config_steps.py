"""What check-config says of the steps of a run: what one takes, how many there are, and whether they suffice."""

import re
from pathlib import Path

import pytest

from dualtune.config import load_config
from dualtune.config.render import example_path
from dualtune.doctor.check_config import ConfigReport, plan_config, teacher_of
from dualtune.doctor.check_config_data import SourceSample, look_at_data, typical_step
from dualtune.engine.choose import choose
from dualtune.engine.machines import limits_for, named
from dualtune.engine.step_time import predict

DEMO = Path(__file__).parents[2] / "dualtune" / "demo"


def row(report: ConfigReport, name: str):
    """The one row of this name."""
    (found,) = [check for check in report.checks if check.name == name]
    return found


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "16 documents of at most 4096 tokens, in 6 micro-batches of up to 12288 tokens if all are that long"),
        (["train.documents_per_step=1"], "1 document of at most 4096 tokens, in 1 micro-batch of up to 12288 tokens"),
        (
            ["train.documents_per_step=null", "train.tokens_per_step=20000", "train.micro_batch_tokens=auto"],
            "up to 20000 tokens: 4 documents or more of at most 4096 tokens, in 4 micro-batches of up to 4096 tokens",
        ),
    ],
)
def test_a_step_is_told_in_words(check, overrides, words):
    assert row(check(*overrides), "step").found.startswith(words)


def test_the_documents_of_a_step_are_those_that_fit(check, tiny_llama, write_rows):
    """Not those that would fit if all were as long as they may be."""
    path = write_rows([{"prompt": "a" * 20, "completion": "b" * 11}] * 3000)
    report = check(f"model.name={tiny_llama}", f"data.train={path}", "train.documents_per_step=null",
                   "train.tokens_per_step=16384")  # fmt: skip
    length = int(re.search(r"(\d+) on average", row(report, "data").found)[1])
    expected = f"up to 16384 tokens: about {16384 // length} documents of {length} tokens on average, in "
    assert row(report, "step").found.startswith(expected) and 16384 // length > 150


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["train.documents_per_step=8"], "--set train.documents_per_step=null"),
        (["train.documents_per_step=null", "train.tokens_per_step=16384"], "--set train.tokens_per_step=auto"),
        (["train.documents_per_step=null"], "More rows, or --set train.epochs=4"),
    ],
)
def test_few_steps_are_told_with_a_way_to_more(check, tiny_llama, write_rows, qa_rows, overrides, fix):
    here = [f"model.name={tiny_llama}", f"data.train={write_rows(qa_rows[:14])}"]
    steps = row(check(*here, *overrides), "steps")
    assert steps.level == "advice" and "; so few steps train little" in steps.found
    assert steps.fix is not None and steps.fix.startswith(fix)
    assert row(check(*here, "train.documents_per_step=null", "train.epochs=12"), "steps").level == "ok"


def test_pairs_are_counted_and_not_their_answers(check, tiny_llama, write_rows):
    path = write_rows([{"prompt": "2+2=", "chosen": f"{n}", "rejected": "no"} for n in range(20)])
    here = [f"model.name={tiny_llama}", f"data.train={path}", "data.eval=0.1", "train.epochs=1"]
    found = row(check(*here, "train.objective=dpo", "train.documents_per_step=4"), "steps").found
    assert found.startswith("about 5: 1 epoch of 18 rows, 2 rows held out")


@pytest.mark.parametrize(
    ("size", "tolerance"),
    [("train.documents_per_step=16", 0), ("train.documents_per_step=null train.tokens_per_step=2000", 0.05)],
)
def test_the_number_of_steps_is_that_of_the_run(check, tiny_llama, open_backend, dualtune_main, size, tolerance):
    """Exact for documents; for tokens, as far as the first rows are like the others."""
    open_backend("torch")
    overrides = [f"model.name={tiny_llama}", "data.max_length=512", *size.split()]
    found = row(check(*overrides), "steps").found
    assert found.endswith(": 3 epochs of 288 rows, 32 rows held out")
    more = [f"data.train={DEMO / 'data' / 'train.jsonl'}", "model.quantization=none", "run.dir=runs/x"]
    sets = [part for override in overrides + more for part in ("--set", override)]
    result = dualtune_main("train", example_path("training_config_h100"), "--platform", "cpu", "--dry-run", *sets)
    number = int(re.search(r"steps +(\d+) of ", result.stdout)[1])
    assert number > 50 and abs(int(found.split()[1].rstrip(":")) - number) <= tolerance * number


@pytest.mark.parametrize("seed", range(4))
def test_the_time_is_that_of_a_step_of_usual_size(seed):
    """The first one may have the long documents, and the time of the run is a multiple of it."""
    overrides = (f"run.seed={seed}", "train.documents_per_step=4")
    config = load_config(example_path("training_config_h100"), overrides)
    mixed = SourceSample(1.0, num_rows=400, lengths=(10,) * 50 + (1000,) * 50)
    assert typical_step(config, [mixed]).tokens == 2 * 10 + 2 * 1000


def test_the_time_is_that_of_the_samples_of_a_step_whose_prompts_are_computed_once():
    more = ["train.objective=grpo", "rollouts.rewards=[exact]", "rollouts.samples=4", "rollouts.max_tokens=30"]
    overrides = (*more, "adapter.dropout=0", "train.documents_per_step=2", "data.max_length=64")
    known = SourceSample(1.0, num_rows=400, lengths=(21,) * 50, shared=(0,) * 50, targets=10 * 50)
    for packing, computed in (
        (True, 2 * (41 + 3 * 31)),
        (False, 2 * 4 * 41),
    ):  # prompts of 11, all but their last token
        config = load_config(example_path("training_config_h100"), (*overrides, f"data.packing={packing}"))
        step = typical_step(config, [known])
        assert (step.tokens, int(step.computed.sum()), step.target_share) == (2 * 4 * 41, computed, 0.75)


def test_the_time_and_the_memory_of_a_step_have_those_of_its_teacher(tiny_llama, write_rows, qa_rows):
    def parts(*overrides):
        config = load_config(example_path("training_config_h100"), (*overrides, f"data.train={write_rows(qa_rows)}"))
        plan = plan_config(config, named("h100-80"), choose("cuda", named("h100-80")))
        documents = typical_step(config, look_at_data(config))
        time = predict(plan.decoder, plan.ask, documents, limits_for("h100-80"), teacher_of(config, plan))
        memory = {part.name: part.bytes for part in plan.estimate.parts}
        return {part.name: part for part in time.parts}, memory.get("teacher")

    own = "model.name=meta-llama/Llama-3.2-1B-Instruct", "model.dtype=bfloat16", "model.quantization=none"

    def has_teacher(*overrides):
        time, memory = parts(*overrides)
        return "teacher" in time, memory is not None

    assert has_teacher(*own) == (False, False)
    taught = *own, "train.objective=distill"
    names = ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.1-8B-Instruct")
    (small, _), (large, weights) = (
        parts(*taught, f"distill.teacher={name}", "distill.teacher_dtype=bfloat16") for name in names
    )
    assert 4 < large["teacher"].flops / small["teacher"].flops < 9
    assert weights == 2 * 8_030_261_248  # Meta's number of parameters
    packed = f"distill.teacher={names[1]}", "distill.teacher_quantization=nf4"
    assert 0.25 < parts(*taught, *packed)[1] / weights < 0.4
    assert has_teacher(*taught, "distill.teacher=base", "distill.hint=Think.") == (True, False)
    assert has_teacher(*taught, "distill.teacher=http://127.0.0.1:1/v1") == (False, False)


@pytest.mark.parametrize(
    ("teacher", "levels", "words"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", ("ok", "ok"), "needs "),
        ("./nowhere", ("fail", "skipped"), "distill.teacher: ./nowhere: its shape is not known"),
        ("someone/unknown", ("advice", "skipped"), "distill.teacher: someone/unknown: its shape is not known"),
        ("meta-llama/Llama-3.1-8B-Instruct nf4", ("ok", "fail"), "distill.teacher_quantization: got 'nf4'"),
    ],
)
def test_a_teacher_is_looked_for_and_planned_or_no_memory_is(check, teacher, levels, words):
    name, _, quantization = teacher.partition(" ")
    of_teacher = f"distill.teacher={name}", f"distill.teacher_quantization={quantization or 'auto'}"
    report = check("train.objective=distill", *of_teacher, name="training_config_m4", machine="m4-max-128")
    memory = row(report, "memory")
    assert (row(report, "teacher").level, memory.level) == levels and memory.found.startswith(words)


def test_a_warm_up_longer_than_the_run_is_told(check, write_rows, qa_rows):
    report = check(f"data.train={write_rows(qa_rows)}", "train.warmup=3")
    assert (row(report, "steps").level, row(report, "steps").fix) == ("advice", "--set train.warmup=1")
