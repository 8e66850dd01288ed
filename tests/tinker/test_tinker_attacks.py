"""The server of `serve --train` among bad, slow and many clients: they get a reason, others their answers."""

import json
import os
import random
import socket
import struct
import threading
import time

import numpy as np
import pytest

from dualtune.base import http_server
from dualtune.base.errors import ConfigError
from dualtune.use.tinker import ledger
from dualtune.use.tinker import requests as requests_module

DATA = {
    "data": [{"model_input": {"chunks": [{"tokens": [65, 66], "type": "encoded_text"}]},
              "loss_fn_inputs": {"target_tokens": {"data": [66, 67], "dtype": "int64"},
                                 "weights": {"data": [1.0, 1.0], "dtype": "float32"}}}],
    "loss_fn": "cross_entropy",
}  # fmt: skip


def is_served(client):
    return client.get("healthz") == (200, {"status": "ok"})


# --- who may ask -----------------------------------------------------------------------------------------------------
def test_foreign_hosts_keys_types_and_paths_are_refused(train_server):
    with train_server(key="tml-secret") as client:
        assert is_served(client)
        assert client.request("GET", "/", headers={"Host": "evil.example"})[0] == 403
        assert client.request("GET", "/api/v1/healthz", headers={"X-API-Key": "tml-other"})[0] == 401
        assert client.request("GET", "/", headers={"X-API-Key": ""})[0] == 401
        assert client.post("create_session", b"{}", {"Content-Type": "text/plain"})[0] == 415
        assert client.get("no_such_path")[0] == 404 and client.request("GET", "/api/v2/healthz")[0] == 404
        status, body = client.request("PATCH", "/api/v1/sessions")
        allowed = "PATCH: is not a method of this server, which answers DELETE, GET, POST, PUT"
        assert (status, body["detail"]) == (501, allowed)
        assert client.request("GET", "/api/v1/healthz", headers={"Authorization": "Bearer tml-secret"})[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"", b"411"), (b"Content-Length: -1\r\n", b"411"),
        (b"Content-Length: %d\r\n" % (requests_module.MAX_BODY + 1), b"413"),
        (b"Content-Length: 9999999999999999999\r\n", b"413"), (b"Content-Length: 2\r\nContent-Length: 3\r\n", b"400"),
        (b"Transfer-Encoding: chunked\r\n", b"501"), (b"X: " + b"y" * 70_000 + b"\r\n", b"431"),
        (b"X: y\r\n" * 200, b"431"), (b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"411"),
    ],
)  # fmt: skip
def test_a_body_whose_size_is_wrong_is_not_read(shared, headers, status):
    with socket.create_connection(("127.0.0.1", shared.port), timeout=20) as connection:
        connection.sendall(b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
        assert connection.recv(4096).split(b" ", 2)[1] == status
    assert is_served(shared)


def test_a_slow_client_is_cut_off(shared, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(http_server, "monotonic", lambda: now[0])
    while shared.server._waiting_since:  # connections of the test before
        time.sleep(0.01)
    with socket.create_connection(("127.0.0.1", shared.port), timeout=20) as connection:
        connection.sendall(b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        while not shared.server._waiting_since:
            time.sleep(0.01)
        now[0] += http_server.REQUEST_S + 1
        assert connection.recv(1) == b""
    assert is_served(shared)


# --- bodies ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("create_session", b"[" * 100_000, "JSON"), ("create_session", b"\xff\xfe", "JSON"),
        ("create_session", {"tags": ["x"] * 1000}, "tags"), ("create_session", {"tags": [], "admin": True}, "admin"),
        ("create_session", {"tags": [], "project_id": "p"}, "project_id"),
        ("create_session", b'{"tags": [], "tags": ["x"]}', "tags"),
        ("create_session", b'{"user_metadata": {"a": "b", "c": "d", "a": "e"}}', "'a'"),
        ("create_session", {"user_metadata": {"a": [[[]]]}}, "user_metadata.a"),
        ("create_session", {"user_metadata": {"a": "x" * 1001}}, "user_metadata.a"),
        ("create_session", b'{"user_metadata": {"a": NaN}}', "user_metadata.a"),
        ("session_heartbeat", {"session_id": "../../etc"}, "session_id"),
        ("optim_step", {"model_id": "../..:train:0", "adam_params": {}}, "model_id"),
        ("optim_step", {"model_id": "a:train:0", "seq_id": -1, "adam_params": {}}, "seq_id"),
        ("optim_step", {"model_id": "a:train:0", "seq_id": 0, "adam_params": {}}, "seq_id"),
        ("optim_step", {"model_id": "a:train:0", "seq_id": 1 << 80, "adam_params": {}}, "seq_id"),
        ("weights_info", {"tinker_path": "tinker://a:train:0/weights/../../x"}, "tinker_path"),
        ("weights_info", {"tinker_path": "tinker:///etc/passwd/weights"}, "tinker_path"),
        ("weights_info", {"tinker_path": "tinker://a:train:0/weights/x\n"}, "tinker_path"),
        ("retrieve_future", {"request_id": "x" * 5000}, "request_id"),
        ("retrieve_futures", {"target": {"sampling_session_id": "x"}}, "sampling_session_id"),
    ],
)  # fmt: skip
def test_a_body_that_is_wrong_names_its_key(shared, path, body, words):
    status, table = shared.post(path, body)
    assert status == 400 and words in table["detail"] and len(table["detail"]) < 600
    assert is_served(shared)


def test_notes_that_could_not_be_read_again_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "MAX_FILE", 300)
    notes = ledger.Ledger(tmp_path)
    notes.note("a", metadata={"x": "y"})
    with pytest.raises(ConfigError, match="user_metadata"):
        notes.note("b", metadata={"x": "y" * 300})
    assert notes.metadata("b") is None and ledger.Ledger(tmp_path).metadata("a") == {"x": "y"}


