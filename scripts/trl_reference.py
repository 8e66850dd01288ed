"""Record the losses of TRL 1.16, with their gradients and metrics, for the tests of the objectives.

    python scripts/trl_reference.py tests/train/data      (where trl==1.16.0 and torch are installed)

trl_losses.json has those of preference training, trl_divergences.json the generalized JSD of distillation,
trl_policy.json those of GRPO's variants and RLOO on the same samples, and trl_tempered.json GRPO from the logits of
samples that were drawn at a temperature. It calls TRL's own code, the loss methods of its
trainers. Around them stand a trainer that has only settings, and a model that answers with given log-probabilities.
Those of the tokens of an answer to compare are equal, so that the gradient with respect to their sum is all there is.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from types import MethodType, SimpleNamespace

import numpy as np
import torch
import trl
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import _ChunkedLogProbFunction, selective_log_softmax

NUM_UNITS, LONGEST = 6, 9
METRICS = ("rewards/", "logps/", "kl", "nll_loss", "log_odds_chosen")  # those that come from the scores alone


def random_inputs(shift):
    """Random answers; `shift` is added to the reference's log-probabilities, and so decides the sign of KTO's KL."""
    random = np.random.default_rng(16)
    num_targets_NA = random.integers(1, LONGEST + 1, (NUM_UNITS, 2))
    logps_NA = (-random.uniform(0.05, 2.0, (NUM_UNITS, 2)) * num_targets_NA).round(4)
    reference_NA = (logps_NA + random.normal(shift, 2.0, (NUM_UNITS, 2))).round(4)
    return {
        "logps": logps_NA.tolist(),
        "num_targets": num_targets_NA.tolist(),
        "reference": reference_NA.tolist(),
        "labels": [1, -1, -1, 1, 1, -1],
    }


def trainer_with(**settings):
    """What the loss methods read of a trainer: no process beside this one, no loss of routers."""
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    defaults = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "is_encoder_decoder": False,
        "padding_value": 0,
        "pad_token_id": 0,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**(defaults | settings))


def tokens_of(logps_B, num_targets_B):
    """Log-probabilities [B, T] of the tokens, and the mask [B, 1 + T] of the answer after a prompt of one token."""
    mask_BT = torch.arange(LONGEST) < num_targets_B[:, None]
    prompt_B1 = torch.zeros(len(mask_BT), 1, dtype=torch.bool)
    return (logps_B / num_targets_B)[:, None] * mask_BT, torch.cat([prompt_B1, mask_BT], dim=1).long()


def outputs_of(logps_BT):
    """What TRL's fused head returns. Only the log-probabilities enter the loss."""
    zeros_BT = torch.zeros_like(logps_BT)
    return SimpleNamespace(log_probs=logps_BT, entropy=zeros_BT, mean_logits=zeros_BT, is_top1=zeros_BT.bool())


