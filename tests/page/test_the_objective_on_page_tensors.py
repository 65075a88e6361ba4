"""The package's own tests of `objective` hold on page tensors, too."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDS_MORE = {  # files that import what a page has not
    "test_gaussian.py": "torch.distributions.Normal",
    "test_group.py": "transformers",
    "test_logprobs_in_pieces.py": "torch's dispatch mode",
    "test_parts_of_pieces.py": "addresses of memory, and devices",
}
FAILS = {  # tests that do not hold, and why
    "test_kl.py::test_exact_kl_dtypes_and_logits_refused[dtype2]": "it draws bfloat16",
    "test_logprobs.py::test_shapes_without_the_shape_checker": "it asks for the type checker",
}


def test_every_test_of_the_objective_holds_but_for_the_listed_ones(page_folder):
    command = [sys.executable, "-m", "pytest", "-p", "with_page_tensors", "--noconftest"]
    command += ["-p", "no:cacheprovider", "-m", "not deep", "--tb=no", "tests/objective"]
    for name in NEEDS_MORE:
        command += ["--ignore", f"tests/objective/{name}"]
    environment = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(Path(__file__).parent),
        "PAGE_FOLDER": str(page_folder),
    }
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    failed = re.findall(r"^(?:FAILED|ERROR) tests/objective/(\S+(?:\[.*?\])?)", ran.stdout, re.M)
    assert set(failed) == set(FAILS), ran.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", ran.stdout)[1]) > 1000
