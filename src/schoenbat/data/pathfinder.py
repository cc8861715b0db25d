"""Pathfinder-32: does one dashed line join the two circles? Drawn by the rules of the Long Range Arena.

Two snakes of 14 dashes begin near the middle of the image, 7 pixels apart, and grow in turns; up to five
distractors of 4 dashes follow. One circle marks the first dash of a snake, the other the last dash of the
same snake (label 1) or of the other one (label 0). The rules are those of Linsley et al., "Learning
long-range spatial dependencies with horizontal gated recurrent units" (2018), and of their generator:

- A dash is 2 pixels long and has a margin of 1 pixel, which later dashes must not enter. The margin of a
  snake's last dash counts from the moment at which the snake has a next one.
- A dash continues the last one across a gap, up to a point (the pivot) from which it turns: it ends on one of
  the pixels about 3 away from the pivot, drawn in proportion to cos² of the turn (0 from 90° on) and to how
  free of margins the pixel and its neighbours are. After three dashes that enter a margin a snake is stuck.
- If one of the two snakes is stuck, both are drawn anew. A distractor is left out after five failures.
- All is drawn at twice the resolution and shrunk by a Lanczos filter. Target snakes have 3/4 of the contrast
  of distractors, circles 1/2; the brightest pixel of an image becomes 255.

Here many images grow at the same time: each array holds one step of all of them.
"""

import itertools
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from schoenbat.data.arrays import Arrays, consecutive
from schoenbat.data.progress import Step, silent
from schoenbat.data.workers import blocks_in_order
from schoenbat.options import check_count

SIZE = 32
TARGET_LENGTH = 14
DISTRACTOR_LENGTH = 4
NUM_DISTRACTORS = 5
SEED_DISTANCE = 7
DASH_LENGTH = 2
MARGIN = 1
MARKER_RADIUS = 1.5
ANTIALIAS = 2
TARGET_CONTRAST = 1.5
DISTRACTOR_CONTRAST = 2.0
DASH_TRIALS = 3
DISTRACTOR_TRIALS = 5
IMAGES_PER_BLOCK = 512
# One attempt in 23 succeeds; this many fit into a processor's cache.
ATTEMPTS_PER_ROUND = 1024
SPLIT_SIZES = {"train": 160_000, "validation": 20_000, "test": 20_000}

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Grey = NDArray[np.uint8]

# A stamp is the picture of a dash with one of its ends in the middle. A canvas is an image with a frame
# around it that is as wide as half a stamp, so that no stamp has to be cut.
_FRAME = DASH_LENGTH + MARGIN + 1
_STAMP = 2 * _FRAME + 1
_CANVAS = SIZE + 2 * _FRAME
_INSIDE = slice(_FRAME, _FRAME + SIZE)

# Margins are grey because they are shrunk: two overlap where they add up to 1.8, a pixel is free up to 0.3.
_OVERLAP = 459
_FREE = 76


def generate(count: int, seed: int, *, workers: int = 1, on_progress: Step = silent) -> tuple[Grey, Integers]:
    """Draw images and their labels, the same on every machine.

    Args:
        count: how many images.
        seed: what they are drawn from, 0 or more.
        workers: how many processes draw; the images do not depend on it.
        on_progress: told how many images there are, now and then.

    Returns:
        images ``(count, 32, 32)`` and labels ``(count,)``, 1 where a snake joins the two circles, else 0.

    >>> images, labels = generate(4, seed=0)
    >>> images.shape, int(images.max()), labels.tolist()
    ((4, 32, 32), 255, [1, 1, 1, 0])
    """
    for name, value, least in (("count", count, 0), ("seed", seed, 0), ("workers", workers, 1)):
        check_count(name, value, least)
    images = np.zeros((count, SIZE, SIZE), dtype=np.uint8)
    labels = np.zeros(count, dtype=np.int64)
    starts = range(0, count, IMAGES_PER_BLOCK)
    blocks = blocks_in_order(partial(_block, seed), range(len(starts)), workers)
    for start, (some, their_labels) in zip(starts, blocks, strict=True):
        rows = slice(start, min(start + IMAGES_PER_BLOCK, count))
        images[rows] = some[: rows.stop - start]
        labels[rows] = their_labels[: rows.stop - start]
        on_progress(rows.stop, count)
    return images, labels


