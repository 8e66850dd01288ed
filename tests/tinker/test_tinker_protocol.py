"""The protocol of `serve --train`, without the client's package: turns, results, sessions, samplers and errors."""

import io
import tarfile
import threading
import time

import numpy as np
import pytest

from dualtune.use.tinker import service as service_module
from dualtune.use.tinker import turns as turns_module
from dualtune.use.tinker.messages import Cancelled


def losses(lengths=(4,), loss="cross_entropy", weight=1.0):
    """The data of a request: texts of some lengths."""
    data = [
        {
            "model_input": {"chunks": [{"tokens": [65 + i % 26 for i in range(length)], "type": "encoded_text"}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [66 + i % 26 for i in range(length)], "dtype": "int64", "shape": [length]},
                "weights": {"data": [weight] * length, "dtype": "float32"},
            },
        }
        for length in lengths
    ]
    return {"data": data, "loss_fn": loss}


def prompt(*tokens):
    return {"chunks": [{"tokens": list(tokens), "type": "encoded_text"}]}


def send_losses(client, run, seq, lengths=(4,), **more):
    return client.send("forward_backward", model_id=run, seq_id=seq, forward_backward_input=losses(lengths, **more))


def send_step(client, run, seq, **adam):
    return client.send("optim_step", model_id=run, seq_id=seq, adam_params={"learning_rate": 0.1, **adam})


def done_by(client, run):
    return [what for name, what in client.host.done if name == run]


# --- turns -----------------------------------------------------------------------------------------------------------
def test_requests_to_a_run_are_executed_in_the_order_of_their_numbers(shared):
    run = shared.run()
    asked = [send_step(shared, run, 4, learning_rate=0.4), send_losses(shared, run, 3, (3,)),
             send_losses(shared, run, 2, (2,))]  # fmt: skip
    time.sleep(0.05)
    assert done_by(shared, run) == []
    asked.append(send_losses(shared, run, 1, (1, 1)))
    for one in asked:
        assert "error" not in shared.result(one)
    assert done_by(shared, run) == [[1, 1], [2], [3], 0.4]


def test_parts_of_a_call_add_up(shared):
    """The update after two parts is that after the whole."""
    whole, parts = shared.run(seed=5), shared.run(seed=5)
    send_losses(shared, whole, 1, (4, 6))
    send_losses(shared, parts, 1, (4,))
    send_losses(shared, parts, 2, (6,))
    norms = [
        shared.result(send_step(shared, run, seq))["metrics"]["grad_norm:mean"] for run, seq in ((whole, 2), (parts, 3))
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 0
    after = [shared.result(send_losses(shared, run, seq, (4, 6)))["metrics"] for run, seq in ((whole, 3), (parts, 4))]
    assert after[0]["loss:sum"] == pytest.approx(after[1]["loss:sum"], rel=1e-6)


def test_a_request_that_is_sent_again_is_executed_once(shared):
    run = shared.run()
    first, again = send_losses(shared, run, 1), send_losses(shared, run, 1)
    assert first["request_id"] == again["request_id"]
    assert shared.result(first) == shared.result(again)
    assert shared.result(send_losses(shared, run, 1)) == shared.result(first)
    assert len(done_by(shared, run)) == 1


def test_a_request_that_is_sent_again_before_its_turn_has_one_result(shared):
    run = shared.run()
    early = [send_losses(shared, run, 2) for _ in range(2)]
    shared.goes_on.clear()
    time.sleep(2 * service_module.POLL_S)
    try:
        waiting = [send_losses(shared, run, 1, (3,)) for _ in range(2)]
    finally:
        shared.goes_on.set()
    assert all("error" not in shared.result(asked) for asked in early + waiting)
    assert done_by(shared, run) == [[3], [4]]


def test_a_request_without_a_number_comes_after_all_others(shared):
    run = shared.run()
    asked = shared.send("forward_backward", model_id=run, forward_backward_input=losses((2,)))
    assert "error" not in shared.result(asked) and done_by(shared, run) == [[2]]
    assert "error" not in shared.result(send_losses(shared, run, 2, (3,)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}),
        ("optim_step", {"adam_params": {"learning_rate": 0.1, "beta1": 1.0}}),
        ("optim_step", {"adam_params": {"learning_rate": 0.1, "momentum": 0.9}}),
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}),
        ("forward_backward", {"forward_backward_input": losses(loss="no_such_loss")}),
        ("forward_backward", {"forward_backward_input": {"data": [], "loss_fn": "cross_entropy"}}),
        ("forward_backward", {"forward_backward_input": losses((0,))}),
        ("forward_backward", {"forward_backward_input": losses((100_000,))}),
        ("save_weights", {"path": "../../outside"}),
        ("save_weights", {"path": "a", "ttl_seconds": 5}),
        ("save_weights_for_sampler", {"path": ".hidden"}),
        ("save_weights_for_sampler", {}),
        ("load_weights", {"path": "tinker://x/weights/none", "optimizer": True}),
    ],
)  # fmt: skip
def test_a_wrong_request_fails_in_its_turn_and_the_next_one_is_executed(shared, path, body):
    """The client counts it: a next request that waited for it would wait for ever."""
    run = shared.run()
    next_one = send_losses(shared, run, 2)
    failed = shared.result(shared.send(path, model_id=run, seq_id=1, **body))
    assert failed["category"] == "user" and failed["error"]
    assert "error" not in shared.result(next_one) and len(done_by(shared, run)) >= 1


