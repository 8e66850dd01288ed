"""train.router_aux_loss_coef: the load of experts, document by document, as both backends balance and measure it."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from dualtune.base.errors import ConfigError
from dualtune.config import parse_config
from dualtune.engine.backend import IGNORE_INDEX, LoadRequest, with_weights
from dualtune.engine.card import ActivationCheckpointing
from dualtune.engine.routing import BUSIEST, IDLE, LOSS
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import assert_close, assert_equal, gradient, random_adapter
from dualtune.engine.testing.tiny_models import pack, row_of, with_common_beginning
from dualtune.model.adapter import AdapterSpec, modules_of, tensor_name
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.report.run_files import read_run
from dualtune.show.report.run_sections import sections_of
from dualtune.train.objectives.comparison import with_slopes
from dualtune.train.objectives.distillation import Distillation
from dualtune.train.run import run
from dualtune.train.state.metrics import History, read_rows
from dualtune.train.state.run_dir import METRICS
from dualtune.train.verdict import of_routers, verdict_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("mlx.core")

import tiny_families  # noqa: E402

from dualtune_torch.routing import find_routers  # noqa: E402

SIZES, EXPERTS, BATCH, LENGTHS = (getattr(tiny_families, name) for name in ("SIZES", "EXPERTS", "BATCH", "LENGTHS"))
TWO = {"num_experts": 4, "num_experts_per_tok": 2}
# Logits of a plain matrix; a dense layer first, whose routers are fewer; a bias; rows that are flat in mlx-lm; two
# paths to the logits in mlx-lm; weights that are not normalized, in a class of ours.
FAMILIES = {
    "mixtral": SIZES | {"num_local_experts": 4},
    "qwen3_moe": tiny_families.FAMILIES["qwen3_moe"],
    "gpt_oss": SIZES | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmoe": SIZES | TWO,
    "granitemoe": tiny_families.FAMILIES["granitemoe"],
    "jamba": SIZES | TWO | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "qwen2_moe": tiny_families.FAMILIES["qwen2_moe"],
    "qwen3_next": tiny_families.FAMILIES["qwen3_next"],
    "qwen3_5_moe_text": tiny_families.FAMILIES["qwen3_next"],
    "mellum": SIZES | EXPERTS | {"num_experts": 4},
    "qwen3_vl_moe": {
        "text_config": SIZES | EXPERTS | {"num_experts": 4, "rope_parameters": tiny_families._turned()},
        "vision_config": tiny_families.PATCHES | {"hidden_size": 16}, **tiny_families.TOKENS,
    },
    "ernie4_5_moe": SIZES | {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "granitemoehybrid": SIZES | TWO | {
        "num_local_experts": 4, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
    },
    "granitemoeshared": SIZES | TWO | {"num_local_experts": 4, "shared_intermediate_size": 16},
    "flex_olmo": SIZES | TWO,
    # Routers that return logits alone, or what else; one of attention; one for images, which is not used.
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 96,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "jetmoe": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    "ernie4_5_vl_moe": {
        "text_config": SIZES | {
            "moe_intermediate_size": [16, 24], "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"], "rope_parameters": tiny_families._turned(),
        },
        "vision_config": tiny_families.IMAGES | {"depth": 1, "num_heads": 2},
    },
    "deepseek_v3": tiny_families.FAMILIES["deepseek_v3"],
    "llama": SIZES,
}  # fmt: skip
FAST = ("mixtral", "qwen3_moe", "jetmoe")
ALL = [pytest.param(name, marks=() if name in FAST else pytest.mark.long) for name in [*FAMILIES][:-2]]
ON_TORCH = ("granitemoeshared", "flex_olmo", "jetmoe", "ernie4_5_vl_moe")  # which mlx-lm does not know
COEFFICIENT = 0.5
SPEC = AdapterSpec(4, 6.0, 0.0, ("o_proj", "q_proj"))
TARGETS = {"dbrx": ("Wqkv", "out_proj"), "jetmoe": ("kv_proj",)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tiny_families.written_once(tmp_path_factory.mktemp("routing"), FAMILIES)


@pytest.fixture
def balanced(load, models):
    """Load an engine that balances, with an adapter that changes something."""

    def load_(name, family, spec=SPEC, coefficient=COEFFICIENT, **options):
        engine = load(name, models(family), spec, router_aux_loss_coef=coefficient, **options)
        return tiny_families.trained(engine)

    return load_


def choice(output):
    """The logits and the chosen experts of a router: DBRX's returns logits alone, JetMoe's as the last of five."""
    if isinstance(output, tuple) and len(output) == 3:
        return output[0], output[2]
    logits = output[-1] if isinstance(output, tuple) else output
    return logits, logits.topk(2).indices


def oracle(model_dir, state, scale, batch, coefficient):
    """The gradient in float64, and the loss of experts, by transformers' function for one layer and document.

    That takes the experts with the largest logits; those that were chosen are others where the choice is corrected.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = transformers.AutoConfig.from_pretrained(model_dir)
    is_wrapper = hasattr(config, "text_config")
    auto = transformers.AutoModelForImageTextToText if is_wrapper else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    modules, routed = dict(model.named_modules()), []
    for router in find_routers(model):
        router.register_forward_hook(lambda module, inputs, output: routed.append(output))
    factors, weights = {}, {}
    for path in modules_of(state):
        own = next(name for name in modules if name.endswith(path.replace("block_sparse_moe", "mlp").partition(".")[2]))
        A, B = (torch.from_numpy(state[tensor_name(path, part)]).double().requires_grad_() for part in "AB")
        weights[f"{own}.weight"] = modules[own].weight.detach() + scale * B @ A
        factors |= {tensor_name(path, "A"): A, tensor_name(path, "B"): B}
    aux, loss = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        tokens, labels = (torch.from_numpy(x[row, :length]).long() for x in (batch.tokens_BT, batch.labels_BT))
        routed.clear()
        output = torch.func.functional_call(model, weights, (tokens[None],))
        losses = torch.nn.functional.cross_entropy(output.logits[0], labels, ignore_index=-100, reduction="none")
        own = torch.ones(length) if batch.weights_BT is None else torch.from_numpy(batch.weights_BT[row, :length])
        loss = loss + (losses * own).sum()
        each = []
        for logits, chosen in map(choice, routed):
            probs, number = logits.flatten(0, -2).softmax(-1), logits.shape[-1]
            f = torch.nn.functional.one_hot(chosen.reshape(length, -1), number).sum(1).double().mean(0)
            each.append(number * (f * probs.mean(0)).sum())
            theirs = load_balancing_loss_func((logits.flatten(0, -2),), number, chosen.shape[-1])
            assert config.model_type.startswith("ernie4_5") or theirs.item() == pytest.approx(each[-1].item(), rel=1e-6)
        aux = aux + own[labels != IGNORE_INDEX].sum() * sum(each) / len(each)
    loss, aux = loss / batch.total_weight, aux / batch.total_weight
    gradients = torch.autograd.grad(loss + coefficient * aux, [*factors.values()])
    return {name: g.numpy() for name, g in zip(factors, gradients, strict=True)}, aux.item()


