"""python -m benchmarks [--T 512 1024] [--rounds 7]

Every contender gets the same float32 arrays, its result is checked against the first one, and the rounds are
interleaved. Printed is the median time as a ratio to torch's fused kernel where torch is installed, else to the first
form: above 1 is slower. No absolute time is kept, for it says more about the machine than about the code.
"""
import argparse
import sys
import time

import numpy as np

from attention_ref import flash, sdpa
from attention_ref.conformance.report import table
from attention_ref.masks import causal


def contenders(q, k, v, scale):
    """Name -> function without arguments that returns o: causal attention of the same arrays."""
    T = q.shape[2]
    mask, open_bias, no_sink = causal(T, T)[None, None], np.float32(0), np.float32(-np.inf)
    found = {
        "sdpa.dense": lambda: sdpa.dense(q, k, v, mask, scale=scale)[0],
        "sdpa.loop": lambda: sdpa.loop(q, k, v, mask, open_bias, no_sink, scale, None)[0],
        "flash.online": lambda: flash.online(q, k, v, lambda i, j: j <= i, scale=scale)[0],
        "flash.loop": lambda: flash.loop(q, k, v, mask, no_sink, scale, 128, 128)[0],
    }
    try:
        import torch
    except ImportError:
        return found
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return {f"torch {torch.__version__} sdpa": lambda: attend(*tensors, is_causal=True, scale=scale).numpy()} | found


def medians(functions, rounds):
    """Median seconds of each function, one call of each per round, after one that warms up and is checked."""
    first = next(iter(functions.values()))()
    for name, function in functions.items():
        np.testing.assert_allclose(function(), first, rtol=1e-4, atol=1e-5, err_msg=name)
    seconds = {name: [] for name in functions}
    for n in range(rounds):
        if sys.stderr.isatty():
            print(f"\r\x1b[Kround {n + 1} of {rounds}", end="\r" * (n + 1 == rounds), file=sys.stderr, flush=True)
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(s)) for name, s in seconds.items()}


def main():
    """Run the benchmark and print the table of ratios."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--T", type=int, nargs="+", default=[256, 512, 1024], help="sequence lengths")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    random, ratios = np.random.default_rng(0), {}
    for T in options.T:
        q, k, v = (random.normal(size=(1, 4, T, 64)).astype(np.float32) for _ in range(3))
        times = medians(contenders(q, k, v, 0.125), options.rounds)
        base = next(iter(times.values()))
        for name, t in times.items():
            ratios.setdefault(name, []).append(f"{t / base:.2f}")
    print("causal attention, float32, B=1, H=4, d=64; time as a ratio to the first line")
    print(table([(name, *r) for name, r in ratios.items()], ("", *(f"T={T}" for T in options.T))))


if __name__ == "__main__":
    main()
