"""A process that hangs in native code, where no signal handler runs, still ends when it is asked to, and in order."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dualtune.base import interrupt
from dualtune.cli import export

LENGTH = 3_000_000  # characters, for hours
GRACE = "from dualtune.base import interrupt\ninterrupt.GRACE_S = 0.2\n"
# Bytes, but for runs of `a`, each of which is searched to its end from every place in it.
SLOW = {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": "a*b|."}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
]}  # fmt: skip


@pytest.fixture
def hung(tmp_path, tiny_softmax, write_rows):
    """Start a command whose tokenizer hangs on its data, and send it a signal when it does."""
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_softmax.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    table = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    (model / "tokenizer.json").write_text(json.dumps(table | {"pre_tokenizer": SLOW}), encoding="utf-8")
    data = write_rows([{"text": "hello"}, {"text": "a" * LENGTH}])

    def start(*arguments):
        config, mark = tmp_path / "config.yaml", tmp_path / "hangs"
        config.write_text(f"model: {{name: {model}}}\nadapter: {{targets: all-linear}}\n"
                          f"data: {{train: {data}, eval: 0}}\nrun: {{dir: {tmp_path / 'run'}}}\n")  # fmt: skip
        code = GRACE + (
            "import dualtune.data.tokens.tokenizer_files as files\n"
            "encode = files.Loaded.encode_batch\n"
            "def told(self, texts, **options):\n"
            f"    if sum(map(len, texts)) >= {LENGTH}: open({str(mark)!r}, 'x').close()\n"
            "    return encode(self, texts, **options)\n"
            "files.Loaded.encode_batch = told\n"
            f"import sys\nsys.argv = ['dualtune', *{[*map(str, arguments)]!r}]\n"
            "from dualtune.cli.main import main\nmain()"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, env=os.environ)  # fmt: skip
        try:
            while process.poll() is None and not mark.exists():
                time.sleep(0.05)
            time.sleep(0.3)
            process.terminate()
            _, err = process.communicate(timeout=1800)
        finally:
            process.kill()
        return process.returncode, err

    start.config, start.run = tmp_path / "config.yaml", tmp_path / "run"
    return start


def test_a_run_that_hangs_in_the_tokenizer_ends_and_leaves_nothing(hung):
    code, err = hung("train", hung.config, "--platform", "numpy")
    assert code == 75, err
    assert "Stopped by SIGTERM. Run the same command again to continue." in err and "Traceback" not in err
    assert not hung.run.exists()


def test_a_run_that_was_there_before_is_left_as_it_was(hung):
    hung.run.mkdir()
    (hung.run / "metrics.jsonl").write_text("")
    code, err = hung("train", hung.config, "--platform", "numpy")
    assert code == 75, err
    assert json.loads((hung.run / "lock").read_text())["state"] == "preempted"


def test_a_preview_that_hangs_ends(hung):
    code, err = hung("preview", hung.config)
    assert code == 75, err
    assert "Stopped by SIGTERM. Nothing is kept of it: the same command starts it again." in err


def test_an_export_that_is_stopped_says_that_it_begins_anew(monkeypatch, tmp_path):
    def stopped(directory):
        os.kill(os.getpid(), signal.SIGTERM)
        interrupt.poll()

    monkeypatch.setattr(export, "_run_of", stopped)
    with pytest.raises(interrupt.Abandoned):
        export.command.main([str(tmp_path), "--to", "hf"], standalone_mode=False)


PHASES = """
from dualtune.base import interrupt
import os, signal, sys, threading, time
interrupt.GRACE_S = {grace_s}
asked = []
def abandon():
    asked.append(True)
    return {answer}
with interrupt.handled(abandon=abandon):
    os.kill(os.getpid(), signal.SIGTERM)
    {wait}
    assert interrupt.requested()
assert asked == {asked} and threading.active_count() == 1 and signal.set_wakeup_fd(-1) == -1
sys.exit(3)
"""
NO_POLL = "while not asked: time.sleep(0.01)"


@pytest.mark.parametrize(("answer", "code"), [("False", 3), ("True", 75)])
def test_who_has_something_to_save_is_left_alone(python, answer, code):
    done = python("-c", PHASES.format(answer=answer, asked="[True]", grace_s=0.2, wait=NO_POLL))
    assert done.returncode == code, done.stderr


def test_who_answers_in_time_is_left_alone(python):
    done = python("-c", PHASES.format(answer="True", asked="[]", grace_s=600, wait="pass"))
    assert done.returncode == 3, done.stderr
