"""What is not read as it stands in the rows is counted: by check-data, preview and a run, and from the cache too."""

import json
import shutil

import pytest

ASK, SAY = {"role": "User", "content": "2+2?"}, {"role": "GPT", "content": "4."}
ROWS = [
    {"messages": [ASK, SAY, SAY], "thinking": "Hm."}, {"messages": [ASK, {"role": "bot", "content": 4}]},
    {"messages": [{"role": "critic", "content": "2+2?"}, SAY]},
]  # fmt: skip
KINDS = {"joined_turns": 1, "unread_column: thinking": 1, "scalar_text": 1}


@pytest.fixture
def config(config_file, write_rows):
    """A config over ROWS, of which the third has a role of its own."""

    def write(**changes):
        write_rows(ROWS * 4)
        return config_file({"data.roles": {"critic": "user"}, "data.max_length": 200, "data.eval": 0} | changes)

    return write


def checked(dualtune_main, *args):
    result = dualtune_main("check-data", *args, "--json")
    (source,) = json.loads(result.stdout)["sources"]
    return result.returncode, source["notices"], source["bad"]


def test_check_data_counts_with_a_config_and_without(dualtune_main, config, write_rows, wording):
    four = {kind: 4 * number for kind, number in KINDS.items()}
    assert checked(dualtune_main, config()) == (0, four, 0)
    assert checked(dualtune_main, write_rows(ROWS)) == (3, KINDS, 1)
    wording(dualtune_main("check-data", config()).stdout)


def test_preview_and_a_run_say_the_same_the_second_time_too(dualtune_main, config):
    path = config()
    for command in (("preview", path), ("train", path, "--dry-run", "--platform", "numpy")) * 2:
        result = dualtune_main(*command)
        assert result.returncode == 0, result.stderr
        text = " ".join((result.stdout + result.stderr).split())
        assert all(
            f"4 of 12 rows: {told}" in text for told in ("turns of one role", "a number, true", "the column 'th")
        )


def test_how_rows_are_read_is_a_part_of_the_cache_s_key(dualtune_main, config):
    def documents(**changes):
        result = dualtune_main("preview", config(**changes), "--rows", 2)
        return result.returncode, result.stdout.count("4.\n\n4."), result.stderr

    joined, kept = documents(), documents(**{"data.consecutive": "keep"})
    refused, unknown = documents(**{"data.consecutive": "refuse"}), documents(**{"data.roles": {}})
    assert (joined[0], kept[0], refused[0], unknown[0]) == (0, 0, 3, 3)
    assert "set data.consecutive to join or keep" in refused[2] and "got 'critic'" in unknown[2]
    assert joined == documents()


NO_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def test_system_messages_that_a_template_drops_are_counted_or_refused(
    dualtune_main, config_file, write_rows, tmp_path, wording
):
    (tmp_path / "t.jinja").write_text(NO_SYSTEM + "{% if add_generation_prompt %}<assistant>{% endif %}")
    write_rows([{"system": "Be brief.", "messages": [ASK, SAY]}] * 3)
    given = {"data.template": tmp_path / "t.jinja", "data.eval": 0}
    assert checked(dualtune_main, config_file(given)) == (0, {"folded_system": 3}, 0)
    result = dualtune_main("preview", config_file(given), "--rows", 1, "--html", tmp_path / "page.html")
    wording(result.stdout)
    assert checked(dualtune_main, config_file(given | {"data.system": "refuse"})) == (3, {}, 3)
    assert dualtune_main("preview", config_file(given | {"data.system": "refuse"})).returncode == 3


def test_plain_text_with_the_marks_of_another_model_s_chat_is_told(dualtune_main, config_file, write_rows, tiny_llama):
    own = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4.<|im_end|>"
    others = ["<s>[INST] 2+2? [/INST] 4.</s>", "<start_of_turn>user\n2+2?<end_of_turn>", "2+2 is 4."]
    write_rows([{"text": text} for text in (own, *others)])
    path = config_file({"model.name": tiny_llama, "data.eval": 0, "data.special_tokens_in_text": "allow"})
    kinds = {"foreign_mark: [INST]": 1, "foreign_mark: <start_of_turn>": 1}
    assert checked(dualtune_main, path) == (0, kinds, 0)
    result = dualtune_main("train", path, "--dry-run", "--platform", "numpy")
    assert "1 of 4 rows: plain text has [INST], a mark of chats" in " ".join((result.stdout + result.stderr).split())


def test_plain_text_without_the_bos_that_the_tokenizer_names_is_told(
    dualtune_main, config_file, write_rows, tiny_softmax, tmp_path
):
    model = tmp_path / "model"
    shutil.copytree(tiny_softmax, model)
    write_rows([{"text": "Once upon a time."}] * 3)
    given = {"model.name": model, "data.eval": 0}
    assert checked(dualtune_main, config_file(given)) == (0, {}, 0)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("add_bos_token", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert checked(dualtune_main, config_file(given)) == (0, {"no_bos": 3}, 0)
    result = dualtune_main("train", config_file(given), "--dry-run", "--platform", "numpy")
    assert "3 of 3 rows: plain text without the tokenizer's BOS" in " ".join((result.stdout + result.stderr).split())


# --- data.eval -------------------------------------------------------------------------------------------------------


def test_a_share_that_the_user_wrote_is_held_out_and_says_what_is_not_used(
    dualtune_main, config_file, write_rows, qa_rows, tmp_path
):
    (tmp_path / "data").mkdir()
    write_rows(qa_rows, "data/train.jsonl")
    write_rows(qa_rows[:3], "data/valid.jsonl")

    def run(**changes):
        path = config_file({"data.train": tmp_path / "data", **changes})
        result = dualtune_main("train", path, "--dry-run", "--platform", "numpy")
        return " ".join((result.stdout + result.stderr).split())

    chosen = run(**{"data.eval": "auto"})
    assert "eval data 3 documents" in chosen and "are not used" not in chosen
    written = run(**{"data.eval": 0.1})
    assert "eval data 2 documents" in written
    assert f"{tmp_path / 'data'}: has evaluation data, which are not used: data.eval holds out 10%" in written
