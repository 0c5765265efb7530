"""The GPU side: trains a GPT from a recipe and token shards. Needs torch (2.8 or newer) and numpy, nothing else.

train.py        the loop, and the command `python -m trainer.train`; start reading here
run.py          what one training process holds, and how it is put together
model.py        GPT-2
loss.py         cross-entropy that never holds the whole logits
optim.py        AdamW, the learning-rate schedule, the arithmetic of a batch
evaluate.py     the validation loss, over all processes
sample.py       text from the model
data.py         which tokens each step sees; prefetch
shards.py       reads and checks the token files
checkpoint.py   saves and resumes; nothing half-written is ever believed
tensors.py      the safetensors file format
device.py       CPU or CUDA, precision, memory, peak speed
distributed.py  one process or several, the same loop
events.py       what is reported: events.jsonl for programs, lines for people
config.py       recipe.json as frozen dataclasses
errors.py       the ways in which training ends badly
prepare/        text in, shards out (runs at home, before anything is rented)
"""

import time

STARTED_MONOTONIC_S = time.monotonic()
"""When this process first touched the package; `elapsed_s` counts from here, so it includes the import of torch."""
