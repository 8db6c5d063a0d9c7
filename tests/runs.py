"""Every run that only has to be looked at afterwards: (script, ranks) -> (name, flags). 0 ranks: plain Python.

Each line of this table is one start of processes (see many_runs.py), made when the first of its runs is asked for.
In flags, {NAME} stands for an input (the fixture `inputs`), {SCRIPT-RANKS-NAME} for the folder of another run.
"""

SGD = ("--optimizer", "sgd", "--lr", "0.05", "--global-batch", "24", "--steps", "3", "--sample-every", "0")
ADAM = ("--lr", "1e-3", "--global-batch", "12", "--steps", "6", "--ema", "0.9", "--log-samples")
SAVED = (*ADAM, "--save-every", "3", "--sample-every", "6", "--prompts", "{prompts}")
LATER = (*ADAM, "--sample-every", "0", "--resume")  # from step 3 of another run
RATE = (
    "--lr",
    "1e-3",
    "--lr-schedule",
    "cosine",
    "--warmup",
    "2",
    "--steps",
    "6",
    "--sample-every",
    "0",
    "--no-export",
)
STILL = ("--optimizer", "sgd", "--lr", "0", "--global-batch", "12", "--steps", "1", "--sample-every", "0")
PICTURES = ("--data", "{folder}", "--optimizer", "sgd", "--lr", "0.05", "--global-batch", "4", "--steps", "6",
            "--sample-every", "0", "--log-samples")  # fmt: skip
ONLY = ("--data", "{only}", "--steps", "2", "--optimizer", "sgd", "--lr", "0.05", "--sample-every", "0")
THIN = ("--model", "{thin-sdxl}", "--optimizer", "sgd", "--lr", "0.05", "--global-batch", "6", "--steps", "2",
        "--sample-every", "0")  # fmt: skip
HELD = (*SGD, "--val-every", "2", "--ema", "0.9", "--clip", "0.5")
RECOMPUTE = ("--activations", "checkpoint")
ZERO, AHEAD, MEASURED = ("--schedule", "zero-bubble"), ("--encode", "ahead"), ("--costs", "measured")


def piped(stages: int, micro: int, *flags: str) -> tuple[str, tuple[str, ...]]:
    """A run of the pipeline that follows the reference curve: its name and its flags. 24 samples: micro-batch 24 / replicas / M."""
    name = "-".join([f"{stages}-stages", f"micro-{micro}", *(f for f in flags if not f.startswith("--"))])
    return name, (*SGD, "--val-every", "2", "--stages", str(stages), "--micro-batch", str(micro), *flags)


PIPED = {
    1: [piped(1, 24), piped(1, 6, *ZERO)],
    2: [piped(2, 24, *ZERO), piped(2, 12, *AHEAD), piped(2, 8, *MEASURED), piped(2, 6, *ZERO, *AHEAD),
        piped(2, 3, *RECOMPUTE), piped(2, 3, *ZERO, *RECOMPUTE)],
    3: [piped(3, 24), piped(3, 12, *ZERO), piped(3, 8, *ZERO, *AHEAD), piped(3, 3)],
    4: [piped(4, 24, *AHEAD), piped(4, 8, *ZERO), piped(4, 6), piped(4, 3, *ZERO), piped(2, 6, *ZERO),
        piped(2, 3, *AHEAD), piped(1, 3)],
}  # fmt: skip

