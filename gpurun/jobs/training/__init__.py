"""Plans a training run: resolves its recipe, estimates its memory and time, and finds its initial weights."""
