"""A mix of sources that changes: by a schedule given up front, by hand during training, and by a new source.

Run it from the repository: ``python examples/04_mixture_schedule.py``. It tokenises two sources by their bytes: the
standard library's code, and its docstrings.
"""

import ast
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from lightning_parm.data import TokenLoader

LENGTH = 256


def write_source(folder: Path, texts: list[str]) -> None:
    """Write one document a text, a token a byte; 0 stands between documents."""
    folder.mkdir()
    schema = pa.schema([pa.field("tokens", pa.list_(pa.uint16()))], metadata={"delimiter": "0"})
    documents = [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]
    with pa.OSFile(str(folder / "0.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.table({"tokens": documents}, schema=schema))


def docstrings(code: str) -> list[str]:
    """Return the longer docstrings of a module."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(code)) if isinstance(node, kinds)]
    return [text for text in found if text and len(text) > 80]


def take(loader: TokenLoader, samples: int) -> dict[str, int]:
    """Consume some samples and return how many each source served of them."""
    before = loader.served()
    for _ in range(samples // loader.samples_per_step):
        loader.next_batch()
    return {name: count - before.get(name, 0) for name, count in loader.served().items()}


def main() -> None:
    """Show it."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_source(folder / "code", texts)
        write_source(folder / "prose", [text for code in texts for text in docstrings(code)])
        sources = {name: str(folder / name) for name in ("code", "prose")}

        schedule = [
            (0, {"code": 1.0, "prose": 0.0}),
            (2000 * LENGTH, {"code": 1.0, "prose": 0.0}),  # code alone for 2,000 samples,
            (6000 * LENGTH, {"code": 0.2, "prose": 0.8}),  # then in a straight line to mostly prose
        ]
        loader = TokenLoader(sources, LENGTH, batch_size=8, weights=schedule)
        print("a schedule, in steps of 1,000 samples:")
        for step in range(7):
            print(f"  {step * 1000:>5} - {step * 1000 + 999}: {take(loader, 1000)}")

        loader.set_weights({"code": 0.5, "prose": 0.5})
        print(f"changed by hand to equal shares, from the next batch on: {take(loader, 1000)}")

        state = loader.state_dict()
        write_source(folder / "names", [" ".join(sorted(set(text.split())))[:20_000] for text in texts])
        grown = TokenLoader(
            {**sources, "names": str(folder / "names")},
            LENGTH,
            batch_size=6,  # another batch size, too
            num_workers=1,
            weights={"code": 0.4, "prose": 0.4, "names": 0.2},
        )
        grown.load_state_dict(state)
        served = take(grown, 1200)
        print(f"resumed with a third source: {served}")
        assert abs(served["names"] - 240) <= 16

        epochs = {name: round(value, 2) for name, value in grown.epochs().items()}
        print(f"epochs of each source so far: {epochs}")
        whole = grown.served()
        assert sum(whole.values()) == state["samples"] + 1200
        print(f"{sum(whole.values())} samples in all, counted from a state of a few hundred bytes: {whole}")


if __name__ == "__main__":
    main()