@pytest.mark.parametrize(("rank", "seq"), [(1 << 40, 0), (513, 0), (0, 0), (-1, 0), (4, 1 << 70)])
def test_a_rank_beyond_all_measure_makes_no_run(shared, rank, seq):
    session = shared.session()
    body = {
        "session_id": session,
        "model_seq_id": seq,
        "base_model": shared.service.base,
        "lora_config": {"rank": rank},
    }
    assert shared.post("create_model", body)[0] == 400
    assert shared.get(f"sessions/{session}")[1]["training_run_ids"] == []


@pytest.mark.parametrize(
    "path",
    [
        "training_runs/%2e%2e%2f%2e%2e/checkpoints/weights/x/archive", "training_runs/..:train:0/checkpoints",
        "training_runs/a%2fb/checkpoints/weights/x/archive", "training_runs/a/checkpoints/weights/..%2f..%2fx/archive",
        "sessions/..", "samplers/%00", "training_runs/%ff", "checkpoints?limit=99999999999", "checkpoints?limit=-1",
        "training_runs?offset=x",
    ],
)  # fmt: skip
def test_a_path_that_leads_out_of_the_runs_leads_nowhere(shared, path):
    status, table = shared.get(path)
    assert status in (400, 404) and isinstance(table["detail"], str)
    assert shared.request("DELETE", f"/api/v1/{path.removesuffix('/archive')}")[0] in (400, 404)


