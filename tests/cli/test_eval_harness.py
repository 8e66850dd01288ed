"""The engine as a model of lm-eval: against log-probabilities computed directly, and in the real package."""

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, EnvironmentFault
from dualtune.engine.backend import IGNORE_INDEX, Batch
from dualtune.engine.decoding import CannotBatch
from dualtune.engine.testing.numpy_engine import NumpyDecoding
from dualtune.train.generation.inference import load_model, stream_text
from dualtune.train.generation.sampling import Sampling
from dualtune.use.scoring.harness import HarnessModel, check_installed, run

NUMPY = ("--platform", "numpy")


@pytest.fixture(scope="module")
def loaded(open_backend, tiny_softmax):
    backend = open_backend("numpy")
    return load_model(backend, str(tiny_softmax)), backend


@pytest.fixture
def model(loaded):
    return HarnessModel(*loaded, max_tokens=64, show=lambda done, total: None)


def asked(*args):
    return SimpleNamespace(args=args)


def logprobs(model, ids):
    """log p of every token after those before it, of the whole vocabulary, by the engine itself."""
    tokens = np.array([ids], np.int32)
    ones = np.ones_like(tokens)
    batch = Batch(tokens, ones * IGNORE_INDEX, ones, np.arange(len(ids), dtype=np.int32)[None], ones.astype(np.uint32))
    return model.engine.logprobs(batch)[0]


def test_loglikelihood_is_the_sum_over_the_continuation(loaded, model):
    llm = loaded[0]
    context, continuation = "2 plus 2 is", " 4!"
    ids = llm.tokenizer.encode(context + continuation, special=True).tolist()
    found = logprobs(llm, ids)
    expected = sum(found[t - 1, ids[t]] for t in range(len(ids) - len(continuation), len(ids)))
    best = "".join(llm.tokenizer.decode([int(found[len(ids) - len(continuation) - 1].argmax())]))
    _, (_, best_is_greedy), (logprob, is_greedy) = (
        model.loglikelihood(  # shortest first: they are computed longest first
            [asked("", "x"), asked(context, best), asked(context, continuation)]
        )
    )
    assert logprob == pytest.approx(expected, rel=1e-5) and not is_greedy
    assert best_is_greedy


def test_a_space_at_the_end_of_a_context_belongs_to_the_continuation(model):
    (with_space, _), (without, _) = model.loglikelihood([asked("2 is ", "4"), asked("2 is", " 4")])
    assert with_space == without


def test_rolling_predicts_every_token_once_however_it_is_cut(loaded):
    """This model sees the last token alone, so windows change nothing."""
    text = "a text of 32 characters, or more"
    whole, cut = (HarnessModel(*loaded, max_tokens=n, show=lambda *_: None) for n in (64, 7))
    found = cut.loglikelihood_rolling([asked(text), asked(""), asked("b")])
    ids = [1, *loaded[0].tokenizer.encode(text, special=False).tolist()]
    table = logprobs(loaded[0], ids)
    assert found[0] == pytest.approx(sum(table[t - 1, ids[t]] for t in range(1, len(ids))), rel=1e-5)
    assert found == pytest.approx(whole.loglikelihood_rolling([asked(text), asked(""), asked("b")]))
    assert found[1] == 0


def test_the_windows_of_rolling_keep_their_context(loaded, monkeypatch):
    """With 4 tokens a window: as the example in lm-eval's documentation, with the target inside the window."""
    model = HarnessModel(*loaded, max_tokens=4, show=lambda *_: None)
    seen = []
    monkeypatch.setattr(
        model, "_scored", lambda windows, with_greedy: (seen.extend(windows), np.zeros((len(windows), 2)))[1]
    )
    model.loglikelihood_rolling([asked("abcdefgh")])
    ids = [1, *loaded[0].tokenizer.encode("abcdefgh", special=False).tolist()]
    assert [(window.tolist(), start) for window, start in seen] == [
        (ids[0:4], 1), (ids[3:7], 1), (ids[5:9], 2),
    ]  # fmt: skip


def test_generation_ends_before_the_first_stop_text(loaded, model):
    whole, *_ = model.generate_until([asked("abc", {"until": [], "max_gen_toks": 12})])
    assert len(whole) > 3
    stop = whole[2:4]
    cut, one, none = model.generate_until(
        [asked("abc", {"until": ["never", stop], "max_gen_toks": 12}), asked("abc", {"until": stop}),
         asked("abc", {"until": whole[0]})]
    )  # fmt: skip
    assert cut == one == whole[: whole.index(stop)] and none == ""


def test_of_two_stop_texts_in_one_piece_the_first_counts(loaded):
    pieces = SimpleNamespace(
        stop_ids=frozenset(),
        stop_text=None,
        encode_text=lambda text: np.array([5], np.int32),
        decode=lambda ids: "ab|cd" * len(ids),
    )
    model = HarnessModel(replace(loaded[0], tokenizer=pieces), loaded[1], max_tokens=64, show=lambda *_: None)
    assert model.generate_until([asked("x", {"until": ["d", "|"]})]) == ["ab"]


