"""Shard: every rank holds 1/N of the weights, gradients and optimizer state; a group of layers is whole only while it runs.

     rank 0        rank 1        rank 2        rank 3
  ┌──────────┐  ┌──────────┐  ┌──────────┐  ┌──────────┐
  │ rows 0-1 │  │ rows 2-3 │  │ rows 4-5 │  │ rows 6-7 │     of every tensor, float32, and of its two moments (and EMA)
  └────┬─────┘  └────┬─────┘  └────┬─────┘  └────┬─────┘
       └──── all-gather a resnet's or a transformer's weights, in --precision; run it; forget it ────┐
       ┌──── backward: gather it again; reduce-scatter its gradients, so each keeps the sum of its rows ┘
  slots 0 4 8 …     1 5 9 …       2 6 10 …      3 7 11 …      of the step's global batch, as in ddp_train.py

 collective       when                                 bytes each rank sends (N ranks, P parameters, bf16)
 all-gather       before each group, forward           (N-1)/N x 2 P in all, one group ahead of the computation
 all-gather       before each group, backward          the same, but for the root; none with --no-reshard
 reduce-scatter   after each group, last micro-batch   (N-1)/N x 4 P in all, float32, behind the computation
 all-reduce       the same, with --shard-size S < N    2 (R-1)/R x 4 P/S: the R = N/S replicas average their shards
 all-reduce       end of a step                        8     the global gradient norm
 all-gather       end of a step                        (N-1) x 56     loss, samples, and the joint decisions
 store            start and end                        a few words    who is ready, who failed first and why

In fp32 the all-gathers are twice as large. Accumulation: until the last micro-batch of a step gradients stay whole and
float32 on every rank, 4 P bytes, because reducing them every time would cost (N-1)/N x 4 P each.

 torchrun --standalone --nproc_per_node=2 fsdp_train.py
 torchrun --standalone --nproc_per_node=8 fsdp_train.py --model DIR --data DIR --out runs/mine --save-every 500
"""

import contextlib
import ctypes
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from common import checkpoint, data, models, plots, sample, shards
from common.config import Config, batch_of, learning_rate, parse
from common.encode import Encoded, Encoder
from common.errors import Elsewhere, UsageError
from common.job import Job, prepare
from common.ledger import SAMPLES, Ledger
from common.meters import Progress, Rows, read_rows
from common.optim import EMA, LossScale, apply_step, build_optimizer, clip_factor, optimizer_tensors
from common.plan import describe, product_rate

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


def shard(unet: nn.Module, config: Config, world: World) -> DeviceMesh:
    """Turn every parameter of `unet`, on the meta device, into a DTensor of rows; returns the mesh.

    A group is what is gathered at once: a resnet, or a whole transformer with all its blocks. Smaller groups leave the
    GPU waiting for the host, which has to launch a collective and its copies for each. What is left (time embedding,
    first and last convolution, samplers) is the root group, which stays gathered from its first use to its last.
    """
    size = config.shard_size or world.world_size
    shape, names = (world.world_size // size, size), ("replicate", "shard")
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)  # comm: makes the two groups, once
    # On a CPU, layer norms want weights of their input's type: there the weights stay float32, and autocast rounds them.
    dtype = models.DTYPES[config.precision] if world.device.type == "cuda" else torch.float32
    how = dict(
        mesh=mesh if shape[0] > 1 else mesh["shard"],
        mp_policy=mixed_precision(dtype),
        offload_policy=CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if config.offload else OffloadPolicy(),
    )
    for module in shards.groups_of(unet):
        fully_shard(module, reshard_after_forward=not config.no_reshard, **how)  # comm: none yet, only later
    fully_shard(unet, reshard_after_forward=False, **how)  # comm: none yet, only later
    return mesh


def mixed_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Gather weights in `dtype`, reduce gradients in float32, and leave inputs alone: timesteps and sizes cast to bf16 would
    become others (998.39 -> 1000, 1367 -> 1368). Autocast casts what goes into products and convolutions."""
    return MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def materialise(
    unet: nn.Module, weights: Iterator[tuple[str, torch.Tensor]], mesh: DeviceMesh, device: torch.device
) -> None:
    """Fill the shards, one tensor at a time: no rank ever holds more than one whole tensor, and nothing is sent."""
    unet.to_empty(device=device).requires_grad_(True).train()
    rank, size = mesh["shard"].get_local_rank(), mesh["shard"].size()
    with torch.no_grad():
        for name, whole in weights:
            local = unet.get_parameter(name).to_local()
            local.copy_(shards.shard_of(whole, rank, size))


@dataclass
class Run:
    """All that a step needs and changes."""

    job: Job
    world: World
    unet: nn.Module  # an FSDPModule; its parameters are DTensors
    mesh: DeviceMesh
    shards: dict[str, nn.Parameter]  # this rank's rows of each parameter, the same memory: what optimizer and EMA see
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    ema: EMA | None
    encode: Encoder
    ledger: Ledger
    replica: int  # which share of the global batch is mine


def whole_norm(run: Run) -> torch.Tensor:
    """Norm of the whole gradient from everybody's rows, 0-dim; the same on every rank."""
    mine = nn.utils.get_total_norm([p.grad for p in run.shards.values()])
    square = mine.to(run.world.device, torch.float64) ** 2
    dist.all_reduce(square, group=run.mesh["shard"].get_group())  # comm: all-reduce, 8 B, every step
    return square.sqrt().float()


