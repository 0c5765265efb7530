"""The same run with the Hugging Face Trainer on GPT2LMHeadModel: same data, same settings, same files.

loop.py     what train.py calls; refuses settings that this loop does not support
stock.py    their Trainer, with the recipe's settings
twin.py     their model in the memory of ours

The trained model is evaluated, sampled, saved and resumed by the same code as the other loop's. The batches and
their order, the rate of every step and the seeds of the dropout masks are the recipe's too; forward, loss, clipping and
AdamW are theirs. Needs transformers (5 or newer) and accelerate.
"""
