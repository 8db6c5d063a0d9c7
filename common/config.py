"""Flags and presets: one frozen dataclass, and argparse made from it.

A field's metadata holds its help text, its choices and the scripts that know the flag; `parse` refuses every other flag.
`None` as a default means "derived": from the preset's recipe, from the model folder or from the machine.
"""

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from typing import NoReturn

from common.errors import UsageError

SCRIPTS = ("ddp", "fsdp", "pipeline")


@dataclass(frozen=True)
class Preset:
    """What a preset trains with when neither --lr nor --optimizer is given (its recipe), and its sizes."""

    resolution: int
    steps: int
    lr: float
    lr_schedule: str = "constant"
    warmup: int = 0
    ema: float = 0.0
    caption_dropout: float = 0.0
    global_batch: int | None = None
    guidance: float = 7.5
    beta2: float = 0.999


# The recipe of `tiny` is a whole: high rate, warm-up, cosine and EMA belong together (the README has what it reaches).
# The others start from pretrained weights as a rule.
#                      side   steps    lr    schedule  warm-up   ema  dropout  batch  guidance  beta2
PRESETS = {
    "tiny":     Preset(  64,    700,  4e-3, "cosine",      50,  0.99,     0.1,    64,     2.0,   0.99),
    "sd15":     Preset( 512,  10000,  1e-5, "constant",     0, 0.0,       0.0,  None,     7.5),
    "sd21":     Preset( 512,  10000,  1e-5, "constant",     0, 0.0,       0.0,  None,     7.5),
    "sdxl":     Preset(1024,  10000,  1e-5, "constant",     0, 0.0,       0.0,  None,     5.0),
    "sdxl-10b": Preset(1024,  10000,  1e-5, "constant",     0, 0.0,       0.0,  None,     5.0),
}  # fmt: skip


def _flag(default, text, **extra):
    return field(default=default, metadata={"help": text, **extra})


