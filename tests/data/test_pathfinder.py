"""Pathfinder-32: the rules of the generator, its labels, and how its images compare with the original's."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from schoenbat.data import pathfinder

# The mean and its standard error of each of the `figures` over 1,000 images that the original generator drew
# with the settings of the Long Range Arena (pathfinder32_reference.parquet).
REFERENCE = {
    "label": (0.502, 0.015811),
    "ink": (135.408, 0.43023),
    "mean grey": (19.4431, 0.059902),
    "mean square": (2850.01, 10.351),
    "black pixels": (653.356, 1.3704),
    "faint pixels": (205.282, 0.85454),
    "bright pixels": (4.928, 0.094904),
    "brightest pixels": (1.743, 0.022471),
    "distinct greys": (52.264, 0.24846),
    "pieces": (13.037, 0.095821),
    "pieces of bright ink": (15.96, 0.10135),
    "centre row": (14.483, 0.067439),
    "centre column": (14.4099, 0.064234),
    "square row": (273.238, 2.0785),
    "square column": (270.455, 2.0075),
    "row times column": (207.891, 1.4378),
    "ink in row 2": (6.723, 0.15431),
    "ink in column 2": (5.986, 0.11473),
    "ink in row 29": (4.124, 0.11948),
    "ink in column 29": (4.071, 0.10716),
    "ink in the middle": (16.423, 0.20058),
    "circle row": (16.112, 0.14106),
    "circle column": (15.974, 0.14689),
    "distance with label 0": (13.0068, 0.22858),
    "distance with label 1": (13.3873, 0.23095),
}
REFERENCE_GREYS = 176


def window(images, combine):
    """Each pixel combined with its eight neighbours; beyond the edge there is 0."""
    for axis in (1, 2):
        padded = np.pad(images, [(0, 0)] + [(int(axis == each), int(axis == each)) for each in (1, 2)])
        before, here, after = (padded.take(range(by, by + 32), axis) for by in range(3))
        images = combine(combine(before, here), after)
    return images


def num_pieces(ink):
    """How many connected pieces of ink each image has: neighbours adopt the largest number of a pixel."""
    names = np.where(ink, np.arange(1, 32 * 32 + 1, dtype=np.int16).reshape(32, 32), 0)
    while not np.array_equal(after := window(names, np.maximum) * ink, names):
        names = after
    return np.array([len(np.unique(each)) - 1 for each in names])


def find_circles(images):
    """The two places of an image with most light in 3 x 3 pixels, (n, 2, 2)."""
    light = window(images.astype(np.int64), np.add)
    places = []
    for _ in range(2):
        rows, columns = np.divmod(light.reshape(len(light), -1).argmax(1), 32)
        places.append(np.stack([rows, columns], -1))
        light = light * (np.abs(np.mgrid[:32, :32] - places[-1][..., None, None]).max(1) > 2)
    return np.stack(places, 1)


def figures(images, labels):
    """Quantities that describe each image, by name; those of one label are shorter."""
    ink = images > 40
    light = images / images.sum((1, 2), keepdims=True)
    rows, columns = np.mgrid[:32, :32]
    first, second = find_circles(images).swapaxes(0, 1)
    distance = np.hypot(*(first - second).T)
    return {
        "label": labels,
        "ink": ink.sum((1, 2)),
        "mean grey": images.mean((1, 2)),
        "mean square": (images.astype(np.float64) ** 2).mean((1, 2)),
        "black pixels": (images == 0).sum((1, 2)),
        "faint pixels": ((images > 0) & (images < 8)).sum((1, 2)),
        "bright pixels": (images > 221).sum((1, 2)),
        "brightest pixels": (images == 255).sum((1, 2)),
        "distinct greys": np.array([len(np.unique(image)) for image in images]),
        "pieces": num_pieces(ink),
        "pieces of bright ink": num_pieces(images > 100),
        "centre row": (light * rows).sum((1, 2)),
        "centre column": (light * columns).sum((1, 2)),
        "square row": (light * rows**2).sum((1, 2)),
        "square column": (light * columns**2).sum((1, 2)),
        "row times column": (light * rows * columns).sum((1, 2)),
        "ink in row 2": ink[:, 2].sum(1),
        "ink in column 2": ink[:, :, 2].sum(1),
        "ink in row 29": ink[:, 29].sum(1),
        "ink in column 29": ink[:, :, 29].sum(1),
        "ink in the middle": ink[:, 12:20, 12:20].sum((1, 2)),
        "circle row": (first + second)[:, 0] / 2,
        "circle column": (first + second)[:, 1] / 2,
        "distance with label 0": distance[labels == 0],
        "distance with label 1": distance[labels == 1],
    }


def mean_and_error(values):
    return float(np.mean(values)), float(np.std(values) / np.sqrt(len(values)))


def reference_images():
    """The reference file's images and labels, where the environment says that there is one."""
    if "SCHOENBAT_REFERENCE" not in os.environ:
        pytest.skip("SCHOENBAT_REFERENCE does not name a pathfinder32_reference.parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(Path(os.environ["SCHOENBAT_REFERENCE"]))
    images = np.frombuffer(b"".join(table["image"].to_pylist()), np.uint8).reshape(-1, 32, 32)
    return images, np.array(table["label"].to_pylist())


@pytest.fixture(scope="module")
def scenes():
    return pathfinder._scenes(3, 0)


@pytest.fixture(scope="module")
def examples():
    return pathfinder.generate(1024, seed=11)


@pytest.fixture(scope="module")
def generated(examples):
    return figures(*examples)


def test_the_label_says_whether_one_snake_leads_from_circle_to_circle(scenes):
    targets, _, circles, labels = scenes
    beginning, end = ((np.arange(len(labels)), *each.T) for each in circles.swapaxes(0, 1))
    joined = np.zeros(len(labels), dtype=bool)
    for snake in range(2):
        canvas = np.zeros((len(labels), 40, 40), dtype=np.float32)
        for dashes in targets[:, snake].swapaxes(0, 1):
            pathfinder._stamp(canvas, dashes, pathfinder._stamps().lines)
        ink = canvas[:, 4:-4, 4:-4] > 0.1
        # No gap between two dashes is wider than two pixels: growing by one closes all of them.
        path = window(ink, np.maximum)
        reached = np.zeros_like(ink)
        reached[beginning] = ink[beginning]
        while not np.array_equal(after := window(reached, np.maximum) & path, reached):
            reached = after
        joined |= reached[end] & ink[end]
    assert joined[labels == 1].all()
    # Nothing keeps the very last dash of a snake from being touched by the other snake.
    assert joined[labels == 0].mean() < 0.02


def test_circles_are_where_the_image_is_brightest(scenes):
    circles = scenes[2]
    found = find_circles(pathfinder._render(*scenes[:3]))
    either = np.abs(found[:, :, None] - circles[:, None]).max(-1)
    both = (either.min(2) <= 1).all(1)
    assert both.mean() > 0.9


def test_snakes_begin_near_the_middle_and_seven_pixels_apart(scenes):
    first, second = scenes[0][:, :, 0, :2].swapaxes(0, 1).astype(float)
    assert first.min() == 14
    assert first.max() == 16
    assert abs(np.hypot(*(first - second).T) - 7).max() < 0.75


def test_snakes_stay_inside_turn_by_less_than_a_right_angle_and_keep_their_dashes_together(scenes):
    targets, distractors, _, _ = scenes
    drawn = distractors[distractors[..., 0, 2] != pathfinder._NO_DASH]
    for snakes in (targets.reshape(-1, 14, 3), drawn):
        assert snakes[:, 1:, :2].min() >= 2
        assert snakes[:, 1:, :2].max() <= 29
        angles = pathfinder._ANGLES[snakes[..., 2]]
        assert np.cos(np.diff(angles, axis=1)).min() > 0
        steps = np.hypot(*np.moveaxis(np.diff(snakes[:, 1:, :2], axis=1), -1, 0))
        assert steps.min() > 1
        assert steps.max() < 6.5


def test_a_distractor_is_whole_or_left_out_and_one_in_three_succeeds_at_most(scenes):
    missing = scenes[1][..., 2] == pathfinder._NO_DASH
    assert np.array_equal(missing.any(-1), missing.all(-1))
    # Five trials, of which 30 in 360 have a direction that the search can succeed in.
    at_most = 1 - (1 - 30 / 360) ** 5
    assert 0.5 * at_most < 1 - missing[..., 0].mean() < at_most


@pytest.mark.parametrize("name", REFERENCE)
def test_figures_are_those_of_the_original(generated, name):
    reference, reference_error = REFERENCE[name]
    mean, error = mean_and_error(generated[name])
    assert abs(mean - reference) < 3.5 * np.hypot(error, reference_error)


def test_the_constants_are_the_figures_of_the_reference_file():
    images, labels = reference_images()
    assert len(np.unique(images)) == REFERENCE_GREYS
    for name, values in figures(images, labels).items():
        assert mean_and_error(values) == pytest.approx(REFERENCE[name], rel=1e-3, abs=1e-4)


def test_the_mean_image_and_the_greys_are_those_of_the_reference_file(examples):
    reference, _ = reference_images()
    images, _ = examples
    assert np.isin(reference, np.unique(images)).mean() > 0.9999
    error = np.hypot(*(each.std(0) / np.sqrt(len(each)) for each in (reference, images)))
    # The outermost pixels hold next to nothing.
    inside = (slice(2, 30), slice(2, 30))
    score = (reference.mean(0) - images.mean(0))[inside] / error[inside]
    assert np.sqrt((score**2).mean()) < 1.2
    assert abs(score).max() < 4.5


def test_a_line_is_drawn_by_the_rule_of_bresenham():
    middle = 8
    rows, columns = np.nonzero(pathfinder._line(-2, 4))
    points = set(zip((rows - middle).tolist(), (columns - middle).tolist(), strict=True))
    assert points == {(0, 0), (-1, 1), (-1, 2), (-2, 3), (-2, 4)}


def test_shrinking_keeps_a_flat_image_flat():
    flat = np.full((2, 17, 17), 7.0)
    assert np.allclose(pathfinder._shrink_rows(flat, 9), 7, atol=1e-4)


def test_images_are_grey_bytes_from_0_to_255(examples):
    images, labels = examples
    assert images.shape == (len(labels), 32, 32)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert (images.max((1, 2)) == 255).all()
    assert (images.min((1, 2)) == 0).all()
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == len(images)


def test_the_same_seed_gives_the_same_bytes_on_every_machine():
    images, labels = pathfinder.generate(50, seed=7)
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert digest[:16] == "541dc60a77426071"


def test_other_seeds_give_other_images():
    one, other = (pathfinder.generate(5, seed)[0] for seed in (1, 2))
    assert not (one[:, None] == other[None]).all((-1, -2)).any()


@pytest.mark.parametrize(("count", "workers"), [(5, 1), (pathfinder.IMAGES_PER_BLOCK + 1, 2)])
def test_images_depend_neither_on_their_number_nor_on_that_of_the_processes(examples, count, workers):
    some = pathfinder.generate(count, seed=11, workers=workers)
    assert all(np.array_equal(few, more[:count]) for few, more in zip(some, examples, strict=True))


def test_no_images():
    images, labels = pathfinder.generate(0, seed=0)
    assert images.shape == (0, 32, 32)
    assert labels.shape == (0,)


@pytest.mark.parametrize("options", [{"count": -1}, {"seed": -1}, {"workers": 0}])
def test_bad_options_are_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least ., got {value}"):
        pathfinder.generate(**{"count": 1, "seed": 0} | options)
