"""Pictures and folders as people really have them, made on the spot: no file of this kind is stored with the project.

`good_pictures()` gives {file name: bytes}: all show the same test card, whatever their mode, format or orientation.
`bad_pictures()` gives {file name: (bytes, a piece of the reason)}: all must be refused.

The card has one colour in each corner, so that any turn, mirroring, channel swap or cut is seen:

        red    | green
        -------+-------      48 wide, 32 high
        blue   | white
"""

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageCms

RED, GREEN, BLUE, WHITE = (220, 40, 30), (30, 190, 50), (40, 30, 210), (245, 245, 245)
HIDDEN = (255, 0, 255)  # what lies under full transparency in the pictures that have any; must never be seen
UNDO = {  # how the pixels must lie in the file, so that a viewer which follows the tag shows the card
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def card(width=48, height=32):
    """The test card as PIL RGB."""
    pixels = np.empty((height, width, 3), np.uint8)
    top, left = height // 2, width // 2
    pixels[:top, :left], pixels[:top, left:], pixels[top:, :left], pixels[top:, left:] = RED, GREEN, BLUE, WHITE
    return Image.fromarray(pixels)


def shows_card(image, tolerance=3):
    """Does each quarter of the picture have the colour that it has on the card?"""
    width, height = image.size
    spots = {(1, 1): RED, (3, 1): GREEN, (1, 3): BLUE, (3, 3): WHITE}
    seen = [(image.getpixel((width * x // 4, height * y // 4)), want) for (x, y), want in spots.items()]
    return image.mode == "RGB" and all(
        abs(a - b) <= tolerance for got, want in seen for a, b in zip(got, want, strict=True)
    )


def encode(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png(width, height, depth, colour_type, rows, extra=b""):
    """A PNG put together by hand, for what Pillow does not write; `extra` stands between header and pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def noise(seed, size=(40, 40)):
    """RGB noise: it does not compress, so that a cut anywhere loses pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


# ---------------------------------------------------------------------------------------------- pictures of the card


def good_pictures():
    """{file name: bytes} of the card in every way that a person might have it."""
    return {**_formats(), **_turned(), **_transparent(), **_modes(), **_wrapped()}


def _formats():
    plain = card()
    lossless = {
        "plain.png": "PNG",
        "plain.bmp": "BMP",
        "plain.tif": "TIFF",
        "plain.ppm": "PPM",
        "plain.jp2": "JPEG2000",
    }
    made = {name: encode(plain, format) for name, format in lossless.items()}
    made["plain.gif"] = encode(plain, "GIF")
    made["plain.jpg"] = encode(plain, "JPEG", quality=95)
    made["progressive.JPEG"] = encode(plain, "JPEG", quality=95, progressive=True)
    made["plain.webp"] = encode(plain, "WEBP", lossless=True)
    made["plain.avif"] = encode(plain, "AVIF", quality=95)
    made["square.ico"] = encode(card(32, 32), "ICO", sizes=[(16, 16), (32, 32)])
    made["png inside.jpg"] = made["plain.png"]
    return made


def _turned():
    made = {f"turned{o}.jpg": encode(card().transpose(UNDO[o]), "JPEG", quality=95, exif=exif(o)) for o in UNDO}
    sideways = card().transpose(UNDO[6])
    made["turned6.png"] = encode(sideways, "PNG", exif=exif(6))
    made["turned6.webp"] = encode(sideways, "WEBP", lossless=True, exif=exif(6))
    made["turned6.tif"] = encode(sideways, "TIFF", exif=exif(6))
    made["turned6.avif"] = encode(sideways, "AVIF", quality=95, exif=exif(6))
    made["turned6_grey_alpha.png"] = encode(sideways.convert("RGBA"), "PNG", exif=exif(6))
    for name, value in {"zero": 0, "nine": 9, "huge": 65535}.items():
        made[f"turned_{name}.jpg"] = encode(card(), "JPEG", quality=95, exif=exif(value))
    made["broken_exif.jpg"] = encode(card(), "JPEG", quality=95, exif=b"Exif\0\0II*\0\xf0\xff\xff\x7f" + b"\x33" * 30)
    made["exif_text.jpg"] = encode(card(), "JPEG", quality=95, exif=b"Exif\0\0no tags at all")
    return made


def _transparent():
    """The card where its white quarter is a hole with HIDDEN under it."""
    hole = card().convert("RGBA")
    hole.paste((*HIDDEN, 0), (24, 16, 48, 32))
    flat = hole.convert("RGB")
    made = {"hole.png": encode(hole, "PNG"), "hole.webp": encode(hole, "WEBP", lossless=True, exact=True)}
    made["hole.tif"] = encode(hole, "TIFF")
    made["hole.avif"] = encode(hole, "AVIF", quality=95)
    made["key.png"] = encode(flat, "PNG", transparency=HIDDEN)
    table = Image.new("P", (48, 32), 3)
    table.putpalette([*RED, *GREEN, *BLUE, *HIDDEN])
    for index, quarter in enumerate([(0, 0, 24, 16), (24, 0, 48, 16), (0, 16, 24, 32)]):
        table.paste(index, quarter)
    made["palette_hole.png"] = encode(table, "PNG", transparency=3)
    made["palette_alphas.png"] = encode(table, "PNG", transparency=b"\xff\xff\xff\x00")
    made["palette_hole.gif"] = encode(table, "GIF", transparency=3)
    made["moving.gif"] = encode(
        table, "GIF", transparency=3, save_all=True, append_images=[Image.new("P", (48, 32))] * 2
    )
    # 16 bits, of which the lower 8 are not a repetition of the upper ones.
    wide = np.asarray(flat).astype(">u2") * 256 + 7
    key = struct.pack(">HHH", *(v * 256 + 7 for v in HIDDEN))
    made["key16.png"] = png(48, 32, 16, 2, [row.tobytes() for row in wide.astype(">u2")], chunk(b"tRNS", key))
    return made


def _modes():
    made = {"palette.png": encode(card().quantize(16), "PNG")}
    wide = (np.asarray(card()).astype(np.uint32) * 257).astype(">u2")
    made["rgb16.png"] = png(48, 32, 16, 2, [row.tobytes() for row in wide])
    lab = ImageCms.profileToProfile(
        card(), ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    made["lab.tif"] = encode(lab, "TIFF")
    made["cmyk.jpg"] = encode(card().convert("CMYK"), "JPEG", quality=95)
    made["cmyk.tif"] = encode(card().convert("CMYK"), "TIFF")
    made["ycbcr.tif"] = encode(card().convert("YCbCr"), "TIFF")
    return made


def _wrapped():
    """The card, and beside it in the file something else."""
    other = Image.new("RGB", (48, 32), HIDDEN)
    jpeg, plain_png = encode(card(), "JPEG", quality=95), encode(card(), "PNG")
    made = {"two_pages.tif": encode(card(), "TIFF", save_all=True, append_images=[other])}
    made["moving.webp"] = encode(card(), "WEBP", lossless=True, save_all=True, append_images=[other], duration=50)
    made["moving.png"] = encode(card(), "PNG", save_all=True, append_images=[other], duration=50)
    made["two_views.mpo"] = encode(card(), "MPO", quality=95, save_all=True, append_images=[other])
    made["junk behind.jpg"] = jpeg + b"\0" * 500 + b"<html>"
    made["junk behind.png"] = plain_png + b"\xff" * 500
    made["srgb_profile.png"] = encode(card(), "PNG", icc_profile=srgb_profile())
    made["broken_profile.png"] = encode(card(), "PNG", icc_profile=srgb_profile()[:200])
    made["no_profile_at_all.jpg"] = encode(card(), "JPEG", quality=95, icc_profile=b"not a profile")
    made["strangers_profile.jpg"] = encode(card().convert("CMYK"), "JPEG", quality=95, icc_profile=srgb_profile())
    return made


def srgb_profile():
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def nearly_srgb_profile():
    """sRGB as another maker rounds it: following it would move some colours by one level."""
    data = bytearray(srgb_profile())
    entry = data.index(b"rXYZ")
    red = struct.unpack(">I", data[entry + 4 : entry + 8])[0] + 8
    data[red : red + 4] = struct.pack(">I", struct.unpack(">I", data[red : red + 4])[0] + 60)
    return bytes(data)


def swapped_profile():
    """sRGB's profile with its red and green primaries exchanged: a picture that carries it looks swapped without it."""
    data = bytearray(srgb_profile())
    count = struct.unpack(">I", data[128:132])[0]
    entries = {bytes(data[132 + 12 * i : 136 + 12 * i]): 132 + 12 * i for i in range(count)}
    red, green = entries[b"rXYZ"], entries[b"gXYZ"]
    data[red + 4 : red + 12], data[green + 4 : green + 12] = data[green + 4 : green + 12], data[red + 4 : red + 12]
    return bytes(data)


# -------------------------------------------------------------------------------------------- files that are no picture


def bad_pictures():
    """{file name: (bytes, a piece of the reason)} of what must never be trained, not even half of it."""
    full = {
        "jpg": encode(noise(0), "JPEG", quality=90),
        "progressive.jpg": encode(noise(0), "JPEG", quality=90, progressive=True),
        "png": encode(noise(0), "PNG"),
        "webp": encode(noise(0), "WEBP", lossless=True),
        "gif": encode(noise(0), "GIF"),
        "bmp": encode(noise(0), "BMP"),
        "tif": encode(noise(0), "TIFF"),
        "lzw.tif": encode(noise(0), "TIFF", compression="tiff_lzw"),
        "avif": encode(noise(0), "AVIF", quality=95),
        "jp2": encode(noise(0), "JPEG2000"),
        "ppm": encode(noise(0), "PPM"),
    }
    made = {f"half.{suffix}": (data[: len(data) // 2], "") for suffix, data in full.items()}
    made |= {f"head.{suffix}": (data[:20], "") for suffix, data in full.items()}
    flipped = bytearray(full["png"])
    flipped[len(flipped) // 2] ^= 0x10
    made["one_bit.png"] = (bytes(flipped), "damaged")
    made["few_bytes.jpg"] = (full["jpg"][: len(full["jpg"]) // 2] + b"\xff\xd9", "ends before")
    made["zero_tail.jpg"] = (full["jpg"][: len(full["jpg"]) // 2] + bytes(len(full["jpg"])), "no end")
    made["few_rows.png"] = (png(40, 40, 8, 2, [b"\x80" * 120] * 20), "ends before")
    made["empty.jpg"] = (b"", "empty file")
    made["zeros.png"] = (b"\0" * 3000, "only zero bytes")
    made["not_found.jpg"] = (b"\n<html><head><title>404 Not Found</title>", "text")
    made["denied.png"] = (b'{"error": "rate limit"}', "text")
    made["pointer.png"] = (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git lfs pull")
    made["iphone.jpg"] = (b"\0\0\0\x24ftypheic\0\0\0\0mif1heic" + b"\0" * 40, "HEIC")
    made["words.png"] = (b"just some words", "not an image")
    made["bomb.png"] = (png(30000, 20000, 1, 0, [bytes(3750)] * 9), "600 megapixels")
    made["large.png"] = (png(20000, 20000, 1, 0, [bytes(2500)] * 9), "20000 x 20000")
    made["strip.png"] = (encode(Image.new("RGB", (1700, 100)), "PNG"), "1700 x 100")
    made["nowhere.png"] = (png(0, 5, 8, 2, []), "")
    made["text_bomb.png"] = (
        png(8, 8, 8, 0, [bytes(8)] * 8, chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(1 << 23)))),
        "damaged",
    )
    nan = np.full((8, 8), np.nan, np.float32)
    made["nan.tif"] = (encode(Image.fromarray(nan), "TIFF"), "no known white")
    made["radar.tif"] = (encode(Image.fromarray(np.full((8, 8), -9999, np.int32)), "TIFF"), "no known white")
    return made


# ---------------------------------------------------------------------------------------------- folders


def write(folder, files):
    """Write {name: bytes, str or PIL image}; returns the folder. Names may hold slashes."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Image.Image):
            content = encode(content, "PNG")
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder
