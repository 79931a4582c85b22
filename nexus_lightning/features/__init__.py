"""Features of the frozen backbone, computed once and then served."""