def splits(*, workers: int = 1, on_progress: Step = silent) -> Arrays:
    """The task of the Long Range Arena: one stream of images, first train, then validation, then test."""
    count = sum(SPLIT_SIZES.values())
    images, labels = generate(count, 0, workers=workers, on_progress=on_progress)
    return consecutive(images.reshape(count, SIZE**2), np.full(count, SIZE**2), labels, SPLIT_SIZES)


def _block(seed: int, index: int) -> tuple[Grey, Integers]:
    """The images and labels of one block."""
    targets, distractors, circles, labels = _scenes(seed, index)
    return _render(targets, distractors, circles), labels


def _scenes(seed: int, index: int) -> tuple[Integers, Integers, Integers, Integers]:
    """What the images of one block show; each block has a random generator of its own.

    A dash is a row, a column and a direction (a row of the tables below).

    Returns:
        the dashes of the target snakes ``(n, 2, 14, 3)`` and of the distractors ``(n, 5, 4, 3)``, the
        centres of the circles ``(n, 2, 2)`` and the labels ``(n,)``.
    """
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(index,))))
    targets, margins = _targets(rng)
    distractors = _distractors(rng, margins)
    labels, first = _integers(rng, 2, (2, IMAGES_PER_BLOCK))
    second = np.where(labels == 1, first, 1 - first)
    images = np.arange(IMAGES_PER_BLOCK)
    circles = np.stack([targets[images, first, 0, :2], targets[images, second, -1, :2]], axis=1)
    return targets, distractors, circles, labels


def _integers(rng: np.random.Generator, bound: int | Integers, shape: int | tuple[int, ...]) -> Integers:
    """Integers from 0 to below `bound`, made of uniform fractions, the simplest stream that NumPy has."""
    return (rng.random(shape) * bound).astype(np.int64)


def _unit(angles: Floats) -> Floats:
    """Rows and columns of the unit vectors of some angles."""
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1)


# The directions: first the whole degrees from -180° on, which a snake can begin with, then the turns from a
# pivot to the pixels around it, which it goes on with.
_DEGREES = 360
_REACH = DASH_LENGTH + MARGIN
_TURNS = np.unique(np.floor(_REACH * _unit(np.arange(0, 2 * np.pi, 1 / _REACH))), axis=0).astype(np.int64)
_ANGLES = np.concatenate([np.deg2rad(np.arange(-180, 180)), np.arctan2(_TURNS[:, 0], _TURNS[:, 1])])
_NO_DASH = len(_ANGLES)

# How probable each turn is after each direction, in integers, the sums of which are exact.
_WEIGHTS = np.rint(2**16 * np.cos(_ANGLES[:, None] - _ANGLES[_DEGREES:]).clip(0) ** 2).astype(np.int32)
_LEAST_WEIGHT = 2**16 * 255 // 10_000

# From the beginning of a first dash to its pivot: to its end, and back by the dash and its margin.
_FIRST_PIVOT = np.ceil(
    np.ceil((DASH_LENGTH * _unit(_ANGLES)).round(9)) - (_REACH * _unit(_ANGLES)).round(9)
).astype(np.int64)

# From a pivot to the next one, to be rounded up. Close to the left and the upper edge, where floating point
# resolves that cos π/2 and sin π are not quite 0, a snake along an axis is thus shifted by a pixel, which the
# look of the images depends on. No other direction may depend on an error that differs between machines.
_ADVANCE = (DASH_LENGTH + 2 * MARGIN) * _unit(_ANGLES)
_ADVANCE[:_DEGREES] = _ADVANCE[:_DEGREES].round(9)

# The original searches for room for a first dash with a mask that hangs over the edge of the image, and so
# finds none, in all but 30 directions, which point to the upper left. In these it asks for a pixel that is
# free, as is the next one to the lower right and, in the first 12 of them, the next one to the left.
_FIRST_DIRECTION = 30
_NUM_DIRECTIONS = 30
_FIRST_STEEP = 42


