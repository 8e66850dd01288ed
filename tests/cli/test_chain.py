"""train → eval → generate → adapter inspect → adapter convert, as a user types them, and the numbers agree."""

import json
import re

import pytest

from dualtune.model.formats.directory import read_adapter

CPU = ("--platform", "cpu")
NUMPY = ("--platform", "numpy")
STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  ")  # before what a run says in a pipe


def last_eval(run_dir) -> dict:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval_loss" in row][-1]


@pytest.mark.long  # the steps of the chain have tests of their own, and README and quickstart are followed
def test_from_a_config_to_a_converted_adapter(dualtune, dualtune_main, config_file, tiny_llama, tmp_path):
    """On torch, in processes of their own. transformers and PEFT generate the same text with the converted adapter."""
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    config = config_file({"model.name": tiny_llama, "train.steps": 12, "train.learning_rate": 0.03})
    run_dir, adapter = tmp_path / "runs" / "a", tmp_path / "runs" / "a" / "adapter"

    def done(*args):
        result = dualtune(*args)
        assert (result.returncode, "Traceback" in result.stderr) == (0, False), result.stderr
        return result

    trained = done("train", config, *CPU)
    assert trained.stdout.splitlines()[-1] == f"adapter     {adapter}"
    assert trained.stderr == ""

    report = json.loads(done("eval", config, "--json", *CPU).stdout)
    expected = last_eval(run_dir)
    assert report["loss"] == pytest.approx(expected["eval_loss"], abs=1e-6)
    assert (report["targets"], report["rows"], report["adapter"]) == (expected["eval_targets"], 4, str(adapter))
    assert "exact_match" not in report

    prompt = "3 plus 3?"
    text = done("generate", tiny_llama, "--adapter", adapter, "--prompt", prompt, "--max-tokens", 12, *CPU).stdout

    inspected = json.loads(done("adapter", "inspect", adapter, "--json").stdout)
    assert (inspected["ok"], inspected["rank"], inspected["scale"], inspected["layout"]) == (True, 2, 2.0, "dual")
    shapes = [tensor.shape for tensor in read_adapter(adapter).tensors.values()]
    assert inspected["num_parameters"] == sum(a * b for a, b in shapes)

    for layout in ("mlx", "peft"):
        said = done("adapter", "convert", adapter, tmp_path / layout, "--to", layout).stdout
        assert said == f"{tmp_path / layout}: written in layout {layout}, read from layout dual\n"
        again = dualtune_main("eval", config, "--adapter", tmp_path / layout, "--json", *CPU)
        assert json.loads(again.stdout)["loss"] == pytest.approx(report["loss"], abs=1e-6)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_llama)
    turn = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    out = model.generate(**ids, do_sample=False, max_new_tokens=12, eos_token_id=ends, pad_token_id=0)
    theirs = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == theirs + "\n"


# --- in this process, on the NumPy engine ----------------------------------------------------------------------------


def test_train_says_what_it_does(dualtune_main, config_file, tmp_path):
    result = dualtune_main("train", config_file({"run.log_every": 2}), *NUMPY)
    assert (result.returncode, result.stderr) == (0, "")
    # "tokenized" comes where the cache does not have these rows from another test.
    lines = [STAMP.sub("", line) for line in result.stdout.splitlines()]
    heads = [line.split()[0] for line in lines if not line.startswith("tokenized")]
    assert heads == ["platform", "model", "adapter", "train", "eval", "steps", "memory", "imported", "loaded", "engine",
                     "checkpoints", "eval", "step", "step", "eval", "verdict", "saved",
                     "report", "adapter"]  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    shown = [line for line in lines if line.startswith("step ")]
    assert f"2/4  loss {sum(losses[:2]) / 2:.4f} " in shown[0]
    assert f"4/4  loss {sum(losses[2:]) / 2:.4f} " in shown[1]


def test_a_dry_run_checks_and_writes_nothing(dualtune_main, config_file, tmp_path):
    config = config_file()
    before = sorted(tmp_path.rglob("*"))
    result = dualtune_main("train", config, "--dry-run", *NUMPY)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == "dry run     nothing was loaded or written"
    assert "\nsteps       4 of 4 documents" in result.stdout
    assert sorted(tmp_path.rglob("*")) == before