def test_a_request_that_never_comes_does_not_keep_the_next_ones_waiting_for_ever(train_server, monkeypatch):
    monkeypatch.setattr(turns_module, "GAP_S", 0.0)
    monkeypatch.setattr(service_module, "CARE_S", 0.0)
    with train_server() as client:
        run = client.run()
        late = client.result(send_losses(client, run, 3))
        assert late["category"] == "server" and "request 1 " in late["error"]
        assert "error" not in client.result(send_losses(client, run, 4))


# --- results ---------------------------------------------------------------------------------------------------------
def test_a_result_that_takes_long_is_asked_for_again(shared, monkeypatch):
    monkeypatch.setattr(service_module, "WAIT_S", 0.05)
    run = shared.run()
    shared.goes_on.clear()
    time.sleep(2 * service_module.POLL_S)
    try:
        asked = send_losses(shared, run, 1)
        status, table = shared.post("retrieve_future", {"request_id": asked["request_id"]})
        assert status == 408 and table["type"] == "try_again" and table["queue_state"] == "active"
    finally:
        shared.goes_on.set()
    assert "error" not in shared.result(asked)


def test_results_expire_after_they_were_sent(train_server, monkeypatch):
    with train_server() as client:
        run = client.run()
        asked = send_losses(client, run, 1)
        client.result(asked)
        monkeypatch.setattr("dualtune.use.tinker.futures.KEPT_S", -1.0)
        client.result(asked)
        client.service.futures.expire()
        assert client.post("retrieve_future", {"request_id": asked["request_id"]})[0] == 404
        again = client.result(send_losses(client, run, 1))
        assert again["category"] == "server" and len(done_by(client, run)) == 1


def test_ends_of_samples_come_in_one_call_and_are_dropped_when_the_client_has_them(shared):
    session = shared.session()
    sampler = shared.send(
        "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=shared.service.base
    )["sampling_session_id"]
    body = {"prompt": prompt(65, 66), "sampling_params": {"max_tokens": 3, "seed": 7}, "sampling_session_id": sampler}
    asked = [shared.send("asample", **body, seq_id=seq) for seq in range(3)]
    assert [one["sample_sequence_ids"] for one in asked] == [[f"{one['request_id']}:0"] for one in asked]
    for one in asked:
        shared.result(one)
    target = {"target": {"sampling_session_id": sampler}}
    ends = shared.send("retrieve_futures", **target)
    assert {end["request_id"] for end in ends["completions"]} == {one["request_id"] for one in asked}
    assert {end["state"] for end in ends["completions"]} == {"finished"}
    seen = shared.send(
        "retrieve_futures", **target, prev_cursor=ends["cursor"], timeout=0.0,
        retrieved_request_ids=[asked[0]["request_id"]],
    )  # fmt: skip
    assert seen == {"completions": [], "cursor": ends["cursor"]}
    assert [shared.post("retrieve_future", {"request_id": one["request_id"]})[0] for one in asked] == [404, 200, 200]
    clone = shared.send("join_sampling_session", sampling_session_id=sampler)["client_counter"]
    other = shared.send("asample", **body, seq_id=clone * 1_000_000_000)
    shared.result(other)
    ends = shared.send("retrieve_futures", target={"sampling_session_id": sampler, "cloned_sampler_id": clone})[
        "completions"
    ]
    assert [end["request_id"] for end in ends] == [other["request_id"]]


