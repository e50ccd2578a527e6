"""Time of prefill and decode beside the model's own cache."""
