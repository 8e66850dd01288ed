"""`dualtune report`: which runs it takes, where it writes their page, and what it opens."""

import json
import re
import shutil

from dualtune.show.report.run_page import run_page


def test_several_runs_are_written_where_they_lie(copy, plain, dualtune_main, tmp_path):
    shutil.copytree(copy, tmp_path / "second")
    result = dualtune_main("report", copy, tmp_path / "second")
    assert result.stdout == f"report      {tmp_path / 'report.html'}\n"
    assert "<h1>2 runs</h1>" in (tmp_path / "report.html").read_text()


def test_runs_of_several_directories_are_written_here_under_names_that_differ(
    copy, dualtune_main, tmp_path, monkeypatch
):  # fmt: skip
    for name in ("x/a/run", "y/a/run", "y/b/run", "y/b/other"):
        shutil.copytree(copy, tmp_path / name)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = dualtune_main("report", "../x/a/run", tmp_path / "y")
    assert result.stdout == "report      report.html\n"
    page = (tmp_path / "here" / "report.html").read_text()
    names = [json.loads(one) for one in re.findall(r'"name":("[^"]*")', page)]
    assert names == ["x/a/run", "y/a/run", "other", "b/run"]


def test_a_run_that_is_given_twice_is_one_run(copy, dualtune_main, tmp_path):
    result = dualtune_main("report", copy, f"{copy}/../{copy.name}", tmp_path)
    assert result.stdout == f"report      {tmp_path / 'report.html'}\n", result.stderr
    assert "<h1>copy</h1>" in (tmp_path / "report.html").read_text()


def test_no_run_is_the_best_of_those_with_different_held_out_documents(train):
    runs = [train("a", data__eval=0.25), train("b", data__eval=0.5), train("c", data__eval=0.25, adapter__rank=1)]
    together, apart = run_page([runs[0], runs[2]]), run_page(runs)
    assert together.count('class="mark">best<') == 1 and "evaluated on different documents" not in together
    assert 'class="mark">best<' not in apart and "evaluated on different documents" in apart
    assert 'class="around"' not in apart and "the best has" not in apart and "<svg viewBox" in apart


def test_no_run_is_the_best_of_those_with_different_losses(train, write_rows):
    """Each β of DPO has a scale of its own; the share of pairs in the right order has one for all."""
    rows = [{"prompt": f"{n}?", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}"} for n in range(16)]
    pairs = {"data__train": write_rows(rows, "pairs.jsonl"), "train__objective": "dpo", "train__steps": 8}
    runs = [train(f"beta-{beta}", preference__beta=beta, **pairs) for beta in (0.1, 0.5)]
    page = run_page(runs)
    assert 'class="mark">best<' not in page and "The runs minimize different losses" in page
    assert "pairs in order" in page
    same = run_page([runs[0], train("rank-1", preference__beta=0.1, adapter__rank=1, **pairs)])
    assert same.count('class="mark">best<') == 1


def test_a_directory_of_runs_stands_for_all_of_them(copy, dualtune_main, tmp_path, wording):
    shutil.copytree(copy, tmp_path / "sweep" / "a")
    shutil.copytree(copy, tmp_path / "sweep" / "b")
    result = dualtune_main("report", tmp_path / "sweep")
    assert result.stdout == f"report      {tmp_path / 'sweep' / 'report.html'}\n"
    assert "<h1>2 runs</h1>" in (tmp_path / "sweep" / "report.html").read_text()
    (tmp_path / "empty").mkdir()
    wording(dualtune_main("report", tmp_path / "empty").stderr)


def test_open_opens_the_page_and_says_where_there_is_no_browser(copy, dualtune_main, monkeypatch, wording):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda uri: bool(opened.append(uri)) or len(opened) == 1)
    assert dualtune_main("report", copy, "--open").returncode == 0
    assert opened == [(copy / "report.html").as_uri()]
    wording(dualtune_main("report", copy, "--open").stderr)


def test_the_command_imports_no_framework(python, plain, tmp_path):
    code = (
        f"import sys\nsys.argv = ['dualtune', 'report', {str(plain)!r}, '--output', {str(tmp_path / 'r.html')!r}]\n"
        "import atexit; atexit.register(lambda: print(*sys.modules))\nfrom dualtune.cli.main import main\nmain()"
    )
    modules = python("-c", code).stdout.splitlines()[-1].split()
    assert "dualtune.show.report.run_page" in modules
    assert not {"torch", "mlx", "transformers", "tokenizers"} & set(modules)
