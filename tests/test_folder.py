"""What happens to a user's pictures, captions and folders before they are trained on. Inputs: tests/inputs.py."""

import io
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from common.errors import Unreadable, UsageError
from common.folder import MAX_CAPTION, ImageFolder, Strings, fit, printable, read_image
from tests import inputs
from tests.inputs import BLUE, GREEN, HIDDEN, RED, card, encode, noise, shows_card, write

# pytest puts its own warning filters in place of the one that common/picture.py has set for Pillow.
pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")

GOOD, BAD = inputs.good_pictures(), inputs.bad_pictures()
LOSSY = (".jpg", ".JPEG", ".mpo", ".avif", ".gif")


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def row(name, text="a card"):
    return {"file_name": name, "text": text}


def samples(folder):
    return [(folder.name(i), folder.caption(i)) for i in range(len(folder))]


@pytest.fixture
def alarm():
    """Breaks a test off that has hung for 20 seconds."""

    def ring(*_):
        pytest.fail("hung for 20 seconds")  # not TimeoutError: that is an OSError, which the reader would catch

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refusal(path):
    """The one line with which a folder is refused at the start."""
    with pytest.raises(UsageError) as caught:
        ImageFolder(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- bytes -> picture


@pytest.mark.parametrize("name", GOOD)
def test_every_format_mode_and_orientation_is_trained_as_a_person_sees_it(name):
    image = read_image(GOOD[name])
    assert image.size == ((32, 32) if name == "square.ico" else (48, 32))
    assert shows_card(image, tolerance=30 if name.endswith(LOSSY) else 12)


def test_a_photo_taken_sideways_is_trained_upright():
    for orientation in range(2, 9):
        stored = Image.open(io.BytesIO(GOOD[f"turned{orientation}.jpg"]))
        assert not shows_card(stored.convert("RGB"), 30), "the pixels in the file must need the tag"
        upright = read_image(GOOD[f"turned{orientation}.jpg"])
        _, time_ids = fit(upright, 32)
        assert shows_card(upright, 30) and time_ids[:2] == (32, 48)


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_not_a_whole_picture_is_refused_with_its_reason(name):
    data, reason = BAD[name]
    with pytest.raises(Unreadable) as caught:
        read_image(data)
    assert reason in str(caught.value) and str(caught.value) and "\n" not in str(caught.value)


def test_the_colour_hidden_under_transparency_is_never_trained():
    for name in GOOD:
        if "hole" in name or "key" in name:
            difference = np.abs(np.asarray(read_image(GOOD[name]), int) - HIDDEN).max(-1)
            assert difference.min() > 60, name


def test_half_transparent_pixels_are_mixed_with_white():
    half = Image.new("RGBA", (4, 4), (0, 100, 200, 128))
    assert read_image(encode(half, "PNG")).getpixel((0, 0)) == (127, 177, 227)
    assert read_image(encode(Image.new("LA", (4, 4), (0, 0)), "PNG")).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(("depth", "key"), [(1, 0), (2, 1), (4, 5), (8, 85), (16, 85 * 257)])
def test_the_transparent_grey_of_a_png_is_meant_in_the_depth_of_the_file(depth, key):
    # One row of eight pixels, alternately the transparent level and the brightest one but not white where it can.
    other = (1 << depth) - 1 if depth == 1 else key * 2
    levels = [key, other] * 4
    packed = sum(level << depth * (7 - i) for i, level in enumerate(levels)).to_bytes(depth, "big")
    data = inputs.png(8, 1, depth, 0, [packed], inputs.chunk(b"tRNS", key.to_bytes(2, "big")))
    shown = [read_image(data).getpixel((x, 0)) for x in range(8)]
    assert shown == [(255,) * 3, (255 if depth == 1 else 170,) * 3] * 4


def test_16_bit_grey_keeps_its_half_tones():
    ramp = np.array([[0, 257, 32768, 65535]], np.uint16)
    big_endian = Image.frombytes("I;16B", (4, 1), ramp.astype(">u2").tobytes())
    files = [encode(Image.fromarray(ramp), format) for format in ("PNG", "TIFF", "PPM", "JPEG2000")]
    for data in [*files, encode(big_endian, "TIFF")]:
        assert np.asarray(read_image(data))[0, :, 1].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("white", [1, 255, 65535])
def test_the_white_of_floats_is_found_in_their_range(white):
    ramp = np.array([[0, 0.5, 1]], np.float32) * white
    assert np.asarray(read_image(encode(Image.fromarray(ramp), "TIFF")))[0, :, 0].tolist() == [0, 128, 255]


def test_floats_without_a_known_white_are_refused_and_not_guessed():
    for values in ([0, 1e6], [-5, 1], [0, np.inf], [np.nan, 1]):
        with pytest.raises(Unreadable, match="no known white"):
            read_image(encode(Image.fromarray(np.array([values], np.float32)), "TIFF"))


def test_one_bit_pictures_are_black_and_white():
    pixels = np.asarray(read_image(encode(Image.fromarray(np.eye(8, dtype=bool)), "PNG")))
    assert (pixels[..., 0] == 255 * np.eye(8)).all()


def test_an_embedded_colour_profile_is_followed():
    swapped = Image.merge("RGB", [card().getchannel(c) for c in "GRB"])
    data = encode(swapped, "PNG", icc_profile=inputs.swapped_profile())
    assert shows_card(read_image(data), 40)
    assert not shows_card(read_image(encode(swapped, "PNG")), 40)


def test_srgb_pictures_are_not_touched_by_their_profile():
    nearly = inputs.nearly_srgb_profile()
    followed = ImageCms.profileToProfile(noise(1), io.BytesIO(nearly), ImageCms.createProfile("sRGB"))
    assert followed.tobytes() != noise(1).tobytes(), (
        "the profile must not be exactly sRGB for this test to tell anything"
    )
    for profile in (inputs.srgb_profile(), nearly):
        data = encode(noise(1), "PNG", icc_profile=profile)
        assert read_image(data).tobytes() == noise(1).tobytes()


def test_really_grey_and_really_black_pictures_are_not_taken_for_cut_ones():
    grey, black = Image.new("RGB", (40, 40), (128,) * 3), Image.new("RGB", (41, 39))
    for options in ({}, {"optimize": True}, {"progressive": True}, {"restart_marker_rows": 1}):
        assert read_image(encode(grey, "JPEG", **options)).getpixel((39, 39)) == (128, 128, 128)
    for mode in ("1", "L", "P", "RGB", "I;16"):
        assert read_image(encode(black.convert("L").convert(mode) if mode != "RGB" else black, "PNG")).size == (41, 39)


def test_an_interlaced_png_is_counted_pass_by_pass():
    # A black one of 5 x 65: tall, so that one column too few in any pass adds up to more than the row that is missing.
    blank = np.zeros((65, 5))
    passes = [blank[::8, ::8], blank[::8, 4::8], blank[4::8, ::4], blank[::4, 2::4], blank[2::4, ::2], blank[::2, 1::2]]
    whole = bytes(sum(len(part) * (1 + part.shape[1]) for part in [*passes, blank[1::2]]))

    def interlaced(raw):
        header = inputs.struct.pack(">IIBBBBB", 5, 65, 8, 0, 0, 0, 1)
        body = inputs.chunk(b"IHDR", header) + inputs.chunk(b"IDAT", inputs.zlib.compress(raw))
        return b"\x89PNG\r\n\x1a\n" + body + inputs.chunk(b"IEND", b"")

    assert read_image(interlaced(whole)).size == (5, 65)
    for missing in (1, 6):
        with pytest.raises(Unreadable, match="damaged"):
            read_image(interlaced(whole[:-missing]))


def test_damage_of_any_kind_gives_a_picture_or_a_reason_and_no_word_on_stderr():
    # In a process of its own: what C libraries write is not seen by pytest. TIFF is left out: libtiff does write.
    script = (
        "import random, sys\n"
        "from common.folder import read_image\n"
        "from common.errors import Unreadable\n"
        "from tests import inputs\n"
        "dice = random.Random(0)\n"
        "files = [d for n, d in inputs.good_pictures().items() if not n.endswith('.tif')]\n"
        "files += [d for n, (d, _) in inputs.bad_pictures().items() if not n.endswith('.tif') and 0 < len(d) < 9000]\n"
        "read = 0\n"
        "for _ in range(1500):\n"
        "    data = bytearray(dice.choice(files))\n"
        "    for _ in range(dice.randint(0, 5)):\n"
        "        data[dice.randrange(len(data))] = dice.randrange(256)\n"
        "    try:\n"
        "        read += read_image(data[: dice.choice([len(data), dice.randrange(len(data))])]).mode == 'RGB'\n"
        "    except Unreadable as error:\n"
        "        assert str(error) and '\\n' not in str(error)\n"
        "print(read)\n"
    )
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "") and 50 < int(run.stdout) < 1400


