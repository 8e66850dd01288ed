"""`dualtune memory ablate`: each technique is measured, and what is said of the measurements."""

import json
import shutil
from dataclasses import replace
from functools import cache

import pytest
from click.testing import CliRunner

from dualtune.cli.main import cli
from dualtune.doctor.bench import ablation
from dualtune.doctor.bench.ablation_process import AblationWork, Failed, measure, run_apart
from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.train.profiler.snapshot import process_reader

SHAPE = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "head_dim": 32,
    "tie_word_embeddings": True, "max_position_embeddings": 512,
}  # fmt: skip
NAMES = ("all layers", "nf4 base", "half the micro-batch")


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_llama):
    home = tmp_path_factory.mktemp("ablation")
    shutil.copytree(tiny_llama, home / "model")
    vocab = json.loads((tiny_llama / "config.json").read_text())["vocab_size"]
    write_tiny_llama(home / "model", vocab_size=vocab, **SHAPE)
    rows = [{"prompt": f"{i} plus {i}?", "completion": f"{2 * i}" * 20} for i in range(32)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": {"name": str(home / "model")},
        "data": {"train": str(home / "rows.jsonl"), "eval": 0, "max_length": 128},
        "train": {"steps": 8, "documents_per_step": 16, "micro_batch_tokens": 1024},
        "run": {"dir": str(home / "run")},
    }  # fmt: skip
    (home / "c.yaml").write_text("".join(f"{section}: {json.dumps(fields)}\n" for section, fields in settings.items()))
    return home / "c.yaml"


@pytest.fixture(scope="module")
def measured_here(open_backend):
    """Measure in this process, each work once: one of its own takes ten seconds."""
    open_backend("torch")
    pytest.importorskip("bitsandbytes")
    return cache(lambda work: measure(replace(work, overrides=list(work.overrides)), on_loaded=lambda: None))


@pytest.fixture
def ablate(config, measured_here, monkeypatch):
    """Run the command on these techniques, in processes of their own or here. `change` changes what was measured."""

    def run(*options, names=NAMES, change=lambda overrides, measured: measured, is_apart=False):
        def changed(work):
            measured = measured_here(replace(work, overrides=tuple(work.overrides)))
            return change(" ".join(work.overrides), measured), process_reader()()

        monkeypatch.setattr(ablation, "run_apart", run_apart if is_apart else changed)
        only = [option for name in names for option in ("--only", name)]
        fixed = ("--platform", "cpu", "--steps", 1, "--rounds", 1)
        return CliRunner().invoke(cli, [*map(str, ("memory", "ablate", config, *fixed, *only, *options))])

    return run


@pytest.mark.parametrize("is_apart", [False, pytest.param(True, marks=pytest.mark.long)], ids=["here", "apart"])
def test_each_technique_saves_what_is_planned_and_changes_no_loss_that_it_must_not(ablate, config, tmp_path, is_apart):
    result = ablate("--json", tmp_path / "found.json", is_apart=is_apart)
    assert result.exit_code == 0, result.output
    assert result.output.endswith("every plan is within 10 % of what was measured\n")
    rows = {row["technique"]: row for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert [*rows] == ["none", *(name for name in ablation.NAMES if name in NAMES)]
    none = rows["none"]
    for name in ("all layers", "half the micro-batch"):
        assert rows[name]["measured_bytes"] < 0.8 * none["measured_bytes"]
        assert abs(rows[name]["loss"] / none["loss"] - 1) <= 1e-6
    assert rows["nf4 base"]["measured_bytes"] < none["measured_bytes"]
    assert abs(rows["nf4 base"]["loss_difference"]) > 1e-6 and not rows["nf4 base"]["same_result"]
    assert all(row["process_bytes"] > row["measured_bytes"] and row["time"] > 0 for row in rows.values())
    assert all(abs(row["planned_bytes"] / row["measured_bytes"] - 1) <= 0.1 for row in rows.values())
    assert not (config.parent / "run").exists()


def test_a_wrong_plan_ends_with_exit_code_1_and_the_name(ablate):
    def change(overrides, measured):
        return replace(measured, peak_bytes=measured.peak_bytes * 4 // 5) if "nf4" in overrides else measured

    result = ablate(names=NAMES[:2], change=change)
    assert result.exit_code == 1
    assert [line.split(":")[0] for line in result.output.splitlines() if "the plan is +" in line] == ["nf4 base"]


@pytest.mark.parametrize(("name", "shown"), [("all layers", True), ("nf4 base", False)])
def test_a_loss_that_changes_is_named_unless_the_technique_may_change_it(ablate, name, shown):
    def change(overrides, measured):
        is_other = "checkpointing=full" in overrides or "nf4" in overrides
        return replace(measured, loss=measured.loss * (1 + 1e-5)) if is_other else measured

    result = ablate(names=[name], change=change)
    assert result.exit_code == shown, result.output
    assert (f"{name}: the loss is +1.0e-05 off" in result.output) == shown


def test_a_loss_in_bfloat16_is_shown_but_not_judged(ablate):
    def change(overrides, measured):
        off = 1e-3 * ("checkpointing=full" in overrides)
        return replace(measured, loss=measured.loss * (1 + off), dtype="bfloat16")

    result = ablate(names=["all layers"], change=change)
    assert result.exit_code == 0 and "+1.0e-03" in result.output


def test_what_fails_is_named_and_the_rest_is_measured(ablate):
    def change(overrides, measured):
        if "nf4" in overrides:
            raise Failed("it was killed by signal 9, perhaps because memory ran out")
        return measured

    result = ablate(names=NAMES[:2], change=change)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("nf4 base: was not measured: it was killed by signal 9")
    assert "all layers " in result.output and "all layers:" not in result.output


def test_what_does_not_fit_is_not_started(ablate, monkeypatch):
    monkeypatch.setattr(ablation, "budget", lambda machine, device: type("Has", (), {"bytes": 1 << 20}))
    result = ablate(names=["all layers"], change=lambda overrides, measured: pytest.fail("started"))
    assert result.exit_code == 1 and result.output.count("this machine has 1.0 MiB") == 2


def test_a_technique_that_the_backend_lacks_is_listed_with_the_reason(ablate, monkeypatch):
    new, before = ablation.Technique("colder memory", {"memory.colder": 2}), ablation.techniques
    monkeypatch.setattr(ablation, "techniques", lambda *sizes: (*before(*sizes), new))
    result = ablate(names=["all layers"])
    assert result.exit_code == 0
    assert "  colder memory " in result.output and "memory.colder: unknown key" in result.output


def test_all_together_are_the_strongest_of_what_is_offered(config):
    place = ablation._place(config, (), "cpu", 1)
    rows, _ = ablation._offered(place, 1024, 100)
    settings = dict(override.split("=", 1) for override in rows[-1].overrides)
    assert rows[-1].technique.name == "all" and not rows[-1].technique.same_result
    assert (settings["train.micro_batch_tokens"], settings["model.quantization"]) == ("512", "nf4")
    assert settings["memory.checkpointing"] == "full"


def test_an_unknown_technique_is_refused_with_those_there_are(config, monkeypatch):
    monkeypatch.setattr(ablation, "run_apart", lambda work: pytest.fail("started"))
    result = CliRunner().invoke(cli, ["memory", "ablate", str(config), "--only", "magic"])
    assert result.exception is not None and "got 'magic', allowed: adapter inputs, half of" in str(result.exception)


def test_a_process_says_why_it_could_not_measure(config):
    with pytest.raises(Failed, match=r"adapter.targets.*'nothing'"):
        run_apart(AblationWork(str(config), ("adapter.targets=[nothing]",), "cpu", 1))
