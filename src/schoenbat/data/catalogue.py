"""The five tasks of the Long Range Arena by name: how each is made, prepared and loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urljoin

from schoenbat.data import cache, image, listops, pathfinder, retrieval, text
from schoenbat.data.arrays import SPLITS, Arrays, fingerprint
from schoenbat.data.download import download, is_url
from schoenbat.data.errors import DataError, MissingDataError
from schoenbat.data.progress import Step, silent
from schoenbat.data.source import Layout, Source, find, find_parquet
from schoenbat.data.task import Split, Task

DOWNLOADS = "downloads"
Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and the total where it is known."""


@dataclass(frozen=True)
class Files:
    """A task that is read: ``layout(**options)`` says from what; the original is published at ``url``."""

    layout: Callable[..., Layout]
    read: Callable[[Source, Step], Arrays]
    url: str | None = None


@dataclass(frozen=True)
class Recipe:
    """What a task's tokens and labels are, its options with their defaults, and where it comes from.

    A task that does not come from files is generated: ``origin(workers=, on_progress=, **options)``.
    """

    vocab_size: int
    num_classes: int
    max_length: int
    origin: Files | Callable[..., Arrays]
    options: Mapping[str, object] = field(default_factory=dict)
    paired: bool = False


RECIPES = {
    "listops": Recipe(
        vocab_size=len(listops.VOCABULARY),
        num_classes=10,
        max_length=listops.WIDTH,
        origin=listops.splits,
        options={"test_size": listops.TEST_SIZE},
    ),
    "text": Recipe(
        vocab_size=256,
        num_classes=2,
        max_length=text.MAX_LENGTH,
        origin=Files(lambda: text.LAYOUT, text.read, text.URL),
    ),
    "retrieval": Recipe(
        vocab_size=256,
        num_classes=2,
        max_length=retrieval.MAX_LENGTH,
        origin=Files(retrieval.layout, retrieval.read),
        options={"pairs": retrieval.PAIRS[0]},
        paired=True,
    ),
    "pathfinder": Recipe(
        vocab_size=256, num_classes=2, max_length=pathfinder.SIZE**2, origin=pathfinder.splits
    ),
    "image": Recipe(
        vocab_size=256,
        num_classes=image.NUM_CLASSES,
        max_length=image.PIXELS,
        origin=Files(lambda: image.LAYOUT, image.read, image.URL),
    ),
}


def task_names() -> tuple[str, ...]:
    """The tasks, in the order of the Long Range Arena's tables.

    >>> task_names()
    ('listops', 'text', 'retrieval', 'pathfinder', 'image')
    """
    return tuple(RECIPES)


def load(
    name: str,
    root: str | Path = "data",
    *,
    hide_zeros: bool = True,
    test_size: int | None = None,
    pairs: str | None = None,
) -> Task:
    """A task from ``root``: what was prepared there, memory-mapped, or Parquet files that lie there, read.

    Args:
        name: one of :func:`task_names`.
        root: the folder that :func:`prepare` was given, or one with the Parquet files; never written to.
        hide_zeros: let masks leave out every token 0 (the paper's rule, which hides black pixels), not only
            padding.
        test_size: of ListOps; what was prepared must agree.
        pairs: of Retrieval, see :mod:`schoenbat.data.retrieval`; what was prepared must agree.

    >>> load("listops", "nowhere")  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    ...
    schoenbat.data.errors.MissingDataError: nowhere/listops does not exist; prepare listops with:
    schoenbat data prepare listops --data nowhere
    """
    recipe, root = _recipe(name), Path(root)
    asked = _asked(name, recipe, test_size=test_size, pairs=pairs)
    if (root / name).is_dir():
        arrays, manifest = cache.read(root / name)
        if asked.items() - manifest.options.items():
            raise DataError(
                f"{root / name} was prepared with {_spelled(manifest.options)}, not {_spelled(asked)}; "
                f"prepare it again with: {_command(name, root, asked)}"
            )
        return _task(name, recipe, arrays, manifest.fingerprint, hide_zeros)
    files, source = _parquet_files(name, recipe, root, asked)
    arrays = files.read(source, silent)
    return _task(name, recipe, arrays, fingerprint(arrays), hide_zeros)


def require(name: str, root: str | Path) -> None:
    """Complain as :func:`load` does if there is nothing to load, without reading anything.

    >>> require("text", "nowhere")
    Traceback (most recent call last):
    ...
    schoenbat.data.errors.MissingDataError: nowhere/text does not exist, nor does nowhere hold \
imdb_reviews.parquet; prepare text with: schoenbat data prepare text --data nowhere
    """
    recipe, root = _recipe(name), Path(root)
    if not (root / name).is_dir():
        _parquet_files(name, recipe, root, asked={})


