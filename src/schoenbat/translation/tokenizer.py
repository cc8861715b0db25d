"""Sentences as subwords, by byte-pair encoding: one vocabulary for both languages."""

from collections.abc import Iterable, Sequence

from schoenbat.data.multi30k import Sentences

PAD, BEGIN, END = 0, 1, 2
_SPECIAL = ["<pad>", "<begin>", "<end>"]
INSTALL = "translation needs {}; install it with: pip install '.[cli]' in a checkout"


class Subwords:
    """A byte-level vocabulary, trained on the sentences it is given; every text can be spelt in it.

    Args:
        sentences: pairs whose German and English it is trained on.
        vocab_size: how many subwords there are at most, with three that are none: padding, begin, end.

    >>> subwords = Subwords(Sentences(["Ein Hund läuft."], ["A dog runs."]), vocab_size=300)
    >>> subwords.decode(subwords.encode(["Ein Hund läuft."]))
    ['Ein Hund läuft.']
    """

    def __init__(self, sentences: Sentences, vocab_size: int) -> None:
        try:
            from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
        except ModuleNotFoundError:
            raise RuntimeError(INSTALL.format("tokenizers")) from None
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if vocab_size < len(alphabet) + len(_SPECIAL):
            raise ValueError(f"a vocabulary of all bytes has at least 259 entries, got {vocab_size}")
        self._tokenizer = Tokenizer(models.BPE())
        self._tokenizer.normalizer = normalizers.NFC()
        # A word is the same subwords at the beginning of a sentence and inside of it.
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        self._tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        self._tokenizer.train_from_iterator([*sentences.german, *sentences.english], trainer)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The subwords of each text, without begin and end."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

    def decode(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """The text of each row of subwords, up to its end."""
        ended = [row[: row.index(END)] if END in row else row for row in map(list, rows)]
        return [text.strip() for text in self._tokenizer.decode_batch(ended, skip_special_tokens=True)]
