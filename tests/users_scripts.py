"""Users' scripts: a course's in short and in full, one with nanoGPT's flags and log, and a Hugging Face Trainer."""

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
steps = int(next(word for word in sys.argv if word.startswith("--max_iters=")).split("=")[1])
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
arguments = TrainingArguments(
    "out", max_steps=int(sys.argv[1]), logging_steps=5, save_steps=10, save_total_limit=2, report_to=[], use_cpu=True,
)
Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=sys.argv[2] if sys.argv[2:] else None)
"""

COURSE_GPT = """\
import os
import torch
import torch.nn as nn
import torch.nn.functional as F

text = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 4
device = "cuda" if torch.cuda.is_available() else "cpu"
print("torch.cuda.is_available():", torch.cuda.is_available())
print("Using device:", device)
chars = sorted(set(text))
stoi, itos = {c: i for i, c in enumerate(chars)}, {i: c for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
seed = int(os.environ.get("GPURUN_SEED", 1337))
print("challenge", os.environ.get("GPURUN_CHALLENGE"), "gives", seed)
torch.manual_seed(seed)

class MiniGPT(nn.Module):
    def __init__(self, size, context=16, width=16):
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(size, width), nn.Embedding(context, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.lm_head, self.context = nn.Linear(width, size), context

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.lm_head(self.block(self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1])), mask))

model = MiniGPT(len(chars)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 41):
    starts = torch.randint(len(data) - 17, (8,))
    x, y = (torch.stack([data[i + shift : i + shift + 16] for i in starts]) for shift in (0, 1))
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:04d} | loss {loss.item():.4f}", flush=True)
model.eval()
out = [stoi["T"]]
with torch.no_grad():
    for _ in range(30):
        out.append(int(model(torch.tensor([out[-16:]]))[0, -1].argmax()))
print("--- sample ---")
print("SAMPLE:" + "".join(itos[i] for i in out))
torch.save({"model_state": model.state_dict(), "stoi": stoi, "itos": itos}, "mini_gpt2_checkpoint.pt")
print("saved mini_gpt2_checkpoint.pt")
"""
"""The course's script in full: a plain PyTorch GPT that prints device, losses and a sample, and saves its weights."""
