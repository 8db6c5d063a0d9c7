"""Cut: one UNet over P ranks, folded, so that every skip is used on the rank that made it and none travels.

                way down                             way up
   stage 0      conv_in ─ resnet ─────── skips ────► resnet ─ conv_out       latents and noise in, loss out
                   │ activation                        ▲
                   ▼                                   │
   stage 1      resnet ─ tb ─ down ───── skips ────► up ─ tb ─ resnet        tb: a transformer block
                   │                                   ▲
                   ▼                                   │
   stage P-1    resnet ─ tb ─ tb ─ tb ─── mid ────── tb ─ tb ─ resnet        turns

   A micro-batch goes down through stages 0 … P-1 and up through P-1 … 0; its gradients take the same way: down through
   the up chunks, up through the down chunks. The frozen encoders, cut too, run from stage P-1 (pixels) to stage 0
   (latents), on the next step's pictures, where a stage would wait.

rank = replica * P + stage. Stage 0 of a replica reads its pictures; with R replicas of P stages, N = R P ranks, the same
stage of all replicas averages its gradients.

collective      when                                  bytes each rank sends (P stages, R replicas, M micro-batches)
send/receive    between neighbours, as the schedule   M x what crosses the rank's cuts, forth and back (--dry-run); for
                says                                  the encoders M x the feature map at their cut, and the text
broadcast       start of a step, stage 0 to its pipe  pictures (bytes) and tokens of a step: to all, because which
                                                      stages have encoders depends on the cut
all-reduce      a chunk's gradients are final         2 (R-1)/R x 4 bytes for each parameter of the stage, under the
                                                      rest of the schedule; none if R = 1
all-reduce      end of a step, over the pipe          8        sum of squares of the gradient
all-gather      end of a step                         (N-1) x 56     loss, samples, and the joint decisions
store           start and end                         a few words    who is ready, who failed first and why

torchrun --standalone --nproc_per_node=2 pipeline_train.py
torchrun --standalone --nproc_per_node=8 pipeline_train.py --stages 4 --schedule zero-bubble --model DIR --data DIR
"""

import contextlib
import ctypes
import dataclasses
import itertools
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from common import checkpoint, data, models, plots, sample
from common.config import Config, batch_of, learning_rate, parse
from common.errors import Elsewhere, UsageError
from common.folding import Folding, Templates, plan_fold, stages_of
from common.job import Job, prepare
from common.ledger import SAMPLES, Ledger, Tally
from common.meters import Progress, Rows, moment, read_rows, seconds
from common.optim import EMA, LossScale, apply_step, build_optimizer, clip_factor, optimizer_tensors
from common.plan import product_rate
from common.schedule import ENCODED_IN_TRANSIT, Message, Op, Schedule, Span, simulate
from common.stage import Feed, Flight, Stage, place_frozen
from common.timing import Times, time_units
from common.units import unet_carry

# ── init ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Everything down to the strategy is the same text in the three scripts; a test compares them.


@dataclass
class World:
    """Who I am, and the store through which ranks can speak before there is a group and after it has broken."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    store: dist.Store
    stop: threading.Event = field(default_factory=threading.Event)  # set by a signal, acted on at the end of a step
    at: str = "start"  # for error messages


def find_world() -> World:
    """Read torchrun's variables, connect to its store, and arrange how this process ends. Makes no group yet."""
    env = {
        k: int(os.environ.get(k, v)) for k, v in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, LOCAL_WORLD_SIZE=1).items()
    }
    gpu, lone = torch.cuda.is_available(), env["WORLD_SIZE"] == 1  # a lone process needs no store that others reach
    world = World(
        rank=env["RANK"],
        local_rank=env["LOCAL_RANK"],
        world_size=env["WORLD_SIZE"],
        local_world_size=env["LOCAL_WORLD_SIZE"],
        device=torch.device("cuda", env["LOCAL_RANK"]) if gpu else torch.device("cpu"),  # never from RANK
        store=dist.HashStore() if lone else next(dist.rendezvous("env://"))[0],  # comm: store, connects to torchrun's
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: world.stop.set())
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan trains on when torchrun is killed
    if not gpu and sys.platform == "linux":
        keep_freed_memory()
    if not gpu and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun says 1, which idles the other cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_world_size))
    return world


def keep_freed_memory() -> None:
    """On a CPU, glibc gives every large activation back to the kernel and asks for it again in the next step; the page
    faults take up to half of the time. GPUs have torch's caching allocator for this."""
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((m_mmap_threshold, 2**30), (m_trim_threshold, 2**31 - 1), (m_top_pad, 2**28)):
            mallopt(option, size)


def check_devices(world: World) -> None:
    """One rank per GPU, said before NCCL says it in its own way."""
    gpus = torch.cuda.device_count()
    if world.device.type == "cuda" and world.local_world_size > gpus:
        raise UsageError(
            f"{world.local_world_size} processes, {gpus} GPUs visible on this host: use --nproc_per_node={gpus}, "
            "or show more of them in CUDA_VISIBLE_DEVICES"
        )
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)


HANG = (
    "Likely: one rank is late or gone (data, memory, a traceback: its last lines tell); ranks took different paths (same "
    "SeqNum, other OpType); or all wait in the same collective and the data does not arrive (direct copies between GPUs, "
    "the network). Next: python tools/nccl_log.py LOG OUT/flight.rank*; torchrun … tools/doctor.py; the same run with "
    "NCCL_DEBUG=INFO NCCL_DEBUG_FILE=/tmp/nccl.%h.%p.log; once with NCCL_P2P_DISABLE=1; or a longer --timeout"
)