def test_pictures_are_read_alike_in_threads_and_forks():
    names = [name for name in GOOD if name != "plain.avif"]
    want = [read_image(GOOD[name]).tobytes() for name in names]
    seen = {}
    threads = [
        threading.Thread(target=lambda k=k: seen.update({k: [read_image(GOOD[n]).tobytes() for n in names]}))
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [seen[k] for k in range(4)] == [want] * 4
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert [image.tobytes() for image in pool.map(read_image, [GOOD[name] for name in names])] == want


# ---------------------------------------------------------------------------------------------- picture -> square


def test_sizes_and_crop_are_told_as_sdxl_expects_them():
    assert fit(card(96, 64), 64)[1] == (64, 96, 0, 16, 64, 64)
    assert fit(card(64, 96), 64)[1] == (96, 64, 16, 0, 64, 64)
    assert fit(card(96, 64), 64, flip=True)[1] == (64, 96, 0, 16, 64, 64)
    assert fit(card(192, 128), 64)[1] == (128, 192, 0, 16, 64, 64)


@pytest.mark.parametrize("seed", range(60))
def test_cutting_the_resized_and_flipped_picture_gives_exactly_the_trained_pixels(seed):
    dice = random.Random(seed)
    resolution, short = dice.choice([8, 32, 56]), dice.randint(1, 90)
    size = [short, dice.randint(short, 16 * short)]
    dice.shuffle(size)
    flip, crop = bool(seed % 2), ("center", "random")[seed // 2 % 2]
    image = noise(seed, tuple(size))
    pixels, (height, width, top, left, *target) = fit(image, resolution, crop, flip, np.random.default_rng(seed))
    assert (width, height) == image.size and target == [resolution, resolution]
    # The resized picture: the shorter side is the target, the longer one the nearest whole number, never below.
    ratio = resolution / min(size)
    resized_size = tuple(int(side * ratio + 0.5 + 1e-9) for side in image.size)
    assert min(resized_size) == resolution
    resized = np.asarray(image.resize(resized_size, Image.Resampling.LANCZOS))
    resized = resized[:, ::-1] if flip else resized
    assert 0 <= top <= resized.shape[0] - resolution and 0 <= left <= resized.shape[1] - resolution
    assert (pixels == resized[top : top + resolution, left : left + resolution]).all()
    assert pixels.dtype == np.uint8 and pixels.flags.writeable and pixels.flags.c_contiguous


def test_random_crops_reach_both_ends_and_repeat_with_the_seed():
    picture = card(48, 32)
    lefts = [fit(picture, 8, "random", False, np.random.default_rng(seed))[1][3] for seed in range(100)]
    assert set(lefts) == {0, 1, 2, 3, 4}
    assert lefts == [fit(picture, 8, "random", False, np.random.default_rng(seed))[1][3] for seed in range(100)]


def test_a_strip_is_refused_before_it_fills_the_memory():
    for size in ((2000, 3), (3, 2000), (17, 1)):
        with pytest.raises(Unreadable, match=f"{size[0]} x {size[1]}"):
            fit(Image.new("RGB", size), 1024)
    assert fit(Image.new("RGB", (16, 1)), 64)[0].shape == (64, 64, 3)


# ---------------------------------------------------------------------------------------------- captions


def test_a_text_file_beside_the_image_is_its_caption(tmp_path):
    write(tmp_path, {"b.png": card(), "b.txt": "second", "sub/a.JPG": card(), "sub/a.txt": "third", "a.png": card()})
    write(tmp_path, {"a.txt": "first", "two.dots.png": card(), "two.dots.txt": "dots", "two.txt": "not this"})
    folder = ImageFolder(tmp_path)
    assert samples(folder) == [
        ("a.png", "first"),
        ("b.png", "second"),
        ("sub/a.JPG", "third"),
        ("two.dots.png", "dots"),
    ]
    assert folder.notes == ["caption files without an image, not used: 1 (two.txt)"]
    assert shows_card(folder.image(1))


@pytest.mark.parametrize(
    ("data", "caption", "note"),
    [
        (b"\xef\xbb\xbfa cat\r\n", "a cat", None),
        (b"a cat\r\non a mat\r\n\r\n", "a cat on a mat", None),
        ("ein Kätzchen 一只猫 🐱".encode(), "ein Kätzchen 一只猫 🐱", None),
        ("a cat’s tail".encode("cp1252"), "a cat’s tail", "Windows-1252: 1 (a.txt)"),
        ("a cat".encode("utf-16"), "a cat", "UTF-16: 1 (a.txt)"),
        ("猫と犬".encode()[:-1], "猫と\ufffd", "damaged UTF-8: 1 (a.txt)"),
        (b"a cat\0on a mat", "a cat on a mat", "control characters, which became spaces: 1 (a.txt)"),
        (b"", "", "empty captions: 1 (a.txt)"),
        (b" \r\n\t", "", "empty captions: 1 (a.txt)"),
        (b"word " * 200_000, ("word " * 2000)[:MAX_CAPTION].strip(), "cut there: 1 (a.txt)"),
    ],
)
def test_captions_reach_the_tokenizer_clean_and_what_was_changed_is_told(tmp_path, data, caption, note):
    folder = ImageFolder(write(tmp_path, {"a.png": card(), "a.txt": data}))
    assert folder.caption(0) == caption
    assert len(folder.notes) == bool(note) and (not note or folder.notes[0].endswith(note))


def test_images_without_caption_are_trained_without_and_counted_once(tmp_path):
    folder = ImageFolder(write(tmp_path, {f"{i}.png": card() for i in range(5)} | {"0.txt": "a card"}))
    assert [folder.caption(i) for i in range(5)] == ["a card", "", "", "", ""]
    assert folder.notes == [
        "images without a caption file, trained with the empty caption: 4 (1.png, 2.png, 3.png and 1 more)"
    ]


def test_names_decomposed_by_a_mac_still_find_their_captions(tmp_path):
    folder = ImageFolder(write(tmp_path, {"Caf\u00e9.png": card(), "Cafe\u0301.txt": "a café"}))
    assert samples(folder) == [("Caf\u00e9.png", "a café")] and not folder.notes


# ---------------------------------------------------------------------------------------------- metadata.jsonl


def test_metadata_in_any_editors_spelling_is_read(tmp_path):
    raw = "\ufeff" + "\r\n".join([json.dumps(row("1.png", "one")), "", json.dumps(row(".\\sub\\2.png", "a\u2028b"))])
    write(tmp_path, {"1.png": card(), "sub/2.png": card(), "metadata.jsonl": raw})
    folder = ImageFolder(tmp_path)
    assert samples(folder) == [("1.png", "one"), ("sub/2.png", "a b")] and not folder.notes
    assert shows_card(folder.image(1))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"file_name": "0.png", "text": "cut off', ["not JSON", "column"]),
        ('["0.png", "text"]', ["not an object", "file_name"]),
        ("7", ["not an object"]),
        ('{"image": "0.png", "caption": "x"}', ["caption, image", "expected file_name and text"]),
        ("{}", ["(none)"]),
        ('{"file_name": "0.png", "text": 7}', ['"text" is 7', "string"]),
        ('{"file_name": "0.png", "text": null}', ['"text" is null']),
        ('{"file_name": "0.png", "text": NaN}', ['"text" is NaN']),
        ('{"file_name": ["0.png"], "text": "x"}', ['"file_name" is']),
        ('{"file_name": "", "text": "x"}', ['"file_name" is ""', "no file"]),
        ('{"file_name": "0.png", "text": "a", "text": "b"}', ['"text" stands there twice']),
        ('{"file_name": "0.png", "text": "a", "n": ' + "9" * 5000 + "}", ["digits"]),
        ("[" * 100_000, ["line 2"]),
        (b'{"file_name": "0.png", "text": "caf\xe9"}', ["not UTF-8"]),
        ('{"file_name": "gone.png", "text": "x"}', ["gone.png not found"]),
        ('{"file_name": "train/0.png", "text": "x"}', ["train/0.png not found; 0.png exists"]),
        ('{"file_name": "0.PNG", "text": "x"}', ["0.PNG not found; 0.png exists"]),
        ('{"file_name": "0.png\\u0000", "text": "x"}', ["no file can have that name"]),
        ('{"file_name": "\\ud800.png", "text": "x"}', ["no file can have that name"]),
    ],
)
def test_a_wrong_line_of_metadata_is_told_by_file_and_number(tmp_path, line, words):
    line = line if isinstance(line, bytes) else line.encode()
    write(tmp_path, {"0.png": card(), "metadata.jsonl": lines(row("0.png")).encode() + line + b"\n"})
    message = refusal(tmp_path)
    assert "metadata.jsonl line 2" in message and all(word in message for word in words) and len(message) < 600


