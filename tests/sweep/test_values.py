"""Which values a command line tries, and how their runs are called."""

import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import load_config
from dualtune.train.sweep.values import Choices, Range, default_rates, grid, names_of, overrides_of, read_values


def test_values_between_commas_are_tried_and_one_value_is_shared():
    fixed, varied = read_values(["train.learning_rate=1e-4, 3e-4,0.001", "train.steps=50"])
    assert fixed == {"train.steps": "train.steps=50"}
    assert varied == [Choices("train.learning_rate", (1e-4, 3e-4, 1e-3))]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lora,dora", ("lora", "dora")),
        ("[q_proj,v_proj],all-linear", (["q_proj", "v_proj"], "all-linear")),
        ("1.0,null", (1.0, None)),
        ("true,false", (True, False)),
        ('"a,b","c"', ("a,b", "c")),
    ],
)
def test_values_are_yaml(text, values):
    assert read_values([f"a.b={text}"]) == ({}, [Choices("a.b", values)])


@pytest.mark.parametrize("text", ["[q_proj,v_proj]", '"a,b"', "1,", "1,,2", "[1,2", "", "nothing"])
def test_what_is_one_value_or_none_is_left_to_the_config(text):
    assert read_values([f"a.b={text}"]) == ({"a.b": f"a.b={text}"}, [])


def test_the_last_setting_of_a_key_wins():
    assert read_values(["a.b=1,2", "a.b=3"]) == ({"a.b": "a.b=3"}, [])
    assert read_values(["a.b=3", "a.b=1,2"]) == ({}, [Choices("a.b", (1, 2))])


def test_ranges():
    _, varied = read_values(["a.rate=1e-5..1e-3", "a.rank=4..64", "a.share=0..0.5", "a.narrow=2..3"])
    assert varied == [
        Range("a.rate", 1e-5, 1e-3),
        Range("a.rank", 4, 64),
        Range("a.share", 0.0, 0.5),
        Range("a.narrow", 2, 3),
    ]
    assert [each.is_log for each in varied] == [True, True, False, False]
    assert type(varied[1].low) is int and type(varied[2].low) is float


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("a.b=1e-3..1e-5", "the first end must be the lower one|whose first end must be the lower one"),
        ("a.b=3..3", "lower one"),
        ("a.b=1,2,1", "has the value 1 twice"),
        ("run.dir=a,b", "a directory of its own"),
    ],
)  # fmt: skip
def test_what_cannot_be_tried(override, words):
    with pytest.raises(ConfigError, match=words):
        read_values([override])


def test_the_grid_has_every_combination_once():
    runs = grid([Choices("a.x", (1, 2)), Choices("a.y", ("p", "q", "r"))])
    assert [tuple(run.values()) for run in runs] == [(1, "p"), (1, "q"), (1, "r"), (2, "p"), (2, "q"), (2, "r")]
    with pytest.raises(ConfigError, match="more than 1000 runs"):
        grid([Choices("a.x", tuple(range(40))), Choices("a.y", tuple(range(40)))])


def test_overrides_give_the_same_values_back():
    values = {"a.x": 1e-4, "a.y": ["q", "v"], "a.z": None, "a.w": "a, b: c"}
    fixed, varied = read_values([f"{override}," for override in overrides_of(values)])
    assert len(fixed) == 4 and not varied
    assert overrides_of(values) == ["a.x=0.0001", 'a.y=["q", "v"]', "a.z=null", 'a.w="a, b: c"']


def test_names_say_what_differs():
    assert names_of([{"train.learning_rate": 3e-4, "adapter.rank": 8}]) == ["learning_rate=0.0003,rank=8"]
    assert names_of([{"data.train": "/data/a b.jsonl"}]) == ["train=a-b.jsonl"]
    assert names_of([{"data.eval": 0.1, "memory.eval": 2}]) == ["data.eval=0.1,memory.eval=2"]
    assert names_of([{"adapter.targets": ["q_proj", "v_proj"], "a.b": True}]) == ["targets=q_proj+v_proj,b=true"]
    assert names_of([{"a.b": ".."}, {"a.b": "/"}]) == ["b=..", "b=-"]


def test_names_differ_even_where_the_case_does_not_count_and_are_never_long():
    names = names_of([{"a.b": "X"}, {"a.b": "x"}, {"a.b": "p/same"}, {"a.b": "q/same"}, {"a.b": "y" * 300}])
    assert len({name.lower() for name in names}) == 5
    assert max(map(len, names)) <= 109
    assert not any("/" in name for name in names)


@pytest.mark.parametrize(
    ("model", "rates"),
    [
        ({"model_type": "llama", "hidden_size": 4096}, (1e-4, 3e-4, 9e-4)),  # 5e-4 · (2000 / 4096) ^ 0.781 = 2.86e-4
        ({"model_type": "qwen3", "hidden_size": 4096}, (2e-4, 5e-4, 1e-3)),  # … ^ 0.0775: 4.73e-4
        ({"model_type": "mistral", "hidden_size": 4096}, (2e-4, 5e-4, 2e-3)),
        ({"model_type": "llama"}, (2e-4, 5e-4, 2e-3)),
    ],
)
def test_the_default_grid_is_that_of_lora_without_regret(make_config, model, rates):
    assert default_rates(make_config("x.jsonl"), model) == Choices("train.learning_rate", rates)


def test_the_default_grid_of_full_training_is_a_tenth_and_sgd_has_none(make_config):
    full = load_config(
        {"model": {"name": "m"}, "data": {"train": "x"}, "adapter": {"method": "full"}, "run": {"dir": "r"}}
    )
    assert default_rates(full, {"model_type": "mistral"}).values == (2e-5, 5e-5, 2e-4)
    with pytest.raises(ConfigError, match=r"no rate is known to be usual with train\.optimizer: sgd"):
        default_rates(make_config("x.jsonl", {"train.optimizer": "sgd"}), {})


@pytest.mark.parametrize(
    ("changes", "centre"),
    [({"train.objective": "dpo"}, 5e-5), ({"train.optimizer": "lion"}, 1e-4), ({"adapter.init": "pissa"}, 1e-4)],
)
def test_the_default_grid_lies_around_what_is_usual(make_config, changes, centre):
    """At the rate of SFT, DPO makes both answers improbable."""
    assert default_rates(make_config("x.jsonl", changes), {"model_type": "mistral"}).values[1] == centre
