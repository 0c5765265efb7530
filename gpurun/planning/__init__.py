"""Planning before anything is paid: the recipe, the offers, the time, and the worst case of the cost."""