RUNS = {
    ("ddp", 0): [
        ("alone", (*SGD, "--micro-batch", "24", "--val-every", "2")),
        ("held", ("--micro-batch", "24", *HELD)),
        ("pictures", (*PICTURES, "--micro-batch", "4")),
        ("only", (*ONLY, "--global-batch", "1")),
        ("thin-sdxl", (*THIN, "--micro-batch", "6")),
    ],
    ("ddp", 2): [
        ("workers", (*SGD, "--micro-batch", "12", "--workers", "2")),
        ("recomputed", (*SGD, "--micro-batch", "3", *RECOMPUTE)),
        ("held-out", (*SGD, "--micro-batch", "12", "--val-every", "1")),
        ("fp16", (*SGD, "--micro-batch", "12", "--precision", "fp16")),
        ("bf16", (*SGD, "--micro-batch", "12", "--precision", "bf16", "--grad-compress", "bf16")),
        ("rate", (*RATE, "--micro-batch", "1", "--accum", "3")),
        ("pictures", (*PICTURES, "--micro-batch", "1", "--workers", "2")),
        ("straight", SAVED),
    ],
    ("ddp", 3): [
        ("plain", (*SGD, "--micro-batch", "8")),
        ("rate", (*RATE, "--micro-batch", "2")),
        ("only", ONLY),
        ("straight", SAVED),
        ("resumed", (*LATER, "{ddp-3-straight}/checkpoint-3")),
        ("after-2", (*LATER, "{ddp-2-straight}/checkpoint-3")),
        ("after-fsdp", (*LATER, "{fsdp-2-straight}/checkpoint-3")),
        ("after-pipeline", (*LATER, "{pipeline-3-straight}/checkpoint-3")),
    ],
    ("ddp", 4): [("accumulated", (*SGD, "--micro-batch", "2"))],
    ("fsdp", 1): [("whole", ("--micro-batch", "24", *HELD)), ("still", STILL)],
    ("fsdp", 2): [
        ("plain", ("--micro-batch", "12", *HELD)),
        ("accumulated", ("--micro-batch", "3", *HELD)),
        ("no-reshard", ("--micro-batch", "6", "--no-reshard", *HELD)),
        # Drawn with the average swapped in after step 2: nothing of it may stay gathered for step 3.
        ("drawn", ("--micro-batch", "12", "--no-reshard", *HELD, "--sample-every", "2", "--prompts", "{prompts}")),
        ("offload", ("--micro-batch", "12", "--offload", *HELD)),
        ("recomputed", ("--micro-batch", "6", *RECOMPUTE, *HELD)),
        ("replicated", ("--micro-batch", "12", "--shard-size", "1", *HELD)),
        ("still", STILL),
        ("straight", SAVED),
        ("resumed", (*LATER, "{fsdp-2-straight}/checkpoint-3")),
        ("thin-sdxl", (*THIN, "--micro-batch", "3")),
        ("bf16", (*SGD, "--micro-batch", "12", "--precision", "bf16")),
    ],
    ("fsdp", 3): [
        ("uneven", ("--micro-batch", "4", *HELD)),
        ("still", STILL),
        ("after-2", (*LATER, "{fsdp-2-straight}/checkpoint-3")),
        ("after-ddp", (*LATER, "{ddp-2-straight}/checkpoint-3")),
        ("after-pipeline", (*LATER, "{pipeline-3-straight}/checkpoint-3")),
    ],
    ("fsdp", 4): [
        ("hybrid", ("--micro-batch", "3", "--shard-size", "2", *HELD)),
        ("full", ("--micro-batch", "6", *HELD)),
    ],
    ("pipeline", 1): PIPED[1],
    ("pipeline", 2): [
        *PIPED[2],
        ("overflow", (*SGD, "--micro-batch", "6", "--precision", "fp16", *ZERO)),
        ("pictures", (*PICTURES, "--micro-batch", "1", "--workers", "1")),
        ("after-ddp", (*LATER, "{ddp-2-straight}/checkpoint-3", "--micro-batch", "6")),
        ("after-fsdp", (*LATER, "{fsdp-2-straight}/checkpoint-3", "--micro-batch", "6")),
        ("after-3", (*LATER, "{pipeline-3-straight}/checkpoint-3", "--micro-batch", "3")),
    ],
    ("pipeline", 3): [
        *PIPED[3],
        ("straight", (*SAVED, "--micro-batch", "3", *ZERO)),
        ("thin-sdxl", (*THIN, "--micro-batch", "2", *ZERO, *RECOMPUTE)),
    ],
    ("pipeline", 4): PIPED[4],
}  # fmt: skip
SCALES = {"overflow": 2.0**40}  # runs that begin with this loss scale, at which the first gradients overflow


def flags_of(script: str, ranks: int, name: str) -> tuple[str, ...]:
    return dict(RUNS[script, ranks])[name]
