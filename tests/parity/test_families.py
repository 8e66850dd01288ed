"""The most used families, tiny: each trains on both backends as transformers computes it, or is refused as known.

tests/golden/families.json names them, and what is refused, by error class. `make families` runs all families and
stages.
"""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "families.py"
GOLDEN = json.loads((ROOT / "tests/golden/families.json").read_text(encoding="utf-8"))
CHEAP = ("train", "base", "parity", "packs")
# Soft caps, linear attention, sinks, latent attention, a state space. Wrappers are in journey/test_multimodal.py.
UNLIKE = ("gemma2", "qwen3_next", "gpt_oss", "deepseek_v3", "nemotron_h")


def run_families(forked, build: Path, families, stages, *more: str) -> tuple[dict[str, dict[str, str]], str]:
    """Run the script. Return what is not ok by family and stage, and the page."""
    only = ("--only", ",".join(stages)) if stages else ()
    page = build / "families.md"
    result = forked(SCRIPT, *only, "--build", build, "--page", page, *more, *families)
    assert page.exists(), result.stderr
    lines = [json.loads(line) for line in (build / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["family"] for line in lines} == set(families)
    found = {family: {} for family in families}
    for line in lines:
        if line["outcome"] not in {"ok", "-"}:
            found[line["family"]][f"{line['stage']} {line['backend']}"] = (
                f"{line['outcome']} {line.get('error', '')}".strip()
            )
    return {family: each for family, each in found.items() if each}, page.read_text(encoding="utf-8")


def check_known(found: dict[str, dict[str, str]]) -> None:
    """Nothing but what the golden file names: what works now, although it was refused, is no failure."""
    known = {family: GOLDEN["refused"].get(family, {}) for family in found}
    new = {
        f"{family}: {stage}": outcome for family, stages in found.items() for stage, outcome in stages.items()
        if known[family].get(stage) != outcome
    }  # fmt: skip
    assert new == {}


@pytest.fixture(scope="module", autouse=True)
def _both(open_backend):
    pytest.importorskip("transformers")
    for name in ("torch", "mlx"):
        open_backend(name)


@pytest.mark.parametrize(
    ("families", "stages"), [(UNLIKE, CHEAP), pytest.param(GOLDEN["families"], (), marks=pytest.mark.long)],
    ids=["unlike ones", "all, and all stages"],
)  # fmt: skip
def test_families_train_alike_on_both_backends_or_are_refused(forked, tmp_path, families, stages):
    found, page = run_families(forked, tmp_path, families, stages)
    check_known(found)
    assert all(f"| `{family}` |" in page for family in families)


def test_what_is_known_is_of_these_families():
    assert all(each.startswith("refused ") for stages in GOLDEN["refused"].values() for each in stages.values())
    assert len(GOLDEN["families"]) == 25 and {*GOLDEN["refused"], *UNLIKE} <= {*GOLDEN["families"]}


@pytest.fixture
def stages(monkeypatch):
    """The module with the stages."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import family.stages

    return family.stages


@pytest.fixture
def llama(stages, tmp_path):
    from family.case import Case

    case = Case("llama", tmp_path)
    assert stages.outcome(stages.make_model, case, "both")["outcome"] == "ok"
    assert stages.outcome(stages.train, case, "torch")["outcome"] == "ok"
    return case


def changed(case, name, change):
    """Change one tensor of the model, and its config not."""
    from safetensors.numpy import load_file, save_file

    file = case.model_dir / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file, {"format": "pt"})


def test_a_base_that_computes_something_else_is_wrong(stages, llama):
    assert llama.stock is not None  # computed before the change
    changed(llama, "model.layers.1.self_attn.q_proj.weight", lambda w: w + 0.05)
    assert stages.outcome(stages.base, llama, "torch")["outcome"] == "WRONG"


def test_a_traceback_is_a_crash_with_its_place(stages, llama):
    def broken(case, name):
        raise RuntimeError("shapes")

    found = stages.outcome(broken, llama, "torch")
    assert (found["outcome"], found["error"]) == ("CRASH", "RuntimeError")
    assert "test_families.py" in found["where"]


def test_a_merge_without_a_tensor_is_lost(stages, llama, monkeypatch):
    """A writer that leaves one out."""
    write = stages.write_merged

    def forgets(engine, adapter, out, tell):
        from safetensors.numpy import load_file, save_file

        write(engine, adapter, out, tell)
        file = next(out.glob("*.safetensors"))
        tensors = load_file(file)
        del tensors["model.norm.weight"]
        save_file(tensors, file, {"format": "pt"})

    monkeypatch.setattr(stages, "write_merged", forgets)
    assert stages.outcome(stages.merges, llama, "torch")["outcome"] == "LOST"
    assert stages.outcome(stages.reloads, llama, "torch")["outcome"] == "LOST"


def test_the_page_says_why_and_lists_faults(forked, tmp_path):
    rows = [
        {"family": "a", "stage": "make", "backend": "both", "outcome": "ok"},
        {"family": "a", "stage": "train", "backend": "torch", "outcome": "ok"},
        {"family": "a", "stage": "base", "backend": "torch", "outcome": "WRONG", "why": "log p differ by 3.0e-01"},
        {"family": "a", "stage": "train", "backend": "mlx", "outcome": "refused", "why": "no <b>"},
        {"family": "b", "stage": "make", "backend": "both", "outcome": "not made", "why": "size"},
    ]  # fmt: skip
    lines = "".join(json.dumps(row | {"commit": "abc"}) + "\n" for row in rows)
    (tmp_path / "results.jsonl").write_text(lines, encoding="utf-8")
    page = tmp_path / "page.md"
    result = forked(SCRIPT, "--page-only", "--build", tmp_path, "--page", page)
    text = page.read_text(encoding="utf-8")
    assert result.returncode == 1
    assert "| `a` | wrong | – |" in text and "no \\<b\\>" in text
    assert "| `a` | base | torch | WRONG: log p differ by 3.0e-01 |" in text and "- `b`: size" in text


def test_a_page_keeps_what_is_not_measured_anew(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from family.page import lines_of, page_of

    before = lines_of((ROOT / "benchmarks/results/families.md").read_text(encoding="utf-8"))
    assert lines_of(page_of(before)) == before
    key = {"family": "llama", "stage": "memory", "backend": "torch"}
    after = lines_of(page_of([*before, key | {"outcome": "WRONG", "why": "0.1 of a|b", "commit": "abc"}]))
    (changed,) = [line for line in after if line.items() >= key.items()]
    assert (changed["outcome"], changed["shown"]) == ("WRONG", "0.1 of a\\|b") and changed["commit"].endswith(", abc")
    assert [line for line in after if line["family"] != "llama"] == [
        line for line in before if line["family"] != "llama"
    ]
