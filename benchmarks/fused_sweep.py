"""Speed of the fused chain on a GPU, for each way of distributing sequences, and a check of its results.

    PYTHONPATH=src:. python benchmarks/fused_sweep.py [--budget SECONDS]

First, values and gradients are compared with log space in float64, for potentials of all sizes; then, for
each problem, it prints medians in ms of a forward and a backward pass: launched one by one, and as a CUDA
graph. Variants are compiled beforehand by several processes; variants left out for lack of time are
reported.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from structgp.structures.linear_chain import fused
from structgp.structures.linear_chain.fused import Shape
from structgp.structures.linear_chain.messages import Logs, Scaled

PROBLEMS = [
    (32, 256, 64, 17),
    (16, 256, 25, 3),
    (16, 64, 25, 22),
    (8, 50, 60, 17),
    (4000, 1, 25, 14),
    (8, 8, 500, 50),
]
# float32 is checked with all of these, float64 with the default only.
CHECKED = (None, Shape(4, 4), Shape(8, 2))
HARD = [(2, 5, 9, 17), (3, 4, 1, 3), (2, 3, 7, 1), (2, 3, 8, 2), (1, 3, 12, 64), (2, 20, 40, 9)]
DEVICE = "cuda"
BANDWIDTH = 4.8e12  # bytes per second, H200
FLOPS = 67e12  # float32, not on tensor cores


def shapes(B: int, V: int) -> list[Shape]:
    """The shapes worth trying: not more sequences per block than needed, and at most 256 numbers per
    thread."""
    found = []
    labels = fused.padded(V)
    for block in (1, 2, 4, 8):
        for warps in (1, 2, 4):
            numbers = block * labels**2 / (32 * warps)
            if block <= max(1, 2 * B - 1) and numbers <= 256 and block * labels >= 8 * warps:
                found.append(Shape(block, warps))
    return sorted(found, key=lambda shape: abs(shape.block_b * labels - 48))


def problem(size: tuple[int, ...], dtype: torch.dtype, spread: float = 4.0) -> tuple[Tensor, ...]:
    """f, g, a mask without padding, and weights (S, B)."""
    S, B, T, V = size
    generator = torch.Generator().manual_seed(0)
    f, g, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        for shape in ((S, B, T, V), (S, V, V), (S, B))
    )
    return f * spread, g * spread, torch.ones(B, T, dtype=torch.bool, device=DEVICE), weight


def both(f: Tensor, g: Tensor, mask: Tensor, weight: Tensor, shape: Shape | None) -> tuple[Tensor, ...]:
    log_z, saved = fused.forward(f, g, mask, shape)
    return log_z, *saved.gradients(weight)


def eager(kind: Callable[..., Logs | Scaled]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def run(f: Tensor, g: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        messages = kind(f, g, mask)
        return messages.log_z, *messages.gradients(weight)

    return run


def error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Largest error, relative to the larger of 1 and the value; infinite values have to be equal."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        finite = torch.isfinite(b)
        if not torch.equal(a.double()[~finite], b[~finite]):
            return float("inf")
        off = (a.double() - b)[finite].abs() / b[finite].abs().clamp(min=1)
        worst = max(worst, off.nan_to_num(torch.inf).max().item() if off.numel() else 0.0)
    return worst


def checks() -> list[tuple[tuple[int, ...], torch.dtype, Shape | None]]:
    rest = [(size, dtype, None) for dtype in (torch.float32, torch.float64) for size in HARD]
    return [(HARD[0], torch.float32, shape) for shape in CHECKED[1:]] + rest


def check() -> bool:
    """Checks values and gradients on hard sizes and potentials, in both types."""
    right = True
    torch.manual_seed(0)
    for size, dtype, shape in checks():
        for spread, banned in ((1, 0), (1, 0.3), (15, 0), (15, 0.3), (200, 0), (200, 0.3), (2000, 0)):
            f, g, _, weight = problem(size, dtype, spread)
            f[torch.rand_like(f) < banned] = -torch.inf
            g[torch.rand_like(g) < banned] = -torch.inf
            B, T = size[1:3]
            lengths = torch.randint(0, T + 1, (B,))
            mask = (torch.arange(T) < lengths[:, None]).to(DEVICE)
            clean = f.double().masked_fill(~mask[..., None], 0)
            expected = eager(Logs)(clean, g.double(), mask, weight.double())
            f = f.masked_fill(~mask[..., None], torch.nan)
            try:
                off = error(both(f, g, mask, weight, shape), expected)
            except Exception as failure:
                off = float("inf")
                print(f"  {type(failure).__name__}: {str(failure)[-300:]}")
            # Large scores are themselves rounded, in proportion to their size.
            if not off <= max(20.0, spread) * (5e-6 if dtype == torch.float32 else 1e-11):
                right = False
                print(f"WRONG {dtype} {size} spread {spread} banned {banned} {shape}: {off:.1e}")
    return right


def milliseconds(run: Callable[[], object], repeats: int = 25) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graphed(run: Callable[[], object]) -> float:
    """Milliseconds of one run within a graph of five runs, so that launching the graph counts little."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            run()
    return milliseconds(graph.replay, 10) / 5


