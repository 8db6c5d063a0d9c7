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
import math
import os
import shutil
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
from torch.nn.parallel import DistributedDataParallel

from common import checkpoint, data, models, plots, sample
from common.config import PRESETS, Batch, Config, batch_of, changed_flags, learning_rate, parse, with_recipe
from common.data import Position
from common.encode import Encoded, Encoder
from common.errors import UsageError
from common.loss import NoiseSchedule
from common.meters import Progress, Rows, read_rows
from common.optim import EMA, LossScale, apply_step, build_optimizer, clip_factor, optimizer_tensors
from common.plan import describe
from common.words import printable

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
        raise ConnectionError(
            f"the first all-reduce of {world.world_size} ranks gave {probe.item()}: the copies between the GPUs are wrong, try NCCL_P2P_DISABLE=1"
        )


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
        raise UsageError(
            f"rank {world.rank} starts with {fingerprint}, rank 0 with {first}: all hosts need the same flags, --data and --resume"
        )


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
    dist.all_gather(list(everyone), mine)  # comm: all-gather, 56 B from each rank, every step
    return everyone


def global_mean(total: torch.Tensor, count: torch.Tensor) -> float:
    """Sum and number on each rank -> mean over all."""
    both = torch.stack([total.double(), count.double()])
    dist.all_reduce(both)  # comm: all-reduce, 16 B, when validating
    return (both[0] / both[1]).item()


# ── the strategy ─────────────────────────────────────────────────────────────────────────────────────────────────────
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def replicate(unet: nn.Module, config: Config, world: World) -> DistributedDataParallel:
    """Wrap the UNet so that its last backward of a step averages gradients over the ranks, bucket by bucket.

    Large buckets: a ring reaches its bandwidth only with messages of hundreds of MiB, and there are 50 of them in SDXL.
    """
    ddp = DistributedDataParallel(  # comm: broadcast, 4 P bytes from rank 0, once
        unet,
        device_ids=[world.local_rank] if world.device.type == "cuda" else None,
        bucket_cap_mb=200,
        gradient_as_bucket_view=True,  # no second copy of the gradients
    )
    if config.grad_compress == "bf16":
        ddp.register_comm_hook(world.world_size, all_reduce_in_bf16)
    return ddp


