"""Schedules of the folded pipeline as data: who computes what, in which order, and who posts which message when.

Under the fold each rank holds a chunk of the down path and the mirrored chunk of the up path. One micro-batch goes

    rank 0   F ┐           ┌ f b ┐           ┌ B        F, f   forward, down and up chunk
    rank 1     └ F ┐   ┌ f       └ b ┐   ┌ B            b, B   gradient of the input, up and down chunk
    rank 2         └ F f             └ b B              w, W   gradient of the weights, any time after b, B
                                                        E      a part of the frozen encoders

and rank 0 holds both ends: noise, target and loss. A schedule is a list of these operations for each rank, made here
from plain numbers without any process group, so that it can be printed, drawn and proven before a single message is
sent. `build` makes it, `simulate` times it, `programs` adds the messages, `check` proves it.

1F1B, 2 stages, 4 micro-batches (a backward takes twice the time of a forward; '-' goes on, '.' waits):

    rank 0   F0 F1 F2 f0 b0  - f1 b1  -  . B0  - f2 b2  - F3 B1  - f3 b3  -  . B2  -  .  . B3  -
    rank 1    . F0 f0 F1 f1  . b0  - B0  - F2 f2 b1  - B1  - F3 f3 b2  - B2  - b3  - B3  -  .  .

Zero bubble (backward split in two; the weight halves fill what would be holes):

    rank 0   F0 F1 F2 f0 b0 w0 f1 b1 B0 w1 B1 W0 F3 f2 b2 W1 w2  . f3 b3 B2 w3 B3 W2 W3
    rank 1    . F0 f0 F1 f1 b0 B0 w0 b1 B1 W0 F2 f2 w1 W1 b2 F3 f3 B2 w2 b3 B3 W2 w3 W3

Zero bubble that encodes the next step's pictures in its holes (encoders run from the last rank to rank 0, where the
latents are needed, since the last rank waits first and rank 0 waits last):

    rank 0   F0 E0 E1 F1 f0 E2 b0 f1 b1 w0 w1 F2 E3 B0 B1 W0 f2 b2 W1 F3 B2 w2 f3 b3 W2 w3 B3 W3
    rank 1   E0 E1 F0 f0 E2 F1 f1 E3 b0 b1 B0 B1 w0 w1 F2 f2 W0 W1 b2 B2 F3 f3 w2 W2 b3 B3 w3 W3
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Op(NamedTuple):
    """One operation of one rank: kind F, B, W or E; chunk "down" or "up" ("" for E)."""

    kind: str
    chunk: str
    micro: int

    def __str__(self) -> str:
        """`F3` on the way down, `f3` on the way up."""
        return f"{self.kind.lower() if self.chunk == 'up' else self.kind}{self.micro}"


KINDS = ("1f1b", "zero-bubble", "forward", "encode")  # the last two: a validation pass; the first step's encoding


@dataclass(frozen=True)
class Costs:
    """Time of each operation, in any unit: for each rank (down, up), for encode one number, for a message its hop.

    `backward` is the gradient of the input alone, `weight` the gradient of the weights; 1F1B does both in one go.
    `held` is what the activations of each chunk weigh, in any unit: the two chunks of a rank may differ greatly.
    """

    forward: list[tuple[float, float]]
    backward: list[tuple[float, float]]
    weight: list[tuple[float, float]]
    encode: list[float]
    hop: float = 0.0
    held: list[tuple[float, float]] | None = None  # None: all the same

    def weight_of(self, rank: int, chunk: str) -> float:
        return self.held[rank][chunk == "up"] if self.held else 1.0

    def limit(self, rank: int, room: float = 1.0) -> float:
        """What a rank may hold: as much as P micro-batches weigh there, as in 1F1B without a fold, times `room`."""
        return room * len(self.forward) * (self.weight_of(rank, "down") + self.weight_of(rank, "up"))

    def of(self, rank: int, op: Op, split: bool) -> float:
        if op.kind == "E":
            return self.encode[rank]
        i = op.chunk == "up"
        if op.kind == "B" and not split:
            return self.backward[rank][i] + self.weight[rank][i]
        return {"F": self.forward, "B": self.backward, "W": self.weight}[op.kind][rank][i]


def unit_costs(stages: int, encode: float = 1.0, hop: float = 0.0) -> Costs:
    """Every operation of every rank takes 1."""
    ones = [(1.0, 1.0)] * stages
    return Costs(forward=ones, backward=ones, weight=ones, encode=[encode] * stages, hop=hop)


@dataclass(frozen=True)
class Schedule:
    kind: str
    stages: int
    micro_batches: int
    encode: str | None  # None, "this" (the pictures of this step), "next" (those of the next)
    costs: Costs  # what it was made for
    room: float
    ops: list[list[Op]]  # for each rank, in order

    @property
    def split(self) -> bool:
        """Whether the weight gradients are operations of their own."""
        return self.kind == "zero-bubble"

    def cost(self, rank: int, op: Op, costs: Costs | None = None) -> float:
        return (costs or self.costs).of(rank, op, self.split)


def needs(rank: int, op: Op, stages: int, encode: str | None = None) -> tuple[int, Op] | None:
    """The one operation whose result this one waits for, as (rank, operation); on another rank it is a message.

    What else it uses (skips of its own down chunk) is older than that by construction.
    """
    last, m = stages - 1, op.micro
    if op.kind == "W":
        return rank, Op("B", op.chunk, m)
    if op.kind == "E":
        return (rank + 1, op) if rank < last else None
    if (op.kind == "F") == (op.chunk == "down"):
        # F down and B up go from rank 0 to the last.
        if rank > 0:
            return rank - 1, op
        if op.kind == "B":
            return 0, Op("F", "up", m)
        return (0, Op("E", "", m)) if encode == "this" else None
    # F up and B down go from the last rank, which turns, to rank 0.
    return (rank + 1, op) if rank < last else (rank, Op(op.kind, "down" if op.kind == "F" else "up", m))


# ── making a schedule ────────────────────────────────────────────────────────────────────────────────────────────────


class Rule(NamedTuple):
    """How a free rank chooses: chunks in this order of urgency, encoders after the first `encode_after` of them.

    A rank encodes at most `lead` micro-batches more than its own `ahead_of` has done; `lead_per_rank` adds to that.
    """

    order: str
    encode_after: float = 7
    ahead_of: str = "F"
    lead: int = 10**6
    lead_per_rank: int = 0


# 1F1B prefers forwards, which the memory limit turns into one forward, one backward; zero bubble rather finishes a
# micro-batch's round trip before it lets in the next. No order is best for all costs, so `build` tries these few and
# keeps the quickest, the first of equals.
ORDERS = {
    "1f1b": ("fFBb", "fFbB", "bfFB"),
    "zero-bubble": ("fbFB", "fFbB", "bBfF"),
    "forward": ("fF",),
    "encode": ("",),
}
# The encoders' turns: early, a little ahead of the rank's own work, or as filling only.
TURNS = ((1, "F", 1, 1), (7, "F", 2, 0), (7, "b", 2, 0), (1, "F", 3, 1), (7, "F", 10**6, 0))
# Weight gradients wait for a hole.
URGENCY_OF_W = 8
# A rank may encode at most so many micro-batches more than the next has taken: pictures at full size are large. The
# script keeps to it by waiting, before it posts an encoder's result, until all but two of the earlier ones are taken.
# Other results need no such wait: each belongs to a chunk whose activations the sender holds, so its limit bounds them
# too.
ENCODED_IN_TRANSIT = 3


def rules(kind: str, encode: str | None) -> list[Rule]:
    """All rules worth trying, the usual one first."""
    turns = TURNS if encode else ((),)
    return [Rule(order, *turn) for order in ORDERS[kind] for turn in turns]


def build(
    kind: str,
    stages: int,
    micro_batches: int,
    costs: Costs | None = None,
    encode: str | None = None,
    room: float = 1.0,
    tries: int | None = None,
) -> Schedule:
    """The schedule of one step. Without costs, every operation counts 1.

    A free rank takes the most urgent operation whose input has arrived. So the order is one that did run, in a
    simulation with these costs: whatever the costs, it cannot deadlock. `room` above 1 lets ranks hold more activations
    than 1F1B would, for fewer holes; `tries` stops after so many rules.
    """
    if kind not in KINDS or encode not in (None, "this", "next") or room < 1:
        raise ValueError(f"schedule {kind!r}, encode {encode!r}, room {room}: {KINDS}, (this, next), at least 1")
    costs = costs or unit_costs(stages)
    encode = "next" if kind == "encode" else encode
    best = None
    for rule in rules(kind, encode)[:tries]:
        simulation = _Plan(kind, stages, micro_batches, costs, encode, room, rule)
        end = simulation.run()
        if best is None or end < best[0] * (1 - 1e-9):
            best = end, simulation.ops
    return Schedule(kind, stages, micro_batches, encode, costs, room, best[1])


class _Plan:
    """A simulation in which free ranks choose. Operations are letters here, F f b B w W E, for speed."""

    def __init__(self, kind: str, stages: int, micros: int, costs: Costs, encode: str | None, room: float, rule: Rule):
        self.stages, self.micros, self.encode, self.rule, self.hop = stages, micros, encode, rule, costs.hop
        self.split, self.forward_only = kind == "zero-bubble", kind == "forward"
        self.urgency = {letter: float(i) for i, letter in enumerate(rule.order)}
        self.urgency["E"] = rule.encode_after - 0.5
        letters = rule.order + ("E" if encode else "")
        # A little over the limit, for sums of fractions.
        self.limit = [costs.limit(r, room) * (1 + 1e-9) for r in range(stages)]
        self.weight = [{a: costs.weight_of(r, _op(a, 0).chunk) for a in "FfbBwW"} for r in range(stages)]
        self.next = [dict.fromkeys(letters, 0) for _ in range(stages)]  # the next micro-batch of each kind
        self.finish = [{letter: [] for letter in letters} for _ in range(stages)]  # when each micro-batch was done
        self.waiting_weights = [deque() for _ in range(stages)]
        self.held = [0.0] * stages
        self.free = [0.0] * stages
        self.ops: list[list[Op]] = [[] for _ in range(stages)]
        self.time = [{a: _positive(costs.of(r, _op(a, 0), self.split)) for a in "FfbBwWE"} for r in range(stages)]
        self.left = stages * micros * (len(letters) + 2 * self.split)
        # Where each letter's input comes from: (rank, letter, delay), or None.
        self.source = [{a: self._source(r, a) for a in letters} for r in range(stages)]

    def _source(self, rank: int, letter: str) -> tuple[int, str, float] | None:
        need = needs(rank, _op(letter, 0), self.stages, self.encode)
        return need and (need[0], str(need[1])[0], self.hop if need[0] != rank else 0.0)

    def run(self) -> float:
        """Let ranks choose, always the one that can start soonest; returns when the last operation ends."""
        choices = [self._choose(r) for r in range(self.stages)]
        while self.left:
            rank = min((r for r in range(self.stages) if choices[r]), key=lambda r: choices[r][0])
            self._do(rank, *choices[rank])
            # Only the neighbours can be affected: all inputs come from one rank away.
            for r in range(max(rank - 1, 0), min(rank + 2, self.stages)):
                choices[r] = self._choose(r)
        return max(self.free)

    def _choose(self, rank: int) -> tuple[float, str, int] | None:
        """The operation this rank would take next, as (start, letter, micro-batch)."""
        able = [(at, *choice) for at, *choice in self._able(rank)]
        if not able:
            return None
        start = max(self.free[rank], min(at for at, *_ in able))
        _, letter, micro = min((u, a, m) for at, u, a, m in able if at <= start)
        return start, letter, micro

    def _able(self, rank: int) -> Iterator[tuple[float, float, str, int]]:
        """Operations whose input exists or is on its way: (arrival, urgency, letter, micro-batch)."""
        for letter, micro in self.next[rank].items():
            if micro == self.micros or not self._admitted(rank, letter, micro):
                continue
            at, source = 0.0, self.source[rank][letter]
            if source:
                done = self.finish[source[0]][source[1]]
                if micro >= len(done):
                    continue
                at = done[micro] + source[2]
            yield at, self.urgency[letter], letter, micro
        if self.waiting_weights[rank]:
            yield 0.0, URGENCY_OF_W, *self.waiting_weights[rank][0]

    def _admitted(self, rank: int, letter: str, micro: int) -> bool:
        """Memory: a forward needs room, and the way down leaves room for the way up.

        So a micro-batch that is down can always come up and give its room back: the oldest never waits for memory.
        """
        if letter in "Ff":
            needed = self.weight[rank]["f"] + (self.weight[rank]["F"] if letter == "F" else 0.0)
            return self.forward_only or self.held[rank] + needed <= self.limit[rank]
        if letter != "E":
            return True
        taken = self.next[rank - 1]["E"] + ENCODED_IN_TRANSIT if rank else self.micros
        own = self.next[rank].get(self.rule.ahead_of, self.micros)
        lead = self.rule.lead + self.rule.lead_per_rank * rank
        return micro < taken and (own == self.micros or micro < own + lead)

    def _do(self, rank: int, start: float, letter: str, micro: int) -> None:
        self.free[rank] = end = start + self.time[rank][letter]
        self.ops[rank].append(_op(letter, micro))
        self.left -= 1
        if letter in "wW":
            self.waiting_weights[rank].popleft()
            self.held[rank] -= self.weight[rank][letter]
            return
        self.next[rank][letter] += 1
        self.finish[rank][letter].append(end)
        if letter in "Ff":
            self.held[rank] += self.weight[rank][letter]
        elif letter in "bB" and self.split:
            self.waiting_weights[rank].append(("w" if letter == "b" else "W", micro))
        elif letter in "bB":
            self.held[rank] -= self.weight[rank][letter]


def _op(letter: str, micro: int) -> Op:
    if letter == "E":
        return Op("E", "", micro)
    return Op(letter.upper(), "up" if letter.islower() else "down", micro)


def _positive(cost: float) -> float:
    """A rank without encoder units passes on what it got: no time, but still after it got it."""
    return max(cost, 1e-9)


# ── timing and drawing ───────────────────────────────────────────────────────────────────────────────────────────────


class Span(NamedTuple):
    """A bar of the Gantt chart."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timing:
    spans: list[Span]  # by start, then end: an order in which all of them could run one after another
    makespan: float
    busy: list[float]  # for each rank, the share of the makespan in which it computes


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timing:
    """When everything happens if each rank follows its list and waits only for inputs (`costs`: other than planned)."""
    costs = costs or schedule.costs
    finish: dict[tuple[int, Op], float] = {}
    free, at, spans = [0.0] * schedule.stages, [0] * schedule.stages, []
    ready = deque(range(schedule.stages))
    while ready:
        rank = ready.popleft()
        while at[rank] < len(schedule.ops[rank]):
            op = schedule.ops[rank][at[rank]]
            need = needs(rank, op, schedule.stages, schedule.encode)
            if need and need not in finish:
                break
            arrival = finish[need] + (costs.hop if need[0] != rank else 0.0) if need else 0.0
            start = max(free[rank], arrival)
            free[rank] = finish[rank, op] = start + _positive(schedule.cost(rank, op, costs))
            spans.append(Span(rank, op, start, free[rank]))
            at[rank] += 1
            ready.extend(r for r in (rank - 1, rank + 1) if 0 <= r < schedule.stages and r not in ready)
    if any(at[r] < len(schedule.ops[r]) for r in range(schedule.stages)):
        raise ValueError(f"schedule stops: {_stopped(schedule, at)}")
    makespan = max(free)
    busy = [sum(s.end - s.start for s in spans if s.rank == r) / makespan for r in range(schedule.stages)]
    return Timing(sorted(spans, key=lambda s: (s.start, s.end)), makespan, busy)


