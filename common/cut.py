"""Where the UNet is cut: which rank holds which units, decided from plain numbers.

    units in order    conv_in ───────── down path ─────────►┐
                      ▲ cut 1 (down)   ▲ cut 2 (down)       │ the last rank turns
                      ▼ cut 1 (up)     ▼ cut 2 (up)         │
                      conv_out ◄─────── up path ────────────┘

                      rank 0           rank 1               rank 2

A cut is a *pair* of places, one on each path, between the same two skips. Then every skip is used on the rank that made
it, and only what is in flight at the two places crosses (SDXL at 1024²: 9 skips of 48.75 MiB stay at home). Places
between the same two skips pair freely: a transformer stack of ten blocks offers ten of them.

The search balances cost (counted FLOPs, or measured times), keeps every rank under a memory limit, and among cuts that
balance almost equally well takes the one with the fewest bytes on the wire.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from common.errors import UsageError
from common.schedule import Costs
from common.units import Carry, Unit, as_leaves, returning, wire

MIB, GIB = 2**20, 2**30

# ── what a unit costs ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class UnitCost:
    """One unit, for one sample."""

    name: str
    forward: float  # FLOP, or seconds
    backward: float  # of the input's gradient
    weight: float  # of the weights' gradient
    parameters: int = 0
    saved: int = 0  # bytes kept from forward to backward
    output: int = 0  # bytes of what it hands on
    down_wire: int = 0  # bytes that cross a down cut just before it: sample, residual, emb, text
    up_wire: int = 0  # bytes that cross an up cut just before it: sample, residual
    sample: int = 0  # the sample's share of either
    pushes: bool = False
    pops: bool = False

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


def count(units: list[Unit], carry: Carry, backward: bool = True) -> list[UnitCost]:
    """Count each unit's FLOPs, parameters and bytes without computing anything.

    Run it under `fake_mode()` with a fake model and a carry of one sample, in the dtype of training.
    """
    costs, known = [], {}
    for unit in units:
        before, alike = carry, _alike(unit, carry)
        # Units of one kind, like the blocks inside a transformer stack, are counted once.
        with torch.set_grad_enabled(backward and alike not in known):
            if alike in known:
                carry = unit(before)
            else:
                carry, *known[alike] = _count_unit(unit, before, backward)
        forward, of_input, of_weight, saved = known[alike]
        costs.append(
            UnitCost(
                name=unit.name,
                forward=forward,
                backward=of_input,
                weight=of_weight,
                parameters=sum(p.numel() for p in unit.parameters().values()),
                saved=saved,
                output=carry.sample.nbytes,
                down_wire=_nbytes(wire(before, "down").values()),
                up_wire=_nbytes(wire(before, "up").values()),
                sample=before.sample.nbytes,
                pushes=unit.pushes,
                pops=unit.pops is not None,
            )
        )
    return costs


def _alike(unit: Unit, carry: Carry) -> tuple:
    """The same for two units that do the same work: by their modules, weights and inputs."""
    inputs = {name: tuple(t.shape) for name, t in wire(carry, "down").items()}
    skip = carry.skips[unit.pops].shape if unit.pops else None
    kinds = tuple(type(m).__name__ for module in unit.modules.values() for m in module.modules())
    weights = tuple(tuple(p.shape) for p in unit.parameters().values())
    return kinds, weights, tuple(inputs.items()), skip, unit.pushes, carry.residual is None


def _count_unit(unit: Unit, before: Carry, backward: bool) -> tuple[Carry, float, float, float, int]:
    """The carry after a unit, its FLOP forward, for the input's gradient, for the weights', and the bytes it saves.

    The weights' gradient costs what multiplying with the weights did (Linear, convolution; attention has none). The
    rest of the backward is the input's; it is counted, not doubled, because text and latents need no gradient.
    """
    # Before conv_in there is no embedding, and nothing that a gradient could be for.
    leaves = as_leaves(before) if backward and before.emb is not None else before
    with _FlopCounter() as counter, _SavedBytes(unit) as saved:
        after = unit(leaves)
    with_weights, attention = counter.split()
    if not backward:
        return after, with_weights + attention, 0.0, 0.0, 0
    with _FlopCounter() as counter:
        roots = [t for t in returning(after, "down").values() if t.requires_grad]
        torch.autograd.backward(roots, [torch.empty_like(t) for t in roots])
    return after, with_weights + attention, sum(counter.split()) - with_weights, with_weights, saved.bytes


def timed(costs: list[UnitCost], seconds: list[tuple[float, float, float]]) -> list[UnitCost]:
    """The same units with measured (forward, backward, weight) times instead of counted FLOPs."""
    return [replace(cost, forward=f, backward=b, weight=w) for cost, (f, b, w) in zip(costs, seconds, strict=True)]


class _FlopCounter(FlopCounterMode):
    """FlopCounterMode that also knows the CPU's fused attention, and tells attention from the rest."""

    def __init__(self):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        super().__init__(
            display=False,
            custom_mapping={
                fused: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value),
                # Four products to the forward's two; computing the scores anew is not counted, as in unfused attention.
                fused_backward: lambda _, query, key, value, *__, **___: 2 * sdpa_flop_count(query, key, value),
            },
        )

    def split(self) -> tuple[float, float]:
        """(FLOP with weights, FLOP of attention). Batched matrix products occur in unfused attention only."""
        by_op = self.get_flop_counts().get("Global", {})
        attention = sum(n for op, n in by_op.items() if "attention" in str(op) or "bmm" in str(op))
        return float(sum(by_op.values()) - attention), float(attention)


