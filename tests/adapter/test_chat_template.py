"""The chat template of a training beside its adapter, and in the model that the adapter is merged into."""

import json

import pytest

from dualtune.base.errors import FormatError
from dualtune.cli.adapter import report_text
from dualtune.model.formats import chat_template
from dualtune.model.formats.chat_template import TEMPLATE_FILE, hash_of, mismatch, write_training_template
from dualtune.model.formats.directory import read_adapter, write_adapter
from dualtune.model.importing.repair import import_adapter
from dualtune.model.inspection import inspect_adapter

SOURCE = "{% for m in messages %}\r\n[{{ m.content }} é]{% endfor %}"
OTHER = "{{ messages }}"


@pytest.fixture
def directory(make_adapter, tmp_path):
    write_adapter(tmp_path / "a", make_adapter(template=SOURCE))
    return tmp_path / "a"


@pytest.mark.parametrize("layout", ["dual", "peft", "mlx"])
def test_the_template_is_written_listed_and_read_to_the_byte(make_adapter, tmp_path, layout):
    write_adapter(tmp_path / "a", make_adapter(template=SOURCE), layout=layout)
    assert (tmp_path / "a" / TEMPLATE_FILE).read_bytes() == SOURCE.encode()
    assert TEMPLATE_FILE in json.loads((tmp_path / "a" / "dualtune.json").read_text())["files"]
    adapter = read_adapter(tmp_path / "a")
    assert adapter.template == SOURCE and adapter.template_hash == hash_of(SOURCE)
    write_adapter(tmp_path / "b", adapter, layout="peft")  # as `adapter convert` does
    assert read_adapter(tmp_path / "b").template == SOURCE


def test_an_adapter_without_a_template_has_no_file(make_adapter, tmp_path):
    write_adapter(tmp_path / "a", make_adapter())
    assert not (tmp_path / "a" / TEMPLATE_FILE).exists()
    adapter = read_adapter(tmp_path / "a")
    assert adapter.template is None and adapter.template_hash is None


@pytest.mark.parametrize("change", [OTHER, SOURCE + " ", None])
def test_a_template_that_was_tampered_with_is_refused(directory, change):
    path = directory / TEMPLATE_FILE
    path.unlink() if change is None else path.write_bytes(change.encode())
    with pytest.raises(FormatError, match=TEMPLATE_FILE):
        read_adapter(directory)
    assert not inspect_adapter(directory).ok


def test_a_template_that_was_added_later_is_refused(make_adapter, tmp_path):
    write_adapter(tmp_path / "a", make_adapter())
    (tmp_path / "a" / TEMPLATE_FILE).write_text(OTHER)
    with pytest.raises(FormatError, match="was added later"):
        read_adapter(tmp_path / "a")


@pytest.mark.parametrize("data", [b"\xff", b"x" * (chat_template.MAX_TEMPLATE_BYTES + 1)])
def test_what_is_no_template_is_refused(directory, data):
    (directory / "dualtune.json").unlink()  # of another tool: nothing is hashed
    (directory / TEMPLATE_FILE).write_bytes(data)
    with pytest.raises(FormatError, match=r"is not UTF-8|must be at most 1048576 bytes"):
        read_adapter(directory)


def test_import_keeps_the_template_of_another_tool(directory):
    (directory / "dualtune.json").unlink()
    assert import_adapter(directory).adapter.template == SOURCE


RECORDS = {
    "its own": (SOURCE, {}, f"{hash_of(SOURCE)}, in chat_template.jinja"),
    "none": (None, {"template": "none", "template_hash": "none"}, "none: trained on plain prompts"),
    "a hash alone": (None, {"template": "chat", "template_hash": "sha256 12"}, "sha256 12, which is not in the dir"),
    "nothing": (None, {}, "not recorded"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_inspect_says_what_is_known(make_adapter, tmp_path, case):
    source, training, said = RECORDS[case]
    write_adapter(tmp_path / "a", make_adapter(template=source), metadata={"training": training})
    report = inspect_adapter(tmp_path / "a")
    assert report.template.startswith(said) and f"template    {said}" in report_text(report)


def test_a_mismatch_is_one_line_and_a_match_none(wording):
    assert mismatch(None, "sha256 1") is mismatch("sha256 1", "sha256 1") is None
    wording(mismatch("sha256 1", "none"))
    wording(mismatch("sha256 1", "sha256 2"))
    wording(mismatch("none", "none"))
    wording(mismatch("none", "sha256 2"))


# --- the merged model ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "key", "named", "no"])
def model(request, tmp_path):
    """A model directory with its template OTHER in one of the places where it may be, or without."""
    path = tmp_path / "model"
    path.mkdir()
    key = {"key": OTHER, "named": [{"name": "tools", "template": "x"}, {"name": "default", "template": OTHER}]}
    table = {"eos_token": "</s>"} | ({"chat_template": key[request.param]} if request.param in key else {})
    (path / "tokenizer_config.json").write_text(json.dumps(table))
    if request.param == "file":
        (path / TEMPLATE_FILE).write_text(OTHER)
    return path, request.param != "no"


def found_in(path):
    """(the file, the key): where tools look."""
    file = path / TEMPLATE_FILE
    config = json.loads((path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "</s>"
    return file.read_bytes().decode() if file.exists() else None, config.get("chat_template")


def test_a_merged_model_has_the_template_of_the_training_and_no_other(model, wording):
    path, _ = model
    wording(write_training_template(path, SOURCE, {}))
    assert found_in(path) == (SOURCE, None)


def test_after_a_training_without_one_a_merged_model_has_none(model, wording):
    path, _ = model
    wording(write_training_template(path, None, {"training": {"template": "none"}}))
    assert found_in(path) == (None, None)


def test_where_the_template_is_a_hash_alone_the_base_s_remains_and_a_difference_is_told(model, wording):
    path, has_one = model
    before = found_in(path)
    same = {"training": {"template": "chat", "template_hash": hash_of(OTHER) if has_one else None}}
    assert write_training_template(path, None, same) == write_training_template(path, None, {}) == "the base's"
    note = write_training_template(path, None, {"training": {"template": "chat", "template_hash": "sha256 0123"}})
    wording(note)
    assert found_in(path) == before
