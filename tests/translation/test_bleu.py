"""BLEU is sacreBLEU's, of the whole corpus, cased."""

import pytest
import sacrebleu

from schoenbat.translation.bleu import bleu

REFERENCES = ["A dog runs on the beach.", "Two cats are asleep on a red sofa.", "He plays in the park."]


def test_the_references_themselves_are_100_and_others_0():
    assert bleu(REFERENCES, REFERENCES) == pytest.approx(100)
    assert bleu(["x", "y", "z"], REFERENCES) < 1


def test_it_is_the_figure_of_sacrebleu():
    translations = ["A dog runs on a beach.", "Two cats sleep on a red sofa.", "he plays in the park ."]
    found = bleu(translations, REFERENCES)
    assert found == pytest.approx(sacrebleu.corpus_bleu(translations, [REFERENCES]).score)
    assert found < sacrebleu.corpus_bleu(translations, [REFERENCES], lowercase=True).score
