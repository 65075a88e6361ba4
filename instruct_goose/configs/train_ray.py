# The script that torchrun would start, in Ray's processes, and nothing of ours between:
#
#     python train_ray.py --processes 16 train.py --its-own-flags
#
# Ray tells each process its place, as torchrun does, and brings them together before the script
# begins. Files are read and written as seen from the folder in which this is started: on several
# machines it lies on a disk that all of them see. Run by its authors with Ray 2.60.0, on one
# machine with two CPU processes (--cpu); not on a cluster, not on a GPU. See the lesson
# "Several processes".
import argparse
import os
import runpy
import sys
from importlib import import_module

import torch


def one_process(started: dict) -> None:
    "What each of them does."
    if torch.cuda.is_available():
        torch.cuda.set_device(import_module("ray.train.torch").get_device())
    os.chdir(started["folder"])
    sys.argv = started["command"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    "Start them, and wait; whatever one of them raises is raised here."
    parser = argparse.ArgumentParser(description="A script in processes that Ray starts.")
    parser.add_argument("--processes", type=int, default=16, help="a GPU for each")
    parser.add_argument("--cpu", action="store_true", help="no GPUs, and gloo: to try it out")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script and its flags")
    args = parser.parse_args()
    if not args.command:
        parser.error("which script? python train_ray.py train.py")
    ray, for_torch = (import_module(name) for name in ("ray.train", "ray.train.torch"))
    for_torch.TorchTrainer(
        one_process,
        train_loop_config={"command": args.command, "folder": os.getcwd()},
        torch_config=for_torch.TorchConfig(backend="gloo" if args.cpu else "cpu:gloo,cuda:nccl"),
        scaling_config=ray.ScalingConfig(num_workers=args.processes, use_gpu=not args.cpu),
    ).fit()


if __name__ == "__main__":
    main()
