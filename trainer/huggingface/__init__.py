"""Trains with the Hugging Face Trainer on GPT2LMHeadModel: with the same data, settings and files.

  loop.py     what train.py calls; refuses settings that this loop does not support
  stock.py    their Trainer, with the recipe's settings
  twin.py     their model, in the memory of gpurun's model

The trained model is evaluated, sampled, saved and resumed by the same code as in the trainer's own loop. The recipe
also determines the batches and their order, the rate of every step and the seeds of the dropout masks. Forward, loss,
clipping and AdamW are those of Hugging Face. It needs transformers (5.6 or newer) and accelerate.
"""
