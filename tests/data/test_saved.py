"""What save_to_disk of the datasets library wrote, Arrow files, and the row numbers of pandas in tables."""

import json

import pytest

from dualtune.base.errors import DataError
from dualtune.data.chat.formats import to_examples
from dualtune.data.documents import Data
from dualtune.data.sources.readers import has_role, open_source
from dualtune.data.sources.rows import RawRow
from dualtune.data.tokens.tokenizer import Tokenizer


def chat(i):
    return {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]}


def arrow_of(rows, path, *, as_file=False):
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(rows)
    with (pa.ipc.new_file if as_file else pa.ipc.new_stream)(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=2)


@pytest.fixture
def saved(tmp_path):
    """Write a directory as save_to_disk does; rows by split, or a list for a Dataset."""

    def dataset(rows, directory, shards):
        directory.mkdir(parents=True)
        names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
        for i, name in enumerate(names):
            arrow_of(rows[i * len(rows) // shards : (i + 1) * len(rows) // shards], directory / name)
        (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (directory / "dataset_info.json").write_text("{}")

    def make(rows, shards=1):
        directory = tmp_path / "saved"
        for split, some in rows.items() if isinstance(rows, dict) else [("", rows)]:
            dataset(some, directory / split, shards)
        if isinstance(rows, dict):
            (directory / "dataset_dict.json").write_text(json.dumps({"splits": list(rows)}))
        return directory

    return make


def answers(directory, **options):
    return [row.fields["messages"][1]["content"] for row in open_source(str(directory), **options).rows()]


SPLITS = {"train": [chat(i) for i in range(5)], "validation": [chat(7)], "odd": [chat(9)]}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_dataset_is_read_in_the_order_of_its_files(saved, shards):
    directory = saved([chat(i) for i in range(5)], shards)
    assert answers(directory) == ["a0", "a1", "a2", "a3", "a4"]
    assert [has_role(str(directory), role) for role in ("train", "valid", "test")] == [True, False, False]


def test_the_splits_of_a_datasetdict_have_the_roles_of_their_names(saved):
    directory = saved(SPLITS)
    assert answers(directory) == ["a0", "a1", "a2", "a3", "a4"]
    assert (answers(directory, role="valid"), answers(directory, split="odd")) == (["a7"], ["a9"])
    assert [has_role(str(directory), role) for role in ("train", "valid", "test")] == [True, True, False]
    with pytest.raises(DataError, match=r"has no split test; it has: train, validation, odd\. Name one with split"):
        open_source(str(directory), role="test")


def test_a_config_evaluates_on_the_validation_split(saved, make_config, tiny_llama):

    config = make_config(saved(SPLITS), {"data.eval": "auto"})
    assert tuple(map(len, Data(config).train_and_eval(Tokenizer(tiny_llama)))) == (5, 1)


def test_the_library_s_own_directory_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([chat(i) for i in range(4)])
    datasets.DatasetDict({"train": rows.select([3, 0]), "test": rows}).save_to_disk(str(tmp_path / "both"))
    assert (answers(tmp_path / "both"), len(answers(tmp_path / "both", role="test"))) == (["a3", "a0"], 4)


@pytest.mark.parametrize(("file", "text", "message"), [
    ("state.json", '{"_data_files": [{"filename": "../../x.arrow"}]}', "got the name '../../x.arrow', allowed: "),
    ("state.json", '{"_data_files": [{"filename": "y.arrow"}]}', "lacks y.arrow, which state.json lists"),
    ("state.json", '{"_data_files": [{"filename": "state.json"}]}', "lacks state.json, which"),
    ("state.json", '{"_data_files": [7]}', "got the name None, allowed"),
    ("state.json", '{"_data_files": []}', "has no rows"), ("state.json", "[]", "is not what save_to_disk writes"),
    ("state.json", "{", "is not what save_to_disk writes"), ("dataset_dict.json", "{}", "it has no list 'splits'"),
    ("dataset_dict.json", '{"splits": ["train", ".."]}', "got the name '..', allowed: a name in this directory"),
])  # fmt: skip
def test_a_directory_that_lies_is_an_error(saved, file, text, message):
    directory = saved([chat(1)])
    (directory / file).write_text(text)
    with pytest.raises(DataError) as caught:
        answers(directory)
    assert message in str(caught.value)


@pytest.mark.parametrize("as_file", [False, True])
def test_an_arrow_file_is_read_and_a_broken_one_is_an_error(tmp_path, as_file):
    path = tmp_path / "a.arrow"
    arrow_of([chat(i) for i in range(5)], path, as_file=as_file)
    assert answers(path) == ["a0", "a1", "a2", "a3", "a4"]
    whole = path.read_bytes()
    for broken in (whole[:-8], whole[: len(whole) // 2], b"x" * 50, b""):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.arrow: (broken Arrow file, after row 0|has no rows)"):
            answers(path)


# --- the row numbers of pandas ---------------------------------------------------------------------------------------


def examples(path):
    rows = list(open_source(str(path)).rows())
    assert all(isinstance(row, RawRow) for row in rows)
    return list(to_examples(rows, "auto", {}))


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_the_row_numbers_of_pandas_in_a_csv_are_not_read_and_noticed(tmp_path, name):
    (tmp_path / "a.csv").write_text(f"{name},prompt,completion\n0,2+2?,4.\n1,3+3?,6.\n")
    found = examples(tmp_path / "a.csv")
    assert [(e.prompt, e.completion) for e in found] == [("2+2?", "4."), ("3+3?", "6.")]
    assert [e.notices for e in found] == [{f"index_column: {name}"}] * 2


@pytest.mark.parametrize("header", ["prompt,,completion", ",prompt,", ","])
def test_another_column_without_a_name_is_an_error(tmp_path, header):
    (tmp_path / "a.csv").write_text(f"{header}\n0,1,2\n")
    with pytest.raises(DataError, match="is empty; give each column a name"):
        examples(tmp_path / "a.csv")
