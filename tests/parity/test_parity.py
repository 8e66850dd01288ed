"""One config on two backends, and an independent loop of transformers and PEFT: the same losses, step by step."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from dualtune.data.order import Order
from dualtune.engine.backend import LoadRequest
from dualtune.engine.testing import tolerances
from dualtune.engine.testing.conformance import random_adapter
from dualtune.engine.testing.tiny_models import random_batch
from dualtune.model.adapter import AdapterSpec, init_adapter
from dualtune.model.optimizer import OptimizerSpec
from dualtune.show.run import run
from dualtune.train.state.metrics import read_rows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CARRIED = 5e-5  # losses after the state went over to the other backend


def losses_of(config, backend):
    """The per-step losses of a run, and its per-step target counts."""
    rows = [row for row in read_rows(run(config, backend).run_dir / "metrics.jsonl") if "event" not in row]
    assert [row["step"] for row in rows] == list(range(1, config.train.steps + 1))
    return np.array([row["loss"] for row in rows]), [row["num_targets"] for row in rows]


def peft_losses(material, config):
    """The same run, written out: Hugging Face's model, PEFT's adapter, torch's AdamW, one micro-batch a step."""
    documents = material.documents()
    order = Order(config, [len(ids) for ids, _ in documents])
    base = transformers.AutoModelForCausalLM.from_pretrained(material.model_dir, dtype=torch.float32)
    linear = {n: tuple(m.weight.shape) for n, m in base.named_modules() if n.split(".")[-1] in TARGETS}
    lora = peft.LoraConfig(
        r=config.adapter.rank, lora_alpha=config.adapter.alpha, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, lora)
    start = init_adapter(linear, config.adapter.rank, config.run.seed)
    found = peft.set_peft_model_state_dict(model, {n: torch.from_numpy(w) for n, w in start.items()})
    assert not found.unexpected_keys
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, weight_decay=config.train.weight_decay)
    steps, warmup = config.train.steps, math.ceil(config.train.warmup * config.train.steps)
    losses, counts = [], []
    for step in range(steps):
        chosen = [documents[i] for i in order.step(step).documents]
        width = max(len(ids) for ids, _ in chosen)
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in chosen])
        labels = torch.tensor([targets + [-100] * (width - len(targets)) for _, targets in chosen])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in chosen])
        logits = model(input_ids=tokens, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, config.train.max_grad_norm)
        rising, falling = (step + 1) / (warmup + 1), (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        optimizer.param_groups[0]["lr"] = config.train.learning_rate * (rising if step < warmup else falling)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        counts.append(int((labels[:, 1:] != -100).sum()))
    return np.array(losses), counts


@pytest.mark.parametrize(
    ("name", "steps"),
    [("tiny", 30), ("stories", 30), *(pytest.param(name, 200, marks=pytest.mark.long) for name in ("tiny", "stories"))],
    ids=["tiny", "stories260k", "tiny-long", "stories260k-long"],
)
def test_both_backends_follow_an_independent_peft_loop(name, steps, request, backends, tmp_path):
    material = request.getfixturevalue(name)
    runs = {
        backend.name: losses_of(material.config(tmp_path / backend.name, train={"steps": steps}), backend)
        for backend in backends.values()
    }
    runs["peft"] = peft_losses(material, material.config(tmp_path, train={"steps": steps}))
    assert runs["torch"][1] == runs["mlx"][1] == runs["peft"][1], "other tokens are trained"
    losses = {name: run[0] for name, run in runs.items()}
    assert losses["peft"][-5:].mean() < 0.8 * losses["peft"][:5].mean(), "nothing was learned, so nothing is shown"
    gaps = {(a, b): np.abs(losses[a] - losses[b]).max() for a, b in itertools.combinations(losses, 2)}
    print(f"largest gaps over {steps} steps:", {" - ".join(pair): f"{gap:.1e}" for pair, gap in gaps.items()})
    assert max(gaps.values()) <= tolerances.STEP_LOSS, gaps


def test_dropout_is_the_same_on_both_backends(material, backends, tmp_path):
    def losses(name, dropout):
        train = {"steps": 15, "documents_per_step": 2, "micro_batch_tokens": material.max_length}
        config = material.config(tmp_path / f"{name}-{dropout}", train=train, adapter={"dropout": dropout})
        return losses_of(config, backends[name])[0]

    with_dropout = losses("torch", 0.1)
    assert np.abs(with_dropout - losses("torch", 0.0)).max() > 1e-3, "dropout does nothing, so nothing is shown"
    gap = np.abs(with_dropout - losses("mlx", 0.1)).max()
    print(f"largest gap: {gap:.1e}")
    assert gap <= tolerances.STEP_LOSS


@pytest.mark.parametrize(
    ("first", "second", "method"), [("mlx", "torch", "lora"), ("torch", "mlx", "lora"), ("mlx", "torch", "dora")]
)
def test_training_continues_on_the_other_backend(first, second, method, tiny, backends):
    """Ten steps here, ten there, dropout included, are twenty steps in one place."""
    pattern, init = ((("q_proj", 3), ("layers.1.mlp.down_proj", 12)), "kaiming") if method == "dora" else ((), "pissa")
    spec = AdapterSpec(8, 16.0, 0.1, tuple(TARGETS), method=method, init=init, rank_pattern=pattern)
    request = LoadRequest(tiny.model_dir, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=5)

    def train(engine, steps):
        losses = []
        for step in steps:
            batch = random_batch([9, 16, 5, 12], 46, seed=step % 4)
            engine.forward_backward(batch, divisor=batch.num_targets)
            losses.append(float(engine.optim_step(lr=3e-3, max_grad_norm=0.3).loss))
        return losses

    straight = train(backends[second].load(request), range(20))
    begun = backends[first].load(request)
    losses = train(begun, range(10))
    continued = backends[second].load(replace(request, seed=6))  # what it would start from must not matter
    continued.load_adapter_state(begun.adapter_state())
    continued.load_optimizer_state(begun.optimizer_state())
    losses += train(continued, range(10, 20))
    assert straight[-1] < straight[0] - 0.1, "nothing was learned, so nothing is shown"
    gap = np.abs(np.array(losses) - straight).max()
    print(f"largest gap: {gap:.1e}")
    assert gap <= CARRIED


def test_forgotten_moments_would_be_seen(tiny, backends):
    """The tolerance of the test above is not so wide that an optimizer state left behind could hide in it."""
    spec = AdapterSpec(8, 16.0, 0.0, tuple(TARGETS))
    request = LoadRequest(tiny.model_dir, "float32", "auto", "pretrained", spec, OptimizerSpec(), seed=5)
    batch = random_batch([9, 16, 5, 12], 46)
    engines = [backends["torch"].load(request) for _ in range(2)]
    engines[0].load_adapter_state(random_adapter(engines[0].adapter_state()))
    for _ in range(10):
        engines[0].forward_backward(batch, divisor=batch.num_targets)
        engines[0].optim_step(lr=3e-3, max_grad_norm=0.3)
    engines[1].load_adapter_state(engines[0].adapter_state())
    for _ in range(2):
        outputs = []
        for engine in engines:
            engine.forward_backward(batch, divisor=batch.num_targets)
            outputs.append(float(engine.optim_step(lr=3e-3, max_grad_norm=0.3).loss))
    assert abs(outputs[0] - outputs[1]) > 2 * CARRIED
