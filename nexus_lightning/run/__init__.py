"""One run: who its tenants are, what they train next, and what happens in a step."""
