"""Text to tokens: files of text in, Arrow files of token ids out, in parallel and resumably.

While it runs, finished shards lie in ``OUTPUT.partial`` under names made from what went into them. When all are there
they get their final names and the folder becomes ``OUTPUT``, in one rename: an ``OUTPUT`` that exists is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_parm.data.tokenize.processes import run_tasks
from lightning_parm.data.tokenize.text import Errors, Part, cut, find_files, read
from lightning_parm.data.tokenize.token_file import Recipe, read_record, write_tokens
from lightning_parm.data.tokenize.tokenizer import describe_tokenizer, require_tokenizers, train_bpe

#: ``(stage, done_bytes, total_bytes)``, called in the calling process.
Progress = Callable[[str, int, int], None]
_SUMMARY = "tokenize.json"
_TRAINING_BYTES = 64 * 2**20


def tokenize(
    inputs: str | list[str],
    output: str,
    tokenizer: str | None = None,
    train_vocab_size: int = 4096,
    train_on: str | list[str] | None = None,
    text_field: str = "text",
    end_of_text: str | None = None,
    errors: Errors = "strict",
    shard_bytes: int = 64 * 2**20,
    num_processes: int | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Turn text into Arrow files of tokens, one list a document.

    A text file is one document; a ``.jsonl`` file has one a line, a ``.parquet`` file one a row. The work is done by
    several processes and can be killed at any moment: run again, it keeps the finished shards, and the files come out
    the same, byte for byte. The tokenizer is saved beside the tokens, as ``tokenizer.json``.

    Args:
        inputs: A file, a folder (all files below it), a quoted glob pattern, or a list of these.
        output: The folder to make. It appears when every document is in it.
        tokenizer: A tokenizer's JSON as the `tokenizers` library saves it. Without one, a byte-level BPE is trained.
        train_vocab_size: Size of the trained BPE's vocabulary.
        train_on: What to train the BPE on, given like ``inputs`` and by default the same.
        text_field: The JSON field or Parquet column that holds the text.
        end_of_text: The token that ends a document; by default the tokenizer's own, such as ``<|endoftext|>``. Its id
            is stored in the files as their delimiter; it is not written after each document.
        errors: What to do with a document that cannot be read: stop and name it, replace its undecodable bytes, or
            skip it and count it.
        shard_bytes: Bytes of text in one Arrow file; a process holds the tokens of one in memory.
        num_processes: Processes to use, by default one a core.
        on_progress: Called with (stage, bytes done, bytes in all).

    Returns:
        Counts of documents, tokens, bytes and shards, and the tokenizer's facts.

    Raises:
        ValueError: An input is missing, empty or unreadable, or ``output`` holds something else. Finished shards stay.
        ModuleNotFoundError: The `tokenizers` library is missing.
        TimeoutError: Another run is writing ``output`` and does not end.
    """
    require_tokenizers()
    if shard_bytes < 1 or (num_processes is not None and num_processes < 1):
        raise ValueError(f"shard_bytes={shard_bytes} and num_processes={num_processes} must be at least 1.")
    target = Path(output)
    partial = target.with_name(f"{target.name}.partial")
    files = _outside(find_files(inputs), target, partial)
    shards = cut(files, shard_bytes)
    learn_from = [] if tokenizer else _outside(find_files(train_on), target, partial) if train_on else files
    training = None if tokenizer else _sha256([train_vocab_size, end_of_text, *map(os.path.realpath, learn_from)])
    report = on_progress or (lambda stage, done, total: None)

    def recipe_from(folder: Path) -> Recipe | None:
        content = _given(tokenizer) if tokenizer else _trained(folder, training)
        if content is None:
            return None
        try:
            return Recipe(content, describe_tokenizer(content, end_of_text), text_field, errors)
        except ValueError as error:
            raise ValueError(f"{tokenizer or folder / 'tokenizer.json'}: {error}") from None

    if _holds_files(target):
        return _existing(target, recipe_from(target), shards)
    with _alone_in(partial):
        if _holds_files(target):  # finished by another run while this one waited
            (partial / "lock").unlink()
            partial.rmdir()
            return _existing(target, recipe_from(target), shards)
        if training is not None and recipe_from(partial) is None:
            content = _train(cut(learn_from, shard_bytes), train_vocab_size, end_of_text, text_field, errors, report)
            _replace(partial / "tokenizer.json", content)
            _replace(partial / _SUMMARY, json.dumps({"training": training}))
        recipe = recipe_from(partial)
        assert recipe is not None
        _replace(partial / "tokenizer.json", recipe.tokenizer)
        started = time.monotonic()
        kept = _encode(shards, recipe, partial, num_processes or len(os.sched_getaffinity(0)), report)
        summary = _number(shards, recipe, partial)
        if not summary["tokens"]:
            raise ValueError(
                f"no token in {inputs!r} ({len(files)} files): {summary['empty_documents']} documents are empty, "
                f"{summary['skipped_documents']} were skipped. Check the input and text_field={text_field!r}."
            )
        summary |= {"kept_shards": kept, "seconds": round(time.monotonic() - started, 3), "training": training}
        _replace(partial / _SUMMARY, json.dumps(summary, indent=2))
        (partial / "lock").unlink()
        partial.rename(target)
    return summary


def _outside(files: list[str], *folders: Path) -> list[str]:
    """Leave out what this program wrote itself, when the output lies below an input folder."""
    own = [folder.resolve() for folder in folders]
    return [file for file in files if not any(folder in Path(file).resolve().parents for folder in own)]


