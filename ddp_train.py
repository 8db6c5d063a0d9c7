"""Replicate: every rank holds the whole UNet; gradients are averaged once per step.

       rank 0          rank 1          rank 2          rank 3
     ┌────────┐      ┌────────┐      ┌────────┐      ┌────────┐
     │  UNet  │      │  UNet  │      │  UNet  │      │  UNet  │    the same weights at every step
     │ AdamW  │      │ AdamW  │      │ AdamW  │      │ AdamW  │    the same state, computed N times
     └───┬────┘      └───┬────┘      └───┬────┘      └───┬────┘
   slots 0 4 8 …       1 5 9 …         2 6 10 …        3 7 11 …     of the step's global batch
         └───────────── all-reduce (gradients) ──────────┘

    collective   when                            bytes each rank sends (N ranks, P parameters)
    all-reduce   last micro-batch of a step      2 (N-1)/N x 4 P, in buckets of 200 MiB, while the backward pass still
                                                 runs; half of that with --grad-compress bf16
    all-gather   end of a step                   (N-1) x 56     loss, samples, and the joint decisions
    store        start and end                   a few words    who is ready, who failed first and why

    torchrun --standalone --nproc_per_node=2 ddp_train.py
    torchrun --standalone --nproc_per_node=8 ddp_train.py --model DIR --data DIR --out runs/mine --save-every 500
"""

import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from common import checkpoint, data, models, plots, sample
from common.config import PRESETS, Batch, Config, batch_of, changed_flags, learning_rate, parse, recipe_of, with_recipe
from common.data import Position
from common.encode import Encoded, Encoder
from common.errors import UsageError
from common.loss import NoiseSchedule
from common.meters import Progress, Rows, read_rows
from common.optim import EMA, LossScale, apply_step, build_optimizer, clip_factor, optimizer_tensors
from common.plan import describe

# ── init ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Everything down to `agree` is the same text in the three scripts; a test compares them.


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
    env = {k: int(os.environ.get(k, v)) for k, v in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, LOCAL_WORLD_SIZE=1).items()}
    gpu = torch.cuda.is_available()
    world = World(
        rank=env["RANK"],
        local_rank=env["LOCAL_RANK"],
        world_size=env["WORLD_SIZE"],
        local_world_size=env["LOCAL_WORLD_SIZE"],
        device=torch.device("cuda", env["LOCAL_RANK"]) if gpu else torch.device("cpu"),  # never from RANK
        # comm: store, connects to the one torchrun (or rank 0) serves; a lone process needs none
        store=next(dist.rendezvous("env://"))[0] if env["WORLD_SIZE"] > 1 else dist.HashStore(),
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: world.stop.set())
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan trains on when torchrun is killed
    if not gpu and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun says 1, which idles the other cores
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_world_size))
    return world


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
            "copies hang (try NCCL_P2P_DISABLE=1), two ranks on one GPU"
        ) from error
    if probe.item() != world.world_size:
        raise ConnectionError(f"the first all-reduce of {world.world_size} ranks gave {probe.item()}: the copies between the GPUs are wrong, try NCCL_P2P_DISABLE=1")


class Elsewhere(Exception):
    """Another rank has the cause and will say it."""


def wait_for(world: World, *keys: str, seconds: float = 600) -> None:
    """Wait until all `keys` are in the store; ends this rank if another fails meanwhile, and never waits for the dead."""
    end = time.monotonic() + seconds
    while not world.store.check(list(keys)):  # comm: store, poll
        if world.store.check(["failure"]):  # comm: store, poll
            raise Elsewhere
        if world.stop.is_set() or time.monotonic() > end:
            raise ConnectionError("stopped while waiting for the other ranks to start")
        time.sleep(0.05)


def all_ready(world: World, fingerprint: str, seconds: float) -> None:
    """Every rank has checked its flags, data and checkpoint, and all see the same; only then is a group made."""
    world.store.set(f"ready/{world.rank}", fingerprint)  # comm: store, my verdict
    wait_for(world, *(f"ready/{r}" for r in range(world.world_size)), seconds=seconds)
    if (first := world.store.get("ready/0").decode()) != fingerprint:  # comm: store, rank 0's verdict
        raise UsageError(f"rank {world.rank} starts with {fingerprint}, rank 0 with {first}: all hosts need the same flags, --data and --resume")


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
        return where + f"out of GPU memory; try --activations checkpoint or a smaller --micro-batch ({first_line(error)})"
    if "DataLoader worker" in str(error):
        return where + f"a process that reads pictures died; more memory, a larger /dev/shm or fewer --workers may help ({first_line(error)})"
    return where + f"{type(error).__name__}: {first_line(error)}"


def is_consequence(error: BaseException) -> bool:
    """Is this what a rank sees when another one is gone?"""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "Timed out", "timed out", "remote process exited", "NCCL communicator was aborted")
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
            silent = [r for r in range(world.world_size) if not world.store.check([f"lost/{r}"])]  # comm: store, who answers
            who = f"rank {', '.join(map(str, silent))} died without a word (killed? out of host memory? see dmesg)"
            line = f"{world.at}: {who if silent else f'the ranks lost each other; a longer --timeout may help ({first_line(error)})'}"
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
    dist.all_gather_into_tensor(everyone, mine)  # comm: all-gather, 56 B from each rank, every step
    return everyone


def global_mean(total: torch.Tensor, count: torch.Tensor) -> float:
    """Sum and number on each rank -> mean over all."""
    both = torch.stack([total.double(), count.double()])
    dist.all_reduce(both)  # comm: all-reduce, 16 B, when validating
    return (both[0] / both[1]).item()


# ── the strategy ─────────────────────────────────────────────────────────────────────────────────────────────────────


