"""Learning rates and averages that count landed steps: a skipped step does not change them."""