def _compile(job: tuple[int, torch.dtype, Shape | None]) -> None:
    """Compiles a variant into Triton's cache on disk. The numbers of draws, sequences and tokens do not
    affect the compiled code."""
    V, dtype, shape = job
    try:
        both(*problem((1, 2, 2, V), dtype), shape)
        torch.cuda.synchronize()
    except Exception:
        return  # the measurement will say why


def roofline(size: tuple[int, ...]) -> str:
    S, B, T, V = size
    numbers = S * B * T * V
    moved = 4 * (5 * numbers + 2 * S * V * V)  # f twice, messages out and in, gradient
    work = 2 * 3 * numbers * V  # a product forward, one backward, the pairs
    return (
        f"{moved / 1e6:.0f} MB at 4.8 TB/s {1e3 * moved / BANDWIDTH:.4f} ms, "
        f"{work / 1e9:.2f} GFLOP at 67 TFLOP/s {1e3 * work / FLOPS:.4f} ms"
    )


def measure(size: tuple[int, ...], tried: list[Shape], ends: float) -> None:
    f, g, mask, weight = problem(size, torch.float32)
    expected = eager(Logs)(f.double(), g.double(), mask, weight.double())
    print(f"\n{size}: {roofline(size)}")
    for name, kind in (("log space", Logs), ("probability space", Scaled)):
        took = milliseconds(lambda kind=kind: eager(kind)(f, g, mask, weight), 5)
        print(f"  eager, {name}: {took:.3f} ms")
    rows, failures = [], 0
    for shape in tried:
        if time.monotonic() > ends:
            print(f"  {len(tried) - len(rows) - failures} variants left out for lack of time")
            break
        try:
            off = error(both(f, g, mask, weight, shape), expected)
            saved = fused.forward(f, g, mask, shape)[1]
            rows.append(
                (
                    graphed(lambda shape=shape: both(f, g, mask, weight, shape)),
                    milliseconds(lambda shape=shape: both(f, g, mask, weight, shape)),
                    milliseconds(lambda shape=shape: fused.forward(f, g, mask, shape)),
                    milliseconds(lambda saved=saved: saved.gradients(weight)),
                    off,
                    shape,
                )
            )
        except Exception as failure:
            failures += 1
            print(f"  {shape}: {type(failure).__name__} {str(failure)[-160:]!r}")
    rows.sort(key=lambda row: row[0])
    default = fused.default_shape(size[1], size[3])
    for place, (graph, whole, out, back, off, shape) in enumerate(rows):
        wrong = "" if off <= 1e-4 else "  WRONG"
        if place < 8 or shape == default or wrong:
            chosen = "  (default)" if shape == default else ""
            print(
                f"  b={shape.block_b:<3}warps={shape.num_warps} graph {graph:.4f}  "
                f"both {whole:.4f}  forward {out:.4f}  backward {back:.4f}  error {off:.0e}{wrong}{chosen}"
            )
    if rows:
        slowest = rows[-1]
        print(f"  {len(rows)} measured; the slowest, {slowest[-1]}: graph {slowest[0]:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=115.0, help="seconds, for all of it")
    budget = parser.parse_args().budget
    begin = time.monotonic()
    print(torch.__version__, torch.cuda.get_device_name())
    tried = {size: shapes(size[1], size[3]) for size in PROBLEMS}
    jobs = [
        (size[3], dtype, shape or fused.default_shape(size[1], size[3])) for size, dtype, shape in checks()
    ]
    jobs += [(size[3], torch.float32, shape) for size in PROBLEMS for shape in tried[size]]
    jobs = list(dict.fromkeys(jobs))
    workers = max(1, min(14, (os.cpu_count() or 1) - 1))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        try:
            pool.map_async(_compile, jobs, chunksize=1).get(timeout=0.5 * budget)
            print(f"{len(jobs)} variants compiled in {time.monotonic() - begin:.0f} s")
        except multiprocessing.TimeoutError:
            print("not all variants are compiled beforehand")
    print("values and gradients:", "right" if check() else "WRONG", flush=True)
    for place, size in enumerate(PROBLEMS):
        left = begin + budget - time.monotonic()
        measure(size, tried[size], time.monotonic() + left / (len(PROBLEMS) - place))
    print(f"\n{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
