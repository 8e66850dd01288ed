"""What went wrong with an adapter or its base is told apart by `dualtune verify`: damages, and the verdict on each."""

import importlib.util
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dualtune.base.errors import FormatError
from dualtune.model.adapter import modules_of, tensor_name
from dualtune.use.verify.verdict import within
from dualtune.use.verify.verify import verify

MODULE = "model.layers.1.self_attn.v_proj"
A, B = tensor_name(MODULE, "A"), tensor_name(MODULE, "B")


def never_opened():
    raise AssertionError("nothing needed to be computed")


# --- the adapter ------------------------------------------------------------------------------------------------------


def doubled(name, tensor):
    return tensor * 2 if name == B else tensor


def zeroed(name, tensor):
    return tensor * ("lora_A" in name)


def without_a_module(name, tensor):
    return None if MODULE in name else tensor


DAMAGES = {  # what a faulty tool made of the tensors and the spec -> what the verdict says beside "broken-adapter"
    "one tensor doubled": (doubled, {}, "the base computes the recorded values, but the adapter does not"),
    "alpha taken for scale": (None, {"alpha": 32.0}, "check alpha / rank"),
    "B is zero": (zeroed, {}, "its effect is 0.00 times the recorded one, with an error of 100%; it does nothing"),
    "one module missing": (without_a_module, {}, "the adapter does not"),
}


@pytest.mark.parametrize(("backend", "options"), [("torch", {}), ("mlx", {}), ("torch", {"dtype": "bfloat16"})])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_adapter_is_told(trained, rewritten, check, damage, backend, options):
    change, spec, words = DAMAGES[damage]
    directory = rewritten(trained("torch"), *([change] if change else []), **spec)
    result = check(directory, backend, **options)
    assert (result.verdict, result.ok) == ("broken-adapter", False), result.sentence
    assert words in result.sentence
    levels = {row.name: row.level for row in result.checks}
    assert (levels["base"], levels["adapter"], levels["weights"]) == ("ok", "fail", "ok")


@pytest.mark.parametrize("damage", ["alpha taken for scale", "B is zero"])
@pytest.mark.parametrize(("backend", "quantization"), [("torch", "nf4"), ("mlx", "affine4")])
def test_gross_damage_is_told_on_a_quantized_base(trained, rewritten, check, damage, backend, quantization):
    """Held to what four bits do to the base alone."""
    change, spec, _ = DAMAGES[damage]
    result = check(
        rewritten(trained("torch"), *([change] if change else []), **spec), backend, quantization=quantization
    )
    assert (result.verdict, result.ok) == ("broken-adapter", False), result.sentence


@pytest.mark.parametrize(("backend", "quantization"), [("torch", "nf4"), ("mlx", "affine4")])
def test_an_idle_adapter_is_told_by_its_effect_where_four_bits_hide_the_rest(
    train, rewritten, check, shared, backend, quantization
):
    """On a pretrained model: its log-probabilities are as near as the precision asks, and its effect is zero."""
    name = str(shared("models/stories260k"))
    train_it = {"steps": 6, "documents_per_step": 4, "learning_rate": 1e-3, "warmup": 0}
    model = {"name": name, "dtype": "float32"}
    directory = train("torch", name=f"stories-{quantization}-idle", model=model, train=train_it)
    assert check(directory, backend, name, quantization=quantization, dtype="float32").ok
    result = check(rewritten(directory, zeroed), backend, name, quantization=quantization, dtype="float32")
    assert (result.verdict, result.ok) == ("broken-adapter", False), result.sentence
    assert within(result.function.adapter, result.function.adapter_limit), "told by its log-probabilities already"


def test_a_converter_that_changes_nothing_does_no_harm(trained, rewritten, check):
    assert check(rewritten(trained("mlx"))).verdict == "same"


def test_matrices_the_wrong_way_round_are_told_where_no_shape_can_tell(train, rewritten, check):
    square = {"adapter": {"rank": 64, "alpha": 32.0, "targets": ["q_proj", "o_proj"]}}
    directory = train("torch", name="square", **square)
    assert check(directory).verdict == "same"
    result = check(rewritten(directory, lambda name, w: np.ascontiguousarray(w.T)))
    assert (result.verdict, result.ok) == ("broken-adapter", False), result.sentence


def test_modules_that_the_config_targets_and_nobody_wrote_are_named(trained, rewritten, check):
    directory = rewritten(trained("torch"), without_a_module)
    config = json.loads((directory / "adapter_config.json").read_text())
    config["target_modules"] = ["v_proj", *(m for m in config["target_modules"] if "v_proj" not in m)]
    (directory / "adapter_config.json").write_text(json.dumps(config))
    refreshed(directory, "adapter_config.json")
    assert f"1 modules that its config targets have no tensors, such as {MODULE}" in check(directory).sentence


