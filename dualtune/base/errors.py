"""Errors that a user can act on, each kind with its exit code, which is public.

A message says what was given, what is allowed and what to do next. `assert` is for our own invariants, never for users.
"""


class DualtuneError(Exception):
    """Base of every error that is reported as one clear message, without a traceback."""

    exit_code = 1


class ConfigError(DualtuneError):
    """The config file, an override or a command-line argument is wrong, or the backend does not honour it."""

    exit_code = 2


class DataError(DualtuneError):
    """The training or evaluation data cannot be used as it is."""

    exit_code = 3


class EnvironmentFault(DualtuneError):
    """The machine lacks something: a backend, a GPU, a model, the network."""

    exit_code = 4


class PeerLost(EnvironmentFault):
    """Another process of the run does not answer: it failed or is gone."""


class DiskError(DualtuneError):
    """A file or directory could not be written."""

    exit_code = 5


class FormatError(DualtuneError):
    """An adapter or bundle is damaged, unsafe, or uses a feature that cannot be converted exactly."""

    exit_code = 6


class NonFiniteError(DualtuneError):
    """A loss, gradient or weight became NaN or infinite."""

    exit_code = 7


class OutOfMemory(DualtuneError):
    """Memory ran out, and smaller micro-batches did not help or were not possible."""

    exit_code = 8


class LockedError(DualtuneError):
    """Another process uses the run directory."""

    exit_code = 9


class DeviceFault(DualtuneError):
    """The GPU or its driver failed: this process can compute nothing more, a new one perhaps can."""

    exit_code = 10


class Preempted(DualtuneError):
    """A signal stopped the run, and its state is saved: run the same command again."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h
    again = "Run the same command again to continue."


class Paused(Preempted):
    """A run has reached the step after which it was to pause, and its state is saved."""
