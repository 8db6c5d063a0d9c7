"""What tests of more than one script begin with."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.launch import SGD, trained


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The reference: one process without torchrun, 24 samples in one micro-batch."""
    out = tmp_path_factory.mktemp("reference") / "alone"
    trained(0, *SGD, "--micro-batch", "24", "--val-every", "2", "--out", out, cwd=out.parent)
    return out


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Ten pictures of which one is cut, so that the last step of an epoch of 4 + 4 + 2 has its own count."""
    path = tmp_path_factory.mktemp("pictures of mine")
    for i in range(10):
        pixels = np.random.default_rng(i).integers(0, 255, (8, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((96, 64)).save(path / f"{i}.png")
    (path / "7.png").write_bytes((path / "7.png").read_bytes()[:-2000])
    (path / "metadata.jsonl").write_text(
        "".join(json.dumps({"file_name": f"{i}.png", "text": f"picture {i}"}) + "\n" for i in range(10))
    )
    return path
