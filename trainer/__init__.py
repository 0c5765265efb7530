"""The GPU side: trains a GPT, or a translator, from a recipe and token shards. Needs torch (2.8 or newer) and numpy.

train.py        the loop, and the command `python -m trainer.train`; start reading here
step.py         one optimiser step: accumulate, judge, move; again in smaller portions if memory runs out
due.py          what is due after a step: a line, an evaluation, samples, a checkpoint
huggingface/    the same run by the Hugging Face Trainer, for comparison
run.py          what one training process holds
assemble.py     how it is put together; announce.py tells what it came to, places.py where its ideas stand in the code
resume.py       goes on from a checkpoint, on any number of processes
model.py        GPT-2; modern.py has the blocks of the other preset
loss.py         cross-entropy that never holds the whole logits
optim.py        AdamW, Muon, the learning-rate schedule, the arithmetic of a batch
pretrained.py   weights to start from
export.py       a checkpoint for transformers (with hf_tokenizer.py and model_card.py), and the command
evaluate.py     the validation loss, over all processes; hellaswag.py answers the items of items.py
sample.py       text from the model; answers.py asks for it, or for translations, at every checkpoint
generate.py     the same from a checkpoint, and the command `python -m trainer.generate`
data.py         which tokens each step sees; prefetch
shards.py       reads and checks the token files
checkpoint.py   the files of a checkpoint; nothing half-written is ever believed
saving.py       the thread that writes them while training goes on
tensors.py      the safetensors file format
device.py       CPU or CUDA, precision, memory, peak speed
distributed.py  one process or several, the same loop
parallel.py     who holds which part of the model: all of it (DDP) or a share (FSDP2)
launch.py       several processes on one machine: the command `python -m trainer.launch`
room.py         which micro-batch fits on a card, and how processes that share a model begin again with a smaller one
scale.py        the loss scale of fp16
spike.py        notices a loss or gradient that jumps
compile_cache.py  carries what torch.compile made from one rental to the next
events.py       what is reported: events.jsonl for programs, lines for people
recipe.py       the recipe: every key with its bounds, what keys may not be together, its counts; gpurun reads it too
recipe_file.py  its file, with what `--rehearse` and `--set` lay over it
errors.py       the ways in which training ends badly
translation/    the encoder-decoder, its sentence pairs and its searches, for the same loop
prepare.py      a text file in, shards out: the command `python -m trainer.prepare`
"""

import time

STARTED_MONOTONIC_S = time.monotonic()
"""When this process first touched the package; `elapsed_s` counts from here, so it includes the import of torch."""