def utilisation(schedule: Schedule, costs: Costs | None = None) -> float:
    """Share of all ranks' time spent computing, 0..1."""
    busy = simulate(schedule, costs).busy
    return sum(busy) / len(busy)


def _stopped(schedule: Schedule, at: list[int]) -> str:
    waits = []
    for rank, ops in enumerate(schedule.ops):
        if at[rank] < len(ops):
            op = ops[at[rank]]
            from_rank, need = needs(rank, op, schedule.stages, schedule.encode)
            waits.append(f"rank {rank} waits at {op} for {need} of rank {from_rank}")
    return "; ".join(waits)


def draw(schedule: Schedule) -> str:
    """The schedule tick by tick; for costs that are whole numbers."""
    timing = simulate(schedule)
    ticks = round(timing.makespan)
    width = max(len(str(s.op)) for s in timing.spans)
    rows = [["."] * ticks for _ in range(schedule.stages)]
    for span in timing.spans:
        first, last = round(span.start), round(span.end)
        rows[span.rank][first:last] = [str(span.op)] + ["-"] * (last - first - 1)
    return "\n".join(f"rank {r}   " + " ".join(f"{cell:>{width}}" for cell in row) for r, row in enumerate(rows))


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Message(NamedTuple):
    """The result of `op` on its way from rank `src` to rank `dst`, where the same operation of `dst` waits for it.

    op       from -> to    what travels (names of common/units.py)
    F down   r -> r+1      wire(carry, "down")
    F up     r+1 -> r      wire(carry, "up")
    B up     r -> r+1      gradients of returning(carry, "up")
    B down   r+1 -> r      gradients of returning(carry, "down")
    E        r+1 -> r      the encoder's carry, and the text embeddings made so far
    """

    src: int
    dst: int
    op: Op


