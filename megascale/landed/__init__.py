"""What counts steps that landed: learning rates and averages that stand still where a step was skipped."""