def protobuf_body(shared, run, change):
    proto = requests_module.protobufs()
    message = proto.ForwardBackwardRequest(model_id=run, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([65, 66], np.int32).tobytes()
    for name, values in (("target_tokens", np.array([66, 67], np.int64)), ("weights", np.ones(2, np.float32))):
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype = proto.DTYPE_INT64 if values.dtype == np.int64 else proto.DTYPE_FLOAT32
        tensor.dense = values.tobytes()
        tensor.shape.append(2)
    change(proto, message, datum)
    return message.SerializeToString()


def sparse(proto, datum, shape, rows, columns):
    tensor = datum.loss_fn_inputs["weights"]
    tensor.ClearField("shape")
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.ones(len(columns), np.float32).tobytes()
    tensor.sparse_csr.crow_indices = np.array(rows, np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()


WRONG = {
    "odd bytes": lambda proto, m, d: setattr(d.model_input[0].encoded_text, "tokens", b"\0" * 7),
    "an image": lambda proto, m, d: d.model_input.add().image.MergeFrom(proto.ImageChunk(data=b"x", format="png")),
    "no data": lambda proto, m, d: m.ClearField("data"),
    "no tokens": lambda proto, m, d: d.ClearField("model_input"),
    "a type": lambda proto, m, d: setattr(d.loss_fn_inputs["weights"], "dtype", proto.DTYPE_BFLOAT16),
    "a shape": lambda proto, m, d: d.loss_fn_inputs["weights"].shape.append(1 << 62),
    "a huge sparse shape": lambda proto, m, d: sparse(proto, d, [1 << 40, 1 << 40], [0], []),
    "a negative sparse shape": lambda proto, m, d: sparse(proto, d, [-1, 2], [0], []),
    "a column outside": lambda proto, m, d: sparse(proto, d, [2, 2], [0, 1, 2], [0, 9]),
    "rows that fall": lambda proto, m, d: sparse(proto, d, [2, 2], [0, 3, 2], [0, 1]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_protobuf_that_is_wrong_fails_in_its_turn(shared, wrong):
    pytest.importorskip("tinker")
    run = shared.run()
    body = protobuf_body(shared, run, WRONG[wrong])
    status, table = shared.post("forward_backward", body, {"Content-Type": "application/x-protobuf"})
    assert status == 200
    failed = shared.result(table)
    assert failed["category"] == "user" and failed["error"]
    again = shared.send("forward_backward", model_id=run, seq_id=2, forward_backward_input=DATA)
    assert "error" not in shared.result(again)


def test_bytes_that_are_no_protobuf_are_refused(shared):
    pytest.importorskip("tinker")
    draw = random.Random(1)
    for _ in range(50):
        body = draw.randbytes(draw.randrange(200))
        status, table = shared.post("forward_backward", body, {"Content-Type": "application/x-protobuf"})
        assert status in (400, 404), (body, table)
    assert is_served(shared)


def test_a_compressed_body_may_not_hold_more_than_a_plain_one(shared, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    monkeypatch.setattr(requests_module, "MAX_BODY", 100_000)
    kinds = {"Content-Type": "application/json", "Content-Encoding": "zstd"}
    bomb = zstandard.ZstdCompressor().compress(b" " * 50_000_000)
    assert len(bomb) < 100_000 and shared.post("create_session", bomb, kinds)[0] == 413
    assert shared.post("create_session", b"no zstd", kinds)[0] == 400
    cut = zstandard.ZstdCompressor().compress(b'{"tags": []}')[:-3]
    assert shared.post("create_session", cut, kinds)[0] == 400
    assert shared.post("create_session", zstandard.ZstdCompressor().compress(b'{"tags": []}'), kinds)[0] == 200
    assert shared.post("create_session", b"{}", kinds | {"Content-Encoding": "br"})[0] == 415


# --- too much --------------------------------------------------------------------------------------------------------
def test_more_than_may_wait_are_told_to_come_again_but_for_the_one_that_others_wait_for(train_server):
    with train_server(max_waiting=4) as client:
        run = client.run()
        asked = [client.send("optim_step", model_id=run, seq_id=seq, adam_params={}) for seq in range(2, 6)]
        status, table = client.post("optim_step", {"model_id": run, "seq_id": 6, "adam_params": {}})
        assert status == 429 and "again" in table["detail"]
        first = client.send("forward_backward", model_id=run, seq_id=1, forward_backward_input=DATA)
        for one in (first, *asked):
            assert "error" not in client.result(one)
        assert client.post("optim_step", {"model_id": run, "seq_id": 6, "adam_params": {}})[0] == 200


def test_futures_that_are_cancelled_or_foreign_harm_nobody(shared):
    run = shared.run()
    asked = shared.send("forward_backward", model_id=run, seq_id=1, forward_backward_input=DATA)
    assert shared.post("cancel_future", {"request_id": "of nobody"})[0] == 204
    shared.result(asked)
    assert shared.post("cancel_future", {"request_id": asked["request_id"]})[0] == 204
    assert "error" not in shared.result(asked)
    assert shared.post("retrieve_future", {"request_id": f"{run}:99"})[0] == 404


SECONDS = float(os.environ.get("DUALTUNE_SOAK_SECONDS", "2"))


def test_64_clients_with_bad_manners_among_them_lose_no_answer(train_server):
    """Half of them train, a quarter samples, a quarter breaks connections, sends nonsense and asks twice."""
    problems, counts, ends = [], {"train": 0, "sample": 0, "bad": 0}, time.monotonic() + SECONDS

    def guarded(kind, work):
        def run(number):
            draw = random.Random(number)
            try:
                session = client.session()
                state = {"run": client.run(session, rank=1), "seq": 1} if kind != "sample" else {"seq": 0}
                if kind == "sample":
                    state["sampler"] = client.send(
                        "create_sampling_session", session_id=session, sampling_session_seq_id=0,
                        base_model=client.service.base,
                    )["sampling_session_id"]  # fmt: skip
                while time.monotonic() < ends:
                    counts[kind] += work(state, draw)
            except BaseException as error:  # noqa: BLE001  of a thread: it is raised by the test
                problems.append(f"{kind} {number}: {error!r}")

        return run

    def train(state, draw):
        seq, run = state["seq"], state["run"]
        asked = [
            client.send("optim_step", model_id=run, seq_id=seq + 1, adam_params={"learning_rate": 0.01}),
            client.send("forward_backward", model_id=run, seq_id=seq, forward_backward_input=DATA),
        ]
        results = [client.result(one) for one in asked]
        assert all("error" not in result for result in results), results
        state["seq"] += 2
        return 2

    def sample(state, draw):
        body = {"prompt": {"chunks": [{"tokens": [65]}]}, "sampling_params": {"max_tokens": 2},
                "sampling_session_id": state["sampler"], "num_samples": draw.randrange(1, 4)}  # fmt: skip
        state["seq"] += 1
        asked = client.send("asample", **body, seq_id=state["seq"])
        assert len(client.result(asked)["sequences"]) == body["num_samples"]
        return 1

    def bad(state, draw):
        with socket.create_connection(("127.0.0.1", client.port), timeout=20) as connection:
            connection.sendall(draw.choice([b"\0" * 10, b"GET / HT", b"POST /api/v1/asample HTTP/1.1\r\nContent-Len"]))
            if draw.random() < 0.5:  # reset, not closed
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert client.post("asample", draw.randbytes(20))[0] == 400
        once = client.send("forward_backward", model_id=state["run"], seq_id=1, forward_backward_input=DATA)
        assert json.dumps(client.result(once)) == state.setdefault("first", json.dumps(client.result(once)))
        return 1

    with train_server(max_waiting=10_000) as client:
        kinds = [("train", train)] * 32 + [("sample", sample)] * 16 + [("bad", bad)] * 16
        threads = [
            threading.Thread(target=guarded(kind, work), args=(number,)) for number, (kind, work) in enumerate(kinds)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == [] and min(counts.values()) > 0
        print(f"{counts} in {SECONDS:.0f} s")
