"""One picture: from the bytes of a file to a training square.

    bytes -> picture     read_image(data): upright, opaque 8-bit sRGB, or Unreadable
    picture -> square    fit(image, ...): resized, flipped, cut, with SDXL's time_ids

A picture that is not whole is never trained: Pillow may not fill in what is missing (LOAD_TRUNCATED_IMAGES stays off),
and the two ways in which a decoder fills it in by itself are looked for. What cannot be seen from here: most formats
have no checksum, so a JPEG with a few wrong bytes in its middle decodes, with some wrong blocks, and a progressive one
that ends early but properly decodes coarser. And libtiff prints its own line on standard error for a damaged TIFF.
"""

import contextlib
import io
import logging
import os
import re
import stat
import struct
import warnings
import zlib

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from common.errors import Unreadable
from common.words import printable

MAX_PIXELS = 1 << 28  # 268 megapixels, 16384 x 16384: larger than any camera's, and 3 GiB while it is converted
MAX_ASPECT = 16  # 16:1; a strip of 2000 x 3 resized to 1024 on its shorter side would be 682,667 pixels long
MAX_BYTES = 1 << 30  # of one file
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")

# Pillow is set up once, here, and not touched while pictures are read: workers may be threads or forks. Its size check
# gives way to ours (which names the size), and its remarks on odd files would say less than the reason that we give.
Image.init()
Image.MAX_IMAGE_PIXELS = MAX_PIXELS
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)


# ---------------------------------------------------------------------------------------------- bytes -> picture


def read_bytes(path, most=MAX_BYTES):
    """The whole content of a regular file of at most `most` bytes. Anything else is Unreadable."""
    try:
        # A pipe named x.png would block a plain open() until someone writes to it, that is for ever.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("not a regular file")
            if status.st_size > most:
                raise Unreadable(f"a file of {status.st_size:,} bytes; at most {most:,} are read")
            return file.read(status.st_size)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise Unreadable(getattr(error, "strerror", None) or str(error)) from error


def read_image(source):
    """Encoded bytes, or a path -> PIL RGB picture as a person sees it: upright, opaque, 8 bits, sRGB.

    Animations and other files of many pictures give their first one. The decoder is chosen by content, not by suffix.
    Raises Unreadable with a short reason, and nothing else, whatever the bytes are.
    """
    data = bytes(source) if isinstance(source, bytes | bytearray | memoryview) else read_bytes(source)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            check_size(image.size)
            raw_mode = image.tile[0][3] if image.tile else None
            image.load()
            # The tag is read after load(), which has already turned TIFF, and before conversion, which may drop it.
            turn = _TURNS.get(_orientation(image))
            if image.format in ("JPEG", "MPO", "PNG"):
                _refuse_part_of_a_picture(image, data)
            colour, alpha = _split_alpha(image, raw_mode)
            picture = _over_white(_to_srgb(colour, image.info.get("icc_profile")), alpha)
            return picture.transpose(turn) if turn is not None else picture
    except Unreadable:
        raise
    except Image.DecompressionBombError as error:
        # Pillow's own check, at twice our limit. Its message begins with the number of pixels.
        pixels = int((re.findall(r"\d+", str(error)) or [2 * MAX_PIXELS])[0])
        raise Unreadable(f"{pixels / 1e6:.0f} megapixels; at most {MAX_PIXELS / 1e6:.0f} are read") from error
    except UnidentifiedImageError as error:
        raise Unreadable(_what_it_is(data)) from error
    except Exception as error:
        # Decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, MemoryError … : all mean the same.
        raise Unreadable(f"damaged: {printable(error) or type(error).__name__}") from error


def check_size(size):
    """(width, height) that can be trained on, or Unreadable: no empty picture, no huge one, no strip."""
    width, height = size
    if min(width, height) < 1:
        raise Unreadable(f"{width} x {height} pixels: empty")
    if width * height > MAX_PIXELS:
        raise Unreadable(f"{width} x {height} pixels; at most {MAX_PIXELS / 1e6:.0f} megapixels are read")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise Unreadable(f"{width} x {height} pixels; longer than {MAX_ASPECT}:1")