def test_a_metadata_file_in_utf_16_is_told(tmp_path):
    write(tmp_path, {"0.png": card(), "metadata.jsonl": lines(row("0.png")).encode("utf-16")})
    assert "save it as UTF-8" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["metadata.json1", "Metadata.jsonl", "metadata.json", "metadata.csv", "train/metadata.jsonl", "captions.txt"],
)
def test_a_misnamed_list_of_captions_is_not_ignored(tmp_path, name):
    message = refusal(write(tmp_path, {"0.png": card(), "1.png": card(), name: lines(row("0.png"))}))
    assert name in message and "Expected metadata.jsonl" in message and "2 images" in message


def test_what_metadata_does_not_list_is_left_out_and_counted(tmp_path):
    write(tmp_path, {"0.png": card(), "1.png": card(), "2.png": card(), "3.png": card(), "3.txt": "x"})
    write(tmp_path, {"metadata.jsonl": lines(row("2.png"), row("0.png"))})
    folder = ImageFolder(tmp_path)
    assert [name for name, _ in samples(folder)] == ["0.png", "2.png"]
    assert folder.notes == [
        "images without a line in metadata.jsonl, left out: 2 (1.png, 3.png)",
        "other files (1 .txt), ignored: 1 (3.txt)",
    ]


def test_an_image_with_two_captions_is_two_samples(tmp_path):
    write(tmp_path, {"0.png": card(), "metadata.jsonl": lines(row("0.png", "z"), row("./0.png", "a"))})
    folder = ImageFolder(tmp_path)
    assert samples(folder) == [("0.png", "z"), ("0.png", "a")]
    assert folder.notes == ["images with several lines in metadata.jsonl, each line a sample: 1 (0.png)"]


