"""Before anything is rented: what is on sale, what a run would cost on it, and what was measured since."""