def speak_before_the_watchdog(world: World, timeout: float) -> None:
    """NCCL's watchdog ends the process without a word of ours. Shortly before, one rank says what to look at."""

    def watch() -> None:
        at, since = world.at, time.monotonic()
        while time.monotonic() - since < 0.9 * timeout:
            time.sleep(1)
            if world.at != at or not at.startswith("step"):
                at, since = world.at, time.monotonic()
        me = str(world.rank)
        if world.store.compare_set("hang", "", me).decode() == me:  # comm: store, one rank speaks
            print(f"note: {at} has lasted {0.9 * timeout:.0f} s. {HANG}", file=sys.stderr, flush=True)

    threading.Thread(target=watch, daemon=True).start()


def join(world: World, timeout: float) -> None:
    """Make the default group and prove it with one all-reduce under a limit of its own; raises with the usual causes."""
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(  # comm: store, addresses of all ranks
            backend,
            store=dist.PrefixStore("default", world.store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout),
            device_id=world.device if backend == "nccl" else None,
        )
        probe = torch.ones(1, device=world.device)
        work = dist.all_reduce(probe, async_op=True)  # comm: all-reduce, 4 B, once
        work.wait(timedelta(seconds=min(timeout, 120)))
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"the first {backend} all-reduce of {world.world_size} ranks failed ({first_line(error)}). Usual causes: "
            "an interface that does not exist or does not reach the other hosts (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), "
            "a firewall between hosts, /dev/shm too small in a container (--shm-size=1g or --ipc=host), GPUs whose direct "
            "copies hang (try NCCL_P2P_DISABLE=1), two ranks on one GPU. torchrun … tools/doctor.py finds out which"
        ) from error
    if probe.item() != world.world_size:
        raise ConnectionError(
            f"the first all-reduce of {world.world_size} ranks gave {probe.item()}: the copies between the GPUs are wrong, try NCCL_P2P_DISABLE=1"
        )
    if backend == "nccl":  # gloo raises in Python; see `fail`
        speak_before_the_watchdog(world, timeout)


def wait_for(world: World, *keys: str, seconds: float = 600, ending: bool = False) -> None:
    """Wait until all `keys` are in the store; ends this rank if another fails meanwhile.

    At the start, a signal and the end of `seconds` stop the waiting. With `ending`, for work that may take long and has
    to be finished after a signal, too, there is no such end; but torchrun also sends the signal when another rank has
    died, and would kill this one half a minute later, so then it waits no longer than 20 s.
    """
    end = time.monotonic() + (math.inf if ending else seconds)
    while not world.store.check(list(keys)):  # comm: store, poll
        if world.store.check(["failure"]):  # comm: store, poll
            raise Elsewhere
        if world.stop.is_set() and not ending:
            raise ConnectionError("told to stop while waiting for the other ranks to start")
        if world.stop.is_set():
            end = min(end, time.monotonic() + 20)
        if time.monotonic() > end:
            if ending:
                raise RuntimeError("remote process exited, or is too slow to end after a signal")
            raise ConnectionError(
                f"the other ranks were not ready within {seconds:g} s; use a longer --timeout if one is slow"
            )
        time.sleep(0.05)


def all_ready(world: World, fingerprint: str, seconds: float) -> None:
    """Every rank has checked its flags, data and checkpoint, and all see the same; only then is a group made."""
    world.store.set(f"ready/{world.rank}", fingerprint)  # comm: store, my verdict
    wait_for(world, *(f"ready/{r}" for r in range(world.world_size)), seconds=seconds)
    if (first := world.store.get("ready/0").decode()) != fingerprint:  # comm: store, rank 0's verdict
        raise UsageError(
            f"rank {world.rank} starts with {fingerprint}, rank 0 with {first}: all hosts need the same flags, --data and --resume"
        )


