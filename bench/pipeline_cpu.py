"""What zero bubble and encoders in the holes are worth: two stages on two CPU cores, one thread each.

    torchrun --standalone --nproc_per_node=2 bench/pipeline_cpu.py

The model is tiny's with all channels of UNet and VAE four times as many: so narrow a network as tiny spends its time on
messages and calls. Both variants live in the same processes and take turns, block by block, so that whatever else the
machine does meets both alike. Writes bench/results/pipeline_cpu.json.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, UNet2DConditionModel

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import pipeline_train  # noqa: E402
from common import data, models  # noqa: E402
from common.config import batch_of, parse  # noqa: E402
from common.folding import plan_fold  # noqa: E402
from common.job import prepare  # noqa: E402
from common.meters import seconds  # noqa: E402

VARIANTS = {
    "pipeline 1f1b ahead": ("--schedule", "1f1b", "--encode", "ahead"),
    "pipeline zero-bubble online": ("--schedule", "zero-bubble", "--encode", "online"),
}


WIDER = 4


def wide_model(folder: Path) -> None:
    """A diffusers folder like tiny's, its UNet and VAE with more channels and seeded weights."""
    shutil.copytree(models.TINY, folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    for name, kind in (("unet", UNet2DConditionModel), ("vae", AutoencoderKL)):
        config = json.loads((models.TINY / name / "config.json").read_text(encoding="utf-8"))
        config["block_out_channels"] = [WIDER * channels for channels in config["block_out_channels"]]
        shutil.rmtree(folder / name)
        kind.from_config(config).save_pretrained(folder / name)


class Variant:
    """A run of its own, ready to be stepped."""

    def __init__(self, world, groups, flags: list[str], stages: int, times: dict):
        given = parse("pipeline", flags)
        spec, batch = models.spec_of(given), batch_of(given, world.world_size // stages, default=(2, 4))
        self.job = prepare(given, spec, batch, world.device.type == "cuda", world.local_world_size)
        config = self.job.config
        frozen = models.build_frozen(spec, config.seed)
        if not times:  # the same for both variants
            times |= pipeline_train.measure(world, self.job, frozen)
        folding = plan_fold(spec, config, batch, stages, world.device, times)
        unet = models.build_part(spec, config.seed, world.device, folding.shapes[world.rank % stages])
        self.run = pipeline_train.build_run(world, self.job, folding, groups, unet, frozen)
        samples = self.job.samples(frozen.tokenizers)
        order = data.MicroBatches(self.job.count, batch, config.seed, self.run.replica, data.Position(), config.steps)
        # Read beforehand, over and over: what is measured is the schedule, and there is no third core for a reader.
        self.batches = itertools.cycle(itertools.islice(data.loader(samples, order, 0, pin=False), 4 * batch.accum))
        self.seconds: list[float] = []
        self.busy: list[float] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            before = time.perf_counter()
            pipeline_train.train_step(self.run, self.batches)
            self.seconds.append(time.perf_counter() - before)
            self.busy.append(self.worked() / self.seconds[-1])

    def worked(self) -> float:
        """Seconds in which this rank computed: in the step's schedule, and in the encoders' before it."""
        ran = self.run.spans[2:] + (self.run.encoding[1:] if self.job.config.encode == "ahead" else [])
        return sum(seconds(start, end) for _, start, end in ran)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="turns of each variant (default 8)")
    parser.add_argument("--steps", type=int, default=3, help="steps in a turn (default 3)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    world = pipeline_train.find_world()
    torch.set_num_threads(1)
    stages = world.world_size
    pipeline_train.join(world, 600)
    groups = pipeline_train.make_groups(world, stages, 600)
    # Times as measured, because on a CPU FLOPs say too little about them.
    shared = "--micro-batch 8 --accum 4 --resolution 128 --precision fp32 --costs measured".split()
    folder = [tempfile.mkdtemp() if world.rank == 0 else None]
    dist.broadcast_object_list(folder)
    if world.rank == 0:
        wide_model(Path(folder[0]))
    dist.barrier()
    shared += ["--stages", str(stages), "--model", folder[0]]
    times = {}
    variants = {name: Variant(world, groups, [*shared, *flags], stages, times) for name, flags in VARIANTS.items()}
    for variant in variants.values():
        variant.steps(2)  # the first encodes its own pictures
        variant.seconds.clear()
        variant.busy.clear()
    for _, variant in itertools.product(range(asked.blocks), variants.values()):
        dist.barrier()
        variant.steps(asked.steps)
    busy = torch.tensor([statistics.median(v.busy) for v in variants.values()])
    dist.all_reduce(busy)
    if world.rank == 0:
        report(variants, (busy / stages).tolist(), stages)
        shutil.rmtree(folder[0])
    dist.barrier()
    dist.destroy_process_group()


def report(variants: dict[str, Variant], busy: list[float], stages: int) -> None:
    rows = []
    for (name, variant), share in zip(variants.items(), busy, strict=True):
        batch, seconds = variant.job.batch, statistics.median(variant.seconds)
        rows.append({
            "name": name, "model": f"tiny, {WIDER} times as wide", "resolution": variant.job.config.resolution,
            "micro_batch": batch.micro_batch, "micro_batches": batch.accum, "stages": stages,
            "images_per_s": batch.global_batch / seconds, "step_s": seconds, "busy": share, "steps": len(variant.seconds),
        })  # fmt: skip
        print(f"{name:30} {rows[-1]['images_per_s']:7.1f} images/s  {1000 * seconds:6.0f} ms a step  {share:4.0%} busy")
    ratio = rows[1]["images_per_s"] / rows[0]["images_per_s"]
    print(f"{ratio:.2f} x")
    result = {
        "bench": "pipeline_cpu", "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "gpus": 0, "torch": torch.__version__, "date": datetime.date.today().isoformat(), "ratio": ratio,
        "command": f"torchrun --standalone --nproc_per_node={stages} bench/pipeline_cpu.py", "rows": rows,
    }  # fmt: skip
    path = ROOT / "bench" / "results" / "pipeline_cpu.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