# Where messages queue. NCCL runs what is posted on one communicator strictly in order on both sides, so that two ranks
# that post in different order wait for each other forever.
QUEUES = {
    "direction": lambda message, rank: (message.src, message.dst),  # a communicator for each direction of each pair
    "pair": lambda message, rank: (min(message[:2]), max(message[:2])),  # one for each pair of neighbours
    "rank": lambda message, rank: rank,  # one for the whole pipe: all messages of a rank stand in one line
}


def messages(schedule: Schedule) -> list[Message]:
    """All messages of a step in one global order, the same on every rank: by the time the sender has them ready.

    Sorted by time, a message never stands before one that it depends on, which is what makes every way of queueing
    (`QUEUES`) free of cycles.
    """
    found = []
    for span in sorted(simulate(schedule).spans, key=lambda s: (s.end, s.rank)):
        for dst in (span.rank - 1, span.rank + 1):
            in_pipe = 0 <= dst < schedule.stages and span.op.kind != "W"
            if in_pipe and needs(dst, span.op, schedule.stages, schedule.encode) == (span.rank, span.op):
                found.append(Message(span.rank, dst, span.op))
    return found


class Step(NamedTuple):
    """One line of a rank's program: "recv" and "send" post a message and go on, "run" computes."""

    action: str
    what: Message | Op


