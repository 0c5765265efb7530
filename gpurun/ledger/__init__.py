"""What is written down and proven: the journal, the run's lock, receipts, the chain that they form, and their audit."""