def replicate(unet: nn.Module, config: Config, world: World) -> DistributedDataParallel:
    """Wrap the UNet so that its last backward of a step averages gradients over the ranks, bucket by bucket.

    Large buckets: a ring reaches its bandwidth only with messages of hundreds of MiB, and there are 50 of them in SDXL.
    """
    ddp = DistributedDataParallel(  # comm: broadcast, 4 P bytes from rank 0, once
        unet,
        device_ids=[world.local_rank] if world.device.type == "cuda" else None,
        bucket_cap_mb=200,
        gradient_as_bucket_view=True,  # no second copy of the gradients
        broadcast_buffers=False,  # the UNet has none that change
    )
    if config.grad_compress == "bf16":
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


@dataclass
class Run:
    """All that a step needs and changes."""

    config: Config
    batch: Batch
    world: World
    unet: nn.Module
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale
    ema: EMA | None
    schedule: NoiseSchedule
    encode: Encoder
    position: Position = Position()
    done: int = 0  # steps that were not skipped: what the learning rate and the EMA count
    samples: int = 0
    skipped_in_a_row: int = 0
    pending: "Outcome | None" = None
    named: set[str] = field(default_factory=set)  # unreadable pictures that were named already

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.unet.named_parameters())

    def autocast(self) -> torch.autocast:
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.config.precision]
        return torch.autocast(self.world.device.type, dtype=kind, enabled=kind != torch.float32)


@dataclass
class Outcome:
    """What became of a step: numbers on their way to the host, read one step later."""

    step: int
    epoch: int
    lr: float
    numbers: torch.Tensor  # [N x 7 + 2]: the tallies of all ranks, gradient norm, loss scale
    ready: torch.cuda.Event | None
    suspects: list[tuple[str, torch.Tensor]]  # names of this rank's pictures, and whether their latents are finite
    problems: dict[str, str]  # this rank's newly found unreadable pictures
    wall: float


# ── train_step ───────────────────────────────────────────────────────────────────────────────────────────────────────
LOSS, SAMPLES, OVERFLOWED, STOP, DATA_S, MEMORY, UNREADABLE = range(7)  # the tally of a rank


def per_sample_loss(run: Run, batch: dict, encoded: Encoded, unet: nn.Module) -> torch.Tensor:
    """[B] float32; 0 for slots without a sample."""
    t, noise, weight = (batch[k].to(run.world.device, non_blocking=True) for k in ("t", "noise", "weight"))
    noisy = run.schedule.add_noise(encoded.latents, noise, t)
    with run.autocast():  # noisy stays float32, so that the sinusoids of t are taken in float32
        prediction = unet(noisy, t, **encoded.condition).sample  # comm: none, DDP's forward moves nothing
    each = run.schedule.loss(prediction, run.schedule.target(encoded.latents, noise, t), t)
    return torch.where(weight > 0, each, torch.zeros_like(each))


def train_step(run: Run, batches) -> dict | None:
    """One optimizer step; returns the metrics of the step before, which are known by now.

    [1] micro-batches: sums of losses, gradients averaged once  [2] tally  [3] norm  [4] settle the step before
    [5] weights. The host never waits for this step, only (in [4]) for the one before, while the device has work queued.
    """
    world, batch_plan = run.world, run.batch
    tally = torch.zeros(7, dtype=torch.float64)
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    suspects, problems = [], {}
    nominal = batch_plan.global_batch / batch_plan.replicas  # samples of this rank, if none is missing

    for micro in range(batch_plan.accum):  # [1]
        before = time.perf_counter()
        batch = next(batches)
        tally[DATA_S] += time.perf_counter() - before
        encoded = run.encode(batch)
        last = micro == batch_plan.accum - 1
        with contextlib.nullcontext() if last else run.ddp.no_sync():
            each = per_sample_loss(run, batch, encoded, run.ddp)
            scaled = each.sum() / nominal * run.loss_scale.scale
            scaled.backward()  # comm: all-reduce, 4 P bytes, only in the last micro-batch
        loss_sum += each.detach().sum()
        tally[SAMPLES] += float(batch["weight"].sum())
        suspects.append((batch["name"], encoded.finite))
        problems |= {n: p for n, p in zip(batch["name"], batch["problem"], strict=True) if p and n not in run.named}
        if run.log_rows is not None:
            run.log_rows.write(data.log_rows(run.position.step + 1, micro, batch))

    tally[STOP] = world.stop.is_set()
    tally[UNREADABLE] = len(problems)
    tally[MEMORY] = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
    tally = tally.to(world.device, non_blocking=True)
    tally[LOSS] = loss_sum
    tally[OVERFLOWED] = sum((~finite).sum() for _, finite in suspects)
    everyone = agree(world, tally)  # [2]

    # [3] The gradient is the sum over all samples / global_batch; what was missing from the batch is put right here.
    present = (everyone[:, SAMPLES].sum() / batch_plan.global_batch).float()
    unscale = run.loss_scale.scale * present
    norm = nn.utils.get_total_norm([p.grad for p in run.unet.parameters()]) / unscale
    found_inf = (~norm.isfinite()).float()  # the same on every rank, because the gradients are

    row = settle(run)  # [4]
    lr = learning_rate(run.done, run.config, batch_plan.replicas)
    numbers = torch.cat([everyone.flatten(), torch.stack([norm, run.loss_scale.scale]).double()])
    run.pending = Outcome(
        run.position.step + 1, run.position.epoch, lr, *to_host(numbers), suspects, problems, time.perf_counter()
    )
    apply_step(run.optimizer, lr, unscale / clip_factor(norm, run.config.clip), found_inf)  # [5]
    run.loss_scale.update(found_inf)
    run.position = data.advance(run.position, run.count, batch_plan.global_batch)
    return row