def stepped(engine, *batches, divisor=None):
    """The gradient and the metrics of a step."""
    engine.discard()
    for batch in batches:
        engine.forward_backward(batch, divisor=divisor or sum(part.total_weight for part in batches))
    found = engine.gradient()
    return found, {name: float(x) for name, x in engine.optim_step(lr=0.0, max_grad_norm=None).metrics.items()}


@pytest.mark.parametrize("family", ALL)
def test_loss_and_gradient_are_transformers_of_each_document_and_layer(balanced, load, models, family):
    spec = replace(SPEC, targets=TARGETS.get(family, SPEC.targets))
    engines = [balanced(name, family, spec) for name in ("torch", "mlx")[: 1 if family in ON_TORCH else 2]]
    state = random_adapter(engines[0].adapter_state())
    expected, aux = oracle(models(family), state, SPEC.scale, BATCH, COEFFICIENT)
    found = [stepped(engine, BATCH) for engine in engines]
    for slopes, metrics in found:
        assert_close(slopes, expected, tolerances.GRADIENT)
        assert metrics[LOSS] == pytest.approx(aux, rel=1e-5)
    assert found[0][1] == pytest.approx(found[-1][1], rel=1e-5) and 0.25 <= found[0][1][BUSIEST] <= 0.5
    plain = gradient(tiny_families.trained(load("torch", models(family), spec)), BATCH)
    assert max(np.abs(plain[name] - slope).max() for name, slope in expected.items()) > 1e-4, "there is nothing to see"


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_a_step_is_the_same_however_its_documents_lie(balanced, models, name):
    """Weighted targets, a trained router, micro-batches, packed rows, recomputed layers, plain kernels."""
    spec = AdapterSpec(4, 6.0, 0.0, ("o_proj", "gate", "experts.down_proj"), experts=True)
    weights = np.random.default_rng(0).uniform(0.5, 2, BATCH.labels_BT.shape).astype(np.float32)
    batch = type(BATCH)(**{name: getattr(BATCH, name) for name in BATCH.__slots__} | {"weights_BT": weights})
    engine = balanced(name, "qwen3_moe", spec)
    expected, metrics = stepped(engine, batch)
    for other, parts in (
        (engine, [row_of(batch, row) for row in range(len(LENGTHS))]),
        (engine, [pack(batch, [[0, 2], [1, 3]])]),
        (balanced(name, "qwen3_moe", spec, checkpointing=ActivationCheckpointing(layers=2)), [batch]),
        *([(balanced(name, "qwen3_moe", spec, kernels="fused"), [batch])] if name == "mlx" else []),  # compiled
        (balanced(name, "qwen3_moe", spec, kernels="reference"), [batch]),
    ):
        slopes, measured = stepped(other, *parts)
        assert_close(slopes, expected, tolerances.GRADIENT)
        assert measured == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize("shared", [(3, 3, 3), (3, 2, 3)], ids=["alike", "of_two_lengths"])
