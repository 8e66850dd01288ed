"""Every public method of the official client against this server: it returns a value, or a clear error.

Needs the package `tinker` (`make test-tinker`); everywhere else this file is skipped.
"""

import asyncio
import inspect
import itertools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")
types = tinker.types
RestClient, AdminClient = tinker.RestClient, tinker.AdminClient
pytestmark = pytest.mark.filterwarnings("ignore")


def datum(tokens=(65, 66, 67), weight=1.0):
    targets = [token + 1 for token in tokens]
    inputs = {"target_tokens": np.array(targets), "weights": np.full(len(tokens), weight, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def squared(data, logprobs):
    loss = sum((values**2).sum() for values in logprobs)
    return loss, {"squared": float(loss)}


def neg_logprob(logprobs, weights):
    return -(logprobs * weights).sum(), {}


@pytest.fixture(scope="module")
def c(train_server, monkeypatch_module):
    """Clients of a server, and what its methods are given."""
    monkeypatch_module.setenv("TINKER_TELEMETRY", "0")
    with train_server() as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        url = {"base_url": f"http://127.0.0.1:{server.port}", "api_key": "tml-local"}
        service = tinker.ServiceClient(**url)
        training = service.create_lora_training_client(server.service.base, rank=2, seed=1).result()
        training.forward_backward([datum()], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        state = training.save_state("state").result().path
        sampler = training.save_weights_for_sampler("sampler").result().path
        sampling = service.create_sampling_client(model_path=sampler).result()
        yield SimpleNamespace(
            server=server, base=server.service.base, ServiceClient=service, TrainingClient=training, state=state,
            sampler=sampler, SamplingClient=sampling, RestClient=RestClient(**url), AdminClient=AdminClient(**url),
            session=training.model_id.split(":")[0], url=url,
        )  # fmt: skip
        service.close("success").result()


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


PROMPT, PARAMS = types.ModelInput.from_ints([65, 66, 67]), types.SamplingParams(max_tokens=3, seed=1)
DAY = "2026-01-01T00:00:00Z"
NOT_SERVED = "is not served by dualtune"
NUMBERS = itertools.count()

# Each public method: what it is given, and what its value has, or the error that names why there is none.
METHODS = {
    "ServiceClient.get_console_url": lambda c: ((), str),
    "ServiceClient.get_server_capabilities": lambda c: ((), lambda v: v.supported_models[0].model_name == c.base),
    "ServiceClient.create_lora_training_client": lambda c: ((c.base, 2), lambda v: v.get_info().lora_rank == 2),
    "ServiceClient.copy_weights": lambda c: ((c.state,), "project"),  # the client itself asks for one
    "ServiceClient.create_training_client_from_state": lambda c: ((c.state,), lambda v: v.get_info().lora_rank == 2),
    "ServiceClient.create_training_client_from_state_with_optimizer": lambda c: (
        (c.state,), lambda v: v.model_id.startswith(c.session)
    ),
    "ServiceClient.create_sampling_client": lambda c: ((c.sampler,), lambda v: v.get_base_model() == c.base),
    "ServiceClient.create_custom_loss": lambda c: ((neg_logprob, {"logprobs": 1, "weights": 1}), lambda v: v.name),
    "ServiceClient.create_rest_client": lambda c: ((), lambda v: isinstance(v, RestClient)),
    "ServiceClient.close": None,  # the last of all, in the fixture
    "ServiceClient.get_telemetry": lambda c: ((), lambda v: v is None),
    "TrainingClient.get_console_url": lambda c: ((), str),
    "TrainingClient.forward": lambda c: (([datum()], "cross_entropy"), lambda v: v.metrics["loss:sum"] > 0),
    "TrainingClient.forward_backward": lambda c: (
        ([datum(), datum((70, 71))], "cross_entropy"),
        lambda v: [output["logprobs"].shape for output in v.loss_fn_outputs] == [[3], [2]],
    ),
    "TrainingClient.forward_backward_custom": lambda c: (
        ([datum()], squared), lambda v: v.metrics["squared"] == pytest.approx(v.metrics["loss:sum"])
    ),
    "TrainingClient.optim_step": lambda c: ((types.AdamParams(),), lambda v: v.metrics["grad_norm:mean"] >= 0),
    "TrainingClient.save_state": lambda c: (
        ("again", None, True), lambda v: v.path == f"tinker://{c.TrainingClient.model_id}/weights/again"
    ),
    "TrainingClient.load_state": lambda c: ((c.state,), lambda v: v.path == c.state),
    "TrainingClient.load_state_with_optimizer": lambda c: ((c.state,), lambda v: v.path == c.state),
    "TrainingClient.save_weights_for_sampler": lambda c: (
        (f"more{next(NUMBERS)}",), lambda v: "/sampler_weights/" in v.path
    ),
    "TrainingClient.save_weights_external": lambda c: (("external",), NOT_SERVED),
    "TrainingClient.get_info": lambda c: ((), lambda v: v.model_id == c.TrainingClient.model_id),
    "TrainingClient.get_tokenizer": lambda c: ((), lambda v: "AB" in v.decode(v.encode("AB"))),
    "TrainingClient.create_sampling_client": lambda c: ((c.sampler,), lambda v: v.get_base_model() == c.base),
    "TrainingClient.save_weights_and_get_sampling_client": lambda c: (
        (), lambda v: len(v.sample(PROMPT, 1, PARAMS).result().sequences) == 1
    ),
    "TrainingClient.get_telemetry": lambda c: ((), lambda v: v is None),
    "SamplingClient.create": lambda c: (
        (c.ServiceClient.holder,), {"base_model": c.base}, lambda v: v.get_base_model() == c.base
    ),
    "SamplingClient.sample": lambda c: (
        (PROMPT, 2, PARAMS, True, 2), lambda v: len(v.sequences) == 2 and len(v.prompt_logprobs) == 3
        and len(v.topk_prompt_logprobs[1]) == 2 and v.sequences[0].sequence_id
    ),
    "SamplingClient.compute_logprobs": lambda c: ((PROMPT,), lambda v: v[0] is None and len(v) == 3 and v[1] < 0),
    "SamplingClient.get_tokenizer": lambda c: ((), lambda v: v.encode("AB")),
    "SamplingClient.get_base_model": lambda c: ((), lambda v: v == c.base),
    "SamplingClient.get_telemetry": lambda c: ((), lambda v: v is None),
    "SamplingClient.get_sampler_handle": lambda c: ((), str),
    "SamplingClient.from_sampler_handle": lambda c: (
        (c.SamplingClient.get_sampler_handle(),), {"api_key": "tml-local"},
        lambda v: len(v.sample(PROMPT, 1, PARAMS).result().sequences) == 1,
    ),
    "SamplingClient.on_queue_state_change": None,  # what the client calls itself
    "RestClient.get_telemetry": lambda c: ((), lambda v: v is None),
    "RestClient.get_server_capabilities": lambda c: ((), lambda v: v.supported_models[0].trainable),
    "RestClient.get_training_run": lambda c: ((c.TrainingClient.model_id,), lambda v: v.lora_rank == 2 and v.is_lora),
    "RestClient.get_training_run_by_tinker_path": lambda c: ((c.state,), lambda v: v.last_checkpoint),
    "RestClient.get_weights_info_by_tinker_path": lambda c: ((c.state,), lambda v: v.base_model == c.base),
    "RestClient.list_training_runs": lambda c: ((), lambda v: v.cursor.total_count >= 1),
    "RestClient.list_checkpoints": lambda c: ((c.TrainingClient.model_id,), lambda v: len(v.checkpoints) >= 2),
    "RestClient.list_user_checkpoints": lambda c: ((), lambda v: v.cursor.total_count >= 2),
    "RestClient.get_external_weights_urls": lambda c: (
        (f"tinker://{c.TrainingClient.model_id}/external_weights/x",), NOT_SERVED
    ),
    "RestClient.delete_checkpoint": lambda c: (
        lambda: (c.TrainingClient.model_id, saved(c, "one").removeprefix(f"tinker://{c.TrainingClient.model_id}/")),
        lambda v: v is None,
    ),
    "RestClient.delete_checkpoint_from_tinker_path": lambda c: (lambda: (saved(c, "two"),), lambda v: v is None),
    "RestClient.copy_weights": lambda c: ((c.state, "project"), NOT_SERVED),
    "RestClient.publish_checkpoint_from_tinker_path": lambda c: ((c.state,), NOT_SERVED),
    "RestClient.unpublish_checkpoint_from_tinker_path": lambda c: ((c.state,), NOT_SERVED),
    "RestClient.set_checkpoint_ttl_from_tinker_path": lambda c: ((c.state, 3600), lambda v: v is None),
    "RestClient.get_session": lambda c: ((c.session,), lambda v: c.TrainingClient.model_id in v.training_run_ids),
    "RestClient.list_sessions": lambda c: ((), lambda v: c.session in v.sessions),
    "RestClient.assign_session_project": lambda c: ((c.session, "project"), NOT_SERVED),
    "RestClient.export_session_trace": lambda c: ((c.session,), NOT_SERVED),
    "RestClient.whoami": lambda c: ((), "whoami requires JWT auth"),
    "RestClient.get_sampler": lambda c: ((f"{c.session}:sample:0",), lambda v: v.model_path == c.sampler),
    "RestClient.search_sessions": lambda c: ((types.SessionSearchRequest(),), NOT_SERVED),
    "RestClient.get_billing_usage": lambda c: ((DAY, DAY), NOT_SERVED),
    "RestClient.get_current_checkpoint_storage_usage": lambda c: ((), NOT_SERVED),
    "RestClient.get_audit_log": lambda c: ((DAY[:10],), NOT_SERVED),
    "AdminClient.get_telemetry": lambda c: ((), lambda v: v is None),
    "AdminClient.get_billing_usage": lambda c: ((DAY, DAY), NOT_SERVED),
    "AdminClient.get_current_checkpoint_storage_usage": lambda c: ((), NOT_SERVED),
    "AdminClient.get_audit_log": lambda c: ((DAY[:10],), NOT_SERVED),
}  # fmt: skip


def saved(c, name):
    return c.TrainingClient.save_state(name, overwrite=True).result().path


def public_methods():
    for kind in (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, RestClient, AdminClient):
        for name, member in inspect.getmembers(kind):
            if not name.startswith("_") and callable(member) and not isinstance(member, type):
                yield f"{kind.__name__}.{name}"


FOUND = sorted(public_methods())


async def awaited(value):
    while inspect.isawaitable(value) or hasattr(value, "result_async"):
        value = await value
    return value


@pytest.mark.parametrize("method", FOUND)
def test_a_method_is_served_or_says_why_not(c, method):
    kind, name = method.split(".")
    case = METHODS[method.removesuffix("_async")]
    if case is None:
        return
    *given, expected = case(c)
    args = given[0]() if callable(given[0]) else given[0]
    call = getattr(getattr(c, kind), name)

    def run():
        value = call(*args, **(given[1] if len(given) > 1 else {}))
        if name.endswith("_async"):
            return asyncio.run(awaited(value))
        return value.result(timeout=60) if hasattr(value, "result") else value

    if isinstance(expected, str):
        with pytest.raises(Exception, match=expected) as error:
            run()
        assert isinstance(error.value, tinker.NotFoundError | tinker.RequestFailedError | RuntimeError | ValueError)
    else:
        assert expected(run())


def test_every_case_is_a_method_of_the_client():
    assert {*METHODS} == {name.removesuffix("_async") for name in FOUND}


def test_a_future_can_be_awaited_and_the_order_of_requests_is_that_of_the_calls(c):
    async def train():
        training = await c.ServiceClient.create_lora_training_client_async(c.base, rank=1, seed=3)
        first = training.forward_backward([datum()], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.05))
        last = training.forward([datum()], "cross_entropy")
        return [(await future).metrics for future in (first, step, last)]

    before, _, after = asyncio.run(train())
    assert after["loss:sum"] < before["loss:sum"]


def test_a_call_in_many_parts_is_one_call(c):
    """The client cuts 3000 data into three requests, which it sends at once."""
    result = c.TrainingClient.forward_backward([datum((65 + i % 20,)) for i in range(3000)], "cross_entropy").result()
    assert len(result.loss_fn_outputs) == 3000
    expected = -sum(float(output["logprobs"].data[0]) for output in result.loss_fn_outputs)
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


def test_an_error_of_a_run_is_the_users_and_the_next_request_is_served(c):
    with pytest.raises(tinker.RequestFailedError) as error:
        c.TrainingClient.forward([datum((1_000_000,))], "cross_entropy").result()
    assert error.value.category == types.RequestErrorCategory.User
    assert c.TrainingClient.forward([datum()], "cross_entropy").result().metrics
