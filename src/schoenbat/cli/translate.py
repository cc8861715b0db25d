"""The command that translates: German into English, with one attention beside another."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from schoenbat.cli.measure import Out
from schoenbat.cli.terminal import (
    EXIT_NOT_FINITE,
    OF_THE_PAPER,
    console,
    explained,
    given,
    print_files,
    progress_bar,
    stoppable,
    write,
)

if TYPE_CHECKING:
    from schoenbat.translation.options import TranslationOptions
    from schoenbat.translation.record import EpochRow
    from schoenbat.translation.training import Encoded

app = typer.Typer()

TRAINING = "Training, the same for all attentions"


@app.command(
    rich_help_panel=OF_THE_PAPER,
    epilog="Example: schoenbat translate --quick --data data\n\n"
    "Example: schoenbat translate --attentions softmax --attentions softmax:qk_norm=true,scale=none "
    "--attentions schoenbat:construction=exact-low --seed 1 --out results/seed-1",
)
@stoppable("attentions trained to their end are kept, this one is not")
def translate(
    attentions: Annotated[
        list[str] | None,
        typer.Option(
            help="Names separated by commas, with options as in 'schoenbat:kernel=inv,post=false'. May be "
            "repeated. Default: softmax without and with ppSBN, SchoenbAt, and the paper's reading of it."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small model and few sentences, in about a minute.")
    ] = False,
    epochs: Annotated[int | None, typer.Option(min=1, help="Default: 20, or 3 with --quick.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, feature maps, batches and dropout.")] = 0,
    data: Annotated[
        Path, typer.Option(help="The Parquet file or the published files of Multi30k, or their folder.")
    ] = Path("data"),
    out: Out = Path("out"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Learning rate at its highest, after the warm-up. Default: 0.001.", rich_help_panel=TRAINING
        ),
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="Default: 0.2.", rich_help_panel=TRAINING)] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Positions a side and batch, padding included. Default: 4096.", rich_help_panel=TRAINING
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Subwords of both languages together. Default: 8000.", rich_help_panel=TRAINING),
    ] = None,
) -> None:
    """Translate Multi30k from German to English: the paper's experiment on ppSBN, and with SchoenbAt.

    A Transformer is trained with each attention in encoder, decoder and between them. After every epoch:
    loss, perplexity, and BLEU by greedy search on validation data; at the end, test BLEU of the epoch with
    the lowest validation loss, by greedy and by beam search.

    The files are written after every attention. A later call with the same options and --out keeps what they
    hold and trains only the attentions that are missing. Calls at the same time share the files, if each
    names other attentions.
    """
    from schoenbat.data import multi30k
    from schoenbat.files import one_at_a_time
    from schoenbat.registry import parse_attentions
    from schoenbat.report.tables import translation_table
    from schoenbat.translation.options import TranslationOptions
    from schoenbat.translation.record import EXPERIMENT, attentions_of, read_rows
    from schoenbat.translation.training import check_attention, encode

    path = out / EXPERIMENT
    with explained():
        chosen = given(
            attentions=parse_attentions(attentions) if attentions else None,
            epochs=epochs,
            seed=seed,
            device=_device(device),
            learning_rate=learning_rate,
            dropout=dropout,
            batch_tokens=batch_tokens,
            vocab_size=vocab_size,
        )
        options = (TranslationOptions.quick if quick else TranslationOptions)(**chosen)
        for attention in options.attentions:
            check_attention(attention, options)
        corpus = multi30k.load(data)
        with console.status("making a vocabulary"):
            encoded = encode(corpus, options)
        # Of a small corpus there may be fewer subwords than were asked for.
        options = replace(options, data=corpus.sha256, vocab_size=len(encoded.subwords))
        rows = read_rows(path.with_suffix(".json"), options)
    for attention in options.attentions:
        if attention in attentions_of(rows):
            console.print(f"{attention}: in {path}.json already", soft_wrap=True, highlight=False)
            continue
        trained = _train(attention, encoded, options)
        with explained(), one_at_a_time(out):  # what other calls have trained in the meantime stays
            others = [
                row for row in read_rows(path.with_suffix(".json"), options) if row.attention != attention
            ]
            rows = [*others, *trained]
            _write(path, replace(options, attentions=attentions_of(rows)), rows)
    console.print(translation_table(rows))
    print_files([path.with_suffix(ending) for ending in (".json", ".svg")])


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _train(attention: str, encoded: "Encoded", options: "TranslationOptions") -> "list[EpochRow]":
    from schoenbat.translation.training import total_steps, train

    console.print(attention, soft_wrap=True, highlight=False)
    with progress_bar() as bar:
        task = bar.add_task("", total=total_steps(encoded.train, options))
        try:
            return train(
                attention,
                encoded,
                options,
                lambda doing, step: bar.update(task, completed=step, description=doing, refresh=True),
            )
        except FloatingPointError as error:
            bar.stop()
            typer.echo(str(error), err=True)
            raise typer.Exit(EXIT_NOT_FINITE) from None


def _write(path: Path, options: "TranslationOptions", rows: "list[EpochRow]") -> None:
    from schoenbat.report.plots import translation_plot

    write(path, options, rows, translation_plot(rows), options.device)