@dataclass(frozen=True)
class Config:
    """Every flag of the three scripts; the order is that of --help."""

    preset: str = _flag("tiny", "architecture with seeded weights", choices=tuple(PRESETS))
    model: str | None = _flag(None, "pretrained diffusers pipeline folder, instead of --preset", metavar="DIR")
    data: str = _flag(
        "shapes", "'shapes', or a folder of images with metadata.jsonl or NAME.txt captions", metavar="PATH"
    )
    resolution: int | None = _flag(None, "side of the training square in pixels (default: the preset's)", metavar="N")
    crop: str = _flag("center", "which square of an oblong picture", choices=("center", "random"))
    flip: float = _flag(0.0, "probability of a horizontal flip", metavar="P")

    micro_batch: int | None = _flag(None, "samples a replica runs at once (default 8, pipeline: 2)", metavar="M")
    accum: int | None = _flag(None, "micro-batches per optimizer step (default 1, pipeline: 4)", metavar="A")
    global_batch: int | None = _flag(None, "M x A x replicas; any two of the three determine the third", metavar="G")
    steps: int | None = _flag(
        None, "optimizer steps in total, resumed ones included (default: the preset's)", metavar="N"
    )

    optimizer: str = _flag("adamw", "adamw or plain SGD", choices=("adamw", "sgd"))
    lr: float | None = _flag(
        None,
        "learning rate (default 1e-5; tiny: its whole recipe, given up when --lr or --optimizer is given)",
        metavar="X",
    )
    lr_schedule: str | None = _flag(
        None, "per optimizer step, whatever the world size", choices=("constant", "linear", "cosine")
    )
    warmup: int | None = _flag(None, "steps over which the rate rises linearly (default 0)", metavar="N")
    scale_lr: bool = _flag(False, "multiply the rate by the number of replicas")
    weight_decay: float = _flag(1e-2, "decoupled in AdamW, L2 in SGD", metavar="X")
    adam_beta2: float | None = _flag(None, "decay of AdamW's squared gradients (default 0.999)", metavar="X")
    clip: float = _flag(1.0, "largest global gradient norm, 0 for no clipping", metavar="X")

    precision: str | None = _flag(
        None,
        "of the computation; weights stay fp32 (default: bf16 on GPU, fp32 on CPU)",
        choices=("fp32", "bf16", "fp16"),
    )
    activations: str = _flag(
        "keep", "keep them for the backward pass, or recompute them", choices=("keep", "checkpoint")
    )
    compile: bool = _flag(False, "torch.compile the resnets and transformer blocks one by one")
    attention: str = _flag("auto", "kernel of scaled_dot_product_attention", choices=("auto", "cudnn", "flash", "math"))
    deterministic: bool = _flag(False, "deterministic algorithms only; slower")
    stages: int | None = _flag(
        None,
        "ranks that one UNet is cut over (default: the largest divisor of the world that it can be folded into)",
        metavar="P",
        scripts=("pipeline",),
    )
    costs: str = _flag(
        "counted",
        "what the cut balances: FLOPs as counted, or times as measured at the start",
        choices=("counted", "measured"),
        scripts=("pipeline",),
    )
    schedule: str = _flag(
        "1f1b",
        "one forward, one backward; or with weight gradients moved into the holes",
        choices=("1f1b", "zero-bubble"),
        scripts=("pipeline",),
    )
    encode: str = _flag(
        "online",
        "the frozen encoders work on the next step's pictures in this step's holes, or ahead of each step",
        choices=("online", "ahead"),
        scripts=("pipeline",),
    )
    grad_compress: str = _flag("none", "send gradients in half the bytes", choices=("none", "bf16"), scripts=("ddp",))
    shard_size: int | None = _flag(
        None, "ranks that share one copy of the weights (default: all); fewer: HSDP", metavar="N", scripts=("fsdp",)
    )
    no_reshard: bool = _flag(False, "keep weights gathered from forward to backward (ZeRO-2)", scripts=("fsdp",))
    offload: bool = _flag(False, "weights, gradients and optimizer state live in the host's memory", scripts=("fsdp",))
    seed: int = _flag(0, "of weights, order, noise, crops, flips and dropped captions", metavar="S")
    workers: int | None = _flag(None, "processes per rank that read pictures (default: from the cores)", metavar="W")
    timeout: float = _flag(600.0, "seconds a rank waits for the others before all stop", metavar="SECONDS")

    ema: float | None = _flag(None, "keep an average of the weights with this decay (default off)", metavar="DECAY")
    prediction: str | None = _flag(
        None, "what the UNet predicts (default: the model's scheduler)", choices=("epsilon", "v_prediction")
    )
    zero_snr: bool = _flag(False, "rescale the noise schedule to zero terminal SNR (needs v_prediction)")
    snr_gamma: float | None = _flag(
        None, "min-SNR-gamma loss weights; the paper's value is 5 (default off)", metavar="G"
    )
    noise_offset: float = _flag(0.0, "strength of a constant added to each channel's noise", metavar="X")
    caption_dropout: float | None = _flag(None, "probability of the empty caption (default 0)", metavar="P")

    out: str | None = _flag(None, "folder of the run (default: runs/SCRIPT-001, -002, ...)", metavar="DIR")
    save_every: int = _flag(0, "steps between checkpoints, 0 for none", metavar="N")
    keep: int = _flag(2, "checkpoints to keep", metavar="K")
    resume: str | None = _flag(None, "'latest', or the path of a checkpoint", metavar="PATH")
    no_export: bool = _flag(False, "leave no diffusers folder at the end")
    time_limit: float | None = _flag(None, "end as after SIGTERM: finish the step, save, exit", metavar="MINUTES")

    val_every: int = _flag(0, "steps between losses on held-out samples, 0 for never", metavar="N")
    sample_every: int | None = _flag(
        None, "steps between sample grids, 0 for none at all (default: at the end)", metavar="N"
    )
    prompts: str | None = _flag(
        None, "prompts of the sample grid, one per line (default: from the data)", metavar="FILE"
    )
    log_every: int = _flag(50, "steps between lines when the output is not a terminal", metavar="N")
    log_samples: bool = _flag(False, "write samples.rank*.jsonl: who trained on what, with digests")
    dry_run: bool = _flag(False, "print the plan and exit")
    world_size: int | None = _flag(None, "with --dry-run: plan for N ranks (default: those that run)", metavar="N")
    bandwidth: float | None = _flag(
        None,
        "with --dry-run: GB/s that a rank sends in a collective (default: measured between the ranks)",
        metavar="X",
    )
    tflops: float | None = _flag(
        None, "with --dry-run: TFLOP/s that training reaches (default: half of a measured product)", metavar="X"
    )


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing: the script prints the line, once, from one rank."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see --help)")


