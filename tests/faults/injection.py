"""Faults put into a process from outside: imported by the sitecustomize.py that tests write for their processes."""

import functools
import os
import pkgutil
import signal


def enter(where, call, action):
    """Do `action` when the function or method named `where` is entered for the call-th time (0: every time)."""
    owner, name = where.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner)
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def entered(*args, **kwargs):
        nonlocal calls
        calls += 1
        if call in (0, calls):
            action()
        return original(*args, **kwargs)

    setattr(owner, name, entered)


def send(name):
    """An action: this process gets a real signal."""
    return lambda: os.kill(os.getpid(), signal.Signals[name])


def throw(error):
    """An action: raise."""

    def action():
        raise error

    return action


def touch(path):
    """An action: make an empty file."""
    return lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