LONG = "2 plus 2 is 4, and 3 plus 3 is"
SAMPLED = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 6}
REQUESTS = [
    ("a", {"until": ["\n"], "max_gen_toks": 5}),
    (LONG, {"until": [], "max_gen_toks": 12}),
    ("", {"max_gen_toks": 3}),
    ("abc", SAMPLED),
    (LONG, SAMPLED | {"top_p": 0.9}),
    ("b", {"max_gen_toks": 0}),
]


def one_by_one(llm, context, options):
    """The answer without stop texts, from the engine's generation of a single text."""
    ids = llm.tokenizer.encode_text(context)[-(64 - options["max_gen_toks"]) :]
    sampling = Sampling(options["max_gen_toks"], options.get("temperature", 0.0), options.get("top_p", 1.0))
    ids = ids if len(ids) else np.array([llm.tokenizer.bos_id], np.int32)
    return "".join(stream_text(llm, ids, sampling))


def test_answers_of_a_batch_are_those_of_single_requests_in_their_order(loaded, model):
    texts = [one_by_one(loaded[0], *request) for request in REQUESTS]
    assert len({*texts}) == len(REQUESTS) and all(texts[:-1])
    assert model.generate_until([asked(*request) for request in REQUESTS]) == texts
    # Each with stop texts of its own, in another order; what a request draws depends on no other.
    stopping = [(context, options | {"until": [text[1:3] or "x", "never"]})
                for (context, options), text in zip(REQUESTS[::-1], texts[::-1], strict=True)]  # fmt: skip
    cut = [text[: text.index(text[1:3])] if len(text) > 1 else text for text in texts[::-1]]
    assert model.generate_until([asked(*request) for request in stopping]) == cut
    assert model.generate_until([]) == []


def test_requests_share_forward_passes_and_end_with_their_stop_texts(loaded, monkeypatch):
    contexts = ("abc", LONG, "b")
    texts = [one_by_one(loaded[0], context, {"max_gen_toks": 8}) for context in contexts]
    shown, passes = [], []
    model = HarnessModel(*loaded, max_tokens=64, show=lambda *counts: shown.append(counts))
    model.generate_until([asked("a", {}), asked("b", {})])  # the trial of the batch comes once
    for name in ("enter", "advance"):
        computed = getattr(NumpyDecoding, name)
        monkeypatch.setattr(
            NumpyDecoding, name, lambda self, rows, computed=computed: passes.append(len(rows)) or computed(self, rows)
        )
    shown.clear()
    stops = [texts[0][2:4], None, texts[2][:1]]
    options = [{"until": stop, "max_gen_toks": 8} for stop in stops]
    found = model.generate_until([asked(*request) for request in zip(contexts, options, strict=True)])
    assert found == [texts[0][: texts[0].index(stops[0])], texts[1], ""]
    last = next(n for n in range(1, 9) if stops[0] in texts[0][:n])  # a token is a byte
    assert passes == [3, *[2] * (last - 1), *[1] * (8 - last)]
    assert shown == [(1, 3), (2, 3), (3, 3)]


def test_a_repeated_request_is_sampled_anew(loaded, model):
    """As tasks with `repeats` need it. The first answer is that of a single request."""
    answers = model.generate_until([asked("abc", SAMPLED), asked("x", SAMPLED), *[asked("abc", SAMPLED)] * 3])
    assert answers[0] == one_by_one(loaded[0], "abc", SAMPLED)
    assert len({answers[0], *answers[2:]}) > 2
    assert answers == model.generate_until([asked("abc", SAMPLED), asked("x", SAMPLED), *[asked("abc", SAMPLED)] * 3])


def test_without_lm_eval_it_is_one_clear_line(dualtune_main, config_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(EnvironmentFault, match="lm_eval cannot be imported"):
        check_installed()
    result = dualtune_main("eval", config_file(), "--base", "--harness", "arc_easy", *NUMPY)
    assert (result.returncode, result.stderr.count("\n")) == (4, 1)
    assert "pip install 'dualtune[harness]'" in result.stderr


class StandInForLmEval:
    """What `run` uses of the package. Its evaluation reads a request, calls `then`, and reports a result."""

    def __init__(self, monkeypatch, then=lambda lm: None):
        self.then, self.all_tasks = then, ["known"]
        for name, content in {
            "lm_eval": {"simple_evaluate": self.evaluate},
            "lm_eval.tasks": {"TaskManager": lambda: self},
            "lm_eval.evaluator": {"get_git_commit_hash": lambda: os.write(2, b"fatal: not a git repository")},
            "lm_eval.api.model": {"LM": object},
        }.items():
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))

    def evaluate(self, *, model, **options):
        print("0%|     | 0/2", file=sys.stderr)
        self.then(model)
        sys.modules["lm_eval.evaluator"].get_git_commit_hash()
        return {"results": {"known": {"alias": "known", "name": "known", "sample_len": 2, "acc,none": 0.5}}}