@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_a_beginning_that_is_computed_once_counts_for_each_document(balanced, models, name, shared):
    """Against whole documents, each alone in float64; the loss of a document weighs as the objective's targets do."""
    engine, seen = balanced(name, "mixtral"), np.array([0, 0, *shared])
    apart = with_common_beginning(LENGTHS, tiny_families.VOCAB, 3)[1]
    weights = np.random.default_rng(0).uniform(0.5, 2, apart.labels_BT.shape).astype(np.float32)
    apart = replace(apart, weights_BT=weights)
    whole = pack(apart, [range(len(LENGTHS))], pad=3)
    keep = (whole.segments_BT[0] == 0) | (whole.positions_BT[0] >= seen[whole.segments_BT[0]])
    once = replace(whole, **{
        field: array[:, keep] for field in whole.__slots__ if isinstance(array := getattr(whole, field), np.ndarray)
    })  # fmt: skip
    once = replace(once, parents_BT=(once.segments_BT > 1).astype(np.int32))
    assert once.num_computed == apart.num_computed - sum(shared) and once.total_weight == apart.total_weight
    expected, aux = oracle(models("mixtral"), engine.adapter_state(), SPEC.scale, apart, COEFFICIENT)
    slopes, metrics = stepped(engine, once)
    assert_close(slopes, expected, tolerances.GRADIENT)
    assert metrics[LOSS] == pytest.approx(aux, rel=1e-5)
    assert metrics == pytest.approx(stepped(engine, apart)[1], rel=1e-5)


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_every_objective_balances_as_sft_does(balanced, name):
    """Beside slopes of whole answers and of tokens, weights of several labels, and weights that follow from log p."""
    engines = [balanced(name, "mixtral", coefficient=coefficient) for coefficient in (COEFFICIENT, 0.0)]
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.5, 2, BATCH.labels_BT.shape).astype(np.float32)
    batch = replace(BATCH, weights_BT=weights, documents=((0,), (1,), (2,), (3,)))
    total, counts = batch.total_weight, batch.is_target_BT.sum(-1)
    said = {d: (rng.permuted(np.tile(np.arange(8, dtype=np.int32), (n, 1)), axis=1)[:, :3], np.full((n, 3), -1.5))
            for d, n in enumerate(counts)}  # fmt: skip
    labelled, _ = Distillation(3, "forward_kl", 0.5, 1.0, 0.0, False).labelled(batch, said)

    def difference(batch, divisor):
        (with_loss, metrics), (without, same) = (stepped(engine, batch, divisor=divisor) for engine in engines)
        assert metrics == pytest.approx(same)
        return {key: with_loss[key] - without[key] for key in with_loss}, metrics

    expected, metrics = difference(batch, total)
    assert max(np.abs(slope).max() for slope in expected.values()) > 1e-4
    for other, divisor in (
        (with_slopes(batch, dict(enumerate(rng.normal(size=4))), total), 1.0),
        (with_slopes(batch, {d: rng.normal(size=n) for d, n in enumerate(counts)}, total), 1.0),
        (replace(labelled, weights_BT=rng.normal(size=labelled.labels_BT.shape).astype(np.float32)), total),
        (with_weights(batch, rng.normal(size=weights.shape).astype(np.float32)), total),
    ):
        found, measured = difference(other, divisor)
        assert_close(found, expected, tolerances.GRADIENT)
        assert measured == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_zero_measures_and_changes_nothing(balanced, load, models, name):
    engine, plain = (
        balanced(name, "mixtral", coefficient=0.0),
        tiny_families.trained(load(name, models("mixtral"), SPEC)),
    )
    (slopes, metrics), (expected, none) = stepped(engine, BATCH), stepped(plain, BATCH)
    assert_equal(slopes, expected)
    assert metrics.keys() == {LOSS, BUSIEST, IDLE} and none == {}
    assert engine.evaluate(BATCH).loss_sum == plain.evaluate(BATCH).loss_sum


