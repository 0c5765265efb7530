"""A trainer without torch that keeps the real trainer's formats. It starts in milliseconds, so that a test can repeat
a run hundreds of times.

Each step takes `train.step_s` seconds. It saves every ten steps, resumes, and on SIGTERM saves and stops.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

wanted_stop = False


def on_term(number, frame):
    global wanted_stop
    wanted_stop = True


def write(path: Path, content: bytes) -> dict:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.rename(path)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def save(out: Path, step: int) -> None:
    files = []
    for kind, name in (("weights", "model.safetensors"), ("optimizer", "optim.safetensors"), ("state", "state.json")):
        named = f"checkpoints/{step:06d}.{name}"
        content = f"{kind} {step}\n".encode() * 50
        if kind != "state":
            header = {"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
            text = json.dumps(header).encode()
            content = len(text).to_bytes(8, "little") + text + content
        files.append({"name": named, "kind": kind, "step": step, **write(out / named, content)})
    manifest = {"v": 1, "latest": step, "best": None, "files": files}
    write(out / "MANIFEST.json", json.dumps(manifest).encode())


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--recipe", "--data", "--out"):
        parser.add_argument(name, type=Path, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, on_term)
    if os.environ.get("RANK", "0") != "0":  # Only the first process reports and saves; this one waits for it.
        step_s = json.loads(args.recipe.read_text())["train"].get("step_s", 0.002)
        events = args.out / "events.jsonl"
        while not wanted_stop and not (events.exists() and '"stop"' in events.read_text()):
            time.sleep(step_s)
        return 0
    recipe, out, began = json.loads(args.recipe.read_text()), args.out, time.time()
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)

    def tell(kind: str, step: int, **more) -> None:
        now = time.time()
        with open(out / "events.jsonl", "a") as events:
            events.write(json.dumps({"kind": kind, "wall": now, "elapsed_s": now - began, "step": step, **more}) + "\n")

    # Each start adds a line: two lines without a resume between them mean that one run had two trainers.
    with open(out / "starts", "a") as starts:
        starts.write(f"{os.getpid()}\n")
    done = json.loads((out / "MANIFEST.json").read_text())["latest"] if (out / "MANIFEST.json").exists() else 0
    print("device: cpu\nparameters: 1,000", flush=True)
    tell("start", done, device="cpu", cuda_name=None, torch="none", python=sys.version.split()[0], world_size=1,
         parameters=1000, tokens_per_step=10, micro_batch=1, accumulation=1, precision="fp32",
         steps=recipe["train"]["steps"], resumed_from=done or None, train_tokens=1000, val_tokens=100)  # fmt: skip
    step_s = recipe["train"].get("step_s", 0.002)
    for step in range(done + 1, recipe["train"]["steps"] + 1):
        time.sleep(step_s)
        loss = 3.0 - step / 100
        tell("step", step, loss=loss, lr=1e-3, grad_norm=1.0, step_s=step_s, tokens_per_s=10 / step_s,
             tokens=step * 10, mfu=None, memory_peak_bytes=None)  # fmt: skip
        print(f"step {step:04d} | loss {loss:.4f} | lr 1.00e-03 | elapsed {time.time() - began:.1f} s", flush=True)
        if recipe["train"].get("fail_at") == step:
            tell("stop", step, reason="error", message="asked to fail", train_s=time.time() - began, final_loss=loss)
            return 1
        if step % 10 == 0 or wanted_stop or step == recipe["train"]["steps"]:
            save(out, step)
            tell("checkpoint", step, files=[], bytes=1, save_s=0.0)
            print(f"checkpoint: checkpoints/{step:06d}.model.safetensors", flush=True)
        if wanted_stop:
            tell("stop", step, reason="signal", message="", train_s=time.time() - began, final_loss=loss)
            return 0
    tell("stop", recipe["train"]["steps"], reason="done", message="", train_s=time.time() - began, final_loss=2.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
