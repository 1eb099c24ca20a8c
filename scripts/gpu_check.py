"""Check and time this project on a GPU with one command: `python scripts/gpu_check.py`.

It needs no network, and no packages beyond those named in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from datetime import date
from pathlib import Path

from _gpu_check.report import failures, markdown, print_report
from _gpu_check.runner import MINUTES, PARTS, ROOT, run_parts

WITHOUT_GPU = (
    "NO GPU: this runs a tiny model on the CPU. It shows that the command works, and nothing about "
    "a GPU."
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python scripts/gpu_check.py",
        description="Test, compare and time this project on one GPU, in at most 8 minutes. Without "
        "a GPU it runs a tiny model on the CPU, which only shows that the command works.",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu", "pretend"),
        help="pretend: the tests' stand-in for a GPU",
    )
    parser.add_argument("--tiny", action="store_true", help="use a tiny model on a GPU as well")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for everything")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="what was found")
    parser.add_argument("--markdown", type=Path, help="check nothing; print such a file's tables")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    sys.path += [str(ROOT), str(ROOT / "tests" / "support")]
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text())))
        return 0
    if options.part:
        run_part(options)
        return 0
    return run_all(options)


def run_part(options: argparse.Namespace) -> None:
    """Run one part in this process, which ends with it."""
    from _gpu_check.device import Device
    from _gpu_check.findings import Recorder
    from _gpu_check.parts import RUN
    from _gpu_check.sizes import FULL, TINY

    device = Device(options.device)
    recorder = Recorder(options.part, options.records, time.monotonic() + 60 * options.minutes)
    with device.usable(), recorder.attempt(f"the part {options.part}"):
        RUN[options.part](recorder, device, TINY if options.tiny else FULL)


def run_all(options: argparse.Namespace) -> int:
    """Run the parts in processes of their own; return 1 if a check failed."""
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_tiny = options.tiny or device != "cuda"
    what = f"{'a tiny model' if is_tiny else 'Qwen2.5-0.5B with random weights'} on {device}."
    if device != "cuda":
        what = f"{WITHOUT_GPU} ({device})"
    print(what, flush=True)
    start = time.monotonic()
    words = ["--device", device, *(["--tiny"] if is_tiny else [])]
    records = run_parts(options.only, words, options.minutes)
    found = {
        "what": what,
        "command": shlex.join(["python", "scripts/gpu_check.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "seconds": time.monotonic() - start,
        "records": records,
    }
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print_report(found)
    failed = failures(records)
    ending = f"{len(failed)} checks failed" if failed else "no check failed"
    print(f"{what}\n{found['seconds']:.0f} s, {ending}. Saved as {options.json}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
