"""Step policies for tests. Each does one thing that predictive training needs: a step without an update, a probe of
documents that are held out, a state that is saved, a return to an earlier state, a step that stands for several."""

import numpy as np

from dualtune.train.hooks import Event
from dualtune.train.policies import Ordinary
from dualtune.train.policy import Outcome, PolicyState


def probe_loss(step):
    return float(step.document_losses(step.probe_documents).mean())


class EveryThirdOnlyLooks(Ordinary):
    """Makes no update in every third step; it measures the loss there."""

    name = "every third only looks"

    def take(self, step):
        if step.index % 3 != 2:
            return super().take(step)
        loss = step.batch_loss()
        return Outcome(None, events=(Event(step.index + 1, "no_update", "only looked", {"mean_loss": loss}),))


class Prober(Ordinary):
    """Measures the loss on documents that are held out for it, after every update."""

    name, num_probes = "prober", 3

    def take(self, step):
        update = super().take(step).update
        loss = probe_loss(step)
        return Outcome(update, events=(Event(step.index + 1, "probe", "probed", {"mean_loss": loss}),))


class Remembering(Ordinary):
    """Remembers its steps, the loss of the last one, and an average of the weights, to which it returns when the loss
    rises: what it does depends on what it remembers. It reads the loss one step late."""

    name = "remembering"

    def __init__(self, config):
        self._takes, self._loss, self._output, self._average = 0, None, None, {}

    def take(self, step):
        last = None if self._output is None else float(self._output.loss)
        if last is not None and self._loss is not None and last > self._loss:
            step.engine.load_adapter_state(self._average)
        outcome = super().take(step)
        self._takes, self._loss, self._output = self._takes + 1, last, outcome.update.output
        weights = step.engine.adapter_state()
        self._average = {n: (w + self._average.get(n, w)) / 2 for n, w in weights.items()}
        return outcome

    def state(self):
        if not self._takes:
            return PolicyState()
        return PolicyState({"takes": self._takes, "losses": [self._loss, float(self._output.loss)]}, self._average)

    def load_state(self, state):
        self.__init__(None)
        if not state.is_empty:
            self._takes, (self._loss, loss) = state.values["takes"], state.values["losses"]
            self._output, self._average = Loss(loss), state.tensors


class Loss:
    """What is left of a step's output in a resumed run."""

    def __init__(self, loss):
        self.loss = loss


class Undoing(Ordinary):
    """Step 4 makes the weights ten times as large, step 5 sees that this does not help and takes it back."""

    name, num_probes = "undoing", 2

    def __init__(self, config):
        self._before = {}

    def take(self, step):
        engine, loss = step.engine, probe_loss(step)
        if step.index == 3:
            before, self._before = engine.adapter_state(), engine.adapter_state() | {"loss": np.array(loss)}
            engine.load_adapter_state({name: 10 * w for name, w in before.items()})
            return Outcome(None)
        if self._before and loss > self._before["loss"]:
            engine.load_adapter_state({name: w for name, w in self._before.items() if name != "loss"})
            self._before = {}
            return Outcome(None, events=(Event(step.index + 1, "undone", "did not help"),))
        return super().take(step)

    def state(self):
        return PolicyState(tensors=self._before)

    def load_state(self, state):
        self._before = dict(state.tensors)


class Jumping(Ordinary):
    """From step 2 on, every step stands for three, where it may."""

    name = "jumping"

    def take(self, step):
        update = super().take(step).update
        return Outcome(update, num_steps=min(3, step.max_steps) if step.index >= 2 else 1)


PHASES = {"warmup": ("full", 2), "full": ("predict", 3), "predict": ("correct", 1), "correct": ("full", 2)}


class Controller(Ordinary):
    """Predicts and corrects, in four phases. It shows where things go, not a useful algorithm (decision 0016)."""

    name, num_probes = "controller", 4

    def __init__(self, config):
        self.load_state(PolicyState())

    def take(self, step):
        jump = self.predict(step) if self.phase == "predict" else None
        outcome = jump or self.observed(step)
        if self.phase == "correct" and self.left == 1 and probe_loss(step) > self.loss:
            step.engine.load_adapter_state(self.before)  # a real one restores the optimizer's state likewise
        self.left -= 1
        if not self.left:
            self.phase = PHASES[self.phase][0]
            self.left = PHASES[self.phase][1]
        return outcome

    def observed(self, step):
        before, outcome = step.engine.adapter_state(), super().take(step)
        self.velocity = {n: w - before[n] for n, w in step.engine.adapter_state().items()}  # a real one averages
        return outcome

    def predict(self, step):
        now, best, tau = step.engine.adapter_state(), probe_loss(step), 0
        self.before, self.loss = now, best
        for trial in (t for t in (1, 2, 4, 8) if t <= step.max_steps):
            with step.trying({n: w + trial * self.velocity[n] for n, w in now.items()}):
                loss = probe_loss(step)
            if loss >= best:
                break
            best, tau = loss, trial
        if not tau:
            return None  # no jump helps, so this step is an ordinary one
        step.engine.load_adapter_state({n: w + tau * self.velocity[n] for n, w in now.items()})
        details = {"steps": tau, "loss_before": self.loss, "loss_after": best}
        return Outcome(None, tau, (Event(step.index + tau, "predicted", f"{tau} steps predicted", details),))

    def state(self):
        parts = {"velocity": self.velocity, "before": self.before}
        tensors = {f"{part} {n}": w for part, weights in parts.items() for n, w in weights.items()}
        return PolicyState({"phase": self.phase, "left": self.left, "loss": self.loss}, tensors)

    def load_state(self, state):
        values = {"phase": "warmup", "left": 2, "loss": 0.0} | dict(state.values)
        self.phase, self.left, self.loss = values["phase"], values["left"], values["loss"]
        self.velocity, self.before = (
            {n.removeprefix(kind): w for n, w in state.tensors.items() if n.startswith(kind)}
            for kind in ("velocity ", "before ")
        )