@pytest.mark.parametrize("name", ["torch", "mlx"])
def test_experts_that_get_no_token_are_counted(balanced, name):
    """One token of each layer goes to 2 of 4 experts."""
    batch = row_of(BATCH, 0)
    one = type(batch)(**{
        key: x[:, :1] if isinstance(x := getattr(batch, key), np.ndarray) else x for key in batch.__slots__
    })  # fmt: skip
    one.labels_BT[:] = 5
    metrics = stepped(balanced(name, "mixtral"), one)[1]
    assert (metrics[BUSIEST], metrics[IDLE]) == (0.5, 4)


PAIRS = [{"prompt": f"{n} + {n} =", "chosen": f" {2 * n}", "rejected": f" {n}, or {n + 1}"} for n in range(8)]
LABELS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n + n % 2}", "label": n % 2 == 0} for n in range(8)]
OBJECTIVES = {
    "sft": {},
    "dpo": {"rows": PAIRS},
    "kto": {"rows": LABELS},
    "grpo": {"rollouts": {"rewards": ["number"], "samples": 2, "max_tokens": 6, "kl": 0.1}},
    "on_policy_distill": {
        "rollouts": {"samples": 2, "max_tokens": 6},
        "distill": {"top_k": 4},
    },
}


@pytest.mark.parametrize(
    "objective",
    [pytest.param(name, marks=pytest.mark.long if name not in ("sft", "kto") else ()) for name in OBJECTIVES],
)
def test_a_run_records_and_reports_it(backends, tiny, models, tmp_path, objective):
    """On MLX in smaller micro-batches: the same numbers in every step."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.model_dir / name, models("mixtral"))
    rows, sections, data = [], dict(OBJECTIVES[objective]), {}
    if "distill" in sections:
        sections["distill"] = sections["distill"] | {"teacher": str(tiny.model_dir)}
    if (answers := sections.pop("rows", None)) is not None:
        data = {"train": str(tmp_path / "answers.jsonl"), "columns": {}}
        (tmp_path / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in answers))
    for name, most in (("torch", 80), ("mlx", 40)):
        train = {"steps": 3, "router_aux_loss_coef": 0.1, "micro_batch_tokens": most, "objective": objective}
        sections |= {"model": {"name": str(models("mixtral"))}, "train": train, "data": data}
        config = tiny.config(tmp_path / name, **sections)
        path = run(config, backends[name]).run_dir
        rows.append([row for row in read_rows(path / METRICS) if "loss" in row])
    for a, b in zip(*rows, strict=True):
        assert [a[key] for key in (LOSS, BUSIEST, IDLE)] == pytest.approx(
            [b[key] for key in (LOSS, BUSIEST, IDLE)], 1e-3
        )
        assert a[LOSS] == pytest.approx(2, rel=0.3)  # a mean; of even experts it is the number of a token's
    tiles = {what: number for number, what in sections_of(read_run(path))["tiles"]}
    assert tiles["experts without a token, the last step"] == str(int(rows[1][-1][IDLE]))


@pytest.mark.parametrize(("shares", "word"), [([0.3] * 15 + [0.7] * 15, "few experts"), ([0.3] * 30, None)])
def test_the_verdict_on_routers_that_narrow(shares, word):
    rows = [{"step": i + 1, "loss": 2 - i / 30, LOSS: 2.0, BUSIEST: share, IDLE: 0} for i, share in enumerate(shares)]
    assert word in (None, verdict_of(History(rows)).word) and (of_routers({BUSIEST: shares}) is None) == (word is None)


@pytest.mark.parametrize("name", ["torch", "mlx"])
@pytest.mark.parametrize(
    ("family", "why"),
    [("llama", "is not a mixture of experts"), ("deepseek_v3", "balanced by a correction of the choice")],
)
def test_other_models_are_refused(balanced, name, family, why):
    with pytest.raises(
        ConfigError, match=rf"train\.router_aux_loss_coef: got 0\.5, but this model \({family}\).*{why}"
    ):
        balanced(name, family, AdapterSpec(4, 6.0, 0.0, ("o_proj",)))


@pytest.mark.parametrize(
    "lines",
    [
        "train: {router_aux_loss_coef: 0.1, activation_cache: disk}\nadapter: {targets: [q_proj], layers: last 1}",
        "train: {router_aux_loss_coef: 0.1}\nmemory: {resident_layers: 2}",
    ],
)
def test_what_does_not_go_together(lines):
    with pytest.raises(ConfigError, match=r"train\.router_aux_loss_coef: got 0\.1"):
        parse_config(f"model: {{name: m}}\ndata: {{train: d.jsonl}}\n{lines}\n")


def test_a_config_says_it():
    config = parse_config("model: {name: m}\ndata: {train: d.jsonl}\ntrain: {router_aux_loss_coef: 0.01}\n")
    request = LoadRequest.of(config, model_dir=None, adapter=SPEC, optimizer=OptimizerSpec())
    assert request.router_aux_loss_coef == 0.01
