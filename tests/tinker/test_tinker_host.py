"""A training host: it computes what an engine computes by itself, whichever runs share it, and saves it."""

import gc
import json
import math
import shutil
import weakref
from collections import Counter
from dataclasses import astuple, replace
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dualtune.base.errors import ConfigError, FormatError, LockedError, NonFiniteError, OutOfMemory
from dualtune.data.batches import SequenceLayout
from dualtune.engine.backend import IGNORE_INDEX, Batch
from dualtune.engine.decoding import CannotBatch
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.tiny_models import write_tiny_gpt2, write_tiny_llama
from dualtune.model.formats.directory import read_adapter
from dualtune.train.generation.inference import BASE_ONLY, load_model
from dualtune.train.generation.sampling import Chooser, Sampling
from dualtune.train.generation.token_logprobs import token_logprobs
from dualtune.train.hooks import Hook
from dualtune.train.run import run as train
from dualtune.train.state import checkpoint
from dualtune.train.state.lock import Lock
from dualtune.use.tinker.adapters import spec_in, spec_of
from dualtune.use.tinker.checkpoints import (
    delete_checkpoint,
    find_checkpoint,
    list_checkpoints,
    list_runs,
    parse_path,
    read_run,
    read_state,
)
from dualtune.use.tinker.gradients import ClientData, DistinctTargets, common_beginnings
from dualtune.use.tinker.host import SAMPLERS_KEPT, TrainingHost
from dualtune.use.tinker.losses import loss_of
from dualtune.use.tinker.messages import AdamSettings, Cancelled, Datum, LoraSettings, SampleRequest
from dualtune.use.tinker.samples import sampled

VOCAB = 262  # of the tiny models
KINDS = ("numpy", "torch", "mlx")
ADAM = AdamSettings(learning_rate=1e-2)
LORA = LoraSettings(rank=4, seed=3)
SETTINGS = {
    "cross_entropy": {}, "importance_sampling": {}, "gspo": {}, "dro": {"beta": 0.1},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
}  # fmt: skip


@pytest.fixture
def open_host(request, open_backend, tmp_path):
    """Open a host of a kind; all of a test have the same directory of runs."""
    opened = []

    def open_(kind, **options):
        model = request.getfixturevalue("tiny_softmax" if kind == "numpy" else "tiny_llama")
        opened.append(TrainingHost(open_backend(kind), str(model), tmp_path / "runs", **options))
        return opened[-1]

    yield open_
    for host in opened:
        host.close()


@pytest.fixture(params=KINDS)
def host(request, open_host):
    return open_host(request.param)


def some_data(count=5, seed=0, **changes):
    """Texts of different lengths, with all that any loss reads; half of a text is a prompt."""
    rng, data = np.random.default_rng(seed), []
    for length in rng.integers(5, 40, count):
        text = rng.integers(5, VOCAB, length + 1)
        is_answer = np.arange(length) >= length // 2
        data.append(datum(text, is_answer, rng, **changes))
    return data


def datum(text, is_answer, rng, **changes):
    length = len(is_answer)
    inputs = {
        "target_tokens": text[1:],
        "weights": np.where(is_answer, rng.normal(1, 0.5, length), 0).astype(np.float32),
        "logprobs": rng.uniform(-7, -4, length).astype(np.float32),
        "advantages": np.where(is_answer, rng.normal(0, 1, length), 0).astype(np.float32),
        "sequence_ratio_mask": is_answer.astype(np.float32),
    }
    return Datum(text[:-1].astype(np.int32), inputs | changes)


def for_loss(name, data):
    """The data with the inputs of a loss alone."""
    keys = {"cross_entropy": ("weights",), "gspo": ("logprobs", "advantages", "sequence_ratio_mask")}
    chosen = ("target_tokens", *keys.get(name, ("logprobs", "advantages")))
    return [replace(datum, inputs={key: datum.inputs[key] for key in chosen}) for datum in data]


def supervised(seed=0, count=5):
    return for_loss("cross_entropy", some_data(count, seed))


def state_of(host, run):
    own = host._runs[run].state
    optimizer = host._seat.optimizer_state(own)
    return host._seat.fetch(own.weights), optimizer


def events(run_dir, kind):
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row.get("event") == kind]


def assert_same(state, expected, rtol=0.0):
    for one, other in ((state[0], expected[0]), *((state[1].slots[s], expected[1].slots[s]) for s in ("m", "v"))):
        assert one.keys() == other.keys()
        for name in one:
            if rtol:
                assert np.allclose(one[name], other[name], rtol=rtol, atol=1e-7), name
            else:
                assert np.array_equal(one[name], other[name]), name
    assert state[1].step == expected[1].step


