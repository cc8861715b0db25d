"""What linear attention costs a trained sentence encoder, and what distillation brings back.

all-MiniLM-L6-v2 is converted to SchoenbAt, then distilled on texts it is not measured on. Measured is how
well its sentence embeddings agree with the original's on held-out reviews (IMDb, test split) and papers
(ACL Anthology Network): the mean cosine with the original embedding, and Spearman's correlation of all
pairwise similarities. Writes results/minilm.json, anew after each stage.

    python examples/minilm.py --model all-MiniLM-L6-v2 --data data
    python examples/minilm.py --model all-MiniLM-L6-v2 --data data --steps 500 2000 --batch 32 --device cuda
    python examples/minilm.py --model all-MiniLM-L6-v2 --data data --window 16 --out minilm_window.json

With ``--window`` two models are made: exact attention to near keys and linear attention to all others, and
beside it what the window does alone, with far keys left out. ``--model`` is a folder or a name on the Hugging
Face hub. ``--data`` holds imdb_reviews.parquet (columns text, split) and aan_papers.parquet (column text).
Needs the extras [hf] and [cli].
"""

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from schoenbat import SchoenbAt
from schoenbat.integrations import huggingface
from schoenbat.report.results import write_results

Batch = dict[str, Tensor]
LINEAR, WITH_WINDOW, WINDOW_ONLY = "linear", "window + linear", "window only"
OF_THE_MAP = "trainable_features", "map_per_head", "separate_maps"
TRAINED: dict[str, Any] = {"scale": "learned", "post": True, **dict.fromkeys(OF_THE_MAP, True)}
# Beside the exponential of a near logit this is lost in rounding.
NOTHING = 1e-37


@dataclass(frozen=True)
class Agreement:
    """Of a model's sentence embeddings with the original's."""

    corpus: str
    texts: int
    cosine: float
    """Mean over the texts."""
    spearman: float
    """Of the similarities of all pairs of texts."""


@dataclass(frozen=True)
class MiniLMRow(Agreement):
    attention: str
    """softmax (the original), linear, window + linear or window only"""
    stage: str
    """original, converted (no training), calibrated (fitted to one batch, no training) or distilled"""
    seconds: float
    """That this stage took, after the one before."""


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, texts=128, out="minilm.json")
    parser.add_argument("--features", type=int, default=128, help="D (default: %(default)s)")
    parser.add_argument("--window", type=int, help="exact attention to so many neighbours, linear beyond")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=(60, 200), help="of the two stages (default: 60 200)"
    )
    return parser.parse_args()


def argument_parser(description: str | None, texts: int, out: str) -> argparse.ArgumentParser:
    """What every measurement of this model is told."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="sentence-transformers/all-MiniLM-L6-v2", help="folder or hub name"
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the two Parquet files")
    parser.add_argument("--batch", type=int, default=4, help="texts in a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text (default: %(default)s)")
    parser.add_argument(
        "--texts", type=int, default=texts, help="held-out texts of each corpus (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results") / out)
    return parser


def read_corpora(
    folder: Path, held_out: int, generator: torch.Generator
) -> tuple[dict[str, list[str]], list[str]]:
    """Held-out texts by corpus, and texts to train on: reviews of the train split, all other papers."""
    reviews = parquet.read_table(folder / "imdb_reviews.parquet", columns=["text", "split"]).to_pylist()
    papers = parquet.read_table(folder / "aan_papers.parquet", columns=["text"]).column("text").to_pylist()
    papers = shuffled(papers, generator)
    test = shuffled([review["text"] for review in reviews if review["split"] == "test"], generator)
    train = [review["text"] for review in reviews if review["split"] == "train"]
    return {"imdb": test[:held_out], "aan": papers[:held_out]}, shuffled(train + papers[held_out:], generator)


def shuffled(texts: list[str], generator: torch.Generator) -> list[str]:
    return [texts[i] for i in torch.randperm(len(texts), generator=generator).tolist()]


def sentence_embeddings(outputs: Any, batch: Batch) -> Tensor:
    """The mean over a text's tokens, as the model was trained with."""
    weight = batch["attention_mask"].unsqueeze(-1).to(outputs.last_hidden_state.dtype)
    return (outputs.last_hidden_state * weight).sum(1) / weight.sum(1)


