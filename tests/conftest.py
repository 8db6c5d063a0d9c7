"""What tests of more than one script begin with: the runs of runs.py, and their inputs."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from tests.launch import trained
from tests.pipeline_models import small_sdxl_folder
from tests.runs import RUNS, SCALES


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """Where runs read: ten pictures of which one is cut, so that the last step of an epoch of 4 + 4 + 2 has its own count;
    a single picture; prompts; a thin SDXL."""
    path = tmp_path_factory.mktemp("inputs of mine")
    (path / "folder").mkdir()
    for i in range(10):
        pixels = np.random.default_rng(i).integers(0, 255, (8, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((96, 64)).save(path / "folder" / f"{i}.png")
    cut = path / "folder" / "7.png"
    cut.write_bytes(cut.read_bytes()[:-2000])
    (path / "folder" / "metadata.jsonl").write_text(
        "".join(json.dumps({"file_name": f"{i}.png", "text": f"picture {i}"}) + "\n" for i in range(10))
    )
    (path / "only").mkdir()
    Image.new("RGB", (64, 64), "red").save(path / "only" / "only.png")
    (path / "prompts").write_text("a large red star\na small blue circle\na small red square\n")
    small_sdxl_folder(path / "thin-sdxl")
    return path


@pytest.fixture(scope="session")
def many(inputs, tmp_path_factory):
    """The folder of a run of runs.py; all runs of so many ranks of a script share one start."""
    folder, started = tmp_path_factory.mktemp("runs with a space"), set()

    def put(match: re.Match, own: tuple[str, int]) -> str:
        other = re.fullmatch(r"(ddp|fsdp|pipeline)-(\d)-(.+)", match[1])
        if not other:
            return str(inputs / match[1])
        script, ranks, name = other[1], int(other[2]), other[3]
        return str(folder / match[1] if (script, ranks) == own else get(script, ranks, name))

    def get(script: str, ranks: int, name: str):
        if (script, ranks) not in started:
            listed = [
                (
                    f"{script}-{ranks}-{run}",
                    [re.sub(r"\{(.+?)\}", lambda match: put(match, (script, ranks)), flag) for flag in flags],
                    SCALES.get(run),
                )
                for run, flags in RUNS[script, ranks]
            ]
            trained(
                ranks,
                f"{script}_train",
                json.dumps(listed),
                folder,
                script="tests/many_runs.py",
                cwd=folder,
                seconds=500,
            )
            started.add((script, ranks))
        return folder / f"{script}-{ranks}-{name}"

    return get


@pytest.fixture(scope="session")
def alone(many):
    """The reference: one process without torchrun, 24 samples in one micro-batch."""
    return many("ddp", 0, "alone")
