"""Reward functions that fail at a chosen call; ``FAILING_REWARD`` is ``HOW:CALL``."""

import os
import sys

calls = 0


def fn(episode):
    global calls
    calls += 1
    how, _, number = os.environ.get("FAILING_REWARD", ":0").partition(":")
    if calls == int(number):
        if how == "raise":
            raise ConnectionError("the reward service is gone")
        if how == "exit":
            sys.exit(7)
        os._exit(7)
    return float(episode.success)


def fails(episode):
    raise ConnectionError("there is no reward service")