def dpo(
    logps_NA, num_targets_NA, reference_NA, labels_N, *, loss="sigmoid", beta=0.1, label_smoothing=0.0, sft_weight=0.0
):
    if (
        loss == "sigmoid" and label_smoothing
    ):  # TRL 1.16 smooths no labels here; its CPO has the same loss of log c − log r
        settings = trainer_with(beta=beta, alpha=0.0, loss_type="sigmoid", label_smoothing=label_smoothing)
        return CPOTrainer.cpo_loss(settings, *(logps_NA - reference_NA).T)[0].mean(), {}
    trainer = trainer_with(
        beta=beta, label_smoothing=label_smoothing, f_divergence_type="reverse_kl", ld_alpha=None, use_weighting=False,
        loss_types=[loss, "sft"] if sft_weight else [loss], loss_weights=[1.0, sft_weight] if sft_weight else [1.0],
    )  # fmt: skip
    logps_BT, mask_BT = tokens_of(logps_NA.T.ravel(), num_targets_NA.T.ravel())
    batch = {
        "input_ids": torch.ones_like(mask_BT),
        "attention_mask": torch.ones_like(mask_BT),
        "completion_mask": mask_BT,
        "ref_chosen_logps": reference_NA[:, 0],
        "ref_rejected_logps": reference_NA[:, 1],
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs_of(logps_BT), batch, return_outputs=False)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def kto(
    logps_NA, num_targets_NA, reference_NA, labels_N, *, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0
):  # fmt: skip
    trainer = trainer_with(
        beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight, loss_type="kto",
        calculate_KL=True,
    )  # fmt: skip
    trainer._compute_kl_logps = MethodType(KTOTrainer._compute_kl_logps, trainer)
    (own_BT, own_mask_BT), (other_BT, other_mask_BT) = (
        tokens_of(logps_NA[:, answer], num_targets_NA[:, answer]) for answer in (0, 1)
    )
    own_ids_BT, other_ids_BT = torch.ones_like(own_mask_BT), torch.full_like(other_mask_BT, 2)
    batch = {
        "input_ids": own_ids_BT, "attention_mask": own_ids_BT, "completion_mask": own_mask_BT,
        "KL_input_ids": other_ids_BT, "KL_attention_mask": other_ids_BT, "KL_completion_mask": other_mask_BT,
        "label": labels_N > 0, "ref_logps": reference_NA[:, 0], "ref_KL_logps": reference_NA[:, 1],
    }  # fmt: skip

    def model(*, input_ids, **_):
        return outputs_of(own_BT if input_ids[0, 0] == 1 else other_BT)

    loss = KTOTrainer._compute_loss(trainer, model, batch, return_outputs=False)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def loss_of_logits(kind, trainer, logps_NA, num_targets_NA):
    """The whole loss of ORPOTrainer or CPOTrainer, which compute log-probabilities from logits themselves.

    Two tokens are enough: that of the answer with probability p, the other one with 1 − p.
    """
    logps_BT, mask_BT = tokens_of(logps_NA.T.ravel(), num_targets_NA.T.ravel())
    logps_BT = torch.where(mask_BT[:, 1:] == 1, logps_BT, -1.0)
    logits_BTV = torch.stack([logps_BT, torch.log(-torch.expm1(logps_BT))], dim=-1)
    logits_BTV = torch.cat([logits_BTV, torch.zeros_like(logits_BTV[:, :1])], dim=1)  # no target follows the last one
    attention_mask_BT = mask_BT.clone()
    attention_mask_BT[:, 0] = 1
    batch = {
        "concatenated_input_ids": torch.zeros_like(mask_BT),
        "concatenated_attention_mask": attention_mask_BT,
        "concatenated_labels": torch.where(mask_BT == 1, 0, -100),
        "chosen_labels": torch.zeros(NUM_UNITS, 1),
    }
    trainer.concatenated_inputs = lambda batch, **_: batch
    trainer.get_batch_logps = kind.get_batch_logps
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(kind, name):
            setattr(trainer, name, MethodType(getattr(kind, name), trainer))
    loss, metrics = kind.get_batch_loss_metrics(trainer, lambda *_, **__: SimpleNamespace(logits=logits_BTV), batch)
    return loss, {name: float(value) for name, value in metrics.items()}


def orpo(logps_NA, num_targets_NA, reference_NA, labels_N, *, beta=0.1):
    return loss_of_logits(ORPOTrainer, trainer_with(beta=beta), logps_NA, num_targets_NA)


def cpo(logps_NA, num_targets_NA, reference_NA, labels_N, *, beta=0.1, label_smoothing=0.0, sft_weight=1.0):
    trainer = trainer_with(
        beta=beta, label_smoothing=label_smoothing, cpo_alpha=sft_weight, loss_type="sigmoid", alpha=0.0
    )
    return loss_of_logits(CPOTrainer, trainer, logps_NA, num_targets_NA)


def simpo(logps_NA, num_targets_NA, reference_NA, labels_N, *, beta=2.0, gamma=1.0, sft_weight=0.0):
    trainer = trainer_with(
        beta=beta, simpo_gamma=gamma, label_smoothing=0.0, cpo_alpha=sft_weight, loss_type="simpo", alpha=0.0
    )
    return loss_of_logits(CPOTrainer, trainer, logps_NA, num_targets_NA)