class _SavedBytes(saved_tensors_hooks):
    """Bytes of all different storages that autograd keeps, weights apart (those stay in memory anyway)."""

    def __init__(self, unit: Unit):
        self.known = {p.untyped_storage()._cdata for p in unit.parameters().values()}
        self.kept: list[torch.Tensor] = []  # held, so that no address is used twice
        self.bytes = 0
        super().__init__(self._keep, lambda tensor: tensor)

    def __enter__(self) -> "_SavedBytes":
        super().__enter__()
        return self

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.kept.append(tensor)
            self.bytes += storage.nbytes()
        return tensor


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


# ── the fold ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Fold:
    """Stage r runs units [down[r], down[r+1]) and later units [up[r+1], up[r]).

    down = [0, d1, …, turn], up = [N, u1, …, turn]: the last stage's two chunks meet at the turn.
    """

    down: list[int]
    up: list[int]

    @property
    def stages(self) -> int:
        return len(self.down) - 1

    def chunks(self, stage: int) -> tuple[range, range]:
        """Units of the stage's down chunk and of its up chunk."""
        return range(self.down[stage], self.down[stage + 1]), range(self.up[stage + 1], self.up[stage])


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank: what a parameter weighs, how many samples a micro-batch has, what is there in any case.

    float32 weights, gradients and AdamW's two moments are 16 bytes, the copy that autocast casts once a step 2 more.
    """

    per_parameter: float = 16.0
    micro_batch: int = 1
    micro_batches: int | None = None  # in a step: fewer than stages are never held
    room: float = 1.0  # of the schedule
    fixed: float = 0.0
    recompute: bool = False  # keep what each unit hands on, and compute the rest again

    def of(self, costs: list[UnitCost], stages: int) -> float:
        """A schedule holds at most what P micro-batches weigh on a rank (`Costs.limit`), whichever chunks these are."""
        return self.base(costs) + sum(self.of_unit(c, stages) for c in costs)

    def base(self, costs: list[UnitCost]) -> float:
        """What does not add up over units: when recomputing, one unit at a time needs all of its activations."""
        return self.fixed + (self.micro_batch * max((c.saved for c in costs), default=0) if self.recompute else 0)

    def of_unit(self, cost: UnitCost, stages: int) -> float:
        held = self.room * min(stages, self.micro_batches or stages) * self.micro_batch
        return self.per_parameter * cost.parameters + held * (cost.output if self.recompute else cost.saved)


def mirror_pairs(costs: list[UnitCost]) -> list[tuple[int, int]]:
    """All cuts (d, u): places before unit d and before unit u with as many skips made below d as used from u on."""
    made = np.cumsum([0] + [c.pushes for c in costs])
    left = np.cumsum([0] + [c.pops for c in costs[::-1]])[::-1]
    # Down places end where the first skip is taken back, up places begin where the last one was made.
    bottom_end = next((i for i, c in enumerate(costs) if c.pops), len(costs))
    bottom_start = max((i for i, c in enumerate(costs) if c.pushes), default=-1) + 1
    downs = [d for d in range(1, bottom_end + 1) if made[d] > 0]
    ups = [u for u in range(bottom_start, len(costs)) if left[u] > 0]
    # The innermost stage needs a unit for each of its two chunks.
    return [(d, u) for d in downs for u in ups if made[d] == left[u] and u - d >= 2]


def most_stages(costs: list[UnitCost]) -> int:
    """The largest number of stages this model can be folded into."""
    pairs = mirror_pairs(costs)
    inside = _inside(pairs)
    reached, stages = np.ones(len(pairs), dtype=bool), 1
    while reached.any():
        reached, stages = (reached[:, None] & inside).any(axis=0), stages + 1
    return stages


def _inside(pairs: list[tuple[int, int]]) -> np.ndarray:
    """[i, j]: pair j lies strictly inside pair i on both paths, so that the stage between them has both its chunks."""
    d, u = np.array(pairs, dtype=int).reshape(-1, 2).T
    return (d[:, None] < d[None]) & (u[:, None] > u[None])


def fold(
    costs: list[UnitCost],
    stages: int,
    memory: Memory | None = None,
    limit: float = float("inf"),
    slack: float = 0.002,
    extra: list[float] | None = None,
    taken: list[float] | None = None,
) -> Fold:
    """The best fold into this many stages.

    First the smallest possible cost of the slowest stage, then, among folds at most `slack` worse, the one with the
    fewest bytes on the wire. Both are shortest paths through the pairs, from the outside in. `extra` is what else each
    stage does for a sample (its encoders), in the units of `costs`, and `taken` how many bytes else are there.
    """
    memory, extra, taken = memory or Memory(), extra or [0.0] * stages, taken or [0.0] * stages
    largest = most_stages(costs)
    if not 1 <= stages <= largest:
        raise UsageError(
            f"--stages {stages}: this model can be folded into 1 to {largest} stages; use {largest} or fewer"
        )
    pairs = mirror_pairs(costs)
    weigh = _Weigh(costs, pairs, stages, memory)
    fits = [weigh.memory + bytes_taken <= limit for bytes_taken in taken]
    slowest, _ = _path(lambda k: np.where(fits[k], weigh.cost + extra[k], np.inf), np.maximum, stages)
    if not np.isfinite(slowest):
        least, _ = _path(lambda k: weigh.memory + taken[k], np.maximum, stages)
        raise UsageError(
            f"no fold into {stages} stages fits {limit / GIB:.1f} GiB a rank: the best needs {least / GIB:.1f} GiB. "
            "Use more stages, a smaller --micro-batch, or --activations checkpoint"
        )
    good = [fits[k] & (weigh.cost + extra[k] <= slowest * (1 + slack)) for k in range(stages)]
    _, path = _path(lambda k: np.where(good[k], weigh.wire, np.inf), np.add, stages)
    cuts = [pairs[i - 1] for i in path[1:-1]]
    return _with_turn(costs, [0] + [d for d, _ in cuts], [len(costs)] + [u for _, u in cuts])


class _Weigh:
    """[i, j]: what the stage between pair i and pair j costs, needs and sends; infinite where there can be none.

    The first node stands for the outside (before conv_in, after conv_out), the last for the inside, to which only the
    stage that turns leads. So [first, last] is the whole UNet on one rank.
    """

    def __init__(self, costs: list[UnitCost], pairs: list[tuple[int, int]], stages: int, memory: Memory):
        self.d = np.array([0] + [d for d, _ in pairs])
        self.u = np.array([len(costs)] + [u for _, u in pairs])
        self.inside = _inside(list(zip(self.d, self.u, strict=True)))
        self.cost = self._between([c.total for c in costs])
        self.memory = self._between([memory.of_unit(c, stages) for c in costs]) + memory.base(costs)
        crossing = np.array([0, *(costs[d].down_wire + costs[u].up_wire for d, u in pairs)])
        self.wire = self._nodes(np.broadcast_to(crossing, self.inside.shape), np.zeros(len(crossing)))

    def _between(self, values: list[float]) -> np.ndarray:
        before = np.concatenate([[0.0], np.cumsum(values)])
        down, up = before[self.d], before[self.u]
        return self._nodes((down[None] - down[:, None]) + (up[:, None] - up[None]), up - down)

    def _nodes(self, stage: np.ndarray, turning: np.ndarray) -> np.ndarray:
        size = len(turning) + 1
        weight = np.full((size, size), np.inf)
        weight[:-1, :-1] = np.where(self.inside, stage, np.inf)
        weight[:-1, -1] = turning
        return weight


def _path(weight: Callable[[int], np.ndarray], join: Callable, steps: int) -> tuple[float, list[int]]:
    """The best path of so many steps from the first node to the last.

    `weight(k)` is what the k-th step weighs, [from, to]; steps are joined by maximum or sum. Returns the path's weight
    and its steps + 1 nodes.
    """
    size = len(weight(0))
    best, came = np.full(size, np.inf), []
    best[0] = 0.0
    for k in range(steps):
        options = join(best[:, None], weight(k))
        came.append(options.argmin(axis=0))
        best = options.min(axis=0)
    path = [size - 1]
    for previous in reversed(came):
        path.append(int(previous[path[-1]]))
    return float(best[-1]), path[::-1]


def _with_turn(costs: list[UnitCost], down: list[int], up: list[int]) -> Fold:
    """Split the last stage's units between its chunks as evenly as possible."""
    inner = range(down[-1] + 1, up[-1])
    turn = min(inner, key=lambda t: abs(_total(costs[down[-1] : t]) - _total(costs[t : up[-1]])))
    return Fold([*down, turn], [*up, turn])


