"""What a command shows while it works: real processes on a pseudo-terminal, and what a pipe gets."""

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from itertools import takewhile

import pytest

from dualtune.base.errors import DiskError
from dualtune.cli.screen import Phase, Phases, is_live, phases
from dualtune.train import result

NUMPY = ("--platform", "numpy")
MAIN = [sys.executable, "-m", "dualtune.cli.main"]
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture
def terminal():
    """Run `dualtune …` on a terminal of so many columns: its exit code, and every piece of a line that it ever drew."""

    def run(columns, *args, env=None, close_after=None):
        leader, follower = os.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment |= {"TERM": "xterm"} | (env or {})
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
        drawn = b""
        with subprocess.Popen([*MAIN, *map(str, args)], env=environment, **streams) as process:
            os.close(follower)
            with contextlib.suppress(OSError):  # EIO: the other side is closed
                while block := os.read(leader, 65536):
                    drawn += block
                    if close_after is not None and close_after in drawn:
                        break
            os.close(leader)
            code = process.wait(timeout=1800)
        lines = [ESCAPE.sub(b"", line).decode() for line in re.split(rb"[\r\n]+", drawn)]
        return code, [line for line in lines if line.strip()]

    return run


def order_of(lines, *wanted):
    """The first line that begins with each of these, by number; -1 for one that is not there."""
    return [next((number for number, line in enumerate(lines) if line.startswith(name)), -1) for name in wanted]


# --- on a terminal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 60])
def test_phases_come_in_order_in_lines_that_fit_and_break_no_word(terminal, config_file, dualtune_main, columns):
    config = config_file({"train.steps": 3, "run.log_every": 1})
    code, lines = terminal(columns, "train", config, *NUMPY)
    assert code == 0
    found = order_of(
        lines, "reading     the config", "platform    numpy", "checking    model and data", "tokenized   /",
        "model       ", "loading     the model", "importing   numpy", "imported    numpy in ",
        "loaded      the model in ", "engine      ", "evaluating", "eval        0  loss ", "step 1/3",
        "saving", "saved       the adapter in ", "adapter     /",
    )  # fmt: skip
    assert found == sorted(found), lines
    assert any(line.startswith("training") for line in lines)
    ours = [line for line in lines if not line.startswith("[")]  # remarks of libraries appear as they are
    assert [line for line in ours if len(line) >= columns and "/" not in line] == []
    assert sum(bool(re.match(r"step +\d/3  loss \d+\.\d{4}", line)) for line in ours) == 3
    piped = dualtune_main("train", config, *NUMPY, "--dry-run").stdout
    told = next(line for line in piped.splitlines() if line.startswith("steps "))
    printed = [line for line in ours if not line.startswith("checking ")]  # the live line, drawn again below each
    first, *rest = printed[next(i for i, line in enumerate(printed) if line.startswith("steps ")) :]
    assert " ".join([first, *takewhile(lambda line: line[0] == " ", rest)]).split() == told.split()


def test_the_first_line_comes_before_the_backend_is_imported(config_file):
    """An import may hold Python's lock for seconds, so the line must stand there before it begins."""
    program = (
        "import sys\n"
        "import dualtune.engine.choose as choose\n"
        "whole = choose.open_backend\n"
        "choose.open_backend = lambda choice: (print('THE IMPORT BEGINS'), whole(choice))[1]\n"
        f"sys.argv = ['dualtune', 'train', {str(config_file())!r}, '--platform', 'numpy']\n"
        "from dualtune.cli.main import main\nmain()\n"
    )
    code, lines = terminal_of_program(program)
    assert code == 0
    shown, begins = order_of(lines, "importing   numpy", "THE IMPORT BEGINS")
    assert shown < begins


def terminal_of_program(program):
    leader, follower = os.openpty()
    drawn = b""
    with subprocess.Popen([sys.executable, "-c", program], stdout=follower, env=os.environ | {"TERM": "xterm"}) as it:
        os.close(follower)
        with contextlib.suppress(OSError):
            while block := os.read(leader, 65536):
                drawn += block
        os.close(leader)
    return it.returncode, [ESCAPE.sub(b"", line).decode() for line in re.split(rb"[\r\n]+", drawn)]


