"""What a loader's state says about the data and the order, and the errors when they are not the same any more."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from lightning_parm.data.schedule import Knots
from lightning_parm.data.sources.format import Tokens
from lightning_parm.data.sources.source import Source

VERSION = 2
_ADVICE = {
    "sequence_length": "The same tokens would be cut into other samples",
    "num_logical_shards": "The samples would come in another order",
    "seed": "The samples would come in another order",
    "samples": "The samples would be other ones",
    "at_exhaustion": "The samples would come in another order",
    "shuffle": "The samples would come in another order",
    "bos": "The samples would hold other tokens",
    "min_document_length": "Other documents would be left out",
}


def check_order(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare what the order depends on besides the data.

    Raises:
        ValueError: something differs; the message names it and says what to do.
    """
    if was.get("version") != VERSION:
        raise ValueError(
            f"The checkpoint's loader state has version {was.get('version')} and this package reads {VERSION}. Resume "
            f"with the version of lightning-parm that wrote it."
        )
    for name, advice in _ADVICE.items():
        if was["order"][name] != now[name]:
            raise ValueError(
                f"The checkpoint was made with {name}={was['order'][name]!r} and the loader has {name}={now[name]!r}. "
                f"{advice}: use {name}={was['order'][name]!r}, or start a new run."
            )


def check_sources(was: dict[str, list[Any] | None], sources: Sequence[Source]) -> None:
    """Compare the sources that a checkpoint and a loader share; one that had been removed may come back changed.

    Raises:
        ValueError: files were added, removed, renamed or changed; the message says which it is and what to do.
    """
    for source in sources:
        old = was.get(source.name)
        if old and tuple(old) != source.fingerprint:
            raise ValueError(
                f"This is other data than the checkpoint's: source {source.name!r} "
                f"{_difference(old, list(source.fingerprint))}. Restore the files as they were; to train on "
                f"additional data, put the new files into a folder of their own and add it as another source."
            )


def _difference(old: list[Any], new: list[Any]) -> str:
    if new[0] != old[0]:
        return f"has {new[0]} files where the checkpoint's had {old[0]}"
    if new[5] != old[5]:
        was, now = ("no delimiter" if end < 0 else f"the delimiter {end}" for end in (old[5], new[5]))
        return f"has {now} where the checkpoint's had {was}"
    if new[3] != old[3]:
        return f"has other file names than the checkpoint's, or in another order ({new[0]} files)"
    return (
        f"has {new[2]} tokens in {new[1]} documents where the checkpoint's had {old[2]} in {old[1]}, or the same in "
        f"another order"
    )


def digest(tokens: Tokens) -> str:
    """Return 64 bits that change when any of the tokens does."""
    return hashlib.blake2b(tokens.astype("<i8").tobytes(), digest_size=8).hexdigest()


def mix_digest(knots: Knots, names: Sequence[str]) -> str:
    """Return 32 bits that change when a user's mix or the names in it do."""
    plain = [[at, sorted(zip(names, weights, strict=True))] for at, weights in knots]
    return hashlib.blake2b(json.dumps(plain).encode(), digest_size=4).hexdigest()
