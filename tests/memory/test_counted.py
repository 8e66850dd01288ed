"""Models without a formula: their shapes, counted without weights, against what the engine takes for a tiny one."""

import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dualtune.engine.backend import LoadRequest
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.memory.counted import Counted, shape_from
from dualtune.engine.memory.estimate import Ask, estimate
from dualtune.engine.memory.shapes import UnknownShape
from dualtune.engine.testing.tiny_models import pack, random_batch
from dualtune.model.adapter import AdapterSpec
from dualtune.model.optimizer import OptimizerSpec

ROOT = Path(__file__).parents[2]
FAMILIES = {  # by kind of layer
    "mixture of experts": "qwen3_moe", "mixture with plain attention": "gpt_oss", "linear attention": "qwen3_next",
    "state space": "mamba2", "both, side by side": "falcon_h1", "convolution": "lfm2", "vision tower": "gemma3",
    "vision tower and linear attention": "qwen3_5", "window and soft caps": "gemma2", "scaled logits": "cohere2",
    "heads of unequal size": "deepseek_v3", "window in its own masks": "mellum", "rotary in float32": "olmo",
    "Llama in a wrapper": "internvl", "experts one by one": "dbrx", "experts by their sizes": "jetmoe",
    "layers without a name": "biogpt", "a wrapper's own attention": "got_ocr2",
}  # fmt: skip
# Of tensors that exist between steps; of what is kept; of the peak of a step. A peak that is too high costs a user
# speed, one that is too low the run.
EXACT, KEPT, PEAK = (0.99, 1.01), (0.95, 1.25), (0.95, 1.45)
ASK = Ask("torch", "cpu", "none", "float32", 8, "all-linear", micro_batch_tokens=512, max_length=512, dropout=False)


@pytest.fixture
def config_of(monkeypatch):
    """family -> config.json of a tiny model of it."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from family.make import tiny_config

    return lambda family: json.loads(json.dumps(tiny_config(family).to_dict(), default=str))


@pytest.fixture
def measure(open_backend, tmp_path, monkeypatch):
    """(estimate, bytes that were found by part) of a step of the torch engine."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from memory_storages import found_in

    def measure_(config, lengths, asked=ASK):
        (tmp_path / "config.json").write_text(json.dumps(config))
        spec = AdapterSpec(asked.rank, 16.0, 0.0, (asked.targets,))
        request = LoadRequest(
            tmp_path, asked.dtype, asked.quantization, "random", spec, OptimizerSpec(), seed=1, kernels=asked.kernels,
            checkpointing=asked.checkpointing, router_aux_loss_coef=0.1 if asked.balances_experts else None,
        )  # fmt: skip
        engine = open_backend("torch").load(request)
        batch = pack(random_batch(lengths, 256), [range(len(lengths))])
        engine.forward_backward(batch, divisor=batch.num_targets)  # the optimizer's state is made
        float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)
        asked = replace(asked, micro_batch_tokens=batch.tokens_BT.size, max_length=max(lengths))
        return estimate(shape_from(config, "torch"), asked), found_in(engine, batch)

    return measure_


COMBINED = {"both, side by side", "vision tower and linear attention", "Llama in a wrapper", "another",
            "mixture with plain attention"}  # fmt: skip


def cases(families):
    """A case for each kind; combinations of kinds in `make test-long`."""
    return [
        pytest.param(family, id=kind, marks=[pytest.mark.long] if kind in COMBINED else [])
        for kind, family in families.items()
    ]


@pytest.mark.parametrize("lengths", [[60] * 8, pytest.param([512], marks=pytest.mark.long)], ids=["short", "long"])
@pytest.mark.parametrize("family", cases(FAMILIES))
def test_a_family_without_a_formula_takes_what_was_estimated(measure, config_of, family, lengths):
    estimated, found = measure(config_of(family), lengths)
    for name in ("weights", "adapter", "optimizer"):
        assert EXACT[0] <= estimated[name] / found[name] <= EXACT[1], name
    assert KEPT[0] <= estimated["activations"] / found["activations"] <= KEPT[1]
    *_, activations, moment, _reserve = estimated.parts
    assert PEAK[0] <= (activations.bytes + moment.bytes) / found["peak"] <= PEAK[1]


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"quantization": "nf4"}, "qwen2_vl"), ({"kernels": "reference"}, "qwen3_moe"),
        ({"checkpointing": ActivationCheckpointing("all")}, "gemma3"), ({"dtype": "bfloat16"}, "glm4_moe"),
    ],
    ids=["nf4", "plain", "recomputed", "bfloat16"],
)  # fmt: skip
def test_another_setup_takes_what_was_estimated(measure, config_of, family, changes, monkeypatch):
    # The plan leaves out what is in float32 where the CPU multiplies no 16 bits.
    monkeypatch.setattr("dualtune_torch.kernels.products.is_native", lambda dtype: True)
    estimated, found = measure(config_of(family), [60] * 8, replace(ASK, **changes))
    assert EXACT[0] <= estimated["weights"] / found["weights"] <= EXACT[1]
    *_, activations, moment, _reserve = estimated.parts
    assert PEAK[0] <= (activations.bytes + moment.bytes) / found["peak"] <= PEAK[1]


