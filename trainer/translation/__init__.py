"""Encoder-decoder translation: the Transformer of "Attention is all you need", in the pre-norm form that is taught.

batch.py    sentence pairs as tensors: source, shifted target, labels and both masks
pairs.py    reads the shards of a parallel text; which pairs every step sees
model.py    encoder, decoder and their loss
decode.py   greedy and beam search
interpret.py  ids to a translation's ids, and those to text
bleu.py     how good translations are, by sacrebleu
task.py     what a training loop asks of all this
__main__.py the command `python -m trainer.translation`: BLEU of a run's checkpoint

Vaswani et al. 2017 (arXiv 1706.03762) throughout; what is otherwise says so where it stands.
"""
