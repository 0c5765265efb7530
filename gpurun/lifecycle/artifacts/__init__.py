"""What comes home while a run goes on, or when somebody asks, beside the collect step."""