# --- samples ---------------------------------------------------------------------------------------------------------
def sampler_of(client, session, number=0, **source):
    return client.send("create_sampling_session", session_id=session, sampling_session_seq_id=number, **source)[
        "sampling_session_id"
    ]


def test_samples_that_wait_are_one_batch_and_one_that_is_cancelled_is_not_in_it(shared):
    session, run = shared.session(), shared.run()
    sampler = sampler_of(shared, session, base_model=shared.service.base)
    shared.goes_on.clear()
    time.sleep(2 * service_module.POLL_S)
    first = send_losses(shared, run, 1)
    asked = [
        shared.send("asample", prompt=prompt(65), num_samples=n, sampling_params={"max_tokens": 2, "seed": 1},
                    sampling_session_id=sampler, seq_id=n)
        for n in (1, 2, 3)
    ]  # fmt: skip
    assert shared.post("cancel_future", {"request_id": asked[1]["request_id"]})[0] == 204
    before = len(shared.host.done)
    shared.goes_on.set()
    shared.result(first)
    results = [shared.result(one) for one in asked]
    assert [len(result.get("sequences", ())) for result in results] == [1, 0, 3]
    assert "cancelled" in results[1]["error"]
    assert ("sample", [1, 3]) in shared.host.done[before:]


def test_what_is_computed_hears_that_it_is_cancelled(shared, monkeypatch):
    def wait(run, data, loss, config, is_cancelled):
        while not is_cancelled():
            time.sleep(0.01)
        raise Cancelled

    run = shared.run()
    monkeypatch.setattr(shared.host, "forward_backward", wait)
    asked = send_losses(shared, run, 1)
    time.sleep(2 * service_module.POLL_S)
    assert shared.post("cancel_future", {"request_id": asked["request_id"]})[0] == 204
    assert shared.result(asked) == {"error": "the request was cancelled", "category": "user"}


def test_the_same_seed_draws_the_same_tokens_and_the_prompt_is_scored(shared):
    sampler = sampler_of(shared, shared.session(), base_model=shared.service.base)

    def drawn(seq, **params):
        return shared.result(
            shared.send("asample", prompt=prompt(65, 66, 67), num_samples=2, prompt_logprobs=True, seq_id=seq,
                        sampling_session_id=sampler, sampling_params={"max_tokens": 4, **params})
        )  # fmt: skip

    one, two, other = drawn(0, seed=3), drawn(1, seed=3), drawn(2, seed=4)
    assert one == two and one["sequences"] != other["sequences"]
    assert one["prompt_logprobs"][0] is None and len(one["prompt_logprobs"]) == 3
    for sequence in one["sequences"]:
        assert len(sequence["tokens"]) == len(sequence["logprobs"]) <= 4 and max(sequence["logprobs"]) <= 0
    last = shared.result(
        shared.send("asample", prompt=prompt(65, 66, 67), prompt_logprobs=True, prompt_logprobs_last_n=1, seq_id=9,
                    sampling_session_id=sampler, sampling_params={"max_tokens": 1})
    )  # fmt: skip
    assert last["prompt_logprobs"] == [None, None, one["prompt_logprobs"][2]]