def programs(
    schedule: Schedule, queue: str = "direction", early: int = 1, everything: list[Message] | None = None
) -> list[list[Step]]:
    """What each rank does in one step: its operations, and between them the posts, in the global order of each queue.

    A receive is posted `early` operations before the one that needs it, if the queue's order allows; a send at once.
    """
    everything = everything or messages(schedule)
    return [_program(ops, _Line(r, everything, QUEUES[queue]), early) for r, ops in enumerate(schedule.ops)]


def _program(ops: list[Op], line: "_Line", early: int) -> list[Step]:
    inputs = [line.incoming.get(op) for op in ops]
    for i, op in enumerate(ops):
        line.post_through(inputs[i], must=True)
        for message in inputs[i + 1 : i + 1 + early]:
            line.post_through(message, must=False)
        line.steps.append(Step("run", op))
        line.ran.add(op)
        line.post_through(line.outgoing.get(op), must=True)
    return line.steps


class _Line:
    """The posts of one rank, queue by queue."""

    def __init__(self, rank: int, everything: list[Message], queue_of: Callable[[Message, int], object]):
        self.rank, self.queue_of = rank, queue_of
        self.steps: list[Step] = []
        self.ran: set[Op] = set()
        self.posted: set[Message] = set()
        self.queues: dict[object, deque[Message]] = {}
        mine = [m for m in everything if rank in m[:2]]
        for message in mine:
            self.queues.setdefault(queue_of(message, rank), deque()).append(message)
        self.incoming = {m.op: m for m in mine if m.dst == rank}
        self.outgoing = {m.op: m for m in mine if m.src == rank}

    def post_through(self, message: Message | None, must: bool) -> None:
        """Post everything in this message's queue up to and including it; unless `must`, stop at what is not ready."""
        if message is None or message in self.posted:
            return
        queue = self.queues[self.queue_of(message, self.rank)]
        while message not in self.posted:
            first = queue[0]
            if first.src == self.rank and first.op not in self.ran:
                if must:
                    raise ValueError(f"rank {self.rank} would have to send {first.op} before it is computed")
                return
            self.posted.add(queue.popleft())
            self.steps.append(Step("send" if first.src == self.rank else "recv", first))


