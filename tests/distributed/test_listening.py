"""Processes on one machine meet where nobody else can reach them, and one that waits in vain says for what."""

import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("listening.py")
CONFIG = Path(__file__).parents[2] / "configs" / "rtx_16gb.yaml"


def anywhere(tmp_path) -> set[str]:
    """The addresses that are open to other machines, of all the processes."""
    found = {address for file in tmp_path.glob("*.json") for address in json.loads(file.read_text())}
    assert len([*tmp_path.glob("*.json")]) == 2
    return {address for address in found if address in ("::", "0.0.0.0")}


def test_processes_started_by_hand_listen_on_the_loopback_address(start, tmp_path):
    for process in start(2, tmp_path, file=SCRIPT).wait():
        assert process.code == 0, process.output
    assert anywhere(tmp_path) == set()


def test_processes_of_a_local_launch_listen_on_no_public_address(tmp_path, python):
    pytest.importorskip("torch")
    from dualtune.train.launch.torchrun import Torchrun

    command = Torchrun("dualtune_torch.torchrun", 2).command([sys.executable, str(SCRIPT), str(tmp_path)])
    result = python(*command[1:], env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert anywhere(tmp_path) == set()


def test_a_stale_world_size_is_named_and_not_waited_for_in_silence(start, tmp_path):
    """WORLD_SIZE=2 RANK=0 from a shell of yesterday: nobody else will come."""
    soon = "import dualtune_torch.distributed as ours\nours.PATIENCE_S = 0.1\n"  # long before the end of the wait
    stale = {0: f"os.environ['WORLD_SIZE'] = '2'\n{soon}"}
    (process,) = start(1, "train", CONFIG, "--platform", "cpu", env={"DUALTUNE_WAIT_S": "2"}, inject=stale).wait()
    said = "process 0 of 2 (RANK and WORLD_SIZE are set) waits for the others at 127.0.0.1"
    assert f"waiting     {said}" in process.output
    assert f"Error: {said}" in process.output and process.output.count("unset RANK WORLD_SIZE") == 2
    assert (process.code, "Traceback" in process.output) == (4, False)
