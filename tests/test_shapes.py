"""The embedded data set and the shipped model: the pictures are right, the examiner is fair, the parts fit together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageFilter
from transformers import CLIPTextModel, CLIPTokenizer

from common.shapes import CAPTIONS, COLOURS, GROUND, SIDE, Shapes, coverage, matches, score

TINY = Path(__file__).resolve().parent.parent / "common" / "tiny"
FOREIGN = ["🦊🌋 ½ €", "猫が好き", "кошка, gato, γάτα", "İstanbul ẞ ﬁ", "\x00\x7f\u200b", "cafe\u0301", "\U0010ffff"]


@pytest.fixture(scope="module")
def source():
    return Shapes(288, first=700_000)


@pytest.fixture(scope="module")
def tokenizer():
    return CLIPTokenizer.from_pretrained(TINY / "tokenizer")


def share_right(pictures, captions):
    return np.mean([matches(picture, caption)["all"] for picture, caption in zip(pictures, captions, strict=True)])


def painted(*objects):
    """A picture of (shape, colour, x, y, radius) each."""
    canvas = np.broadcast_to(np.array(GROUND, dtype=np.float32), (SIDE, SIDE, 3))
    for shape, colour, x, y, radius in objects:
        share = coverage(shape, x, y, radius)[..., None]
        canvas = canvas + share * (np.array(COLOURS[colour]) - canvas)
    return Image.fromarray(np.rint(canvas).astype(np.uint8))


def test_a_picture_is_a_function_of_its_index():
    here, there = Shapes(10, first=40), Shapes(100)
    assert here.name(3) == there.name(43) == "shapes/000043"
    assert here.caption(3) == there.caption(43)
    assert here.image(3).tobytes() == there.image(43).tobytes() != there.image(43 + 48).tobytes()
    assert here.image(3).size == (64, 64) and here.image(3).mode == "RGB"
    with pytest.raises(IndexError):
        here.image(10)


def test_every_caption_comes_once_in_48_pictures():
    some = Shapes(48, first=5)
    assert sorted(some.caption(i) for i in range(48)) == sorted(CAPTIONS) and len(set(CAPTIONS)) == 48


def test_true_pictures_pass_also_when_blurred_or_noisy(source):
    pictures, captions = zip(*((source.image(i), source.caption(i)) for i in range(len(source))), strict=True)
    assert share_right(pictures, captions) >= 0.998
    assert share_right([p.filter(ImageFilter.GaussianBlur(1)) for p in pictures[:96]], captions[:96]) >= 0.98
    rng = np.random.default_rng(0)
    noisy = [np.clip(np.asarray(p) + rng.normal(0, 12, (64, 64, 3)), 0, 255).astype(np.uint8) for p in pictures[:96]]
    assert share_right(map(Image.fromarray, noisy), captions[:96]) >= 0.98


def test_wrong_captions_pass_by_chance_only(source):
    order = np.random.default_rng(0).permutation(len(source))
    share = share_right([source.image(i) for i in range(len(source))], [source.caption(int(i)) for i in order])
    assert share <= 0.05  # 1 in 48 is 2 %


def test_a_picture_of_no_one_thing_is_never_right():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    square_and_star = painted(("square", "red", 14, 14, 11), ("star", "red", 46, 44, 11))
    touching = painted(("circle", "blue", 24, 32, 11), ("circle", "blue", 40, 32, 11))
    for picture in (Image.new("RGB", (64, 64), GROUND), Image.new("RGB", (64, 64)), Image.fromarray(noise)):
        assert not any(matches(picture, caption)["all"] for caption in CAPTIONS)
    assert score(Image.new("RGB", (64, 64), GROUND))["count"] == 0
    assert score(square_and_star)["count"] == 2 and not matches(square_and_star, "a small red square")["count"]
    assert score(touching)["count"] == 1 and score(touching)["shape"] is None
    assert score(painted(("circle", "blue", 32, 32, 11)))["shape"] == "circle"


def test_the_verdict_says_which_part_is_wrong():
    picture = painted(("star", "green", 30, 30, 20))
    right = {"colour": True, "shape": True, "size": True, "count": True, "all": True}
    assert matches(picture, "a large green star") == right
    wrong = {"colour": "a large blue star", "shape": "a large green circle", "size": "a small green star"}
    for part, caption in wrong.items():
        assert matches(picture, caption) == right | {part: False, "all": False}


@torch.no_grad()
def test_the_vae_keeps_what_a_caption_says(source):
    vae = AutoencoderKL.from_pretrained(TINY / "vae").eval()
    x = torch.from_numpy(np.stack([np.asarray(source.image(i)) for i in range(192)])).permute(0, 3, 1, 2) / 127.5 - 1
    posteriors = [vae.encode(part).latent_dist for part in x.split(48)]
    latents = torch.cat([p.mean for p in posteriors])
    drawn = ((torch.cat([vae.decode(z).sample for z in latents.split(48)]).clamp(-1, 1) + 1) * 127.5).round().byte()
    pictures = [Image.fromarray(y) for y in drawn.permute(0, 2, 3, 1).numpy()]
    assert share_right(pictures, [source.caption(i) for i in range(192)]) >= 0.99
    # The diffusion starts from a unit normal: latents must have its mean and deviation, without a scaling factor.
    assert vae.config.scaling_factor == 1.0 and not vae.config.shift_factor
    assert latents.mean(dim=(0, 2, 3)).abs().max() < 0.1 and (latents.std(dim=(0, 2, 3)) - 1).abs().max() < 0.1
    spread = torch.cat([p.std for p in posteriors]).mean()
    assert 0.005 < spread < 0.3  # real, but small beside the latents' own


def test_every_word_of_a_caption_is_one_token(tokenizer):
    for caption in CAPTIONS:
        ids = tokenizer(caption, padding="max_length", truncation=True).input_ids
        assert len(ids) == 77 and ids[0] == tokenizer.bos_token_id
        assert ids[5:] == [tokenizer.eos_token_id] * 72 and tokenizer.pad_token_id == tokenizer.eos_token_id
    assert tokenizer("a large red star").input_ids == tokenizer(" A  Large\nRED star ").input_ids
    assert tokenizer.decode(tokenizer("a large red star").input_ids, skip_special_tokens=True) == "a large red star"


@pytest.mark.parametrize("text", [*FOREIGN, "".join(map(chr, range(1, 0x250))), "x" * 500], ids=ascii)
def test_no_text_is_unknown_to_the_tokenizer(tokenizer, text):
    ids = tokenizer(text, truncation=False).input_ids
    # The unknown token is EOS, as in CLIP: it may stand at the end only.
    assert ids[-1] == tokenizer.eos_token_id and tokenizer.unk_token_id not in ids[:-1] and len(ids) > 2


@torch.no_grad()
def test_the_text_encoder_agrees_with_the_tokenizer_and_tells_captions_apart(tokenizer):
    encoder = CLIPTextModel.from_pretrained(TINY / "text_encoder", dtype=torch.float32).eval()
    config = encoder.config
    assert (config.bos_token_id, config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert (config.vocab_size, config.max_position_embeddings) == (len(tokenizer), tokenizer.model_max_length)
    ids = tokenizer(list(CAPTIONS), padding="max_length", return_tensors="pt").input_ids
    out = encoder(ids)
    # Pooled features are those of the first EOS, where everything before it has been seen.
    torch.testing.assert_close(out.pooler_output, out.last_hidden_state[:, 5])
    assert torch.pdist(out.last_hidden_state.flatten(1)).min() > 1


def test_what_ships_stays_below_two_megabytes():
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) < 2_000_000