@contextlib.contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """Forward passes without backward. FSDP would keep what they gathered, and go on with it after the weights have moved."""
    run.unet.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in run.unet.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        run.unet.train()


# ── train_step ───────────────────────────────────────────────────────────────────────────────────────────────────────


def per_sample_loss(run: Run, batch: dict, encoded: Encoded, unet: nn.Module, weighted: bool = True) -> torch.Tensor:
    """[B] float32; 0 for slots without a sample."""
    schedule = run.job.schedule
    t, noise, weight = (batch[k].to(run.world.device, non_blocking=True) for k in ("t", "noise", "weight"))
    noisy = schedule.add_noise(encoded.latents, noise, t)
    with models.autocast(run.job.config.precision, run.world.device):  # noisy, and so the sinusoids of t, stay float32
        prediction = unet(noisy, t, **encoded.condition).sample  # comm: all-gather, 2 P bytes (bf16), group by group
    each = schedule.loss(prediction, schedule.target(encoded.latents, noise, t), t, weighted)
    return torch.where(weight > 0, each, torch.zeros_like(each))


def train_step(run: Run, batches: Iterator[dict]) -> dict | None:
    """One optimizer step; returns the metrics of the step before, which are known by now.

    [1] micro-batches: sums of losses, gradients averaged and sharded once  [2] tally  [3] norm  [4] settle the step before
    [5] weights. The host never waits for this step, only (in [4]) for the one before, while the device has work queued.
    """
    config, batch, ledger = run.job.config, run.job.batch, run.ledger
    nominal = batch.global_batch / batch.replicas  # samples of this rank, if none is missing
    tally = ledger.open(run.world.device)
    for micro in range(batch.accum):  # [1]
        samples = tally.take(batches)
        encoded = run.encode(samples)
        run.unet.set_requires_gradient_sync(micro == batch.accum - 1)
        each = per_sample_loss(run, samples, encoded, run.unet)
        loss = each.sum() / nominal * run.loss_scale.scale
        loss.backward()  # comm: all-gather again, 2 P bytes; reduce-scatter, 4 P bytes, only in the last micro-batch
        tally.add(samples, encoded.finite, each.detach())
    everyone = agree(run.world, tally.close(stop=run.world.stop.is_set()))  # [2]

    # [3] The gradient is the sum over all samples / global_batch; what was missing from the batch is put right here.
    present = (everyone[:, SAMPLES].sum() / batch.global_batch).float()
    unscale = run.loss_scale.scale * present
    for name, parameter in run.unet.named_parameters():
        run.shards[name].grad, parameter.grad = parameter.grad.to_local(), None
    norm = whole_norm(run) / unscale
    found_inf = (~norm.isfinite()).float()  # the same on every rank, because the norm is

    row = ledger.settle()  # [4]
    lr = learning_rate(ledger.done, config, batch.replicas)
    ledger.enter(tally, lr, everyone, norm, run.loss_scale.scale)
    apply_step(run.optimizer, lr, unscale / clip_factor(norm, config.clip), found_inf)  # [5]
    run.loss_scale.update(found_inf)
    return row


def warm_up(run: Run, samples: data.Samples) -> None:
    """A forward and backward pass that teaches nothing: FSDP sets itself up, kernels are compiled and chosen."""
    blank = data.collate([samples[0, data.EMPTY]] * run.job.batch.micro_batch)
    loss = per_sample_loss(run, blank, run.encode(blank), run.unet).sum() * 0
    loss.backward()  # comm: as in a step, once at the start
    run.unet.zero_grad(set_to_none=True)


def held_out_loss(run: Run, samples: data.Samples) -> float:
    """Mean over fixed pictures, timesteps and noise, unweighted; the pictures are dealt to the ranks like cards."""
    total, count = (torch.zeros((), dtype=torch.float64, device=run.world.device) for _ in range(2))
    with evaluating(run):  # all ranks run the same number of batches, since they gather the weights together
        for cards in data.dealt(samples, run.world.rank, run.world.world_size, run.job.batch.micro_batch):
            batch = data.collate([samples[card] for card in cards])
            total += per_sample_loss(run, batch, run.encode(batch), run.unet, weighted=False).sum()
            count += float(batch["weight"].sum())
    return global_mean(total, count)