def alone_in_rows(data):
    """A micro-batch of one datum a row, made apart from the code under test."""
    width = -(-max(len(datum.tokens) for datum in data) // 16) * 16
    shape = len(data), width
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    labels, weights = np.full(shape, IGNORE_INDEX, np.int32), np.zeros(shape, np.float32)
    for b, datum in enumerate(data):
        own = slice(0, len(datum.tokens))
        tokens[b, own], segments[b, own], positions[b, own] = datum.tokens, 1, np.arange(len(datum.tokens))
        weights[b, own] = datum.inputs["weights"]
        labels[b, own] = np.where(datum.inputs["weights"] != 0, datum.inputs["target_tokens"], IGNORE_INDEX)
    return Batch(tokens, labels, segments, positions, np.zeros(shape, np.uint32), weights)


# --- training --------------------------------------------------------------------------------------------------------


def test_ten_steps_are_those_of_an_engine_bit_for_bit(host, open_backend):
    """One datum a row, longest first, because so it lies them out."""
    host._layout = replace(host._layout, row_length=None)
    host.create_run("run", LORA)
    spec = spec_of(LORA, host.directory)
    engine = load_model(host.backend, str(host.directory), spec=spec).engine
    engine.load_adapter_state(state_of(host, "run")[0])
    engine.set_hyperparameters({"beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0})
    for step in range(10):
        data = sorted(supervised(seed=step), key=lambda datum: -len(datum.tokens))
        result = host.forward_backward("run", data, "cross_entropy", {})
        metrics = host.optim_step("run", ADAM)
        batch = alone_in_rows(data)
        engine.forward_backward(batch, divisor=1.0)
        output = engine.optim_step(lr=1e-2, max_grad_norm=None)
        assert result.metrics["loss:sum"] == pytest.approx(float(output.loss), rel=1e-5, abs=1e-4)
        assert metrics == {"grad_norm:mean": float(output.grad_norm)}
    assert_same(state_of(host, "run"), (engine.adapter_state(), engine.optimizer_state()))


def test_logprobs_are_those_of_every_target_in_the_order_of_the_data(host):
    """Of prompts too, and in micro-batches of any size."""
    host.create_run("run", LORA)
    data = supervised(count=9)
    result = host.forward("run", data, "cross_entropy", {})
    engine = host._seat.train(host._runs["run"].state)
    for datum, output in zip(data, result.outputs, strict=True):
        batch = alone_in_rows([datum])
        everywhere = np.where(np.arange(batch.tokens_BT.shape[1]) < len(datum.tokens), 0, IGNORE_INDEX)
        everywhere[: len(datum.tokens)] = datum.inputs["target_tokens"]
        alone = engine.target_logprobs(replace(batch, labels_BT=everywhere[None].astype(np.int32)))[0]
        assert output["logprobs"].dtype == np.float32
        assert output["logprobs"] == pytest.approx(alone[: len(datum.tokens)], abs=tolerances.LOGPROBS)
    host._layout = host._layout.cut_to(40)
    smaller = host.forward("run", data, "cross_entropy", {})
    assert smaller.metrics["loss:sum"] == pytest.approx(result.metrics["loss:sum"], rel=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_gradient_is_that_of_the_loss(name, open_host):
    """Along the gradient, the loss of `forward` changes by its square.

    GSPO's and CISPO's slopes are not those of their values, where a ratio is a constant: by definition.
    """
    host = open_host("torch")
    host.create_run("run", LORA)
    data = for_loss(name, some_data())
    host.forward_backward("run", supervised(9), "cross_entropy", {})
    host.optim_step("run", ADAM)  # so that B is not zero
    host.forward_backward("run", data, name, SETTINGS[name])
    own = host._runs["run"].state
    engine = host._seat.train(own)
    gradient, weights = engine.gradient(), engine.adapter_state()
    square = sum(float((g.astype(np.float64) ** 2).sum()) for g in gradient.values())
    logprobs = [out["logprobs"] for out in host.forward("run", data, name, SETTINGS[name]).outputs]

    def loss_at(step):
        """The loss as a function of log p, with what is a constant in it as it is now."""
        engine.load_adapter_state({n: (w + step * gradient[n]).astype(np.float32) for n, w in weights.items()})
        result = host.forward("run", data, name, SETTINGS[name])
        if name not in ("gspo", "cispo"):
            return result.metrics["loss:sum"]
        slopes = [loss_of(name, lp, datum.inputs, SETTINGS[name])[1] for lp, datum in zip(logprobs, data, strict=True)]
        return sum(float((s * out["logprobs"]).sum()) for s, out in zip(slopes, result.outputs, strict=True))

    step = 1e-2 / math.sqrt(square)
    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    engine.load_adapter_state(weights)
    assert slope == pytest.approx(square, rel=tolerances.DIRECTIONAL["default"])


def samples_of_prompts(seed=0):
    """Three samples of each of two prompts, as reinforcement learning has them, one with a prompt of its own, and two
    texts whose weights begin in what they share."""
    rng, data = np.random.default_rng(seed), []
    for number, prompt_length in ((3, 40), (3, 25), (1, 30), (2, 21)):
        prompt = rng.integers(5, VOCAB, prompt_length)
        for _ in range(number):
            text = np.concatenate([prompt, rng.integers(5, VOCAB, int(rng.integers(2, 12)))])
            length, start = len(text) - 1, 5 if number == 2 else prompt_length - 1
            is_answer = np.arange(length) >= start
            data.append(datum(text, is_answer, rng))
    return data


def test_common_beginnings_are_found_with_their_targets():
    data = for_loss("cross_entropy", samples_of_prompts())
    assert common_beginnings(data).tolist() == [0, 39, 39, 0, 24, 24, 0, 0, 20]
    other = [replace(data[0], inputs={"target_tokens": data[0].inputs["target_tokens"] + 1}), *data[1:3]]
    assert common_beginnings(other).tolist() == [0, 0, 39]  # the same tokens before other targets
    same = [data[0], data[0], replace(data[1], inputs={"target_tokens": np.zeros((len(data[1].tokens), 2), int)})]
    assert common_beginnings(same).tolist() == [0, len(data[0].tokens) - 1, 0]


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("name", ["cross_entropy", "gspo"])
def test_a_common_beginning_is_computed_once_and_counts_for_each(kind, name, open_host):
    """Of single targets and of the ratio of a sequence; also where memory cuts the samples of a prompt apart."""
    host = open_host(kind)
    assert host._shares
    host.create_run("run", LORA)
    host.forward_backward("run", supervised(9), "cross_entropy", {})
    host.optim_step("run", ADAM)
    own, data = host._runs["run"].state, for_loss(name, samples_of_prompts())
    engine, found = host._seat.train(own), []
    for shares, most in ((False, 2048), (True, 2048), (True, 96)):
        host._shares, host._layout = shares, SequenceLayout(most, most)
        batches = [*ClientData(data, shares=shares).micro_batches(host._layout)]
        engine.discard()
        own.has_gradient = False
        result = host.forward_backward("run", data, name, SETTINGS[name])
        found.append((sum(batch.num_computed for batch in batches), result, engine.gradient()))
    (separate, expected, g), *others = found
    assert [count for count, _, _ in others] == sorted(count for count, _, _ in others) and others[1][0] < separate
    for _, result, gradient in others:
        assert result.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-4)
        for one, other in zip(result.outputs, expected.outputs, strict=True):
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=tolerances.LOGPROBS)
        for tensor in g:
            assert np.abs(gradient[tensor] - g[tensor]).max() <= 1e-3 * np.abs(g[tensor]).max()


@pytest.mark.parametrize("name", SETTINGS)
def test_both_engines_agree_on_every_loss(name, open_host):
    """From the same start, which is a function of the seed."""
    found = []
    for kind in ("torch", "mlx"):
        host = open_host(kind)
        host.create_run(kind, LORA)
        host.forward_backward(kind, supervised(9), "cross_entropy", {})
        host.optim_step(kind, ADAM)
        result = host.forward_backward(kind, for_loss(name, some_data()), name, SETTINGS[name])
        found.append((result, host._seat.train(host._runs[kind].state).gradient()))
    (one, g), (other, h) = found
    assert other.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], rel=1e-4)
    norm = math.sqrt(sum(float((x.astype(np.float64) ** 2).sum()) for x in g.values()))
    gap = math.sqrt(sum(float(((g[n] - h[n]).astype(np.float64) ** 2).sum()) for n in g))
    assert gap + norm > 0 and gap <= 10 * tolerances.GRADIENT * norm


