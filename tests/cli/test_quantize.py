"""`dualtune quantize --compare`: the loss of the base in each format, measured, and kept for the report of a run."""

import json
from itertools import islice

import pytest
import yaml

from dualtune.base.errors import DataError
from dualtune.data.documents import Data, tokenize
from dualtune.show.report.run_files import read_run
from dualtune.show.report.run_page import run_page
from dualtune.show.report.run_sections import base_formats
from dualtune.train.evaluation import evaluate, layout_of
from dualtune.train.generation.inference import load_model
from dualtune.use.scoring.compare import compare_formats, formats_of

ROWS = [{"prompt": f"{i} plus {i}?", "completion": str(2 * i)} for i in range(30)]


@pytest.fixture
def config(make_config, write_rows):
    return make_config(write_rows(ROWS))


def test_each_format_has_the_loss_that_eval_measures_on_the_first_rows(config, open_backend):
    backend = open_backend("torch")
    found = compare_formats(config, backend, rows=20, formats=("none", "nf4"))
    assert [each.quantization for each in found.formats] == ["none", "nf4"] and found.rows == 20
    for each in found.formats:
        model = load_model(backend, config.model.name, quantization=each.quantization)
        documents = tokenize(islice(Data(config).train[0].examples(), 20), model.tokenizer, "assistant", 64)
        assert each.loss == evaluate(model.engine, documents, layout_of(config)).eval_loss
        assert found.targets == documents.num_targets
    plain, nf4 = (each.loss for each in found.formats)
    assert nf4 != plain
    assert [each["above"] for each in found.as_json()["formats"]] == [0, nf4 - plain]


def test_all_formats_of_a_backend_are_measured_the_unquantized_one_first(open_backend):
    formats = formats_of(open_backend("torch"))
    assert formats[0] == "none" and {"nf4", "int8"} <= {*formats} and "auto" not in formats


def test_rows_without_targets_are_an_error(make_config, write_rows, open_backend):
    config = make_config(write_rows([{"prompt": "x" * 100, "completion": "y"}]), {"data.max_length": 8})
    with pytest.raises(DataError, match="target"):
        compare_formats(config, open_backend("torch"), formats=("none",))


def test_the_command_keeps_its_numbers_beside_a_run_and_the_report_shows_them(config, tmp_path, dualtune_main):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    words = ("quantize", path, "--compare", "--format", "nf4", "--rows", "4", "--platform", "cpu", "--json")
    result = dualtune_main(*words)
    assert result.returncode == 0
    assert not (tmp_path / "run" / "base_formats.json").exists()  # there is no run yet
    assert dualtune_main("train", path, "--platform", "cpu", "--set", "model.quantization=nf4").returncode == 0
    run = read_run(tmp_path / "run")
    assert base_formats(run) == {"used": "nf4", "command": f"dualtune quantize {run.path / 'config.yaml'} --compare"}
    result = dualtune_main(*words)
    measured = json.loads(result.stdout)["formats"]
    row = ("nf4", f"{measured[1]['loss']:.4f}", f"{measured[1]['above']:+.4f}")
    found = base_formats(run)
    assert found["used"] == "nf4" and found["rows"][1] == row
    cells = "nf4 (this run)</th><td>{}</td><td>{}</td>".format(*row[1:])
    assert cells in run_page([run.path])
    (tmp_path / "run" / "base_formats.json").write_text('{"formats": [3, {"loss": "x", "quantization": ["<b>"]}]}')
    assert base_formats(run)["rows"][1] == ("['<b>']", "–", "") and "['<b>']" not in run_page([run.path])
    (tmp_path / "run" / "base_formats.json").write_text("{")
    assert "base_formats.json" in base_formats(run)["problem"]


def test_each_format_has_its_line_as_soon_as_it_is_measured(config, tmp_path, dualtune_main):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    result = dualtune_main("quantize", path, "--compare", "--format", "nf4", "--rows", "4", "--platform", "cpu")
    lines = [line.split() for line in result.stdout.splitlines()]
    told = {words[1]: words[3] for words in lines if words[:1] == ["measured"] and words[2] == "loss"}
    table = {words[0]: words[1] for words in lines if words[:1] in (["none"], ["nf4"])}
    assert list(told) == ["none", "nf4"] and told == table


def test_a_format_is_told_before_the_next_one_is_loaded(config, open_backend):
    heard = []
    found = compare_formats(
        config, open_backend("torch"), 4, ("none", "nf4"), heard.append, heard.append, lambda *done: heard.append(done)
    )
    none, nf4 = found.formats
    assert heard == ["none", (0, 1), (1, 1), none, "nf4", (0, 1), (1, 1), nf4]


def test_without_compare_it_says_where_quantization_is_set(config, tmp_path, dualtune_main):
    (tmp_path / "c.yaml").write_text("")
    result = dualtune_main("quantize", tmp_path / "c.yaml")
    assert result.returncode == 2 and "model.quantization" in result.stderr
    result = dualtune_main("quantize", tmp_path / "c.yaml", "--compare")
    assert result.returncode == 2