def test_an_empty_metadata_file_is_an_error(tmp_path):
    assert "holds no line" in refusal(write(tmp_path, {"0.png": card(), "metadata.jsonl": "\n\n"}))


# ---------------------------------------------------------------------------------------------- nothing from outside


def test_metadata_cannot_reach_outside_of_the_folder(tmp_path):
    write(tmp_path, {"secret.png": card(), "data/0.png": card()})
    outside = ["../secret.png", str(tmp_path / "secret.png"), "..\\secret.png", "a/../../secret.png", "/etc/x.png"]
    names = ["0.png", *outside]
    folder = ImageFolder(write(tmp_path / "data", {"metadata.jsonl": lines(*map(row, names))}))
    assert len(folder) == 6 and any("outside of the folder" in note and ": 5 (" in note for note in folder.notes)
    readable = []
    for index in range(len(folder)):
        try:
            readable.append((folder.name(index), folder.image(index)))
        except Unreadable as error:
            assert "outside" in str(error)
    assert [name for name, _ in readable] == ["0.png"]


def test_an_absolute_path_into_the_folder_is_accepted(tmp_path):
    write(tmp_path, {"sub/0.png": card(), "metadata.jsonl": lines(row(str(tmp_path / "sub/0.png")))})
    assert samples(ImageFolder(tmp_path)) == [("sub/0.png", "a card")]


