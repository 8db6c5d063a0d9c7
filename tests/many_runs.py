"""Many runs of a script after one start, under torchrun or alone: SCRIPT [[NAME, FLAGS, LOSS SCALE or null], …] FOLDER.

Starting ranks takes longer than a run of three steps of `tiny`. Each run is the script's whole `main`, with a part of the
store and a process group of its own. What a rank said, held and sent is noted beside the run, in NAME/ranks.json.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from common import folding, plots

ISSUED: list[tuple[str, str, int]] = []  # (where the run was, kind, bytes of the whole message)


def watch(where) -> None:
    """Note every tensor collective that Python issues, FSDP's among them."""

    def noted(kind, function, whole):
        def call(*args, **kwargs):
            tensor = whole(args, kwargs)
            ISSUED.append((where(), kind, tensor.numel() * tensor.element_size()))
            return function(*args, **kwargs)

        return call

    def first(args, kwargs):
        return args[0] if args else kwargs.get("output", kwargs.get("output_tensor", kwargs.get("tensor")))

    def second(args, kwargs):
        return args[1] if len(args) > 1 else kwargs["input"]

    whole_tensor = DTensor.full_tensor

    def gathered(tensor, **more):
        ISSUED.append((where(), "full-tensor", tensor.numel() * tensor.element_size()))
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


def held_by(run) -> dict:
    """What this rank keeps of a network, and what the strategy promises about it."""
    mine = getattr(run, "shards", None)
    if mine is not None:  # the optimizer's rows are the network's own memory
        same = all(p.to_local().data_ptr() == mine[n].data_ptr() for n, p in run.unet.named_parameters())
        return {"held": sum(p.numel() for p in mine.values()), "same_memory": same}
    found = {"held": sum(p.numel() for p in run.unet.parameters() if not p.is_meta)}
    if hasattr(run, "stage"):
        found |= {"in_flight": run.stage.in_flight(), "sent": run.sent_bytes}
    return found


def main() -> None:
    script, runs, folder = importlib.import_module(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    first = world = script.find_world()
    torch.set_num_threads(1)
    if sys.argv[1] != "pipeline_train":
        watch(lambda: world.at)
    build, built = script.build_run, []

    def build_run(*parts):
        run = build(*parts)
        if scale:
            run.loss_scale.scale.fill_(scale)
        built.append(run)
        return run

    script.build_run = build_run
    count, counted = folding.count_units, {}

    def count_units(spec, config):  # the same for all runs of a model
        key = spec.name, config.precision, config.resolution
        if key not in counted:
            counted[key] = count(spec, config)
        return counted[key]

    folding.count_units = count_units
    draw = plots.schedule
    for name, flags, scale in runs:  # noqa: B007 - `build_run` reads it
        world = dataclasses.replace(
            first, store=dist.PrefixStore(name, first.store), stop=threading.Event(), at="start"
        )
        sys.argv[1:] = [*flags, "--out", str(folder / name)]
        ISSUED.clear()
        plots.schedule = draw if name.endswith("straight") else lambda *_: None  # takes longer than a step
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            script.main(world)
        mine = held_by(built.pop()) | {"issued": ISSUED.copy(), "out": out.getvalue(), "err": err.getvalue()}
        said = script.everyone_says(world, mine)
        if world.rank == 0:
            (folder / name / "ranks.json").write_text(json.dumps(said))
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as the scripts end, and for the same reason


if __name__ == "__main__":
    main()
