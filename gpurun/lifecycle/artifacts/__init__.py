"""Downloads of a run's files outside of the collect step: during training, or when the user requests them."""
