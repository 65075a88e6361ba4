"evidence/gpu.py where there is no GPU: it refuses to measure, and every line of it can be tried."
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refused_without_a_gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "evidence")
    monkeypatch.delitem(sys.modules, "run", raising=False)  # tests/run.py, if another test has imported it
    from gpu import main

    with pytest.raises(SystemExit, match="no GPU here.*--rehearse"): main([])


@pytest.mark.deep
def test_rehearsal(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "evidence/gpu.py", "--rehearse", "--output", tmp_path / "gpu.json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    figures = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert figures["rehearsal"] and "rehearsal" in figures["origin"]["gpu"] and figures["resume"]["loaded_to_the_bit"]
    for row in figures["models"].values():
        coarse, fine = (row["agreement"][d] for d in ("bfloat16", "float32"))
        assert coarse["within"] and fine["within"]
        assert all(coarse["difference"][k] > fine["bound"][k] for k in ("logprobs", "gradient"))  # the bound can tell them apart
