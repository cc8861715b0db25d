"""How close a converted sentence encoder comes without training: against features, window and scale.

all-MiniLM-L6-v2 is converted as in minilm.py, and its sentence embeddings are compared with the original's:

- features: linear attention with 32 to 512 of them;
- window: exact attention to 4 to 64 neighbours on each side, with linear attention to all others and without;
- scale: all logits times 0.25 to 2, for linear attention and for softmax itself.

Calibrated means fitted to one batch of other texts, layer by layer, without gradients: the directions of the
features, and with a window what far keys weigh. Writes results/minilm_curves.json and .svg.

    python examples/minilm_curves.py --model all-MiniLM-L6-v2 --data data
    python examples/minilm_curves.py --model all-MiniLM-L6-v2 --data data --texts 512 --batch 32 --device cuda

Needs the extras [hf] and [cli].
"""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from minilm import (
    LINEAR,
    WINDOW_ONLY,
    WITH_WINDOW,
    Agreement,
    Batch,
    argument_parser,
    convert,
    prepare,
)
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from schoenbat.files import write_atomically
from schoenbat.integrations import huggingface
from schoenbat.report.plots import agreement_plot
from schoenbat.report.results import write_results

FEATURES, WIDTHS, FACTORS = (32, 64, 128, 256, 512), (4, 8, 16, 32, 64), (0.25, 0.5, 0.7, 1.0, 1.4, 2.0)
NUM_FEATURES = 128
"""D, where something else is varied."""


@dataclass(frozen=True)
class Point:
    """One model that is made."""

    against: str
    """features, window or scale"""
    value: float | None
    """None: no window."""
    attention: str
    """softmax, linear, window + linear or window only"""
    calibrated: bool


@dataclass(frozen=True)
class CurveRow(Point, Agreement):
    """What one model comes to on one corpus."""


def points() -> Iterator[Point]:
    for stage in (False, True):
        yield from (Point("features", count, LINEAR, stage) for count in FEATURES)
        yield from (Point("window", width, WITH_WINDOW, stage) for width in WIDTHS)
        yield from (Point("scale", factor, LINEAR, stage) for factor in FACTORS if factor != 1.0)
    yield from (Point("window", width, WINDOW_ONLY, False) for width in WIDTHS)
    yield from (Point("scale", factor, "softmax", False) for factor in FACTORS)


def make(original: PreTrainedModel, point: Point, batch: Batch) -> PreTrainedModel:
    assert point.value is not None
    model = copy.deepcopy(original)
    if point.against == "scale":
        for module in model.modules():
            if hasattr(module, "scaling"):
                module.scaling *= point.value
    if point.attention == "softmax":
        return model
    window = int(point.value) if point.against == "window" else None
    count = int(point.value) if point.against == "features" else NUM_FEATURES
    convert(model, point.attention, window=window, num_features=count)
    if point.calibrated:
        huggingface.calibrate(model, batch)
    return model


def also_on(rows: list[CurveRow]) -> Iterator[CurveRow]:
    """The model that all three curves have in common, on the two that it was not measured for."""
    for row in rows:
        if (row.against, row.value) == ("features", NUM_FEATURES):
            yield replace(row, against="window", value=None)
            yield replace(row, against="scale", value=1.0)


def main() -> None:
    options = argument_parser(__doc__, texts=32, out="minilm_curves.json").parse_args()
    original, held_out, training = prepare(options, steps=1)
    rows: list[CurveRow] = []
    for point in tqdm(list(points()), "models"):
        agreements = held_out.compare(make(original, point, training[0]))
        rows += [CurveRow(**asdict(found), **asdict(point)) for found in agreements]
    rows += also_on(rows)
    write_results(options.out, "minilm_curves", vars(options), rows, device=options.device)
    write_atomically(options.out.with_suffix(".svg"), agreement_plot([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
