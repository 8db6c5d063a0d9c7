"""The embedded data set `shapes`: captioned pictures drawn as a function of their index, and their examiner.

48 captions = 6 colours x 4 shapes x 2 sizes, "a large red star". A picture is 64x64 RGB, one object on an off-white
ground. Place, exact size and exact tint vary; the caption says all that matters. Because the pictures follow rules,
the same rules can examine what a trained model draws: `matches` says whether a picture shows what its caption says.
"""

from functools import cache
from itertools import product

import numpy as np
from PIL import Image, ImageDraw

SIDE = 64  # pixels
COLOURS = {
    "red": (214, 39, 40),
    "orange": (242, 125, 20),
    "yellow": (246, 214, 40),
    "green": (44, 160, 70),
    "blue": (40, 95, 210),
    "purple": (142, 62, 172),
}
# Radii in pixels of a shape of unit size, see `outline`. The gap between the two ranges is wider than either range.
SIZES = {"small": (10.0, 12.0), "large": (18.0, 21.0)}
SHAPES = ("circle", "square", "triangle", "star")
CAPTIONS = tuple(f"a {size} {colour} {shape}" for size, colour, shape in product(SIZES, COLOURS, SHAPES))

GROUND = (246, 244, 239)
TINT = 5  # largest change of a colour channel of the object, and of the brightness of the ground
MARGIN = 2  # pixels that always stay free at the border
SUPERSAMPLE = 4
STREAM = 20_240_817  # keeps these random numbers apart from everyone else's

# What the examiner demands. A pixel belongs to an object when a channel differs this much from the ground;
MIN_CONTRAST = 64
# fewer such pixels together are a speck, not an object (the smallest true one has about 200);
MIN_AREA = 16
# the nearest colour gives the name, unless even that is this far away: grey, brown, black are no colour of ours;
MAX_TINT = 64
# and the ideal shape laid over the object must cover it this well (intersection over union).
MIN_FIT = 0.75


def outline(shape):
    """Corners of the shape of unit size round the origin, [n, 2] in (x, y), y downwards; `None` means a circle.

    The four are scaled so that they look equally large: a star reaches further out than a square.
    """
    if shape == "circle":
        return None
    if shape == "square":
        return 0.86 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])
    corners = {"triangle": 3, "star": 10}[shape]
    turn = 2 * np.pi * np.arange(corners) / corners
    reach = np.where(np.arange(corners) % 2, 0.45, 1.0) if shape == "star" else 1.0
    return 1.22 * np.stack([reach * np.sin(turn), -reach * np.cos(turn)], axis=1)


def extent(shape):
    """How far the shape of unit size reaches to the left, up, right and down of its centre: (x0, y0, x1, y1)."""
    points = outline(shape)
    if points is None:
        return -0.95, -0.95, 0.95, 0.95
    return (*points.min(axis=0), *points.max(axis=0))


def coverage(shape, x, y, radius):
    """Share of each pixel that the shape covers, float [64, 64] in 0..1."""
    canvas = Image.new("L", (SIDE * SUPERSAMPLE, SIDE * SUPERSAMPLE))
    draw, points = ImageDraw.Draw(canvas), outline(shape)
    # Pillow counts the centre of pixel 0 as 0, we count its left edge as 0.
    centre = np.array([x, y]) * SUPERSAMPLE - 0.5
    if points is None:
        reach = extent(shape)[2] * radius * SUPERSAMPLE
        draw.ellipse([*(centre - reach), *(centre + reach)], fill=255)
    else:
        draw.polygon([tuple(p) for p in centre + points * radius * SUPERSAMPLE], fill=255)
    return np.asarray(canvas.reduce(SUPERSAMPLE), dtype=np.float32) / 255


class Shapes:
    """Pictures `first` … `first + count - 1` of an endless series; any 48 neighbours show every caption once."""

    def __init__(self, count, first=0):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    @staticmethod
    def captions():
        """All 48 captions."""
        return list(CAPTIONS)

    def index(self, i):
        """Position in the endless series of this source's i-th picture."""
        if not 0 <= i < self.count:
            raise IndexError(f"picture {i} of {self.count}")
        return self.first + i

    def name(self, i):
        """Name of the i-th picture, the same wherever this source begins."""
        return f"shapes/{self.index(i):06d}"

    def caption(self, i):
        """Caption of the i-th picture."""
        return CAPTIONS[self.index(i) % len(CAPTIONS)]

    def image(self, i):
        """The i-th picture, RGB 64x64."""
        _, size, colour, shape = self.caption(i).split()
        rng = np.random.default_rng([STREAM, self.index(i)])
        radius = rng.uniform(*SIZES[size])
        x0, y0, x1, y1 = (radius * e for e in extent(shape))
        x = rng.uniform(MARGIN - x0, SIDE - MARGIN - x1)
        y = rng.uniform(MARGIN - y0, SIDE - MARGIN - y1)
        ground = np.array(GROUND) + rng.integers(-TINT, TINT + 1)
        paint = np.array(COLOURS[colour]) + rng.integers(-TINT, TINT + 1, 3)
        share = coverage(shape, x, y, radius)[..., None]
        return Image.fromarray(np.rint(ground + share * (paint - ground)).astype(np.uint8))