# ── proof ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check(schedule: Schedule, queues: tuple[str, ...] = ("direction",), early: int = 1) -> None:
    """Prove a schedule by playing every rank's program under NCCL's rules, knowing nothing about time.

    A posted message waits at the end of its queue on each of the two ranks, and passes when it is first on both.
    Computation waits for the messages it needs. Raises ValueError if this comes to a stop, with what each rank waits
    for; if an operation is missing; if a rank holds more activations, or leaves more results untaken, than it may.
    """
    check_complete(schedule)
    check_memory(schedule)
    chunks = max(max(peak_held(schedule, unweighted=True)), 1)
    everything = messages(schedule)  # raises if an operation stands before one that it needs
    for queue in queues:
        untaken = play(programs(schedule, queue, early, everything), QUEUES[queue])
        if untaken > max(chunks, ENCODED_IN_TRANSIT):
            raise ValueError(f"{untaken} results of one rank wait to be taken, though it holds {chunks} chunks at most")


def check_complete(schedule: Schedule) -> None:
    """Each rank does each operation of each micro-batch once."""
    letters = {"1f1b": "FfbB", "zero-bubble": "FfbBwW", "forward": "Ff", "encode": ""}[schedule.kind]
    letters += "E" if schedule.encode else ""
    wanted = {_op(letter, m) for letter in letters for m in range(schedule.micro_batches)}
    for rank, ops in enumerate(schedule.ops):
        if len(ops) != len(wanted) or set(ops) != wanted:
            raise ValueError(f"rank {rank} does not do every operation of every micro-batch exactly once")


