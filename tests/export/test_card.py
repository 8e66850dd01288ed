"""What an export says of itself: its loss beside the run's last evaluation, and of what it was merged."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from dualtune.cli.export import _next_command
from dualtune.show.run import run
from dualtune.use.export.request import Request
from dualtune.use.model_card import export_card


@pytest.fixture
def trained(make_config, write_rows, qa_rows, open_backend):
    config = make_config(write_rows(qa_rows), {"train.steps": 4, "data.eval": 0.25, "run.eval_every": 2})
    return run(config, open_backend("torch"))


def export(dualtune_main, trained, out, *options):
    done = dualtune_main("export", trained.run_dir, out, "--platform", "cpu", "--json", *options)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == json.loads((out / "export.json").read_text())
    return record, (out / "README.md").read_text()


def test_the_loss_of_the_export_stands_beside_the_runs_last_evaluation(trained, tmp_path, dualtune_main):
    record, text = export(dualtune_main, trained, tmp_path / "out", "--to", "hf")
    loss = record["loss"]
    assert loss["run"] == trained.eval_loss and loss["merged"] == pytest.approx(loss["run"], abs=1e-5)
    assert (loss["written"], loss["unknown"]) == (None, None)
    assert (
        f"| last evaluation of the run | {trained.eval_loss:.4f} |" in text
        and f"| merged | {loss['merged']:.4f} |" in text
    )
    assert "is trained" not in text and "own weights" in text and "`<|im_end|>`" in text
    said = dualtune_main("export", trained.run_dir, tmp_path / "again", "--platform", "cpu", "--to", "hf").stdout
    assert f"the run's last evaluation {trained.eval_loss:.4f}, merged {loss['merged']:.4f}" in said
    words = shlex.split(said.splitlines()[-1])
    assert words[0] == "next" and words[-2] == "chat" and Path(words[-1]).resolve() == tmp_path / "again"


@pytest.mark.parametrize(
    ("target", "files", "command"),
    [
        ("gguf", ["README.md", "a-BF16.gguf"], "llama-server -m 'my model/a-BF16.gguf'"),
        ("lmstudio", ["README.md", "dualtune/a/a-Q4_0.gguf"], "cp -r 'my model/dualtune' ~/.lmstudio/models/"),
        ("ollama", ["Modelfile", "a-Q4_0.gguf"], "ollama create my-model -f 'my model/Modelfile'"),
    ],
)
def test_the_next_command_is_one_for_the_program(target, files, command):
    out = Path("my model")
    assert _next_command(Request(Path("run"), None, out, target, "q4_0", "My model"), files) == command


def test_after_dpo_the_loss_is_that_of_the_chosen_answers(
    make_config, write_rows, open_backend, tmp_path, dualtune_main
):
    """The run's evaluation was a comparison with the reference, which is no loss of a model."""
    pairs = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "many"} for n in range(12)]
    changes = {"train.objective": "dpo", "train.steps": 2, "data.eval": 0.25}
    trained = run(make_config(write_rows(pairs), changes), open_backend("torch"))
    record, _ = export(dualtune_main, trained, tmp_path / "out", "--to", "hf")
    done = dualtune_main("eval", trained.run_dir / "config.yaml", "--platform", "cpu", "--json")
    assert trained.eval_loss is not None and record["loss"]["run"] is None
    assert record["loss"]["merged"] == pytest.approx(json.loads(done.stdout)["loss"], abs=1e-4)


def test_what_was_quantized_is_evaluated_as_it_was_written(trained, tmp_path, dualtune_main, open_backend):
    open_backend("torch")
    record, text = export(dualtune_main, trained, tmp_path / "out", "--to", "hf", "--quantize", "nf4", "--without-base")
    loss = record["loss"]
    assert 1e-4 < abs(loss["written"] - loss["merged"]) < 0.5
    assert f"| as written here | {loss['written']:.4f} |" in text


def test_without_the_data_the_export_is_written_and_says_what_is_missing(trained, tmp_path, dualtune_main):
    (tmp_path / "train.jsonl").unlink()
    record, text = export(dualtune_main, trained, tmp_path / "out", "--to", "hf")
    assert record["loss"]["merged"] is None and "train.jsonl" in record["loss"]["unknown"]
    assert record["loss"]["run"] == trained.eval_loss and "| not measured |" in text
    record, _ = export(dualtune_main, trained, tmp_path / "none", "--to", "hf", "--without-loss")
    assert record["loss"]["unknown"] is record["loss"]["merged"] is None


def record_of(**changes):
    nothing = dict.fromkeys(("run", "merged", "written", "unknown"))
    distances = dict.fromkeys(
        ("adapter from base", "merged from adapter", "written from adapter", "base, quantized alike, from base")
    )
    return {
        "base": "org/llama", "target": "hf", "quantization": "none", "dualtune": "1", "loss": nothing, "stops": [],
        "divergence_nats": distances, "trained_on": "none", **changes,
    }  # fmt: skip


def test_the_card_says_into_which_weights_a_qlora_adapter_was_merged():
    assert (
        "trained on the base in nf4 (QLoRA), and is merged into the original weights, not into the dequantized"
        in export_card("tuned", record_of(trained_on="nf4"))
    )
    assert "QLoRA" not in export_card("tuned", record_of()) and "merged into" not in export_card(
        "tuned", record_of(trained_on=None)
    )


def test_the_card_names_no_directory_of_this_machine_and_no_markup_of_a_name():
    text = export_card("a|b\n# c", record_of(base="/home/somebody/llama", stops=["<|im_end|>"]))
    assert "somebody" not in text and "`llama`" in text and "\n# c" not in text and "`<|im_end|>`" in text
    front = yaml.safe_load(text.split("---")[1])
    assert front == {"library_name": "transformers", "tags": ["dualtune"]}
    front = yaml.safe_load(export_card("x", record_of()).split("---")[1])
    assert front["base_model"] == "org/llama"


def test_the_card_says_what_peft_does_not_load_of_the_adapter():
    assert "Of the adapter by itself: PEFT drops it." in export_card("tuned", record_of(), ("PEFT drops it",))
    assert "by itself" not in export_card("tuned", record_of())