def _what_it_is(data):
    """Why Pillow knows no decoder for these bytes: the files that people really find under an image's name."""
    head = data[:64].lstrip().lower()
    if not data.strip(b"\0"):
        return "only zero bytes" if data else "an empty file"
    if head.startswith((b"<", b"{", b"[")):
        return "text, not an image (a failed download?)"
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the image: run `git lfs pull`"
    if data[4:8] == b"ftyp" and data[8:12] not in (b"avif", b"avis"):
        return "HEIC or a video: convert it to JPEG or PNG"
    return "not an image, or cut off in its first bytes"


def _refuse_part_of_a_picture(image, data):
    """Unreadable, if the decoder filled in the rest of a JPEG or PNG that ends too early but properly."""
    width, height = image.size
    if image.format == "PNG":
        # Rows that never came are zero. A black last row is rare enough to count what the file really holds.
        last_row = image.crop((0, height - 1, width, height)).tobytes()
        if not any(last_row) and not _png_is_whole(data):
            raise Unreadable("damaged: ends before the last row")
        return
    end = data.find(b"\xff\xd9", _start_of_scan(data))
    if end < 0:  # a download that was given its full length first: zero bytes decode as blocks of nothing
        raise Unreadable("damaged: no end of the picture in the file")
    if image.getpixel((width - 1, height - 1)) in (128, (128, 128, 128)):
        # Blocks that never came are mid-grey. Were they really drawn so, then more data behind them changes nothing.
        longer = io.BytesIO(data[:end] + bytes(range(1, 201)) + data[end:])
        with Image.open(longer, formats=("JPEG",)) as again:
            if again.convert("RGB").tobytes() != image.convert("RGB").tobytes():
                raise Unreadable("damaged: ends before the last block")


def _start_of_scan(data):
    """Position of a JPEG's first SOS marker. Segments before it are skipped: a thumbnail has markers of its own."""
    position = 2
    while data[position : position + 1] == b"\xff" and data[position + 1] != 0xDA:
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return position