def test_several_targets_in_a_place_add_up(host):
    """Each K of its own micro-batches; one that stands twice is one with both weights; the gradient is the sum's."""
    host.create_run("run", replace(LORA, train_unembed=False))  # the head is that of the fused loss
    (datum,) = supervised(count=1)
    targets = datum.inputs["target_tokens"]
    others = (targets + 7) % VOCAB
    pair = {"target_tokens": np.stack([targets, others], 1)}
    weights = np.ones((len(targets), 2), np.float32) * [1.0, -0.25]
    engine = host._seat.train(host._runs["run"].state)

    def gradient_of(*data):
        engine.discard()
        host._runs["run"].state.has_gradient = False
        result = host.forward_backward("run", data, "cross_entropy", {})
        return engine.gradient(), result

    once = np.ones(len(targets), np.float32)
    together, result = gradient_of(replace(datum, inputs=pair | {"weights": weights.astype(np.float32)}))
    apart, singles = gradient_of(
        replace(datum, inputs={"target_tokens": targets, "weights": once}),
        replace(datum, inputs={"target_tokens": others, "weights": -0.25 * once}),
    )
    twice, _ = gradient_of(
        replace(datum, inputs={"target_tokens": np.stack([targets, others, others], 1),
                               "weights": (np.ones((len(targets), 3)) * [1.0, -0.5, 0.25]).astype(np.float32)})
    )  # fmt: skip
    for name, g in together.items():
        scale = np.abs(g).max() + 1e-6
        assert np.abs(apart[name] - g).max() <= 1e-3 * scale and np.abs(twice[name] - g).max() <= 1e-3 * scale
    shown = np.stack([output["logprobs"] for output in singles.outputs], 1)
    assert result.outputs[0]["logprobs"] == pytest.approx(shown, abs=tolerances.LOGPROBS)


def test_repeated_targets_are_one_for_the_engine():
    targets = np.array([[3, 3, 4], [5, 6, 7], [1, 1, 1]])
    distinct = DistinctTargets.of(targets)
    assert distinct.labels.tolist() == [[3, 4, 0], [5, 6, 7], [1, 0, 2]]
    logprobs = np.array([[-3.0, -4.0, 0.0], [-5.0, -6.0, -7.0], [-1.0, 0.0, -2.0]])
    assert distinct.of_client(logprobs, 0).tolist() == [[-3, -3, -4], [-5, -6, -7], [-1, -1, -1]]
    assert distinct.of_client(logprobs[1:], 1).tolist() == [[-5, -6, -7], [-1, -1, -1]]
    assert distinct.of_engine(np.ones((3, 3))).tolist() == [[2, 1, 0], [1, 1, 1], [3, 0, 0]]
    assert DistinctTargets.of(targets[1:2]).place_TK is None


def test_adam_is_the_documented_formula_with_the_constants_of_each_step(open_host):
    host = open_host("numpy")
    host.create_run("run", LORA)
    w = {name: x.astype(np.float64) for name, x in state_of(host, "run")[0].items()}
    m, v = ({name: np.zeros(x.shape) for name, x in w.items()} for _ in range(2))
    steps = (AdamSettings(1e-2), AdamSettings(2e-2, 0.8, 0.9, 1e-4, 0.5, 3.0), AdamSettings(1e-3, 0.5, 0.99))
    for t, adam in enumerate(steps, start=1):
        host.forward_backward("run", supervised(seed=t), "cross_entropy", {})
        g = {n: x.astype(np.float64) for n, x in host._seat.train(host._runs["run"].state).gradient().items()}
        norm = host.optim_step("run", adam)["grad_norm:mean"]
        clip = min(1.0, adam.grad_clip_norm / norm) if adam.grad_clip_norm else 1.0
        for n in w:
            m[n] = adam.beta1 * m[n] + (1 - adam.beta1) * clip * g[n]
            v[n] = adam.beta2 * v[n] + (1 - adam.beta2) * (clip * g[n]) ** 2
            m_hat, v_hat = m[n] / (1 - adam.beta1**t), v[n] / (1 - adam.beta2**t)
            w[n] = w[n] - adam.learning_rate * (m_hat / (np.sqrt(v_hat) + adam.eps) + adam.weight_decay * w[n])
    for name, x in state_of(host, "run")[0].items():
        assert x == pytest.approx(w[name], abs=1e-5), name
    names = ("beta1", "beta2", "eps", "weight_decay", "max_grad_norm")
    rows = events(host.runs_dir / "run", "updates")
    assert [(row["step"], *(row[name] for name in names)) for row in rows] == [
        (t, *astuple(adam)[1:-1], adam.grad_clip_norm or None) for t, adam in enumerate(steps)
    ]


@pytest.mark.parametrize(
    "adam",
    [AdamSettings(-1.0), AdamSettings(math.nan), AdamSettings(beta1=1.0), AdamSettings(beta2=-0.1),
     AdamSettings(eps=0.0), AdamSettings(weight_decay=-1.0), AdamSettings(grad_clip_norm=math.inf)],
)  # fmt: skip
def test_constants_without_an_update_are_refused(adam, open_host, wording):
    host = open_host("numpy")
    host.create_run("run", LORA)
    with pytest.raises(ConfigError) as error:
        host.optim_step("run", adam)
    wording(str(error.value))


# --- several runs ----------------------------------------------------------------------------------------------------


def test_runs_that_take_turns_are_each_as_if_alone(host, open_host):
    """Between their calls, inside a step, and with another adapter, for which the engine is made anew."""
    kind = host.backend.name
    exact = kind != "numpy"  # whose gradient has more digits than the float32 that leave an engine
    settings = {"a": LORA, "b": replace(LORA, seed=4), "c": LoraSettings(2, 3)}
    calls = [(run, seed) for seed in range(3) for run in ("a", "b", "c", "a", "b")]
    for run, chosen in settings.items():
        host.create_run(run, chosen)
    seen = {run: [] for run in settings}
    for number, (run, seed) in enumerate(calls):
        seen[run].append(host.forward_backward(run, supervised(seed * 10 + ord(run)), "cross_entropy", {}).metrics)
        if number % 5 > 1:  # a and b have two parts of a step, with others between them
            seen[run].append(host.optim_step(run, ADAM))
        if number % 4 == 0:
            [*host.sample([SampleRequest(None, np.array([5, 6], np.int32), max_tokens=2, seed=1)])]
    assert host._shared_base.num_loaded == 1
    for run, chosen in settings.items():
        other = open_host(kind)
        other.create_run(f"{run}-alone", chosen)
        alone = []
        for number, (who, seed) in enumerate(calls):
            if who == run:
                data = supervised(seed * 10 + ord(run))
                alone.append(other.forward_backward(f"{run}-alone", data, "cross_entropy", {}).metrics)
                if number % 5 > 1:
                    alone.append(other.optim_step(f"{run}-alone", ADAM))
        for one, expected in zip(seen[run], alone, strict=True):
            assert one == (expected if exact else pytest.approx(expected, rel=1e-4))
        assert_same(state_of(host, run), state_of(other, f"{run}-alone"), 0 if exact else 1e-3)