@torch.no_grad()
def embed(model: PreTrainedModel, batches: list[Batch]) -> Tensor:
    model.eval()
    rows = [sentence_embeddings(model(**batch), batch) for batch in tqdm(batches, "embedding", leave=False)]
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of the similarities of all pairs of rows."""
    pairs = torch.triu_indices(len(a), len(a), offset=1, device=a.device)
    ranks = [(x @ x.T)[pairs[0], pairs[1]].argsort().argsort().double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


class HeldOut:
    """Batches of held-out texts by corpus, and the embeddings that the original gives them."""

    def __init__(self, original: PreTrainedModel, batches: dict[str, list[Batch]]) -> None:
        self.batches = batches
        self.expected = {corpus: embed(original, some) for corpus, some in batches.items()}

    def compare(self, model: PreTrainedModel) -> Iterator[Agreement]:
        for corpus, expected in self.expected.items():
            embeddings = embed(model, self.batches[corpus])
            cosine = float((embeddings * expected).sum(-1).mean())
            yield Agreement(corpus, len(expected), cosine, spearman(embeddings, expected))


def prepare(options: argparse.Namespace, steps: int) -> tuple[PreTrainedModel, HeldOut, list[Batch]]:
    """The original, what it is compared on, and batches for so many steps; everything on the device."""
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModel.from_pretrained(options.model, dtype=torch.float32).to(options.device)
    held_out, train = read_corpora(options.data, options.texts, generator)

    def batches(texts: list[str]) -> list[Batch]:
        found = []
        for start in tqdm(range(0, len(texts), options.batch), "tokenizing", leave=False):
            some = texts[start : start + options.batch]
            tokens = tokenizer(
                some, truncation=True, max_length=options.length, padding=True, return_tensors="pt"
            )
            found.append({name: tensor.to(options.device) for name, tensor in tokens.items()})
        return found

    compared = HeldOut(model, {corpus: batches(texts) for corpus, texts in held_out.items()})
    return model, compared, batches(train[: steps * options.batch])


def convert(
    model: PreTrainedModel, attention: str, *, window: int | None, num_features: int, **options: Any
) -> None:
    """Put one of the three attentions into a model."""
    if attention == LINEAR:
        huggingface.convert(model, num_features=num_features, **options)
    elif attention == WITH_WINDOW:
        huggingface.convert(model, num_features=num_features, window=window, **options)
    else:
        mapless = {name: value for name, value in options.items() if name not in OF_THE_MAP}
        huggingface.convert(model, num_features=2, window=window, **mapless)
        leave_out_far_keys(model)


def leave_out_far_keys(model: PreTrainedModel) -> None:
    """Far keys weigh nothing, and stay so; padding alone, which has no near keys, still averages them."""
    for module in model.modules():
        if isinstance(module, SchoenbAt) and module.far_rho is not None:
            module.set_far_weight(torch.full((module.num_heads,), NOTHING))
            module.far_rho.requires_grad_(False)


def stages(
    model: PreTrainedModel, attention: str, training: list[Batch], options: argparse.Namespace
) -> Iterator[tuple[str, PreTrainedModel]]:
    """A copy of the model with this attention, after each thing that is done to it."""
    settings = {"window": options.window, "num_features": options.features}
    plain, student = copy.deepcopy(model), copy.deepcopy(model)
    convert(plain, attention, **settings)
    yield "converted", plain
    convert(student, attention, **settings, **TRAINED)
    # Near keys are seen exactly: alone, they leave nothing to calibrate.
    if attention != WINDOW_ONLY:
        huggingface.calibrate(plain, training[0])
        yield "calibrated", plain
        huggingface.calibrate(student, training[0])
    huggingface.distill(student, training, steps=tuple(options.steps), output=sentence_embeddings)
    yield "distilled", student


def main() -> None:
    options = parse_arguments()
    model, held_out, training = prepare(options, sum(options.steps))
    rows: list[MiniLMRow] = []

    def measure(attention: str, stage: str, model: PreTrainedModel, seconds: float) -> None:
        for found in held_out.compare(model):
            row = MiniLMRow(**asdict(found), attention=attention, stage=stage, seconds=round(seconds, 1))
            rows.append(row)
            scores = f"cosine {row.cosine:.4f}  spearman {row.spearman:.4f}"
            print(f"{attention:15} {stage:10} {row.corpus:4} {scores}", flush=True)

    measure("softmax", "original", model, 0.0)
    for attention in (LINEAR,) if options.window is None else (WITH_WINDOW, WINDOW_ONLY):
        began = time.perf_counter()
        for stage, made in stages(model, attention, training, options):
            measure(attention, stage, made, time.perf_counter() - began)
            write_results(options.out, "minilm", vars(options), rows, device=options.device)
            began = time.perf_counter()


if __name__ == "__main__":
    main()
