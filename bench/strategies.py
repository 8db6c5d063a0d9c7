"""Speed and memory of the scripts on GPUs, with inputs encoded once, each row a run of the real script.

    python bench/strategies.py --preset sdxl --micro-batch 8 --rows ddp fsdp "ddp --compile" "fsdp --compile"

Each row says which script and which flags. The VAE and the text encoders are in memory, as in training, but encode only
the first micro-batch, which every step then trains on: what is measured is the UNet's part. Prints a table and writes
bench/results/NAME.json.
"""

import argparse
import datetime
import importlib
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from common import models, plan  # noqa: E402
from common.config import batch_of, parse  # noqa: E402
from common.folding import count_units  # noqa: E402
from common.job import prepare  # noqa: E402

WARM = 4  # steps that do not count


def child(script: str) -> None:
    """One rank of one row: the script itself, with an encoder that remembers its first batch."""
    module = importlib.import_module(f"{script}_train")

    class Once(module.Encoder):
        encoded = None

        def __call__(self, batch):
            if self.encoded is None:
                self.encoded = super().__call__(batch)
            return self.encoded

    def again(samples, micro_batches, workers, pin):
        """The first micro-batch for ever: reading pictures is not measured either."""
        return itertools.repeat(module.data.collate([samples[at] for at in next(iter(micro_batches))]))

    module.Encoder, module.data.loader = Once, again
    world = module.find_world()
    try:
        module.main(world)
    except BaseException as error:  # noqa: BLE001
        module.fail(world, error)


def measure(row: str, args: argparse.Namespace, folder: Path) -> dict:
    script, *flags = shlex.split(row)
    flags = [
        "--preset", args.preset, "--micro-batch", str(args.micro_batch), "--steps", str(args.steps), "--sample-every", "0",
        "--no-export", *(["--resolution", str(args.resolution)] if args.resolution else []), *flags,
    ]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.gpus}", __file__]
    run = subprocess.Popen(
        [*command, "--child", script, *flags, "--out", str(folder / "run")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = run.communicate(timeout=args.limit)
    except subprocess.TimeoutExpired:
        run.terminate()  # torchrun passes it on; the script writes its checkpoint or is killed 30 s later
        out, err = run.communicate()
        print(out[-2000:], err[-4000:], sep="\n", file=sys.stderr)
        return {"name": row, "error": f"not done after {args.limit:g} s"}
    if run.returncode:
        print(out[-2000:], err[-4000:], sep="\n", file=sys.stderr)
        return {"name": row, "error": next((x for x in err.splitlines() if x.startswith("error:")), "failed")}
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][WARM:]
    given = parse(script, flags)
    spec, batch = models.spec_of(given), batch_of(given, args.gpus)
    job = prepare(given, spec, batch, torch.cuda.is_available(), args.gpus)
    flops = sum(unit.total for unit in count_units(spec, job.config)[0])
    speed = statistics.median(r["samples_per_s"] for r in steps)
    return {
        "name": row,
        "model": args.preset,
        "resolution": job.config.resolution,
        "micro_batch": args.micro_batch,
        "images_per_s": speed,
        "images_per_s_per_gpu": speed / args.gpus,
        "share_of_ceiling": speed / args.gpus * flops / args.ceiling,
        "peak_gib": max(r["max_mem_gib"] for r in steps),
        "predicted_gib": sum(plan.memory_of(script, spec, job.config, batch, args.gpus).values()) / 2**30,
        "loss": steps[-1]["loss"],
        "step_s": [r["step_s"] for r in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--preset", default="sdxl")
    parser.add_argument("--resolution", type=int)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--limit", type=float, help="seconds after which a row is given up")
    parser.add_argument("--name", default="strategies")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.ceiling = plan.product_rate(device, torch.bfloat16)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{args.gpus} x {machine}, torch {torch.__version__}, bf16 product {args.ceiling / 1e12:.4g} TFLOP/s")
    result = {
        "bench": args.name, "machine": machine, "gpus": args.gpus, "torch": torch.__version__,
        "command": shlex.join(["python", "bench/strategies.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(), "product_tflops": args.ceiling / 1e12, "rows": [],
    }  # fmt: skip
    args.results.mkdir(parents=True, exist_ok=True)
    for row in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure(row, args, Path(folder))
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in measured.items() if k != "step_s"}
        print("  ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
        result["rows"].append(measured)
        (args.results / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        script = sys.argv[2]
        del sys.argv[1:3]
        child(script)
    else:
        main()
