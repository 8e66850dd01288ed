"""Faults put into a process from outside: imported by the sitecustomize.py that tests write for their processes."""

import functools
import os
import pkgutil
import signal
import time


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


def enter_large(where, tokens, calls, action):
    """Do `action` when the method named `where` gets a micro-batch of more tokens, after so many calls."""
    owner, name = where.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner)
    original = getattr(owner, name)
    done = 0

    @functools.wraps(original)
    def entered(self, batch, **options):
        nonlocal done
        done += 1
        if done > calls and batch.tokens_BT.size > tokens:
            action()
        return original(self, batch, **options)

    setattr(owner, name, entered)


def send(name):
    """An action: this process gets a real signal."""
    return lambda: os.kill(os.getpid(), signal.Signals[name])


def interrupt_parent(times):
    """An action: the parent gets Ctrl-C, and each one is awaited here."""

    def action():
        from dualtune.base import interrupt

        for _ in range(times):
            os.kill(os.getppid(), signal.SIGINT)
            while not interrupt.requested():
                time.sleep(0.01)
        while times > 1:  # until the second one
            time.sleep(0.01)

    return action


def throw(error):
    """An action: raise."""

    def action():
        raise error

    return action


def touch(path):
    """An action: make an empty file."""
    return lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
