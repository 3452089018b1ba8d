"""A contestant of the attention benchmark in plain numpy; `fault` makes it misbehave."""

import os
import threading
import time

import numpy as np
from peers.task import Model
from safetensors.numpy import load_file

PACKAGES = ("numpy",)
# CPU time that a run takes at the least.
WORK_S = 0.0005
# Runs after which one that raises late does, at its next of the last shape: amid the rounds.
LATE = 60


def build(task):
    fault = task.options["fault"]
    if fault == "refuses":
        raise RuntimeError("this size is\nnot for me")
    print("libraries print what they like")
    runs = []
    weights = {name: tensor.astype(np.float64) for name, tensor in load_file(task.weights).items()}

    def bind(x, mask):
        last = x.shape[:2] == (2, 6)

        def run():
            if fault == "dies" and last:
                os._exit(7)
            if fault == "hangs" and last:
                time.sleep(60)
            runs.append(x.shape)
            if fault == "raises late" and last and len(runs) > LATE:
                raise ValueError("no more")
            y = attention(
                x, mask if fault != "ignores the mask" else np.ones_like(mask), weights, task.num_heads
            )
            burn()
            if fault == "spins on":
                threading.Thread(target=burn, args=(0.3,), daemon=True).start()
            if fault == "slows down":
                time.sleep(len(runs) * 1e-4)
            return y.astype(np.float32)

        return run

    return Model(bind, ("in numpy",))


def attention(x, mask, weights, heads):
    def project(name, value):
        return value @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    batch, seq, width = x.shape
    q, k, v = (
        project(name, x).reshape(batch, seq, heads, -1).transpose(0, 2, 1, 3)
        for name in ("query", "key", "value")
    )
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(width // heads)
    shares = np.where(mask[:, None, None], np.exp(scores - scores.max(-1, keepdims=True)), 0)
    shares /= np.maximum(shares.sum(-1, keepdims=True), 1e-30)
    return project("output", (shares @ v).transpose(0, 2, 1, 3).reshape(batch, seq, width))


def burn(seconds=WORK_S):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
