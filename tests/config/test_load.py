"""Values, files and messages: every problem at once, in plain words, at the right place."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualtune.base.errors import ConfigError
from dualtune.config import Config, get_value, load_config, parse_config, to_yaml
from dualtune.config.schema import sections

MINIMAL = "model:\n  name: m\ndata:\n  train: t\n"
MAPPING = "a mapping (keys: path, weight, format, columns, subset, split, roles, consecutive)"
TOKEN = "hf_" + "aB3" * 10
KEYS = [(section, key) for section, model in sections().items() for key in model.model_fields]


def error_of(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="c.yaml", overrides=overrides)
    return str(caught.value)


def with_(line: str) -> str:
    """The minimal config with a line of one more section, line 5: `section: {key: value}`."""
    return MINIMAL + line + "\n"


def test_all_problems_are_reported_at_once_with_their_lines(wording) -> None:
    text = """\
model:
  name: m
  dtype: fp32
adapter:
  dropout: 1
  rank: 0
  lora_alpha: 8
  targets: [q_proj, 3]
data:
  eval: true
train:
  leraning_rate: 1e-4
  warmup: 100
  steps: 50
  rank: 3
runn:
  seed: 1
"""
    wording(error_of(text, "run.seed=1.5", "run.kep=1").splitlines())


@pytest.mark.parametrize(
    ("lines", "keys"),
    [
        ("memory: {resident_layers: 2}", {"memory.resident_layers"}),
        ("memory: {sharding: full}", {"memory.sharding"}),
        ("train: {activation_cache: disk}\nadapter: {layers: last 1}", {"train.activation_cache"}),
    ],
)
@pytest.mark.parametrize("data", ["new_tokens: [<tool>]", "new_special_tokens: [<tool>]"])
def test_new_tokens_need_a_base_that_is_not_frozen(lines: str, keys: set[str], data: str) -> None:
    error = error_of(f"model: {{name: m}}\ndata:\n  train: t\n  {data}\n{lines}\n")
    assert all(key in error for key in keys) and f"data.{data.partition(':')[0]} trains parameters of the base" in error


def test_new_rows_are_those_of_new_tokens() -> None:
    new = "model: {name: m}\nadapter: {train_rows: new}\ndata: {train: t, new_special_tokens: [<end>]"
    config = parse_config(f"{new}, new_tokens: [<tool>]}}\n")
    assert config.adapter.rows == ()
    assert config.data.added_tokens == (("<tool>", False), ("<end>", True))
    twice = error_of(f"{new}, new_tokens: [<end>]}}")
    assert "data.new_special_tokens: got <end>, but data.new_tokens names it" in twice
    assert "adapter.train_rows: got new, but no token is new" in error_of(with_("adapter: {train_rows: new}"))
    assert parse_config(with_("adapter: {train_rows: [new]}")).adapter.rows == ("new",)


# --- Values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("adapter.rank", "'16'", "got '16', must be an integer >= 1"),
        ("adapter.rank", "true", "got true, must be an integer >= 1"),
        ("adapter.rank", "3.7", "got 3.7, must be an integer >= 1"),
        ("adapter.rank", "16.0", "got 16.0, must be an integer >= 1"),
        ("adapter.rank", "null", "got null, must be an integer >= 1"),
        ("adapter.rank", "{a: 1}", "got a mapping, must be an integer >= 1"),
        ("adapter.alpha", "0", "got 0, must be >= 1e-09 and <= 1e+09"),
        ("adapter.alpha", ".inf", "got .inf, must be finite"),
        (
            "adapter.targets",
            "[]",
            "got an empty list, must be all-linear or a list of different module names, such as [q_proj, v_proj]",
        ),
        ("adapter.targets", "[a, b, a]", "lists 'a' more than once"),
        ("adapter.targets", "all_linear", "Did you mean 'all-linear'?"),
        ("adapter.init_from", "''", "got '', must be a path or null"),
        ("data.eval", "1", f"got 1, must be auto, a number >= 0 and < 1, a path, {MAPPING}, a list of these, or null"),
        ("data.eval", ".nan", "got .nan, must be finite"),
        ("data.packing", "yes", "got 'yes', must be true or false"),
        ("data.on_bad_row", "ignore", "got 'ignore', allowed: error, skip"),
        ("data.max_bad_rows", "1.5", "got 1.5, must be a number >= 0 and < 1, or an integer >= 1"),
        ("data.format", "dpo", "Preference training is chosen by 'train.objective'"),
        ("data.packing", "1", "got 1, must be true or false"),
        ("data.max_length", "1", "got 1, must be >= 2"),
        ("data.columns", "[a]", "got a list, must be a mapping from our column names to the file's"),
        ("data.loss_on", "[last]", "got a list, allowed: assistant, all, last"),
        ("model.dtype", "bf16", "Did you mean 'bfloat16'?"),
        ("model.dtype", "fp16", "Did you mean 'float16'?"),
        (
            "model.quantization",
            "null",
            "got null, allowed: auto, none, nf4, int8, affine4, affine8. Did you mean 'none'?",
        ),
        ("model.quantization", "afine4", "Did you mean 'affine4'?"),
        ("train.epochs", "1e999", "got .inf, must be finite"),
        ("train.learning_rate", "-.inf", "got -.inf, must be finite"),
        ("train.learning_rate", "'1e-4'", "got '1e-4', must be a number > 0"),
        ("train.max_grad_norm", "0", "got 0, must be a number > 0 or null"),
        ("train.micro_batch_tokens", "0", "got 0, must be auto or an integer >= 1"),
        ("train.warmup", "1.5", "got 1.5, must be a number >= 0 and < 1, or an integer >= 1"),
        ("train.warmup", "-1", "got -1, must be a number >= 0 and < 1, or an integer >= 1"),
        ("memory.checkpointing", "true", "Did you mean 'full'?"),
        ("memory.limit", "12gb", "got '12gb', must be auto or a size such as 12GB or 12GiB"),
        ("memory.limit", "12", "got 12, must be auto or a size such as 12GB or 12GiB"),
        ("memory.limit", "0GB", "got '0GB', must be auto or a size such as 12GB or 12GiB"),
        ("run.dir", "3", "got 3, must be a path"),
        ("run.dir", '"a\\nb"', "got 'a\\nb', must not contain control characters or lone surrogates"),
        ("run.dir", '"\\uD800"', "must not contain control characters or lone surrogates"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(key: str, value: str, message: str) -> None:
    section, _, name = key.partition(".")
    extra = {"model": f"model: {{name: m, {name}: {value}}}\ndata: {{train: t}}\n"}
    extra["data"] = f"model: {{name: m}}\ndata: {{train: t, {name}: {value}}}\n"
    error = error_of(extra.get(section, with_(f"{section}: {{{name}: {value}}}")))
    assert re.match(rf"c\.yaml:\d: {key}: ", error)
    assert error.endswith(message)
    assert "\n" not in error


def test_a_prompt_has_lines_and_tabs_and_no_other_control_character(wording) -> None:
    text = with_('run: {sample_prompts: ["Fix:\\n\\tx = 1"]}')
    config = parse_config(text)
    assert config.run.sample_prompts == ("Fix:\n\tx = 1",) and parse_config(to_yaml(config)) == config
    wording(error_of(with_('run: {sample_prompts: ["a\\e[2Jb"]}')))


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train: {warmup: 0}", "train.warmup", 0.0),
        ("train: {warmup: 100}", "train.warmup", 100),
        ("train: {learning_rate: 1}", "train.learning_rate", 1.0),
        ("train: {learning_rate: 1e-4}", "train.learning_rate", 1e-4),
        ("train: {max_grad_norm: null}", "train.max_grad_norm", None),
        ("adapter: {targets: all-linear}", "adapter.targets", "all-linear"),
        ("adapter: {targets: [a, b.c]}", "adapter.targets", ("a", "b.c")),
        ("memory: {limit: 1.5 GiB}", "memory.limit", "1.5 GiB"),
        ("run: {dir: ../a b/é}", "run.dir", "../a b/é"),
        ("run:\n  # seed: 1\n", "run.seed", 42),
    ],
)
def test_a_right_value_is_taken_as_it_is(text: str, key: str, value: object) -> None:
    got = get_value(parse_config(with_(text)), key)
    assert got == value
    assert type(got) is type(value)


_values = st.recursive(
    st.sampled_from(
        ["true", "null", "0", "-1", "7", "0.5", "1e-4", ".inf", "'16'", "auto", "none", "x", "!!int 3", "*a"]
    ),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: f"[{', '.join(items)}]") | inner.map("{{a: {0}}}".format)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(KEYS), _values, max_size=6))
def test_any_values_give_a_config_or_our_own_words(values: dict[tuple[str, str], str]) -> None:
    lines: list[str] = []
    for section in sections():
        lines += [f"{section}:", *(f"  {key}: {value}" for (name, key), value in values.items() if name == section)]
    try:
        parse_config("\n".join(lines))
    except ConfigError as error:
        assert not re.search(
            r"pydantic|\b[Ii]nput\b|valid (string|integer|number)|https?:|constrained|literal", str(error)
        )
        assert all(re.match(r"<string>(:\d+)?: [a-z_.0-9\[\]]+: ", line) for line in str(error).splitlines())


@pytest.mark.parametrize(
    ("data", "train", "message"),
    [
        ("eval: ./x/../t", "", "c.yaml:5: data.eval: got './x/../t', which is also in data.train; must be other data"),
        ("", "warmup: 50, steps: 50", "c.yaml:6: train.warmup: got 50 steps, must be below train.steps (50)"),
        (
            "",
            "micro_batch_tokens: 2047",
            "c.yaml:6: train.micro_batch_tokens: got 2047, must be >= data.max_length (2048), because one document",
        ),
        (
            "max_bad_rows: 10",
            "",
            "c.yaml:5: data.max_bad_rows: got 10, has no effect while data.on_bad_row is error; set on_bad_row: skip",
        ),
    ],
)
def test_impossible_pairs_are_refused(data: str, train: str, message: str) -> None:
    assert error_of(f"{MINIMAL}  {data}\ntrain: {{{train}}}\n").startswith(message)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("adapter: {method: full, rank: 8}", "adapter.rank: got 8, but adapter.method: full has no adapter; remove"),
        ("adapter: {method: full, alpha: 16}", "adapter.alpha: got 16.0, but adapter.method: full has no adapter"),
        ("adapter: {method: full, scaling: rank_stabilized}", "adapter.scaling: got rank_stabilized, but"),
        ("adapter: {method: full, init: normal}", "adapter.init: got normal, but adapter.method: full has no adapter"),
        ("adapter: {init: normal, init_from: x}", "adapter.init: got normal, but adapter.init_from gives the start"),
        ("adapter: {method: full, dropout: 0}", "adapter.dropout: got 0.0, but adapter.method: full has no adapter"),
        ("adapter: {method: full, targets: [a, b]}", "adapter.targets: got a, b, but adapter.method: full has no"),
        ("adapter: {method: full, experts: true}", "adapter.experts: got true, but adapter.method: full has no"),
        (
            "adapter: {method: full, init_from: x}",
            "adapter.init_from: got 'x', but adapter.method: full has",
        ),
        (
            "adapter: {method: full}\nmemory: {checkpointing: adapter_inputs}",
            "memory.checkpointing: got adapter_inputs, w",
        ),
        ("adapter: {method: full}\nmemory: {sharding: full}", "memory.sharding: got full, but only a frozen base"),
    ],
)
def test_what_has_no_meaning_for_a_model_trained_whole_is_refused(section: str, message: str) -> None:
    assert message in error_of(with_(section))


@pytest.mark.parametrize("format_", ["nf4", "int8", "affine4", "affine8"])
def test_a_quantized_base_cannot_be_trained_whole(format_: str, wording) -> None:
    text = f"model: {{name: m, quantization: {format_}}}\nadapter: {{method: full}}\ndata: {{train: t}}\n"
    wording(error_of(text))


def test_a_recorded_config_of_a_model_trained_whole_is_read_again() -> None:
    """It has every key, with its default."""
    config = parse_config(with_("adapter: {method: full}\nmemory: {checkpointing: full}"))
    assert parse_config(to_yaml(config)) == config and config.adapter.trains_model


@pytest.mark.parametrize(
    "train", ["warmup: 49, steps: 50", "warmup: 50", "micro_batch_tokens: 2048", "tokens_per_step: 1"]
)
def test_possible_pairs_pass(train: str) -> None:
    assert parse_config(with_(f"train: {{{train}}}"))


@pytest.mark.parametrize(
    "data", ["on_bad_row: skip, max_bad_rows: 10", "on_bad_row: skip", "on_bad_row: error, max_bad_rows: 0.01"]
)
def test_a_limit_of_bad_rows_goes_with_skipping_them(data: str) -> None:
    assert parse_config(f"model: {{name: m}}\ndata: {{train: t, {data}}}\n")


def test_an_impossible_pair_is_not_blamed_on_a_value_that_is_wrong_itself(wording) -> None:
    text = f"{MINIMAL}  max_length: '100'\ntrain: {{micro_batch_tokens: 500}}\n"
    wording(error_of(text))


# --- Secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (MINIMAL.replace("name: m", f"name: {TOKEN}"), []),
        (MINIMAL.replace("name: m", f"name: https://user:{TOKEN}@hub/x"), []),
        (with_(f"adapter: {{targets: [a, {TOKEN}]}}"), []),
        (f"{MINIMAL}  columns: {{a: {TOKEN}}}\n", []),
        (f"{MINIMAL}  columns: {{{TOKEN}: a}}\n", []),
        (with_(f"{TOKEN}: 1"), []),
        (with_(f"run: {{{TOKEN}: {TOKEN}}}"), []),
        (with_(f"run: {'x' * 42}{TOKEN}{'x' * 50}"), []),
        (MINIMAL, [f"model.name={TOKEN}"]),
        (MINIMAL, [TOKEN]),
        (with_(f"run: *{TOKEN}"), []),
        (with_(f"run: !{TOKEN} x"), []),
        (with_(f"run: !{TOKEN}!x y"), []),
    ],
)
def test_a_token_is_refused_and_never_shown(text: str, overrides: list[str]) -> None:
    error = error_of(text, *overrides)
    assert TOKEN[:12] not in error


def test_a_name_that_only_begins_like_a_token_is_fine() -> None:
    assert parse_config(MINIMAL, overrides=["model.name=hf_models/tiny"]).model.name == "hf_models/tiny"


# --- Files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_and_named_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL, encoding="utf-8-sig")
    assert load_config(path, ["run.seed=1"]) == parse_config(MINIMAL, overrides=["run.seed=1"])
    path.write_bytes(b"model: {name: m}\r\ndata: {train: t}\r\nrun: {sede: 1}\r\n")
    with pytest.raises(ConfigError, match="^" + re.escape(f"{path}:3: run.sede: unknown key. Did you mean 'seed'?")):
        load_config(str(path))


def test_a_file_that_is_not_there_or_not_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'x.yaml'}: no such file")):
        load_config(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: is a directory, must be a YAML file")):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"model:\n  name: caf\xe9\n", ":2: byte 0xe9 is not UTF-8; save the file as UTF-8"),
        ("model: {}".encode("utf-16"), ":1: byte 0xff is not UTF-8; save the file as UTF-8"),
        (b"#" * 2**19, ": is larger than 262144 bytes, too large for a config"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}{message}"


def test_a_huge_wrong_list_is_refused_in_time() -> None:
    start = time.process_time()
    assert "adapter.targets[0]: got 1" in error_of(with_(f"adapter: {{targets: [{', '.join(['1'] * 20_000)}]}}"))
    assert time.process_time() - start < 20  # a quadratic search took minutes; it takes two seconds


# --- Lookup ----------------------------------------------------------------------------------------------------------


def test_get_value_follows_a_dotted_key() -> None:
    config = parse_config(MINIMAL, overrides=["data.columns.prompt=q"])
    assert get_value(config, "adapter.rank") == 16
    assert get_value(config, "train") is config.train
    assert get_value(config, "data.columns.prompt") == "q"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("adapter.rnak", "adapter.rnak: unknown key. Did you mean 'rank'?"),
        ("rank", "rank: unknown key. It belongs to a section: 'adapter.rank'"),
        ("adapter.rank.x", "adapter.rank.x: there is no 'x' in 'adapter.rank'"),
        ("data.columns.x", "data.columns.x: there is no 'x' in 'data.columns'"),
        ("adapter.model_fields", "adapter.model_fields: unknown key."),
    ],
)
def test_get_value_refuses_what_is_not_there(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        get_value(parse_config(MINIMAL), key)


def test_a_config_error_exits_with_2() -> None:
    assert ConfigError.exit_code == 2
    assert isinstance(parse_config(MINIMAL), Config)


# --- from Python -----------------------------------------------------------------------------------------------------


def test_a_mapping_is_a_config_like_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL + "adapter: {targets: [q_proj]}\n")
    given = {"model": {"name": "m"}, "data": {"train": Path("t")}, "adapter": {"targets": ("q_proj",)}}
    assert load_config(given) == load_config(file)
    assert load_config(given, ["train.steps=7", "adapter.rank=2"]).train.steps == 7
    assert given == {"model": {"name": "m"}, "data": {"train": Path("t")}, "adapter": {"targets": ("q_proj",)}}


def test_what_is_wrong_with_a_mapping_is_said_by_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": {"name": "m", "dtype": "fp32"}, "data": {}})
    assert str(caught.value).splitlines() == [
        "<mapping>: model.dtype: got 'fp32', allowed: auto, float32, bfloat16, float16. Did you mean 'float32'?",
        error_of("model:\n  name: m\ndata: {}\n").replace("c.yaml:3", "<mapping>"),
    ]


@pytest.mark.parametrize("source", [None, 3, ["model"], b"c.yaml"])
def test_what_is_neither_a_path_nor_a_mapping_is_refused_in_words(source) -> None:
    with pytest.raises(ConfigError, match="allowed: the path of a YAML file, or a mapping"):
        load_config(source)


def test_an_empty_mapping_is_told_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"model\.name: missing"):
        load_config({})


def test_the_old_name_of_a_value_is_read_and_the_new_one_is_written():
    config = parse_config(with_("memory: {checkpointing: remade}"))
    assert config.memory.checkpointing == "adapter_inputs"
    assert "checkpointing: adapter_inputs" in to_yaml(config)
    assert config == parse_config(to_yaml(config))