def _total(costs: Iterable[UnitCost]) -> float:
    return sum(c.total for c in costs)


# ── the frozen encoders ──────────────────────────────────────────────────────────────────────────────────────────────


def encoder_cut(
    costs: list[UnitCost], stages: int, extra: list[float] | None = None, slack: float = 0.1
) -> list[range]:
    """The VAE encoder's units for each rank: contiguous, from the last rank (pixels) to rank 0 (moments).

    `extra` is what each rank's text encoders cost. A rank may get none if there are more ranks than units. Early
    feature maps are huge (SDXL at 1024²: 256 MiB before the first downsampler, 64 after), hence the larger `slack`.
    """
    extra = (extra or [0.0] * stages)[::-1]
    before = np.concatenate([[0.0], np.cumsum([c.total for c in costs])])
    cost = before[None] - before[:, None]
    cost = np.where(cost >= 0, cost, np.inf)
    crossing = np.array([c.sample for c in costs] + [0.0])
    slowest = _path(lambda k: cost + extra[k], np.maximum, stages)[0]
    good = [cost + extra[k] <= slowest * (1 + slack) for k in range(stages)]
    # What a rank takes in, it had to be sent; the first takes pixels from its own loader.
    sent = [np.where(good[k], crossing[:, None] if k else 0.0, np.inf) for k in range(stages)]
    cuts = _path(lambda k: sent[k], np.add, stages)[1]
    return [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)][::-1]


