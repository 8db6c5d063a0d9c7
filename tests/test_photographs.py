"""Real photographs, as they come with scikit-image's wheel, through the whole of a run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from PIL import Image

from common import models
from common.config import Config
from common.picture import fit, read_image
from tests.launch import rows, trained

CAPTIONS = {
    "astronaut.png": "an astronaut in an orange suit before a flag",
    "chelsea.png": "the face of a tabby cat",
    "coffee.png": "a cup of coffee on a wooden table",
    "rocket.jpg": "a rocket on its launch pad at night",
    "camera.png": "a man behind a camera on a tripod, black and white",
    "hubble_deep_field.jpg": "galaxies on a black sky",
    "motorcycle_left.png": "a motorcycle in a garage",
}


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    shipped = Path(skimage.__file__).parent / "data"
    found = [name for name in CAPTIONS if (shipped / name).exists()]
    assert len(found) >= 4, f"this scikit-image ships only {found}"
    for name in found:
        shutil.copy(shipped / name, folder / name)
    (folder / "metadata.jsonl").write_text(
        "".join(json.dumps({"file_name": n, "text": CAPTIONS[n]}) + "\n" for n in found)
    )
    return folder


def test_training_on_photographs_learns_them(photographs, tmp_path):
    out = tmp_path / "run"
    flags = (
        "--data",
        photographs,
        "--lr",
        "2e-3",
        "--global-batch",
        "8",
        "--steps",
        "40",
        "--flip",
        "0.5",
        "--crop",
        "random",
    )
    ended = trained(2, *flags, "--workers", "1", "--log-samples", "--out", out, cwd=tmp_path)
    losses = [r["loss"] for r in rows(out)]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:3])
    assert "unreadable" not in ended.err
    seen = {i for r in range(2) for row in rows(out, f"samples.rank{r}.jsonl") for i in row["ids"]}
    assert seen == {p.name for p in photographs.glob("*.*g")}
    assert (out / "samples-40.png").exists()


def test_the_vae_gives_back_the_light_and_dark_of_a_photograph(photographs):
    """`tiny`'s VAE knows the colours of shapes alone; where a photograph is light and dark still tells it from the others."""
    vae = models.build_frozen(models.spec_of(Config()), 0).vae
    names = [
        n for n in CAPTIONS if (photographs / n).exists() and not n.startswith("hubble")
    ]  # stars are too small for it
    pixels = np.stack([fit(read_image(photographs / n), 64)[0] for n in names])
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        back = vae.decode(vae.encode(x).latent_dist.mean).sample
    light = [t.mean(1).flatten(1) - t.mean((1, 2, 3))[:, None] for t in (x, back)]
    alike = torch.nn.functional.cosine_similarity(light[0][:, None], light[1][None], dim=-1)
    assert alike.argmax(1).tolist() == list(range(len(names)))
    assert alike.diag().min() > 0.5


def test_a_photo_taken_sideways_is_trained_upright(photographs, tmp_path):
    upright = Image.open(photographs / "coffee.png").convert("RGB").resize((120, 80))
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "sideways.jpg", quality=95, exif=exif)
    read = np.asarray(read_image(tmp_path / "sideways.jpg"), dtype=float)
    assert read.shape == (80, 120, 3)
    assert np.abs(read - np.asarray(upright, dtype=float)).mean() < 6
