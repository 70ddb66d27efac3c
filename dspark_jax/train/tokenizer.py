"""The tokenizer of small checkpoints: byte-level BPE, trained here on the training text. Any
text round-trips.

Digits stay single (sums and counting are learnt digit by digit, a space before a number is its own
token), a line end takes the indentation that follows it (code), a word takes the space before it.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# Ids 0 and 1: the end of a document; the unknown places of a draft block.
EOS, NOISE = "<|end|>", "<|noise|>"
PIECES = r"\p{N}|\n+ *| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+?(?=\s?\S|$)|\s+"


def build(texts: Iterable[str], vocab_size: int = 1024) -> Tokenizer:
    """Trains a tokenizer of exactly `vocab_size` entries (2 special, 256 bytes, the rest merges) on
    `texts`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, NOISE],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text gives {tokenizer.get_vocab_size()} tokenizer entries of {vocab_size}: "
            "more text is needed"
        )
    return tokenizer


def load(path: str | Path) -> Tokenizer:
    """Reads a tokenizer.json."""
    return Tokenizer.from_file(str(path))


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """Bytes of text that each id stands for; 1 for special tokens (as an end of text counts in
    bits/byte).
    """
    special = {EOS, NOISE}
    return [
        1 if (token := tokenizer.id_to_token(i)) in special else len(token)
        for i in range(tokenizer.get_vocab_size())
    ]
