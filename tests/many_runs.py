"""Many runs of ddp_train.py or fsdp_train.py after one start, under torchrun: SCRIPT [[NAME, FLAGS], …] FOLDER.

Starting ranks takes longer than a run of three steps of `tiny`. Each run is built and carried out by the script's own
functions; what is left out is the beginning of its `main`, the finding of the other ranks. What each rank sends is written
beside the run.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from common import models, shards
from common.config import batch_of, parse
from common.job import prepare

ISSUED: list[tuple[str, str, int]] = []  # (where the run was, kind, bytes of the whole message)


def watch(world) -> None:
    """Note every tensor collective that Python issues, FSDP's among them."""

    def noted(kind, function, whole):
        def call(*args, **kwargs):
            tensor = whole(args, kwargs)
            ISSUED.append((world.at, kind, tensor.numel() * tensor.element_size()))
            return function(*args, **kwargs)

        return call

    def first(args, kwargs):
        return args[0] if args else kwargs.get("output", kwargs.get("output_tensor", kwargs.get("tensor")))

    def second(args, kwargs):
        return args[1] if len(args) > 1 else kwargs["input"]

    whole_tensor = DTensor.full_tensor

    def gathered(tensor, **more):
        ISSUED.append((world.at, "full-tensor", tensor.numel() * tensor.element_size()))
        return whole_tensor(tensor, **more)

    DTensor.full_tensor = gathered  # goes by another way than the functions below
    for kind, names, whole in (
        ("all-gather", ("all_gather_into_tensor", "all_gather_single"), first),
        ("reduce-scatter", ("reduce_scatter_tensor", "reduce_scatter_single"), second),
        ("all-reduce", ("all_reduce",), first),
    ):
        for name in names:
            if hasattr(dist, name):
                setattr(dist, name, noted(kind, getattr(dist, name), whole))


def carry_out(script, world, flags: list[str], out: Path) -> dict:
    sharded = script.__name__ == "fsdp_train"
    given = parse(script.__name__.removesuffix("_train"), flags, world.rank)
    shards.check_size(given.shard_size, world.world_size)
    spec = models.spec_of(given)
    job = prepare(given, spec, batch_of(given, world.world_size), False, world.local_world_size)
    frozen = models.build_frozen(spec, job.config.seed)
    if sharded:
        unet = models.empty_unet(spec)
        run = script.build_run(world, job, unet, models.weights_of(unet, spec, job.config.seed), frozen)
        held = sum(p.numel() for p in run.shards.values())
    else:
        unet = models.build_unet(spec, job.config.seed, world.device)
        run = script.build_run(world, job, unet, frozen)
        held = sum(p.numel() for p in unet.parameters())
    ISSUED.clear()
    out.mkdir(exist_ok=True)
    script.carry_out(run, frozen, out, [])
    same = not sharded or all(p.to_local().data_ptr() == run.shards[n].data_ptr() for n, p in unet.named_parameters())
    return {"issued": ISSUED.copy(), "held": held, "same_memory": same}


def main() -> None:
    script, runs, folder = importlib.import_module(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    world = script.find_world()
    torch.set_num_threads(1)
    script.join(world, 120)
    watch(world)
    for name, flags in runs:
        said = script.everyone_says(world, carry_out(script, world, flags, folder / name))
        if world.rank == 0:
            (folder / name / "ranks.json").write_text(json.dumps(said))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as the scripts end, and for the same reason


if __name__ == "__main__":
    main()
