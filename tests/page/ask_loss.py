"""Ask a reader's loss, as JavaScript does, in a folder that holds a page's files.

python ask_loss.py FOLDER JOBS.json RESULT.json

JOBS.json: [{texts, settings, batch: [lengths, scores, logprobs, ref_logprobs, values], new: [rows,
logprobs, values, entropy]}, …]. RESULT.json: for each job {added, prepared, gradient} or {mistake}.
"""

import json
import sys
from pathlib import Path


def main():
    folder, jobs, result = sys.argv[1:]
    sys.path.insert(0, folder)
    import page_tensors

    page_tensors.install()
    import page_loss

    def asked(job: dict) -> dict:
        said = {}
        for name, function, given in (
            ("added", page_loss.new_loss, [job["texts"]]),
            ("prepared", page_loss.prepare, [job["settings"], *job["batch"]]),
            ("gradient", page_loss.gradient, job["new"]),
        ):
            said[name] = json.loads(function(*map(json.dumps, given)))
            if "mistake" in said[name]:
                return said[name]
        return said

    answers = [asked(job) for job in json.loads(Path(jobs).read_text("utf-8"))]
    Path(result).write_text(json.dumps(answers), "utf-8")


if __name__ == "__main__":
    main()