def test_set_overrides_the_file(dualtune_main, config_file, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    args = ["--set", "train.steps=2", "--set", f"run.dir={elsewhere}", *NUMPY]
    assert dualtune_main("train", config_file(), *args).returncode == 0
    assert last_eval(elsewhere)["step"] == 2
    assert not (tmp_path / "runs").exists()


def test_the_same_command_again_continues_or_says_why_not(dualtune_main, config_file, tmp_path, wording):
    config = config_file({"run.save_every": 2})
    assert dualtune_main("train", config, *NUMPY).returncode == 0
    finished = dualtune_main("train", config, *NUMPY)
    assert finished.returncode == 0
    assert "\nfinished    this run has already ended, after 4 steps: nothing to do\n" in finished.stdout
    longer = dualtune_main("train", config, "--set", "train.steps=6", *NUMPY)
    assert longer.returncode == 0, longer.stderr
    assert "Z  resumed     after step 4, from " in longer.stdout
    assert last_eval(tmp_path / "runs" / "a")["step"] == 6
    changed = dualtune_main("train", config, "--set", "adapter.rank=3", *NUMPY)
    assert changed.returncode == 2
    wording(changed.stderr)
    never = dualtune_main("train", config, "--resume", "never", *NUMPY)
    assert never.returncode == 2
    wording(never.stderr)


def test_eval_measures_the_base_a_file_and_exact_answers(dualtune_main, config_file, write_rows, qa_rows, tmp_path):
    config = config_file({"train.steps": 60, "train.learning_rate": 0.1, "train.documents_per_step": 12})
    assert dualtune_main("train", config, *NUMPY).returncode == 0

    def report(*args) -> dict:
        result = dualtune_main("eval", config, "--json", *args, *NUMPY)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    rows = [json.loads(line) for line in (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()]
    base, tuned = report("--base"), report("--exact-match")
    assert base["loss"] == pytest.approx(rows[0]["eval_loss"], abs=1e-9)
    assert base["adapter"] is None and "exact_match" not in base
    assert tuned["loss"] < base["loss"]
    assert tuned["perplexity"] == pytest.approx(2.718281828459045 ** tuned["loss"])
    file = write_rows(qa_rows[:2], "two.jsonl")
    assert report("--data", file)["rows"] == 2
    plain = dualtune_main("eval", config, *NUMPY)
    assert f"\nloss          {tuned['loss']:.4f}\n" in plain.stdout


def test_exact_match_counts_answers_that_greedy_decoding_gives(dualtune_main, config_file, write_rows, tmp_path):
    """The model sees the last token alone, so it answers "x" to every prompt: right in three rows of four."""
    rows = [{"prompt": f"{i}?", "completion": "x" if i % 4 else "y"} for i in range(16)]
    config = config_file({"data.train": write_rows(rows, "xy.jsonl"), "data.eval": 0, "train.steps": 150,
                          "train.learning_rate": 0.1, "train.documents_per_step": 16})  # fmt: skip
    assert dualtune_main("train", config, *NUMPY).returncode == 0
    args = ["eval", config, "--data", write_rows(rows, "xy.jsonl"), "--exact-match", "--json", *NUMPY]
    assert json.loads(dualtune_main(*args).stdout)["exact_match"] == 0.75
    longest = json.loads((tmp_path / "runs/a/environment.json").read_text())["data"]["lengths"]["max"]
    for length, share in ((longest, 0.75), (longest - 1, 0.4375)):  # ten rows are the longest, seven of them answered
        found = json.loads(dualtune_main(*args, "--set", f"data.max_length={length}").stdout)
        assert found["exact_match"] == pytest.approx(share)


def test_generate_samples_by_seed_and_continues_raw_text(dualtune_main, tiny_softmax):
    def text(*args) -> str:
        result = dualtune_main("generate", tiny_softmax, "--prompt", "abc", "--max-tokens", 20, *args, *NUMPY)
        assert (result.returncode, result.stderr) == (0, "platform    numpy: as requested\n")
        return result.stdout

    assert text("--temperature", 1) == text("--temperature", 1) != text("--temperature", 1, "--seed", 5)
    assert text() == text("--temperature", 1, "--top-p", 1e-6) != text("--raw")


def test_the_json_reports_are_json(dualtune_main, config_file, tmp_path):
    assert dualtune_main("train", config_file({"train.steps": 1}), *NUMPY).returncode == 0
    adapter = tmp_path / "runs" / "a" / "adapter"
    for args in (["check-gpu"], ["adapter", "inspect", adapter], ["eval", config_file(), *NUMPY]):
        assert isinstance(json.loads(dualtune_main(*args, "--json").stdout), dict)