def check_memory(schedule: Schedule) -> None:
    """No rank holds more than its limit; a validation pass holds nothing."""
    if schedule.kind in ("1f1b", "zero-bubble"):
        for rank, held in enumerate(peak_held(schedule)):
            limit = schedule.costs.limit(rank, schedule.room)
            if held > limit * (1 + 1e-6):
                raise ValueError(f"rank {rank} holds activations of {held:g}, more than {limit:g}")


def peak_held(schedule: Schedule, unweighted: bool = False) -> list[float]:
    """The most activations each rank holds at once, as `costs.held` weighs them (`unweighted`: the number of chunks).

    A chunk's are held from F until B, or, where backward is split, until W.
    """
    released, peaks = "W" if schedule.split else "B", []
    for rank, ops in enumerate(schedule.ops):
        held = peak = 0.0
        for op in ops:
            weight = 1.0 if unweighted else schedule.costs.weight_of(rank, op.chunk)
            held += weight * ((op.kind == "F") - (op.kind == released))
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def play(programs: list[list[Step]], queue_of: Callable[[Message, int], object]) -> int:
    """Run programs until all are done, or raise ValueError with what each rank waits for.

    Returns the most results that ever waited to be taken in one direction; ranks run ahead as far as they can.
    """
    table = _Table(programs, queue_of)
    while table.woken:
        table.advance(table.woken.popleft())
    stuck = [f"rank {r} waits at {_say(p[table.at[r]])}" for r, p in enumerate(programs) if table.at[r] < len(p)]
    if stuck:
        raise ValueError("deadlock: " + "; ".join(stuck))
    return table.most_untaken


