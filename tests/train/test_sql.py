"""SQL judged by what SQLite answers to it. What a model writes may read the tables, and do nothing else."""

import pytest

from dualtune.train.rl.sql import MAX_ROWS, SqlJudge


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    script = tmp_path_factory.mktemp("sql") / "animals.sql"
    script.write_text(
        "CREATE TABLE animals (name TEXT, legs INTEGER);"
        "INSERT INTO animals VALUES ('cat', 4), ('hen', 2), ('dog', 4), ('ant', 6);",
        encoding="utf-8",
    )
    return SqlJudge(script)


@pytest.mark.parametrize(
    ("expected", "got", "is_right"),
    [
        ("SELECT name FROM animals WHERE legs = 4", "select name from animals where legs between 3 and 5", True),
        ("SELECT name FROM animals WHERE legs = 4", "SELECT name FROM animals WHERE legs = 4 ORDER BY name DESC", True),
        ("SELECT name FROM animals ORDER BY name", "SELECT name FROM animals ORDER BY name DESC", False),
        ("SELECT name FROM animals WHERE legs = 4", "SELECT name FROM animals", False),
        ("SELECT COUNT(*) FROM animals", "SELECT '4'", False),
        ("SELECT name FROM animals WHERE legs = 9", "I do not know", False),
        ("no query", "no query", False),
    ],
)
def test_a_query_is_right_if_its_rows_are(judge, expected, got, is_right):
    assert judge.score(expected, got) is is_right


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE animals", "DELETE FROM animals", "PRAGMA user_version", "ATTACH 'other.db' AS other",
        "SELECT load_extension('x')", "SELECT hex(zeroblob(100000000))", "SELECT 1; SELECT 2", "SELECT 'a\0'", "\ud800",
        "SELECT COUNT(*) FROM animals a, animals b, animals c, animals d, animals e, animals f, animals g, animals h, "
        "animals i, animals j, animals k, animals l",
    ],
)  # fmt: skip
def test_nothing_but_reading_is_executed_and_nothing_runs_away(judge, query, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert judge.answer(query) is None
    assert judge.answer("SELECT COUNT(*) FROM animals") == [(4,)]
    assert not list(tmp_path.iterdir())


def test_answers_are_bounded_and_said_in_a_line(judge):
    assert judge.in_words("SELECT name, legs FROM animals WHERE legs > 2 ORDER BY name") == "ant 6, cat 4, dog 4"
    assert judge.in_words("SELECT name FROM animals WHERE legs > 6") == "no rows"
    assert judge.in_words("SELEC") == "an error of SQLite"
    many = "SELECT a.name FROM animals a, animals b, animals c, animals d, animals e, animals f"  # 4,096 rows
    assert len(judge.answer(many)) == MAX_ROWS
    assert judge.in_words(many).endswith(", …")
