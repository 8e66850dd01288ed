"""What a run of a client leaves behind is read by every command, or refused with what to do instead."""

import json

import numpy as np
import pytest

from dualtune.use.tinker.host import TrainingHost
from dualtune.use.tinker.messages import AdamSettings, Datum, LoraSettings

CPU = ("--platform", "cpu")
GO_ON = "--set adapter.init_from=RUN/weights/NAME --set adapter.init_optimizer=true --set run.dir=DIR"


@pytest.fixture(scope="module")
def run(open_backend, tiny_llama, tmp_path_factory):
    """The directory of a run with a state `s` and weights `q`."""
    runs = tmp_path_factory.mktemp("served")
    host = TrainingHost(open_backend("torch"), str(tiny_llama), runs)
    host.create_run("run", LoraSettings(2, 1))
    for seed in range(2):
        text = np.random.default_rng(seed).integers(5, 250, 20)
        data = [Datum(text[:-1].astype(np.int32), {"target_tokens": text[1:]})]
        host.forward_backward("run", data, "cross_entropy", {})
        host.optim_step("run", AdamSettings(1e-2))
    host.save_state("run", "s")
    host.save_sampler("run", "q")
    host.close()
    return runs / "run"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("runs RUN --json", '"step": 2'), ("runs compare RUN RUN", "done"), ("runs export RUN", "grad_norm"),
        ("runs clean RUN", "nothing to delete"), ("watch RUN --once", "step 2"), ("verify STATE CPU", "same"),
        ("report RUN --output OUT/report.html", "report.html"), ("checkpoints STATE", "ok"),
        ("checkpoints RUN", "dualtune checkpoints RUN/weights/NAME"),
        ("generate --adapter STATE --prompt a --max-tokens 2 CPU", ""), ("adapter inspect SAMPLER", "q_proj"),
        ("adapter diff STATE SAMPLER", "same function"), ("adapter convert SAMPLER OUT/mlx --to mlx", "layout mlx"),
        ("adapter merge RUN OUT/merged --base MODEL", "merged"), ("export STATE OUT/hf --to hf CPU", "written"),
        ("eval RUN/config.yaml --set data.train=ROWS --set data.eval=0.5 CPU", "perplexity"),
        ("bundle pack RUN OUT/a.bundle --adapter", "adapter_model.safetensors"), ("push OUT RUN", "adapter"),
        ("push OUT/other.tar STATE", "adapter"),
    ],
)  # fmt: skip
def test_a_command_reads_it(command, said, run, tmp_path, tiny_llama, write_rows, qa_rows, dualtune_main):
    result = dualtune_main(*words(command, run, tmp_path, tiny_llama, write_rows(qa_rows)))
    assert result.returncode == 0, result.stderr
    assert said.replace("RUN", str(run)) in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("train RUN/config.yaml --set data.train=ROWS CPU", 2, GO_ON),
        ("train RUN/config.yaml --set data.train=ROWS --set run.dir=OUT/new --resume STATE CPU", 2, GO_ON),
        ("bundle pack RUN OUT/a.bundle", 2, "--adapter"), ("bundle pack STATE OUT/a.bundle", 2, "--adapter"),
        ("eval RUN CPU", 2, "That of a run is RUN/config.yaml"), ("eval RUN/config.yaml CPU", 2, "data.train: missing"),
        ("profile RUN", 6, "of `dualtune serve --train`"),
    ],
)  # fmt: skip
def test_a_command_refuses_it(command, code, said, run, tmp_path, tiny_llama, write_rows, qa_rows, dualtune_main):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    result = dualtune_main(*words(command, run, tmp_path, tiny_llama, write_rows(qa_rows)))
    assert result.returncode == code and said.replace("RUN", str(run)) in result.stderr
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def words(command, run, tmp_path, model, rows):
    """The words of a command, with paths in the place of their names."""
    out = tmp_path / "out"
    out.mkdir()
    places = {"STATE": run / "weights" / "s", "SAMPLER": run / "sampler_weights" / "q", "MODEL": model, "RUN": run,
              "OUT": out, "ROWS": rows}  # fmt: skip
    for name, path in places.items():
        command = command.replace(name, str(path))
    return command.replace("CPU", " ".join(CPU)).split()


def test_its_report_says_how_to_go_on(run, dualtune_main, tmp_path):
    assert dualtune_main("report", run, "--output", tmp_path / "page.html").returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert f"adapter.init_from={run}/weights/NAME" in page and json.dumps(str(run / "config.yaml")) not in page
