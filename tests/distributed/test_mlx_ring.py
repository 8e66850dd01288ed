"""MLX processes in a ring on this machine compute together what one computes alone."""

import json
import socket
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx")
from safetensors.numpy import load_file

from dualtune.engine.testing.tiny_models import write_tiny_llama
from dualtune.engine.testing.tolerances import RESUMED_LOSS

WORKER = Path(__file__).with_name("mlx_worker.py")


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("ring")
    rows = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(8)]
    (home / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return home


@pytest.fixture(scope="module")
def results(home, start_forked, tiny_llama):
    """{number of processes: [what each has]}."""
    model = write_tiny_llama(home / "model", num_hidden_layers=1, hidden_size=32, head_dim=8, intermediate_size=64)
    started = []
    for size in (1, 2):
        hosts = home / f"hosts-{size}.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]), encoding="utf-8")
        for rank in range(size):
            ring = {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} if size > 1 else {}
            said = home / f"{size}-{rank}.txt"
            started.append((start_forked(WORKER, model, tiny_llama, home, out=said, err=said, env=ring), said))
    for process, said in started:
        process.join(1800)
        assert process.exitcode == 0, said.read_text(encoding="utf-8")
    return {size: [dict(np.load(home / f"{size}-{rank}.npz")) for rank in range(size)] for size in (1, 2)}


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_gradient_of_two_is_that_of_one(results, layout):
    (alone,), together = results[1], results[2]
    assert all(part[f"{layout} share"] > 0 for part in together)
    assert sum(part[f"{layout} share"] for part in together) >= alone[f"{layout} share"]
    names = [name for name in alone if name.startswith(layout) and "lora_" in name]
    assert len(names) == 14
    for name in [*names, f"{layout} loss", f"{layout} norm"]:
        assert np.abs(alone[name]).max() > 1e-3
        np.testing.assert_allclose(together[0][name], alone[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_both_have_the_same_bits(results):
    first, second = results[2]
    for name in first:
        if not name.endswith("share"):
            assert np.array_equal(first[name], second[name]), name


def test_two_draw_and_learn_what_one_does(results, home):
    rollouts = {
        size: [json.loads(line) for line in (home / f"run-{size}" / "rollouts.jsonl").read_text().splitlines()]
        for size in results
    }
    assert len(rollouts[1]) == 2 * 3 * 2 and len({row["completion"] for row in rollouts[1]}) > 4
    assert [row["completion"] for row in rollouts[2]] == [row["completion"] for row in rollouts[1]]
    alone, together = (load_file(home / f"run-{size}" / "adapter" / "adapter_model.safetensors") for size in (1, 2))
    for name, tensor in alone.items():
        np.testing.assert_allclose(together[name], tensor, atol=RESUMED_LOSS, err_msg=name)
    assert max(np.abs(tensor).max() for name, tensor in alone.items() if "lora_B" in name) > 100 * RESUMED_LOSS
