"""What a user may name as data: a file, a directory, a dataset of the hub. The hub is a server of our own."""

import http.server
import json
import os
import stat
import sys
import threading
from hashlib import sha1
from pathlib import Path

import pytest

from dualtune.base.errors import DataError, EnvironmentFault, FormatError
from dualtune.data.sources import readers
from dualtune.data.sources.readers import has_role, open_source

KINDS = (
    ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .txt, .text, .md; "
    "all except .parquet and .arrow also with .gz appended"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make files in an empty working directory; the text of each is its name, in JSON lines."""
    monkeypatch.chdir(tmp_path)

    def make(*names: str):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"from": path.name}) + "\n")
        return tmp_path

    return make


def names_of(source) -> list[str]:
    return [path.name for path in source.files]


def error_of(*args, **options) -> str:
    with pytest.raises(DataError) as caught:
        open_source(*args, **options)
    return str(caught.value)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_named_as_the_user_wrote_it(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder("a.jsonl")))
    source = open_source("~/a.jsonl", role="valid")
    assert (source.name, names_of(source)) == ("~/a.jsonl", ["a.jsonl"])
    assert [row.fields for row in source.rows()] == [{"from": "a.jsonl"}]


@pytest.mark.parametrize(
    "name", ["no.jsonl", "data/no.jsonl", "data/no.csv.gz", "no", "/no/file", "a/b/c", "../no", ""]
)
def test_what_is_not_there_is_an_error(folder, name):
    folder()
    if name:
        assert error_of(name) == f"{name}: no such file or directory"
    else:
        assert error_of(name).startswith(".: needs train.*")


@pytest.mark.parametrize(
    ("name", "got"), [("a.xlsx", "a '.xlsx' file"), ("a", "a file without a suffix"), ("a.parquet.gz", "a '.gz' file")]
)
def test_another_kind_of_file_is_an_error_with_the_kinds(folder, name, got):
    folder(name)
    assert error_of(name) == f"{name}: got {got}, allowed: {KINDS}"


def test_what_only_a_dataset_has_is_refused_for_files(folder, wording):
    folder("a.jsonl", "d/train.jsonl")
    wording(error_of("a.jsonl", split="train"))
    for name in ("a.jsonl", "d"):
        wording(error_of(name, subset="main"))


def test_what_cannot_be_read_is_an_error(folder, wording):
    path = folder("a.jsonl") / "a.jsonl"
    os.mkfifo("pipe.jsonl")
    wording(error_of("pipe.jsonl"))
    assert "cannot be read: " in error_of("x" * 5000 + ".jsonl")
    wording(error_of("~no-such-user/a.jsonl"))
    source = open_source(str(path))
    path.unlink()
    for read in (source.identity, lambda: list(source.rows())):
        with pytest.raises(DataError, match=r"a.jsonl: cannot be read: No such file or directory"):
            read()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_file_that_may_not_be_read_is_an_error(folder):
    path = folder("a.jsonl") / "a.jsonl"
    path.chmod(stat.S_IWUSR)
    with pytest.raises(DataError, match=r"a.jsonl: cannot be read: Permission denied"):
        list(open_source(str(path)).rows())


def test_a_single_file_is_for_training(folder):
    folder("a.jsonl")
    assert [has_role("a.jsonl", role) for role in ("train", "valid", "test")] == [True, False, False]
    assert not has_role("b.jsonl", "train")


# --- directories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("valid", ["valid", "validation", "val", "dev"])
def test_a_directory_gives_each_role_its_file(folder, valid):
    folder("d/train.jsonl", f"d/{valid}.csv.gz", "d/Test.NDJSON", "d/README.txt", "d/.test.jsonl", "d/training.jsonl")
    found = {role: names_of(open_source("d", role=role)) for role in ("train", "valid", "test")}
    assert found == {"train": ["train.jsonl"], "valid": [f"{valid}.csv.gz"], "test": ["Test.NDJSON"]}
    assert names_of(open_source("d", split=valid)) == [f"{valid}.csv.gz"]
    assert all(has_role("d", role) for role in found)
    assert not has_role("..", "valid")


@pytest.mark.parametrize(
    "parts",
    [
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"],
        ["train_1.jsonl", "train_2.jsonl", "train_10.jsonl"],
        ["train.part1.jsonl.gz", "train.part2.jsonl.gz"],
    ],
)
def test_parts_are_read_in_the_order_of_their_numbers(folder, parts):
    folder(*parts[::-1])
    assert names_of(open_source(".")) == parts


def test_parts_are_one_stream(folder):
    folder("train_2.jsonl", "train_1.jsonl")
    told = []
    source = open_source(".")
    assert [(row.path, row.fields["from"]) for row in source.rows(told.append)] == [
        ("train_1.jsonl", "train_1.jsonl"),
        ("train_2.jsonl", "train_2.jsonl"),
    ]
    assert told == [0.5, 1.0]
    before = source.identity()
    folder("train_1.jsonl", "train_2.jsonl")
    assert open_source(".").identity() == before
    (source.files[0]).write_bytes(source.files[1].read_bytes())
    assert open_source(".").identity() != before


def test_missing_parts_are_noticed(folder, wording):
    folder("train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl")
    wording(error_of("."))


@pytest.mark.parametrize(
    "names", [("train.csv", "train.jsonl"), ("train.jsonl", "train.jsonl.gz"), ("train.jsonl", "train_1.jsonl")]
)
def test_two_sets_for_one_role_are_an_error_and_not_read_twice(folder, names):
    folder(*names)
    message = f".: several files fit the role train: {', '.join(names)}. Name one file"
    assert error_of(".") == message
    folder("val.jsonl", "dev.jsonl")
    assert "dev.jsonl, val.jsonl. Name one file" in error_of(".", role="valid")


def test_a_directory_without_the_role_says_what_it_holds(folder, wording):
    folder("d/data.jsonl", "d/.hidden", "d/sub/train.jsonl")
    wording(error_of("d"))
    wording(error_of("d", role="valid"))
    wording(error_of("d", split="validatoin"))
    folder(*(f"many/{i:02}.jsonl" for i in range(30)))
    assert error_of("many").endswith("18.jsonl, 19.jsonl, …")


# --- datasets of the hub ---------------------------------------------------------------------------------------------

COMMIT = "1" * 40
LOCAL = Path(__file__).parents[2] / "constraints.txt"
CARD = """---
configs:
- {config_name: main, data_files: [{split: train, path: train.jsonl}, {split: dev, path: dev.jsonl}]}
- {config_name: more, data_files: [{split: test, path: train.jsonl}]}
---
"""
TRAIN = [{"q": f"{i}?", "meta": {"x": i} if i % 2 else {"y": "z"}} for i in range(2500)]
BROKEN = "---\nconfigs: [{config_name: main, data_files: broken.jsonl}]\n---\n"
DATASETS = {
    "me/tiny": {"README.md": CARD, "train.jsonl": "\n".join(map(json.dumps, TRAIN)), "dev.jsonl": '{"q": "dev"}\n'},
    "me/broken": {"README.md": BROKEN, "broken.jsonl": '{"q": 1}\n{"q": }\n'},
    "me/damaged": {"README.md": "", "train.jsonl": '{"q": 1}\n'},
    "me/named": {"README.md": "", "train.jsonl": '{"q": 2}\n'},
    "me/pictures": {"README.md": "", "train.tar": "x"},
    "me/away": {"README.md": f"---\nconfigs: [{{config_name: a, data_files: {LOCAL}}}]\n---\n", "a.txt": "a"},
    "me/borrowed": {
        "README.md": f"---\nconfigs: [{{config_name: a, data_files: 'hf://datasets/me/tiny@{COMMIT}/dev.jsonl'}}]\n---\n",
    },
}
ANNOUNCED = {"me/damaged": sha1(b"other").hexdigest(), "me/named": "../../../../outside"}  # of train.jsonl


def git_hash(data: bytes) -> str:
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as `datasets` asks for."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        kind, _, rest = self.path.partition("?")[0].strip("/").removeprefix("api/").partition("/")
        owner, name, *place = rest.split("/")
        dataset = DATASETS.get(f"{owner}/{name}")
        body = None
        if name == "odd":
            return self.answer(400, None, "")
        if kind == "datasets" and dataset and place[0] == "resolve":
            body = dataset.get(place[2])
        elif dataset and place[0] == "tree":
            files = [
                {"type": "file", "path": f, "size": len(d), "oid": git_hash(d.encode())} for f, d in dataset.items()
            ]
            body = json.dumps(files)
        elif dataset and place[0] == "revision":
            body = json.dumps({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": []})
        etag = ANNOUNCED.get(f"{owner}/{name}") if place[-1:] == ["train.jsonl"] else None
        return self.answer(404 if body is None else 200, body, "EntryNotFound" if dataset else "RepoNotFound", etag)

    def answer(self, status, body, error, etag=None):
        data = (body or "").encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{etag or git_hash(data)}"')
        if body is None:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def ask(tmp_path_factory, python):
    """Evaluate an expression in a process that sees our hub, or, offline, the cache that was filled from it.

    A process takes seconds, so `ask.each` evaluates several in one.
    """
    pytest.importorskip("datasets")
    home = tmp_path_factory.mktemp("hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def evaluate_each(*expressions: str, offline: bool = False) -> list:
        code = f"""
import json
from dualtune.data.sources import readers
from dualtune.data.sources.readers import has_role, open_source
from dualtune.base.errors import DualtuneError
for expression in {expressions!r}:
    try:
        print(json.dumps(eval(expression)))
    except DualtuneError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""
        address = f"http://127.0.0.1:{server.server_port}"
        env = {"HF_ENDPOINT": address, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        out = python("-c", code, env=env | {"HF_HUB_OFFLINE": str(int(offline))}, cwd=home)
        assert out.returncode == 0, out.stderr
        return [json.loads(line) for line in out.stdout.splitlines()]

    def evaluate(expression: str, offline: bool = False):
        return evaluate_each(expression, offline=offline)[0]

    evaluate.each = evaluate_each
    yield evaluate
    server.shutdown()
    server.server_close()


ROWS = "[(row.path, row.line, row.fields) for row in open_source({}).rows()]"


def test_a_dataset_of_the_hub_is_read_and_offline_from_its_cache(ask):
    tiny = "'me/tiny', subset='main'"
    expected = [["me/tiny", number, fields] for number, fields in enumerate(TRAIN, start=1)]
    assert ask(ROWS.format(tiny)) == expected
    offline = (
        ROWS.format(tiny),
        ROWS.format(f"{tiny}, role='valid'"),
        ROWS.format(f"{tiny}, split='train[1:2]'"),
        "(told := [], list(open_source('me/tiny', subset='main').rows(told.append)))[0]",
        "[has_role('me/tiny', role, 'main') for role in ('train', 'valid', 'test')]",
    )
    assert ask.each(*offline, offline=True) == [
        expected,
        [["me/tiny", 1, {"q": "dev", "meta": None}]],
        [["me/tiny", 1, TRAIN[1]]],
        [0.4, 0.8, 1],
        [True, True, False],
    ]
    assert not ask("has_role('me/tiny', 'valid', 'more')")  # a test split is not for validation


def test_the_identity_of_a_dataset_depends_on_the_split_and_not_on_the_network(ask):
    identities = "[open_source('me/tiny', subset='main', role=role).identity() for role in ('train', 'valid')]"
    train, valid = ask(identities)
    assert train != valid and train.startswith("hub:")
    assert ask(identities, offline=True) == [train, valid]


REFUSED = {
    "'me/absent'": "Dataset 'me/absent' doesn't exist on the Hub or cannot be accessed.",
    "'me/tiny', subset='other'": "BuilderConfig 'other' not found. Available: ['main', 'more']",
    "'me/tiny'": "Config name is missing. Please pick one among the available configs: ['main', 'more']",
    "'me/tiny', subset='main', split='nope'": "Unknown split \"nope\". Should be one of ['train', 'dev'].",
    "'me/broken'": "An error occurred while generating the dataset: ",
    "'me/odd'": "",
}


def test_a_dataset_that_cannot_be_loaded_names_both_possibilities(ask):
    for (call, reason), (kind, message) in zip(REFUSED.items(), ask.each(*map(ROWS.format, REFUSED)), strict=True):
        name = call.split("'")[1]
        expected = f"{name}: no such file or directory, and it cannot be loaded as a dataset of the hub: {reason}"
        assert (kind, message[: len(expected)]) == ("DataError", expected)


UNSAFE = {
    "me/damaged": "are not those that the hub announced",
    "me/named": "sent the header etag",
    "me/pictures": "me/pictures: its files are read as webdataset, allowed: arrow, csv, json, parquet, text",
}


def test_an_unsafe_dataset_is_refused_before_its_files_are_read(ask):
    names = [ROWS.format(f"'{name}'") for name in UNSAFE]
    for (name, part), (kind, message) in zip(UNSAFE.items(), ask.each(*names), strict=True):
        assert (name, kind, part in message) == (name, "FormatError", True), message
        assert "\n" not in message


def test_a_dataset_whose_card_names_files_of_other_places_is_refused(ask):
    names = ("me/away", "me/borrowed")
    for name, (kind, message) in zip(names, ask.each(*(ROWS.format(f"'{name}'") for name in names)), strict=True):
        assert kind in ("FormatError", "DataError") and message.startswith(f"{name}: ")  # newer libraries look, too


@pytest.mark.parametrize("file", [
    str(LOCAL), f"hf://datasets/me/tinier@{COMMIT}/a.jsonl", "https://127.0.0.1/a.jsonl",
    f"zip://a.jsonl::hf://datasets/me/tiny@{COMMIT}/a.zip", f"hf://me/tiny@{COMMIT}/a.jsonl",
    *(f"hf://datasets/me/tiny@{COMMIT}/{path}" for path in ("../x", "a/../../x", "a//x", "./x", "a\\..\\x", "a\nb")),
])  # fmt: skip
def test_a_file_of_a_dataset_is_in_its_repository(file):
    assert readers._place("me/tiny", f"hf://datasets/me/tiny@{COMMIT}/a/b.jsonl") == (COMMIT, "a/b.jsonl")
    assert readers._place("me/tiny", "hf://datasets/Me/Tiny@refs%2Fpr%2F1/b.jsonl") == ("refs/pr/1", "b.jsonl")
    with pytest.raises(FormatError, match="not in its repository"):
        readers._place("me/tiny", file)


def test_a_split_that_is_missing_for_the_role_is_named_with_those_that_there_are(ask):
    assert ask(ROWS.format("'me/tiny', subset='main', role='test'")) == [
        "DataError",
        "me/tiny: has no split for the role test; it has: train, dev. Name one with split",
    ]


def test_without_the_library_the_error_says_what_to_install(monkeypatch, folder, wording):
    folder()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentFault) as caught:
        open_source("me/tiny")
    wording(str(caught.value))


def test_a_library_that_would_run_code_of_datasets_is_refused(monkeypatch, folder):
    datasets = pytest.importorskip("datasets")
    folder()
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(EnvironmentFault, match=r"got datasets 3.6.0, 4 or newer is needed"):
        open_source("me/tiny")


def test_a_directory_wins_over_a_dataset_of_the_same_name(folder):
    folder("me/tiny/train.jsonl")
    assert names_of(open_source("me/tiny")) == ["train.jsonl"]
