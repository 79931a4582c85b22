"""Events, loggers, progress display, banner, statistics and the report of a run."""
