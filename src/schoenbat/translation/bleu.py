"""BLEU of a whole corpus, as sacreBLEU computes and names it, so that figures of different papers compare."""

from collections.abc import Sequence

from schoenbat.translation.tokenizer import INSTALL


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """From 0 to 100; cased, on raw text, with sacreBLEU's own tokenisation (13a).

    >>> round(bleu(["A dog runs on the beach."], ["A dog runs on the beach."]), 6)
    100.0
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError:
        raise RuntimeError(INSTALL.format("sacrebleu")) from None
    return float(BLEU().corpus_score(list(translations), [list(references)]).score)
