"""How many engines do three kinds of traffic need? deploy/docs/planner.md says how it is computed.

    .venv/bin/python examples/planner/plan.py [FOLDER]

The profile is what a benchmark of one engine measures: time to the first token by length of the
prompt, time between tokens by how full the KV cache is. It is written to FOLDER if there is none,
where you can replace it by your own numbers; without FOLDER nothing is left behind.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path

import msgspec

from select_service.planner.cli import main

PREFILL = {  # of one prompt alone: its length, and the time to its first token in ms
    "prefill_isl": [128, 1024, 4096, 16384],
    "prefill_ttft": [18.0, 40.0, 125.0, 640.0],
    "prefill_thpt_per_gpu": [7111.0, 25600.0, 32768.0, 25600.0],
}
DECODE = {  # share of the KV cache in use, tokens of context, time between tokens in ms
    "x_kv_usage": [0.05, 0.5, 0.95] * 2,
    "y_context_length": [1024] * 3 + [8192] * 3,
    "z_itl": [7.0, 18.0, 31.0, 7.5, 17.0, 28.0],
    "z_thpt_per_gpu": [1400.0, 5400.0, 5900.0, 160.0, 720.0, 830.0],
    "max_kv_tokens": 200_000,
}
TRAFFIC = {  # requests in three minutes, tokens of a prompt, tokens of an answer
    "chats": (3600, 1000, 200),
    "documents": (600, 8000, 300),
    "agents": (1800, 4000, 1500),
}

GOALS = "--ttft 500 --itl 30 --attainment 0.99 --max-gpu-budget 64 --mode slo --json"


def write_profile(folder: Path) -> None:
    """Write what of the profile is not there yet: the rest may be yours."""
    folder.mkdir(exist_ok=True)
    for half, measured in (("prefill", PREFILL), ("decode", DECODE)):
        file = folder / f"{half}_raw_data.json"
        if not file.exists():
            file.write_text(json.dumps(measured))


def show_plans(folder: Path) -> None:
    """Plan for each kind of traffic with the profile in a folder."""
    print("TTFT of 500 ms and ITL of 30 ms for 99 % of requests, with at most 64 GPUs:\n")
    columns = "{:<10} {:>10} {:>7} {:>7}   {:>7} {:>6} {:>4}   {}"
    head = ("requests/s", "prompt", "answer", "prefill", "decode", "GPUs", "in time?")
    print(columns.format("", *head))
    for name, (requests, isl, osl) in TRAFFIC.items():
        demand = f"--num-req {requests} --isl {isl} --osl {osl} --profile-results-dir"
        answer = io.StringIO()
        with contextlib.redirect_stdout(answer):
            assert main(["plan", *demand.split(), str(folder), *GOALS.split()]) == 0
        plan = msgspec.json.decode(answer.getvalue())
        kept = "yes" if not plan["short_of_gpus"] + plan["infeasible"] else "no"
        engines = plan["num_p"], plan["num_d"], plan["gpus"]
        print(columns.format(name, f"{requests / 180:.1f}", isl, osl, *engines, kept))
    print("\nPrompts and answers are in tokens; prefill and decode are engines of each kind.")


with tempfile.TemporaryDirectory() as elsewhere:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else elsewhere)
    write_profile(folder)
    show_plans(folder)
if len(sys.argv) > 1:
    print(f"The profile is in {folder}. Charts of it:")
    print(f"  .venv/bin/select-planner profile inspect {folder} --out profile.html")
else:
    print("To keep the profile, for your own numbers and other commands, name a FOLDER.")
