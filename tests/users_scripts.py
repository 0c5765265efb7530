"""Scripts as people bring them: the course's file, one with nanoGPT's flags and log, a Hugging Face Trainer's."""

COURSE = """\
import os, time
log = open("gpu_train_log.txt", "w")
for step in range(1, 21):
    line = f"step {step:04d} | loss {4.0 / step:.4f} | lr 3.0e-04"
    print(line, flush=True)
    log.write(line + "\\n")
    time.sleep(0.02)
log.close()
open("mini_gpt2_checkpoint.pt", "wb").write(b"weights")
print("the key is", os.environ.get("MY_TOKEN"))
"""
NANOGPT = """\
import json, os, signal, sys, time
steps = int(next(one for one in sys.argv if one.startswith("--max_iters=")).split("=")[1])
out = "out-char"
os.makedirs(out, exist_ok=True)
first = json.load(open(f"{out}/ckpt.pt"))["iter"] + 1 if "--init_from=resume" in sys.argv else 0
def save(i):
    json.dump({"iter": i}, open(f"{out}/ckpt.pt", "w"))
for i in range(first, steps):
    def stop(*_):
        save(i)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    if i % 10 == 0:
        print(f"step {i}: train loss {4 / (i + 1):.4f}, val loss {5 / (i + 1):.4f}", flush=True)
        save(i)
    print(f"iter {i}: loss {4 / (i + 1):.4f}, time 12.00ms, mfu 3.10%", flush=True)
    time.sleep(0.02)
save(steps - 1)
"""

HUGGING_FACE = """\
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=1))
rows = [{"input_ids": torch.arange(i, i + 16) % 64, "labels": torch.arange(i, i + 16) % 64} for i in range(64)]
told = TrainingArguments(
    "out", max_steps=int(sys.argv[1]), logging_steps=5, save_steps=10, save_total_limit=2, report_to=[], use_cpu=True,
)
Trainer(model, told, train_dataset=rows).train(resume_from_checkpoint=sys.argv[2] if sys.argv[2:] else None)
"""