def test_a_terminal_that_goes_away_ends_no_run(terminal, config_file, tmp_path):
    config = config_file({"train.steps": 6, "run.log_every": 1})
    code, _ = terminal(80, "train", config, *NUMPY, close_after=b"step ")
    assert code == 0
    assert (tmp_path / "runs" / "a" / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(("term", "live"), [("xterm", True), ("dumb", False)])
def test_a_line_is_live_where_it_can_be_written_over(monkeypatch, tmp_path, term, live):
    monkeypatch.setenv("TERM", term)
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as stream, (tmp_path / "file").open("w") as file:
        assert is_live(stream) == live
        assert not is_live(file)
    assert not is_live(stream)  # it is closed
    os.close(leader)


def test_json_stays_alone_on_standard_output_while_the_line_is_live(config_file, dualtune_main):
    """The live line of a command with --json is drawn on standard error."""
    assert dualtune_main("train", config_file(), *NUMPY).returncode == 0
    leader, follower = os.openpty()
    command = [*MAIN, "eval", str(config_file()), "--json", *NUMPY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=os.environ | {"TERM": "xterm"}) as it:
        os.close(follower)
        drawn = b""
        with contextlib.suppress(OSError):
            while block := os.read(leader, 65536):
                drawn += block
        out = it.stdout.read()
        os.close(leader)
    assert it.returncode == 0
    assert out.startswith(b"{\n") and out.endswith(b"}\n")
    assert b"importing" in drawn and b"loading" in drawn and b"evaluating" in drawn


# --- in a pipe -------------------------------------------------------------------------------------------------------


STAMP = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ  "


def test_a_pipe_gets_a_line_with_its_seconds_for_each_phase_and_whole_lines(dualtune_main, config_file):
    result = dualtune_main("train", config_file({"run.log_every": 2}), *NUMPY)
    stamp = STAMP
    for done in ("imported    numpy", "tokenized   .*/train.jsonl", "loaded      the model", "saved       the adapter"):
        assert len(re.findall(rf"^{stamp}{done} in \d+\.\d s$", result.stdout, re.M)) == 1, done
    said = rf"^{stamp}eval +\d  loss \d+\.\d{{4}} over \d+ target tokens in \d+\.\d s$"
    assert len(re.findall(said, result.stdout, re.M)) == 2
    steps = re.findall(rf"^{stamp}(step .*)$", result.stdout, re.M)
    assert [re.sub(r"\d[\d.,e+-]*", "0", line) for line in steps] == [
        "step        0/0  loss 0  lr 0  grad norm 0  0 tokens/s  peak 0 GiB  0 s left"
    ] * 2
    assert "\x1b" not in result.stdout and "━" not in result.stdout


def test_in_a_pipe_all_lines_but_the_result_have_the_time_and_the_log_has_them_too(
    dualtune_main, config_file, tmp_path, tiny_softmax
):  # fmt: skip
    run = tmp_path / "runs" / "a"
    lines = dualtune_main("train", config_file(), *NUMPY).stdout.splitlines()
    result = [f"report      {run / 'report.html'}", f"adapter     {run / 'adapter'}"]
    assert lines[-2:] == result and all(re.match(STAMP, line) for line in lines[:-2])
    said, log = map(heads, (lines, (run / "log.txt").read_text().splitlines()))
    phases = [["imported", "numpy"], ["loaded", "the"], ["saved", "the"]]
    assert [head for head in said[said.index(["model", str(tiny_softmax) + ","]) : -2] if head not in phases] == log[
        :-1
    ]
    assert log[-1] == ["adapter", str(run / "adapter")] and log[-2][0] == "verdict"


def heads(lines):
    """The first two words of each line after its time: the others may have another number of seconds."""
    return [re.sub(STAMP, "", line).split()[:2] for line in lines]


def test_after_the_last_samples_the_result_is_what_is_saved(dualtune_main, config_file):
    result = dualtune_main("train", config_file({"run.sample_prompts": ["1 plus 1?"]}), *NUMPY)
    assert re.search(r"Z  saved       the adapter in \d+\.\d s$", result.stdout, re.M)


def test_a_pipe_hears_what_is_done_after_half_a_minute_of_silence(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("dualtune.cli.screen.time.monotonic", lambda: clock[0])
    shown = Phases(err=False)
    shown.tell_if_silent()
    clock[0] += 60
    shown.tell_if_silent()  # nothing is done, so there is nothing to say
    assert capsys.readouterr().out == ""
    shown.begin("computing", "the fingerprint of the base model")
    shown.tell_if_silent()
    shown.begin("tokenizing", "data.jsonl")
    clock[0] += 29
    shown.update(0.25, 1)
    shown.tell_if_silent()
    assert capsys.readouterr().out == "computing   the fingerprint of the base model  0 s\n"
    clock[0] += 1
    shown.tell_if_silent()
    shown.tell_if_silent()  # once: the line itself ends the silence
    assert capsys.readouterr().out == "tokenizing  data.jsonl  25%  1 min 26 s left  30 s\n"
    clock[0] += 100
    shown.tell("step 3")
    shown.tell_if_silent()
    shown.finish("tokenized")
    assert capsys.readouterr().out == "step 3\ntokenized   data.jsonl in 2 min 10 s\n"


def test_a_pipe_hears_of_long_work_by_itself(python):
    """The thread that watches is there: also while a call does not return, and on standard error beside JSON."""
    program = """if True:
        import time
        from dualtune.cli import screen
        screen.MOST_SILENT_S = 0.0
        with screen.phases(err=True) as shown:
            before = shown._told
            shown.begin("evaluating")
            while shown._told == before:
                time.sleep(0.01)
    """
    assert python("-c", program).stderr.startswith("evaluating  ")


def test_the_fingerprints_are_named_while_they_are_computed(config_file, open_backend, monkeypatch):
    from dualtune.cli import progress
    from dualtune.config import load_config
    from dualtune.show.run import run

    config, backend = load_config(config_file()), open_backend("numpy")
    began = []
    monkeypatch.setattr(Phases, "begin", lambda self, doing, what="", since=None: began.append(f"{doing} {what}"))
    with phases(), progress.reading() as show, progress.progress_hook(config, backend) as hook:
        run(config, backend, [hook], show=show)
    base, result = "computing the fingerprint of the base model", "computing the fingerprints of the adapter"
    at_base, at_result = began.index(base), began.index(result)
    assert began[at_base + 1] == "checking model and data"
    assert began[at_result - 1] == "saving the adapter" and set(began[at_result + 1 :]) == {"saving the adapter"}


@pytest.mark.parametrize(("method", "result"), [("full", "the model"), ("dora", "the adapter")])
def test_what_is_saved_is_named_by_the_method(tmp_path, open_backend, capsys, method, result):
    """Whatever an engine counts: a model's constants are parameters that full fine-tuning does not train."""
    from dualtune.cli.progress import progress_hook
    from dualtune.config import load_config

    file = tmp_path / "config.yaml"
    adapter = f"adapter: {{method: {method}}}"
    file.write_text(f"{{model: {{name: m}}, {adapter}, data: {{train: a.jsonl}}, train: {{steps: 1}}}}")
    with progress_hook(load_config(file), open_backend("numpy")) as hook:
        hook._show_saving()
    assert re.search(rf"saved       {result} in ", capsys.readouterr().out)


def test_on_a_cpu_a_step_is_told_when_it_is_done(config_file, open_backend):
    """Not with the next one, which makes pairs of lines before each evaluation and each checkpoint."""
    from dualtune.config import load_config
    from dualtune.show.run import run
    from dualtune.train.hooks import Hook

    told = []

    class Order(Hook):
        def on_step(self, record):
            told.append(f"told {record.step}")

        def after_step(self, step):
            told.append(f"taken {step.step}")

    run(load_config(config_file({"train.steps": 3})), open_backend("numpy"), [Order()])
    assert told == [f"{what} {step}" for step in (1, 2, 3) for what in ("taken", "told")]


def test_a_run_that_fails_is_not_called_saved(dualtune_main, config_file, monkeypatch):
    def full(*_, **__):
        raise DiskError("no room")

    monkeypatch.setattr(result, "write_adapter", full)
    done = dualtune_main("train", config_file(), *NUMPY)
    assert (done.returncode, "saved " in done.stdout) == (5, False)


# --- the line itself -------------------------------------------------------------------------------------------------


def test_the_live_line_keeps_what_matters_most():
    fields = (("loss 1.2345",), ("1,234 tokens/s",))
    phase = Phase("training", "", began=0.0, done=12, total=30, ends=100.0, fields=fields)
    numbers = "12/30  1 min 00 s left  loss 1.2345  1,234 tokens/s  40 s"
    assert phase.line(40.0, 99) == f"training  {'━' * 12}{'╌' * 18}  {numbers}"
    assert phase.line(40.0, 59) == "training  ━━━━━╌╌╌╌╌╌╌  12/30  1 min 00 s left  loss 1.2345"
    assert phase.line(40.0, 30) == "training  ━━━━━╌╌╌╌╌╌╌╌  12/30"
    assert all(len(phase.line(40.0, width)) <= width for width in range(15, 130))


def test_a_guess_that_has_run_out_is_not_shown():
    phase = Phase("evaluating", "", began=0.0, done=1, total=4, ends=30.0)
    assert "10 s left" in phase.line(20.0, 80)
    assert "left" not in phase.line(31.0, 80)


def test_nothing_is_said_to_be_left_at_the_end():
    shown = Phases(err=False)
    shown.begin("evaluating")
    shown.update(0, 4)
    assert "left" not in shown.now.line(shown.now.began + 5, 80)  # nothing is known yet
    shown.update(4, 4)
    assert shown.now.ends is None


def test_phases_inside_others_are_the_same():
    with phases() as outer:
        with phases(err=True) as inner:
            assert inner is outer
        outer.begin("still here")
    with phases() as later:
        assert later is not outer


def test_standard_error_hears_no_phases_where_it_is_no_terminal(capsys):
    with phases(err=True) as shown:
        shown.begin("loading", "the model")
        shown.finish("loaded")
    assert capsys.readouterr() == ("", "")
