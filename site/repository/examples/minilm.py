"""What linear attention costs a trained sentence encoder, and what distillation brings back.

all-MiniLM-L6-v2 is converted to SchoenbAt, then distilled on texts it is not measured on. Measured is how
well its sentence embeddings agree with the original's on held-out reviews (IMDb, test split) and papers
(ACL Anthology Network): the mean cosine with the original embedding, and Spearman's correlation of all
pairwise similarities. Writes results/minilm.json.

    python examples/minilm.py --model all-MiniLM-L6-v2 --data data
    python examples/minilm.py --model all-MiniLM-L6-v2 --data data --window 16 --steps 100 400

``--model`` is a folder or a name on the Hugging Face hub. ``--data`` holds imdb_reviews.parquet (columns
text, split) and aan_papers.parquet (column text). Needs the extras [hf] and [cli].
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from schoenbat.integrations import huggingface
from schoenbat.report.results import write_results

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class MiniLMRow:
    """Agreement of a model's sentence embeddings with the original's."""

    stage: str
    """original, converted (no training), calibrated (fitted to one batch, no training) or distilled"""
    corpus: str
    texts: int
    cosine: float
    """Mean over the texts."""
    spearman: float
    """Of the similarities of all pairs of texts."""
    seconds: float
    """That conversion or distillation took."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="sentence-transformers/all-MiniLM-L6-v2", help="folder or hub name"
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the two Parquet files")
    parser.add_argument("--features", type=int, default=128, help="D (default: %(default)s)")
    parser.add_argument("--window", type=int, help="exact attention to so many neighbours, linear beyond")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=(60, 200), help="of the two stages (default: 60 200)"
    )
    parser.add_argument("--batch", type=int, default=4, help="texts in a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text (default: %(default)s)")
    parser.add_argument(
        "--texts", type=int, default=128, help="held-out texts of each corpus (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/minilm.json"))
    return parser.parse_args()


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
def embed(model: PreTrainedModel, batches: Iterator[Batch]) -> Tensor:
    model.eval()
    rows = [sentence_embeddings(model(**batch), batch) for batch in tqdm(batches, "embedding", leave=False)]
    return torch.nn.functional.normalize(torch.cat(rows), dim=-1)


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of the similarities of all pairs of rows."""
    pairs = torch.triu_indices(len(a), len(a), offset=1, device=a.device)
    ranks = [(x @ x.T)[pairs[0], pairs[1]].argsort().argsort().double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def main() -> None:
    options = parse_arguments()
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModel.from_pretrained(options.model).to(options.device)
    held_out, train = read_corpora(options.data, options.texts, generator)

    def batches(texts: list[str]) -> Iterator[Batch]:
        for start in range(0, len(texts), options.batch):
            some = texts[start : start + options.batch]
            tokens = tokenizer(
                some, truncation=True, max_length=options.length, padding=True, return_tensors="pt"
            )
            yield {name: tensor.to(options.device) for name, tensor in tokens.items()}

    original = {corpus: embed(model, batches(texts)) for corpus, texts in held_out.items()}
    rows: list[MiniLMRow] = []

    def measure(stage: str, model: PreTrainedModel, work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        work()
        seconds = round(time.perf_counter() - began, 1)
        for corpus, texts in held_out.items():
            embeddings = embed(model, batches(texts))
            cosine = float((embeddings * original[corpus]).sum(-1).mean())
            row = MiniLMRow(
                stage, corpus, len(texts), cosine, spearman(embeddings, original[corpus]), seconds
            )
            rows.append(row)
            print(f"{stage:12} {corpus:5} cosine {row.cosine:.4f}  spearman {row.spearman:.4f}", flush=True)

    local = {} if options.window is None else {"window": options.window}
    plain = copy.deepcopy(model)
    measure("original", model, lambda: None)
    measure("converted", plain, lambda: huggingface.convert(plain, num_features=options.features, **local))
    first = next(batches(train))
    measure("calibrated", plain, lambda: huggingface.calibrate(plain, first))

    trainable: dict[str, Any] = dict.fromkeys(
        ("post", "trainable_features", "map_per_head", "separate_maps"), True
    )
    trainable["scale"] = "learned"
    huggingface.convert(model, num_features=options.features, **trainable, **local)
    huggingface.calibrate(model, first)
    needed = train[: sum(options.steps) * options.batch]
    stream = list(batches(needed))
    measure(
        "distilled",
        model,
        lambda: huggingface.distill(model, stream, steps=tuple(options.steps), output=sentence_embeddings),
    )
    write_results(options.out, "minilm", vars(options), rows, device=options.device)


if __name__ == "__main__":
    main()