def _png_is_whole(data):
    """Do the IDAT chunks of a PNG hold as many bytes as its header promises? Interlaced ones are in 7 pictures."""
    width, height, depth, colour_type, _, _, interlaced = struct.unpack(">IIBBBBB", data[16:29])
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour_type]
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    promised = 0
    for left, top, step_x, step_y in passes if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // step_x), -(-(height - top) // step_y)
        promised += rows * (1 + -(-columns * bits // 8)) if columns > 0 and rows > 0 else 0
    unpack, held, position = zlib.decompressobj(), 0, 8
    while position + 8 <= len(data) and held < promised:
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        if kind == b"IDAT":
            held += len(unpack.decompress(data[position + 8 : position + 8 + length]))
        position += 12 + length
    return held >= promised


# EXIF says how the camera was held; this is the way back.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _orientation(image):
    """The EXIF orientation; 1 (upright) where there is none, or only garbage: the pixels are still good."""
    with contextlib.suppress(Exception):  # whatever a parser can meet in garbage
        value = image.getexif().get(0x0112)
        return value if isinstance(value, int) else 1
    return 1


def _split_alpha(image, raw_mode):
    """Any mode -> (colour picture of 8 bits a channel, alpha [h, w] as mode L, or None where all is opaque)."""
    key = image.info.get("transparency")
    if key is not None and raw_mode in _KEY_SCALE:
        # PNG states its one transparent colour in the file's own depth, and Pillow hands it on unscaled.
        key = tuple(_scaled_key(k, raw_mode) for k in key) if isinstance(key, tuple) else _scaled_key(key, raw_mode)
        image.info["transparency"] = key
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        opaque = None if not isinstance(key, int) else Image.fromarray(np.uint8(255) * (values != key))
        return Image.fromarray(_to_8_bits(values, _white_level(image, values))), opaque
    if image.has_transparency_data:
        both = image.convert("RGBA")
        return both.convert("RGB"), both.getchannel("A")
    return (image if image.mode in ("L", "RGB", "CMYK") else image.convert("RGB")), None


_KEY_SCALE = {"L;2": (85, 1), "L;4": (17, 1), "RGB;16B": (1, 256)}


def _scaled_key(value, raw_mode):
    """One level of a transparent colour, from the depth of the file to 0..255."""
    times, over = _KEY_SCALE[raw_mode]
    return min(255, value * times // over)


def _white_level(image, values):
    """The value that means white in a grey picture [h, w] of more than 8 bits.

    16-bit files say so: 65535. Floats and 32-bit integers do not, so the range in use decides: white is the first of 1,
    255, 65535 that nothing exceeds by more than 1 %. Beyond that, below zero, or with NaN any picture would be a guess.
    """
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
        return 65535
    low, high = values.min(), values.max()
    white = next((white for white in (1, 255, 65535) if high <= 1.01 * white), None)
    if white is None or low < -0.01 * white:
        raise Unreadable(f"grey values from {low:g} to {high:g}, no known white: save it with 8 or 16 bits")
    return white


def _to_8_bits(values, white):
    """Grey [h, w] of any type, 0..white -> uint8 [h, w], rounded: 65535 becomes 255, 32768 becomes 128."""
    scaled = values.astype(np.float32)
    scaled *= 255 / white
    scaled += 0.5
    return scaled.clip(0, 255, out=scaled).astype(np.uint8)


# 64 colours on which a profile shows whether it is sRGB under some name or other.
_CHART = Image.fromarray(np.stack(np.meshgrid(*[np.uint8([0, 85, 170, 255])] * 3), -1).reshape(8, 8, 3))


def _to_srgb(colour, profile):
    """L, RGB or CMYK picture with its embedded ICC profile (bytes or None) -> RGB picture in sRGB.

    Phones write Display P3 and some cameras Adobe RGB: without conversion their colours are trained pale. A profile
    that is broken or belongs to another kind of picture is ignored, as browsers do.
    """
    if profile:
        try:
            transform = ImageCms.buildTransform(
                ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB"), colour.mode, "RGB"
            )
            if colour.mode != "RGB" or _changes(transform, _CHART):
                return ImageCms.applyTransform(colour, transform)
        except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
            pass
    return colour.convert("RGB")


def _changes(transform, chart):
    """Does the transform move any colour by more than rounding does?"""
    after = np.asarray(ImageCms.applyTransform(chart, transform), np.int16)
    return np.abs(after - np.asarray(chart, np.int16)).max() > 2


def _over_white(picture, alpha):
    """RGB and alpha -> RGB over white. What the file hides under full transparency is never seen."""
    if alpha is None:
        return picture
    sheet = Image.new("RGB", picture.size, "white")
    sheet.paste(picture, mask=alpha)
    return sheet


# ---------------------------------------------------------------------------------------------- picture -> square


def fit(image, resolution, crop="center", flip=False, rng=None):
    """PIL RGB picture -> (uint8 [resolution, resolution, 3], time_ids), by Lanczos.

        original h x w --shorter side to `resolution`--> h' x w' --mirrored, if flip--> --cut at (top, left)--> square

    time_ids = (h, w, top, left, resolution, resolution), SDXL's size and crop conditioning (Podell et al. 2023, section
    2.2) in its order: of the original, of the cut in the resized *and mirrored* picture, of the target. The longer side
    is rounded to the nearest pixel. With crop "random", `rng` (numpy Generator) gives top, then left.
    """
    check_size(image.size)
    width, height = image.size
    short = min(width, height)
    wide, high = ((2 * side * resolution + short) // (2 * short) for side in (width, height))
    resized = image.resize((wide, high), Image.Resampling.LANCZOS)
    if flip:
        resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if crop == "random":
        top, left = (int(rng.integers(room + 1)) for room in (high - resolution, wide - resolution))
    else:
        top, left = (high - resolution) // 2, (wide - resolution) // 2
    square = resized.crop((left, top, left + resolution, top + resolution))
    return np.array(square), (height, width, top, left, resolution, resolution)