def introduction(world: World) -> str:
    """Who trains, in one line."""
    gpu = world.device.type == "cuda"
    backend = f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}" if gpu else "gloo"
    words = [f"{world.world_size} ranks, {world.local_world_size} on this host, {backend}, torch {torch.__version__}"]
    if gpu and world.local_world_size > 1:  # as the driver says; what NCCL really took is in its log
        pairs = itertools.permutations(range(world.local_world_size), 2)
        off = os.environ.get("NCCL_P2P_DISABLE", "0") != "0"
        direct = not off and all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        words.append("GPUs reach each other directly" if direct else "GPUs exchange through host memory")
    return ", ".join([*words, *(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_"))])


def record_flights(out: Path) -> None:
    """At a time-out every rank writes its last 2000 collectives to OUT/flight.rankN. torch renamed the variables: set both."""
    for new, old, value in (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(out.absolute() / "flight.rank")),
    ):
        os.environ[new] = os.environ[old] = os.environ.get(new) or os.environ.get(old) or value
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def find_checkpoint(world: World, job: Job, script: str) -> tuple[Path | None, dict | None, list[str]]:
    """What --resume means: (checkpoint, its state, what to say). Rank 0 looks, the store tells the others."""
    config = job.config
    if not config.resume:
        return None, None, []
    if world.rank == 0:
        out = checkpoint.choose_out(config.out, script, config.resume, create=False)
        folder, state, notes = checkpoint.find(out, config.resume)
        world.store.set("checkpoint", str(folder or ""))  # comm: store, the folder
    else:
        wait_for(world, "checkpoint")
        found, notes = world.store.get("checkpoint").decode(), []  # comm: store, the folder
        folder = Path(found) if found else None
        state = checkpoint.read_state(folder) if folder else None
    return folder, state, notes + (job.changes_since(state) if state else [])


def open_out(world: World, config: Config, script: str) -> Path:
    """The folder of the run, made by rank 0 only when every rank is ready: a run that is refused leaves nothing."""
    if world.rank == 0:
        world.store.set("out", str(checkpoint.choose_out(config.out, script, config.resume)))  # comm: store, the folder
    wait_for(world, "out")
    out = Path(world.store.get("out").decode())  # comm: store, the folder
    if world.device.type == "cuda":
        record_flights(out)
    return out


def speeds(world: World, config: Config) -> tuple[float | None, float | None]:
    """(GB/s, TFLOP/s) for the plan: as given, or measured between the ranks there are; None for what one rank cannot tell."""
    bandwidth, rate = config.bandwidth, config.tflops
    if bandwidth is None and world.world_size > 1:
        join(world, config.timeout)
        message = torch.ones(2**26 if world.device.type == "cuda" else 2**20, device=world.device)
        for repeat in range(6):  # the first one opens the connections
            if repeat == 1:
                began = time.perf_counter()
            dist.all_reduce(message)  # comm: all-reduce, 256 MiB (CPU: 4 MiB), six times, only with --dry-run
            message.fill_(message[0].item() and 1)  # waits for it
        sent = 5 * 2 * (world.world_size - 1) / world.world_size * message.nbytes
        bandwidth = sent / (time.perf_counter() - began) / 1e9
    if rate is None and (config.bandwidth is None or world.device.type == "cuda"):
        rate = 0.5 * product_rate(world.device, models.DTYPES[config.precision]) / 1e12
    return bandwidth, rate


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def explain(world: World, error: BaseException) -> str:
    """One line for the first cause."""
    where = f"rank {world.rank}, {world.at}: "
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, ConnectionError):
        return where + str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return (
            where + f"out of GPU memory; try --activations checkpoint or a smaller --micro-batch ({first_line(error)})"
        )
    if isinstance(error, dcp.api.CheckpointException):  # raised on all ranks, and says on which one it began
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}, {world.at}: the checkpoint could not be written, is the disk of --out full? ({first_line(cause)})"
    if "DataLoader worker" in str(error):
        return (
            where
            + f"a process that reads pictures died; more memory, a larger /dev/shm or fewer --workers may help ({first_line(error)})"
        )
    return where + f"{type(error).__name__}: {first_line(error)}"


def is_consequence(error: BaseException) -> bool:
    """Is this what a rank sees when another one is gone?"""
    signs = (
        "closed by peer",
        "reset by peer",
        "Broken pipe",
        "Timed out",
        "timed out",
        "remote process exited",
        "NCCL communicator was aborted",
    )
    return isinstance(error, RuntimeError) and any(s in str(error) for s in signs)


