"""Tokenizers as files: loading one, finding its end-of-text token, training a small byte-level BPE."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


@dataclass(frozen=True)
class TokenizerFacts:
    """What the files of tokens remember of their tokenizer: one past its largest id, its delimiter, its contents."""

    vocab_size: int
    delimiter: int
    sha256: str


def require_tokenizers() -> None:
    """Raise one sentence when the ``tokenizers`` library is missing.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise ModuleNotFoundError("Tokenizing needs the tokenizers library: pip install 'lightning-parm[cli]'.")


def load_tokenizer(content: str) -> Any:
    """Build the ``tokenizers.Tokenizer`` of a JSON text, set to encode documents whole and as they are.

    Truncation and padding are switched off, and a special token that is spelled out in a document is encoded as
    ordinary text: otherwise a document that talks about ``<|endoftext|>`` would be cut in two.

    Raises:
        ValueError: The text is not a tokenizer's JSON.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"not the JSON of a `tokenizers` tokenizer ({error}).") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def describe_tokenizer(content: str, end_of_text: str | None = None) -> TokenizerFacts:
    """Read vocabulary size and delimiter off a tokenizer's JSON.

    Args:
        content: The JSON text.
        end_of_text: The token that ends a document; by default the first one known that the vocabulary has.

    Raises:
        ValueError: The token is not in the vocabulary, or none is known.
    """
    tokenizer = load_tokenizer(content)
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    ends = _KNOWN_ENDS if end_of_text is None else (end_of_text,)
    end = next((token for token in ends if token in vocabulary), None)
    if end is None:
        special = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values())
        raise ValueError(
            f"the tokenizer has no token {' or '.join(ends)}; name the one that ends a document with end_of_text, "
            f"for instance one of its special tokens {special}."
        )
    return TokenizerFacts(
        max(vocabulary.values()) + 1, vocabulary[end], hashlib.sha256(content.encode("utf-8")).hexdigest()
    )


def train_bpe(texts: Iterable[str], vocab_size: int, end_of_text: str | None = None) -> str:
    """Train a byte-level BPE, GPT-2's kind, and return its JSON; the same texts always give the same tokenizer.

    Args:
        texts: The documents to learn from.
        vocab_size: Number of tokens: 256 bytes, the end-of-text token, and merges. It comes out smaller when the
            texts have too few different pairs.
        end_of_text: The token that ends a document, ``<|endoftext|>`` by default; its id is 0.

    Raises:
        ValueError: ``vocab_size`` is below 257.

    Example:
        >>> tokenizer = load_tokenizer(train_bpe(["low lower lowest"] * 3, vocab_size=260))
        >>> tokenizer.decode(tokenizer.encode("slower").ids)
        'slower'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise ValueError(
            f"vocab_size={vocab_size} is below 257 (256 bytes and the end-of-text token); 4096 suits a few megabytes."
        )
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text or END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())
