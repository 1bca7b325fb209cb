"""Exit steps of one token, from its trajectory, written from the paper's formulas and Algorithm 1, in numpy."""

import numpy as np


def acceleration_exit(x, threshold, normalize="none", patience=2):
    """Algorithm 1 on a trajectory x[0..K]; returns the number of steps executed (its loop body entered)."""
    k_max = len(x) - 1
    k, delta_previous, hits = 0, None, 0
    while k < k_max:
        delta = x[k + 1] - x[k]
        if delta_previous is not None:
            a = np.linalg.norm(delta - delta_previous)
            if normalize == "state":
                a = a / np.linalg.norm(x[k + 1])
            if normalize == "step":
                a = a / (np.linalg.norm(delta) + np.linalg.norm(delta_previous))
            hits = hits + 1 if a < threshold else 0
            if hits == patience:
                return k + 1  # step k has been executed; the listing breaks before it counts it
        delta_previous = delta
        k += 1
    return k_max


def step_norm_exit(x, threshold, normalize="none"):
    for k in range(len(x) - 1):
        size = np.linalg.norm(x[k + 1] - x[k])
        if normalize == "state":
            size = size / np.linalg.norm(x[k + 1])
        if size < threshold:
            return k + 1
    return len(x) - 1


def kl_exit(x, threshold, head):
    """`head` maps a state to logits."""

    def log_softmax(z):
        z = z - z.max()
        return z - np.log(np.exp(z).sum())

    for k in range(2, len(x)):
        p, q = log_softmax(head(x[k])), log_softmax(head(x[k - 1]))
        if (np.exp(p) * (p - q)).sum() < threshold:
            return k
    return len(x) - 1
