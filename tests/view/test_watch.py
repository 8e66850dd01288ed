"""`dualtune watch`: a run as its files show it, while it trains, after a kill, on another machine, and damaged."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from dualtune.base.errors import ConfigError, FormatError
from dualtune.show import page_server
from dualtune.show.page_server import PageServer
from dualtune.show.report.run_files import read_run
from dualtune.show.view import follow
from dualtune.show.view.follow import WatchedRun
from dualtune.train.hooks import Hook
from dualtune.train.state.listing import summary_of

SETTINGS = {"train.steps": 6, "run.log_every": 1, "run.eval_every": 2, "run.save_every": 2,
            "run.sample_prompts": ["say it"]}  # fmt: skip


class Watching(Hook):
    """Reads the files of the run that it is a hook of, and may end it."""

    def __init__(self, path, dies_at=None):
        self.said, self.states, self.watched = [], [], None
        self._path, self._dies_at = path, dies_at

    def on_step(self, record):
        self.watched = self.watched or WatchedRun(self._path, lambda line, when: self.said.append(line))
        self.watched.read()
        self.states.append(self.watched.state)
        assert self.watched.view.step == record.step
        if record.step == self._dies_at:
            raise KeyboardInterrupt


def note_of(path, **changes):
    """Write the note of a holder into a lock that nobody holds."""
    note = json.loads((path / "lock").read_text()) | {"state": "running"} | changes
    (path / "lock").write_text(json.dumps(note))


def test_a_long_file_is_read_in_parts_that_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "CHUNK", 100)
    path = tmp_path / "rows"
    path.write_text("".join(f"row {number}\n" for number in range(1000)))
    read = []
    followed = follow.Followed(path)
    chunk = followed._chunk
    monkeypatch.setattr(followed, "_chunk", lambda file: read.append(1) or chunk(file))
    lines, is_new = followed.new_lines()
    assert is_new and next(lines) == "row 0" and len(read) == 1
    assert [*lines] == [f"row {number}" for number in range(1, 1000)] and len(read) > 50
    with path.open("a") as file:
        file.write("one more\nhalf of")
    lines, is_new = followed.new_lines()
    assert ([*lines], is_new) == (["one more"], False)


def test_a_run_is_followed_while_it_trains_is_killed_and_resumed(trained, tmp_path):
    run_dir = tmp_path / "run"
    watching = Watching(run_dir, dies_at=5)
    with pytest.raises(KeyboardInterrupt):
        trained("numpy", SETTINGS, [watching])
    watched = watching.watched
    assert watching.states == ["running"] * 5
    assert [line.split()[:2] for line in watching.said if line.startswith("step")] == [
        ["step", f"{step}/6"]
        for step in (2, 3, 4, 5)  # the first was there already
    ]
    watched.read()
    assert watched.state == "failed" and watched.reason == "interrupted"
    note_of(run_dir, pid=2**22 + 1)
    watched.read()
    assert watched.state == "killed"

    watching.said.clear()
    result = trained("numpy", SETTINGS)
    watched.read()
    assert watching.said[0] == "the run begins again, from a checkpoint or from its start"
    view = watched.view
    assert (watched.state, view.step, view.num_steps, view.evals[-1]) == ("done", 6, 6, (6, result.eval_loss))
    assert view.best.eval_loss == min(loss for step, loss in view.evals if step)
    assert view.saved[0] == 6 and view.used_bytes > 0
    assert [(sample.step, sample.prompt) for sample in view.samples] == [(6, "say it")]
    assert view.seconds_left == 0.0


def test_the_time_left_is_read_from_the_files(trained, tmp_path):
    """The seconds of evaluations and saves come from memory.csv, those of steps from metrics.jsonl."""
    trained("numpy", SETTINGS)
    path = tmp_path / "run"
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    kept = [{**row, "step_s": 3.0} for row in rows if row["step"] <= 2]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    header = (path / "memory.csv").read_text().splitlines()[0]
    phases = [("start", 1), ("evaluation", 11), ("data", 12), ("save", 32)]
    (path / "memory.csv").write_text(
        "\n".join([header, *(f"2,{name},7,8,,,,9,{time}.000" for name, time in phases)]) + "\n2,evaluation,1"
    )
    watched = WatchedRun(path, lambda line, when: None)
    watched.read()
    watched.view.saved = (2, 0.0)  # the checkpoints of the finished run lie there
    assert watched.view.seconds_left == 4 * 3 + 2 * 10 + 2 * 20
    assert (watched.view.used_bytes, watched.view.limit_bytes) == (7, 9)


def test_a_run_on_another_machine_counts_as_running_everywhere(trained, tmp_path):
    """Its lock may be invisible over a network file system."""
    trained("numpy", SETTINGS)
    note_of(tmp_path / "run", host="another-machine")
    watched = WatchedRun(tmp_path / "run", lambda line, when: None)
    watched.read()
    assert watched.is_running and "on another-machine, by its note" in watched.reason
    assert [each.state for each in (summary_of(tmp_path / "run"), read_run(tmp_path / "run"))] == ["running"] * 2


def test_damaged_files_are_left_out_or_refused_in_one_line(trained, tmp_path, monkeypatch):
    trained("numpy", SETTINGS)
    path = tmp_path / "run"
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1e999}\n[[[\n\xff\n{"step": 7, "loss": 1.5, "lr": "x", "step_s": null, "time": 5}\n{"ste')
    with (path / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "prompt": 1}\n{"step": 7, "prompt": "p", "answer": "' + b"a" * 50_000 + b'"}\nx\n')
    with (path / "memory.csv").open("ab") as file:
        file.write(b"a,b\n")
    monkeypatch.setattr(follow, "CHUNK", 1 << 12)  # the long line is longer
    watched = WatchedRun(path, lambda line, when: None)
    watched.read()
    assert (watched.view.step, watched.view.last.lr, watched.view.samples[-1].step) == (7, 0, 6)
    monkeypatch.setattr(follow, "MAX_BYTES", 1000)
    with pytest.raises(FormatError, match=r"metrics\.jsonl: \d+ bytes, at most 1000 are allowed$"):
        WatchedRun(path, print).read()
    (path / "metrics.jsonl").unlink()
    (path / "metrics.jsonl").mkdir()
    with pytest.raises(FormatError, match=r"metrics\.jsonl"):
        WatchedRun(path, print).read()
    with pytest.raises(ConfigError, match="is not a run directory"):
        WatchedRun(tmp_path, print)


def test_a_pipe_gets_the_state_and_the_end(trained, tmp_path, dualtune_main):
    trained("numpy", SETTINGS)
    for options in ((), ("--once",)):
        result = dualtune_main("watch", tmp_path / "run", *options)
        assert (result.returncode, result.stderr) == (0, "")
        heads = [line.split()[0] for line in result.stdout.splitlines()]
        assert heads == ["run", "curve", "evaluated", "state", "sample", "done"]
    assert "step 6/6" in result.stdout
    (tmp_path / "empty").mkdir()
    refused = dualtune_main("watch", tmp_path / "empty")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1


def test_a_terminal_shows_the_run_until_it_ends(trained, tmp_path):
    trained("numpy", SETTINGS)
    note_of(tmp_path / "run", host="another-machine")
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "dualtune.cli.main", "watch", str(tmp_path / "run"), "--every", "0.1"]
    with subprocess.Popen(command, stdout=follower, stderr=follower, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(follower)
        drawn, is_over = b"", False
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while block := os.read(leader, 65536):
                drawn += block
                if not is_over and b"last row" in drawn and b"curve" in drawn:
                    is_over = True
                    note_of(tmp_path / "run", host="another-machine", state="done")
        os.close(leader)
    text = drawn.decode()
    assert process.returncode == 0 and is_over
    assert "training" in text and "6/6" in text and "done\r\n" in text


def test_the_page_is_served_to_this_machine_and_asked_for_again_while_the_run_trains(trained, tmp_path, monkeypatch):
    trained("numpy", SETTINGS)
    with (tmp_path / "run" / "samples.jsonl").open("a") as file:
        file.write('{"step": 6, "prompt": "say it", "answer": "<i>bold"}\n')
    running = [True]

    def ask(path="/", host="localhost"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": f"{host}:{port}"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read().decode()

    with PageServer(0, tmp_path / "run", lambda: running[0]) as server:
        port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, headers, page = ask()
        assert (status, headers["Refresh"]) == (200, "10") and "<h1>run</h1>" in page and "default-src 'none'" in page
        assert "<h2>Samples</h2>" in page and page.count("say it</summary>") == 1 and "<td>4</td><td>" in page
        assert "<td>6</td><td>&lt;i&gt;bold</td>" in page and "<i>" not in page
        assert ask("/log.txt")[0] == 404 and ask(host="evil.example")[0] == 403
        running[0] = False
        (tmp_path / "run" / "config.yaml").write_text("a: [<b>")
        status, headers, page = ask()
        assert (status, headers["Refresh"]) == (200, None) and "config.yaml: " in page and "<b>" not in page
        monkeypatch.setattr(page_server, "run_page", lambda runs: [][1])
        running[0] = True  # so the page is made again
        status, _, page = ask()
        assert status == 200 and "the page cannot be made: IndexError: list index out of range" in page
        server.shutdown()
