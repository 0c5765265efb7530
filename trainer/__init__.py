"""The GPU side: trains a GPT, or a translator, from a recipe and token shards. Needs torch (2.8 or newer) and numpy.

train.py        the loop, and the command `python -m trainer.train`; start reading here
run.py          the three parts of a run: setup, state and input/output; start.py puts them together
model.py        GPT-2; modern.py has the blocks of the other preset
loss.py         cross-entropy that never holds the whole logits
optim.py        AdamW, Muon, the learning-rate schedule; the loss scale of fp16, and the detection of loss spikes
data.py         how a batch is cut, and which tokens each step sees; prefetch
evaluate.py     the validation loss, HellaSwag and text from the model
checkpoint.py   the files of a checkpoint; incomplete files are never trusted
saving.py       the thread that writes them while training continues; and how a run resumes from them
distributed.py  the device, and one process or several: each has the whole model (DDP), or a share (FSDP2)
events.py       what is reported: events.jsonl for programs, lines for people
recipe.py       the recipe: every key with its bounds, its counts; gpurun reads it too
recipe_rules.py which keys exclude one another
recipe_file.py  its file, with `--rehearse` and `--set` applied, and its comparison with a checkpoint's recipe
shards.py       reads, checks and writes the token files
                        a small GPT run uses the files above, and no other
launch.py       several processes on one machine: the command `python -m trainer.launch`
network.py      how fast several machines reach one another; torchrun starts it on each
out_of_memory.py  what happens when a GPU's memory runs out, from a smaller micro-batch to a restart of all processes
compile_cache.py  carries the results of torch.compile from one rental to the next
pretrained.py   weights to start from
run_checkpoint.py  opens an untrusted checkpoint safely
generate.py     text from a checkpoint, and the command `python -m trainer.generate`
replay.py       recomputes a checkpoint's loss and its last steps
export.py       a checkpoint for transformers, and the command `python -m trainer.export`; model_card.py its card
core_score.py   CORE, and the command `python -m trainer.core_score`
traced_memory.py  how much GPU memory a step takes, traced without a GPU
prepare.py      turns a text file into shards: the command `python -m trainer.prepare`
tokenizer.py    text to token ids; pair_tokenizer.py the same for sentence pairs
items.py        HellaSwag's items; cards.py the peak speeds of GPUs; errors.py the errors that end training
translation/    the encoder-decoder, its sentence pairs and its searches, for the same loop
huggingface/    the same run with the Hugging Face Trainer, for comparison
"""

import time

STARTED_MONOTONIC_S = time.monotonic()
"""When this process first imported the package. `elapsed_s` counts from then, so it includes torch's import."""