def test_a_snapshot_keeps_its_weights_and_one_in_flight_has_the_newest(shared):
    session = shared.session()
    run = shared.run(session)

    def save(seq, number, kind):
        return shared.result(
            shared.send("save_weights_for_sampler", model_id=run, seq_id=seq, sampling_session_seq_id=number, kind=kind)
        )["sampling_session_id"]

    def score(sampler, seq):
        asked = shared.send("asample", prompt=prompt(65, 66, 67, 68), prompt_logprobs=True, seq_id=seq,
                            sampling_session_id=sampler, sampling_params={"max_tokens": 1})  # fmt: skip
        return shared.result(asked)["prompt_logprobs"][1:]

    snapshot, flying = save(1, 0, "snapshot"), save(2, 1, "inflight")
    before = score(snapshot, 0)
    assert score(flying, 0) == before
    send_losses(shared, run, 3)
    send_step(shared, run, 4, learning_rate=1.0)
    newer = save(5, 2, "inflight")
    assert score(snapshot, 1) == before
    assert score(flying, 1) == score(newer, 0) != before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 100_000}, "num_samples"), ({"num_samples": 0}, "num_samples"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"max_tokens": 33}}, "--max-tokens"), ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"temperature": -1}}, "temperature"), ({"prompt": prompt()}, "prompt"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "chunks"),
        ({"prompt": prompt(*[65] * 100_000)}, "prompt"), ({"prompt": prompt(-1)}, "prompt"),
        ({"topk_prompt_logprobs": 1000}, "topk"), ({"record_stability_info": True}, "record_stability_info"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"), ({"target_prompt_logprobs": {"data": [1]}}, "target"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs"), ({"sampling_session_id": "x:sample:0"}, "sampling_session"),
        ({"sampling_session_id": None, "base_model": "another"}, "base_model"),
        ({"sampling_session_id": None}, "base_model"), ({"seq_id": None}, "seq_id"),
    ],
)  # fmt: skip
def test_a_request_for_samples_that_cannot_be_served_says_which_key(shared, change, words):
    sampler = sampler_of(shared, shared.session(), base_model=shared.service.base)
    body = {"prompt": prompt(65), "sampling_params": {"max_tokens": 1}, "sampling_session_id": sampler, "seq_id": 0}
    status, table = shared.post("asample", {key: value for key, value in (body | change).items() if value is not None})
    assert status in (400, 404) and words in table["detail"], table