def test_a_run_that_is_unloaded_frees_its_memory_and_its_name_stays_taken(open_host):
    host = open_host("numpy")
    host.create_run("run", LORA)
    host.save_sampler("run", None)
    state = weakref.ref(host._runs["run"])
    with pytest.raises(ConfigError):
        host.create_run("run", LORA)
    host.unload("run")
    gc.collect()
    assert state() is None and not host._samplers
    for call in (
        lambda: host.unload("run"),
        lambda: host.optim_step("run", ADAM),
        lambda: host.create_run("run", LORA),
    ):
        with pytest.raises(ConfigError):
            call()
    assert [run.name for run in list_runs(host.runs_dir)] == ["run"]


def test_two_hosts_do_not_share_a_run(open_host):
    """Each can have the other's states, not its runs."""
    one, other = open_host("numpy"), open_host("numpy")
    one.create_run("run", LORA)
    with pytest.raises(ConfigError):
        other.create_run("run", LORA)
    path = one.save_state("run", "first").path
    other.create_run_from("copy", path, optimizer=True)
    with pytest.raises(LockedError):
        Lock(one.runs_dir / "run")


# --- what goes wrong -------------------------------------------------------------------------------------------------


class Failing:
    """An engine whose micro-batches fail from a number on, once or for ever."""

    def __init__(self, engine, error, after, most=math.inf):
        self._engine, self._error, self._after, self._most, self.num = engine, error, after, most, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def forward_backward_of(self, batch, weigh, *, divisor):
        self.num += 1
        if self._after < self.num <= self._after + self._most:
            self._engine.forward_backward_of(batch, lambda logprobs: 100 * weigh(logprobs), divisor=divisor)
            raise self._error
        return self._engine.forward_backward_of(batch, weigh, divisor=divisor)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_memory_that_runs_out_takes_smaller_micro_batches_and_changes_nothing(kind, open_host):
    """Also what was added before in this step stays."""
    host, twin = open_host(kind), open_host(kind)
    for each, name in ((host, "run"), (twin, "twin")):
        each.create_run(name, LORA)
        each.forward_backward(name, supervised(1), "cross_entropy", {})
    seat = host._seat
    seat._engine = Failing(seat._engine, MemoryError(), 0, most=1)
    host.forward_backward("run", supervised(2), "cross_entropy", {})
    assert host._layout.max_tokens < twin._layout.max_tokens
    twin.forward_backward("twin", supervised(2), "cross_entropy", {})
    gradients = [each._seat.train(each._runs[name].state).gradient() for each, name in ((host, "run"), (twin, "twin"))]
    for name, g in gradients[1].items():
        assert np.abs(gradients[0][name] - g).max() <= 1e-4 * np.abs(g).max()
    seat._engine = seat._engine._engine


def test_a_shortage_of_memory_in_between_leaves_the_gradient(open_host):
    """In a forward pass, and while something is sampled: both let the engine drop what it has."""
    host = open_host("numpy")
    host.create_run("run", LORA)
    host.forward_backward("run", supervised(1), "cross_entropy", {})
    engine = host._seat._engine
    before = engine.gradient()
    host._seat._engine = Short(engine)
    host.forward("run", supervised(2), "cross_entropy", {})
    assert host._seat._engine.num == 1
    host._seat._engine = engine
    [*host.sample([request(None)])]
    engine.discard()
    host.forward("run", supervised(2), "cross_entropy", {})
    for name, g in engine.gradient().items():
        assert np.array_equal(g, before[name])


class Short:
    """An engine whose memory runs out once."""

    def __init__(self, engine):
        self._engine, self.num = engine, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def target_logprobs(self, batch, **options):
        if not self.num:
            self.num = 1
            raise MemoryError
        return self._engine.target_logprobs(batch, **options)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("the device is gone"), KeyboardInterrupt()], ids=repr)
def test_a_call_that_fails_leaves_the_gradient_as_it_was(error, open_host):
    host = open_host("numpy", micro_batch_tokens=64)
    host.create_run("run", LORA)
    host.forward_backward("run", supervised(1), "cross_entropy", {})
    engine = host._seat._engine
    before = engine.gradient()
    host._seat._engine = Failing(engine, error, 1)
    with pytest.raises(OutOfMemory if isinstance(error, MemoryError) else type(error)):
        host.forward_backward("run", supervised(2), "cross_entropy", {})
    host._seat._engine = engine
    for name, g in engine.gradient().items():
        assert np.array_equal(g, before[name])
    assert host.optim_step("run", ADAM)["grad_norm:mean"] > 0


def test_a_gradient_that_is_not_finite_updates_nothing(host):
    host.create_run("run", LORA)
    host.forward_backward("run", supervised(), "cross_entropy", {})
    host.optim_step("run", ADAM)
    before = state_of(host, "run")
    data = [replace(d, inputs=d.inputs | {"weights": np.full(len(d.tokens), 3e38, np.float32)}) for d in supervised()]
    with np.errstate(all="ignore"):
        host.forward_backward("run", data, "cross_entropy", {})
        if host.backend.name == "numpy":  # which computes in float64
            next(iter(host._seat._engine._grads.values()))[:] = np.inf
        with pytest.raises(NonFiniteError):
            host.optim_step("run", ADAM)
    assert_same(state_of(host, "run"), before)
    host.forward_backward("run", supervised(), "cross_entropy", {})
    host.optim_step("run", ADAM)


