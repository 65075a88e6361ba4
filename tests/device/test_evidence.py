"evidence/gpu.py where there is no GPU: it refuses to measure, and every line of it can be tried."
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
GPU = ROOT / "evidence/gpu.py"


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "gpu.json"
    done = subprocess.run([sys.executable, GPU, "--rehearse", "--output", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refused_without_a_gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "evidence")
    monkeypatch.delitem(sys.modules, "run", raising=False)  # tests/run.py, if another test has imported it
    from gpu import main

    with pytest.raises(SystemExit, match="no GPU here.*--rehearse"): main([])


@pytest.mark.deep
def test_rehearsal(rehearsal):
    figures = json.loads(rehearsal.read_text("utf-8"))
    assert figures["rehearsal"] and "rehearsal" in figures["origin"]["gpu"] and figures["resume"]["loaded_to_the_bit"]
    for row in figures["models"].values():
        coarse, fine = (row["agreement"][d] for d in ("bfloat16", "float32"))
        assert coarse["within"] and fine["within"]
        assert all(coarse["difference"][k] > fine["bound"][k] for k in ("logprobs", "gradient"))  # the bound can tell them apart
