"""What --dry-run prints: the batch product, the memory that is known beforehand, and the bytes on the wire."""

from common.config import Batch, Config
from common.models import ModelSpec, parameter_count

GIB = 2**30


def replicated_bytes(parameters: int, config: Config) -> dict[str, int]:
    """Memory per rank of what DDP keeps whole, in bytes: everything is float32."""
    kept = {
        "weights": 4,
        "gradients": 4,
        "optimizer": 8 if config.optimizer == "adamw" else 0,
        "ema": 4 if config.ema else 0,
    }
    return {what: size * parameters for what, size in kept.items() if size}


def ring_bytes(message: int, ranks: int) -> int:
    """What one rank sends in a ring all-reduce of `message` bytes: 2 (N-1)/N of it."""
    return 2 * (ranks - 1) * message // ranks


def describe(config: Config, batch: Batch, spec: ModelSpec, samples: int) -> str:
    parameters = parameter_count(spec)
    memory = replicated_bytes(parameters, config)
    message = parameters * (2 if config.grad_compress == "bf16" else 4)
    steps = -(-samples // batch.global_batch)
    lines = [
        f"model      {spec.name}, UNet of {parameters:,} parameters, predicts {config.prediction}",
        f"data       {config.data}: {samples} samples at {config.resolution} x {config.resolution}, {steps} steps per epoch",
        f"replicas   {batch.replicas}",
        f"batch      {batch}",
        f"steps      {config.steps}, {config.optimizer}, lr {config.lr:g} {config.lr_schedule}, warm-up {config.warmup}, {config.precision}",
        f"memory     {sum(memory.values()) / GIB:.2f} GiB per rank before activations: "
        + ", ".join(f"{what} {size / GIB:.2f}" for what, size in memory.items()),
        f"wire       {ring_bytes(message, batch.replicas) / GIB:.3f} GiB sent per rank and step (all-reduce of {message / GIB:.3f} GiB)",
    ]
    return "\n".join(lines)
