"""A task whose answers need two new tokens: learned, resumed, exported, and answered alike everywhere."""

import json
from unittest.mock import Mock

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import Config
from dualtune.data.documents import Data
from dualtune.data.survey import unseen_tokens
from dualtune.data.tokens.new_tokens import with_new_tokens
from dualtune.data.tokens.tokenizer import Tokenizer
from dualtune.data.tokens.tokenizer_files import load
from dualtune.engine.backend import IGNORE_INDEX, Batch
from dualtune.model.beside import NewToken
from dualtune.model.formats.directory import read_adapter
from dualtune.model.gguf import CONTROL, USER, model_from_gguf
from dualtune.model.weight_files import weights_in
from dualtune.show.run import run
from dualtune.train.generation.inference import load_model, stream_text
from dualtune.train.generation.sampling import Sampling
from dualtune.use.export import gguf_file

YES, NO = "<|yes|>", "<|no|>"
NEW = [YES, NO]
TOKENS = [*map(NewToken, NEW)]
ROWS = "token_adapter.trainable_tokens_delta"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path):
    rows = [{"prompt": f"{digit} even?", "completion": NEW[digit % 2]} for digit in range(10)]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(model, data, place, **train):
    return Config.model_validate({
        "model": {"name": str(model), "dtype": "float32"},
        "adapter": {"rank": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj", "down_proj"]},
        "data": {"train": str(data), "eval": 0, "new_tokens": NEW, "max_length": 64, "template": "none"},
        "train": {"steps": 30, "documents_per_step": 10, "learning_rate": 2e-2, "warmup": 0.0, "max_grad_norm": 1.0,
                  "schedule": "constant", "weight_decay": 0.0} | train,
        "run": {"dir": str(place), "report": False, "save_every": 10},
    })  # fmt: skip


def answers(backend, model, adapter=None):
    loaded = load_model(backend, str(model), adapter, dtype="float32", template="none")
    prompts = [loaded.tokenizer.encode_text(f"{digit} even?") for digit in range(10)]
    return ["".join(stream_text(loaded, prompt, Sampling(2))) for prompt in prompts]


def logprobs(backend, model, adapter):
    loaded = load_model(backend, str(model), adapter, dtype="float32", template="none")
    tokens = loaded.tokenizer.encode_text(f"1 even?{YES}2{NO}")
    row = tokens[None]
    batch = Batch(row, row * 0 + IGNORE_INDEX, row * 0 + 1, np.arange(row.size)[None], np.zeros(row.shape, np.uint32))
    return loaded.engine.logprobs(batch)[0]


def in_peft(base, adapter):
    """What transformers and PEFT compute with the files of the adapter's directory."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(adapter), AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(len(tokenizer))
    model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        ids = torch.tensor(tokenizer(f"1 even?{YES}2{NO}")["input_ids"])[None]
        return model(ids).logits.log_softmax(-1)[0].numpy()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_task_is_learned_and_every_export_answers_alike(
    make_model, data, tmp_path, dualtune_main, open_backend, tied
):
    torch, mlx = open_backend("torch"), open_backend("mlx")
    pytest.importorskip("gguf")
    base = make_model(vocab_size=262, tie_word_embeddings=tied)
    result = run(config(base, data, tmp_path / "run"), torch)
    adapter = read_adapter(result.adapter_dir)
    assert adapter.new_tokens == tuple(TOKENS) and adapter.spec.beside.rows == (262, 263)
    assert sum(name.endswith(ROWS) for name in adapter.tensors) == (1 if tied else 2)
    expected = [NEW[digit % 2] for digit in range(10)]
    found = answers(torch, base, result.adapter_dir)
    assert [answer[: len(word)] for answer, word in zip(found, expected, strict=True)] == expected
    assert answers(mlx, base, result.adapter_dir) == found
    assert in_peft(base, result.adapter_dir) == pytest.approx(logprobs(torch, base, result.adapter_dir), abs=1e-4)
    for target, quantize in (("hf", "none"), ("mlx", "none"), ("gguf", "f32")):
        out = tmp_path / target
        words = ("export", result.adapter_dir, out, "--to", target, "--quantize", quantize, "--platform", "cpu")
        done = dualtune_main(*words)
        assert done.returncode == 0, done.stderr
        model = model_from_gguf(next(out.glob("*.gguf"))) if target == "gguf" else out
        assert json.loads((model / "config.json").read_text())["vocab_size"] == 264
        assert answers(mlx if target == "mlx" else torch, model) == found, target


def test_a_run_resumes_bitwise_and_goes_on_on_another_backend(make_model, data, tmp_path, open_backend):
    torch, base = open_backend("torch"), make_model(vocab_size=262)
    straight = run(config(base, data, tmp_path / "straight"), torch)
    run(config(base, data, tmp_path / "parts", steps=20), torch)
    parts = run(config(base, data, tmp_path / "parts"), torch)
    one, other = (read_adapter(result.adapter_dir).tensors for result in (straight, parts))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    run(config(base, data, tmp_path / "moved", steps=20), open_backend("mlx"))
    moved = run(config(base, data, tmp_path / "moved"), torch)
    assert moved.eval_loss is None and answers(torch, base, moved.adapter_dir) == answers(
        torch, base, straight.adapter_dir
    )


def test_new_rows_are_the_mean_of_the_pieces_and_spare_rows_are_used(make_model):
    for size in (262, 300):
        base = make_model(vocab_size=size)
        grown = with_new_tokens(base, TOKENS)
        assert with_new_tokens(base, TOKENS) == grown and with_new_tokens(grown, TOKENS) == grown
        assert [load(grown).rust.token_to_id(token.text) for token in TOKENS] == [262, 263]
        before, after = weights_in(base).tensors, weights_in(grown).tensors
        assert after["lm_head.weight"].shape == (max(size, 264), 64)
        assert json.loads((grown / "config.json").read_text())["vocab_size"] == max(size, 264)
        assert before.keys() == after.keys()
        table = np.fromfile(
            after["lm_head.weight"].file, np.float32, offset=after["lm_head.weight"].begin, count=264 * 64
        )
        pieces = Tokenizer(base).encode(YES, special=False)
        np.testing.assert_allclose(
            table.reshape(-1, 64)[262], table.reshape(-1, 64)[pieces].mean(axis=0, dtype=np.float64), rtol=1e-6
        )
        assert Tokenizer(grown).encode(f"a{YES}b{NO}", special=False).tolist()[1::2] == [262, 263]
        assert Tokenizer(grown).decode([262]) == YES and Tokenizer(base).fingerprint() != Tokenizer(grown).fingerprint()


def test_a_special_token_is_one_for_every_reader(make_model):
    transformers = pytest.importorskip("transformers")
    base, tokens = make_model(vocab_size=262), [NewToken(YES), NewToken(NO, special=True)]
    grown = with_new_tokens(base, tokens)
    assert grown != with_new_tokens(base, TOKENS)
    ours, theirs = Tokenizer(grown, special_tokens_in_text="allow"), transformers.AutoTokenizer.from_pretrained(grown)
    text = f"a{YES}b{NO}"
    assert ours.encode(text, special=False).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    ids = [262, 263]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == YES
    assert NO in theirs.all_special_tokens and YES not in theirs.all_special_tokens
    assert Tokenizer(grown).special_ids - Tokenizer(base).special_ids == {263}
    writer = Mock()
    gguf_file._add_vocabulary(writer, grown, 264)
    assert writer.add_token_types.call_args.args[0][262:] == [USER, CONTROL]
    with pytest.raises(ConfigError, match=r"data\.new_tokens: got '<\|no\|>', which is a special token"):
        with_new_tokens(grown, TOKENS)
    with pytest.raises(ConfigError, match=r"data\.new_special_tokens: got '<\|yes\|>', which is an ordinary token"):
        with_new_tokens(grown, [NewToken(YES, special=True)])


def test_a_new_token_that_no_document_has_is_named(make_model, data, tmp_path):
    base = make_model(vocab_size=262)
    for new, special, policy, unseen in (
        (NEW, [], "text", None),
        ([*NEW, "<|call|>"], [], "text", "<|call|>"),
        ([YES], [NO], "text", NO),  # plain text in the rows
        ([YES], [NO], "allow", None),
    ):
        given = config(base, data, tmp_path / "run")
        update = {"new_tokens": tuple(new), "new_special_tokens": tuple(special), "special_tokens_in_text": policy}
        given = given.model_copy(update={"data": given.data.model_copy(update=update)})
        tokenizer = Tokenizer.of(base, given.data)
        train, _ = Data(given).train_and_eval(tokenizer)
        found = unseen_tokens(given.data, train, tokenizer)
        assert [text.partition(": ")[2].partition(";")[0] for text in found] == ([unseen] if unseen else [])
        assert bool(found and "allow" in found[0]) == (unseen == NO)


def test_what_cannot_be_is_named(make_model, data, tmp_path, open_backend):
    backend, base = open_backend("torch"), make_model(vocab_size=262)
    for adapter, said in (
        ({"train_rows": ["no such token"]}, "adapter.train_rows: got 'no such token'"),
        ({"train_modules": ["embed_tokens"]}, "adapter.train_modules: got embed_tokens alone"),
        ({"train_modules": ["embed_tokens", "lm_head"], "train_rows": "new"}, "adapter.train_rows: got new, but"),
    ):
        settings = config(base, data, tmp_path / "run")
        settings = settings.model_copy(update={"adapter": settings.adapter.model_copy(update=adapter)})
        with pytest.raises(ConfigError, match=said):
            run(settings, backend)