def _targets(rng: np.random.Generator) -> tuple[Integers, Grey]:
    """The two snakes of each image of a block, and their margins."""
    found: list[tuple[Integers, Grey]] = []
    while sum(len(dashes) for dashes, _ in found) < IMAGES_PER_BLOCK:
        margins = np.zeros((ATTEMPTS_PER_ROUND, _CANVAS, _CANVAS), dtype=np.uint8)
        margins[:, _INSIDE, _INSIDE] = 255
        margins[:, _FRAME + 1 : -_FRAME - 1, _FRAME + 1 : -_FRAME - 1] = 0
        _, dashes, margins = _grow(rng, margins, _two_first_dashes(rng), TARGET_LENGTH)
        found.append((dashes, margins))
    dashes, margins = (np.concatenate(parts)[:IMAGES_PER_BLOCK] for parts in zip(*found, strict=True))
    return dashes, margins


def _two_first_dashes(rng: np.random.Generator) -> Integers:
    """Where two snakes begin: one in the middle, one in any direction on a circle around it."""
    n = ATTEMPTS_PER_ROUND
    direction = _FIRST_DIRECTION + _integers(rng, _NUM_DIRECTIONS, n)
    flat = direction < _FIRST_STEEP
    corner = 2 * SEED_DISTANCE
    room = SIZE - 2 * corner - 1
    row = corner + _integers(rng, room, n)
    column = corner + flat + _integers(rng, room - flat, n)
    away = (SEED_DISTANCE * _unit(_ANGLES[_integers(rng, _DEGREES, n)])).round(9)
    second_row, second_column = np.rint(np.stack([row, column]) + away.T).astype(np.int64)
    second = second_row, second_column, _integers(rng, _DEGREES, n)
    return np.stack([np.stack([row, column, direction], -1), np.stack(second, -1)], axis=1)


def _distractors(rng: np.random.Generator, margins: Grey) -> Integers:
    """The distractors of each image, whose margins are added to the others; a missing one has no dashes."""
    distractors = np.zeros((len(margins), NUM_DISTRACTORS, DISTRACTOR_LENGTH, 3), dtype=np.int64)
    distractors[..., 2] = _NO_DASH
    for snake in range(NUM_DISTRACTORS):
        missing = np.ones(len(margins), dtype=bool)
        for _ in range(DISTRACTOR_TRIALS):
            lucky = _integers(rng, _DEGREES, len(margins)) < _NUM_DIRECTIONS
            images, dashes = _first_dashes(rng, margins, np.flatnonzero(missing & lucky))
            grown, dashes, grown_margins = _grow(rng, margins[images], dashes[:, None], DISTRACTOR_LENGTH)
            images = images[grown]
            distractors[images, snake] = dashes[:, 0]
            margins[images] = grown_margins
            missing[images] = False
    return distractors


def _first_dashes(rng: np.random.Generator, margins: Grey, images: Integers) -> tuple[Integers, Integers]:
    """For those of the images that have room, a dash to begin a distractor with."""
    direction = _FIRST_DIRECTION + _integers(rng, _NUM_DIRECTIONS, len(images))
    flat = (direction < _FIRST_STEEP)[:, None, None]
    taken = margins[images] > _FREE
    before, after = (slice(_INSIDE.start + by, _INSIDE.stop + by) for by in (-1, 1))
    taken = taken[:, _INSIDE, _INSIDE] | taken[:, after, after] | (flat & taken[:, _INSIDE, before])
    rank = (~taken).reshape(len(images), SIZE**2).cumsum(axis=1)
    chosen = _integers(rng, rank[:, -1], len(images))
    row, column = np.divmod((rank > chosen[:, None]).argmax(axis=1), SIZE)
    room = rank[:, -1] > 0
    return images[room], np.stack([row, column, direction], axis=-1)[room]