@cache
def unit_area(shape):
    """Area of the shape of unit size, from its drawing."""
    return coverage(shape, SIDE / 2, SIDE / 2, 20.0).sum() / 20.0**2


def neighbours(grid):
    """The grid moved by one pixel up, down, left and right, and itself: [5, H, W]; zero comes in at the border."""
    padded = np.pad(grid, 1)
    return np.stack([grid, padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]])


def objects(mask):
    """Connected parts of a bool [H, W] mask with at least MIN_AREA pixels, largest first, each a bool [H, W]."""
    # Every pixel starts with a label of its own and takes over the largest among its neighbours until all is quiet.
    labels = np.arange(1, mask.size + 1).reshape(mask.shape) * mask
    while True:
        spread = neighbours(labels).max(axis=0) * mask
        if (spread == labels).all():
            break
        labels = spread
    numbers, areas = np.unique(labels[mask], return_counts=True)
    order = np.argsort(-areas, kind="stable")
    return [labels == numbers[k] for k in order if areas[k] >= MIN_AREA]


def nearest_colour(paint):
    """Name of the colour nearest to an RGB triple, or None if all are far."""
    distance = {name: np.linalg.norm(paint - np.array(rgb)) for name, rgb in COLOURS.items()}
    name = min(distance, key=distance.get)
    return name if distance[name] <= MAX_TINT else None


def best_shape(share):
    """The shape that fits an object's coverage [64, 64] best: (name, its radius in pixels, intersection over union)."""
    area = share.sum()
    y, x = (np.indices(share.shape) + 0.5).reshape(2, -1) @ share.ravel() / area
    fits = []
    for shape in SHAPES:
        # Centre and area of the object determine the ideal drawing; only its outline is then compared.
        radius = np.sqrt(area / unit_area(shape))
        ideal = coverage(shape, x, y, radius)
        fits.append((np.minimum(ideal, share).sum() / np.maximum(ideal, share).sum(), shape, radius))
    fit, shape, radius = max(fits)
    return shape, float(radius), float(fit)


def score(image):
    """What a picture shows: {"count", "colour", "shape", "size", "fit"}, of the largest object; None = not to be said.

    image: PIL RGB 64x64. No learnt part, no randomness: ground from the border, objects by contrast, colour from the
    object's inside, shape by laying the four ideal ones over it, size from the radius of the one that fits.
    """
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ground = np.median(border, axis=0)
    found = objects(np.abs(pixels - ground).max(axis=-1) > MIN_CONTRAST)
    verdict = {"count": len(found), "colour": None, "shape": None, "size": None, "fit": 0.0}
    if not found:
        return verdict
    inside = neighbours(found[0]).all(axis=0)
    paint = np.median(pixels[inside if inside.any() else found[0]], axis=0)
    verdict["colour"] = nearest_colour(paint)
    # Mixed pixels at the rim count by their mixture. Two pixels round the object hold all of its rim.
    around = neighbours(neighbours(found[0]).any(axis=0)).any(axis=0)
    share = np.clip((pixels - ground) @ (paint - ground) / np.sum((paint - ground) ** 2), 0, 1) * around
    shape, radius, verdict["fit"] = best_shape(share)
    if verdict["fit"] >= MIN_FIT:
        verdict["shape"] = shape
        verdict["size"] = "small" if radius < (SIZES["small"][1] * SIZES["large"][0]) ** 0.5 else "large"
    return verdict


def matches(image, caption):
    """Which parts of a caption the picture shows: bools for "colour", "shape", "size", "count" and "all" of them."""
    _, size, colour, shape = caption.split()
    seen = score(image)
    right = {
        "colour": seen["colour"] == colour,
        "shape": seen["shape"] == shape,
        "size": seen["size"] == size,
        "count": seen["count"] == 1,
    }
    return {**right, "all": all(right.values())}