@pytest.mark.parametrize(
    "wrong",
    ["empty", "no tokens", "too long", "negative", "beyond the vocabulary", "targets beyond", "lengths",
     "too many targets", "unknown run"],
)  # fmt: skip
def test_data_that_no_model_reads_are_refused(wrong, open_host, wording):
    host = open_host("torch")
    host.create_run("run", LORA)
    (datum,) = supervised(count=1)
    n = len(datum.tokens)
    tokens = {"no tokens": datum.tokens[:0], "too long": np.full(9999, 5, np.int32),
              "negative": np.where(np.arange(n) == 1, -1, datum.tokens), "lengths": datum.tokens[1:],
              "beyond the vocabulary": np.full(n, VOCAB, np.int32)}.get(wrong, datum.tokens)  # fmt: skip
    targets = {"targets beyond": np.full(n, VOCAB + 5), "too many targets": np.ones((n, VOCAB + 1), int),
               "no tokens": datum.inputs["target_tokens"][:0], "too long": np.full(9999, 5)}.get(
        wrong, datum.inputs["target_tokens"]
    )  # fmt: skip
    data = [] if wrong == "empty" else [Datum(tokens, {"target_tokens": targets})]
    with pytest.raises(ConfigError) as error:
        host.forward_backward("other" if wrong == "unknown run" else "run", data, "cross_entropy", {})
    wording(str(error.value))


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (LoraSettings(0), {}),
        (LoraSettings(100_000), {}),
        (LoraSettings(4, -1), {}),
        (LoraSettings(4, 1, False, False, False), {}),
    ],
)
def test_adapters_that_cannot_be_are_refused(settings, options, open_host, wording):
    host = open_host("torch")
    with pytest.raises(ConfigError) as error:
        host.create_run("run", settings)
    wording(str(error.value))
    assert not list_runs(host.runs_dir)


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ((True, True, True), {"self_attn", "mlp", "lm_head"}),
        ((True, False, False), {"self_attn"}),
        ((False, True, False), {"mlp"}),
        ((False, False, True), {"lm_head"}),
        ((True, False, True), {"self_attn", "lm_head"}),
    ],
)
def test_a_client_chooses_the_layers_by_what_they_are(choice, expected, open_host):
    host = open_host("torch")
    info = host.create_run("run", LoraSettings(2, 0, *choice))
    names = {name.split(".")[-4] for name in state_of(host, "run")[0]}
    assert {"lm_head" if name == "model" else name for name in names} == expected
    assert (info.train_attn, info.train_mlp, info.train_unembed) == choice


ATTENTION, FEED_FORWARD = LoraSettings(2, 0, True, False, False), LoraSettings(2, 0, False, True, False)
MIXTURE = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight")


def test_layers_of_other_families_are_told_apart_by_their_paths(tmp_path):
    """GPT-2 has a c_proj in both parts. Experts are stored one by one or as a stack; a router is in no part."""
    gpt2 = write_tiny_gpt2(tmp_path / "gpt2")
    assert spec_of(ATTENTION, gpt2).targets == ("attn.c_attn", "attn.c_proj")
    assert spec_of(FEED_FORWARD, gpt2).targets == ("mlp.c_fc", "mlp.c_proj")
    for stored, targets in (
        (
            {"mlp.experts.0.gate_proj.weight": (4, 4), "mlp.experts.1.gate_proj.weight": (4, 4)},
            ["mlp.experts.gate_proj"],
        ),
        ({"mlp.experts.gate_up_proj": (2, 4, 8)}, [f"experts.{name}_proj" for name in ("gate", "up", "down")]),
    ):
        shapes = dict.fromkeys(MIXTURE, (4, 4)) | {f"model.layers.0.{name}": shape for name, shape in stored.items()}
        path = tmp_path / str(len(stored))
        path.mkdir()
        (path / "config.json").write_text('{"model_type": "mixture", "tie_word_embeddings": false}')
        save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path / "model.safetensors")
        spec = spec_of(FEED_FORWARD, path)
        assert ([*spec.targets], spec.experts) == (targets, True)
        assert (spec_of(ATTENTION, path).targets, spec_of(ATTENTION, path).experts) == (("self_attn.q_proj",), False)
        everything = spec_of(LORA, path)
        assert (everything.targets, everything.experts) == (("all-linear", "lm_head"), True)


def test_an_output_head_that_is_the_embedding_is_not_trained_and_that_is_said(tmp_path, open_backend, tiny_llama):
    path = write_tiny_llama(tmp_path / "tied", vocab_size=VOCAB, tie_word_embeddings=True)
    for file in tiny_llama.glob("*token*"):
        shutil.copy(file, path)
    host = TrainingHost(open_backend("torch"), str(path), tmp_path / "runs")
    assert not host.create_run("run", LORA).train_unembed
    assert not any("lm_head" in name for name in state_of(host, "run")[0])
    host.close()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_what_is_cancelled_ends_between_micro_batches_and_tokens(kind, open_host):
    """The gradient of before stays, bit for bit, and the other requests of a batch go on."""
    host = open_host(kind)
    host._layout = host._layout.cut_to(40)
    host.create_run("run", LORA)
    host.forward_backward("run", supervised(1), "cross_entropy", {})
    before, asked = host._seat.train(host._runs["run"].state).gradient(), count(1)
    with pytest.raises(Cancelled):
        host.forward_backward("run", supervised(2, count=9), "cross_entropy", {}, lambda: next(asked) == 3)
    after = host._seat.train(host._runs["run"].state).gradient()
    assert next(asked) == 4 and all(np.array_equal(after[name], g) for name, g in before.items())

    tokens = Counter()

    def is_cancelled(index):
        tokens[index] += 1
        return index == 0 and tokens[0] > 3

    results = dict(host.sample([request(None, max_tokens=30), request(None, max_tokens=30, seed=2)], is_cancelled))
    assert isinstance(results[0], Cancelled) and 3 < tokens[0] < 8
    assert len(results[1].sequences[0].tokens) == 30


# --- checkpoints -----------------------------------------------------------------------------------------------------


def trained(host, run, settings=LORA, steps=2):
    host.create_run(run, settings)
    for step in range(steps):
        host.forward_backward(run, supervised(step), "cross_entropy", {})
        host.optim_step(run, ADAM)


def test_a_state_goes_on_in_another_process_bit_for_bit(host, open_host):
    """As after a kill: the other one has only the files."""
    trained(host, "run")
    path = host.save_state("run", "second").path
    assert path == "tinker://run/weights/second"
    other = open_host(host.backend.name)
    info = other.create_run_from("next", path, optimizer=True)
    assert (info.rank, info.seed, info.train_attn) == (4, 3, True)
    for each, run in ((host, "run"), (other, "next")):
        each.forward_backward(run, supervised(7), "cross_entropy", {})
        each.optim_step(run, ADAM)
    assert_same(state_of(other, "next"), state_of(host, "run"))
    # Without its optimizer, the same weights and a new one.
    other.create_run_from("fresh", path, optimizer=False)
    host.load_state("run", path, optimizer=False)
    assert state_of(host, "run")[1].step == state_of(other, "fresh")[1].step == 0
    assert_same(state_of(host, "run"), state_of(other, "fresh"))
    # A state in the middle of a step has no gradient.
    host.forward_backward("run", supervised(8), "cross_entropy", {})
    host.load_state("run", path, optimizer=True)
    host.optim_step("run", replace(ADAM, learning_rate=0.0))
    assert np.array_equal(
        *(next(iter(state_of(each, run)[0].values())) for each, run in ((host, "run"), (other, "fresh")))
    )