def all_reduce_in_bf16(world_size: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's bucket hook for --grad-compress: the mean over ranks, sent and summed in bf16. Torch has one like it for NCCL."""
    half = (bucket.buffer() / world_size).bfloat16()
    work = dist.all_reduce(half, async_op=True)  # comm: all-reduce, 2 P bytes in all, in place of DDP's own
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


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
    count: int  # samples in an epoch
    names: str  # digest of their names
    log_rows: Rows | None
    position: Position = Position()
    clock: float = 0.0  # when the last settled step ended
    done: int = 0  # steps that were not skipped: what the learning rate and the EMA count
    samples: int = 0
    skipped_in_a_row: int = 0
    pending: "Outcome | None" = None
    stopping: bool = False  # some rank was told to stop; all ranks know it from the same tally
    named: set[str] = field(default_factory=set)  # unreadable pictures that were named already

    def autocast(self) -> torch.autocast:
        kind = DTYPES[self.config.precision]
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


def per_sample_loss(run: Run, batch: dict, encoded: Encoded, unet: nn.Module, weighted: bool = True) -> torch.Tensor:
    """[B] float32; 0 for slots without a sample."""
    t, noise, weight = (batch[k].to(run.world.device, non_blocking=True) for k in ("t", "noise", "weight"))
    noisy = run.schedule.add_noise(encoded.latents, noise, t)
    with run.autocast():  # noisy stays float32, so that the sinusoids of t are taken in float32
        prediction = unet(noisy, t, **encoded.condition).sample  # comm: none, DDP's forward moves nothing
    each = run.schedule.loss(prediction, run.schedule.target(encoded.latents, noise, t), t, weighted)
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


def to_host(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Start the copy to the host; the event says when it has arrived."""
    if numbers.device.type == "cpu":
        return numbers, None
    host = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def settle(run: Run) -> dict | None:
    """Read what became of the pending step and act on it, the same on every rank: EMA, counters, joint decisions.

    Its weights are still those after that step, so the EMA comes out as if it had been updated at once.
    """
    outcome, run.pending = run.pending, None
    if outcome is None:
        return None
    if outcome.ready is not None:
        outcome.ready.synchronize()
    *tallies, norm, scale = outcome.numbers.tolist()
    ranks = torch.tensor(tallies, dtype=torch.float64).view(-1, 7)
    tally, worst = ranks.sum(0).tolist(), ranks.max(0).values.tolist()
    if tally[OVERFLOWED]:
        stop_for_overflow(outcome, mine=bool(ranks[run.world.rank, OVERFLOWED]))
    if tally[UNREADABLE]:
        name_unreadable(run, outcome.problems)
    skipped = not math.isfinite(norm)
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if skipped else 0
    if run.skipped_in_a_row == 50:
        raise ArithmeticError("50 steps in a row had a non-finite gradient; a lower --lr or --precision bf16 may help")
    if not skipped:
        run.done += 1
        if run.ema is not None:
            run.ema.update()
    if tally[STOP]:
        run.stopping = True
        run.world.stop.set()
    run.samples += int(tally[SAMPLES])
    seconds, run.clock = outcome.wall - run.clock, outcome.wall
    return {
        "step": outcome.step,
        "loss": tally[LOSS] / tally[SAMPLES] if tally[SAMPLES] else math.nan,
        "grad_norm": norm,
        "lr": outcome.lr,
        "samples": run.samples,
        "epoch": outcome.epoch,
        "samples_per_s": tally[SAMPLES] / seconds,
        "step_s": seconds,
        "data_s": worst[DATA_S],
        "max_mem_gib": worst[MEMORY] / 2**30,
        "skipped": skipped,
        "loss_scale": scale,
    }


def stop_for_overflow(outcome: Outcome, mine: bool) -> NoReturn:
    """A picture whose latents are not finite ends the run; the rank that has it says its name."""
    if not mine:
        raise Elsewhere
    names = [n for ns, finite in outcome.suspects for n, ok in zip(ns, finite.tolist(), strict=True) if not ok]
    raise ArithmeticError(
        f"the VAE's latents of {', '.join(names)} are not finite: the picture or the VAE's weights are broken"
    )


def name_unreadable(run: Run, problems: dict[str, str]) -> None:
    """Say each unreadable picture once, on rank 0. All ranks come here in the same step: the tally told them."""
    found: list[dict[str, str]] = [{}] * run.world.world_size
    dist.all_gather_object(found, problems)  # comm: all-gather of names, only when a rank met new unreadable pictures
    for name, problem in sorted({n: p for each in found for n, p in each.items() if n not in run.named}.items()):
        run.named.add(name)
        if run.world.rank == 0:
            print(
                f"warning: left out {printable(name)}: {problem} ({len(run.named)} unreadable so far)",
                file=sys.stderr,
                flush=True,
            )


def warm_up(run: Run, samples: data.Samples) -> None:
    """Two forward and backward passes that teach nothing, before anything counts.

    DDP arranges its buckets anew after its first backward, by the order in which gradients came. A resumed run would
    start with the first arrangement again and sum gradients of three or more ranks in another order; now every counted
    step, of every run, has the second. It is also where kernels are compiled and chosen.
    """
    blank = data.collate([samples[0, data.EMPTY]] * run.batch.micro_batch)
    encoded = run.encode(blank)
    for _ in range(2):
        loss = per_sample_loss(run, blank, encoded, run.ddp).sum() * 0
        loss.backward()  # comm: all-reduce, 4 P bytes, twice at the start
        run.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def held_out_loss(run: Run, samples: data.Samples) -> float:
    """Mean over fixed pictures, timesteps and noise, unweighted; the pictures are dealt to the ranks like cards."""
    run.unet.eval()
    total, count = (torch.zeros((), dtype=torch.float64, device=run.world.device) for _ in range(2))
    cards = [(k // len(samples), k % len(samples)) for k in range(len(samples.timesteps))][
        run.world.rank :: run.world.world_size
    ]
    for start in range(0, len(cards), run.batch.micro_batch):
        batch = data.collate([samples[card] for card in cards[start : start + run.batch.micro_batch]])
        total += per_sample_loss(run, batch, run.encode(batch), run.unet, weighted=False).sum()
        count += float(batch["weight"].sum())
    run.unet.train()
    return global_mean(total, count)


def sample_grid(run: Run, pipe, prompts: list[str], out: Path) -> None:
    """Every rank draws its share of the prompts, with the averaged weights if there are any; rank 0 pastes the sheet."""
    world, config = run.world, run.config
    mine = list(range(len(prompts)))[world.rank :: world.world_size]
    run.unet.eval()
    with run.ema.swapped_in() if run.ema else contextlib.nullcontext(), run.autocast():
        guidance = PRESETS[config.preset].guidance if config.model is None else 7.5
        pictures = list(sample.draw(pipe, prompts, mine, config.seed, guidance, config.resolution))
    run.unet.train()
    gathered = [None] * world.world_size if world.rank == 0 else None
    dist.gather_object(dict(zip(mine, pictures, strict=True)), gathered)  # comm: gather of pictures, to rank 0
    if world.rank == 0:
        drawn = {i: picture for part in gathered for i, picture in part.items()}
        plots.grid([drawn[i] for i in range(len(prompts))], prompts, out / f"samples-{run.position.step}.png")


# ── save / load ──────────────────────────────────────────────────────────────────────────────────────────────────────


def tensors_of(run: Run) -> dict[str, torch.Tensor]:
    """Everything that is saved as tensors, by names that all three scripts share; live, so that loading fills them."""
    named = dict(run.unet.named_parameters())
    tensors = {f"unet.{n}": p.detach() for n, p in named.items()}
    tensors |= optimizer_tensors(run.optimizer, named.items())
    if run.ema is not None:
        tensors |= {f"ema.{n}": t for n, t in run.ema.average.items()}
    return tensors


def save(run: Run, out: Path) -> None:
    """checkpoint-N: each rank writes its part under another name, rank 0 seals and renames when all are done."""
    step, aside = run.position.step, checkpoint.partial_of(out, run.position.step)
    if run.world.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
    dcp.save(tensors_of(run), checkpoint_id=aside)  # comm: gather of plans and results; the tensors go to disk
    if run.world.rank == 0:
        checkpoint.seal(aside, {
            "step": step, "done": run.done, "samples": run.samples, "position": dataclasses.asdict(run.position),
            "ema_updates": run.ema.updates if run.ema else None,
            "loss_scale": {k: v.item() for k, v in run.loss_scale.state_dict().items()},
            "count": run.count, "names": run.names, "global_batch": run.batch.global_batch, "config": dataclasses.asdict(run.config),
        })  # fmt: skip
        shutil.rmtree(checkpoint.path_of(out, step), ignore_errors=True)  # a damaged one of the same step
        aside.rename(checkpoint.path_of(out, step))
        checkpoint.prune(out, run.config.keep, step)
    dist.barrier()  # comm: barrier, so that no rank dies or resumes between the write and the rename


def load(run: Run, folder: Path, state: dict) -> None:
    """Restore a checkpoint of any script and any number of ranks."""
    tensors = tensors_of(run)
    if state["ema_updates"] is None:
        tensors = {n: t for n, t in tensors.items() if not n.startswith("ema.")}
    dcp.load(tensors, checkpoint_id=folder)  # comm: gather of plans; the tensors come from disk
    run.done, run.samples = state["done"], state["samples"]
    run.loss_scale.load_state_dict(state["loss_scale"])
    if run.ema is not None:
        run.ema.updates = state["ema_updates"] or 0
        if state["ema_updates"] is None:  # --ema is new: the average begins with the weights as they are
            run.ema.restart()


def export(run: Run, spec: models.ModelSpec, out: Path) -> None:
    """pipeline/: rank 0 holds the whole model anyway, so nobody else is asked, and nobody waits."""
    if run.world.rank:
        return
    weights = {n: p.detach().cpu() for n, p in run.unet.named_parameters()}
    average = {n: t.cpu() for n, t in run.ema.average.items()} if run.ema else None
    models.export(
        out / "pipeline", spec, run.config.seed, average or weights, weights if average else None,
        run.config.prediction, run.config.zero_snr,
    )  # fmt: skip


# ── main ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def resolve(config: Config, spec: models.ModelSpec, world: World) -> Config:
    """Every flag has its final value from here on."""
    config = with_recipe(config)
    on_gpu = world.device.type == "cuda"
    side = config.resolution or (
        PRESETS[config.preset].resolution if config.model is None else spec.unet["sample_size"] * spec.vae_factor
    )
    if config.attention in ("cudnn", "flash") and not on_gpu:
        raise UsageError(f"--attention {config.attention} needs a GPU: use auto or math")
    return dataclasses.replace(
        config,
        resolution=side,
        prediction=config.prediction or spec.scheduler.get("prediction_type", "epsilon"),
        zero_snr=config.zero_snr or bool(spec.scheduler.get("rescale_betas_zero_snr")),
        precision=config.precision or ("bf16" if on_gpu else "fp32"),
        workers=config.workers
        if config.workers is not None
        else data.default_workers(config.data, len(os.sched_getaffinity(0)), world.local_world_size),
    )


def open_run(config: Config, world: World, notes: list[str]) -> tuple[Path, Path | None, dict | None, list[str]]:
    """(folder of the run, checkpoint to resume from, its state, what to say); rank 0 chooses, the store tells the others."""
    if world.rank == 0:
        out = checkpoint.choose_out(config.out, "ddp", config.resume)
        folder, state, warnings = checkpoint.find(out, config.resume) if config.resume else (None, None, [])
        world.store.set("out", f"{out}\n{folder or ''}")  # comm: store, the folders
        notes = [*notes, *warnings]
    else:
        wait_for(world, "out")
        out, folder = (Path(p) if p else None for p in world.store.get("out").decode().split("\n"))  # comm: store
        state = checkpoint.read_state(folder) if folder else None
    if state is not None:
        changed = changed_flags(state["config"], config)
        notes = [*notes, *([f"resuming with {', '.join(changed)}"] if changed else [])]
    return out, folder, state, notes


def begin(run: Run, out: Path, notes: list[str], spec: models.ModelSpec) -> None:
    """What rank 0 says before the first step."""
    config, world = run.config, run.world
    for note in notes:
        print(f"note: {note}", flush=True)
    backend = f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}" if world.device.type == "cuda" else "gloo"
    print(f"ddp: {world.world_size} ranks, {backend}, torch {torch.__version__}, {config.precision}, {out}")
    parameters = sum(p.numel() for p in run.unet.parameters())
    print(
        f"{spec.name}: {parameters / 1e6:.1f} M parameters, {run.count} samples, {run.batch}, step {run.position.step} of {config.steps}",
        flush=True,
    )
    cores = len(os.sched_getaffinity(0))
    if config.workers * world.local_world_size > cores:
        print(
            f"warning: --workers {config.workers} x {world.local_world_size} ranks > {cores} cores: they will wait for each other",
            file=sys.stderr,
        )


def finish_step(run: Run, row: dict | None, rows: Rows | None, progress: Progress, held: data.Samples | None) -> None:
    """Report a settled step; the held-out loss is taken when its weights are still in place."""
    if row is None:
        return
    if held is not None and row["step"] % run.config.val_every == 0:
        row["val_loss"] = held_out_loss(run, held)
    if rows is not None:
        rows.write(row)
    progress.step(row)


def main(world: World) -> None:
    # Everything that can be wrong is found before a group is made.
    given = parse("ddp", sys.argv[1:], world.rank)
    check_devices(world)
    spec = models.spec_of(given)
    batch = batch_of(given, replicas=world.world_size)
    config = resolve(given, spec, world)
    schedule = NoiseSchedule(spec.scheduler, config.prediction, config.zero_snr, config.snr_gamma)
    source, notes = data.open_source(config.data)
    held_source, held_indices, indices = data.held_out(config.data, source) if config.val_every else (None, None, None)
    prompts = data.prompts_of(config, source)
    if config.dry_run:
        if world.rank == 0:
            print(describe(config, batch, spec, len(source)))
        return
    out, folder, state, notes = open_run(config, world, notes)
    frozen = models.build_frozen(spec, config.seed)
    unet = models.build_unet(spec, config.seed, world.device)
    all_names = "\n".join(source.name(i) for i in range(len(source)))
    names = f"{zlib.crc32(all_names.encode('utf-8', 'surrogateescape')):08x}"
    all_ready(
        world,
        f"{len(source)} samples (names {names}), {batch}, step {state['step'] if state else 0}",
        seconds=config.timeout,
    )

    join(world, config.timeout)
    use_kernels(config, world)
    latent = (spec.latent_channels, config.resolution // spec.vae_factor, config.resolution // spec.vae_factor)
    samples = data.Samples(source, frozen.tokenizers, config, latent, len(schedule), indices)
    held = (
        data.held_out_samples(held_source, held_indices, frozen.tokenizers, config, latent, len(schedule))
        if config.val_every
        else None
    )
    if config.activations == "checkpoint":
        unet.enable_gradient_checkpointing()
    if config.compile:
        models.compile_blocks(unet)
    frozen.to(world.device, DTYPES[config.precision])
    named = list(unet.named_parameters())
    run = Run(
        config, batch, world, unet, replicate(unet, config, world), build_optimizer(named, config),
        LossScale(config.precision == "fp16", world.device), EMA(named, config.ema) if config.ema else None,
        schedule.to(world.device), Encoder(frozen, spec.is_xl, world.device, remember=config.data == "shapes"),
        len(samples), names, None,
    )  # fmt: skip
    if state is not None:
        load(run, folder, state)
        run.position, more = data.position_after(state, run.count, run.names, batch.global_batch)
        notes = [*notes, *more]
    if world.rank == 0:
        begin(run, out, notes, spec)
    already_complete = run.position.step >= config.steps
    rows = None
    if not already_complete:
        rows = Rows(out / "metrics.jsonl", run.position.step) if world.rank == 0 else None
        run.log_rows = Rows(out / f"samples.rank{world.rank}.jsonl", run.position.step) if config.log_samples else None
        train(run, samples, held, rows, frozen, spec, prompts, out)
    elif world.rank == 0:
        print(f"already complete: {out} has all {config.steps} steps")
    if run.position.step < config.steps:
        if world.rank == 0:
            print(f"stopped after step {run.position.step}{', saved' if config.save_every else ''}: {out}")
        return
    world.at = "export"
    if not config.no_export and not (already_complete and (out / "pipeline").exists()):
        export(run, spec, out)
    if world.rank == 0:
        print(f"done: {out}", flush=True)


def train(
    run: Run, samples: data.Samples, held: data.Samples | None, rows: Rows | None, frozen, spec, prompts, out: Path
) -> None:
    """The loop: step, report, and at their times save and draw; ends early, on all ranks alike, when one was told to stop."""
    config, world = run.config, run.world
    warm_up(run, samples)
    micro_batches = data.MicroBatches(len(samples), run.batch, config.seed, world.rank, run.position, config.steps)
    batches = iter(data.loader(samples, micro_batches, config.workers, pin=world.device.type == "cuda"))
    progress = Progress(world.rank == 0, config.steps, run.position.step, config.log_every)
    pipe = models.pipeline_of(spec, frozen, run.unet, config.prediction, config.zero_snr)
    started = run.clock = time.perf_counter()
    ending = False
    while run.position.step < config.steps and not ending:
        world.at = f"step {run.position.step + 1}"
        row = train_step(run, batches)
        finish_step(run, row, rows, progress, held)
        if config.time_limit and time.perf_counter() - started > 60 * config.time_limit:
            world.stop.set()  # told to the others with the next step's tally
        step, last = run.position.step, run.position.step == config.steps
        ending = run.stopping
        saving = config.save_every and (step % config.save_every == 0 or last or ending)
        drawing = (
            not ending and config.sample_every != 0 and (last or step % (config.sample_every or config.steps) == 0)
        )
        validating = config.val_every and step % config.val_every == 0
        if saving or drawing or validating or last or ending:
            finish_step(run, settle(run), rows, progress, held)  # nothing may be pending now
        if saving:
            save(run, out)
        if drawing:
            sample_grid(run, pipe, prompts, out)
        if run.pending is None:
            run.clock = time.perf_counter()  # what was done between steps is not the next step's time
    world.at = "end"
    progress.close()
    if rows is not None:
        rows.close()
        plots.loss_curve(read_rows(out / "metrics.jsonl"), out / "loss.png")


def use_kernels(config: Config, world: World) -> None:
    """Which kernels torch may choose."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
        torch.use_deterministic_algorithms(True)
    elif world.device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # shapes repeat, so trying kernels once pays
    models.choose_attention(config.attention)


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
