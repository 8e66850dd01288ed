"""`dualtune tunnel` through a real sshd: a port, what is saved, lost connections, and the end at both ends."""

import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from dualtune.base.errors import ConfigError, FormatError
from dualtune.base.files import write_directory
from dualtune.train.state import checkpoint
from dualtune.use.tunnel import here, there

# A command that saves two checkpoints, replaces an adapter, and answers; it saves once more when it is asked to end.
COMMAND = """\
import json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from dualtune.base.files import json_bytes, listing, write_directory

def save(step):
    files = {"adapter.safetensors": str(step).encode() * 70000, "state.json": json_bytes({"step": step})}
    files["MANIFEST.json"] = json_bytes({"files": listing(files)})
    write_directory(Path(f"runs/a/checkpoints/step-{step:08d}"), files)
    print("saved", step, flush=True)

def end(*_):
    save(9)
    sys.exit(75)

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/save":
            save(2)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())

signal.signal(signal.SIGTERM, end)
Path("runs/a").mkdir(parents=True)
Path("runs/a/config.yaml").write_text("{}")
save(1)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
PATIENCE_S = 1800


def wait_for(is_true):
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


class Near:
    """`dualtune tunnel` as a process, and what it says."""

    def __init__(self, cluster, folder: Path, *words: str, host="cluster"):
        program = folder / "dualtune"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dualtune "$@"\n')
        program.chmod(0o755)
        (cluster.home / "command.py").write_text(COMMAND)
        self.to, self.said = folder / "home", folder / "said"
        options = ["--to", str(self.to), "--program", str(program)]
        command = [sys.executable, "-m", "dualtune", "tunnel", *options, *words[:-1], host, "--"]
        with self.said.open("wb") as said:
            self.process = subprocess.Popen([*command, *words[-1].split()], stdout=said, stderr=said, cwd=folder)

    def text(self) -> str:
        return self.said.read_text(encoding="utf-8")

    def url(self) -> str:
        wait_for(lambda: self.is_said("ready") or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()
        return re.search(r"^ready +(\S+)$", self.text(), re.M)[1]

    def is_said(self, word: str) -> bool:
        return any(line.startswith(word) for line in self.text().splitlines())

    def ask(self, path="") -> int:
        """The process id of the command there."""
        with urllib.request.urlopen(f"{self.url()}/{path}") as answer:
            return int(answer.read())

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name[-8:]) for path in self.to.glob("a/checkpoints/step-*"))


@pytest.fixture
def near(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cluster.use(prelude=f"XDG_CACHE_HOME={tmp_path / 'cache'}; export XDG_CACHE_HOME")
    started = []

    def start(*words: str, **options) -> Near:
        started.append(Near(cluster, tmp_path, *words, **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


SERVE = f"{sys.executable} command.py {{port}}"


def test_a_port_is_forwarded_what_is_saved_comes_home_and_ctrl_c_ends_both(near):
    tunnel = near(SERVE)
    there_pid = tunnel.ask()
    tunnel.ask("save")
    wait_for(lambda: tunnel.checkpoints() == [1, 2])
    tunnel.process.send_signal(signal.SIGINT)
    assert tunnel.process.wait(PATIENCE_S) == 0, tunnel.text()
    assert tunnel.checkpoints() == [1, 2, 9]  # what it saved when it was asked to end, too
    assert not psutil.pid_exists(there_pid)
    assert (tunnel.to / "a" / "config.yaml").read_text() == "{}"
    for step in (1, 2, 9):
        folder = tunnel.to / "a" / "checkpoints" / f"step-{step:08d}"
        assert (folder / "adapter.safetensors").read_bytes() == str(step).encode() * 70000
    assert not list(tunnel.to.rglob(".*"))
    assert "with exit code 75; 3 fetched" in tunnel.text() and "saved 9" in tunnel.text()


def test_a_program_of_tinker_trains_through_it_and_its_checkpoints_come_home(near, tiny_softmax, dualtune_main):
    """Two steps, samples and a state, of a real `serve --train` there; what ends with it is saved and comes home."""
    pytest.importorskip("tinker")
    tunnel = near(f"{sys.executable} -m dualtune serve {tiny_softmax} --train --port {{port}} --platform numpy")
    url = tunnel.url()

    def post(call, **body):
        asked = urllib.request.Request(f"{url}/api/v1/{call}", json.dumps(body).encode())
        asked.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(asked) as answer:
            table = json.loads(answer.read())
        return post("retrieve_future", request_id=table["request_id"]) if "request_id" in table else table

    def step(number):
        target = {"data": [6, 7, 8], "dtype": "int64"}
        text = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        data = [{"model_input": text, "loss_fn_inputs": {"target_tokens": target}}]
        asked = {"data": data, "loss_fn": "cross_entropy"}
        loss = post("forward_backward", model_id=run, seq_id=number, forward_backward_input=asked)["metrics"]
        post("optim_step", model_id=run, seq_id=number + 1, adam_params={"learning_rate": 0.1})
        return loss["loss:sum"]

    session = post("create_session", tags=[])["session_id"]
    made = {"session_id": session, "model_seq_id": 0, "base_model": str(tiny_softmax)}
    run = post("create_model", **made, lora_config={"rank": 2, "seed": 1})["model_id"]
    assert step(1) > step(3)
    path = post("save_weights", model_id=run, seq_id=5, path="s")["path"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    sampled = post("asample", prompt=prompt, sampling_params={"max_tokens": 3, "seed": 1, "stop": []}, model_path=path)
    assert len(sampled["sequences"][0]["tokens"]) == 3
    state = tunnel.to / run / "weights" / "s"
    wait_for(lambda: (state / "checkpoints/step-00000002").exists() and (state / "adapter").exists())
    step(6)
    tunnel.process.send_signal(signal.SIGINT)
    assert tunnel.process.wait(PATIENCE_S) == 0, tunnel.text()
    assert checkpoint.read(state / "checkpoints" / "step-00000002").step == 2
    assert checkpoint.read(state.parent / "interrupted" / "checkpoints" / "step-00000003").step == 3
    for place in (state, tunnel.to / run):
        done = dualtune_main("verify", place, "--base", tiny_softmax, "--platform", "numpy")
        assert done.returncode == 0, done.stdout + done.stderr
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1].rstrip("/"))))


def test_a_lost_connection_is_made_again_and_the_command_goes_on(near):
    tunnel = near(SERVE)
    before = tunnel.ask()
    (ssh,) = [child for child in psutil.Process(tunnel.process.pid).children() if "ssh" in child.name()]
    ssh.kill()
    wait_for(lambda: tunnel.is_said("connected"))
    assert tunnel.ask("save") == before
    wait_for(lambda: tunnel.checkpoints() == [1, 2])
    tunnel.process.send_signal(signal.SIGTERM)
    assert tunnel.process.wait(PATIENCE_S) == 0


@pytest.mark.long  # the next test ends it in the same way
def test_a_command_does_not_outlive_the_near_end(near, cluster):
    """Killed, it says no farewell: the far end waits as long as it was told to."""
    tunnel = near("--wait", "8", SERVE)
    there_pid = tunnel.ask()
    tunnel.process.kill()
    wait_for(lambda: not psutil.pid_exists(there_pid))
    assert (cluster.home / "runs/a/checkpoints/step-00000009").exists()  # with SIGTERM, so that it could save


def test_a_machine_that_is_gone_is_given_up_and_what_came_home_stays(near, cluster):
    tunnel = near("--wait", "8", SERVE)
    there_pid = tunnel.ask()
    wait_for(lambda: tunnel.checkpoints() == [1])
    cluster.use(prelude="exit 255")
    (ssh,) = [child for child in psutil.Process(tunnel.process.pid).children() if "ssh" in child.name()]
    ssh.kill()
    assert tunnel.process.wait(PATIENCE_S) == 4
    assert "To continue, run the same command again" in tunnel.text() and tunnel.checkpoints() == [1]
    wait_for(lambda: not psutil.pid_exists(there_pid))
    assert (cluster.home / "runs/a/checkpoints/step-00000009").exists()  # with SIGTERM, so that it could save


def test_a_command_that_ends_gives_its_exit_code(near):
    tunnel = near(f"{sys.executable} -c raise(SystemExit(7))")
    assert tunnel.process.wait(PATIENCE_S) == 7
    assert "exit code 7; 0 fetched" in tunnel.text()


def test_a_machine_without_dualtune_is_named(cluster, dualtune_main):
    done = dualtune_main("tunnel", "--program", "none/dualtune", "cluster", "MODEL")
    assert done.returncode == 4 and "cluster: there is no program 'none/dualtune' there." in done.stderr


def test_a_port_here_that_is_taken_is_named(dualtune_main):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = dualtune_main("tunnel", "--port", taken.getsockname()[1], "cluster", "MODEL")
    assert done.returncode == 2 and "--port: got " in done.stderr


# --- without a connection ---------------------------------------------------------------------------------------------


class Store:
    """A machine whose files are these bytes."""

    host = "gpu"

    def __init__(self, **files):
        self.files, self.fetched = files, []

    def pull(self, path, target, *, patience, most):
        self.fetched.append(path)
        part = target.with_name(f".{target.name}.part-0")
        part.write_bytes(self.files[target.name])
        return part

    def message(self, place="a/adapter"):
        entries = {n: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in self.files.items()}
        return {"saved": [place, entries]}


@pytest.fixture
def take(tmp_path):
    """What is said when the far end on a machine says something."""

    def take_(store, message):
        said = []
        task = there.FarTask("0" * 16, ("true",), "runs", 3.0)
        tunnel = here.Tunnel(store, "dualtune", task, tmp_path, None, say=lambda word, line: said.append(word))
        tunnel._take({"attached": "/runs"})
        tunnel._take(message)
        return said

    return take_


def test_what_is_saved_again_takes_the_place_of_what_was_and_the_same_is_not_fetched(take, tmp_path):
    store = Store(weights=b"first", more=b"x")
    assert take(store, store.message()) == ["saved"] and take(store, store.message()) == []
    assert store.fetched == ["/runs/a/adapter/weights", "/runs/a/adapter/more"]
    store.files = {"weights": b"second"}
    assert take(store, store.message()) == ["saved"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "a/adapter").iterdir()} == {"weights": b"second"}


def test_what_is_not_what_was_announced_is_not_brought_home(take, tmp_path):
    store = Store(weights=b"first")
    message = store.message()
    store.files["weights"] = b"other"
    assert take(store, message) == ["not fetched"]
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("message", [{"saved": 1}, {"saved": ["a", {"x": {}}]}, {"saved": ["a", ["x"]]}], ids=str)
def test_what_is_not_understood_is_one_error(take, message):
    with pytest.raises(FormatError, match="said what this version does not know"):
        take(Store(), message)


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", "a\\b", "a\nb", "x" * 256])
def test_a_name_of_the_other_machine_is_only_a_name(name):
    with pytest.raises(FormatError, match="which is not fetched"):
        here.check_names(["runs", name])


def test_only_what_is_whole_and_new_is_announced(tmp_path):
    files = {"adapter.safetensors": b"a", "MANIFEST.json": b"{}"}
    write_directory(tmp_path / "a/checkpoints/step-00000001", files)
    write_directory(tmp_path / "a/checkpoints/.step-00000002.tmp-1", files)
    (tmp_path / "a/metrics.jsonl").write_text("{}")
    (tmp_path / "a/config.yaml").write_text("{}")
    first = dict(there.saved(tmp_path, {}))
    assert {place: [*unit["files"]] for place, unit in first.items()} == {
        "a/": ["config.yaml"], "a/checkpoints/step-00000001": ["MANIFEST.json", "adapter.safetensors"],
    }  # fmt: skip
    known = {place: unit["stamps"] for place, unit in first.items()}
    assert dict(there.saved(tmp_path, known)) == {}
    (tmp_path / "a/config.yaml").write_text("{ }")
    assert [*dict(there.saved(tmp_path, known))] == ["a/"]


def test_the_far_end_begins_nothing_again(tmp_path, monkeypatch, capsys):
    """After a restart of its machine, say: a new command over an old connection is not what was asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    there.attach(there.FarTask("0" * 16, ("false",), "runs", 3.0, is_new=False))
    assert capsys.readouterr().out == f'\n{there.MARK}{{"ended": {there.LOST}}}\n' and not list(tmp_path.iterdir())


def test_a_command_does_not_outlive_the_files_of_its_keeper(tmp_path):
    home = tmp_path / ("0" * 16)
    home.mkdir()
    program = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    task = there.FarTask("0" * 16, (sys.executable, "-c", program), "runs", 600.0)
    (home / "command.json").write_text(task.text)
    (home / "lease").write_text("0")
    with subprocess.Popen([sys.executable, "-m", "dualtune.use.tunnel.there", str(home)], stderr=subprocess.PIPE):
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        shutil.rmtree(home)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_the_far_end_takes_no_other_task():
    task = there.FarTask("0" * 16, ("true",), "runs", 3.0)
    assert there.FarTask.parse(task.text) == task
    for changes in ({"name": "../x"}, {"command": []}):
        with pytest.raises(ConfigError):
            there.FarTask.parse(json.dumps(json.loads(task.text) | changes))