def _grow(
    rng: np.random.Generator, margins: Grey, first: Integers, length: int
) -> tuple[Integers, Integers, Grey]:
    """Let the snakes of each image grow in turns, and give up those images in which one gets stuck.

    Args:
        rng: the source of randomness.
        margins: of all dashes so far but the first ones ``(n, canvas, canvas)``; overwritten.
        first: the first dash of each snake ``(n, snakes, 3)``.
        length: how many dashes each snake is to have.

    Returns:
        which images are left ``(m,)``, their dashes ``(m, snakes, length, 3)`` and margins.
    """
    images = np.arange(len(first))
    dashes = np.repeat(first[:, :, None], length, axis=2)
    pivots = first[..., :2] + _FIRST_PIVOT[first[..., 2]]
    for step, snake in itertools.product(range(1, length), range(first.shape[1])):
        last = dashes[:, snake, step - 1]
        pivots[:, snake] = np.ceil(pivots[:, snake] + _ADVANCE[last[:, 2]])
        dashes[:, snake, step], fits = _next_dashes(rng, margins, pivots[:, snake], last[:, 2])
        _stamp(margins, last, _stamps().margins)
        images, dashes, pivots, margins = images[fits], dashes[fits], pivots[fits], margins[fits]
    # The last dash of the other target snake keeps no margin.
    _stamp(margins, dashes[:, -1, -1], _stamps().margins)
    return images, dashes, margins


def _next_dashes(
    rng: np.random.Generator, margins: Grey, pivots: Integers, directions: Integers
) -> tuple[Integers, NDArray[np.bool_]]:
    """A dash for each image that begins at its pivot, and whether it keeps clear of all margins."""
    # What is outside of the image is clipped to its border, which is not free either.
    ends = np.clip(pivots[:, None] + _TURNS, 0, SIZE - 1)  # [n, turns, 2]
    images = np.arange(len(margins))[:, None]
    cover = _spread(margins)[images, ends[..., 0] + _FRAME, ends[..., 1] + _FRAME]
    cumulative = np.cumsum(_WEIGHTS[directions] * (255 - cover.astype(np.int32)), axis=1)  # [n, turns]
    dashes = np.zeros((len(margins), 3), dtype=np.int64)
    fits = np.zeros(len(margins), dtype=bool)
    pending = np.flatnonzero(cumulative[:, -1] >= _LEAST_WEIGHT)
    for _ in range(DASH_TRIALS):
        chosen = _integers(rng, cumulative[pending, -1], len(pending))
        turns = (cumulative[pending] <= chosen[:, None]).sum(axis=1)
        dashes[pending] = np.column_stack([ends[pending, turns], _DEGREES + turns])
        fits[pending] = _are_clear(margins, pending, dashes[pending])
        pending = pending[~fits[pending]]
    return dashes, fits


def _spread(margins: Grey) -> Grey:
    """The margins, grown by a pixel on each side. The frame makes it harmless to run on into the next row."""
    flat = margins.reshape(-1)
    wide = flat.copy()
    for step in (1, _CANVAS):
        np.maximum(wide[step:], flat[:-step], out=wide[step:])
        np.maximum(wide[:-step], flat[step:], out=wide[:-step])
    return wide.reshape(margins.shape)


def _are_clear(margins: Grey, images: Integers, dashes: Integers) -> NDArray[np.bool_]:
    """Whether each dash keeps clear of the margins in its image."""
    rows, columns, directions = dashes.T
    windows = sliding_window_view(margins, (_STAMP, _STAMP), axis=(1, 2))[images, rows, columns]
    overlaps = windows > _stamps().limits[directions]
    return ~overlaps.reshape(len(dashes), _STAMP**2).any(axis=1)


def _stamp(canvas: NDArray, dashes: Integers, stamps: NDArray) -> None:
    """Draw one dash into each image."""
    rows, columns, directions = dashes.T
    windows = sliding_window_view(canvas, (_STAMP, _STAMP), axis=(1, 2), writeable=True)
    places = np.arange(len(canvas)), rows, columns
    windows[places] = np.maximum(windows[places], stamps[directions])


