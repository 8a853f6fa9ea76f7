"""The demo, small: the same file and the same steps, with a tiny corpus, a tiny model and few steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml
from distributed import run_command

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_demo_trains_resumes_and_proves_it(tmp_path: Path) -> None:
    config = yaml.safe_load((EXAMPLES / "demo.yaml").read_text(encoding="utf-8"))
    config["model"]["init_args"] |= {"num_layers": 1, "model_dim": 32, "hidden_dim": 32}
    config["data"]["init_args"] |= {"sequence_length": 32, "batch_size": 2}
    config["trainer"]["log_every_n_steps"] = 2
    callbacks = {callback["class_path"].rsplit(".", 1)[-1]: callback for callback in config["trainer"]["callbacks"]}
    callbacks["ModelCheckpoint"]["init_args"]["every_n_train_steps"] = 6
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--config=small.yaml", "--megabytes=0.2"]
    result = run_command([*command, "--steps=6", "--resumed-steps=6"], cwd=tmp_path, timeout=280, fresh=False)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output[-4000:]
    report = output[output.index("what came out") :]
    assert re.search(r"loss +8\.\d\d at step 2 -> \d\.\d\d at the checkpoint -> \d\.\d\d at the end", report), report
    assert re.search(r"4 ranks, mp=2 ep=2 esp=2 +[\d,]+ tokens/s", report)
    assert re.search(r"2 ranks, mp=1 ep=2 esp=1 +[\d,]+ tokens/s", report)
    # 6 steps of 2 ranks with 2 samples each, and again 6 of 2 with 2.
    assert "first run: samples 0 to 23; resumed run: samples 24 to 47" in report
    assert "all 48 samples hold the tokens that one loader in one process reads" in report
    assert re.search(
        r"blocks\.0\.feed_forward +schedule (plain|s0|s1|s2) \w+ x\d; expert load \(1 is fair\)( \d\.\d\d){8}", report
    )
    assert re.search(r"source 'code' +\d+ samples, \d+\.\d\d% of all; asked for 60\.00%", report)
