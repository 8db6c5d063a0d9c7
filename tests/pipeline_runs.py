"""Many pipeline runs after one start: under torchrun, with a list of (name, flags) as JSON and a folder for them.

Starting ranks takes longer than a run of three steps of `tiny`. Each run is built and carried out by the script's own
functions; what is left out is the beginning of its `main`, the finding of the other ranks.
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

import pipeline_train as script  # noqa: E402
from common import models  # noqa: E402
from common.config import batch_of, parse  # noqa: E402
from common.folding import plan_fold, stages_of  # noqa: E402
from common.job import prepare  # noqa: E402


def carry_out(world, flags: list[str], out: Path, loss_scale: float | None) -> dict:
    given = parse("pipeline", flags, world.rank)
    spec = models.spec_of(given)
    stages = stages_of(given, spec, world.world_size)
    batch = batch_of(given, world.world_size // stages, default=(2, 4))
    job = prepare(given, spec, batch, False, world.local_world_size)
    folding = plan_fold(spec, job.config, batch, stages, world.device)
    frozen = models.build_frozen(spec, job.config.seed)
    if job.config.costs == "measured":
        folding = plan_fold(spec, job.config, batch, stages, world.device, script.measure(world, job, frozen))
    unet = models.build_part(spec, job.config.seed, world.device, folding.shapes[world.rank % stages])
    groups = script.make_groups(world, stages, 120)
    run = script.build_run(world, job, folding, groups, unet, frozen)
    if loss_scale:
        run.loss_scale.scale.fill_(loss_scale)
    out.mkdir(exist_ok=True)
    script.carry_out(run, frozen, out, [])
    owned = sum(p.numel() for p in unet.parameters() if not p.is_meta)
    return {"in_flight": run.stage.in_flight(), "owned": owned, "sent": run.sent_bytes}


def main() -> None:
    runs, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    world = script.find_world()
    script.join(world, 120)
    for name, flags, loss_scale in runs:
        said = script.everyone_says(world, carry_out(world, flags, folder / name, loss_scale))
        if world.rank == 0:
            (folder / name / "ranks.json").write_text(json.dumps(said))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as the scripts end, and for the same reason


if __name__ == "__main__":
    main()