def test_a_state_moves_between_backends(open_host):
    torch, mlx = open_host("torch"), open_host("mlx")
    trained(torch, "there")
    mlx.create_run_from("here", torch.save_state("there", "s").path, optimizer=True)
    losses = [
        each.forward_backward(run, supervised(5), "cross_entropy", {}).metrics["loss:sum"]
        for each, run in ((torch, "there"), (mlx, "here"))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_names_are_names(open_host, wording):
    host = open_host("numpy")
    trained(host, "run", steps=1)
    for name in ("../x", "a/b", "..", "", ".hidden", "x" * 200, "a\0b", "-x", "a b"):
        for call in (host.save_state, host.save_sampler):
            with pytest.raises(ConfigError):
                call("run", name)
        with pytest.raises(ConfigError):
            host.create_run(name, LORA)
    messages = []
    for path in ("tinker://run/weights/none", "tinker://../weights/x", "tinker://run/other/x", "/etc/passwd",
                 "tinker://run/weights/x/y", "tinker://none/weights/x"):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            host.load_state("run", path, optimizer=True)
        messages.append(str(error.value))
    wording(messages)
    assert {path.name for path in host.runs_dir.iterdir()} == {"run"}


def test_checkpoints_are_listed_found_overwritten_and_deleted(open_host):
    host = open_host("numpy")
    trained(host, "run", steps=1)
    host.save_state("run", "s")
    with pytest.raises(ConfigError):
        host.save_state("run", "s")
    host.save_state("run", "s", overwrite=True)
    sampler = host.save_sampler("run", "s")
    found = list_checkpoints(host.runs_dir, "run")
    assert {each.path for each in found} == {"tinker://run/weights/s", "tinker://run/sampler_weights/s"}
    assert all(each.num_bytes > 1000 for each in found) and list_checkpoints(host.runs_dir) == found
    assert parse_path(sampler) == ("run", "sampler_weights", "s")
    assert (find_checkpoint(host.runs_dir, sampler).directory / "adapter_model.safetensors").is_file()
    with pytest.raises(ConfigError):  # weights to sample from are no state
        host.load_state("run", sampler, optimizer=False)
    delete_checkpoint(host.runs_dir, sampler)
    assert [each.kind for each in list_checkpoints(host.runs_dir)] == ["weights"]


@pytest.mark.parametrize("fault", ["write:3000", *(f"{p}:{n}" for p in ("synced", "renamed") for n in range(1, 5))])
def test_a_host_that_is_killed_while_it_saves_has_the_state_of_before_or_the_new_one(fault, open_host, monkeypatch):
    """Under the same name. And the run shows an adapter at any time."""

    def die():
        raise SystemExit(fault)

    host = open_host("numpy")
    trained(host, "run", steps=1)
    host.save_state("run", "s")
    states = [state_of(host, "run")[0]]
    host.forward_backward("run", supervised(3), "cross_entropy", {})
    host.optim_step("run", ADAM)
    states.append(state_of(host, "run")[0])
    monkeypatch.setattr("dualtune.base.faults._passed", Counter())
    monkeypatch.setattr("dualtune.base.faults.die", die)
    monkeypatch.setenv("DUALTUNE_FAULT", fault)
    with pytest.raises(SystemExit):
        host.save_state("run", "s", overwrite=True)
    monkeypatch.delenv("DUALTUNE_FAULT")
    other = open_host("numpy")
    other.create_run_from("next", "tinker://run/weights/s", optimizer=True)
    shown = read_adapter(host.runs_dir / "run").tensors
    for found in (state_of(other, "next")[0], shown):
        assert any(all(np.array_equal(found[name], w) for name, w in state.items()) for state in states)


def test_a_state_of_another_model_or_adapter_or_that_was_changed_is_refused(open_host, wording):
    host = open_host("torch")
    trained(host, "run", steps=1)
    path = host.save_state("run", "s").path
    host.create_run("wide", LoraSettings(8, 1))
    messages = []
    with pytest.raises(ConfigError) as error:
        host.load_state("wide", path, optimizer=True)
    messages.append(str(error.value))
    with pytest.raises(ConfigError) as error:
        open_host("numpy").create_run_from("other", path, optimizer=True)
    messages.append(str(error.value))
    (file,) = (host.runs_dir / "run" / "weights" / "s").rglob("optimizer_m.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(FormatError) as error:
        host.load_state("run", path, optimizer=True)
    wording([each.replace(host.base, "MODEL") for each in messages])
    assert "sha256" in str(error.value)


def test_train_starts_from_the_adapter_of_a_run_or_a_state(open_host, tmp_path, make_config, write_rows, qa_rows):
    host = open_host("torch")
    trained(host, "run", steps=3)
    host.save_state("run", "s")
    host.close()
    run = tmp_path / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "event" not in row]
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["num_targets"] > 0 for row in rows)
    targets = json.loads((run / "adapter" / "adapter_config.json").read_text())["target_modules"]
    for start in (run, run / "weights" / "s"):
        own = {"adapter.init_from": start, "adapter.rank": 4, "adapter.alpha": 32, "adapter.targets": targets}
        result = train(make_config(write_rows(qa_rows), own | {"run.dir": tmp_path / start.name}), host.backend)
        assert result.num_steps == 4


