"""Values from the command line and the environment that no run can have: one line that names them, no traceback."""

import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.base.files import cache_dir, expanded
from dualtune.base.world import launched_number, wait_limit_s
from dualtune.cli import main as command_line
from dualtune.config import load_config
from dualtune.train.launch import supervise

NOBODY = "~no-such-user-here"


@pytest.mark.parametrize("text", ["abc", "-1", "1.5", "2 ", "x" * 10**5, "10000000000", "٣"])
@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"])
def test_what_a_launcher_sets_is_a_number_or_one_line(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(EnvironmentFault, match=f"^{name}: got ") as refusal:
        launched_number(name, 0)
    assert len(str(refusal.value)) < 400


def test_numbers_of_a_launcher_are_read(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    assert launched_number("RANK", None, below=6) == 5
    with pytest.raises(EnvironmentFault, match="from 0 to 1"):
        launched_number("RANK", None, below=2)
    monkeypatch.delenv("RANK")
    assert launched_number("RANK", 7) == 7
    with pytest.raises(EnvironmentFault, match=r"^RANK: got ''"):
        launched_number("RANK", None)


@pytest.mark.parametrize(
    ("rank", "size", "named"),
    [("0", "abc", "WORLD_SIZE"), ("x", "2", "RANK"), ("5", "2", "RANK"), ("", "2", "RANK")],
)
def test_torch_refuses_a_place_outside_of_its_world_instead_of_waiting(monkeypatch, rank, size, named):
    distributed = pytest.importorskip("dualtune_torch.distributed")
    for name, value in {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentFault, match=f"^{named}: got "):
        distributed.world.__wrapped__("cpu")


def test_restarts_ask_for_the_same_number(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(EnvironmentFault, match="WORLD_SIZE"):
        supervise._check_alone(1)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "0"])
def test_the_time_to_wait_is_a_time(monkeypatch, text):
    monkeypatch.setenv("DUALTUNE_WAIT_S", text)
    with pytest.raises(EnvironmentFault, match="DUALTUNE_WAIT_S"):
        wait_limit_s()


def test_a_user_who_does_not_exist_is_named(monkeypatch):
    with pytest.raises(ConfigError, match=NOBODY):
        expanded(f"{NOBODY}/x")
    monkeypatch.setenv("DUALTUNE_CACHE", f"{NOBODY}/x")
    with pytest.raises(ConfigError, match=NOBODY):
        cache_dir()


@pytest.mark.parametrize("key", ["run.dir", "model.name", "data.train", "data.eval", "adapter.init_from"])
@pytest.mark.parametrize("command", ["train", "check-config"])
def test_every_path_of_a_config_may_name_such_a_user(
    make_config, write_rows, qa_rows, dualtune_main, tmp_path, tiny_llama, command, key
):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{name: {tiny_llama}}}\ndata: {{train: {write_rows(qa_rows)}}}\nrun: {{dir: {tmp_path / 'r'}}}\n"
    )
    done = dualtune_main(command, config, "--set", f"{key}={NOBODY}/x.jsonl")
    assert done.returncode in (2, 3, 4) and NOBODY in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("value", ["1e300", "1e-300", "1e10"])
def test_the_scale_of_an_adapter_is_one_that_its_files_can_hold(value):
    base = {"model": {"name": "m"}, "data": {"train": "d"}, "run": {"dir": "r"}}
    with pytest.raises(ConfigError, match=r"adapter\.alpha"):
        load_config(base, [f"adapter.alpha={value}"])
    assert load_config(base, ["adapter.alpha=1e9"]).adapter.alpha == 1e9


def test_a_panic_of_a_library_in_rust_is_one_line(monkeypatch, capsys):
    panic = type("PanicException", (BaseException,), {})

    def fail(**_):
        raise panic("index out of bounds")

    monkeypatch.setattr(command_line, "cli", type("Cli", (), {"main": staticmethod(fail)}))
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    shown = capsys.readouterr().err
    assert stop.value.code == 6 and "index out of bounds" in shown and shown.count("\n") == 1