def _render(targets: Integers, distractors: Integers, circles: Integers) -> Grey:
    """The images ``(n, 32, 32)`` of some scenes."""
    light = _markers()[circles[..., 0], circles[..., 1]].max(axis=1)
    for snakes, contrast in ((targets, TARGET_CONTRAST), (distractors, DISTRACTOR_CONTRAST)):
        canvas = np.zeros((len(snakes), _CANVAS, _CANVAS), dtype=np.float32)
        for dashes in snakes.reshape(len(snakes), -1, 3).swapaxes(0, 1):
            _stamp(canvas, dashes, _stamps().lines)
        light = np.maximum(light, np.float32(contrast) * canvas[:, _INSIDE, _INSIDE])
    return np.floor(255 * light / light.max(axis=(1, 2), keepdims=True) + 0.5).astype(np.uint8)


class _Stamps(NamedTuple):
    """Pictures of a dash for each direction and for no dash, ``(directions + 1, 9, 9)``."""

    lines: NDArray[np.float32]
    margins: Grey
    limits: Grey  # what the margins of others must not exceed


@cache
def _stamps() -> _Stamps:
    # A first dash is drawn from its beginning on, any other from its end back.
    angles = np.where(np.arange(_NO_DASH) < _DEGREES, _ANGLES, _ANGLES + np.pi)
    ends = np.ceil((DASH_LENGTH * ANTIALIAS * _unit(angles)).round(9)).astype(np.int64)
    lines = np.stack([_line(height, width) for height, width in ends.tolist()])
    radius = MARGIN * ANTIALIAS
    disc = np.hypot(*np.mgrid[-radius : radius + 1, -radius : radius + 1]) <= radius
    padded = np.pad(lines, ((0, 0), (radius, radius), (radius, radius)))
    thick = (sliding_window_view(padded, disc.shape, axis=(1, 2)) & disc).any(axis=(-1, -2))
    thin = _shrink_rows(_shrink_rows(lines, _STAMP), _STAMP)
    grey = np.rint(255 * _shrink_rows(thick, _STAMP)).clip(0, 255)
    margins = np.rint(_shrink_rows(grey, _STAMP)).clip(0, 255)
    blank = ((0, 1), (0, 0), (0, 0))
    return _Stamps(
        lines=np.pad(thin, blank).astype(np.float32),
        margins=np.pad(margins, blank).astype(np.uint8),
        limits=np.minimum(_OVERLAP - 1 - np.pad(margins, blank), 255).astype(np.uint8),
    )


@cache
def _markers() -> NDArray[np.float32]:
    """Pictures of a circle around each pixel, ``(32, 32, 32, 32)``, the brightest pixel of which is 1."""
    pixels = np.arange(SIZE * ANTIALIAS)
    squares = (pixels - ANTIALIAS * np.arange(SIZE)[:, None]) ** 2  # [centre, pixel]
    circles = squares[:, None, :, None] + squares[:, None, :] <= (MARKER_RADIUS * ANTIALIAS) ** 2
    light = np.stack([_shrink_rows(_shrink_rows(row, SIZE), SIZE) for row in circles])
    return (light / light.max(axis=(-1, -2), keepdims=True)).astype(np.float32)


def _line(height: int, width: int) -> NDArray[np.bool_]:
    """A stamp at full resolution of a line from the middle, by Bresenham's rule."""
    middle = _FRAME * ANTIALIAS
    image = np.zeros((2 * middle + 1, 2 * middle + 1), dtype=bool)
    length = max(abs(height), abs(width))
    steps = np.arange(length + 1)
    rows, columns = ((2 * steps * abs(end) + length) // (2 * length) for end in (height, width))
    image[middle + np.sign(height) * rows, middle + np.sign(width) * columns] = True
    return image


def _shrink_rows(images: NDArray, size: int) -> Floats:
    """Images whose rows are shrunk to `size` pixels by a Lanczos filter of three lobes, then transposed."""
    scale = images.shape[-1] / size
    distance = (np.arange(images.shape[-1]) + 0.5) / scale - np.arange(size)[:, None] - 0.5
    weights = np.where(abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0)
    # With 22 bits for a weight all sums are exact, so that no machine rounds them in another way.
    weights = np.rint(2**22 * weights / weights.sum(axis=1, keepdims=True)) / 2**22
    return (images @ weights.T).swapaxes(-1, -2)