def sample_grid(run: Run, pipe, out: Path) -> None:
    """Every rank draws its share of the prompts, with the averaged weights if there are any; rank 0 pastes the sheet.

    The ranks gather weights together, so each draws equally many: at the end some draw again what another has drawn.
    """
    world, job = run.world, run.job
    mine = data.equal_shares(len(job.prompts), world.rank, world.world_size)
    with run.ema.swapped_in() if run.ema else contextlib.nullcontext():
        with evaluating(run), models.autocast(job.config.precision, world.device):
            drawn = sample.draw(
                pipe, job.prompts, mine, job.config.seed, job.guidance, job.config.resolution
            )  # comm: all-gather, 2 P bytes for each of its UNet calls
    gathered = [None] * world.world_size if world.rank == 0 else None
    dist.gather_object(drawn, gathered)  # comm: gather of pictures, to rank 0
    if world.rank == 0:
        sample.save_sheet(gathered, job.prompts, out / f"samples-{run.ledger.position.step}.png")


# ── save / load ──────────────────────────────────────────────────────────────────────────────────────────────────────


def as_dtensor(run: Run, name: str, rows: torch.Tensor) -> torch.Tensor:
    """This rank's rows of something shaped like the parameter `name` -> DTensor, without a copy; scalars stay as they are.

    Shape and stride are given, because the rows of a rank do not tell how many the others have.
    """
    if rows.dim() == 0:
        return rows
    like = run.unet.get_parameter(name)
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def tensors_of(run: Run) -> dict[str, torch.Tensor]:
    """Everything that is saved as tensors, by names that all three scripts share; live, so that loading fills them."""
    tensors = {f"unet.{n}": p.detach() for n, p in run.shards.items()}
    tensors |= optimizer_tensors(run.optimizer, run.shards.items())
    if run.ema is not None:
        tensors |= {f"ema.{n}": t for n, t in run.ema.average.items()}
    return {key: as_dtensor(run, key.split(".", 1)[1], rows) for key, rows in tensors.items()}


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
    """pipeline/: every rank takes part in gathering, one tensor at a time; only rank 0 keeps them, on the CPU."""

    def gathered(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        whole = {}
        for name, mine in rows.items():
            tensor = as_dtensor(
                run, name, mine.to(run.world.device)
            ).full_tensor()  # comm: all-gather, 4 P bytes in all
            if run.world.rank == 0:
                whole[name] = tensor.cpu()
        return whole

    weights = gathered({n: p.detach() for n, p in run.shards.items()})
    average = gathered(run.ema.average) if run.ema else None
    if run.world.rank == 0:
        models.export(out / "pipeline", run.job.spec, run.job.config, average or weights, weights if average else None)


# ── main ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def main(world: World) -> None:
    # Everything that can be wrong is found before a group is made.
    given = parse("fsdp", sys.argv[1:], world.rank)
    check_devices(world)
    shards.check_size(given.shard_size, given.world_size or world.world_size)
    batch = batch_of(given, replicas=given.world_size or world.world_size)
    spec = models.spec_of(given)
    job = prepare(given, spec, batch, world.device.type == "cuda", world.local_world_size)
    config = job.config
    if config.dry_run:
        bandwidth, rate = speeds(world, config)
        if world.rank == 0:
            print(describe("fsdp", job, config.world_size or world.world_size, bandwidth, rate))
        return
    folder, state, notes = find_checkpoint(world, job, "fsdp")
    frozen = models.build_frozen(spec, config.seed)
    unet = models.empty_unet(spec)
    weights = models.weights_of(unet, spec, config.seed)
    all_ready(world, f"{job.fingerprint}, step {state['step'] if state else 0}", seconds=config.timeout)
    out = open_out(world, config, "fsdp")

    join(world, config.timeout)
    run = build_run(world, job, unet, weights, frozen)
    if state is not None:
        notes += load(run, folder, state)
    carry_out(run, frozen, out, [*job.notes, *notes])


def build_run(
    world: World, job: Job, unet: nn.Module, weights: Iterator[tuple[str, torch.Tensor]], frozen: models.Frozen
) -> Run:
    """Everything that a run keeps on the devices; `unet` is on the meta device, `weights` comes tensor by tensor."""
    config = job.config
    models.use_kernels(config, world.device)
    if config.activations == "checkpoint":
        unet.enable_gradient_checkpointing()
    if config.compile:
        models.compile_blocks(unet)
    job.schedule.to(world.device)
    frozen.to(world.device, models.DTYPES[config.precision])
    mesh = shard(unet, config, world)
    materialise(unet, weights, mesh, torch.device("cpu") if config.offload else world.device)
    mine = {name: nn.Parameter(p.to_local()) for name, p in unet.named_parameters()}
    ema = EMA(mine.items(), config.ema) if config.ema else None
    return Run(
        job, world, unet, mesh, mine, build_optimizer(mine.items(), config),
        LossScale(config.precision == "fp16", world.device), ema,
        Encoder(frozen, job.spec.is_xl, world.device, remember=config.data == "shapes"),
        Ledger(job, world.rank, ema, share=lambda mine: everyone_says(world, mine)),
        replica=world.rank,
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