# --- checkpoints -----------------------------------------------------------------------------------------------------
def test_a_run_goes_on_from_its_state_as_if_nothing_had_been(shared):
    session = shared.session()
    run = shared.run(session)
    send_losses(shared, run, 1)
    send_step(shared, run, 2)
    path = shared.result(shared.send("save_weights", model_id=run, seq_id=3, path="here"))["path"]
    assert path == f"tinker://{run}/weights/here"
    asked = shared.send("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)
    other = shared.result(asked)["model_id"]
    for number, seq in ((run, 4), (other, 1)):
        send_losses(shared, number, seq)
        send_step(shared, number, seq + 1)
    metrics = [shared.result(send_losses(shared, name, seq))["metrics"] for name, seq in ((run, 6), (other, 3))]
    assert metrics[0] == metrics[1]


def test_checkpoints_are_listed_described_downloaded_and_deleted(shared):
    run = shared.run(rank=3)
    for seq, kind, more in ((1, "save_weights", {"user_metadata": {"a": "b"}, "ttl_seconds": 4000}),
                            (2, "save_weights_for_sampler", {})):  # fmt: skip
        assert "path" in shared.result(shared.send(kind, model_id=run, seq_id=seq, path="one", **more))
    found = shared.get(f"training_runs/{run}/checkpoints")[1]["checkpoints"]
    assert {(c["checkpoint_id"], c["checkpoint_type"]) for c in found} == {
        ("weights/one", "training"), ("sampler_weights/one", "sampler")
    }  # fmt: skip
    state = next(c for c in found if c["checkpoint_type"] == "training")
    assert state["user_metadata"] == {"a": "b"} and state["expires_at"] and state["size_bytes"] > 0
    assert shared.post("weights_info", {"tinker_path": f"tinker://{run}/weights/none"})[0] == 404
    info = shared.send("weights_info", tinker_path=f"tinker://{run}/weights/one")
    assert info["lora_rank"] == 3 and info["base_model"] == shared.service.base
    status, data = shared.get(f"training_runs/{run}/checkpoints/sampler_weights/one/archive")
    assert status == 200
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {*archive.getnames()}
    assert shared.request("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/one")[0] == 204
    assert shared.request("DELETE", f"/api/v1/training_runs/{run}/checkpoints/weights/one")[0] == 404
    left = shared.get(f"training_runs/{run}/checkpoints")[1]["checkpoints"]
    assert [c["checkpoint_id"] for c in left] == ["sampler_weights/one"]
    table = shared.get(f"training_runs/{run}")[1]
    assert (
        table["last_checkpoint"] is None
        and table["last_sampler_checkpoint"]["checkpoint_id"] == left[0]["checkpoint_id"]
    )


def test_a_checkpoint_whose_time_is_over_is_deleted(shared):
    run = shared.run()
    path = shared.result(shared.send("save_weights", model_id=run, seq_id=1, path="short"))["path"]
    url = f"/api/v1/training_runs/{run}/checkpoints/weights/short/ttl"
    headers = {"Content-Type": "application/json"}
    assert shared.request("PUT", url, b'{"ttl_seconds": 3600}', headers)[0] == 204
    assert shared.get(f"training_runs/{run}/checkpoints")[1]["checkpoints"][0]["expires_at"]
    shared.service.ledger.set_ttl(path, -1.0)
    until(lambda: shared.get(f"training_runs/{run}/checkpoints")[1]["checkpoints"] == [])


def until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it has not happened in a minute")


def test_a_server_that_starts_again_finds_its_runs(train_server, tmp_path):
    with train_server(runs=tmp_path) as client:
        session = client.session()
        run = client.run(session)
        send_losses(client, run, 1)
        send_step(client, run, 2)
        path = client.result(
            client.send("save_weights", model_id=run, seq_id=3, path="kept", user_metadata={"x": "y"})
        )["path"]
        loss = client.result(send_losses(client, run, 4))["metrics"]
        send_losses(client, run, 5)
        client.result(send_step(client, run, 6))
    with train_server(runs=tmp_path) as client:
        assert client.get("training_runs")[1]["training_runs"][0]["training_run_id"] == run
        checkpoints = client.get(f"training_runs/{run}/checkpoints")[1]["checkpoints"]
        assert {c["checkpoint_id"] for c in checkpoints} == {"weights/kept", f"weights/{service_module.LAST}"}
        assert next(c for c in checkpoints if c["checkpoint_id"] == "weights/kept")["user_metadata"] == {"x": "y"}
        assert client.post("session_heartbeat", {"session_id": session})[0] == 410
        status, table = client.post("optim_step", {"model_id": run, "seq_id": 5, "adam_params": {}})
        assert status == 404 and "checkpoint" in table["detail"]
        asked = client.send("load_weights", session_id=client.session(), model_seq_id=0, path=path, optimizer=True)
        assert client.result(send_losses(client, client.result(asked)["model_id"], 1))["metrics"] == loss


# --- sessions --------------------------------------------------------------------------------------------------------
def test_a_session_whose_client_is_gone_is_saved_and_freed(train_server, monkeypatch):
    said = []
    with train_server(say=said.append) as client:
        run = client.run()
        send_losses(client, run, 1)
        client.result(send_step(client, run, 2))
        waiting = send_losses(client, run, 9)
        monkeypatch.setattr(client.service.sessions, "_timeout_s", -1.0)
        until(lambda: any(f"tinker://{run}/weights/{service_module.LAST}" in text for text in said))
        assert "not heard from" in client.result(waiting)["error"]
        until(lambda: run not in client.host._runs)
        assert client.post("session_heartbeat", {"session_id": run.split(":")[0]})[0] == 410
        checkpoints = client.get(f"training_runs/{run}/checkpoints")[1]["checkpoints"]
        assert [c["checkpoint_id"] for c in checkpoints] == [f"weights/{service_module.LAST}"]


def test_a_session_that_is_finished_frees_its_runs(shared):
    run = shared.run()
    session = run.split(":")[0]
    assert session in shared.get("sessions?limit=1000")[1]["sessions"]
    assert shared.get(f"sessions/{session}")[1]["training_run_ids"] == [run]
    assert shared.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})[0] == 204
    assert shared.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})[0] == 204
    until(lambda: run not in shared.host._runs)
    assert session not in shared.get("sessions?limit=1000")[1]["sessions"]
    assert shared.post("optim_step", {"model_id": run, "adam_params": {}})[0] == 404