CASES = [
    (dpo, {}),
    (dpo, {"beta": 0.3, "label_smoothing": 0.2}),
    (dpo, {"beta": 0.2, "sft_weight": 0.7}),
    (dpo, {"loss": "hinge", "beta": 0.5}),
    (dpo, {"loss": "ipo", "beta": 0.5}),
    (dpo, {"loss": "robust", "label_smoothing": 0.1}),
    (dpo, {"loss": "apo_zero", "sft_weight": 0.2}),
    (orpo, {}),
    (orpo, {"beta": 0.4}),
    (cpo, {}),
    (cpo, {"beta": 0.2, "label_smoothing": 0.1, "sft_weight": 0.0}),
    (simpo, {}),
    (simpo, {"beta": 2.5, "gamma": 0.5, "sft_weight": 0.3}),
    (kto, {}),
    (kto, {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.5}),
]


def record(objective, settings, inputs):
    logps_NA = torch.tensor(inputs["logps"], dtype=torch.float64, requires_grad=True)
    others = torch.tensor(inputs["num_targets"]), torch.tensor(inputs["reference"], dtype=torch.float64)
    loss, metrics = objective(logps_NA, *others, torch.tensor(inputs["labels"]), **settings)
    loss.backward()
    return {
        "objective": objective.__name__, "settings": settings, "inputs": inputs, "value": loss.item(),
        "slopes": logps_NA.grad.tolist(),
        "metrics": {name: value for name, value in metrics.items() if name.startswith(METRICS)},
    }  # fmt: skip


def record_divergence(beta):
    """The generalized JSD of three targets over five tokens."""
    random = np.random.default_rng(7)
    student_NV, teacher_NV = random.normal(0, 1.5, (2, 3, 5)).round(4)
    logits_NV = torch.tensor(student_NV, requires_grad=True)
    loss = GKDTrainer.generalized_jsd_loss(logits_NV, torch.tensor(teacher_NV), beta=beta, reduction="sum")
    loss.backward()
    inputs = {"student": student_NV.tolist(), "teacher": teacher_NV.tolist()}
    return {"beta": beta, **inputs, "value": loss.item(), "gradient": logits_NV.grad.tolist()}


POLICY_CASES = [
    ("grpo", {"loss_type": "grpo"}),
    ("grpo", {"loss_type": "grpo", "beta": 0.3}),
    ("dr_grpo", {"loss_type": "dr_grpo"}),
    ("dapo", {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1}),
    ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.04}),
    ("cispo", {"loss_type": "cispo", "epsilon_high": 1.2}),
    ("rloo", {}),
]


def policy_loss(kind, settings, mask_NT, logps_NT, old_NT, reference_NT, advantages_N):
    """The loss of samples with these log-probabilities by a trainer's own method, and its metrics."""
    options = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token", **settings}
    trainer = trainer_with(
        **options, args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, max_completion_length=12,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps_NT, torch.zeros_like(logps_NT), None),
    )  # fmt: skip
    trainer.accelerator.num_processes, trainer.accelerator.reduce = 1, lambda x, **_: x
    inputs = {
        "prompt_ids": torch.ones(len(mask_NT), 1, dtype=torch.long), "prompt_mask": torch.ones(len(mask_NT), 1),
        "completion_ids": mask_NT.long(), "completion_mask": mask_NT.double(),
        "advantages": torch.tensor(advantages_N), "old_per_token_logps": old_NT,
        "ref_per_token_logps": reference_NT, "num_items_in_batch": mask_NT.double().sum(),
        "old_logps": (old_NT * mask_NT).sum(1),
    }  # fmt: skip
    loss = kind._compute_loss(trainer, trainer.model, inputs)
    return loss, {key: values[0] for key, values in trainer._metrics["train"].items()}