def fail(world: World, error: BaseException) -> NoReturn:
    """End this rank: 2 for wrong input, 1 for anything later. The first rank with a cause of its own prints the one line.

    torchrun kills the others as soon as one exits, so nobody exits before the line is out: the store says who speaks.
    """
    code, line = 2 if isinstance(error, UsageError) else 1, explain(world, error)
    with contextlib.suppress(Exception):  # without a store there is nobody to agree with
        lost = is_consequence(error)
        if lost or isinstance(error, Elsewhere):
            world.store.set(f"lost/{world.rank}", "")  # comm: store, I live, the cause is not mine
            end = time.monotonic() + (3 if lost else 10)
            while time.monotonic() < end and not world.store.check(["failure"]):  # comm: store, poll
                time.sleep(0.1)
        if lost and not world.store.check(["failure"]):  # comm: store, nobody has confessed, so somebody died
            answers = [world.store.check([f"lost/{r}"]) for r in range(world.world_size)]  # comm: store, who answers
            silent = [r for r, answered in enumerate(answers) if not answered]
            who = f"{'rank' if len(silent) == 1 else 'one of the ranks'} {', '.join(map(str, silent))}"
            if "imed out" in str(error):  # the connection to a dead rank is closed by its host, which is no time-out
                who += " did not come within --timeout: use a longer one if it only was busy"
            else:
                who += " died without a word (killed? out of host memory? see dmesg)"
            line = f"{world.at}: {who if silent else f'the ranks lost each other ({first_line(error)}). {HANG}'}"
        mine = f"{world.rank} {code}"
        owner = world.store.compare_set("failure", "", mine).decode()  # comm: store, the first one speaks
        if owner != mine:
            code = int(owner.split()[1])
            world.store.wait(["reported"], timedelta(seconds=10))  # comm: store, its line is out
            os._exit(code)
    if not isinstance(error, UsageError | ConnectionError | OSError | Elsewhere) and not is_consequence(error):
        traceback.print_exception(error)
    print(f"error: {line}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        world.store.set("reported", "")  # comm: store, the others may exit now
    sys.stdout.flush()
    os._exit(code)  # at once: destroying a broken group can wait for ever


def agree(world: World, mine: torch.Tensor) -> torch.Tensor:
    """What every rank has to say at the end of a step, [K] float64 -> [N, K], on the device and without waiting for it."""
    everyone = mine.new_empty(world.world_size, len(mine))
    dist.all_gather(list(everyone), mine)  # comm: all-gather, 56 B from each rank, every step
    return everyone


def everyone_says(world: World, mine: dict) -> list[dict]:
    """A dictionary from each rank, on every rank; all must call it."""
    said: list[dict] = [{}] * world.world_size
    dist.all_gather_object(said, mine)  # comm: all-gather of a few names, only when a rank met new unreadable pictures
    return said


def global_mean(total: torch.Tensor, count: torch.Tensor) -> float:
    """Sum and number on each rank -> mean over all."""
    both = torch.stack([total.double(), count.double()])
    dist.all_reduce(both)  # comm: all-reduce, 16 B, when validating
    return (both[0] / both[1]).item()


# ── the strategy ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Groups:
    """The groups that this rank is in, beside the default one; none of a single rank."""

    pipe: dist.ProcessGroup | None  # the stages of my replica
    replicate: dist.ProcessGroup | None  # my stage in all replicas
    neighbours: dict[tuple[int, int], dist.ProcessGroup]  # (from stage, to stage) -> the two of us, one way


def make_groups(world: World, stages: int, timeout: float) -> Groups:
    """All groups of all ranks, made by every rank in the same order and used once, so that nothing is set up later.

    A group of two for each *direction* of each pair of neighbours: NCCL runs what is posted on a communicator strictly
    in order, and two directions in one line could wait for each other.
    """
    limit, mine = timedelta(seconds=timeout), Groups(None, None, {})
    replica, stage = divmod(world.rank, stages)
    for r in range(world.world_size // stages if stages > 1 else 0):
        row = range(r * stages, (r + 1) * stages)
        pipe = dist.new_group(row, timeout=limit, group_desc=f"pipe-{r}")  # comm: store, once
        mine.pipe = pipe if r == replica else mine.pipe
        for lower in range(stages - 1):
            for ends in ((lower, lower + 1), (lower + 1, lower)):
                both = [row[s] for s in ends]
                pair = dist.new_group(both, timeout=limit, group_desc=f"pipe-{r}:{ends[0]}-{ends[1]}")  # comm: store
                if world.rank in both:
                    mine.neighbours[ends] = pair
    for s in range(stages if world.world_size > stages else 0):
        column = range(s, world.world_size, stages)
        group = dist.new_group(column, timeout=limit, group_desc=f"replicate-{s}")  # comm: store, once
        mine.replicate = group if s == stage else mine.replicate
    probe = torch.zeros(1, device=world.device)
    for group in (mine.pipe, mine.replicate):
        if group is not None:
            dist.all_reduce(probe, group=group)  # comm: all-reduce, 4 B, once
    for (src, dst), group in mine.neighbours.items():
        pass_on = dist.isend if src == stage else dist.irecv
        other = replica * stages + (dst if src == stage else src)
        post(pass_on, [probe], other, group)[0].wait()  # comm: send or receive, 4 B, once
    return mine


def post(what, tensors: list[torch.Tensor], other: int, group: dist.ProcessGroup) -> list[dist.Work]:
    """Post the tensors of one message together; goes on at once."""
    return dist.batch_isend_irecv([dist.P2POp(what, t, other, group) for t in tensors])  # comm: send or receive


class Wire:
    """Messages between neighbours: posted in the order of the schedule, waited for only by what needs them."""

    def __init__(self, groups: Groups, world: World, stage: int):
        self.groups, self.world, self.first = groups, world, world.rank - stage
        self.coming: dict[Op, tuple[list[dist.Work], dict[str, torch.Tensor]]] = {}
        self.going: list[tuple[Message, list[dist.Work], list[torch.Tensor]]] = []  # tensors live until they are sent
        self.sent_bytes = 0

    def receive(self, message: Message, expected: dict[str, tuple]) -> None:
        """Post a receive. Neither backend checks shapes, so they come from the same templates on both sides."""
        tensors = {n: torch.empty(shape, dtype=kind, device=self.world.device) for n, (shape, kind) in expected.items()}
        group = self.groups.neighbours[message.src, message.dst]
        works = post(dist.irecv, list(tensors.values()), self.first + message.src, group)  # comm: receive
        self.coming[message.op] = works, tensors

    def take(self, op: Op) -> dict[str, torch.Tensor] | None:
        """What arrived for `op`; None if all it needs is here. On a GPU only the stream waits, never the host."""
        works, tensors = self.coming.pop(op, ((), None))
        for work in works:
            work.wait()
        return tensors

    def send(self, message: Message, tensors: dict[str, torch.Tensor]) -> None:
        """Post a send. Encoders could run far ahead of who takes their large results, so they wait for all but two."""
        for entry in [e for e in self.going if all(work.is_completed() for work in e[1])]:
            self.finish(entry)
        if message.op.kind == "E":
            encoded = [e for e in self.going if e[0].op.kind == "E"]
            for entry in encoded[: max(0, len(encoded) - ENCODED_IN_TRANSIT + 1)]:
                self.finish(entry)
        group = self.groups.neighbours[message.src, message.dst]
        works = post(dist.isend, list(tensors.values()), self.first + message.dst, group)  # comm: send
        self.going.append((message, works, list(tensors.values())))
        self.sent_bytes += sum(t.nbytes for t in tensors.values())

    def finish(self, entry: tuple) -> None:
        """Let go of what is sent. Once: a second wait on gloo would wait for ever."""
        self.going = [e for e in self.going if e is not entry]
        for work in entry[1]:
            work.wait()

    def close(self) -> None:
        """End of a schedule: everything sent has been taken."""
        for entry in list(self.going):
            self.finish(entry)


@dataclass
class Run:
    """All that a step needs and changes."""

    job: Job
    world: World
    unet: nn.Module
    folding: Folding
    stage: Stage
    groups: Groups
    wire: Wire
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    ema: EMA | None
    ledger: Ledger
    replica: int  # which share of the global batch is mine
    frozen: models.Frozen
    feed: Feed | None = None  # the next step's, encoded in the holes of the last
    # Of the last step that was like most, in that it encoded the next one's pictures:
    spans: list[tuple] = field(default_factory=list)
    sent_bytes: int = 0  # to neighbours
    encoding: list[tuple] = field(default_factory=list)  # when encoders ran by themselves

    @property
    def outermost(self) -> bool:
        return self.stage.stage == 0

    @property
    def pictures(self) -> tuple[int, int, int]:
        """Micro-batch, height, width of what is read next: every rank of the pipe must know it before it comes."""
        return self.job.batch.micro_batch, self.job.config.resolution, self.job.config.resolution

    def flight(self, feed: Feed, **more) -> Flight:
        """Of these pictures through the UNet; steps may differ in size."""
        return Flight(feed.latents(self.job.spec.vae_factor), feed, **more)


def read(run: Run, batches: Iterator[dict], count: int) -> Feed:
    """The next `count` micro-batches: stage 0 reads them, everyone gets pictures and tokens.

    One rank reads, so that each picture is opened once; its bytes are few beside what the encoders make of them.
    """
    (size, *sides), device = run.pictures, run.world.device
    encoders = len(run.frozen.text_encoders)
    read = [next(batches) for _ in range(count)] if run.outermost else []
    if run.outermost:
        pixels, tokens = (torch.stack([b[k] for b in read]).to(device, non_blocking=True) for k in ("pixels", "tokens"))
    else:
        pixels = torch.empty(count, size, 3, *sides, dtype=torch.uint8, device=device)
        tokens = torch.empty(count, size, encoders, 77, dtype=torch.int64, device=device)
    if run.groups.pipe is not None:
        for tensor in (pixels, tokens):
            dist.broadcast(tensor, run.wire.first, group=run.groups.pipe)  # comm: broadcast of pictures and captions
    return Feed(read, pixels, tokens)


def play(run: Run, schedule: Schedule, flight: Flight) -> list[tuple]:
    """This rank's part of a schedule: post what it says, compute what it says, wait only for what an operation needs.

    Returns (operation, start, end) of all that was computed, as moments that are read later.
    """
    stage, wire, results = run.stage, run.wire, {}
    program, last = run.folding.programs_of(schedule)[stage.stage], "W" if schedule.split else "B"
    final = {op.chunk: op for action, op in program if action == "run" and op.kind == last}  # of each chunk
    group, wire.sent_bytes = run.groups.replicate, 0
    reductions, spans = [], [(None, moment(run.world.device), None)]
    for action, what in program:
        if action == "recv":
            pictures = flight.next_feed.pictures if what.op.kind == "E" else None
            expected = run.folding.expects(stage.templates, stage.stage, what.op, flight.latents, pictures)
            wire.receive(what, expected)  # comm: receive, as the schedule says
        elif action == "send":
            wire.send(what, results.pop(what.op))  # comm: send, as the schedule says
        else:
            received, start = wire.take(what), moment(run.world.device)
            results[what] = stage.perform(what, received, flight)
            spans.append((what, start, moment(run.world.device)))
            if group is not None and final.get(what.chunk) == what:  # averaged while the rest of the schedule runs
                flat = stage.gradients[what.chunk]
                reductions.append(dist.all_reduce(flat, group=group, async_op=True))  # comm: all-reduce, 4 B/parameter
    for work in reductions:
        work.wait()
    wire.close()
    return spans


# ── train_step ───────────────────────────────────────────────────────────────────────────────────────────────────────


def train_step(run: Run, batches: Iterator[dict]) -> dict | None:
    """One optimizer step; returns the metrics of the step before, which are known by now.

    [1] pictures  [2] the schedule: forward and backward of all micro-batches, and the encoders on the next step's
    pictures  [3] tally  [4] norm over all stages  [5] settle the step before  [6] weights
    """
    config, batch, ledger, folding = run.job.config, run.job.batch, run.ledger, run.folding
    tally = ledger.open(run.world.device)
    timed = iter(lambda: tally.take(batches), None)  # how long stage 0 waits for pictures is in the tally
    feed, run.feed = run.feed or encode_now(run, timed, batch.accum), None  # [1]
    if config.encode == "online" and ledger.position.step + 1 < config.steps:
        run.feed = read(run, timed, batch.accum)
    run.stage.begin_step()
    flight = run.flight(feed, next_feed=run.feed, tally=tally)
    schedule = folding.step(encode=run.feed is not None)
    spans = play(run, schedule, flight)  # [2]
    if run.feed is not None or not run.spans or config.encode == "ahead":
        run.spans, run.sent_bytes = [(schedule, None, None), *spans], run.wire.sent_bytes
    everyone = agree(run.world, tally.close(stop=run.world.stop.is_set()))  # [3]

    # [4] The gradient is the sum over all samples / global_batch; what was missing from the batch is put right here.
    present = (everyone[:, SAMPLES].sum() / batch.global_batch).float()
    unscale = run.loss_scale.scale * present
    squares = nn.utils.get_total_norm([p.grad for _, p in run.stage.parameters()]).double().square()
    if run.groups.pipe is not None:
        dist.all_reduce(squares, group=run.groups.pipe)  # comm: all-reduce, 8 B, one norm over all stages
    norm = squares.sqrt().float() / unscale
    found_inf = (~norm.isfinite()).float()  # the same on every rank, because the squares are

    row = ledger.settle()  # [5]
    lr = learning_rate(ledger.done, config, batch.replicas)
    ledger.enter(tally, lr, everyone, norm, run.loss_scale.scale)
    apply_step(run.optimizer, lr, unscale / clip_factor(norm, config.clip), found_inf)  # [6]
    run.loss_scale.update(found_inf)
    return row


def warm_up(run: Run, samples: data.Samples) -> None:
    """One micro-batch through everything, which teaches nothing: shapes are probed, kernels chosen and compiled."""
    blank = data.collate([samples[0, data.EMPTY]] * run.job.batch.micro_batch)
    feed = encode_now(run, iter([blank]), 1)
    run.stage.begin_step()
    flight = run.flight(feed, tally=Tally(run.world.device, lambda *_: None, set()))
    play(run, run.folding.schedule_for(run.job.config.schedule, 1), flight)


def encode_now(run: Run, batches: Iterator[dict], count: int) -> Feed:
    """Read and encode at once: the first step, --encode ahead, held-out pictures."""
    feed = read(run, batches, count)
    run.encoding = play(run, run.folding.schedule_for("encode", count), Flight(next_feed=feed))
    return feed


@torch.no_grad()
def held_out_loss(run: Run, samples: data.Samples) -> float:
    """Mean over fixed pictures, timesteps and noise, unweighted; dealt to the replicas like cards, forward only."""
    run.unet.eval()
    batch = run.job.batch
    cards = data.dealt(samples, run.replica, batch.replicas, batch.micro_batch)
    feed = encode_now(run, (data.collate([samples[card] for card in hand]) for hand in cards), len(cards))
    flight = run.flight(feed, held_out=[])
    play(run, run.folding.schedule_for("forward", len(cards)), flight)
    total, count = (torch.zeros((), dtype=torch.float64, device=run.world.device) for _ in range(2))
    for each, held in zip(flight.held_out, feed.batches, strict=True):
        total += each.sum()
        count += float(held["weight"].sum())
    run.unet.train()
    return global_mean(total, count)


def sample_grid(run: Run, pipe, out: Path) -> None:
    """Stage 0 of each replica draws its share of the prompts through the pipe; rank 0 pastes the sheet.

    The diffusers pipeline calls the UNet as ever; the call runs over all stages, which serve until it says that it is
    done. So no rank needs the whole UNet for it, and the ranks are used one after the other: slow, but rare.
    """
    world, job = run.world, run.job
    mine, drawn = range(len(job.prompts))[run.replica :: job.batch.replicas], {}
    run.unet.eval()
    with run.ema.swapped_in() if run.ema else contextlib.nullcontext(), torch.no_grad():
        if run.outermost:
            kind = models.DTYPES[job.config.precision]
            run.frozen.to(world.device, kind)
            run.unet.forward = lambda *args, **more: (call_folded(run, *args, **more),)
            drawn = sample.draw(pipe, job.prompts, mine, job.config.seed, job.guidance, job.config.resolution)
            del run.unet.forward
            place_frozen(run.frozen, run.folding, 0, world.device, kind)
            tell_shape(run, (0, 0, 0))
        else:
            while (latents := tell_shape(run, None))[0]:
                play(run, run.folding.schedule_for("forward", 1), Flight(latents))
    run.unet.train()
    gathered = [None] * world.world_size if world.rank == 0 else None
    dist.gather_object(drawn, gathered)  # comm: gather of pictures, to rank 0
    if world.rank == 0:
        sample.save_sheet(gathered, job.prompts, out / f"samples-{run.ledger.position.step}.png")


def call_folded(run: Run, latents, timestep, encoder_hidden_states, return_dict=False, **more) -> torch.Tensor:
    """`unet.forward` over all stages, on stage 0."""
    size, _, height, width = latents.shape
    added = more.pop("added_cond_kwargs", None)
    added = {name: t.float() for name, t in added.items()} if added else None
    carry = unet_carry(latents.float(), timestep, encoder_hidden_states.float(), added_cond_kwargs=added, **more)
    tell_shape(run, (size, height, width))
    play(run, run.folding.schedule_for("forward", 1), Flight((size, height, width), carry=carry))
    return run.stage.outputs.pop(("up", 0)).sample.float()


def tell_shape(run: Run, latents: tuple[int, int, int] | None) -> tuple[int, int, int]:
    """Stage 0 tells the others the shape of what comes next, or (0, 0, 0) that nothing does."""
    shape = torch.tensor(latents or (0, 0, 0), device=run.world.device)
    if run.groups.pipe is not None:
        dist.broadcast(shape, run.wire.first, group=run.groups.pipe)  # comm: broadcast, 24 B, when drawing
    return tuple(shape.tolist())


def draw_schedule(run: Run, out: Path) -> None:
    """schedule.png: one of the last steps as planned and as it ran, stage by stage, of the first replica."""
    if not run.spans:
        return
    (schedule, *_), (_, began, _), *spans = run.spans
    mine = [(op, seconds(began, start), seconds(began, end)) for op, start, end in spans]
    everyone = [None] * run.world.world_size if run.world.rank == 0 else None
    dist.gather_object(mine, everyone)  # comm: gather of when each operation ran, to rank 0, once
    if everyone is not None:
        real = [Span(r, *one) for r, part in enumerate(everyone[: run.folding.stages]) for one in part]
        plots.schedule(simulate(schedule).spans, real, out / "schedule.png")


# ── save / load ──────────────────────────────────────────────────────────────────────────────────────────────────────


def tensors_of(run: Run) -> dict[str, torch.Tensor]:
    """What this rank saves: the tensors of its own units, by names that all three scripts share; live, so that loading
    fills them. Replicas have the same ones; of those the checkpoint takes one."""
    named = dict(run.stage.parameters())
    tensors = {f"unet.{n}": p.detach() for n, p in named.items()}
    tensors |= optimizer_tensors(run.optimizer, named.items())
    if run.ema is not None:
        tensors |= {f"ema.{n}": t for n, t in run.ema.average.items()}
    return tensors


def save(run: Run, out: Path) -> None:
    """checkpoint-N: each rank writes its part under another name, rank 0 seals and renames when all are done."""
    world, step = run.world, run.ledger.position.step
    aside = checkpoint.partial_of(out, step)
    if world.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
    dcp.save(tensors_of(run), checkpoint_id=aside)  # comm: gather of plans and results; the tensors go to disk
    if world.rank == 0:
        checkpoint.finish(aside, run.ledger.state_dict() | run.loss_scale.state_dict(), run.job.config.keep)
        world.store.set(f"saved/{step}", "")  # comm: store, rank 0 has renamed it
    wait_for(world, f"saved/{step}", ending=True)  # however long that takes, which a barrier would not


def load(run: Run, folder: Path, state: dict) -> list[str]:
    """Restore a checkpoint of any script and any number of ranks; returns what to say."""
    tensors = tensors_of(run)
    if state["ema_updates"] is None:
        tensors = {n: t for n, t in tensors.items() if not n.startswith("ema.")}
    dcp.load(tensors, checkpoint_id=folder)  # comm: gather of plans; the tensors come from disk
    run.loss_scale.load_state_dict(state)
    return run.ledger.load_state_dict(state)


def export(run: Run, out: Path) -> None:
    """pipeline/: the stages of the first replica hand their tensors to rank 0, one by one, which keeps them on the host."""
    if run.replica:
        return
    weights = gathered(run, {n: p.detach() for n, p in run.stage.parameters()})
    average = gathered(run, run.ema.average) if run.ema else None
    if run.world.rank == 0:
        models.export(out / "pipeline", run.job.spec, run.job.config, average or weights, weights if average else None)


def gathered(run: Run, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors of the UNet by name, on rank 0's host; on the other ranks nothing."""
    whole = {}
    for stage, shapes in enumerate(run.folding.shapes):
        for name, shape in shapes.items():
            tensor = mine[name] if name in mine else torch.empty(shape, device=run.world.device)
            if run.groups.pipe is not None:
                dist.broadcast(tensor, stage, group=run.groups.pipe)  # comm: broadcast, 4 B/parameter, once or twice
            if run.world.rank == 0:
                whole[name] = tensor.cpu()
    return {name: whole[name] for name, _ in run.unet.named_parameters()} if whole else {}


# ── main ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def main(world: World) -> None:
    # Everything that can be wrong is found before a group is made.
    given = parse("pipeline", sys.argv[1:], world.rank)
    check_devices(world)
    spec = models.spec_of(given)
    ranks = given.world_size or world.world_size
    stages = stages_of(given, spec, ranks)
    batch = batch_of(given, replicas=ranks // stages, default=(2, 4))
    job = prepare(given, spec, batch, world.device.type == "cuda", world.local_world_size)
    config = job.config
    folding = plan_fold(spec, config, batch, stages, world.device)
    if config.dry_run:
        bandwidth, rate = speeds(world, config)
        if world.rank == 0:
            print(folding.describe(spec, job.count, bandwidth, rate))
        return
    folder, state, notes = find_checkpoint(world, job, "pipeline")
    frozen = models.build_frozen(spec, config.seed)
    unet = models.build_part(spec, config.seed, world.device, folding.shapes[world.rank % stages])
    all_ready(
        world, f"{job.fingerprint}, {stages} stages, step {state['step'] if state else 0}", seconds=config.timeout
    )
    out = open_out(world, config, "pipeline")

    join(world, config.timeout)
    models.use_kernels(config, world.device)
    if config.costs == "measured":
        folding = plan_fold(spec, config, batch, stages, world.device, measure(world, job, frozen))
        unet = models.build_part(spec, config.seed, world.device, folding.shapes[world.rank % stages])
        notes.append(f"cut by measured times: {folding.balance()}")
    run = build_run(world, job, folding, make_groups(world, stages, config.timeout), unet, frozen)
    if state is not None:
        notes += load(run, folder, state)
    carry_out(run, frozen, out, [*job.notes, *notes])
    draw_schedule(run, out)


def measure(world: World, job: Job, frozen: models.Frozen) -> Times:
    """How long units take here: each rank measures some of them, and all get all times."""
    mine = time_units(job.spec, job.config, job.batch, frozen, world.device, world.rank, world.world_size)
    return {unit: time for part in everyone_says(world, mine) for unit, time in part.items()}  # comm: all-gather


def build_run(world: World, job: Job, folding: Folding, groups: Groups, unet: nn.Module, frozen: models.Frozen) -> Run:
    """Put this rank's units and encoders on the device, and around them what trains them."""
    config = job.config
    replica, stage = divmod(world.rank, folding.stages)
    if config.compile:
        models.compile_blocks(unet)
    job.schedule.to(world.device)
    if stage:  # stage 0 reads, and says what was read
        job = dataclasses.replace(job, config=dataclasses.replace(config, workers=0, log_samples=False))
    place_frozen(frozen, folding, stage, world.device, models.DTYPES[config.precision])
    loss_scale = LossScale(config.precision == "fp16", world.device)
    templates = Templates(job.spec, config.precision, world.device)
    mine = Stage(stage, folding, unet, frozen, templates, job.schedule, loss_scale, world.device)
    named = mine.parameters()
    ema = EMA(named, config.ema) if config.ema else None
    return Run(
        job, world, unet, folding, mine, groups, Wire(groups, world, stage), build_optimizer(named, config), loss_scale, ema,
        Ledger(job, world.rank, ema, share=lambda mine: everyone_says(world, mine)),
        replica, frozen,
    )  # fmt: skip


def carry_out(run: Run, frozen: models.Frozen, out: Path, notes: list[str]) -> None:
    """Train from where the ledger stands to the end, or to the signal, and export."""
    config, world, ledger = run.job.config, run.world, run.ledger
    if world.rank == 0:
        said = [introduction(world), f"{run.job.introduction(ledger.position.step)}, {out}"]
        print(*(f"note: {note}" for note in notes), *said, sep="\n", flush=True)
    already_complete = ledger.complete
    if not already_complete:
        train(run, frozen, out)
    elif world.rank == 0:
        print(f"already complete: {out} has all {config.steps} steps")
    if not ledger.complete:
        if world.rank == 0:
            print(f"stopped after step {ledger.position.step}{', saved' if config.save_every else ''}: {out}")
        return
    world.at = "export"
    if not config.no_export and not (already_complete and (out / "pipeline").exists()):
        export(run, out)
    if world.rank == 0:
        print(f"done: {out}", flush=True)


def train(run: Run, frozen: models.Frozen, out: Path) -> None:
    """The loop: step, report, and at their times save and draw; ends early, on all ranks alike, when one was told to stop."""
    job, config, world, ledger = run.job, run.job.config, run.world, run.ledger
    samples, held = job.samples(frozen.tokenizers), job.held_out(frozen.tokenizers)
    warm_up(run, samples)
    first = ledger.position
    rows = Rows(out / "metrics.jsonl", first.step) if world.rank == 0 else None
    ledger.log_rows = Rows(out / f"samples.rank{world.rank}.jsonl", first.step) if config.log_samples else None
    micro_batches = data.MicroBatches(job.count, job.batch, config.seed, run.replica, first, config.steps)
    batches = iter(data.loader(samples, micro_batches, config.workers, pin=world.device.type == "cuda"))
    progress = Progress(world.rank == 0, config.steps, first.step, config.log_every)
    pipe = models.pipeline_of(job.spec, frozen, run.unet, config.prediction, config.zero_snr)

    def report(row: dict | None) -> None:
        if row is not None and held is not None and row["step"] % config.val_every == 0:
            row["val_loss"] = held_out_loss(run, held)
        if row is not None and rows is not None:
            rows.write(row)
            progress.step(row)

    started = ledger.clock = time.perf_counter()
    ending = False
    while not ledger.complete and not ending:
        world.at = f"step {ledger.position.step + 1}"
        report(train_step(run, batches))
        if config.time_limit and time.perf_counter() - started > 60 * config.time_limit:
            world.stop.set()  # told to the others with the next step's tally
        ending = ledger.stopping
        if due := job.due(ledger.position.step, ending):
            report(ledger.settle())  # nothing may be pending now, and a held-out loss needs the weights of its step
        if "save" in due:
            save(run, out)
        if "draw" in due:
            sample_grid(run, pipe, out)
        ledger.start_clock()
    world.at = "end"
    progress.close()
    if rows is not None:
        rows.close()
        plots.loss_curve(read_rows(out / "metrics.jsonl"), out / "loss.png")


if __name__ == "__main__":
    this = find_world()
    try:
        main(this)
    except SystemExit:  # --help
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        fail(this, error)
    if dist.is_initialized():
        dist.destroy_process_group()  # comm: closes the connections, once, at the end
        # Everything is written. The interpreter is not taken down piece by piece: a thread of gloo's that still has a tensor
        # to free would find it gone and abort a rank that has finished.
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)