def prepare(
    name: str,
    root: str | Path = "data",
    source: str | Path | None = None,
    *,
    workers: int = 1,
    test_size: int | None = None,
    pairs: str | None = None,
    on_progress: Progress | None = None,
) -> Task:
    """Generate, or fetch and read, a task, and keep it in ``root`` for :func:`load`.

    Args:
        name: one of :func:`task_names`.
        root: where to keep it, in a folder of the task's name; what that held before is replaced at the end.
        source: Parquet files, an original archive or its folder, as a path or URL; None takes the official
            URL. ListOps and Pathfinder are generated and take none.
        workers: how many processes generate; the result does not depend on it.
        test_size: of ListOps, 2,000; the first examples of a larger test set are those of a smaller one.
        pairs: of Retrieval, "matched", "uniform" or "lra", see :mod:`schoenbat.data.retrieval`.
        on_progress: told what is being done, how much of it is done, and the total.

    Returns:
        the task, as :func:`load` gives it.

    >>> prepare("pathfinder", source="images.tar.gz")
    Traceback (most recent call last):
    ...
    ValueError: pathfinder is generated and has no source; got images.tar.gz
    """
    recipe, root = _recipe(name), Path(root)
    options = {**recipe.options, **_asked(name, recipe, test_size=test_size, pairs=pairs)}
    if source is not None and not isinstance(recipe.origin, Files):
        raise ValueError(f"{name} is generated and has no source; got {source}")
    tell: Progress = on_progress or (lambda stage, done, total: None)
    sums: Mapping[str, str] = {}
    cache.claim(root / name)
    if isinstance(recipe.origin, Files):
        found = _find(name, recipe.origin, source, recipe.origin.layout(**options), root / DOWNLOADS, tell)
        arrays, sums = recipe.origin.read(found, partial(tell, "reading")), found.sha256()
    else:
        arrays = recipe.origin(workers=workers, on_progress=partial(tell, "generating"), **options)
    cache.write(root / name, arrays, options, sums, partial(tell, "writing"))
    return load(name, root)


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"no task {name!r}; known are {', '.join(RECIPES)}")
    return RECIPES[name]


def _parquet_files(
    name: str, recipe: Recipe, root: Path, asked: Mapping[str, object]
) -> tuple[Files, Source]:
    """The Parquet files in ``root`` of a task that is not prepared, and who reads them."""
    looked = f"{root / name} does not exist"
    if isinstance(recipe.origin, Files):
        layout = recipe.origin.layout(**{**recipe.options, **asked})
        source = find_parquet(root, layout)
        if source:
            return recipe.origin, source
        if layout.parquet:
            looked += f", nor does {root} hold {' and '.join(layout.parquet)}"
    raise MissingDataError(f"{looked}; prepare {name} with: {_command(name, root, asked)}")


def _find(
    name: str, files: Files, source: str | Path | None, layout: Layout, downloads: Path, tell: Progress
) -> Source:
    """A source on this machine, after a download if need be."""
    source = source or files.url
    if source is None:
        raise ValueError(f"{name} has no public address; give a source (--from), which is {layout}")
    if not is_url(source):
        return find(Path(source), layout)
    url = str(source)
    # Files that go together lie together.
    names = layout.parquet if url.rpartition("/")[2] in layout.parquet else (url,)
    fetched = [download(urljoin(url, other), downloads, partial(tell, "downloading")) for other in names]
    return find(fetched[0], layout)


def _task(name: str, recipe: Recipe, arrays: Arrays, sha256: str, hide_zeros: bool) -> Task:
    splits = {
        split: Split(
            arrays["sequences"],
            arrays["sequence_lengths"],
            arrays[f"{split}_members"],
            arrays[f"{split}_labels"],
            hide_zeros,
        )
        for split in SPLITS
    }
    return Task(
        name=name,
        vocab_size=recipe.vocab_size,
        num_classes=recipe.num_classes,
        max_length=recipe.max_length,
        paired=recipe.paired,
        fingerprint=sha256,
        **splits,
    )


def _asked(name: str, recipe: Recipe, **options: object) -> dict[str, object]:
    """The options that were given, which the task must have."""
    asked = {key: value for key, value in options.items() if value is not None}
    for key, value in asked.items():
        if key not in recipe.options:
            raise ValueError(f"{name} has no {key}; got {key}={value}")
    return asked


def _spelled(options: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())


def _command(name: str, root: Path, options: Mapping[str, object]) -> str:
    origin = RECIPES[name].origin
    # Where there is an official address, the files are downloaded from there.
    source = " --from FILE_OR_URL" if isinstance(origin, Files) and origin.url is None else ""
    more = "".join(f" --{key.replace('_', '-')} {value}" for key, value in options.items())
    return f"schoenbat data prepare {name}{source} --data {root}{more}"