def harness_of(loaded):
    return run(loaded[0], "no name", loaded[1], ["known"], limit=None, show=lambda *_: None)


@pytest.fixture
def of_64_tokens(monkeypatch):
    monkeypatch.setattr("dualtune.use.scoring.harness._max_tokens", lambda *_: 64)


def test_metrics_are_reported_and_bars_are_not(loaded, of_64_tokens, monkeypatch, capfd):
    StandInForLmEval(monkeypatch)
    assert harness_of(loaded) == {"known": {"acc,none": 0.5}}
    assert capfd.readouterr().err == ""


def test_answers_that_must_follow_each_other_are_told_past_the_silence(loaded, of_64_tokens, monkeypatch, capfd):
    class OneByOne:
        def __getattr__(self, name):
            return getattr(loaded[0].engine, name)

        def decoding(self):
            raise CannotBatch("its layers keep a state")

    answers, requests = [], [asked(*request) for request in REQUESTS]
    StandInForLmEval(monkeypatch, lambda lm: answers.extend(lm.generate_until(requests)))
    single = replace(loaded[0], engine=OneByOne())
    run(
        single, "no name", loaded[1], ["known"], limit=None, show=lambda *_: None,
        tell=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    assert answers == [one_by_one(loaded[0], *request) for request in REQUESTS]
    assert capfd.readouterr().err == "answers one by one: its layers keep a state\n"


def test_a_fault_of_a_task_is_one_line_and_one_of_the_engine_stays_itself(loaded, of_64_tokens, monkeypatch):
    def bad_template(lm):
        raise KeyError("'x' is undefined\nmore lines")

    StandInForLmEval(monkeypatch, bad_template)
    with pytest.raises(ConfigError, match=r"^--harness known: KeyError: .*'x' is undefined"):
        harness_of(loaded)

    def lost_connection(lm):
        raise OSError("no route to host\nmore lines")

    StandInForLmEval(monkeypatch, lost_connection)
    with pytest.raises(EnvironmentFault, match=r"^--harness known: OSError: no route to host$"):
        harness_of(loaded)
    StandInForLmEval(monkeypatch, lambda lm: lm.generate_until([asked("a", {"max_gen_toks": "a word"})]))
    with pytest.raises(ValueError, match="invalid literal for int"):
        harness_of(loaded)


BAD_TASKS = {
    '{"q": 1}\n{"q": 2}\n': "ParserError: ",
    "a: b\n": "ValueError: Unknown config shape",
    "task: x\ndataset_path: json\n": "",
    "task: x\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{docs}'}}}}\ntest_split: test\n"
    "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{{{nofield.x}}}}'\n": "UndefinedError: ",
}


@pytest.mark.parametrize(("text", "said"), BAD_TASKS.items(), ids=["json", "no task", "no data", "no field"])
def test_a_bad_task_file_of_lm_eval_is_one_clear_line(dualtune_main, config_file, tmp_path, write_rows, text, said):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `harness`)")
    docs, file = write_rows([{"q": "2 is"}], "docs.jsonl"), tmp_path / "bad.yaml"
    file.write_text(text if text.startswith("{") else text.format(docs=docs))
    result = dualtune_main("eval", config_file(), "--base", "--harness", file, *NUMPY)
    assert result.returncode in (2, 4) and f"--harness {file}: {said}" in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1


def test_tasks_of_lm_eval_run_on_the_engine(dualtune_main, config_file, tmp_path, write_rows):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `harness`)")
    docs = write_rows([{"q": f"{i} is", "choices": [" 4", " 5"], "label": i % 2} for i in range(6)], "docs.jsonl")
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: '{docs}'}}}}\ntest_split: test\n"
    kinds = {
        "choice": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: choices\ndoc_to_target: label\n",
        "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{q}}'\n"
        "metric_list: [{metric: bits_per_byte}]\n",
        "generated": "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '4'\n"
        "generation_kwargs: {until: ['!'], max_gen_toks: 4}\nmetric_list: [{metric: exact_match}]\n",
    }
    files = [tmp_path / f"{kind}.yaml" for kind in kinds]
    for file, text in zip(files, kinds.values(), strict=True):
        file.write_text(f"task: {file.stem}\n{common}{text}")
    result = dualtune_main("eval", config_file(), "--base", "--harness", ",".join(map(str, files)), "--json", *NUMPY)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)["harness"]
    assert found.keys() == kinds.keys()
    assert 0 <= found["choice"]["acc,none"] <= 1 and found["rolling"]["bits_per_byte,none"] > 0
    assert found["generated"]["exact_match,none"] == 0
    assert all("," in key for numbers in found.values() for key in numbers)
    assert result.stderr == "platform    numpy: as requested\n"
    unknown = dualtune_main("eval", config_file(), "--base", "--harness", "no_such_task", *NUMPY)
    assert (unknown.returncode, "lm-eval has no task 'no_such_task'" in unknown.stderr) == (2, True)