def test_symlinks_are_followed_inside_and_named_when_they_lead_outside(tmp_path):
    write(tmp_path, {"elsewhere/x.png": card(), "secret.txt": "password", "data/a.png": card(), "data/a.txt": "mine"})
    data = tmp_path / "data"
    links = {"b.png": "a.png", "c.png": "../elsewhere/x.png", "d.png": "gone.png", "more": "../elsewhere", "loop": "."}
    for link, target in links.items():
        (data / link).symlink_to(target)
    (data / "b.txt").symlink_to("../secret.txt")
    folder = ImageFolder(data)
    assert samples(folder) == [("a.png", "mine"), ("b.png", ""), ("c.png", ""), ("d.png", "")]
    assert shows_card(folder.image(1))
    for index, reason in ((2, "outside"), (3, "No such file")):
        with pytest.raises(Unreadable, match=reason):
            folder.image(index)
    told = "\n".join(folder.notes)
    assert "lead outside of the folder, not read: 2 (b.txt, c.png)" in told
    assert "not entered" in told and "loop, more" in told


def test_a_metadata_file_from_elsewhere_is_refused(tmp_path):
    write(tmp_path, {"data/0.png": card(), "list.jsonl": lines(row("0.png"))})
    (tmp_path / "data/metadata.jsonl").symlink_to("../list.jsonl")
    assert "copy the file" in refusal(tmp_path / "data")


