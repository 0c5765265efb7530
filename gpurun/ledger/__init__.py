"""The records of runs and money: the journal, the run's lock, budgets, receipts, their chain, and the audit."""