def refreshed(directory, name):
    """dualtune.json lists the file as it is now: a mishap of the tool that wrote it, not of the copy."""
    import hashlib

    record, data = json.loads((directory / "dualtune.json").read_text()), (directory / name).read_bytes()
    record["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (directory / "dualtune.json").write_text(json.dumps(record))


def test_a_damaged_file_is_refused_before_anything_loads(trained, model, tmp_path):
    path = tmp_path / "copied"
    shutil.copytree(trained("torch"), path)
    data = bytearray((path / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(FormatError, match="its sha256 is not the one"):
        verify(path, str(model), never_opened)


# --- the base ---------------------------------------------------------------------------------------------------------


def edit_json(path, change):
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def swap_tokens(path):
    """Two letters change their ids."""

    def swap(tokenizer):
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["e"] = vocab["e"], vocab["a"]

    edit_json(path / "tokenizer.json", swap)


def other_template(path):
    template = path / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ '!' }}")


def unsampled_weight(path, rows=slice(16, 32)):
    """Of a tensor [64, 64] that is none of those whose hashes are recorded, and between the places that are hashed."""
    from dualtune.model.fingerprint import fingerprint

    tensors = load_file(path / "model.safetensors")
    (name, *_) = (n for n in tensors if n not in fingerprint(path)["tensors"] and n.endswith("q_proj.weight"))
    tensors[name][rows] *= 1.5
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


BASES = {  # what became of the base -> what the sentence names
    "other weights": (lambda path: None, {"seed": 1}, "it computes different values. It differs in weights ("),
    "another config": (
        lambda path: edit_json(path / "config.json", lambda config: config.update(rope_theta=100.0)), {},
        "it computes different values. It differs in config (different hash)",
    ),
    "another tokenizer": (swap_tokens, {}, "It differs in tokenizer ('The capital of France is' is encoded as ["),
    "a weight of another tensor": (
        lambda path: unsampled_weight(path, slice(None)), {},
        "different values. It differs in weights (different hash)",
    ),
    "a weight that is not sampled": (unsampled_weight, {}, "its sampled hashes agree, but it computes different"),
    "another width": (
        lambda path: None, {"hidden_size": 96, "num_attention_heads": 6},
        "the adapter does not fit it: model.layers.0.mlp.down_proj: the adapter is for [64, 128], the base has",
    ),
    "fewer layers": (lambda path: None, {"num_hidden_layers": 1}, "the base has no such module and 4 more"),
    "a smaller vocabulary": (lambda path: None, {"vocab_size": 90}, "was recorded, but the vocabulary here has 90"),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("what", BASES)
def test_a_wrong_base_is_told(trained, write_model, check, tmp_path, what, backend):
    change, options, words = BASES[what]
    base = write_model(tmp_path / "base", **options)
    change(base)
    result = check(trained("torch"), backend, base)
    assert (result.verdict, result.ok) == ("wrong-base", False), result.sentence
    assert words in result.sentence


def test_other_weights_are_told_on_a_quantized_base(trained, write_model, check, tmp_path, wording):
    """Slightly other ones, whose gap four bits could explain: then the hashes decide."""
    base = write_model(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    save_file({n: w * np.float32(1.01) for n, w in tensors.items()}, base / "model.safetensors", {"format": "pt"})
    result = check(trained("torch"), base=base, quantization="nf4")
    assert (result.verdict, result.ok) == ("wrong-base", False), result.sentence
    wording(result.sentence)


def test_files_that_only_look_different_are_no_wrong_base(trained, write_model, check, tmp_path):
    """A tokenizer saved with other spaces, a config with one more key, weights once more in float64."""
    base = write_model(tmp_path / "base")
    edit_json(base / "tokenizer.json", lambda tokenizer: None)
    edit_json(base / "config.json", lambda config: config.update(transformers_version="5.0"))
    tensors = load_file(base / "model.safetensors")
    save_file({n: w.astype(np.float64) for n, w in tensors.items()}, base / "model.safetensors", {"format": "pt"})
    result = check(trained("torch"), base=base, dtype="float32")
    assert (result.verdict, result.ok) == ("same", True), result.sentence
    assert {row.name for row in result.checks if row.level == "advice"} == {"tokenizer", "config", "weights"}


def test_another_template_is_told_where_the_adapter_brings_none(trained, write_model, check, tmp_path, wording):
    """As adapters of an older dualtune: a hash alone."""
    base, old = write_model(tmp_path / "base"), shutil.copytree(trained("torch"), tmp_path / "old")
    other_template(base)
    (old / "chat_template.jinja").unlink()
    edit_json(old / "dualtune.json", lambda record: record["files"].pop("chat_template.jinja"))
    result = check(old, base=base)
    assert (result.verdict, result.ok) == ("wrong-base", False), result.sentence
    wording(result.sentence)
    result = check(trained("torch"), base=base)
    assert (result.verdict, result.ok) == ("same", True), result.sentence
    assert "not the base's: the adapter contains the one it was trained with" in {row.found for row in result.checks}


def test_a_template_that_was_not_used_may_change(train, write_model, check, tmp_path):
    directory = train("torch", name="raw", data={"template": "none"})
    base = write_model(tmp_path / "base")
    other_template(base)
    assert check(directory, base=base).verdict == "same"


# --- nothing to compare with ------------------------------------------------------------------------------------------


def test_an_adapter_of_another_tool_is_not_called_verified(trained, model, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(trained("torch") / name, tmp_path / name)
    result = verify(tmp_path, str(model), never_opened)
    assert (result.verdict, result.ok, result.function) == ("nothing-recorded", False, None)
    rows = {row.name: (row.level, row.found) for row in result.checks}
    num = len(modules_of(load_file(tmp_path / "adapter_model.safetensors")))
    assert rows["shapes"] == ("ok", f"{num} modules fit the base")
    assert rows["numbers"] == ("ok", f"{2 * num} tensors, all finite; B is zero in 0 modules")


def test_an_adapter_of_random_weights_is_compared_with_no_others(trained, model, tmp_path, wording):
    directory = shutil.copytree(trained("torch"), tmp_path / "adapter")
    record = json.loads((directory / "dualtune.json").read_text())
    assert record["base"]["init"] == "pretrained"
    record["base"]["init"] = "random"
    (directory / "dualtune.json").write_text(json.dumps(record))
    result = verify(directory, str(model), never_opened)
    assert (result.verdict, result.ok, result.function) == ("nothing-recorded", False, None)
    wording(result.sentence)


def test_shapes_of_another_tools_adapter_are_compared(trained, write_model, tmp_path, wording):
    (tmp_path / "peft").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(trained("torch") / name, tmp_path / "peft" / name)
    result = verify(tmp_path / "peft", str(write_model(tmp_path / "b", intermediate_size=192)), never_opened)
    assert (result.verdict, result.checks[-1].level) == ("nothing-recorded", "fail")
    wording(result.checks[-1].found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.update(base=[]), "malformed"),
        (lambda f: f.update(adapter="x"), "malformed"),
        (lambda f: f["base"][0]["tokens"].insert(0, -1), "malformed"),
        (lambda f: f["base"][0]["tokens"].insert(0, True), "malformed"),
        (lambda f: f["base"][0]["tokens"].insert(0, 1 << 31), "malformed"),
        (lambda f: f["base"][0].update(top=[[1]]), "malformed"),
        (lambda f: f["base"][0].update(top=[[1.0, -1.0]]), "malformed"),
        (lambda f: f["base"][0].update(top=[[1, 0.5]]), "malformed"),
        (lambda f: f["base"][0].update(top=[[1, None]]), "malformed"),
        (lambda f: f["base"][0].update(earlier=[[]]), "malformed"),
        (lambda f: f["base"][0].update(earlier=[[[1, -1.0]]] * 500), "malformed"),
        (lambda f: f["base"][0].update(dtype=["float32"]), "malformed"),
        (lambda f: f["base"][0].update(prompt=7), "malformed"),
        (lambda f: f["base"][0].update(dtype="float16"), "got float16, float32, must be the same for all"),
        (lambda f: f["adapter"][0]["tokens"].insert(0, 5), "not recorded for the same tokens"),
        (lambda f: f["base"].pop(), "not recorded for the same tokens"),
    ],
)
def test_a_malformed_record_is_refused(trained, with_record, model, change, words):
    directory = with_record(trained("torch"), lambda record: change(record["fingerprints"]))
    with pytest.raises(FormatError, match=f"dualtune.json: fingerprints.*{words}"):
        verify(directory, str(model), never_opened)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_ends_with_0_or_6(trained, rewritten, write_model, dualtune_main, model, tmp_path):
    good, options = trained("torch"), ("--platform", "cpu", "--base")
    result = dualtune_main("verify", good, *options, model)
    assert result.returncode == 0, result.stderr
    assert "\nverdict: same: the same function, within the limits of float32" in result.stdout
    result = dualtune_main("verify", rewritten(good, doubled), *options, model, "--json")
    assert result.returncode == 6
    report = json.loads(result.stdout)
    assert (report["verdict"], report["function"]["pair"]) == ("broken-adapter", "float32")
    assert [row["name"] for row in report["checks"] if row["level"] == "fail"] == ["adapter"]
    assert all(set(row) == {"name", "level", "found", "fix", "mend"} for row in report["checks"])
    assert dualtune_main("verify", good, *options, write_model(tmp_path / "other", seed=1)).returncode == 6
    assert dualtune_main("verify", good, *options, tmp_path / "nowhere").returncode == 4
    on_mlx = ("--platform", "mlx", "--base", model, "--quantization", "nf4")
    assert dualtune_main("verify", good, *on_mlx).returncode == (2 if importlib.util.find_spec("mlx") else 4)
    assert dualtune_main("verify", model, *options, model).returncode == 6  # no adapter directory