def test_a_symlink_to_the_whole_folder_is_as_good_as_the_folder(tmp_path):
    write(tmp_path, {"data/0.png": card(), "data/0.txt": "a card"})
    (tmp_path / "link").symlink_to("data")
    folder = ImageFolder(tmp_path / "link")
    assert samples(folder) == [("0.png", "a card")] and not folder.notes and shows_card(folder.image(0))


# ---------------------------------------------------------------------------------------------- the folder


def test_a_folder_without_images_says_what_is_in_it(tmp_path):
    assert "it is empty" in refusal(tmp_path)
    write(tmp_path, {f"{i}.txt": "x" for i in range(10)} | {"a.heic": "x", "b.heic": "x", "noext": "x"})
    message = refusal(tmp_path)
    assert "no images in" in message and "found 13 files: 10 .txt, 2 .heic, 1 without suffix" in message


def test_a_path_that_is_no_folder_is_told(tmp_path):
    assert "No such file" in refusal(tmp_path / "nowhere")
    assert "is a file" in refusal(write(tmp_path, {"x.png": card()}) / "x.png")


def test_side_files_of_desktops_and_unread_formats_are_told_and_not_trained(tmp_path):
    write(tmp_path, {"0.png": card(), "0.txt": "a card", "._0.png": "AppleDouble", ".DS_Store": "x", "Thumbs.db": "x"})
    write(tmp_path, {"__MACOSX/0.png": card(), ".ipynb_checkpoints/0.png": card()})
    write(tmp_path, {"phone.HEIC": "x", "notes.json": "{}"})
    folder = ImageFolder(tmp_path)
    assert samples(folder) == [("0.png", "a card")]
    told = "\n".join(folder.notes)
    assert "hidden and system files and folders, ignored: 5" in told and "phone.HEIC" in told and "1 .json" in told