def _holds_files(folder: Path) -> bool:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, and the output must be a folder: name another.")
    return folder.exists() and any(folder.iterdir())


def _given(tokenizer: str) -> str:
    try:
        return Path(tokenizer).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{tokenizer!r} cannot be read as a tokenizer's JSON ({error}).") from None


def _trained(folder: Path, training: str | None) -> str | None:
    """Return the tokenizer that an earlier run trained on the same files, whatever became of their contents since."""
    if not (folder / _SUMMARY).is_file():
        return None
    if json.loads((folder / _SUMMARY).read_text(encoding="utf-8")).get("training") != training:
        return None
    return (folder / "tokenizer.json").read_text(encoding="utf-8")


def _existing(target: Path, recipe: Recipe | None, shards: list[tuple[Part, ...]]) -> dict[str, Any]:
    if recipe is not None and (target / _SUMMARY).is_file():
        summary: dict[str, Any] = json.loads((target / _SUMMARY).read_text(encoding="utf-8"))
        if summary["digest"] == _sha256([recipe.digest(shard) for shard in shards]):
            return summary | {"kept_shards": summary["shards"]}
    raise ValueError(
        f"{target} exists and was not made from these inputs with these options: name another output, or remove it."
    )


def _train(
    shards: list[tuple[Part, ...]],
    vocab_size: int,
    end_of_text: str | None,
    text_field: str,
    errors: Errors,
    report: Progress,
) -> str:
    """Train a BPE on at most about 64 MiB: every n-th document of evenly spaced shards."""
    chosen = shards[:: max(1, len(shards) // 64)]
    total = sum(part.num_bytes for shard in chosen for part in shard)
    stride = max(1, round(total / _TRAINING_BYTES))
    done = 0

    def learn(task: list[tuple[Part, ...]], report_bytes: Callable[[int], None]) -> str:
        os.environ.pop("TOKENIZERS_PARALLELISM", None)  # alone, training may use every core

        def texts() -> Iterator[str]:
            index = 0
            for part in (part for shard in task for part in shard):
                for text in read(part, text_field, errors):
                    if index % stride == 0 and text:
                        yield text
                    index += 1
                report_bytes(part.num_bytes)

        return train_bpe(texts(), vocab_size, end_of_text)

    def count(amount: int) -> None:
        nonlocal done
        done += amount
        report("training the tokenizer", done, total)

    # In a process of its own: the library's threads must not exist here when the encoders are forked.
    return str(run_tasks([chosen], learn, 1, count)[0])


def _encode(shards: list[tuple[Part, ...]], recipe: Recipe, partial: Path, num_processes: int, report: Progress) -> int:
    """Encode the shards that are not there yet and return how many were."""
    for file in partial.glob("shard-*.arrow"):  # an earlier run was killed while it gave the final names
        file.rename(partial / f"{read_record(file)['shard_sha256']}.arrow")
    for draft in partial.glob("*.draft"):
        draft.unlink()
    missing = [shard for shard in shards if not (partial / f"{recipe.digest(shard)}.arrow").exists()]
    total = sum(part.num_bytes for shard in shards for part in shard)
    done = total - sum(part.num_bytes for shard in missing for part in shard)

    def count(amount: int) -> None:
        nonlocal done
        done += amount
        report("tokenizing", done, total)

    def encode(shard: tuple[Part, ...], report_bytes: Callable[[int], None]) -> None:
        write_tokens(shard, recipe, partial / f"{recipe.digest(shard)}.arrow", report_bytes)

    count(0)
    try:
        run_tasks(missing, encode, num_processes, count)
    except ValueError as error:
        finished = sum((partial / f"{recipe.digest(shard)}.arrow").exists() for shard in shards)
        raise ValueError(f"{error} ({finished} of {len(shards)} shards are finished and stay.)") from None
    return len(shards) - len(missing)


def _number(shards: list[tuple[Part, ...]], recipe: Recipe, partial: Path) -> dict[str, Any]:
    """Give the finished shards their final names, in order, and add up what they hold."""
    digests = [recipe.digest(shard) for shard in shards]
    for file in partial.glob("*.arrow"):
        if file.stem not in digests:  # made from a file that has changed since
            file.unlink()
    totals = dict.fromkeys(("documents", "tokens", "empty_documents", "skipped_documents"), 0)
    number = 0
    for digest in digests:
        file = partial / f"{digest}.arrow"
        record = read_record(file)
        for name in totals:
            totals[name] += int(record[name])
        if record["documents"] == "0":
            file.unlink()
            continue
        file.rename(partial / f"shard-{number:05d}.arrow")
        number += 1
    return totals | {
        "text_bytes": sum(part.num_bytes for shard in shards for part in shard),
        "shards": number,
        "vocab_size": recipe.facts.vocab_size,
        "delimiter": recipe.facts.delimiter,
        "tokenizer_sha256": recipe.facts.sha256,
        "digest": _sha256(digests),
    }


@contextmanager
def _alone_in(folder: Path, patience_seconds: float = 5.0) -> Iterator[None]:
    """Hold the folder's lock. Forked children hold it too, and give it up soon after their parent was killed."""
    deadline = time.monotonic() + patience_seconds
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / "lock")):
                break
        except FileNotFoundError:  # the run that held it finished and took the folder away
            pass
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise TimeoutError(f"another run is writing {folder}: wait for it, or name another output.") from None
            time.sleep(0.1)
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, content: str) -> None:
    draft = path.with_name(f"{path.name}.draft")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode("utf-8")).hexdigest()