def parse(script: str, argv: list[str], rank: int = 0) -> Config:
    """Flags of `script` ('ddp', 'fsdp' or 'pipeline') -> Config, checked as far as flags alone allow.

    Raises UsageError; `--help` prints on rank 0 and raises SystemExit(0) on all.
    """
    parser = _Parser(prog=f"{script}_train.py", allow_abbrev=False, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this text and exit")
    for f in flags_of(script):
        name = "--" + f.name.replace("_", "-")
        if f.type is bool:
            parser.add_argument(name, action="store_true", help=f.metadata["help"])
            continue
        kind = {int: int, float: float}.get(f.type) or {int | None: int, float | None: float}.get(f.type, str)
        text = f.metadata["help"] + (
            "" if f.default is None or "default" in f.metadata["help"] else f" (default {f.default})"
        )
        parser.add_argument(
            name,
            type=kind,
            default=f.default,
            help=text,
            choices=f.metadata.get("choices"),
            metavar=f.metadata.get("metavar"),
        )
    given = vars(parser.parse_args(argv))
    if given.pop("help"):
        if rank == 0:
            parser.print_help()
        raise SystemExit(0)
    config = Config(**given)
    check(config, argv)
    return config


def flags_of(script: str) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(Config) if script in f.metadata.get("scripts", SCRIPTS)]


def check(config: Config, argv: list[str] = ()) -> None:
    """Refuse what no machine and no data could make right; each message offers a value that works."""

    def refuse(flag: str, why: str) -> NoReturn:
        value = getattr(config, flag.strip("-").replace("-", "_"))
        raise UsageError(f"{flag} {value}: {why}")

    def at_least(flag: str, low: float) -> None:
        value = getattr(config, flag.strip("-").replace("-", "_"))
        if value is not None and not value >= low:  # "not >=" also catches nan
            refuse(flag, f"must be at least {low}")

    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            example = f.default or 0.5
            refuse("--" + f.name.replace("_", "-"), f"must be a finite number, for example {example}")
    for flag in ("--micro-batch", "--accum", "--global-batch", "--steps", "--keep", "--log-every", "--shard-size"):
        at_least(flag, 1)
    for flag in ("--world-size", "--bandwidth", "--tflops"):
        value = getattr(config, flag.strip("-").replace("-", "_"))
        if value is not None and not config.dry_run:
            refuse(flag, "is for a plan: add --dry-run (torchrun's --nproc_per_node says how many ranks run)")
        if value is not None and value <= 0:
            refuse(flag, "must be above 0, for example 8")
    for flag in ("--warmup", "--workers", "--save-every", "--val-every", "--sample-every", "--seed"):
        at_least(flag, 0)
    for flag in ("--lr", "--weight-decay", "--clip", "--noise-offset"):
        at_least(flag, 0)
    for flag in ("--flip", "--caption-dropout"):
        value = getattr(config, flag.strip("-").replace("-", "_"))
        if value is not None and not 0 <= value <= 1:
            refuse(flag, "is a probability, from 0 to 1")
    if config.ema is not None and not 0 <= config.ema < 1:
        refuse("--ema", "is a decay from 0 (off) to below 1, 0.9999 for long runs")
    if config.adam_beta2 is not None and not 0 <= config.adam_beta2 < 1:
        refuse("--adam-beta2", "is a decay from 0 to below 1, for example 0.999")
    if config.snr_gamma is not None and config.snr_gamma <= 0:
        refuse("--snr-gamma", "must be above 0; the paper's value is 5")
    if config.timeout <= 0:
        refuse("--timeout", "must be above 0 seconds, for example 600")
    if config.time_limit is not None and config.time_limit <= 0:
        refuse("--time-limit", "must be above 0 minutes, for example 60")
    if config.resolution is not None and (config.resolution < 8 or config.resolution % 8):
        refuse("--resolution", f"must be a multiple of 8, for example {max(8, round(config.resolution / 8) * 8)}")
    if config.seed >= 2**63:
        refuse("--seed", "must be below 2^63, for example 0")
    if config.model is not None and any(a == "--preset" or a.startswith("--preset=") for a in argv):
        raise UsageError(f"--model {config.model} and --preset {config.preset} exclude each other: leave out one")
    if config.resume is not None and not config.resume.strip():
        raise UsageError("--resume is empty: give 'latest' or the path of a checkpoint")
    if config.out is not None and not config.out.strip():
        raise UsageError("--out is empty: give a folder, for example runs/mine")


def recipe_of(config: Config) -> Preset:
    """The preset's recipe as a whole, or plain defaults when --lr, --optimizer or --model is given."""
    preset = PRESETS[config.preset]
    own = config.lr is not None or config.optimizer != "adamw" or config.model is not None
    return Preset(preset.resolution, preset.steps, lr=1e-5) if own else preset


