"""Text becomes Arrow files of tokens: found and cut, tokenised in processes, written so that a kill loses nothing."""

from lightning_parm.data.tokenize.corpus import tokenize
from lightning_parm.data.tokenize.tokenizer import describe_tokenizer, load_tokenizer, train_bpe

__all__ = ["describe_tokenizer", "load_tokenizer", "tokenize", "train_bpe"]
