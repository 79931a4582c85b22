"""Which rank and device holds what."""
