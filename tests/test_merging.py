"""Merging: the base's own files, tensor by tensor, with the change of the adapter added where it adapts."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import ConfigError, FormatError
from dualtune.model.base_model import find_weights
from dualtune.model.merging import write_merged
from dualtune.model.places import FilePlace, canonical_names, check_places, file_names
from dualtune.model.spellings import both_spellings

RNG = np.random.default_rng(0)
CONFIG = {"model_type": "llama", "dtype": "float32"}


@pytest.fixture
def base(tmp_path):
    """A model in two shards, with a fused and a transposed matrix, integers, and a tensor that no class reads."""
    directory = tmp_path / "base"
    directory.mkdir()
    shards = {
        "model-00001-of-00002.safetensors": {
            "language_model.fused.weight": RNG.normal(size=(6, 4)).astype(np.float32),
            "language_model.turned.weight": RNG.normal(size=(4, 3)).astype(np.float32),
        },
        "model-00002-of-00002.safetensors": {
            "vision_tower.conv.weight": RNG.normal(size=(2, 3, 2, 2)).astype(np.float16),
            "language_model.half.weight": RNG.normal(size=(2, 2)).astype(np.float16),
            "ids": np.arange(5),
        },
    }
    for name, tensors in shards.items():
        save_file(tensors, directory / name, metadata={"format": "pt", "made_by": "someone"})
    index = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def stored(directory):
    return {name: each for file in sorted(directory.glob("*.safetensors")) for name, each in load_file(file).items()}


PLACES = {
    "v": FilePlace("language_model.fused.weight", rows=(4, 6)),
    "turned": FilePlace("language_model.turned.weight", transposed=True),
    "half": FilePlace("language_model.half.weight"),
}
DELTAS = {
    "v": RNG.normal(size=(2, 4)).astype(np.float32),
    "turned": RNG.normal(size=(3, 4)).astype(np.float32),
    "half": RNG.normal(size=(2, 2)).astype(np.float32),
}


def test_only_what_is_adapted_changes(base, tmp_path):
    write_merged(find_weights(base), tmp_path / "out", PLACES, DELTAS.__getitem__, "float32")
    before, after = stored(base), stored(tmp_path / "out")
    assert [*after] == [*before]
    for name in ("vision_tower.conv.weight", "ids"):
        assert after[name].dtype == before[name].dtype
        assert after[name].tobytes() == before[name].tobytes()
    fused = before["language_model.fused.weight"].copy()
    fused[4:6] += DELTAS["v"]
    assert (after["language_model.fused.weight"] == fused).all()
    turned = before["language_model.turned.weight"] + DELTAS["turned"].T
    assert (after["language_model.turned.weight"] == turned).all()
    half = (before["language_model.half.weight"].astype(np.float32) + DELTAS["half"]).astype(np.float16)
    assert (after["language_model.half.weight"] == half).all()


def test_shards_metadata_and_index_are_the_bases(base, tmp_path):
    write_merged(find_weights(base), tmp_path / "out", {}, DELTAS.__getitem__, "float32")
    for file in base.glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    written, own = (
        json.loads((d / "model.safetensors.index.json").read_text())["weight_map"] for d in (tmp_path / "out", base)
    )
    assert written == own
    with safe_open(tmp_path / "out" / "model-00001-of-00002.safetensors", "np") as file:
        assert file.metadata()["made_by"] == "someone"


def test_another_precision_rounds_every_number(base, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    write_merged(find_weights(base), tmp_path / "out", PLACES, DELTAS.__getitem__, "bfloat16")
    file = load_torch(tmp_path / "out" / "model-00001-of-00002.safetensors")
    expected = torch.tensor(stored(base)["language_model.turned.weight"] + DELTAS["turned"].T).bfloat16()
    assert torch.equal(file["language_model.turned.weight"], expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert stored_ids(tmp_path / "out").tolist() == [0, 1, 2, 3, 4]


def stored_ids(directory):
    with safe_open(directory / "model-00002-of-00002.safetensors", "np") as file:
        return file.get_tensor("ids")


def test_bfloat16_is_rounded_as_torch_rounds_it():
    torch = pytest.importorskip("torch")
    from dualtune.base.tensors import rounded

    bits = RNG.integers(0, 2**32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        found = torch.tensor(rounded(values, "BF16").view(np.int16)).view(torch.bfloat16)
    expected = torch.tensor(values).bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


def test_what_has_no_place_is_refused(base, tmp_path):
    for place, found in ((FilePlace("gone.weight"), "is not there"), (FilePlace("ids"), "is stored as I64")):
        with pytest.raises(ConfigError, match=rf"merge: .*{place.tensor} {found}"):
            write_merged(find_weights(base), tmp_path / "out", {"m": place}, DELTAS.__getitem__, "float32")
    with pytest.raises(ConfigError, match=r"which does not fit the change \[2, 4\]"):
        write_merged(
            find_weights(base), tmp_path / "out", {"v": FilePlace("language_model.half.weight")}, DELTAS.__getitem__,
            "float32",
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"1 of the adapted modules from several .*for example b"):
        check_places(["a", "b"], {"a"}, "mlx-lm")


def test_a_damaged_index_is_named(base, tmp_path):
    weights = find_weights(base)
    (base / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(FormatError, match=r"index\.json: got a JSON list"):
        write_merged(weights, tmp_path / "out", {}, DELTAS.__getitem__, "float32")


def test_parts_of_a_matrix_are_called_after_it():
    places = {
        "a.q_proj": FilePlace("m.qkv.weight", rows=(0, 4)),
        "a.o": FilePlace("transformer.h.0.attn.c_proj.weight"),
    }
    assert canonical_names(places) == {"a.q_proj": "m.qkv.q_proj", "a.o": "transformer.h.0.attn.c_proj"}


def test_names_are_matched_inside_their_wrappers():
    stored = [
        "language_model.model.layers.0.self_attn.q_proj", "vision_tower.layers.0.self_attn.q_proj", "lm_head",
        "model.layers.1.mlp.up_proj", "other.model.layers.1.mlp.up_proj",
    ]  # fmt: skip
    modules = {
        "model.language_model.layers.0.self_attn.q_proj": "language_model.model.layers.0.self_attn.q_proj",
        "language_model.lm_head": "lm_head",
        "lm_head": "lm_head",
        "model.layers.9.self_attn.q_proj": "model.layers.9.self_attn.q_proj",  # nowhere
        "vision_tower.layers.0.self_attn.q_proj": "vision_tower.layers.0.self_attn.q_proj",
    }
    assert file_names(modules, stored) == modules


def test_both_spellings_of_rope_parameters():
    config = {
        "text_config": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }
    found = both_spellings(config)
    assert found["text_config"]["rope_theta"] == 5e5
    assert found["text_config"]["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1e6, 1e4)
    assert found["rope_parameters"] == config["rope_parameters"]
    assert both_spellings({"rope_theta": 3.0, "rope_parameters": {"rope_theta": 5.0}})["rope_theta"] == 3.0