def test_a_session_that_ends_while_its_run_is_made_leaves_nothing(shared):
    session = shared.session()
    shared.goes_on.clear()
    time.sleep(2 * service_module.POLL_S)
    try:
        asked = shared.send(
            "create_model", session_id=session, model_seq_id=0, base_model=shared.service.base, lora_config={"rank": 1}
        )
        shared.post(f"sessions/{session}/finish", {"reason": {"type": "errored"}})
    finally:
        shared.goes_on.set()
    assert "has ended the session" in shared.result(asked)["error"]
    run = f"{session}:train:0"
    until(lambda: run not in shared.host._runs and run not in shared.service.turns.runs())


def test_an_error_of_the_server_itself_is_told(shared, monkeypatch):
    monkeypatch.setattr(service_module, "list_runs", lambda directory: 1 / 0)
    status, table = shared.get("training_runs")
    assert status == 500 and "ZeroDivisionError" in table["detail"]


def test_a_run_that_is_unloaded_is_gone_and_its_checkpoints_stay(shared):
    run = shared.run()
    shared.result(shared.send("save_weights", model_id=run, seq_id=1, path="one"))
    assert shared.result(shared.send("unload_model", model_id=run))["model_id"] == run
    assert shared.post("optim_step", {"model_id": run, "adam_params": {}})[0] == 404
    assert len(shared.get(f"training_runs/{run}/checkpoints")[1]["checkpoints"]) == 1


def test_a_stop_refuses_what_waits_and_saves_what_no_checkpoint_has(train_server):
    said = []
    with train_server(say=said.append) as client:
        saved, unsaved = client.run(number=0), client.run(number=0)
        for run in (saved, unsaved):
            send_losses(client, run, 1)
            client.result(send_step(client, run, 2))
        client.result(client.send("save_weights", model_id=saved, seq_id=3, path="mine"))
        early = client.service.futures.get(send_losses(client, unsaved, 9)["request_id"])
    assert early.outcome.message == "the server is stopping"
    assert said == [f"{unsaved}: saved as tinker://{unsaved}/weights/{service_module.LAST}"]


# --- what is there ---------------------------------------------------------------------------------------------------
def test_what_is_there_is_told(shared, wording):
    assert shared.get("healthz") == (200, {"status": "ok"})
    model = shared.get("get_server_capabilities")[1]["supported_models"][0]
    assert model["model_name"] == shared.service.base and model["trainable"] and model["sampleable"]
    run = shared.run(rank=2)
    info = shared.send("get_info", model_id=run)
    assert info["lora_rank"] == 2 and info["model_data"]["model_name"] == shared.service.base
    status, page = shared.request("GET", "/")
    assert status == 200 and run in page.decode() and f"http://127.0.0.1:{shared.port}" in page.decode()
    status, table = shared.post("copy_weights", {})
    assert status == 404
    wording(table["detail"])


def test_64_clients_lose_no_answer(shared):
    """Each has a run of its own; every request of each has its result, in its order."""
    counts = []

    def train():
        run = shared.run(rank=1)
        asked = [send_step(shared, run, 2), send_losses(shared, run, 1, (3,)), send_losses(shared, run, 3, (5,))]
        counts.append(sum("error" not in shared.result(one) for one in asked))
        assert [what for name, what in shared.host.done if name == run] == [[3], 0.1, [5]]
        counts.append(0)

    threads = [threading.Thread(target=train) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 128 and sum(counts) == 3 * 64


def test_values_of_losses_are_those_of_the_host(shared):
    run = shared.run()
    result = shared.result(shared.send("forward", model_id=run, seq_id=1, forward_input=losses((3, 5), weight=2.0)))
    logprobs = [np.array(output["logprobs"]["data"]) for output in result["loss_fn_outputs"]]
    assert [len(values) for values in logprobs] == [3, 5]
    assert result["metrics"]["loss:sum"] == pytest.approx(-2.0 * sum(values.sum() for values in logprobs), rel=1e-5)
    assert done_by(shared, run) == []