def place_encoders(
    vae: list[UnitCost],
    text_costs: list[float],
    text_bytes: list[float],
    load: list[float],
    used: list[float],
    vae_slack: float,
    slack: float = 0.005,
) -> tuple[list[range], list[int]]:
    """The VAE's units of each rank, as `encoder_cut` says, and a rank for each text encoder.

    `load` and `used`: what else each rank does for a sample, and its bytes. Of all placements of the text encoders, of
    which there are at most two, those count whose slowest rank is at most `slack` worse than the best; of these the one
    whose fullest ranks are the least full.
    """
    stages, tried = len(load), []
    for places in product(range(stages), repeat=len(text_costs)):
        extra, full = list(load), list(used)
        for at, cost, size in zip(places, text_costs, text_bytes, strict=True):
            extra[at] += cost
            full[at] += size
        units = encoder_cut(vae, stages, extra, vae_slack)
        slowest = max(e + _total(vae[i] for i in part) for e, part in zip(extra, units, strict=True))
        tried.append((slowest, sorted(full, reverse=True), units, list(places)))
    good = (1 + slack) * min(slowest for slowest, *_ in tried)
    _, _, units, places = min((t for t in tried if t[0] <= good), key=lambda t: (t[1], t[0]))
    return units, places


# ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StagePlan:
    """One row of the table."""

    units: tuple[int, int]
    first: tuple[str, str]  # first unit of each chunk
    last: tuple[str, str]
    parameters: int
    cost_share: float  # of the whole UNet
    sends_down: int  # bytes for each sample, to the next rank
    sends_up: int  # to the previous rank
    sample_bytes: int  # of both, the activation alone
    skips: int
    memory: float  # bytes
    encoder_units: int = 0
    text_encoders: tuple[str, ...] = ()