class _Table:
    """Where every rank is, and what stands in every queue."""

    def __init__(self, programs: list[list[Step]], queue_of: Callable[[Message, int], object]):
        self.programs, self.queue_of = programs, queue_of
        self.at = [0] * len(programs)
        self.lines: dict[object, deque[Message]] = defaultdict(deque)
        self.passed: set[Message] = set()
        self.inputs = [{s.what.op: s.what for s in p if s.action == "recv"} for p in programs]
        self.untaken: dict[tuple, int] = defaultdict(int)  # by direction, encoders apart from the rest
        self.most_untaken = 0
        self.woken = deque(range(len(programs)))  # ranks that may be able to go on

    def advance(self, rank: int) -> None:
        """Run a rank until it must wait."""
        steps = self.programs[rank]
        while self.at[rank] < len(steps) and not self.blocked(rank, *steps[self.at[rank]]):
            action, what = steps[self.at[rank]]
            self.at[rank] += 1
            if action != "run":
                self.post(rank, action, what)

    def blocked(self, rank: int, action: str, what: Message | Op) -> bool:
        if action == "run":
            message = self.inputs[rank].get(what)
            return message is not None and message not in self.passed
        return action == "send" and what.op.kind == "E" and self.untaken[_stream(what)] == ENCODED_IN_TRANSIT

    def post(self, rank: int, action: str, message: Message) -> None:
        if action == "send":
            self.untaken[_stream(message)] += 1
            self.most_untaken = max(self.most_untaken, self.untaken[_stream(message)])
        line = self.lines[rank, self.queue_of(message, rank)]
        line.append(message)
        self.deliver(line[0])

    def deliver(self, message: Message) -> None:
        """Let a message pass if it is first on both sides, and then those that it had kept waiting."""
        ends = [self.lines[rank, self.queue_of(message, rank)] for rank in message[:2]]
        if all(end and end[0] == message for end in ends):
            self.passed.add(message)
            self.untaken[_stream(message)] -= 1
            self.woken.extend(rank for rank in message[:2] if rank not in self.woken)
            for end in ends:
                end.popleft()
            for end in ends:
                if end:
                    self.deliver(end[0])


def _stream(message: Message) -> tuple[int, int, bool]:
    return message.src, message.dst, message.op.kind == "E"


def _say(step: Step) -> str:
    if step.action == "run":
        return f"{step.what}"
    return f"{step.action} {step.what.op} {step.what.src}->{step.what.dst}"
