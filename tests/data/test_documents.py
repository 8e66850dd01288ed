"""Which tokens are targets. The oracle is a text written by hand: what the ids of the targets decode to."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError, DataError, EnvironmentFault
from dualtune.data.chat.conversations import Message
from dualtune.data.chat.examples import EQUAL_TEXTS, Example
from dualtune.data.documents import Data, Documents, tokenize
from dualtune.data.preferences import PreferenceCounts
from dualtune.data.sources.rows import BadRow
from dualtune.data.tokens.store import stored_in_memory
from dualtune.data.tokens.tokenize import State, _fitted, tokenize_rows
from dualtune.data.tokens.tokenizer import Tokenizer

BOS, EOS, IM_END = 1, 2, 4  # of the byte tokenizer


def chat(*turns):
    return Example("f", 1, tuple(Message(role, content) for role, content in turns))


def plain(prompt, completion):
    return Example("f", 1, (Message("user", prompt), Message("assistant", completion)), (), prompt, completion)


SUMS = chat(("system", "Be brief."), ("user", "What is 2+2?"), ("assistant", "It is 4."), ("user", "And 3+3?"),
            ("assistant", "6, of course."))  # fmt: skip


@pytest.fixture(scope="session")
def smollm2(shared) -> Tokenizer:
    return Tokenizer(shared("tokenizers/smollm2"))


@pytest.fixture(scope="session")
def chatml(tiny_llama) -> Tokenizer:
    return Tokenizer(tiny_llama)


@pytest.fixture(scope="session")
def bare(tiny_llama) -> Tokenizer:
    return Tokenizer(tiny_llama, "none")


def one(example, tokenizer, loss_on="assistant", max_length=1000):
    (document,) = tokenize([example], tokenizer, loss_on, max_length)
    return document


def pieces(document, tokenizer) -> list[str]:
    """The runs of targets of a document, each decoded with its special tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], document.loss_mask, [False]]).astype(int)))
    runs = [document.tokens[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return [tokenizer.decode_all(run) for run in runs]


def text_of(document, tokenizer) -> str:
    return tokenizer.decode_all(document.tokens)


# --- chats -----------------------------------------------------------------------------------------------------------

SUMS_TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n"
    "<|im_start|>assistant\nIt is 4.<|im_end|>\n<|im_start|>user\nAnd 3+3?<|im_end|>\n"
    "<|im_start|>assistant\n6, of course.<|im_end|>\n"
)
TARGETS = {
    "assistant": ["It is 4.<|im_end|>", "6, of course.<|im_end|>"],
    "last": ["6, of course.<|im_end|>"],
    "all": [SUMS_TEXT.rstrip("\n")],
}


@pytest.mark.parametrize("loss_on", TARGETS)
def test_smollm2_s_targets_are_the_answers_and_their_end_tokens(smollm2, loss_on):
    document = one(SUMS, smollm2, loss_on)
    assert pieces(document, smollm2) == TARGETS[loss_on]
    assert text_of(document, smollm2) == SUMS_TEXT  # nothing is added, nothing lost
    assert document.num_targets == document.loss_mask[1:].sum()


@pytest.mark.parametrize("loss_on", TARGETS)
def test_the_same_with_a_tokenizer_that_has_another_eos(chatml, loss_on):
    """<|im_end|> ends the turn, so no </s> follows it; the template writes the only <s>."""
    document = one(SUMS, chatml, loss_on)
    assert pieces(document, chatml) == [("<s>" if loss_on == "all" else "") + text for text in TARGETS[loss_on]]
    assert text_of(document, chatml) == "<s>" + SUMS_TEXT


def test_a_chat_that_ends_with_the_user_trains_no_end_of_it(chatml):
    document = one(chat(("user", "Hi"), ("assistant", "Ho"), ("user", "Bye")), chatml)
    assert pieces(document, chatml) == ["Ho<|im_end|>"]
    assert EOS not in document.tokens


def test_training_sees_the_prompt_that_generation_sees(chatml):
    document, prompt = one(plain("2+2=", "4"), chatml), chatml.encode_prompt("2+2=")
    assert document.tokens[: len(prompt)].tolist() == prompt.tolist()
    assert not document.loss_mask[: len(prompt)].any() and document.loss_mask[len(prompt)]


def test_a_template_without_an_end_token_gets_one(with_template):
    tokenizer = with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
                              "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    document = one(chat(("user", "Hi"), ("assistant", "Ho")), tokenizer)
    assert pieces(document, tokenizer) == ["Ho</s>"]
    assert text_of(document, tokenizer) == "user: Hi\nassistant: Ho</s>"


def test_the_end_token_behind_a_marked_turn_is_learned_with_it(with_template):
    """Markers around the content alone would otherwise teach a model that never stops."""
    tokenizer = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    assert pieces(one(SUMS, tokenizer), tokenizer) == ["It is 4.<|im_end|>", "6, of course.<|im_end|>"]


def test_a_document_whose_only_learned_token_is_its_first_has_nothing_to_predict():
    state, kept = _fitted([(np.array([7], np.int32), np.array([True]))], 8, split=False)
    assert (state, kept) == (State.NO_TARGET, [])


# --- plain texts -----------------------------------------------------------------------------------------------------


def test_without_a_template_the_completion_and_one_eos_are_targets(bare):
    document = one(plain("2+2 is ", "four é"), bare)
    assert pieces(document, bare) == ["four é</s>"]
    assert text_of(document, bare) == "<s>2+2 is four é</s>"
    assert (document.tokens[1:] == BOS).sum() == 0


def test_the_same_row_becomes_a_chat_with_a_template(chatml):
    document = one(plain("2+2 is ", "four"), chatml)
    assert text_of(document, chatml) == (
        "<s><|im_start|>user\n2+2 is <|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
    )
    assert pieces(document, chatml) == ["four<|im_end|>"]


def test_a_text_is_trained_whole(bare, chatml):
    for tokenizer in (bare, chatml):
        document = one(Example("f", 1, (), (), "", "Once.", is_text=True), tokenizer)
        assert (text_of(document, tokenizer), pieces(document, tokenizer)) == ("<s>Once.</s>", ["Once.</s>"])


def test_loss_on_all_trains_the_prompt_too(bare):
    assert pieces(one(plain("ab", "cd"), bare, "all"), bare) == ["abcd</s>"]


def test_no_token_lies_across_the_border(bare):
    """Generation starts from the prompt's own tokens, which end in `=`; `=7` could not follow them."""
    document, prompt = one(plain("3+4=", "7!"), bare), bare.encode("3+4=", special=True)
    assert pieces(document, bare) == ["7!</s>"]
    assert document.tokens[: len(prompt)].tolist() == prompt.tolist()
    assert document.loss_mask.tolist() == [False] * len(prompt) + [True] * 3
    inside = one(plain("3+4", "=7!"), bare)  # where nothing lies across, the text is left in one piece
    assert inside.tokens.tolist() == [*bare.encode("3+4=7!", special=True).tolist(), EOS]


def test_a_tokenizer_that_adds_an_eos_itself_gets_no_second_one(tiny_llama):
    from tokenizers import processors

    backend = Tokenizer(tiny_llama, "none")
    backend._rust.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    document = one(plain("ab", "cd"), backend)
    assert text_of(document, backend) == "<s>abcd</s>"
    assert pieces(document, backend) == ["cd</s>"]


# --- length ----------------------------------------------------------------------------------------------------------


def test_truncation_keeps_what_is_trainable_and_counts(bare):
    """<s> + 4 + 3 + </s> = 9 tokens; of the first 6 one is a target, of the first 5 none."""
    examples = [plain("abcd", "efg"), plain("ab", "c")]
    cut = tokenize(examples, bare, "assistant", 6)
    assert [pieces(document, bare) for document in cut] == [["e"], ["c</s>"]]
    assert (cut.num_rows, cut.num_truncated, cut.dropped) == (2, 1, {})
    dropped = tokenize(examples, bare, "assistant", 5)
    assert [pieces(document, bare) for document in dropped] == [["c</s>"]]
    assert (dropped.num_rows, dropped.num_truncated, sum(dropped.dropped.values())) == (2, 0, 1)
    assert dropped.summary() == (
        "1 document, 5 tokens, 2 of them targets (40%); 1 dropped: no trainable token within max_length"
    )
    whole = tokenize(examples, bare, "assistant", 9)
    assert (whole.num_tokens, whole.num_targets, whole.num_truncated) == (9 + 5, 4 + 2, 0)


def test_more_rows_than_a_chunk_stay_in_order(bare, monkeypatch):
    monkeypatch.setattr("dualtune.data.tokens.tokenize.ENCODE_ROWS", 3)
    documents = tokenize([plain("a", str(i)) for i in range(8)], bare, "assistant", 100)
    assert [pieces(document, bare) for document in documents] == [[f"{i}</s>"] for i in range(8)]


# --- templates -------------------------------------------------------------------------------------------------------


def test_rows_that_the_template_refuses_are_listed(with_template):
    template = "{% if messages[-2].content == 'And 3+3?' %}{{ raise_exception('no system turn') }}{% endif %}x"
    with pytest.raises(DataError) as caught:
        tokenize([SUMS, plain("a", "b"), SUMS], with_template(template), "all", 1000)
    assert str(caught.value).splitlines() == [
        "f:1: the chat template refuses this conversation: no system turn",
        "f:1: the chat template refuses this conversation: no system turn",
        "2 of 3 rows cannot be used. Fix or remove them, or set data.on_bad_row: skip. "
        "`dualtune check-data` lists all of them.",
    ]


def test_a_conversation_without_a_template_is_refused(bare):
    with pytest.raises(DataError, match=r"has no chat template, and a conversation needs one. Set data.template"):
        tokenize([SUMS], bare, "assistant", 1000)


def test_a_template_file_must_exist(tiny_llama):
    with pytest.raises(ConfigError, match=r"data\.template: got 'no\.jinja', allowed: auto, none, chatml"):
        Tokenizer(tiny_llama, "no.jinja")


def test_a_directory_without_a_tokenizer_is_an_environment_fault(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(EnvironmentFault, match="its tokenizer cannot be loaded"):
        Tokenizer(tmp_path)


def test_answers_end_at_eos_and_at_the_token_that_ends_a_turn(chatml, bare, smollm2):
    assert (chatml.stop_ids, bare.stop_ids) == ({EOS, IM_END}, {EOS})
    assert smollm2.stop_ids == {smollm2._rust.token_to_id("<|im_end|>")}


@pytest.mark.parametrize("ends", [3, [3, 0]])
def test_answers_end_where_the_model_s_generation_config_says(tiny_llama, tmp_path, ends):
    shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert Tokenizer(tmp_path / "model", "none").stop_ids == {EOS, *np.atleast_1d(ends)}


# --- held-out rows ---------------------------------------------------------------------------------------------------


def texts(documents, tokenizer):
    return [text_of(document, tokenizer) for document in documents]


def test_train_and_held_out_rows_are_disjoint_and_complete(make_config, write_rows, qa_rows, chatml):
    config = make_config(write_rows(qa_rows), {"data.eval": 0.25})
    train, held_out_ = Data(config).train_and_eval(chatml)
    assert (len(train), len(held_out_)) == (12, 4)
    everything = Data(make_config(write_rows(qa_rows))).train_and_eval(chatml)[0]
    assert sorted(texts(train, chatml) + texts(held_out_, chatml)) == sorted(texts(everything, chatml))
    examples = Data(config).held_out_examples(held_out_)
    assert [example.where for example in examples] == [document.where for document in held_out_]


def test_held_out_rows_of_an_array_on_one_line_are_found_again(make_config, qa_rows, chatml, tmp_path):
    path = tmp_path / "train.json"
    path.write_text(json.dumps(qa_rows))
    data = Data(make_config(path, {"data.eval": 0.25}))
    train, held_out_ = data.train_and_eval(chatml)
    examples = [*data.held_out_examples(held_out_)], [*data.training_examples(held_out_)]
    assert [len(part) for part in examples] == [4, 12]
    assert [[example.where for example in part] for part in examples] == [
        [document.where for document in part] for part in (held_out_, train)
    ]


def test_an_eval_file_is_used_whole(make_config, write_rows, qa_rows, chatml):
    other = write_rows(qa_rows[:3], "eval.jsonl")
    train, held_out_ = Data(make_config(write_rows(qa_rows), {"data.eval": str(other)})).train_and_eval(chatml)
    assert [len(train), len(held_out_)] == [16, 3]
    assert len(Data(make_config(write_rows(qa_rows), {"data.eval": None})).train_and_eval(chatml)[1]) == 0


def test_a_directory_s_valid_file_wins_over_the_default_share_alone(make_config, write_rows, qa_rows, chatml, tmp_path):
    (tmp_path / "data").mkdir()
    write_rows(qa_rows, "data/train.jsonl")
    write_rows(qa_rows[:5], "data/valid.jsonl")
    sizes = {
        share: tuple(map(len, Data(make_config(tmp_path / "data", {"data.eval": share})).train_and_eval(chatml)))
        for share in ("auto", 0.1, 0.25, 0)
    }
    assert sizes == {"auto": (16, 5), 0.1: (14, 2), 0.25: (12, 4), 0: (16, 0)}
    # Who names a split has chosen: its rows shall not be evaluated on again as if they were others.
    chosen = make_config({"path": str(tmp_path / "data"), "split": "train"}, {"data.eval": "auto"})
    assert tuple(map(len, Data(chosen).train_and_eval(chatml))) == (14, 2)


def test_several_sources_are_taken_together_and_know_where_they_are_from(make_config, write_rows, qa_rows, chatml):
    a, b = write_rows(qa_rows[:10], "a.jsonl"), write_rows([{"q": "Hi", "a": "Ho"}] * 3, "b.jsonl")
    sources = [str(a), {"path": str(b), "weight": 2, "columns": {"prompt": "q", "completion": "a"}}]
    train, held_out_ = Data(make_config(sources, {"data.eval": 0.25})).train_and_eval(chatml)
    assert (len(train), len(held_out_), train.weights) == (10, 3, (1.0, 2.0))
    where = {document.where for document in [*train, *held_out_]}
    assert where == {f"{a}:{n + 1}" for n in range(10)} | {f"{b}:{n + 1}" for n in range(3)}
    assert [train[i].where.startswith(str(b)) for i in range(10)] == (train.sources == 1).tolist()


# --- answers that are compared ---------------------------------------------------------------------------------------

PAIRS = [{"prompt": f"Question {n}?", "chosen": f" right {n}", "rejected": f" wrong {n} again"} for n in range(6)]
LABELLED = [{"prompt": f"Q{n}", "completion": f" a{n}", "label": n % 2 == 0} for n in range(5)]


def test_an_objective_needs_rows_of_its_kind(make_config, write_rows, wording):
    rows = {"pairs": PAIRS, "plain": [{"prompt": "a", "completion": "b"}], "labelled": LABELLED}
    rows["numbered"] = [row | {"label": int(row["label"])} for row in LABELLED]
    pairs, plain, labelled, numbered = (write_rows(some, f"{name}.jsonl") for name, some in rows.items())
    for path, objective in (
        (pairs, "sft"), (plain, "kto"), (plain, "dpo"), (labelled, "sft"), (labelled, "orpo"), (numbered, "kto"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            Data(make_config(path, {"train.objective": objective}))
        wording(str(error.value).replace(f"{path.parent}/", ""))


def test_a_pair_is_two_documents_side_by_side(make_config, write_rows, bare):
    path = write_rows(PAIRS)
    train, held_out_ = Data(make_config(path, {"train.objective": "dpo", "data.eval": 0.3})).train_and_eval(bare)
    assert (train.answers, len(train), len(held_out_)) == (2, 8, 4)  # both answers of a row are held out together
    assert (train.counted(1), train.summary().split(",")[0]) == ("1 pair", "4 pairs")
    for part in (train, held_out_):
        rows = [int(part[i].where.rpartition(":")[2]) for i in range(len(part))]
        assert rows[0::2] == rows[1::2]
        for i, row in enumerate(rows):
            document = part[i]
            learned = bare.decode(document.tokens[document.loss_mask & (document.tokens != bare.eos_id)].tolist())
            assert learned == PAIRS[row - 1]["rejected" if i % 2 else "chosen"]


def test_a_pair_is_dropped_whole(make_config, write_rows, bare):
    """A prompt that is too long leaves one answer without targets, or both."""
    rows = [*PAIRS, {"prompt": "word " * 90, "chosen": "b", "rejected": "c"}]
    config = make_config(write_rows(rows), {"train.objective": "dpo", "data.max_length": 64})
    train, _ = Data(config).train_and_eval(bare)
    assert (len(train), train.dropped) == (12, {"no trainable token within max_length": 1})
    one_sided = [([1, 2, 3], [0, 0, 1]), ([1, 2, 3, 4], [0, 0, 0, 1])]
    texts = [(np.array(ids, np.int32), np.array(mask, bool)) for ids, mask in one_sided]
    assert _fitted(texts, 3, split=False) == (State.TOO_LONG, [])
    assert _fitted(texts, 4, split=False)[0] == State.WHOLE
    late = [(np.array([1, 2, 3, last], np.int32), np.array([0, 0, 1, 1], bool)) for last in (4, 5)]
    assert _fitted(late, 3, split=False) == (State.TOO_LONG, [])  # what differs is cut off
    assert _fitted(late[:1], 3, split=False)[0] == State.CUT


def test_a_pair_that_the_template_makes_equal_is_a_bad_row(with_template):
    """Templates of many families cut off white space around a content."""
    trims = with_template("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}")
    chosen, rejected, other = (chat(("user", "Q"), ("assistant", answer)) for answer in ("A", " A ", "B"))
    pairs = [replace(chosen, rejected=rejected), replace(chosen, rejected=other)]
    counts = PreferenceCounts(max_length=64)
    bad, good = counts.rows(tokenize_rows(pairs, trims, "assistant", 64))
    assert (bad.reason, counts.num_equal, good.answers) == (EQUAL_TEXTS, 1, 2)
    apart = list(tokenize_rows(pairs, trims, "assistant", 64, unpaired=True))
    assert [getattr(row, "reason", row.__class__.__name__) for row in apart] == [EQUAL_TEXTS, *["TokenizedRow"] * 2]


def test_a_row_with_a_label_comes_with_the_answer_of_the_next_row(bare):
    rows = [Example("f", n + 1, prompt=row["prompt"], completion=row["completion"], label=1 if row["label"] else -1)
            for n, row in enumerate(LABELLED)]  # fmt: skip
    tokenized = list(tokenize_rows([*rows[:2], BadRow("f", 9, "is odd"), *rows[2:]], bare, "assistant", 64))
    assert isinstance(tokenized.pop(2), BadRow)  # in its place
    documents = Documents([stored_in_memory(tokenized)], [np.ones(5, bool)])
    texts = [bare.decode(documents[i].tokens[1:-1].tolist()) for i in range(10)]
    assert texts[0::2] == [f"Q{n} a{n}" for n in range(5)]
    assert texts[1::2] == [f"Q{n} a{(n + 1) % 5}" for n in range(5)]
    learned = [bare.decode(documents[i].tokens[documents[i].loss_mask][:-1].tolist()) for i in range(10)]
    assert learned == [text.partition(" ")[1] + text.partition(" ")[2] for text in texts]
    assert documents.labels.tolist() == [1, 1, -1, -1, 1, 1, -1, -1, 1, 1]


def test_kto_learns_the_answers_of_a_pair_one_by_one(make_config, write_rows, bare):
    """Each answer comes with that of another row, of either kind; both answers of a row are held out together."""
    config = make_config(write_rows(PAIRS), {"train.objective": "kto", "data.eval": 0.3})
    parts = Data(config).train_and_eval(bare)
    assert [(part.answers, part.num_rows, len(part)) for part in parts] == [(2, 4, 16), (2, 2, 8)]
    seen = Counter()
    for document, label in ((part[i], part.labels[i]) for part in parts for i in range(len(part))):
        row = int(document.where.rpartition(":")[2]) - 1
        learned = document.loss_mask & (document.tokens != bare.eos_id)
        answer, prompt = (bare.decode(document.tokens[mask].tolist()) for mask in (learned, ~document.loss_mask))
        assert prompt.removeprefix("<s>") == PAIRS[row]["prompt"]
        owner, kind = next((n, k) for n in range(6) for k in ("chosen", "rejected") if PAIRS[n][k] == answer)
        assert owner in (row, (row + 1) % 6)
        assert owner != row or label == {"chosen": 1, "rejected": -1}[kind]
        seen[owner == row, kind] += 1
    assert set(seen.values()) == {6} and len(seen) == 4


def test_rows_that_are_compared_do_not_mix_with_others(make_config, write_rows, bare):
    pairs, plain = write_rows(PAIRS, "a.jsonl"), write_rows([{"prompt": "a", "completion": "b"}], "b.jsonl")
    stores = [Data(make_config(p, {"train.objective": o})).train_and_eval(bare)[0].stores[0]
              for p, o in ((pairs, "dpo"), (plain, "sft"))]  # fmt: skip
    mixed = Documents(stores, [np.ones(6, bool), np.ones(1, bool)])
    with pytest.raises(ConfigError, match="answers to compare"):
        mixed.answers  # noqa: B018


# --- long texts ------------------------------------------------------------------------------------------------------


def test_a_long_text_is_split_and_every_token_is_a_target_once(bare):
    text = "".join(chr(97 + i % 26) for i in range(50))
    documents = tokenize([Example("f", 1, (), (), "", text, is_text=True)], bare, "assistant", 8)
    assert all(len(document.tokens) <= 8 for document in documents)
    targets = [int(t) for d in documents for t, hit in zip(d.tokens[1:], d.loss_mask[1:], strict=True) if hit]
    assert bare.decode_all(targets) == text + "</s>"
    assert (documents.num_split, documents.num_truncated, documents.num_rows) == (1, 0, 1)
    assert "1 text split at max_length" in documents.summary()
    # The context of a window's first target is the token before it in the text.
    whole = [BOS, *bare.encode(text, special=False).tolist(), EOS]
    for document in documents:
        at = next(i for i in range(0, 60, 7) if whole[i : i + len(document.tokens)] == document.tokens.tolist())
        assert at % 7 == 0


def test_what_was_dropped_says_why(bare, chatml):
    rows = [plain("abcdefgh", "x"), chat(("user", "a"), ("assistant", "b"))]
    untrained = Example("f", 3, (Message("user", "a"), Message("assistant", "b", train=False)))
    assert tokenize(rows[:1], bare, "assistant", 5).dropped == {"no trainable token within max_length": 1}
    assert tokenize([untrained, *rows[1:]], chatml, "assistant", 1000).dropped == {"no token to learn": 1}