def test_names_that_are_no_text_are_trained_and_do_not_garble_the_log(tmp_path):
    odd = [b"line\nbreak.png", b"\xff\xfe.png", "\u202egnp.png".encode(), "ünï 😀.png".encode(), b"back\\slash.png"]
    for name in odd:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(GOOD["plain.png"])
    folder = ImageFolder(tmp_path)
    assert sorted(os.fsencode(folder.name(i)) for i in range(len(folder))) == sorted(odd)
    assert all(shows_card(folder.image(i)) for i in range(len(folder)))
    assert all(note.isprintable() and note.encode() for note in folder.notes)
    assert printable("a\nb\u202e\udcff ü😀") == "a\\nb\\u202e\\udcff ü😀"


def test_pipes_sockets_and_folders_named_like_images_neither_hang_nor_train(tmp_path, alarm):
    write(tmp_path, {"good.png": card(), "good.txt": "a card", "folder.png/inner.png": card()})
    os.mkfifo(tmp_path / "pipe.png")
    os.mkfifo(tmp_path / "good2.txt")
    write(tmp_path, {"good2.png": card()})
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "sock.png"))  # relative: the address may have 107 bytes only
        folder = ImageFolder(tmp_path)
        unread = []
        for index in range(len(folder)):
            try:
                folder.image(index)
            except Unreadable:
                unread.append(folder.name(index))
    assert unread == ["pipe.png", "sock.png"] and folder.name(0) == "folder.png/inner.png"
    assert any("good2.txt" in note and "not a regular file" in note for note in folder.notes)


def test_a_file_that_vanishes_or_may_not_be_read_spoils_one_sample_only(tmp_path, monkeypatch):
    folder = ImageFolder(write(tmp_path, {"a.png": card(), "b.png": card(), "c.png": card()}))
    (tmp_path / "a.png").unlink()
    # Permission bits do not bind root, under whom tests often run: the refusal is played.
    really = os.open

    def refuse(path, *rest, **options):
        if str(path).endswith("b.png"):
            raise PermissionError(13, "Permission denied")
        return really(path, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    for index, reason in ((0, "No such file"), (1, "Permission denied")):
        with pytest.raises(Unreadable, match=reason):
            folder.image(index)
    assert folder.first_readable() == 2


def test_a_subfolder_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    write(tmp_path, {"a.png": card(), "locked/b.png": card()})
    really = os.scandir

    def refuse(path):
        if str(path).rstrip("/").endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return really(path)

    monkeypatch.setattr(os, "scandir", refuse)
    folder = ImageFolder(tmp_path)
    assert len(folder) == 1 and any("Permission denied" in note and "locked" in note for note in folder.notes)


def test_a_folder_in_which_nothing_can_be_read_is_an_error_with_the_first_reason(tmp_path):
    folder = ImageFolder(write(tmp_path, {"a.png": b"", "b.png": b"<html>"}))
    with pytest.raises(UsageError, match=r"none of the 2 images in .* the first: a\.png: an empty file"):
        folder.first_readable()
    write(tmp_path, {"c.png": card()})
    assert ImageFolder(tmp_path).first_readable() == 2


def test_the_order_does_not_depend_on_the_file_system(tmp_path, monkeypatch):
    names = [f"{random.Random(i).random():.6f}.png" for i in range(30)]
    write(tmp_path, {name: b"x" for name in names} | {"sub/" + name: b"x" for name in names})
    first = ImageFolder(tmp_path)
    really = os.scandir

    class Backwards:
        def __init__(self, path):
            self.entries = sorted(really(path), key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return self.entries

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(os, "scandir", Backwards)
    second = ImageFolder(tmp_path)
    assert samples(second) == samples(first) and second.notes == first.notes
    order = [name for name, _ in samples(first)]
    assert order == sorted(order)


def test_strings_give_back_what_they_were_given():
    texts = ["", "a", "ünï 😀", "\udcff undecodable", "x" * 1000, ""]
    kept = Strings(texts)
    assert len(kept) == 6 and [kept[i] for i in range(6)] == texts
    with pytest.raises(IndexError):
        kept[6]


def test_the_corners_of_the_card_differ():
    # The tests above tell nothing if the card looks the same from two sides.
    assert len({RED, GREEN, BLUE, inputs.WHITE}) == 4
    assert not any(shows_card(card().transpose(turn), 60) for turn in inputs.UNDO.values())
