"""How many engines do three kinds of traffic need? deploy/docs/planner.md says how it is computed.

The profile is what a benchmark of one engine measures: seconds to the first token by length of the
prompt, time between tokens by how full the KV cache is. Put your own numbers there.
"""

import json
import tempfile
from pathlib import Path

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
    "documents": (600, 12_000, 300),
    "agents": (1800, 4000, 1500),
}

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "prefill_raw_data.json").write_text(json.dumps(PREFILL))
    Path(folder, "decode_raw_data.json").write_text(json.dumps(DECODE))
    goals = "--ttft 500 --itl 30 --attainment 0.99 --max-gpu-budget 64 --mode slo --json"
    for name, (requests, isl, osl) in TRAFFIC.items():
        print(f"{name}: ", end="", flush=True)
        demand = f"--num-req {requests} --isl {isl} --osl {osl} --profile-results-dir {folder}"
        assert main(["plan", *demand.split(), *goals.split()]) == 0