def plan(
    costs: list[UnitCost],
    cut: Fold,
    memory: Memory | None = None,
    encoder: list[range] | None = None,
    text: dict[str, int] | None = None,
) -> list[StagePlan]:
    """What each rank holds, does and sends."""
    memory, whole = memory or Memory(), _total(costs)
    rows = []
    for r in range(cut.stages):
        down, up = ([costs[i] for i in chunk] for chunk in cut.chunks(r))
        below = costs[cut.down[r + 1]] if r < cut.stages - 1 else UnitCost("", 0, 0, 0)
        above = costs[cut.up[r]] if r > 0 else UnitCost("", 0, 0, 0)
        rows.append(
            StagePlan(
                units=(len(down), len(up)),
                first=(down[0].name, up[0].name),
                last=(down[-1].name, up[-1].name),
                parameters=sum(c.parameters for c in down + up),
                cost_share=_total(down + up) / whole,
                sends_down=below.down_wire,
                sends_up=above.up_wire,
                sample_bytes=below.sample + above.sample,
                skips=sum(c.pushes for c in down),
                memory=memory.of(down + up, cut.stages),
                encoder_units=len(encoder[r]) if encoder else 0,
                text_encoders=tuple(name for name, rank in (text or {}).items() if rank == r),
            )
        )
    return rows


def imbalance(rows: list[StagePlan]) -> float:
    """The slowest stage over the mean: 1 is perfect."""
    return max(row.cost_share for row in rows) * len(rows)


def forward_bytes(rows: list[StagePlan]) -> tuple[int, int]:
    """Bytes that cross all cuts in one sample's forward: (everything, the activations alone)."""
    return sum(row.sends_down + row.sends_up for row in rows), sum(row.sample_bytes for row in rows)


def table(rows: list[StagePlan]) -> str:
    """The plan as `--dry-run` prints it."""
    lines = [
        f"{'rank':>4} {'units':>7} {'parameters':>12} {'cost':>6} {'sends down':>12} {'sends up':>12} "
        f"{'skips':>5} {'memory':>10}  down | up"
    ]
    for r, row in enumerate(rows):
        lines.append(
            f"{r:>4} {row.units[0]:>3}+{row.units[1]:<3} {row.parameters / 1e6:>10.1f} M {row.cost_share:>6.1%} "
            f"{row.sends_down / MIB:>8.2f} MiB {row.sends_up / MIB:>8.2f} MiB {row.skips:>5} "
            f"{row.memory / GIB:>6.1f} GiB  {row.first[0]} … {row.last[0]} | {row.first[1]} … {row.last[1]}"
        )
        held = [f"{row.encoder_units} VAE units"] if row.encoder_units else []
        if held or row.text_encoders:
            lines.append(f"{'':>4} and {', '.join([*held, *row.text_encoders])}")
    total, sample = forward_bytes(rows)
    lines.append(
        f"slowest over mean {imbalance(rows):.3f}; one sample's forward sends {total / MIB:.2f} MiB over all cuts, "
        f"{sample / MIB:.2f} of it activations"
    )
    return "\n".join(lines)


def schedule_costs(
    costs: list[UnitCost], cut: Fold, encode: list[float] | None = None, hop: float = 0.0, recompute: bool = False
) -> Costs:
    """What `schedule.build` needs to know, for one sample and in the units of `costs` (`encode` and `hop` too)."""
    chunks = [[[costs[i] for i in chunk] for chunk in cut.chunks(r)] for r in range(cut.stages)]

    def each(kind: str) -> list[tuple[float, float]]:
        return [tuple(sum(getattr(c, kind) for c in chunk) for chunk in pair) for pair in chunks]

    return Costs(
        each("forward"),
        each("backward"),
        each("weight"),
        encode or [0.0] * cut.stages,
        hop,
        held=each("output" if recompute else "saved"),
    )