def with_recipe(config: Config) -> Config:
    """Fill what was not given; the batch is solved by `batch_of`, once the number of replicas is known."""
    recipe = recipe_of(config)

    def given(value, otherwise):
        return otherwise if value is None else value

    steps = given(config.steps, 10000 if config.model else recipe.steps)
    return dataclasses.replace(
        config,
        steps=steps,
        lr=given(config.lr, recipe.lr),
        lr_schedule=given(config.lr_schedule, recipe.lr_schedule),
        # A run of a few steps, as in a trial, should not be all warm-up.
        warmup=given(config.warmup, min(recipe.warmup, steps // 10)),
        ema=given(config.ema, recipe.ema),
        adam_beta2=given(config.adam_beta2, recipe.beta2),
        caption_dropout=given(config.caption_dropout, recipe.caption_dropout),
    )


@dataclass(frozen=True)
class Batch:
    """global_batch = micro_batch x accum x replicas."""

    micro_batch: int
    accum: int
    replicas: int

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accum * self.replicas

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch} x accum {self.accum} x {self.replicas} replicas = {self.global_batch}"


def plan_batch(
    micro_batch: int | None,
    accum: int | None,
    global_batch: int | None,
    replicas: int,
    default: tuple[int, int] = (8, 1),
) -> Batch:
    """Solve G = M x A x replicas for what was not given; `default` is (M, A).

    With G alone, M is the largest divisor of a replica's share that is not above the default, so that no more memory is
    used than by default. Raises UsageError with the product and values that work.
    """
    if global_batch is None:
        return Batch(micro_batch or default[0], accum or default[1], replicas)
    unit = (micro_batch or 1) * (accum or 1) * replicas
    if global_batch % unit or (micro_batch and accum and global_batch != unit):
        factors = ([f"micro-batch {micro_batch}"] if micro_batch else []) + ([f"accum {accum}"] if accum else [])
        product = " x ".join([*factors, f"{replicas} replicas"])
        low, high = global_batch // unit * unit, (global_batch // unit + 1) * unit
        use = f"{unit}" if micro_batch and accum else " or ".join(str(v) for v in (low, high) if v)
        raise UsageError(
            f"--global-batch {global_batch} cannot be split: {product} = {unit} samples per round. Use {use}."
        )
    share = global_batch // unit  # what is left for the factors that were not given
    if micro_batch:
        return Batch(micro_batch, accum or share, replicas)
    if accum:
        return Batch(share, accum, replicas)
    micro = max(m for m in range(1, default[0] + 1) if share % m == 0)
    return Batch(micro, share // micro, replicas)


def batch_of(config: Config, replicas: int, default: tuple[int, int] = (8, 1)) -> Batch:
    """The batch of a run; a recipe's own global batch gives way to any flag, and to a world that does not divide it."""
    wanted = recipe_of(config).global_batch
    if wanted and (config.micro_batch, config.accum, config.global_batch) == (None, None, None):
        accum = default[1]
        default = (max(1, round(wanted / (replicas * accum))), accum)
    return plan_batch(config.micro_batch, config.accum, config.global_batch, replicas, default)


def learning_rate(done: int, config: Config, replicas: int) -> float:
    """Rate of the step that follows `done` optimizer steps; a function of nothing else, so of no world size.

    Rises as (done + 1) / warmup, then constant, or down to zero at `steps` by a line or half a cosine.
    """
    peak = config.lr * (replicas if config.scale_lr else 1)
    if done < config.warmup:
        return peak * (done + 1) / config.warmup
    progress = (done - config.warmup) / max(1, config.steps - config.warmup)
    if config.lr_schedule == "linear":
        return peak * max(0.0, 1 - progress)
    if config.lr_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak


# Flags that leave the curve as it is: how the work is split, watched and stored.
NEUTRAL = frozenset(
    "micro_batch accum workers timeout out save_every keep resume no_export val_every sample_every prompts log_every "
    "log_samples dry_run activations compile attention deterministic time_limit shard_size no_reshard offload "
    "world_size bandwidth tflops stages costs schedule encode".split()
)
# Flags under which the weights of a checkpoint mean something else.
BOUND = ("preset", "prediction", "zero_snr", "optimizer")


def changed_flags(before: dict, config: Config) -> list[str]:
    """What a resumed run does differently, as '--lr 0.001 (was 0.0001)'; raises UsageError for what cannot be honoured.

    `before` is the configuration in the checkpoint (`dataclasses.asdict`), as resolved as `config` is.
    """
    changed = []
    for name, value in dataclasses.asdict(config).items():
        if name in NEUTRAL or name not in before or before[name] == value:
            continue
        flag = "--" + name.replace("_", "-")
        if name in BOUND:
            use = f"use {before[name]}"
            if isinstance(value, bool):  # a switch takes no value
                use = f"leave out {flag}" if value else f"add {flag}"
            raise UsageError(
                f"{flag} {value} cannot continue a checkpoint made with {flag} {before[name]}: {use}, or another --out"
            )
        changed.append(f"{flag} {value} (was {before[name]})")
    return changed
