"""Generation: greedy against transformers' generate(), sampling against the probabilities, stopping."""

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.train.generation.inference import LoadedModel, load_model, stream_text
from dualtune.train.generation.sampling import Chooser, Sampling

STORY = "Once upon a time, there was a little girl"
GREEDY = " named Lily. She loved to play outside in the park. One day, she saw a big, red ball."


@pytest.fixture(scope="session")
def torch_model(tiny_llama, open_backend):
    return load_model(open_backend("torch"), str(tiny_llama))


def generated(model, prompt, **options) -> str:
    return "".join(stream_text(model, model.tokenizer.encode_prompt(prompt), Sampling(**options)))


def transformers_greedy(path, ids, num_tokens) -> list[int]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = torch.tensor([ids.tolist()])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=num_tokens,
                         eos_token_id=None, pad_token_id=0)  # fmt: skip
    return out[0, len(ids) :].tolist()


# --- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_a_pretrained_model_tells_its_story(shared, open_backend, name):
    model = load_model(open_backend(name), str(shared("models/stories260k")))
    assert generated(model, STORY, max_tokens=30).startswith(GREEDY[:60])
    assert generated(model, STORY, max_tokens=200).startswith(GREEDY)


def test_the_story_is_transformers_s(shared, open_backend):
    path = shared("models/stories260k")
    model = load_model(open_backend("torch"), str(path))
    ids = model.tokenizer.encode_prompt(STORY)
    ours = list(model.engine.generate(ids, choose=Chooser(Sampling(60), frozenset())))
    assert ours == transformers_greedy(path, ids, 60)


def test_greedy_tokens_are_transformers_s(tiny_llama, torch_model):
    ids = torch_model.tokenizer.encode_prompt("Say something.")
    ours = list(torch_model.engine.generate(ids, choose=Chooser(Sampling(40), frozenset())))
    assert ours == transformers_greedy(tiny_llama, ids, 40)


def test_pieces_join_to_the_whole_and_split_no_character():
    """Two bytes of é in two tokens: shown when it is whole."""

    class Bytes:
        stop_ids, stop_text = frozenset(), ""

        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    class Engine:
        def generate(self, prompt, *, choose, cache):
            yield from "aé€!".encode() * 40

    model = LoadedModel(Engine(), Bytes())
    pieces = list(stream_text(model, np.zeros(1, int), Sampling(999)))
    assert [piece for piece in pieces if piece] == [*"aé€!"] * 40
    assert len(pieces) == 40 * len("aé€!".encode()) + 1  # one a token, so that a limit of time is looked at
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        list(stream_text(model, np.zeros(0, int), Sampling(9)))


# --- sampling --------------------------------------------------------------------------------------------------------

PROBS = np.array([0.05, 0.5, 0.15, 0.3])
LOGITS = np.log(PROBS).astype(np.float32)


def drawn(n=5_000, **options) -> np.ndarray:
    """How often each token is chosen."""
    choose = Chooser(Sampling(n, **options), frozenset())
    return np.bincount([choose(LOGITS) for _ in range(n)], minlength=4) / n


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    expected = PROBS ** (1 / temperature) / (PROBS ** (1 / temperature)).sum()
    assert drawn(temperature=temperature) == pytest.approx(expected, abs=0.03)  # four standard errors are 0.028


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, [1]), (0.49, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.81, [1, 2, 3]), (1, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    expected = np.isin(np.arange(4), kept) * PROBS
    assert drawn(temperature=1.0, top_p=top_p) == pytest.approx(expected / expected.sum(), abs=0.03)


def test_top_p_keeps_what_transformers_keeps():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    for top_p in (0.3, 0.6, 0.9):
        logits = rng.normal(0, 2, 20).astype(np.float32)
        theirs = transformers.TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=int), torch.tensor(logits[None]))[0]
        choose = Chooser(Sampling(5000, 1.0, top_p), frozenset())
        assert {choose(logits) for _ in range(5000)} <= set(np.flatnonzero(np.isfinite(theirs.numpy())))


def test_temperature_zero_takes_the_largest():
    assert drawn(n=10, temperature=0.0)[1] == 1.0


def test_extreme_logits_are_no_trouble():
    choose = Chooser(Sampling(2, 0.01), frozenset())
    assert choose(np.array([-1e30, 3e38, 0, 0], np.float32)) == 1
    assert drawn(n=10, temperature=1e-310)[1] == 1.0


def test_a_seed_repeats_and_another_does_not(torch_model):
    options = {"max_tokens": 30, "temperature": 1.0}
    texts = [generated(torch_model, "Hello", seed=seed, **options) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


# --- stopping --------------------------------------------------------------------------------------------------------


def test_it_stops_at_a_stop_token_and_at_the_limit():
    choose = Chooser(Sampling(3), frozenset({2}))
    a, stop = np.eye(4)[[1, 2]]
    assert [choose(a), choose(stop)] == [1, None]
    choose = Chooser(Sampling(2), frozenset({2}))
    assert [choose(a) for _ in range(3)] == [1, 1, None]


@pytest.mark.parametrize("stop", ["</s>", "<|im_end|>"])
def test_the_end_of_the_answer_is_not_shown(torch_model, stop):
    """A model that says "ok" and then the end token."""
    answer = [*torch_model.tokenizer.encode("ok", special=False), torch_model.tokenizer.encode(stop, special=False)[0]]

    class Scripted:
        def generate(self, prompt, *, choose, cache):
            for wanted in [*answer, *answer]:
                token = choose(np.eye(262, dtype=np.float32)[wanted])
                if token is None:
                    return
                yield token

    model = LoadedModel(Scripted(), torch_model.tokenizer)
    assert generated(model, "Hi", max_tokens=20) == "ok"


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lab", ["torch"], indirect=True)
def test_an_adapter_of_another_model_is_refused(lab, tiny_softmax, open_backend, shared):
    result = lab.run(train__steps=1)
    with pytest.raises(ConfigError, match=r"no linear layer is called 'model\.layers"):
        load_model(open_backend("numpy"), str(tiny_softmax), result.adapter_dir)
    with pytest.raises(ConfigError, match=r"does not fit the model .*stories260k: adapter: tensors of another shape"):
        load_model(lab.backend, str(shared("models/stories260k")), result.adapter_dir)


@pytest.mark.parametrize(("trained", "used"), [("auto", True), ("none", False)])
def test_an_adapter_is_used_with_the_template_that_it_was_trained_with(lab, trained, used):
    result = lab.run(train__steps=1, data__template=trained)
    assert (load_model(lab.backend, str(lab.model), result.adapter_dir).tokenizer.template is not None) is used
    assert load_model(lab.backend, str(lab.model), result.adapter_dir, template="none").tokenizer.template is None