def test_balanced_experts_keep_a_number_for_each_of_a_token(measure, config_of):
    config, added, more = config_of("olmoe"), [], []
    for balances in (False, True):
        estimated, found = measure(config, [60] * 8, replace(ASK, balances_experts=balances))
        on_mlx = replace(ASK, backend="mlx", balances_experts=balances)
        added.append((estimated["activations"], estimate(shape_from(config, "mlx"), on_mlx)["activations"]))
        more.append(found["activations"])
    on_torch, on_mlx = (after - before for before, after in zip(*added, strict=True))
    assert on_torch == more[1] - more[0] and on_mlx > 0
    assert on_mlx == 4 * ASK.micro_batch_tokens * config["num_experts"] * config["num_hidden_layers"]


def test_experts_are_stored_whole_and_a_token_uses_a_few(config_of):
    config = config_of("olmoe")
    found = shape_from(config, "torch")
    experts = 3 * config["num_experts"] * config["intermediate_size"] * config["hidden_size"] * found.layers
    unused = experts * (1 - config["num_experts_per_tok"] / config["num_experts"])
    router_and_attention = found.active_parameters - (experts - unused)
    assert 0 < router_and_attention < found.num_parameters - experts
    assert found.num_parameters > found.active_parameters + unused


def test_a_family_with_a_formula_keeps_it_and_imports_no_framework():
    """In a process of its own: this one has imported torch."""
    code = (
        "import sys\nfrom dualtune.engine.memory.counted import shape_from\n"
        "from dualtune.engine.memory.shapes import KNOWN, Decoder\n"
        "assert isinstance(shape_from(KNOWN['Qwen/Qwen3-8B'], 'torch'), Decoder)\n"
        "assert not {'torch', 'transformers', 'mlx'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_was_counted_is_kept(config_of, monkeypatch, tmp_path):
    """The second question about a model asks no framework, and a damaged file is counted again."""
    monkeypatch.setenv("DUALTUNE_CACHE", str(tmp_path))
    config, calls = config_of("olmoe"), []
    from dualtune_torch import counting as count

    own = count.count
    monkeypatch.setattr(count, "count", lambda config: calls.append(config) or own(config))
    first, second = shape_from(config, "torch"), shape_from(config, "torch")
    assert len(calls) == 1
    assert isinstance(first, Counted) and isinstance(second, Counted)
    assert (first.modules(), first.num_parameters) == (second.modules(), second.num_parameters)
    assert estimate(first, ASK) == estimate(second, ASK)
    (file,) = (tmp_path / "shapes").iterdir()
    file.write_text("{")
    assert shape_from(config, "torch").num_parameters == first.num_parameters
    assert len(calls) == 2


def test_without_the_backend_the_refusal_says_what_to_install(config_of, monkeypatch):
    config = config_of("olmoe")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnknownShape, match=r"torch counts .* not installed: pip install 'dualtune\[torch\]'"):
        shape_from(config, "torch")


def test_a_family_that_the_framework_does_not_know_is_refused_with_the_reason():
    with pytest.raises(
        UnknownShape, match="unheard_of, for which there is no formula, and its shapes cannot be counted"
    ):
        shape_from({"model_type": "unheard_of", "vocab_size": 8, "hidden_size": 8}, "torch")


ON_MLX = {
    "mixture of experts": "qwen3_moe", "another": "glm4_moe", "convolution": "lfm2", "soft caps": "gemma2",
    "state space": "mamba2", "linear attention": "qwen3_next", "latent attention": "deepseek_v3",
    "windows": "gemma3_text", "sinks": "gpt_oss", "numbers of a layer itself": "gemma4_text",
}  # fmt: skip
PEAK_ON_MLX = (0.9, 1.2)  # of everything that is there at the peak


@pytest.mark.parametrize("family", cases(ON_MLX))
def test_a_family_without_a_formula_takes_on_mlx_what_was_estimated(open_backend, tmp_path, config_of, family):
    mx = pytest.importorskip("mlx.core")
    config, backend = config_of(family), open_backend("mlx")
    (tmp_path / "config.json").write_text(json.dumps(config))
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    spec = AdapterSpec(ASK.rank, 16.0, 0.0, (ASK.targets,))
    request = LoadRequest(tmp_path, "float32", "none", "random", spec, OptimizerSpec(), seed=1, kernels="auto")
    engine, batch = backend.load(request), pack(random_batch([60] * 8, 256), [range(8)])

    def take_step():
        engine.forward_backward(batch, divisor=batch.num_targets)
        mx.synchronize()
        float(engine.optim_step(lr=1e-4, max_grad_norm=1.0).loss)

    take_step()  # makes the state of the optimizer
    gc.collect()
    mx.clear_cache()
    backend.reset_peak_memory()
    for _ in range(2):  # one may have an array less at its peak
        take_step()
    asked = replace(ASK, backend="mlx", micro_batch_tokens=batch.tokens_BT.size, max_length=60)
    found = estimate(shape_from(config, "mlx"), asked)
    peak = backend.memory().peak_bytes - before
    assert PEAK_ON_MLX[0] <= (found.total_bytes - found["reserve"]) / peak <= PEAK_ON_MLX[1]