def record_policy(name, settings):
    """The loss of six samples with up to nine tokens, each with a ratio of its own, and its slopes by token."""
    random = np.random.default_rng(5)
    lengths_N = random.integers(1, LONGEST + 1, NUM_UNITS)
    logps_NT = -random.uniform(0.05, 2.0, (NUM_UNITS, LONGEST)).round(4)
    old_NT = (logps_NT + random.normal(0, 0.2, logps_NT.shape)).round(4)
    reference_NT = (logps_NT + random.normal(0, 0.4, logps_NT.shape)).round(4)
    advantages_N = random.normal(0, 1, NUM_UNITS).round(4)
    mask_NT = torch.arange(LONGEST) < torch.tensor(lengths_N)[:, None]
    logps = torch.tensor(logps_NT, requires_grad=True)
    kind = RLOOTrainer if name == "rloo" else GRPOTrainer
    others = torch.tensor(old_NT), torch.tensor(reference_NT), advantages_N
    loss, metrics = policy_loss(kind, settings, mask_NT, logps, *others)
    loss.backward()

    def flat(values_NT):
        return np.asarray(values_NT)[mask_NT.numpy()].tolist()

    return {
        "objective": name, "settings": settings, "lengths": lengths_N.tolist(), "advantages": advantages_N.tolist(),
        "logps": flat(logps_NT), "old": flat(old_NT), "reference": flat(reference_NT), "max_tokens": 12,
        "value": loss.item(), "slopes": flat(logps.grad), "metrics": metrics,
    }  # fmt: skip


def record_tempered(temperature, cap):
    """GRPO of three samples from the logits now, when they were drawn, and of the reference, [M, 7] each.

    TRL's fused head, which computes in float32, must say the same: with the identity its products are the logits.
    """
    random, lengths_N, vocab = np.random.default_rng(11), np.array([4, 2, 3]), 7
    mask_NT = torch.arange(4) < torch.tensor(lengths_N)[:, None]
    advantages_N, tokens_M = random.normal(0, 1, 3).round(4), random.integers(0, vocab, 9)
    now_MV = random.normal(0, 1.5, (9, vocab)).round(4)
    old_MV, reference_MV = (now_MV + random.normal(0, scale, now_MV.shape).round(4) for scale in (0.1, 0.4))

    def logps_of(logits_MV):
        tokens = torch.tensor(tokens_M)
        capped_MV = logits_MV if cap is None else cap * torch.tanh(logits_MV / cap)
        logps_M = selective_log_softmax(capped_MV, tokens, temperature=temperature)
        fused_M, *_ = _ChunkedLogProbFunction.apply(
            logits_MV.float(), torch.eye(vocab), None, tokens, temperature, 4, cap
        )
        torch.testing.assert_close(fused_M.double(), logps_M, rtol=0, atol=1e-5)
        return torch.zeros(mask_NT.shape, dtype=torch.float64).masked_scatter(mask_NT, logps_M)

    leaf_MV = torch.tensor(now_MV, requires_grad=True)
    logps, old, reference = (logps_of(x) for x in (leaf_MV, torch.tensor(old_MV), torch.tensor(reference_MV)))
    settings = {"loss_type": "grpo", "beta": 0.3}
    loss, metrics = policy_loss(GRPOTrainer, settings, mask_NT, logps, old, reference, advantages_N)
    loss.backward()
    return {
        "temperature": temperature, "cap": cap, "settings": settings, "lengths": lengths_N.tolist(),
        "advantages": advantages_N.tolist(), "tokens": tokens_M.tolist(), "now": now_MV.tolist(),
        "old": old_MV.tolist(), "reference": reference_MV.tolist(), "logps": logps[mask_NT].tolist(),
        "value": loss.item(), "kl": metrics["kl"], "gradient": leaf_MV.grad.tolist(),
    }  # fmt: skip


def write(path, cases):
    lines = ",\n".join(json.dumps(case) for case in cases)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    if trl.__version__ != "1.16.0":
        parser.error(f"trl {trl.__version__} is installed, the tests compare with 1.16.0")
    cases = [record(*case, random_inputs(shift=-1.0)) for case in CASES]
    cases.append(record(kto, {}, random_inputs(shift=3.0)))  # KL below 0
    args.directory.mkdir(exist_ok=True)
    write(args.directory / "trl_losses.json", cases)
    write(args.directory / "trl_divergences.json", [record_divergence(beta) for beta in (0.0, 0.1, 0.5, 0.9, 1.0)])
    write(args.directory / "trl_policy.json", [record_policy(*case) for case in POLICY_CASES])
    write(args.directory / "trl_tempered.json", [record_tempered(*case) for case in ((0.7, None), (1.6, 3.0))])


if __name__ == "__main__":
    main()
