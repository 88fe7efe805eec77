"""log Z of a linear chain for S draws of B sequences, and its gradients in f (S, B, T, V) and g (S, V, V).

The work is the same for all: from the two tensors to log Z of every draw and sequence, and back to two
gradients. It includes building the inputs that a peer's interface requires: torch-struct takes a matrix for
every position, pytorch-crf one transition matrix at a time, so that it needs a call per draw. All results
are compared first.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.clock import take_turns
from benchmarks.record import Options, Row, log_plot, table

LogZ = Callable[[Tensor, Tensor, Tensor], Tensor]

SHAPES = ((8, 50, 60, 17), (32, 64, 32, 17), (16, 20, 25, 22), (16, 100, 25, 3), (8, 8, 500, 10))
VALUES_ONLY = ((4000, 1, 25, 14), (10000, 4, 20, 17))
QUICK = ((4, 10, 12, 5), (8, 50, 60, 17))
# Tolerances relative to the largest number. In single precision, gradients lose digits at each position,
# mostly in log space.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5}
A_POSITION = {torch.float64: 1e-12, torch.float32: 2e-6}
# torch-struct sums over S B T V^3 numbers at once: above this many it is left out, for lack of memory.
MOST_AT_ONCE = 150_000_000


def ours(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    from structgp.structures.linear_chain.messages import log_partition

    return log_partition(f, g, mask)


def ours_in_torch(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """Our function as it is without numba."""
    from structgp.structures.linear_chain import messages

    before = messages.WORTH_COMPILING
    messages.WORTH_COMPILING = f.numel() * f.shape[-1] + 1
    try:
        return messages.log_partition(f, g, mask)
    finally:
        messages.WORTH_COMPILING = before


def plain_loop(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """A loop over tokens in log space, whose autograd graph has T steps."""
    alpha = f[:, :, 0]
    for t in range(1, f.shape[2]):
        moved = torch.logsumexp(alpha[..., None] + g[:, None], -2) + f[:, :, t]
        alpha = torch.where(mask[:, t, None], moved, alpha)
    return torch.logsumexp(alpha, -1)


def torch_struct(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    from torch_struct import LinearChainCRF

    S, B, T, V = f.shape
    potentials = g[:, None, None] + f[:, :, 1:, None]  # (S, B, T-1, from, to)
    first = torch.nn.functional.pad(f[:, :, :1, :, None], (0, 0, 0, 0, 0, T - 2))
    potentials = (potentials + first).mT.reshape(S * B, T - 1, V, V)
    lengths = mask.sum(-1).repeat(S)
    LinearChainCRF.arg_constraints = {}  # without them torch warns
    return LinearChainCRF(potentials, lengths).partition.reshape(S, B)


def pytorch_crf(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    from torchcrf import CRF

    crf = CRF(f.shape[-1]).to(f.device, f.dtype)
    del crf.transitions
    for name in ("start_transitions", "end_transitions"):
        getattr(crf, name).data.zero_()
    found = []
    for potentials, scores in zip(f, g, strict=True):
        crf.transitions = scores
        found.append(crf._compute_normalizer(potentials.transpose(0, 1), mask.T))
    return torch.stack(found)


# Maps the name of a peer to the package that it needs, and its function.
PEERS: dict[str, tuple[str | None, LogZ]] = {
    "plain loop": (None, plain_loop),
    "torch-struct": ("torch_struct", torch_struct),
    "pytorch-crf": ("torchcrf", pytorch_crf),
}


def run(options: Options) -> Iterator[Row]:
    for dtype in (torch.float64, torch.float32):
        for shape in QUICK if options.quick else SHAPES:
            yield measured(shape, dtype, options, backward=True)
    if not options.quick:
        for shape in VALUES_ONLY:
            yield measured(shape, torch.float32, options, backward=False)


def measured(shape: tuple[int, ...], dtype: torch.dtype, options: Options, *, backward: bool) -> Row:
    f, g, mask = inputs(shape, dtype, options.device)
    contestants: dict[str, LogZ] = {"structgp": ours}
    if options.device == "cpu":
        contestants["structgp, torch only"] = ours_in_torch
    absent = []
    for name, (package, function) in PEERS.items():
        if not options.wants(name):
            continue
        S, B, T, V = shape
        if package is not None and importlib.util.find_spec(package) is None:
            absent.append(name)
        elif name == "torch-struct" and S * B * T * V**3 > MOST_AT_ONCE:
            absent.append(f"{name} at {S}, {B}, {T}, {V}")
        else:
            contestants[name] = function
    calls = {name: call_of(function, f, g, mask, backward) for name, function in contestants.items()}
    close = CLOSE[dtype]
    check_equal(calls, (close, max(close, A_POSITION[dtype] * shape[2])))
    times = take_turns(
        calls,
        rounds=3 if options.quick else 7,
        device=options.device,
        at_least=0.2 if options.quick else 3.0,
    )
    mine = times["structgp"]
    peers = {name: t.over(mine) for name, t in times.items() if name in PEERS}
    return {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "backward": backward,
        "seconds": {name: t.seconds for name, t in times.items()},
        "cpu_seconds": {name: t.cpu_seconds for name, t in times.items()},
        "ratios": {name: t.over(mine) for name, t in times.items() if t is not mine},
        "cpu_ratios": {name: t.cpu_over(mine) for name, t in times.items() if t is not mine},
        "fastest_peer": min(peers, key=lambda name: peers[name]) if peers else None,
        "absent": absent,
    }


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Standard normal scores f and g, and a mask with lengths from half of T to T."""
    S, B, T, V = shape
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(S, B, T, V, generator=generator, dtype=torch.float64)
    g = torch.randn(S, V, V, generator=generator, dtype=torch.float64)
    lengths = torch.randint((T + 1) // 2, T + 1, (B,), generator=generator)
    lengths[0] = T
    mask = torch.arange(T) < lengths[:, None]
    return f.to(device, dtype), g.to(device, dtype), mask.to(device)


def call_of(
    function: LogZ, f: Tensor, g: Tensor, mask: Tensor, backward: bool
) -> Callable[[], list[Tensor]]:
    if not backward:

        def values() -> list[Tensor]:
            with torch.no_grad():
                return [function(f, g, mask)]

        return values
    f, g = f.clone().requires_grad_(), g.clone().requires_grad_()

    def gradients() -> list[Tensor]:
        value = function(f, g, mask)
        return [value.detach(), *torch.autograd.grad(value.sum(), (f, g))]

    return gradients


def check_equal(calls: dict[str, Callable[[], list[Tensor]]], close: tuple[float, float]) -> None:
    """Raises AssertionError unless all results agree. close : tolerances for values and for gradients,
    relative to the largest number."""
    (_, first), *others = calls.items()
    expected = first()
    for name, call in others:
        for i, (ours, theirs) in enumerate(zip(expected, call(), strict=True)):
            error = float((ours - theirs).abs().max() / ours.abs().max())
            if not error <= close[i > 0]:
                raise AssertionError(f"{name}: results differ by {error:.1e} of the largest")


def tables(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    header = ["S, B, T, V", "", "", "structgp, ms (CPU ms)", *names]

    def ratio(row: Row, name: str) -> str:
        if name not in row["ratios"]:
            return ""
        return f"{row['ratios'][name]:.3g} ({row['cpu_ratios'][name]:.3g})"

    lines = [
        [
            ", ".join(map(str, row["shape"])),
            row["dtype"],
            "with gradients" if row["backward"] else "values",
            f"{1e3 * row['seconds']['structgp']:.3g} ({1e3 * row['cpu_seconds']['structgp']:.3g})",
            *(ratio(row, name) for name in names),
        ]
        for row in rows
    ]
    absent = sorted({name for row in rows for name in row["absent"]})
    note = f"\nNot installed, or too large for memory: {'; '.join(absent)}.\n" if absent else ""
    about = "Others as multiples of structgp's time (of its CPU time), medians of rounds."
    return f"{about}\n\n{table(header, lines)}{note}"


def plots(rows: list[Row]) -> dict[str, str]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        S, B, T, V = row["shape"]
        if row["dtype"] == "float64":
            for name, seconds in row["seconds"].items():
                lines.setdefault(name, []).append((S * B * T * V * V, seconds))
    return {"chain": log_plot(lines, "S B T V^2", "seconds", "log Z and gradients")}
