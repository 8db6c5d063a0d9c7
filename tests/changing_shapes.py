"""Three steps of the pipeline's own `train_step` on pictures of three sizes, as buckets will give them: on two stages with
the next step's pictures encoded in the holes, and on two replicas of the whole UNet. FOLDER gets weights and rows of each."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import pipeline_train
from common import data, models
from common.config import batch_of, parse
from common.folding import plan_fold
from common.job import prepare

SIZES = [(64, 64), (96, 64), (32, 48), (64, 64)]  # height and width of each step; latents of an odd side among them
FLAGS = ["--micro-batch", "2", "--steps", str(len(SIZES)), "--optimizer", "sgd", "--lr", "0.05", "--workers", "0"]
VARIANTS = {
    "stages": ("--stages", "2", "--accum", "4", "--schedule", "zero-bubble"),
    "replicas": ("--stages", "1", "--accum", "2"),
}


class Sized(pipeline_train.Run):
    """Knows the size of what is read next, as a plan of buckets would."""

    reads = 0

    @property
    def pictures(self):
        return self.job.batch.micro_batch, *SIZES[self.reads]


def resized(batch: dict, step: int, number: int, factor: int) -> dict:
    """The micro-batch with pictures and noise of this step's size, drawn by its number in the global batch."""
    draw, (height, width), size = torch.Generator().manual_seed(100 * step + number), SIZES[step], len(batch["t"])
    batch["pixels"] = torch.randint(0, 256, (size, 3, height, width), generator=draw, dtype=torch.uint8)
    for name in ("noise", "posterior_noise"):
        batch[name] = torch.randn(size, 4, height // factor, width // factor, generator=draw)
    return batch


def batches_of(run, samples):
    """Micro-batches of all steps; the replicas deal the global batch of a step among themselves."""
    accum = run.job.batch.accum
    for step in range(len(SIZES)):
        for micro in range(accum):
            number = run.replica * accum + micro
            batch = data.collate([samples[0, 8 * step + 2 * number + i] for i in range(2)])
            yield resized(batch, step, number, run.job.spec.vae_factor)


def train(world, name: str, folder: Path) -> None:
    given = parse("pipeline", [*FLAGS, *VARIANTS[name]])
    spec, stages = models.spec_of(given), given.stages
    batch = batch_of(given, world.world_size // stages, default=(2, 4))
    job = prepare(given, spec, batch, False, world.local_world_size)
    folding = plan_fold(spec, job.config, batch, stages, world.device)
    frozen = models.build_frozen(spec, 0)
    unet = models.build_part(spec, 0, world.device, folding.shapes[world.rank % stages])
    run = pipeline_train.build_run(world, job, folding, pipeline_train.make_groups(world, stages, 60), unet, frozen)
    read = pipeline_train.read

    def counted(run, *args):
        feed = read(run, *args)
        run.reads += 1
        return feed

    pipeline_train.read = counted
    batches = batches_of(run, job.samples(frozen.tokenizers))
    rows = [pipeline_train.train_step(run, batches) for _ in SIZES]
    rows = [*rows[1:], run.ledger.settle()]
    pipeline_train.read = read
    weights = pipeline_train.gathered(run, {n: p.detach() for n, p in run.stage.parameters()})
    if world.rank == 0:
        torch.save({"rows": rows, "weights": weights}, folder / f"{name}.pt")


def main() -> None:
    pipeline_train.Run = Sized
    world = pipeline_train.find_world()
    torch.set_num_threads(1)
    pipeline_train.join(world, 60)
    for name in VARIANTS:
        train(world, name, Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