class Gradients(Hook):
    """What a run updates with."""

    def __init__(self):
        self.seen = []

    def on_gradients(self, view):
        self.seen.append({name: x.copy() for name, x in view.gradients.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_train_goes_on_with_the_optimizer_of_a_run_and_back(
    kind, open_host, tmp_path, make_config, write_rows, qa_rows
):
    """The update of `dualtune train` is that of the host with the same gradient; so is the next one, back there."""
    host, hook = open_host(kind), Gradients()
    trained(host, "run", steps=3)
    path = host.save_state("run", "s").path
    targets = [*read_adapter(tmp_path / "runs" / "run").spec.targets]
    config = make_config(write_rows(qa_rows), {
        "adapter.init_from": tmp_path / "runs" / "run" / "weights" / "s", "adapter.init_optimizer": True,
        "adapter.rank": 4, "adapter.alpha": 32, "adapter.targets": targets, "adapter.dropout": 0, "train.steps": 2,
        "train.learning_rate": 1e-2, "train.schedule": "constant", "train.weight_decay": 0,
        "train.max_grad_norm": None, "train.warmup": 0, "run.save_every": 1, "run.dir": tmp_path / "runs" / "on",
    }, Path(host.base))  # fmt: skip
    result = train(config, host.backend, [hook])
    (note,) = (row["message"] for row in events(result.run_dir, "found") if "optimizer" in row["message"])
    changes = "beta2 0.999 instead of 0.95, eps 1e-08 instead of 1e-12"  # train's, which no config changes
    assert note.endswith(f"after 3 updates; these of its constants have changed: {changes}")
    host.load_state("run", path, optimizer=True)
    host.save_state("run", "t")  # no update since, so the constants are those that were loaded
    assert read_state(host.runs_dir, "tinker://run/weights/t")[1].state["updates"]["beta2"] == ADAM.beta2
    steps = replace(ADAM, beta2=0.999, eps=1e-8)
    rtol = 0.0 if kind == "torch" else 1e-6
    for number, gradient in enumerate(hook.seen, start=1):
        own = host._runs["run"].state
        host._seat.train(own).add_gradient(gradient)
        own.has_gradient = True
        host.optim_step("run", steps)
        saved = checkpoint.read(checkpoint.path_of(result.run_dir / "checkpoints", number))
        assert saved.optimizer.step == 3 + number
        assert_same(state_of(host, "run"), (saved.adapter, saved.optimizer), rtol)
        host.create_run_from(f"from-{number}", f"tinker://on/weights/{saved.path.name}", optimizer=True)
        assert_same(state_of(host, f"from-{number}"), (saved.adapter, saved.optimizer))
        host.load_state("run", f"tinker://on/weights/{saved.path.name}", optimizer=True)


def test_what_of_train_cannot_be_loaded_is_refused(open_host, tmp_path, make_config, write_rows, qa_rows, wording):
    host = open_host("numpy")
    settings = {"data.eval": 0, "train.steps": 1, "adapter.alpha": 5, "run.dir": tmp_path / "runs" / "on"}
    train(make_config(write_rows(qa_rows), settings, Path(host.base)), host.backend)
    info = host.create_run_from("next", "tinker://on/weights/step-00000001", optimizer=False)
    assert (info.rank, info.adapter["alpha"]) == (2, 5)
    assert read_run(tmp_path / "runs" / "next") == replace(info, steps=0)
    settings |= {"train.optimizer": "lion", "run.dir": tmp_path / "runs" / "lion"}
    train(make_config(write_rows(qa_rows), settings, Path(host.base)), host.backend)
    host.create_run("run", LORA)
    calls = [
        lambda: host.load_state("run", "tinker://on/weights/step-00000001", optimizer=True),
        lambda: host.load_state("run", "tinker://on/weights/step-00000009", optimizer=True),
        lambda: host.load_state("next", "tinker://lion/weights/step-00000001", optimizer=True),
        lambda: delete_checkpoint(host.runs_dir, "tinker://on/weights/step-00000001"),
        *(partial(spec_in, section, "HERE") for section in (
            {"method": "dora"}, {"init": "pissa"}, {"train_modules": ["norm"]}, {"rank": "2"},
        )),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((ConfigError, FormatError)) as error:
            call()
        wording(str(error.value))
    host.load_state("next", "tinker://lion/weights/step-00000001", optimizer=False)
    assert state_of(host, "next")[1].step == 0


# --- sampling --------------------------------------------------------------------------------------------------------


def drawn(host, *requests):
    return [result for _, result in sorted(host.sample(requests), key=lambda pair: pair[0])]


def request(source, prompt=(5, 6, 7), **options):
    return SampleRequest(source, np.array(prompt, np.int32), **{"max_tokens": 6, "seed": 1, "stop": []} | options)


def batches_of(monkeypatch):
    """The requests of each batch that a host computes, and how many adapters it has; 0: that of the engine."""
    batches, own = [], sampled

    def counted(engine, pending, is_shortage, batch=None):
        batches.append((sorted(pending), len(batch.bank) if batch else 0))
        return own(engine, pending, is_shortage, batch)

    monkeypatch.setattr("dualtune.use.tinker.sample_batches.sampled", counted)
    return batches


def test_samples_are_those_of_their_own_weights_whoever_trains(host, monkeypatch):
    """Two runs of unlike ranks and layers, the base, and a run's weights of before its last update, in one batch; and a
    path on disk. Their prompts are scored in one forward pass."""
    batches, passes = batches_of(monkeypatch), []
    trained(host, "a")
    trained(host, "b", replace(LORA, seed=8, rank=2, train_mlp=host.backend.name == "numpy"))
    before = host.save_sampler("a", None)
    named = host.save_sampler("a", "named")
    old_weights = {name: x.copy() for name, x in state_of(host, "a")[0].items()}
    host.forward_backward("a", supervised(5), "cross_entropy", {})
    host.optim_step("a", replace(ADAM, learning_rate=0.1))
    after, other = host.save_sampler("a", None), host.save_sampler("b", None)
    sources = (before, after, other, None, named)
    drawn(host, *map(request, sources))  # an engine is tried before it computes with several adapters
    batches.clear()
    engine = host._seat.present(BASE_ONLY)
    own = engine.target_logprobs
    monkeypatch.setattr(engine, "target_logprobs", lambda batch: passes.append(len(batch.tokens_BT)) or own(batch))
    results = drawn(host, *(request(source, num_samples=2, prompt_logprobs=True) for source in sources))
    assert batches == [([*range(5)], 4)] and passes == [4]  # two have the same weights
    seat = host._seat
    states = {before: old_weights, after: state_of(host, "a")[0], other: state_of(host, "b")[0], named: old_weights}
    for source, result in zip(sources, results, strict=True):
        engine = seat.use(host._weights(source), BASE_ONLY)
        state = states.get(source) or engine.neutral_state()
        engine.load_adapter_state(state)
        seat._weights = None
        (alone,) = token_logprobs(engine, [np.array([5, 6, 7], np.int32)])
        assert result.prompt_logprobs[1:] == pytest.approx(alone.logprobs[1:], abs=tolerances.LOGPROBS)
        for sample, sequence in enumerate(result.sequences):
            choose = Chooser(Sampling(6, 1.0, seed=1), frozenset(), numbers=(sample,), keeps_logprobs=True)
            assert sequence.tokens.tolist() == [*engine.generate(np.array([5, 6, 7], np.int32), choose=choose)]
            assert sequence.logprobs == pytest.approx(choose.logprobs, abs=1e-4)
            assert sequence.stop_reason == "length" and len(sequence.tokens) == 6
    assert not np.array_equal(results[0].prompt_logprobs[1:], results[1].prompt_logprobs[1:])
    # The run goes on as if nothing had been sampled.
    host.forward_backward("a", supervised(6), "cross_entropy", {})
    host.optim_step("a", ADAM)


@pytest.mark.parametrize("reason", ["the engine cannot", "no room", "no room for two", "large numbers"])
def test_sources_follow_each_other_where_they_cannot_be_one_batch(open_host, monkeypatch, reason):
    def refuses(*_):
        raise CannotBatch("not this model")

    told = []
    host, batches = open_host("numpy", tell=told.append), batches_of(monkeypatch)
    for number in range(3):
        trained(host, f"run{number}", replace(LORA, seed=number))
    requests = [request(host.save_sampler(f"run{number}", None)) for number in range(3)]
    together = drawn(host, *requests)
    banked = host._seat.banked
    assert drawn(host, *requests[:2]) and host._seat.banked is banked is not None  # its factors are on the device
    host.forward_backward("run0", supervised(5), "cross_entropy", {})
    assert host._seat.banked is None
    batches.pop()
    weights = host._samplers[requests[1].source]
    name = next(name for name in weights.tensors if name.endswith("lora_A.weight"))
    if reason == "the engine cannot":
        monkeypatch.setattr("dualtune.engine.testing.numpy_engine.check_base_alone", refuses)
    elif reason == "no room":
        monkeypatch.setattr(host._sample_batches, "_banked", lambda *_: (_ for _ in ()).throw(MemoryError))
    elif reason == "no room for two":
        monkeypatch.setattr("dualtune.engine.memory.serving.BANK_SHARE", 0.0)
    else:
        weights.tensors[name] = weights.tensors[name].copy()
        weights.tensors[name][0, 0] = 1e9  # float16 does not hold it
    apart = drawn(host, *requests)
    if reason == "large numbers":
        assert batches == [([0, 1, 2], 3), ([0, 2], 2), ([1], 0)]
        together[1] = apart[1]
    else:
        assert batches == [([0, 1, 2], 3), *(([i], 0) for i in range(3))]
    assert [each.sequences[0].tokens.tolist() for each in apart] == [
        each.sequences[0].tokens.tolist() for each in together
    ]
    drawn(host, *requests)
    assert len(told) == (reason != "no room for two")  # once


def test_a_sampler_of_another_rank_needs_no_other_engine(open_host, monkeypatch):
    host = open_host("numpy")
    trained(host, "other", replace(LORA, rank=2))
    path = host.save_sampler("other", "named")
    trained(host, "run")
    engine = host._seat.present(BASE_ONLY)
    before = state_of(host, "run")
    (by_bank,) = drawn(host, request(path))
    assert host._seat.present(BASE_ONLY) is engine
    assert_same(state_of(host, "run"), before)
    monkeypatch.setattr(host._sample_batches, "_banked", lambda sources: None)
    (by_engine,) = drawn(host, request(path))
    assert host._seat.present(BASE_ONLY) is not engine
    assert by_bank.sequences[0].tokens.tolist() == by_engine.sequences[0].tokens.tolist()


def test_a_sampled_text_has_the_logprobs_that_training_sees(host):
    trained(host, "run")
    path = host.save_sampler("run", None)
    (result,) = drawn(host, request(path, max_tokens=8, topk_sample_logprobs=2, topk_prompt_logprobs=3))
    (sequence,) = result.sequences
    text = np.concatenate([[5, 6, 7], sequence.tokens])
    scored = host.forward("run", [Datum(text[:-1].astype(np.int32), {"target_tokens": text[1:]})], "cross_entropy", {})
    assert sequence.logprobs == pytest.approx(scored.outputs[0]["logprobs"][2:], abs=1e-4)
    assert sequence.top.tokens.shape == (8, 2) and result.prompt_top.tokens.shape == (3, 3)
    assert result.prompt_logprobs is None and (result.prompt_top.tokens[0] == -1).all()


def test_what_ends_a_continuation(host):
    (free,) = drawn(host, request(None, max_tokens=12)).pop().sequences
    fourth = int(free.tokens[3])
    first = free.tokens.tolist().index(fourth)
    by_id, turn, text = drawn(
        host,
        request(None, max_tokens=12, stop=[fourth]),
        request(None, max_tokens=12, stop=None),
        request(None, max_tokens=12, stop=[host._model.tokenizer.decode([int(free.tokens[0])]) or "?"]),
    )
    (sequence,) = by_id.sequences
    assert sequence.stop_reason == "stop" and sequence.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert len(sequence.logprobs) == first + 1
    assert turn.sequences[0].tokens.tolist() == free.tokens[: len(turn.sequences[0].tokens)].tolist()
    assert text.sequences[0].stop_reason in ("stop", "length")
    (whole,) = drawn(host, request(None, max_tokens=None, prompt=[5] * (host.max_length - 3)))
    assert len(whole.sequences[0].tokens) == 3


def test_one_bad_request_leaves_the_others(open_host, wording):
    host = open_host("numpy")
    wrong = [
        request("memory:run/1"), request("tinker://run/weights/x"), request(None, prompt=[]),
        request(None, prompt=[-1]), request(None, prompt=[5] * host.max_length), request(None, num_samples=0),
        request(None, num_samples=10**6), request(None, max_tokens=0), request(None, temperature=math.nan),
        request(None, top_p=0.0), request(None, top_k=-2), request(None, topk_prompt_logprobs=999),
        request(None, topk_sample_logprobs=-1), request(None, stop=[""]),
        request(None, seed=-1),
    ]  # fmt: skip
    results = drawn(host, *wrong, request(None))
    assert len(results.pop().sequences[0].tokens) == 6
    wording([str(each) for each in results])
    assert all(isinstance(each, ConfigError) for each in results)


def test_few_samplers_without_a_name_are_kept(open_host):
    host = open_host("numpy")
    trained(host, "run", steps=1)
    paths = [host.save_sampler("run", None) for _ in range(SAMPLERS_KEPT + 1)]
    results = drawn(host, *(request(path) for path in paths))
    assert [isinstance(each, ConfigError) for each in results] == [True] + [False] * SAMPLERS_KEPT


def test_samplers_on_disk_leave_the_memory_and_come_back(open_host):
    host = open_host("numpy")
    trained(host, "run", steps=1)
    paths = [host.save_sampler("run", f"s{number}") for number in range(SAMPLERS_KEPT + 2)]
    assert [*host._samplers] == paths[2:]
    first, again = drawn(host, request(paths[0]), request(paths[-1]))
    assert first.sequences[0].tokens.tolist() == again.sequences[0].tokens.tolist()
    assert len(host._samplers) == SAMPLERS_KEPT and paths[0] in host._samplers
    delete_checkpoint(host.runs_dir, paths[0])
    assert isinstance(drawn(host, request(paths[0]))[0], ConfigError)
