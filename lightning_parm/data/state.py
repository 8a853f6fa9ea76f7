"""What a loader's state says about the data and the order, and the errors when they are not the same any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_parm.data.loader import TokenLoader


def describe(loader: TokenLoader) -> dict[str, Any]:
    """Return what the order depends on: a few numbers a source, and no path, so that data may be moved."""
    return {
        "sequence_length": loader.sequence_length,
        "num_logical_shards": loader.num_logical_shards,
        "seed": loader.seed,
        "sources": {source.name: source.fingerprint() for source in loader.sources},
    }


def check_state(loader: TokenLoader, state: dict[str, Any]) -> None:
    """Compare a state with the loader that is to go on from it.

    Raises:
        ValueError: something that the order depends on differs; the message names it and says what to do.
    """
    now = describe(loader)
    for name in ("sequence_length", "num_logical_shards", "seed"):
        if state[name] != now[name]:
            raise ValueError(
                f"The checkpoint was made with {name}={state[name]} and the loader has {name}={now[name]}, which is "
                f"another order of samples. Use {name}={state[name]}, or start a new run."
            )
    was, is_ = state["sources"], now["sources"]
    if set(was) != set(is_):
        raise ValueError(f"The checkpoint has the sources {sorted(was)} and the loader has {sorted(is_)}.")
    for name, old in was.items():
        if old != is_[name]:
            raise ValueError(_difference(name, old, is_[name]))


def _difference(name: str, old: list[Any], new: list[Any]) -> str:
    if new[0] != old[0]:
        what = f"has {new[0]} files where the checkpoint's had {old[0]}"
    elif new[3] != old[3]:
        what = f"has other file names than the checkpoint's ({new[0]} files)"
    else:
        what = f"has {new[2]} tokens in {new[1]} documents where the checkpoint's had {old[2]} in {old[1]}"
    return (
        f"This is other data than the checkpoint's: source {name!r} {what}. Restore the files as they were; to train "
        f"on additional data, put the new files into a folder of their own and add it as another source."
    )
