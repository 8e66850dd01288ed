"""The only table of tolerances between two implementations, for float32 unless a name says otherwise."""

LOGPROBS = 1e-5  # log-probabilities of the same adapter on two backends
STEP_LOSS = 2e-5  # per-step loss of the same run on two backends, over 200 steps at learning rate 1e-3
RESUMED_LOSS = 5e-5  # per-step loss of a run resumed on another backend
LOSS_IN_16_BITS = 3e-2  # per-step loss of a short run beside the same run in float32: two CPUs are up to 1.4e-2 off
GRADIENT = 1e-4  # relative, by norm, of one step
DIRECTIONAL = {"numpy": 1e-6, "default": 2e-2}  # finite differences of a float32 loss are noisy
UPDATE = 1e-6  # one AdamW update against the formula, absolute, at learning rate 1e-2
MERGE = 1e-5  # log-probabilities of merged weights against the adapter
